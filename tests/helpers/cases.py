"""Cases of the tables of patterns: a model, its example, and what each backend runs for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import QConfigMapping

from dbrq.lowering.engine import is_dequantize
from tests.helpers.computing import counted
from tests.helpers.running import run


@dataclass
class Case:
    """A pattern and its example, and what each backend runs for it.

    Attributes:
        make: the model.
        shape: the example's, or a function that makes the example.
        float: what torchscript runs.
        int8: the same with a layer behind that reads int8; "" is what runs without it, and the layer.
        behind: that layer.
        mapping: another recipe than the default one.
        onednn: what oneDNN runs without and with that layer, None where that is left open; if there is none, each layer
            is one primitive, with the functions and the sum behind it.
        inductor: the kernels that Inductor's code calls.
        free: sizes of the first input that vary at inference.
        bfloat16: float parts in bfloat16.
    """

    make: Callable[[], nn.Module]
    shape: tuple | Callable[[], Any]
    float: str = ""
    int8: str = ""
    behind: str = "qconv"
    mapping: QConfigMapping | None = None
    onednn: tuple[str | None, str | None] | None = None
    inductor: str = ""
    free: tuple[int, ...] = ()
    bfloat16: bool = False

    def example(self) -> Any:
        return self.shape() if callable(self.shape) else torch.randn(self.shape)

    def stock(self, out: str) -> Counter[str]:
        """What torchscript runs."""
        return counted(self.float if out == "float" else self.int8 or f"{self.float} {self.behind}")


def table(*parts: dict[str, Case], outs: tuple = ("float", "int8")) -> Any:
    """Runs a test for each case, with each kind of output."""
    cases = {name: case for part in parts for name, case in part.items()}
    assert len(cases) == sum(map(len, parts))
    params = [pytest.param(name, case, out, id=f"{name}-{out}") for name, case in cases.items() for out in outs]
    return pytest.mark.parametrize("name, case, out", params)


class Followed(nn.Module):
    """A model and a layer that reads its (first) output as int8 and multiplies by one."""

    def __init__(self, model: nn.Module, example: Any, behind: str) -> None:
        super().__init__()
        self.model = model
        like = run(model, example)
        like = like[0] if isinstance(like, tuple) else like
        if behind == "qconv":
            channels = like.shape[1]
            self.behind = getattr(nn, f"Conv{like.dim() - 2}d")(channels, channels, 1, groups=channels, bias=False)
            nn.init.ones_(self.behind.weight)
        else:
            self.behind = nn.Linear(like.shape[-1], like.shape[-1], bias=False)
            nn.init.eye_(self.behind.weight)

    def forward(self, *inputs):
        out = self.model(*inputs)
        return (self.behind(out[0]), *out[1:]) if isinstance(out, tuple) else self.behind(out)


def let(value: Tensor, fn: Callable) -> Any:
    """A local name inside a lambda."""
    return fn(value)


def settled(model: nn.Module) -> nn.Module:
    """In eval mode, with batch-norm statistics that are not those of a new model."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for mean, tensor in (
                (1, module.weight),
                (0, module.bias),
                (0, module.running_mean),
                (1, module.running_var),
            ):
                nn.init.uniform_(tensor, mean - 0.4, mean + 0.4)
    return model.eval()


def made(case: Case, out: str) -> tuple[nn.Module, Any]:
    model, x = settled(case.make()), case.example()
    return (Followed(model, x, case.behind).eval() if out == "int8" else model), x


def last_step(graph: fx.GraphModule) -> float:
    return [node for node in graph.graph.nodes if is_dequantize(node)][-1].args[1]


def by_name(cases: dict, *names: str) -> Any:
    """Runs a test for each case, which its keys name."""
    return pytest.mark.parametrize(",".join(names), list(cases.values()), ids=list(cases))
