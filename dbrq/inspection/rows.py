"""What a report holds, as plain data that lowered models keep as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..hidden_state import lowered_of

#: Attribute of a lowered model that holds its report.
LOWERED_REPORT = "dbrq_report"


def lowered_report(model: object) -> str | None:
    """The report that a lowered model holds, as JSON; None of others."""
    held = getattr(lowered_of(model) or model, LOWERED_REPORT, None)
    return held if isinstance(held, str) else None


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
        elements: how many elements it reads and writes beside its weights, for the example's shapes; 0 inside a fusion.
    """

    path: str
    op: str
    precision: str
    reason: str
    kernel: str
    macs: int
    weighs: bool = True
    elements: int = 0


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
class ChosenRange:
    """Which floats an activation's integers stand for.

    Attributes:
        op: path of the op that reads it first as int8.
        low, high: what the least and the greatest integer stand for.
        levels: how many integers there are.
        seen: the least and the greatest value of calibration; None where the model has forgotten it.
        counts: how many values of calibration lay in each of as many equal parts of ``seen``; empty where forgotten.
    """

    op: str
    low: float
    high: float
    levels: int
    seen: tuple[float, float] | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a report knows of the model beside its ops.

    Attributes:
        model: its class.
        stage: "prepared", "converted" or "lowered".
        bytes_before: of parameters and buffers, in float.
        bytes_after: the same with int8 weights; of a prepared model about as they will be: weights that forward
            computes, or that ops in float read as well, show once it is converted.
        bytes_per_token: of the weights that a call reads, each once, whatever its input is: integers with their scales,
            and what stays in float. Of a language model that decodes, a token reads them. Without tables of which
            embeddings read rows, and without modules that did not run; of experts, all that ran count.
        ranges: of the activations that are int8.
        edges: (number of the row that makes a value, number of one that reads it).
    """

    model: str = ""
    stage: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    ranges: tuple[ChosenRange, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    bytes_per_token: int = 0


def as_json(rows: Sequence[ReportRow], facts: Facts) -> str:
    """For keeping with a lowered model."""
    return json.dumps({"rows": [dataclasses.astuple(row) for row in rows], "facts": dataclasses.asdict(facts)})


def from_json(text: str) -> tuple[tuple[ReportRow, ...], Facts]:
    """What ``as_json`` wrote, or versions of dbrq that knew of rows only."""
    held = json.loads(text)
    if not isinstance(held, Mapping):
        return tuple(ReportRow(*row) for row in held), Facts(stage="lowered")
    return tuple(ReportRow(*row) for row in held["rows"]), _facts(held["facts"])


def _facts(held: Mapping[str, Any]) -> Facts:
    ranges = tuple(
        ChosenRange(**{**r, "seen": r["seen"] and tuple(r["seen"]), "counts": tuple(r["counts"])})
        for r in held["ranges"]
    )
    return Facts(**{**held, "ranges": ranges, "edges": tuple((a, b) for a, b in held["edges"])})
