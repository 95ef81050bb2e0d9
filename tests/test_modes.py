"""Modes of torch: gradients, inference mode, autocast; around models and in forward."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.models import ROWS, Rows
from tests.helpers.phases import X, in_phase, net, phases
from tests.helpers.running import convert, quantized, run
from tests.helpers.training import BATCH, V, close, recipes, small_net

# Other dtypes


def test_autocast_in_forward() -> None:
    def forward(m: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
            g = F.linear(x, m.c.weight)
        return h, m.b(h.float()) + g

    model = Rows(forward)
    converted = quantized(model, ROWS, strict=True)
    with torch.no_grad():
        for expected, result in zip(model(ROWS[0]), converted(ROWS[0]), strict=True):
            assert result.dtype is expected.dtype and sqnr(expected.float(), result.float()) > 30
    rows = {row.path: row for row in dbrq.report(converted).rows}
    assert [rows[name].precision for name in ("a", "b", "linear.0")] == ["float", "int8", "float"]
    assert "bfloat16" in rows["a"].reason


# Inference mode and autocast

#: Around prepare, calibration, conversion, inference: none, each alone, all.
MODES = [(False,) * 4, *(tuple(i == j for i in range(4)) for j in range(4)), (True,) * 4]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode(modes, made_inside):
    inside = [torch.inference_mode if mode else nullcontext for mode in modes]
    with torch.inference_mode() if made_inside else nullcontext():
        model, x = small_net(), BATCH.clone()
        expected = model(x)
    with inside[0]():
        prepared = dbrq.prepare(model, x)
    assert not any(t.is_inference() for t in prepared.state_dict().values())
    with torch.no_grad(), inside[1]():
        prepared(x)
    dbrq.calibrate(prepared, [x * 0.5])
    with torch.inference_mode():
        prepared(x * 0.7)
    with inside[2]():
        converted = dbrq.convert(prepared)
    with torch.no_grad():
        outside = converted(x)
    with inside[3]():
        assert torch.equal(converted(x), outside) and close(expected.clone(), outside)
        lowered = dbrq.lower(converted, x)
        assert close(expected.clone(), lowered(x))
    assert torch.equal(dbrq.convert(copy.deepcopy(prepared))(BATCH), outside)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return self.c(torch.softmax(h @ h.mT, -1) @ self.b(x))


class Inside(Attention):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = F.gelu(self.a(x))
        return self.c(self.b(h.float()))


def narrowed():
    return torch.autocast("cpu", torch.bfloat16)


@recipes
@pytest.mark.parametrize("modes", MODES)
def test_autocast_around(mapping, modes):
    """It does not reach in: what dtypes ops take was recorded without it."""
    inside = [narrowed if mode else nullcontext for mode in modes]
    torch.manual_seed(0)
    model = Attention()
    with inside[0]():
        prepared = dbrq.prepare(model.train(), V, mapping)
    with inside[1]():
        out = prepared(V)
        out.square().sum().backward()
    assert out.dtype is torch.float32 and close(model(V), out, 20)
    with inside[2]():
        converted = dbrq.convert(prepared)
    with inside[3]():
        assert converted(V).dtype is torch.float32 and close(model(V).float(), converted(V), 20)
        for backend in ("torchscript", "onednn"):
            assert close(model(V).float(), dbrq.lower(converted, V, backend=backend)(V), 20)
    assert dbrq.report(converted).coverage == 1.0


@recipes
def test_autocast_inside(mapping):
    torch.manual_seed(0)
    model = Inside()
    prepared = dbrq.prepare(model, V, mapping)
    prepared(V).sum().backward()
    converted = dbrq.convert(prepared)
    assert close(model(V), converted(V), 20)
    with narrowed():
        assert close(model(V).float(), converted(V).float(), 20)
    with pytest.raises(dbrq.RewriteError, match="autocast"):
        dbrq.lower(converted, V)


# Modes of torch


@phases
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_autograd(phase, context):
    model = in_phase(phase, net, X)
    expected = run(model, X)
    with context():
        got = model(X)
        assert torch.equal(got, expected)
    assert torch.equal(run(model, X), expected)
    assert torch.isfinite(got + 1).all()


def test_everything_in_inference_mode():
    with torch.inference_mode():
        prepared = dbrq.prepare(net(), X)
        prepared(X)
        converted = dbrq.convert(prepared)
        expected = converted(X).clone()
    assert torch.equal(run(converted, X), expected)
    assert torch.equal(run(copy.deepcopy(converted), X), expected)


def test_inputs_that_require_grad():
    converted = in_phase("quantized", net, X)
    x = X.clone().requires_grad_()
    assert torch.equal(converted(x).detach(), run(converted, X))


def test_autocast_around_a_converted_model():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    converted = convert(model, torch.randn(4, 16)).quantized
    with torch.autocast("cpu", torch.bfloat16):
        got = run(converted, torch.randn(4, 16))
    assert torch.isfinite(got.float()).all()
