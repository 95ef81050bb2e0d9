"""What a primitive should compute, in float64 and for a sample of its results: the definition, and no kernel's tricks.

All numbers that trials use are integers, or integers times powers of two, so that float64 holds every sum exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .handles import Alg, Arg, Binary, Eltwise, Spec, Sum

#: Argument -> its tensor, in the memory's dtype.
Tensors = Mapping[int, Tensor]
#: Weights that are turned into float64 at a time.
_CHUNK = 1 << 22
#: Multiply-accumulates that are enough for one kernel.
_ENOUGH = 1 << 23


@dataclass(frozen=True)
class Sample:
    """Which results to compute.

    Attributes:
        rows: positions ``[P, ndim]``, 0 along ``axis``.
        axis: computed whole at each position; None where positions stand for themselves.
        coordinates: of each result, ``[ndim, S]``; those of a row behind each other.
    """

    rows: Tensor
    axis: int | None
    coordinates: Tensor

    @classmethod
    def rows_of(cls, shape: Sequence[int], axis: int, positions: int) -> Sample:
        """An axis computed whole at corners, edges and random positions of the others."""
        others = [1 if i == axis else n for i, n in enumerate(shape)]
        rows = _spread(others, min(positions, math.prod(others)))
        coordinates = rows[:, None, :].repeat(1, shape[axis], 1)
        coordinates[:, :, axis] = torch.arange(shape[axis])
        return cls(rows, axis, coordinates.reshape(-1, len(shape)).t().contiguous())

    @classmethod
    def points_of(cls, shape: Sequence[int], positions: int) -> Sample:
        """Corners, edges and random positions; each coordinate of an axis is there, if they are not too many."""
        rows = _spread(shape, max(positions, min(max(shape, default=1), 8 * positions)))
        return cls(rows, None, rows.t().contiguous())


def _spread(sizes: Sequence[int], count: int) -> Tensor:
    """Positions ``[P, ndim]``: about ``count`` random ones that go through each axis, and the ends of all axes."""
    generator = torch.Generator().manual_seed(len(sizes))
    columns, ends = [], []
    for i, n in enumerate(sizes):
        turns = torch.arange(-(-count // max(n, 1)) * n)[:count] % n if n <= count else None
        if turns is None:
            columns.append(torch.randint(n, (count,), generator=generator))
        else:
            columns.append(turns[torch.randperm(count, generator=generator)])
        ends += [(i, 0), (i, n - 1)]
    random = torch.stack(columns, 1) if columns else torch.zeros((1, 0), dtype=torch.long)
    edges = random[torch.arange(len(ends)) % len(random)]
    for row, (i, end) in enumerate(ends):
        edges[row, i] = end
    corners = torch.tensor([[0] * len(sizes), [n - 1 for n in sizes]])
    return torch.cat([corners, edges, random])


def sample_of(spec: Spec) -> Sample:
    """What a trial of a primitive looks at: all output channels, at a number of positions."""
    shape = spec.dst.shape or ()
    last = len(shape) - 1
    if spec.kind in ("convolution_forward", "deconvolution_forward", "pooling_forward", "matmul"):
        axis = last if spec.kind == "matmul" else 1
        each = spec.work // max(math.prod(shape), 1) * shape[axis]
        return Sample.rows_of(shape, axis, max(2, min(8, _ENOUGH // max(each, 1))))
    if spec.kind == "softmax_forward":
        return Sample.rows_of(shape, spec.axis, 32)
    if spec.kind == "layer_normalization_forward":
        return Sample.rows_of(shape, last, 32)
    return Sample.points_of(shape, 512)


# Heads: the operation itself, as far as it is linear, without scales that multiply the whole of it


def head(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    """What results ``[S]`` are made of: sums of products, maxima, or the source itself for functions and softmax.

    A factor on the source is one on what this gives; but for layer norms.
    """
    return _HEADS[spec.kind](spec, tensors, sample)


def _shifted(tensors: Tensors, arg: int, values: Tensor) -> Tensor:
    """As float64, less the zero point if there is one."""
    zero_point = tensors.get(Arg.ZERO_POINTS | arg)
    values = values.double()
    return values if zero_point is None else values - zero_point.double()


def _taps(spec: Spec, out: Tensor, axis: int, kernel: int, size: int) -> tuple[Tensor, Tensor]:
    """Source coordinates ``[P, kernel]`` that results at ``out`` read along an axis, and which of them exist."""
    stride, padding, dilation = spec.stride[axis], spec.padding[axis], spec.dilation[axis]
    steps = torch.arange(kernel) * dilation
    if spec.kind == "deconvolution_forward":
        moved = out[:, None] + padding - steps
        at, valid = moved // stride, moved % stride == 0
    else:
        at = out[:, None] * stride - padding + steps
        valid = torch.ones_like(at, dtype=torch.bool)
    valid &= (at >= 0) & (at < size)
    return at.clamp(0, size - 1), valid


def _windows(spec: Spec, source: Tensor, rows: Tensor, kernel: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What windows hold, ``[P, taps, C]``, and which of their taps are inside, ``[P, taps]``."""
    n = len(kernel)
    index: list[Tensor] = [rows[:, 0].reshape(-1, *[1] * n)]
    inside = torch.ones((len(rows), *[1] * n), dtype=torch.bool)
    for axis, (k, size) in enumerate(zip(kernel, source.shape[2:], strict=True)):
        at, valid = _taps(spec, rows[:, 2 + axis], axis, k, size)
        view = (len(rows), *(k if i == axis else 1 for i in range(n)))
        index.append(at.reshape(view))
        inside = inside & valid.reshape(view)
    found = source.movedim(1, -1)[tuple(index)]
    return found.flatten(1, n), inside.flatten(1)


def _convolution(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    weights = tensors[Arg.WEIGHTS]
    kernel = weights.shape[weights.dim() - len(spec.stride) :]
    found, inside = _windows(spec, tensors[Arg.SRC], sample.rows, kernel)
    windows = _shifted(tensors, Arg.SRC, found) * inside[..., None]
    groups = weights.shape[0] if weights.dim() == len(kernel) + 3 else 1
    count, taps, channels = windows.shape
    by_group = windows.reshape(count, taps, groups, channels // groups).permute(2, 0, 3, 1).flatten(2)
    flat = weights.reshape(groups, weights.shape[-len(kernel) - 2], -1)
    step = max(_CHUNK // max(flat.shape[0] * flat.shape[2], 1), 1)
    parts = [by_group @ part.double().transpose(1, 2) for part in flat.split(step, 1)]
    return torch.cat(parts, 2).permute(1, 0, 2).reshape(-1)


def _matmul(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    source, weights, rows = tensors[Arg.SRC], tensors[Arg.WEIGHTS], sample.rows

    def at(tensor: Tensor, row: Tensor) -> tuple[int, ...]:
        sizes = tensor.shape[:-2]
        return tuple(0 if n == 1 else int(i) for n, i in zip(sizes, row, strict=False))

    result = torch.empty((len(rows), weights.shape[-1]), dtype=torch.float64)
    batches: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        batches.setdefault(at(weights, row), []).append(number)
    step = max(_CHUNK // max(weights.shape[-2], 1), 1)
    for batch, numbers in batches.items():
        left = torch.stack([source[at(source, rows[i])][int(rows[i, -2])] for i in numbers])
        left = _shifted(tensors, Arg.SRC, left)
        columns = [left @ _shifted(tensors, Arg.WEIGHTS, part) for part in weights[batch].split(step, 1)]
        result[numbers] = torch.cat(columns, 1)
    return result.reshape(-1)


def _pool(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    found, inside = _windows(spec, tensors[Arg.SRC], sample.rows, spec.kernel)
    windows, mask = found.double(), inside[..., None]
    if spec.alg is Alg.POOLING_MAX:
        return windows.masked_fill(~mask, -math.inf).amax(1).reshape(-1)
    total = (windows * mask).sum(1)
    if spec.alg is Alg.POOLING_AVG_EXCLUDE_PADDING:
        return (total / inside.sum(1)[:, None]).reshape(-1)
    return (total / math.prod(spec.kernel)).reshape(-1)


def _gathered(tensor: Tensor, at: Tensor) -> Tensor:
    """Elements ``[S]`` of a tensor that broadcasts to the result."""
    return tensor[tuple(c if n > 1 else c * 0 for c, n in zip(at, tensor.shape, strict=True))].double()


def _scales(spec: Spec, tensors: Tensors, arg: int, at: Tensor) -> Tensor:
    """The scales of an argument, as they meet the results: one, or ``[S]``."""
    scales = tensors[Arg.SCALES | arg].double()
    mask, shape = spec.attributes.scales[arg], spec.dst.shape or ()
    if not mask:
        return scales
    if arg == Arg.WEIGHTS:
        return scales[at[len(shape) - 1 if spec.kind == "matmul" else 1]]
    index = torch.zeros_like(at[0])
    for axis, n in enumerate(shape):
        index = index * n + at[axis] if mask >> axis & 1 else index
    return scales[index]


def _binary(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    at = sample.coordinates
    sides = [_gathered(tensors[arg], at) for arg in (Arg.SRC, Arg.SRC_1)]
    for i, arg in enumerate((Arg.SRC, Arg.SRC_1)):
        if arg in spec.attributes.scales:
            sides[i] = sides[i] * _scales(spec, tensors, arg, at)
    assert spec.alg is not None
    return OPERATIONS[spec.alg](*sides)


def _of_source(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    return _shifted(tensors, Arg.SRC, _gathered(tensors[Arg.SRC], sample.coordinates))


def _concat(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    sources = [tensors[arg] for arg in sorted(tensors) if arg in spec.descs and arg >= Arg.MULTIPLE_SRC]
    return _gathered(torch.cat(sources, spec.axis), sample.coordinates)


def _rows(tensors: Tensors, sample: Sample) -> Tensor:
    source, axis = tensors[Arg.SRC], sample.axis or 0
    others = tuple(c for i, c in enumerate(sample.rows.t()) if i != axis)
    rows = source.movedim(axis, -1)
    return rows[others].double() if others else rows.double().expand(len(sample.rows), -1)


def _of_rows(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    return _rows(tensors, sample).reshape(-1)


def _layer_norm(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    rows = _rows(tensors, sample)
    weight, bias = (tensors[a].double() if a in tensors else None for a in (Arg.SCALE, Arg.SHIFT))
    return F.layer_norm(rows, rows.shape[-1:], weight, bias, spec.alpha).reshape(-1)


def _resampling(spec: Spec, tensors: Tensors, sample: Sample) -> Tensor:
    source, sizes = tensors[Arg.SRC].double(), (spec.dst.shape or ())[2:]
    if spec.alg is Alg.NEAREST:
        whole = F.interpolate(source, sizes, mode="nearest-exact")
    else:
        mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(sizes)]
        whole = F.interpolate(source, sizes, mode=mode, align_corners=False)
    return _gathered(whole, sample.coordinates)


_HEADS: dict[str, Callable[[Spec, Tensors, Sample], Tensor]] = {
    "convolution_forward": _convolution,
    "deconvolution_forward": _convolution,
    "matmul": _matmul,
    "pooling_forward": _pool,
    "binary": _binary,
    "eltwise_forward": _of_source,
    "reorder": _of_source,
    "concat": _concat,
    "softmax_forward": _of_rows,
    "layer_normalization_forward": _layer_norm,
    "resampling_forward": _resampling,
}


# What follows the head


OPERATIONS: dict[Alg, Callable[[Tensor, Tensor], Tensor]] = {
    Alg.ADD: torch.add,
    Alg.MUL: torch.mul,
    Alg.MAX: torch.maximum,
    Alg.MIN: torch.minimum,
    Alg.DIV: torch.div,
    Alg.SUB: torch.sub,
}

#: With ``alpha`` and ``beta``.
_FUNCTIONS: dict[Alg, Callable[[Tensor, float, float], Tensor]] = {
    Alg.RELU: lambda x, a, b: torch.where(x > 0, x, x * a),
    Alg.TANH: lambda x, a, b: x.tanh(),
    Alg.ELU: lambda x, a, b: torch.where(x > 0, x, a * x.expm1()),
    Alg.SQUARE: lambda x, a, b: x * x,
    Alg.ABS: lambda x, a, b: x.abs(),
    Alg.SQRT: lambda x, a, b: x.sqrt(),
    Alg.LINEAR: lambda x, a, b: a * x + b,
    Alg.HARDSIGMOID: lambda x, a, b: (a * x + b).clamp(0, 1),
    Alg.LOGISTIC: lambda x, a, b: x.sigmoid(),
    Alg.EXP: lambda x, a, b: x.exp(),
    Alg.GELU_TANH: lambda x, a, b: F.gelu(x, approximate="tanh"),
    Alg.SWISH: lambda x, a, b: x * (a * x).sigmoid(),
    Alg.LOG: lambda x, a, b: x.log(),
    Alg.CLIP: lambda x, a, b: x.clamp(a, b),
    Alg.POW: lambda x, a, b: a * x.pow(b),
    Alg.GELU_ERF: lambda x, a, b: F.gelu(x),
    Alg.ROUND: lambda x, a, b: x.round(),
    Alg.MISH: lambda x, a, b: F.mish(x),
    Alg.HARDSWISH: lambda x, a, b: x * (a * x + b).clamp(0, 1),
}


def apply(op: Eltwise, x: Tensor) -> Tensor:
    """A function of each value; its numbers are rounded to float32, as the library holds them."""
    alpha, beta = torch.tensor([op.alpha, op.beta], dtype=torch.float32).tolist()
    return _FUNCTIONS[op.alg](x, alpha, beta)


def scales_of(spec: Spec, tensors: Tensors, at: Tensor) -> dict[int, Tensor]:
    """Scales that multiply heads, and the result's, by argument: one number, or ``[S]``."""
    args = (a for a in spec.attributes.scales if spec.kind != "binary" or a == Arg.DST)  # its head scales operands
    return {Arg.SCALES | arg: _scales(spec, tensors, arg, at) for arg in args}


def operands_of(spec: Spec, tensors: Tensors, at: Tensor) -> dict[int, Tensor]:
    """What heads meet, by argument: one number, or ``[S]``.

    Args:
        at: the results' coordinates ``[ndim, S]``.
    """
    found = scales_of(spec, tensors, at)
    if Arg.BIAS in tensors:
        bias = tensors[Arg.BIAS]
        found[Arg.BIAS] = bias.double()[at[1]] if bias.dim() == 1 else _gathered(bias, at)
    for number, op in enumerate(spec.attributes.post_ops, 1):
        if isinstance(op, Sum):
            found[Arg.DST] = _gathered(tensors[Arg.DST], at)
        elif isinstance(op, Binary):
            arg = Arg.POST_OP * number | Arg.SRC_1
            found[arg] = _gathered(tensors[arg], at)
    if Arg.DST in spec.attributes.zero_points:
        found[Arg.ZERO_POINTS | Arg.DST] = tensors[Arg.ZERO_POINTS | Arg.DST].double()
    return found


def finished(spec: Spec, heads: Tensor, operands: Mapping[int, Tensor]) -> Tensor:
    """Results ``[S]`` before they are rounded, from what heads give; whole rows for a softmax."""
    one, none = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    y = heads * operands.get(Arg.SCALES | Arg.SRC, one) * operands.get(Arg.SCALES | Arg.WEIGHTS, one)
    if spec.kind == "eltwise_forward":
        y = apply(Eltwise(spec.alg or Alg.RELU, spec.alpha, spec.beta), y)
    elif spec.kind == "softmax_forward":
        rows = y.reshape(-1, (spec.dst.shape or (1,))[spec.axis])
        y = (rows.softmax(-1) if spec.alg is Alg.SOFTMAX else rows.log_softmax(-1)).reshape(-1)
    y = y + operands.get(Arg.BIAS, none)
    for number, op in enumerate(spec.attributes.post_ops, 1):
        if isinstance(op, Sum):
            y = y + op.scale * (operands[Arg.DST] - op.zero_point)
        elif isinstance(op, Binary):
            y = OPERATIONS[op.alg](y, operands[Arg.POST_OP * number | Arg.SRC_1])
        else:
            y = apply(op, y)
    return y / operands.get(Arg.SCALES | Arg.DST, one) + operands.get(Arg.ZERO_POINTS | Arg.DST, none)
