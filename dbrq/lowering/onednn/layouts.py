"""Layouts that torch has, seen as oneDNN wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .binding import row_major
from .values import Value


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor ``[N, C, ...]`` whose channels are next to each other.

    >>> channels_last((1, 8, 4, 5))
    (160, 1, 40, 8)
    """
    batch, *rest, channel = row_major((shape[0], *shape[2:], shape[1]))
    return (batch, channel, *rest)


def same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides lead to the same addresses; those of axes of size 1 do not matter."""
    return all(a == b or n == 1 for n, a, b in zip(shape, one, other, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps or overlaps, in whatever order."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def in_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dense strides that order the axes as ``strides`` does.

    >>> in_order((2, 3, 4), (4, 100, 1))
    (4, 8, 1)
    """
    axes = sorted(range(len(shape)), key=lambda i: (-strides[i], i))
    result = [0] * len(shape)
    step = 1
    for axis in reversed(axes):
        result[axis] = step
        step *= shape[axis]
    return tuple(result)


class Rows:
    """The last axis of a tensor as rows, all others as one, in the order in which they lie in memory.

    Attributes:
        value: ``[rows, width]``.
    """

    def __init__(self, value: Value, order: Sequence[int], pitch: int) -> None:
        self._shape, self._order = value.shape[:-1], order
        width = value.shape[-1]
        self.value = value.like((math.prod(self._shape), width), (pitch, 1))

    @classmethod
    def of(cls, value: Value) -> Rows | None:
        """None where the layout has no such view."""
        shape, strides = value.shape, value.strides
        if strides[-1] != 1 and shape[-1] != 1:
            return None
        order = sorted(range(len(shape) - 1), key=lambda i: (strides[i] if shape[i] != 1 else 0, -i))
        axes = [i for i in order if shape[i] != 1]
        pitch = strides[axes[0]] if axes else shape[-1]
        if pitch < shape[-1]:
            return None
        step = pitch
        for axis in axes:
            if strides[axis] != step:
                return None
            step *= shape[axis]
        return cls(value, order, pitch)

    def strides(self, width: int) -> tuple[int, ...]:
        """Strides of a dense result ``[..., width]`` whose rows lie in the same order."""
        result, step = [0] * len(self._shape), width
        for axis in self._order:
            result[axis] = step
            step *= self._shape[axis]
        return (*result, 1)
