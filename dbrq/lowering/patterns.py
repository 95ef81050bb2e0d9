"""What backends share: predicates on nodes, and rewrites whose results are ops of torch or plain functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..eager.views import names_dtype
from ..graph.nodes import DEQUANTIZE, DEQUANTIZE_ROWS, QUANTIZE_ROWS
from ..kernels import QParams, ints, script
from ..mappings import Role
from ..op_facts import Memory, called, is_random, is_written
from .engine import (
    Lowering,
    Predicate,
    Rewrite,
    bind,
    bind_known,
    first_input,
    is_call,
    is_dequantize,
    is_dynamic_input,
    is_quantize,
    is_weight,
    qparams_of,
    row_of,
)

#: Why the nodes found cannot be replaced, "" if they can.
Guard = Callable[[Lowering, Sequence[fx.Node]], str]


def named(*names: str) -> Predicate:
    def fits(node: fx.Node) -> bool:
        row = row_of(node)
        return row is not None and row.name in names

    return fits


def computes(*ndims: int) -> Predicate:
    """A convolution (by its number of spatial dimensions) or linear layer (0), int8 in and int8 weights."""

    def fits(node: fx.Node) -> bool:
        found = bind(node)
        if (
            found is None
            or found[0].role is not Role.COMPUTE
            or found[0].name == "matmul"
            or found[0].ndim not in ndims
        ):
            return False
        return is_dequantize(found[1][0]) and is_weight(found[1][1])

    return fits


def is_activation(node: fx.Node) -> bool:
    row = row_of(node)
    return row is not None and row.role is Role.ACTIVATION


def fine(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    return ""


def on(name: str, predicate: Predicate, replace: Callable, guard: Callable = fine) -> Rewrite:
    return Rewrite(name, [predicate], guard, replace)


def epilogues(takes_sum: Guard, takes_activation: Guard) -> list[tuple[str, list[Predicate], Guard]]:
    """What may follow a convolution or linear layer that is to be one kernel with it, longest first: a name, the nodes,
    and whether they can.
    """
    add, relu = named("add"), named("relu")
    return [
        ("_add_relu_quantize", [add, relu, is_quantize], takes_sum),
        ("_add_quantize", [add, is_quantize], takes_sum),
        ("_add_relu", [add, relu], takes_sum),
        ("_add", [add], takes_sum),
        ("_activation_quantize", [is_activation, is_quantize], takes_activation),
        ("_activation", [is_activation], takes_activation),
        ("_quantize", [is_quantize], fine),
        ("", [], fine),
    ]


# Spellings


def _is_silu(node: fx.Node) -> bool:
    """``x * sigmoid(x)``."""
    return _gated(node) is not None


def _gated(node: fx.Node) -> fx.Node | None:
    """The ``x`` of ``x * sigmoid(x)``, where nothing else reads the sigmoid."""
    found = bind(node)
    if found is None or found[0].name != "mul":
        return None
    for x, gate in (found[1][:2], found[1][1::-1]):
        inner = bind(gate)
        if inner is not None and inner[0].name == "sigmoid" and inner[1][0] is x and len(gate.users) == 1:
            return x if len(x.users) == 2 else None
    return None


def _gate_fits(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    gate = next(n for n in node.all_input_nodes if (row := row_of(n)) is not None and row.name == "sigmoid")
    return lowering.disturbed([gate, node])


def _silu(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    x = _gated(node)
    assert x is not None
    lowering.replace(node, lowering.call(node, torch.nn.functional.silu, (x,), node))
    return "silu"


# On integers


def inputs_of(node: fx.Node) -> list[fx.Node]:
    found = bind(node)
    assert found is not None
    return list(found[1][0]) if found[0].takes_list else [found[1][0]]


def moves(node: fx.Node) -> bool:
    """An op that moves or chooses elements of int8 values, all of one scale, and is quantized right after to the
    same.
    """
    row = row_of(node)
    if row is None or row.role not in (Role.PASS, Role.SHARE) or not node.users:
        return False
    if names_dtype(node.args, node.kwargs):
        return False
    sources = inputs_of(node)
    if not all(map(is_dequantize, sources)):
        return False
    qparams = qparams_of(sources[0])
    if any(qparams_of(s) != qparams for s in sources):
        return False
    users = [user for user in node.users if not is_call(user, len)]  # of how many parts there are
    readers = [reader for user in users for reader in (user.users if is_call(user, operator.getitem) else (user,))]
    return bool(readers) and all(is_quantize(r) and qparams_of(r) == qparams for r in readers)


def _sizes(value: Any, n: int) -> list[Any]:
    """One number, known or computed, per spatial dimension."""
    return [value] * n if isinstance(value, fx.Node) else ints(value, n)


def _moves_integers(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    row, bound = bind_known(node)
    qparams = qparams_of(inputs_of(node)[0])
    source, words = inputs_of(node)[0].args[0], "integers"
    target: Callable | None = None
    rest: tuple[Any, ...] = ()
    if row.name.startswith("max_pool"):
        n = row.ndim
        kernel = _sizes(bound[1], n)
        stride = kernel if bound[2] is None or bound[2] == [] else _sizes(bound[2], n)
        rest = (kernel, stride, _sizes(bound[3], n), _sizes(bound[4], n), bool(bound[5]))
        target, words = script.max_pool, "quantized.max_pool2d"
    elif row.name == "interpolate":
        n = len(node.meta["shape"]) - 2
        size = None if bound[1] is None else _sizes(bound[1], n)
        factors = None if bound[2] is None else bound[2] if isinstance(bound[2], (list, tuple)) else [bound[2]] * n
        target, rest = script.nearest, (size, factors, bound[3])
    elif row.name == "pad" and bound[2] == "constant":
        target, rest = script.pad, (bound[1], qparams.zero_point)
    elif row.name == "pad":
        target, rest = script.pad_mode, (list(bound[1]), bound[2])
    if target is not None:
        new = lowering.call(node, target, (source, *rest), node, dtype=torch.uint8, qparams=qparams)
    else:
        new = node
        for before in inputs_of(node):
            node.replace_input_with(before, first_input(before))
        node.meta.update(dtype=torch.uint8, qparams=qparams)
    for user in list(node.users):
        if is_call(user, len):
            continue
        if is_call(user, operator.getitem):
            user.meta.update(dtype=torch.uint8, qparams=qparams)
            for q in list(user.users):
                lowering.replace(q, user)
        else:
            lowering.replace(user, new)
    if new is not node:
        lowering.erase(node)
    return words


# Linear layers with other activations, and weights


def _is_dynamic_linear(node: fx.Node) -> bool:
    found = bind(node)
    if found is None or found[0].name != "linear" or not is_weight(found[1][1]):
        return False
    return is_dynamic_input(found[1][0])


def _dynamic_linear(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    _, bound = bind_known(node)
    q = bound[0].args[0]  # of a value, scale, zero point, and from which level to which
    kernel = script.DynamicLinear(
        lowering.tensor(bound[1].args[0]), lowering.tensor(bound[1].args[1]),
        None if bound[2] is None else lowering.tensor(bound[2]), QParams(1.0, 0), None, dtype=lowering.dtype,
        levels=q.args[4], by_row=is_call(q, QUANTIZE_ROWS),
    )  # fmt: skip
    path = lowering.hold(node.meta.get("op") or node.name, kernel)
    lowering.replace(node, lowering.call(node, path, (q.args[0],), node, dtype=lowering.dtype))
    return f"onednn.qlinear_pointwise (dynamic{', by row' if kernel.by_row else ''})"


def _is_weight_only_linear(node: fx.Node) -> bool:
    found = bind(node)
    return (
        found is not None
        and found[0].name == "linear"
        and is_weight(found[1][1])
        and not is_call(found[1][0], DEQUANTIZE)
        and not is_call(found[1][0], DEQUANTIZE_ROWS)
    )


def _weight_only_linear(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    _, bound = bind_known(node)
    args = (bound[0], bound[1].args[0], bound[1].args[1], bound[2])
    lowering.replace(node, lowering.call(node, script.weight_only_linear, args, node))
    return "int8 weights, float activations"


def _dequantize_weight(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    lowering.replace(node, lowering.call(node, script.dequantize_weight, node.args[:2], node))
    return "dequantize"


# Masks


def add_masks_once(lowering: Lowering) -> None:
    """A mask of truth values that several attentions read becomes a float mask once, and not in each."""
    for mask in list(lowering.graph.nodes):
        if mask.meta.get("dtype") is not torch.bool or is_written(mask):
            continue
        readers = [u for u in mask.users if is_call(u, F.scaled_dot_product_attention) and _mask_of(u) is mask]
        if len(readers) < 2:
            continue
        with lowering.graph.inserting_after(mask):
            added = lowering.graph.call_function(script.additive_mask, (mask, lowering.dtype))
        added.meta = {**mask.meta, "dtype": lowering.dtype}
        for reader in readers:
            reader.replace_input_with(mask, added)


def _mask_of(attention: fx.Node) -> Any:
    return attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")


# Layouts


#: Functions that see how a value lies in memory.
_SEE_STRIDES = frozenset({"as_strided", "stride", "as_strided_"})


def free_of_strides(lowering: Lowering) -> None:
    """Kernels write channels_last, parts of merged layers are views: who saw contiguous values must not notice.

    A copy for a reader is made where it reads, since the value may be written to until then. But whoever writes to a
    value through a view of it must write to the value itself: where a graph writes, what kernels make is contiguous
    from the start, and so are all values and views that torch makes of it, as they were for the float model.
    """
    graph = lowering.graph
    mutable = lowering.writes
    memory = Memory(graph)
    for node in list(graph.nodes):
        if not mutable:
            if node.op == "call_method" and not names_dtype(node.args, node.kwargs):
                node.target = _OF_ANY_LAYOUT.get(node.target, node.target)
            continue
        written = memory.is_written(node)  # then kernels too must read what others write to
        readers = [user for user in node.users if written or not _made_by_kernels(user)]
        if readers and _made_by_kernels(node) and _was_contiguous(node) and not memory.is_foreign(node):
            with graph.inserting_after(node):
                _read_contiguous(graph, node, readers)
    for node in list(graph.nodes):
        draws = is_random(node) and not mutable
        if node.op == "output" or draws or (called(node) in _SEE_STRIDES and not mutable):
            for read in node.all_input_nodes:
                if memory.is_foreign(read) or memory.is_held(read):
                    continue
                with graph.inserting_before(node):
                    if _was_contiguous(read):
                        _read_contiguous(graph, read, [node])
                    elif draws:
                        _read_in_order(graph, read, node)


_OF_ANY_LAYOUT: dict[Any, str] = {"view": "reshape", "view_as": "reshape_as"}


def _made_by_kernels(node: fx.Node) -> bool:
    """Whether lowering put the node in place of what was recorded."""
    recorded = node.meta.get("facts")
    return node.op in ("call_module", "call_function") and (recorded is None or recorded.call != called(node))


def _was_contiguous(node: fx.Node) -> bool:
    rank, dtype = len(node.meta.get("shape", ())), node.meta.get("dtype")
    return bool(rank > 1 and dtype is not torch.uint8 and node.meta.get("contiguous"))


def _read_contiguous(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    contiguous = graph.call_method("contiguous", (node,))
    contiguous.meta = dict(node.meta)
    for reader in readers:
        reader.replace_input_with(node, contiguous)


def _read_in_order(graph: fx.Graph, node: fx.Node, reader: fx.Node) -> None:
    """Have what draws numbers see the axes of a value in the order in which they lay in the run: that of the draws."""
    order, _ = node.meta.get("layout") or (None, None)
    if order is None or node.meta.get("dtype") is torch.uint8:
        return
    value = graph.call_method("contiguous", (graph.call_method("permute", (node, order)),))
    back = graph.call_method("permute", (value, tuple(map(order.index, range(len(order))))))
    back.meta = dict(node.meta)
    reader.replace_input_with(node, back)


SILU = on("silu", _is_silu, _silu, _gate_fits)
MOVES = on("moves", moves, _moves_integers)
DYNAMIC_LINEAR = on("dynamic_linear", _is_dynamic_linear, _dynamic_linear)
WEIGHT_ONLY_LINEAR = on("weight_only_linear", _is_weight_only_linear, _weight_only_linear)
DEQUANTIZE_WEIGHT = on("dequantize_weight", is_weight, _dequantize_weight)
