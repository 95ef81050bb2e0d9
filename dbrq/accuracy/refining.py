"""What a preset asks for, done where conversion has float weights still and calibration is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..auto_trace import InterceptedForward
from ..calibration.observing import is_fake_quantize
from ..calibration.session import QuantizedModelToken
from ..kernels import QParams
from .bias import correct, correct_in_order
from .kept import KeptBatches
from .layers import Layers
from .presets import Preset
from .runs import sampled
from .smoothing import smooth


@dataclass
class Refined:
    """What conversion takes in place of qparams from ranges, and of weights rounded to the nearest.

    Attributes:
        qparams: key of a value -> how it is quantized.
        weights: canonical place of a weight -> what it consists of.
    """

    qparams: dict[int, QParams]
    weights: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)


def refine(
    root: InterceptedForward,
    token: QuantizedModelToken,
    preset: Preset,
    kept: KeptBatches | None,
    qparams: dict[int, QParams],
) -> Refined:
    """Apply the methods of ``preset`` to a prepared model in eval mode, which is changed: biases, and where channels
    are equalized, weights.

    Args:
        qparams: those of ranges.
    """
    trained = any(map(is_fake_quantize, token.observers.values()))
    if kept is None or not kept.batches or not preset.needs_data or trained:
        return Refined(qparams)
    layers = Layers(token, sampled(root, token, kept), dict(qparams))
    if preset.smoothing:
        smooth(layers, corrected=preset.bias_correction is not None)
    for op in layers.ops:
        if op.weight is not None and op.weight.key in layers.smoothing:
            layers.refined[op.weight.key] = layers.parts(op)
    if preset.bias_correction == "fast":
        correct(layers)
    elif preset.bias_correction == "full":
        correct_in_order(root, layers, kept)
    return Refined(layers.qparams, layers.refined)
