"""Interception: how dbrq comes between the user's code and torch, for one model and one thread at a time.

Two points: the ``forward`` of each module instance (``InterceptedForward``, an instance attribute, so no class is
patched) and a ``TorchFunctionMode`` that lives as long as one call of the model (``RunCall``). Three kinds of hooks
hang on them:

* op hooks, for leaf modules and functions of the op table: the state of the module that calls them has one per op;
* module I/O hooks: entering and leaving a module that is not a leaf, and what the root takes and returns;
* argument dequant hooks: any other op gets plain float tensors.

All bookkeeping of a run (which op are we at) is in ``RunCall`` and its frames, so many threads can run one model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from . import moves
from .containers import tree_leaves, tree_map
from .decompositions import DECOMPOSABLE, decomposed
from .errors import ConfigurationError, DeviationError
from .guards import not_compiled, without_autocast, without_gradient
from .mappings import FUNCTIONS, READS_NUMBER, OpRow, Role, function_name, mutates, reads_values
from .record import Tag
from .tensors import Int8Tensor, Lazy, plain

if TYPE_CHECKING:
    from .quantization_state import AutoQuantizationState, Hook

hook_log = logging.getLogger("dbrq.hooks")
TAG = "_dbrq_tag"
_NO_KWARGS: dict[str, Any] = {}
_disabled = torch._C.DisableTorchFunction


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
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.strict = False

    def start(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """Run ``intercepted`` as the outermost module of a call."""
        if torch.is_autocast_enabled("cpu"):
            with without_autocast():
                return self.start(intercepted, args, kwargs)
        if _get_current_function_mode() is active.call is not None:
            with _pop_mode_temporarily():  # a model called by another: its ops are not the other's
                return RunCall(self).run(intercepted, args, kwargs)
        return RunCall(self).run(intercepted, args, kwargs)


class InterceptedForward:
    """Stands in for the ``forward`` of one module instance; survives deepcopy and pickle with the module.

    Attributes:
        module: the module.
        path: its path in the model.
        token: shared by the model.
        row, attributes: its op, if it is a leaf of the op table; ``passes`` if in eval that op changes nothing.
        is_torch_leaf: torch's own module that holds no others; its ops are its caller's.
        state: its ``AutoQuantizationState``, if it is not a leaf or is the root.
    """

    def __init__(self, module: nn.Module, path: str, token: ModelToken) -> None:
        self.module, self.path, self.token = module, path, token
        self.previous = module.__dict__.get("forward")
        self.row: OpRow | None = None
        self.attributes: tuple[str, ...] = ()
        self.passes = self.is_torch_leaf = False
        self.state: AutoQuantizationState | None = None

    @not_compiled
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
        index, hooks = frame.index, frame.hooks
        if index < len(hooks) and (hook := hooks[index]).module_path == self.path:
            frame.index = index + 1
        else:
            hook = frame.next(self.row, self.path)
        if kwargs or len(args) != 1:
            return hook.module(call, self, args, kwargs)
        return hook.leaf(call, self, args[0])

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own forward."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @functools.cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of what forward takes by position."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in self.__signature__.parameters.values() if p.kind in positional)

    def tensors_by_name(self, args: tuple, kwargs: dict) -> dict[str, list[Tensor]]:
        """The tensors of a call, argument by argument, however it is spelled."""
        names = self.parameter_names
        given = dict(zip(names, args, strict=False))
        given.update({f"*{i}": value for i, value in enumerate(args[len(names) :])})
        given.update(kwargs)
        return {name: [leaf for leaf in tree_leaves(v) if isinstance(leaf, Tensor)] for name, v in given.items()}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return type(self.module).forward.__doc__

    @property
    def __wrapped__(self) -> Callable:
        return self.previous or type(self.module).forward.__get__(self.module)


class Frame:
    """One call of one module in a run: the hooks of its recorded path, and how far the run has come."""

    __slots__ = ("hooks", "index", "state")

    def __init__(self, state: AutoQuantizationState, hooks: list[Hook]) -> None:
        self.state, self.hooks, self.index = state, hooks, 0

    def next(self, row: OpRow, path: str | None) -> Hook:
        """The hook of the op that runs now; raises if the record has another one here."""
        index = self.index
        if index < len(self.hooks):
            hook = self.hooks[index]
            if hook.row is row and hook.module_path == path:
                self.index = index + 1
                return hook
        raise self.state.deviation(self.hooks, index, row.name if path is None else f"{row.name} ({path})")

    def finish(self) -> None:
        if self.index != len(self.hooks):
            raise self.state.deviation(self.hooks, self.index, "the end of forward")


class RunCall(TorchFunctionMode):
    """One run of a prepared or converted model on one thread."""

    def __init__(self, token: ModelToken) -> None:
        self.token = token
        self.frame: Frame | None = None
        self.counts: dict[int, int] = {}
        self.lines: Counter[str] = Counter()
        self.mutations = 0
        self.quantized_inputs: dict[int, tuple] = {}
        self.input_tags: dict[int, Tag] = {}
        self.log = active.log
        self.log_hooks = hook_log.isEnabledFor(logging.DEBUG)
        self.slow = self.log is not None or self.log_hooks
        self.gradient = False

    # Module I/O hooks

    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        previous, active.call = active.call, self
        # int8 kernels have no gradient: through what is float around them it would be silently wrong.
        enabled = torch.is_grad_enabled()
        gradient = self.gradient = enabled and self.token.phase == "observe"
        try:
            with torch.set_grad_enabled(gradient), self:
                if intercepted.state is None:
                    output = self._leave(self._leaf_alone(intercepted, args, kwargs))
                else:
                    self._tag_inputs(intercepted, args, kwargs)
                    output = self._leave(self.enter(intercepted, args, kwargs))
        finally:
            active.call = previous
        if enabled and not gradient:
            return without_gradient(intercepted.path, output, (*args, *kwargs.values()))
        return output

    def _tag_inputs(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> None:
        assert intercepted.state is not None
        tags = intercepted.state.input_tags()
        for name, tensors in intercepted.tensors_by_name(args, kwargs).items():
            for tensor, tag in zip(tensors, tags.get(name, ()), strict=False):
                self.input_tags[id(tensor)] = tag

    def _leave(self, output: Any) -> Any:
        """What the outermost module returns: plain tensors in the user's own containers."""
        with _disabled():
            return tree_map(_untagged, output)

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

    def _module(self, intercepted: InterceptedForward, state: AutoQuantizationState, args: tuple, kwargs: dict) -> Any:
        count = self.counts.get(id(state), 0)
        self.counts[id(state)] = count + 1
        parent = self.frame
        hooks = state.hooks(count)
        if hooks is None:
            return self._opaque(intercepted, args, kwargs)
        self.frame = Frame(state, hooks)
        try:
            if intercepted.row is not None:
                output = self._leaf(intercepted, args, kwargs)
            else:
                output = intercepted.original(*args, **kwargs)
            self.frame.finish()
            return output
        finally:
            self.frame = parent

    def _opaque(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A module that is kept in float: the subtree runs as the user wrote it."""
        with _disabled():
            return intercepted.original(*tree_map(plain, args), **tree_map(plain, kwargs))

    # Op hooks

    def _leaf(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        row = intercepted.row
        if row is None or self.frame is None or row.role in (Role.PASS, Role.FLOAT):
            if intercepted.passes and (not intercepted.module.training or row.name == "identity"):
                return args[0] if args else next(iter(kwargs.values()))
            with _disabled():
                output = intercepted.original(*tree_map(plain, args), **tree_map(plain, kwargs))
                if row is None:  # not looked into: all its outputs are its own
                    name = type(intercepted.module).__name__
                    given = list(tree_leaves((args, kwargs)))
                    for leaf in tree_leaves(output):
                        if type(leaf) is Tensor and not any(leaf is g for g in given):
                            leaf.__dict__[TAG] = name
                return output
        hook = self.frame.next(row, intercepted.path)
        output = hook.module(self, intercepted, args, kwargs)
        return output if self.log is None else self._logged(hook, output)

    def _leaf_alone(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A leaf called by itself, outside of the model."""
        with _disabled():
            hook = intercepted.token.home_hook(intercepted)
            if hook is None:
                return intercepted.original(*args, **kwargs)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and hook.reads:
                    self.input_tags[id(leaf)] = hook.reads[0].tag
            return tree_map(plain, hook.module(self, intercepted, args, kwargs))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or _NO_KWARGS
        if func in DECOMPOSABLE and (parts := decomposed(func, args, kwargs)) is not None:
            with self:
                return parts(*args, **kwargs)
        spelling = FUNCTIONS.get(func)
        if spelling is None:
            return self._other(func, args, kwargs)
        row = spelling.row
        if row.role is Role.PASS:
            return self._pass(func, row, args, kwargs)
        if row.role is Role.FLOAT or not has_float(args, kwargs):
            return self._other(func, args, kwargs)
        hook = self.frame.next(row, None)
        if self.log_hooks:
            hook_log.debug("%s::%s.__torch_function__ start", self.frame.state.path or "<root>", row.name)
        output = hook.function(self, func, spelling, args, kwargs)
        if self.log_hooks:
            hook_log.debug("%s::%s.__torch_function__ end", self.frame.state.path or "<root>", row.name)
        return output if self.log is None else self._logged(hook, output)

    def _logged(self, hook: Hook, output: Any) -> Any:
        if not (isinstance(output, Int8Tensor) and output.deferred is not None):  # inside a fusion there is no value
            self.log(hook.op, output)
        return output

    def _pass(self, func: Callable, row: OpRow, args: tuple, kwargs: dict) -> Any:
        subject = args[0] if args else kwargs.get("input")
        if isinstance(subject, Lazy):
            moved = moves.move(func, row, subject, args, kwargs)
            if moved is not None:
                return moved
        elif type(subject) is Tensor and TAG in subject.__dict__:
            output = func(*args, **kwargs)
            tag = subject.__dict__[TAG]
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if type(leaf) is Tensor:
                    leaf.__dict__[TAG] = tag
            return output
        elif id(subject) in self.input_tags:
            output = func(*args, **kwargs)
            for leaf in tree_leaves(output):
                if type(leaf) is Tensor and leaf is not subject:
                    leaf.__dict__[TAG] = self.input_tags[id(subject)]
            return output
        return self._other(func, args, kwargs)

    # Argument dequant hooks

    def _other(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if not reads_values(func):
            return func(*args, **kwargs)
        if func in READS_NUMBER and self.token.phase == "observe":
            number = func(*args, **kwargs)
            self.token.record.read(self.lines, number)  # type: ignore[attr-defined]
            return number
        if mutates(func) or "out" in kwargs:
            output = self.run_float(func, args, kwargs, mutates(func))
            written = kwargs.get("out", args[0] if args else None)
            if type(written) is Tensor:
                written.__dict__[TAG] = function_name(func)
                written.__dict__.pop(INT8, None)
            return output
        given = args
        if any(isinstance(a, (Lazy, list, tuple)) for a in args):
            args = tree_map(plain, args)
        if kwargs:
            kwargs = tree_map(plain, kwargs)
        output = func(*args, **kwargs)
        if type(output) is Tensor:
            self._tag_new(func, output, given)
        elif isinstance(output, (tuple, list)):
            for leaf in output:
                if type(leaf) is Tensor:
                    self._tag_new(func, leaf, given)
        return output

    def _tag_new(self, func: Callable, output: Tensor, given: tuple) -> None:
        """Say who made a value; some functions return what they were given."""
        if output.is_floating_point() and TAG not in output.__dict__ and not any(output is a for a in given):
            output.__dict__[TAG] = function_name(func)

    def run_float(self, func: Callable, args: tuple, kwargs: dict, inplace: bool) -> Any:
        """``func`` on plain tensors; an int8 value that it writes to takes the new value."""
        target = kwargs.get("out") if "out" in kwargs else args[0] if inplace and args else None
        if target is not None:
            self.mutations += 1
        if not isinstance(target, Int8Tensor):
            return func(*tree_map(plain, args), **tree_map(plain, kwargs))
        value = target.float_value().clone()
        args, kwargs = tree_map(lambda leaf: value if leaf is target else plain(leaf), (args, dict(kwargs)))
        func(*args, **kwargs)
        target.become(value)
        return target

    def look(self, hook: Callable, module: nn.Module, path: str, args: tuple) -> Any:
        """Call a hook that the record does not know; it sees float values, and its ops are none of the record's."""
        with _disabled():
            args = tree_map(_shown, args) if self.token.phase == "int8" else args
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            before = [_version(tensor) for tensor in given]
            result = hook(module, *args)
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if before == [_version(tensor) for tensor in given] and all(any(m is g for g in given) for m in made):
                return None
        raise ConfigurationError(
            "a hook that was registered after prepare changes values", path=path,
            expected="a hook that only looks", got=getattr(hook, "__qualname__", type(hook).__name__),
            hint="register it on the float model, before prepare, so that ranges are those of the changed values",
        )  # fmt: skip

    def tag_of(self, value: Tensor) -> Tag:
        """Who made ``value``, a plain tensor."""
        tag = value.__dict__.get(TAG)
        return self.input_tags.get(id(value)) if tag is None else tag


def _shown(leaf: Any) -> Any:
    """A value for the user to keep: plain, without what runs write on it, and no reader of a fusion under way."""
    if isinstance(leaf, Lazy):
        fused = getattr(leaf, "deferred", None)
        leaf = leaf.float_value() if fused is None else fused.value(leaf.stage)  # type: ignore[attr-defined]
    return leaf.detach() if type(leaf) is Tensor else leaf


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _untagged(leaf: Any) -> Any:
    if isinstance(leaf, Lazy):
        leaf = leaf.float_value()
    if type(leaf) is Tensor:
        leaf.__dict__.pop(TAG, None)
        leaf.__dict__.pop(INT8, None)
    return leaf


#: Attribute of a float tensor that caches its quantized elements.
INT8 = "_dbrq_int8"


def has_float(args: tuple, kwargs: dict) -> bool:
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            if arg.dtype.is_floating_point:
                return True
        elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor) and arg[0].dtype.is_floating_point:
            return True
    return False


def unexpected_module_call(path: str, recorded: int) -> DeviationError:
    return DeviationError(
        "a module was called more often than in the watching run",
        path=path,
        expected=f"at most {recorded} call(s) in one run",
        got=f"call number {recorded + 1}",
        hint="pass example_inputs that take this path to prepare",
    )
