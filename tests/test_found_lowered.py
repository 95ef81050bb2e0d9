"""What an audit of lowered models, kernels and files found: wrong numbers unsaid, crashes, errors of torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dbrq

PYTHON_BACKENDS = ("onednn", "torchscript")


def sqnr(expected: torch.Tensor, got: torch.Tensor) -> float:
    noise = (expected - got).norm()
    return float("inf") if not noise else float(20 * torch.log10(expected.norm() / noise))


@pytest.fixture(autouse=True)
def _without_gradient():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class OtherIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, y):
        first = self.l(x)
        y.add_(1.0)
        return first, self.l(x) + x


class BufferIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("h", torch.randn(4, 8))

    def forward(self, x):
        first = self.l(x)
        self.h.add_(1.0)
        return first, self.l(x) + x


class InputInPlace(nn.Module):
    """An int8 op in place on an input, which is then written under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        x.add_(self.l(x))
        first = self.m(x)
        y.add_(1.0)
        return first, self.m(x)


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@pytest.mark.parametrize("cls", [OtherIsWritten, InputInPlace])
def test_writes_to_an_input_are_seen_through_another_input(cls, backend):
    model = cls().eval()
    mapping = dbrq.default_qconfig_mapping()
    mapping.set_object_type("add_", mapping.global_qconfig)
    data = [(2 * torch.randn(4, 8), 2 * torch.randn(4, 8)) for _ in range(8)]  # x + 1 is within these ranges
    lowered = dbrq.lower(dbrq.quantize(model, data, mapping), copy.deepcopy(data[0]), backend=backend)
    x = torch.randn(4, 8).clamp(-2, 2)
    a, b = x.clone(), x.clone()
    assert sqnr(model(a, a)[1], lowered(b, b)[1]) > 28
    assert torch.equal(a, b) or cls is InputInPlace


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
def test_writes_to_a_buffer_are_seen_through_an_input(backend):
    model = BufferIsWritten().eval()
    data = [2 * torch.randn(4, 8) for _ in range(8)]
    lowered = dbrq.lower(dbrq.quantize(model, data), data[0], backend=backend)
    model.h.copy_(torch.randn(4, 8).clamp(-2, 2))
    lowered.h.copy_(model.h)
    assert sqnr(model(model.h)[1], lowered(lowered.h)[1]) > 28
