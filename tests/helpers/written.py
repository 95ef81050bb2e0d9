"""Code around three linear layers, calibrated on batches, and as near to float as 8 bits are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.running import run


class Layers(nn.Module):
    def __init__(self, code: Callable) -> None:
        super().__init__()
        self.code = code
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.code(self, x)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 12, 16, generator=generator) for _ in range(3)]


def calibrated(model: nn.Module, data: list) -> nn.Module:
    prepared = dbrq.prepare(model.eval(), data[0])
    dbrq.calibrate(prepared, data)
    return dbrq.convert(prepared)


def judged(code: Callable, data: list | None = None, least: float = 28) -> nn.Module:
    """Converted and as near to float as 8 bits are, in each of its results."""
    data = batches() if data is None else data
    model = Layers(code).eval()
    converted = calibrated(model, data)
    for item in data:
        torch.manual_seed(2)
        expected = run(model, item)
        torch.manual_seed(2)
        for e, r in zip(expected, run(converted, item), strict=True):
            assert sqnr(e, r) > least
    return converted
