"""``export``: what the program takes and returns."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import run
from torch import Tensor, nn

import dbrq

Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Result:
    logits: Tensor
    hidden: Any = None


OUTPUTS = {
    "tensor": (lambda y: y, lambda y: y),
    "tuple": (lambda y: (y, y + 1), lambda y: (y, y + 1)),
    "dict": (lambda y: {"a": y}, lambda y: {"a": y}),
    "dict of more": (lambda y: {"a": y, "b": (y, [y]), "c": None}, lambda y: {"a": y, "b": (y, [y]), "c": None}),
    "ordered dict": (lambda y: collections.OrderedDict(a=y), lambda y: {"a": y}),
    "named tuple": (lambda y: Pair(y, y), lambda y: (y, y)),
    "dataclass": (lambda y: Result(y, (y,)), lambda y: {"logits": y, "hidden": (y,)}),
    "shape": (lambda y: (y, y.shape), lambda y: (y, tuple(y.shape))),
}


class Model(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.fc, self.output = nn.Linear(4, 4), output

    def forward(self, x: Tensor, scale: float = 2.0, y: Tensor | None = None) -> Any:
        return self.output(self.fc(x) * scale + (0 if y is None else y))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.allclose(a, b, atol=1e-5)
    if isinstance(a, (list, tuple)):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return list(a) == list(b) and all(same(a[k], b[k]) for k in a) if isinstance(a, dict) else a == b


@pytest.mark.parametrize("output, plain", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_are_nested_as_the_model_nests_them(output, plain):
    quantized = dbrq.quantize(Model(output), [torch.randn(3, 4)])
    program = dbrq.export(quantized, torch.randn(3, 4))
    x = torch.randn(5, 4)
    quantized.output = lambda y: y
    assert same(program.module()(x), plain(run(quantized, x)))


def test_inputs_left_out_between_others():
    quantized = dbrq.quantize(Model(lambda y: y), [{"x": torch.randn(3, 4), "y": torch.randn(3, 4)}])
    program = dbrq.export(quantized, {"x": torch.randn(3, 4), "y": torch.randn(3, 4)})
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    assert same(program.module()(x=x, y=y), run(quantized, {"x": x, "y": y}))


def test_a_decision_on_a_value_is_asserted():
    model = Model(lambda y: y + 1 if y.sum() > 0 else y)
    nn.init.eye_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    x = torch.rand(3, 4)
    program = dbrq.export(dbrq.quantize(model, [x]), x)
    program.module()(x)
    with pytest.raises(RuntimeError):
        program.module()(-x)


def test_a_decision_on_a_size_that_is_compared():
    """As ``multi_head_attention_forward`` compares shapes."""
    quantized = dbrq.quantize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), [torch.randn(2, 3, 8)])
    program = dbrq.export(quantized, torch.randn(2, 3, 8))
    x = torch.randn(3, 5, 8)
    assert same(program.module()(x), run(quantized, x))
