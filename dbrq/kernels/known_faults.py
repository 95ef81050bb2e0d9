"""Convolutions that torch's int8 kernels compute wrong on some CPU, and how they are computed instead, on every CPU.

A file made here runs elsewhere, so nobody may choose these, whether or not they are right here. Found by
``benchmarks/kernel_scan.py`` (AVX512-VNNI and AVX512 alone; AVX2 is right throughout), by reports from CPUs with AMX,
and by reading oneDNN 3.12 (``jit_brgemm_conv_utils.cpp``). A predicate looks at the geometry as the kernel would get
it, with what is padded by hand padded already. Those that depend on the input's size are decided where the convolution
runs, in TorchScript too, which is why they are plain functions of lists.
"""

# ruff: noqa: UP006, UP035 (TorchScript reads these annotations)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import List

#: Kernels from this width on are few, and one of them, wav2vec 2.0's of 128 with 48 channels a group, is wrong on AMX.
_WIDE = 32
#: Channels of a group that fill a row of an AMX tile (int8). Fewer are padded, or share a row with other columns.
_TILE = 64


@dataclass(frozen=True)
class Geometry:
    """A convolution of int8 values, apart from its numbers.

    Attributes:
        shape: ``[batch, channels, *spatial]`` of the input.
        outputs: output channels.
        kernel, stride, padding, dilation: one int for each spatial dimension.
    """

    shape: tuple[int, ...]
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def result(self) -> tuple[int, ...]:
        """Spatial sizes of the result."""
        return tuple(
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, pad, dil, k, step in zip(
                self.shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )

    @property
    def per_group(self) -> int:
        """Input channels of a group."""
        return self.shape[1] // self.groups

    @property
    def products(self) -> int:
        """Products summed up for one element of the result."""
        return self.per_group * math.prod(self.kernel)

    @property
    def macs(self) -> int:
        return math.prod(self.result) * self.shape[0] * self.outputs * self.products


def plain_dilation(kernel: List[int], dilation: List[int]) -> List[int]:
    """The dilation, 1 along axes where the kernel has one element: there it means nothing, and with padding oneDNN
    reads memory that is not there.

    >>> plain_dilation([1, 3], [3, 3])
    [1, 3]
    """
    return [1 if k == 1 else d for k, d in zip(kernel, dilation, strict=True)]


def lies_in_padding(kernel: List[int], padding: List[int], dilation: List[int]) -> bool:
    """Whether a kernel may see nothing but padding: wrong sums for a zero point, and on AVX512 SIGSEGV."""
    return any(p > d * (k - 1) for k, p, d in zip(kernel, padding, dilation, strict=True))


def is_one_frame(size: List[int], padding: List[int]) -> bool:
    """Whether a volume of one frame is padded with others; the kernel then reads memory that nobody wrote.

    Args:
        size: of the input, ``[batch, channels, *spatial]``.
    """
    return len(size) == 5 and size[2] == 1 and padding[0] > 0


def is_one_column(
    size: List[int], kernel: List[int], stride: List[int], padding: List[int], dilation: List[int]
) -> bool:
    """Whether a result is one column wide and has several rows: they are taken for columns, a stride apart."""
    n = len(kernel)
    rows = 1
    points = 1
    padded = 0
    for i in range(n):
        points *= kernel[i]
        padded += padding[i]
        out = (size[i + 2] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        if i < n - 1:
            rows *= out
        elif out != 1:
            return False
    return rows > 1 and (points > 1 or padded > 0)


def is_one_step(size: List[int], kernel: List[int], stride: List[int], padding: List[int]) -> bool:
    """Whether an unpadded image is as wide as the kernel, so that any stride gives the same as 1 does.

    brgemm convolutions are wrong where it is as wide as the stride too, as in ``Conv2d(16, 16, 8, stride=8)`` on 8x8.
    """
    return size[-1] == kernel[-1] and padding[-1] == 0 and stride[-1] > 1


def has_joined_columns(geometry: Geometry) -> bool:
    """Whether oneDNN may take several columns for one with more channels, and fewer of these than a tile's row.

    It does for unpadded kernels whose width and stride have a divisor in common. On AMX the weights' channels are
    padded to whole rows before, and no longer fit: ``Conv2d(32, 32, 4, stride=4)``, ``Conv2d(32, 32, 8, stride=8)``.
    """
    g = geometry
    return (
        g.groups == 1
        and g.per_group % 4 == 0
        and g.per_group < _TILE
        and g.padding[-1] == 0
        and g.dilation[-1] == 1
        and math.gcd(g.kernel[-1], g.stride[-1]) > 1
    )


def has_few_channels_and_a_wide_kernel(geometry: Geometry) -> bool:
    """Whether oneDNN sums over channels and columns of the kernel at once, in more than one row of an AMX tile.

    Seen wrong where they fill rows exactly (16 channels and 8 columns, 24 and 16 or 32) and for 3 channels and 32
    columns (the patches of ViT-B/32); 24 channels and 31 or 7 columns, or 16 and 5, are right.
    """
    g = geometry
    if g.dilation[-1] > 1 or g.per_group == g.outputs // g.groups == 1:  # a depthwise convolution has its own kernel
        return False
    row = g.per_group * g.kernel[-1]
    fills = g.kernel[-1] > 3 and row % _TILE == 0
    return g.kernel[-1] >= _WIDE or (g.per_group < _TILE // 2 and row >= _TILE and (fills or g.kernel[-1] >= 8))


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: what these convolutions have in common.
        cpus: where they were seen to go wrong.
        torch: the versions of torch, and of the oneDNN inside, that do it.
        wrong: what happens.
        instead: how they are computed.
        holds: whether a geometry is one.
    """

    name: str
    cpus: str
    torch: str
    wrong: str
    instead: str
    holds: Callable[[Geometry], bool]


#: For the rows whose geometries no native kernel may get.
WINDOWS = "windows"
_SEEN = "2.13 (oneDNN 3.12)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "dilation along an axis where the kernel has one element", "AVX512, AMX", _SEEN, "SIGSEGV", "dilation 1",
        lambda g: list(g.dilation) != plain_dilation(list(g.kernel), list(g.dilation)),
    ),
    Fault(
        "a kernel that may see padding alone", "AVX512, AMX", _SEEN, "wrong sums; SIGSEGV", "padded by hand",
        lambda g: lies_in_padding(list(g.kernel), list(g.padding), list(g.dilation)),
    ),
    Fault(
        "one frame padded with others", "AVX512, AMX", _SEEN, "reads memory that nobody wrote", "padded by hand",
        lambda g: is_one_frame(list(g.shape), list(g.padding)),
    ),
    Fault(
        "several columns in one", "AMX", _SEEN, "garbage", WINDOWS, has_joined_columns,
    ),
    Fault(
        "few channels and a wide kernel", "AMX", _SEEN, "garbage", WINDOWS, has_few_channels_and_a_wide_kernel,
    ),
    Fault(
        "a result one column wide", "AVX512, AMX", _SEEN, "rows behind the first are garbage", "one column more",
        lambda g: is_one_column(list(g.shape), list(g.kernel), list(g.stride), list(g.padding), list(g.dilation)),
    ),
    Fault(
        "an image as wide as kernel and stride", "AVX512, AMX", _SEEN, "garbage", "stride 1",
        lambda g: is_one_step(list(g.shape), list(g.kernel), list(g.stride), list(g.padding)),
    ),
)  # fmt: skip


def fault_of(geometry: Geometry) -> Fault | None:
    """The first row of the table that a geometry is in."""
    return next((fault for fault in FAULTS if fault.holds(geometry)), None)
