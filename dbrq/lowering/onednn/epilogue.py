"""What a primitive does after its head: element-wise steps, and how the result is quantized, as oneDNN's post-ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels import QParams
from .binding import Alg, Arg, Attributes, Binary, Eltwise, PostOp, Sum
from .builder import Builder, Unsupported
from .partitions import Function, Step, With
from .values import Place, Value


@dataclass(frozen=True)
class Given:
    """An operand of a partition: its value and, where that is uint8, what it means."""

    value: Value
    qparams: QParams | None = None


#: How a primitive sees another tensor that is added to its result; raises ``Unsupported``.
Fitted = Callable[[Value], Value]


@dataclass
class Epilogue:
    """Post-ops, scales and zero points by argument, and the places that go with them."""

    post_ops: list[PostOp] = field(default_factory=list)
    scales: dict[int, int] = field(default_factory=dict)
    zero_points: dict[int, int] = field(default_factory=dict)
    places: dict[int, Value | Place] = field(default_factory=dict)

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.scales, self.zero_points, self.post_ops)

    def scale(self, arg: int, values: Value | Place, mask: int = 0) -> None:
        self.scales[int(arg)] = mask
        self.places[Arg.SCALES | arg] = values

    def zero_point(self, b: Builder, arg: int, zero_point: int) -> None:
        if zero_point:
            self.zero_points[int(arg)] = 0
            self.places[Arg.ZERO_POINTS | arg] = b.numbers(zero_point, dtype=torch.int32)

    def steps(self, b: Builder, steps: Sequence[Step], operands: Sequence[Any], fitted: Fitted) -> None:
        """Append what follows the head."""
        for step in steps:
            if isinstance(step, Function):
                self.post_ops.append(Eltwise(step.alg, step.alpha, step.beta))
            else:
                self._with(b, step, operands[step.operand], fitted)

    def _with(self, b: Builder, step: With, other: Given, fitted: Fitted) -> None:
        qparams, value = other.qparams, other.value
        if qparams is not None and (
            step.alg not in (Alg.ADD, Alg.SUB, Alg.MUL) or (step.alg is Alg.MUL and qparams.zero_point)
        ):
            value, qparams = b.as_float(value, qparams), None
        value = fitted(value)
        if value.dtype not in (torch.float32, torch.bfloat16, torch.uint8):
            raise Unsupported(f"the other operand is {value.dtype}")
        if qparams is None:
            self._binary(step.alg, value)
            return
        # Post-ops read integers as they are, so the sum is taken in units of the other operand's scale.
        scale, zero_point = qparams.scale, qparams.zero_point
        if step.alg is Alg.MUL:
            self._binary(Alg.MUL, value)
            self.linear(scale, 0.0)
            return
        sign = 1 if step.alg is Alg.ADD else -1
        self.linear(1 / scale, 0.0)
        self._binary(step.alg, value)
        self.linear(scale, -sign * scale * zero_point)

    def _binary(self, alg: Alg, value: Value) -> None:
        self.places[Arg.POST_OP * (len(self.post_ops) + 1) | Arg.SRC_1] = value
        self.post_ops.append(Binary(alg, value.desc))

    def linear(self, alpha: float, beta: float) -> None:
        if (alpha, beta) != (1.0, 0.0):
            self.post_ops.append(Eltwise(Alg.LINEAR, alpha, beta))

    def sum(self, value: Value, qparams: QParams | None) -> None:
        """Add what the destination holds."""
        scale, zero_point = (qparams.scale, qparams.zero_point) if qparams else (1.0, 0)
        self.post_ops.append(Sum(scale, zero_point, value.dtype))

    def clip(self, out: QParams) -> None:
        """Keep to levels fewer than a byte has."""
        if (out.quant_min, out.quant_max) != (0, 255):
            low, high = ((level - out.zero_point) * out.scale for level in (out.quant_min, out.quant_max))
            self.post_ops.append(Eltwise(Alg.CLIP, low, high))

    def quantize(self, b: Builder, out: QParams | None, by_attributes: bool) -> None:
        """Quantize the result, by destination scale and zero point or, where a primitive has none, by a post-op."""
        if out is None:
            return
        self.clip(out)
        if by_attributes:
            self.scale(Arg.DST, b.numbers(out.scale))
            self.zero_point(b, Arg.DST, out.zero_point)
        else:
            self.linear(1 / out.scale, float(out.zero_point))
