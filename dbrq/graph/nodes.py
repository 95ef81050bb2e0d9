"""Nodes of graphs: the ops of quantized values, which nodes matter, and what a value was computed from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import assert_, quantized_decomposed
from ..op_facts import called, is_random, writes

QUANTIZE = quantized_decomposed.quantize_per_tensor

DEQUANTIZE = quantized_decomposed.dequantize_per_tensor

CHOOSE_QPARAMS = quantized_decomposed.choose_qparams

QUANTIZE_ROWS = quantized_decomposed.quantize_per_token

DEQUANTIZE_ROWS = quantized_decomposed.dequantize_per_token

DEQUANTIZE_PER_CHANNEL = quantized_decomposed.dequantize_per_channel


def quicker(target: Any) -> Any:
    """What computes the same as ``target`` in less time and memory: torch's reference makes int64 of int8 weights."""
    return _dequantized if target is DEQUANTIZE_PER_CHANNEL else target


def _dequantized(
    int8: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, *rest: Any, **options: Any
) -> Tensor:
    if options or (zero_point is not None and bool(zero_point.any())) or scale.dtype is not torch.float32:
        return DEQUANTIZE_PER_CHANNEL(int8, scale, zero_point, axis, *rest, **options)
    return int8.to(torch.float32) * scale.reshape([-1 if d == axis else 1 for d in range(int8.dim())])


_CHECKS = ("check_input", "check_absent", "check_same")


def tensors_behind(node: fx.Node) -> Iterable[fx.Node]:
    """The tensors that a node's value was computed from."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in found and ("dtype" in n.meta or _holds_tensors(n))]
        found.update(dict.fromkeys(new))
        waiting += new
    return found


def _holds_tensors(node: fx.Node) -> bool:
    """Whether a node's value is several tensors, as that of ``split``."""
    return any(called(user) == "getitem" and "dtype" in user.meta for user in node.users)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """A number's node and those of the numbers it was computed from."""
    found = [node]
    if not node.meta.get("reads"):
        for before in node.all_input_nodes:
            if "dtype" not in before.meta:
                found += ancestors(before)
    return found


def evaluated(node: fx.Node, read: fx.Node, number: Any) -> Any:
    """What a number would have been, had ``read`` given ``number``; None if that cannot be told."""
    if node is read:
        return number
    if node.op != "call_function":
        return None
    args = [evaluated(a, read, number) if isinstance(a, fx.Node) else a for a in node.args]
    return None if any(a is None for a in args) else function_of(node)(*args)


def function_of(node: fx.Node) -> Callable:
    """What a node of a function calls."""
    assert callable(node.target)
    return node.target


def is_impure(node: fx.Node) -> bool:
    """Whether a node does more than compute its result: writes to an argument, draws random numbers, which those that
    come later depend on, or checks something.
    """
    if node.op in ("placeholder", "output") or writes(node) or is_random(node):
        return True
    return node.target is assert_ or getattr(node.target, "__name__", "") in _CHECKS


def remove_dead(graph: fx.Graph) -> None:
    """Erase nodes without effect that nothing reads."""
    for node in reversed(graph.nodes):
        if not node.users and not is_impure(node):
            graph.erase_node(node)


def base_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "call").rsplit(".", 1)[0]


def identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name.strip(".")).strip("_")
    return f"_{name}" if name[:1].isdigit() else name


def walk(fn: Callable[[Any], Any], value: Any) -> Any:
    """``tree_map`` for arguments of ops: also into slices, and ``torch.Size`` becomes a list."""
    if isinstance(value, slice):
        return slice(*(walk(fn, v) for v in (value.start, value.stop, value.step)))
    if isinstance(value, torch.Size):
        return [walk(fn, v) for v in value]
    if isinstance(value, (list, tuple)):
        items = [walk(fn, v) for v in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {k: walk(fn, v) for k, v in value.items()}
    return fn(value)


def leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    walk(found.append, value)
    return found
