"""Factors by which a model smooths what its linear layers read, taken into the parameters of what makes the value.

``linear(norm(x) * factors)`` costs a multiplication that a norm, a product with a parameter or a layer with a weight
does by the way, if nothing else reads its result: ``norm(x, weight * factors, bias * factors)``. Elsewhere, as behind a
norm whose result goes to a residual sum too, each backend multiplies in the pass that quantizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..graph.nodes import is_impure
from .engine import Lowering, bind, first_input, is_smoothing, is_weight
from .passes import written_attributes

#: Norms along the last axes, whose weight is argument 2 and whose bias, if there is one, argument 3.
_WITH_BIAS = (F.layer_norm, torch.layer_norm)
_NORMS = (*_WITH_BIAS, F.rms_norm, torch.rms_norm)
#: Names of their arguments from the weight on, of those without and those with a bias.
_BEHIND = (("weight", "eps"), ("weight", "bias", "eps", "cudnn_enable"))


def fold_factors(lowering: Lowering) -> None:
    """Take factors into what makes the value that they multiply, where nothing else reads it."""
    written = written_attributes(lowering.graph)
    for product in list(lowering.graph.nodes):
        if not is_smoothing(product):
            continue
        source, factors = first_input(product), _Factors(lowering, product, written)
        fixed = bool({source.name, product.name} & lowering.kept) or is_impure(source)
        if len(source.users) > 1 or fixed or not factors.takes(factors.node):
            continue
        if source.meta.get("dtype") is not torch.float32:
            continue
        for fold in (_into_norm, _into_product, _into_layer):
            if words := fold(source, factors):
                lowering.note("fold_factors", product, words)
                lowering.replace(product, source)
                break


class _Factors:
    """Factors of one value's last axis, and the parameters that they are taken into."""

    def __init__(self, lowering: Lowering, product: fx.Node, written: frozenset[str]) -> None:
        self.lowering, self.product, self.written = lowering, product, written
        self.source = first_input(product)
        self.node: Any = product.args[1]
        self.values = lowering.tensor(self.node)

    def takes(self, parameter: Any) -> bool:
        """Whether a parameter is one of the model's tensors in float32, which calls do not change."""
        if not isinstance(parameter, fx.Node) or parameter.op != "get_attr" or parameter.target in self.written:
            return False
        return self.lowering.tensor(parameter).dtype is torch.float32

    def times(self, parameter: Any, shape: Sequence[int] = (-1,)) -> fx.Node:
        """A new parameter: the old one times the factors, which have the given shape for it."""
        return self.held(parameter, self.lowering.tensor(parameter).detach() * self.values.reshape(shape))

    def held(self, like: fx.Node, value: Tensor) -> fx.Node:
        """The node of a new tensor of the model, before what is to read it."""
        name = f"{self.product.name}_{str(like.target).rpartition('.')[2]}"
        self.lowering.module.register_buffer(name, value.contiguous())
        with self.lowering.graph.inserting_before(self.source):
            node = self.lowering.graph.create_node("get_attr", name, name=name)
        node.meta = {**like.meta, "shape": tuple(value.shape), "contiguous": True}
        return node


def _into_norm(norm: fx.Node, factors: _Factors) -> str:
    if norm.op != "call_function" or norm.target not in _NORMS:
        return ""
    has_bias = norm.target in _WITH_BIAS
    shape, weight = _argument(norm, 1, "normalized_shape"), _argument(norm, 2, "weight")
    bias = _argument(norm, 3, "bias") if has_bias else None
    if any(not (p is None or factors.takes(p)) for p in (weight, bias)):
        return ""
    if weight is not None:
        weight = factors.times(weight)
    else:
        sizes = list(shape) if isinstance(shape, (list, tuple)) else [shape]
        if not all(isinstance(size, int) for size in sizes):
            return ""
        weight = factors.held(factors.node, factors.values.expand(sizes))
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": factors.times(bias)}
    rest = dict(zip(_BEHIND[has_bias], norm.args[2:], strict=False))
    norm.args, norm.kwargs = norm.args[:2], {**rest, **norm.kwargs, **given}
    return "in the norm's parameters"


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _into_product(node: fx.Node, factors: _Factors) -> str:
    """The product of a value and a parameter, as the last step of a norm that is spelled out."""
    found = bind(node)
    if found is None or found[0].name != "mul":
        return ""
    for parameter, other in (found[1][:2], found[1][1::-1]):
        if not factors.takes(parameter) or not isinstance(other, fx.Node) or other is parameter:
            continue
        if other.meta.get("dtype") is not torch.float32 or other.meta.get("shape") != node.meta["shape"]:
            continue
        node.replace_input_with(parameter, factors.times(parameter))
        return "in the parameter that the value is multiplied by"
    return ""


def _into_layer(node: fx.Node, factors: _Factors) -> str:
    """The rows of a linear layer's weight, or the scales of these rows, and its bias."""
    found = bind(node)
    if found is None or found[0].name != "linear":
        return ""
    _, weight, bias = found[1][:3]
    if not (bias is None or factors.takes(bias)):
        return ""
    if is_weight(weight) and factors.takes(weight.args[1]) and weight.args[3] == 0:
        int8, scale, *rest = weight.args
        new = factors.times(scale)
        with factors.lowering.graph.inserting_before(node):
            own = factors.lowering.graph.node_copy(weight)
        own.args, own.meta = (int8, new, *rest), dict(weight.meta)
    elif factors.takes(weight):
        own = factors.times(weight, (-1, 1))
    else:
        return ""
    node.replace_input_with(weight, own)
    factors.lowering.erase(weight)
    if bias is not None:
        node.replace_input_with(bias, factors.times(bias))
    return "in the rows of the layer's weight, and its bias"
