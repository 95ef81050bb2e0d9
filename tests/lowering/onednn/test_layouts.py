"""What a plan may not assume: strides, conjugates, negatives, shapes of torch's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.lowering.onednn.execution import _as_planned
from dbrq.lowering.onednn.library import OneDNNError
from dbrq.lowering.onednn.values import Buffer, Kind, Value


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, z):
        return self.l(z.real) + z.imag


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2.0)
        return self.l(x)


@torch.no_grad()
def test_onednn_reads_the_numbers_of_conjugates_and_negatives():
    z = torch.randn(4, 16, dtype=torch.complex64)[:, ::2]
    plain, negative = z.imag, z.conj().imag
    quantized = dbrq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(4, 8) for _ in range(4)])
    for inputs in ((plain, negative), (negative, plain)):
        lowered = dbrq.lower(quantized, torch.randn(4, 8), backend="onednn")
        for x in inputs:
            torch.testing.assert_close(lowered(x), quantized(x))
    quantized = dbrq.quantize(Complex().eval(), [z])
    lowered = dbrq.lower(quantized, z, backend="onednn")
    for x in (z, z.conj()):
        torch.testing.assert_close(lowered(x), quantized(x))


@torch.no_grad()
def test_onednn_writes_to_negatives():
    quantized = dbrq.quantize(WritesInput().eval(), [torch.randn(2, 8) for _ in range(3)])
    lowered = dbrq.lower(quantized, torch.randn(2, 8), backend="onednn")
    z = torch.randn(2, 8, dtype=torch.complex64)
    a, b = (z.clone().conj().imag for _ in range(2))
    torch.testing.assert_close(lowered(b), quantized(a))
    assert a.is_neg() and torch.equal(a, b)


pytestmark = pytest.mark.usefixtures("nothing_proved")


# What a plan may not assume


class Fused(nn.Module):
    def __init__(self, layer: nn.Module, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.operation = layer, operation

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.operation(self.layer(x), y))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(4, 8, 3, padding=1), (2, 4, 6, 6), (2, 8, 6, 6)),
    "linear": (lambda: nn.Linear(4, 8), (2, 5, 4), (2, 5, 8)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 8, 3, padding=1), (2, 4, 6, 6), (2, 8, 6, 6)),
    "gelu": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU()), (2, 5, 4), (2, 5, 8)),
}


@pytest.mark.parametrize("operation", [torch.add, torch.mul, torch.sub], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_an_operand_may_make_the_result_larger(name, operation):
    make, shape, result = LAYERS[name]
    model, x, y = Fused(make(), operation).eval(), torch.randn(shape), torch.randn(result)
    quantized = dbrq.quantize(model, [(x, y)])
    graph, lowered = dbrq.rewrite(quantized, (x, y)), dbrq.lower(quantized, (x, y), backend="onednn")
    one, rest = y[:1], [-1] * (y.dim() - 1)
    calls = [(x[:1], y), (x[:1], one.expand(5, *rest)), (x, one), (x, one.expand(2, *rest)), (x, y[..., :1]),
             (x, y[..., :1].expand(result)), (x[:1], torch.randn(5, *[1] * (y.dim() - 1))), (x[1:], y)]  # fmt: skip
    for a, b in calls * 2:
        expected = graph(a, b)
        torch.testing.assert_close(lowered(a, b), expected, atol=2e-5 * float(expected.abs().max()) + 1e-6, rtol=1e-5)
    with pytest.raises(RuntimeError, match="must match"):
        lowered(x, torch.randn([1] * y.dim()).expand(*[7] * y.dim()))


def negative(x: Tensor) -> Tensor:
    """The same numbers, held as their negatives."""
    return torch._neg_view(-x)


class Conjugated(nn.Module):
    """Holds a tensor with the negative bit, and makes some on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 4)
        self.register_buffer("shift", negative(torch.randn(16)))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.a(x).unflatten(-1, (16, 2)))
        return self.b(z.conj().imag + self.shift) + self.b((z.conj() * z.conj()).imag)


def test_negative_and_conjugate_bits_are_no_part_of_the_memory():
    model, x = Conjugated().eval(), torch.randn(8, 16)
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, negative(x), backend="onednn")
    expected = quantized(x)
    for given in (x, negative(x), torch.complex(torch.randn(8, 16), -x).conj().imag, x):
        assert torch.equal(given, x)
        torch.testing.assert_close(lowered(given), expected, atol=0.02 * float(expected.abs().max()), rtol=0.0)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool1d(F.max_pool1d(self.a(x), 3, 3), 3, 2, 1, 2)


@pytest.mark.parametrize("example", [False, True])
def test_a_result_of_torch_may_have_other_strides_than_when_it_was_traced(example):
    """A dilated ``max_pool1d`` looks whether a dispatch mode is active, as one is while a plan is made."""
    model, x = Pooled().eval(), torch.randn(2, 6, 12)
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, x if example else x[:1], backend="onednn")
    expected = dbrq.rewrite(quantized, x)(x)
    for _ in range(3):
        torch.testing.assert_close(lowered(x), expected, atol=1e-5, rtol=1e-5)


def test_a_result_of_another_shape_is_an_error():
    x = torch.randn(3, 4)
    planned = _as_planned(Value(Buffer(Kind.FRESH, 48, None, 0), (3, 4), torch.float32, (4, 1)), "layer")
    turned = x.t().contiguous().t()
    assert torch.equal(planned(turned), x) and planned(turned).stride() == (4, 1) and planned(x) is x
    for wrong in (x[:2], x.double(), None):
        with pytest.raises(OneDNNError, match="please report"):
            planned(wrong)
