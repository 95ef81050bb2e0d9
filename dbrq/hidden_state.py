"""Holding a state on a module without the user's code meeting it.

``_auto_quant_state`` lives in the instance's ``__dict__``, so ``children()``, Sequential, ModuleList and ModuleDict do
not see it. What must see it (``apply``, ``.to``, ``parameters``, ``state_dict``, ``repr``) is extended on the instance:
no class is patched. The extensions are partials of functions of this module, which deepcopy and pickle take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .eager.weights import check_weights
from .tensors import version_of

STATE = "_auto_quant_state"


def attach(module: nn.Module, state: nn.Module) -> None:
    """Give ``module`` a hidden child ``state``."""
    module.__dict__[STATE] = state
    extend(module, _EXTENSIONS)
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def extend(module: nn.Module, extensions: Mapping[str, Callable], *arguments: Any) -> None:
    """Put functions before methods of one instance.

    Args:
        module: the instance.
        extensions: name of a method -> ``function(module, previous, *arguments, *args)`` to call in its place, with
            what stood there on the instance, if anything did; ``original`` gives the method.
        arguments: further arguments of all of them.
    """
    for name, function in extensions.items():
        module.__dict__[name] = functools.partial(function, module, module.__dict__.get(name), *arguments)


def state_of(module: nn.Module) -> Any:
    """The module's state, or None."""
    return module.__dict__.get(STATE)


def lowered_of(model: object) -> Any:
    """What runs in place of a converted model's forward; None if that is the user's."""
    state = state_of(model) if isinstance(model, nn.Module) else None
    return None if state is None else state.whole


def original(module: nn.Module, previous: Callable | None, name: str) -> Callable:
    """The method that an extension stands before."""
    return previous if previous is not None else functools.partial(getattr(type(module), name), module)


def map_tensors(module: nn.Module, previous: Callable | None, fn: Callable, recurse: bool) -> nn.Module:
    """``_apply`` as torch calls it: a class's own may take the function alone, as all of torch's did once."""
    mapped = original(module, previous, "_apply")
    return mapped(fn) if recurse else mapped(fn, recurse)


def _named_modules(
    module: nn.Module,
    previous: Callable | None,
    memo: set | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Module]]:
    memo = set() if memo is None else memo
    yield from original(module, previous, "named_modules")(memo, prefix, remove_duplicate)
    yield from state_of(module).named_modules(memo, f"{prefix}.{STATE}" if prefix else STATE, remove_duplicate)


def _apply_to_tensors(module: nn.Module, previous: Callable | None, fn: Callable, recurse: bool = True) -> nn.Module:
    state, changed = state_of(module), False
    if state.whole is not None and recurse:
        state.whole.check_move(fn)  # what was made of the tensors holds what they were, and where
        return module

    def noting(tensor: Tensor) -> Tensor:
        nonlocal changed
        before = version_of(tensor), _address(tensor)
        result = fn(tensor)
        changed = changed or result is not tensor or (version_of(tensor), _address(tensor)) != before
        return result

    map_tensors(module, previous, noting, recurse)
    if recurse:
        state._apply(_keeping_dtypes(noting))
        if changed:  # else what was packed and lowered stays: much code says ``.to(device)`` or ``.float()`` to be sure
            state.refresh()
            if (root := state.token.states.get("")) is not None:
                root.whole = None
    return module


def _address(tensor: Tensor) -> int:
    """Where a tensor lies, as far as it lies in memory."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


def _keeping_dtypes(fn: Callable) -> Callable:
    """Ranges and qparams are float32 whatever the model is: half a range of float16 would be lost for good."""

    def apply(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if moved.dtype is tensor.dtype else tensor.to(moved.device)

    return apply


def _apply(module: nn.Module, previous: Callable | None, fn: Callable) -> nn.Module:
    state_of(module).apply(fn)
    return original(module, previous, "apply")(fn)


def _train(module: nn.Module, previous: Callable | None, mode: bool = True) -> nn.Module:
    state_of(module).train(mode)
    return original(module, previous, "train")(mode)


def _extra_repr(module: nn.Module, previous: Callable | None) -> str:
    """What is hidden: all of it while observers watch, in short once converted (``print(module._auto_quant_state)`` has
    all).
    """
    own, state = original(module, previous, "extra_repr")(), state_of(module)
    hidden = state.in_short() if state.token.phase == "int8" else f"({STATE}): {state!r}"
    lowered = "" if state.whole is None else f"lowered: {state.whole.words}"
    return "\n".join(filter(None, (own, hidden, lowered)))


def mark(module: nn.Module, words: str) -> None:
    """Have a module print ``words`` behind its own settings, as ``Conv2d(3, 8, ..., int8)`` does."""
    extend(module, {"extra_repr": _marked}, words)


def _marked(module: nn.Module, previous: Callable | None, words: str) -> str:
    own = original(module, previous, "extra_repr")()
    return f"{own}, {words}" if own else words


_EXTENSIONS: dict[str, Callable] = {
    "named_modules": _named_modules,
    "_apply": _apply_to_tensors,
    "apply": _apply,
    "train": _train,
    "extra_repr": _extra_repr,
}


def _save(module: nn.Module, state_dict: dict, prefix: str, metadata: dict) -> None:
    state_of(module).state_dict(destination=state_dict, prefix=f"{prefix}{STATE}.")


def _load(
    module: nn.Module,
    state_dict: dict,
    prefix: str,
    metadata: dict,
    strict: bool,
    missing: list,
    unexpected: list,
    errors: list,
) -> None:
    _check(module, state_dict, prefix)
    own = f"{prefix}{STATE}."
    values = {key[len(own) :]: state_dict.pop(key) for key in [k for k in state_dict if k.startswith(own)]}
    state = state_of(module)
    lowered = state.whole
    state.refresh()
    try:
        result = state.load_state_dict(
            state.checked(values), strict=False, assign=metadata.get("assign_to_params_buffers", False)
        )
    except RuntimeError as error:
        errors.append(str(error))
        return
    state.whole = lowered  # which looks at its tensors before it runs
    state.token.warn_of_saturation()
    missing.extend(own + key for key in result.missing_keys)
    unexpected.extend(own + key for key in result.unexpected_keys)


def _check(module: nn.Module, state_dict: dict, prefix: str) -> None:
    """Raise for what cannot be loaded, here and in all modules inside: torch goes from one to the next, and what it
    has loaded stays when a later one fails.
    """
    if state_of(module).token.phase != "int8":
        return
    for path, inner in module.named_modules():
        if path.rpartition(".")[2] == STATE:
            inner.checked(_under(f"{prefix}{path}.", state_dict))
        elif any(name.endswith("_int8") for name in inner._buffers):
            at = f"{prefix}{path}".rstrip(".")
            check_weights(inner, at, _under(f"{at}." if at else "", state_dict))


def _under(prefix: str, state_dict: dict) -> dict:
    return {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
