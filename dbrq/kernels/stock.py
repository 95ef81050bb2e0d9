"""Torch's int8 convolutions and linear layers as they are, right or wrong: what ``packed`` calls once they are proved.

The only calls of ``torch.ops.onednn``. Some of those ops corrupt memory or answer silently wrong when misused
(docs/kernels.md), so shapes, dtypes and layouts are checked before. Activations are uint8, weights int8 and symmetric.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import packed_layout
from ..errors import KernelInputError
from .known_faults import lies_in_padding, plain_dilation
from .padding import enlarged
from .qparams import NO_POST_OP, PostOp, QParams, require

# Above this many elements, padding the input by hand costs more than the weights' reorder that it saves.
PAD_BY_HAND_BELOW = 400_000
qconv = torch.ops.onednn.qconv_pointwise.default
qconv_sum = torch.ops.onednn.qconv2d_pointwise.binary
qlinear = torch.ops.onednn.qlinear_pointwise.default
qlinear_sum = torch.ops.onednn.qlinear_pointwise.binary


def zero_point_in_bias(weight: Tensor, scale: Tensor, input_scale: float, zero_point: int) -> Tensor:
    """What a zero point of the input that the kernel is not given adds to each output channel, float32 ``[out]``.

    Rounded as kernels with VNNI round: over nothing but padding the sum is exactly 0.
    """
    sums = weight.flatten(1).sum(1, dtype=torch.int32) * -zero_point
    return sums.to(torch.float32) * input_scale * scale


class StockConv:
    """An int8 convolution by torch's kernel: conv1d, conv2d or conv3d by the rank of ``weight``.

    Args:
        weight: int8 ``[out, in / groups, *kernel]``.
        scale: float32 ``[out]``, one per output channel.
        bias: float32 ``[out]`` or None.
        stride, padding, dilation: one int per spatial dimension.
        groups: as in ``torch.nn.Conv2d``.

    Safe to call from several threads: what is derived is rebuilt whole and assigned once.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        require(
            weight.dtype is torch.int8 and weight.dim() in (3, 4, 5), "conv", "an int8 weight of rank 3 to 5", weight
        )
        self.ndim = weight.dim() - 2
        self.weight = weight.contiguous()
        self.scale = scale.to(torch.float32).contiguous()
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self.kernel = list(weight.shape[2:])
        self.stride, self.padding = list(stride), list(padding)
        self.dilation = plain_dilation(self.kernel, list(dilation))
        self.groups = groups
        self._pads = lies_in_padding(self.kernel, self.padding, self.dilation)
        self.in_channels = weight.shape[1] * groups
        self._zero_points = torch.zeros(weight.shape[0], dtype=torch.int64)
        self._packed: dict[tuple, Tensor] = {}  # padding and input shape -> one of ...
        self._layouts: dict[bytes, Tensor] = {}  # layout -> packed weight
        self._shifted_bias: dict[tuple[float, int], Tensor] = {}
        self._shapes: dict[torch.Size, torch.Size] = {}

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the result for an input of ``shape`` ``[batch, in, *spatial]``; raises for what no kernel takes."""
        known = self._shapes.get(shape)
        if known is not None:
            return known
        if len(shape) != self.ndim + 2 or shape[1] != self.in_channels:
            raise KernelInputError(
                f"conv{self.ndim}d cannot take this input",
                expected=f"[batch, {self.in_channels}, {self.ndim} spatial dims]",
                got=tuple(shape),
                hint="pass the shape the layer was built for",
            )
        spatial = [
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, pad, dil, k, step in zip(
                shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        if min(spatial, default=1) <= 0:
            raise KernelInputError(
                f"conv{self.ndim}d: the input is smaller than the kernel",
                expected=f"spatial sizes of at least the kernel {self.kernel} after padding {self.padding}",
                got=tuple(shape),
            )
        result = torch.Size([shape[0], self.weight.shape[0], *spatial])
        if len(self._shapes) > 256:
            self._shapes.clear()
        self._shapes[shape] = result
        return result

    def stock(
        self, q: Tensor, qparams: QParams, post_op: PostOp, out: QParams | None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The same by torch's kernel, whether or not it is right; ``dtype`` where ``out`` is None."""
        q, zero_point, packed, bias, padding = self._operands(q, qparams)
        scale, zero, dtype = (1.0, 0, dtype) if out is None else (out.scale, out.zero_point, torch.uint8)
        result = qconv(
            q, qparams.scale, zero_point, packed, self.scale, self._zero_points, bias,
            self.stride, padding, self.dilation, self.groups, scale, zero, dtype,
            post_op.name, post_op.args, post_op.algorithm,
        )  # fmt: skip
        return result if out is None or out.quant_max == 255 else result.clamp_(out.quant_min, out.quant_max)

    def stock_sum(
        self, q: Tensor, qparams: QParams, accumulator: Tensor, accumulated: QParams | None, relu: bool,
        out: QParams | None, dtype: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        """The same by torch's kernel, whether or not it is right; the accumulator has its layout."""
        q, zero_point, packed, bias, padding = self._operands(q, qparams)
        dtype = dtype if out is None else torch.uint8
        scale, zero = (1.0, 0) if out is None else (out.scale, out.zero_point)
        acc_scale, acc_zero = (1.0, 0) if accumulated is None else (accumulated.scale, accumulated.zero_point)
        result = qconv_sum(
            q, qparams.scale, zero_point, packed, self.scale, self._zero_points, accumulator, bias,
            self.stride, padding, self.dilation, self.groups, scale, zero, dtype,
            acc_scale, acc_zero, "sum", 1.0, "relu" if relu else "none", [], "",
        )  # fmt: skip
        return result if out is None or out.quant_max == 255 else result.clamp_(out.quant_min, out.quant_max)

    def _operands(self, q: Tensor, qparams: QParams) -> tuple[Tensor, int, Tensor, Tensor | None, list[int]]:
        """Input, zero point, packed weight, bias and padding as the kernel is best given them.

        A zero point other than 0 makes the kernel reorder its weights at every call. Without padding its effect is a
        constant per output channel, so it goes into the bias; with padding the input is first padded by hand.
        """
        zero_point, padding, bias = qparams.zero_point, self.padding, self.bias
        if self._pads_by_hand(q.shape, zero_point):
            q = enlarged(
                q, [n + 2 * p for n, p in zip(q.shape[2:], padding, strict=True)], padding, zero_point
            )  # and into channels_last, in the same copy
            padding = [0] * self.ndim
        if self.ndim == 2:
            q = q.contiguous(memory_format=torch.channels_last)
        if zero_point and not any(padding):
            zero_point, bias = 0, self._bias_with_zero_point(qparams)
        return q, zero_point, self._pack(padding, q.shape), bias, padding

    def _pads_by_hand(self, shape: torch.Size, zero_point: int) -> bool:
        small = zero_point != 0 and any(self.padding) and shape.numel() <= PAD_BY_HAND_BELOW
        return small or self._pads

    def _pack(self, padding: list[int], shape: torch.Size) -> Tensor:
        """The weight in the layout the kernel wants for this input shape; with another it would reorder at every
        call.
        """
        key = (*padding, *shape)
        packed = self._packed.get(key)
        if packed is None:
            packed = torch.ops.onednn.qconv_prepack(
                self.weight, self.scale, 1.0, 0, self.stride, padding, self.dilation, self.groups, list(shape)
            )
            layout = packed_layout(packed)
            packed = self._layouts.setdefault(layout, packed)
            if len(self._packed) > 256:
                self._packed.clear()
            self._packed[key] = packed
        return packed

    def _bias_with_zero_point(self, qparams: QParams) -> Tensor:
        key = (qparams.scale, qparams.zero_point)
        bias = self._shifted_bias.get(key)
        if bias is None:
            shift = zero_point_in_bias(self.weight, self.scale, qparams.scale, qparams.zero_point)
            bias = shift if self.bias is None else shift + self.bias
            if len(self._shifted_bias) > 64:
                self._shifted_bias.clear()
            self._shifted_bias[key] = bias
        return bias


class StockLinear:
    """An int8 linear layer by torch's kernel.

    Args:
        weight: int8 ``[out, in]``.
        scale: float32 ``[out]`` or ``[1]``.
        bias: float32 ``[out]`` or None.
    """

    ndim = 0

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        require(weight.dtype is torch.int8 and weight.dim() == 2, "linear", "an int8 weight of rank 2", weight)
        if bias is not None:  # one of another shape, the kernel takes for none
            require(bias.shape == weight.shape[:1], "linear", f"a bias of shape {list(weight.shape[:1])}", bias)
        self.weight, self.weight_shape = weight, weight.shape
        self.scale = scale.to(torch.float32).contiguous()
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._zero_points = torch.zeros(self.scale.numel(), dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the result for an input of ``shape`` ``[..., in]``; raises for what no kernel takes."""
        if len(shape) < 1 or shape[-1] != self.weight_shape[1]:
            raise KernelInputError(
                "linear cannot take this input", expected=f"[..., {self.weight_shape[1]}]", got=tuple(shape)
            )
        return shape[:-1] + self.weight_shape[:1]

    def stock(
        self, rows: Tensor, qparams: QParams, post_op: PostOp = NO_POST_OP, out: QParams | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        """The same by torch's kernel, whether or not it is right, of two dimensions or more; ``dtype`` where ``out`` is
        None.
        """
        scale, zero, dtype = (1.0, 0, dtype) if out is None else (out.scale, out.zero_point, torch.uint8)
        return qlinear(
            rows, qparams.scale, qparams.zero_point, self._packed, self.scale, self._zero_points, self.bias, scale,
            zero, dtype, post_op.name, post_op.args, post_op.algorithm,
        )  # fmt: skip

    def stock_sum(
        self, rows: Tensor, qparams: QParams, accumulator: Tensor, accumulated: QParams | None, relu: bool,
        out: QParams | None, dtype: torch.dtype = torch.float32, binary: str = "sum",
    ) -> Tensor:  # fmt: skip
        """The same by torch's kernel, whether or not it is right; ``binary`` "add" only reads the other value."""
        scale, zero, dtype = (1.0, 0, dtype) if out is None else (out.scale, out.zero_point, torch.uint8)
        other_scale, other_zero = (1.0, 0) if accumulated is None else (accumulated.scale, accumulated.zero_point)
        return qlinear_sum(
            rows, qparams.scale, qparams.zero_point, self._packed, self.scale, self._zero_points, accumulator,
            self.bias, scale, zero, dtype, other_scale, other_zero, binary, 1.0, "relu" if relu else "none", [], "",
        )  # fmt: skip


@functools.cache
def has_exact_int8_dot() -> bool:
    """Whether u8 x s8 products accumulate exactly on this CPU (VNNI or AMX).

    Without VNNI pairs of products saturate at 16 bits. Asked of the kernel itself rather than of CPU flags, since
    that is what matters: 255 * 127 * 2 does not fit 16 bits.
    """
    k = 64
    x = torch.full((4, k), 255, dtype=torch.uint8)
    weight = torch.full((16, k), 127, dtype=torch.int8)
    packed = StockLinear(weight, torch.ones(16), None)
    return bool((packed.stock(x, QParams(1.0, 0)) == 255.0 * 127.0 * k).all())
