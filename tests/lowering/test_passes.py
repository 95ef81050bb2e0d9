"""Passes over whole graphs change no number: signed zeros, ``as_strided``, clamps whose limits cross."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.judging import sqnr

PYTHON_BACKENDS = ("onednn", "torchscript")
ALL_BACKENDS = ("onednn", "inductor", "torchscript")


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("first", [0.0, -0.0])
@torch.no_grad()
def test_zeros_of_another_sign_are_other_numbers(backend, first):
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x, sign=0.0):
            return torch.copysign(self.l(x), sign)

    x = torch.randn(4, 8)
    quantized = dbrq.quantize(Signed().eval(), [(x, first)])
    lowered = dbrq.lower(quantized, (x, first), backend=backend)
    torch.testing.assert_close(lowered(x, first), quantized(x, first))
    with pytest.raises((RuntimeError, AssertionError, torch.jit.Error), match="the sign of argument sign"):
        lowered(x, -first)
    torch.testing.assert_close(lowered(x, first), quantized(x, first))


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@torch.no_grad()
def test_as_strided_counts_from_where_the_storage_begins(backend):
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return self.l(x) + x.as_strided((2, 4), (4, 1), 0)

    x, more = torch.randn(2, 4), torch.randn(6, 4)
    quantized = dbrq.quantize(Strided().eval(), [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    for given in (x, more[2:4], more[1:3], more[:2], x):
        torch.testing.assert_close(lowered(given), quantized(given))


@pytest.mark.parametrize("limits", [(1.0, -1.0), (-1.0, float("nan"))])
@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@torch.no_grad()
def test_clamp_whose_limits_are_crossed_is_not_fused(backend, limits):
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.l(x).clamp(*limits), self.m(x)

    x = torch.randn(4, 8)
    model = Clamps().eval()
    if limits[1] != limits[1]:  # what calibration refuses behind an int8 layer, it need not fuse
        assert dbrq.mappings._hardtanh((None, *limits)) is None
        return
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    assert torch.equal(lowered(x)[0], model(x)[0]) and sqnr(model(x)[1], lowered(x)[1]) > 30
