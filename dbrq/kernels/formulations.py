"""Which way a convolution or linear layer is computed: the first that proved right on this CPU.

Kernels are tried in the order given here, each on data of its own (``trials``); the last way, float32 on the levels,
needs no kernel. Geometries that are known to go wrong on some CPU (``known_faults``) start further down on every CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import script
from .known_faults import WINDOWS, Geometry, fault_of
from .qparams import NO_POST_OP, PostOp, QParams

#: Windows are multiplied group by group: with more groups than this, float32 is faster.
_MOST_GROUPS = 64
#: Channels that leave no part of a tile or register unused.
_WHOLE = 64


IN_LEVELS = script.LevelLinear.words


class Way(enum.Enum):
    """How a convolution is computed."""

    NATIVE = "by the stock kernel"
    WIDER = "by the stock kernel, with one column more"
    CHANNELS = "by the stock kernel, with channels of zeros"
    WINDOWS = script.WindowConv.words
    LEVELS = script.LevelConv.words


@dataclass(frozen=True)
class Call:
    """What an answer of a kernel depends on beside its geometry.

    Attributes:
        zero_point: whether the kernel is given one that is not 0.
        top: the largest level of the input.
        out: type of the result.
        post_op, arguments, algorithm: as in ``PostOp``.
        summed: type of the value that is added, which the kernel writes over; None for none.
        threads: how many the kernel may use.
    """

    zero_point: bool
    top: int
    out: torch.dtype
    post_op: str = "none"
    arguments: tuple[float, ...] = ()
    algorithm: str = ""
    summed: torch.dtype | None = None
    threads: int = field(default_factory=torch.get_num_threads)


def call_of(
    zero_point: bool, top: int, out: torch.dtype, post_op: PostOp = NO_POST_OP, summed: torch.dtype | None = None
) -> Call:
    return Call(zero_point, top, out, post_op.name, tuple(map(float, post_op.args)), post_op.algorithm, summed)


def ways(geometry: Geometry) -> Sequence[Way]:
    """Ways to compute a convolution, best first."""
    fault = fault_of(geometry)
    windows = [Way.WINDOWS] if geometry.groups <= _MOST_GROUPS else []
    if fault is not None and fault.instead == WINDOWS:
        return [*windows, Way.LEVELS]
    channels = [Way.CHANNELS] if geometry.groups == 1 and geometry.shape[1] % _WHOLE else []
    return [Way.NATIVE, Way.WIDER, *channels, *windows, Way.LEVELS]


def is_stock(geometry: Geometry, way: Way) -> bool:
    """Whether the kernel is called with a geometry as it is."""
    return way is Way.NATIVE and fault_of(geometry) is None


def in_way(kernel: script.Conv, way: Way) -> script.Conv:
    """A scriptable convolution computed in another way; the same one for ``NATIVE``."""
    if way is Way.NATIVE:
        return kernel
    sums = isinstance(kernel, script.ConvSum)
    cls: type[script.Conv] = type(kernel)
    if way is Way.WINDOWS:
        cls = script.WindowConvSum if sums else script.WindowConv
    elif way is Way.LEVELS:
        cls = script.LevelConvSum if sums else script.LevelConv
    held = _held(kernel)
    held["may_be_thin"] = kernel.may_be_thin or way in (Way.WIDER, Way.CHANNELS)
    if way is Way.WIDER:
        held["widen"] = True
    elif way is Way.CHANNELS:
        more = -kernel.channels % _WHOLE
        held["more_channels"] = more
        held["_buffers"]["weight"] = torch.cat([kernel.weight, torch.zeros_like(kernel.weight[:, :1]).expand(
            -1, more, *(-1 for _ in kernel.kernel))], 1)  # fmt: skip
    return script.restored(cls, held)


_IN_LEVELS: dict[type[script.Linear], type[script.Linear]] = {
    script.Linear: script.LevelLinear,
    script.PointwiseConv: script.LevelPointwiseConv,
    script.LinearAdd: script.LevelLinearAdd,
    script.PointwiseConvAdd: script.LevelPointwiseConvAdd,
    script.DynamicLinear: script.LevelDynamicLinear,
}


def in_levels(kernel: script.Linear) -> script.Linear:
    """A scriptable linear layer computed in float32."""
    cls = _IN_LEVELS.get(type(kernel))
    return kernel if cls is None else script.restored(cls, _held(kernel))


def _held(kernel: nn.Module) -> dict:
    held = dict(kernel.__dict__)
    held["_buffers"] = dict(held["_buffers"])
    return held


def geometry_of(kernel: script.Conv) -> Geometry:
    """The geometry that a scriptable convolution asks its kernel for, with the example's input."""
    return Geometry(kernel.shape, kernel.weight.shape[0], kernel.kernel, kernel.stride, kernel.padding, kernel.dilation,
                    kernel.groups)  # fmt: skip


def stand_in(
    weight: Tensor, scale: Tensor, bias: Tensor | None, geometry: Geometry, way: Way, qparams: QParams,
    post_op: PostOp, out: QParams | None, summed: QParams | bool = False, dtype: torch.dtype = torch.float32,
) -> Callable[..., Tensor]:  # fmt: skip
    """A convolution that is not the stock kernel's, for inputs of the geometry's shape.

    Args:
        summed: qparams of another value that is added, True where that is float32, False for none.
    """
    arguments = (weight, scale, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups, qparams,
                 out, geometry.shape, post_op, dtype)  # fmt: skip
    if summed is False:
        return in_way(script.Conv(*arguments), way)
    other = summed if isinstance(summed, QParams) else None
    return in_way(script.ConvSum(*arguments, other=other, owned=True), way)
