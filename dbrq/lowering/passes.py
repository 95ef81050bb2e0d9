"""What is done to a graph before its patterns are looked for: ops in place become ops that return a new value, wherever
nobody could tell; constants are computed; sizes are read where they are known first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..graph.nodes import is_impure
from ..op_facts import AS_LAID_OUT, Facts, Memory, assumed, called, facts_of, family, sources, writes, written
from .engine import Lowering, is_dequantize, is_weight


def reduce_mutation(lowering: Lowering) -> None:
    """Replace writes to memory that the graph made itself and that is read through one name only."""
    order = {node: i for i, node in enumerate(lowering.graph.nodes)}
    for node in reversed(list(lowering.graph.nodes)):
        facts = facts_of(node)
        if facts.writes != (0,) or facts.random or not isinstance(node.args[0], fx.Node):
            continue
        target = node.args[0]
        aliases = family(target)
        if any(n.op in ("placeholder", "get_attr") for n in aliases) or _mixed(node, target):
            continue
        later = [u for n in aliases - {target, node} for u in n.users
                 if order[u] > order[node] and (u not in aliases or writes(u))]  # fmt: skip
        if later or not _out_of_place(node):
            continue
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)
        lowering.note("reduce_mutation", node, "a value of its own")


def written_attributes(graph: fx.Graph) -> frozenset[str]:
    """Paths of the model's tensors that the graph may write to."""
    memory = Memory(graph)
    return frozenset(str(n.target) for n in graph.nodes if n.op == "get_attr" and memory.is_written(n))


def written_as_laid_out(graph: fx.Graph) -> frozenset[str]:
    """Names of nodes that are written to only if they lie in memory in a certain way: they must lie as the float
    model's do, so no kernel may choose another layout for them.
    """
    found: set[str] = set()
    for node in graph.nodes:
        for target in written(node):
            names = family(target)
            if any(called(n) in AS_LAID_OUT for n in names):
                found |= {n.name for n in names}
    return frozenset(found)


def _mixed(node: fx.Node, target: fx.Node) -> bool:
    """Whether an op out of place might give another dtype than the memory has."""
    dtype = target.meta.get("dtype")
    return any(n.meta.get("dtype", dtype) is not dtype for n in node.all_input_nodes if n.meta.get("shape"))


def _out_of_place(node: fx.Node) -> bool:
    """Spell the op without writing; False for ops that have no such spelling, or none that gives the same dtype."""
    target, kwargs = _spelled_out_of_place(node)
    if target is None:
        return False
    before = node.target, node.kwargs
    node.target, node.kwargs = target, kwargs
    if _dtype(node) is not node.meta.get("dtype"):
        node.target, node.kwargs = before
        return False
    node.meta["facts"] = Facts(called(node), (), assumed(node).aliases)
    return True


def _spelled_out_of_place(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """Target and keyword arguments of the same op, not in place; no target if there is none."""
    target, kwargs = node.target, dict(node.kwargs)
    if node.op == "call_method":
        name = str(target).removesuffix("_")
        known = name != target and hasattr(torch.Tensor, name) and name not in ("copy", "set", "fill")
        return (name if known else None), kwargs
    if "inplace" in kwargs:
        return target, {**kwargs, "inplace": False}
    name = called(node)
    if name.endswith("_") and not name.startswith("__"):
        name = name.removesuffix("_")
        return getattr(torch, name, None) or getattr(F, name, None), kwargs
    return None, kwargs


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of what a call gives, found without data; None where that is not to be found."""

    def like(n: fx.Node) -> Any:
        dtype = n.meta.get("dtype")
        return 1 if dtype is None else torch.empty(n.meta["shape"], dtype=dtype, device="meta")

    args, kwargs = fx.map_arg((node.args, node.kwargs), like)
    try:
        with torch.no_grad():
            result = _callable(node, args)(*args, **kwargs)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
    ):  # no kernel without data, or numbers that 1 cannot stand for
        return None
    return result.dtype if isinstance(result, Tensor) else None


def _callable(node: fx.Node, args: Any) -> Callable:
    return getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target


def fold_constants(lowering: Lowering) -> None:
    """Compute what depends on no input once, now.

    Memory that the graph writes to, in whatever way it may come to be shared, is made anew in each call, and so is what
    the caller gets.
    """
    graph = lowering.graph
    memory = Memory(graph)
    static = _static(graph, memory)
    known: dict[fx.Node, Any] = {}
    for node in static:
        if node.op == "get_attr":
            known[node] = lowering.tensor(node)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            with torch.no_grad():
                known[node] = _callable(node, args)(*args, **kwargs)
    for node, value in known.items():
        readers = [user for user in node.users if user not in known]
        if node.op == "get_attr" or not isinstance(value, Tensor) or not readers:
            continue
        name = f"folded_{node.name}"
        lowering.module.register_buffer(name, value.contiguous().clone())
        with graph.inserting_before(node):
            attribute = graph.create_node("get_attr", name, name=name)
        attribute.meta = dict(node.meta)
        passed_on = [user for user in readers if memory.is_returned(node) and _passes_on(user, node)]
        for user in readers:
            if user not in passed_on:
                user.replace_input_with(node, attribute)
        if passed_on:
            with graph.inserting_before(min(passed_on)):
                copy = graph.call_method("clone", (attribute,))
            copy.meta = dict(node.meta)
            for user in passed_on:
                user.replace_input_with(node, copy)
    for node in reversed(list(graph.nodes)):
        if node in known and not node.users:
            graph.erase_node(node)


def _static(graph: fx.Graph, memory: Memory) -> list[fx.Node]:
    """The nodes to compute now, in order.

    What is made without any tensor (``zeros(3)``) is as quickly made as read, unless it is the caller's to keep:
    TorchScript would make it once and give it away again and again.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if memory.is_written(node):
            continue
        made = node.op in ("call_function", "call_method") and not is_impure(node) and not is_weight(node)
        a_view = memory.is_returned(node) and memory.is_held(node)  # of the model's own tensors, which it stays
        if node.op == "get_attr" or (made and not a_view and all(n in found for n in node.all_input_nodes)):
            found[node] = None
    needed = [node for node in found if memory.is_returned(node)]
    for node in needed:  # which grows meanwhile
        needed += [n for n in node.all_input_nodes if n not in needed]
    chosen: dict[fx.Node, None] = {}
    for node in found:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or ((inputs or node in needed) and all(n in chosen for n in inputs)):
            chosen[node] = None
    return list(chosen)


def _passes_on(user: fx.Node, node: fx.Node) -> bool:
    """Whether the memory of ``node`` goes further than ``user``."""
    return user.op == "output" or node in sources(user)


def sizes_of_integers(lowering: Lowering) -> None:
    """A dequantized value has the shape of its integers."""
    for node in lowering.graph.nodes:
        if node.op == "call_method" and node.target in ("size", "numel") and is_dequantize(node.args[0]):
            node.replace_input_with(node.args[0], node.args[0].args[0])
