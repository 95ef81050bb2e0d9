"""``AutoQuantizationState``: what was seen in one module, its observers, and after conversion its qparams.

The op hooks of a run come from here: ``hooks(n)`` are those of the module's n-th call. Nothing in a state changes
during a run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import without_function_modes
from .eager import ops
from .eager.interfaces import Hook, Model, Part
from .eager.path import Hooks
from .eager.weights import check_entry
from .errors import DeviationError, LoadError
from .kernels import QParams, together
from .kernels.ranges import SAFE, WANTED, for_this_cpu, makes_sense
from .mappings import OpRow
from .record.callsite import Site, site
from .record.record import Decision, Key, Place, Read, SeenCall, SeenOp, Tag
from .tensors import layout_of

#: The tensors that hold qparams, in the order of the fields of ``QParams``.
_QPARAMS = {"scale": torch.float32, "zero_point": torch.int64, "quant_min": torch.uint8, "quant_max": torch.uint8}
_INTEGERS = tuple(_QPARAMS)[1:]


class AutoQuantizationState(nn.Module):
    """The quantization state of one non-leaf module, under its ``_auto_quant_state``.

    Attributes:
        path: the module's path in the model.
        calls: what was seen, call by call; each call holds the paths taken through it.
        observers: value key -> observer or fake quantize, for values first read here as int8.
        weight_fake_quants: op path -> fake quantize of its weight, in quantization aware training.
        scale, zero_point, quant_min, quant_max: after conversion, the qparams of the values in ``slots`` as the model
            was made with them, each ``[n]``: float32, int64, and uint8 twice.
        parts: number of a call -> the module lowered for that call, for each origin of its inputs
            (lowering/submodules.py).
        anchor: an empty parameter where conversion left the module none, for code that asks
            ``next(self.parameters())``.
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: Tensor
    quant_max: Tensor
    parts: dict[int, list[Part]]
    whole: Any = None
    _hooks: dict[int, Hooks]
    _plans: dict[SeenOp, Hook]
    _any: dict[Place, tuple[list[Hook], int]] | None
    _homes: dict[str, Hook]
    _any_lists: dict[tuple[int, int], list[Hook]]
    _functions: dict[tuple[str, Any], list[tuple[Place, Hook]]]
    _shared: tuple[dict[Site, set[Site]], dict[str, list[Place]]] | None

    def __init__(self, path: str, token: Model, calls: list[SeenCall]) -> None:
        super().__init__()
        self.path, self.token, self.calls = path, token, calls
        self.opaque = False
        self.observers = nn.ModuleDict()
        self.weight_fake_quants = nn.ModuleDict()
        self.slots: dict[int, int] = {}
        for name, dtype in _QPARAMS.items():
            self.register_buffer(name, torch.empty(0, dtype=dtype))
        self.refresh()

    # What was seen

    def ops(self) -> list[SeenOp]:
        return list(dict.fromkeys(op for call in self.calls for path in call.paths for op in path.ops))

    def input_tags(self, name: str, tensors: Sequence[Tensor]) -> list[Tag]:
        """Who made the tensors of argument ``name`` where the module is the outermost of a run: the caller, as when it
        was calibrated so, else who made them inside the model.
        """
        given = self.token.record.named
        tags: list[Tag] = [given.get((self.path, name, i, t.dtype)) for i, t in enumerate(tensors)]
        inside = self.calls[0].input_tags.get(name, ()) if self.calls else ()
        return [inside[i] if tag is None and i < len(inside) else tag for i, tag in enumerate(tags)]

    def lie_as_recorded(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors of argument ``name``, where the module is the outermost of a run, lie in memory as in
        calibration, if forward goes by that. int8 values do not lie as float ones do, so such a run is not for them.
        """
        record = self.token.record
        if not record.by_layout:
            return True
        for number, tensor in enumerate(tensors):
            if layout_of(tensor) != record.layouts.get((self.path, name, number)):
                self._report_layout(name, tensor)
                return False
        return True

    def _report_layout(self, name: str, tensor: Tensor) -> None:
        line = self.token.record.by_layout
        if self.token.strict:
            raise DeviationError(
                "an input lies in memory in another way than in calibration, and forward goes by that",
                path=self.path, op=line, expected=f"{name!r} contiguous, channels_last ... as in calibration",
                got=f"strides {tensor.stride() if tensor.layout is torch.strided else tensor.layout}",
                hint="calibrate with inputs of this layout, or bring them to that of calibration",
            )  # fmt: skip
        self.token.warn_once(
            f"layout of {name}",
            f"dbrq: {self.path or 'the model'} runs in float: {name!r} lies in memory in another way than in "
            f"calibration, and what forward does goes by that ({line})",
        )

    def unrecorded(self, op: str, leaf: str | None) -> None:
        """``op`` runs where no recorded path has it: raise in strict models, else warn once."""
        name = f"{self.path}.{op}".lstrip(".") if leaf is None else leaf
        if self.token.strict:
            raise DeviationError(
                "the run left the paths that were recorded", path=self.path, op=name, expected="a recorded path",
                got=f"{op} ({name})", hint="calibrate with inputs that take this path",
            )  # fmt: skip
        self.token.warn_once(
            f"{op} {name}",
            f"dbrq: {name} runs in float: {op} in module {self.path or '<root>'} is on a path that was not recorded"
            + (", or its weight is not computed as it was at conversion" if self._computes_weight(op) else ""),
        )  # fmt: skip

    def _computes_weight(self, op: str) -> bool:
        return any(o.op == op and o.weight is not None and o.weight.computed for o in self.ops())

    def check_end(self, last: SeenOp | None, expected: SeenOp | None) -> None:
        """Raise unless some recorded path ends where a run did, after ``last``."""
        ends = {path.ops[-1].place if path.ops else None for call in self.calls for path in call.paths}
        if (None if last is None else last.place) not in ends:
            subject, before = (last, "what follows ") if expected is None else (expected, "")
            assert subject is not None
            raise DeviationError(
                "the run left the paths that were recorded", path=self.path, op=subject.path,
                expected=f"{before}{subject.op} ({subject.path})", got="the end of forward",
                hint="calibrate with inputs that take this path",
            )  # fmt: skip

    # qparams

    def keep_qparams(self, qparams: dict[int, QParams]) -> None:
        """Hold the qparams of the values that ops here read or write."""
        self.refresh()
        self.slots = {key: slot for slot, key in enumerate(qparams)}
        for name, dtype in _QPARAMS.items():
            setattr(self, name, torch.tensor([getattr(q, name) for q in qparams.values()], dtype=dtype))

    def stored(self, key: int) -> QParams:
        """qparams of a value as the model was made with them, on whatever CPU."""
        slot = self.slots[key]
        return QParams(float(self.scale[slot]), *(int(getattr(self, name)[slot]) for name in _INTEGERS))

    def qparams(self, key: Key) -> QParams:
        """qparams of a value as this CPU computes with them; of several values, those of their ranges together."""
        if isinstance(key, tuple):
            return together([self.qparams(k) for k in key])
        return for_this_cpu(self.stored(key))

    @property
    def is_wide(self) -> bool:
        """Whether a value was given more bits than CPUs without exact int8 products take."""
        return bool((self.quant_max - self.quant_min > SAFE).any())

    def checked(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The qparams that ``load_state_dict`` is about to put in place; nothing has changed yet.

        Raises:
            LoadError: they are no qparams, or those of another model.
        """
        if "scale" in values and "quant_max" not in values and self.slots:
            self.token.warn_once(
                "bits of a state dict",
                "dbrq: the state dict is of an older version and does not say how many bits its activations have: as "
                "many as those of the model that it is loaded into, it is assumed",
            )
            values = {**values, "quant_min": self.quant_min, "quant_max": self.quant_max}
        given = {name: values.get(name, getattr(self, name)) for name in _QPARAMS}
        for name, tensor in given.items():
            check_entry(tensor, getattr(self, name), self.path, name)
        for slot, (scale, *integers) in enumerate(zip(*(tensor.tolist() for tensor in given.values()), strict=True)):
            if not makes_sense(q := QParams(scale, *integers)):
                raise LoadError(
                    "the state dict holds no usable qparams", path=self.path, expected=WANTED, got=f"{q} at {slot}",
                    hint="load the state dict of a converted copy of this model",
                )  # fmt: skip
        return values

    # Hooks

    def hooks(self, count: int) -> Hooks | None:
        """The op hooks of the module's call number ``count`` in a run; None if it is not looked into."""
        if self.opaque:
            return None
        hooks = self._hooks.get(count)
        if hooks is None:
            with without_function_modes():
                hooks = self._hooks[count] = self._hooks_of(count)
        return hooks

    def _hooks_of(self, count: int) -> Hooks:
        if count < len(self.calls):
            paths = self.calls[count].paths
            most = max(range(len(paths)), key=lambda i: paths[i].seen, default=0)
            return Hooks(self, [[self.plan(op) for op in path.ops] for path in paths], most)
        if not self.calls:
            return Hooks(self, [], 0)
        last = self.calls[-1].paths
        self.any_hooks()
        return Hooks(self, [self._any_lists[len(self.calls) - 1, i] for i in range(len(last))], 0)

    def plan(self, op: SeenOp) -> Hook:
        """The hook of one op."""
        hook = self._plans.get(op)
        if hook is None:
            hook = ops.plan(self, op)
            sites, places = self._sharing()
            hook.deep = len(sites[op.place.site[:1]]) > 1
            hook.sited = op.leaf is not None and len(places[op.leaf]) > 1
            self._plans[op] = hook  # not before: other threads take it from here
        return hook

    def _sharing(self) -> tuple[dict[Site, set[Site]], dict[str, list[Place]]]:
        """Innermost line -> the sites there, which differ by what they are called from; leaf module -> its places."""
        if self._shared is None:
            sites: dict[Site, set[Site]] = {}
            places: dict[str, list[Place]] = {}
            for op in self.ops():
                sites.setdefault(op.place.site[:1], set()).add(op.place.site)
                if op.leaf is not None and op.place not in places.setdefault(op.leaf, []):
                    places[op.leaf].append(op.place)
            self._shared = sites, places
        return self._shared

    def any_hooks(self) -> dict[Place, tuple[list[Hook], int]]:
        """Hooks for when a loop runs on, or the module is called again: place -> one that serves any time and any
        call, and the path it is on.
        """
        if self._any is None:
            with without_function_modes():
                times: dict[Place, list[SeenOp]] = {}
                for op in self.ops():
                    times.setdefault(op.place, []).append(op)
                made = {place: self._plan_any(ops) for place, ops in times.items()}
                found: dict[Place, tuple[list[Hook], int]] = {}
                lists: dict[tuple[int, int], list[Hook]] = {}
                for number, call in enumerate(self.calls):
                    for i, path in enumerate(call.paths):
                        hooks = lists[number, i] = [made[op.place] for op in path.ops]
                        for position, op in enumerate(path.ops):
                            found.setdefault(op.place, (hooks, position))
                self._any_lists = lists
                self._any = found  # last: other threads take it for a sign that all is there
        return self._any

    def _plan_any(self, ops: Sequence[SeenOp]) -> Hook:
        hook = self.plan(_any_time(ops))
        hook.any_time = True
        return hook

    def home(self, ops: Sequence[SeenOp]) -> Hook:
        """The hook of a leaf module that is called by itself, outside of the model: it reads with the ranges of all
        that its ``ops`` read, the first of which is called here.
        """
        path = ops[0].leaf
        assert path is not None
        hook = self._homes.get(path)
        if hook is None:
            with without_function_modes():
                hook = self._plan_any(ops[:1] if _are_alike(ops) else ops)
                if hook.reads:
                    keys = [(op.owner, key) for op in ops for read in op.decision.reads for _, key in read.edges]
                    hook.read_qparams = [together([self.token.states[owner].qparams(key) for owner, key in keys])]
            self._homes[path] = hook
        return hook

    def places_of_leaf(self, path: str) -> list[Place]:
        """The recorded places that a leaf module which is called now may be at: its calls on this line, or any."""
        places = self._sharing()[1].get(path, [])
        if len(places) < 2:
            return places
        where = site()
        return [place for place in places if place.site == where] or places

    def places_of_function(self, row: OpRow, bound: list[Any] | None) -> list[Place]:
        """The recorded places that the op which runs now may be at; one, unless its weight is chosen at run time."""
        where = site()
        found = self._functions.get((row.name, where))
        if found is None:
            ops = [op for op in self.ops() if op.row is row and op.leaf is None and op.place.site == where]
            with without_function_modes():
                found = [(op.place, self.plan(op)) for op in {op.place: op for op in ops}.values()]
            self._functions[row.name, where] = found
        return [place for place, hook in found if bound is None or hook.fits(bound)]

    def refresh(self) -> None:
        """Forget what was derived from the qparams, since they may have changed."""
        self.parts, self.whole = {}, None
        self.__dict__.update(_nothing_derived())

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        ranges = self.__dict__.pop("ranges", None)
        if ranges is not None:  # of a file from before they were buffers
            for i, name in enumerate(("quant_min", "quant_max")):
                self.register_buffer(name, torch.tensor([ranges[key][i] for key in self.slots], dtype=_QPARAMS[name]))

    def __getstate__(self) -> dict:
        return {**self.__dict__, **_nothing_derived()}

    def __deepcopy__(self, memo: dict) -> AutoQuantizationState:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new

    # Printing

    def in_short(self) -> str:
        """Which ops of the module's own forward run in int8, for the line that its model prints; "" if none do."""
        counts = Counter(op.op for op in self.ops() if op.decision.precision == "int8" and op.leaf is None)
        ops = ", ".join(op if n == 1 else f"{op} x{n}" for op, n in counts.items())
        return f"int8: {ops}" if ops else ""

    def extra_repr(self) -> str:
        lines = []
        for number, call in enumerate(self.calls):
            lines.append(f"(call {number}): {{")
            for path in call.paths:
                lines += [f"  {i}: {self._describe(op)}" for i, op in enumerate(path.ops)]
            lines.append("}")
        return "\n".join(lines)

    def _describe(self, op: SeenOp) -> str:
        decision = op.decision
        text = f"{op}\n     {decision.precision}"
        text += f" ({decision.reason})" if decision.reason else f", {decision.kernel}"
        read = [key for r in decision.reads for _, key in r.edges]
        for name, keys in (("reads", read), ("writes", [] if decision.writes is None else [decision.writes])):
            if keys:
                text += f"; {name} " + ", ".join(
                    f"{k} ({self.qparams(k)})" if k in self.slots else str(k) for k in keys
                )
        return text


def _nothing_derived() -> dict[str, Any]:
    """What a state makes of what was seen when it is asked to, and copies and files do without."""
    return {"_hooks": {}, "_plans": {}, "_any": None, "_any_lists": {}, "_functions": {}, "_shared": None, "_homes": {}}


def _any_time(ops: Sequence[SeenOp]) -> SeenOp:
    """An op that stands for ``ops``, the same place at other times. Its plan writes float values (``any_time``), as
    their range at a time that was never seen is not known.
    """
    last = ops[-1]
    decisions = [op.decision for op in ops]
    if len(ops) == 1:
        return replace(last)
    if not _are_alike(ops):
        return replace(last, decision=Decision(reason="it does not always run in int8"))
    reads = []
    for read in last.decision.reads:
        edges: dict[Tag, list[Key]] = {}
        for tag, key in _edges(decisions, read.slot):
            edges.setdefault(tag, []).append(key)
        merged = [(tag, _key(keys)) for tag, keys in edges.items()]
        first = next(m for m in merged if m[0] == read.tag)
        reads.append(Read(read.slot, first[1], read.tag, tuple(m for m in merged if m is not first)))
    return replace(last, decision=replace(last.decision, reads=tuple(reads)))


def _are_alike(ops: Sequence[SeenOp]) -> bool:
    """Whether all of ``ops`` run in int8, in one way."""
    return all(op.decision.precision == "int8" and op.decision.mode == ops[-1].decision.mode for op in ops)


def _edges(decisions: Iterable[Decision], slot: int) -> Iterable[tuple[Tag, Key]]:
    for decision in decisions:
        for read in decision.reads:
            if read.slot == slot:
                yield from read.edges


def _key(keys: Iterable[Key]) -> Key:
    """One key for several."""
    flat = dict.fromkeys(k for key in keys for k in (key if isinstance(key, tuple) else (key,)))
    return next(iter(flat)) if len(flat) == 1 else tuple(flat)
