"""Where the time of a converted model goes: op by op, with what turns floats into integers and back, and what is left.

A copy of the model runs, in which each op's hook looks at the clock before and after, and so does a ``RunCall`` around
the calls that have no hook.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..auto_trace import RunCall
from ..calibration.session import QuantizedModelToken, working_copy
from ..hidden_state import state_of
from ..mappings import function_name
from ..op_facts import reads_values
from ..pytree import copied_inputs, tree_leaves
from ..quantization_state import AutoQuantizationState
from ..record.record import SeenOp
from ..tensors import Int8Tensor
from .report import report
from .rows import ReportRow
from .summary import is_tiny
from .timing import Profile, profile_of

#: (Module path, function) -> what reports call its calls, in order.
_Paths = dict[tuple[str, str], list[str]]
#: Of a call, what is worth a sentence.
_WORTH_SAYING = 0.1


@dataclass
class _Taken:
    """What one op took in one call, in microseconds; ``conversion`` is part of ``microseconds``."""

    name: str
    precision: str
    microseconds: float = 0.0
    conversion: float = 0.0
    shape: tuple[int, ...] = ()


@dataclass
class Stopwatch:
    """Times of one call. Inside an op nothing else starts: what it calls is its own.

    Attributes:
        taken: path of an op -> what it took; in the order in which they ran. Precisions are "int8", "float", "moved"
            (views and the like) and "lowered".
        counts: (module path, function) -> how often it ran without a hook.
    """

    taken: dict[str, _Taken] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _running: _Taken | None = None

    def op(self, path: str, name: str, precision: str, run: Callable[[], Any], given: Any = ()) -> Any:
        """Run an op. What it is ``given`` as int8 is made float first, if it is one in float."""
        if self._running is not None:
            return run()
        taken = self._running = self.taken.setdefault(path, _Taken(name, precision))
        start = time.perf_counter()
        try:
            if precision == "float":
                self.conversion(lambda: _made_float(given))
            output = run()
        finally:
            self._running = None
        taken.microseconds += (time.perf_counter() - start) * 1e6
        taken.shape = next((tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), ())
        return output

    def conversion(self, run: Callable[[], Any]) -> Any:
        """A part of the op that runs, which turns floats into integers or back."""
        start = time.perf_counter()
        try:
            return run()
        finally:
            if self._running is not None:
                self._running.conversion += (time.perf_counter() - start) * 1e6

    def least(self, other: Stopwatch) -> Stopwatch:
        """Of each op that both met, what took less."""
        for path, taken in other.taken.items():
            if path not in self.taken or taken.microseconds < self.taken[path].microseconds:
                self.taken[path] = taken
        return self


def _made_float(given: Any) -> None:
    for leaf in tree_leaves(given):
        if isinstance(leaf, Int8Tensor) and leaf.deferred_ is None:
            leaf.float_value()


class TimedCall(RunCall):
    """A run whose calls without a hook are timed; ``paths`` says what reports call them."""

    def __init__(self, token: QuantizedModelToken, watch: Stopwatch, paths: _Paths) -> None:
        super().__init__(token)
        self.watch, self.paths = watch, paths

    def _other(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        run = super()._other
        if not reads_values(func):  # x.shape
            return run(func, args, kwargs)
        given = args, kwargs
        return self.watch.op(self._named(func), function_name(func), "float", lambda: run(func, *given), given)

    def _pass(self, func: Callable, row: Any, args: tuple, kwargs: dict) -> Any:
        run = super()._pass
        return self.watch.op(self._named(func), function_name(func), "moved", lambda: run(func, row, args, kwargs))

    def _unseen(self, intercepted: Any, args: tuple, kwargs: dict) -> Any:
        run, row = super()._unseen, intercepted.row
        name = type(intercepted.module).__name__ if row is None else row.name
        return self.watch.op(intercepted.path, name, "float", lambda: run(intercepted, args, kwargs), (args, kwargs))

    def _named(self, func: Callable) -> str:
        assert self.frame is not None
        key = self.frame.state.path, function_name(func)
        known, count = self.paths.get(key, []), self.watch.counts[key]
        if self.watch._running is None:
            self.watch.counts[key] += 1
        return known[count] if count < len(known) else ".".join(filter(None, key))


class _Timed:
    """Has the calls of a converted model, which is used up, be timed by ``watch``; ``start`` puts a new one there."""

    def __init__(self, model: nn.Module) -> None:
        self.watch = Stopwatch()
        self.token: QuantizedModelToken = state_of(model).token
        self.heads = {step.value: op.path for op in self.token.record.hooked() for step in op.decision.chain}
        self.paths: _Paths = defaultdict(list)
        for op in self.token.record.ops:
            if not op.hooked:
                self.paths[op.owner, op.op].append(op.path)
        self.token.__dict__["run"] = self._run
        for state in self.token.states.values():
            state.__dict__["plan"] = functools.partial(self._plan, state)
            state.parts = {n: [self._part(state.path, part) for part in parts] for n, parts in state.parts.items()}

    def start(self) -> Stopwatch:
        self.watch = Stopwatch()
        return self.watch

    def _run(self, intercepted: Any, args: tuple, kwargs: dict) -> Any:
        return TimedCall(self.token, self.watch, self.paths).run(intercepted, args, kwargs)

    def _part(self, path: str, part: Any) -> Any:
        return lambda *args: self.watch.op(path, "module", "lowered", lambda: part(*args))

    def _plan(self, state: AutoQuantizationState, op: SeenOp) -> Any:
        """The hook of an op, with a watch around what calls it."""
        plan: Any = type(state).plan(state, op)
        if "leaf" not in plan.__dict__:
            path = self.heads.get(op.result.id, op.path) if op.decision.member_of is not None else op.path
            for name, given in (("leaf", 2), ("module", 2), ("function", 3)):
                plan.__dict__[name] = self._in_op(getattr(plan, name), path, op, given)
            for name in ("read_int8", "write"):
                plan.__dict__[name] = self._as_conversion(getattr(plan, name))
        return plan

    def _in_op(self, method: Callable, path: str, op: SeenOp, given: int) -> Callable:
        return lambda *args: self.watch.op(path, op.op, op.decision.precision, lambda: method(*args), args[given:])

    def _as_conversion(self, method: Callable) -> Callable:
        return lambda *args: self.watch.conversion(lambda: method(*args))


def profile_converted(model: nn.Module, inputs: tuple, kwargs: dict, repeats: int) -> Profile:
    """``profile`` of a converted model: of each op the least that it took in ``repeats`` calls, and of what is left of
    a call, too.
    """
    run = working_copy(model, ())
    clock, best, rest = _Timed(run), Stopwatch(), float("inf")
    for turn in range(repeats + 1):  # in the first one, kernels are tried and weights packed
        args, options = copied_inputs((inputs, kwargs))
        watch, start = clock.start(), time.perf_counter()
        run(*args, **options)
        taken = (time.perf_counter() - start) * 1e6
        if turn:
            rest = min(rest, taken - sum(op.microseconds for op in watch.taken.values()))
            best = best.least(watch)
    return _as_profile(model, best, max(rest, 0.0))


def _as_profile(model: nn.Module, watch: Stopwatch, rest: float) -> Profile:
    rows = {row.path: row for row in report(model).rows}
    found = []
    for path, taken in watch.taken.items():
        row, how = rows.get(path), taken.precision
        op = taken.name if row is None else row.op  # of a fusion, its first
        kernel = row.kernel if row is not None and how == "int8" else f"torch: {op}" if how != "lowered" else how
        macs = 0 if row is None or how == "lowered" else row.macs
        found.append((path, kernel, f"{op}, {how}", taken.shape, taken.microseconds, macs, taken.conversion))
    totals: dict[str, float] = defaultdict(float)
    for taken in watch.taken.values():
        totals[_WORDS[taken.precision]] += taken.microseconds - taken.conversion
        totals[_CONVERSION] += taken.conversion
    totals[_PYTHON] = rest
    whole = sum(totals.values())
    spent = dict(sorted(totals.items(), key=lambda item: -item[1]))
    return profile_of(found, whole=whole, spent=spent, why=tuple(_why(watch, spent, whole, rows)))


_CONVERSION, _PYTHON = "floats to integers and back", "Python, of the model and between ops"
_WORDS = {"int8": "int8 ops", "float": "ops in float", "moved": "views and moves", "lowered": "lowered parts"}


def _why(watch: Stopwatch, spent: Mapping[str, float], whole: float, rows: Mapping[str, ReportRow]) -> Iterator[str]:
    for what, us in spent.items():
        share = f"{us / whole:.0%} of a call"
        if us < _WORTH_SAYING * whole:
            continue
        if what == _PYTHON:
            yield f"{share} is Python, which dbrq.lower leaves out: dbrq.lower(model, example)"
        elif what == _CONVERSION:
            most = max(watch.taken, key=lambda path: watch.taken[path].conversion)
            yield f"{share} turns floats into integers and back, where int8 ops and ops in float meet; most at {most}"
        elif what == _WORDS["float"]:
            floats = [path for path, taken in watch.taken.items() if taken.precision == "float"]
            most = max(floats, key=lambda path: watch.taken[path].microseconds)
            because = f": {rows[most].reason}" if most in rows and rows[most].reason else ""
            yield f"{share} is spent in {len(floats)} ops in float, most in {most}{because}"
        elif what == _WORDS["int8"]:
            tiny = [path for path in watch.taken if path in rows and is_tiny(rows[path])]
            us = sum(watch.taken[path].microseconds for path in tiny)
            if us > _WORTH_SAYING * whole:
                share = f"{us / whole:.0%} of a call"
                yield (f"{share} is spent in {len(tiny)} int8 layers with so little to do that calling their kernels "
                       "takes longer than the numbers: dbrq.lower, larger batches, or float")  # fmt: skip
