"""What was quantized, what was not and why, and what it costs: ``report`` and ``compare``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from .._torch import without_function_modes
from ..auto_trace import logging_values
from ..calibration.first_run import watch
from ..calibration.surgery import copied, random_state_kept, uncompiled
from ..errors import ConfigurationError
from ..hidden_state import state_of
from ..mappings import LEAVES, Role
from ..pytree import call_arguments, copied_inputs, tree_leaves
from ..record.record import Record, SeenOp
from ..tensors import plain


@dataclass(frozen=True)
class ReportRow:
    """One op: where it is, how it runs, and why in float.

    Attributes:
        path: module path; for functional ops followed by op and occurrence.
        op: name in the op table, or the function's.
        precision: "int8" or "float".
        reason: why float, else "".
        kernel: what runs.
        macs: multiply-accumulates for the example's shapes.
        weighs: whether they are with weights: parameters, and what comes from parameters.
    """

    path: str
    op: str
    precision: str
    reason: str
    kernel: str
    macs: int
    weighs: bool = True


@dataclass(frozen=True)
class PathRow:
    """One path through one call of a module.

    Attributes:
        module: module path, "" for the root.
        call: which call of the module in a run.
        number: which path, in the order they were first taken.
        seen: how often calibration took it.
        ops: how many hooked ops are on it.
        shared: how many of those other paths of the same call have, too.
    """

    module: str
    call: int
    number: int
    seen: int
    ops: int
    shared: int


@dataclass(frozen=True)
class Report:
    """All ops of a model in the order they ran, modules that never did, and paths. ``str()`` is a table of the ops, and
    one of the paths where there are several through a call.
    """

    rows: tuple[ReportRow, ...]
    paths: tuple[PathRow, ...] = ()

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

    def _share(self, counts: Any) -> float:
        rows = [row for row in self.rows if row.macs and counts(row)]
        total = sum(row.macs for row in rows)
        return (
            sum(row.macs for row in rows if row.precision == "int8" and "float activations" not in row.kernel) / total
            if total
            else 0.0
        )

    def __str__(self) -> str:
        table = [
            [
                r.path,
                r.op,
                r.precision,
                f"{r.macs / 1e6:.3g}" if r.macs else "",
                r.kernel if r.precision == "int8" else r.reason,
            ]
            for r in self.rows
        ]
        head = ["path", "op", "precision", "MMACs", "kernel, or why float"]
        summary = (
            f"int8: {self.coverage:.1%} of multiply-accumulates with weights, "
            f"{self.coverage_all:.1%} with those of activations among themselves"
        )
        text = f"{tabulate(table, head)}\n{summary}"
        branching = {(row.module, row.call) for row in self.paths if row.number}
        if not branching:
            return text
        taken = [
            [row.module or "<root>", row.call, row.number, row.seen, row.ops, row.shared]
            for row in self.paths
            if (row.module, row.call) in branching
        ]
        return f"{text}\n\npaths\n{tabulate(taken, ['module', 'call', 'path', 'times seen', 'ops', 'shared ops'])}"


def report(model: nn.Module) -> Report:
    """What ``model`` runs in int8 and what in float, op by op.

    Args:
        model: a prepared, converted or lowered model. For a prepared one the rows say what conversion will do.

    Raises:
        ConfigurationError: the model is none of these.

    >>> from dbrq import prepare
    >>> rows = report(prepare(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), torch.zeros(1, 4))).rows
    >>> [(row.path, row.precision) for row in rows]
    [('0', 'int8'), ('1', 'float')]
    """
    model = uncompiled(model)
    if isinstance(held := getattr(model, LOWERED_REPORT, None), str):
        return Report(tuple(ReportRow(*row) for row in json.loads(held)))
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None:
        raise ConfigurationError("report reads prepared, lowered and converted models", got=type(model).__name__)
    seen = state.token.record.ops
    rows = [_row(op, state.token) for op in seen if op.row.role is not Role.PASS or op.row.name == "pad"]
    reached = {op.module for op in seen} | {op.weight.path for op in seen if op.weight is not None}
    for path, module in model.named_modules():
        found = None if isinstance(module, torch.jit.ScriptModule) else LEAVES.get(type(module).forward)
        if found is not None and found[0].role in _WITH_WEIGHTS and path not in reached:
            reason = "it was never reached in the watching run"
            rows.append(ReportRow(path, type(module).__name__, "float", reason, "float", 0))
    return Report(tuple(rows), tuple(_paths(state.token.record)))


def _paths(record: Record) -> Iterator[PathRow]:
    for module, calls in record.calls.items():
        for call, seen in enumerate(calls):
            on = Counter(op for path in seen.paths for op in dict.fromkeys(path.ops))
            for number, path in enumerate(seen.paths):
                shared = sum(on[op] > 1 for op in path.ops)
                yield PathRow(module, call, number, path.seen, len(path.ops), shared)


_WITH_WEIGHTS = (Role.COMPUTE, Role.EMBEDDING, Role.RECURRENT, Role.FLOAT, Role.NORM)


#: Attribute of a lowered model that holds its report.
LOWERED_REPORT = "dbrq_report"


def rows_as_json(rows: Iterable[ReportRow]) -> list[list]:
    """Rows as plain lists, for keeping them with a lowered model."""
    return [list(dataclasses.astuple(row)) for row in rows]


def _row(op: SeenOp, token: Any) -> ReportRow:
    d = op.decision
    kernel = d.kernel
    for _, packed in token.packed_for(op).values() if op.row.role is Role.COMPUTE and op.weight is not None else ():
        if packed.words:
            kernel = packed.words + "".join(kernel.partition(" + ")[1:])
    return ReportRow(op.path, op.op, d.precision, d.reason, kernel, op.macs, op.weighs)


@dataclass(frozen=True)
class ComparisonRow:
    """One op's output in the float and in the quantized model: signal to quantization noise ratio in dB."""

    path: str
    op: str
    sqnr: float


@dataclass(frozen=True)
class Comparison:
    """Ops sorted by ``sqnr``, worst first. ``str()`` is a table."""

    rows: tuple[ComparisonRow, ...]

    def __str__(self) -> str:
        return tabulate([[r.path, r.op, f"{r.sqnr:.1f}"] for r in self.rows], ["path", "op", "SQNR (dB)"])


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise ratio in dB: ``20 log10(|reference| / |reference - other|)``; inf where equal.

    >>> round(sqnr(torch.tensor([1.0, 1.0]), torch.tensor([1.1, 0.9])))
    20
    """
    noise = torch.linalg.vector_norm((reference - other).double()).item()
    signal = torch.linalg.vector_norm(reference.double()).item()
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def log_values(
    model: nn.Module, example_inputs: Any = (), *, example_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Output of every op of one run: op path (as in ``report``) -> float tensor.

    Args:
        model: a float, prepared or converted model. A copy of it is run, a float one's in eval mode.
        example_inputs, example_kwargs: one call's arguments, as in ``prepare``.

    Inside a fusion of a converted model only its last op has a value.

    >>> list(log_values(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4)))
    ['0', '1']
    """
    return {path: value for path, (_, value) in _logged(model, example_inputs, example_kwargs).items()}


def _weights(model: nn.Module) -> list[Tensor]:
    """The int8 weights of a converted model, which its calls do not write to."""
    return [tensor for name, tensor in model.named_buffers() if name.endswith("_int8")]


def _logged(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> dict[str, tuple[str, Tensor]]:
    model = uncompiled(model)
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    values: dict[str, tuple[str, Tensor]] = {}

    def keep(op: SeenOp, output: Any) -> None:
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if op.hooked and first is not None and first.is_floating_point():
            with without_function_modes():
                values[op.path] = (op.op, plain(first).detach().clone())

    with torch.no_grad():
        if state_of(model) is None:
            watch(model, args, kwargs, on_op=keep)
        else:
            tried = copied(model, (*model.parameters(), *_weights(model)))
            args, kwargs = copied_inputs((args, kwargs))
            with random_state_kept(), logging_values(keep):
                tried(*args, **kwargs)
    return values


def compare(
    float_model: nn.Module,
    quantized: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run both models on one input and compare them op by op.

    Args:
        float_model: the model before ``prepare``, or a prepared one.
        quantized: the converted model.
        example_inputs, example_kwargs: one call's arguments, as in ``prepare``.

    >>> from dbrq import quantize
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
    >>> result = compare(model, quantize(model, [x]), x)
    >>> sorted(row.path for row in result.rows)
    ['1', '2']
    """
    before, after = (_logged(m, example_inputs, example_kwargs) for m in (float_model, quantized))
    rows = [
        ComparisonRow(path, op, sqnr(before[path][1], value))
        for path, (op, value) in after.items()
        if path in before and before[path][1].shape == value.shape
    ]
    return Comparison(tuple(sorted(rows, key=lambda row: row.sqnr)))
