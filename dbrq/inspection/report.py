"""``report``: what was quantized, what was not and why."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from ..calibration.observers import HistogramObserver, observed
from ..calibration.session import QuantizedModelToken, qparams_of
from ..calibration.surgery import uncompiled
from ..eager.recurrent import recurrent_weights
from ..errors import ConfigurationError, QuantizationError
from ..hidden_state import STATE, state_of
from ..kernels import QParams
from ..mappings import LEAVES, Role
from ..record.record import Record, SeenOp, TensorInfo
from ..tensors import WEIGHT_PARTS
from .comparing import Comparison
from .page import Contents, write
from .rows import ChosenRange, Facts, PathRow, ReportRow, from_json, lowered_report
from .summary import headline, mmacs, reason_of, runs_int8, screen
from .tables import Table
from .timing import Profile

#: Bars of a histogram.
_BARS = 48


@dataclass(frozen=True)
class Report(Table):
    """All ops of a model in the order they ran, modules that never did, and paths.

    ``str()`` fits a screen; ``table()`` has every op, ``_repr_html_`` too (what notebooks show).

    Attributes:
        rows: one for each op.
        paths: one for each path through a call of a module.
        facts: what else is known: bytes, ranges, who reads what.
        profile: what ``report`` was given; the shares of the time are taken from it.
    """

    rows: tuple[ReportRow, ...]
    paths: tuple[PathRow, ...] = ()
    facts: Facts = field(default_factory=Facts, compare=False)
    profile: Profile | None = field(default=None, compare=False, repr=False)

    @property
    def coverage(self) -> float:
        """Share of multiply-accumulates with weights done in int8, 0 to 1: those of convolutions, linear and recurrent
        layers, experts, and of any other product with parameters.
        """
        return self._share(lambda row: row.weighs)

    @property
    def coverage_all(self) -> float:
        """As ``coverage``, with products of activations, as in attention."""
        return self._share(lambda row: True)

    def _share(self, counts: Callable[[ReportRow], bool]) -> float:
        rows = [row for row in self.rows if row.macs and counts(row)]
        total = sum(row.macs for row in rows)
        return sum(row.macs for row in rows if runs_int8(row)) / total if total else 0.0

    def __str__(self) -> str:
        branching = len({(row.module, row.call) for row in self._branching()})
        return screen(self.rows, self.facts, self.coverage, self.coverage_all, branching, self.profile)

    def title(self) -> str:
        return headline(self.coverage, self.coverage_all, self.facts)

    def head(self) -> list[str]:
        return ["path", "op", "precision", "MMACs", "kernel, or why float"]

    def cells(self, row: ReportRow) -> list[str]:
        return [row.path, row.op, row.precision, mmacs(row.macs), reason_of(row)]

    def table(self) -> str:
        """All ops as text, and a table of the paths where there are several through a call."""
        text = f"{super().table()}\n{self.title()}"
        taken = [
            [row.module or "<root>", row.call, row.number, row.seen, row.ops, row.shared] for row in self._branching()
        ]
        if not taken:
            return text
        return f"{text}\n\npaths\n{tabulate(taken, ['module', 'call', 'path', 'times seen', 'ops', 'shared ops'])}"

    def save(
        self, path: str | os.PathLike, *, compare: Comparison | None = None, profile: Profile | None = None
    ) -> None:
        """Write the report as one HTML file that needs no other and no network (``pip install dbrq[report]``).

        It has what ``str()`` and ``table()`` have, plots of time and of the ranges of activations (with histograms if
        the report is a prepared model's: a converted one has forgotten them), the graph, and the environment.

        Args:
            path: of the file; one that is there is replaced.
            compare: what ``dbrq.compare`` found, for the error of each op.
            profile: what ``dbrq.profile`` found, unless ``dbrq.report`` was given it already.

        Raises:
            ConfigurationError: jinja2 or matplotlib is missing, or the file cannot be written.
        """
        for name, given, kind in (("compare", compare, Comparison), ("profile", profile, Profile)):
            if given is not None and not isinstance(given, kind):
                raise ConfigurationError(
                    f"save takes what dbrq.{name} found", expected=f"{name}=dbrq.{name}(...)",
                    got=type(given).__name__, hint=f"pass the result, not the model or dbrq.{name} itself",
                )  # fmt: skip
        write(Contents(self.rows, self.facts, self.coverage, self.coverage_all, self._branching(), compare,
                       self.profile if profile is None else profile), path)  # fmt: skip

    def _branching(self) -> list[PathRow]:
        """The paths of calls that have several."""
        branching = {(row.module, row.call) for row in self.paths if row.number}
        return [row for row in self.paths if (row.module, row.call) in branching]


def report(model: nn.Module, *, profile: Profile | None = None) -> Report:
    """What ``model`` runs in int8 and what in float, op by op.

    Args:
        model: a prepared, converted or lowered model. For a prepared one the rows say what conversion will do.
        profile: what ``dbrq.profile`` found for it: the report then says which share of the time was measured, beside
            the estimate. (Profiles of torchscript models name kernels, not ops, and say nothing here.)

    Raises:
        ConfigurationError: the model is none of these.

    >>> from dbrq import prepare
    >>> found = report(prepare(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), torch.zeros(1, 4)))
    >>> [(row.path, row.precision) for row in found.rows]
    [('0', 'int8'), ('1', 'float')]
    >>> print(found.table())
    path    op       precision    MMACs    kernel, or why float
    ------  -------  -----------  -------  ---------------------...
    0       linear   int8         1.2e-05  onednn.qlinear_pointwise
    1       softmax  float ...
    """
    model = uncompiled(model)
    if (held := lowered_report(model)) is not None:
        rows, facts = from_json(held)
        return Report(rows, facts=facts, profile=profile)
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None:
        raise ConfigurationError(
            "report reads prepared, lowered and converted models", got=type(model).__name__,
            hint="call dbrq.prepare or dbrq.quantize first",
        )  # fmt: skip
    token: QuantizedModelToken = state.token
    seen = [op for op in token.record.ops if op.row.role is not Role.PASS or op.row.name == "pad"]
    found = [_row(op, token) for op in seen]
    reached = {op.module for op in token.record.ops} | {
        op.weight.path for op in token.record.ops if op.weight is not None
    }
    for path, module in model.named_modules():
        leaf = None if isinstance(module, torch.jit.ScriptModule) else LEAVES.get(type(module).forward)
        if leaf is not None and leaf[0].role in _WITH_WEIGHTS and path not in reached:
            reason = "it was never reached in the watching run"
            found.append(ReportRow(path, type(module).__name__, "float", reason, "float", 0))
    return Report(tuple(found), tuple(_paths(token.record)), _facts(model, token, seen), profile)


def _paths(record: Record) -> Iterator[PathRow]:
    for module, calls in record.calls.items():
        for call, seen in enumerate(calls):
            on = Counter(op for path in seen.paths for op in dict.fromkeys(path.ops))
            for number, path in enumerate(seen.paths):
                shared = sum(on[op] > 1 for op in path.ops)
                yield PathRow(module, call, number, path.seen, len(path.ops), shared)


_WITH_WEIGHTS = (Role.COMPUTE, Role.EMBEDDING, Role.RECURRENT, Role.FLOAT, Role.NORM)


def _row(op: SeenOp, token: QuantizedModelToken) -> ReportRow:
    d = op.decision
    kernel = d.kernel
    for _, packed in token.packed_for(op).values() if op.row.role is Role.COMPUTE and op.weight is not None else ():
        if packed.words:
            kernel = packed.words + "".join(kernel.partition(" + ")[1:])
    elements = 0 if d.member_of is not None else sum(_sizes((*op.inputs, *op.outputs)))
    return ReportRow(op.path, op.op, d.precision, d.reason, kernel, op.macs, op.weighs, elements)


def _sizes(infos: Iterable[TensorInfo]) -> Iterator[int]:
    return (math.prod(info.shape) for info in infos if not info.constant)


# What is known beside the ops


def _facts(model: nn.Module, token: QuantizedModelToken, seen: list[SeenOp]) -> Facts:
    prepared = token.phase == "observe"
    tensors = _tensors(model)
    saved = _saved(tensors, token) if prepared else {}
    before, after = _bytes_to_come(tensors, saved) if prepared else _bytes_of_converted(tensors)
    read = sum(tensors[name].nbytes - saved.get(name, 0) for name in _read(tensors, token.record))
    ranges = _observed(token) if prepared else _converted(token)
    stage = "prepared" if prepared else "converted"
    if any(state.parts for state in token.states.values()):
        stage = "lowered in parts"
    edges = tuple(sorted(_edges(token.record, seen)))
    return Facts(type(model).__name__, stage, before, after, tuple(ranges), edges, read)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The user's parameters and buffers, and what their weights became: not what observes, nor qparams."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if f".{STATE}." not in f".{name}"}


def _bytes_of_converted(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    after = sum(tensor.nbytes for tensor in tensors.values())
    before = after
    for name, tensor in tensors.items():
        if not name.endswith("_int8"):
            continue
        stem = name.removesuffix("_int8")
        made = [tensors[n].nbytes for n in (f"{stem}_{part}" for part in WEIGHT_PARTS[1:]) if n in tensors]
        beside = stem in tensors or ".weight_computed_" in f".{stem}"  # the float weight is there, too
        before += (0 if beside else 4 * tensor.numel()) - tensor.nbytes - sum(made)
    return before, after


def _bytes_to_come(tensors: Mapping[str, Tensor], saved: Mapping[str, int]) -> tuple[int, int]:
    before = sum(tensor.nbytes for tensor in tensors.values())
    return before, before - sum(saved.values())


def _saved(tensors: Mapping[str, Tensor], token: QuantizedModelToken) -> dict[str, int]:
    """Name -> bytes that a parameter will be smaller by."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    saved: dict[str, int] = {}
    for op in token.record.hooked():
        if op.decision.precision != "int8":
            continue
        for weight in _weights_of(op, token):
            if weight is not None and (name := names.get(id(weight))) is not None and weight.dim():
                saved[name] = weight.nbytes - weight.numel() - 4 * weight.shape[0]
    return saved


def _read(tensors: Mapping[str, Tensor], record: Record) -> Iterator[str]:
    """Names of the parameters, and of what they became, that ops read as a whole."""
    tables: set[str] = set()
    products: set[str] = set()
    ran = {""}
    for op in record.ops:
        ran |= {op.owner, op.module or op.owner}
        if op.weight is not None:
            ran.add(op.weight.path)
            (tables if op.row.role is Role.EMBEDDING else products).add(".".join(filter(None, op.weight.key)))
    ran |= {value.parameter[0] for value in record.values.values() if value.parameter is not None and value.readers}
    for name, tensor in tensors.items():
        stem = next((s for s in map(name.removesuffix, _ENDS) if s != name and f"{s}_int8" in tensors), name)
        is_weight = stem != name or isinstance(tensor, nn.Parameter)
        # Of a table that a linear layer has in int8, an embedding in float keeps the float form.
        for_rows = stem in tables and (stem not in products or (stem == name and f"{stem}_int8" in tensors))
        if is_weight and not for_rows and name.rpartition(".")[0] in ran:
            yield name


#: What an int8 weight consists of.
_ENDS = tuple(f"_{part}" for part in WEIGHT_PARTS)


def _weights_of(op: SeenOp, token: QuantizedModelToken) -> list[Tensor | None]:
    """The parameters that will be int8 for an op."""
    if op.row.role is Role.RECURRENT and op.module is not None:
        module = token.modules[op.module]
        return [module._parameters.get(name) for name, _ in recurrent_weights(module)]
    if op.weight is None or op.weight.computed:
        return []
    return [token.modules[op.weight.path]._parameters.get(op.weight.name)]


def _converted(token: QuantizedModelToken) -> Iterator[ChosenRange]:
    known: set[Any] = set()
    for op in token.record.hooked():
        state = token.states[op.owner]
        for key in (key for read in op.decision.reads for _, key in read.edges):
            if key not in known and key in state.slots:
                known.add(key)
                yield _range(op.path, state.qparams(key))


def _range(path: str, q: QParams, observer: nn.Module | None = None) -> ChosenRange:
    low, high = ((level - q.zero_point) * q.scale for level in (q.quant_min, q.quant_max))
    seen = None if observer is None else _seen(observer)
    counts = _bars(observer, *seen) if seen is not None and isinstance(observer, HistogramObserver) else ()
    return ChosenRange(path, low, high, q.quant_max - q.quant_min + 1, seen, counts)


def _observed(token: QuantizedModelToken) -> Iterator[ChosenRange]:
    known: set[int] = set()
    for (op, _), observation in token.observing.items():
        observer = token.observers.get(observation.key)
        if observer is None or observation.key in known or not observed(observer):
            continue
        known.add(observation.key)
        try:
            q = qparams_of(observer, op)
        except QuantizationError:  # convert says so
            continue
        yield _range(op.path, q, getattr(observer, "activation_post_process", observer))


def _seen(observer: nn.Module) -> tuple[float, float] | None:
    low, high = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
    known = isinstance(low, Tensor) and isinstance(high, Tensor) and low.numel() == high.numel() == 1
    return (float(low), float(high)) if known else None  # type: ignore[arg-type]  # known says so


def _bars(observer: HistogramObserver, low: float, high: float) -> tuple[int, ...]:
    """The observer's counts in ``_BARS`` equal parts; each of its bins counts where its middle is."""
    if not low < high:
        return ()
    edges, counts = observer.occupied(low, high)
    middles = (edges[1:] + edges[:-1]) / 2
    places = ((middles - low) * (_BARS / (high - low))).long().clamp_(0, _BARS - 1)
    return tuple(torch.zeros(_BARS, dtype=torch.float64).index_add_(0, places, counts).long().tolist())


def _edges(record: Record, seen: list[SeenOp]) -> set[tuple[int, int]]:
    """Who makes what others read, by way of ops that only move elements."""
    numbers = {op: number for number, op in enumerate(seen)}
    makers: dict[int, set[int]] = {}

    def made_by(vid: int) -> set[int]:
        found, waiting, met = set(), [vid], set()
        while waiting:
            if (each := waiting.pop()) in met or (value := record.values.get(each)) is None:
                continue
            met.add(each)
            if value.producer is None:
                waiting += [] if value.origin is None else [value.origin]
            elif value.producer in numbers:
                found.add(numbers[value.producer])
            else:
                waiting += [info.id for info in value.producer.inputs]
        return found

    edges = set()
    for op, number in numbers.items():
        for info in op.inputs:
            if info.id not in makers:
                makers[info.id] = made_by(info.id)
            edges |= {(maker, number) for maker in makers[info.id] if maker != number}
    return edges
