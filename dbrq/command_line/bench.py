"""``dbrq bench``: a model in float, in int8, and lowered to each backend, in one table."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from ..calibration.surgery import random_state_kept
from ..errors import ERRORS_OF_CODE, CompilerError, OneDNNError, is_bug
from ..inspection.comparing import sqnr
from ..inspection.report import report
from ..lowering import BACKENDS, lower
from ..progress import Stages
from ..pytree import copied_inputs, tree_leaves
from .models import Subject, UsageError, subject
from .result import Result

_SLICES = 10


@dataclass
class BenchRow:
    """One form of the model.

    Attributes:
        form: "float", "eager" (converted), or the backend.
        milliseconds: the median of a call; None where it does not run.
        fastest: the least of a call.
        speedup: how many times as fast as the first row.
        sqnr: of the outputs, against the first row's, in dB, over all items; None for that row itself.
        same_top: the share of largest entries of the outputs' last dimension that are at the same place, 0 to 1.
        megabytes: of parameters and buffers; None where they are packed.
        note: what went wrong.
    """

    form: str
    milliseconds: float | None = None
    fastest: float | None = None
    speedup: float | None = None
    sqnr: float | None = None
    same_top: float | None = None
    megabytes: float | None = None
    note: str = ""


def bench(options: Namespace) -> Result:
    """``dbrq bench MODEL``"""
    known = ("eager", *BACKENDS)
    named = options.backends is not None
    wanted = [name.strip() for name in options.backends.split(",") if name.strip()] if named else known
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError("there is no such backend", expected=" or ".join(known), got=", ".join(unknown))
    if not wanted:
        raise UsageError("no backend is asked for", expected=", ".join(known), got=repr(options.backends))
    of = subject(options.model, options.example, options.allow)
    if named and of.stage == "lowered":
        raise UsageError("a lowered model runs on the backend it was lowered to", got=f"--backends {options.backends}")
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads or threads)
    try:
        rows = _rows(of, wanted, options)
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    failed = [row for row in rows if row.milliseconds is None and (named or not row.note.startswith(_ABSENT))]
    problems = tuple(f"{row.form} does not run: {row.note}" for row in failed)
    quantized_here = ", on which it was quantized" if of.stage == "float" else ""
    on = f"its example{quantized_here}" if of.data is None else f"{len(of.calls(options.batches))} items"
    text = f"{_table(rows)}\n\n{of.name}, {used} thread(s), accuracy on {on}, against {rows[0].form}"
    return Result(text, {"model": of.name, "threads": used, "rows": [asdict(row) for row in rows]}, problems)


_ABSENT = "not here: "


def _rows(of: Subject, wanted: Sequence[str], options: Namespace) -> list[BenchRow]:
    progress = False if options.quiet else None
    rows: dict[str, BenchRow] = {}
    forms: dict[str, nn.Module] = {}
    args, kwargs = of.call
    if of.stage in ("float", "lowered"):
        forms[of.stage] = of.model.eval()
        rows[of.stage] = BenchRow(of.stage, megabytes=_megabytes(of.model))
    if of.stage != "lowered":
        quantized = of.converted(progress)
        for name in ("eager", *BACKENDS):
            if name not in wanted:
                continue
            rows[name] = BenchRow(name)
            try:
                forms[name] = quantized if name == "eager" else lower(
                    quantized, args, example_kwargs=kwargs, backend=name, progress=progress
                )  # fmt: skip
            except ERRORS_OF_CODE as error:
                rows[name].note = _note(error)
        if "eager" in rows:
            rows["eager"].megabytes = report(quantized).facts.bytes_after / 1e6
    with torch.no_grad(), Stages("benchmark", progress) as stages:
        stages.at("accuracy")
        _accuracy(rows, forms, of.calls(options.batches))
        stages.at("timing")
        for name, taken in _interleaved(forms, args, kwargs, options.seconds).items():
            rows[name].milliseconds, rows[name].fastest = statistics.median(taken), min(taken)
    first = next((row.milliseconds for row in rows.values()), None)
    for row in rows.values():
        row.speedup = first / row.milliseconds if first and row.milliseconds else None
    return list(rows.values())


def _note(error: BaseException) -> str:
    if is_bug(error):
        raise error
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{_ABSENT if isinstance(error, (CompilerError, OneDNNError)) else ''}{type(error).__name__}: {first}"


def _megabytes(model: nn.Module) -> float | None:
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values()) / 1e6 or None


def _outputs(model: nn.Module, call: tuple[tuple, dict]) -> list[Tensor]:
    """The floating point tensors that a call gives."""
    args, kwargs = copied_inputs(call)
    with random_state_kept():
        output = model(*args, **kwargs)
    return [leaf.float() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _accuracy(rows: Mapping[str, BenchRow], forms: dict[str, nn.Module], calls: Sequence[Any]) -> None:
    names = list(forms)
    found: dict[str, list[list[Tensor]]] = {}
    for name in names:
        try:
            found[name] = [_outputs(forms[name], call) for call in calls]
        except ERRORS_OF_CODE as error:
            if name == names[0]:
                raise
            rows[name].note = _note(error)
            del forms[name]
    for name in found:
        if name != names[0]:
            both = zip(found[names[0]], found[name], strict=True)
            pairs = [(a, b) for before, after in both for a, b in zip(before, after, strict=False)]
            rows[name].sqnr, rows[name].same_top = _agreement([(a, b) for a, b in pairs if a.shape == b.shape])


def _agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float | None, float | None]:
    if not pairs:
        return None, None
    expected, got = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    same = [(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in pairs if a.dim() > 1 and a.shape[-1] > 1 and a.numel()]
    return sqnr(expected, got), float(torch.cat(same).double().mean()) if same else None


def _interleaved(forms: Mapping[str, nn.Module], args: tuple, kwargs: dict, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call. The forms take turns, so that a busy moment of the machine hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(_SLICES + 1):
        for name, model in forms.items():
            end = time.perf_counter() + (seconds / _SLICES if turn else 0)  # the first turn only warms up
            while True:
                start = time.perf_counter()
                model(*args, **kwargs)
                now = time.perf_counter()
                if turn:
                    taken[name].append(1e3 * (now - start))
                if now >= end:
                    break
    return taken


def _table(rows: Sequence[BenchRow]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    columns: list[tuple[str, Callable[[BenchRow], str]]] = [
        ("", lambda row: row.form),
        ("ms", lambda row: cell(row.milliseconds, "{:.3f}")),
        ("fastest", lambda row: cell(row.fastest, "{:.3f}")),
        ("speed-up", lambda row: cell(row.speedup, "{:.2f}")),
        ("SQNR (dB)", lambda row: cell(row.sqnr, "{:.1f}")),
        ("same top", lambda row: cell(row.same_top, "{:.1%}")),
        ("MB", lambda row: cell(row.megabytes, "{:.1f}")),
        ("", lambda row: row.note),
    ]
    if not any(row.note for row in rows):
        columns.pop()
    return tabulate([[show(row) for _, show in columns] for row in rows], [name for name, _ in columns],
                    disable_numparse=True, colalign=["left", *["right"] * 6, "left"][: len(columns)])  # fmt: skip
