"""A report as one HTML file that needs nothing else: no network, no other file, no JavaScript but its own few lines."""

from __future__ import annotations

import datetime
import importlib.resources
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..version import __version__
from . import plots
from .comparing import Comparison, ComparisonRow
from .machine import cpu, torch_facts
from .rows import ChosenRange, Facts, PathRow, ReportRow
from .summary import estimated, kinds, measured, megabytes, mmacs, next_steps, read_by_token, reason_of, share_in_int8
from .timing import Profile

_ROW, _LANE, _LEFT = 22, 9, 14
_MOST_BARS = 20


@dataclass(frozen=True)
class Contents:
    """What a page shows; what is None or empty has no section on it. ``paths`` are those of calls that have several."""

    rows: Sequence[ReportRow]
    facts: Facts
    coverage: float
    coverage_all: float
    paths: Sequence[PathRow] = ()
    compare: Comparison | None = None
    profile: Profile | None = None


def write(contents: Contents, path: str | os.PathLike) -> None:
    """Write the page.

    Raises:
        ConfigurationError: jinja2 or matplotlib is not installed, or the file cannot be written.
    """
    try:
        text = _page(contents)
    except ImportError as error:
        raise ConfigurationError(
            "an HTML report needs packages that are not installed", expected="jinja2 and matplotlib", got=str(error),
            hint="pip install dbrq[report]; print(report) and report.table() do without",
        ) from error  # fmt: skip
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the report cannot be written: {error}", got=os.fspath(path), hint="name a file in a folder that exists"
        ) from error


def _page(contents: Contents) -> str:
    import jinja2

    template = importlib.resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(_shown(contents))


def _shown(contents: Contents) -> dict[str, Any]:
    rows, facts, profile = contents.rows, contents.facts, contents.profile
    guessed, known = estimated(rows), measured(rows, profile)
    shares = known or guessed
    errors = {row.path: row for row in contents.compare.rows} if contents.compare else {}
    in_order = [errors[row.path] for row in rows if row.path in errors]
    return {
        "title": f"{facts.model or 'model'}, {facts.stage or 'int8'}",
        "cards": _cards(contents, shares, known is not None),
        "steps": list(next_steps(rows, facts, shares, contents.compare is not None)),
        "kinds": _kinds(rows, shares),
        "how": "measured" if known else "estimated",
        "ops": [_op(i, row, shares[i], errors.get(row.path)) for i, row in enumerate(rows)],
        "has_errors": bool(errors),
        "has_local": any(row.local is not None for row in in_order),
        "errors": plots.errors(in_order) if in_order else "",
        "worst": sorted(in_order, key=lambda row: row.sqnr if row.local is None else row.local)[:10],
        "time": _time(rows, shares),
        "spent": _spent(profile),
        "profile": profile,
        "ranges": _ranges(facts.ranges, errors),
        "graph": _graph(rows, facts.edges),
        "paths": contents.paths,
        "environment": _environment(),
    }


def _cards(contents: Contents, shares: Sequence[float], is_measured: bool) -> list[tuple[str, str]]:
    """(number, what it is)."""
    facts = contents.facts
    how = "measured" if is_measured else "estimated"
    cards = [
        (f"{contents.coverage:.1%}", "of multiply-accumulates with weights in int8"),
        (f"{contents.coverage_all:.1%}", "with those of activations among themselves"),
        (
            f"{share_in_int8(contents.rows, shares):.0%}",
            f"of the time in int8 ops, {how}",
        ),
    ]
    if facts.bytes_before:
        cards.append((megabytes(facts.bytes_after), f"of weights, {megabytes(facts.bytes_before)} in float"))
    if read_by_token(contents.rows, facts):
        cards.append((megabytes(facts.bytes_per_token), "of weights read by a token that is decoded alone"))
    if contents.compare and contents.compare.rows:
        worst = contents.compare.rows[0]
        cards.append((f"{worst.sqnr:.1f} dB", f"the lowest SQNR, at {worst.path}"))
    if contents.profile:
        us = contents.profile.whole or contents.profile.microseconds
        cards.append((f"{us / 1e3:.2f} ms", "a call" if contents.profile.whole else "all kernels of a call"))
    return cards


def _kinds(rows: Sequence[ReportRow], shares: Sequence[float]) -> list[dict[str, Any]]:
    found = [
        {"precision": precision, "op": op, "why": why, "count": len(numbers), "share": sum(shares[i] for i in numbers),
         "macs": mmacs(sum(rows[i].macs for i in numbers))}
        for (precision, op, why), numbers in kinds(rows).items()
    ]  # fmt: skip
    return sorted(found, key=lambda kind: -kind["share"])


def _op(number: int, row: ReportRow, share: float, error: ComparisonRow | None) -> dict[str, Any]:
    return {"number": number, "row": row, "share": share, "macs": mmacs(row.macs), "why": reason_of(row),
            "sqnr": error and error.sqnr, "local": error and error.local}  # fmt: skip


def _time(rows: Sequence[ReportRow], shares: Sequence[float]) -> str:
    most = sorted(range(len(rows)), key=lambda i: -shares[i])[:_MOST_BARS]
    most = [i for i in most if shares[i] > 0]
    colours = [plots.PRECISION[rows[i].precision] for i in most]
    if not most:
        return ""
    return plots.bars([rows[i].path for i in most], [shares[i] for i in most], colours, "share of the time")


def _spent(profile: Profile | None) -> str:
    if profile is None or not profile.spent or not profile.whole:
        return ""
    shares = [us / profile.whole for us in profile.spent.values()]
    kinds_of = {"int8 ops": "int8", "ops in float": "float"}
    colours = [plots.PRECISION[kinds_of.get(what, "neither")] for what in profile.spent]
    return plots.bars(list(profile.spent), shares, colours, "share of a call")


def _ranges(ranges: Sequence[ChosenRange], errors: Mapping[str, ComparisonRow]) -> dict[str, Any]:
    """Histograms where the model has them, else from where to where ranges go; of a large model, those that matter."""

    def matters(one: ChosenRange) -> float:
        error = errors.get(one.op)
        return -(one.high - one.low) if error is None or error.local is None else error.local

    known = [one for one in ranges if one.counts]
    most = plots.MOST_HISTOGRAMS if known else 4 * plots.MOST_HISTOGRAMS
    chosen = {id(one) for one in sorted(known or ranges, key=matters)[:most]}
    shown = [one for one in known or ranges if id(one) in chosen]
    plot = "" if not shown else plots.histograms(shown) if known else plots.spans(shown)
    return {"plot": plot, "counts": bool(known), "shown": len(shown), "all": len(known or ranges)}


def _graph(rows: Sequence[ReportRow], edges: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Ops from top to bottom in the order in which they ran; what is not read by the next one goes by a lane at the
    left.
    """
    busy: list[int] = []  # lane -> the row where it is free again
    lanes = []
    for start, end in sorted(edges, key=lambda edge: (edge[0], edge[1])):
        if end == start + 1 or end <= start:
            continue
        lane = next((i for i, until in enumerate(busy) if until <= start), len(busy))
        busy[lane:] = [end, *busy[lane + 1 :]]
        lanes.append((start, end, lane))
    x = _LEFT + _LANE * (len(busy) + 1)
    middle = _ROW // 2
    curves = [
        f"M{x} {a * _ROW + middle + 3}h-{_LANE * (lane + 1)}V{b * _ROW + middle - 3}h{_LANE * (lane + 1)}"
        for a, b, lane in lanes
    ]
    longest = max((len(row.path) + len(row.op) for row in rows), default=0)
    return {
        "row": _ROW, "x": x, "curves": curves, "steps": [a for a, b in edges if b == a + 1],
        "width": x + 40 + 7 * longest, "height": _ROW * len(rows),
    }  # fmt: skip


def _environment() -> list[tuple[str, str]]:
    of_cpu, of_torch = cpu(), torch_facts()
    return [
        ("made", datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")),
        ("dbrq", __version__),
        ("torch", f"{of_torch['version']}, oneDNN {of_torch['onednn']}, {of_torch['capability']}"),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("CPU", f"{of_cpu['name']}, {of_cpu['cores']} cores, {of_cpu['usable_threads']} usable threads"),
        ("instruction sets", ", ".join(of_cpu["instruction_sets"]) or "none of those that int8 kernels use"),
        ("variables", ", ".join(f"{name}={value}" for name, value in of_cpu["environment"].items()) or "none"),
    ]  # fmt: skip
