"""Ops that only move elements, on int8 values: they work on the integers, and qparams pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import op_facts
from ..kernels import pad_mode
from ..mappings import DROPOUTS, FUNCTIONS, OpRow, drops
from ..op_facts import may_alias
from ..pytree import tree_map
from ..tensors import Int8Tensor, Int8Weight, Lazy

SAME = frozenset({"identity", "contiguous", *DROPOUTS})
_MAKERS = frozenset({"pad", "view", *DROPOUTS})
#: What copies elements or does not, as the layout of what it is given and its settings have it.
AS_LAID_OUT = SAME | op_facts.AS_LAID_OUT
# Data may be channels_last inside; the user's code sees contiguous values, of which a view is always possible.
_PLAIN = (torch.contiguous_format, torch.preserve_format)
RESHAPED: dict[str, Callable] = {
    "view": torch.Tensor.reshape,
    "view_as": torch.Tensor.reshape_as,
    "ravel": torch.Tensor.flatten,
}


def makes_elements(func: Callable, row: OpRow, args: tuple, kwargs: dict) -> bool:
    """Whether a call of an op that moves elements gives others: a pad with a number, an active dropout, other dtypes.

    What it gives is then no value that was moved, but one that it made.
    """
    if row.name not in _MAKERS:
        return False
    if row.name == "view":
        return names_dtype(args, kwargs)
    bound = FUNCTIONS[func].bind(args, kwargs)
    if row.name == "pad":  # only zero is sure to be representable
        return bound[2] == "constant" and bool(bound[3])
    return drops(row, bound)


def names_dtype(args: Any, kwargs: Any) -> bool:
    """Whether a dtype is among the arguments: a ``view`` then sees the same bits as other numbers."""
    return torch.dtype in map(type, args) or (bool(kwargs) and torch.dtype in map(type, kwargs.values()))


def move(func: Callable, row: OpRow, subject: Lazy, args: tuple, kwargs: dict) -> Any:
    """``func``, which only moves elements, on an int8 activation or weight; None where only float ones will do."""
    if row.name == "to" and not keeps_float32(args, kwargs):
        return None
    if row.name in ("to", "contiguous") and isinstance(subject, Int8Tensor) and may_copy(args, kwargs):
        # Marked as sharing elements: nobody knows whether a write to it is one to the value.
        return None if subject.data_u8 is None else subject.view_as_moved(subject.data_u8)
    if row.name == "to":
        return subject
    if isinstance(subject, Int8Weight):
        if row.name in SAME:
            return subject if row.name == "contiguous" and subject.is_contiguous() else None
        return subject if row.name in ("detach", "data") else subject.moved(func, args[1:], kwargs)
    if not isinstance(subject, Int8Tensor):
        return None
    if row.name in SAME:
        return subject
    if subject.data_u8 is None:
        return None
    if row.name == "clone":
        return Int8Tensor(subject.shape, subject.data_u8, subject.qparams, subject.tag_)
    if row.name == "data":
        return subject.view_as_moved(subject.data_u8)
    if row.name == "pad":
        return _pad(subject, *FUNCTIONS[func].bind(args, kwargs)[1:])
    return _on_integers(func, row, subject, args, kwargs)


def _on_integers(func: Callable, row: OpRow, subject: Int8Tensor, args: tuple, kwargs: dict) -> Any:
    rest, kwargs = tree_map(_shape_donor, (args[1:], kwargs))
    if kwargs.get("input") is not None:
        kwargs = {k: v for k, v in kwargs.items() if k != "input"}
    result = RESHAPED.get(row.name, func)(subject.data_u8, *rest, **kwargs)
    shares = may_alias(func)  # even if what is channels_last inside had to be copied
    return tree_map(lambda leaf: subject.view_as_moved(leaf, shares) if isinstance(leaf, Tensor) else leaf, result)


def _shape_donor(leaf: Any) -> Any:
    """Other int8 values take part only as a shape to follow."""
    if isinstance(leaf, Int8Tensor):
        return leaf.data_u8 if leaf.data_u8 is not None else leaf.float_value()
    return leaf.float_value() if isinstance(leaf, Lazy) else leaf


def _pad(subject: Int8Tensor, pads: Any, mode: str, value: float | None) -> Int8Tensor:
    assert subject.data_u8 is not None
    if mode != "constant":
        return subject.view_as_moved(pad_mode(subject.data_u8, tuple(pads), mode))
    return subject.view_as_moved(F.pad(subject.data_u8, tuple(pads), value=subject.qparams.zero_point))


def may_copy(args: tuple, kwargs: dict) -> bool:
    """Whether a ``contiguous`` or ``to`` that changes no number may have to move elements."""
    given = (*args[1:], *kwargs.values())
    return any(value is True or (isinstance(value, torch.memory_format) and value not in _PLAIN) for value in given)


def keeps_float32(args: tuple, kwargs: dict) -> bool:
    """Whether a ``.to``, ``.float`` or ``.type_as`` leaves a float32 CPU tensor as it is."""
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.dtype) and value is not torch.float32:
            return False
        if isinstance(value, Tensor) and (value.dtype is not torch.float32 or value.device.type != "cpu"):
            return False
        if isinstance(value, (str, torch.device)) and torch.device(value).type != "cpu":
            return False
    return True
