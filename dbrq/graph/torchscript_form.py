"""How a recorded call is written in a graph, so that it reads well and TorchScript takes it.

TorchScript types a call by the schemas of the aten operator that bears the function's name, or by the function's own
annotations. Python's spellings are wider: ints for floats, several tensors for a list of them, numpy's keywords,
methods for casts. ``spelled`` writes a call as a schema has it; ``scriptable`` says whether there is such a way at all.
"""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._torch import OpOverload, boolean_dispatched, find_builtin, schemas_of, script_name, script_overloads
from ..mappings import NUMPY_NAMES
from .nodes import leaves, walk
from .symbols import Traced, untraced

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
_VARIADIC = frozenset({"meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"})
#: Those of them that take no list in Python -> the operator that does.
_LISTED = {name: getattr(torch.ops.aten, name) for name in ("broadcast_tensors", "cartesian_prod", "block_diag")}
#: Functions that give views, which their schemas do not say -> those of which they do.
_SAFE = {"unsafe_chunk": "chunk", "unsafe_split": "split", "unsafe_split_with_sizes": "split_with_sizes"}
_DROPPED = frozenset({"device", "pin_memory", "layout", "requires_grad", "generator", "non_blocking"})
#: Methods that cast.
_CASTS = {
    "bool": torch.bool, "byte": torch.uint8, "char": torch.int8, "short": torch.int16, "int": torch.int32,
    "long": torch.int64, "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
    "double": torch.float64,
    "chalf": torch.complex32, "cfloat": torch.complex64, "cdouble": torch.complex128,
}  # fmt: skip

#: Functions that take sizes, which may be tensors of one integer where Python's numbers are meant -> the first of those
#: arguments.
TAKE_SIZES = {
    **dict.fromkeys(("zeros", "ones", "empty", "full", "rand", "randn", "arange"), 0),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape", "expand", "repeat",
                     "broadcast_to", "as_strided", "pad"), 1),
}  # fmt: skip

_HOLDABLE = (bool, int, float, complex, str, Tensor, slice, np.ndarray, torch.dtype, torch.device, torch.layout,
             torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool)  # fmt: skip

Spelled = tuple[str, Any, list, dict]
"""Kind of node, target, positional arguments, keyword arguments."""


def property_name(getter: Any) -> str:
    """The name of the property whose ``__get__`` this is."""
    return getter.__self__.__name__


def spelled(function: Callable, args: Sequence[Any], kwargs: dict) -> Spelled:
    """How to write ``function(*args, **kwargs)``."""
    given = list(args)
    name = name_of(function)
    options = {
        _renamed(k, name): v
        for k, v in kwargs.items()
        if k not in _DROPPED and not (k in ("out", "dtype") and v is None)
    }
    if name == "__get__":
        return "call_function", getattr, [given[0], property_name(function)], {}
    if function in _OPERATORS:
        return _operator(*_OPERATORS[function], given)
    if function in _INPLACE:
        return "call_method", _INPLACE[function], given, {}
    if name == "nonzero" and (options.pop("as_tuple", False) or given[1:] == [True]):
        return "call_function", torch.ops.aten.nonzero_numpy, given[:1] or [options["input"]], {}
    if is_method(function):
        return _method(_SAFE.get(name, name), given, options)
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if name == "einsum" and (len(given) > 2 or not isinstance(given[1], (list, tuple))):
        given = [given[0], list(given[1:])]
    if name == "einsum" and (order := _only_permutes(given[0])) is not None:
        return "call_method", "permute", [given[1][0], order], {}
    if name in _SAFE:
        function = getattr(torch, _SAFE[name])
    if name in _VARIADIC and isinstance(given[0], Tensor) and (len(given) > 1 or name == "meshgrid"):
        given = [list(given)]
    if name in _LISTED and function is getattr(torch, name):
        return "call_function", _LISTED[name], [list(given)], {}
    if function is torch.tensor and given and isinstance(given[0], (list, tuple)) and _is_empty(given[0]):
        # An empty list is one of tensors to TorchScript.
        return "call_function", torch.zeros, [list(torch.tensor(given[0]).shape)], options
    if function in (torch.tensor, torch.as_tensor) and given and isinstance(given[0], (list, tuple)):
        given = [_of_one_type(given[0]), *given[1:]]
    if name.startswith("avg_pool"):
        given, options = _with_stride(given, options)
    return "call_function", function, *_typed(function, given, options)


def name_of(function: Any) -> str:
    """The name of a function, a method, or an operator without its overload."""
    return getattr(function, "__name__", "").partition(".")[0]


def _renamed(keyword: str, name: str) -> str:
    """A keyword as the function's schemas have it."""
    other = NUMPY_NAMES.get(keyword, keyword)
    if other == keyword or any(a.name == keyword for schema in _schemas(name) for a in schema.arguments):
        return keyword
    return other


def _method(name: str, given: list, options: dict) -> Spelled:
    if not given:
        given = [options.pop("self", None) if "self" in options else options.pop("input")]
    if name in _CASTS and (options or name in ("bool", "bfloat16")):  # TorchScript lacks those, and arguments of others
        return "call_method", "to", [given[0], _CASTS[name]], options
    if name == "type":
        return "call_method", "to", [given[0], dtype_named(given[1] if given[1:] else options["dtype"])], {}
    if name == "norm" and options.get("p") == "fro":
        options["p"] = 2
    if name == "view" and isinstance(dtype := [*given[1:], *options.values()][0], torch.dtype):
        if dtype is given[0].dtype:  # which TorchScript has no word for
            return "call_method", "view_as", [given[0], given[0]], {}
        return "call_method", name, given[:1], {"dtype": dtype}  # the only word by which it is no size
    return "call_method", name, *_conforming(name, given, options)


def dtype_named(wanted: Any) -> torch.dtype:
    """The dtype that ``x.type(wanted)`` means: a dtype, a class of old like ``torch.FloatTensor``, or its name."""
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted.removeprefix("torch."))
    return wanted if isinstance(wanted, torch.dtype) else wanted.dtype


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


def _of_one_type(data: Any) -> Any:
    """Nested lists of numbers, of which TorchScript takes those of one type only."""
    kinds = {type(untraced(number)) for number in leaves(data)}
    if len(kinds) < 2 or not kinds <= {bool, int, float}:
        return data
    one: float = 1.0 if float in kinds else 1
    return walk(lambda number: operator.mul(number, one), data)


def _with_stride(given: list, options: dict) -> tuple[list, dict]:
    """The stride of an average pool is its kernel where it is None, which TorchScript does not take."""
    if len(given) > 2 and given[2] is None:
        given = [*given[:2], given[1], *given[3:]]
    if options.get("stride", 0) is None:
        options = {k: v for k, v in options.items() if k != "stride"}
    return given, options


# Types


def _typed(function: Callable, given: list, options: dict) -> tuple[list, dict]:
    """Arguments of the types that TorchScript's signature has."""
    if not inspect.isfunction(function) or find_builtin(function) is not None:
        return _conforming(name_of(function), given, options)
    names, hints = _annotations(function)
    given = [_as_annotated(v, hints.get(name, "")) for v, name in zip(given, names, strict=False)] + given[len(names) :]
    return given, {k: _as_annotated(v, hints.get(k, "")) for k, v in options.items()}


@functools.lru_cache(maxsize=1024)
def _annotations(function: Callable) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of a function's parameters, and their annotations as text."""
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function)
    except (TypeError, ValueError, NameError):
        return (), {}
    return tuple(parameters), {n: "float" if n == "scale_factor" else str(hints.get(n, "")) for n in parameters}


def _as_annotated(value: Any, hint: str) -> Any:
    if "float" in hint and "int" not in hint:
        return _as_float(value)
    if "Tensor" in hint and isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return torch.tensor(value)  # as lengths of sequences may be given
    return value


def _as_float(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_float(v) for v in value]
    if isinstance(value, Traced):
        return operator.mul(value, 1.0) if type(value.value) is int else value
    return float(value) if type(value) is int else value


@functools.lru_cache(maxsize=1024)
def _schemas(name: str) -> tuple[Any, ...]:
    """The schemas of an aten operator, all overloads but those that write to ``out``."""
    schemas = schemas_of(f"aten::{name}")
    return tuple(s for s in schemas if "out" not in s.overload_name)


def _conforming(name: str, given: list, options: dict) -> tuple[list, dict]:
    """Arguments as the schema that takes them has them; as they are, if one takes them so, or none does."""
    said = {k: v for k, v in options.items() if v is not None}  # None may stand for what a schema has not
    for named in (options, said):
        for ints_fit in (False, True):  # where a float is wanted
            for schema in _schemas(name):
                values = [*given, *named.values()]
                types = _types(schema, len(given), tuple(named))
                if types is not None and all(_fits(v, t, ints_fit) for v, t in zip(values, types, strict=True)):
                    if ints_fit:
                        values = [_converted(v, t) for v, t in zip(values, types, strict=True)]
                    return values[: len(given)], dict(zip(named, values[len(given) :], strict=True))
    return given, options


def _types(schema: Any, count: int, keywords: tuple[str, ...]) -> list[str] | None:
    """What a schema wants of the first arguments and of those with these names; None if it has no such arguments."""
    named = {a.name: a for a in schema.arguments}
    arguments = [a for a in schema.arguments if not a.kwarg_only][:count]
    arguments += [named.get("self" if k == "input" and "self" in named else k) for k in keywords]
    if len(arguments) < count + len(keywords) or None in arguments:
        return None
    return [str(a.type) for a in arguments]


#: Type in a schema -> what Python passes there. Enumerations are ints to TorchScript.
_TAKEN: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "bool": (bool,),
    "int": (int, torch.dtype, torch.layout, torch.memory_format),
    "float": (int, float),
    "number": (int, float, complex),
    "str": (str,),
}


def _fits(value: Any, wanted: str, ints_fit: bool) -> bool:
    """Whether Python takes ``value`` where a schema has the type ``wanted``, and perhaps ints where that is float."""
    if wanted.startswith("Optional["):
        return value is None or _fits(value, wanted[9:-1], ints_fit)
    if wanted.startswith("List["):
        inner = wanted[5:-1]
        if isinstance(value, (list, tuple)):
            return all(_fits(v, inner, ints_fit) for v in value)
        return inner in ("int", "float") and isinstance(value, (int, float)) and _fits(value, inner, ints_fit)
    if wanted == "float" and not ints_fit:
        return isinstance(value, float)
    return isinstance(value, _TAKEN.get(wanted, object))


def _converted(value: Any, wanted: str) -> Any:
    return _as_float(value) if wanted.replace("Optional[", "").replace("List[", "").startswith("float") else value


# What TorchScript has


@functools.lru_cache(maxsize=1024)
def scriptable(function: Callable) -> bool:
    """Whether TorchScript has, or can compile, a function that torch wrote in Python; True for any other."""
    if not inspect.isfunction(function):
        return True
    if is_method(function):  # what aten has under its name may give other results
        return function in _OPERATORS or function in _INPLACE
    if (builtin := find_builtin(function)) is not None:
        return bool(_schemas(builtin.removeprefix("aten::")))
    name = script_name(function)
    if function in boolean_dispatched or script_overloads(name):
        return True
    try:
        torch.jit.frontend.get_jit_def(function, function.__name__)
    except (torch.jit.frontend.FrontendError, OSError, RuntimeError, TypeError):
        return False
    return True


def holdable(leaf: Any) -> bool:
    """Whether a graph can hold a value that a function is given."""
    return leaf is None or leaf is Ellipsis or isinstance(leaf, _HOLDABLE) or hasattr(leaf, "item")


def is_method(function: Callable) -> bool:
    """Whether ``function`` is a method of Tensor."""
    if type(function).__name__ in ("method_descriptor", "wrapper_descriptor"):
        return True
    return getattr(Tensor, getattr(function, "__name__", ""), None) is function
