"""Derivatives in forward, and of a converted model: right or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.models import ROWS, Call, Rows
from tests.helpers.running import quantized, quantized_on, quietly

Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def forces(m: Rows, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.b(torch.tanh(m.a(x))).sum() + 0.01 * (x**2).sum()
        return torch.autograd.grad(energy, x)[0]


def scalar(m: Rows, z: Tensor) -> Tensor:
    return torch.tanh(m.b(z)).sum() + 0.1 * (z**2).sum()


def added(m: Rows, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(((F.relu(h + z) + z) ** 2).sum(), z)[0]


DIFFERENTIATES: dict[str, Callable] = {
    "autograd.grad": forces,
    "an add": added,
    "func.grad": lambda m, x: torch.func.grad(lambda z: scalar(m, z))(x),
    "func.jacrev": lambda m, x: torch.func.jacrev(lambda z: torch.tanh(m.b(z)))(x[0]),
    "jacobian": lambda m, x: torch.autograd.functional.jacobian(lambda z: torch.tanh(m.b(z)).sum(0) + z.sum(0), x),
    "vmap": lambda m, x: m.b(F.relu(torch.vmap(m.a)(x))),
    "vmap of an int8 value": lambda m, x: m.b(F.relu(torch.vmap(m.c)(F.relu(m.a(x))))),
}


@pytest.mark.parametrize("name", DIFFERENTIATES)
def test_derivatives_in_forward(name: str) -> None:
    model = Rows(DIFFERENTIATES[name])
    converted, strict = quantized(model, ROWS), quantized(model, ROWS, strict=True)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="derivative"):
            assert sqnr(model(ROWS[0]), converted(ROWS[0])) > 35
        with pytest.raises(dbrq.DeviationError, match="derivative"):
            strict(ROWS[0])


@pytest.mark.parametrize("recurrent", [False, True])
def test_derivatives_in_forward_of_dynamic_layers(recurrent: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.LSTM(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                return torch.autograd.grad(self.b(self.a(z)[0] if recurrent else z).tanh().sum(), z)[0]

    mapping = torch.ao.quantization.QConfigMapping().set_global(torch.ao.quantization.default_dynamic_qconfig)
    model = Recurrent().eval()
    converted = dbrq.quantize(model, ROWS, mapping, progress=False)
    assert sqnr(model(ROWS[0]), quietly(converted, ROWS[0])) > 30


def test_forward_mode_derivatives_of_a_converted_model_are_refused() -> None:
    run = quantized(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), ROWS)
    x = ROWS[0]
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        torch.func.jvp(run, (x,), (x,))
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        torch.func.jacfwd(run)(x)
    with torch.autograd.forward_ad.dual_level():
        run(x)  # of which none is asked for
        with pytest.raises(dbrq.QuantizationError, match="no gradient"):
            run(torch.autograd.forward_ad.make_dual(x, x))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return torch.tanh(x) * 2 + self.norm(self.linear(x))


def test_no_gradient_rather_than_a_wrong_one():
    x = Z.clone().requires_grad_()
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        quantized_on(Mixed(), Z)(x).sum().backward()
    assert x.grad is None
    assert torch.is_grad_enabled()


def test_layers_one_behind_the_other_under_vmap() -> None:
    """No value between them is ever seen, so the second is float; conversion failed, as if it had seen no data."""
    model = Call(lambda m, x: torch.vmap(lambda row: m.b(m.a(row)).tanh())(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    x = torch.randn(4, 8)
    int8 = dbrq.quantize(model.eval(), [x])
    assert sqnr(model(x), quietly(int8, x)) > 30
    assert "torch.func" in next(row.reason for row in dbrq.report(int8).rows if row.path == "b")
