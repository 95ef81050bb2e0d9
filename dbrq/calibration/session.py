"""What a prepared or converted model is beside the user's modules: record, decisions, observers, weights."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..auto_trace import InterceptedForward, ModelToken, active
from ..eager.interfaces import Hook
from ..eager.weights import trained_qparams
from ..errors import ConfigurationError, NotCalibratedError, QuantizationError
from ..guards import check_ready
from ..hidden_state import lowered_of, mark, state_of
from ..kernels import QParams
from ..kernels.ranges import WANTED, is_narrow, makes_sense, saturates
from ..quantization_state import AutoQuantizationState
from ..record.merge import Joined, Union
from ..record.record import Key, Record, SeenOp, Tag
from .observers import observed
from .observing import Observing
from .placement import Observation, Placement
from .qconfigs import QConfigResolver, kind
from .recorder import Watch
from .surgery import copied
from .values import Observer

_TRANSFORMED = "a transform of torch.func, such as vmap, runs it"


class QuantizedModelToken(ModelToken):
    """What the intercepted modules of one prepared or converted model share.

    Attributes:
        record: what all runs showed.
        modules: path -> module, for every name that a module has.
        resolver: the user's choice of qconfigs, and of what stays float; None for a model from a file.
        keys: value id -> the key of its qparams, as placed last.
        observers: value key -> observer; each is registered in the state that reads the value first.
        ranges: value id -> minimum and maximum, for values that are not observed but might be.
        observing: (op, value id) -> how the op observes the value.
        weight_axes: canonical place of each int8 weight -> axis of its scales.
        kept_weights: those of them that stay as float parameters too, for ops in float.
        states: module path -> state.
        given: what the example ran with: name of the argument -> class; None where that is not known.
        preset: the methods that conversion applies (accuracy/presets.py).
        recipe: what a loaded recipe says of parameters and weights, by place; None without one.
        refined: places of the weights and parameters that a preset's methods have chosen, of a converted model.
        simulate: makes what runs the ops in place of observers, where int8 is to be tried in float.
        kept: a sample of the calls of calibration, for methods that need one; None if none does.
        lock: held by a run that observes or joins, since several threads may calibrate one model.
    """

    given: dict[str, type] | None = None  # what was pickled before has none
    preset: Any = None
    kept: Any = None
    recipe: Any = None
    refined: tuple[tuple[str, str], ...] = ()
    simulate: Callable[[], Observer] | None = None

    def __init__(self, record: Record, modules: dict[str, nn.Module], resolver: QConfigResolver | None) -> None:
        super().__init__("observe")
        self.record, self.modules, self.resolver = record, modules, resolver
        self.union = Union(record)
        self.fuse = True
        self.keys: dict[int, int] = {}
        self.observers: dict[int, nn.Module] = {}
        self.ranges: dict[int, tuple[float, float]] = {}
        self.observing: dict[tuple[SeenOp, int], Observation] = {}
        self.fixed_qparams: dict[int, QParams] = {}
        self.weight_axes: dict[tuple[str, str], int | None] = {}
        self.kept_weights: set[tuple[str, str]] = set()
        self.states: dict[str, AutoQuantizationState] = {}
        self.runs = 0
        self.lock = threading.RLock()
        self._packed: dict[tuple, dict] = {}
        self._kept: dict[Tag, tuple[str, Key]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": {}, "_kept": None, "lock": None, "warned": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    # Runs

    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        if self.phase == "int8":
            return super().run(intercepted, args, kwargs)
        if intercepted.state is None:  # a leaf alone is no run
            return intercepted.original(*args, **kwargs)
        if self.simulate is not None:
            with torch.no_grad():
                return Watch(self.modules, self, self.simulate()).run(intercepted, args, kwargs)
        observing = Observing(self)
        watch = Watch(self.modules, self, observing, on_op=active.log)
        if self.kept is not None:
            with self.lock:
                self.kept.offer(args, kwargs)
        output = watch.run(intercepted, args, kwargs)
        with self.lock, torch.inference_mode(False):
            if not self._was_cast():  # else nothing can be learnt of it
                self._join(watch, observing, comparable=not intercepted.module.training)
        self.runs += 1
        return output

    def _join(self, watch: Watch, observing: Observing, comparable: bool) -> None:
        joined = Joined(self.union, watch.record, watch.joined, comparable)
        if joined.changed:
            assert self.resolver is not None  # prepared models have one
            for op in joined.new:
                self.resolver.assign_to(op)
            place(self, {})
        observing.settle(joined.ops, joined.values)

    def _was_cast(self) -> bool:
        try:
            check_ready(self.record.hooked(), self.modules)
        except ConfigurationError:
            return True
        return False

    def forget_calibration(self) -> None:
        """Drop what only further runs of the prepared model would need."""
        self.observers, self.observing, self.keys, self.ranges = {}, {}, {}, {}
        self.record.computed, self.given, self.kept, self.recipe = {}, None, None, None
        del self.union, self.resolver

    def home_hook(self, intercepted: InterceptedForward) -> Hook | None:
        ops = [op for op in self.record.hooked() if op.leaf == intercepted.path]
        state = self.states[ops[0].owner] if ops else None
        return None if state is None or state.opaque else state.home(ops)

    def warn_of_saturation(self) -> None:
        """Say so where this CPU computes with fewer bits than the model was made with."""
        if self.phase != "int8" or not saturates():
            return
        dynamic = (op.qconfig for op in self.record.hooked() if op.decision.mode == "dynamic" and op.qconfig)
        if any(s.is_wide for s in self.states.values()) or not all(is_narrow(q.activation()) for q in dynamic):
            self.warn_once(
                "7 bits",
                "dbrq: the model was made with 8-bit activations, and int8 products of this CPU saturate unless they "
                "have 7: here it is computed with 7. For more precision where it runs on such CPUs only, calibrate "
                "again with default_qconfig_mapping(reduce_range=True)",
            )

    # What hooks need to know

    def weight_fake_quant(self, op: SeenOp) -> nn.Module | None:
        """The fake quantize of an op's weight, in quantization aware training."""
        held = self.states[op.owner].weight_fake_quants
        return held[op.module_key] if op.module_key in held else None  # noqa: SIM401 (no .get)

    def place_of(self, tag: Tag) -> tuple | None:
        """Where in the code the op is that made a value, whichever time it was."""
        value = self.record.values.get(tag) if isinstance(tag, int) else None
        return None if value is None or value.producer is None else (value.producer.owner, value.producer.place)

    def maker(self, tag: Tag) -> str:
        """Who made a value, for messages."""
        value = self.record.values.get(tag) if isinstance(tag, int) else None
        if value is not None and value.is_input:
            return "an input of the model"
        if value is None or value.producer is None:
            return "a value that no op made" if tag is None else f"a value made by {tag!r}"
        return f"the value that {value.producer.path} made"

    def qparams_of(self, tag: Tag) -> QParams | None:
        """qparams of the value that ``tag`` made, if anything reads or writes it as int8."""
        if self._kept is None:
            kept: dict[Tag, tuple[str, Key]] = {}
            for op in self.record.hooked():
                edges = [edge for read in op.decision.reads for edge in read.edges]
                if op.decision.writes is not None and not op.decision.chain:  # else its last op writes
                    edges.append((op.result.tag, op.decision.writes))
                for known, key in edges:
                    kept.setdefault(known, (op.owner, key))
            self._kept = kept
        found = self._kept.get(tag)
        return None if found is None else self.states[found[0]].qparams(found[1])

    def packed_for(self, op: SeenOp) -> dict:
        """Where the packed weight of an op is kept, for all ops that pack it in the same way."""
        norm = op.decision.chain[0] if op.decision.chain else None
        key = (op.row, op.weight, op.bias, norm and (norm.norm, norm.eps), op.pad, op.constants[3:7])
        return self._packed.setdefault(key, {})

    def take_packed(self, other: QuantizedModelToken) -> None:
        """Use the packed weights of the model that this one's is a copy of, where both hold the same tensors."""
        places: dict[int, dict] = {}
        for path, module in other.modules.items():
            mine = self.modules[path]
            places[id(module._parameters)], places[id(module._buffers)] = mine._parameters, mine._buffers
        for key, entries in other._packed.items():
            for folded, (watched, packed) in entries.items():
                if (moved := watched.moved(places)) is not None:
                    self._packed.setdefault(key, {})[folded] = moved, packed


def place(token: QuantizedModelToken, forced: dict[int, str]) -> Placement:
    """Decide where values are quantized, and have an observer for each that is.

    Observers of values that were quantized before stay what they are.
    """
    before, held = token.keys, token.observers
    placement = Placement(token.record, token.fuse, forced)
    token.keys, token.observers, token.observing = placement.keys, {}, placement.observed
    trained = {path: state.weight_fake_quants for path, state in token.states.items()}
    for state in token.states.values():
        state.observers = nn.ModuleDict()
        state.weight_fake_quants = nn.ModuleDict()
        state.refresh()
    kept: set[int] = set()
    for (op, vid), observation in placement.observed.items():
        if observation.key in token.observers:
            continue
        observer = held.get(before.get(vid, -1))
        if observer is None:
            qconfig = placement.observer_qconfig(vid, op)
            assert qconfig is not None
            observer = qconfig.activation()
            if vid in token.ranges:
                observer(torch.tensor(token.ranges[vid]))
        elif id(observer) in kept:  # values that shared one do so no more
            observer = copy.deepcopy(observer)
        kept.add(id(observer))
        token.observers[observation.key] = observer
        token.states[op.owner].observers[str(observation.key)] = observer
    for op in token.record.hooked():
        if op.decision.precision != "int8" or op.weight is None or op.qconfig is None:
            continue
        if op.decision.mode == "static" or kind(op.qconfig)[0] == "static":
            known = trained[op.owner]
            weight = known[op.module_key] if op.module_key in known else op.qconfig.weight()
            if hasattr(weight, "fake_quant_enabled"):
                token.states[op.owner].weight_fake_quants[op.module_key] = weight
    return placement


@contextlib.contextmanager
def undone_on_failure(token: QuantizedModelToken) -> Iterator[None]:
    """Put the decisions, observers and fixed qparams of a prepared model back if the block fails."""
    names = ("keys", "observers", "observing", "fixed_qparams")
    held = {name: getattr(token, name) for name in names}
    decisions = [(op, op.decision) for op in token.record.ops]
    states = [(state, state.observers, state.weight_fake_quants) for state in token.states.values()]
    try:
        yield
    except BaseException:
        token.__dict__.update(held)
        for op, decision in decisions:
            op.decision = decision
        for state, observers, weight_fake_quants in states:
            state.observers, state.weight_fake_quants = observers, weight_fake_quants
            state.refresh()
        raise


def leave_unseen(token: QuantizedModelToken) -> None:
    """Paths that calibration never took, though the watching run did, stay float."""
    forced: dict[int, str] = {}
    while token.runs:
        unseen = {
            key for key, o in token.observers.items() if key not in token.fixed_qparams and not observed(o)
        }  # fmt: skip
        edges = [edge for edge, o in token.observing.items() if o.key in unseen and id(edge[0]) not in forced]
        nothing_seen = len(unseen) == len(token.observers) and not all(op.transformed for op, _ in edges)
        if not edges or nothing_seen:
            return
        for op, vid in edges:
            others = {slot: [v for v in vids if v != vid] for slot, vids in op.slots().items()}
            if all(others.values()):  # what other paths bring is known
                op.activations = tuple(edge for edge in op.activations if edge[1] != vid)
            else:
                forced[id(op)] = _TRANSFORMED if op.transformed else "calibration never came here"
        place(token, forced)


def all_qparams(token: QuantizedModelToken) -> dict[int, QParams]:
    """key -> qparams of every quantized value."""
    found = dict(token.fixed_qparams)
    readers = {key: op for op in reversed(token.record.hooked()) for read in op.decision.reads for _, key in read.edges}
    for key, observer in token.observers.items():
        if key in found:
            continue
        if not observed(observer):
            op = readers[key]
            raise NotCalibratedError(
                "the model was converted before it saw any data" if not token.runs else "a value was never observed",
                path=op.owner,
                op=op.path,
                expected="at least one run of the prepared model",
                got=f"{token.runs} run(s)",
                hint="run data through the prepared model, or call dbrq.calibrate(prepared, data)",
            )
        found[key] = qparams_of(observer, readers[key])
    return found


def qparams_of(observer: nn.Module, op: SeenOp) -> QParams:
    """An observer's result in uint8: signed ranges are shifted by 128, which changes no value."""
    scale, zero_point = map(torch.as_tensor, trained_qparams(observer))
    if scale.numel() != 1:
        raise ConfigurationError(
            "an activation observer must give one scale", path=op.owner, op=op.path, got=tuple(scale.shape)
        )
    inner = getattr(observer, "activation_post_process", observer)
    low = getattr(inner, "quant_min", None)
    high = getattr(inner, "quant_max", None)
    signed = getattr(inner, "dtype", torch.quint8) in (torch.qint8, torch.int8)
    low, high = (low, high) if low is not None and high is not None else ((-128, 127) if signed else (0, 255))
    shift = 128 if signed else 0
    value, zero = float(scale), int(zero_point)
    if not 0 <= low + shift <= high + shift <= 255:
        raise ConfigurationError(
            "kernels take 8 bits", path=op.owner, op=op.path, expected="a range within 8 bits", got=(low, high)
        )
    q = QParams(value, zero + shift, low + shift, high + shift)
    if not makes_sense(q):
        raise QuantizationError(
            "an observer gave qparams that cannot be used", path=op.owner, op=op.path, expected=WANTED, got=q,
            hint="check its calibration, or set the op's qconfig to None",
        )  # fmt: skip
    return q


def mark_int8(token: QuantizedModelToken) -> None:
    """Have the layers of a converted model that are int8 say so where they are printed."""
    ops: dict[str, list[SeenOp]] = {}
    for op in token.record.hooked():
        owner = op.leaf if op.leaf is not None or op.weight is None else op.weight.path
        if owner is not None:
            ops.setdefault(owner, []).append(op)
    for path, its in ops.items():
        int8 = [op.decision.mode for op in its if op.decision.precision == "int8"]
        if int8:
            how = {"static": "int8", "dynamic": "int8 dynamic", "weight_only": "int8 weights"}[int8[0]]
            mark(token.modules[path], how if len(int8) == len(its) else f"{how}, float at times")


def working_copy(quantized: nn.Module, shared: Iterable[Any]) -> nn.Module:
    """A copy of a converted model for a run that may leave traces in it.

    Args:
        shared: tensors and other objects that both hold; so they do what nothing writes to.
    """
    token: QuantizedModelToken = quantized.__dict__["forward"].token
    lowered = lowered_of(quantized)
    model = copied(quantized, [*shared, token.record, lowered, *(state.calls for state in token.states.values())])
    state_of(model).whole = None  # it is the user's code that is to run
    model.__dict__["forward"].token.take_packed(token)
    return model


def token_of(model: object, phase: str, doing: str) -> QuantizedModelToken:
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None or state.token.phase != phase:
        wanted = "a model that prepare returned" if phase == "observe" else "a model that convert returned"
        got = "a float model" if state is None else f"a model in phase {state.token.phase!r}"
        if not isinstance(model, nn.Module):
            got = type(model).__name__
        raise ConfigurationError(f"cannot {doing} this model", expected=wanted, got=got)
    return state.token
