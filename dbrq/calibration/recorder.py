"""Watching: a run is recorded, op by op, while the user's Python runs.

``watch`` makes the first run, on the example. It happens on a throwaway copy that shares parameters with the model, in
eval mode, under ``no_grad``, with random state put back, so that nothing of the user's changes. Every run of a prepared
model is watched too: what it shows joins the record (paths.py), and observers see the values that int8 ops will read.
"""

from __future__ import annotations

import contextlib
import copy
import random
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from ..auto_trace import InterceptedForward, active, hook_log, look, version_of
from ..eager.arguments import activations, bind_leaf, constant, specified
from ..eager.decompositions import decomposed
from ..errors import ConfigurationError
from ..mappings import (
    DROPOUTS,
    FUNCTIONS,
    OTHER,
    READS_NUMBER,
    Multiplied,
    OpRow,
    Role,
    asks_inplace,
    function_name,
    is_torch_leaf,
    leaf_row,
    reads_values,
)
from ..op_facts import mutates
from ..pytree import tree_leaves, tree_map
from ..record.callsite import border, site, user_line
from ..record.merge import Union
from ..record.parameters import Computed, computed
from ..record.record import (
    VARYING_NUMBERS,
    ModuleStep,
    ParameterRef,
    Place,
    Record,
    SeenCall,
    SeenOp,
    Tag,
    TensorInfo,
    Value,
)
from ..tensors import geometry_of, unmarked
from .surgery import as_forward_sees, bake, copied, uncompile_children, uncompiled

_disabled = torch._C.DisableTorchFunction
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Observer(Protocol):
    """What looks on while a prepared model runs; ``observing`` has it."""

    record: Record
    union: Union

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any: ...

    def stash(self, op: SeenOp, values: Sequence[tuple[int, Tensor]]) -> None: ...


def watch(
    model: nn.Module, args: tuple, kwargs: dict, opaque: Sequence[type[nn.Module]] = (), on_op: Callable | None = None
) -> Record:
    """Run ``model`` once and return what was seen. ``model`` itself is neither run nor changed.

    Args:
        model: any module.
        args, kwargs: one call's arguments; they are copied, since forward may change them.
        opaque: module classes not to look into.
        on_op: called with (op, output) after every op, for logging values.
    """
    stand_in = bake(uncompile_children(copied(uncompiled(model), model.parameters())).eval())
    _check_copied((args, kwargs))
    args, kwargs = copy.deepcopy((args, kwargs))
    with torch.no_grad(), random_state_kept():
        args, kwargs = as_forward_sees(stand_in, args, kwargs)
        run = Watch(dict(stand_in.named_modules(remove_duplicate=False)), on_op=on_op)
        for path, module in stand_in.named_modules():
            intercept(module, path, run, tuple(opaque))
        run.run(stand_in.__dict__["forward"], args, kwargs)
    return run.record


def _check_copied(inputs: Any) -> None:
    """Raise for tensors that torch cannot copy with what they are part of."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.layout in _COMPRESSED:
            raise ConfigurationError(
                "an input is a sparse tensor of a compressed layout", got=str(leaf.layout),
                expected="strided tensors, or sparse ones in coordinates", hint="pass it .to_sparse(), or .to_dense()",
            )  # fmt: skip


def intercept(
    module: nn.Module, path: str, token: Any, opaque: tuple[type[nn.Module], ...]
) -> InterceptedForward | None:
    """Come between ``module`` and its callers, if it has a Python forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    intercepted = InterceptedForward(module, path, token)
    intercepted.opaque = isinstance(module, opaque)
    intercepted.is_torch_leaf = is_torch_leaf(module)
    found = None if intercepted.opaque else leaf_row(module)
    if found is not None:
        intercepted.row, intercepted.attributes = found
        intercepted.passes = found[0].role is Role.PASS
    module.__dict__["forward"] = intercepted
    return intercepted


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _Frame:
    """One call of one module while watching."""

    def __init__(self, path: str, call: SeenCall | None, number: int) -> None:
        self.path, self.call, self.number = path, call, number
        self.counts: Counter[tuple[Place, bool]] = Counter()


@dataclass
class _Started:
    """An op that is about to run: where it is, what it reads, and the op of the union that it is."""

    place: Place
    nth: int
    hooked: bool
    inputs: tuple[TensorInfo, ...]
    known: SeenOp | None


class Watch(TorchFunctionMode):
    """The mode that records one run. Also the token of a throwaway copy, so that its modules find their way here.

    Attributes:
        record: what it saw.
        observing: in a run of a prepared model, what decides which values are observed.
        joined: value id here -> value id in the union of all runs, as far as known.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        token: Any = None,
        observing: Observer | None = None,
        on_op: Callable | None = None,
    ) -> None:
        self.on_op, self.observing = on_op, observing
        self.record = Record()
        self.joined: dict[int, int] = {}
        self.lines: Counter[str] = Counter()
        self.token = self if token is None else token
        self.slow = True  # every module call comes to enter
        self.frame: _Frame | None = None
        self.leaf: InterceptedForward | None = None
        self.hidden = 0  # depth inside an opaque module
        self._ids: dict[int, tuple[weakref.ref, int]] = {}
        self._by_storage: dict[int, list[tuple[weakref.ref, int]]] = defaultdict(list)
        self._occurrences: dict[tuple, int] = defaultdict(int)
        self._modules = modules
        self._computed: dict[tuple[str, str], Tensor] = {}
        self._made_of_parameters: dict[int, Computed] = {}  # value id -> how it was computed
        self._parameters = self._find_parameters()
        self._before = {key: _identity(self._registered(key)) for key in self._parameters.values()}

    def _find_parameters(self) -> dict[int, tuple[str, str]]:
        found: dict[int, tuple[str, str]] = {}
        for path, module in self._modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.device.type == "meta":
                    continue
                key = found.setdefault(tensor.untyped_storage()._cdata, (path, name))
                places = self.record.parameter_names.setdefault(key, [])
                if (path, name) not in places:
                    places.append((path, name))
        return found

    # Runs

    @border
    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """Run ``intercepted`` as the outermost module."""
        previous, active.call = active.call, self
        try:
            with self:
                for name, tensors in intercepted.tensors_by_name(args, kwargs).items():
                    for number, tensor in enumerate(tensors):
                        self._given((intercepted.path, name, number, tensor.dtype), tensor)
                output = self.enter(intercepted, args, kwargs)
                with _disabled():
                    for leaf in tree_leaves(output):
                        if isinstance(leaf, Tensor):
                            self._value(leaf).is_output = True
                    self._find_varying()
                return tree_map(unmarked, output)
        finally:
            active.call = previous

    def _given(self, name: tuple[str, str, int, torch.dtype], tensor: Tensor) -> None:
        value = self._value(tensor)
        if value.is_input:  # given twice
            return
        self._as_input(value)
        self._name(name, value)

    def _name(self, name: tuple, value: Value) -> None:
        self.record.named[name] = value.info.id
        if self.observing is not None and (known := self.observing.record.named.get(name)) is not None:
            self.joined[value.info.id] = known

    def _as_input(self, value: Value) -> None:
        info = value.info
        value.info = TensorInfo(info.id, info.shape, info.dtype, info.contiguous, info.id)
        value.is_input = True

    def start(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        raise ConfigurationError(
            "forward calls its modules from another thread", path=intercepted.path, hint="call them from one thread"
        )

    def look(self, hook: Callable, module: nn.Module, path: str, args: tuple) -> Any:
        """Call a hook that only looks."""
        with _disabled():
            look(hook, module, path, args)

    def _log(self, message: str, *of: str) -> None:
        if self.observing is not None:
            assert self.frame is not None
            hook_log.debug(message, self.frame.path or "<root>", *of)

    def enter(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        if self.observing is None or intercepted.only_watched:
            return self._enter(intercepted, args, kwargs)
        hook_log.debug("%s.__call__ start", intercepted.path or "<root>")
        output = self._enter(intercepted, args, kwargs)
        hook_log.debug("%s.__call__ end", intercepted.path or "<root>")
        return output

    def _enter(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        if self.hidden or intercepted.opaque:
            return self._opaque(intercepted, args, kwargs)
        if intercepted.row is not None and self.frame is not None:
            return self._leaf_op(intercepted, args, kwargs)
        if intercepted.is_torch_leaf and self.frame is not None:
            outer, self.leaf = self.leaf, intercepted
            try:
                return intercepted.inner(*args, **kwargs)
            finally:
                self.leaf = outer
        return self._module(intercepted, args, kwargs)

    def _module(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        calls = self.record.calls.setdefault(intercepted.path, [])
        with _disabled():
            tensors = intercepted.tensors_by_name(args, kwargs)
            inside = f"{intercepted.path}." if intercepted.path else ""
            call = SeenCall(
                input_tags={n: tuple(self._value(t).info.tag for t in ts) for n, ts in tensors.items()},
                arguments=specified(args, kwargs),
                before={path: len(its) for path, its in self.record.calls.items() if path.startswith(inside)},
            )
        calls.append(call)
        if self.frame is not None and self.frame.call is not None:
            self.frame.call.paths[0].steps.append(ModuleStep(intercepted.path, user_line()))
        outer, self.frame = self.frame, _Frame(intercepted.path, call, len(calls) - 1)
        leaf, self.leaf = self.leaf, None
        try:
            if intercepted.row is not None:
                return self._leaf_op(intercepted, args, kwargs)
            return intercepted.original(*args, **kwargs)
        finally:
            self.frame, self.leaf = outer, leaf

    def _opaque(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A subtree that stays float: one op, of which only inputs and outputs are known."""
        if self.frame is None:  # the whole model
            self.frame = _Frame(intercepted.path, None, 0)
        name = type(intercepted.module).__name__
        with _disabled():
            started = None if self.hidden else self._start(OTHER, name, (args, kwargs), module=intercepted)
        self.hidden += 1
        try:
            with _disabled():
                output = intercepted.original(*args, **kwargs)
        finally:
            self.hidden -= 1
        if started is not None:
            with _disabled():
                self._see(started, OTHER, name, "module", args, kwargs, output, module=intercepted)
        return output

    # Ops

    def _leaf_op(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        row = intercepted.row
        assert row is not None
        with _disabled():
            bound = bind_leaf(intercepted, args, kwargs)
            started = self._start(row, row.name, (args, kwargs), bound, intercepted)
            stashed, output = self._run(started, row, bound, lambda: intercepted.original(*args, **kwargs))
            if row.role is Role.PASS:
                self._same_value(bound[0], output)
            name = type(intercepted.module).__name__
            seen = self._see(started, row, row.name, name, args, kwargs, output, bound, intercepted)
            self._keep(seen, stashed)
        return output

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        parts = None if self.hidden else decomposed(func, args, kwargs)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if self.hidden or self.frame is None or not reads_values(func):  # without a frame: a destructor's, say
            return func(*args, **kwargs)
        spelling = FUNCTIONS.get(func)
        row = spelling.row if spelling else OTHER
        bound = spelling.bind(args, kwargs) if spelling else []
        name = function_name(func)
        started = self._start(row, name, (args, kwargs), bound, self.leaf)
        inplace = spelling is not None and spelling.inplace
        if started.hooked:
            self._log("%s::%s.__torch_function__ start", row.name)
        stashed, output = self._run(started, row, bound, lambda: func(*args, **kwargs), inplace)
        if started.hooked:
            self._log("%s::%s.__torch_function__ end", row.name)
        if func in READS_NUMBER:
            self.record.read(self.lines, output)
        if row.name in DROPOUTS and not (bound[2] and bound[1]):
            self._same_value(bound[0], output)
        written = kwargs.get("out")
        if written is None and args and mutates(func):
            written = args[0]
        seen = self._see(started, row, name, _spelled(func), args, kwargs, output, bound, self.leaf, written)
        self._keep(seen, stashed)
        if not seen.inplace and written is None:
            for tensor, how in computed(func, args, kwargs, output, self._source):
                self._made_of_parameters[self._value(tensor).info.id] = how
        return output

    def _run(
        self, started: _Started, row: OpRow, bound: list, original: Callable, inplace: bool = False
    ) -> tuple[list, Any]:
        """The op, with what it reads observed; also what it read that could not be observed yet, as (slot, value,
        elements).
        """
        observing = self.observing
        if observing is None or not started.hooked:
            return [], original()
        known, edges, unknown = started.known, [], []
        for slot, t in activations(row, bound):
            if not t.is_floating_point() or _storage(t) is None:
                continue
            vid = self._value(t).info.id
            its = self.joined.get(vid)
            if known is not None and its is not None and (slot, its) in known.activations:
                edges.append((slot, its, t))
            else:
                unknown.append((vid, t.detach().clone()))
        if known is None:
            return unknown, original()
        return unknown, observing.run(known, edges, bound, original, inplace)

    def _keep(self, seen: SeenOp, stashed: list) -> None:
        if stashed:
            assert self.observing is not None
            self.observing.stash(seen, stashed)

    def _start(
        self, row: OpRow, op: str, given: Any, bound: Sequence[Any] = (), module: InterceptedForward | None = None
    ) -> _Started:
        """Say which op runs now, before it does."""
        frame = self.frame
        assert frame is not None
        inputs = self._infos(given)
        is_module = module is not None and module.row is row
        hooked = (
            frame.call is not None
            and row.role not in (Role.PASS, Role.FLOAT)
            and (is_module or any(i.dtype.is_floating_point for i in inputs))
        )
        weight = None
        if row.takes_weight and not is_module and (ref := self._weight(row, bound[1])) is not None:
            weight = (ref.key, ref.geometry, tuple(map(constant, bound[3:7])))
        whole = is_module or (module is not None and module.opaque)
        place = Place(op, site(), module.path if whole else None, weight)  # type: ignore[union-attr]
        nth = frame.counts[place, hooked]  # a converted model counts hooked ops only
        frame.counts[place, hooked] += 1
        started = _Started(place, nth, hooked, inputs, None)
        if self.observing is not None:
            moved = tuple(self.joined.get(i.id) for i in inputs) if row.role is Role.PASS else None
            started.known = self.observing.union.find(frame.path, frame.number, place, nth, hooked, moved)
        return started

    def _infos(self, tree: Any) -> tuple[TensorInfo, ...]:
        return tuple(self._value(leaf).info for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))

    def _see(
        self,
        started: _Started,
        row: OpRow,
        op: str,
        spelling: str,
        args: tuple,
        kwargs: dict,
        output: Any,
        bound: Sequence[Any] = (),
        module: InterceptedForward | None = None,
        written: Any = None,
    ) -> SeenOp:
        frame = self.frame
        assert frame is not None
        inputs, hooked = started.inputs, started.hooked
        path = module.path if module is not None else None
        name = ("module", path) if path is not None else (frame.path, op)
        occurrence = self._occurrences[name]
        self._occurrences[name] += 1
        seen = SeenOp(
            op=op,
            row=row,
            owner=frame.path,
            call=frame.number,
            place=started.place,
            nth=started.nth,
            hooked=hooked,
            module=path,
            occurrence=occurrence,
            site=user_line(),
            spelling=spelling,
            inputs=inputs,
            outputs=(),
            is_module=module is not None and module.row is row,
        )
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._describe(seen, row, bound, module)
        same = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if row.role is Role.PASS:
            seen.outputs = tuple(self._moved(seen, t, inputs).info for t in tensors)
        else:
            seen.inplace = isinstance(written, Tensor) or (bool(bound) and asks_inplace(row, bound))
            tag: Tag = None if hooked else op
            if not seen.inplace:  # some functions return what they were given
                seen.outputs = tuple(
                    (self._value(t) if id(t) in same else self._new(t, tag, seen)).info for t in tensors
                )
            else:
                seen.outputs = tuple(self._made(seen, t, id(t) in same, tag).info for t in tensors)
            if isinstance(written, Tensor) and id(written) not in {id(t) for t in tensors}:
                self._made(seen, written, True, tag)
        for vid in {i.id for i in inputs} - ({o.id for o in seen.outputs} if row.role is Role.PASS else set()):
            self.record.values[vid].readers.append(seen)
        if hooked:
            frame.call.paths[0].steps.append(seen)  # type: ignore[union-attr]
        self._count(seen, args, kwargs, bound, module)
        self.record.ops.append(seen)
        known = started.known
        if known is not None:
            for mine, its in zip(seen.outputs, known.outputs, strict=False):
                self.joined.setdefault(mine.id, its.id)
        if self.on_op is not None:
            self.on_op(seen if known is None else known, output)
        return seen

    def _count(
        self, seen: SeenOp, args: tuple, kwargs: dict, bound: Sequence[Any], module: InterceptedForward | None
    ) -> None:
        """Multiply-accumulates, and whether weights are among what they multiply."""
        row = seen.row
        if row.macs is None or not any(i.dtype.is_floating_point for i in seen.inputs):
            return
        leaf = module.module if module is not None and seen.is_module else None
        shapes = [info.shape for info in seen.inputs]
        seen.macs = row.macs(Multiplied(bound, shapes, seen.result.shape, leaf))
        added = bound[0] if "beta" in row.names else None
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not added]
        seen.weighs = row.always_weighs or any(map(self._is_weight, operands))

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, comes from parameters alone, or is a choice of a parameter's elements."""
        value, how = self._value(tensor), self._source(tensor)
        storage = _storage(tensor)
        keys = [value.parameter, None if storage is None else self._parameters.get(storage)]
        keys += [ref.key for ref in how.sources] if isinstance(how, Computed) else []
        return any(key is not None and key[1] in self._modules[key[0]]._parameters for key in keys)

    def _describe(self, seen: SeenOp, row: OpRow, bound: list, module: InterceptedForward | None) -> None:
        """What placement needs to know beyond inputs and outputs."""
        seen.constants = tuple(constant(b) for b in bound)
        seen.activations = tuple(
            (slot, self._value(t).info.id) for slot, t in activations(row, bound) if t.dtype.is_floating_point
        )
        if row.role in (Role.COMPUTE, Role.EMBEDDING) and row.name != "matmul" and len(bound) > 1:
            seen.weight = self._weight(row, bound[1])
            if seen.weight is None:
                seen.weight_problem = "its weight is computed in forward, or is no parameter of the model"
            elif seen.weight.computed:
                self._keep_computed(seen, bound[1])
            if row.role is Role.COMPUTE and isinstance(bound[2], Tensor):
                seen.bias = self._parameter(bound[2])
                seen.bias_computed = seen.bias is None
        if row.role is Role.NORM:
            seen.norm = tuple(self._parameter(b) if isinstance(b, Tensor) else None for b in bound[1:5])
        if module is not None and row.ndim and getattr(module.module, "padding_mode", "zeros") != "zeros":
            seen.pad = (tuple(module.module._reversed_padding_repeated_twice), module.module.padding_mode)

    # Values

    def computed(self, path: str, name: str, value: Tensor) -> None:
        """``value`` is what a parametrization makes of the parameter ``name`` of a module, in this run."""
        storage = _storage(value)
        if storage is not None:
            self._computed[path, name] = value
            self._parameters[storage] = (path, name)

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
        storage = _storage(tensor)
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

    def _made(self, seen: SeenOp, tensor: Tensor, same_object: bool, tag: Tag) -> Value:
        """The value an op made; if it wrote to one it was given, whoever shares its memory stays float."""
        if not same_object:
            return self._new(tensor, tag, seen)
        old = self._lookup(tensor)
        storage = _storage(tensor)
        if storage is None:
            return self._new(tensor, tag, seen)
        others = [
            (ref, vid)
            for ref, vid in self._by_storage[storage]
            if vid != old and ref() is not None and ref() is not tensor
        ]
        value = self._new(tensor, tag, seen)
        shared = bool(others) or storage in self._parameters or (old is not None and self._outlives(old))
        if shared:
            for vid in (*(vid for _, vid in others), value.info.id, *(() if old is None else (old,))):
                self.record.values[vid].aliased_mutation = True
        return value

    def _outlives(self, vid: int) -> bool:
        """Whether the memory of a value belongs to the caller: inputs and what is only moved from them."""
        value: Value | None = self.record.values[vid]
        while value is not None:
            if value.is_input or value.info.constant:
                return True
            value = None if value.origin is None else self.record.values[value.origin]
        return False

    def _moved(self, seen: SeenOp, tensor: Tensor, inputs: tuple[TensorInfo, ...]) -> Value:
        """The result of an op that moves elements; the value itself if that op did nothing."""
        known = self._lookup(tensor)
        if known is not None:
            return self.record.values[known]
        source = self.record.values[inputs[0].id] if inputs else None
        value = self._new(tensor, source.info.tag if source is not None else None, seen)
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
        return value

    def _same_value(self, source: Any, output: Any) -> None:
        """Identity and dropout in eval may return a new object for the same value."""
        if isinstance(output, Tensor) and output is not source and isinstance(source, Tensor):
            vid = self._value(source).info.id
            self._ids[id(output)] = (weakref.ref(output), vid)

    def _parameter(self, tensor: Any) -> ParameterRef | None:
        """The parameter or buffer ``tensor`` is, or is a pure view of."""
        if not isinstance(tensor, Tensor):
            return None
        storage = _storage(tensor)
        key = None if storage is None else self._parameters.get(storage)
        if key is None or tensor.dtype is not torch.float32:
            return None
        return self._part(key, tensor)

    def _part(self, key: tuple[str, str], tensor: Tensor) -> ParameterRef | None:
        registered = self._registered(key)
        geometry = geometry_of(tensor)
        if registered is None or (geometry != geometry_of(registered) and not registered.is_contiguous()):
            return None
        return ParameterRef(*key, geometry == geometry_of(registered), *geometry)

    def _registered(self, key: tuple[str, str]) -> Tensor | None:
        path, name = key
        owner = self._modules[path]
        for held in (owner._parameters, owner._buffers):  # of a ScriptModule they have no get
            if name in held and held[name] is not None:
                return held[name]
        return self._computed.get(key)

    # Weights computed from parameters alone

    def _source(self, tensor: Tensor) -> Computed | ParameterRef | None:
        """How a tensor comes from parameters and buffers alone; None if it does not."""
        storage = _storage(tensor)
        key = None if storage is None else self._parameters.get(storage)
        if key is not None:
            registered = self._registered(key)
            return self._part(key, tensor) if registered is not None and registered.dtype is tensor.dtype else None
        vid = self._lookup(tensor)
        if vid is None or self.record.values[vid].aliased_mutation:
            return None
        return self._made_of_parameters.get(vid)

    def _weight(self, row: OpRow, tensor: Any) -> ParameterRef | None:
        """The parameter that a weight is, or what it is computed from parameters as."""
        ref = self._parameter(tensor)
        if ref is not None or row.role is not Role.COMPUTE or not isinstance(tensor, Tensor):
            return ref
        how = self._source(tensor)
        if not isinstance(how, Computed) or tensor.dtype is not torch.float32:
            return None
        assert self.frame is not None
        return how.ref(tensor.shape, self.frame.path)

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
        """Weights computed from what forward changes are others in the next run."""
        for key, how in self.record.computed.items():
            now = {ref.key: _identity(self._registered(ref.key)) for ref in how.sources}
            if any(self._before.get(source, identity) != identity for source, identity in now.items()):
                self.record.varying[key] = "its weight is computed in forward, from buffers that forward changes"


def _identity(tensor: Tensor | None) -> tuple[int, int] | None:
    if tensor is None:
        return None
    return id(tensor), version_of(tensor)


def _storage(tensor: Tensor) -> int | None:
    """Identifies the memory of a tensor; None for those without (sparse ones, and those inside vmap)."""
    try:
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    except (RuntimeError, NotImplementedError):
        return None


def _spelled(func: Callable) -> str:
    name = resolve_name(func)
    return name or getattr(func, "__name__", str(func))
