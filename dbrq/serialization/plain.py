"""What runs showed and what was decided, as JSON and back: data of known classes only, so that reading runs no code.

A value of JSON stands for itself, a list for a list. Everything else is an object of one key, which says what it is.
Ops, paths and the like, which are one object wherever they are met, are numbered in a table.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.ao.quantization import QConfig

from ..calibration.observers import HistogramObserver
from ..errors import LoadError, QuantizationError
from ..mappings import OpRow, row_named
from ..record.parameters import ParameterRef
from ..record.record import (
    Decision,
    ModuleStep,
    Place,
    Read,
    Record,
    SeenCall,
    SeenOp,
    SeenPath,
    Step,
    TensorInfo,
    TensorSpec,
    Value,
)

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (Decision, ModuleStep, ParameterRef, Place, Read, Record, SeenCall, SeenOp, SeenPath, Step, TensorInfo,
                TensorSpec, Value)
}  # fmt: skip
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size, "slice": lambda items: slice(*items),
    "range": lambda items: range(*items), "complex": lambda items: complex(*items),
    "dict": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}  # fmt: skip
#: Kinds of names in the module ``torch``.
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
#: Where observers that a qconfig names come from.
_OBSERVERS = ("torch.ao.quantization.observer", "torch.ao.quantization.fake_quantize")


class Writer:
    """Values as JSON.

    Attributes:
        objects: the table.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, tuple[int, Any]] = {}

    def write(self, value: Any) -> Any:
        """``value`` as JSON.

        Raises:
            QuantizationError: it is, or holds, what only code could make again.

        >>> Writer().write((1, torch.float32, {2: None}))
        {'tuple': [1, {'torch': 'float32'}, {'dict': [2, None]}]}
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return [self.write(item) for item in value]
        if isinstance(value, _NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, OpRow):
            return {"row": value.name}
        if value is Ellipsis:
            return {"ellipsis": None}
        if type(value) is QConfig:
            return {"QConfig": [self.write_observer(value.activation), self.write_observer(value.weight)]}
        if _CLASSES.get(type(value).__name__) is type(value):
            return {"object": self._number(value)}
        items = _items(value)
        if items is None:
            raise QuantizationError(
                f"{type(value).__module__}.{type(value).__qualname__} cannot be written without pickle",
                expected="numbers, text, dtypes and containers of them", got=repr(value)[:80],
            )  # fmt: skip
        return {type(value).__name__: [self.write(item) for item in items]}

    def _number(self, value: Any) -> int:
        known = self._numbers.get(id(value))
        if known is None:
            number = len(self.objects)
            known = self._numbers[id(value)] = number, value
            self.objects.append(None)
            self.objects[number] = [type(value).__name__, {k: self._field(k, v) for k, v in vars(value).items()}]
        return known[0]

    def _field(self, name: str, value: Any) -> Any:
        if name != "arguments":
            return self.write(value)
        try:  # of no use where they are more than plain values
            return self.write(value)
        except QuantizationError:
            return None

    def write_observer(self, made: Any) -> Any:
        """What a qconfig makes an observer with: a class, and what it is called with."""
        partial = getattr(made, "p", made)
        keywords = getattr(partial, "keywords", {})
        cls = getattr(partial, "func", partial)
        fine = isinstance(cls, type) and not getattr(partial, "args", ()) and not getattr(made, "callable_args", {})
        if not fine or _observer_class(f"{cls.__module__}.{cls.__qualname__}") is not cls:
            raise QuantizationError(
                "a qconfig makes observers in a way that cannot be written without pickle", got=repr(made)[:80],
                expected="observers of torch.ao.quantization or dbrq, with_args", hint="save in the default format",
            )  # fmt: skip
        written = {k: self.write_observer(v) if isinstance(v, type) else self.write(v) for k, v in keywords.items()}
        return {"observer": [f"{cls.__module__}.{cls.__qualname__}", written]}


class Reader:
    """What ``Writer`` wrote."""

    def __init__(self, objects: list[Any]) -> None:
        self._written, self._read = objects, dict[int, Any]()

    def read(self, written: Any) -> Any:
        """The value.

        Raises:
            LoadError: it is not what ``Writer`` writes.
        """
        try:
            return self._value(written)
        except (AttributeError, IndexError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, QuantizationError):
                raise
            raise LoadError(f"the description of the model is damaged: {error}") from error

    def _value(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self._value(item) for item in written]
        if not isinstance(written, dict):
            return written
        ((kind, held),) = written.items()
        if kind == "object":
            return self._object(held)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self._value(item) for item in held])
        if kind == "torch":
            named = getattr(torch, held)
            if not isinstance(named, _NAMED):
                raise LoadError("the description of the model names what is no dtype", got=held)
            return named
        if kind == "QConfig":
            return QConfig(*(self._observer(each) for each in held))
        return _KINDS[kind](held)

    def _object(self, number: int) -> Any:
        if number not in self._read:
            name, fields = self._written[number]
            cls = _CLASSES[name]
            if getattr(cls, "__dataclass_params__", None) is not None and cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                self._read[number] = cls(**{k: self._value(v) for k, v in fields.items()})
            else:
                made: Any = object.__new__(cls)
                self._read[number] = made
                if dataclasses.is_dataclass(cls) and fields.keys() != {f.name for f in dataclasses.fields(cls)}:
                    raise LoadError("the description of the model is of another version", got=f"{name}: {list(fields)}")
                vars(made).update({k: self._value(v) for k, v in fields.items()})
        return self._read[number]

    def _observer(self, written: Any) -> Any:
        name, keywords = written["observer"]
        cls = _observer_class(name)
        if cls is None:
            raise LoadError("a qconfig of the file names what is no observer", got=name)
        read = {k: self._observer(v) if isinstance(v, dict) and "observer" in v else self._value(v)
                for k, v in keywords.items()}  # fmt: skip
        return cls.with_args(**read) if read else cls


#: How else a kind is read.
_KINDS: dict[str, Callable[[Any], Any]] = {
    "float": float, "device": torch.device, "row": row_named, "ellipsis": lambda _: Ellipsis,
}  # fmt: skip


def _items(value: Any) -> list[Any] | None:
    """What a container is made of; None if it is not of a known class."""
    if type(value) in (tuple, frozenset, torch.Size):
        return list(value)
    if type(value) is set:
        return list(value)
    if type(value) is dict:
        return [part for item in value.items() for part in item]
    if type(value) is slice or type(value) is range:
        return [value.start, value.stop, value.step]
    return [value.real, value.imag] if type(value) is complex else None


def _observer_class(name: str) -> Any:
    """The observer of that name, None if it is none of torch's or dbrq's."""
    module, _, last = name.rpartition(".")
    if module == HistogramObserver.__module__ and last == HistogramObserver.__name__:
        return HistogramObserver
    found = getattr(importlib.import_module(module), last, None) if module in _OBSERVERS else None
    return (
        found if isinstance(found, type) and issubclass(found, torch.nn.Module) and found.__module__ == module else None
    )
