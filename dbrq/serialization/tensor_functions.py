"""Functions that compute with tensors and numbers and do nothing else: what graphs in files may call."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..lowering.graph_data import GraphData, Ref, function_named

_BUILTINS = frozenset({
    "abs", "bool", "complex", "divmod", "float", "int", "len", "list", "max", "min", "pow", "range", "round", "slice",
    "sum", "tuple",
})  # fmt: skip
_FACTORIES = frozenset(f"torch.{name}" for name in (
    "arange", "as_tensor", "bartlett_window", "blackman_window", "complex", "empty", "empty_like", "empty_strided",
    "eye", "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range",
    "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
))  # fmt: skip
#: Ours and torch's own that no user's code overrides.
_CHECKS = frozenset({
    "dbrq.graph.signature.check_absent", "dbrq.graph.signature.check_input", "dbrq.graph.signature.check_same",
    "torch._assert", "torch._pack_padded_sequence", "torch._pad_packed_sequence",
    "torch.jit._script._unwrap_optional",
})  # fmt: skip
#: Operators of namespaces that are no torch library's may do anything.
_NAMESPACES = frozenset(
    {"aten", "dbrq", "mkldnn", "onednn", "prims", "quantized", "quantized_decomposed", "torchvision"}
)
_ON_FILES = frozenset({"from_file", "load", "save"})
#: Of ``operator``: what gives a function, or calls one.
_CALLS = frozenset({"attrgetter", "call", "itemgetter", "methodcaller"})
_METHODS_OF_DICTS = frozenset({"get", "items", "keys", "values"})
_CONSTANTS = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, slice,
    type(Ellipsis), range, Ref,
)  # fmt: skip


@functools.cache
def _overridable() -> frozenset[Callable]:
    """What subclasses of tensors may give another meaning: functions of tensors."""
    return frozenset(
        function for functions in torch.overrides.get_overridable_functions().values() for function in functions
    )


def is_tensor_function(name: str, function: Any) -> bool:
    """Whether a function of this qualified name only computes."""
    top, *rest = name.split(".")
    if name.startswith("torch.ops."):
        return rest[1] in _NAMESPACES and rest[2] not in _ON_FILES
    if name in _BUILTINS or name in _FACTORIES or name in _CHECKS:
        return True
    if top in ("operator", "math"):
        return (
            len(rest) == 1
            and rest[0].strip("_") not in _CALLS
            and hasattr(operator if top[0] == "o" else math, rest[0])
        )
    functional = (
        name.startswith("torch.nn.functional.") and getattr(function, "__module__", "") == "torch.nn.functional"
    )
    return top == "torch" and callable(function) and (functional or function in _overridable())


def problem_of(graph: GraphData, trusted: Callable[[str], bool]) -> str:
    """What a graph of a file does that graphs of tensor functions do not; empty if nothing.

    fx writes names of methods, attributes and keywords into Python code as they are.

    Args:
        trusted: whether the caller allowed the function of a name.
    """
    for op, _, target, args, kwargs, _ in graph:
        other = _object_in([args, kwargs])
        if other is not None:
            return f"holds an object of class {type(other).__name__}"
        if not all(isinstance(key, str) and key.isidentifier() for key in kwargs):
            return f"names arguments {list(kwargs)}"
        if op == "call_function" and not _may_be_called(target[0], args, trusted):
            return f"calls {target[0]}"
        if op == "call_method" and not _is_method(target):
            return f"calls a method {target}"
        if op not in ("call_function", "call_method") and not _is_path(target):
            return f"names {target!r}"
    return ""


def _object_in(value: Any) -> Any:
    """What is no constant among arguments, keys of dicts included: fx writes them into Python code, too."""
    if type(value) in (list, tuple, torch.Size):
        return next((found for item in value if (found := _object_in(item)) is not None), None)
    if type(value) is dict:
        return _object_in([*value.keys(), *value.values()])
    if type(value) is slice:
        return _object_in([value.start, value.stop, value.step])
    return None if type(value) in _CONSTANTS else value


def copied(value: Any) -> Any:
    """The lists, tuples and dicts of a graph, made anew."""
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return {key: copied(item) for key, item in value.items()} if type(value) is dict else value


def _may_be_called(name: str, args: Sequence[Any], trusted: Callable[[str], bool]) -> bool:
    if name == "getattr":
        return len(args) == 2 and isinstance(args[1], str) and _is_method(args[1])
    return trusted(name) or is_tensor_function(name, None if name.startswith("torch.ops.") else function_named(name))


def _is_method(name: Any) -> bool:
    """Whether a public attribute of tensors, or a method of dicts, has that name."""
    known = isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    return known and (hasattr(torch.Tensor, name) or name in _METHODS_OF_DICTS)


def _is_path(name: Any) -> bool:
    """Whether a name leads to a parameter, buffer or module."""
    parts = name.split(".") if isinstance(name, str) else [""]
    return all((part.isidentifier() and not part.startswith("__")) or part.isdigit() for part in parts)
