"""Whole small networks, containers of outputs, and inputs that no kernel takes."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.cases import let, settled
from tests.helpers.models import Call
from tests.helpers.onednn import lower
from tests.helpers.patterns import BIG, IMAGE, MATMUL_CASES, conv, linear, pointwise, same, two
from tests.helpers.running import convert


def convnet() -> nn.Module:
    """A stem, residuals with int8 and float operands, pools, a pointwise convolution, a classifier."""

    def forward(m, x):
        y = F.max_pool2d(F.relu(m.stem(x)), 3, 2, 1)
        y = F.relu(m.a(y) + y)
        y = F.hardswish(m.wide(y)) + F.softplus(m.b(y))
        return m.head(F.adaptive_avg_pool2d(m.a(y), 1).reshape(x.size(0), -1))

    of16 = functools.partial(conv, 2, 16, out_channels=16)
    return Call(forward, stem=conv(2, 3, out_channels=16, stride=2, padding=1), a=of16(padding=1), b=of16(padding=1),
                wide=of16(kernel_size=1), head=nn.Linear(16, 5))  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 5))


NETWORKS = {"convnet": (convnet, (2, 3, 32, 32)), "transformer": (transformer, (3, 9, 16))}
by_network = pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
SHAPES = [(1, 3, 32, 32), (5, 3, 32, 32), (2, 3, 20, 46), (1, 3, 7, 9), (1, 9, 16), (7, 1, 16), (2, 30, 16)]
MIXED = ["conv1d plain", "conv2d plain", "conv + relu, int8", "linear + relu, float", "linear GELU(approximate='none')",
         "layer_norm", "average, padded", "query, key and value", "pointwise"]  # fmt: skip


MODELS = {
    "conv": (conv, (2, 4, 9, 9)), "image": (lambda: conv(2, 3, padding=1), (2, 3, 9, 9)), "pointwise": (pointwise, BIG),
    "conv1d": (lambda: conv(1), (2, 4, 9)), "conv3d": (lambda: conv(3), (2, 4, 9, 9, 9)), "sum": (two(same), IMAGE),
    "pool": (lambda: nn.Sequential(conv(), nn.MaxPool2d(2), conv(2, 8)), (2, 4, 9, 9)),
    "padded": (lambda: conv(padding=2, padding_mode="reflect"), (2, 4, 9, 9)), "linear": (linear(), (3, 7, 16)),
    "linear sum": (lambda: Call(lambda m, x: m.a(x) + x, a=nn.Linear(16, 16)), (3, 16)),
    "matmul": (MATMUL_CASES["matmul, bmm"].make, (2, 3, 8, 16)),
}  # fmt: skip
BAD = {
    "batch 0": lambda x: x[:0], "rank": lambda x: x[0], "rank + 1": lambda x: x[None], "double": lambda x: x.double(),
    "long": lambda x: x.long(), "half": lambda x: x.half(),
    "channels": lambda x: torch.cat([x, x], -1 if x.size(-1) == 16 else 1), "empty": lambda x: x[:0, :0],
    "fewer channels": lambda x: x[..., :1] if x.size(-1) == 16 else x[:, :1],
    "too small": lambda x: x[(..., *[slice(1)] * (x.dim() - 2))], "no rows": lambda x: x[..., :0, :],
    "no columns": lambda x: x[..., :0],
}  # fmt: skip


@functools.cache
def network(name: str) -> tuple[Any, Any, Tensor]:
    """A lowered model, its graph and its example. Tests leave them as they were."""
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x = settled(make()), torch.randn(shape)
        quantized = convert(model, x).quantized
        return lower(quantized, x), dbrq.rewrite(quantized, x), x


def name_for(shape: tuple[int, ...]) -> str:
    return "convnet" if len(shape) == 4 else "transformer"


class Output(collections.OrderedDict):
    """A dict whose values can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OutputWithAttributes(collections.OrderedDict):
    """A dict whose values are attributes beside."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__.update(values)


Pair = collections.namedtuple("Pair", ["hidden", "pooled"])
CONTAINERS: dict[str, Callable] = {
    "tuple": lambda m, x: (m.a(x), m.b(x)),
    "list": lambda m, x: [m.a(x), m.b(x)],
    "namedtuple": lambda m, x: Pair(m.a(x), m.b(x)),
    "dict": lambda m, x: {"a": m.a(x), "b": [m.b(x), None]},
    "output": lambda m, x: Output(a=m.a(x), b=m.b(x)),
    "output with attributes": lambda m, x: OutputWithAttributes(a=m.a(x), b=m.b(x)),
    "nested": lambda m, x: ({"a": (m.a(x),)}, [m.b(x), (x,)]),
    "with numbers": lambda m, x: (m.a(x), 3, "text", None, x.shape[1]),
    "one in a tuple": lambda m, x: (m.a(x),),
    "nothing": lambda m, x: None,
    "empty": lambda m, x: (),
    "the same twice": lambda m, x: (m.a(x),) * 2,
}


def two_layers(fn: Callable) -> nn.Module:
    return Call(fn, inputs=1, a=nn.Linear(16, 16), b=nn.Linear(16, 16), w=torch.randn(16)).eval()


OUTPUTS: dict[str, Callable] = {
    "a layer's": lambda m, x: m.a(x),
    "two": lambda m, x: (m.a(x), m.b(x)),
    "a view": lambda m, x: m.a(x)[:, :4],
    "a value and its view": lambda m, x: let(m.a(x), lambda y: (y, y.t(), y[0])),
    "the same twice": lambda m, x: let(m.a(x), lambda y: (y, y)),
    "the input": lambda m, x: (m.a(x), x),
    "a view of the input": lambda m, x: (m.a(x), x[1:]),
    "a parameter": lambda m, x: (m.a(x), m.w),
    "a constant": lambda m, x: (m.a(x), torch.arange(5.0) * 2),
    "a view of a parameter": lambda m, x: (m.a(x), m.w[:3]),
    "an expanded parameter": lambda m, x: (m.a(x), m.w.expand(3, 16)),
    "half of it": lambda m, x: m.a(x).chunk(2, 1),
    "read again": lambda m, x: let(m.a(x), lambda y: (y, m.b(y))),
    "by torch": lambda m, x: F.softplus(m.a(x)),
    "a sum": lambda m, x: let(m.a(x), lambda y: (y + m.b(x), y)),
    "integers": lambda m, x: (m.a(x) > 0, x.long()),
}


class Counts(nn.Module):
    """Writes to a buffer in each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) + self.calls


def writing(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.first(x))
    y = F.relu(m.second(y) + y)
    made = torch.zeros_like(y)
    made[:, ::2] += y[:, ::2]
    return m.last(torch.cat([made, F.max_pool2d(y, 3, 1, 1)], 1).mean((2, 3)))
