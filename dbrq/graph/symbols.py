"""Sizes and numbers that the user's code computes from tensors while a graph is recorded.

They are what ``x.size(0)`` or ``x.sum().item()`` give in such a run: instances of ``torch.SymInt`` and its relatives,
which
torch's functions take wherever they take a number. Arithmetic on one is recorded, so it stays free in the graph.
Turning one into a
Python decision (``if n > 3``, ``range(n)``) makes it a constant, and the recorder is told, who asserts it in the graph.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx


class Recorder(Protocol):
    """Who records the arithmetic."""

    def scalar(self, function: Callable, args: tuple) -> Any:
        """Record ``function(*args)`` on numbers and return the traced result."""

    def decide(self, traced: Traced) -> None:
        """The user's code looks at the value of ``traced``: from here on it is a constant."""


class Traced:
    """A number with its value in this run and the node that computes it in any other."""

    value: Any
    fx_node: fx.Node
    recorder: Recorder

    def __init__(self, value: Any, fx_node: fx.Node, recorder: Recorder) -> None:
        self.value, self.fx_node, self.recorder = value, fx_node, recorder

    def decided(self) -> Any:
        """The value, as a constant."""
        self.recorder.decide(self)
        return self.value

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __bool__(self) -> bool:
        if type(self.value) is bool:
            return self.decided()
        return builtins.bool(self.recorder.scalar(operator.ne, (self, 0)))  # all that is decided

    def __hash__(self) -> int:
        return hash(self.decided())

    def __int__(self) -> int:
        return int(self.decided())

    def __index__(self) -> int:
        return operator.index(self.decided())

    def __float__(self) -> float:
        return float(self.decided())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.decided(), dtype)

    def __deepcopy__(self, memo: dict) -> Traced:
        return self

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self.value), (self.decided(),)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return operator.floordiv(self, other), operator.mod(self, other)

    def __pos__(self) -> Any:
        return self


class TracedInt(Traced, torch.SymInt):
    """An int, to ``isinstance`` too."""

    __class__ = int  # type: ignore[assignment]  # mypy has object's property in mind

    def as_integer_ratio(self) -> tuple[int, int]:  # type: ignore[override]  # torch's is of a SymInt
        return self.decided().as_integer_ratio()

    def bit_length(self) -> int:
        return self.decided().bit_length()


class TracedFloat(Traced, torch.SymFloat):
    """A float, to ``isinstance`` too."""

    __class__ = float  # type: ignore[assignment]  # likewise

    def is_integer(self) -> bool:
        return self.decided().is_integer()


class TracedBool(Traced, torch.SymBool):
    """A truth value, to ``isinstance`` too."""

    __class__ = bool  # type: ignore[assignment]  # likewise


_CLASSES = {int: TracedInt, float: TracedFloat, bool: TracedBool}


def traced(value: Any, node: fx.Node, recorder: Recorder) -> Any:
    """``value`` as a traced number; anything that is no int, float or bool as it is."""
    cls = _CLASSES.get(type(value))
    return value if cls is None else cls(value, node, recorder)


def untraced(value: Any) -> Any:
    """The plain number, without a decision."""
    return value.value if isinstance(value, Traced) else value


def _binary(function: Callable, reflected: bool) -> Callable:
    def method(self: Traced, other: Any) -> Any:
        if isinstance(other, Tensor) or not isinstance(other, (int, float, Traced)):
            return NotImplemented
        return self.recorder.scalar(function, (other, self) if reflected else (self, other))

    return method


def _unary(function: Callable) -> Callable:
    return lambda self, *rest: self.recorder.scalar(function, (self, *rest))


def _install() -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "lshift", "rshift"):
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        setattr(Traced, f"__{name}__", _binary(function, False))
        setattr(Traced, f"__r{name}__", _binary(function, True))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Traced, f"__{name}__", _binary(getattr(operator, name), False))
    for name, function in (("neg", operator.neg), ("abs", abs), ("ceil", math.ceil), ("floor", math.floor),
                           ("round", round), ("trunc", math.trunc)):  # fmt: skip
        setattr(Traced, f"__{name}__", _unary(function))


_install()
