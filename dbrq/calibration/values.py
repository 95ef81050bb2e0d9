"""The values that one run meets: which is which, who made each, and which are parameters or come from these alone."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import op_facts
from .._torch import storage_id
from ..eager import views
from ..mappings import OpRow, Role
from ..op_facts import memory_of
from ..record.merge import Union
from ..record.parameters import Computed
from ..record.record import VARYING_NUMBERS, ParameterRef, Record, SeenOp, Tag, TensorInfo, Value
from ..tensors import geometry_of, version_of


class Observer(Protocol):
    """What looks on while a prepared model runs; ``observing`` has it."""

    record: Record
    union: Union

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any: ...

    def stash(self, op: SeenOp, values: Sequence[tuple[int, Tensor]]) -> None: ...


class Values:
    """The values of one run, each under a number, and what is known of where they come from.

    Attributes:
        record: of the run.
        observing: in a run of a prepared model, what decides which values are observed.
        joined: value id here -> value id in the union of all runs, as far as known.
    """

    def __init__(self, modules: dict[str, nn.Module], observing: Observer | None) -> None:
        self.observing = observing
        self.record = Record()
        self.joined: dict[int, int] = {}
        self._ids: dict[int, tuple[weakref.ref, int]] = {}
        self._by_storage: dict[int, list[tuple[weakref.ref, int]]] = defaultdict(list)
        self._modules = modules
        self._computed: dict[tuple[str, str], Tensor] = {}
        self._written: set[tuple[str, str]] = set()  # parameters and buffers that forward writes to
        self._by_layout: set[int] = set()  # ids of values that are a view or a copy of another as layouts have it, ...
        self._returned: dict[int, bool] = {}  # ... of those returned as they were: by a call that named a layout?
        self._doubtful: set[int] = set()  # ... and of those to which a write came or did not, as layouts have it
        self._made_of_parameters: dict[int, Computed] = {}  # value id -> how it was computed
        self._parameters = self._find_parameters()
        self._first = {(path, name): p for path, module in modules.items() for name, p in module._parameters.items()}
        self._before = {key: _identity(self._registered(key)) for key in self._parameters.values()}

    def _lookup(self, tensor: Tensor) -> int | None:
        known = self._ids.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _value(self, tensor: Tensor) -> Value:
        vid = self._lookup(tensor)
        return self.record.values[vid] if vid is not None else self._new(tensor, None, constant=True)

    def _new(self, tensor: Tensor, tag: Tag, producer: SeenOp | None = None, constant: bool = False) -> Value:
        vid = len(self.record.values)
        if producer is not None and tag is None:
            tag = vid
        info = TensorInfo(vid, tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), tag, constant)
        storage = memory_of(tensor)
        parameter = self._parameters.get(storage) if constant and storage is not None else None
        value = Value(info, producer, parameter=parameter)
        self.record.values[vid] = value
        if parameter is not None:
            self._name((*parameter, geometry_of(tensor)), value)
        reference = weakref.ref(tensor)
        self._ids[id(tensor)] = (reference, vid)
        if storage is not None:
            self._by_storage[storage].append((reference, vid))
        return value

    def _name(self, name: tuple, value: Value) -> None:
        self.record.named[name] = value.info.id
        if self.observing is not None and (known := self.observing.record.named.get(name)) is not None:
            self.joined[value.info.id] = known

    def _made(self, seen: SeenOp, tensor: Tensor, same_object: bool, tag: Tag) -> list[TensorInfo]:
        """What an op made. If it wrote to what it was given, that is another value from now on, and so is whatever
        shares its memory; integers stand for none of them.
        """
        storage = memory_of(tensor) if same_object else None
        if storage is None:
            return [self._new(tensor, tag, seen).info]
        old = self._lookup(tensor)
        entries = [(held, vid) for ref, vid in self._by_storage[storage] if (held := ref()) is not None]
        others = [(held, vid) for held, vid in entries if held is not tensor]
        family = {vid for _, vid in others} | ({old} if old is not None else set())
        value = self._new(tensor, tag, seen)
        if storage in self._parameters:
            self._written.add(self._parameters[storage])
        if old in self._returned:
            self.record.goes_by_layout()
            if self._returned[old]:  # an int8 value would be copied there
                self.record.values[old].aliased_mutation = value.aliased_mutation = True
        if not (others or storage in self._parameters or (old is not None and self._outlives(old))):
            return [value.info]
        current = [(held, vid) for held, vid in others if vid == self._lookup(held)]
        renewed = [self._renewed(seen, held, vid) for held, vid in current if not self.record.values[vid].info.constant]
        for changed in (*family, value.info.id, *(info.id for info in renewed)):
            self.record.values[changed].aliased_mutation = True
        if family & (self._by_layout | self._returned.keys()):
            self._doubtful |= {info.id for info in renewed}
            if len(renewed) < len(current):
                self.record.goes_by_layout()
        return [value.info, *renewed]

    def _made_in_place(
        self, seen: SeenOp, outputs: list[Tensor], written: Mapping[int, Tensor], target: Any, given: set[int], tag: Tag
    ) -> tuple[TensorInfo, ...]:
        """What an op returned and what it wrote to, then whatever shares memory with these.

        In a run of a converted model only the target of a write changes its maker, if there is one.
        """
        returned = {id(t) for t in outputs}
        made = []
        for t in (*outputs, *(t for t in written.values() if id(t) not in returned)):
            is_given = id(t) in given
            aside = is_given and target is not None and t is not target
            made.append(self._made(seen, t, is_given, self._value(t).info.tag or tag if aside else tag))
        return (*(infos[0] for infos in made), *(info for infos in made for info in infos[1:]))

    def _renewed(self, seen: SeenOp, tensor: Tensor, before: int) -> TensorInfo:
        """What a tensor holds after a write to its memory: to whoever reads it, the same op made it as before."""
        return self._new(tensor, self.record.values[before].info.tag, seen).info

    def _outlives(self, vid: int) -> bool:
        """Whether the memory of a value belongs to the caller: inputs and what is only moved from them."""
        value: Value | None = self.record.values[vid]
        while value is not None:
            if value.is_input or value.info.constant:
                return True
            value = None if value.origin is None else self.record.values[value.origin]
        return False

    def _moved(
        self, seen: SeenOp, tensor: Tensor, inputs: tuple[TensorInfo, ...], given: Any, names_layout: bool
    ) -> Value:
        """The result of an op that moves elements; the value itself if that op did nothing.

        Args:
            names_layout: whether the call names a layout in which the result has to lie.
        """
        known = self._lookup(tensor)
        if known is not None:
            if seen.row.name == "contiguous" or names_layout:
                self._returned[known] = names_layout or self._returned.get(known, False)
            return self.record.values[known]
        source = self.record.values[inputs[0].id] if inputs else None
        value = self._new(tensor, source.info.tag if source is not None else None, seen)
        if source is not None and seen.row.name in op_facts.AS_LAID_OUT:
            self._by_layout |= {source.info.id, value.info.id, *self._sharing(given), *self._sharing(tensor)}
        if source is not None:
            value.info = TensorInfo(
                value.info.id,
                value.info.shape,
                value.info.dtype,
                value.info.contiguous,
                source.info.tag,
                source.info.constant,
            )
            value.origin, value.parameter = source.info.id, source.parameter
            if seen.row.name in views.AS_LAID_OUT:
                self._copied(given, tensor)
        return value

    def _sharing(self, tensor: Any) -> list[int]:
        """The ids of living values in the memory of a tensor."""
        storage = memory_of(tensor) if isinstance(tensor, Tensor) else None
        return [] if storage is None else [vid for ref, vid in self._by_storage[storage] if ref() is not None]

    def _copied(self, given: Any, tensor: Tensor) -> None:
        """A copy, if it is one, for whose int8 value the value itself may stand: a write to either is one to both."""
        mine = memory_of(tensor)
        held = None if given is None else memory_of(given)
        if mine is not None and held is not None and held != mine:
            own, others = self._by_storage[mine], self._by_storage[held]
            self._by_storage[mine], self._by_storage[held] = own + others, others + own

    def _ask_layout(self, tensor: Tensor) -> None:
        """The user's code asks how a value lies in memory."""
        self.record.goes_by_layout()
        value: Value | None = self._value(tensor)
        while value is not None:
            value.layout_asked = True
            value = None if value.origin is None else self.record.values[value.origin]

    def _same_value(self, source: Any, output: Any) -> None:
        """Identity and dropout in eval may return a new object for the same value."""
        if isinstance(output, Tensor) and output is not source and isinstance(source, Tensor):
            vid = self._value(source).info.id
            self._ids[id(output)] = (weakref.ref(output), vid)

    # Parameters

    def _find_parameters(self) -> dict[int, tuple[str, str]]:
        found: dict[int, tuple[str, str]] = {}
        for path, module in self._modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.device.type == "meta":
                    continue
                key = found.setdefault(storage_id(tensor.untyped_storage()), (path, name))
                places = self.record.parameter_names.setdefault(key, [])
                if (path, name) not in places:
                    places.append((path, name))
        return found

    def _parameter(self, tensor: Any) -> ParameterRef | None:
        """The parameter or buffer ``tensor`` is, or is a pure view of."""
        if not isinstance(tensor, Tensor):
            return None
        storage = memory_of(tensor)
        key = None if storage is None else self._parameters.get(storage)
        if key is None or tensor.dtype is not torch.float32:
            return None
        return self._part(key, tensor)

    def _part(self, key: tuple[str, str], tensor: Tensor) -> ParameterRef | None:
        registered = self._registered(key)
        geometry = geometry_of(tensor)
        if registered is None or (geometry != geometry_of(registered) and not registered.is_contiguous()):
            return None
        (path, name), (shape, stride, offset) = key, geometry
        return ParameterRef(path, name, geometry == geometry_of(registered), shape, stride, offset)

    def _registered(self, key: tuple[str, str]) -> Tensor | None:
        path, name = key
        owner = self._modules[path]
        for held in (owner._parameters, owner._buffers):  # of a ScriptModule they have no get
            if name in held and held[name] is not None:
                return held[name]
        return self._computed.get(key)

    def _is_replaced(self, path: str, parameters: Sequence[Any]) -> bool:
        """Whether a module has other parameters than when the run began: forward, or a functional call, set them."""
        for name, tensor in zip(("weight", "bias"), parameters, strict=False):
            key = (path, name)
            if key in self._first and tensor is not self._first[key] and tensor is not self._computed.get(key):
                return True
        return False

    # Weights computed from parameters alone

    def computed(self, path: str, name: str, value: Tensor) -> None:
        """``value`` is what a parametrization makes of the parameter ``name`` of a module, in this run."""
        storage = memory_of(value)
        if storage is not None:
            self._computed[path, name] = value
            self._parameters[storage] = (path, name)

    def _source(self, tensor: Tensor) -> Computed | ParameterRef | None:
        """How a tensor comes from parameters and buffers alone; None if it does not."""
        storage = memory_of(tensor)
        key = None if storage is None else self._parameters.get(storage)
        if key is not None:
            registered = self._registered(key)
            return self._part(key, tensor) if registered is not None and registered.dtype is tensor.dtype else None
        vid = self._lookup(tensor)
        if vid is None or self.record.values[vid].aliased_mutation:
            return None
        return self._made_of_parameters.get(vid)

    def _weight(self, row: OpRow, tensor: Any, owner: str) -> ParameterRef | None:
        """The parameter that a weight is, or what it is computed from parameters as."""
        ref = self._parameter(tensor)
        if ref is not None or row.role is not Role.COMPUTE or not isinstance(tensor, Tensor):
            return ref
        how = self._source(tensor)
        if not isinstance(how, Computed) or tensor.dtype is not torch.float32:
            return None
        return how.ref(tensor.shape, owner)

    def _bias(self, bias: Any) -> Any:
        """Which parameter a bias is; a name for one that forward computes, None where there is none."""
        ref = self._parameter(bias)
        return (ref.key, ref.geometry) if ref is not None else "computed" if isinstance(bias, Tensor) else None

    def _keep_computed(self, seen: SeenOp, weight: Tensor) -> None:
        how, ref = self._source(weight), seen.weight
        assert isinstance(how, Computed) and ref is not None
        kept = self.record.computed.setdefault(ref.key, how)
        if kept.exact != how.exact:
            self.record.varying[ref.key] = VARYING_NUMBERS
        seen.sources = tuple(
            ref for ref in how.sources if (t := self._registered(ref.key)) is not None and t.dtype is torch.float32
        )

    def _find_varying(self) -> None:
        """Weights that forward changes, or computes from what it changes, are others in the next run."""
        now = {key: _identity(self._registered(key)) for key in self._before}
        changed = self._written | {key for key, before in self._before.items() if now[key] != before}
        for key in changed:
            self.record.varying[key] = "forward changes its weight"
        for key, how in self.record.computed.items():
            if any(ref.key in changed for ref in how.sources):
                self.record.varying[key] = "its weight is computed in forward, from buffers that forward changes"


def _identity(tensor: Tensor | None) -> tuple[int, int, int | None] | None:
    if tensor is None:
        return None
    return id(tensor), version_of(tensor), memory_of(tensor)
