"""What inputs are beside tensors and numbers: the containers they come in, and values that code was recorded for.

The graph asserts both, in nodes of their own. A model that runs from Python compares them by the placeholder's
``meta["structure"]`` instead, and gives its graph the containers as the example had them:

    None                                        a tensor, or what the graph asserts itself
    ("items", [structure, ...])                 a list or tuple
    ("keys", in_order, [(key, structure), ...]) a mapping
    ("value", words, or_none)                   a value that ``words_of`` puts in these words
"""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..errors import KernelInputError
from .symbols import Traced

#: ``meta`` of the nodes that assert a structure: "order" where they look at the order of keys, else "structure".
ASSERTS = "asserts"
_BY_REPR = (bool, int, float, complex, str, bytes, range, type(None), type(...), torch.dtype, torch.device,
            torch.layout, torch.memory_format)  # fmt: skip
_HINT = "call it as in the example, or lower the model with an example of these inputs"


def check_same(x: Any, name: str, words: str, or_none: bool) -> None:
    """Raises unless an input has the value that the graph was made for."""
    if x is None and or_none:
        return
    got = words_of(x)
    if got != words:
        raise KernelInputError(
            f"dbrq: input {name} has another value than in the graph's example", expected=words, got=got, hint=_HINT
        )


def words_of(value: Any, opaque: list[Any] | None = None, depth: int = 6) -> str:
    """A value in words that are the same in each process, and others for each value that is not equal.

    Args:
        opaque: takes what is told apart by its class only.
    """
    kind = _name(type(value))

    def inside(part: Any) -> str:
        return words_of(part, opaque, depth - 1)

    if isinstance(value, enum.Enum):
        return f"{kind}({inside(value.value)})"
    if isinstance(value, np.generic):
        return f"{kind}({value.item()!r})"
    if isinstance(value, _BY_REPR):
        return repr(value) if type(value).__module__ == "builtins" else f"{kind}({value!r})"
    if depth and not isinstance(value, (Tensor, nn.Module)):
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return f"{kind}({inside(value.tolist())})"
            return f"{kind}({value.dtype}, {value.shape}, {hashlib.sha1(value.tobytes()).hexdigest()})"
        if isinstance(value, slice):
            return f"slice({inside(value.start)}, {inside(value.stop)}, {inside(value.step)})"
        if isinstance(value, (list, tuple)):
            return f"{kind}({', '.join(map(inside, value))})"
        if isinstance(value, (set, frozenset)):
            return f"{kind}({', '.join(sorted(map(inside, value)))})"
        if isinstance(value, Mapping):
            return f"{kind}({', '.join(f'{inside(k)}: {inside(v)}' for k, v in value.items())})"
        if isinstance(value, functools.partial):
            return f"{kind}({inside(value.func)}, {inside(value.args)}, {inside(value.keywords)})"
        if isinstance(value, types.MethodType):
            return f"{inside(value.__self__)}.{value.__name__}"
        if _has_a_name(value):
            return _name(value)
        if type(value).__flags__ & (1 << 9) and hasattr(value, "__dict__") and not callable(value):  # a class of Python
            return f"{kind}({', '.join(f'{k}={inside(v)}' for k, v in vars(value).items())})"
    if opaque is not None:
        opaque.append(value)
    return kind


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}".lstrip(".").removeprefix("builtins.")


def _has_a_name(value: Any) -> bool:
    """Whether a class or function is the one that its module has under its name."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (type, types.ModuleType, type(None)))
    if not isinstance(value, (type, types.FunctionType)):
        return False
    try:
        return operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value
    except (AttributeError, KeyError):
        return False


def fitted(value: Any, structure: Any, name: str) -> Any:
    """An input in the containers of the example, as lists, tuples and dicts; None for what is compared here.

    Raises:
        KernelInputError: it is of another structure, or has another value where that matters.
    """
    if structure is None:
        if isinstance(value, (list, tuple, Mapping)):
            raise _other(name, "no container", f"an object of class {type(value).__name__}")
        return value
    if structure[0] == "value":
        check_same(value, name, *structure[1:])
        return None
    if structure[0] == "items":
        parts = structure[1]
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            got = f"{len(value)}" if isinstance(value, (list, tuple)) else f"an object of class {type(value).__name__}"
            raise _other(name, f"a list or tuple of {len(parts)}", got)
        items = [fitted(item, part, f"{name}[{i}]") for i, (item, part) in enumerate(zip(value, parts, strict=True))]
        return items if isinstance(value, list) else tuple(items)
    in_order, pairs = structure[1:]
    keys = [key for key, _ in pairs]
    if not isinstance(value, Mapping):
        raise _other(name, f"a mapping of {keys}", f"an object of class {type(value).__name__}")
    if len(value) != len(keys) or any(key not in value for key in keys):
        raise _other(name, f"the keys {keys}", f"{list(value)}")
    if in_order and list(value) != keys:
        raise _other(name, f"the keys {keys} in this order, on which the result depends", f"{list(value)}")
    return {key: fitted(value[key], part, f"{name}[{key!r}]") for key, part in pairs}


def _other(name: str, expected: str, got: str) -> KernelInputError:
    return KernelInputError(
        f"dbrq: input {name} has another structure than in the graph's example", expected=expected, got=got, hint=_HINT
    )


def without_asserts(graph: fx.Graph, kinds: tuple[str, ...] = ("structure", "order")) -> None:
    """Erase the nodes that assert structures of these kinds."""
    for node in reversed(graph.nodes):
        if node.meta.get(ASSERTS) in kinds and not node.users:
            graph.erase_node(node)


def free_of_order(graph: fx.Graph) -> None:
    """Let mappings come with their keys in any order."""
    without_asserts(graph, ("order",))
    for node in graph.find_nodes(op="placeholder"):
        if "structure" in node.meta:
            node.meta["structure"] = _without_order(node.meta["structure"])


def _without_order(structure: Any) -> Any:
    if structure is None or structure[0] == "value":
        return structure
    if structure[0] == "items":
        return "items", list(map(_without_order, structure[1]))
    return "keys", False, [(key, _without_order(part)) for key, part in structure[2]]


def in_another_order(tree: Any) -> Any:
    """Arguments with the keys of all plain dicts the other way round; the same object if there are none of several."""
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        items = [in_another_order(item) for item in tree]
        return tree if all(new is old for new, old in zip(items, tree, strict=True)) else type(tree)(items)
    if type(tree) is dict:
        if len(tree) < 2 and all(in_another_order(v) is v for v in tree.values()):
            return tree
        return {key: in_another_order(tree[key]) for key in reversed(tree)}
    return tree


def ordered(structure: Any) -> bool:
    """Whether a structure asks for an order of keys."""
    if structure is None or structure[0] == "value":
        return False
    if structure[0] == "items":
        return any(map(ordered, structure[1]))
    return structure[1] or any(ordered(part) for _, part in structure[2])


def contents(value: Any) -> Any:
    """What is in an argument's containers, and values as they are, for as long as the run goes on: equal to what this
    gives later unless forward changed them.
    """
    if isinstance(value, Mapping):
        return {key: contents(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(contents, value))
    if isinstance(value, (Tensor, Traced)) or value is None or type(value) in (bool, int, float, str):
        return _Same(value)
    return words_of(value)


class _Same:
    """An object, equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]  # it is compared only
