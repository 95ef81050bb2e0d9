"""Convolutions and linear layers: what has weights."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import OneDNNError
from ....kernels import QParams, ints, script
from ....kernels.known_faults import plain_dilation
from .. import binding
from ..binding import Alg, Arg, Desc, Primitive
from ..builder import Builder, Unsupported
from ..epilogue import Epilogue, Fitted, Given
from ..layouts import channels_last, same_layout
from ..partitions import BatchNorm, Partition, Weight, With
from ..values import Place, Value
from .common import as_model_float, broadcasts_to, checked, fitted_to, laid_out, rows_of, without_repeats


def folded(weight: Tensor, bias: Tensor | None, b: Builder, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with the batch norm behind it."""
    mean, variance = b.held(norm.mean).double(), b.held(norm.variance).double()
    factor = (variance + norm.epsilon).rsqrt()
    if norm.weight is not None:
        factor = factor * b.held(norm.weight).double()
    shift = -mean if bias is None else bias.double() - mean
    shift = shift * factor
    if norm.bias is not None:
        shift = shift + b.held(norm.bias).double()
    return (weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))).float(), shift.float()


class _Parameters:
    """Weight, bias and scales of a convolution or linear layer, as its primitive wants them."""

    def __init__(self, b: Builder, partition: Partition, x: Given, weight: Any, bias: Any) -> None:
        if not isinstance(weight, Weight) or not (bias is None or isinstance(bias, Weight)):
            raise Unsupported("its weight or bias is computed")
        self.b, self.int8 = b, weight.scale is not None
        if self.int8 and x.qparams is None:
            raise Unsupported("its input is float and its weight int8")
        self.path = weight.path
        self._bias, self._norm = bias, partition.norm
        self.qparams = x.qparams if self.int8 else None
        self.scale_path = weight.scale
        self.held = b.held(weight.path)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.int8 else self.b.dtype

    @property
    def levels(self) -> int:
        """The highest number that the input holds, if it is uint8."""
        return 255 if self.qparams is None else self.qparams.quant_max

    def weight(self) -> Tensor:
        """As torch lays it out."""
        if self.int8:
            return self.held
        weight = self.held if self._norm is None else folded(self.held, None, self.b, self._norm)[0]
        return weight.detach().to(self.b.dtype)

    def bias(self, with_zero_point: bool) -> Value | None:
        """float32 ``[out]``; with what the input's zero point adds up to, where no padding takes part."""
        b, path = self.b, self._bias
        shift = self.qparams.zero_point if self.qparams is not None and with_zero_point else 0
        if path is None and not shift and self._norm is None:
            return None

        def make() -> Tensor:
            bias = None if path is None else b.held(path.path).float()
            if self._norm is not None:
                return folded(self.held, bias, b, self._norm)[1]
            if not shift:
                assert bias is not None
                return bias.contiguous()
            assert self.scale_path is not None and self.qparams is not None
            total = self.held.sum(tuple(range(1, self.held.dim())), dtype=torch.int32)
            # Rounded as the kernel rounds what it sums, so that an input of zeros gives the bias and nothing else.
            moved = (total * -shift).float() * (b.held(self.scale_path) * self.qparams.scale).float()
            return moved if bias is None else moved + bias

        return b.constant(
            ("bias", self.path, self.scale_path, path and path.path, shift, self.qparams, self._norm), make
        )

    def scales(self) -> Value:
        """Per output, the input's scale included."""
        b, path, qparams = self.b, self.scale_path, self.qparams
        assert path is not None and qparams is not None
        return b.constant(("scale", path, qparams.scale), lambda: (b.held(path) * qparams.scale).float().contiguous())

    def known(self, shape: tuple[int, ...]) -> list[Place]:
        """The weight in the layouts that earlier plans took."""
        return self.b.packed.known(self._key(shape))

    def packed(self, wanted: Desc, shape: tuple[int, ...], tensor: Callable[[], Tensor]) -> Place:
        return self.b.packed.pack(self._key(shape), tensor, wanted)

    def _key(self, shape: tuple[int, ...]) -> str:
        return f"{self.path}|{self.dtype}|{shape}|{self._norm}"


def _paddings(padding: Any, kernel: Sequence[int], dilation: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    if padding == "valid":
        return [0] * n, [0] * n
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [t // 2 for t in total], [t - t // 2 for t in total]
    return ints(padding, n), ints(padding, n)


def convolution(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, weight, bias, stride, padding, dilation, groups = arguments[:7]
    n = p.row.ndim
    parameters = _Parameters(b, p, x, weight, bias)
    value = x.value if parameters.int8 else as_model_float(b, x)
    unbatched = len(value.shape) == n + 1
    if unbatched:
        value = value.like((1, *value.shape), (math.prod(value.shape), *value.strides))
    if len(value.shape) != n + 2:
        raise Unsupported("it has another number of dimensions")
    shape = tuple(parameters.held.shape)
    kernel, stride = shape[2:], ints(stride, n)
    dilation = plain_dilation(list(kernel), ints(dilation, n))
    if value.shape[1] != shape[1] * groups:
        raise Unsupported("the number of channels does not fit")
    left, right = _paddings(padding, kernel, dilation, n)
    value = laid_out(b, value, channels_last(value.shape))
    sizes = [
        (size + a + c - d * (k - 1) - 1) // s + 1
        for size, a, c, d, k, s in zip(value.shape[2:], left, right, dilation, kernel, stride, strict=True)
    ]
    if min(sizes) <= 0:
        raise Unsupported("its result is empty")
    out_shape = (value.shape[0], shape[0], *sizes)
    grouped = (groups, shape[0] // groups, *shape[1:]) if groups > 1 else shape
    macs = math.prod(out_shape) * math.prod(shape[1:])
    padded = any(left) or any(right)

    def make(e: Epilogue, src: Value, dst: Value, bias: Value | None, weights: Desc) -> Primitive:
        if parameters.int8:
            e.scale(Arg.WEIGHTS, parameters.scales(), 3 if groups > 1 else 1)
            if padded:
                assert parameters.qparams is not None
                e.zero_point(b, Arg.SRC, parameters.qparams.zero_point)
        return checked(binding.convolution(src.desc, weights, _desc(bias), dst.desc, stride, left, dilation,
                                            e.attributes, right, levels=parameters.levels), macs)  # fmt: skip

    result = _with_weights(
        b, p, operands, value, parameters, make, out_shape, channels_last(out_shape), not padded, macs,
        lambda tensor: tensor.reshape(grouped), grouped, fitted_to(b, out_shape, channels_last(out_shape)),
    )  # fmt: skip
    return result.like(result.shape[1:], result.strides[1:]) if unbatched else result


def _with_weights(b: Builder, p: Partition, operands: list[Any], src: Value, parameters: _Parameters, make: Any,
                  shape: tuple[int, ...], strides: tuple[int, ...], zero_point_in_bias: bool, macs: int,
                  as_packed: Callable[[Tensor], Tensor], weight_shape: tuple[int, ...],
                  fitted: Fitted) -> Value:  # fmt: skip
    """A primitive with weights, and what follows it; a value that is added is written over where nobody reads it."""
    dtype = b.dtype if p.out is None else torch.uint8
    bias = parameters.bias(zero_point_in_bias)
    e, dst = Epilogue(), None
    read = Counter(operands[s.operand].value.buffer for s in p.steps if isinstance(s, With))
    read[src.buffer] += 1
    for i, step in enumerate(p.steps):
        given = operands[step.operand] if isinstance(step, With) and step.alg is Alg.ADD else None
        alone = given is not None and read[given.value.buffer] == 1
        if dst is None and given is not None and alone and _may_overwrite(b, given.value, shape, strides, dtype):
            e.sum(given.value, given.qparams)
            dst = given.value.like(shape, strides)
            dst.buffer.version += 1
        else:
            e.steps(b, p.steps[i : i + 1], operands, fitted)
    e.quantize(b, p.out, by_attributes=True)
    if dst is None:
        dst = b.new(shape, dtype, strides)
    if bias is not None and len(weight_shape) == 2:  # a linear layer's
        bias = bias.like((1, shape[-1]), (shape[-1], 1))
    primitive = make(e, src, dst, bias, Desc.any(weight_shape, parameters.dtype))
    layout = primitive.layout(Arg.WEIGHTS, weight_shape, parameters.dtype)
    known = parameters.known(weight_shape)
    if known and all(place.desc != layout for place in known):
        # Another shape's layout, if the same kernel takes it: rather than the weight a second time. oneDNN may accept
        # a layout without the sums that a zero point needs, and read them behind its end: what it says it reads counts.
        with contextlib.suppress(OneDNNError, Unsupported):
            other = make(e, src, dst, bias, known[0].desc)
            reads = other.layout(Arg.WEIGHTS, weight_shape, parameters.dtype)
            if other.implementation == primitive.implementation and reads == known[0].desc:
                primitive, layout = other, reads
    places: dict[int, Any] = {
        **e.places, Arg.SRC: src, Arg.DST: dst,
        Arg.WEIGHTS: parameters.packed(layout, weight_shape, lambda: as_packed(parameters.weight())),
    }  # fmt: skip
    if bias is not None:
        places[Arg.BIAS] = bias
    b.run(primitive, places, macs)
    return dst


def _desc(value: Value | None) -> Desc | None:
    return None if value is None else value.desc


def _may_overwrite(
    b: Builder, value: Value, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> bool:
    """Whether a value that is added may become the result: it looks like one, and nothing reads it afterwards."""
    return (
        value.dtype is dtype and value.shape == shape and same_layout(shape, value.strides, strides) and b.dies(value)
    )


def deconvolution(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, weight, bias, stride, padding, output_padding, groups, dilation = arguments[:8]
    n = p.row.ndim
    value = as_model_float(b, x)
    if not isinstance(weight, Weight) or len(value.shape) != n + 2:
        raise Unsupported("its weight is computed, or it has no batch")
    held = b.held(weight.path)
    inputs, outputs, *kernel = held.shape
    stride, padding, extra, dilation = (ints(v, n) for v in (stride, padding, output_padding, dilation))
    sizes = [
        (size - 1) * s - 2 * a + d * (k - 1) + e + 1
        for size, s, a, d, k, e in zip(value.shape[2:], stride, padding, dilation, kernel, extra, strict=True)
    ]
    if min(sizes) <= 0:
        raise Unsupported("its result is empty")
    shape = (value.shape[0], outputs * groups, *sizes)
    grouped = (groups, outputs, inputs // groups, *kernel) if groups > 1 else (outputs, inputs, *kernel)
    value = laid_out(b, value, channels_last(value.shape))
    macs = math.prod(value.shape) * outputs * math.prod(kernel)
    e = Epilogue()
    strides = channels_last(shape)
    e.steps(b, p.steps, operands, fitted_to(b, shape, strides))
    e.quantize(b, p.out, by_attributes=False)
    dst = b.new(shape, b.dtype if p.out is None else torch.uint8, strides)
    bias_value = None if bias is None else b.attribute(bias.path)
    primitive = checked(
        binding.convolution(
            value.desc, Desc.any(grouped, b.dtype), _desc(bias_value), dst.desc, stride, padding, dilation,
            e.attributes, [a - e for a, e in zip(padding, extra, strict=True)], transposed=True,
        ), macs,
    )  # fmt: skip
    layout = primitive.layout(Arg.WEIGHTS, grouped, b.dtype)

    def packed() -> Tensor:
        tensor = held.detach().to(b.dtype)
        if groups > 1:
            tensor = tensor.reshape(groups, inputs // groups, outputs, *kernel)
        return tensor.transpose(-n - 2, -n - 1)

    places = {**e.places, Arg.SRC: value, Arg.DST: dst,
              Arg.WEIGHTS: b.packed.pack(f"{weight.path}|{b.dtype}|transposed", packed, layout)}  # fmt: skip
    if bias_value is not None:
        places[Arg.BIAS] = bias_value
    b.run(primitive, places, macs)
    return dst


def linear(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, weight, bias = arguments[:3]
    parameters = _Parameters(b, p, x, weight, bias)
    return _product(b, p, operands, x.value if parameters.int8 else as_model_float(b, x), parameters)


def _product(
    b: Builder, p: Partition, operands: list[Any], value: Value, parameters: _Parameters, scale: Value | None = None
) -> Value:
    """A linear layer, and what follows it.

    Args:
        scale: one, of an input whose own is known in the call only.
    """
    _check_depth(value, parameters)
    width, depth = parameters.held.shape
    rows = rows_of(b, value)
    count = rows.value.shape[0]
    strides = rows.strides(width)
    full = (*value.shape[:-1], width)
    macs = count * width * depth

    def make(e: Epilogue, src: Value, dst: Value, bias: Value | None, weights: Desc) -> Primitive:
        if parameters.int8:
            e.scale(Arg.WEIGHTS, parameters.scales(), 2)
        if scale is not None:
            e.scale(Arg.SRC, scale)
        return checked(
            binding.matmul(src.desc, weights, _desc(bias), dst.desc, e.attributes, levels=parameters.levels), macs
        )

    def fitted(other: Value) -> Value:
        if not broadcasts_to(other, full):
            raise Unsupported("the result has the other operand's shape")
        other = without_repeats(other)
        if math.prod(other.shape) == (other.shape[-1] if other.shape else 1) and other.numel in (1, width):
            return laid_out(b, other, binding.row_major(other.shape)).like((1, other.numel), (other.numel, 1))
        if other.shape != full:
            raise Unsupported("the other operand does not broadcast to rows")
        return laid_out(b, other, strides).like((count, width), (width, 1))

    def flat(given: Any) -> Any:
        """Operands of the result's shape, as rows."""
        if isinstance(given, Given) and given.value.shape == full and same_layout(full, given.value.strides, strides):
            return Given(given.value.like((count, width), (width, 1)), given.qparams)
        return given

    full2, fitted2 = (count, width), lambda other: other if other.shape == (count, width) else fitted(other)
    seen = [flat(o) for o in operands]
    result = _with_weights(b, p, seen, rows.value, parameters, make, full2, (width, 1), True, macs,
                           lambda tensor: tensor.t(), (depth, width), fitted2)  # fmt: skip
    return result.like(full, strides)


def _check_depth(value: Value, parameters: _Parameters) -> None:
    if parameters.held.dim() != 2 or not value.shape or value.shape[-1] != parameters.held.shape[1]:
        raise Unsupported("the shapes do not fit")


class _ByRow(_Parameters):
    """Parameters of a linear layer whose input has qparams that are known in the call only; they are applied to what
    comes of its integers. So one layout of the weight serves one row and many.
    """

    moved: Value | None = None

    def bias(self, with_zero_point: bool) -> Value | None:
        return self.moved

    def own_bias(self) -> Value:
        bias = super().bias(False)
        width = self.held.shape[0]
        return bias if bias is not None else self.b.constant(("no bias", width), lambda: torch.zeros(width))

    def column(self) -> Value:
        """What the layer without its bias makes of a row of ones."""
        b, path = self.b, self.scale_path
        assert path is not None
        return b.constant(("column", self.path, path), lambda: script.of_ones(self.held, b.held(path)))


def linear_by_row(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """The layer of one row is one primitive: its scale is the source's, its zero point in the bias. Behind a primitive
    of several rows torch applies their qparams, since kernels for rows that differ are reference kernels.
    """
    x, weight, bias, levels = arguments
    value = as_model_float(b, x)
    rows = rows_of(b, value).value
    count = rows.shape[0]
    if count > 1 and (p.steps or p.out is not None):
        raise Unsupported("steps behind several rows come after their qparams")
    key = (rows.buffer, rows.offset, rows.shape, rows.strides, "by row", levels)
    q, scale, zero_point = b.derived(key, lambda: b.call(_quantized_rows, (rows, levels), {}))
    parameters = _ByRow(b, p, Given(q, QParams(1.0, 0, 0, levels)), weight, bias)
    _check_depth(q, parameters)
    if count == 1:
        parameters.moved = b.call(_moved, (parameters.own_bias(), parameters.column(), scale, zero_point), {})
        q = q.like(value.shape, binding.row_major(value.shape))
        return _product(b, p, operands, q, parameters, scale.like((1,), (1,)))
    parameters.moved = parameters.own_bias()  # ``rescale_rows`` finds it there
    result = _product(b, p, operands, q, parameters)
    given = (result, scale, zero_point, parameters.column(), parameters.moved)
    b.call(script.rescale_rows, given, {}, writes=True)
    result.buffer.version += 1
    shape = (*value.shape[:-1], result.shape[-1])
    return result.like(shape, binding.row_major(shape))


def _quantized_rows(rows: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    return script.quantize_rows(rows.contiguous(), levels)


def _moved(bias: Tensor, column: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The bias of one row, with what its zero point adds up to: ``[1, out]``."""
    return torch.addcmul(bias, column, zero_point * scale, value=-1)
