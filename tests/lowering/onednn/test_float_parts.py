"""What stays float: in primitives, in bfloat16, in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping

import dbrq
from tests.helpers.cases import let, made, settled
from tests.helpers.graphs import X, quantized
from tests.helpers.judging import assert_close, sqnr
from tests.helpers.models import Call
from tests.helpers.networks import MIXED, by_network
from tests.helpers.onednn import lower, residual, steps
from tests.helpers.patterns import (
    ACTIVATIONS,
    CONVS,
    IMAGE,
    INTEGERS,
    MORE_SUMS,
    SHARED,
    SIZES,
    SUMS,
    TO_INT8,
    conv,
    same,
)
from tests.helpers.running import convert, floats, run


def test_a_value_of_no_dimensions_leaves_onednn_in_float32():
    q = quantized(lambda s, x: (s.a(x), (torch.arange(x.shape[0]).float() * 1.5).sum()), X)
    low = dbrq.lower(q, (X,), backend="onednn", dtype=torch.bfloat16)
    assert low(X)[1].dtype is torch.float32 and low(X)[1] == 9


# bfloat16

IN_BFLOAT16 = [*MIXED, "softmax", "gelu", "conv + relu, float", "linear Mish()", "transposed", "average, mean"]


@pytest.mark.parametrize("name", IN_BFLOAT16)
@pytest.mark.parametrize("out", ["float", "int8"])
def test_what_stays_float_can_be_bfloat16(name, out):
    cases = {
        **CONVS,
        **SUMS,
        **MORE_SUMS,
        **ACTIVATIONS,
        **TO_INT8,
        **INTEGERS,
        **SHARED,
    }
    model, x = made(cases[name], out)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x, dtype=torch.bfloat16)
    assert_close(run(lowered, x), run(quantized, x), 0.06)
    assert all(t.dtype is torch.float32 for t in floats(run(lowered, x)))
    assert not dbrq.lowered_form(lowered).in_torch


SLICES: dict[str, Callable] = {
    "cat with the input": lambda m, x: torch.cat([m.a(x)[:, :4], x[:, 4:]], 1),
    "softmax": lambda m, x: x[:, 4:].softmax(-1) + m.a(x)[:, :4],
    "product": lambda m, x: m.a(x)[:, :4] * x[:, 4:].sigmoid(),
    "halves": lambda m, x: let(m.a(x), lambda y: y[:, :4] * y[:, 4:].sigmoid()),
    "a layer of a slice": lambda m, x: m.l(x[..., :4]) + m.l(m.a(x)[..., :4]),
    "expanded": lambda m, x: m.a(x) + x[:, :1].expand(3, 8, 6, 5).exp(),
    "every other": lambda m, x: m.l(x[:, ::2, :, ::2][..., [0, 1, 2, 0]]) * m.a(x)[:, ::2, :, 1:2].tanh(),
    "int8, added": lambda m, x: let(m.a(x), lambda y: m.a(torch.cat([y[:, :4] + y[:, 4:], y[:, 4:]], 1))),
    "int8, exp": lambda m, x: let(m.a(x), lambda y: m.a(y)[:, :4] / y[:, 4:].exp()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SLICES)
def test_slices(name, dtype):
    model, x = Call(SLICES[name], inputs=1, a=same(), l=nn.Linear(4, 4)).eval(), torch.randn(3, 8, 6, 5)
    for mapping in (None, QConfigMapping()):
        quantized = convert(model, x, mapping).quantized
        lowered = lower(quantized, x, dtype=dtype)
        for _ in range(2):
            assert_close(run(lowered, x), run(quantized, x), 0.02 if dtype is torch.float32 else 0.06)


@by_network
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_network(make, shape, dtype):
    """No worse than what the others compute, held against float."""
    model, x = settled(make()), torch.randn(shape)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x, dtype=dtype)
    expected = run(model, x)
    assert not dbrq.lowered_form(lowered).in_torch
    for reference in (run(quantized, x), run(dbrq.lower(quantized, x, dtype=dtype), x)):
        assert sqnr(expected, run(lowered, x)) >= sqnr(expected, reference) - 1.0


@by_network
def test_a_model_that_was_not_quantized_runs_in_float_primitives(make, shape):
    model, x = settled(make()), torch.randn(shape)
    quantized = convert(model, x, QConfigMapping()).quantized
    lowered = lower(quantized, x)
    torch.testing.assert_close(run(lowered, x), run(model, x), atol=1e-5, rtol=1e-4)
    assert not dbrq.lowered_form(lowered).in_torch and not any("quantize" in step for step in steps(lowered))


@by_network
def test_a_model_that_was_not_quantized_runs_in_bfloat16(make, shape):
    model, x = settled(make()), torch.randn(shape)
    lowered = lower(convert(model, x, QConfigMapping()).quantized, x, dtype=torch.bfloat16)
    assert_close(run(lowered, x), run(model, x), 0.03)
    assert not dbrq.lowered_form(lowered).in_torch


FLOAT_MODELS = {
    "conv bn relu": (
        lambda: nn.Sequential(conv(padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        SIZES[2],
    ),
    "conv without bias, bn": (lambda: nn.Sequential(conv(bias=False), nn.BatchNorm2d(8), nn.SiLU()), SIZES[2]),
    "conv bn without parameters": (
        lambda: Call(
            lambda m, x: F.batch_norm(m.a(x), m.mean.detach(), m.var.detach()),
            a=conv(),
            mean=torch.randn(8),
            var=torch.rand(8) + 0.5,
        ),
        SIZES[2],
    ),
    "conv1d": (lambda: nn.Sequential(conv(1, groups=4), nn.GELU()), SIZES[1]),
    "conv3d": (lambda: nn.Sequential(conv(3, padding=1), nn.BatchNorm3d(8)), SIZES[3]),
    "bn in training": (
        lambda: Call(lambda m, x: F.batch_norm(m.a(x), None, None, training=True), a=conv()),
        SIZES[2],
    ),
    "transposed, bn": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        SIZES[2],
    ),
    "linear bn": (lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), (5, 16)),
    "residual": (residual(lambda m, x, y: F.relu(m.b(y) + y)), IMAGE),
    "functions": (lambda: Call(lambda m, x: torch.sigmoid(F.elu(x) * 2 + 1).sqrt() / 3), (3, 7, 16)),
    "1 / x": (lambda: Call(lambda m, x: 1.0 / (x.exp() + 2.0) - x), (3, 7)),
    "x / y": (lambda: Call(lambda m, x: x / (x.exp() + 1)), (3, 7)),
    "0-d": (lambda: Call(lambda m, x: F.relu(x.mean()) + 1), (3, 7)),
    "clamp by tensors": (lambda: Call(lambda m, x: x.clamp(x.mean(), x.amax())), (3, 7)),
    "pow": (lambda: Call(lambda m, x: x.abs().pow(0.5) + x**2), (3, 7)),
    "where": (lambda: Call(lambda m, x: torch.where(x > 0, x, x.exp())), (3, 7)),
    "softmax of all": (lambda: Call(lambda m, x: F.softmax(x.flatten(), 0)), (3, 7)),
    "cat": (lambda: Call(lambda m, x: torch.cat([x, x.exp(), x[:1]])), (3, 7)),
    "avg pool": (
        lambda: Call(lambda m, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
        (2, 4, 9, 10),
    ),
    "max pool with indices": (lambda: Call(lambda m, x: F.max_pool2d(x, 2, return_indices=True)), (2, 4, 9, 10)),
    "global pool": (lambda: Call(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1)), (2, 4, 9, 10)),
    "mean": (lambda: Call(lambda m, x: x.mean((2, 3))), (2, 4, 9, 10)),
    "expanded": (lambda: Call(lambda m, x: x[:, :1].expand(2, 4, 9, 10) + x), (2, 4, 9, 10)),
    "a sum over itself": (lambda: Call(lambda m, x: x + x), (3, 7)),
    "x * x.mT": (lambda: Call(lambda m, x: x * x.mT), (7, 7)),
    "integers": (lambda: Call(lambda m, x: (x * 3).long() + torch.arange(7)), (3, 7)),
    "bool": (lambda: Call(lambda m, x: (x > 0) & (x < 1)), (3, 7)),
    "doubles": (lambda: Call(lambda m, x: F.relu(x.double()) + x.double()), (3, 7)),
    "halves": (lambda: Call(lambda m, x: F.relu(x.half()) * 2), (3, 7)),
    "complex": (lambda: Call(lambda m, x: torch.fft.rfft(x).abs()), (3, 7)),
}


@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float(name):
    make, shape = FLOAT_MODELS[name]
    model, x = settled(make()), torch.randn(shape)
    lowered = lower(convert(model, x, QConfigMapping()).quantized, x)
    for given in (x, torch.randn(shape)):
        got, expected = run(lowered, given), run(model, given)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
