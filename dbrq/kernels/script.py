"""The kernels as modules that TorchScript takes: what a lowered graph calls.

Shapes, ranks and element types are checked before a kernel sees them, here as in eager mode: some of these ops
corrupt memory when misused. Weights are kept as int8 and packed when the module is made, loaded or copied, for the
input shape of the example. The same code runs in Python, where it is slower.
"""

# ruff: noqa: F821 (``number`` is TorchScript's name for int or float, which Python has not)
# ruff: noqa: RUF005, RUF012, UP006, UP035, UP045 (TorchScript reads these annotations)

import math
from collections.abc import Sequence
from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn

from .known_faults import is_one_column, is_one_frame, is_one_step, lies_in_padding, plain_dilation
from .qparams import NO_POST_OP, ROUND, PostOp, QParams
from .stock import PAD_BY_HAND_BELOW, zero_point_in_bias


def _bits(x: Tensor) -> Tensor:
    """int32 whose low 8 bits are those of a float32 tensor of shifted levels.

    ``x.view(torch.int32)`` would do, but TorchScript lacks it, and ``set_`` wants contiguous memory. Elsewhere the
    number itself serves, since ``ROUND`` is a multiple of 256.
    """
    if x.is_contiguous():
        return torch.empty([0], dtype=torch.int32).set_(x, 0, x.size(), x.stride())
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.empty([0], dtype=torch.int32).set_(x.permute([0, 2, 3, 1]), 0, x.size(), x.stride())
    return x.to(torch.int32)


class Quantize(nn.Module):
    """float32 or bfloat16 -> uint8 of the same shape, rounding half to even.

    ``channels_last``: write 4-d results in that layout, in the same pass.
    """

    __constants__ = ["channels_last", "high", "inverse", "low"]
    shift: Tensor

    def __init__(self, qparams: QParams, channels_last: bool = False) -> None:
        super().__init__()
        self.inverse = 1.0 / qparams.scale
        self.low, self.high = ROUND + qparams.quant_min, ROUND + qparams.quant_max
        self.channels_last = channels_last
        self.register_buffer("shift", torch.tensor(ROUND + qparams.zero_point, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            x = x.to(torch.float32)
        bits = _bits(torch.add(self.shift, x, alpha=self.inverse).clamp_(self.low, self.high))
        if self.channels_last and x.dim() == 4:
            return bits.to(torch.uint8, memory_format=torch.channels_last)
        return bits.to(torch.uint8)


class QuantizeImage(nn.Module):
    """float32 ``[N, 3, H, W]`` -> uint8 ``[N, 4, H + 2 ph, W + 2 pw]`` in channels_last, the fourth channel 0.

    The three levels of a pixel are put into one number, which float32 holds exactly, and that as an integer is the
    pixel's four bytes: much less work than moving bytes about. Padding is the zero point.
    """

    __constants__ = ["fill", "high", "inverse", "low", "padding", "pads", "round"]
    shift: Tensor

    def __init__(self, qparams: QParams, padding: Sequence[int]) -> None:
        super().__init__()
        self.inverse = 1.0 / qparams.scale
        self.low, self.high = ROUND + qparams.quant_min, ROUND + qparams.quant_max
        self.padding = (padding[1], padding[1], padding[0], padding[0])
        self.pads, self.round = any(padding), ROUND
        self.fill = float(qparams.zero_point * (1 + 256 + 65536))
        self.register_buffer("shift", torch.tensor(ROUND + qparams.zero_point, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 4 and x.size(1) == 3, "dbrq: this graph takes images of 3 channels"
        assert x.numel() > 0, "dbrq: int8 kernels take no empty batch"
        if x.dtype != torch.float32:
            x = x.to(torch.float32)
        levels = torch.add(self.shift, x, alpha=self.inverse).clamp_(self.low, self.high).sub_(self.round)
        pixels = torch.add(levels.select(1, 0), levels.select(1, 1), alpha=256.0).add_(
            levels.select(1, 2), alpha=65536.0
        )
        if self.pads:
            pixels = torch.constant_pad_nd(pixels, self.padding, self.fill)
        words = pixels.to(torch.int32).contiguous()
        n, h, w = words.size(0), words.size(1), words.size(2)
        return torch.empty([0], dtype=torch.uint8).set_(words, 0, [n, 4, h, w], [4 * h * w, 1, 4 * w, 4])


class AverageToInt8(nn.Module):
    """Averaged uint8 levels, in float32 -> uint8 with other qparams."""

    __constants__ = ["high", "low", "ratio", "zero_point"]
    shift: Tensor

    def __init__(self, old: QParams, new: QParams) -> None:
        super().__init__()
        self.ratio, self.zero_point = old.scale / new.scale, old.zero_point
        self.low, self.high = ROUND + new.quant_min, ROUND + new.quant_max
        self.register_buffer("shift", torch.tensor(ROUND + new.zero_point, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_point != 0:
            x = x - self.zero_point
        return _bits(torch.add(self.shift, x, alpha=self.ratio).clamp_(self.low, self.high)).to(torch.uint8)


class Requantize(nn.Module):
    """uint8 with one scale and zero point -> uint8 with others."""

    __constants__ = ["high", "low", "ratio", "zero_point"]

    def __init__(self, old: QParams, new: QParams) -> None:
        super().__init__()
        self.ratio = old.scale / new.scale
        self.zero_point = old.zero_point
        self.low, self.high = ROUND + new.quant_min, ROUND + new.quant_max
        self.register_buffer("shift", torch.tensor(ROUND + new.zero_point, dtype=torch.float32))

    def forward(self, q: Tensor) -> Tensor:
        levels = q.to(torch.float32).sub_(self.zero_point)
        return _bits(torch.add(self.shift, levels, alpha=self.ratio).clamp_(self.low, self.high)).to(torch.uint8)


def dequantize(q: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """uint8 -> float32 or bfloat16."""
    levels = q.to(torch.float32)
    if zero_point != 0:
        levels.sub_(zero_point)
    return levels.mul_(scale).to(dtype)


def _output(out: Optional[QParams], dtype: torch.dtype) -> Tuple[float, int, int, int]:
    """Scale, zero point, kind (0 uint8, 1 float32, 2 bfloat16) and largest level of a kernel's result."""
    if out is not None:
        return out.scale, out.zero_point, 0, out.quant_max
    return 1.0, 0, 1 if dtype is torch.float32 else 2, 255


class _Kernel(nn.Module):
    """What convolutions and linear layers share: the int8 weight, its scales and bias, and how the result is
    written.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor
    zero_points: Tensor
    packed: Tensor

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Optional[Tensor], input: QParams, out: Optional[QParams],
        post_op: PostOp, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        outputs = weight.shape[0]
        bias = torch.zeros(outputs) if bias is None else bias.detach().to(torch.float32)
        self.register_buffer("weight", weight.contiguous().clone())
        self.register_buffer("scale", scale.detach().to(torch.float32).clone())
        self.register_buffer("bias", bias.clone())
        self.zero_points = torch.zeros(outputs, dtype=torch.int64)
        self.input_scale, self.input_zero_point = input.scale, input.zero_point
        self.output_scale, self.output_zero_point, self.kind, self.top = _output(out, dtype)
        self.post_op, self.algorithm = post_op.name, post_op.algorithm
        self.arguments = len(post_op.args)
        self.first, self.second = (*map(float, post_op.args), 0.0, 0.0)[:2]

    def summed(self, result: Tensor, other: Tensor, other_scale: float, other_zero_point: int) -> Tensor:
        """A float32 result plus another value, with post-op and quantization, where shapes broadcast."""
        if other.dtype == torch.uint8:
            result = result + dequantize(other, other_scale, other_zero_point, torch.float32)
        else:
            result = result + other
        if self.post_op == "relu":
            result = torch.relu(result)
        if self.kind == 0:
            levels = torch.round(result / self.output_scale) + self.output_zero_point
            return levels.clamp(0, self.top).to(torch.int32).to(torch.uint8)
        return result.to(torch.float32 if self.kind == 1 else torch.bfloat16)

    def __reduce__(self) -> tuple:
        """Packed weights cannot be copied, so they are packed again. (TorchScript's copies go by ``__getstate__``.)"""
        return restored, (type(self), {k: v for k, v in self.__dict__.items() if k not in ("packed", "parts")})

    @torch.jit.export
    def __getstate__(self) -> Tuple[Tensor, Tensor, Tensor, bool]:
        return self.weight, self.scale, self.bias, self.training

    @torch.jit.export
    def __setstate__(self, state: Tuple[Tensor, Tensor, Tensor, bool]) -> None:
        self.weight, self.scale, self.bias, self.training = state
        self.zero_points = torch.zeros([self.weight.size(0)], dtype=torch.int64)
        self.packed = self.pack()

    def _bias_with_zero_point(self) -> None:
        """Without padding the input's zero point adds a constant per output channel."""
        self.bias.add_(zero_point_in_bias(self.weight, self.scale, self.input_scale, self.input_zero_point))
        self.input_zero_point = 0


def restored(cls: type, held: dict) -> _Kernel:
    """A copy of a kernel, from all but its packed weight."""
    new = cls.__new__(cls)
    new.__dict__.update(held)
    new.packed = new.pack()
    return new


_KERNEL_CONSTANTS = ["input_scale", "input_zero_point", "output_scale", "output_zero_point", "kind", "top", "post_op",
                     "algorithm", "arguments", "first", "second"]  # fmt: skip


def enlarged(q: Tensor, spatial: List[int], before: List[int], fill: int) -> Tensor:
    """uint8 ``[batch, channels, *]`` in the middle of a tensor with the sizes ``spatial``, in the kernel's layout.

    ``before``: how far from the start of each spatial dimension.
    """
    sizes = list(q.size())[:2] + spatial
    if len(spatial) == 2:
        result = torch.empty(sizes, dtype=torch.uint8, memory_format=torch.channels_last)
    else:
        result = torch.empty(sizes, dtype=torch.uint8)
    result.fill_(fill)
    inner = result
    for i in range(len(spatial)):
        inner = inner.narrow(i + 2, before[i], q.size(i + 2))
    inner.copy_(q)
    return result


def _dense(x: Tensor) -> Tensor:
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


class Conv(_Kernel):
    """conv1d, conv2d or conv3d of a batched uint8 tensor, with a post-op.

    Attributes:
        widen: ask the kernel for one column more than is wanted.
        more_channels: of zeros, appended to the input.
        may_be_thin: ``is_thin`` is asked of inputs; elsewhere TorchScript leaves out what would follow.
        fuses_sum: whether one kernel adds another value (in ``ConvSum``).
        words: how it is computed, for reports; "" for the stock kernel itself.
    """

    __constants__ = [
        *_KERNEL_CONSTANTS,
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
        assert q.size(0) > 0, "dbrq: int8 kernels take no empty batch"
        fits = q.size(2) >= self.least[0]
        if self.ndim > 1:
            fits = fits and q.size(3) >= self.least[1]
        if self.ndim > 2:
            fits = fits and q.size(4) >= self.least[2]
        assert fits, "dbrq: the input is smaller than the convolution's kernel"
        if self.pads_by_hand:
            return self.padded(q, list(self.hand_padding))
        return _dense(q)

    def padded(self, q: Tensor, pads: List[int]) -> Tensor:
        """The input with its zero point around it, in the kernel's layout."""
        spatial = list(q.size())[2:]
        for i in range(len(pads)):
            spatial[i] += 2 * pads[i]
        return enlarged(q, spatial, pads, self.fill)

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
            q = _dense(torch.cat([q, q.narrow(1, 0, 1).expand(_with_channels(q, self.more_channels))], 1))
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
        return result if result.size(-1) == width else _dense(result.narrow(-1, 0, width))

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

    __constants__ = [*Conv.__constants__, "other_scale", "other_zero_point", "owned", "room"]

    def __init__(self, *args, other: Optional[QParams], owned: bool, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.other_scale, self.other_zero_point = (1.0, 0) if other is None else (other.scale, other.zero_point)
        self.owned = owned
        self.room = tuple(
            2 * p - d * (k - 1) - 1 for p, d, k in zip(self.padding, self.dilation, self.kernel, strict=True)
        )

    def forward(self, q: Tensor, other: Tensor) -> Tensor:
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        assert other.dtype == dtype, "dbrq: the other operand of a fused add has the wrong type"
        q = self.prepared(q)
        height = (q.size(2) + self.room[0]) // self.stride[0] + 1
        width = (q.size(3) + self.room[1]) // self.stride[1] + 1
        # Where it broadcasts, the kernel would take it for memory that is not there.
        apart = not self.fuses_sum or list(other.size()) != [q.size(0), self.weight.size(0), height, width]
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


class _Windows(Conv):
    """A convolution as the linear layer over its windows that it is: for each group, one copy and one product."""

    words = "onednn.qlinear_pointwise of windows"
    fuses_sum = False
    parts: List[Tensor]

    def pack(self) -> Tensor:
        """One packed weight for each group, in ``parts``; channels are the innermost dimension of a window."""
        rows = self.weight.flatten(2).transpose(1, 2).flatten(1)
        self.parts = [torch.ops.onednn.qlinear_prepack(part.contiguous(), None) for part in rows.chunk(self.groups)]
        return torch.empty([0])

    def convolved(
        self, q: Tensor, scale: float, zero_point: int, dtype: torch.dtype, post_op: str
    ) -> Tensor:  # fmt: skip
        if max(self.padding) > 0:
            q = self.padded(q, list(self.padding))
        arguments: List[Optional[number]] = []
        if post_op != "none" and self.arguments > 0:
            arguments.append(self.first)
        if post_op != "none" and self.arguments > 1:
            arguments.append(self.second)
        inner, outer = self.channels // self.groups, self.weight.size(0) // self.groups
        number = 0
        results: List[Tensor] = []
        for packed in self.parts:
            rows = windows(
                q.narrow(1, number * inner, inner), list(self.kernel), list(self.stride), list(self.dilation)
            )
            result = torch.ops.onednn.qlinear_pointwise(
                rows.flatten(0, self.ndim).flatten(1), self.input_scale, self.input_zero_point, packed,
                self.scale.narrow(0, number * outer, outer), self.zero_points.narrow(0, number * outer, outer),
                self.bias.narrow(0, number * outer, outer), scale, zero_point, dtype, post_op, arguments,
                self.algorithm,
            )  # fmt: skip
            results.append(result.reshape(list(rows.size())[: self.ndim + 1] + [outer]))
            number += 1
        whole = results[0] if number == 1 else torch.cat(results, -1)
        return _dense(whole.movedim(-1, 1))


def windows(q: Tensor, kernel: List[int], stride: List[int], dilation: List[int]) -> Tensor:
    """``[batch, channels, *]`` -> what each element of a convolution's result sees: ``[batch, *, *kernel, channels]``,
    contiguous.
    """
    sizes, strides = [q.size(0)], [q.stride(0)]
    for i in range(len(kernel)):
        sizes.append((q.size(i + 2) - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1)
        strides.append(q.stride(i + 2) * stride[i])
    for i in range(len(kernel)):
        sizes.append(kernel[i])
        strides.append(q.stride(i + 2) * dilation[i])
    sizes.append(q.size(1))
    strides.append(q.stride(1))
    return q.as_strided(sizes, strides, q.storage_offset()).contiguous()


class WindowConv(_Windows):
    """``Conv``, as a linear layer over windows."""


class WindowConvSum(_Windows, ConvSum):
    """``ConvSum``, as a linear layer over windows, and an addition."""


class _Levels(Conv):
    """A convolution of levels in float32: the way that is right where no int8 kernel is."""

    words = "float32 convolution of levels"
    fuses_sum = False

    def pack(self) -> Tensor:
        return self.weight.to(torch.float32)

    def convolved(
        self, q: Tensor, scale: float, zero_point: int, dtype: torch.dtype, post_op: str
    ) -> Tensor:  # fmt: skip
        levels = q.to(torch.float32) - self.input_zero_point
        if self.ndim == 1:
            sums = torch.nn.functional.conv1d(
                levels, self.packed, None, self.stride, self.padding, self.dilation, self.groups
            )
        elif self.ndim == 2:
            sums = torch.nn.functional.conv2d(
                levels, self.packed, None, self.stride, self.padding, self.dilation, self.groups
            )
        else:
            sums = torch.nn.functional.conv3d(
                levels, self.packed, None, self.stride, self.padding, self.dilation, self.groups
            )
        shape = [-1] + [1] * self.ndim
        result = sums * (self.scale * self.input_scale).reshape(shape) + self.bias.reshape(shape)
        finish = finished(result, scale, zero_point, dtype, post_op, self.first, self.second, self.algorithm)
        return _dense(finish)


class LevelConv(_Levels):
    """``Conv``, in float32."""


class LevelConvSum(_Levels, ConvSum):
    """``ConvSum``, in float32."""


def finished(
    x: Tensor, scale: float, zero_point: int, dtype: torch.dtype, post_op: str, first: float, second: float,
    algorithm: str,
) -> Tensor:  # fmt: skip
    """What kernels do with their float32 sums: post-op (``first`` and ``second`` are its arguments), then quantization
    or another type.
    """
    if post_op == "relu":
        x = torch.relu(x)
    elif post_op == "leaky_relu":
        x = torch.where(x > 0, x, x * first)
    elif post_op == "tanh":
        x = torch.tanh(x)
    elif post_op == "gelu":
        x = torch.nn.functional.gelu(x, approximate=algorithm)
    elif post_op == "hardtanh":
        x = x.clamp(first, second)
    elif post_op == "hardswish":
        x = torch.nn.functional.hardswish(x)
    elif post_op == "swish":
        x = torch.nn.functional.silu(x)
    else:
        assert post_op == "none", "dbrq: no such post-op"
    if dtype == torch.uint8:
        return (torch.round(x / scale) + zero_point).clamp(0, 255).to(torch.int32).to(torch.uint8)
    return x.to(dtype)


class Linear(_Kernel):
    """linear of a uint8 tensor ``[..., in]``, with a post-op."""

    __constants__ = [*_KERNEL_CONSTANTS, "fuses_sum"]
    words = ""
    fuses_sum = True

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Optional[Tensor], input: QParams, out: Optional[QParams],
        post_op: PostOp = NO_POST_OP, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(weight, scale, bias, input, out, post_op, dtype)
        self.packed = self.pack()

    def pack(self) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(self.weight, None)

    def prepared(self, q: Tensor) -> Tensor:
        """The input, checked and contiguous."""
        assert q.dtype == torch.uint8, "dbrq: an int8 linear layer takes uint8"
        assert q.dim() > 0 and q.size(-1) == self.weight.size(1), (
            f"dbrq: a linear layer of {self.weight.size(1)} inputs got {q.size(-1)}"
        )
        assert q.numel() > 0, "dbrq: int8 kernels take no empty batch"
        return q.contiguous()

    def product(
        self, rows: Tensor, input_scale: float, input_zero_point: int, scale: float, zero_point: int,
        dtype: torch.dtype, post_op: str,
    ) -> Tensor:  # fmt: skip
        """The layer of a prepared input of two dimensions or more, which has the qparams given first."""
        arguments: List[Optional[number]] = []
        if post_op != "none" and self.arguments > 0:
            arguments.append(self.first)
        if post_op != "none" and self.arguments > 1:
            arguments.append(self.second)
        return torch.ops.onednn.qlinear_pointwise(
            rows, input_scale, input_zero_point, self.packed, self.scale, self.zero_points, self.bias, scale,
            zero_point, dtype, post_op, arguments, self.algorithm,
        )  # fmt: skip

    def forward(self, q: Tensor) -> Tensor:
        return self.linear(q)

    def linear(self, q: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        x = self.prepared(q)
        result = self.product(
            x if q.dim() > 1 else x.unsqueeze(0), self.input_scale, self.input_zero_point, self.output_scale,
            self.output_zero_point, dtype, self.post_op,
        )  # fmt: skip
        if self.top != 255:
            result = result.clamp_(0, self.top)
        return result if q.dim() > 1 else result.squeeze(0)


class PointwiseConv(Linear):
    """conv2d with a 1x1 kernel, as the linear layer that it is.

    That kernel costs less to call, and its packed weight does not depend on the image's size.
    """

    def __init__(self, weight: Tensor, *args, **kwargs) -> None:
        super().__init__(weight.flatten(1), *args, **kwargs)
        self._bias_with_zero_point()

    def forward(self, q: Tensor) -> Tensor:
        return _image(self.linear(_pixels(q)), q)


def _pixels(x: Tensor) -> Tensor:
    """``[N, C, H, W]`` -> ``[N * H * W, C]``, without a copy for what is channels_last."""
    assert x.dim() == 4, f"dbrq: an int8 convolution takes 4 dimensions and got {x.dim()}"
    channels = x.size(1)
    x = x.contiguous(memory_format=torch.channels_last)
    return x.as_strided([x.size(0) * x.size(2) * x.size(3), channels], [channels, 1])


def _image(rows: Tensor, like: Tensor) -> Tensor:
    """``[N * H * W, C]`` -> ``[N, C, H, W]`` in channels_last, N, H and W as in ``like``."""
    c, h, w = rows.size(1), like.size(2), like.size(3)
    return rows.as_strided([like.size(0), c, h, w], [h * w * c, 1, w * c, c])


class LinearAdd(Linear):
    """linear plus another value [+ relu].

    A float other is read (``add``). A uint8 one is written over (``sum``) where ``owned``; else it is read as raw
    integers, as ``add`` does, with everything else in units of its scale.
    """

    __constants__ = [*Linear.__constants__, "other_scale", "other_zero_point", "binary", "owned", "unit", "reads_int8"]

    def __init__(self, *args, other: Optional[QParams], owned: bool, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.other_scale, self.other_zero_point = (1.0, 0) if other is None else (other.scale, other.zero_point)
        self.binary, self.owned, self.reads_int8 = "add", owned, other is not None
        self.unit = 1.0

    def settle(self) -> None:
        """Choose the kernel, now that it is known whether the other value may be written over."""
        if self.reads_int8 and self.owned:
            self.binary = "sum"
        elif self.reads_int8:
            self.unit = self.other_scale
            self.scale.div_(self.unit)
            self.bias.div_(self.unit).sub_(self.other_zero_point)

    def forward(self, q: Tensor, other: Tensor) -> Tensor:
        return self.added(q, other)

    def added(self, q: Tensor, other: Tensor) -> Tensor:
        """``q`` ``[..., in]`` and ``other`` ``[..., out]`` -> ``[..., out]``."""
        x = self.prepared(q)
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        expected = list(x.size())
        expected[-1] = self.weight.size(0)
        assert (other.dtype == torch.uint8) == self.reads_int8, (
            "dbrq: the other operand of a fused add has the wrong type"
        )
        assert self.reads_int8 or other.is_floating_point(), "dbrq: the other operand of a fused add has the wrong type"
        if not self.fuses_sum or list(other.size()) != expected:
            return self.separately(x, other)  # it broadcasts, which the kernel would take for memory that is not there
        other = other.contiguous()
        if x.dim() == 1:
            x, other = x.unsqueeze(0), other.unsqueeze(0)
        scale = self.other_scale if self.binary == "sum" else 1.0
        zero_point = self.other_zero_point if self.binary == "sum" else 0
        result = torch.ops.onednn.qlinear_pointwise(
            x, self.input_scale, self.input_zero_point, self.packed, self.scale, self.zero_points, other,
            self.bias, self.output_scale / self.unit, self.output_zero_point, dtype, scale, zero_point,
            self.binary, 1.0, self.post_op, [], "",
        )  # fmt: skip
        if self.top != 255:
            result = result.clamp_(0, self.top)
        return result if q.dim() > 1 else result.squeeze(0)

    def separately(self, x: Tensor, other: Tensor) -> Tensor:
        """The same in two steps."""
        return self.summed(self.unsummed(x), other, self.other_scale, self.other_zero_point)

    def unsummed(self, x: Tensor) -> Tensor:
        """The linear layer alone, float32."""
        result = self.product(
            x if x.dim() > 1 else x.unsqueeze(0), self.input_scale, self.input_zero_point, 1.0, 0, torch.float32, "none"
        )
        result = result if x.dim() > 1 else result.squeeze(0)
        if self.reads_int8 and self.binary == "add":
            result = (result + self.other_zero_point) * self.unit
        return result


class PointwiseConvAdd(LinearAdd):
    """conv2d with a 1x1 kernel plus another value [+ relu], as the linear layer that it is."""

    def __init__(self, weight: Tensor, *args, **kwargs) -> None:
        super().__init__(weight.flatten(1), *args, **kwargs)
        self._bias_with_zero_point()

    def forward(self, q: Tensor, other: Tensor) -> Tensor:
        if other.dim() != 4 or [q.size(0), q.size(2), q.size(3)] != [other.size(0), other.size(2), other.size(3)]:
            return self.separately_as_images(q, other)
        return _image(self.added(_pixels(q), _pixels(other)), q)

    def separately_as_images(self, q: Tensor, other: Tensor) -> Tensor:
        """The same for an other value that broadcasts."""
        result = _image(self.unsummed(self.prepared(_pixels(q))), q)
        return self.summed(result, other, self.other_scale, self.other_zero_point)


class DynamicLinear(Linear):
    """linear whose input is quantized with qparams of its own values; float in, float out."""

    __constants__ = [*Linear.__constants__, "levels"]

    def __init__(self, *args, levels: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        assert x.numel() > 0, "dbrq: int8 kernels take no empty batch"
        assert x.size(-1) == self.weight.size(1), (
            f"dbrq: a linear layer of {self.weight.size(1)} inputs got {x.size(-1)}"
        )
        dtype = torch.float32 if self.kind == 1 else torch.bfloat16
        low, high = torch.aminmax(x)
        lowest, highest = float(low.item()), float(high.item())
        finite = lowest > -3.5e38 and highest < 3.5e38  # false for NaN, which min and max would swallow
        assert finite, "dbrq: a dynamically quantized activation has NaN or infinity"
        bottom, top = min(lowest, 0.0), max(highest, 0.0)
        scale = max((top - bottom) / self.levels, 1e-12)
        zero_point = int(min(float(self.levels), max(0.0, float(round(-bottom / scale)))))
        q = torch.mul(x, 1.0 / scale).round_().add_(zero_point).clamp_(0, self.levels).to(torch.uint8)
        rows = q.contiguous() if x.dim() > 1 else q.unsqueeze(0)
        result = self.product(rows, scale, zero_point, 1.0, 0, dtype, "none")
        return result if x.dim() > 1 else result.squeeze(0)


class _LevelProduct(Linear):
    """A linear layer on levels in float32: the way that is right where no int8 kernel is."""

    words = "float32 product of levels"
    fuses_sum = False

    def pack(self) -> Tensor:
        return self.weight.to(torch.float32)

    def product(
        self, rows: Tensor, input_scale: float, input_zero_point: int, scale: float, zero_point: int,
        dtype: torch.dtype, post_op: str,
    ) -> Tensor:  # fmt: skip
        sums = torch.nn.functional.linear(rows.to(torch.float32) - input_zero_point, self.packed)
        result = sums * (self.scale * input_scale) + self.bias
        return finished(result, scale, zero_point, dtype, post_op, self.first, self.second, self.algorithm)


class LevelLinear(_LevelProduct):
    """``Linear``, in float32."""


class LevelPointwiseConv(_LevelProduct, PointwiseConv):
    """``PointwiseConv``, in float32."""


class LevelLinearAdd(_LevelProduct, LinearAdd):
    """``LinearAdd``, in float32."""


class LevelPointwiseConvAdd(_LevelProduct, PointwiseConvAdd):
    """``PointwiseConvAdd``, in float32."""


class LevelDynamicLinear(_LevelProduct, DynamicLinear):
    """``DynamicLinear``, in float32."""


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of what may be attended to, as what is added to the scores."""
    return torch.zeros(mask.size(), dtype=dtype).masked_fill_(mask.logical_not(), -float("inf"))


def max_pool(
    q: Tensor, kernel: List[int], stride: List[int], padding: List[int], dilation: List[int], ceil_mode: bool
) -> Tensor:
    """Max pooling of a batched uint8 tensor, on the integers; 1, 2 or 3 spatial dimensions."""
    n = len(kernel)
    assert q.dim() == n + 2 and q.numel() > 0, "dbrq: an int8 max pool takes a batch that is not empty"
    if n == 2:
        return torch.ops.quantized.max_pool2d(q, kernel, stride, padding, dilation, ceil_mode)
    if n == 1:
        wide = torch.ops.quantized.max_pool2d(
            q.unsqueeze(2), [1, kernel[0]], [1, stride[0]], [0, padding[0]], [1, dilation[0]], ceil_mode
        )
        return wide.squeeze(2)
    return torch.max_pool3d(q.to(torch.float32), kernel, stride, padding, dilation, ceil_mode).to(torch.uint8)


def max_pool_of_levels(
    q: Tensor, kernel: List[int], stride: List[int], padding: List[int], dilation: List[int], ceil_mode: bool
) -> Tensor:
    """The same in float32, which holds levels exactly."""
    assert q.dim() == len(kernel) + 2 and q.numel() > 0, "dbrq: an int8 max pool takes a batch that is not empty"
    levels = q.to(torch.float32)
    if len(kernel) == 1:
        levels = torch.max_pool1d(levels, kernel, stride, padding, dilation, ceil_mode)
    elif len(kernel) == 2:
        levels = torch.max_pool2d(levels, kernel, stride, padding, dilation, ceil_mode)
    else:
        levels = torch.max_pool3d(levels, kernel, stride, padding, dilation, ceil_mode)
    return levels.to(torch.uint8)


def matmul_of_levels(a: Tensor, b: Tensor, scale: float, za: int, zb: int) -> Tensor:
    """``int8_matmul`` in float32."""
    assert a.dtype == torch.uint8 and b.dtype == torch.uint8, "dbrq: an int8 matmul takes uint8"
    return torch.matmul(a.to(torch.float32) - za, b.to(torch.float32) - zb).mul_(scale)


def int8_matmul(a: Tensor, b: Tensor, scale: float, za: int, zb: int) -> Tensor:
    """Batched ``a @ b`` of two uint8 tensors -> float32, exact until the last scaling; see ``kernels.int8_matmul``."""
    assert a.dtype == torch.uint8 and b.dtype == torch.uint8, "dbrq: an int8 matmul takes uint8"
    assert a.dim() >= 2 and b.dim() >= 2 and a.size(-1) == b.size(-2), (
        "dbrq: an int8 matmul of shapes that do not match"
    )
    assert a.numel() > 0 and b.numel() > 0, "dbrq: int8 kernels take no empty batch"
    m, k, n = a.size(-2), a.size(-1), b.size(-1)
    batch = list(torch.empty(list(a.size())[:-2] + [0]).add(torch.empty(list(b.size())[:-2] + [0])).size())[:-1]
    left = a.expand(batch + [m, k]).reshape([-1, m, k])
    right = torch.bitwise_xor(b, 128).to(torch.int8).expand(batch + [k, n]).reshape([-1, k, n])
    out = torch.empty([left.size(0), m, n], dtype=torch.int32)
    for i in range(left.size(0)):
        out[i].copy_(torch._int_mm(left[i], right[i]))
    result = out.to(torch.float32)
    shift = zb - 128
    if za != 0:
        result.sub_(right.sum([1], keepdim=True, dtype=torch.int32).to(torch.float32), alpha=za)
    if shift != 0:
        result.sub_(left.sum([2], keepdim=True, dtype=torch.int32).to(torch.float32), alpha=shift)
    return result.add_(float(za * shift * k)).mul_(scale).reshape(batch + [m, n])


def weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Optional[Tensor]) -> Tensor:
    """float ``[..., in]`` times int8 ``[out, in]`` with a scale per output; the activation is not quantized."""
    out = torch.nn.functional.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
    return out if bias is None else out + bias


def dequantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 ``[out, ...]`` -> float32."""
    return weight.to(torch.float32) * scale.reshape([-1] + [1] * (weight.dim() - 1))


def levels(q: Tensor) -> Tensor:
    """The integers, as float32."""
    return q.to(torch.float32)


def scale_levels(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """What averaged integers mean."""
    return x.sub_(zero_point).mul_(scale)


def nearest(q: Tensor, size: Optional[List[int]], scale_factor: Optional[List[float]], mode: str) -> Tensor:
    """Interpolation that chooses elements, on the integers; torch's kernels take uint8 in some layouts only."""
    return (
        torch.nn.functional.interpolate(q.to(torch.float32), size, scale_factor, mode).to(torch.int32).to(torch.uint8)
    )


def pad(q: Tensor, pads: List[int], zero_point: int) -> Tensor:
    """Zero padding of a quantized value."""
    return torch.nn.functional.pad(q, pads, "constant", float(zero_point))


def pad_mode(q: Tensor, pads: List[int], mode: str) -> Tensor:
    """``F.pad`` with mode "circular", "reflect" or "replicate", by indexing; see ``kernels.pad_mode``."""
    for i in range(len(pads) // 2):
        left, right = pads[2 * i], pads[2 * i + 1]
        dim = q.dim() - 1 - i
        size = q.size(dim)
        if left != 0 or right != 0:
            index = torch.arange(-left, size + right)
            if mode == "circular":
                assert left <= size and right <= size, "dbrq: circular padding must be at most the input's size"
                index = index % size
            elif mode == "replicate":
                index = index.clamp(0, size - 1)
            else:
                assert left < size and right < size, "dbrq: reflect padding must be smaller than the input"
                index = (size - 1) - ((size - 1) - index.abs()).abs()
            q = q.index_select(dim, index)
    return q
