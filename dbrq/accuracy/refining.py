"""What a preset asks for, done where conversion has float weights still and calibration is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..auto_trace import InterceptedForward
from ..calibration.observing import is_fake_quantize
from ..calibration.session import QuantizedModelToken, all_qparams, leave_unseen, place, token_of
from ..calibration.surgery import bake, copied
from ..errors import NotCalibratedError
from ..kernels import QParams
from .bias import correct, correct_in_order, give_bias
from .equalization import equalize
from .kept import KeptBatches
from .layers import Layers
from .presets import Preset
from .ranges import by_output, by_percentile
from .rounding import choose
from .runs import Parts, Place, nearest, sampled
from .smoothing import smooth


@dataclass
class Refined:
    """What conversion takes in place of qparams from ranges, and of weights rounded to the nearest.

    Attributes:
        qparams: key of a value -> how it is quantized.
        weights: canonical place of a weight -> what it consists of.
        changed: places of the parameters that are not those of the float model.
    """

    qparams: dict[int, QParams]
    weights: dict[Place, Parts] = field(default_factory=dict)
    changed: set[Place] = field(default_factory=set)


@dataclass
class Ready:
    """A prepared model that is about to be converted: calibration is over, its weights are float still.

    Attributes:
        model: in eval mode, with what the preset's methods changed of biases and weights.
    """

    model: nn.Module
    token: QuantizedModelToken
    refined: Refined

    @property
    def root(self) -> InterceptedForward:
        root: InterceptedForward = self.model.__dict__["forward"]
        return root


def ready(
    prepared: nn.Module, *, inplace: bool = False, preset: Preset | None = None, floats: Mapping[str, str] | None = None
) -> Ready:
    """Calibration ends, and the methods of a preset do their work.

    Args:
        prepared: a prepared and calibrated model; it is not changed unless ``inplace``.
        preset: None for the one that it was prepared with.
        floats: path of an op -> why it stays float, beside those that do anyway.

    Raises:
        NotCalibratedError: a value to quantize was never observed.
    """
    target = prepared if inplace else copied(prepared)
    token = token_of(target, "observe", "convert")
    preset = token.preset if preset is None else preset
    kept_float = dict(floats or {}) | preset.floats(token.record)
    if kept_float:
        for op in token.record.hooked():
            op.excluded = op.excluded or kept_float.get(op.path, "")
        place(token, {})
    leave_unseen(token)
    qparams = all_qparams(token)
    bake(target.eval())
    with torch.inference_mode(False), torch.no_grad():
        if token.recipe is None:
            refined = refine(target.__dict__["forward"], token, preset, token.kept, qparams)
        else:
            refined = _as_written(token, token.recipe, qparams)
    return Ready(target, token, refined)


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
    if not preset.needs_data or any(map(is_fake_quantize, token.observers.values())) or token.fixed_qparams:
        return Refined(qparams)
    if kept is None or not kept.batches:
        if not token.observers:  # nothing is static
            return Refined(qparams)
        raise NotCalibratedError(
            f"the preset needs a sample of the calibration data, for {', '.join(preset.methods)}",
            expected="a model prepared with this preset, or another that needs data", got="none was kept",
            hint="prepare(..., preset=...), then calibrate",
        )  # fmt: skip
    layers = Layers(token, sampled(root, token, kept), dict(qparams))
    if not isinstance(preset.ranges, str):
        by_percentile(layers, preset.ranges)
    if preset.equalization:
        equalize(layers)
    if preset.smoothing:
        smooth(layers, corrected=preset.bias_correction is not None)
    for op in layers.ops:
        if op.weight is not None and op.weight.key in layers.smoothing:
            layers.refined[op.weight.key] = layers.parts(op)
    if preset.ranges == "output":
        by_output(layers)
    if preset.rounding != "nearest":
        choose(layers, preset.rounding)
    if preset.bias_correction == "fast":
        correct(layers)
    elif preset.bias_correction == "full":
        correct_in_order(root, layers, kept)
    return Refined(layers.qparams, layers.refined, layers.changed)


def _as_written(token: QuantizedModelToken, recipe: Mapping[Place, Parts], qparams: dict[int, QParams]) -> Refined:
    """What a recipe says beside ranges: it was found by a preset's methods for the model that was saved."""
    weights = {op.weight.key: op for op in token.record.hooked() if op.weight is not None}
    refined = Refined(qparams)
    for (path, name), parts in recipe.items():
        if "values" in parts:
            known = token.modules[path]._parameters.get(name)
            if known is None:
                give_bias(token, path, parts["values"])
            else:
                known.data.copy_(parts["values"].reshape(known.shape))
            refined.changed.add((path, name))
        op = weights.get((path, name))
        if op is None or op.decision.precision != "int8":
            continue
        if "int8" in parts:
            refined.weights[path, name] = {part: tensor for part, tensor in parts.items() if part != "values"}
        elif "smoothing" in parts:
            refined.weights[path, name] = nearest(token, op, parts["smoothing"])
    return refined
