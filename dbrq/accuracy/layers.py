"""Layers whose int8 form is being chosen: their weights and outputs, in float and rounded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..calibration.session import QuantizedModelToken
from ..eager.float_reference import run_float
from ..eager.weights import read_in_float
from ..kernels import QParams
from ..record.parameters import tensor_of
from ..record.record import SeenOp
from .runs import Inputs, Parts, Place, Rounding, is_layer, nearest, rounding_of, values_of


@dataclass
class Layers:
    """The convolutions and linear layers of one model that is being converted.

    Attributes:
        token: of the prepared model.
        inputs: key of a value -> the sample of it.
        qparams: key -> how the value is quantized; methods change it.
        smoothing: canonical place of a weight -> factors of what its layer reads.
        refined: canonical place of a weight -> its parts, where a method has chosen them.
        changed: places of parameters that methods have changed.
    """

    token: QuantizedModelToken
    inputs: dict[int, Inputs]
    qparams: dict[int, QParams]
    smoothing: dict[Place, Tensor] = field(default_factory=dict)
    refined: dict[Place, Parts] = field(default_factory=dict)
    changed: set[Place] = field(default_factory=set)

    def __post_init__(self) -> None:
        hooked = self.token.record.hooked()
        self.ops = [op for op in hooked if is_layer(op)]
        self.read_in_float = read_in_float(self.token.record)
        self._others = {op.weight.key for op in hooked if op.weight is not None and not is_layer(op)}

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self.token.modules

    def keys(self, op: SeenOp) -> list[int]:
        """Keys of the values that come to a layer."""
        return list(dict.fromkeys(self.token.observing[op, vid].key for _, vid in op.activations))

    def sample(self, op: SeenOp) -> tuple[int, Inputs] | None:
        """What a layer reads, of one value of those that come to it: the value's key, and its sample."""
        found = ((key, self.inputs[key]) for key in self.keys(op) if key in self.inputs)
        return next(((key, inputs) for key, inputs in found if inputs.is_rows == (op.row.ndim == 0)), None)

    def is_free(self, op: SeenOp) -> bool:
        """Whether nothing but layers reads the weight, whole, so that its integers may be any."""
        assert op.weight is not None
        return op.weight.whole and op.weight.key not in self.read_in_float and op.weight.key not in self._others

    def weight(self, op: SeenOp) -> Tensor:
        """In float, as the layer reads it."""
        assert op.weight is not None
        return tensor_of(op.weight, self.modules).detach().to(torch.float32)

    def parts(self, op: SeenOp) -> Parts:
        """What its int8 weight consists of, as it stands: ``int8``, ``scale``, perhaps ``smoothing``."""
        assert op.weight is not None
        known = self.refined.get(op.weight.key)
        return nearest(self.token, op, self.smoothing.get(op.weight.key)) if known is None else known

    def rounded_weight(self, op: SeenOp) -> Tensor:
        """The values of the whole weight after rounding."""
        return values_of(op, self.parts(op))

    def rounding(self) -> Rounding:
        """All that was chosen, to simulate it."""
        chosen = {op.weight.key: self.parts(op) for op in self.ops if op.weight is not None}
        return rounding_of(self.token, self.qparams, chosen)

    def output(self, op: SeenOp, x: Tensor, weight: Tensor) -> Tensor:
        """The layer without its bias."""
        return run_float(op.row, [x, weight, None, *op.constants[3:]], op.pad)


def affine(low: float, high: float, like: QParams) -> QParams:
    """qparams of a range, with the integers of ``like``."""
    low, high = min(low, 0.0), max(high, 0.0)
    levels = like.quant_max - like.quant_min
    scale = max((high - low) / levels, torch.finfo(torch.float32).eps)
    zero_point = round(like.quant_min - low / scale)
    return QParams(scale, min(max(zero_point, like.quant_min), like.quant_max), like.quant_min, like.quant_max)


def ends(q: QParams) -> tuple[float, float]:
    """The least and the greatest value that qparams have."""
    return (q.quant_min - q.zero_point) * q.scale, (q.quant_max - q.zero_point) * q.scale
