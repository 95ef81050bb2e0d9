"""What is done to a graph before its patterns are looked for: ops in place become ops that return a new value, wherever
nobody could tell; constants are computed; sizes are read where they are known first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..graph import is_impure
from ..mappings import Role
from .engine import Lowering, is_dequantize, is_weight, row_of

_OPERATORS: dict[Callable, Callable] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip


def reduce_mutation(lowering: Lowering) -> None:
    """Replace writes to memory that the graph made itself and that is read through one name only."""
    order = {node: i for i, node in enumerate(lowering.graph.nodes)}
    for node in reversed(list(lowering.graph.nodes)):
        if not node.meta.get("writes") or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        written = node.args[0]
        family = _aliases(written)
        if family is None or _mixed(node, written):
            continue
        later = [u for n in family - {written, node} for u in n.users if order[u] > order[node] and u not in family]
        if later or not _out_of_place(node):
            continue
        del node.meta["writes"]
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)
        lowering.note("reduce_mutation", node, "a value of its own")


def may_alias(node: fx.Node) -> bool:
    """Whether a node's result may share memory with its first argument."""
    if node.op == "output" or node.meta.get("writes"):
        return True
    row = row_of(node)
    if row is not None:
        return row.role is Role.PASS
    if node.op == "call_function":
        return node.target in (operator.getitem, getattr) or getattr(node.target, "__name__", "") == "_unwrap_optional"
    return node.op == "call_method" and node.target not in ("size", "numel")


def _aliases(node: fx.Node) -> set[fx.Node] | None:
    """All nodes that may share memory with ``node``; None if that is not the graph's own."""
    base = node
    while base.all_input_nodes and may_alias(base):
        base = base.all_input_nodes[0]
    if base.op in ("placeholder", "get_attr"):
        return None
    found: set[fx.Node] = set()
    pending = [base]
    while pending:
        one = pending.pop()
        if one in found:
            continue
        found.add(one)
        pending += [u for u in one.users if u.op != "output" and may_alias(u) and u.all_input_nodes[0] is one]
    return found


def written_attributes(graph: fx.Graph) -> frozenset[str]:
    """Paths of the model's tensors that the graph may write to."""
    found = set()
    for node in graph.nodes:
        base = node
        if node.meta.get("writes"):
            while base.all_input_nodes and may_alias(base):
                base = base.all_input_nodes[0]
            if base.op == "get_attr":
                found.add(base.target)
    return frozenset(found)


def _mixed(node: fx.Node, written: fx.Node) -> bool:
    """Whether an op out of place might give another dtype than the memory has."""
    dtype = written.meta.get("dtype")
    return any(n.meta.get("dtype", dtype) is not dtype for n in node.all_input_nodes if n.meta.get("shape"))


def _out_of_place(node: fx.Node) -> bool:
    """Spell the op without writing; False for ops that have no such spelling."""
    if node.op == "call_method":
        name = str(node.target)
        name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
        if name == node.target or not hasattr(torch.Tensor, name) or name in ("__setitem__", "copy", "set", "fill"):
            return False
        node.target = name
        return True
    if node.target in _OPERATORS:
        node.target = _OPERATORS[node.target]  # type: ignore[index]
        return True
    if "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}
        return True
    name = getattr(node.target, "__name__", "")
    counterpart = getattr(torch, name.removesuffix("_"), None) or getattr(F, name.removesuffix("_"), None)
    if name.endswith("_") and not name.startswith("__") and counterpart is not None:
        node.target = counterpart
        return True
    return False


def fold_constants(lowering: Lowering) -> None:
    """Compute what depends on no input once, now."""
    graph = lowering.graph
    written = written_attributes(graph)
    known: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if node.target not in written:
                known[node] = lowering.tensor(node)
            continue
        inputs = node.all_input_nodes
        if node.op not in ("call_function", "call_method") or is_impure(node) or is_weight(node) or not inputs:
            continue
        if all(n in known for n in inputs) and not node.meta.get("random"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            with torch.no_grad():
                target = node.target
                known[node] = (
                    getattr(args[0], target)(*args[1:], **kwargs)
                    if isinstance(target, str)
                    else target(*args, **kwargs)
                )
    for node, value in known.items():
        if node.op == "get_attr" or not isinstance(value, Tensor) or not any(user not in known for user in node.users):
            continue
        name = f"folded_{node.name}"
        lowering.module.register_buffer(name, value.contiguous().clone())
        with graph.inserting_before(node):
            attribute = graph.create_node("get_attr", name, name=name)
        attribute.meta = dict(node.meta)
        for user in list(node.users):
            if user not in known:
                user.replace_input_with(node, attribute)
    for node in reversed(list(graph.nodes)):
        if node in known and not node.users:
            graph.erase_node(node)


def sizes_of_integers(lowering: Lowering) -> None:
    """A dequantized value has the shape of its integers."""
    for node in lowering.graph.nodes:
        if node.op == "call_method" and node.target in ("size", "numel") and is_dequantize(node.args[0]):
            node.replace_input_with(node.args[0], node.args[0].args[0])
