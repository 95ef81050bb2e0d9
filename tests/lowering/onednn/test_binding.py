"""The binding to libdnnl: statuses, descriptors, and each primitive against torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbrq.lowering.onednn import binding
from dbrq.lowering.onednn.binding import Alg, Arg, Attributes, Binary, Desc, Eltwise, Memory, Primitive, Sum, row_major
from dbrq.lowering.onednn.layouts import channels_last, in_order, is_dense, same_layout
from dbrq.lowering.onednn.library import _STATUSES, OneDNNError, Unimplemented, failure

# Statuses


@pytest.mark.parametrize(("status", "name"), _STATUSES.items())
def test_statuses_have_onednns_names(status, name):
    error = failure("dnnl_some_call", status)
    assert f"dnnl_some_call failed: {name}" in str(error)
    assert isinstance(error, Unimplemented) is (status == 3)


def test_an_unknown_status_is_shown():
    assert "status 99" in str(failure("dnnl_some_call", 99))


def test_a_failing_call_raises():
    with pytest.raises(OneDNNError, match="dnnl_memory_desc_create_with_strides failed: dnnl_invalid_arguments"):
        Desc.strided((-1, 3), torch.float32, (3, 1))
    with pytest.raises(OneDNNError, match="dnnl_invalid_arguments"):
        binding.eltwise(
            Alg.RELU, Desc.strided((2, 3), torch.float32), Desc.strided((3, 2), torch.float32), 0, 0, Attributes()
        )


def test_a_primitive_that_does_not_exist_is_unimplemented():
    x = Desc.strided((2, 3), torch.int32)
    with pytest.raises(OneDNNError, match=r"dnnl_unimplemented|dnnl_invalid_arguments"):
        binding.softmax(Alg.SOFTMAX, x, x, 1, Attributes())


# Descriptors


def test_descriptors_are_equal_when_their_memory_is():
    a = Desc.strided((2, 3, 4), torch.float32)
    assert a == Desc.strided((2, 3, 4), torch.float32, (12, 4, 1)) and a.strides == (12, 4, 1)
    for other in (
        Desc.strided((2, 3, 4), torch.uint8),
        Desc.strided((2, 3, 4), torch.float32, (1, 2, 6)),
        Desc.strided((2, 12), torch.float32),
        Desc.any((2, 3, 4), torch.float32),
        "text",
    ):
        assert a != other
    with pytest.raises(TypeError):
        hash(a)


@pytest.mark.parametrize("dtype", binding.DTYPES, ids=str)
def test_sizes_in_bytes(dtype):
    each = torch.empty((), dtype=dtype).element_size()
    assert Desc.strided((2, 3, 4), dtype).size == 24 * each
    assert Desc.strided((2, 3), dtype, (10, 1)).size >= 13 * each  # with a gap between its rows


def test_a_part_is_a_box_of_the_same_memory():
    x = torch.arange(24.0).reshape(2, 3, 4)
    part = Desc.strided(x.shape, x.dtype).part((1, 2, 2), (1, 1, 2))
    out = torch.empty(1, 2, 2)
    dst = Desc.strided(out.shape, out.dtype)
    binding.execute(
        binding.reorder(part, dst, Attributes()),
        {Arg.SRC: Memory(part, x.data_ptr()), Arg.DST: Memory(dst, out.data_ptr())},
    )
    assert torch.equal(out, x[1:, 1:, 2:])


@pytest.mark.parametrize("shape", [(2, 8, 4, 5), (1, 8, 4), (3, 1, 2, 4, 5), (1, 1, 1, 1)], ids=str)
def test_layouts_are_torchs(shape):
    x = torch.empty(shape)
    assert row_major(shape) == x.stride() and is_dense(shape, x.stride())
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) in formats:
        last = (
            x.to(memory_format=formats[len(shape)])
            if 1 not in shape
            else torch.empty(shape, memory_format=formats[len(shape)])
        )
        assert same_layout(shape, channels_last(shape), last.stride())
    turned = x.transpose(0, -1)
    assert same_layout(turned.shape, in_order(turned.shape, turned.stride()), turned.stride())
    assert not is_dense((2, 3), (6, 2)) and not is_dense((2, 3), (0, 1)) and is_dense((2, 1, 3), (3, 7, 1))


# Primitives


def desc(x: Tensor) -> Desc:
    return Desc.strided(x.shape, x.dtype, x.stride())


def execute(primitive: Primitive, tensors: Mapping[int, Tensor]) -> None:
    binding.execute(primitive, {arg: Memory(desc(t), t.data_ptr()) for arg, t in tensors.items()})


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def packed(primitive: Primitive, weight: Tensor) -> tuple[Desc, Tensor]:
    """A weight in the layout that a primitive chose."""
    wanted = primitive.layout(Arg.WEIGHTS, weight.shape, weight.dtype)
    held = torch.zeros(wanted.size, dtype=torch.uint8)
    binding.execute(
        binding.reorder(desc(weight), wanted, Attributes()),
        {Arg.SRC: Memory(desc(weight), weight.data_ptr()), Arg.DST: Memory(wanted, held.data_ptr())},
    )
    return wanted, held


CONVOLUTIONS = {
    "plain": (2, 8, 3, {}),
    "1x1": (2, 8, 1, {}),
    "padded": (2, 8, 3, {"padding": 1}),
    "1d": (1, 8, 3, {"padding": 2}),
    "strided": (2, 8, 3, {"stride": 2}),
    "dilated": (2, 8, 3, {"dilation": 2, "padding": 2}),
    "3d": (3, 8, 2, {"padding": 1}),
    "groups": (2, 8, 3, {"groups": 2, "padding": 1}),
    "depthwise": (2, 8, 3, {"groups": 8, "padding": 1}),
}


@pytest.mark.parametrize("zero_point", [0, 3, 255])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_int8_convolution_is_exact(name, zero_point):
    """Sums of products of integers, with scales that are powers of two: no rounding anywhere."""
    n, channels, kernel, options = CONVOLUTIONS[name]
    groups, padding = options.get("groups", 1), options.get("padding", 0)
    x = torch.randint(0, 256, (2, channels, *(9, 7, 6)[:n]), dtype=torch.uint8)
    x = x.as_strided(x.shape, channels_last(x.shape)) if n else x
    weight = torch.randint(-128, 128, (16, channels // groups, *[kernel] * n)).to(torch.int8)
    bias = torch.randint(-50, 50, (16,)).float()
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[n]
    expected = function(x.double() - zero_point, weight.double(), None, **options) * 0.25 + bias.double().view(
        -1, *[1] * n
    )
    dst = torch.empty_strided(expected.shape, channels_last(expected.shape))
    grouped = weight.reshape(groups, 16 // groups, *weight.shape[1:]) if groups > 1 else weight
    zero_points = {Arg.SRC: 0} if zero_point else {}
    each = [options.get(key, default) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    primitive = binding.convolution(
        desc(x),
        Desc.any(grouped.shape, torch.int8),
        desc(bias),
        desc(dst),
        *([v] * n for v in each),
        Attributes({Arg.WEIGHTS: 3 if groups > 1 else 1}, zero_points),
    )
    wanted, held = packed(primitive, grouped)
    scales = torch.full((16,), 0.25)
    memories = {Arg.SRC: x, Arg.BIAS: bias, Arg.DST: dst, Arg.SCALES | Arg.WEIGHTS: scales}
    if zero_point:
        memories[Arg.ZERO_POINTS | Arg.SRC] = numbers(zero_point, dtype=torch.int32)
    binding.execute(
        primitive,
        {
            **{a: Memory(desc(t), t.data_ptr()) for a, t in memories.items()},
            Arg.WEIGHTS: Memory(wanted, held.data_ptr()),
        },
    )
    assert padding >= 0 and torch.equal(dst.double(), expected)
    assert not primitive.is_reference


@pytest.mark.parametrize(
    "shapes", [((5, 16), (16, 12)), ((3, 5, 16), (3, 16, 12)), ((2, 3, 5, 16), (1, 3, 16, 4))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_matmul(shapes, dtype):
    one, two = (torch.randint(0, 9, s).to(torch.int8).to(dtype) for s in shapes)
    two = two.to(torch.int8) - 4 if dtype is torch.uint8 else two
    expected = (one.double() @ two.double() + 3.0).relu()
    dst, bias = torch.empty(expected.shape), torch.full((1,) * (expected.dim() - 1) + expected.shape[-1:], 3.0)
    primitive = binding.matmul(desc(one), desc(two), desc(bias), desc(dst), Attributes(post_ops=[Eltwise(Alg.RELU)]))
    execute(primitive, {Arg.SRC: one, Arg.WEIGHTS: two, Arg.BIAS: bias, Arg.DST: dst})
    assert torch.equal(dst.double(), expected)


def test_destination_scale_and_zero_point_round_to_even():
    one, two = (
        torch.eye(4),
        torch.tensor([[0.5, 1.5, 2.5, -1.5], [300, -300, 7, 8], [0, 1, 2, 3], [-0.5, 3.5, 4.5, 254.0]]),
    )
    dst = torch.empty(4, 4, dtype=torch.uint8)
    x, w = one.to(torch.uint8), torch.randint(-9, 9, (4, 4)).to(torch.int8)
    primitive = binding.matmul(desc(x), desc(w), None, desc(dst), Attributes({Arg.DST: 0}, {Arg.DST: 0}))
    execute(
        primitive,
        {
            Arg.SRC: x,
            Arg.WEIGHTS: w,
            Arg.DST: dst,
            Arg.SCALES | Arg.DST: numbers(2.0),
            Arg.ZERO_POINTS | Arg.DST: numbers(6, dtype=torch.int32),
        },
    )
    assert two.numel() and torch.equal(dst.double(), (w.double() / 2 + 6).round().clamp(0, 255))


ORDERS = {"row major": (24, 12, 4, 1), "channels last": (24, 1, 8, 2), "turned": (1, 2, 4, 12)}


@pytest.mark.parametrize("zero_point", [0, 7, 200])
@pytest.mark.parametrize("order", ORDERS)
def test_reorder_quantizes_and_dequantizes(order, zero_point):
    x = torch.randn(2, 2, 3, 4).mul(3)
    levels = ((x / 0.25).round() + zero_point).clamp(0, 255)
    exact = (levels - zero_point) * 0.25
    dst = torch.empty_strided(x.shape, ORDERS[order], dtype=torch.uint8)
    zero_points = {Arg.DST: 0} if zero_point else {}
    places = {Arg.SRC: exact, Arg.DST: dst, Arg.SCALES | Arg.DST: numbers(0.25)}
    if zero_point:
        places[Arg.ZERO_POINTS | Arg.DST] = numbers(zero_point, dtype=torch.int32)
    execute(binding.reorder(desc(exact), desc(dst), Attributes({Arg.DST: 0}, zero_points)), places)
    assert torch.equal(dst.float(), levels)
    back = torch.empty(x.shape)
    places = {Arg.SRC: dst, Arg.DST: back, Arg.SCALES | Arg.SRC: numbers(0.25)}
    zero_points = {Arg.SRC: 0} if zero_point else {}
    if zero_point:
        places[Arg.ZERO_POINTS | Arg.SRC] = numbers(zero_point, dtype=torch.int32)
    execute(binding.reorder(desc(dst), desc(back), Attributes({Arg.SRC: 0}, zero_points)), places)
    assert torch.equal(back, exact)


#: Algorithm, alpha, beta, torch's function, what is given to it.
FUNCTIONS: dict[str, tuple[Alg, float, float, Callable, Callable]] = {
    "relu": (Alg.RELU, 0, 0, F.relu, torch.randn),
    "leaky_relu": (Alg.RELU, 0.2, 0, lambda x: F.leaky_relu(x, 0.2), torch.randn),
    "tanh": (Alg.TANH, 0, 0, torch.tanh, torch.randn),
    "elu": (Alg.ELU, 0.7, 0, lambda x: F.elu(x, 0.7), torch.randn),
    "square": (Alg.SQUARE, 0, 0, torch.square, torch.randn),
    "abs": (Alg.ABS, 0, 0, torch.abs, torch.randn),
    "sqrt": (Alg.SQRT, 0, 0, torch.sqrt, torch.rand),
    "linear": (Alg.LINEAR, 2.0, -0.5, lambda x: x * 2 - 0.5, torch.randn),
    "hardsigmoid": (Alg.HARDSIGMOID, 1 / 6, 0.5, F.hardsigmoid, lambda *s: torch.randn(*s) * 4),
    "logistic": (Alg.LOGISTIC, 0, 0, torch.sigmoid, torch.randn),
    "exp": (Alg.EXP, 0, 0, torch.exp, torch.randn),
    "gelu_tanh": (Alg.GELU_TANH, 0, 0, lambda x: F.gelu(x, approximate="tanh"), torch.randn),
    "gelu_erf": (Alg.GELU_ERF, 0, 0, F.gelu, torch.randn),
    "swish": (Alg.SWISH, 1.0, 0, F.silu, torch.randn),
    "log": (Alg.LOG, 0, 0, torch.log, lambda *s: torch.rand(*s) + 0.1),
    "clip": (Alg.CLIP, -0.3, 0.8, lambda x: x.clamp(-0.3, 0.8), torch.randn),
    "pow": (Alg.POW, 2.0, -1.0, lambda x: 2 / x, lambda *s: torch.rand(*s) + 0.5),
    "round": (Alg.ROUND, 0, 0, torch.round, lambda *s: torch.arange(-8.0, 8.0).div(2).expand(s[0], -1).contiguous()),
    "mish": (Alg.MISH, 0, 0, F.mish, torch.randn),
    "hardswish": (Alg.HARDSWISH, 1 / 6, 0.5, F.hardswish, lambda *s: torch.randn(*s) * 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    alg, alpha, beta, function, draw = FUNCTIONS[name]
    x = draw(7, 16)
    dst = torch.empty_like(x)
    execute(binding.eltwise(alg, desc(x), desc(dst), alpha, beta, Attributes()), {Arg.SRC: x, Arg.DST: dst})
    torch.testing.assert_close(dst, function(x), atol=1e-5, rtol=1e-5)


def test_every_function_of_one_value_is_tested():
    tested = {alg for alg, *_ in FUNCTIONS.values()}
    assert {alg for alg in Alg if 0x20 <= alg < 0x100} <= tested


@pytest.mark.xfail(strict=True, reason="oneDNN's relu and clip give a bound for NaN (docs/onednn.md)")
@pytest.mark.parametrize("alg", [Alg.RELU, Alg.CLIP])
def test_not_a_number_passes(alg):
    x, dst, most = numbers(math.nan, -1.0, 2.0, math.inf), torch.empty(4), 3.0 if alg is Alg.CLIP else 0.0
    execute(binding.eltwise(alg, desc(x), desc(dst), 0.0, most, Attributes()), {Arg.SRC: x, Arg.DST: dst})
    assert dst[1:].tolist() == [0.0, 2.0, most or math.inf] and dst[0].isnan()


OPERATIONS = {"add": Alg.ADD, "mul": Alg.MUL, "maximum": Alg.MAX, "minimum": Alg.MIN, "div": Alg.DIV, "sub": Alg.SUB}


@pytest.mark.parametrize("other", [(2, 3, 4, 5), (1, 3, 1, 1), (1, 1, 1, 1), (2, 3, 1, 5)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name, other):
    x, y = torch.randn(2, 3, 4, 5), torch.rand(other) + 0.5
    dst = torch.empty_like(x)
    primitive = binding.binary(OPERATIONS[name], desc(x), desc(y), desc(dst), Attributes())
    execute(primitive, {Arg.SRC: x, Arg.SRC_1: y, Arg.DST: dst})
    torch.testing.assert_close(dst, getattr(torch, name)(x, y))


def test_operation_of_integers_with_scales():
    x, y = (torch.randint(0, 256, (4, 32), dtype=torch.uint8) for _ in range(2))
    dst = torch.empty(4, 32)
    attributes = Attributes({Arg.SRC: 0, Arg.SRC_1: 0}, post_ops=[Eltwise(Alg.LINEAR, 1.0, -3.0)])
    execute(
        binding.binary(Alg.ADD, desc(x), desc(y), desc(dst), attributes),
        {
            Arg.SRC: x,
            Arg.SRC_1: y,
            Arg.DST: dst,
            Arg.SCALES | Arg.SRC: numbers(0.5),
            Arg.SCALES | Arg.SRC_1: numbers(0.25),
        },
    )
    assert torch.equal(dst, x * 0.5 + y * 0.25 - 3.0)


def test_post_ops_apply_in_order():
    x, w, other = torch.randn(4, 8), torch.randn(8, 16), torch.randn(4, 16)
    dst = torch.randn(4, 16)
    expected = torch.tanh((x @ w + 0.5 * dst) * other)
    attributes = Attributes(post_ops=[Sum(0.5), Binary(Alg.MUL, desc(other)), Eltwise(Alg.TANH)])
    primitive = binding.matmul(desc(x), desc(w), None, desc(dst), attributes)
    execute(primitive, {Arg.SRC: x, Arg.WEIGHTS: w, Arg.DST: dst, Arg.POST_OP * 2 | Arg.SRC_1: other})
    torch.testing.assert_close(dst, expected, atol=1e-5, rtol=1e-5)


def test_a_sum_honours_scale_zero_point_and_dtype():
    x, w = torch.randint(0, 9, (4, 8), dtype=torch.uint8), torch.randint(-9, 9, (8, 16)).to(torch.int8)
    dst = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    expected = (x.double() @ w.double() + 0.5 * (dst.double() - 9)).round().clamp(0, 255)
    primitive = binding.matmul(desc(x), desc(w), None, desc(dst), Attributes(post_ops=[Sum(0.5, 9, torch.uint8)]))
    execute(primitive, {Arg.SRC: x, Arg.WEIGHTS: w, Arg.DST: dst})
    assert torch.equal(dst.double(), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("alg", "function"), [(Alg.SOFTMAX, torch.softmax), (Alg.LOG_SOFTMAX, torch.log_softmax)])
def test_softmax(alg, function, axis):
    x = torch.randn(3, 7, 16)
    dst = torch.empty_like(x)
    execute(binding.softmax(alg, desc(x), desc(dst), axis, Attributes()), {Arg.SRC: x, Arg.DST: dst})
    torch.testing.assert_close(dst, function(x, axis), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_layer_norm(scale, shift):
    x, w, b = torch.randn(5, 16), torch.rand(16) + 0.5, torch.randn(16)
    dst = torch.empty_like(x)
    places = {Arg.SRC: x, Arg.DST: dst, **({Arg.SCALE: w} if scale else {}), **({Arg.SHIFT: b} if shift else {})}
    execute(binding.layer_norm(desc(x), desc(dst), 1e-5, scale, shift, Attributes()), places)
    torch.testing.assert_close(
        dst, F.layer_norm(x, (16,), w if scale else None, b if shift else None), atol=1e-5, rtol=1e-5
    )


POOLS: dict[str, tuple[Alg, Callable]] = {
    "max": (Alg.POOLING_MAX, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "average": (Alg.POOLING_AVG_INCLUDE_PADDING, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "average, padding left out": (
        Alg.POOLING_AVG_EXCLUDE_PADDING,
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_pool(name, dtype):
    alg, function = POOLS[name]
    x = torch.randint(0, 256, (2, 16, 9, 9)).to(dtype).contiguous(memory_format=torch.channels_last)
    expected = function(x.float())
    dst = torch.empty(expected.shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    primitive = binding.pooling(alg, desc(x), desc(dst), [2, 2], [3, 3], [1, 1], [1, 1], [1, 1], Attributes())
    execute(primitive, {Arg.SRC: x, Arg.DST: dst})
    assert (dst.float() - expected).abs().max() <= (0.5 if dtype is torch.uint8 else 1e-4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat(axis):
    parts = [torch.randn([n if i == axis else size for i, size in enumerate((2, 3, 4))]) for n in (1, 3, 2)]
    expected = torch.cat(parts, axis)
    dst = torch.empty_like(expected)
    primitive = binding.concat([desc(p) for p in parts], desc(dst), axis, Attributes())
    execute(primitive, {**{Arg.MULTIPLE_SRC + i: p for i, p in enumerate(parts)}, Arg.DST: dst})
    assert torch.equal(dst, expected)


@pytest.mark.parametrize(("alg", "mode"), [(Alg.NEAREST, "nearest-exact"), (Alg.LINEAR_RESAMPLING, "bilinear")])
def test_resampling(alg, mode):
    x = torch.randn(2, 16, 5, 6)
    expected = F.interpolate(x, scale_factor=2, mode=mode)
    dst = torch.empty_like(expected)
    execute(binding.resampling(alg, desc(x), desc(dst), [2.0, 2.0], Attributes()), {Arg.SRC: x, Arg.DST: dst})
    torch.testing.assert_close(dst, expected, atol=1e-5, rtol=1e-5)


def test_transposed_convolution():
    x, weight, bias = torch.randn(2, 4, 7, 6), torch.randn(4, 8, 3, 3), torch.randn(8)
    expected = F.conv_transpose2d(x, weight, bias, 2, 1, 1)
    dst, turned = torch.empty_like(expected), weight.transpose(0, 1).contiguous()
    primitive = binding.convolution(
        desc(x), desc(turned), desc(bias), desc(dst), [2, 2], [1, 1], [1, 1], Attributes(), [0, 0], transposed=True
    )
    execute(primitive, {Arg.SRC: x, Arg.WEIGHTS: turned, Arg.BIAS: bias, Arg.DST: dst})
    torch.testing.assert_close(dst, expected, atol=1e-5, rtol=1e-5)


def test_primitives_know_what_they_are():
    x, w = Desc.strided((64, 64), torch.uint8), Desc.any((64, 64), torch.int8)
    primitive = binding.matmul(x, w, None, Desc.strided((64, 64), torch.float32), Attributes())
    assert (primitive.kind == "matmul" and "int8" in primitive.implementation) or "brg" in primitive.implementation
    assert not primitive.is_reference and primitive.scratchpad >= 0


def test_an_argument_that_a_primitive_has_not_is_an_error():
    x = Desc.strided((64, 64), torch.float32)
    with pytest.raises(OneDNNError):
        binding.matmul(x, x, None, x, Attributes()).layout(Arg.SHIFT, (64,), torch.float32)
