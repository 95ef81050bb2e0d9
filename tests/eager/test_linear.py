"""Linear layers and products in every spelling, against FX graph mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, per_channel_dynamic_qconfig

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches, assert_precision, rows, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, quantized_on, run

Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

LINEAR_INPUTS = {"2-d": (5, 16), "3-d": (3, 5, 16), "4-d": (2, 3, 5, 16), "1-d": (16,)}


@by_name(LINEAR_INPUTS, "shape")
@pytest.mark.parametrize("bias", [True, False])
def test_linear_module(shape, bias):
    converted = assert_matches(nn.Sequential(nn.Linear(16, 24, bias)), torch.randn(shape))
    assert_precision(converted, "linear", "int8", 1)


@by_name(LINEAR_INPUTS, "shape")
@by_name(
    {
        "no bias": lambda m, x: F.linear(x, m.weight),
        "bias": lambda m, x: F.linear(x, m.weight, m.bias),
        "bias=": lambda m, x: F.linear(x, m.weight, bias=m.bias),
        "weight=": lambda m, x: F.linear(x, weight=m.weight),
        "weight= bias=": lambda m, x: F.linear(x, weight=m.weight, bias=m.bias),
        "input= weight= bias=": lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias),
    },
    "fn",
)
def test_linear_function(fn, shape):
    model = Call(fn, weight=torch.randn(24, 16) * 0.2, bias=torch.randn(24))
    assert_precision(assert_matches(model, torch.randn(shape)), "linear", "int8", 1)


@by_name(
    {
        "w.t()": ((16, 24), lambda m, x: F.linear(x, m.weight.t())),
        "w.T": ((16, 24), lambda m, x: F.linear(x, m.weight.T)),
        "w.mT": ((16, 24), lambda m, x: F.linear(x, m.weight.mT)),
        "permute": ((16, 24), lambda m, x: F.linear(x, m.weight.permute(1, 0))),
        "transpose": ((16, 24), lambda m, x: F.linear(x, torch.transpose(m.weight, 0, 1))),
        "view": ((24, 4, 4), lambda m, x: F.linear(x, m.weight.view(24, 16))),
        "flatten": ((24, 4, 4), lambda m, x: F.linear(x, m.weight.flatten(1))),
        "squeeze": ((24, 16, 1), lambda m, x: F.linear(x, m.weight.squeeze(-1))),
        "rows": ((48, 16), lambda m, x: F.linear(x, m.weight[24:])),
        "columns": ((24, 32), lambda m, x: F.linear(x, m.weight[:, 16:])),
        "chunk": ((72, 16), lambda m, x: torch.cat([F.linear(x, w) for w in m.weight.chunk(3)], -1)),
        "select": ((2, 24, 16), lambda m, x: F.linear(x, m.weight[1])),
    },
    "shape, fn",
)
def test_linear_with_a_pure_view_counts_as_the_parameter(shape, fn):
    converted = assert_matches(Call(fn, weight=torch.randn(shape) * 0.2), torch.randn(5, 16), fx=False)
    assert_precision(converted, "linear", "int8")


@by_name(
    {
        "x @ w": ((16, 24), lambda m, x: x @ m.weight),
        "x @ w.T": ((24, 16), lambda m, x: x @ m.weight.T),
        "matmul, w.t()": ((24, 16), lambda m, x: torch.matmul(x, m.weight.t())),
        "mm, rows": ((32, 24), lambda m, x: torch.mm(x, m.weight[16:])),
        "addmm, w.T": ((24, 16), lambda m, x: torch.addmm(m.bias, x, m.weight.T)),
    },
    "shape, fn",
)
def test_product_with_a_parameter_or_its_view_is_a_linear_layer(shape, fn):
    model, x = Call(fn, weight=torch.randn(shape) * 0.2, bias=torch.randn(24)), torch.randn(5, 16)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 1)
    expected = run(converted, x)
    assert sqnr(run(model, x), expected) > 30
    for backend in ("torchscript", "onednn"):
        torch.testing.assert_close(run(dbrq.lower(converted, x, backend=backend), x), expected, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(converted(x), expected)


@by_name(
    {
        "scaled": lambda m, x: F.linear(x, m.weight * 0.5),
        "masked": lambda m, x: F.linear(x, m.weight.masked_fill(m.weight < 0, 0.0)),
        "copied rows": lambda m, x: F.linear(x, torch.cat([m.weight, m.weight])),
    },
    "fn",
)
def test_linear_with_a_computed_weight(fn):
    model, x = Call(fn, weight=torch.randn(24, 16)), torch.randn(5, 16)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 1)
    assert sqnr(run(model, x), run(converted, x)) > 30


@by_name({"per tensor": default_dynamic_qconfig, "per channel": per_channel_dynamic_qconfig}, "qconfig")
@by_name(
    {
        "module": (lambda: nn.Sequential(nn.Linear(16, 24))),
        "function": (
            lambda: Call(lambda m, x: F.linear(x, m.weight, m.bias), weight=torch.randn(24, 16), bias=torch.randn(24))
        ),
    },
    "make",
)
def test_dynamic_linear_is_float_in_and_out(make, qconfig):
    mapping = QConfigMapping().set_global(qconfig)
    converted = assert_matches(make(), torch.randn(32, 16), mapping)
    assert_precision(converted, "linear", "int8", 1)
    assert "dynamic" in rows(converted, "linear")[0].kernel


def test_dynamic_linear_follows_the_range_of_its_input():
    model, x = nn.Sequential(nn.Linear(16, 24)), torch.randn(32, 16)
    converted = convert(model, x, QConfigMapping().set_global(default_dynamic_qconfig)).quantized
    for factor in (0.01, 1.0, 1000.0):
        assert sqnr(run(model, x * factor), run(converted, x * factor)) > 25


class Products(nn.Module):
    """Linear layers as GPT-2 spells them, and as others do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.w, self.b = how, nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24))
        self.last = nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.how(self, x))


@pytest.mark.parametrize(
    "how",
    [
        lambda m, x: torch.addmm(m.b, x, m.w),
        lambda m, x: m.b.addmm(x, m.w),
        lambda m, x: x @ m.w + m.b,
        lambda m, x: torch.matmul(x, m.w),
        lambda m, x: torch.mm(x, m.w),
    ],
)
def test_a_product_with_a_parameter_is_a_linear_layer(how):
    model = Products(how)
    report = dbrq.report(quantized_on(model, Z))
    assert report.coverage == 1.0 and [r.op for r in report.rows if r.macs] == ["linear", "linear"]
    assert sqnr(run(model, Z), run(quantized_on(model, Z), Z)) > 25


def test_a_bias_computed_in_forward_is_added_in_float():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.q, self.v = nn.Linear(16, 16, bias=False), nn.Parameter(Z[0, :8]), nn.Parameter(Z[1, :8])

        def forward(self, x):
            return F.linear(x, self.linear.weight, torch.cat((self.q, self.v))).relu()

    model = nn.Sequential(Joined(), nn.Linear(16, 4))
    converted = quantized_on(model, Z)
    assert dbrq.report(converted).coverage == 1.0
    assert sqnr(run(model.eval(), Z), run(converted, Z)) > 25


# Values that no op made


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.last(x) + m.first(m.positions),
        lambda m, x: m.last(x) + m.first(m.positions.expand(x.size(0), -1, -1)),
        lambda m, x: m.last(x) + F.linear(m.positions, m.first.weight, m.first.bias * 2),
    ],
    ids=["parameter", "expanded", "with a computed bias"],
)
def test_linear_layer_on_a_parameter_is_int8_in_its_own_range(fn):
    # No one calibrates a parameter, nor knows whether another comes later.
    positions = nn.Parameter(torch.randn(7, 16) * 3)
    model = Call(fn, positions=positions, first=nn.Linear(16, 8), last=nn.Linear(16, 8)).eval()
    x = torch.randn(3, 7, 16)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 2)
    assert sqnr(run(model, x), run(converted, x)) > 35
    for graph in (dbrq.rewrite(converted, x), dbrq.lower(converted, x)):
        assert sqnr(run(converted, x), run(graph, x)) > 60
    with torch.no_grad():
        for held in (model, converted):
            held.positions.mul_(100)
    assert sqnr(run(model, x), run(converted, x)) > 35


@pytest.mark.parametrize("qconfig", [torch.ao.quantization.default_dynamic_qconfig,
                                     torch.ao.quantization.float16_dynamic_qconfig])  # fmt: skip
def test_dynamic_linear_layer_adds_a_computed_bias(qconfig):
    model = Call(lambda m, x: F.linear(x, m.weight, m.bias * 2), weight=torch.randn(8, 16), bias=torch.randn(8) * 9)
    x = torch.randn(3, 16)
    converted = convert(model, x, qconfig).quantized
    assert sqnr(run(model, x), run(converted, x)) > 30
    assert sqnr(run(converted, x), run(dbrq.rewrite(converted, x), x)) > 60
