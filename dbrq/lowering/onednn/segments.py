"""Graphs cut into segments that one plan can hold, and what of a graph depends on values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..._torch import assert_
from ...graph.nodes import leaves
from ...op_facts import Watching, called, facts_of, is_random, writes


@dataclass(frozen=True)
class Segment:
    """Nodes whose results have shapes that follow from those of ``inputs``; ``outputs`` are read behind them."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def segments_of(graph: fx.Graph, dynamic: frozenset[str]) -> list[Segment | fx.Node]:
    """The graph in order: nodes named in ``dynamic`` by themselves, all others in as few segments as possible."""
    level: dict[fx.Node, int] = {}
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    ordered = any(writes(n) or is_random(n) for n in nodes)  # what writes or draws stays where it is
    lowest = 0
    for node in nodes:
        before = [level[n] + (n.name in dynamic) for n in node.all_input_nodes if n in level]
        level[node] = max([lowest, *before])
        if ordered or node.target is assert_:  # what was decided holds before anything behind it runs
            lowest = level[node] + (node.name in dynamic)
    parts: list[Segment | fx.Node] = []
    for number in range(max(level.values(), default=0) + 1):
        here = [n for n in nodes if level[n] == number]
        static = [n for n in here if n.name not in dynamic]
        if static:
            parts.append(_segment(static))
        parts += [n for n in here if n.name in dynamic]
    return parts


def _segment(nodes: list[fx.Node]) -> Segment:
    inside = set(nodes)
    inputs = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs))


def known_dynamic(graph: fx.Graph) -> frozenset[str]:
    """Names of the nodes that are known to depend on more than shapes; and of those that compute with their numbers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        by_number = any(n in found and "dtype" not in n.meta for n in node.all_input_nodes)
        if node.op in ("call_function", "call_method") and (by_number or facts_of(node).dynamic):
            found.add(node)
    return frozenset(node.name for node in found)


def dynamic_nodes(graph: fx.Graph, run: Callable[[fx.Node, Mapping[fx.Node, Any]], Any],
                  inputs: Mapping[fx.Node, Any]) -> frozenset[str]:  # fmt: skip
    """Names of the nodes whose results depend on more than shapes, seen in one run; and of those that compute with
    numbers from them, or with tensors that have no strides.

    Args:
        run: executes a node, given the results so far.
    """
    results = dict(inputs)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with Watching() as watched:
            results[node] = run(node, results)
        by_number = any(n in found and not _holds_tensors(results[n]) for n in node.all_input_nodes)
        given = [leaf for n in node.all_input_nodes for leaf in leaves(results[n]) if isinstance(leaf, Tensor)]
        fits = all(_fit_in_plans(results[n]) for n in (node, *node.all_input_nodes))
        if watched.decided_by(called(node), given, results[node]) or by_number or not fits:
            found.add(node)
    return frozenset(node.name for node in found)


def has_strides(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory on the CPU, which is all that plans know."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _fit_in_plans(value: Any) -> bool:
    return all(has_strides(leaf) for leaf in leaves(value) if isinstance(leaf, Tensor))


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves(value))
