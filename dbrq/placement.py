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
import math
from dataclasses import dataclass, replace

import torch

from .fusion import find_chains, step_of
from .mappings import Role
from .qconfigs import kind, symmetric_weight
from .record import Decision, Read, Record, SeenOp, Step, Tag

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
        self.forced = forced or {}  # id(op) -> reason
        self.reasons: dict[int, str] = {}
        self.modes: dict[int, str] = {}
        self._weight_makers = self._find_weight_makers()
        self.hard = [op for op in record.hooked() if self._computes(op)]
        heads = [op for op in self.hard if op.row.name != "matmul"]
        self.chains: dict[int, list[SeenOp]] = {}
        if fuse:
            self.chains = {id(heads[i]): chain for i, chain in find_chains(record, heads).items()}
        self.chained = {id(op): head for head in heads for op in self.chains.get(id(head), ())}
        self.soft = {id(op) for op in record.hooked() if self._may_be_soft(op)}
        self._is_hard = {id(op) for op in self.hard}
        self._settle()
        self._parents: dict[int, int] = {}
        self._share()
        self.keys = {vid: self.key(vid) for vid in record.values}
        self.observed = self._choose_observers()
        self._decide()

    # Who may run in int8

    def _computes(self, op: SeenOp) -> bool:
        """Whether ``op`` is a convolution, linear layer or matmul with static int8 activations."""
        row = op.row
        if row.role not in (Role.COMPUTE, Role.EMBEDDING, Role.RECURRENT):
            return False
        mode, reason = kind(op.qconfig)
        if op.qconfig is None and self.record.default_recipe:
            reason = "the default recipe leaves it in float"
        reason = self.forced.get(id(op), "") or reason or self._unfit(op, mode) or self._weight_problem(op)
        if reason:
            self.reasons[id(op)] = reason
            return False
        if mode == "static" and self._reads_constants(op):
            mode = "dynamic"
        self.modes[id(op)] = mode
        return mode == "static"

    def _unfit(self, op: SeenOp, mode: str) -> str:
        role = op.row.role
        bad = [i.dtype for _, vid in op.activations if (i := self.record.values[vid].info).dtype is not torch.float32]
        if bad:
            return f"its input is {bad[0]}, and int8 kernels stand in for float32"
        if role is Role.EMBEDDING:
            if mode != "weight_only":
                return "embeddings take a weight-only qconfig"
            return "max_norm changes its weights in forward" if op.constants[3] is not None else ""
        if role is Role.RECURRENT:
            return "" if mode == "dynamic" else "recurrent layers take a dynamic qconfig"
        if id(op) in self._weight_makers:
            return _MAKES_WEIGHTS
        if op.row.name != "matmul" and not symmetric_weight(op.qconfig):
            return "its qconfig asks for affine weights, and kernels take symmetric int8"
        if op.row.name == "matmul":
            if mode != "static":
                return "matmul takes a static qconfig"
            constant = any(self.record.values[vid].info.constant for _, vid in op.activations)
            flat = any(len(self.record.values[vid].info.shape) < 2 for _, vid in op.activations)
            return "one operand is a constant or a vector" if constant or flat or len(op.slots()) < 2 else ""
        if op.row.name != "linear" and mode != "static":
            return f"no {mode} int8 kernel for convolutions"
        if op.row.name != "linear" and self._reads_constants(op):
            return "its input is a parameter, or comes from code that no hook sees"
        return ""

    def _reads_constants(self, op: SeenOp) -> bool:
        """Whether no op made what ``op`` reads: parameters, buffers, tensors that the user's code keeps.

        Nothing tells one of them from another that comes there later, so a range that was observed would not hold.
        Linear layers take each by its own range.
        """
        constant = [self.record.values[vid].info.constant for _, vid in op.activations]
        return op.row.role is Role.COMPUTE and op.row.name != "matmul" and all(constant)

    def _weight_problem(self, op: SeenOp) -> str:
        if op.weight is None or not op.weight.computed:
            return op.weight_problem
        return self.record.varying.get(op.weight.key, "")

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
            reason = next(filter(None, (_unsuitable(op, c) for c in (op.constants, *op.other_constants))), "")
        if not reason and any(self.record.values[v].info.dtype is not torch.float32 for _, v in op.activations):
            reason = "its inputs are not float32"
        if reason:
            self.reasons[id(op)] = reason
        return not reason

    # Values

    def level(self, vid: int) -> Level:
        value = self.record.values[vid]
        if value.aliased_mutation or value.info.dtype is not torch.float32 or value.info.constant:
            return Level.FLOAT
        if value.is_input:
            return Level.NEUTRAL
        op = value.producer
        if op is None:
            return Level.FLOAT
        if value.origin is not None:
            return self.level(value.origin)
        if id(op) in self._is_hard or id(op) in self.chained:
            return Level.INT8
        if id(op) in self.soft:
            if op.row.role is Role.ELEMENTWISE and all(self.level(v) is Level.NEUTRAL for _, v in op.activations):
                return Level.NEUTRAL
            return Level.INT8
        return Level.FLOAT

    def pure(self, vid: int) -> bool:
        """Whether only the integers of this value need exist: of what it was moved from, too."""
        origin = self.record.values[vid].origin
        return self._read_as_int8(vid) and (origin is None or self.pure(origin))

    def _read_as_int8(self, vid: int) -> bool:
        """Whether a value that someone can make int8 is read as such by all who read it."""
        value = self.record.values[vid]
        if value.is_output or not value.readers or self.level(vid) is not Level.INT8:
            return False
        return not self._unread(vid) and all(self._reads_int8(op, vid) for op in value.readers)

    def _reads_int8(self, op: SeenOp, vid: int) -> bool:
        if op.row.role is Role.PASS:
            if op.row.name == "pad" and op.constants[2] == "constant" and op.constants[3]:
                return False  # only zero is sure to be representable
            moved = [o.id for o in op.outputs if self.record.values[o.id].producer is op]
            return (
                bool(moved) and op.inputs[0].id == vid and all(self._read_as_int8(m) or self._unread(m) for m in moved)
            )
        if vid not in (v for _, v in op.activations):
            return False
        if id(op) in self._is_hard or id(op) in self.soft:
            return True
        return id(op) in self.chained and op.row.name == "add" and (id(op), vid) not in self._float_reads

    def _unread(self, vid: int) -> bool:
        """Whether a value is no output, and at most moved about for nobody."""
        value = self.record.values[vid]
        return not value.is_output and all(
            op.row.role is Role.PASS and all(self._unread(o.id) for o in op.outputs if o.id != vid)
            for op in value.readers
        )

    def _settle(self) -> None:
        """Soft ops and the other operands of fused adds fall back to float until nothing changes."""
        self._float_reads: set[tuple[int, int]] = set()
        changed = True
        while changed:
            changed = False
            for op in reversed(self.record.hooked()):
                if id(op) in self.soft and (reason := self._soft_problem(op)):
                    self.soft.discard(id(op))
                    self.reasons[id(op)] = reason
                    changed = True
                elif id(op) in self.chained and op.row.name == "add":
                    for _, vid in op.activations:
                        if self._is_other(op, vid) and (id(op), vid) not in self._float_reads and not self.pure(vid):
                            self._float_reads.add((id(op), vid))
                            changed = True

    def _is_other(self, op: SeenOp, vid: int) -> bool:
        chain = self.chains[id(self.chained[id(op)])]
        before = self.chained[id(op)] if chain[0] is op else chain[chain.index(op) - 1]
        return vid != before.result.id

    def _soft_problem(self, op: SeenOp) -> str:
        out = self.record.values[op.result.id]
        inputs = [vid for _, vid in op.activations]
        free = op.row.role is Role.ELEMENTWISE and all(self.level(v) is Level.NEUTRAL for v in inputs)
        if not free and not all(self.pure(v) for v in inputs):
            return "its inputs are not int8 here, and quantizing them for it alone gains nothing"
        if free and any(id(r) not in self.soft for r in out.readers):
            return "it runs on the model's inputs, before they are quantized"
        if out.aliased_mutation:
            return "its result is changed in place through another view"
        if op.row.role is Role.ELEMENTWISE:
            fine = all(self._reads_int8(r, out.info.id) for r in out.readers)
            return "" if fine else "its result is read in float"
        return "" if self.pure(out.info.id) else "its result is read in float"

    # Sharing of qparams, and who observes

    def _find(self, vid: int) -> int:
        while vid in self._parents:
            vid = self._parents[vid]
        return vid

    def key(self, vid: int) -> int:
        """The id under which the qparams of a value are kept: its own, or that of what it moves or shares with."""
        value = self.record.values[vid]
        while value.origin is not None and self.pure(value.origin):
            value = self.record.values[value.origin]
        return self._find(value.info.id)

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
                whole = self._size(vid) >= self._size(source)  # not a slice
                found[op, vid] = Observation(self.key(vid), source, whole, made)
        return found

    def _size(self, vid: int) -> int:
        return math.prod(self.record.values[vid].info.shape)

    def _source(self, vid: int) -> int:
        value = self.record.values[vid]
        while value.origin is not None and self.pure(value.origin):
            value = self.record.values[value.origin]
        return value.info.id

    def observer_qconfig(self, vid: int, reader: SeenOp):
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
            return Decision("int8", mode=self.modes[id(op)], kernel=_kernel(op, self.modes[id(op)], ()))
        if id(op) in self._is_hard or id(op) in self.soft:
            reads = self._reads(op, op.slots())
            return Decision("int8", reads=reads, writes=self._writes(op.result.id), kernel=_kernel(op, "static", ()))
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
        head.decision = replace(head.decision, writes=writes, chain=tuple(steps), kernel=_kernel(head, "static", chain))


_FLOAT_REASONS = {
    Role.NORM: "it follows no int8 convolution or linear layer that it could fold into",
    Role.ACTIVATION: "it follows no int8 op that takes it in; between int8 ops it runs in float",
}


def _unsuitable(op: SeenOp, constants: tuple) -> str:
    """Why the arguments of a soft op rule out int8; "" if they do not."""
    name = op.row.name
    if name == "div" and constants[2] is not None:
        return "division with rounding"
    if name.startswith("max_pool") and (constants[6] or len(op.slots()) != 1):
        return "it returns indices"
    if name == "interpolate" and constants[3] not in ("nearest", "nearest-exact"):
        return f"interpolation mode {constants[3]} computes new values"
    if name == "mean" and constants[3] not in (None, torch.float32):
        return "it changes the dtype"
    if op.row.role is Role.SHARE and op.row.ndim and len(op.inputs[0].shape) != op.row.ndim + 2:
        return "its input has no batch dimension"
    if op.row.role is Role.ELEMENTWISE:
        tensors = [i for i in op.inputs if i.dtype is not torch.float32]
        return f"one operand is {tensors[0].dtype}" if tensors else ""
    return ""


def _kernel(op: SeenOp, mode: str, chain) -> str:
    """What runs, in words for the report."""
    row = op.row
    if row.role is Role.RECURRENT:
        return "onednn.qlinear_pointwise per step (dynamic)"
    if row.role is Role.EMBEDDING:
        return "int8 rows"
    if mode == "weight_only":
        return "int8 weights, float activations"
    if row.name == "matmul":
        return "aten._int_mm"
    if row.role is Role.COMPUTE:
        base = "onednn.qlinear_pointwise" if row.ndim == 0 else f"onednn.qconv{row.ndim}d_pointwise"
        names = "".join(f" + {step.row.name}" for step in chain)
        return base + names + (" (dynamic)" if mode == "dynamic" else "")
    if row.role is Role.SHARE:
        return "quantized.max_pool2d" if row.name in ("max_pool1d", "max_pool2d") else "integers"
    return "dequantize, compute, quantize"
