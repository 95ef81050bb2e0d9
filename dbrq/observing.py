"""What happens at the ops of a prepared model: the values that int8 ops will read are observed, or fake-quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .auto_trace import INT8
from .errors import CalibrationError
from .mappings import OpRow, Role
from .observers import HistogramObserver
from .record import SeenOp
from .reference import run_float
from .weights import norm_scale

if TYPE_CHECKING:
    from .workflow import QuantizedModelToken


_MAY_READ_INT8 = (Role.COMPUTE, Role.ELEMENTWISE, Role.POOL, Role.SHARE)


class Observing:
    """The observers' side of one run.

    Each value is observed once in a run, by the first op that reads it as int8. What an op reads that was never read
    there before is put aside until the run is over and it is decided how it is to be read.
    """

    def __init__(self, token: QuantizedModelToken) -> None:
        self.token, self.record, self.union = token, token.record, token.union
        self.stashed: list[tuple[SeenOp, int, Tensor]] = []
        self._seen: set[int] = set()

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        """``op`` on what it reads, as (slot, value id, elements); in training with fake quantize, on quantized ones."""
        bound, changed = list(bound), False
        for slot, vid, x in edges:
            found = self._observer(op, vid, x)
            if found is None:
                self._note_range(op, vid, x)
                continue
            value = _observe(found, x, op)
            if is_fake_quantize(found) and not inplace:
                _place(bound, op.row, slot, value)
                changed = True
        weight_fake_quant = self.token.weight_fake_quant(op)
        if weight_fake_quant is not None:
            bound[1] = self._fake_weight(op, weight_fake_quant, bound[1])
            changed = True
        return run_float(op.row, bound, op.pad) if changed else original()

    def stash(self, op: SeenOp, values: Sequence[tuple[int, Tensor]]) -> None:
        self.stashed += [(op, vid, x) for vid, x in values]

    def settle(self, ops: dict[SeenOp, SeenOp], values: dict[int, int]) -> None:
        """The run has joined the union: observe what was put aside."""
        with torch.no_grad():
            for op, vid, x in self.stashed:
                its, at = values[vid], ops[op]
                found = self._observer(at, its, x)
                if found is not None:
                    _observe(found, x, at)
                else:
                    self._note_range(at, its, x)

    def _observer(self, op: SeenOp, vid: int, x: Tensor) -> nn.Module | None:
        """What observes the value now; None if it was seen in this run, or its sources were."""
        observation = self.token.observing.get((op, vid))
        if observation is None or not x.numel():
            return None
        observer = self.token.observers[observation.key]
        if is_fake_quantize(observer):
            return observer
        if observation.made or vid in self._seen or observation.source in self._seen:
            return None
        self._seen.add(vid)
        if observation.whole:
            self._seen.add(observation.source)
        return observer

    def _note_range(self, op: SeenOp, vid: int, x: Tensor) -> None:
        """Another path may show later that a value must be quantized which now lies inside a fusion."""
        if op.row.role not in _MAY_READ_INT8 or (op, vid) in self.token.observing or vid in self._seen:
            return
        if x.dtype is not torch.float32 or not x.numel():
            return
        self._seen.add(vid)
        low, high = map(float, torch.aminmax(x.detach()))
        if math.isfinite(low) and math.isfinite(high):
            known = self.token.ranges.get(vid, (low, high))
            self.token.ranges[vid] = min(low, known[0]), max(high, known[1])

    def _fake_weight(self, op: SeenOp, fake_quant: nn.Module, weight: Tensor) -> Tensor:
        """The weight as conversion will round it: scaled by the batch norm that folds into it, and back."""
        chain = op.decision.chain
        if not chain or chain[0].op.role is not Role.NORM:
            return fake_quant(weight)
        scale = norm_scale(chain[0], self.token.modules).reshape(-1, *[1] * (weight.dim() - 1)).detach()
        scale = torch.where(scale.abs() < 1e-12, torch.ones_like(scale), scale)
        return fake_quant(weight * scale) / scale


def _observe(observer: nn.Module, x: Tensor, op: SeenOp) -> Tensor:
    try:
        if is_fake_quantize(observer):
            return _fake_quantized(observer, x)
        return observer(x.detach() if isinstance(observer, HistogramObserver) else _checked(x.detach()))
    except CalibrationError as error:
        raise CalibrationError(
            "a value seen in calibration cannot be quantized",
            path=op.owner,
            op=op.path,
            expected="finite values",
            got=error.got or error.message,
            hint="check the calibration data, or set this op's qconfig to None",
        ) from error


def _fake_quantized(fake_quantize: nn.Module, x: Tensor) -> Tensor:
    """Several ops may read one value: it is observed and rounded once."""
    cached = x.__dict__.get(INT8)
    if cached is not None and cached[0] is fake_quantize and cached[1] == _version(x):
        return cached[2]
    result = fake_quantize(_checked(x))
    x.__dict__[INT8] = (fake_quantize, _version(x), result)
    return result


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def is_fake_quantize(observer: Any) -> bool:
    return hasattr(observer, "fake_quant_enabled")


def _checked(x: Tensor) -> Tensor:
    """``x``, unless it has NaN or infinity, which would spoil an observer for good."""
    low, high = torch.aminmax(x.detach())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CalibrationError("NaN or infinity", got=f"minimum {low.item()}, maximum {high.item()}")
    return x


def _place(bound: list[Any], row: OpRow, slot: int, value: Tensor) -> None:
    if row.name in ("cat", "stack"):
        bound[0] = [*bound[0][:slot], value, *bound[0][slot + 1 :]]
    else:
        bound[slot] = value
