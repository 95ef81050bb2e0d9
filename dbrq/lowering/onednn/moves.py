"""Quantization before what only moves elements, so that a quarter of the bytes is moved."""

from __future__ import annotations

import torch
from torch import fx

from ...eager.views import names_dtype
from ..engine import Lowering, bind, bind_known, is_quantize, qparams_of


def quantize_before_moves(lowering: Lowering) -> None:
    """What is quantized after it was moved about in float is quantized where it was computed, and moved as integers."""
    graph = lowering.graph
    if lowering.writes:
        return
    for quantize in list(graph.nodes):
        if not is_quantize(quantize):
            continue
        moves: list[fx.Node] = []
        source = quantize.args[0]
        while isinstance(source, fx.Node) and len(source.users) == 1 and _only_moves(source):
            moves.append(source)
            source = bind_known(source)[1][0]
        if (
            not moves
            or not isinstance(source, fx.Node)
            or source.op in ("placeholder", "get_attr")
            or source.meta.get("dtype") is not torch.float32
        ):
            continue
        qparams = qparams_of(quantize)
        with graph.inserting_after(source):
            early = graph.call_function(quantize.target, (source, *quantize.args[1:]))
        early.meta = {
            **source.meta,
            "dtype": torch.uint8,
            "qparams": qparams,
            "name": f"{source.name}_q",
            "op": quantize.meta.get("op"),
        }
        moves[-1].replace_input_with(source, early)
        for move in moves:
            move.meta.update(dtype=torch.uint8, qparams=qparams)
        lowering.replace(quantize, moves[0])


_MOVING = frozenset({"view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "swapaxes", "swapdims",
                     "movedim", "moveaxis", "squeeze", "unsqueeze", "contiguous"})  # fmt: skip


def _only_moves(node: fx.Node) -> bool:
    found = bind(node)
    if found is None or found[0].name not in _MOVING or names_dtype(node.args, node.kwargs):
        return False
    return isinstance(found[1][0], fx.Node)
