"""Graphs as plain data, for files and copies."""

from __future__ import annotations

import builtins
import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import qualified_name
from ..graph.nodes import walk
from ..op_facts import Facts

#: What of a node's ``meta`` a graph keeps.
_KEPT = ("path", "op", "site", "shape", "dtype", "contiguous", "layout", "structure", "smooths")


class Ref:
    """Stands for a node among arguments. (No tuple or dataclass: ``walk`` would look into it.)"""

    def __init__(self, name: str) -> None:
        self.name = name


_Ref = Ref  # its name in files
GraphData = list[tuple[str, str, Any, Any, dict[str, Any], dict[str, Any]]]


def as_data(graph: fx.Graph) -> GraphData:
    """Nodes as (op, name, target, args, kwargs, meta), with functions by their qualified names."""

    def plain(value: Any) -> Any:
        return walk(lambda leaf: Ref(leaf.name) if isinstance(leaf, fx.Node) else leaf, value)

    return [
        (node.op, node.name, node.target if isinstance(node.target, str) else (_name(node.target),),
         plain(node.args), plain(dict(node.kwargs)), _meta(node))
        for node in graph.nodes
    ]  # fmt: skip


def from_data(data: GraphData) -> fx.Graph:
    """What ``as_data`` was made from."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def given(value: Any) -> Any:
        return walk(lambda leaf: nodes[leaf.name] if isinstance(leaf, Ref) else leaf, value)

    for op, name, target, args, kwargs, meta in data:
        target = target if isinstance(target, str) else function_named(target[0])
        node = graph.create_node(op, target, given(args), given(kwargs), name=name)
        node.meta = dict(meta)
        if "facts" in meta:
            node.meta["facts"] = Facts(*meta["facts"])
        nodes[name] = node
    return graph


def _meta(node: fx.Node) -> dict[str, Any]:
    kept = {k: node.meta[k] for k in _KEPT if k in node.meta}
    return kept | {"facts": node.meta["facts"].as_data()} if "facts" in node.meta else kept


def _name(function: Any) -> str:
    return qualified_name(function).replace("_operator.", "operator.")


def function_named(name: str) -> Callable:
    """The function of a qualified name."""
    parts = name.split(".")
    if len(parts) == 1:
        return getattr(builtins, name)
    if parts[:2] == ["torch", "ops"]:
        return operator.attrgetter(".".join(parts[1:]))(torch)
    for i in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        return operator.attrgetter(".".join(parts[i:]))(module)
    raise ImportError(name)
