"""Which way a kernel's work is done on this CPU: the first that proved right, on data of its own (``trials``).

Each is tried once per process, for each geometry, post-op, type of the result, zero point and number of levels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import selfcheck
from ..selfcheck import Failure
from . import script, stock, trials
from .formulations import IN_LEVELS, Call, Way, geometry_of, in_levels, in_way, ways
from .known_faults import Geometry

#: Types of the result by ``script.Kernel.kind``.
_DTYPES = (torch.uint8, torch.float32, torch.bfloat16)


def way_of_convolution(geometry: Geometry, call: Call) -> Way:
    """The first way that computes a convolution right here.

    Args:
        geometry: as the kernel gets it: padded already if that is done by hand.
    """
    name = f"onednn.qconv{len(geometry.kernel)}d_pointwise" + (" + sum" if call.summed is not None else "")
    kernel = stock.qconv if call.summed is None else stock.qconv_sum
    found, problem = Way.LEVELS, ""
    for way in ways(geometry):
        if way is Way.LEVELS:
            break
        trial = functools.partial(trials.convolution, geometry, call, way)
        this = selfcheck.problem_of((kernel, way, geometry, call), trial)
        if not this:
            found = way
            break
        problem = problem or this
    if problem:
        selfcheck.note_failure(Failure(name, f"{geometry}, {call}", problem, found.value))
    return found


def is_linear_right(rows: int, inner: int, outer: int, call: Call, added: bool = False) -> bool:
    """Whether the linear kernel is right here; ``added`` for the form that reads what it adds and leaves it alone.

    Kernels differ by how many rows fill their blocks; so that not each new length of a text is tried, more than 64 rows
    are tried as the next larger number of the same remainder by 16, with three digits in binary.
    """
    rows = _like(rows)
    kernel = stock.qlinear if call.summed is None else stock.qlinear_sum
    key = (kernel, rows, inner, outer, call, added)
    problem = selfcheck.problem_of(key, functools.partial(trials.linear, rows, inner, outer, call, added))
    if problem:
        form = " + add" if added else " + sum" if call.summed is not None else ""
        geometry = f"[{rows}, {inner}] x [{inner}, {outer}], {call}"
        selfcheck.note_failure(Failure(f"onednn.qlinear_pointwise{form}", geometry, problem, IN_LEVELS))
    return not problem


def _like(rows: int) -> int:
    """The number of rows that is tried for ``rows``.

    >>> [_like(n) for n in (1, 64, 65, 100, 197)]
    [1, 64, 65, 100, 197]
    """
    if rows <= 64:
        return rows
    step = 1 << (rows.bit_length() - 3)
    if step <= 16:
        return rows
    return -(-(rows - rows % 16) // step) * step + rows % 16


def proven(kernel: script.Conv | script.Linear, shape: Sequence[int], top: int) -> tuple[nn.Module, str]:
    """A scriptable convolution or linear layer, or what computes the same and is right here.

    Args:
        shape: of the example's input.
        top: the largest level of the input.

    Returns:
        The module, and in words what stands in for the kernel, "" if nothing does.
    """
    if isinstance(kernel, script.Conv):
        summed = _DTYPES[kernel.kind] if isinstance(kernel, script.ConvSum) else None
        call = _call(kernel, kernel.input_zero_point != 0, top, summed)
        way = way_of_convolution(geometry_of(kernel), call)
        return in_way(kernel, way), "" if way is Way.NATIVE else way.value
    image = isinstance(kernel, (script.PointwiseConv, script.PointwiseConvAdd))
    rows = (shape[0] * shape[2] * shape[3]) if image else math.prod(shape[:-1])
    outer, inner = kernel.weight.shape
    adding = kernel if isinstance(kernel, script.LinearAdd) else None
    reads_only = adding is not None and adding.binary != "sum"
    float_type = torch.bfloat16 if kernel.kind == 2 else torch.float32
    summed = None if adding is None else torch.uint8 if adding.reads_int8 else float_type
    dynamic = isinstance(kernel, script.DynamicLinear)
    call = _call(kernel, dynamic or kernel.input_zero_point != 0, top, summed)
    right = not rows or is_linear_right(rows, inner, outer, call, reads_only)
    return (kernel, "") if right else (in_levels(kernel), IN_LEVELS)


def _call(kernel: script.Conv | script.Linear, zero_point: bool, top: int, summed: torch.dtype | None) -> Call:
    arguments = (kernel.first, kernel.second)[: kernel.arguments]
    return Call(zero_point, top, _DTYPES[kernel.kind], kernel.post_op, arguments, kernel.algorithm, summed)


def is_max_pool_right(
    shape: Sequence[int], strides: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool,
) -> bool:  # fmt: skip
    """Whether ``quantized.max_pool2d`` is right here."""
    arguments: tuple[Any, ...] = (*map(tuple, (shape, strides, kernel, stride, padding, dilation)), ceil_mode)
    problem = selfcheck.problem_of(("max_pool2d", *arguments), lambda: trials.max_pool(*arguments))
    if problem:
        selfcheck.note_failure(Failure("quantized.max_pool2d", f"{arguments}", problem, "float32 max pool of levels"))
    return not problem


def is_matmul_right(m: int, k: int, n: int) -> bool:
    """Whether ``aten._int_mm`` is right here."""
    problem = selfcheck.problem_of(("_int_mm", m, k, n, torch.get_num_threads()), lambda: trials.matmul(m, k, n))
    if problem:
        selfcheck.note_failure(
            Failure("aten._int_mm", f"[{m}, {k}] x [{k}, {n}]", problem, "float32 product of levels")
        )
    return not problem
