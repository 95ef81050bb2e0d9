"""Models called again and again, beside the float model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import dbrq

BACKENDS = ("torchscript", "onednn")


class Cases(nn.Module):
    """Runs each case on the input and on what a linear layer of it gives.

    Args:
        cases: name -> function of (this module, input, float input) that returns tensors.
    """

    def __init__(self, cases: dict[str, Callable[[Cases, Tensor], Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cases = cases
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(3, 8))
        self.register_buffer("index", torch.tensor([0, 1, 1]))
        self.scale = nn.Parameter(torch.rand(3, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"linear": self.linear(x)} | {name: case(self, x) for name, case in self.cases.items()}


def calls(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 8, generator=generator) for _ in range(count)]


def results(model: nn.Module, inputs: list[Tensor]) -> list[dict[str, Tensor]]:
    """What calls return, on copies of the inputs, and as it was when they returned."""
    with torch.no_grad():
        return [{name: value.clone() for name, value in model(x.clone()).items()} for x in inputs]


def check(model: nn.Module, backend: str, tolerance: float = 1e-5, linear: float = 0.2) -> None:
    """Raise unless converted and lowered models give in each of three calls what the float model gives."""
    inputs = calls()
    expected = results(copy.deepcopy(model), inputs)
    quantized = dbrq.quantize(copy.deepcopy(model), inputs)
    lowered = dbrq.lower(quantized, inputs[0], backend=backend)
    wrong = []
    for kind, one in (("converted", copy.deepcopy(quantized)), (backend, lowered)):
        for number, (got, wanted) in enumerate(zip(results(one, inputs), expected, strict=True)):
            for name, value in wanted.items():
                bound = linear if name == "linear" else tolerance
                if got[name].shape != value.shape or not torch.allclose(got[name], value, atol=bound, rtol=1e-4):
                    wrong.append(f"{kind}, call {number}: {name}")
    assert not wrong


def check_draws(model: nn.Module, lowered: nn.Module, inputs: list[Tensor]) -> None:
    """Raise unless a model draws what the float model draws, after the same seed, and something else in each call."""
    torch.manual_seed(3)
    expected = results(model, inputs)
    torch.manual_seed(3)
    got = results(lowered, inputs)
    wrong = [
        f"call {i}: {name}" for i in range(len(inputs)) for name, value in expected[i].items()
        if name != "linear" and not torch.allclose(got[i][name], value, atol=1e-5)
    ]  # fmt: skip
    assert not wrong
    assert not [name for name in expected[0] if torch.equal(got[0][name], got[1][name])]
