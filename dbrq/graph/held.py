"""What a model's Python holds: attributes of modules, and what is in the containers and objects among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..quantization_state import AutoQuantizationState
from ..tensors import version_of

#: Containers of more than so many items are told apart by their items' identity.
_MOST = 1000

#: (path of a module, name of an attribute) -> what tells its value apart from others.
Held = dict[tuple[str, str], Any]


def held(model: nn.Module, path: str = "") -> Held:
    """What the modules of a model hold, so that two of these differ if its code changed anything of it.

    Args:
        path: the model's own, inside of another.
    """
    return {
        (f"{path}.{inner}".strip("."), name): shown(value)
        for inner, module in model.named_modules() if not isinstance(module, AutoQuantizationState)
        for name, value in (*vars(module).items(), *module._buffers.items(), *module._parameters.items())
    }  # fmt: skip


def differing(before: Held, after: Held) -> list[str]:
    """Names of the attributes that differ."""
    return sorted(
        f"{path}.{name}".lstrip(".")
        for path, name in before.keys() | after.keys()
        if before.get((path, name)) != after.get((path, name))
    )


def shown(value: Any, depth: int = 4) -> Any:
    """What tells a value apart: identity, and that of what is inside."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, (bool, int, float, str)):
        return type(value), value
    if not depth or isinstance(value, (nn.Module, type)):
        return id(value)
    if isinstance(value, Mapping):
        parts: Any = value.values()
        keys: tuple = tuple(map(id, value))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        parts, keys = value, ()
    elif hasattr(value, "__dict__") and not callable(value) and not type(value).__module__.startswith("dbrq."):
        parts, keys = vars(value).values(), tuple(vars(value))
    else:
        return id(value)
    inner = map(id, parts) if len(parts) > _MOST else (shown(part, depth - 1) for part in parts)
    # Of what nobody can change, another one that is equal is the same.
    return None if isinstance(value, (tuple, frozenset)) else id(value), type(value), keys, *inner
