"""A scripted model that carries an example and what it should compute, and can tell whether it does on the CPU at hand.

A TorchScript file meets CPUs that no check of ours has seen. ``self_test()`` needs no dbrq, from Python or C++; it runs
the example from the state that the model was lowered in, compares, and leaves the state as it was.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import flush_plans, pytree
from ..graph.nodes import QUANTIZE
from ..kernels import script
from ..kernels.ranges import SAFE
from .engine import Lowering, is_call
from .passes import written_attributes

#: SQNR in dB that a right CPU reaches at least; 10 dB less than here where lowering itself is farther from the graph.
_ENOUGH, _SLACK, _LEAST = 30.0, 10.0, 10.0
_PREFIX = "self_test"
#: What no pair of results is farther apart, or nearer, than.
_FAR, _EQUAL = -1000.0, 1000.0

_COMPARISON = f"""
def {_PREFIX}_of(self, got: Optional[Tensor], expected: Tensor, values: bool) -> float:
    if got is None:
        return {_FAR}
    if list(got.size()) != list(expected.size()):
        return {_FAR}
    if self.{_PREFIX}_shapes_only or not values or got.numel() == 0:
        return {_EQUAL}
    a = got.detach().to(torch.float64)
    b = expected.to(torch.float64)
    if not expected.is_floating_point():
        return {_EQUAL} if float((a == b).to(torch.float64).mean().item()) >= 0.9 else {_FAR}
    finite = torch.isfinite(b)
    a = torch.where(finite, a, torch.zeros_like(a))
    b = torch.where(finite, b, torch.zeros_like(b))
    noise = float((a - b).norm().item())
    signal = float(b.norm().item())
    if noise == 0.0:
        return {_EQUAL}
    if not (noise < 1e300) or signal == 0.0:
        return {_FAR}
    return float(20.0 * (torch.log10(torch.tensor(signal)) - torch.log10(torch.tensor(noise))).item())
"""


#: The attribute of a scripted model that says how large the integers of its activations may be.
WIDEST = "dbrq_widest"
#: Pairs of products of the largest integers, which some CPUs sum in 16 bits: the example may not have any.
_EXTREMES = f"""
def {_PREFIX}_is_exact(self) -> bool:
    if self.{WIDEST} <= {SAFE}:
        return True
    x = torch.full([4, 64], self.{WIDEST}, dtype=torch.uint8)
    weight = torch.ops.onednn.qlinear_prepack(torch.full([16, 64], 127, dtype=torch.int8), None)
    got = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, weight, torch.ones([16]), torch.zeros([16], dtype=torch.int64), torch.zeros([16]), 1.0, 0,
        torch.float32, "none", [], "")
    return bool((got == float(self.{WIDEST} * 127 * 64)).all())
"""


def widest_level(graph: fx.Graph, module: nn.Module) -> int:
    """The largest integer that a Q/DQ graph, or one of the modules that it calls, quantizes an activation to."""
    inside = [m.levels for m in module.modules() if isinstance(m, script.DynamicLinear)]
    return max([0, *inside, *(node.args[4] for node in graph.nodes if is_call(node, QUANTIZE))])


def expected_outputs(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """What a Q/DQ graph computes in float: the reference. Its state is left as it is."""
    kept = {name: tensor.clone() for name, tensor in graph.state_dict().items()}
    run = fx.Interpreter(graph)
    with torch.no_grad():
        outputs = run.run(*copy.deepcopy(tuple(inputs)), enable_io_processing=False)
        outputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), outputs)
        for name, tensor in graph.state_dict().items():
            tensor.copy_(kept[name])
    return outputs


class SelfTest:
    """The method to be, for one module; ``hold`` before the module is scripted and ``define`` after."""

    def __init__(self, lowering: Lowering, inputs: Sequence[Any], expected: Any, widest: int) -> None:
        self._widest = widest
        self._tensors: dict[str, Tensor] = {}
        nodes = {str(n.target): n for n in lowering.graph.nodes if n.op == "get_attr"}
        written = sorted(written_attributes(lowering.graph))
        arguments = ", ".join(self._literal(value) for value in inputs)
        before = [f"    kept_{i} = {_attribute(path)}.clone()" for i, path in enumerate(written)]
        before += [f"    {_attribute(path)}.copy_({self._held(lowering.tensor(nodes[path]))})" for path in written]
        after = [f"    {_attribute(path)}.copy_(kept_{i})" for i, path in enumerate(written)]
        found = list(_leaves(expected, "got"))
        floats = any(tensor.is_floating_point() for _, tensor in found)
        compared = [
            f"    worst = min(worst, self.{_PREFIX}_of({path}, {self._held(tensor)}, "
            f"{tensor.is_floating_point() or not floats}))"
            for path, tensor in found
        ]
        self._source = "\n".join(
            [
                f"def {_PREFIX}_sqnr(self) -> float:",
                *before,
                f"    got = self.forward({arguments})",
                f"    worst = {_EQUAL}",
                *compared,
                *after,
                "    return worst",
                "",
            ]
        )

    def hold(self, module: nn.Module) -> None:
        """Give a module the tensors."""
        for name, tensor in self._tensors.items():
            setattr(module, name, tensor)
        setattr(module, WIDEST, self._widest)
        setattr(module, f"{_PREFIX}_least", _ENOUGH)
        setattr(module, f"{_PREFIX}_shapes_only", False)

    def define(self, scripted: torch.jit.ScriptModule) -> None:
        """Give it the methods, and settle how near a right CPU comes to what is expected."""
        scripted.define(_COMPARISON)
        scripted.define(self._source)
        scripted.define(_EXTREMES)
        scripted.define(
            f"def {_PREFIX}(self) -> bool:\n"
            f"    return self.{_PREFIX}_is_exact() and self.{_PREFIX}_sqnr() >= self.{_PREFIX}_least\n"
        )
        # Without a plan of its own, which would take as long as that of the model and as much memory.
        with torch.no_grad(), torch.jit.optimized_execution(False):
            once, again = (scripted.self_test_sqnr() for _ in range(2))
        flush_plans(scripted.self_test_sqnr)
        near = min(once, again)
        if once != again and near < _LEAST + _SLACK:  # drawn at random
            scripted.self_test_shapes_only = True
        scripted.self_test_least = max(min(_ENOUGH, near - _SLACK), _LEAST)

    def _held(self, tensor: Tensor) -> str:
        name = f"{_PREFIX}_value_{len(self._tensors)}"
        self._tensors[name] = tensor.detach().clone()
        return f"self.{name}"

    def _literal(self, value: Any) -> str:
        """An input, as TorchScript writes it."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or _keeps_strides(value):
                return f"{self._held(value)}.clone()"
            span = f"{self._held(_memory_of(value))}.clone()"
            return f"{span}.as_strided({list(value.shape)}, {list(value.stride())})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._literal(item)}" for key, item in value.items()) + "}"
        items = ", ".join(map(self._literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items},)" if items else "()"


def _keeps_strides(tensor: Tensor) -> bool:
    """Whether a copy is laid out as the tensor is: graphs may go by that, and say so of their inputs."""
    return tensor.numel() == 0 or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _memory_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor, one-dimensional, where its strides look for them; zeros in between."""
    strides = tensor.stride()
    memory = tensor.new_zeros(1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)))
    once = tensor[tuple(slice(0, 1 if s == 0 else n) for n, s in zip(tensor.shape, strides, strict=True))]
    memory.as_strided(once.shape, strides).copy_(once)
    return memory


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, and how TorchScript reaches each."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in zip(itertools.count(), value, strict=False):
            yield from _leaves(item, f"{path}[{i}]")


def _attribute(path: str) -> str:
    """``a.0.b`` of a module, in TorchScript."""
    found = "self"
    for part in path.split("."):
        found = f"{found}.{part}" if part.isidentifier() else f'getattr({found}, "{part}")'
    return found
