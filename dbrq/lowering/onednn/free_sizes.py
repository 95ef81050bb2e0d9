"""Sizes that change from call to call where no layer with a weight depends on them, such as the length of a cache.

A plan is made for shapes. What depends on a size that grows by one in each call is therefore left out of plans: torch
runs it, between plans that stay what they are (``segments``). Two calls show what that is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ...graph.nodes import leaves, walk
from .partitions import Partition, Weight
from .segments import Segment
from .values import plainly

Run = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]


def sizes_seen(graph: fx.Graph, run: Run, inputs: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """For each node, what of its result a plan would be made for: shapes and numbers.

    Args:
        run: executes a node, given the results so far.
    """
    results = dict(inputs)
    last = {read: node for node in graph.nodes for read in node.all_input_nodes}
    seen: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op != "placeholder":
            results[node] = run(node, results)
        seen[node] = _sizes(results[node])
        for read in node.all_input_nodes:
            if last[read] is node:
                del results[read]
    return seen


def _sizes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (list, tuple, dict)):
        return tuple(map(_sizes, leaves(value)))
    return value


def depending(
    first: Mapping[fx.Node, Any], second: Mapping[fx.Node, Any], modules: Mapping[str, Any]
) -> frozenset[str] | None:
    """Names of the nodes whose plans would differ between two calls; None if a layer with a weight is among them.

    Args:
        first, second: ``sizes_seen`` of the calls.
    """
    differ = {node for node, sizes in first.items() if not _equal(sizes, second[node])}
    found = {n for n in first if n.op != "placeholder" and (n in differ or not differ.isdisjoint(n.all_input_nodes))}
    for node in found:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Partition) and any(isinstance(a, Weight) for a in module.arguments):
            return None
    return frozenset(node.name for node in found)


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def loop(
    parts: Sequence[Segment | fx.Node],
    placeholders: Sequence[fx.Node],
    output: fx.Node,
    runner: Callable[[Segment], Callable],
    tensors: Mapping[str, Any],
    module_at: Callable[[str], Any],
) -> Callable:
    """A function that runs segments and nodes one after another, as code.

    Args:
        runner: what runs a segment: given its inputs, gives its outputs.
        tensors: that the graph holds.
        module_at: partitions, and modules that the graph calls.
    """
    graph = fx.Graph()
    held: dict[str, Any] = {}
    env: dict[fx.Node, Any] = {p: graph.placeholder(f"input_{i}") for i, p in enumerate(placeholders)}

    def add(node: fx.Node, env: dict[fx.Node, Any]) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.op == "get_attr":
            name = f"held_{len(held)}"
            held[name] = tensors[str(node.target)]
            env[node] = graph.create_node("get_attr", name)
            return
        if node.op == "call_module":
            module = module_at(str(node.target))
            if isinstance(module, Partition):
                nodes = list(module.reference.nodes)
                inner = dict(zip((n for n in nodes if n.op == "placeholder"), args, strict=True))
                for step in nodes:
                    if step.op not in ("placeholder", "output"):
                        add(step, inner)
                env[node] = inner[nodes[-1].args[0]]
                return
            env[node] = graph.call_function(module.forward, args, kwargs)
        else:
            env[node] = graph.create_node(node.op, node.target, args, kwargs)
        if _may_be_lazy(node):
            env[node] = graph.call_function(all_plainly, (env[node],))

    for part in parts:
        if isinstance(part, Segment):
            results = graph.call_function(runner(part), tuple(env[n] for n in part.inputs))
            for number, n in enumerate(part.outputs):
                env[n] = graph.call_function(operator.getitem, (results, number))
        else:
            add(part, env)
    graph.output(fx.map_arg(output.args[0], lambda n: env[n]))
    return fx.GraphModule(held, graph, class_name="Loop").forward


def _may_be_lazy(node: fx.Node) -> bool:
    """Whether a result may be a view of complex numbers, whose memory holds other numbers than it means."""
    dtypes = [n.meta.get("dtype") for n in (node, *node.all_input_nodes)]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)


def all_plainly(value: Any) -> Any:
    """``plainly`` for each tensor in nested containers."""
    return walk(lambda leaf: plainly(leaf) if isinstance(leaf, Tensor) else leaf, value)
