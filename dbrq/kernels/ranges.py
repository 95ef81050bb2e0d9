"""Which qparams of activations make sense at all, and which of those this CPU computes rightly.

Without VNNI or AMX, pairs of u8 x s8 products are summed in 16 bits and saturate there, unless activations stay below
128. Observers of the default recipe see to that where a model is made, but files, recipes, state dicts and qconfigs of
the user's come from anywhere. So a model keeps the qparams it was made with, and every plan and graph is made from
``for_this_cpu`` of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import QParams, has_exact_int8_dot

#: The largest activation whose products never saturate: 2 * 127 * 128 is below 2**15.
SAFE = 127
#: How many products of a uint8 and an int8 int32 holds the sum of; with the zero point taken away it is no larger.
DEEPEST = (2**31 - 1) // (255 * 128)
#: Scales between these have an inverse, and 255 steps, in float32.
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 255
WANTED = "a scale that float32 holds to full precision, and 0 <= quant_min <= zero_point <= quant_max <= 255"


def makes_sense(q: QParams) -> bool:
    """Whether numbers of type float and int are qparams that kernels can take."""
    fits = 0 <= q.quant_min <= q.zero_point <= q.quant_max <= 255 and q.quant_min < q.quant_max
    return math.isfinite(q.scale) and _LEAST <= q.scale <= _MOST and fits


def are_scales(scale: Tensor) -> bool:
    """Whether all elements of a tensor can be scales."""
    return bool(((scale >= _LEAST) & (scale <= _MOST)).all())


def saturates() -> bool:
    """Whether int8 products of this CPU need activations of 7 bits."""
    return not has_exact_int8_dot()


def for_this_cpu(q: QParams) -> QParams:
    """``q``, or where that would saturate the same range in 7 bits."""
    if q.quant_max <= SAFE or not saturates():
        return q
    width = q.quant_max - q.quant_min
    if width <= SAFE:  # 7 bits that begin too high: the same values with other integers
        return QParams(q.scale, q.zero_point - q.quant_min, 0, width)
    zero_point = round((q.zero_point - q.quant_min) * SAFE / width)
    return QParams(q.scale * width / SAFE, zero_point, 0, SAFE)


def is_narrow(activation: Any) -> bool:
    """Whether an observer asks for fewer than 8 bits."""
    low, high = getattr(activation, "quant_min", None), getattr(activation, "quant_max", None)
    narrow = low is not None and high is not None and high - low < 255
    return bool(getattr(activation, "reduce_range", False)) or narrow


def by_row(activation: Any) -> bool:
    """Whether values that are quantized by their own range get qparams for each row, of a text each token."""
    return getattr(activation, "qscheme", None) is torch.per_channel_affine


def seven_bits(activation: Any) -> bool:
    """Whether values that are quantized by their own range get 7 bits: as the observer asks, or as this CPU needs."""
    return is_narrow(activation) or saturates()
