"""How each op of the op table becomes primitives: one emitter a row, or a few rows.

An emitter gets the builder, the partition and its head's arguments, and returns the value of the result. It raises
``Unsupported`` where no primitive fits; torch then runs the partition's nodes (docs/onednn.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import QParams, ints
from . import binding
from .binding import Alg, Arg, Desc, Primitive
from .builder import Builder, Unsupported
from .epilogue import Epilogue, Fitted, Given
from .layouts import Rows, channels_last, in_order, is_dense, same_layout
from .library import OneDNNError
from .partitions import BatchNorm, Function, Operand, Partition, Step, Weight, With
from .values import Kind, Place, Value

Emitter = Callable[[Builder, Partition, list[Any], list[Any]], Value]

_FLOATS = (torch.float32, torch.bfloat16)
#: Up to this many operations oneDNN's reference kernels are as good as any.
_SMALL = 1000


def emit(b: Builder, partition: Partition, inputs: Sequence[Any]) -> Value:
    """Compile a partition for its inputs, execute it, and return its result.

    Raises:
        Unsupported: no primitive fits.
    """
    operands = [
        Given(value, operand.qparams) if isinstance(value, Value) else value
        for value, operand in zip(inputs, partition.operands, strict=True)
    ]
    for given in operands:
        if isinstance(given, Given):
            expected = (torch.uint8,) if given.qparams else (*_FLOATS, torch.bool, torch.uint8)
            if given.value.dtype not in expected:
                raise Unsupported(f"an operand is {given.value.dtype}")
            if not given.value.numel:
                raise Unsupported("an operand is empty")
    operands = [_expressible(b, given) for given in operands]

    def resolved(argument: Any) -> Any:
        if isinstance(argument, Operand):
            return operands[argument.index]
        if isinstance(argument, (list, tuple)):
            return [resolved(item) for item in argument]
        return argument

    arguments = [resolved(a) for a in partition.arguments]
    try:
        return _emitted(b, partition, arguments, operands)
    except Unsupported:
        if len(partition.steps) + (partition.out is not None) + (partition.row.name != "elementwise") < 2:
            raise
    return _in_parts(b, partition, arguments, operands)


def _emitted(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    try:
        result = EMITTERS[p.row.name](b, p, arguments, operands)
    except OneDNNError as error:
        raise Unsupported(str(error)) from error
    if p.out is not None and result.dtype is not torch.uint8:  # not by the primitive itself
        return _quantized(b, result, p.out)
    return result


def _in_parts(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """A primitive for the head, and one for each step."""
    result = arguments[0]
    if p.row.name != "elementwise":
        result = Given(_emitted(b, dataclasses.replace(p, steps=(), out=None), arguments, operands))
    try:
        for step in p.steps:
            result = Given(_chain(b, result, [step], operands, None))
    except OneDNNError as error:
        raise Unsupported(str(error)) from error
    return result.value if p.out is None else _quantized(b, _float(b, result), p.out)


def emit_conversion(b: Builder, value: Value, qparams: QParams, to_int8: bool) -> Value:
    """Quantize a float value, or dequantize a uint8 one.

    Raises:
        Unsupported: it has another type, or is empty.
    """
    if not value.numel or value.dtype not in (_FLOATS if to_int8 else (torch.uint8,)):
        raise Unsupported(f"it reads {value.dtype}")
    value = _expressible(b, Given(value)).value
    return _quantized(b, value, qparams) if to_int8 else b.as_float(value, qparams)


def _expressible(b: Builder, given: Any) -> Any:
    """An operand in a layout that oneDNN takes: gaps between rows must hold whole rows."""
    if not isinstance(given, Given):
        return given
    step = 0
    for stride, size in sorted(
        (s, n) for s, n in zip(given.value.strides, given.value.shape, strict=True) if n > 1 and s
    ):
        if stride < step:
            return Given(b.call(torch.clone, (given.value,), {"memory_format": torch.contiguous_format}), given.qparams)
        step = stride * size
    return given


def _float(b: Builder, given: Any) -> Value:
    """An operand in the float dtype of the model's inside."""
    if isinstance(given, Weight):
        return b.attribute(given.path)
    if not isinstance(given, Given):
        raise Unsupported("an operand is no tensor")
    value = b.as_float(given.value, given.qparams)
    if value.dtype not in _FLOATS:
        raise Unsupported(f"an operand is {value.dtype}")
    return value if value.dtype is b.dtype else b.reordered(value, b.dtype, value.strides)


def _checked(primitive: Primitive, macs: int = 0) -> Primitive:
    if primitive.is_reference and macs > _SMALL:
        raise Unsupported(f"oneDNN has only {primitive.implementation} for it")
    return primitive


def _laid_out(b: Builder, value: Value, strides: tuple[int, ...]) -> Value:
    """The value in a given layout."""
    if same_layout(value.shape, value.strides, strides):
        return value.like(value.shape, strides)
    return b.reordered(value, value.dtype, strides)


def _dense(b: Builder, value: Value) -> Value:
    """The value without gaps."""
    if is_dense(value.shape, value.strides):
        return value
    return b.reordered(value, value.dtype, in_order(value.shape, value.strides) if 0 not in value.strides
                       else binding.row_major(value.shape))  # fmt: skip


# Convolutions


def _folded(weight: Tensor, bias: Tensor | None, b: Builder, norm: BatchNorm) -> tuple[Tensor, Tensor]:
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

    def weight(self) -> Tensor:
        """As torch lays it out."""
        if self.int8:
            return self.held
        weight = self.held if self._norm is None else _folded(self.held, None, self.b, self._norm)[0]
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
                return _folded(self.held, bias, b, self._norm)[1]
            if not shift:
                assert bias is not None
                return bias.contiguous()
            assert self.scale_path is not None and self.qparams is not None
            total = self.held.sum(tuple(range(1, self.held.dim())), dtype=torch.int32)
            moved = total.double() * b.held(self.scale_path).double() * (-shift * self.qparams.scale)
            return (moved if bias is None else moved + bias).float()

        return b.constant(("bias", self.path, None if path is None else path.path, shift, self.qparams), make)

    def scales(self) -> Value:
        """Per output, the input's scale included."""
        b, path, qparams = self.b, self.scale_path, self.qparams
        assert path is not None and qparams is not None
        return b.constant(("scale", path, qparams.scale), lambda: (b.held(path) * qparams.scale).float().contiguous())

    def packed(self, wanted: Desc, tensor: Callable[[], Tensor]) -> Place:
        key = f"{self.path}|{self.dtype}|{tuple(wanted.shape or ())}|{self._norm}"
        return self.b.packed_weight(key, tensor, wanted)


def _paddings(padding: Any, kernel: Sequence[int], dilation: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    if padding == "valid":
        return [0] * n, [0] * n
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [t // 2 for t in total], [t - t // 2 for t in total]
    return ints(padding, n), ints(padding, n)


def _convolution(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, weight, bias, stride, padding, dilation, groups = arguments[:7]
    n = p.row.ndim
    parameters = _Parameters(b, p, x, weight, bias)
    value = x.value if parameters.int8 else _float(b, x)
    unbatched = len(value.shape) == n + 1
    if unbatched:
        value = value.like((1, *value.shape), (math.prod(value.shape), *value.strides))
    if len(value.shape) != n + 2:
        raise Unsupported("it has another number of dimensions")
    shape = tuple(parameters.held.shape)
    kernel, stride, dilation = shape[2:], ints(stride, n), ints(dilation, n)
    if value.shape[1] != shape[1] * groups:
        raise Unsupported("the number of channels does not fit")
    left, right = _paddings(padding, kernel, dilation, n)
    value = _laid_out(b, value, channels_last(value.shape))
    sizes = [
        (size + a + c - d * (k - 1) - 1) // s + 1
        for size, a, c, d, k, s in zip(value.shape[2:], left, right, dilation, kernel, stride, strict=True)
    ]
    if min(sizes) <= 0:
        raise Unsupported("its result is empty")
    out_shape = (value.shape[0], shape[0], *sizes)
    grouped = (groups, shape[0] // groups, *shape[1:]) if groups > 1 else shape
    macs = math.prod(out_shape) * math.prod(shape[1:])
    wanted = Desc.any(grouped, parameters.dtype)
    padded = any(left) or any(right)

    def make(e: Epilogue, src: Value, dst: Value, bias: Value | None) -> Primitive:
        if parameters.int8:
            e.scale(Arg.WEIGHTS, parameters.scales(), 3 if groups > 1 else 1)
            if padded:
                e.zero_point(b, Arg.SRC, parameters.qparams.zero_point)  # type: ignore[union-attr]
        return _checked(binding.convolution(src.desc, wanted, bias and bias.desc, dst.desc, stride, left, dilation,
                                            e.attributes, right), macs)  # fmt: skip

    result = _with_weights(
        b, p, operands, value, parameters, make, out_shape, channels_last(out_shape), not padded, macs,
        lambda tensor: tensor.reshape(grouped), grouped, _fitted_to(b, out_shape, channels_last(out_shape), unbatched),
    )  # fmt: skip
    return result.like(result.shape[1:], result.strides[1:]) if unbatched else result


def _fitted_to(b: Builder, shape: tuple[int, ...], strides: tuple[int, ...], unbatched: bool = False) -> Any:
    """How an operand is seen by a primitive whose result has this shape and layout."""

    def fitted(other: Value) -> Value:
        sizes, steps = other.shape, other.strides
        missing = len(shape) - len(sizes)
        if missing < 0:
            raise Unsupported("the other operand has more dimensions")
        if missing:
            other = other.like((1,) * missing + sizes, (math.prod(sizes),) * missing + steps)
        other = _without_repeats(other)
        if any(m not in (1, n) for m, n in zip(other.shape, shape, strict=True)):
            raise Unsupported("the other operand does not broadcast to the result")
        if other.shape == shape:
            return _laid_out(b, other, strides)
        return _laid_out(b, other, in_order(other.shape, strides))

    return fitted


def _without_repeats(value: Value) -> Value:
    """Axes along which a value is repeated, as axes of size 1."""
    if 0 not in value.strides:
        return value
    shape = tuple(1 if stride == 0 else size for size, stride in zip(value.shape, value.strides, strict=True))
    return value.like(shape, tuple(stride or 1 for stride in value.strides))


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
        if dst is None and alone and _may_overwrite(b, given.value, shape, strides, dtype):
            e.sum(given.value, given.qparams)
            dst = given.value.like(shape, strides)
        else:
            e.steps(b, p.steps[i : i + 1], operands, fitted)
    e.quantize(b, p.out, by_attributes=True)
    if dst is None:
        dst = b.new(shape, dtype, strides)
    if bias is not None and len(weight_shape) == 2:  # a linear layer's
        bias = bias.like((1, shape[-1]), (shape[-1], 1))
    primitive = make(e, src, dst, bias)
    layout = primitive.layout(Arg.WEIGHTS, weight_shape, parameters.dtype)
    places: dict[int, Any] = {
        **e.places, Arg.SRC: src, Arg.DST: dst,
        Arg.WEIGHTS: parameters.packed(layout, lambda: as_packed(parameters.weight())),
    }  # fmt: skip
    if bias is not None:
        places[Arg.BIAS] = bias
    b.run(primitive, places, macs)
    return dst


def _may_overwrite(
    b: Builder, value: Value, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> bool:
    """Whether a value that is added may become the result: it looks like one, and nothing reads it afterwards."""
    return (
        value.dtype is dtype and value.shape == shape and same_layout(shape, value.strides, strides) and b.dies(value)
    )


def _deconvolution(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, weight, bias, stride, padding, output_padding, groups, dilation = arguments[:8]
    n = p.row.ndim
    value = _float(b, x)
    if not isinstance(weight, Weight) or len(value.shape) != n + 2:
        raise Unsupported("its weight is computed, or it has no batch")
    held = b.held(weight.path)
    inputs, outputs, *kernel = held.shape
    stride, padding, extra, dilation = (ints(v, n) for v in (stride, padding, output_padding, dilation))
    sizes = [
        (size - 1) * s - 2 * a + d * (k - 1) + e + 1
        for size, s, a, d, k, e in zip(value.shape[2:], stride, padding, dilation, kernel, extra, strict=True)
    ]
    shape = (value.shape[0], outputs * groups, *sizes)
    grouped = (groups, outputs, inputs // groups, *kernel) if groups > 1 else (outputs, inputs, *kernel)
    value = _laid_out(b, value, channels_last(value.shape))
    macs = math.prod(value.shape) * outputs * math.prod(kernel)
    e = Epilogue()
    strides = channels_last(shape)
    e.steps(b, p.steps, operands, _fitted_to(b, shape, strides))
    e.quantize(b, p.out, by_attributes=False)
    dst = b.new(shape, b.dtype if p.out is None else torch.uint8, strides)
    bias_value = None if bias is None else b.attribute(bias.path)
    primitive = _checked(
        binding.convolution(
            value.desc, Desc.any(grouped, b.dtype), bias_value and bias_value.desc, dst.desc, stride, padding, dilation,
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
              Arg.WEIGHTS: b.packed_weight(f"{weight.path}|{b.dtype}|transposed", packed, layout)}  # fmt: skip
    if bias_value is not None:
        places[Arg.BIAS] = bias_value
    b.run(primitive, places, macs)
    return dst


# Linear layers and matmuls


def _rows(b: Builder, value: Value) -> Rows:
    rows = Rows.of(value)
    return rows if rows is not None else Rows.of(b.reordered(value, value.dtype, binding.row_major(value.shape)))  # type: ignore[return-value]


def _linear(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, weight, bias = arguments[:3]
    parameters = _Parameters(b, p, x, weight, bias)
    value = x.value if parameters.int8 else _float(b, x)
    if parameters.held.dim() != 2 or not value.shape or value.shape[-1] != parameters.held.shape[1]:
        raise Unsupported("the shapes do not fit")
    width, depth = parameters.held.shape
    rows = _rows(b, value)
    count = rows.value.shape[0]
    strides = rows.strides(width)
    full = (*value.shape[:-1], width)
    wanted = Desc.any((depth, width), parameters.dtype)
    macs = count * width * depth

    def make(e: Epilogue, src: Value, dst: Value, bias: Value | None) -> Primitive:
        if parameters.int8:
            e.scale(Arg.WEIGHTS, parameters.scales(), 2)
        return _checked(binding.matmul(src.desc, wanted, bias and bias.desc, dst.desc, e.attributes), macs)

    def fitted(other: Value) -> Value:
        other = _without_repeats(other)
        if math.prod(other.shape) == (other.shape[-1] if other.shape else 1) and other.numel in (1, width):
            return other.like((1, other.numel), (other.numel, 1))
        if other.shape != full:
            raise Unsupported("the other operand does not broadcast to rows")
        return _laid_out(b, other, strides).like((count, width), (width, 1))

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


def _matmul(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    left, right = arguments[:2]
    if not isinstance(left, Given) or not isinstance(right, Given):
        raise Unsupported("an operand is a parameter")
    int8 = left.qparams is not None and right.qparams is not None
    a, w = (left.value, right.value) if int8 else (_float(b, left), _float(b, right))
    if len(a.shape) < 2 or len(w.shape) < 2 or a.shape[-1] != w.shape[-2]:
        raise Unsupported("an operand is a vector")
    ndim = max(len(a.shape), len(w.shape), 3)
    a, w = (_at_rank(v, ndim) for v in (a, w))
    batch = tuple(max(m, n) for m, n in zip(a.shape[:-2], w.shape[:-2], strict=True))
    shape = (*batch, a.shape[-2], w.shape[-1])
    macs = math.prod(shape) * a.shape[-1]
    e = Epilogue()
    a, w = (_plain_matrix(b, _without_repeats(v)) for v in (a, w))
    if int8:
        qa, qb = left.qparams, right.qparams
        w = _signed(b, w)
        e.scale(Arg.SRC, b.numbers(qa.scale))
        e.scale(Arg.WEIGHTS, b.numbers(qb.scale))
        e.zero_point(b, Arg.SRC, qa.zero_point)
        e.zero_point(b, Arg.WEIGHTS, qb.zero_point - 128)
    strides = binding.row_major(shape)
    e.steps(b, p.steps, operands, _fitted_to(b, shape, strides))
    e.quantize(b, p.out, by_attributes=int8)
    dst = b.new(shape, b.dtype if p.out is None else torch.uint8, strides)
    b.run(_checked(binding.matmul(a.desc, w.desc, None, dst.desc, e.attributes), macs),
          {**e.places, Arg.SRC: a, Arg.WEIGHTS: w, Arg.DST: dst}, macs)  # fmt: skip
    drop = ndim - max(len(left.value.shape), len(right.value.shape))
    return dst.like(shape[drop:], strides[drop:])


def _at_rank(value: Value, ndim: int) -> Value:
    missing = ndim - len(value.shape)
    return value.like((1,) * missing + value.shape, (value.numel,) * missing + value.strides) if missing else value


def _plain_matrix(b: Builder, value: Value) -> Value:
    """Rows or columns next to each other, as matmuls want them.

    oneDNN compares strides of axes of size 1 too when it looks for a layout that it knows.
    """
    if 1 in (value.strides[-1], value.strides[-2]):
        strides = (value.numel if n == 1 else s for n, s in zip(value.shape[:-2], value.strides[:-2], strict=True))
        return value.like(value.shape, (*strides, *value.strides[-2:]))
    return b.reordered(value, value.dtype, binding.row_major(value.shape))


def _signed(b: Builder, value: Value) -> Value:
    """uint8 levels as int8, 128 less."""

    def make() -> Value:
        result = b.new(value.shape, torch.int8, in_order(value.shape, value.strides))
        b.convert(value, result, QParams(1.0, 128))
        return result

    return b.derived((value.buffer, value.offset, value.shape, value.strides, "signed"), make)


def _attention(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """softmax(q k^T * scale + mask) v, the scores in one buffer."""
    query, key, value, mask, dropout, causal, scale, grouped = arguments[:8]
    if dropout or grouped:
        raise Unsupported("it has dropout or grouped queries")
    q, k, v = (_float(b, given) for given in (query, key, value))
    if not (len(q.shape) == len(k.shape) == len(v.shape)) or len(q.shape) < 3:
        raise Unsupported("its operands have other ranks")
    if q.shape[:-2] != k.shape[:-2] or k.shape[:-1] != v.shape[:-1]:
        raise Unsupported("its operands broadcast")
    scores_shape = (*q.shape[:-1], k.shape[-2])
    macs = math.prod(scores_shape)
    e = Epilogue()
    e.linear(scale if scale is not None else 1 / math.sqrt(q.shape[-1]), 0.0)
    dead = None
    if isinstance(mask, Weight):
        mask = Given(b.attribute(mask.path))
    if isinstance(mask, Given):
        key = (mask.value.buffer, mask.value.offset, mask.value.shape, mask.value.strides)
        added, *dead = b.derived((*key, "mask"), lambda: b.call(_added_mask, (mask.value, b.dtype), {}))
        e.steps(b, [With(Alg.ADD, 0)], [Given(added)], _fitted_to(b, scores_shape, binding.row_major(scores_shape)))
    if causal:
        upper = b.constant(("causal", scores_shape[-2:], b.dtype), lambda: torch.full(
            scores_shape[-2:], -math.inf).triu(1).to(b.dtype))  # fmt: skip
        e.steps(b, [With(Alg.ADD, 0)], [Given(upper)], _fitted_to(b, scores_shape, binding.row_major(scores_shape)))
    q, k, v = (_plain_matrix(b, _repeated(b, t)) for t in (q, k, v))
    turned = k.like((*k.shape[:-2], k.shape[-1], k.shape[-2]), (*k.strides[:-2], k.strides[-1], k.strides[-2]))
    scores = b.new(scores_shape, b.dtype)
    first = binding.matmul(q.desc, turned.desc, None, scores.desc, e.attributes)
    b.run(_checked(first, macs), {**e.places, Arg.SRC: q, Arg.WEIGHTS: turned, Arg.DST: scores},
          macs * q.shape[-1])  # fmt: skip
    plain = Epilogue().attributes
    b.run(binding.softmax(Alg.SOFTMAX, scores.desc, scores.desc, len(scores_shape) - 1, plain),
          {Arg.SRC: scores, Arg.DST: scores}, words="softmax")  # fmt: skip
    shape = (*q.shape[:-1], v.shape[-1])
    # As torch's own kernel lays it out: heads next to each other, for the layer behind.
    order = (*range(len(shape) - 3), len(shape) - 2, len(shape) - 3, len(shape) - 1)
    inner = binding.row_major([shape[i] for i in order])
    strides = tuple(inner[order.index(i)] for i in range(len(shape)))
    result = b.new(shape, b.dtype, strides)
    second = binding.matmul(scores.desc, v.desc, None, result.desc, plain)
    b.run(_checked(second, macs), {Arg.SRC: scores, Arg.WEIGHTS: v, Arg.DST: result}, macs * v.shape[-1])
    if dead is not None and not (dead[1].buffer.kind is Kind.CONSTANT and not b.tensor(dead[1])):
        b.call(_clear, (result, *dead), {}, writes=True, watch=False)
    return result


def _added_mask(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What is added to scores, which queries may attend to nothing, and whether any may not.

    Those get no mask, since softmax of nothing is NaN; torch gives zeros for them.
    """
    if mask.dtype is torch.bool:
        dead = mask.any(-1, keepdim=True).logical_not_()
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)
    else:
        dead = (mask == -math.inf).all(-1, keepdim=True)
        added = mask.to(dtype, copy=True)
    return added.masked_fill_(dead, 0.0), dead, dead.any()


def _clear(result: Tensor, dead: Tensor, any_dead: Tensor) -> None:
    """What queries get that may attend to nothing."""
    if any_dead:
        result.masked_fill_(dead, 0.0)


def _repeated(b: Builder, value: Value) -> Value:
    """A value whose repeats are there."""
    return value if 0 not in value.strides else b.reordered(value, value.dtype, binding.row_major(value.shape))


# Norms and softmax


def _layer_norm(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, normalized, weight, bias, epsilon = arguments[:5]
    value = _float(b, x)
    normalized = [normalized] if isinstance(normalized, int) else list(normalized)
    count = len(normalized)
    if any(not (w is None or isinstance(w, Weight)) for w in (weight, bias)):
        raise Unsupported("its parameters are computed")
    if count != 1:
        value = _laid_out(b, value, binding.row_major(value.shape))
        flat = (*value.shape[:-count], math.prod(normalized))
        value = value.like(flat, binding.row_major(flat))
    if value.shape[-1] != math.prod(normalized):
        raise Unsupported("the shapes do not fit")
    rows = _rows(b, value)
    width = value.shape[-1]
    out = p.out if p.out is not None and (p.out.quant_min, p.out.quant_max) == (0, 255) else None
    e = Epilogue()
    shift: Value | None = None if bias is None else b.attribute(bias.path)
    if out is not None:
        e.scale(Arg.DST, b.numbers(out.scale))
        if out.zero_point:  # the primitive has no zero point for its result: the bias takes it along
            path, moved = None if bias is None else bias.path, out.scale * out.zero_point
            shift = b.constant(("shift", path, moved, width), lambda: (
                torch.zeros(width) if path is None else b.held(path).float()) + moved)  # fmt: skip
    dst = b.new(rows.value.shape, b.dtype if out is None else torch.uint8)
    primitive = binding.layer_norm(rows.value.desc, dst.desc, epsilon, weight is not None, shift is not None,
                                   e.attributes)  # fmt: skip
    places: dict[int, Any] = {**e.places, Arg.SRC: rows.value, Arg.DST: dst}
    for arg, held in ((Arg.SCALE, None if weight is None else b.attribute(weight.path)), (Arg.SHIFT, shift)):
        if held is not None:
            if held.dtype is not torch.float32:
                raise Unsupported("its parameters are not float32")
            places[arg] = held.like((width,), (1,))
    b.run(_checked(primitive, dst.numel * 8), places)
    result = dst.like(value.shape, rows.strides(width))
    if count != 1:
        shape = (*value.shape[:-1], *normalized)
        result = result.like(shape, binding.row_major(shape))
    return result


def _softmax(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, dim, dtype = arguments[:3]
    value = _dense(b, _float(b, x))
    if dim is None or dtype not in (None, torch.float32):
        raise Unsupported("its axis is not given, or its dtype is another one")
    alg = Alg.SOFTMAX if p.row.name == "softmax" else Alg.LOG_SOFTMAX
    direct = p.out is not None and p.out.zero_point == 0 and p.out.quant_max == 255 and alg is Alg.SOFTMAX
    e = Epilogue()
    if direct:
        e.scale(Arg.DST, b.numbers(p.out.scale))  # type: ignore[union-attr]
    dst = b.new(value.shape, torch.uint8 if direct else b.dtype, value.strides)
    primitive = binding.softmax(alg, value.desc, dst.desc, dim % len(value.shape), e.attributes)
    b.run(_checked(primitive, value.numel), {**e.places, Arg.SRC: value, Arg.DST: dst})
    return dst


# Element by element


def _elementwise(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """What stands alone: a function, or an operation of two tensors, and what follows."""
    return _chain(b, arguments[0], p.steps, operands, p.out)


def _chain(b: Builder, x: Any, steps: Sequence[Step], operands: list[Any], out: QParams | None) -> Value:
    if not isinstance(x, Given):
        raise Unsupported("its input is no tensor of the graph")
    first = steps[0] if steps else None
    e = Epilogue()
    dtype = b.dtype if out is None else torch.uint8
    if isinstance(first, With):
        return _of_two(b, x, first, steps[1:], operands, out)
    value = _dense(b, _float(b, x))
    if not value.shape:
        raise Unsupported("it has no dimensions")
    rest = steps if out is not None or first is None else steps[1:]
    e.steps(b, rest, operands, _fitted_to(b, value.shape, value.strides))
    e.quantize(b, out, by_attributes=False)
    dst = b.new(value.shape, dtype, value.strides)
    if out is None and isinstance(first, Function):
        primitive = binding.eltwise(first.alg, value.desc, dst.desc, first.alpha, first.beta, e.attributes)
        b.run(_checked(primitive, value.numel), {**e.places, Arg.SRC: value, Arg.DST: dst})
        return dst
    # The primitive for functions writes its input's type only; adding nothing writes any.
    zero = b.numbers(0.0).like((1,) * len(value.shape), (1,) * len(value.shape))
    primitive = binding.binary(Alg.ADD, value.desc, zero.desc, dst.desc, e.attributes)
    b.run(_checked(primitive, value.numel), {**e.places, Arg.SRC: value, Arg.SRC_1: zero, Arg.DST: dst})
    return dst


def _of_two(
    b: Builder, x: Given, first: With, steps: Sequence[Step], operands: list[Any], out: QParams | None
) -> Value:
    """An operation of two tensors; in float where no kernel reads their integers, repeated where none broadcasts."""
    other = operands[first.operand]
    if not isinstance(other, Given):
        raise Unsupported("an operand is a number that the graph computes")
    if first.alg in (Alg.ADD, Alg.MUL) and x.value.numel < other.value.numel:
        x, other = other, x
    ways = (
        [(False, False), (True, False), (True, True)] if x.qparams or other.qparams else [(True, False), (True, True)]
    )
    for number, (in_float, repeated) in enumerate(ways):
        try:
            return _of_two_in(b, x, other, first.alg, steps, operands, out, in_float, repeated)
        except (Unsupported, OneDNNError):
            if number == len(ways) - 1:
                raise
    raise AssertionError


def _of_two_in(b: Builder, x: Given, other: Given, alg: Alg, steps: Sequence[Step], operands: list[Any],
               out: QParams | None, in_float: bool, repeated: bool) -> Value:  # fmt: skip
    if not in_float and alg not in (Alg.ADD, Alg.SUB):
        raise Unsupported("integers are added only")
    one, two = (_float(b, x), _float(b, other)) if in_float else (x.value, other.value)
    one = _dense(b, one)
    if not one.shape:
        raise Unsupported("it has no dimensions")
    if repeated:
        if two.shape == one.shape:
            raise Unsupported("it does not broadcast")
        two = b.call(_repeat, (two, one.shape), {})
    fitted = _fitted_to(b, one.shape, one.strides)
    two = fitted(two)
    e = Epilogue()
    offset = 0.0
    if not in_float:
        for arg, given, sign in ((Arg.SRC, x, 1.0), (Arg.SRC_1, other, 1.0 if alg is Alg.ADD else -1.0)):
            if given.qparams is not None:
                e.scale(arg, b.numbers(given.qparams.scale))
                offset -= sign * given.qparams.scale * given.qparams.zero_point
    e.linear(1.0, offset)
    e.steps(b, steps, operands, fitted)
    e.quantize(b, out, by_attributes=False)
    dst = b.new(one.shape, b.dtype if out is None else torch.uint8, one.strides)
    primitive = binding.binary(alg, one.desc, two.desc, dst.desc, e.attributes)
    b.run(_checked(primitive, one.numel), {**e.places, Arg.SRC: one, Arg.SRC_1: two, Arg.DST: dst})
    return dst


def _repeat(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.expand(shape).contiguous()


def _batch_norm(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """With running statistics: a factor and a shift for each channel."""
    x, mean, variance, weight, bias, training, _, epsilon = arguments[:8]
    held = (mean, variance, *(w for w in (weight, bias) if w is not None))
    if training or not isinstance(x, Given) or not all(isinstance(w, Weight) for w in held):
        raise Unsupported("its statistics are computed")
    norm = BatchNorm(mean.path, variance.path, weight and weight.path, bias and bias.path, float(epsilon))
    shape = (1, -1, *[1] * (len(x.value.shape) - 2))

    def constant(what: str, number: int) -> Given:
        ones = torch.ones(b.held(norm.mean).shape[0], 1)
        return Given(b.constant((norm, what, shape), lambda: _folded(ones, None, b, norm)[number].reshape(shape)))

    added = [*operands, constant("factor", 0), constant("shift", 1)]
    first = [With(Alg.MUL, len(operands)), With(Alg.ADD, len(operands) + 1)]
    return _chain(b, Given(_float(b, x)), [*first, *p.steps], added, p.out)


def _quantized(b: Builder, value: Value, out: QParams) -> Value:
    """A float value, quantized."""
    if (out.quant_min, out.quant_max) != (0, 255):
        return _chain(b, Given(value), [], [], out)
    result = b.new(value.shape, torch.uint8, in_order(value.shape, value.strides))
    b.convert(value, result, None, out)
    return result


def _quantize(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, out = arguments[0], p.out
    assert out is not None
    value = given.value
    if given.qparams is None and value.dtype not in _FLOATS:
        raise Unsupported(f"it reads {value.dtype}")
    if (out.quant_min, out.quant_max) != (0, 255):
        return _chain(b, given, [], operands, out)
    once = _without_repeats(value)
    last = p.channels_last and len(once.shape) > 2
    strides = channels_last(once.shape) if last else in_order(once.shape, once.strides)
    result = b.reordered(once, torch.uint8, strides, given.qparams, out)
    if once is value:
        return result
    repeated = zip(result.strides, value.strides, value.shape, strict=True)
    return result.like(value.shape, tuple(0 if s == 0 and n > 1 else r for r, s, n in repeated))


def _dequantize(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    return b.as_float(arguments[0].value, arguments[0].qparams)


# Pools


def _windows(p: Partition, value: Value, arguments: list[Any]) -> tuple[list[int], list[int], list[int], bool]:
    n = p.row.ndim
    kernel = ints(arguments[1], n)
    stride = kernel if arguments[2] is None or arguments[2] == [] else ints(arguments[2], n)
    return kernel, stride, ints(arguments[3], n), False


def _pool(b: Builder, p: Partition, given: Given, alg: Alg, kernel: list[int], stride: list[int], padding: list[int],
          dilation: list[int], ceil_mode: bool, operands: list[Any]) -> Value:  # fmt: skip
    averages = alg is not Alg.POOLING_MAX
    n = len(kernel)
    # An average of integers that ends as integers is shifted and scaled once, behind the sum.
    on_integers = given.qparams is not None and averages and p.out is not None and not any(padding) and not p.steps
    value = given.value if on_integers or (not averages and given.value.dtype is torch.uint8) else _float(b, given)
    if len(value.shape) != n + 2:
        raise Unsupported("it has no batch")
    value = _laid_out(b, value, channels_last(value.shape))
    sizes, right = [], []
    for size, k, s, a, d in zip(value.shape[2:], kernel, stride, padding, dilation, strict=True):
        span = size + 2 * a - d * (k - 1) - 1
        count = (-(-span // s) if ceil_mode else span // s) + 1
        if ceil_mode and (count - 1) * s >= size + a:
            count -= 1
        sizes.append(count)
        right.append((count - 1) * s + d * (k - 1) + 1 - size - a)
    if ceil_mode and averages and any(r > a for r, a in zip(right, padding, strict=True)):
        raise Unsupported("its last windows are cut")
    if min(sizes) <= 0:
        raise Unsupported("its result is empty")
    shape = (*value.shape[:2], *sizes)
    e = Epilogue()
    if on_integers:
        old, new = given.qparams, p.out
        ratio = old.scale / new.scale  # type: ignore[union-attr]
        e.linear(ratio, new.zero_point - old.zero_point * ratio)  # type: ignore[union-attr]
        if (new.quant_min, new.quant_max) != (0, 255):  # type: ignore[union-attr]
            raise Unsupported("its result has fewer levels")
    elif averages:
        e.steps(b, p.steps, operands, _fitted_to(b, shape, channels_last(shape)))
        if p.out is not None:
            e.quantize(b, p.out, by_attributes=False)
    dst = b.new(shape, value.dtype, channels_last(shape))
    if not on_integers and p.out is not None and averages:
        raise Unsupported("the pool writes what it reads")
    primitive = binding.pooling(alg, value.desc, dst.desc, stride, kernel, dilation, padding, right, e.attributes)
    b.run(_checked(primitive, dst.numel * math.prod(kernel)), {**e.places, Arg.SRC: value, Arg.DST: dst})
    return dst


def _max_pool(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    if arguments[6]:
        raise Unsupported("it returns indices")
    given = arguments[0]
    n = p.row.ndim
    kernel, stride, padding, _ = _windows(p, given.value, arguments)
    return _pool(b, p, given, Alg.POOLING_MAX, kernel, stride, padding, ints(arguments[4], n), bool(arguments[5]),
                 operands)  # fmt: skip


def _average_pool(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, n = arguments[0], p.row.ndim
    kernel, stride, padding, _ = _windows(p, given.value, arguments)
    ceil_mode, with_padding = bool(arguments[4]), bool(arguments[5])
    if len(arguments) > 6 and arguments[6] is not None:
        raise Unsupported("it divides by a number of its own")
    alg = Alg.POOLING_AVG_INCLUDE_PADDING if with_padding else Alg.POOLING_AVG_EXCLUDE_PADDING
    return _float_ended(b, p, lambda q: _pool(b, q, given, alg, kernel, stride, padding, [1] * n, ceil_mode, operands))


def _adaptive_pool(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, n = arguments[0], p.row.ndim
    size = given.value.shape[2:]
    out = [
        s if o is None else o
        for s, o in zip(
            size, ints(arguments[1], n) if not isinstance(arguments[1], (list, tuple)) else arguments[1], strict=True
        )
    ]
    if len(size) != n or any(s % o for s, o in zip(size, out, strict=True)):
        raise Unsupported("its windows differ in size")
    kernel = [s // o for s, o in zip(size, out, strict=True)]
    return _float_ended(b, p, lambda q: _pool(b, q, given, Alg.POOLING_AVG_EXCLUDE_PADDING, kernel, kernel, [0] * n,
                                              [1] * n, False, operands))  # fmt: skip


def _mean(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, axes, keep, dtype = arguments[:4]
    ndim = len(given.value.shape)
    axes = sorted(a % ndim for a in ([axes] if isinstance(axes, int) else axes or []))
    if dtype not in (None, torch.float32) or ndim < 3 or axes != list(range(2, ndim)):
        raise Unsupported("it is no mean over an image")
    kernel, n = list(given.value.shape[2:]), ndim - 2
    if p.steps and not keep:
        raise Unsupported("what follows it has fewer dimensions")
    value = _float_ended(b, p, lambda q: _pool(b, q, given, Alg.POOLING_AVG_EXCLUDE_PADDING, kernel, kernel, [0] * n,
                                               [1] * n, False, operands))  # fmt: skip
    return value if keep else value.like(value.shape[:2], (value.shape[1], 1))


def _float_ended(b: Builder, p: Partition, pool: Callable[[Any], Value]) -> Value:
    """A pool, in float where it cannot end as integers."""
    try:
        return pool(p)
    except (Unsupported, OneDNNError):
        if p.out is None:
            raise
    return pool(p.in_float())


# Moving


def _concat(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    givens, dim = arguments[:2]
    if not isinstance(givens, list) or not all(isinstance(g, Given) for g in givens):
        raise Unsupported("not all are tensors of the graph")
    values = [g.value if g.qparams is None else _float(b, g) for g in givens]
    first = values[0]
    if any(v.dtype is not first.dtype or len(v.shape) != len(first.shape) for v in values) or not first.shape:
        raise Unsupported("they differ in dtype or rank")
    axis = dim % len(first.shape)
    shape = tuple(sum(v.shape[axis] for v in values) if i == axis else n for i, n in enumerate(first.shape))
    if len(shape) > 2 and any(
        same_layout(v.shape, v.strides, channels_last(v.shape)) and not v.is_row_major for v in values
    ):
        strides = channels_last(shape)
        values = [_laid_out(b, v, channels_last(v.shape)) for v in values]
    else:
        strides = binding.row_major(shape)
    values = [_repeated(b, v) for v in values]
    dst = b.new(shape, first.dtype, strides)
    primitive = binding.concat([v.desc for v in values], dst.desc, axis, Epilogue().attributes)
    b.run(_checked(primitive, dst.numel), {Arg.DST: dst, **{Arg.MULTIPLE_SRC + i: v for i, v in enumerate(values)}})
    return dst


EMITTERS: dict[str, Emitter] = {
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _deconvolution for n in (1, 2, 3)},
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "elementwise": _elementwise,
    "quantize": _quantize,
    "dequantize": _dequantize,
    **{f"max_pool{n}d": _max_pool for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _average_pool for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive_pool for n in (1, 2, 3)},
    "mean": _mean,
    "batch_norm": _batch_norm,
    "cat": _concat,
}
