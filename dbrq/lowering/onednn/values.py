"""What a plan is made of: buffers, values in them, and steps that read and write them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .binding import Arg, Desc, Primitive, row_major


def plainly(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its numbers: neither their negatives nor their conjugates."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


class Kind(enum.Enum):
    """Whose memory a buffer is."""

    ARENA = "the plan's"
    INPUT = "the caller's"
    FRESH = "made by torch in each call"
    OUTPUT = "made in each call, and returned"
    CONSTANT = "the model's"
    STATE = "the model's, written to by calls"


FIXED = (Kind.ARENA, Kind.CONSTANT, Kind.STATE)


class Buffer:
    """A piece of memory.

    Attributes:
        size: in bytes.
        tensor: while a plan is made, what holds it; of constants and state always.
        first, last: steps between which it is in use.
        offset: in the arena, bytes; set when the arena is planned.
        version: how often what it holds was written over.
    """

    __slots__ = ("first", "kind", "last", "offset", "size", "tensor", "version")

    def __init__(self, kind: Kind, size: int, tensor: Tensor | None, step: int) -> None:
        self.kind, self.size, self.tensor = kind, size, tensor
        self.first = self.last = step
        self.offset = self.version = 0


class Value:
    """A tensor in a buffer, in one of torch's layouts.

    Attributes:
        strides: in elements.
        offset: in bytes, from the buffer's start.
    """

    __slots__ = ("_desc", "buffer", "dtype", "offset", "shape", "strides")

    def __init__(
        self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...], offset: int = 0
    ) -> None:
        self.buffer, self.shape, self.dtype, self.strides, self.offset = buffer, shape, dtype, strides, offset
        self._desc: Desc | None = None

    @property
    def desc(self) -> Desc:
        if self._desc is None:
            self._desc = Desc.strided(self.shape, self.dtype, self.strides)
        return self._desc

    @property
    def place(self) -> Place:
        return Place(self.buffer, self.offset, self.desc)

    @property
    def is_row_major(self) -> bool:
        return all(s == r or n == 1 for s, r, n in zip(self.strides, row_major(self.shape), self.shape, strict=True))

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def like(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Value:
        """The same memory, seen otherwise."""
        return Value(self.buffer, tuple(shape), self.dtype, tuple(strides), self.offset)

    def in_tensor(self, tensor: Tensor) -> Tensor:
        """The value's tensor; ``tensor`` holds its buffer."""
        size = torch.empty((), dtype=self.dtype).element_size()
        flat = tensor if tensor.dtype is self.dtype else tensor.view(self.dtype)
        start = flat.storage_offset() + self.offset // size
        return flat.as_strided(self.shape, self.strides, start)


@dataclass(frozen=True)
class Place:
    """Memory with a layout, as primitives take it; the layout may be oneDNN's own."""

    buffer: Buffer
    offset: int
    desc: Desc


@dataclass(frozen=True)
class PrimitiveStep:
    """One execution of a primitive.

    Attributes:
        op: path of the op in reports.
        words: what it computes, for people.
        macs: multiply-accumulates.
    """

    primitive: Primitive
    places: dict[int, Place]
    op: str
    words: str
    macs: int = 0

    def described(self) -> tuple[str, str, str, tuple[int, ...]]:
        """Op, kernel, what it computes, and the shape of its result."""
        return self.op, self.primitive.implementation, self.words, self.places[Arg.DST].desc.shape or ()


@dataclass(frozen=True)
class TorchStep:
    """One call of torch.

    Attributes:
        args, kwargs: ``Value`` stands for a tensor.
        results: (number of the leaf in the result, its value) of new tensors.
    """

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[tuple[int, Value], ...]
    op: str
    macs = 0

    def described(self) -> tuple[str, str, str, tuple[int, ...]]:
        """Op, function, what it computes, and the shape of its result."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return self.op, f"torch: {name}", name, self.results[0][1].shape if self.results else ()


Step = PrimitiveStep | TorchStep
