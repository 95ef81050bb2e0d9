"""How a recorded call is written in a graph, so that it reads well and TorchScript takes it."""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and", "or", "xor", "lshift", "rshift")
_DUNDERS: dict[str, tuple[Callable, bool]] = {
    f"__{prefix}{name}__": (getattr(operator, f"{name}_" if name in ("and", "or") else name), prefix == "r")
    for name in _NAMES
    for prefix in ("", "r")
}
_DUNDERS |= {f"__{name}__": (getattr(operator, name), False) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg")}
_DUNDERS |= {
    # Not operator.pow, which is printed as **, and that binds closer than a minus before it.
    "__pow__": (torch.pow, False),
    "__rpow__": (torch.pow, True),
    "__rdiv__": (operator.truediv, True),
    "__div__": (operator.truediv, False),
    "__abs__": (abs, False),
    "__invert__": (operator.invert, False),
    "__getitem__": (operator.getitem, False),
    "__bool__": (bool, False),
    "__int__": (int, False),
    "__index__": (int, False),
    "__float__": (float, False),
}
_INPLACE_DUNDERS = {f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul", "pow")} | {
    "__ifloordiv__": "floor_divide_", "__itruediv__": "div_", "__idiv__": "div_", "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_", "__imod__": "remainder_", "__ixor__": "bitwise_xor_",
}  # fmt: skip
# By function too, since some are wrappers that bear another name.
_OPERATORS = {getattr(Tensor, name): spelled for name, spelled in _DUNDERS.items() if hasattr(Tensor, name)}
_INPLACE = {getattr(Tensor, name): method for name, method in _INPLACE_DUNDERS.items() if hasattr(Tensor, name)}
#: Functions that take their tensors one by one, and in TorchScript as a list.
_VARIADIC = frozenset({"meshgrid", "broadcast_tensors", "cartesian_prod", "block_diag", "atleast_1d", "atleast_2d",
                       "atleast_3d"})  # fmt: skip
#: Functions that give views, which their schemas do not say -> those of which they do.
_SAFE = {"unsafe_chunk": "chunk", "unsafe_split": "split", "unsafe_split_with_sizes": "split_with_sizes"}
_DROPPED = frozenset({"device", "pin_memory", "layout", "requires_grad", "generator", "non_blocking"})
_ALIASES = {"axis": "dim", "axes": "dim", "keepdims": "keepdim"}
_TO_DTYPE = {"bool": torch.bool, "bfloat16": torch.bfloat16}

#: Functions that take sizes, which may be tensors of one integer where Python's numbers are meant -> the first of those
#: arguments.
TAKE_SIZES = {
    **dict.fromkeys(("zeros", "ones", "empty", "full", "rand", "randn", "arange"), 0),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape", "expand", "repeat",
                     "broadcast_to", "as_strided", "pad"), 1),
}  # fmt: skip

Spelled = tuple[str, Any, list, dict]
"""Kind of node, target, positional arguments, keyword arguments."""


def spelled(function: Callable, args: Sequence[Any], kwargs: dict) -> Spelled:
    """How to write ``function(*args, **kwargs)``."""
    given = list(args)
    options = {
        _ALIASES.get(k, k): v
        for k, v in kwargs.items()
        if k not in _DROPPED and not (k in ("out", "dtype") and v is None)
    }
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, [given[0], function.__self__.__name__], {}  # type: ignore[attr-defined]
    if function in _OPERATORS:
        return _operator(*_OPERATORS[function], given)
    if function in _INPLACE:
        return "call_method", _INPLACE[function], given, {}
    if is_method(function):
        name = _SAFE.get(name, name)
        if not given:
            given = [options.pop("self", None) if "self" in options else options.pop("input")]
        if name in _TO_DTYPE:
            return "call_method", "to", [given[0], _TO_DTYPE[name]], {}
        if name == "norm" and options.get("p") == "fro":
            options["p"] = 2
        return "call_method", name, given, options
    if name == "einsum" and (len(given) > 2 or not isinstance(given[1], (list, tuple))):
        given = [given[0], list(given[1:])]
    if name == "einsum" and (order := _only_permutes(given[0])) is not None:
        return "call_method", "permute", [given[1][0], order], {}
    if name in _SAFE:
        function = getattr(torch, _SAFE[name])
    if name in _VARIADIC and given and isinstance(given[0], Tensor):
        given = [list(given)]
    if function is torch.tensor and given and isinstance(given[0], (list, tuple)) and _is_empty(given[0]):
        # An empty list is one of tensors to TorchScript.
        return "call_function", torch.zeros, [list(torch.tensor(given[0]).shape)], options
    if name.startswith("avg_pool"):
        given, options = _with_stride(given, options)
    return "call_function", function, *_with_floats(function, given, options)


def _only_permutes(equation: Any) -> list[int] | None:
    """The order of axes that an ``einsum`` of one tensor gives, if that is all it does; None for others."""
    read, _, made = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    plain = made.isalpha() and len(set(made)) == len(made)
    return [read.index(axis) for axis in made] if plain and sorted(read) == sorted(made) else None


def _operator(target: Callable, reflected: bool, given: list) -> Spelled:
    if reflected:
        given = given[::-1]
    if target is operator.getitem and given[1] is Ellipsis:
        given = [given[0], (Ellipsis,)]
    if target is operator.getitem and isinstance(given[0], Tensor) and isinstance(given[1], tuple):
        given = [given[0], _without_ellipsis(given[0].dim(), given[1])]
    return "call_function", target, given, {}


def _without_ellipsis(dims: int, index: tuple) -> tuple:
    """An index with ``...`` written out beside a list or tensor, where TorchScript does not take it."""
    place = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    if place is None or not any(isinstance(item, (list, Tensor)) for item in index):
        return index
    taken = sum(item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1
                for item in index if item is not None and item is not Ellipsis)  # fmt: skip
    return (*index[:place], *[slice(None)] * (dims - taken), *index[place + 1 :])


def _is_empty(data: Sequence[Any]) -> bool:
    """Whether nested lists hold no number."""
    return all(isinstance(item, (list, tuple)) and _is_empty(item) for item in data)


def _with_stride(given: list, options: dict) -> tuple[list, dict]:
    """The stride of an average pool is its kernel where it is None, which TorchScript does not take."""
    if len(given) > 2 and given[2] is None:
        given = [*given[:2], given[1], *given[3:]]
    if options.get("stride", 0) is None:
        options = {k: v for k, v in options.items() if k != "stride"}
    return given, options


def _with_floats(function: Callable, given: list, options: dict) -> tuple[list, dict]:
    """ints where TorchScript's signature has float."""
    names, floats = _signature(function)
    if not floats:
        return given, options
    given = [_as_float(v) if i < len(names) and names[i] in floats else v for i, v in enumerate(given)]
    return given, {k: _as_float(v) if k in floats else v for k, v in options.items()}


def _as_float(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_float(v) for v in value]
    return float(value) if type(value) is int else value


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of a function's parameters, and those that are floats."""
    if inspect.isfunction(function):
        try:
            parameters = inspect.signature(function).parameters
            hints = typing.get_type_hints(function)
        except (TypeError, ValueError, NameError):
            return (), frozenset()
        floats = {n for n in parameters if "float" in str(hints.get(n, "")) and "int" not in str(hints.get(n, ""))}
        floats |= {n for n in parameters if n == "scale_factor"}
        return tuple(parameters), frozenset(floats)
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(function, '__name__', '')}")
    schemas = [s for s in schemas if "out" not in s.overload_name]
    if not schemas:
        return (), frozenset()
    first = schemas[0].arguments
    floats = {a.name for a in first if str(a.type) in ("float", "Optional[float]")}
    return tuple(a.name for a in first), frozenset(floats)


def is_method(function: Callable) -> bool:
    """Whether ``function`` is a method of Tensor."""
    if type(function).__name__ in ("method_descriptor", "wrapper_descriptor"):
        return True
    return getattr(Tensor, getattr(function, "__name__", ""), None) is function
