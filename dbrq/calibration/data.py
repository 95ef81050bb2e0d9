"""What items of calibration data mean as calls of a model.

Data comes as loaders and datasets give it: with labels and texts that forward does not take, as lists of numbers and
as arrays. What an item is passed as is judged by forward's signature, and by what the example ran with; where that
does not settle it, the caller is asked for ``unpack``. Nothing is tried out: a model runs on what was decided.
"""

from __future__ import annotations

import inspect
import itertools
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..errors import ConfigurationError, NotCalibratedError
from ..pytree import call_arguments

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NUMBERS = (bool, int, float, np.number, np.bool_)


class Calls:
    """The items of ``data``, one by one, as ``(args, kwargs)`` for ``model``.

    Args:
        model: float or prepared.
        data: batches in any iterable; a tensor, an array or a mapping alone is one batch, with a note.
        unpack: maps an item first; what it returns is passed as it is.
        max_batches: how many items are taken; None: all.
        given: what the example ran with, name of the argument -> class; None if there was no example.

    Raises:
        ConfigurationError: ``data`` is no data, or it is not clear what an item's parts are for.
        NotCalibratedError: a generator gives no items, as one that was used before.
    """

    def __init__(
        self, model: nn.Module, data: Any, unpack: Callable[[Any], Any] | None = None, max_batches: int | None = None,
        given: Mapping[str, type] | None = None,
    ) -> None:  # fmt: skip
        self.data, self.unpack, self.max_batches = _iterable(data), unpack, max_batches
        self._takes = Takes(model, given, loaded=isinstance(data, DataLoader), examples=_is_hugging_face(data))

    def __len__(self) -> int:
        """How many there are, as far as ``data`` knows.

        Raises:
            TypeError: it does not know.
        """
        known = len(self.data)  # type: ignore[arg-type]
        return known if self.max_batches is None else min(known, self.max_batches)

    def __iter__(self) -> Iterator[tuple[tuple, dict]]:
        empty = self.max_batches != 0
        for item in itertools.islice(self.data, self.max_batches):
            empty = False
            yield self._takes.call(item) if self.unpack is None else call_arguments(self.unpack(item))
        if empty and isinstance(self.data, Iterator):
            raise NotCalibratedError(
                "there is no calibration data", expected="at least one item", got="a generator that gives none",
                hint="a generator gives its items once only: make it anew, or pass a list",
            )  # fmt: skip


class Rest:
    """All of ``calls``, of which the first is taken already."""

    def __init__(self, first: tuple[tuple, dict], rest: Iterator[tuple[tuple, dict]], calls: Calls) -> None:
        self.first, self.rest, self.calls = first, rest, calls

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[tuple[tuple, dict]]:
        return itertools.chain([self.first], self.rest)


def classes_of(model: nn.Module, args: tuple, kwargs: dict) -> dict[str, type]:
    """What a call gives to forward: name -> class, with ``*0`` for the first that ``*args`` takes."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    names = [p.name for p in found if p.kind in _POSITIONAL]
    names += [f"*{i}" for i in range(len(args) - len(names))]
    return {name: type(value) for name, value in (*zip(names, args, strict=False), *kwargs.items())}


def _iterable(data: Any) -> Iterable[Any]:
    """``data`` itself, or a list of the one batch that it is."""
    if isinstance(data, (Tensor, np.ndarray, Mapping)):
        what = "a mapping" if isinstance(data, Mapping) else f"one {type(data).__name__}"
        warnings.warn(
            f"dbrq: the calibration data is {what}, taken for one batch; for several, pass an iterable of them",
            stacklevel=4,
        )
        return [torch.from_numpy(data) if isinstance(data, np.ndarray) else data]
    sized = hasattr(type(data), "__getitem__") and not isinstance(data, (str, bytes))
    if isinstance(data, (str, bytes, nn.Module, type)) or not (isinstance(data, Iterable) or sized):
        raise ConfigurationError(
            "calibration data is an iterable of batches", got=type(data).__name__,
            expected="a DataLoader, a list, a generator, a dataset",
            hint="put one batch into a list: [batch]",
        )  # fmt: skip
    return data


def _is_hugging_face(data: Any) -> bool:
    """Whether ``data`` is like ``datasets.Dataset``, whose items are single examples."""
    return hasattr(data, "column_names") and hasattr(data, "features")


class Takes:
    """What a model's forward takes, and of an item that.

    Args:
        model: the model; hooks that come before its forward may turn anything into its arguments, so with such hooks
            every item is passed whole.
        given: what the example ran with, by name.
        loaded: whether items are those of a ``DataLoader``, whose last is likely a label.
        examples: whether items are single examples, that need a batch dimension.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, type] | None, loaded: bool, examples: bool) -> None:
        self.given, self.loaded, self.examples = given, loaded, examples
        self.parameters: dict[str, inspect.Parameter] | None = None
        self._noted = False
        try:
            if not model._forward_pre_hooks:
                self.parameters = dict(inspect.signature(model.forward).parameters)
        except (TypeError, ValueError):  # of code without a signature
            return
        found = (self.parameters or {}).values()
        self.positional = [p for p in found if p.kind in _POSITIONAL]
        self.required = [p for p in self.positional if p.default is inspect.Parameter.empty]
        self.any_position = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found)
        self.names = {
            p.name for p in found if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        }
        self.names |= {name for name in given or () if not name.startswith("*")}  # which a wrapper may take
        rest = next((p for p in found if p.kind is inspect.Parameter.VAR_KEYWORD), None)
        self.any_name = rest is not None or (given is None and _wrapper_takes_any(model.forward))
        if rest is not None and (more := _typed(model.forward, rest)) is not None:
            self.names |= more  # ``**kwargs: Unpack[SomeTypedDict]`` says which
            self.any_name = False

    def call(self, item: Any) -> tuple[tuple, dict]:
        """The call that ``item`` stands for."""
        if self.parameters is None:
            return call_arguments(item)
        if isinstance(item, Mapping):
            return (), self._by_name(item)
        if isinstance(item, (tuple, list)):
            return self._by_position(item)
        return call_arguments(item)

    # Mappings

    def _by_name(self, item: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in item.items() if self.any_name or key in self.names}
        needed = [p.name for p in self.required if p.name not in kept]
        if needed or (item and not kept):
            raise ConfigurationError(
                "an item of the calibration data is a mapping that lacks what forward takes",
                expected=f"{', '.join(needed or sorted(self.names))}", got=f"the keys {', '.join(map(repr, item))}",
                hint=_unpack(item, self.required),
            )  # fmt: skip
        self._note([repr(key) for key in item if key not in kept])
        return self._as_tensors(kept)

    def _as_tensors(self, item: dict[str, Any]) -> dict[str, Any]:
        """Lists of numbers, and arrays, as tensors. One dimension is one example, and becomes a batch of one."""
        plain = {key: value for key, value in item.items() if self._is_data(key, value)}
        if any(isinstance(value, Tensor) for value in item.values()) and not self.examples:
            plain = {key: value for key, value in plain.items() if isinstance(value, np.ndarray)}
        made = {key: self._tensor(key, value) for key, value in plain.items()}
        if self.examples:
            made = {key: value for key, value in item.items() if isinstance(value, Tensor)} | made
        if self.examples or any(t.dim() == 1 for key, t in made.items() if not isinstance(item[key], Tensor)):
            numbers = {k: torch.as_tensor(v) for k, v in item.items() if isinstance(v, _NUMBERS) and self._is_tensor(k)}
            made = {key: t[None] for key, t in (made | numbers).items()}
        return item | made

    def _is_data(self, key: str, value: Any) -> bool:
        """Whether a value is numbers that stand for a tensor: not where forward asks for a list, or the example was
        one.
        """
        if isinstance(value, np.ndarray):
            return value.dtype.kind in "biuf" and self._wants_tensor(key, np.ndarray)
        first = value
        while isinstance(first, list) and first:
            first = first[0]
        return isinstance(value, list) and isinstance(first, (*_NUMBERS, np.ndarray)) and self._wants_tensor(key, list)

    def _wants_tensor(self, key: str, kind: type) -> bool:
        if self.given is not None and key in self.given:
            return not issubclass(self.given[key], kind)
        written = self._annotation(key).lower()
        return self._is_tensor(key) or not any(word in written for word in ("list", "sequence", "array", "tuple"))

    def _is_tensor(self, key: str) -> bool:
        return "Tensor" in self._annotation(key)

    def _annotation(self, key: str) -> str:
        parameter = (self.parameters or {}).get(key)
        return "" if parameter is None or parameter.annotation is inspect.Parameter.empty else str(parameter.annotation)

    def _tensor(self, key: str, value: Any) -> Tensor:
        try:
            array = np.asarray(value)
            if array.dtype == np.float64:
                array = array.astype(np.float32)  # what Python's numbers are in torch
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{key!r} of an item of the calibration data is no tensor, and cannot become one: {error}",
                expected="numbers, in rows of one length", got=type(value).__name__,
                hint="pad to one length in the tokenizer (padding=True), or pass unpack=",
            ) from error  # fmt: skip

    # Tuples

    def _by_position(self, item: Sequence[Any]) -> tuple[tuple, dict]:
        most = len(self.positional)
        if self._is_named(item):
            self._note([f"item[{i}]" for i in range(1, len(item))])
            return (), self._by_name(item[0])
        if len(item) > most and not self.any_position:
            if not most:
                raise _ambiguous(item, self.positional, "forward takes nothing by position")
            self._note([f"item[{i}]" for i in range(most, len(item))])
            return tuple(item[:most]), {}
        if self.loaded and len(item) > len(self.required):
            return self._settled(item), {}
        return tuple(item), {}

    def _is_named(self, item: Sequence[Any]) -> bool:
        """Whether an item is (arguments by name, labels): ``({...},)`` stays one dict by position."""
        if len(item) < 2 or not isinstance(item[0], Mapping) or not item[0] or len(self.names) < 2:
            return False
        return all(p.name in item[0] for p in self.required) and any(key in self.names for key in item[0])

    def _settled(self, item: Sequence[Any]) -> tuple:
        """The part of a loader's item that the example ran with, where forward could take all of it."""
        names = [p.name for p in self.positional]
        if self.given is None:
            if len(item) == 1:
                return tuple(item)
            raise _ambiguous(item, self.positional, "forward can do with less than an item holds")
        names += [f"*{i}" for i in range(len(item) - len(names))]
        ran = next((i for i, name in enumerate(names) if name not in self.given), len(names))
        self._note([f"item[{i}]" for i in range(ran, len(item))])
        return tuple(item[:ran])

    def _note(self, dropped: Sequence[str]) -> None:
        if dropped and not self._noted:
            self._noted = True
            warnings.warn(
                f"dbrq: forward does not take {', '.join(dropped)} of the calibration data's items, which is dropped; "
                "unpack= says otherwise",
                stacklevel=6,
            )


def _wrapper_takes_any(forward: Any) -> bool:
    """Whether what stands for forward, in the signature of what it wraps, takes any names itself."""
    outer = inspect.signature(forward, follow_wrapped=False).parameters.values()
    return hasattr(forward, "__wrapped__") and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in outer)


def _typed(forward: Any, rest: inspect.Parameter) -> set[str] | None:
    """Names that ``**kwargs: Unpack[SomeTypedDict]`` takes; None if it takes any."""
    annotation = rest.annotation
    if isinstance(annotation, str):
        try:
            annotation = typing.get_type_hints(inspect.unwrap(forward)).get(rest.name)
        except Exception:  # names of annotations need not exist when the code runs
            return None
    inside = typing.get_args(annotation)
    names = getattr(inside[0], "__annotations__", None) if len(inside) == 1 else None
    return None if names is None or not typing.is_typeddict(inside[0]) else set(names)


def _ambiguous(item: Sequence[Any], parameters: Sequence[inspect.Parameter], why: str) -> ConfigurationError:
    return ConfigurationError(
        f"it is not clear which parts of the calibration data's items are arguments of the model: {why}",
        expected=f"items for forward({', '.join(p.name for p in parameters)})",
        got=f"{type(item).__name__} of {len(item)}: {', '.join(type(part).__name__ for part in item)}",
        hint="say what is passed: unpack=lambda item: item[0] for inputs without labels, unpack=tuple for all",
    )  # fmt: skip


def _unpack(item: Mapping[str, Any], required: Sequence[inspect.Parameter]) -> str:
    if len(required) == 1 and item:
        key = next(iter(item))
        return f"unpack=lambda item: item[{key!r}] passes one of them, unpack=lambda item: (item,) the mapping itself"
    return "unpack= maps an item to what forward takes: a tuple of arguments, or a dict of those by name"
