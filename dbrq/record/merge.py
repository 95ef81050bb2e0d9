"""Many runs, one record: where their paths part and join.

An op is the same op on whatever path it is met if its owner, the owner's call, its place in the code and how often
that place came before agree. A value is the same value if the same op made it. So paths that join after a branch share
what follows, an op may read several values at one slot, and decisions hold for all paths together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..mappings import Role
from .record import (
    MOST_SETTINGS,
    REPLACED,
    VARYING_NUMBERS,
    Place,
    Record,
    SeenCall,
    SeenOp,
    SeenPath,
    Tag,
    TensorInfo,
    Value,
)

#: More paths through one call than these are counted no more; their ops are still known.
MOST_PATHS = 100
#: Of more origins than these of one call's arguments no note is taken.
MOST_ORIGINS = 8


class Union:
    """The record of all runs, and the look-ups that joining another run takes.

    Attributes:
        record: it.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._known: dict[tuple, SeenOp] = {}
        self._named: Counter[tuple] = Counter()
        for op in record.ops:
            self.add(op)
            for position, info in enumerate(op.inputs):
                if info.constant and record.values[info.id].producer is None:
                    record.constants.setdefault((op, position), info.id)

    def add(self, op: SeenOp) -> None:
        """A new op of the record."""
        moved = tuple(info.id for info in op.inputs) if op.row.role is Role.PASS else None
        self._known[op.owner, op.call, op.place, op.nth, op.hooked, moved] = op
        name = ("module", op.module) if op.module is not None else (op.owner, op.op)
        op.occurrence = self._named[name]
        self._named[name] += 1

    def find(
        self, owner: str, call: int, place: Place, nth: int, hooked: bool, moved: tuple[int | None, ...] | None
    ) -> SeenOp | None:
        """The op at that place; ``moved``: what it moves, for ops that do (moves of two values are two ops)."""
        return self._known.get((owner, call, place, nth, hooked, moved))


class Joined:
    """One run, joined to the union: its ops and values are taken over where they are new.

    Args:
        union: all runs before.
        run: the record of this one.
        values: value id of the run -> value id in the union, as far as known while it ran.
        comparable: whether the constants of its ops count (in training they differ).

    Attributes:
        values: value id of the run -> value id in the union.
        ops: the run's ops -> the union's.
        new: ops that the union did not have.
        changed: whether the run showed anything new, so that decisions must be made again.
    """

    def __init__(self, union: Union, run: Record, values: dict[int, int], comparable: bool) -> None:
        self.union, self.record, self.run = union, union.record, run
        self.values = dict(values)
        self.ops: dict[SeenOp, SeenOp] = {}
        self.new: list[SeenOp] = []
        self.changed = False
        for key, vid in run.named.items():
            if key not in self.record.named:
                self.record.named[key] = self._add(run.values[vid])
            self.values.setdefault(vid, self.record.named[key])
        for op in run.ops:
            self._join(op, comparable)
        for vid, value in run.values.items():
            if vid in self.values:
                self._note(self.record.values[self.values[vid]], value)
        self._join_computed(comparable)
        for path, calls in run.calls.items():
            self._count_paths(path, calls)
        for name, layout in run.layouts.items():
            self.record.layouts.setdefault(name, layout)
        self.record.by_layout = self.record.by_layout or run.by_layout
        for place, numbers in run.numbers.items():
            self.record.numbers.setdefault(place, set()).update(numbers)

    def _join(self, op: SeenOp, comparable: bool) -> None:
        moved = tuple(self.values.get(info.id) for info in op.inputs) if op.row.role is Role.PASS else None
        known = self.union.find(op.owner, op.call, op.place, op.nth, op.hooked, moved)
        subject = known if known is not None else op
        for position, info in enumerate(op.inputs):
            if info.id not in self.values:
                if (subject, position) not in self.record.constants:
                    self.record.constants[subject, position] = self._add(self.run.values[info.id])
                self.values[info.id] = self.record.constants[subject, position]
        if known is None:
            self._take_over(op)
        else:
            self._add_to(known, op, comparable)

    def _join_computed(self, comparable: bool) -> None:
        """How weights are computed: as in the latest run, which has to be as in the others."""
        varying = {key: why for key, why in self.run.varying.items() if comparable or why == VARYING_NUMBERS}
        for key, how in self.run.computed.items():
            known = self.record.computed.setdefault(key, how)
            if known.exact != how.exact:
                varying.setdefault(key, VARYING_NUMBERS)
                self.record.computed[key] = how
        if not varying.keys() <= self.record.varying.keys():
            self.record.varying.update(varying)
            self.changed = True

    def _take_over(self, op: SeenOp) -> None:
        self.changed = True
        outputs = []
        for info in op.outputs:
            if info.id not in self.values:
                self.values[info.id] = self._add(self.run.values[info.id], op)
            outputs.append(self._info(info))
        op.inputs, op.outputs = tuple(map(self._info, op.inputs)), tuple(outputs)
        op.activations = tuple((slot, self.values[vid]) for slot, vid in op.activations)
        self.union.add(op)
        self.record.ops.append(op)
        self.new.append(op)
        self.ops[op] = op
        made = {info.id for info in op.outputs} if op.row.role is Role.PASS else set()
        for vid in {info.id for info in op.inputs} - made:
            self.record.values[vid].readers.append(op)

    def _add_to(self, known: SeenOp, op: SeenOp, comparable: bool) -> None:
        self.ops[op] = known
        for mine, its in zip(op.outputs, known.outputs, strict=False):
            self.values.setdefault(mine.id, its.id)
        for info in op.outputs[len(known.outputs) :]:  # a list that grew
            if info.id not in self.values:
                self.values[info.id] = self._add(self.run.values[info.id], known)
            known.outputs = (*known.outputs, self._info(info))
            self.changed = True
        for slot, vid in op.activations:
            if (edge := (slot, self.values[vid])) not in known.activations:
                known.activations = (*known.activations, edge)
                self.changed = True
        read = {info.id for info in known.inputs}
        made = {info.id for info in known.outputs} if op.row.role is Role.PASS else set()
        for info in op.inputs:
            vid = self.values[info.id]
            if vid not in read:
                known.inputs = (*known.inputs, self._info(info))
                read.add(vid)
                self.changed = True
            readers = self.record.values[vid].readers
            if vid not in made and not any(reader is known for reader in readers):
                readers.append(known)
                self.changed = True
        if op.weight_problem == REPLACED and not known.weight_problem:
            known.weight, known.weight_problem = None, op.weight_problem
            self.changed = True
        if comparable and op.constants not in known.all_constants():
            known.other_constants = (*known.other_constants[1 - MOST_SETTINGS :], op.constants)
            self.changed = True

    def _add(self, value: Value, producer: SeenOp | None = None) -> int:
        """A new value of the union."""
        vid = len(self.record.values)
        self.values[value.info.id] = vid
        origin = None if value.origin is None else self.values[value.origin]
        self.record.values[vid] = Value(
            self._info(value.info), producer, [], value.is_input, value.is_output, value.aliased_mutation,
            value.layout_asked, origin, value.parameter,
        )  # fmt: skip
        self.changed = True
        return vid

    def _info(self, info: TensorInfo) -> TensorInfo:
        return replace(info, id=self.values[info.id], tag=self.tag(info.tag))

    def tag(self, tag: Tag) -> Tag:
        """A tag of the run as one of the union."""
        return self.values.get(tag) if isinstance(tag, int) else tag

    def _note(self, known: Value, seen: Value) -> None:
        for name in ("is_output", "aliased_mutation", "layout_asked"):
            if getattr(seen, name) and not getattr(known, name):
                setattr(known, name, True)
                self.changed = True
        if seen.info.dtype is not known.info.dtype and known.info.dtype.is_floating_point:
            known.info = replace(known.info, dtype=seen.info.dtype)
            self.changed = True

    def _count_paths(self, module: str, calls: list[SeenCall]) -> None:
        known_calls = self.record.calls.setdefault(module, [])
        for number, call in enumerate(calls):
            tags = {name: tuple(map(self.tag, tags)) for name, tags in call.input_tags.items()}
            if number == len(known_calls):
                known_calls.append(SeenCall([], tags, [], call.arguments, call.before))
            known = known_calls[number]
            if tags not in known.all_input_tags() and len(known.other_input_tags) < MOST_ORIGINS:
                known.other_input_tags.append(tags)
            steps = [self.ops[step] if isinstance(step, SeenOp) else step for step in call.paths[0].steps]
            paths = known_calls[number].paths
            path = next((path for path in paths if path.steps == steps), None)
            if path is None and len(paths) < MOST_PATHS:
                path = SeenPath(steps)
                paths.append(path)
            if path is not None:
                path.seen += 1
