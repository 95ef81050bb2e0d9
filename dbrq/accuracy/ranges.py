"""Ranges of values by other measures than the squared error of the value itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibration.observers import HistogramObserver
from ..errors import ConfigurationError
from ..kernels import QParams
from ..record.record import SeenOp
from .layers import Layers, affine, ends
from .runs import rounded, weights_of_rows

#: Both ends of the range that a histogram gave are tried at these multiples of it.
_STEPS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3)
#: Of a linear layer's outputs, and rows of what a convolution reads, so many are compared.
_OUTPUTS = 256


def by_percentile(layers: Layers, percentage: float) -> None:
    """The narrowest ranges that leave at most ``100 - percentage`` percent of what was seen beyond each end.

    Raises:
        ConfigurationError: an observer of another class than ``dbrq.HistogramObserver`` keeps no histogram.
    """
    token = layers.token
    readers = {observation.key: op for (op, _), observation in token.observing.items()}
    for key, observer in token.observers.items():
        op = readers[key]
        if not isinstance(observer, HistogramObserver):
            raise ConfigurationError(
                "ranges by percentile are read off histograms", path=op.owner, op=op.path,
                expected="dbrq.HistogramObserver", got=type(observer).__name__,
                hint="leave activations to the default qconfig, or choose another Preset(ranges=...)",
            )  # fmt: skip
        low, high = observer.min_val.item(), observer.max_val.item()
        edges, counts = observer.occupied(low, high)
        share = counts.cumsum(0) / counts.sum()
        beyond = 1 - percentage / 100
        first = int((share <= beyond).sum())
        last = int((share < 1 - beyond).sum())
        layers.qparams[key] = affine(edges[first].item(), edges[last + 1].item(), layers.qparams[key])


def by_output(layers: Layers) -> None:
    """For each value that layers read, the range with the least squared error of what these make of it.

    Smoothed values have such ranges already.
    """
    readers: dict[int, SeenOp] = {}
    for op in layers.ops:
        assert op.weight is not None
        if op.weight.key not in layers.smoothing:
            for key in layers.keys(op):
                readers.setdefault(key, op)
    for key, op in readers.items():
        inputs = layers.inputs.get(key)
        if inputs is not None and inputs.is_rows == (op.row.ndim == 0):
            layers.qparams[key] = _searched(layers, op, inputs.parts, layers.qparams[key])


def _searched(layers: Layers, op: SeenOp, parts: list[Tensor], q: QParams) -> QParams:
    weight, rounded_weight = layers.weight(op), layers.rounded_weight(op)
    if not op.row.ndim:
        chosen = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))[:_OUTPUTS]
        weight, rounded_weight = weight[chosen], rounded_weight[chosen]
        parts = [torch.cat(parts)]
    outputs = [layers.output(op, x, weight) for x in parts]
    counts = [1.0 if op.row.ndim else weights_of_rows(y)[:, None] for y in outputs]

    def error(candidate: QParams) -> float:
        return sum(
            ((layers.output(op, rounded(x, candidate), rounded_weight) - y).square() * count).sum().item()
            for x, y, count in zip(parts, outputs, counts, strict=True)
        )

    low, high = ends(q)
    best, best_error = q, error(q)
    for end in ("high", "low"):  # one after the other: seven candidates each, not 49
        if end == "low" and q.zero_point == q.quant_min:
            continue
        at = ends(best)
        for step in _STEPS:
            candidate = affine(low * step, at[1], q) if end == "low" else affine(at[0], high * step, q)
            found = error(candidate)
            if found < best_error:
                best, best_error = candidate, found
    return best
