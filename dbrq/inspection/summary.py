"""A report on one screen: how much is int8, where the time goes, and what to do next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tabulate import tabulate

from .rows import Facts, ReportRow
from .timing import Profile

# What a float multiply-accumulate costs is 1: nominal, of one core with VNNI, which computes some 40 billion of them a
# second or three times as many in int8 (kernels, with what is around them), and moves 2.5 billion floats.
_MAC = {"float": 1.0, "int8": 1 / 3}
_ELEMENT = {"float": 16.0, "int8": 6.0}
#: Rows of each of the two tables, and the width of what is in words.
_MOST, _WIDTH = 10, 52
#: Below so many multiply-accumulates the call of a kernel costs more than its numbers.
_TINY = 100_000
#: Of the time, what is worth a sentence.
_WORTH_SAYING = 0.05


def runs_int8(row: ReportRow) -> bool:
    """Whether an op's products are of integers; int8 weights with float activations are not."""
    return row.precision == "int8" and "float activations" not in row.kernel


def is_tiny(row: ReportRow) -> bool:
    """An int8 layer with so little to do that quantizing and calling may cost more than float does."""
    return row.precision == "int8" and row.weighs and 0 < row.macs < _TINY


def estimated(rows: Sequence[ReportRow]) -> list[float]:
    """The share of the time that each op takes by its multiply-accumulates and elements, 0 to 1: a rule of thumb, which
    knows neither this CPU nor the kernels.
    """
    kinds = ["int8" if runs_int8(row) else "float" for row in rows]
    costs = [r.macs * _MAC[kind] + r.elements * _ELEMENT[kind] for r, kind in zip(rows, kinds, strict=True)]
    total = sum(costs) or 1.0
    return [cost / total for cost in costs]


def measured(rows: Sequence[ReportRow], profile: Profile | None) -> list[float] | None:
    """The share of the time that each op took in a profile; None if that does not know the report's ops."""
    if profile is None:
        return None
    shares = profile.shares()
    found = [shares.get(row.path, 0.0) for row in rows]
    return found if sum(found) > 0.5 else None


def reason_of(row: ReportRow) -> str:
    """Why an op is in float, or what runs."""
    return row.kernel if row.precision == "int8" else row.reason


def next_steps(
    rows: Sequence[ReportRow], facts: Facts, shares: Sequence[float], compared: bool = False
) -> Iterator[str]:
    """What would make the model faster or smaller, what matters most first; ``compared``: accuracy was looked at."""
    if facts.stage == "prepared":
        yield "calibrate it with data like those to come, then dbrq.convert and dbrq.lower"
    elif facts.stage == "converted":
        yield "dbrq.lower(model, example) fuses it; dbrq.doctor(model, example) says which backend is the fastest here"
    floats: dict[str, float] = defaultdict(float)
    paths: dict[str, list[str]] = defaultdict(list)
    for row, share in zip(rows, shares, strict=True):
        if row.precision == "float" and row.macs:
            floats[row.reason] += share
            paths[row.reason].append(row.path)
    for reason, share in sorted(floats.items(), key=lambda item: -item[1])[:3]:
        if share >= _WORTH_SAYING:
            yield f"{share:.0%} of the time in float, in {_listed(paths[reason])}: {reason}"
    if facts.stage == "converted" and not compared:
        yield "dbrq.compare(float_model, quantized, example) shows which layers cost accuracy"


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(map(_end, paths[:1])) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def megabytes(count: int) -> str:
    """
    >>> megabytes(12_300), megabytes(4_560_000)
    ('12.3 kB', '4.6 MB')
    """
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def headline(coverage: float, coverage_all: float, facts: Facts) -> str:
    """How much of a model is int8, in a sentence."""
    named = f"{facts.model}, {facts.stage}: " if facts.model else ""
    return (
        f"{named}int8: {coverage:.1%} of multiply-accumulates with weights, "
        f"{coverage_all:.1%} with those of activations among themselves"
    )


def weights(facts: Facts) -> str:
    """Bytes before and after, in a sentence; "" where they are not known."""
    if not facts.bytes_before:
        return ""
    ratio = facts.bytes_after / facts.bytes_before
    about = "about " if facts.stage == "prepared" else ""
    before, after = megabytes(facts.bytes_before), megabytes(facts.bytes_after)
    return f"weights: {before} in float, {about}{after} in int8 ({ratio:.0%})"


def read_by_token(rows: Sequence[ReportRow], facts: Facts) -> str:
    """Bytes of weights that a token reads, in a sentence; "" for models without embeddings."""
    if not facts.bytes_per_token or not any(row.op.startswith("embedding") for row in rows):
        return ""
    about = "about " if facts.stage == "prepared" else ""
    return f"a token that is decoded alone reads {about}{megabytes(facts.bytes_per_token)} of weights"


def time_in_int8(rows: Sequence[ReportRow], profile: Profile | None) -> str:
    """Share of the time that int8 ops take, in a sentence."""
    known = [("estimated", estimated(rows)), ("measured", measured(rows, profile))]
    said = [f"{share_in_int8(rows, shares):.0%} {how}" for how, shares in known if shares is not None]
    return f"share of the time in int8 ops: {', '.join(said)}"


def share_in_int8(rows: Sequence[ReportRow], shares: Sequence[float]) -> float:
    """What the ops in int8 have of ``shares``, 0 to 1."""
    return sum(share for row, share in zip(rows, shares, strict=True) if row.precision == "int8")


def screen(
    rows: Sequence[ReportRow], facts: Facts, coverage: float, coverage_all: float, branching: int,
    profile: Profile | None = None,
) -> str:  # fmt: skip
    """The text of a report: some 40 lines at most, however large the model."""
    guessed, known = estimated(rows), measured(rows, profile)
    times = [("est. time", guessed)] + ([] if known is None else [("time", known)])
    first = [headline(coverage, coverage_all, facts), weights(facts), read_by_token(rows, facts)]
    parts = [
        "\n".join(filter(None, [*first, time_in_int8(rows, profile)])),
        _kinds(rows, times),
        f"the {min(_MOST, len(rows))} that cost most\n{_costliest(rows, times)}" if rows else "",
        "what to do next\n" + "\n".join(f"- {step}" for step in next_steps(rows, facts, known or guessed)),
        f"several paths lead through {branching} call(s) of modules" if branching else "",
        f"all {len(rows)} ops: report.table(), report.rows, or report.save('report.html')",
    ]
    return "\n\n".join(filter(None, parts))


def kinds(rows: Sequence[ReportRow]) -> Mapping[tuple[str, str, str], list[int]]:
    """(precision, op, reason or kernel) -> numbers of the rows."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        found[row.precision, row.op, "" if row.precision == "int8" else row.reason].append(number)
    return found


def _kinds(rows: Sequence[ReportRow], times: Sequence[tuple[str, Sequence[float]]]) -> str:
    by_time = times[-1][1]
    order = sorted(kinds(rows).items(), key=lambda item: (-sum(by_time[i] for i in item[1]), -len(item[1])))

    def line(precision: str, op: str, reason: str, numbers: Sequence[int]) -> list[str]:
        shares = [f"{sum(values[i] for i in numbers):.1%}" for _, values in times]
        return [precision, op, str(len(numbers)), mmacs(sum(rows[i].macs for i in numbers)), *shares, _cut(reason)]

    lines = [line(*kind, numbers) for kind, numbers in order[:_MOST]]
    if rest := [i for _, numbers in order[_MOST:] for i in numbers]:
        lines.append(line("", f"{len(order) - _MOST} other kinds", "", rest))
    return tabulate(lines, ["runs in", "op", "ops", "MMACs", *(name for name, _ in times), "why float"],
                    disable_numparse=True, colalign=["left", "left", "right", "right", *["right"] * len(times), "left"]
                    if lines else None)  # fmt: skip


def _costliest(rows: Sequence[ReportRow], times: Sequence[tuple[str, Sequence[float]]]) -> str:
    by_time = times[-1][1]
    most = sorted(range(len(rows)), key=lambda i: -by_time[i])[:_MOST]
    lines = [
        [_end(rows[i].path), rows[i].op, rows[i].precision, mmacs(rows[i].macs), *(f"{v[i]:.1%}" for _, v in times)]
        for i in most
    ]
    return tabulate(lines, ["path", "op", "runs in", "MMACs", *(name for name, _ in times)], disable_numparse=True,
                    colalign=["left", "left", "left", "right", *["right"] * len(times)])  # fmt: skip


def mmacs(macs: int) -> str:
    """Millions of multiply-accumulates, to three digits or to one.

    >>> mmacs(16_723_456_789), mmacs(12_345), mmacs(0)
    ('16,723', '0.0123', '')
    """
    return "" if not macs else f"{macs / 1e6:,.0f}" if macs >= 1e8 else f"{macs / 1e6:.3g}"


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _end(path: str) -> str:
    """A path, of a long one its end, which tells it from others."""
    return path if len(path) <= _WIDTH else f"...{path[3 - _WIDTH :]}"
