"""Runs of kernels on integers of their own, compared with exact arithmetic; see ``selfcheck`` and ``formulations``.

Each trial returns what is wrong, "" if nothing is. Scales are powers of two, so results are exact. The input is part of
a larger memory full of other numbers, and what a kernel writes over lies between guard zones. Elements compared are the
corners of the result, in the first and last item of the batch, and random ones, at all output channels of each; all of
them where that is cheap. Rows of weights repeat after ``_ROWS``, so that few of them need to be multiplied out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from .._torch import without_dispatch_modes, without_function_modes
from ..selfcheck import Guarded, integers
from . import script
from .formulations import Call, Way, is_stock, stand_in
from .known_faults import Geometry
from .qparams import PostOp, QParams
from .stock import StockConv, StockLinear

#: Multiply-accumulates spent on what a kernel should have computed.
_MOST = 1_000_000
#: Distinct rows of weights: a prime, so that no block of a kernel's holds the same as another does.
_ROWS = 31
_LEVELS, _WEIGHTS, _BIAS, _OTHER = range(4)  # seeds
#: Share of the largest result by which float32 sums may be off, and of values that kernels approximate.
_EXACT, _NEARLY = 1e-5, 5e-3


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Nothing of what the user's code has switched on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_function_modes())
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


@functools.lru_cache(8)
def _pattern(low: int, high: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random integers, a quarter of them extreme: pairs of large products are what saturates."""
    numbers = integers((65_537,), low, high, torch.int32, seed)
    extreme = integers((65_537,), 0, 7, torch.int32, seed + 100)
    numbers[extreme == 0], numbers[extreme == 1] = low, high
    return numbers.to(dtype)


@functools.lru_cache(8)
def _memory(low: int, high: int, dtype: torch.dtype, seed: int, size: int) -> Tensor:
    pattern = _pattern(low, high, dtype, seed)
    return pattern.repeat(-(-size // len(pattern)))


def _numbers(
    shape: Sequence[int], low: int, high: int, dtype: torch.dtype, seed: int, strides: Sequence[int] | None = None
) -> Tensor:
    """Random integers with others before and behind them, not to be written to."""
    count, zone = math.prod(shape), 4096
    size = 1 << max(17, (count + 2 * zone).bit_length())  # few sizes: many tensors share one memory
    memory = _memory(low, high, dtype, seed, size)
    if strides is None:
        return memory[zone : zone + count].view(tuple(shape))
    return memory.as_strided(tuple(shape), tuple(strides), zone)


def _channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of what a kernel reads: channels innermost for images, outermost but for the batch elsewhere."""
    sizes = list(shape[2:])
    if len(sizes) != 2:
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return (shape[1] * sizes[0] * sizes[1], 1, shape[1] * sizes[1], shape[1])


class _Layer:
    """Weights, scales and qparams for ``outer`` sums of ``products`` products."""

    def __init__(self, weight_shape: Sequence[int], products: int, call: Call) -> None:
        outer = weight_shape[0]
        self.rows = _numbers((_ROWS, math.prod(weight_shape[1:])), -127, 127, torch.int8, _WEIGHTS)
        self.weight = self.rows.repeat(-(-outer // _ROWS), 1)[:outer].reshape(tuple(weight_shape))
        self.input = QParams(2.0**-7, call.top // 5 if call.zero_point else 0, 0, call.top)
        self.scale = torch.pow(2.0, -7.0 - (torch.arange(outer, dtype=torch.float32) % 3))
        units = self.scale * self.input.scale
        spread = 2 ** round(math.log2(math.sqrt(products) * 85 * call.top * 0.6))  # a usual sum
        self.bias = _numbers((outer,), -255, 255, torch.float32, _BIAS) * (units * (spread / 256))
        size = spread * 2.0**-15
        self.out = QParams(size / 32, 100) if call.out is torch.uint8 else None
        self.post_op = PostOp(call.post_op, list(call.arguments), call.algorithm)
        self.other = QParams(size / 64, 90) if call.summed is torch.uint8 else None
        self._unit = size / 64

    def sums(self, seen: Tensor) -> Tensor:
        """Exact sums of products, ``[places, groups, products]`` -> ``[places, outer]``, in float64."""
        few = seen.double().sub_(self.input.zero_point) @ self.rows.double().t()
        outputs = torch.arange(len(self.weight))
        return few[:, outputs // (len(outputs) // seen.shape[1]), outputs % _ROWS]

    def in_units_of_other(self) -> None:
        """Make one unit of the result one level of the other value, which is then added as it is."""
        assert self.other is not None
        factor = 1 / self.other.scale
        self.scale, self.bias = self.scale * factor, self.bias * factor
        if self.out is not None:
            self.out = QParams(self.out.scale * factor, self.out.zero_point)

    def addend(self, shape: Sequence[int], call: Call) -> Tensor:
        """Another value, to be added."""
        levels = _numbers(shape, 0, 255, torch.uint8, _OTHER)
        if call.summed is torch.uint8:
            return levels
        assert call.summed is not None
        return ((levels.to(torch.float32) - 128) * self._unit).to(call.summed)


def _finish(sums: Tensor, layer: _Layer, call: Call, other: Tensor | None) -> Tensor:
    """What the kernel should make of exact sums, in float64, before quantization."""
    result = sums * (layer.scale * layer.input.scale).double() + layer.bias.double()
    if other is not None:
        addend = other.double()
        result = result + (addend if layer.other is None else (addend - layer.other.zero_point) * layer.other.scale)
    first, second = (*call.arguments, 0.0, 0.0)[:2]
    return script.finished(result, 1.0, 0, torch.float64, call.post_op, first, second, call.algorithm)


def _compare(got: Tensor, expected: Tensor, layer: _Layer, call: Call) -> str:
    """Whether results at sampled places are those expected."""
    exact = call.post_op in ("none", "relu", "hardtanh")
    if got.dtype is not call.out:
        return f"it returned {got.dtype}"
    if layer.out is not None:
        levels = (expected / layer.out.scale + layer.out.zero_point).clamp(0, 255)
        wrong = (got.double() - levels).abs() > (0.51 if exact else 1.51)
    else:
        most = expected.abs().max().item()
        share = (_EXACT if exact else _NEARLY) if call.out is torch.float32 else 1e-2
        wrong = ~((got.double() - expected).abs() <= share * most)
    return f"{int(wrong.sum())} of {wrong.numel()} sampled results wrong" if bool(wrong.any()) else ""


def _places(sizes: Sequence[int], cost: int) -> tuple[Tensor, ...]:
    """Indices of elements to compare, one tensor for each dimension.

    Args:
        sizes: batch and spatial sizes of a result.
        cost: multiply-accumulates of one place.
    """
    count = min(max(_MOST // max(cost, 1), 8), 512)
    if math.prod(sizes) <= count:
        flat = torch.arange(math.prod(sizes))
    else:
        steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        corners = [
            sum(i * step for i, step in zip(corner, steps, strict=True))
            for corner in itertools.product(*((0, size - 1) for size in sizes))
        ]
        flat = torch.tensor(corners + random.Random(0).choices(range(math.prod(sizes)), k=count))
    strides = torch.tensor([math.prod(sizes[i + 1 :]) for i in range(len(sizes))])
    return tuple((flat.unsqueeze(1) // strides % torch.tensor(sizes)).unbind(1))


def convolution(geometry: Geometry, call: Call, way: Way) -> str:
    """A convolution computed in a way."""
    with _quietly():
        g, n = geometry, len(geometry.kernel)
        layer = _Layer((g.outputs, g.per_group, *g.kernel), g.products, call)
        format_ = torch.channels_last if n == 2 else torch.contiguous_format
        q = _numbers(g.shape, 0, call.top, torch.uint8, _LEVELS, _channels_last(g.shape))
        shape = (g.shape[0], g.outputs, *g.result)
        other = zone = None
        if call.summed is not None:
            other = layer.addend(shape, call).contiguous(memory_format=format_)
            zone = Guarded(other.numel() * other.element_size())
        held = None if zone is None or other is None else zone.holding(other)
        got = _convolved(g, call, way, layer, q, held)
        if got.shape != shape:
            return f"its result has the shape {tuple(got.shape)}"
        if zone is not None and not zone.intact:
            return "it wrote beside the value that it adds to"
        places = _places((shape[0], *g.result), g.products * g.outputs // g.groups)
        expected = _finish(_sums(q, layer, g, places), layer, call, _at(other, places))
        sampled = _at(got, places)
        assert sampled is not None
        return _compare(sampled, expected, layer, call)


def _convolved(g: Geometry, call: Call, way: Way, layer: _Layer, q: Tensor, accumulator: Tensor | None) -> Tensor:
    if not is_stock(g, way):
        summed = False if accumulator is None else True if layer.other is None else layer.other
        kernel = stand_in(
            layer.weight, layer.scale, layer.bias, g, way, layer.input, layer.post_op, layer.out, summed, call.out
        )
        return kernel(q) if accumulator is None else kernel(q, accumulator)
    packed = StockConv(layer.weight, layer.scale, layer.bias, g.stride, g.padding, g.dilation, g.groups)
    if accumulator is None:
        return packed.stock(q, layer.input, layer.post_op, layer.out, call.out)
    return packed.stock_sum(q, layer.input, accumulator, layer.other, call.post_op == "relu", layer.out, call.out)


def _sums(levels: Tensor, layer: _Layer, g: Geometry, places: tuple[Tensor, ...]) -> Tensor:
    """Exact sums at places, ``[places, output channels]``, in float64."""
    spatial = [size + 2 * pad for size, pad in zip(g.shape[2:], g.padding, strict=True)]
    zero_point = layer.input.zero_point
    padded = script.enlarged(levels, spatial, list(g.padding), zero_point)
    starts = [places[0], *(at * step for at, step in zip(places[1:], g.stride, strict=True))]
    strides = [padded.stride(0), *padded.stride()[2:]]
    inside = [padded.stride(1), *(s * d for s, d in zip(padded.stride()[2:], g.dilation, strict=True))]
    sizes = [g.shape[1], *g.kernel]
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(sizes, inside, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    assert isinstance(first, Tensor)
    flat = padded.as_strided((padded.numel(),), (1,), padded.storage_offset())
    seen = flat[first.reshape(-1, 1) + offsets.reshape(1, -1)]
    return layer.sums(seen.reshape(len(seen), g.groups, -1))


def _at(x: Tensor | None, places: tuple[Tensor, ...]) -> Tensor | None:
    """``[places, channels]`` of ``[batch, channels, *]``."""
    return None if x is None else x.movedim(1, -1)[places]


def linear(rows: int, inner: int, outer: int, call: Call, added: bool) -> str:
    """A linear layer, alone or with another value that it is added to."""
    with _quietly():
        layer = _Layer((outer, inner), inner, call)
        q = _numbers((rows, inner), 0, call.top, torch.uint8, _LEVELS)
        other = zone = None
        if call.summed is not None:
            other = layer.addend((rows, outer), call)
            zone = Guarded(other.numel() * other.element_size())
        if added and call.summed is torch.uint8:
            layer.in_units_of_other()
        packed = StockLinear(layer.weight, layer.scale, layer.bias)
        if zone is None or other is None:
            got = packed.stock(q, layer.input, layer.post_op, layer.out, call.out)
        else:
            accumulator = zone.holding(other)
            got = packed.stock_sum(
                q, layer.input, accumulator, None if added else layer.other, call.post_op == "relu", layer.out,
                call.out, "add" if added else "sum",
            )  # fmt: skip
            if not zone.intact:
                return "it wrote beside the value that it adds to"
            if added:
                if not torch.equal(accumulator, other):
                    return "it wrote over the value that it adds"
                layer.other = None
        if got.shape != (rows, outer):
            return f"its result has the shape {tuple(got.shape)}"
        (places,) = _places((rows,), inner * outer)
        expected = _finish(layer.sums(q[places].unsqueeze(1)), layer, call, None if other is None else other[places])
        return _compare(got[places], expected, layer, call)


def max_pool(shape: Sequence[int], strides: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
             padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool) -> str:  # fmt: skip
    """``quantized.max_pool2d``."""
    with _quietly():
        q = _numbers(shape, 0, 255, torch.uint8, _LEVELS, strides)
        got = torch.ops.quantized.max_pool2d(q, kernel, stride, padding, dilation, ceil_mode)
        window = (list(kernel), list(stride), list(padding), list(dilation))
        expected = F.max_pool2d(q.float(), *window, ceil_mode)
        if got.shape != expected.shape:
            return f"its result has the shape {tuple(got.shape)}"
        wrong = int((got != expected).sum())
        return f"{wrong} of {got.numel()} results wrong" if wrong else ""


def matmul(m: int, k: int, n: int) -> str:
    """``aten._int_mm`` of uint8 and int8."""
    with _quietly():
        a = _numbers((m, k), 0, 255, torch.uint8, _LEVELS)
        b = _numbers((k, n), -128, 127, torch.int8, _WEIGHTS)
        zone = Guarded(4 * m * n)
        got = zone.bytes.view(torch.int32).reshape(m, n)
        _torch.int_mm(a, b, out=got)
        if not zone.intact:
            return "it wrote beside its result"
        (places,) = _places((m,), k * n)
        expected = a[places].double() @ b.double()
        wrong = int((got[places].double() != expected).sum())
        return f"{wrong} of {expected.numel()} sampled results wrong" if wrong else ""
