"""Convolutions by torch's int8 kernel, asked so that no known fault is met."""

# ruff: noqa: RUF005, RUF012, UP006, UP035, UP045 (TorchScript reads these annotations)

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch
from torch import Tensor

from ..known_faults import is_one_column, is_one_frame, is_one_step, lies_in_padding, plain_dilation
from ..padding import enlarged
from ..qparams import NO_POST_OP, PostOp, QParams
from ..stock import PAD_BY_HAND_BELOW
from .base import KERNEL_CONSTANTS, Kernel

if TYPE_CHECKING:
    from .base import number


def dense(x: Tensor) -> Tensor:
    """A convolution's input or result in the kernel's layout."""
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


def settled(
    size: List[int], kernel: List[int], stride: List[int], padding: List[int], dilation: List[int], widen: bool
) -> Tuple[List[int], List[int], List[int], List[int]]:
    """How to ask a kernel for a convolution so that it is computed right: see ``known_faults``.

    Args:
        size: of the input, ``[batch, channels, *spatial]``.
        widen: ask for one column more in any case.

    Returns:
        Spatial sizes of the input to give it; what of that lies before the values; stride; padding.
    """
    n = len(kernel)
    spatial = size[2:]
    before = [0] * n
    stride = list(stride)
    padding = list(padding)
    if is_one_frame(size, padding):
        for i in range(n):
            before[i] = padding[i]
            spatial[i] += 2 * padding[i]
            padding[i] = 0
    if widen or is_one_column(size[:2] + spatial, kernel, stride, padding, dilation):
        spatial[n - 1] += stride[n - 1]
    elif is_one_step(spatial, kernel, stride, padding):
        stride[n - 1] = 1
    return spatial, before, stride, padding


class Conv(Kernel):
    """conv1d, conv2d or conv3d of a batched uint8 tensor, with a post-op.

    Attributes:
        widen: ask the kernel for one column more than is wanted.
        more_channels: of zeros, appended to the input.
        may_be_thin: ``is_thin`` is asked of inputs; elsewhere TorchScript leaves out what would follow.
        fuses_sum: whether one kernel adds another value (in ``ConvSum``).
        words: how it is computed, for reports; "" for the stock kernel itself.
    """

    __constants__ = [
        *KERNEL_CONSTANTS,
        "stride",
        "padding",
        "hand_padding",
        "fill",
        "dilation",
        "groups",
        "channels",
        "kernel",
        "shape",
        "ndim",
        "least",
        "pads_by_hand",
        "two_columns",
        "thin_below",
        "may_be_thin",
        "widen",
        "more_channels",
        "fuses_sum",
        "room",
    ]
    words = ""
    fuses_sum = True

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Optional[Tensor], stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int, input: QParams, out: Optional[QParams], shape: Sequence[int],
        post_op: PostOp = NO_POST_OP, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(weight, scale, bias, input, out, post_op, dtype)
        self.ndim = weight.dim() - 2
        self.channels, self.kernel = weight.shape[1] * groups, tuple(weight.shape[2:])
        self.stride, self.groups = tuple(stride), groups
        self.dilation = tuple(plain_dilation(list(self.kernel), list(dilation)))
        self.padding, self.hand_padding = tuple(padding), tuple([0] * self.ndim)
        small = input.zero_point and any(padding) and math.prod(shape) <= PAD_BY_HAND_BELOW
        if small or lies_in_padding(list(self.kernel), list(padding), list(self.dilation)):
            self.padding, self.hand_padding = self.hand_padding, self.padding
        self.fill = self.input_zero_point
        if input.zero_point and not any(self.padding):
            self._bias_with_zero_point()
        self.pads_by_hand = any(self.hand_padding)
        extent = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        self.room = tuple(2 * p - e for p, e in zip(self.padding, extent, strict=True))
        least = [max(1, e - 2 * p) for e, p in zip(extent, padding, strict=True)]
        self.least = tuple([*least, 1, 1][:3])
        self.shape = (*shape[:2], *(s + 2 * p for s, p in zip(shape[2:], self.hand_padding, strict=True)))
        self.two_columns = extent[-1] + self.stride[-1] - 2 * self.padding[-1]
        pointwise = not any((*self.padding, *self.hand_padding)) and {*self.kernel, self.stride[-1]} == {1}
        self.thin_below = 0 if pointwise else self.two_columns
        self.may_be_thin = self.thin_below > 0 or self.ndim == 3
        self.widen, self.more_channels = False, 0
        self.packed = self.pack()

    def takes_image(self) -> None:
        """Read what ``QuantizeImage`` writes: four channels, padded."""
        self.weight = torch.cat([self.weight, torch.zeros_like(self.weight[:, :1])], 1)
        self.channels, self.pads_by_hand = 4, False
        if any(self.hand_padding):
            pads = [2 * p for p in (*self.hand_padding, 0)]
            self.least = tuple(least + p for least, p in zip(self.least, pads, strict=True))
        self.shape = (self.shape[0], 4, *self.shape[2:])
        self.packed = self.pack()

    def pack(self) -> Tensor:
        size = list(self.shape)
        spatial, _, stride, padding = settled(
            size, list(self.kernel), list(self.stride), list(self.padding), list(self.dilation), self.widen
        )
        size = [size[0], size[1] + self.more_channels] + spatial
        return torch.ops.onednn.qconv_prepack(
            self.weight, self.scale, 1.0, 0, stride, padding, list(self.dilation), self.groups, size
        )

    def prepared(self, q: Tensor) -> Tensor:
        """The input, checked, padded and in the kernel's layout."""
        assert q.dtype == torch.uint8, "dbrq: an int8 convolution takes uint8"
        assert q.dim() == self.ndim + 2, f"dbrq: an int8 convolution takes {self.ndim + 2} dimensions and got {q.dim()}"
        assert q.size(1) == self.channels, f"dbrq: a convolution of {self.channels} channels got {q.size(1)}"
        fits = q.size(2) >= self.least[0]
        if self.ndim > 1:
            fits = fits and q.size(3) >= self.least[1]
        if self.ndim > 2:
            fits = fits and q.size(4) >= self.least[2]
        assert fits, "dbrq: the input is smaller than the convolution's kernel"
        if self.pads_by_hand:
            return self.padded(q, list(self.hand_padding))
        return dense(q)

    def padded(self, q: Tensor, pads: List[int]) -> Tensor:
        """The input with its zero point around it, in the kernel's layout."""
        spatial = list(q.size())[2:]
        for i in range(len(pads)):
            spatial[i] += 2 * pads[i]
        return enlarged(q, spatial, pads, self.fill)

    def output_size(self, q: Tensor) -> List[int]:
        """The shape of the convolution of a prepared input."""
        sizes = [q.size(0), self.weight.size(0)]
        for i in range(len(self.room)):
            sizes.append((q.size(2 + i) + self.room[i]) // self.stride[i] + 1)
        return sizes

    def is_thin(self, q: Tensor) -> bool:
        """Whether a prepared input is one that the kernel might compute wrong, or always is asked in another way."""
        thin = self.widen or self.more_channels > 0 or q.size(-1) < self.thin_below
        if self.ndim == 3:
            thin = thin or q.size(2) == 1
        return thin

    def convolved(
        self, q: Tensor, scale: float, zero_point: int, dtype: torch.dtype, post_op: str
    ) -> Tensor:  # fmt: skip
        """The convolution of a prepared input."""
        if q.size(0) == 0:  # which the kernel does not take
            return torch.empty(self.output_size(q), dtype=dtype)
        if self.may_be_thin:  # noqa: SIM102 (a constant alone is decided when this is compiled)
            if self.is_thin(q):
                return self.convolved_thin(q, scale, zero_point, dtype, post_op)
        arguments: List[Optional[number]] = []
        if post_op != "none" and self.arguments > 0:
            arguments.append(self.first)
        if post_op != "none" and self.arguments > 1:
            arguments.append(self.second)
        return torch.ops.onednn.qconv_pointwise(
            q, self.input_scale, self.input_zero_point, self.packed, self.scale, self.zero_points, self.bias,
            self.stride, self.padding, self.dilation, self.groups, scale, zero_point, dtype, post_op, arguments,
            self.algorithm,
        )  # fmt: skip

    def convolved_thin(
        self, q: Tensor, scale: float, zero_point: int, dtype: torch.dtype, post_op: str
    ) -> Tensor:  # fmt: skip
        """The same, asked so that no known fault is met."""
        width = (q.size(-1) - self.two_columns) // self.stride[-1] + 2
        spatial, before, stride, padding = settled(
            list(q.size()), list(self.kernel), list(self.stride), list(self.padding), list(self.dilation), self.widen
        )
        if spatial != list(q.size())[2:]:
            q = enlarged(q, spatial, before, self.fill)
        if self.more_channels > 0:
            q = dense(torch.cat([q, q.narrow(1, 0, 1).expand(_with_channels(q, self.more_channels))], 1))
        arguments: List[Optional[number]] = []
        if post_op != "none" and self.arguments > 0:
            arguments.append(self.first)
        if post_op != "none" and self.arguments > 1:
            arguments.append(self.second)
        result = torch.ops.onednn.qconv_pointwise(
            q, self.input_scale, self.input_zero_point, self.packed, self.scale, self.zero_points, self.bias,
            stride, padding, list(self.dilation), self.groups, scale, zero_point, dtype, post_op, arguments,
            self.algorithm,
        )  # fmt: skip
        return result if result.size(-1) == width else dense(result.narrow(-1, 0, width))

    def forward(self, q: Tensor) -> Tensor:
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        result = self.convolved(self.prepared(q), self.output_scale, self.output_zero_point, dtype, self.post_op)
        return result if self.top == 255 else result.clamp_(0, self.top)


def _with_channels(x: Tensor, channels: int) -> List[int]:
    sizes = list(x.size())
    sizes[1] = channels
    return sizes


class ConvSum(Conv):
    """conv2d plus another value [+ relu], written over that value where ``owned``, else over a copy of it.

    The other value and the result are both uint8, or both of ``dtype``.
    """

    __constants__ = [*Conv.__constants__, "other_scale", "other_zero_point", "owned"]

    def __init__(self, *args: Any, other: Optional[QParams], owned: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.other_scale, self.other_zero_point = (1.0, 0) if other is None else (other.scale, other.zero_point)
        self.owned = owned

    # torch means ``forward`` to take what it likes in each class; TorchScript takes no reason behind an ignore.
    def forward(self, q: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        assert other.dtype == dtype, "dbrq: the other operand of a fused add has the wrong type"
        q = self.prepared(q)
        # Where it broadcasts, the kernel would take it for memory that is not there.
        apart = not self.fuses_sum or list(other.size()) != self.output_size(q) or q.size(0) == 0
        if self.may_be_thin:
            apart = apart or self.is_thin(q)
        if apart:
            return self.separately(q, other)
        if self.owned:
            accumulator = other.contiguous(memory_format=torch.channels_last)
        else:
            accumulator = other.clone(memory_format=torch.channels_last)
        result = torch.ops.onednn.qconv2d_pointwise(
            q, self.input_scale, self.input_zero_point, self.packed, self.scale, self.zero_points, accumulator,
            self.bias, self.stride, self.padding, self.dilation, self.groups, self.output_scale, self.output_zero_point,
            dtype, self.other_scale, self.other_zero_point, "sum", 1.0, self.post_op, [], "",
        )  # fmt: skip
        return result if self.top == 255 else result.clamp_(0, self.top)

    def separately(self, q: Tensor, other: Tensor) -> Tensor:
        """The same in two steps; ``q`` is prepared."""
        result = self.convolved(q, 1.0, 0, torch.float32, "none")
        return self.summed(result, other, self.other_scale, self.other_zero_point)
