"""Trials of primitives: each runs once on numbers of its own, between guard zones, and is compared with the definition.

Sources hold integers over the whole range of their dtype (floats: small integers times a power of two), so that
reference.py knows every sum exactly. One power of two is left free, and chosen such that results differ as much as they
can: an 8-bit result that saturates everywhere, or a sigmoid of 1 everywhere, would show nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import selfcheck
from . import handles, reference
from .handles import Alg, Arg, Binary, Desc, Memory, Primitive, Spec, Sum

#: Gives what brings weights into a layout of oneDNN's own.
Reorder = Callable[[Desc, Desc], Primitive]

# As uint8 75, as int32 and float32 some ten million, as bfloat16 too: nothing that could pass for a result.
_PATTERN = 0x4B
_SCALES = {"softmax_forward": 2.0**-8, "layer_normalization_forward": 2.0**-5}
_ZERO_POINTS = {torch.uint8: 113, torch.int8: 7, torch.int32: 3}
_POSITIVE = (Alg.SQRT, Alg.LOG, Alg.POW)
#: Different results that are enough.
_MANY = 80
# Twice what rounding to nearest takes: some kernels keep what they still compute with in the result's memory.
_ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def is_provable(spec: Spec) -> bool:
    """Whether a trial can look at the result. Reorders into layouts of oneDNN's own are proved by what reads them."""
    return all(desc.strides is not None for desc in spec.descs.values()) or spec.kind != "reorder"


def problem_of(primitive: Primitive, reorder: Reorder) -> str:
    """Try a primitive; returns what is wrong, "" if nothing is."""
    with torch.no_grad():
        return _Trial(primitive, reorder).problem()


@dataclass(frozen=True)
class _Placed:
    """An argument in guarded memory."""

    guarded: selfcheck.Guarded
    memory: Memory
    view: Tensor | None


class _Trial:
    def __init__(self, primitive: Primitive, reorder: Reorder) -> None:
        self.primitive, self.spec, self._reorder = primitive, primitive.spec, reorder
        self.sample = reference.sample_of(self.spec)
        self.tensors: dict[int, Tensor] = {}
        self.moving: set[int] = set()  # arguments that the free power of two multiplies
        self.in_head = False  # heads are made of them
        self._data()

    def problem(self) -> str:
        expected, slack = self._expected()
        placed = {arg: self._place(arg, tensor) for arg, tensor in self.tensors.items()}
        if Arg.DST not in placed:
            placed[Arg.DST] = _place(self.spec.dst, None)
        if self.primitive.scratchpad:
            placed[Arg.SCRATCHPAD] = _place(Desc.strided((self.primitive.scratchpad,), torch.uint8), None)
        handles.execute(self.primitive, {arg: p.memory for arg, p in placed.items()})
        for arg in (Arg.DST, Arg.SCRATCHPAD):  # what kernels write to; the other zones are there to be read by mistake
            if arg in placed and not placed[arg].guarded.intact:
                return f"it writes beside its {arg.name.lower()}"
        view = placed[Arg.DST].view
        assert view is not None
        return self._compared(view[tuple(self.sample.coordinates)].double(), expected, slack)

    # Numbers

    def _data(self) -> None:
        spec = self.spec
        for arg, desc in spec.descs.items():
            if arg != Arg.DST:
                self.tensors[arg] = self._source(arg, desc)
        for arg, mask in spec.attributes.scales.items():
            value = _SCALES.get(spec.kind, 0.5) if arg == Arg.DST else 1.0
            count = math.prod(n for i, n in enumerate(self._shape(arg)) if mask >> i & 1)
            self.tensors[Arg.SCALES | arg] = value * 0.5 ** (torch.arange(count) % 3).float()
        for arg in spec.attributes.zero_points:
            dtype = spec.descs[arg].dtype or torch.uint8
            self.tensors[Arg.ZERO_POINTS | arg] = torch.tensor([_ZERO_POINTS.get(dtype, 0)], dtype=torch.int32)
        self._let_move()
        self.heads = reference.head(spec, self.tensors, self.sample)
        size = self._size_of_heads()
        if Arg.BIAS in spec.descs:
            self._take(Arg.BIAS, spec.descs[Arg.BIAS], size)
        for number, op in enumerate(spec.attributes.post_ops, 1):
            if isinstance(op, Binary):
                factor = op.alg in (Alg.MUL, Alg.DIV)
                self._take(Arg.POST_OP * number | Arg.SRC_1, op.other, 0.0 if factor else size)
            elif isinstance(op, Sum):
                self._take(Arg.DST, spec.dst, size)

    def _take(self, arg: int, desc: Desc, size: float) -> None:
        """An operand that joins results: integers, or about as large as results; factors near 1 for a size of 0."""
        shape, dtype = desc.shape or (), desc.dtype or torch.float32
        if not dtype.is_floating_point:
            self.tensors[arg] = _integers(arg, shape, dtype)
        elif size:
            self.tensors[arg] = _numbers(shape, -8, 8, dtype, arg) * size
            self.moving.add(arg)
        else:
            # Of a factor's sign nothing is left in a result that is cut at 0.
            self.tensors[arg] = _numbers(shape, 2, 6, dtype, arg) * 0.25

    def _source(self, arg: int, desc: Desc) -> Tensor:
        spec, shape, dtype = self.spec, _without_repeats(desc), desc.dtype or torch.float32
        if not dtype.is_floating_point:
            tensor = _integers(arg, shape, dtype, spec.levels if arg == Arg.SRC else 255)
        elif arg in (Arg.SCALE, Arg.SRC_1) and (arg == Arg.SCALE or spec.alg in (Alg.MUL, Alg.DIV)):
            tensor = _numbers(shape, 2, 6, dtype, arg) * 0.25
        else:
            most = 8 if Arg.WEIGHTS in spec.descs else 255
            least = 1 if spec.kind == "eltwise_forward" and spec.alg in _POSITIVE else -most
            tensor = _numbers(shape, least, most, dtype, arg)
        return tensor.expand(desc.shape or ())

    def _shape(self, arg: int) -> tuple[int, ...]:
        return self.spec.descs[arg].shape or ()

    def _let_move(self) -> None:
        """One side of a product, or all sides of a sum, in their numbers or their scales."""
        spec = self.spec
        if spec.kind == "layer_normalization_forward":  # for which a factor makes no difference
            return
        heads = (Arg.SRC,) if spec.alg is Alg.DIV else (Arg.SRC, Arg.WEIGHTS, Arg.SRC_1)
        sides = [a for a in spec.descs if a in heads or a >= Arg.MULTIPLE_SRC]
        found: list[int] = []
        for arg in sides:
            if self.tensors[arg].dtype.is_floating_point:
                found.append(arg)
            elif arg in spec.attributes.scales:
                found.append(Arg.SCALES | arg)
        if Arg.WEIGHTS in spec.descs or spec.alg is Alg.MUL:
            self.moving.update(found[:1])
        elif len(found) == len(sides):
            self.moving.update(found)
        self.in_head = bool(self.moving) and (spec.kind == "binary" or found[0] in spec.descs)

    def _size_of_heads(self) -> float:
        """A power of two, an eighth of what results are like before post-ops."""
        y = self.heads
        for arg, scales in reference.scales_of(self.spec, self.tensors, self.sample.coordinates).items():
            y = y * scales if arg != Arg.SCALES | Arg.DST else y
        deviation = float(y.std()) if len(y) > 1 else 1.0
        return 2.0 ** round(math.log2(deviation / 8)) if deviation > 0 else 1.0

    # The free power of two

    def _expected(self) -> tuple[Tensor, Tensor]:
        """Results before rounding, and by how much rounding on the way may move them; scales the data too."""
        spec = self.spec
        operands = reference.operands_of(spec, self.tensors, self.sample.coordinates)
        factor = 2.0 ** self._best_power(operands) if self.moving else 1.0
        for arg in self.moving:
            self.tensors[arg] = self.tensors[arg] * factor
        heads, operands = self._moved(self.heads, operands, factor)
        y = reference.finished(spec, heads, operands)
        moved = reference.finished(spec, heads * (1 + 2.0**-21), operands)
        return y, (moved - y).abs().nan_to_num(0.0)

    def _moved(self, heads: Tensor, operands: dict[int, Tensor], factor: float) -> tuple[Tensor, dict[int, Tensor]]:
        """Heads and operands for data times ``factor``."""
        found = {arg: v * factor if arg in self.moving else v for arg, v in operands.items()}
        return heads * factor if self.in_head else heads, found

    def _best_power(self, operands: dict[int, Tensor]) -> int:
        """The exponent that gives most different results among a few."""
        count = len(self.heads)
        if self.spec.kind == "softmax_forward":  # whole rows
            few = torch.arange(4 * self._shape(Arg.DST)[self.spec.axis])[:count]
        else:
            few = torch.arange(0, count, count // 512 + 1)
        heads = self.heads[few]
        less = {arg: v[few] if len(v.shape) and len(v) == count else v for arg, v in operands.items()}
        guess = self._guess(heads, less)
        best, most = 0, -1
        for power in sorted(range(-24, 25, 2), key=lambda p: abs(p - guess)):
            different = self._different(reference.finished(self.spec, *self._moved(heads, less, 2.0**power)))
            if different > most:
                best, most = power, different
            if most >= min(len(few) // 2, _MANY):
                break
        return best

    def _guess(self, heads: Tensor, operands: dict[int, Tensor]) -> float:
        """What brings 8-bit results to some 50 levels, if nothing follows."""
        if (self.spec.dst.dtype or torch.float32).is_floating_point:
            return 0.0
        y = heads * operands.get(Arg.SCALES | Arg.WEIGHTS, 1.0) / operands.get(Arg.SCALES | Arg.DST, 1.0)
        size = float(y.abs().mean())
        return -math.log2(size / 50) if size > 0 else 0.0

    def _different(self, y: Tensor) -> int:
        dtype = self.spec.dst.dtype or torch.float32
        y = y[y.isfinite()]
        if dtype.is_floating_point:
            return len((y * 1024).round().unique())
        info = torch.iinfo(dtype)
        y = y.round()
        return len(y[(y > info.min) & (y < info.max)].unique())

    # Memory and comparison

    def _place(self, arg: int, tensor: Tensor) -> _Placed:
        spec = self.spec
        desc = spec.descs.get(arg)
        if desc is None:
            number = arg // Arg.POST_OP
            op = spec.attributes.post_ops[number - 1] if number else None
            desc = op.other if isinstance(op, Binary) else Desc.strided(tensor.shape, tensor.dtype)
        if desc.strides is not None:
            return _place(desc, tensor)
        assert desc.shape is not None and desc.dtype is not None
        wanted = self.primitive.layout(arg, desc.shape, desc.dtype)
        placed = _place(wanted, None)
        source = Desc.strided(desc.shape, desc.dtype)
        plain = tensor.contiguous()
        handles.execute(self._reorder(source, wanted),
                        {Arg.SRC: Memory(source, plain.data_ptr()), Arg.DST: placed.memory})  # fmt: skip
        return placed

    def _compared(self, got: Tensor, expected: Tensor, slack: Tensor) -> str:
        dtype = self.spec.dst.dtype or torch.float32
        finite = expected[expected.isfinite()].abs()
        slack = slack + expected.abs() * 2.0**-14
        if dtype.is_floating_point:
            bound = torch.finfo(dtype).max
            most = min(float(finite.max()), 1.0) if len(finite) else 0.0
            allowed = slack + 1e-5 * most + expected.abs() * _ROUNDING.get(dtype, 0.0)
            right = ((got - expected).abs() <= allowed) | (got == expected) | (expected.abs() > bound)
            right |= got.isnan() & expected.isnan()
        else:
            info = torch.iinfo(dtype)
            expected = expected.clamp(info.min, info.max)
            right = ((got - expected).abs() <= 0.501 + slack.clamp(max=0.05)) | expected.isnan()
        if bool(right.all()):
            return ""
        wrong = int((~right).sum())
        first = int((~right).nonzero()[0])
        at = tuple(self.sample.coordinates[:, first].tolist())
        return f"{wrong} of {len(right)} results are wrong: at {at} {got[first]:.6g} for {expected[first]:.6g}"


def _place(desc: Desc, tensor: Tensor | None) -> _Placed:
    """A tensor in guarded memory, or memory for a result."""
    itemsize = 1 if desc.dtype is None else desc.dtype.itemsize
    guarded = selfcheck.Guarded(max(desc.size, itemsize), _PATTERN)  # a desc that repeats one element has no size
    view = None
    if desc.strides is not None and desc.shape is not None and desc.dtype is not None:
        flat = guarded.bytes.view(desc.dtype)
        view = flat.as_strided(desc.shape, desc.strides, flat.storage_offset())
        if tensor is not None:
            once = _without_repeats(desc)
            flat.as_strided(once, desc.strides, flat.storage_offset()).copy_(tensor[tuple(slice(0, n) for n in once)])
    return _Placed(guarded, Memory(desc, guarded.bytes.data_ptr()), view)


def _without_repeats(desc: Desc) -> tuple[int, ...]:
    """The shape with axes along which elements repeat as axes of size 1."""
    if desc.strides is None:
        return desc.shape or ()
    return tuple(1 if s == 0 else n for n, s in zip(desc.shape or (), desc.strides, strict=True))


def _integers(arg: int, shape: Sequence[int], dtype: torch.dtype, most: int = 255) -> Tensor:
    low, high = {torch.uint8: (0, most), torch.int8: (-128, 127)}.get(dtype, (-30_000, 30_000))
    return _numbers(shape, low, high, dtype, arg)


def _numbers(shape: Sequence[int], low: int, high: int, dtype: torch.dtype, seed: int) -> Tensor:
    """As ``selfcheck.integers``, from numbers drawn once."""
    count, period = math.prod(shape), _drawn(low, high, dtype, seed)
    if count > len(period):
        period = period.repeat(-(-count // len(period)))
    return period[:count].reshape(tuple(shape))


@functools.lru_cache(16)
def _drawn(low: int, high: int, dtype: torch.dtype, seed: int) -> Tensor:
    return selfcheck.integers((65_537,), low, high, dtype, seed)
