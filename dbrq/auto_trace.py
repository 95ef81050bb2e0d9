"""Interception: how dbrq comes between the user's code and torch, for one model and one thread at a time.

Two points: the ``forward`` of each module instance (``InterceptedForward``, an instance attribute, so no class is
patched) and a ``TorchFunctionMode`` that lives as long as one call of the model (``RunCall``). Three kinds of hooks
hang on them:

* op hooks, for leaf modules and functions of the op table: the state of the module that calls them has one per op;
* module I/O hooks: entering and leaving a module that is not a leaf, and what the root takes and returns;
* argument dequant hooks: any other op gets plain float tensors.

A run follows the recorded paths: ``Frame`` expects the op that came next when it was recorded, and looks an op up by
its place in the code where the code branches otherwise. All bookkeeping of a run (which op are we at) is in ``RunCall``
and its frames, so many threads can run one model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import guards
from ._torch import (
    count_dispatch_modes,
    current_function_mode,
    without_current_function_mode,
    without_function_modes,
)
from .eager import views
from .eager.arguments import has_float
from .eager.decompositions import DECOMPOSABLE, Product, decomposed
from .eager.floats import FloatCalls
from .eager.interfaces import Hook
from .eager.outside import QUESTIONS, look, shown
from .eager.path import FloatFrame, Frame
from .mappings import FUNCTIONS, OpRow, Role
from .pytree import named_leaves, tree_leaves, tree_map
from .quantization_state import AutoQuantizationState
from .record.callsite import border
from .record.record import Record
from .tensors import Int8Tensor, Lazy, current, plain, unmarked

hook_log = logging.getLogger("dbrq.hooks")
#: What a lowered part returns where it cannot run.
NOT_RUN = object()
_NO_KWARGS: dict[str, Any] = {}


class _Active(threading.local):
    """The call that runs on this thread, if one does."""

    call: Any = None
    log: Callable[[Any, Any], None] | None = None


active = _Active()


@contextlib.contextmanager
def logging_values(log: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``log(op, output)`` after each hooked op that this thread runs in a prepared or converted model."""
    previous, active.log = active.log, log
    try:
        yield
    finally:
        active.log = previous


class ModelToken:
    """What all intercepted modules of one model share: whose they are and how a run starts.

    Attributes:
        phase: "observe" or "int8".
        strict: leaving the recorded paths raises.
        record: what runs showed; subclasses have it, and ...
        weight_axes: ... the canonical place of each int8 weight, with the axis of its scales.
    """

    record: Record
    weight_axes: dict[tuple[str, str], int | None]

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.strict = False
        self.warned: set[str] = set()

    def warn_once(self, what: str, message: str) -> None:
        """Warn of ``what``, the first time that it happens in this model."""
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(message, stacklevel=2)

    def start(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """Run ``intercepted`` as the outermost module of a call."""
        state = intercepted.state
        if state is not None and state.whole is not None and active.log is None:
            output = state.whole(intercepted, args, kwargs)
            if output is not NOT_RUN:
                return output
        if torch.is_autocast_enabled("cpu"):
            with guards.without_autocast():
                return self.start(intercepted, args, kwargs)
        if current_function_mode() is active.call is not None:
            with without_current_function_mode():  # a model called by another: its ops are not the other's
                return self.run(intercepted, args, kwargs)
        return self.run(intercepted, args, kwargs)

    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """One run, in int8."""
        return RunCall(self).run(intercepted, args, kwargs)

    def home_hook(self, intercepted: InterceptedForward) -> Hook | None:
        """The hook of a leaf module that is called by itself, outside of the model."""
        raise AssertionError("subclasses say which")


class InterceptedForward:
    """Stands in for the ``forward`` of one module instance; survives deepcopy and pickle with the module.

    Attributes:
        module: the module.
        path: its path in the model.
        token: shared by the model.
        row, attributes: its op, if it is a leaf of the op table; ``passes`` if in eval that op changes nothing.
        is_torch_leaf: torch's own module that holds no others; its ops are its caller's.
        opaque: it is not looked into.
        only_watched: its calls are seen while watching, and are nobody's business afterwards.
        state: its ``AutoQuantizationState``, if it is not a leaf or is the root.
    """

    def __init__(self, module: nn.Module, path: str, token: ModelToken) -> None:
        self.module, self.path, self.token = module, path, token
        self.previous = module.__dict__.get("forward")
        self.row: OpRow | None = None
        self.attributes: tuple[str, ...] = ()
        self.passes = self.is_torch_leaf = self.opaque = self.only_watched = False
        self.state: AutoQuantizationState | None = None

    @guards.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = active.call
        if call is None or call.token is not self.token:
            return self.token.start(self, args, kwargs)
        frame = call.frame
        if self.row is None or frame is None or call.slow:
            return call.enter(self, args, kwargs)
        if self.passes:
            if self.module.training:
                return call.enter(self, args, kwargs)
            return args[0] if args else next(iter(kwargs.values()))
        hook: Hook | None
        index, hooks = frame.index, frame.hooks
        if index < len(hooks) and (hook := hooks[index]).module_path == self.path and not hook.sited:
            frame.index = index + 1
        elif (hook := frame.leaf(self.row, self.path)) is None:
            return call.unrecorded_leaf(self, args, kwargs)
        if kwargs or len(args) != 1:
            return hook.module(call, self, args, kwargs)
        return hook.leaf(call, self, args[0])

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self.previous is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.previous

    @border
    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own forward."""
        return self.inner(*args, **kwargs)

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """The same, for a module whose ops are its caller's: sites begin with the caller."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @functools.cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of what forward takes by position."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in self.__signature__.parameters.values() if p.kind in positional)

    def tensors_by_name(self, args: tuple, kwargs: dict) -> dict[str, list[Tensor]]:
        """The tensors of a call under the names of arguments, and of what is in these, however it is spelled."""
        names = self.parameter_names
        given = dict(zip(names, args, strict=False))
        given.update({f"*{i}": value for i, value in enumerate(args[len(names) :])})
        given.update(kwargs)
        found = (each for name, value in given.items() for each in named_leaves(value, name))
        return {name: [leaf] for name, leaf in found if isinstance(leaf, Tensor)}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # typeshed knows no computed one
        return type(self.module).forward.__doc__

    @property
    def __wrapped__(self) -> Callable:
        return self.previous or type(self.module).forward.__get__(self.module)


class RunCall(FloatCalls, TorchFunctionMode):
    """One run of a prepared or converted model on one thread."""

    def __init__(self, token: ModelToken) -> None:
        self.token = token
        self.frame: Frame | None = None
        self.frames = Frame
        self.lenient = False
        self.counts: dict[int, int] = {}
        FloatCalls.__init__(self)
        self.log = active.log
        self.log_hooks = hook_log.isEnabledFor(logging.DEBUG)
        self.slow = self.log is not None or self.log_hooks

    # Module I/O hooks

    @border
    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        if count_dispatch_modes():
            guards.refuse_fake_mode(intercepted.path)
        if any(isinstance(leaf, Lazy) for leaf in tree_leaves((args, kwargs))):  # of a model that calls this one
            args, kwargs = tree_map(plain, (args, kwargs))
        guards.refuse_tangents(intercepted.path, (args, kwargs))
        outer, active.call = active.call, self
        previous, current.provenance = current.provenance, self.provenance
        enabled = torch.is_grad_enabled()
        try:
            with torch.no_grad(), self:  # int8 kernels have no gradient: through what is float it would be wrong
                if intercepted.state is None:
                    output = self._leave(self._leaf_alone(intercepted, args, kwargs))
                else:
                    self._tag_inputs(intercepted, args, kwargs)
                    output = self._leave(self.enter(intercepted, args, kwargs))
        except KeyError as error:
            guards.explain_missing(error, intercepted.path, self.token.weight_axes)
            raise
        finally:
            active.call, current.provenance = outer, previous
            self.provenance.end()
        if enabled:
            return guards.without_gradient(intercepted.path, output, (*args, *kwargs.values()))
        return output

    def _tag_inputs(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> None:
        state = intercepted.state
        assert state is not None
        for name, tensors in intercepted.tensors_by_name(args, kwargs).items():
            for tensor, tag in zip(tensors, state.input_tags(name, tensors), strict=True):
                self.provenance.set_tag_of_any(tensor, tag)
            if not state.lie_as_recorded(name, tensors):
                self.frames = FloatFrame

    def _leave(self, output: Any) -> Any:
        """What the outermost module returns: plain tensors in the user's own containers."""
        with without_function_modes():
            return tree_map(unmarked, output)

    def enter(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A module of the model is called."""
        if self.log_hooks:
            hook_log.debug("%s.__call__ start", intercepted.path or "<root>")
        state = intercepted.state
        if state is None or (intercepted.row is not None and self.frame is not None):
            output = self._leaf(intercepted, args, kwargs)
        else:
            output = self._module(intercepted, state, args, kwargs)
        if self.log_hooks:
            hook_log.debug("%s.__call__ end", intercepted.path or "<root>")
        return output

    @border
    def _module(self, intercepted: InterceptedForward, state: AutoQuantizationState, args: tuple, kwargs: dict) -> Any:
        count = self.counts.get(id(state), 0)
        self.counts[id(state)] = count + 1
        if state.parts and not self.slow and self.frames is Frame:
            for part in state.parts.get(count, ()):
                output = part(self, args, kwargs)
                if output is not NOT_RUN:
                    return output
        parent = self.frame
        hooks = state.hooks(count)
        if hooks is None:
            return self._opaque(intercepted, args, kwargs)
        self.frame = self.frames(state, hooks, self.lenient)
        try:
            if intercepted.row is not None:
                output = self._leaf(intercepted, args, kwargs)
            elif intercepted.previous is not None:
                output = intercepted.previous(*args, **kwargs)
            else:
                output = type(intercepted.module).forward(intercepted.module, *args, **kwargs)
            self.frame.finish()
            return output
        finally:
            self.frame = parent

    def _opaque(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A module that is kept in float: the subtree runs as the user wrote it."""
        with without_function_modes():
            return self._unseen(intercepted, args, kwargs)

    def _unseen(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A module's own forward on plain tensors, to some of which it may write."""
        output = intercepted.original(*tree_map(plain, args), **tree_map(plain, kwargs))
        self.provenance.written(None)
        return output

    # Op hooks

    def _leaf(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        row = intercepted.row
        if row is None or self.frame is None or row.role in (Role.PASS, Role.FLOAT):
            if row is not None and intercepted.passes and (not intercepted.module.training or row.name == "identity"):
                return args[0] if args else next(iter(kwargs.values()))
            with without_function_modes():
                output = self._unseen(intercepted, args, kwargs)
                if row is None or row.role is Role.PASS:  # not looked into, or it drops: its outputs are its own
                    name = type(intercepted.module).__name__ if row is None else row.name
                    given = list(tree_leaves((args, kwargs)))
                    for leaf in tree_leaves(output):
                        if type(leaf) is Tensor and not any(leaf is g for g in given):
                            self.provenance.set_tag_of_any(leaf, name)
                return output
        hook = self.frame.leaf(row, intercepted.path)
        if hook is None:
            return self.unrecorded_leaf(intercepted, args, kwargs)
        output = hook.module(self, intercepted, args, kwargs)
        return output if self.log is None else self._logged(hook, output)

    def unrecorded_leaf(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A leaf module where it was never recorded: in float."""
        assert self.frame is not None and intercepted.row is not None
        name = intercepted.row.name
        self.frame.unrecorded(name, intercepted.path)
        with without_function_modes():
            output = self._unseen(intercepted, args, kwargs)
            for leaf in tree_leaves(output):
                if type(leaf) is Tensor:
                    self.provenance.set_tag_of_any(leaf, name)
            return output

    def _leaf_alone(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A leaf called by itself, outside of the model."""
        with without_function_modes():
            hook = intercepted.token.home_hook(intercepted)
            if hook is None:
                return intercepted.original(*args, **kwargs)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and hook.reads:
                    self.provenance.set_tag_of_any(leaf, hook.reads[0].tag)
            return tree_map(plain, hook.module(self, intercepted, args, kwargs))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in QUESTIONS:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or _NO_KWARGS
        if func in DECOMPOSABLE:
            output = self._composed(func, args, kwargs)
            if output is not NOT_RUN:
                return output
        spelling = FUNCTIONS.get(func)
        if spelling is None:
            return self._other(func, args, kwargs)
        row = spelling.row
        if row.role is Role.PASS:
            if views.makes_elements(func, row, args, kwargs):
                return self._other(func, args, kwargs)
            return self._pass(func, row, args, kwargs)
        if row.role is Role.FLOAT or not has_float(args, kwargs):
            return self._other(func, args, kwargs)
        frame = self.frame
        assert frame is not None
        hook = frame.function(row, spelling.bind(args, kwargs) if row.takes_weight else None)
        if hook is None:
            frame.unrecorded(row.name, None)
            return self._other(func, args, kwargs)
        if self.log_hooks:
            hook_log.debug("%s::%s.__torch_function__ start", frame.state.path or "<root>", row.name)
        output = hook.function(self, func, spelling, args, kwargs)
        if self.log_hooks:
            hook_log.debug("%s::%s.__torch_function__ end", frame.state.path or "<root>", row.name)
        return output if self.log is None else self._logged(hook, output)

    def _composed(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """A function that is made of ops of the table; ``NOT_RUN`` for others."""
        frame = self.frame
        assert frame is not None
        hooks, index = frame.hooks, frame.index
        hook = hooks[index] if index < len(hooks) and not self.slow else None
        if hook is not None and (known := hook.products.get(func)) is not None:
            given = known.as_linear(args, kwargs)
            if given is not None and hook.fits(given if len(given) == 3 else (*given, None)):
                frame.index = index + 1
                return hook.function(self, F.linear, FUNCTIONS[F.linear], given, _NO_KWARGS)
        parts = decomposed(func, args, kwargs)
        if parts is None:
            return NOT_RUN
        with self:
            output = parts(*args, **kwargs)
        if hook is not None and frame.hooks is hooks and frame.index == index + 1 and not hook.deep:
            known = Product.of(func, args)
            if known is not None:
                hook.products[func] = known
        return output

    def _logged(self, hook: Hook, output: Any) -> Any:
        if not (isinstance(output, Int8Tensor) and output.deferred_ is not None):  # inside a fusion there is no value
            assert self.log is not None
            self.log(hook.op, output)
        return output

    def computed(self, path: str, name: str, value: Tensor) -> None:
        """Parametrizations are baked at conversion; those that are left make values like any other."""

    def look(self, hook: Callable, module: nn.Module, path: str, args: tuple) -> Any:
        """Call a hook that only looks; it sees float values."""
        with without_function_modes():
            look(hook, module, path, tree_map(shown, args))
