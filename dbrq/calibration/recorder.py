"""Watching: a run is recorded, op by op, while the user's Python runs.

The first run is one on the example (first_run.py). Every run of a prepared model is watched too: what it shows joins
the record (record/merge.py), and observers see the values that int8 ops will read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import is_wrapped, reversed_padding, without_function_modes
from ..auto_trace import InterceptedForward, active, hook_log
from ..eager import views
from ..eager.arguments import activations, bind_leaf, constant, settings, specified, spelled_name
from ..eager.decompositions import decomposed
from ..eager.outside import look
from ..errors import ConfigurationError
from ..macs import Multiplied
from ..mappings import (
    DROPOUTS,
    FUNCTIONS,
    OTHER,
    READS_NUMBER,
    OpRow,
    Role,
    asks_inplace,
    drops,
    function_name,
    is_torch_leaf,
    leaf_row,
)
from ..op_facts import BY_MEMORY, LAYOUT_QUESTIONS, is_pure, memory_of, reads_values, target_of
from ..pytree import tree_leaves, tree_map
from ..record.callsite import border, site, user_line
from ..record.parameters import Computed, computed
from ..record.record import REPLACED, ModuleStep, Place, SeenCall, SeenOp, Tag, TensorInfo, Value
from ..tensors import Versions, layout_of, unmarked
from .originals import Originals
from .values import Observer, Values

_NOTHING: dict[int, Tensor] = {}


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


class Watch(Values, TorchFunctionMode):
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
        originals: Originals | None = None,
        on_op: Callable | None = None,
    ) -> None:
        super().__init__(modules, observing)
        self.on_op, self.originals = on_op, originals
        self.training = False
        self.lines: Counter[str] = Counter()
        self.token = self if token is None else token
        self.slow = True  # every module call comes to enter
        self.frame: _Frame | None = None
        self.leaf: InterceptedForward | None = None
        self.hidden = 0  # depth inside an opaque module
        self._occurrences: dict[tuple, int] = defaultdict(int)

    # Runs

    @border
    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """Run ``intercepted`` as the outermost module."""
        previous, active.call = active.call, self
        self.training = intercepted.module.training
        try:
            with self:
                for name, tensors in intercepted.tensors_by_name(args, kwargs).items():
                    for number, tensor in enumerate(tensors):
                        self._given((intercepted.path, name, number, tensor.dtype), tensor)
                output = self.enter(intercepted, args, kwargs)
                with without_function_modes():
                    for leaf in tree_leaves(output):
                        if isinstance(leaf, Tensor):
                            self._returns(self._value(leaf))
                    self._find_varying()
                return tree_map(unmarked, output)
        finally:
            active.call = previous

    def _given(self, name: tuple[str, str, int, torch.dtype], tensor: Tensor) -> None:
        value = self._value(tensor)
        if value.is_input:  # given twice
            return
        self.record.layouts.setdefault(name[:3], layout_of(tensor))
        self._as_input(value)
        self._name(name, value)

    def _returns(self, value: Value) -> None:
        value.is_output = True
        if value.info.id in self._doubtful:
            self.record.goes_by_layout()

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
        with without_function_modes():
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
        with without_function_modes():
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
        with without_function_modes():
            started = None if self.hidden else self._start(OTHER, name, (args, kwargs), module=intercepted)
        self.hidden += 1
        try:
            with without_function_modes():
                output = intercepted.original(*args, **kwargs)
        finally:
            self.hidden -= 1
        if started is not None:
            with without_function_modes():
                self._see(started, OTHER, name, "module", args, kwargs, output, module=intercepted)
        return output

    # Ops

    def _leaf_op(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        row = intercepted.row
        assert row is not None
        with without_function_modes():
            bound, op = bind_leaf(intercepted, args, kwargs), row.name
            row = OTHER if drops(row, bound) and not self._is_off(row) else row
            started = self._start(row, op, (args, kwargs), bound, intercepted)
            if self.originals is not None and row.role is Role.EMBEDDING:
                self.originals.keep([bound[1]] if bound[3] is not None else ())  # max_norm
            stashed, output = self._run(started, row, bound, lambda: intercepted.original(*args, **kwargs))
            if row.role is Role.PASS:
                self._same_value(bound[0], output)
            name = type(intercepted.module).__name__
            seen = self._see(started, row, op, name, args, kwargs, output, bound, intercepted)
            self._keep(seen, stashed)
        return output

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        parts = None if self.hidden else decomposed(func, args, kwargs)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if self.hidden or self.frame is None or not reads_values(func):  # without a frame: a destructor's, say
            if self.frame is not None and not self.hidden and function_name(func) in LAYOUT_QUESTIONS:
                with without_function_modes():
                    self._ask_layout(args[0])
            return func(*args, **kwargs)
        spelling = FUNCTIONS.get(func)
        row = spelling.row if spelling else OTHER
        if row.role is Role.PASS and not self._is_off(row) and views.makes_elements(func, row, args, kwargs):
            row, spelling = OTHER, None
        bound = spelling.bind(args, kwargs) if spelling else []
        name = function_name(func)
        if name in BY_MEMORY:
            self.record.goes_by_layout()
        started = self._start(row, name, (args, kwargs), bound, self.leaf)
        inplace = spelling is not None and spelling.inplace
        if started.hooked:
            self._log("%s::%s.__torch_function__ start", row.name)
        looked_at = [] if is_pure(func) else [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = Versions(looked_at)
        kept = self.originals.before(func, (args, kwargs)) if self.originals is not None else ()
        stashed, output = self._run(started, row, bound, lambda: func(*args, **kwargs), inplace)
        if started.hooked:
            self._log("%s::%s.__torch_function__ end", row.name)
        if func in READS_NUMBER:
            self.record.read(self.lines, output)
        if row.name in DROPOUTS and not drops(row, bound):
            self._same_value(bound[0], output)
        target = target_of(func, args, kwargs)
        written = {id(t): t for t in (target, *versions.written()) if t is not None}
        if self.originals is not None:
            self.originals.after(kept, written.values())
        spelled = spelled_name(func)
        seen = self._see(started, row, name, spelled, args, kwargs, output, bound, self.leaf, written, target)
        self._keep(seen, stashed)
        if not seen.inplace and not written:
            for tensor, how in computed(func, args, kwargs, output, self._source):
                self._made_of_parameters[self._value(tensor).info.id] = how
        return output

    def _is_off(self, row: OpRow) -> bool:
        """Whether this run trains the model, and what drops in it will not in eval mode."""
        return self.training and row.name in DROPOUTS

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
            if not t.is_floating_point() or memory_of(t) is None:
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
        if any(info.id in self._doubtful for info in inputs):
            self.record.goes_by_layout()
        is_module = module is not None and module.row is row
        hooked = (
            frame.call is not None
            and row.role not in (Role.PASS, Role.FLOAT)
            and (is_module or any(i.dtype.is_floating_point for i in inputs))
        )
        weight = None
        if row.takes_weight and not is_module and (ref := self._weight(row, bound[1], frame.path)) is not None:
            weight = (ref.key, ref.geometry, tuple(map(constant, bound[3:7])), self._bias(bound[2]))
        whole = module if module is not None and (is_module or module.opaque) else None
        place = Place(op, site(), None if whole is None else whole.path, weight)
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
        written: Mapping[int, Tensor] = _NOTHING,
        target: Any = None,
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
            given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            named = row.name in ("to", "contiguous") and views.may_copy(args, kwargs)
            seen.outputs = tuple(self._moved(seen, t, inputs, given, named).info for t in tensors)
        else:
            seen.inplace = bool(written) or (bool(bound) and asks_inplace(row, bound))
            tag: Tag = None if hooked else op
            if not seen.inplace:  # some functions return what they were given
                seen.outputs = tuple(
                    (self._value(t) if id(t) in same else self._new(t, tag, seen)).info for t in tensors
                )
            else:
                target = bound[0] if target is None and not written else target
                seen.outputs = self._made_in_place(seen, tensors, written, target, same, tag)
        for vid in {i.id for i in inputs} - ({o.id for o in seen.outputs} if row.role is Role.PASS else set()):
            self.record.values[vid].readers.append(seen)
        if hooked:
            assert frame.call is not None
            frame.call.paths[0].steps.append(seen)
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
        storage = memory_of(tensor)
        keys = [value.parameter, None if storage is None else self._parameters.get(storage)]
        keys += [ref.key for ref in how.sources] if isinstance(how, Computed) else []
        return any(key is not None and key[1] in self._modules[key[0]]._parameters for key in keys)

    def _describe(self, seen: SeenOp, row: OpRow, bound: Sequence[Any], module: InterceptedForward | None) -> None:
        """What placement needs to know beyond inputs and outputs."""
        seen.constants = settings(row, bound)
        seen.transformed = any(is_wrapped(leaf) for leaf in tree_leaves(bound) if isinstance(leaf, Tensor))
        seen.activations = tuple(
            (slot, self._value(t).info.id) for slot, t in activations(row, bound) if t.dtype.is_floating_point
        )
        if row.role in (Role.COMPUTE, Role.EMBEDDING) and row.name != "matmul" and len(bound) > 1:
            seen.weight = self._weight(row, bound[1], seen.owner)
            if seen.weight is None:
                seen.weight_problem = "its weight is computed in forward, or is no parameter of the model"
            elif not bound[1].numel() or bound[1].dim() < 2:
                seen.weight, seen.weight_problem = None, "its weight is a vector, or has no elements"
            elif seen.weight.computed:
                self._keep_computed(seen, bound[1])
            elif module is not None and seen.is_module and self._is_replaced(module.path, bound[1:3]):
                seen.weight, seen.weight_problem = None, REPLACED
            if row.role is Role.COMPUTE and isinstance(bound[2], Tensor):
                seen.bias = self._parameter(bound[2])
                seen.bias_computed = seen.bias is None
        if row.role is Role.NORM:
            seen.norm = tuple(self._parameter(b) if isinstance(b, Tensor) else None for b in bound[1:5])
        leaf: Any = None if module is None else module.module
        if row.ndim and getattr(leaf, "padding_mode", "zeros") != "zeros":
            seen.pad = (tuple(reversed_padding(leaf)), leaf.padding_mode)
