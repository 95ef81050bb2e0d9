"""The copies that dbrq makes of a model, and what of torch's machinery around its modules does not come along.

* torch.compile: the wrappers are taken off, of children too.
* Tensors computed from parameters and kept as attributes, as ``weight_norm`` and pruning of the old style do: a copy
  has their values.
* Parametrizations (``torch.nn.utils.parametrize``, and hooks of the old style): a prepared model keeps and trains
  them. The watching run and conversion see the tensor that they compute as a parameter (``baked``).
* Hooks. Those there when the model is prepared are part of it: their ops are recorded, and quantized. Hooks added
  later look at float values, and may not change them: ranges were found, or will be, without them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._torch import COMPILED, PRUNED, global_forward_pre_hooks, without_function_modes
from ..auto_trace import active
from ..errors import ERRORS_OF_CODE, ConfigurationError
from ..hidden_state import extend, original


def copied(model: nn.Module, shared: Iterable[Any] = ()) -> nn.Module:
    """A deep copy; ``shared`` objects are in both.

    Raises:
        ConfigurationError: the model cannot be copied.
    """
    memo: dict[int, Any] = {id(each): each for each in shared}
    # deepcopy refuses tensors that have a history; those in attributes are computed anew in each run.
    for module in model.modules():
        for held in module.__dict__.values():
            for value in held if isinstance(held, (list, tuple)) else (held,):  # RNNs keep lists of their weights
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    memo[id(value)] = value.detach().clone()
    try:
        with torch.inference_mode(False):  # else the copy could never train
            return copy.deepcopy(model, memo)
    except (*ERRORS_OF_CODE, copy.Error, pickle.PickleError) as error:
        raise ConfigurationError(
            f"the model cannot be deep-copied: {error}",
            expected="a module that copy.deepcopy takes",
            got=type(model).__name__,
            hint="remove what cannot be copied (locks, generators, open files) from its attributes, or pass "
            "inplace=True where you prepare it",
        ) from error


# torch.compile


def uncompiled(model: Any) -> Any:
    """The module inside ``torch.compile(module)``, or what was given: dbrq watches eager code."""
    while _is_wrapper(model):
        model = model._modules[COMPILED]
    return model


def uncompile_children(model: nn.Module) -> nn.Module:
    """Put the modules themselves in place of children that are ``torch.compile(module)``."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if _is_wrapper(child):
                module._modules[name] = uncompiled(child)
    return model


def _is_wrapper(module: Any) -> bool:
    # By name, since importing the class imports the compiler.
    return isinstance(module, nn.Module) and type(module).__name__ == "OptimizedModule" and COMPILED in module._modules


# Parametrizations

#: Hooks that set a tensor before each forward -> where they keep its name, and what they add to it for their own.
_OLD_STYLE: dict[type, tuple[str, tuple[str, ...]]] = {
    WeightNorm: ("name", ("g", "v")),
    SpectralNorm: ("name", ("orig", "u", "v")),
    prune.BasePruningMethod: (PRUNED, ("orig", "mask")),
}


def bake(model: nn.Module) -> nn.Module:
    """Put the present value of each parametrized tensor in place of what computes it. Call it in eval mode."""
    with torch.inference_mode(False), torch.no_grad(), without_function_modes():
        for module in list(model.modules()):
            if parametrize.is_parametrized(module):
                _bake_new_style(module)
            for key, hook in list(module._forward_pre_hooks.items()):
                if (kind := _old_style(hook)) is not None:
                    _bake_old_style(module, key, _inner(hook), *_OLD_STYLE[kind])
    return model


def _bake_new_style(module: nn.Module) -> None:
    computed = module.parametrizations
    assert isinstance(computed, nn.ModuleDict)
    values = {name: getattr(module, name).detach().clone() for name in computed}
    parameters = {name for name, how in computed.items() if any(True for _ in how.parameters(False))}
    # Only the instance changes class: copies share the class that has the properties.
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module._modules["parametrizations"]
    _drop_state_dict_hooks(module)
    for name, value in values.items():
        if name in parameters:
            setattr(module, name, nn.Parameter(value, requires_grad=value.is_floating_point()))
        else:
            module.register_buffer(name, value)


def _bake_old_style(module: nn.Module, key: int, hook: Any, attribute: str, suffixes: tuple[str, ...]) -> None:
    name = getattr(hook, attribute)
    hook(module, ())
    value = module.__dict__.pop(name).detach().clone()
    del module._forward_pre_hooks[key]
    for suffix in suffixes:
        module._parameters.pop(f"{name}_{suffix}", None)
        module._buffers.pop(f"{name}_{suffix}", None)
    _drop_state_dict_hooks(module)
    setattr(module, name, nn.Parameter(value))


def _drop_state_dict_hooks(module: nn.Module) -> None:
    """Those that torch's parametrizations registered; some cannot be pickled."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for number, held in list(hooks.items()):
            if getattr(getattr(held, "hook", held), "__module__", "").startswith("torch.nn.utils."):
                del hooks[number]


def _old_style(hook: Any) -> type | None:
    return next((kind for kind in _OLD_STYLE if isinstance(_inner(hook), kind)), None)


def _inner(hook: Any) -> Any:
    return hook.args[0] if isinstance(hook, functools.partial) and hook.func is _plain_hook else hook


def run_parametrizations_plainly(model: nn.Module, token: Any) -> list[str]:
    """Keep what computes parametrized tensors out of the record's sight.

    Returns:
        Paths of the modules that do so, which are no part of forward.
    """
    paths = []
    for path, module in list(model.named_modules()):
        if parametrize.is_parametrized(module):
            paths.append(f"{path}.parametrizations".lstrip("."))
            for name, how in module.parametrizations.items():
                how.__dict__["forward"] = functools.partial(_forward_plainly, how, token, path, name)
        for key, hook in module._forward_pre_hooks.items():
            if _old_style(hook) is not None:
                module._forward_pre_hooks[key] = functools.partial(_plain_hook, hook, token, path)
    return paths


def _forward_plainly(module: nn.Module, token: Any, path: str, name: str, *args: Any, **kwargs: Any) -> Any:

    with without_function_modes():
        value = type(module).forward(module, *args, **kwargs)
        if active.call is not None and active.call.token is token:
            active.call.computed(path, name, value)
        return value


# Hooks


def as_forward_sees(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments that a call's pre-hooks leave for ``forward``."""
    if not (model._forward_pre_hooks or global_forward_pre_hooks):
        return args, kwargs
    seen: list[tuple[tuple, dict]] = []

    def capture(*a: Any, **k: Any) -> None:
        seen.append((a, k))
        raise _Seen

    before, hooks = model.__dict__.get("forward"), model._forward_hooks
    model.__dict__["forward"], model._forward_hooks = capture, OrderedDict()
    try:
        with contextlib.suppress(_Seen):
            model(*args, **kwargs)
    finally:
        model._forward_hooks = hooks
        model.__dict__.pop("forward")
        if before is not None:
            model.__dict__["forward"] = before
    return seen[0]


class _Seen(Exception):
    pass


def run_later_hooks_plainly(model: nn.Module, token: Any) -> None:
    """Hooks that are registered from now on are no part of the record. ``token`` says whose runs they belong to."""
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.jit.ScriptModule):
            extend(module, _REGISTERING, token, path)


def _register(
    name: str, module: nn.Module, previous: Callable | None, token: Any, path: str, hook: Callable, **options: Any
) -> Any:
    return original(module, previous, name)(functools.partial(_plain_hook, hook, token, path), **options)


_REGISTERING: dict[str, Callable] = {
    name: functools.partial(_register, name) for name in ("register_forward_hook", "register_forward_pre_hook")
}


def _plain_hook(hook: Callable, token: Any, path: str, module: nn.Module, *args: Any) -> Any:

    call = active.call
    if call is None or call.token is not token:  # the root's own hooks, which are outside of the run
        return hook(module, *args)
    return call.look(hook, module, path, args)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
