"""Convolutions and linear layers in other ways, for where torch's int8 kernel is not right: ``formulations`` has which.

A convolution is a linear layer over windows, which another kernel computes; float32 on the levels needs no int8 kernel.
"""

# ruff: noqa: RUF005, UP006, UP035, UP045 (TorchScript reads these annotations)

from typing import TYPE_CHECKING, List, Optional

import torch
from torch import Tensor

from .conv import Conv, ConvSum, dense
from .linear import DynamicLinear, Linear, LinearAdd, PointwiseConv, PointwiseConvAdd

if TYPE_CHECKING:
    from .base import number


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
        group = 0
        results: List[Tensor] = []
        for packed in self.parts:
            rows = windows(q.narrow(1, group * inner, inner), list(self.kernel), list(self.stride), list(self.dilation))
            result = torch.ops.onednn.qlinear_pointwise(
                rows.flatten(0, self.ndim).flatten(1), self.input_scale, self.input_zero_point, packed,
                self.scale.narrow(0, group * outer, outer), self.zero_points.narrow(0, group * outer, outer),
                self.bias.narrow(0, group * outer, outer), scale, zero_point, dtype, post_op, arguments,
                self.algorithm,
            )  # fmt: skip
            results.append(result.reshape(list(rows.size())[: self.ndim + 1] + [outer]))
            group += 1
        whole = results[0] if group == 1 else torch.cat(results, -1)
        return dense(whole.movedim(-1, 1))


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
        return dense(finish)


class LevelConv(_Levels):
    """``Conv``, in float32."""


class LevelConvSum(_Levels, ConvSum):
    """``ConvSum``, in float32."""


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
