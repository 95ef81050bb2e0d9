"""What emitters share: operands in float, in a layout, or as a primitive broadcasts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import binding
from ..binding import Primitive
from ..builder import Builder, Unsupported
from ..epilogue import Fitted, Given
from ..layouts import Rows, in_order, is_dense, same_layout
from ..partitions import Weight
from ..values import Value

FLOATS = (torch.float32, torch.bfloat16)
#: Up to this many operations oneDNN's reference kernels are as good as any.
_SMALL = 64


def as_model_float(b: Builder, given: Any) -> Value:
    """An operand in the float dtype of the model's inside."""
    if isinstance(given, Weight):
        return b.attribute(given.path)
    if not isinstance(given, Given):
        raise Unsupported("an operand is no tensor")
    value = b.as_float(given.value, given.qparams)
    if value.dtype not in FLOATS:
        raise Unsupported(f"an operand is {value.dtype}")
    return value if value.dtype is b.dtype else b.reordered(value, b.dtype)


def checked(primitive: Primitive, macs: int = 0) -> Primitive:
    if primitive.is_reference and macs > _SMALL:
        raise Unsupported(f"oneDNN has only {primitive.implementation} for it")
    return primitive


def laid_out(b: Builder, value: Value, strides: tuple[int, ...]) -> Value:
    """The value in a given layout."""
    if same_layout(value.shape, value.strides, strides):
        return value.like(value.shape, strides)
    return b.reordered(value, value.dtype, strides)


def dense(b: Builder, value: Value) -> Value:
    """The value without gaps."""
    if is_dense(value.shape, value.strides):
        return value
    return b.reordered(value, value.dtype, in_order(value.shape, value.strides) if 0 not in value.strides
                       else binding.row_major(value.shape))  # fmt: skip


def expressible(b: Builder, given: Any) -> Any:
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


def broadcasts_to(value: Value, shape: Sequence[int]) -> bool:
    """Whether an operand leaves a result's shape as it is. Axes along which it is repeated have their sizes."""
    missing = len(shape) - len(value.shape)
    return missing >= 0 and all(m in (1, n) for m, n in zip(value.shape, shape[missing:], strict=True))


def without_repeats(value: Value) -> Value:
    """Axes along which a value is repeated, as axes of size 1."""
    if 0 not in value.strides:
        return value
    shape = tuple(1 if stride == 0 else size for size, stride in zip(value.shape, value.strides, strict=True))
    return value.like(shape, tuple(stride or 1 for stride in value.strides))


def repeated(b: Builder, value: Value) -> Value:
    """A value whose repeats are there."""
    return value if 0 not in value.strides else b.reordered(value, value.dtype, binding.row_major(value.shape))


def fitted_to(b: Builder, shape: tuple[int, ...], strides: tuple[int, ...], repeats: bool = False) -> Fitted:
    """How an operand is seen by a primitive whose result has this shape and layout.

    Args:
        repeats: write repeated elements out, for primitives that do not broadcast.
    """

    def fitted(other: Value) -> Value:
        sizes, steps = other.shape, other.strides
        missing = len(shape) - len(sizes)
        if not broadcasts_to(other, shape):
            raise Unsupported("the result has the other operand's shape")
        if missing:
            other = other.like((1,) * missing + sizes, (math.prod(sizes),) * missing + steps)
        other = without_repeats(other)
        if repeats and other.shape != shape:
            small = other
            key = (small.buffer, small.offset, small.shape, small.strides, shape)
            other = b.derived(key, lambda: b.call(_repeat, (small, shape), {}))
        if other.shape == shape:
            return laid_out(b, other, strides)
        return laid_out(b, other, in_order(other.shape, strides))

    return fitted


def _repeat(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.expand(shape).contiguous()


def rows_of(b: Builder, value: Value) -> Rows:
    rows = Rows.of(value)
    if rows is None:
        rows = Rows.of(b.reordered(value, value.dtype, binding.row_major(value.shape)))
        assert rows is not None
    return rows
