"""Values from float to integers and back, and from some integers to others."""

# ruff: noqa: RUF012, UP006, UP035 (TorchScript reads annotations, and ``__constants__`` as it is)

from collections.abc import Sequence
from typing import Tuple

import torch
from torch import Tensor, nn

from ..qparams import ROUND, QParams


def _bits(x: Tensor) -> Tensor:
    """int32 whose low 8 bits are those of a float32 tensor of shifted levels.

    ``x.view(torch.int32)`` would do, but TorchScript lacks it, and ``set_`` wants contiguous memory. Elsewhere the
    number itself serves, since ``ROUND`` is a multiple of 256.
    """
    # torch's stubs lack ``set_`` of tensors; TorchScript takes no reason behind an ignore.
    if x.is_contiguous():
        return torch.empty([0], dtype=torch.int32).set_(x, 0, x.size(), x.stride())  # type: ignore[call-overload]
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        pixels = x.permute([0, 2, 3, 1])
        return torch.empty([0], dtype=torch.int32).set_(pixels, 0, x.size(), x.stride())  # type: ignore[call-overload]
    return x.to(torch.int32)


def quantize_rows(rows: Tensor, levels: int, middle: float = ROUND) -> Tuple[Tensor, Tensor, Tensor]:
    """float32 ``[rows, in]`` -> uint8, and scale and zero point of each row, float32 ``[rows, 1]``, by its own range.

    A row with NaN or infinity gets such a scale, which the caller refuses.
    """
    low, high = rows.amin(-1, True).clamp_max_(0.0), rows.amax(-1, True).clamp_min_(0.0)
    scale = high.sub_(low).div_(levels).clamp_min_(1e-12)
    zero_point = low.div_(scale).round_().neg_().clamp_(0, levels)
    shifted = torch.addcmul(zero_point + middle, rows, scale.reciprocal())
    bits = _bits(shifted.clamp_(middle, middle + levels))
    return bits.to(torch.uint8), scale, zero_point


def of_ones(weight: Tensor, scale: Tensor) -> Tensor:
    """What a linear layer without its bias makes of a row of ones: int8 ``[out, in]`` and its scales -> float32
    ``[out]``.
    """
    return weight.sum(1, dtype=torch.int32).to(torch.float32).mul_(scale)


def rescale_rows(result: Tensor, scale: Tensor, zero_point: Tensor, column: Tensor, bias: Tensor) -> Tensor:
    """What a linear layer makes of levels, as if their scale were one and their zero point none, with qparams of each
    row: written over ``result`` ``[rows, out]``, a float32 that has the bias already.

    Args:
        column: float32 ``[out]``, ``of_ones`` of the layer.
        bias: float32 ``[out]``.
    """
    result.mul_(scale).addr_((zero_point * scale).neg_().flatten(), column)
    return result.addr_((1.0 - scale).flatten(), bias)


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


class QuantizeSmoothed(nn.Module):
    """float32 or bfloat16 -> uint8 of the same shape, the channels of the last axis multiplied by factors before.

    Args:
        factors: float32 ``[channels]``.
    """

    __constants__ = ["high", "low"]
    factors: Tensor
    shift: Tensor

    def __init__(self, qparams: QParams, factors: Tensor) -> None:
        super().__init__()
        self.low, self.high = ROUND + qparams.quant_min, ROUND + qparams.quant_max
        self.register_buffer("factors", factors.double().div(qparams.scale).to(torch.float32))
        self.register_buffer("shift", torch.tensor(ROUND + qparams.zero_point, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            x = x.to(torch.float32)
        return _bits(torch.addcmul(self.shift, x, self.factors).clamp_(self.low, self.high)).to(torch.uint8)


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
        strides = [4 * h * w, 1, 4 * w, 4]
        # torch's stubs lack ``set_`` of tensors.
        return torch.empty([0], dtype=torch.uint8).set_(words, 0, [n, 4, h, w], strides)  # type: ignore[call-overload]


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
    shift: Tensor

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


def levels(q: Tensor) -> Tensor:
    """The integers, as float32."""
    return q.to(torch.float32)


def scale_levels(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """What averaged integers mean."""
    return x.sub_(zero_point).mul_(scale)


def dequantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 ``[out, ...]`` -> float32."""
    return weight.to(torch.float32) * scale.reshape([-1] + [1] * (weight.dim() - 1))
