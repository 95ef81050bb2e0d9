"""Bias correction: the mean error of a layer's output, which rounding its weight makes, is taken from its bias."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..auto_trace import InterceptedForward
from ..calibration.session import QuantizedModelToken
from ..record.parameters import ParameterRef
from ..record.record import SeenOp
from .kept import KeptBatches
from .layers import Layers
from .runs import Looking, Place, Rounding, Simulation, run_with, weights_of_rows

#: How often "full" correction goes through the kept batches.
_PASSES = 2


def correct(layers: Layers) -> None:
    """Correct each layer by itself, on the inputs that it has in the float model (Nagel et al., 2019), where the mean
    error of one half of the sample is that of the other too.
    """
    rounding = layers.rounding()
    halves: tuple[_Mean, _Mean] = (_Mean(), _Mean())
    for op in layers.ops:
        sample, bias = layers.sample(op), _bias_of(layers, op)
        if sample is None or bias is None:
            continue
        key, inputs = sample
        weight, rounded = layers.weight(op), rounding.weight(op)
        for x, second in inputs.in_halves():
            output = layers.output(op, x, weight)
            error = output - layers.output(op, rounding.rounded(op, key, x), rounded)
            importance = _importance(op, output)
            halves[second].add(bias, _sum(op, error, importance), importance.sum().item())
    one, other = halves
    whole = {bias: _Mean.of(bias, one, other) for bias in {*one.sums, *other.sums} if _holds(bias, one, other)}
    _add(layers, whole)


class _Mean:
    """Weighted means of errors, by place of the bias."""

    def __init__(self) -> None:
        self.sums: dict[Place, Tensor] = {}
        self.counts: dict[Place, float] = defaultdict(float)

    def add(self, bias: Place, total: Tensor, count: float) -> None:
        self.sums[bias] = self.sums.get(bias, torch.zeros(())) + total
        self.counts[bias] += count

    @staticmethod
    def of(bias: Place, *means: _Mean) -> Tensor:
        total = sum((mean.sums[bias] for mean in means if bias in mean.sums), torch.zeros(()))
        return total / sum(mean.counts[bias] for mean in means)


def _holds(bias: Place, first: _Mean, second: _Mean) -> bool:
    """Whether the mean error of either half of the sample makes that of the other smaller."""
    if bias not in first.sums or bias not in second.sums:
        return False
    a, b = _Mean.of(bias, first), _Mean.of(bias, second)
    return bool(2 * (a @ b) > torch.maximum(a @ a, b @ b))


def correct_in_order(root: InterceptedForward, layers: Layers, kept: KeptBatches) -> None:
    """Correct layer after layer, on the inputs that the layers before make in int8, corrected themselves."""
    correcting: dict[Place, Tensor] = {}
    sums: dict[Place, Tensor] = {}
    counts: dict[Place, float] = {}
    rounding = layers.rounding()
    biases = {op: bias for op in layers.ops if (bias := _bias_of(layers, op)) is not None}
    for _ in range(_PASSES):
        sums.clear()
        counts.clear()
        for batch in kept.batches:
            means = _Means(layers, biases)
            run_with(root, layers.token, means, batch)
            run_with(
                root, layers.token, _Correcting(layers, rounding, biases, means.found, sums, counts, correcting), batch
            )
    _add(layers, correcting)


class _Means(Looking):
    """Notes the mean of each layer's output by channel, in float."""

    def __init__(self, layers: Layers, biases: dict[SeenOp, Place]) -> None:
        super().__init__(layers.token)
        self.biases = biases
        self.found: dict[SeenOp, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        output = original()
        if op in self.biases:
            importance = _importance(op, output)
            self.found[op].append((importance, _sum(op, output, importance)))
        return output


class _Correcting(Simulation):
    """int8 in float, in which each layer's output gets the mean that it has in float."""

    def __init__(
        self, layers: Layers, rounding: Rounding, biases: dict[SeenOp, Place],
        means: dict[SeenOp, list[tuple[Tensor, Tensor]]], sums: dict[Place, Tensor], counts: dict[Place, float],
        correcting: dict[Place, Tensor],
    ) -> None:  # fmt: skip
        super().__init__(layers.token, rounding)
        self.biases, self.means, self.sums, self.counts, self.correcting = biases, means, sums, counts, correcting
        self._times: Counter[SeenOp] = Counter()

    def result(self, op: SeenOp, bound: list[Any]) -> Any:
        output = super().result(op, bound)
        bias = self.biases.get(op)
        if bias is None or self._times[op] >= len(self.means[op]):
            return output
        importance, expected = self.means[op][self._times[op]]
        self._times[op] += 1
        self.sums[bias] = self.sums.get(bias, torch.zeros(())) + expected - _sum(op, output, importance)
        self.counts[bias] = self.counts.get(bias, 0.0) + importance.sum().item()
        self.correcting[bias] = correction = self.sums[bias] / self.counts[bias]
        return output + (correction.reshape(-1, *[1] * op.row.ndim) if op.row.ndim else correction)


def _importance(op: SeenOp, output: Tensor) -> Tensor:
    """How much each row or place of a layer's float output counts, ``[n]``."""
    columns = _by_channel(op, output)
    return torch.ones(columns.shape[1]) if op.row.ndim else weights_of_rows(columns.T)


def _sum(op: SeenOp, output: Tensor, importance: Tensor) -> Tensor:
    """``[out]``: over all rows or places."""
    return _by_channel(op, output) @ importance


def _by_channel(op: SeenOp, output: Tensor) -> Tensor:
    """``[out, n]``, of a layer's output."""
    if not op.row.ndim:
        return output.reshape(-1, output.shape[-1]).T
    return output.movedim(-1 - op.row.ndim, 0).flatten(1)


def _bias_of(layers: Layers, op: SeenOp) -> Place | None:
    """Where the bias of a layer is registered, or can be; None where there is no place for a correction."""
    if op.bias is not None:
        record = layers.token.record
        whole = op.bias.whole and not op.bias.computed
        others = (r for v in record.values.values() if v.parameter == op.bias.key for r in v.readers)
        return op.bias.key if whole and all(r.bias is not None and r.bias.key == op.bias.key for r in others) else None
    if op.leaf is None or op.bias_computed:
        return None
    return (op.leaf, "bias") if layers.modules[op.leaf]._parameters.get("bias", 0) is None else None


def _add(layers: Layers, corrections: dict[Place, Tensor]) -> None:
    """Add to the biases; layers of modules that have none get one."""
    for (path, name), correction in corrections.items():
        known = layers.modules[path]._parameters.get(name)
        if known is None:
            give_bias(layers.token, path, correction)
        elif known.numel() == correction.numel():
            known.data.add_(correction.reshape(known.shape))
        else:
            continue
        layers.changed.add((path, name))


def give_bias(token: QuantizedModelToken, path: str, bias: Tensor) -> None:
    """Give a layer that has none a bias."""
    token.modules[path].bias = nn.Parameter(bias.clone(), requires_grad=False)
    ref = ParameterRef(path, "bias", True, tuple(bias.shape), (1,), 0)
    for op in token.record.ops:
        if op.leaf == path and op.bias is None:
            op.bias = ref
