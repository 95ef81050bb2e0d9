"""Objects that hold tensors, taken apart and put together: how graphs take and return caches, batches and the like.

A graph knows tensors, numbers and plain containers. An object that a model is given (a key-value cache) is a tree of
attributes: its tensors and integers go into the graph, and everything else about it, its classes, flags, strings and
who holds whom, is its *shape*, for which a graph is recorded. What forward does to objects shows in the attributes
that are others afterwards; these come out of the graph, and are set in the caller's own objects. No class is known by
name.

While a graph is recorded, ``Within`` is the model's forward: it puts the objects together, calls the user's code and
takes apart what comes out. When the lowered graph runs, ``Boundary`` does the same the other way round.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..auto_trace import active
from ..errors import RewriteError
from .symbols import Traced

_TENSOR, _NUMBER = ("tensor",), ("number",)
#: What is compared by value.
_CONSTANTS = (str, bytes, range, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
              complex, enum.Enum)  # fmt: skip
#: What is what it is, as far as code can tell.
_FIXED = (nn.Module, type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.MethodType)
_OPAQUE = (*_FIXED, np.ndarray, np.generic)
_HEAP_TYPE = 1 << 9


class _Itself:
    """Stands for an object that cannot be taken apart, and is equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_object(value: Any) -> bool:
    """Whether a value is an instance of a class of Python that holds what it is in attributes."""
    if isinstance(value, (Tensor, Traced, bool, int, float, *_CONSTANTS, *_OPAQUE)):
        return False
    return bool(type(value).__flags__ & _HEAP_TYPE) and hasattr(value, "__dict__") and not callable(value)


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(value.__dict__)
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


class Apart:
    """Values taken apart in one walk: shapes, and leaves in the order in which they were met.

    Args:
        objects: what is known before, by number; shapes refer to it.
        given: likewise tensors.
        fixed: whether truth values and fractions belong to the shape; in what comes out they are leaves.

    Attributes:
        objects: lists, dicts and objects met, by number.
        strange: what cannot be taken apart, and may change where nobody sees it.
    """

    def __init__(self, objects: Iterable[Any] = (), given: Iterable[Any] = (), fixed: bool = True) -> None:
        self.objects = list(objects)
        self.leaves: list[Any] = []
        self.strange: list[Any] = []
        self._numbers = {id(each): number for number, each in enumerate(self.objects)}
        self._given = {id(each): number for number, each in enumerate(given) if isinstance(each, Tensor)}
        self._met: dict[int, int] = {}
        self._leaf_types = (int,) if fixed else (int, float, bool)

    def shape(self, value: Any) -> tuple:
        """What of a value is no leaf: hashable, and equal for values for which code does the same."""
        if isinstance(value, Tensor):
            key = id(value)
            if key in self._given:
                return "given", self._given[key]
            if key in self._met:
                return "again", self._met[key]
            self._met[key] = len(self.leaves)
            self.leaves.append(value)
            return _TENSOR
        cls = type(value)
        if cls in self._leaf_types or isinstance(value, Traced):
            self.leaves.append(value)
            return _NUMBER
        if cls is bool or cls is float or isinstance(value, _CONSTANTS):
            return "is", cls.__name__, value  # True is 1, and 1 is 1.0
        if (number := self._numbers.get(id(value))) is not None:
            return "object", number
        if isinstance(value, tuple):
            return "tuple", cls, tuple(map(self.shape, value))
        if cls is slice:
            return "slice", self.shape((value.start, value.stop, value.step))
        if not isinstance(value, (list, dict)) and not is_object(value):
            if not isinstance(value, _FIXED):
                self.strange.append(value)
            return "itself", _Itself(value)
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return self.content(value)

    def content(self, value: Any) -> tuple:
        """The shape of what is in a list, dict or object."""
        items: tuple = ()
        if isinstance(value, list):
            items = tuple(map(self.shape, list.__iter__(value)))
        elif isinstance(value, dict):
            items = tuple((key, self.shape(item)) for key, item in _items(value))
        if not hasattr(value, "__dict__"):
            return "new", type(value), items
        return "new", type(value), items, tuple((name, self.shape(v)) for name, v in _attributes(value).items())


def _items(value: dict) -> Iterable[tuple[Any, Any]]:
    return OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)


class Together:
    """Puts values together of shapes and leaves, in the order in which ``Apart`` took them apart.

    Args:
        leaves: of the values.
        objects, given: what is known before; new objects are added.
    """

    def __init__(self, leaves: Iterable[Any], objects: Iterable[Any] = (), given: Sequence[Any] = ()) -> None:
        self.objects = list(objects)
        self._given, self._taken, self._leaves = given, list[Any](), iter(leaves)

    def value(self, shape: tuple) -> Any:
        kind = shape[0]
        if kind == "tensor" or kind == "number":
            self._taken.append(next(self._leaves))
            return self._taken[-1]
        if kind == "is":
            return shape[2]
        if kind == "new":
            made = shape[1].__new__(shape[1])
            self.objects.append(made)
            _fill(made, *self.content(shape))
            return made
        if kind == "tuple":
            items = [self.value(item) for item in shape[2]]
            return shape[1](*items) if hasattr(shape[1], "_fields") else shape[1](items)
        if kind == "slice":
            return slice(*self.value(shape[1]))
        if kind == "itself":
            return shape[1].value
        return {"object": self.objects, "given": self._given, "again": self._taken}[kind][shape[1]]

    def content(self, shape: tuple) -> tuple[list, dict[str, Any] | None]:
        """The items of a list or dict, and the attributes of an object; None if it has none."""
        if issubclass(shape[1], dict):
            items = [(key, self.value(item)) for key, item in shape[2]]
        else:
            items = [self.value(item) for item in shape[2]]
        return items, {name: self.value(part) for name, part in shape[3]} if len(shape) == 4 else None


def _fill(made: Any, items: list, attributes: dict[str, Any] | None) -> None:
    """Give a list, dict or object this content in place of what it has."""
    if isinstance(made, list):
        list.__setitem__(made, slice(None), items)
    elif isinstance(made, dict):
        cls: Any = OrderedDict if isinstance(made, OrderedDict) else dict
        if [key for key, _ in _items(made)] != [key for key, _ in items]:
            cls.clear(made)
        for key, item in items:
            cls.__setitem__(made, key, item)
    if attributes is None:
        return
    held = made.__dict__
    for name in [name for name in held if name not in attributes]:
        del held[name]
    for name, value in attributes.items():
        if name not in held and isinstance(getattr(type(made), name, None), types.MemberDescriptorType):
            object.__setattr__(made, name, value)  # a slot
        else:
            held[name] = value


def by_name(names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call in one spelling: what forward takes by name is given by name.

    Args:
        names: of what forward takes by position or name.
    """
    if len(args) > len(names):
        return args, dict(kwargs)
    return (), {**dict(zip(names, args, strict=False)), **kwargs}


def names_of(signature: inspect.Signature) -> tuple[str, ...]:
    """What forward takes by position or by name; nothing, where something before that has no name to callers."""
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        return ()
    return tuple(p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)


@dataclass
class Call:
    """The arguments of one call, taken apart.

    Attributes:
        shape: of all of them; calls of equal shapes may run on one graph.
        args, kwargs: what the graph takes: tuples of leaves in place of arguments that hold what can change.
    """

    apart: Apart
    shape: tuple
    args: tuple
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> Call:
        args, options = by_name(names, args, kwargs)
        apart = Apart()
        shapes: list[tuple] = []

        def taken(name: int | str, value: Any) -> Any:
            objects, leaves = len(apart.objects), len(apart.leaves)
            shape = apart.shape(value)
            held = len(apart.objects) > objects or shape[0] == "object"
            shapes.append((name, held, shape))
            return _plain(value, apart.leaves[leaves:]) if held else value

        positional = tuple(taken(number, value) for number, value in enumerate(args))
        named = {name: taken(name, options[name]) for name in sorted(options)}
        return cls(apart, tuple(shapes), positional, named)

    def problem(self) -> str:
        """What of the arguments no graph can follow, in words; "" if nothing."""
        strange = self.apart.strange if self.apart.objects else []
        return f"an object of class {type(strange[0]).__name__}" if strange else ""


def _plain(value: Any, leaves: list[Any]) -> Any:
    """The leaves of a container or object; of a mapping of tensors under their names, which say who made them."""
    if isinstance(value, Mapping):
        leaf = set(map(id, leaves))
        named = {key: item for key, item in value.items() if id(item) in leaf}
        if list(map(id, named.values())) == list(map(id, leaves)):
            return named
    return tuple(leaves)


def _whole(value: Any, shape: tuple) -> list[Any]:
    """The leaves of a value that holds nothing that can change."""
    if shape[0] in ("tensor", "number"):
        return [value]
    parts = zip(value, shape[2], strict=True) if shape[0] == "tuple" else ()
    return [leaf for each, inner in parts for leaf in _whole(each, inner)]


@dataclass
class Boundary:
    """Between the caller's objects and the graph that was recorded for calls of one shape.

    Attributes:
        shape: of the arguments.
        effects: (number of an object, what is in it after a call), for those that calls change.
        returned: the shape of the output; None until a graph was recorded.
    """

    shape: tuple
    effects: tuple[tuple[int, tuple], ...] = ()
    returned: tuple | None = None

    def put_together(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict, list[Any], list[Any]]:
        """What a call of ``shape`` was given, of what a graph is; the objects in it, and all leaves."""
        positional, named = dict(enumerate(args)), dict(kwargs)
        given: list[Any] = []
        for name, held, shape in self.shape:
            value = positional[name] if isinstance(name, int) else named[name]
            if not held:
                given += _whole(value, shape)
            else:
                given += value.values() if isinstance(value, dict) else value
        together = Together(given)
        for name, _, shape in self.shape:
            (positional if isinstance(name, int) else named)[name] = together.value(shape)
        return tuple(positional.values()), named, together.objects, given

    def take_apart(self, output: Any, objects: list[Any], given: list[Any], before: list[tuple]) -> tuple:
        """The leaves of what a call changed in objects, and of its output.

        Args:
            before: ``contents`` of the objects before the call.
        """
        recording = getattr(active.call, "recorder", None) is not None
        apart = Apart(objects, given, fixed=False)
        changed = [number for number, (old, new) in enumerate(zip(before, contents(objects, given), strict=True))
                   if not _unchanged(old, new)]  # fmt: skip
        if not recording:
            if not {*changed} <= (recorded := {number for number, _ in self.effects}):
                raise _other(type(objects[min({*changed} - recorded)]).__name__)
            changed = sorted(recorded)
        effects = tuple((number, apart.content(objects[number])) for number in changed)
        returned = apart.shape(output)
        if apart.strange:
            raise RewriteError(
                "the model makes an object that a graph cannot build", path="", got=type(apart.strange[0]).__name__,
                expected="tensors, numbers, containers, and objects of Python's own kind that hold them",
                hint="return its tensors, or keep using the converted model",
            )  # fmt: skip
        if recording:
            self.effects, self.returned = effects, returned
        elif effects != self.effects or returned != self.returned:
            raise _other("another output" if effects == self.effects else "others in an object")
        return tuple(apart.leaves)

    def restore(self, call: Call, leaves: Sequence[Any]) -> Any:
        """Set in the caller's objects what the graph gave for them; returns the model's output."""
        assert self.returned is not None
        together = Together(leaves, call.apart.objects, call.apart.leaves)
        contents = [(together.objects[number], together.content(shape)) for number, shape in self.effects]
        output = together.value(self.returned)
        for each, content in contents:  # not before all is there
            _fill(each, *content)
        return output

    def copy(self) -> Boundary:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict) -> Boundary:
        return self  # ``Within`` is copied with the model, and writes to the one that was given


def _other(what: str) -> RewriteError:
    return RewriteError(
        "the model leaves other objects behind than when its graph was recorded", path="", got=what,
        hint="keep using the converted model",
    )  # fmt: skip


def contents(objects: Sequence[Any], given: Sequence[Any]) -> list[tuple]:
    """What each object holds, and the numbers in it."""
    found = []
    for each in objects:
        apart = Apart(objects, given)
        found.append((apart.content(each), apart.leaves))
    return found


def _unchanged(old: tuple, new: tuple) -> bool:
    return old[0] == new[0] and all(
        a is b or (type(a) is type(b) is int and a == b) for a, b in zip(old[1], new[1], strict=True)
    )


def boundary_of(model: nn.Module) -> Boundary | None:
    """What a model's forward is called through while graphs of it are recorded; None if it is called as it is."""
    previous = model.__dict__["forward"].previous
    return previous.boundary if isinstance(previous, Within) else None


class Within:
    """The forward of a model while a graph of it is recorded: takes and gives tensors and numbers, and calls the user's
    own with objects.

    Args:
        module: the model.
        previous: the forward of this instance, if it has one of its own.
    """

    def __init__(self, boundary: Boundary, module: nn.Module, previous: Any) -> None:
        self.boundary, self.module, self.previous = boundary, module, previous

    @property
    def inner(self) -> Any:
        return self.previous or type(self.module).forward.__get__(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_name(names_of(self.__signature__), args, kwargs)
        args, kwargs, objects, given = self.boundary.put_together(args, kwargs)
        before = contents(objects, given)
        return self.boundary.take_apart(self.inner(*args, **kwargs), objects, given, before)
