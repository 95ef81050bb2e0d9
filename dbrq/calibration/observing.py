"""What happens at the ops of a prepared model: the values that int8 ops will read are observed, or fake-quantized."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..eager.float_reference import run_float
from ..eager.weights import norm_scale
from ..errors import CalibrationError
from ..guards import refuse_checkpoint
from ..mappings import OpRow, Role
from ..record.merge import Union
from ..record.record import Record, SeenOp
from ..tensors import version_of
from .observers import HistogramObserver
from .placement import Observation
from .recorder import Watch


class Session(Protocol):
    """The prepared model, as observing sees it.

    Attributes:
        observing: (op, value id) -> how the op observes the value.
        observers: value key -> observer.
        ranges: value id -> minimum and maximum, for values that are not observed but might be.
        lock: held while observers see values.
    """

    record: Record
    union: Union
    modules: dict[str, nn.Module]
    observing: dict[tuple[SeenOp, int], Observation]
    observers: dict[int, nn.Module]
    ranges: dict[int, tuple[float, float]]
    lock: threading.RLock

    def weight_fake_quant(self, op: SeenOp) -> nn.Module | None: ...


_MAY_READ_INT8 = (Role.COMPUTE, Role.ELEMENTWISE, Role.POOL, Role.SHARE)


class Observing:
    """The observers' side of one run.

    Each value is observed once in a run, by the first op that reads it as int8. What an op reads that was never read
    there before is put aside until the run is over and it is decided how it is to be read.
    """

    def __init__(self, token: Session) -> None:
        self.token, self.record, self.union = token, token.record, token.union
        self.stashed: list[tuple[SeenOp, int, Tensor]] = []
        self.gradient = torch.is_grad_enabled()
        self._seen: set[int] = set()
        self._ranged: set[int] = set()
        self._held: dict[int, tuple] = {}

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        """``op`` on what it reads, as (slot, value id, elements); in training with fake quantize, on quantized ones."""
        bound = list(bound)
        with self.token.lock:
            changed = self._observe(op, edges, bound, inplace)
        return run_float(op.row, bound, op.pad) if changed else original()

    def _observe(self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], inplace: bool) -> bool:
        """Observe what ``op`` reads; whether that put anything quantized into ``bound``."""
        changed = False
        for slot, vid, x in edges:
            found = self._observer(op, vid, x)
            if found is None:
                self._note_range(op, vid, x)
                continue
            if not is_fake_quantize(found):
                _observed(found, x, op)
                continue
            if self.gradient:
                refuse_checkpoint(op, Watch.run.__code__)
            value = self._rounded(found, x, op)
            if not inplace:
                _place(bound, op.row, slot, value)
                changed = True
        weight_fake_quant = self.token.weight_fake_quant(op)
        if weight_fake_quant is not None:
            if self.gradient:
                refuse_checkpoint(op, Watch.run.__code__)
            bound[1] = self._fake_weight(op, weight_fake_quant, bound[1])
            changed = True
        return changed

    def stash(self, op: SeenOp, values: Sequence[tuple[int, Tensor]]) -> None:
        self.stashed += [(op, vid, x) for vid, x in values]

    def settle(self, ops: dict[SeenOp, SeenOp], values: dict[int, int]) -> None:
        """The run has joined the union: observe what was put aside."""
        with torch.no_grad():
            for op, vid, x in self.stashed:
                its, at = values[vid], ops[op]
                found = self._observer(at, its, x)
                if found is not None:
                    _observed(found, x, at)
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

    def _rounded(self, fake_quantize: nn.Module, x: Tensor, op: SeenOp) -> Tensor:
        """Several ops may read one value: it is observed and rounded once in a run.

        Kept by the run, not by ``x``: that may be the user's, and the result holds the graph of this run's gradients.
        """
        known = self._held.get(id(x))
        if known is not None and known[0] is x and known[1] is fake_quantize and known[2] == version_of(x):
            return known[3]
        result = _observed(fake_quantize, x, op)
        self._held[id(x)] = (x, fake_quantize, version_of(x), result)
        return result

    def _note_range(self, op: SeenOp, vid: int, x: Tensor) -> None:
        """Another path may show later that a value must be quantized which now lies inside a fusion."""
        if op.row.role not in _MAY_READ_INT8 or (op, vid) in self.token.observing or vid in self._ranged:
            return
        if x.dtype is not torch.float32 or not x.numel():
            return
        self._ranged.add(vid)
        low, high = map(float, torch.aminmax(x.detach()))
        if math.isfinite(low) and math.isfinite(high):
            known = self.token.ranges.get(vid, (low, high))
            self.token.ranges[vid] = min(low, known[0]), max(high, known[1])

    def _fake_weight(self, op: SeenOp, fake_quant: nn.Module, weight: Tensor) -> Tensor:
        """The weight as conversion will round it: scaled by the batch norm that folds into it, and back."""
        chain = op.decision.chain
        if not chain or chain[0].op.role is not Role.NORM:
            return fake_quant(weight.to(torch.float32)).to(weight.dtype)
        scale = norm_scale(chain[0], self.token.modules).reshape(-1, *[1] * (weight.dim() - 1)).detach()
        scale = torch.where(scale.abs() < 1e-12, torch.ones_like(scale), scale)
        return fake_quant((weight * scale).to(torch.float32)).to(weight.dtype) / scale


def _observed(observer: nn.Module, x: Tensor, op: SeenOp) -> Tensor:
    try:
        if is_fake_quantize(observer):
            return observer(_checked(x).to(torch.float32)).to(x.dtype)  # torch's takes float32 only
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


def is_fake_quantize(observer: Any) -> bool:
    return hasattr(observer, "fake_quant_enabled")


def _checked(x: Tensor) -> Tensor:
    """``x``, unless it has NaN or infinity, which would spoil an observer for good."""
    low, high = torch.aminmax(x.detach())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CalibrationError("NaN or infinity", got=f"minimum {low.item()}, maximum {high.item()}")
    return x


def _place(bound: list[Any], row: OpRow, slot: int, value: Tensor) -> None:
    if row.takes_list:
        bound[0] = [*bound[0][:slot], value, *bound[0][slot + 1 :]]
    else:
        bound[slot] = value
