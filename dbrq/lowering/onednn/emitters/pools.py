"""Pools, and concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ....errors import OneDNNError
from ....kernels import ints
from .. import binding
from ..binding import Alg, Arg
from ..builder import Builder, Unsupported
from ..epilogue import Epilogue, Given
from ..layouts import channels_last, same_layout
from ..partitions import Partition
from ..values import Value
from .common import as_model_float, checked, fitted_to, laid_out, repeated


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
    value = (
        given.value if on_integers or (not averages and given.value.dtype is torch.uint8) else as_model_float(b, given)
    )
    if len(value.shape) != n + 2:
        raise Unsupported("it has no batch")
    value = laid_out(b, value, channels_last(value.shape))
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
        assert old is not None and new is not None
        ratio = old.scale / new.scale
        e.linear(ratio, new.zero_point - old.zero_point * ratio)
        if (new.quant_min, new.quant_max) != (0, 255):
            raise Unsupported("its result has fewer levels")
    elif averages:
        e.steps(b, p.steps, operands, fitted_to(b, shape, channels_last(shape)))
        if p.out is not None:
            e.quantize(b, p.out, by_attributes=False)
    dst = b.new(shape, value.dtype, channels_last(shape))
    if not on_integers and p.out is not None and averages:
        raise Unsupported("the pool writes what it reads")
    primitive = binding.pooling(alg, value.desc, dst.desc, stride, kernel, dilation, padding, right, e.attributes)
    b.run(checked(primitive, dst.numel * math.prod(kernel)), {**e.places, Arg.SRC: value, Arg.DST: dst})
    return dst


def max_pool(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    if arguments[6]:
        raise Unsupported("it returns indices")
    given = arguments[0]
    n = p.row.ndim
    kernel, stride, padding, _ = _windows(p, given.value, arguments)
    return _pool(b, p, given, Alg.POOLING_MAX, kernel, stride, padding, ints(arguments[4], n), bool(arguments[5]),
                 operands)  # fmt: skip


def average_pool(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, n = arguments[0], p.row.ndim
    kernel, stride, padding, _ = _windows(p, given.value, arguments)
    ceil_mode, with_padding = bool(arguments[4]), bool(arguments[5])
    if len(arguments) > 6 and arguments[6] is not None:
        raise Unsupported("it divides by a number of its own")
    alg = Alg.POOLING_AVG_INCLUDE_PADDING if with_padding else Alg.POOLING_AVG_EXCLUDE_PADDING
    return _float_ended(b, p, lambda q: _pool(b, q, given, alg, kernel, stride, padding, [1] * n, ceil_mode, operands))


def adaptive_pool(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, n = arguments[0], p.row.ndim
    size = given.value.shape[2:]
    if len(size) != n:
        raise Unsupported("its input has no batch")
    wanted = arguments[1] if isinstance(arguments[1], (list, tuple)) else ints(arguments[1], n)
    out = [s if o is None else o for s, o in zip(size, wanted, strict=True)]
    if not all(out) or any(s % o for s, o in zip(size, out, strict=True)):
        raise Unsupported("its windows differ in size")
    kernel = [s // o for s, o in zip(size, out, strict=True)]
    return _float_ended(b, p, lambda q: _pool(b, q, given, Alg.POOLING_AVG_EXCLUDE_PADDING, kernel, kernel, [0] * n,
                                              [1] * n, False, operands))  # fmt: skip


def mean(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, axes, keep, dtype = arguments[:4]
    ndim = len(given.value.shape)
    axes = sorted(a % max(ndim, 1) for a in ([axes] if isinstance(axes, int) else axes or []))
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


def concat(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    givens, dim = arguments[:2]
    if not isinstance(givens, list) or not all(isinstance(g, Given) for g in givens):
        raise Unsupported("not all are tensors of the graph")
    values = [g.value if g.qparams is None else as_model_float(b, g) for g in givens]
    first = values[0]
    if any(v.dtype is not first.dtype or len(v.shape) != len(first.shape) for v in values) or not first.shape:
        raise Unsupported("they differ in dtype or rank")
    axis = dim % len(first.shape)
    shape = tuple(sum(v.shape[axis] for v in values) if i == axis else n for i, n in enumerate(first.shape))
    if len(shape) > 2 and any(
        same_layout(v.shape, v.strides, channels_last(v.shape)) and not v.is_row_major for v in values
    ):
        strides = channels_last(shape)
        values = [laid_out(b, v, channels_last(v.shape)) for v in values]
    else:
        strides = binding.row_major(shape)
    values = [repeated(b, v) for v in values]
    dst = b.new(shape, first.dtype, strides)
    primitive = binding.concat([v.desc for v in values], dst.desc, axis, Epilogue().attributes)
    b.run(checked(primitive, dst.numel), {Arg.DST: dst, **{Arg.MULTIPLE_SRC + i: v for i, v in enumerate(values)}})
    return dst
