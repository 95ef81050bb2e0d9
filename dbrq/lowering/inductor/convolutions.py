"""Int8 convolutions that go wrong, of which Inductor is kept from making int8 kernels."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from ...kernels import ints
from ...kernels.known_faults import Geometry, fault_of


class FixedSizes(Exception):
    """The sizes must stay as they are, since for these one of the graph's convolutions has no int8 kernel."""


def fault_in_words(geometry: Geometry) -> str:
    """Why the kernel that Inductor would call is not to be trusted with a convolution, or ""."""
    fault = fault_of(geometry)
    return "" if fault is None else f"torch's int8 kernel is wrong on some CPU for {fault.name}"


_CONVOLUTION_DEFAULTS: tuple[Any, ...] = (None, [1, 1], [0, 0], [1, 1], 1)
_DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
_DEQUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default


@dataclass(frozen=True)
class Convolution:
    """An int8 convolution of the graph that Inductor is given.

    Attributes:
        node: it.
        shape: of its input: integers, and expressions where sizes are free.
        geometry: for sizes of some kind.
    """

    node: fx.Node
    shape: tuple[int | sympy.Expr, ...]
    geometry: Geometry

    def fault(self, numbers: Mapping[sympy.Symbol, int]) -> str:
        """What its int8 kernel does wrong, where free sizes are ``numbers``."""
        sizes = [s if isinstance(s, int) else s.subs(numbers) for s in self.shape]
        if not isinstance(sizes[0], int) and not sizes[0].is_Integer:
            sizes[0] = 2  # a batch whose size depends on values
        if not all(isinstance(size, int) or size.is_Integer for size in sizes):
            return "int8 kernels are wrong for some sizes, and those of an image depend on values"
        geometry = dataclasses.replace(self.geometry, shape=tuple(map(int, sizes)))
        if 0 in geometry.shape:
            return "what is added to a result without elements has no layout that torch's kernel takes"
        image, free = geometry.shape[2:], any(not isinstance(size, int) for size in self.shape)
        if free and (geometry.shape[1] == 1 or (max(image) == 1 and max(geometry.result) > 1)):
            return "torch 2.13 is wrong about the layout of its result where sizes are free"
        return fault_in_words(geometry)

    def in_float(self, module: fx.GraphModule) -> None:
        """Have it read its weight as a constant in float, which leaves it to a float kernel."""
        weight: Any = self.node.args[1]
        tensors = (operator.attrgetter(str(a.target))(module) if isinstance(a, fx.Node) else a for a in weight.args)
        name = f"{self.node.name}_in_float"
        module.register_buffer(name, weight.target(*tensors))
        with module.graph.inserting_before(self.node):
            constant = module.graph.get_attr(name)
        constant.meta = dict(weight.meta)
        self.node.replace_input_with(weight, constant)


def geometry_of(
    shape: Sequence[int], weight: Sequence[int], sizes: Sequence[int | Sequence[int]], groups: int
) -> Geometry:
    """A conv2d's geometry, from the shapes of its input and weight, and stride, padding and dilation."""
    outputs, _, *kernel = weight
    stride, padding, dilation = (tuple(ints(value, 2)) for value in sizes)
    return Geometry(tuple(shape), outputs, tuple(kernel), stride, padding, dilation, groups)


def convolutions_of(graph: fx.Graph) -> list[Convolution]:
    """Those that Inductor makes int8 kernels of."""
    found = []
    x: Any
    weight: Any
    rest: list[Any]
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default):
        x, weight, *rest = node.args
        if not _is_made_by(x, _DEQUANTIZE) or not _is_made_by(weight, _DEQUANTIZE_PER_CHANNEL):
            continue
        _, stride, padding, dilation, groups = (*rest, *_CONVOLUTION_DEFAULTS[len(rest) :])
        sizes = (s.node.expr if isinstance(s, torch.SymInt) else s for s in x.meta["val"].shape)
        geometry = geometry_of((), weight.meta["val"].shape, (stride, padding, dilation), groups)
        found.append(Convolution(node, tuple(sizes), geometry))
    return found


def _is_made_by(node: Any, function: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is function
