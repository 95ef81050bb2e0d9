"""Rewrites of the Q/DQ graph: for what Inductor knows no pattern of, or gets wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import fx

from ...graph.nodes import CHOOSE_QPARAMS, DEQUANTIZE, function_of, remove_dead
from ...kernels import ints
from ...kernels.known_faults import plain_dilation
from ..engine import (
    Lowering,
    Rewrite,
    bind,
    bind_known,
    first_input,
    is_call,
    is_dequantize,
    is_quantize,
    is_weight,
    row_of,
)
from ..patterns import computes, epilogues, fine, moves, on
from ..smoothing import fold_factors
from .convolutions import fault_in_words, geometry_of

#: Ops for which Inductor calls int8 kernels.
_INT8 = frozenset({"conv1d", "conv2d", "linear"})
_NO_KERNEL = "Inductor calls no int8 kernel for this op; values and weights are rounded as before"


def _conv1d(node: fx.Node) -> bool:
    return computes(1)(node) and len(node.meta["shape"]) == 3


def _widened(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """A convolution over lengths, and what follows it, as one over images of one row: Inductor has more of those."""
    graph, head, last = lowering.graph, nodes[0], nodes[-1]
    _, bound = bind_known(head)
    name = f"{bound[1].args[0].target}_wide"
    if not hasattr(lowering.module, name.replace(".", "_")):
        lowering.module.register_buffer(name.replace(".", "_"), lowering.tensor(bound[1].args[0]).unsqueeze(2))
    with graph.inserting_before(last):
        x = _with_a_row(graph, bound[0])
        weight = graph.call_function(
            bound[1].target, (graph.get_attr(name.replace(".", "_")), *bound[1].args[1:]), bound[1].kwargs
        )
        out, inner, length = bound[1].meta["shape"]
        weight.meta = {**bound[1].meta, "shape": (out, inner, 1, length)}
        sizes = ((low, ints(value, 1)[0]) for low, value in zip((1, 0, 1), bound[3:6], strict=True))
        new = {head: graph.call_function(F.conv2d, (x, weight, bound[2], *sizes, bound[6]))}
        for node in nodes[1:]:
            others = {n: _with_a_row(graph, n) for n in node.all_input_nodes if n not in new}
            new[node] = graph.node_copy(node, (others | new).__getitem__)
        flat = graph.call_function(torch.squeeze, (new[last], 2))
    for node, wide in {**new, bound[1]: weight}.items():
        wide.meta = {**node.meta, "shape": (*node.meta["shape"][:2], 1, *node.meta["shape"][2:])}
    flat.meta = dict(last.meta)
    lowering.replace(last, flat)
    steps = "".join(f" + {row.name}" for n in nodes[1:] if (row := row_of(n)) is not None)
    return f"onednn.qconv2d_pointwise{steps}" + " + quantize" * is_quantize(last)


def _with_a_row(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``[N, C, L]`` as ``[N, C, 1, L]``, on the integers if there are any."""
    if is_dequantize(node):
        wide = graph.call_function(DEQUANTIZE, (_with_a_row(graph, first_input(node)), *node.args[1:]))
    elif is_call(node, torch.squeeze) and node.args[1:] == (2,) and len(first_input(node).meta["shape"]) == 4:
        return first_input(node)
    else:
        wide = graph.call_function(torch.unsqueeze, (node, 2))
    wide.meta = {**node.meta, "shape": (*node.meta["shape"][:2], 1, *node.meta["shape"][2:])}
    return wide


def _adds_alike(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    head, add = nodes[:2]
    others = [n for n in add.all_input_nodes if n is not head]
    alike = len(others) == 1 and others[0].op != "get_attr" and others[0].meta.get("shape") == head.meta["shape"]
    return "" if alike else "the other operand is no other tensor of this shape"


def _dilates_nothing(node: fx.Node) -> bool:
    """A convolution whose kernel has one element along a dimension that it dilates, where dilation means nothing."""
    if not computes(1, 2)(node):
        return False
    row, bound = bind_known(node)
    return _dilation(node) != ints(bound[5], row.ndim)


def _dilation(node: fx.Node) -> list[int]:
    row, bound = bind_known(node)
    return plain_dilation(list(bound[1].meta["shape"][2:]), ints(bound[5], row.ndim))


def _undilated(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """oneDNN 3.12 reads out of bounds there, with padding."""
    (node,) = nodes
    _, bound = bind_known(node)
    bound[5] = _dilation(node)
    node.args, node.kwargs = tuple(bound), {}
    return "dilation of what has one element"


def _has_one_channel(node: fx.Node) -> bool:
    if not computes(2)(node):
        return False
    _, bound = bind_known(node)
    return bound[1].meta["shape"][1] == 1 and bound[6] == 1


def _with_a_channel(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Beside its one channel another, which weighs nothing: of one channel torch 2.13 takes what int8 convolutions
    return for contiguous where sizes are free, as it is of float ones; it is channels_last.
    """
    (node,) = nodes
    _, (source, weight, *_) = bind_known(node)
    graph, int8 = lowering.graph, weight.args[0]
    name = f"{int8.target}_padded".replace(".", "_")
    if not hasattr(lowering.module, name):
        lowering.module.register_buffer(name, F.pad(lowering.tensor(int8), (0, 0, 0, 0, 0, 1)))
    with graph.inserting_before(node):
        q = graph.call_function(F.pad, (source.args[0], (0, 0, 0, 0, 0, 1)))
        wide = graph.call_function(source.target, (q, *source.args[1:]), source.kwargs)
        padded = graph.call_function(weight.target, (graph.get_attr(name), *weight.args[1:]), weight.kwargs)
    batch, _, *image = source.meta["shape"]
    q.meta, wide.meta = ({**n.meta, "shape": (batch, 2, *image)} for n in (source.args[0], source))
    padded.meta = {**weight.meta, "shape": (weight.meta["shape"][0], 2, *weight.meta["shape"][2:])}
    for old, new in ((source, wide), (weight, padded)):
        node.replace_input_with(old, new)
        lowering.erase(old)
    return "a channel of zeros beside the one"


def _pools_wrongly(node: fx.Node) -> bool:
    """A max pool that Inductor takes for ``quantized.max_pool2d``, which torch 2.13 then calls with other options."""
    found = bind(node)
    if found is None or not found[0].name.startswith("max_pool") or not moves(node):
        return False
    return found[0].ndim != 2 or bool(found[1][5])


def _pools_levels(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """The largest integer, in generated code."""
    (node,) = nodes
    graph, source = lowering.graph, first_input(node)
    with graph.inserting_before(node):
        levels = graph.call_method("to", (source.args[0], torch.float32))
    levels.meta = dict(source.meta)
    with graph.inserting_after(node):
        integers = graph.call_method("to", (node, torch.uint8))
    integers.meta = {**node.meta, "dtype": torch.uint8}
    for reader in list(node.users):
        if reader is not integers:
            lowering.replace(reader, integers)
    node.replace_input_with(source, levels)
    lowering.erase(source)
    return "max pool of integers, generated"


def _reads_strides(node: fx.Node) -> bool:
    """A linear layer whose input is not contiguous, which Inductor would take for a batch of products."""
    found = bind(node)
    return (
        found is not None and found[0].name == "linear" and is_dequantize(found[1][0]) and is_weight(found[1][1])
        and len(found[1][0].meta["shape"]) > 2 and not found[1][0].meta.get("contiguous", True)
    )  # fmt: skip


def _contiguous(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    source = bind_known(node)[1][0]
    with lowering.graph.inserting_before(source):
        q = lowering.graph.call_method("contiguous", (source.args[0],))
        dense = lowering.graph.call_function(DEQUANTIZE, (q, *source.args[1:]))
    q.meta = {**source.args[0].meta, "contiguous": True}
    dense.meta = {**source.meta, "contiguous": True}
    node.replace_input_with(source, dense)
    lowering.erase(source)
    return "contiguous"


def _in_float(node: fx.Node) -> bool:
    """A weight that is read by what has no int8 kernel here."""
    readers = [row_of(user) for user in node.users]
    return is_weight(node) and not any(row is not None and row.name in _INT8 for row in readers)


def _as_constant(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Inductor keeps what dequantizes a weight, for its own passes, and would run it in each call."""
    (node,) = nodes
    value = function_of(node)(*fx.map_arg(node.args, lowering.tensor), **node.kwargs)
    name = f"{node.name}_float"
    lowering.module.register_buffer(name, value)
    with lowering.graph.inserting_before(node):
        constant = lowering.graph.get_attr(name)
    constant.meta = dict(node.meta)
    for user in node.users:
        if user.meta.get("op") is not None:
            lowering.reasons[user.meta["op"]] = _NO_KERNEL
    lowering.replace(node, constant)
    return "a constant in float"


def _fault(node: fx.Node) -> str:
    """What the int8 kernel of a convolution does wrong for the example's sizes."""
    if not computes(2)(node):
        return ""
    _, (x, weight, _, *sizes, groups) = bind_known(node)
    if isinstance(sizes[1], str):
        return ""
    return fault_in_words(geometry_of(x.meta["shape"], weight.meta["shape"], sizes, groups))


def _is_faulty(node: fx.Node) -> bool:
    return bool(_fault(node))


def _in_float_by_fault(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """A weight of its own in float, so that other readers keep theirs."""
    (node,) = nodes
    reason, weight = _fault(node), bind_known(node)[1][1]
    with lowering.graph.inserting_before(node):
        own = lowering.graph.node_copy(weight)
    own.meta = dict(weight.meta)
    node.replace_input_with(weight, own)
    _as_constant(lowering, [own])
    lowering.erase(weight)
    if (op := node.meta.get("op")) is not None:
        lowering.reasons[op] = f"{reason}; values and weights are rounded as before"
    return f"float: {reason}"


def _chooses_without_zero(node: fx.Node) -> bool:
    return is_call(node, CHOOSE_QPARAMS) and not is_call(node.args[0], torch.cat)


def _with_zero(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Inductor's qparams of a value without zero among its numbers leave zero, and all beyond the span, out."""
    (node,) = nodes
    graph, x = lowering.graph, first_input(node)
    with graph.inserting_before(node):
        ends = [graph.call_method("reshape", (graph.call_method(name, (x,)), (1,))) for name in ("amin", "amax")]
        zero = graph.call_method("new_zeros", (x, (1,)))
        node.replace_input_with(x, graph.call_function(torch.cat, ([*ends, zero],)))
    return "qparams of a range with zero"


REWRITES: list[Rewrite] = [
    on("qparams_with_zero", _chooses_without_zero, _with_zero),
    on("dilation", _dilates_nothing, _undilated),
    *(
        Rewrite(f"conv1d{suffix}", [_conv1d, *steps], guard, _widened)
        for suffix, steps, guard in epilogues(_adds_alike, fine)
    ),
    on("one_channel", _has_one_channel, _with_a_channel),
    on("max_pool", _pools_wrongly, _pools_levels),
    on("linear_contiguous", _reads_strides, _contiguous),
    on("known_fault", _is_faulty, _in_float_by_fault),
    on("weight_in_float", _in_float, _as_constant),
]


def prepare(lowering: Lowering) -> None:
    """Rewrite a Q/DQ graph, which Inductor takes as it is, into one of which it makes more."""
    fold_factors(lowering)
    lowering.apply(REWRITES)
    remove_dead(lowering.graph)
    lowering.graph.lint()
