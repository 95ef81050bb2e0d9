"""Where values are quantized: decided once, from the record, before conversion; eager and every backend obey it.

Convolutions and linear layers read int8. Everything else reads int8 only where the value is int8 for certain anyway:

* a value is *pure* if whoever made it can write uint8 and all who read it, read it as int8: then only the integers
exist;
* any other value stays float, and those who need int8 quantize it when they read it.

The record is of all paths together: a value is pure if that holds on each of them.

So a residual stream that a layer norm reads keeps its precision, and a convolutional network stays on integers from one
convolution to the next. Soft readers (add, cat, pools) start out as int8 readers and fall back to float until nothing
changes; falling back only ever makes more values float, so this ends.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.ao.quantization import QConfig

from ..fusion import find_chains, step_of
from ..mappings import PARTS, Role
from ..record.record import Decision, Read, Record, SeenOp, Step, Tag
from .families import Families, root_of
from .qconfigs import kind
from .reasons import _FLOAT_REASONS, kernel_of, reads_constants, unfit, unsuitable

_MAKES_WEIGHTS = "it computes a weight, which is rounded as a whole"
_SOFT = (Role.ELEMENTWISE, Role.POOL, Role.SHARE)


class Level(enum.Enum):
    """Who can make a value int8: its producer (INT8), nobody yet (NEUTRAL, an input of the model), or only a reader."""

    INT8 = "int8"
    NEUTRAL = "input"
    FLOAT = "float"


@dataclass(frozen=True)
class Observation:
    """How an op observes a value that it reads as int8.

    Attributes:
        key: the id under which its qparams are kept.
        source: the value whose elements it has, ...
        whole: ... and whether it has all of them.
        made: whether it is made of observed values, so that only fake quantization has anything to do.
    """

    key: int
    source: int
    whole: bool
    made: bool


class Placement:
    """The decisions for one record.

    Attributes:
        keys: value id -> id under which its qparams are kept.
        observed: (op, value id) of each reading as int8 -> how it is observed.
    """

    def __init__(self, record: Record, fuse: bool, forced: dict[int, str] | None = None) -> None:
        self.record = record
        self.reasons: dict[int, str] = {id(op): op.excluded for op in record.ops if op.excluded}
        self.forced = self.reasons | (forced or {})  # id(op) -> reason
        self.modes: dict[int, str] = {}
        self._weight_makers = self._find_weight_makers()
        self.hard = self._find_hard()
        heads = [op for op in self.hard if op.row.name != "matmul"]
        self.chains: dict[int, list[SeenOp]] = {}
        if fuse:
            self.chains = {id(heads[i]): chain for i, chain in find_chains(record, heads).items()}
        self.chained = {id(op): head for head in heads for op in self.chains.get(id(head), ())}
        self.soft = {id(op) for op in record.hooked() if self._may_be_soft(op)}
        self._is_hard = {id(op) for op in self.hard}
        self._families = Families(record)
        self._find_levels()
        self._settle()
        self._sources: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._share()
        self.keys = {vid: self.key(vid) for vid in record.values}
        self.observed = self._choose_observers()
        self._decide()

    # Who may run in int8

    def _find_hard(self) -> list[SeenOp]:
        """Those that ``_computes`` says; embeddings are asked last, since they may follow linear layers."""
        asked = sorted(self.record.hooked(), key=lambda op: op.row.role is Role.EMBEDDING)
        found = {id(op) for op in asked if self._computes(op)}
        return [op for op in self.record.hooked() if id(op) in found]

    def _reads_int8_rows(self, op: SeenOp) -> bool:
        """Whether ``op`` is an embedding whose table is the weight of an int8 linear layer, as of tied weights."""
        if op.row.role is not Role.EMBEDDING or op.weight is None:
            return False
        weights = (o.weight for o in self.record.hooked() if o.row.name == "linear" and id(o) in self.modes)
        return any(weight is not None and weight.key == op.weight.key for weight in weights)

    def _computes(self, op: SeenOp) -> bool:
        """Whether ``op`` is a convolution, linear layer or matmul with static int8 activations."""
        row = op.row
        if row.role not in (Role.COMPUTE, Role.EMBEDDING, Role.RECURRENT):
            return False
        mode, reason = kind(op.qconfig)
        if mode == "dynamic" and self._reads_int8_rows(op):  # rather than keep a float copy for it
            mode = "weight_only"
        if op.qconfig is None and self.record.default_recipe:
            reason = "the default recipe leaves it in float"
        makes_weight = _MAKES_WEIGHTS if id(op) in self._weight_makers else ""
        reason = self.forced.get(id(op)) or reason or makes_weight or unfit(self.record, op, mode)
        if reason:
            self.reasons[id(op)] = reason
            return False
        if mode == "static" and reads_constants(self.record, op):
            mode = "dynamic"
        self.modes[id(op)] = mode
        return mode == "static"

    def _find_weight_makers(self) -> set[int]:
        """Ops all of whose results are weights computed in forward, or go into those: they are int8 themselves."""
        found: set[int] = set()
        for op in reversed(self.record.ops):
            values = [self.record.values[info.id] for info in op.outputs]
            if values and all(
                value.readers
                and not value.is_output
                and all(id(r) in found or self._reads_as_weight(r, value.info.id) for r in value.readers if r is not op)
                for value in values
            ):
                found.add(id(op))
        return found

    def _reads_as_weight(self, op: SeenOp, vid: int) -> bool:
        return op.weight is not None and op.weight.computed and vid not in (v for _, v in op.activations)

    def _may_be_soft(self, op: SeenOp) -> bool:
        if op.row.role not in _SOFT or id(op) in self.chained:
            return False
        reason = self.forced.get(id(op), "")
        if not reason and kind(op.qconfig)[0] != "static":
            reason = kind(op.qconfig)[1] or "element-wise ops take a static qconfig"
        if not reason:
            reason = next(filter(None, (unsuitable(op, c) for c in op.all_constants())), "")
        if not reason and any(self.record.values[v].info.dtype is not torch.float32 for _, v in op.activations):
            reason = "its inputs are not float32"
        if reason:
            self.reasons[id(op)] = reason
        return not reason

    # Values. None of this recurses, and each answer is kept: a record may hold thousands of ops in a row.

    def level(self, vid: int) -> Level:
        return self._levels[vid]

    def _find_levels(self) -> None:
        """The levels to begin with, while all ops that may be soft are."""
        self._levels: dict[int, Level] = {}
        self._pinned: set[int] = set()  # values that are what they are, whoever makes them
        self._moved: dict[int, list[int]] = defaultdict(list)
        for vid, value in self.record.values.items():
            if value.is_exposed or value.info.dtype is not torch.float32 or value.info.constant:
                level = Level.FLOAT
            elif value.is_input:
                level = Level.NEUTRAL
            elif value.producer is None:
                level = Level.FLOAT
            else:
                if value.origin is not None:
                    self._moved[value.origin].append(vid)
                self._levels[vid] = Level.NEUTRAL  # until something shows otherwise
                continue
            self._levels[vid] = level
            self._pinned.add(vid)
        found = {vid: self._levels[vid] for vid in self._pinned}
        for vid, value in self.record.values.items():
            if vid not in self._pinned and value.origin is None:
                assert value.producer is not None
                found[vid] = self._made(value.producer)
        self._levels.update(found)
        self._spread(vid for vid, level in found.items() if level is not Level.NEUTRAL)

    def _made(self, op: SeenOp) -> Level:
        """The level of what ``op`` makes, unless its inputs say otherwise."""
        if id(op) in self._is_hard or id(op) in self.chained:
            return Level.INT8
        if id(op) in self.soft:
            return Level.NEUTRAL if self._is_neutral(op) else Level.INT8
        return Level.FLOAT

    def _is_neutral(self, op: SeenOp) -> bool:
        """Whether an element-wise op reads only what nobody has made int8 yet."""
        if op.row.role is not Role.ELEMENTWISE:
            return False
        return all(self._levels[vid] is Level.NEUTRAL for _, vid in op.activations)

    def _spread(self, changed: Iterable[int]) -> set[int]:
        """Carry changed levels on to what is moved from these values, or made of them. Returns all that changed.

        A level changes from NEUTRAL to INT8 to FLOAT, never back.
        """
        waiting, seen = list(changed), set()
        while waiting:
            vid = waiting.pop()
            seen.add(vid)
            follow = [(moved, self._levels[vid]) for moved in self._moved[vid]]
            for op in self.record.values[vid].readers:
                if id(op) in self.soft and op.row.role is Role.ELEMENTWISE and not self._is_neutral(op):
                    made = (o.id for o in op.outputs if self.record.values[o.id].producer is op)
                    follow += [(o, Level.INT8) for o in made if self._levels[o] is Level.NEUTRAL]
            for other, level in follow:
                if other not in self._pinned and self._levels[other] is not level:
                    self._levels[other] = level
                    waiting.append(other)
        return seen

    def pure(self, vid: int) -> bool:
        """Whether only the integers of this value need exist: of what it was moved from, too."""
        self._families.know(vid, self._find_pure)
        return vid in self._pure

    def _find_pure(self, family: list[int]) -> None:
        for vid in reversed(family):  # what is moved from a value comes after it
            self._read[vid] = self._is_read_as_int8(vid)
        self._pure.difference_update(family)
        for vid in family:
            origin = self.record.values[vid].origin
            if self._read[vid] and (origin is None or origin in self._pure):
                self._pure.add(vid)

    def _read_as_int8(self, vid: int) -> bool:
        """Whether a value that someone can make int8 is read as such by all who read it."""
        self._families.know(vid, self._find_pure)
        return self._read[vid]

    def _is_read_as_int8(self, vid: int) -> bool:
        value = self.record.values[vid]
        if value.is_output or not value.readers or self._levels[vid] is not Level.INT8:
            return False
        return vid in self._families.used and all(self._reads_int8(op, vid, self._read) for op in value.readers)

    def _reads_int8(self, op: SeenOp, vid: int, read: dict[int, bool]) -> bool:
        """Whether ``op`` takes the integers of value ``vid``. ``read``: what is known of values moved from that."""
        if op.row.role is Role.PASS:
            moved = [o.id for o in op.outputs if self.record.values[o.id].producer is op]
            used = self._families.used
            return bool(moved) and op.inputs[0].id == vid and all(m not in used or read.get(m, False) for m in moved)
        if vid not in (v for _, v in op.activations):
            return False
        if id(op) in self._is_hard or id(op) in self.soft:
            return True
        return id(op) in self.chained and op.row.name == "add" and (id(op), vid) not in self._float_reads

    def _settle(self) -> None:
        """Soft ops and the other operands of fused adds fall back to float until nothing changes.

        From the last op to the first, again and again; but an op whose values are as they were is not asked again.
        """
        self._float_reads: set[tuple[int, int]] = set()
        self._read: dict[int, bool] = {}
        self._pure: set[int] = set()
        ops = self.record.hooked()
        numbers = {id(op): number for number, op in enumerate(ops)}
        now, later = {*range(len(ops))}, set[int]()
        queue = sorted(-number for number in now)
        while queue:
            number = -heapq.heappop(queue)
            now.discard(number)
            for changed in self._fall_back(ops[number]):
                for op in self._families.touch(changed):
                    other = numbers.get(id(op), -1)
                    if 0 <= other < number and other not in now:
                        now.add(other)
                        heapq.heappush(queue, -other)
                    elif other >= number:
                        later.add(other)
            if not queue:
                now, later = later, set()
                queue = sorted(-number for number in now)

    def _fall_back(self, op: SeenOp) -> set[int]:
        """Have ``op`` read in float what it has to; returns the values that this changes anything for."""
        if id(op) in self.soft and (reason := self._soft_problem(op)):
            self.soft.discard(id(op))
            self.reasons[id(op)] = reason
            made = [o.id for o in op.outputs if self.record.values[o.id].producer is op and o.id not in self._pinned]
            made = [vid for vid in made if self.record.values[vid].origin is None]
            self._levels.update(dict.fromkeys(made, Level.FLOAT))
            return {vid for _, vid in op.activations} | {o.id for o in op.outputs} | self._spread(made)
        changed = set()
        if id(op) in self.chained and op.row.name == "add":
            for _, vid in op.activations:
                if self._is_other(op, vid) and (id(op), vid) not in self._float_reads and not self.pure(vid):
                    self._float_reads.add((id(op), vid))
                    changed.add(vid)
                    self._families.forget(vid)
        return changed

    def _is_other(self, op: SeenOp, vid: int) -> bool:
        chain = self.chains[id(self.chained[id(op)])]
        before = self.chained[id(op)] if chain[0] is op else chain[chain.index(op) - 1]
        return vid != before.result.id

    def _soft_problem(self, op: SeenOp) -> str:
        out = self.record.values[op.result.id]
        inputs = [vid for _, vid in op.activations]
        free = self._is_neutral(op)
        if not free and not all(self.pure(v) for v in inputs):
            return "its inputs are not int8 here, and quantizing them for it alone gains nothing"
        if free and any(id(r) not in self.soft for r in out.readers):
            return "it runs on the model's inputs, before they are quantized"
        if out.is_exposed:
            return "its result is changed in place through another view, or asked how it lies in memory"
        if op.row.role is Role.ELEMENTWISE:
            self._read_as_int8(out.info.id)  # so that what is moved from it is known
            fine = all(self._reads_int8(r, out.info.id, self._read) for r in out.readers)
            return "" if fine else "its result is read in float"
        return "" if self.pure(out.info.id) else "its result is read in float"

    # Sharing of qparams, and who observes

    def key(self, vid: int) -> int:
        """The id under which the qparams of a value are kept: its own, or that of what it moves or shares with."""
        return root_of(self._parents, self._source(vid))

    def _share(self) -> None:
        by_place: dict[tuple, list[int]] = {}
        for op in self.record.hooked():
            if op.row.role is Role.SHARE and id(op) in self.soft:
                self._join([*(v for _, v in op.activations), op.result.id])
            if id(op) in self._is_hard or id(op) in self.soft:
                for vids in op.slots().values():
                    self._share_by_producer(vids)
                    for vid in vids:
                        producer = self.record.values[self._source(vid)].producer
                        if producer is not None and not producer.hooked:
                            by_place.setdefault((producer.owner, producer.call, producer.place), []).append(vid)
        for vids in by_place.values():  # nor can those that a loop over such an op makes
            self._join(vids)

    def _share_by_producer(self, vids: list[int]) -> None:
        """Values that one kind of op made in float cannot be told apart by their reader."""
        by_tag: dict[Tag, list[int]] = {}
        for vid in vids:
            by_tag.setdefault(self.record.values[vid].info.tag, []).append(vid)
        for same in by_tag.values():
            if len(same) > 1:
                self._join(same)

    def _join(self, vids: list[int]) -> None:
        """Have ``vids`` share one observer."""
        for vid in vids[1:]:
            target = self.key(vids[0])
            if (other := self.key(vid)) != target:
                self._parents[other] = target

    def _int8_reads(self, op: SeenOp) -> list[int]:
        if id(op) in self._is_hard or id(op) in self.soft:
            return [vid for _, vid in op.activations]
        if id(op) in self.chained and op.row.name == "add":
            return [v for _, v in op.activations if self._is_other(op, v) and (id(op), v) not in self._float_reads]
        return []

    def _choose_observers(self) -> dict[tuple[SeenOp, int], Observation]:
        found: dict[tuple[SeenOp, int], Observation] = {}
        for op in self.record.hooked():
            for vid in self._int8_reads(op):
                source = self._source(vid)
                producer = self.record.values[source].producer
                made = producer is not None and producer.row.role is Role.SHARE and id(producer) in self.soft
                whole = self._holds_all(vid, source)
                found[op, vid] = Observation(self.key(vid), source, whole, made)
        return found

    def _holds_all(self, vid: int, source: int) -> bool:
        """Whether a value has every element of ``source``, which it was moved from."""
        values = self.record.values
        while vid != source:
            op, origin = values[vid].producer, values[vid].origin
            if op is None or origin is None or op.row.name in PARTS:
                return False
            if math.prod(values[vid].info.shape) < math.prod(values[origin].info.shape):
                return False
            vid = origin
        return True

    def _source(self, vid: int) -> int:
        """What a value was moved from, as integers; itself if it was not."""
        way = [vid]
        while (known := self._sources.get(way[-1])) is None:
            origin = self.record.values[way[-1]].origin
            if origin is None or not self.pure(origin):
                known = way[-1]
                break
            way.append(origin)
        self._sources.update(dict.fromkeys(way, known))
        return known

    def observer_qconfig(self, vid: int, reader: SeenOp) -> QConfig | None:
        """The qconfig whose activation observer watches a value: its producer's where that runs in int8, else the
        reader's.
        """
        producer = self.record.values[self._source(vid)].producer
        if producer is not None:
            producer = self.chained.get(id(producer), producer)
            if id(producer) in self._is_hard or id(producer) in self.soft:
                return producer.qconfig
        head = self.chained.get(id(reader), reader)
        return head.qconfig

    # Decisions

    def _decide(self) -> None:
        for op in self.record.ops:
            op.decision = self._decision(op)
        for head in self.hard:
            if chain := self.chains.get(id(head)):
                self._decide_chain(head, chain)

    def _reads(self, op: SeenOp, slots: dict[int, list[int]]) -> tuple[Read, ...]:
        reads = []
        for slot, vids in slots.items():
            edges = dict.fromkeys((self.record.values[vid].info.tag, self.key(vid)) for vid in vids)
            (tag, key), *others = edges
            reads.append(Read(slot, key, tag, tuple(others)))
        return tuple(reads)

    def _writes(self, vid: int) -> int | None:
        return self.key(vid) if self.pure(vid) else None

    def _decision(self, op: SeenOp) -> Decision:
        if op.row.role is Role.PASS:
            moves_int8 = bool(op.inputs) and self.pure(op.inputs[0].id)
            return Decision("int8", kernel="integers") if moves_int8 else Decision(reason="it moves a float value")
        if id(op) in self.chained:
            return Decision("int8")  # completed by _decide_chain
        if id(op) in self.modes and id(op) not in self._is_hard:
            return Decision("int8", mode=self.modes[id(op)], kernel=kernel_of(op, self.modes[id(op)], ()))
        if id(op) in self._is_hard or id(op) in self.soft:
            reads = self._reads(op, op.slots())
            return Decision("int8", reads=reads, writes=self._writes(op.result.id), kernel=kernel_of(op, "static", ()))
        reason = (
            self.reasons.get(id(op)) or op.row.reason or _FLOAT_REASONS.get(op.row.role, "no int8 kernel for this op")
        )
        if id(op) in self._weight_makers:
            reason = _MAKES_WEIGHTS
        return Decision(reason=reason)

    def _decide_chain(self, head: SeenOp, chain: list[SeenOp]) -> None:
        steps: list[Step] = []
        before = head
        writes = self._writes(chain[-1].result.id)
        for op in chain:
            step = step_of(op, before)
            if step.other_slot is not None:
                (vid,) = op.slots()[step.other_slot]
                if (id(op), vid) not in self._float_reads:
                    (other,) = self._reads(op, {step.other_slot: [vid]})
                    step = replace(step, other=other)
            steps.append(step)
            reads = () if step.other is None else (step.other,)
            op.decision = Decision(
                "int8", reads=reads, member_of=before.result.id, kernel=f"fused into {head.path}",
                writes=writes if op is chain[-1] else None,
            )  # fmt: skip
            before = op
        head.decision = replace(
            head.decision, writes=writes, chain=tuple(steps), kernel=kernel_of(head, "static", chain)
        )
