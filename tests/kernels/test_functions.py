"""The door to the kernels: right numbers against float, clear errors, and the traps it is there for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq import kernels
from dbrq.errors import KernelInputError
from dbrq.kernels import (
    NO_POST_OP,
    SUPPORTED_POST_OPS,
    PackedConv,
    PackedLinear,
    PostOp,
    QParams,
    dequantize,
    dynamic_qparams,
    has_exact_int8_dot,
    int8_matmul,
    max_pool,
    pad_mode,
    quantize,
    requantize,
    script,
)
from dbrq.kernels.script import Conv, ConvSum
from tests.helpers.judging import sqnr

PYTHON_BACKENDS = ("onednn", "torchscript")

OUT = QParams(0.1, 100)
CONVS = [  # in, out, kernel, size, groups, padding, stride, dimensions
    (8, 16, 3, 9, 1, 1, 1, 2),
    (8, 16, 3, 9, 2, 0, 2, 2),
    (8, 8, 3, 9, 8, 1, 1, 1),
    (4, 8, 3, 5, 1, 1, 1, 3),
    (8, 16, 1, 9, 1, 0, 1, 2),
    (96, 576, 1, 14, 1, 0, 1, 2),
    (8, 1, 3, 1, 1, 1, 1, 2),
    *((c, 16, k, size, 1, padding, k, n) for c, k, size, padding, n in (  # image as wide as kernel and stride
        (16, 8, 8, 0, 2), (32, 4, 4, 0, 2), (16, 8, 6, 1, 2), (16, 64, 64, 0, 1), (32, 4, 4, 0, 3), (16, 8, 16, 0, 2))),
]  # fmt: skip


def packed(inner, out, k, groups, padding, stride, n):
    top = 127 if has_exact_int8_dot() else 63
    weight = torch.randint(-top, top, (out, inner // groups) + (k,) * n, dtype=torch.int8)
    scale, bias = torch.rand(out) * 0.01 + 1e-3, torch.randn(out)
    conv = PackedConv(weight, scale, bias, [stride] * n, [padding] * n, [1] * n, groups)
    return conv, weight.float() * scale.view(-1, *[1] * (n + 1)), bias


@pytest.mark.parametrize("size", [8, 16, 12])
@pytest.mark.parametrize("summed", [False, True], ids=["", "sum"])
def test_scripted_convolution_of_an_image_as_wide_as_kernel_and_stride(summed, size):
    weight, scale = torch.randint(-63, 63, (16, 16, 8, 8), dtype=torch.int8), torch.rand(16) * 0.01 + 1e-3
    q, qparams = torch.randint(0, 255, (2, 16, size, size), dtype=torch.uint8), QParams(0.02, 117)
    arguments = (weight, scale, torch.randn(16), (8, 8), (0, 0), (1, 1), 1, qparams, None, (2, 16, 8, 8))
    expected = F.conv2d(dequantize(q, qparams), weight * scale.view(-1, 1, 1, 1), arguments[2], 8)
    if summed:
        other = torch.randn_like(expected)
        got = torch.jit.script(ConvSum(*arguments, other=None, owned=False))(q, other)
        expected = expected + other
    else:
        got = torch.jit.script(Conv(*arguments))(q)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero_point", [0, 117])
@pytest.mark.parametrize("case", CONVS, ids=str)
def test_conv(case, zero_point):
    inner, out, k, size, groups, padding, stride, n = case
    conv, weight, bias = packed(inner, out, k, groups, padding, stride, n)
    qparams = QParams(0.02, zero_point)
    for batch in (1, 3):  # another shape through the same object
        q = torch.randint(0, 255, (batch, inner) + (size,) * n, dtype=torch.uint8)
        expected = getattr(F, f"conv{n}d")(dequantize(q, qparams), weight, bias, stride, padding, 1, groups)
        torch.testing.assert_close(conv(q, qparams), expected, rtol=1e-4, atol=1e-4)
        assert (conv(q, qparams, NO_POST_OP, OUT).int() - quantize(expected, OUT).int()).abs().max() <= 1
        bound = conv.bind(q.shape, qparams, NO_POST_OP, OUT)
        if bound is not None:
            assert torch.equal(bound(q), conv(q, qparams, NO_POST_OP, OUT))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("zero_point", [0, 33])
def test_conv_and_sum_leave_the_other_operand_as_it_is(relu, zero_point):
    conv, weight, bias = packed(8, 16, 3, 1, 1, 1, 2)
    qparams, meaning = QParams(0.02, zero_point), QParams(0.05, 3)
    q = torch.randint(0, 255, (2, 8, 7, 7), dtype=torch.uint8)
    other = torch.randint(0, 255, (2, 16, 7, 7), dtype=torch.uint8)
    expected = F.conv2d(dequantize(q, qparams), weight, bias, 1, 1) + dequantize(other, meaning)
    expected = quantize(expected.relu() if relu else expected, OUT)
    assert (conv.add_(q, qparams, other.clone(), meaning, relu, OUT).int() - expected.int()).abs().max() <= 1
    bound = conv.bind_sum(q.shape, qparams, meaning, relu, OUT)
    if bound is not None:
        before = other.clone()
        assert (bound(q, other).int() - expected.int()).abs().max() <= 1
        assert torch.equal(other, before)


FLOAT = {
    "none": lambda x: x, "relu": F.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "tanh": torch.tanh,
    "gelu": F.gelu,
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 6.0), "hardswish": F.hardswish, "swish": F.silu,
}  # fmt: skip
ARGUMENTS = {"leaky_relu": (0.2,), "hardtanh": (0.0, 6.0)}


@pytest.mark.parametrize(("n", "name"), [(n, p) for n, names in SUPPORTED_POST_OPS.items() for p in sorted(names)])
def test_post_ops(n, name):
    post_op = PostOp(name, ARGUMENTS.get(name, ()), "none" if name == "gelu" else "")
    qparams = QParams(0.02, 40)
    if n:
        layer, weight, bias = packed(8, 16, 3, 1, 1, 1, n)
        q = torch.randint(0, 255, (2, 8) + (6,) * n, dtype=torch.uint8)
        expected = FLOAT[name](getattr(F, f"conv{n}d")(dequantize(q, qparams), weight, bias, 1, 1))
    else:
        int8, scale, bias = torch.randint(-60, 60, (16, 8), dtype=torch.int8), torch.rand(16) * 0.01, torch.randn(16)
        layer = PackedLinear(int8, scale, bias)
        q = torch.randint(0, 255, (2, 5, 8), dtype=torch.uint8)
        expected = FLOAT[name](F.linear(dequantize(q, qparams), int8 * scale[:, None], bias))
    assert (layer(q, qparams, post_op, OUT).int() - quantize(expected, OUT).int()).abs().max() <= 1


def test_linear_and_sum():
    int8, scale = torch.randint(-60, 60, (16, 8), dtype=torch.int8), torch.rand(16) * 0.01
    layer, q, qparams = (
        PackedLinear(int8, scale, None),
        torch.randint(0, 255, (3, 8), dtype=torch.uint8),
        QParams(0.02, 9),
    )
    other = torch.randn(3, 16)
    expected = (F.linear(dequantize(q, qparams), int8 * scale[:, None]) + other).relu()
    torch.testing.assert_close(layer.add_(q, qparams, other.clone(), True), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(KernelInputError):  # would corrupt the heap
        layer.add_(q, qparams, torch.randn(3, 15), True)
    with pytest.raises(KernelInputError):
        layer.add_(q, qparams, torch.randn(16, 3).t(), True)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(1, 7, 5, 5, dtype=torch.uint8),
        torch.zeros(8, 5, 5, dtype=torch.uint8),
        torch.zeros(1, 8, 1, 1, dtype=torch.uint8),
        torch.zeros(1, 8, 5, 5),
        torch.zeros(1, 8, 5, 5, dtype=torch.int8),
    ],
    ids=["channels", "rank", "smaller than the kernel", "float", "int8"],
)
def test_bad_inputs_never_reach_a_kernel(bad):
    conv, _, _ = packed(8, 16, 3, 1, 0, 1, 2)
    with pytest.raises(KernelInputError):
        conv(bad, QParams(0.02, 0))
    with pytest.raises(KernelInputError):
        conv.add_(bad, QParams(0.02, 0), torch.zeros(1, 16, 3, 3, dtype=torch.uint8), QParams(1.0, 0), False, OUT)


def test_sum_with_an_accumulator_of_another_shape():
    conv, _, _ = packed(8, 16, 3, 1, 1, 1, 2)
    q = torch.zeros(1, 8, 5, 5, dtype=torch.uint8)
    for shape in ((1, 16, 4, 4), (1, 16, 1, 1), (16, 5, 5)):
        with pytest.raises(KernelInputError):
            conv.add_(q, QParams(0.02, 0), torch.zeros(shape, dtype=torch.uint8), QParams(1.0, 0), False, OUT)
        with pytest.raises(KernelInputError):
            conv.bind_sum(q.shape, QParams(0.02, 0), QParams(1.0, 0), False, OUT)(
                q, torch.zeros(shape, dtype=torch.uint8)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_linear_refuses_other_dtypes(dtype):
    layer = PackedLinear(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4), None)
    with pytest.raises(KernelInputError):
        layer(torch.zeros(2, 8, dtype=dtype), QParams(1.0, 0))
    with pytest.raises(KernelInputError):
        layer(torch.zeros(2, 7, dtype=torch.uint8), QParams(1.0, 0))


def test_quantize_rounds_half_to_even_and_saturates():
    x = torch.tensor([-1e9, -0.5, 0.5, 1.5, 2.5, 254.5, 1e9])
    assert quantize(x, QParams(1.0, 0)).tolist() == [0, 0, 0, 2, 2, 254, 255]
    assert quantize(x, QParams(1.0, 10, 0, 127)).tolist() == [0, 10, 10, 12, 12, 127, 127]
    q = torch.arange(256, dtype=torch.uint8)
    for qparams in (QParams(0.37, 0), QParams(1e-6, 255), QParams(12.5, 113)):
        assert torch.equal(quantize(dequantize(q, qparams), qparams), q)
        assert torch.equal(requantize(q, qparams, qparams), q)


def test_int8_matmul_broadcasts():
    a, b = torch.randint(0, 255, (2, 3, 5, 16), dtype=torch.uint8), torch.randint(0, 255, (3, 16, 7), dtype=torch.uint8)
    qa, qb = QParams(0.1, 13), QParams(0.2, 111)
    torch.testing.assert_close(int8_matmul(a, qa, b, qb), dequantize(a, qa) @ dequantize(b, qb), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_max_pool_of_more_than_a_few_hundred_elements(n):
    q = torch.randint(0, 255, (1, 8) + (20,) * n, dtype=torch.uint8)
    expected = getattr(F, f"max_pool{n}d")(q.float(), 3, 2, 1)
    assert torch.equal(max_pool(q, n, [3] * n, [2] * n, [1] * n, [1] * n, False).float(), expected)
    with pytest.raises(KernelInputError):
        max_pool(q, n, [3] * n, [2] * n, [2] * n, [1] * n, False)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_of_integers(mode):
    x = torch.arange(24.0).view(1, 2, 3, 4)
    assert torch.equal(pad_mode(x.to(torch.uint8), (1, 2, 2, 1), mode).float(), F.pad(x, (1, 2, 2, 1), mode=mode))


@pytest.mark.parametrize("mode, pads", [("circular", (4, 0)), ("reflect", (0, 3))])
def test_pad_modes_refuse_what_torch_refuses(mode, pads):
    """Circular padding of more than the size went round twice."""
    x = torch.zeros(1, 2, 3)
    with pytest.raises(RuntimeError):
        F.pad(x, pads, mode=mode)
    with pytest.raises(KernelInputError, match="padding"):
        pad_mode(x.to(torch.uint8), pads, mode)


def test_dynamic_qparams():
    assert dynamic_qparams(torch.zeros(3), False) == QParams(1.0, 0, 0, 255)
    assert dynamic_qparams(torch.tensor([-1.0, 254.0]), False) == QParams(1.0, 1, 0, 255)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(KernelInputError):
            dynamic_qparams(torch.tensor([0.0, bad]), False)


def test_exact_dot_is_asked_of_the_kernel():
    if torch.cpu._is_vnni_supported():
        assert has_exact_int8_dot()


@pytest.mark.parametrize(
    "model, shape",
    [
        (lambda: nn.Linear(70_000, 2), (2, 70_000)),
        (lambda: nn.Conv2d(1024, 2, 9), (1, 1024, 9, 9)),
        (lambda: nn.Conv2d(2048, 4, 9, groups=2), (1, 2048, 9, 9)),
    ],
    ids=["linear", "conv2d", "groups"],
)
@torch.no_grad()
def test_sums_that_int32_does_not_hold_stay_float(model, shape):
    model = nn.Sequential(model()).eval()
    model[0].weight.uniform_(0.95, 1.0)
    x = torch.rand(shape) * 0.02 + 0.98
    quantized = dbrq.quantize(model, [x])
    (row,) = dbrq.report(quantized).rows
    assert row.precision == "float" and "int32 holds" in row.reason
    for backend in PYTHON_BACKENDS:
        assert sqnr(model(x), dbrq.lower(quantized, x, backend=backend)(x)) > 60


@torch.no_grad()
def test_sums_that_int32_just_holds_are_int8():
    model = nn.Sequential(nn.Linear(65_000, 2)).eval()
    model[0].weight.uniform_(0.99, 1.0)
    x = torch.rand(2, 65_000) * 0.01 + 0.99
    quantized = dbrq.quantize(model, [x])
    assert [row.precision for row in dbrq.report(quantized).rows] == ["int8"]
    for backend in PYTHON_BACKENDS:
        assert sqnr(model(x), dbrq.lower(quantized, x, backend=backend)(x)) > 40


_OPERANDS = {
    "rows repeated": lambda: torch.randint(256, (1, 1, 16)).expand(2, 32, 16),
    "columns repeated": lambda: torch.randint(256, (2, 32, 1)).expand(2, 32, 16),
    "one number": lambda: torch.randint(256, (1, 1, 1)).expand(2, 32, 16),
    "batch repeated": lambda: torch.randint(256, (1, 32, 16)).expand(2, 32, 16),
    "one row, strides 1": lambda: torch.randint(256, (2, 16, 1)).as_strided((2, 1, 16), (16, 1, 1)),
    "one row of a column": lambda: torch.randint(256, (2, 16, 3))[..., :1].transpose(1, 2),
    "part of more": lambda: torch.randint(256, (2, 32, 48))[..., 16:32],
}


@pytest.mark.parametrize("make", _OPERANDS.values(), ids=_OPERANDS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_int8_matmul_of_any_strides(make, side):
    def laid(x):
        """uint8 in the strides of ``x``, ``to`` choosing others."""
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(size, dtype=torch.uint8).as_strided(x.shape, x.stride())
        once = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
        memory[once] = x[once].to(torch.uint8)
        return memory

    a, b = laid(make()), laid(make()).transpose(1, 2)
    if side == "left":
        b = torch.randint(256, (2, 16, 5), dtype=torch.uint8)
    elif side == "right":
        a = torch.randint(256, (2, 7, 16), dtype=torch.uint8)
    expected = (a.double() - 3) @ (b.double() - 5)
    eager = kernels.int8_matmul(a, kernels.QParams(1.0, 3), b, kernels.QParams(1.0, 5))
    scripted = torch.jit.script(script.int8_matmul)(a, b, 1.0, 3, 5)
    torch.testing.assert_close(eager.double(), expected)
    torch.testing.assert_close(scripted.double(), expected)
