"""Convolutions and sums that torch's passes or kernels get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.lowering import inductor
from dbrq.lowering.engine import Lowering, bind
from dbrq.lowering.patterns import computes
from tests.helpers.inductor import assert_same, lowered
from tests.helpers.int8_patterns import Chain, conv
from tests.helpers.judging import sqnr
from tests.helpers.reference import fake_quantized
from tests.helpers.running import has_compiler, run

if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.mark.parametrize("ndim", [1, 2])
def test_convolutions_of_one_channel(ndim):
    """torch 2.13 is wrong about their layout where sizes are free."""
    torch.manual_seed(0)
    model = Chain(conv(ndim, 1), F.gelu, conv(ndim)).eval()
    quantized = dbrq.quantize(model, [torch.randn(4, 1, *[9] * ndim)])
    model = lowered(quantized, torch.randn(4, 1, *[9] * ndim))
    for shape in ((3, 9), (5, 9)):
        assert_same(model, quantized, torch.randn(shape[0], 1, *[shape[1]] * ndim))


class Between(nn.Module):
    """A function between two int8 layers."""

    def __init__(self, function: Any, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.function, self.first, self.last = function, first, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.first, x))


SUMS = {
    "relu(y + y)": lambda y, f, x: F.relu(y + y),
    "y + the same view": lambda y, f, x: F.relu(y + y.reshape(y.shape)),
    "y + the same again": lambda y, f, x: F.relu(y + f(x)),
}


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_what_is_added_to_itself(kind):
    """Inductor asserts that the other operand is another: a bare AssertionError for each of these."""
    torch.manual_seed(0)
    shape = (3, 16) if kind == "linear" else (1, 16, 5, 5)
    layers = (nn.Linear(16, 8), nn.Linear(8, 4)) if kind == "linear" else (nn.Conv2d(16, 8, 1), nn.Conv2d(8, 4, 1))
    x = torch.randn(shape)
    both = Between(lambda y, f, x: torch.cat([s(y, f, x) for s in SUMS.values()]), *layers).eval()
    quantized = dbrq.quantize(both, [x])
    assert sqnr(fake_quantized(quantized, both, x), run(lowered(quantized, x), x)) > 45


def test_negative_bit():
    """As of ``z.conj().imag``; compiled code reads memory and knows of no such bit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(8, 16)
    quantized = dbrq.quantize(model, [x, -x])
    model_of_code = lowered(quantized, x)
    for given in (torch._neg_view(x), torch.complex(x, x).conj().imag):
        assert given.is_neg()
        for _ in range(2):
            assert sqnr(run(model, -x), run(model_of_code, given)) > 30


def one_column() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=(1, 3), groups=16), nn.ReLU(), nn.Conv2d(32, 8, 1))
    return model.eval(), torch.randn(2, 16, 20, 5)


def test_a_convolution_of_one_column():
    """torch's int8 kernel is wrong for it: -1 dB."""
    model, x = one_column()
    quantized = dbrq.quantize(model, [x])
    model_of_code = lowered(quantized, x)
    assert sqnr(run(model, x), run(model_of_code, x)) > 30
    first, *_, last = dbrq.report(model_of_code).rows
    assert (first.precision, last.precision) == ("float", "int8") and "one column" in first.reason


def test_a_convolution_that_comes_to_one_column_later(monkeypatch):
    """The width is free by then: the form of free sizes does not take it, and one of its own has no int8 kernel."""

    def uncompiled(self: Any, module: Any, examples: list) -> Any:
        return torch.fx.Interpreter(module).run, str(module.graph)

    monkeypatch.setattr(inductor.InductorModel, "_through_inductor", uncompiled)
    model, _ = one_column()
    quantized = dbrq.quantize(model, [torch.randn(2, 16, 20, 12)])
    model_of_code = lowered(quantized, torch.randn(2, 16, 20, 12))
    for batch, width, forms in ((2, 14, 2), (2, 5, 3), (2, 9, 3), (3, 5, 4)):
        x = torch.randn(batch, 16, 20, width)
        assert sqnr(run(model, x), run(model_of_code, x)) > 20
        assert len(dbrq.lowered_form(model_of_code).forms) == forms
    assert ["in_float" in form.code for form in dbrq.lowered_form(model_of_code).forms] == [False, False, True, True]
    assert [set(form.free) for form in dbrq.lowered_form(model_of_code).forms] == [set(), {(0, 3)}, set(), set()]


def prepared(quantized: nn.Module, x: Tensor) -> Any:
    """The graph that Inductor is given."""
    graph = dbrq.rewrite(quantized, x)
    lowering = Lowering(graph)
    inductor.prepare(lowering)
    graph.recompile()
    return graph


def test_a_faulty_convolution_leaves_other_readers_of_its_weight_in_int8():
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, stride=(1, 2), padding=(1, 0))
    model, x = Between(lambda y, f, x: f(y), layer, nn.Conv2d(16, 8, 1)).eval(), torch.randn(2, 16, 9, 9)
    quantized = dbrq.quantize(model, [x])
    graph = prepared(quantized, x)
    assert sum(map(computes(2), graph.graph.nodes)) == 2
    assert sqnr(dbrq.rewrite(quantized, x)(x), graph(x)) > 60


def test_a_batch_of_none_is_added_to_a_convolutions_result():
    """Torch's kernel asks for a layout that nothing without elements has (by the fuzzer, seed 8000250)."""
    torch.manual_seed(0)
    model = Between(lambda y, f, x: y + f(y), nn.Conv2d(10, 10, 1), nn.Identity()).eval()
    x = torch.randn(1, 10, 1, 9).to(memory_format=torch.channels_last)
    quantized = dbrq.quantize(model, [x])
    model_of_code = lowered(quantized, x)
    assert_same(model_of_code, quantized, x)
    assert run(model_of_code, x[:0].contiguous()).shape == (0, 10, 1, 9)
    assert_same(model_of_code, quantized, torch.randn(3, 10, 1, 9))


def test_a_kernel_of_one_element_dilates_nothing():
    """Given to oneDNN, with padding, it reads out of bounds."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 16, (3, 1), dilation=(1, 3), padding=(1, 0)), nn.Conv2d(16, 8, (1, 3), dilation=2)
    ).eval()
    x = torch.randn(2, 16, 9, 9)
    quantized = dbrq.quantize(model, [x])
    graph = prepared(quantized, x)
    convolutions = [bind(node)[1] for node in graph.graph.nodes if computes(2)(node)]
    assert [list(bound[5]) for bound in convolutions] == [[1, 1], [1, 2]]
    assert sqnr(dbrq.rewrite(quantized, x)(x), graph(x)) > 60
