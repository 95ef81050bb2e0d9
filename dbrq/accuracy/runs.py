"""Runs of a prepared model on the kept batches: what layers read is sampled, or int8 is simulated in float."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..auto_trace import InterceptedForward
from ..calibration.recorder import Watch
from ..calibration.session import QuantizedModelToken
from ..eager.float_reference import run_float
from ..eager.weights import channel_axis, quantized_weight
from ..kernels import QParams, along, dequantize, dynamic_qparams, quantize
from ..kernels.ranges import by_row, seven_bits
from ..mappings import Role
from ..record.parameters import source_of
from ..record.record import SeenOp
from ..tensors import version_of
from .kept import Batch, KeptBatches

Place = tuple[str, str]
Parts = dict[str, Tensor]
#: Rows of a linear layer's input, and elements of a convolution's, that are sampled over all batches.
ROWS, ELEMENTS = 1024, 1 << 19


class Looking:
    """An observer of one run of a prepared model (``calibration.values.Observer``) that leaves its ops as they are."""

    def __init__(self, token: QuantizedModelToken) -> None:
        self.token, self.record, self.union = token, token.record, token.union

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        return original()

    def stash(self, op: SeenOp, values: Sequence[tuple[int, Tensor]]) -> None:
        pass


def run_with(root: InterceptedForward, token: QuantizedModelToken, observer: Looking, batch: Batch) -> Any:
    """The output of a prepared model for one batch, its ops run by ``observer``; nothing of it joins the record."""
    args, kwargs = batch
    with torch.inference_mode(False), torch.no_grad():
        return Watch(token.modules, token, observer).run(root, args, kwargs)


# What layers read


@dataclass
class Inputs:
    """A sample of a value that layers read.

    Attributes:
        parts: rows ``[n, in]`` where linear layers read it, images and the like where convolutions do.
        batches: the number of the batch that each part is from.
        low, high: for linear layers, ``[in]``: the ends of each channel over all kept batches.
    """

    parts: list[Tensor] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    low: Tensor | None = None
    high: Tensor | None = None

    @property
    def is_rows(self) -> bool:
        return self.low is not None

    def rows(self) -> Tensor:
        return torch.cat(self.parts)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Of rows, ``low`` and ``high``."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def in_halves(self) -> Iterator[tuple[Tensor, bool]]:
        """The parts, each with whether it is in the half that is held out."""
        if self.is_rows:
            rows, held_out = self.rows(), self.held_out()
            yield from ((rows[~held_out], False), (rows[held_out], True))
        else:
            several = len(self.parts) > 1
            for number, part in enumerate(self.parts):
                if several:
                    yield part, number % 2 == 1
                elif len(part) > 1:
                    yield from ((part[::2], False), (part[1::2], True))

    def held_out(self) -> Tensor:
        """For each row, whether it is in the half that is held out: every other batch, or of one batch every other
        stretch of rows.
        """
        if len(set(self.batches)) > 1:
            parts = zip(self.parts, self.batches, strict=True)
            return torch.cat([torch.full((len(part),), number % 2 == 1) for part, number in parts])
        n = sum(map(len, self.parts))
        return torch.arange(n) * 8 // max(1, n) % 2 == 1


class _Sampling(Looking):
    def __init__(self, token: QuantizedModelToken, wanted: dict[int, Inputs], number: int, count: int) -> None:
        super().__init__(token)
        self.wanted, self.number, self.count = wanted, number, count
        self._generator = torch.Generator().manual_seed(number)
        self._taken: set[tuple[int, int]] = set()

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        for _, vid, x in edges if is_layer(op) else ():
            key = self.token.observing[op, vid].key
            if key in self.wanted and (key, vid) not in self._taken and x.numel():
                self._taken.add((key, vid))
                self._take(op, self.wanted[key], x.detach().to(torch.float32))
        return original()

    def _take(self, op: SeenOp, inputs: Inputs, x: Tensor) -> None:
        if inputs.parts and inputs.is_rows != (op.row.ndim == 0):
            return
        if op.row.ndim:
            x = x.unsqueeze(0) if x.dim() == op.row.ndim + 1 else x
            some = max(1, ELEMENTS // self.count // max(1, x[0].numel()))
            inputs.parts.append(x[:some].clone())
        else:
            x = x.reshape(-1, x.shape[-1])
            low, high = x.amin(0), x.amax(0)
            inputs.low = low if inputs.low is None else torch.minimum(inputs.low, low)
            inputs.high = high if inputs.high is None else torch.maximum(inputs.high, high)
            chosen = torch.randperm(len(x), generator=self._generator)[: max(16, ROWS // self.count)]
            inputs.parts.append(x[chosen])
        inputs.batches.append(self.number)


def weights_of_rows(output: Tensor) -> Tensor:
    """How much the error of each row ``[n, out]`` of a linear layer's output counts: ``[n]``.

    A token whose values are a hundred times as large as those of the others, of which trained transformers have a few,
    would decide alone, and the norm that follows divides its error by its size.
    """
    size = output.square().mean(1)
    return 1 / (size + size.median() + torch.finfo(torch.float32).tiny)


def is_layer(op: SeenOp) -> bool:
    """Whether an op is a convolution or linear layer that multiplies int8 values by a parameter that is its weight."""
    static = op.decision.precision == "int8" and op.decision.mode == "static" and op.row.role is Role.COMPUTE
    return static and op.weight is not None and not op.weight.computed


def sampled(root: InterceptedForward, token: QuantizedModelToken, kept: KeptBatches) -> dict[int, Inputs]:
    """Key of each value that a layer reads -> a sample of it, in float."""
    found = {o.key: Inputs() for (op, _), o in token.observing.items() if is_layer(op)}
    for number, batch in enumerate(kept.batches):
        run_with(root, token, _Sampling(token, found, number, len(kept)), batch)
    return {key: inputs for key, inputs in found.items() if inputs.parts}


# int8, in float


@dataclass
class Rounding:
    """How ops round what they read, as conversion will have it.

    Attributes:
        qparams: key of a value -> how it is quantized.
        weights: canonical place of a weight -> its values after rounding.
        smoothing: canonical place of a weight -> factors of the channels that its layer reads.
    """

    qparams: dict[int, QParams]
    weights: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    smoothing: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def rounded(self, op: SeenOp, key: int, x: Tensor) -> Tensor:
        """What an op reads of a value."""
        factors = None if op.weight is None else self.smoothing.get(op.weight.key)
        x = x.to(torch.float32)
        if factors is None:
            return rounded(x, self.qparams[key])
        return rounded(x * factors, self.qparams[key]) / factors

    def weight(self, op: SeenOp) -> Tensor:
        """The weight that an op reads, the part of it that is meant."""
        assert op.weight is not None
        whole = self.weights[op.weight.key]
        return whole if op.weight.whole else whole.contiguous().as_strided(*op.weight.geometry)


def rounding_of(token: QuantizedModelToken, qparams: dict[int, QParams], refined: Mapping[Place, Parts]) -> Rounding:
    """How a model that is about to be converted will round.

    Args:
        refined: canonical place of a weight -> what it consists of, where that is not rounded to the nearest.
    """
    rounding = Rounding(qparams)
    for op in token.record.hooked():
        if op.decision.precision != "int8" or op.weight is None or not op.row.takes_weight:
            continue
        parts = refined.get(op.weight.key) or nearest(token, op)
        rounding.weights[op.weight.key] = values_of(op, parts)
        if "smoothing" in parts:
            rounding.smoothing[op.weight.key] = parts["smoothing"]
    return rounding


def nearest(token: QuantizedModelToken, op: SeenOp, factors: Tensor | None = None) -> Parts:
    """The int8 weight of an op with each element rounded to the nearest; of a layer whose inputs are multiplied by
    ``factors``, the weight without them.
    """
    assert op.weight is not None
    if op.weight.computed:
        whole = token.record.computed[op.weight.key].value(token.modules).detach()
    else:
        registered, name = source_of(op.weight, token.modules)
        whole = registered[name].detach()
    weight = whole if factors is None else whole / factors
    axis = channel_axis(weight.shape, op.weight, op.row.weight_axis)
    parts = quantized_weight(weight, op, axis, None, token.modules)
    return parts if factors is None else {**parts, "smoothing": factors}


def values_of(op: SeenOp, parts: Parts) -> Tensor:
    """The values of a whole int8 weight."""
    assert op.weight is not None
    levels, scale, zero_point = parts["int8"].to(torch.float32), parts["scale"], parts.get("zero_point")
    axis = channel_axis(levels.shape, op.weight, op.row.weight_axis) if scale.numel() > 1 else None
    if zero_point is not None:
        levels = levels - along(zero_point, axis, levels.dim())
    value = levels * along(scale, axis, levels.dim())
    return value * parts["smoothing"] if "smoothing" in parts else value


def rounded(x: Tensor, q: QParams) -> Tensor:
    """A value after it was quantized and dequantized."""
    return dequantize(quantize(x, q), q)


def rounded_as_it_comes(x: Tensor, activation: Any) -> Tensor:
    """The same by its own range, or that of each row, as the observer of its qconfig says."""
    narrow = seven_bits(activation)
    if not by_row(activation):
        return rounded(x, dynamic_qparams(x, narrow))
    rows = x.reshape(-1, x.shape[-1])
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (127 if narrow else 255)).clamp(min=torch.finfo(torch.float32).eps)
    zero = torch.round(-low / scale)
    levels = (torch.round(rows / scale) + zero).clamp(0, 127 if narrow else 255)
    return ((levels - zero) * scale).reshape(x.shape)


class Simulation(Looking):
    """Ops compute in float what they will compute in int8: on rounded values, with rounded weights.

    Args:
        chosen: says which ops do; None for all that will.
    """

    def __init__(
        self, token: QuantizedModelToken, rounding: Rounding, chosen: Callable[[SeenOp], bool] | None = None
    ) -> None:
        super().__init__(token)
        self.rounding, self.chosen = rounding, chosen
        self._held: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        if op.decision.precision != "int8" or (self.chosen is not None and not self.chosen(op)):
            return original()
        bound, changed = list(bound), False
        for slot, vid, x in edges:
            observation = self.token.observing.get((op, vid))
            if op.decision.mode == "static" and observation is not None:
                value = self._rounded(op, observation.key, x)
            elif op.decision.mode == "dynamic" and op.qconfig is not None:
                value = rounded_as_it_comes(x.to(torch.float32), op.qconfig.activation())
            else:
                continue
            if op.row.takes_list:
                bound[0] = [*bound[0][:slot], value, *bound[0][slot + 1 :]]
            else:
                bound[slot] = value
            changed = True
        if op.weight is not None and op.weight.key in self.rounding.weights and op.row.takes_weight:
            bound[1] = self.rounding.weight(op)
            changed = True
        if not changed or inplace:
            return original()
        return self.result(op, bound)

    def result(self, op: SeenOp, bound: list[Any]) -> Any:
        """What an op makes of rounded values."""
        return run_float(op.row, bound, op.pad)

    def _rounded(self, op: SeenOp, key: int, x: Tensor) -> Tensor:
        """Several ops may read one value: it is rounded once, since all of them smooth it alike."""
        known = self._held.get((id(x), key))
        if known is None or known[0] is not x or known[1] != version_of(x):
            known = self._held[id(x), key] = x, version_of(x), self.rounding.rounded(op, key, x)
        return known[2]
