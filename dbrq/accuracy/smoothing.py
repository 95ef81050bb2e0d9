"""Smoothing of what linear layers read: wide channels are made narrower, and their weights larger by as much.

The scheme is that of SmoothQuant (Xiao et al., 2023): ``x @ W.T == (x * f) @ (W / f).T``. How strong it should be, if
it helps at all, depends on the layers: for each group of those that read one value, some strengths are tried on half of
the calibration sample and judged by the error of the layers' outputs on the other half, since factors that fit the
widest value of each channel too well clip what comes later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.families import root_of
from ..eager.weights import levels_of
from ..kernels import QParams
from ..record.record import SeenOp
from .layers import Layers, affine
from .runs import Inputs, weights_of_rows

#: Strengths: the exponent of the activations' part in SmoothQuant's formula.
_STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: Or only channels wider than these multiples of the median are made narrower, to that width.
_WIDTHS = (1.5, 3.0, 6.0)
#: Ranges that are tried: the ends of the sample times these.
_CLIPS = (1.1, 1.0, 0.85, 0.7)
#: Outputs whose errors are counted, and candidates whose ranges are searched.
_OUTPUTS, _BEST = 512, 2
#: A group is left as it is unless its error falls below this share of what it was.
_WORTH = 0.9


@dataclass
class _Group:
    """Linear layers that must have the same factors: they read the same values, or have the same weight."""

    ops: list[SeenOp]
    keys: list[int]


def smooth(layers: Layers, corrected: bool) -> None:
    """Choose factors and ranges for all groups of linear layers that gain by it.

    Args:
        corrected: the mean error of each output will be taken from the bias, so it does not count.
    """
    for group in _groups(layers):
        inputs = [layers.inputs[key] for key in group.keys]
        found = _Search(layers, group, inputs, corrected).run()
        if found is None:
            continue
        factors, clip = found
        for op in group.ops:
            assert op.weight is not None
            layers.smoothing[op.weight.key] = factors
        for key, its in zip(group.keys, inputs, strict=True):
            layers.qparams[key] = _range(its, factors, clip, layers.qparams[key])


def _groups(layers: Layers) -> Iterator[_Group]:
    readers: dict[int, list[SeenOp]] = defaultdict(list)
    for (op, _), observation in layers.token.observing.items():
        readers[observation.key].append(op)
    written = {op.decision.writes for op in layers.token.record.ops}
    parents: dict[int, int] = {}
    by_weight: dict[tuple[str, str], int] = {}
    for key, ops in readers.items():
        for op in ops:
            if op.weight is not None:
                first = root_of(parents, by_weight.setdefault(op.weight.key, key))
                if (other := root_of(parents, key)) != first:
                    parents[other] = first
    found: dict[int, list[int]] = defaultdict(list)
    for key in readers:
        found[root_of(parents, key)].append(key)
    for keys in found.values():
        ops = list(dict.fromkeys(op for key in keys for op in readers[key]))
        linear = all(op.row.name == "linear" and op in layers.ops and layers.is_free(op) for op in ops)
        known = all(key in layers.inputs and layers.inputs[key].is_rows and key not in written for key in keys)
        if linear and known and len({op.weight.shape[1] for op in ops if op.weight is not None}) == 1:
            yield _Group(ops, keys)


def _range(inputs: Inputs, factors: Tensor, clip: tuple[float, float], like: QParams) -> QParams:
    low, high = inputs.ends()
    return affine((low * factors).amin().item() * clip[0], (high * factors).amax().item() * clip[1], like)


class _Search:
    """The factors of one group."""

    def __init__(self, layers: Layers, group: _Group, inputs: list[Inputs], corrected: bool) -> None:
        self.corrected = corrected
        self.x = torch.cat([its.rows() for its in inputs])
        self.high = torch.stack([torch.maximum(-low, high) for low, high in (its.ends() for its in inputs)]).amax(0)
        held_out = torch.cat([its.held_out() for its in inputs])
        self.halves = (held_out, ~held_out)
        self.like = layers.qparams[group.keys[0]]
        by_weight = {op.weight.key: op for op in group.ops if op.weight is not None}
        weight = torch.cat([layers.weight(op) for op in by_weight.values()])
        if len(weight) > _OUTPUTS:
            weight = weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))[:_OUTPUTS]]
        self.weight = weight
        self.levels = levels_of(group.ops[0].qconfig)
        self.weight_width = torch.cat([layers.weight(op).abs().amax(0)[None] for op in by_weight.values()]).amax(0)
        self.y = self.x @ weight.T
        self.counts = weights_of_rows(self.y)[:, None]

    def run(self) -> tuple[Tensor, tuple[float, float]] | None:
        if not all(bool(half.any()) for half in self.halves) or not bool(self.high.amax() > 0):
            return None
        unclipped = (1.0, 1.0)
        before = self._error(None, None)
        candidates = [("strength", value) for value in _STRENGTHS] + [("width", value) for value in _WIDTHS]
        errors = {candidate: self._error(candidate, unclipped) for candidate in candidates}
        best: tuple[float, tuple[str, float], tuple[float, float]] | None = None
        for candidate in sorted(errors, key=errors.__getitem__)[:_BEST]:
            for clip in ((a, b) for a in _CLIPS for b in _CLIPS):
                error = errors[candidate] if clip == unclipped else self._error(candidate, clip)
                if best is None or error < best[0]:
                    best = error, candidate, clip
        if best is None or not best[0] < _WORTH * before:
            return None
        return self._factors(best[1], self.high), best[2]

    def _factors(self, candidate: tuple[str, float], high: Tensor) -> Tensor:
        """What channels with the ends ``high`` are multiplied by."""
        kind, value = candidate
        high = high.clamp(min=high.amax() * 1e-3)
        if kind == "width":
            factors = (high.median() * value / high).clamp(max=1.0)
        else:
            width = self.weight_width.clamp(min=self.weight_width.amax().clamp(min=1e-12) * 1e-3)
            factors = width ** (1 - value) / high**value
        return factors / factors.log().mean().exp()

    def _error(self, candidate: tuple[str, float] | None, clip: tuple[float, float] | None) -> float:
        """Squared error of the outputs, each half of the rows with what the other half asks for."""
        total = 0.0
        for held_out in self.halves:
            seen = self.x[~held_out]
            factors = None if candidate is None else self._factors(candidate, seen.abs().amax(0))
            x = self.x if factors is None else self.x * factors
            weight = self.weight if factors is None else self.weight / factors
            scale = (weight.abs().amax(1, keepdim=True) / self.levels[1]).clamp(min=1e-12)
            weight = torch.round(weight / scale).clamp_(*self.levels).mul_(scale)
            q = self.like
            if clip is not None:
                low, high = (end.item() for end in torch.aminmax(x[~held_out]))
                q = affine(low * clip[0], high * clip[1], self.like)
            levels = torch.round(x / q.scale).clamp_(q.quant_min - q.zero_point, q.quant_max - q.zero_point)
            error = (levels.mul_(q.scale) @ weight.T).sub_(self.y)
            if self.corrected:
                counts = self.counts[~held_out]
                error -= (error[~held_out] * counts).sum(0) / counts.sum()
            total += (error[held_out].square_() * self.counts[held_out]).sum().item()
        return total
