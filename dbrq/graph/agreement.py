"""Whether two forms of one model compute the same: the converted model, its Q/DQ graph, and what is lowered from that.

The Q/DQ graph run in float is the reference. Another form of it may round a value to the other side of a step, and a
deep network may amplify that; how far is measured on the reference itself, whose values are nudged as rounding would.
A form is judged on the example and on perturbed inputs, so that what was frozen of the example shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import codegen_of, storage_id, version
from ..op_facts import writes
from .difference import Difference, difference, noises, numbers, rms
from .nodes import DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE, quicker
from .signature import RestoringCodeGen
from .trials import Outcome, Trial, outcome, owned, seeded

#: Runs of the nudged reference.
_SAMPLES = 6
#: Outcomes of a reference that strays further than this, relative to its values, say little about single ops.
INFORMATIVE = 0.1
#: Float weights of a reference that are kept between its runs, in bytes.
_KEPT = 1 << 29


@dataclass(frozen=True)
class WrongOp:
    """An op that is wrong: the module that ran it, its name in reports, what was expected and what came, in words."""

    path: str
    op: str
    expected: str
    got: str


class Reference(fx.Interpreter):
    """A Q/DQ graph run in float. The graph stays as it is, and so do the tensors that it writes to.

    Args:
        graph: the graph; this keeps a copy of it, and its tensors.
        dtype: what the forms that are compared with it compute in, where they compute in float.
    """

    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype = torch.float32) -> None:
        nodes = copy.deepcopy(graph.graph)
        codegen = codegen_of(nodes)
        self.returned = codegen.returned if isinstance(codegen, RestoringCodeGen) else None
        super().__init__(fx.GraphModule(graph, nodes))
        self.extra_traceback = False
        self.dtype = dtype
        self.writes = any(map(writes, nodes.nodes))
        self._weights: dict[fx.Node, Tensor] = {}
        self._room = _KEPT
        self._held: dict[str, tuple[Tensor, Tensor]] = {}  # path -> a copy for one call, and what it is a copy of
        self.changed: set[str] = set()  # paths of the tensors that calls wrote to
        self._nudge: torch.Generator | None = None
        self._forced: Callable[[fx.Node, Any], Any] | None = None
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._undefined: set[fx.Node] = set()  # of this call: what comes of quantizing NaN, which gives any number
        self._vague: set[str] = set()  # trials in which there were such

    def expected(self, trial: Trial) -> dict[str, Any]:
        """What a call gives."""
        if trial.words not in self._outcomes:
            self._outcomes[trial.words] = self._outcome(trial)
            if self._undefined:
                self._vague.add(trial.words)
        return self._outcomes[trial.words]

    def samples(self, trial: Trial) -> list[dict[str, Any]]:
        """What it gives when its values are nudged as rounding would."""
        if trial.words not in self._samples:
            self._samples[trial.words] = [self._outcome(trial, seed) for seed in range(_SAMPLES)]
        return self._samples[trial.words]

    def difference(self, trial: Trial, got: Outcome) -> Difference | None:
        """Where what another form gave strays further than rounding accounts for; None if nowhere, or if NaN was
        quantized, for which there is no right number.
        """
        expected = self.expected(trial)
        return None if trial.words in self._vague else difference(expected, got, lambda: self.samples(trial))

    def noise(self, trial: Trial) -> float:
        """How far rounding alone was seen to change an outcome, relative to its size; 0 where all agreed so closely
        that nobody had to look.
        """
        if trial.words not in self._samples:
            return 0.0
        return max([0.0, *noises(self.expected(trial), self.samples(trial))])

    def wrong_op(self, trial: Trial, values: Mapping[fx.Node, Tensor]) -> WrongOp | None:
        """The first op whose value in another form is wrong, given the values that form has for its inputs.

        Args:
            values: node -> what the other form has for it.
        """
        found: list[WrongOp] = []

        def forced(node: fx.Node, value: Any) -> Any:
            other = values.get(node)
            if other is None or not isinstance(value, Tensor):
                return value
            if (other.shape, other.dtype) != (value.shape, value.dtype):
                return value
            if node.target is DEQUANTIZE and isinstance(node.args[1], float):  # an op may leave rounding to its reader
                qparams: Any = node.args[1:5]
                other = torch.fake_quantize_per_tensor_affine(other, *qparams)
            problem = None if node in self._undefined else _local_difference(node, value, other)
            self._undefined.discard(node)
            if problem is not None:
                found.append(WrongOp(node.meta.get("path") or "", node.meta.get("op") or node.name, *problem))
            return value.copy_(other) if self.writes else other  # what is written to may have other names

        self.call(trial, forced)
        return found[0] if found else None

    def _outcome(self, trial: Trial, nudge: int | None = None) -> dict[str, Any]:
        self._nudge = None if nudge is None else torch.Generator().manual_seed(nudge)
        try:
            return self.call(trial)
        finally:
            self._nudge = None

    def call(self, trial: Trial, forced: Callable[[fx.Node, Any], Any] | None = None) -> dict[str, Any]:
        """The outcome of a call.

        Args:
            forced: given a node and its value, returns the value to go on with.
        """
        inputs = owned(trial.inputs)
        self._held, self._forced = {}, forced
        self._undefined = set()
        try:
            with torch.inference_mode(False), torch.no_grad(), seeded(trial.seed):
                plain = self.run(*inputs)
        finally:
            self._forced = None
        output = _mutable(plain) if self.returned is None else self.returned(plain)
        changed = {
            name: held for name, (held, before) in self._held.items() if version(held) or not torch.equal(held, before)
        }
        self.changed |= set(changed)
        self._held = {}
        return outcome(output, inputs if self.writes else None, changed)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if not self.writes or not isinstance(value, Tensor) or value.dtype is torch.int8:
            return value
        if target not in self._held:
            self._held[target] = value.clone(), value  # some of torch's ops write without counting a version
        return self._held[target][0]

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return super().call_function(quicker(target), args, kwargs)

    def run_node(self, node: fx.Node) -> Any:
        if node in self._weights:
            return self._weights[node]
        value = super().run_node(node)
        given = [n for n in node.all_input_nodes if n in self.env]
        nan = node.target is QUANTIZE and bool(given) and bool(self.env[given[0]].isnan().any())
        if nan or any(n in self._undefined for n in given):
            self._undefined.add(node)
        if node.target is DEQUANTIZE_PER_CHANNEL and all(n.op == "get_attr" for n in node.all_input_nodes):
            size = value.numel() * value.element_size()
            if size <= self._room:
                self._room -= size
                self._weights[node] = value
        elif self._nudge is not None and node.op in ("call_function", "call_method", "call_module"):
            value = self._nudged(node, value)
        return value if self._forced is None else self._forced(node, value)

    def _nudged(self, node: fx.Node, value: Any) -> Any:
        """A float value with an error such as sums in another order have, and such that of those that are quantized
        next a few go to the other side of a step. What is next to zero is below it, zero and above it in turn: integers
        cancel where floats leave a rest, and ``!= 0``, ``> 0`` or ``%`` tell.
        """
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16) or not value.numel():
            return value
        if node.target is DEQUANTIZE or writes(node) or self._is_view(node, value):
            return value
        reader = next((user for user in node.users if user.target is QUANTIZE), None)
        finite = value.isfinite()
        error = rest = rms(torch.where(finite, value, 0.0)) * (2.0**-8 if self.dtype is torch.bfloat16 else 1e-5)
        if reader is not None and isinstance(reader.args[1], float):
            rows = max(value.shape[0] if value.dim() else 1, 1)
            error = max(error, min(0.5, max(0.02, 16 * rows / value.numel())) * reader.args[1])
        noise = torch.rand(value.shape, generator=self._nudge).sub_(0.5).mul_(2 * error)
        nudged = torch.where(finite, value + noise, value)
        if self._nudge is not None:
            side = self._nudge.initial_seed() % 3 - 1
            nudged = torch.where(value.abs() <= rest, side * noise.abs(), nudged)
        return value.copy_(nudged)  # what is a view of it comes later

    def _is_view(self, node: fx.Node, value: Tensor) -> bool:
        """Whether a value shares memory with what it was made of, or with itself."""
        if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)):
            return True
        storage = storage_id(value.untyped_storage())
        given = (self.env.get(n) for n in node.all_input_nodes)
        return any(isinstance(g, Tensor) and storage_id(g.untyped_storage()) == storage for g in given)


def _local_difference(node: fx.Node, expected: Tensor, got: Tensor) -> tuple[str, str] | None:
    """What is wrong with the value of one op, given its inputs: for a quantized one more than the step that rounding
    leaves open, for a float one more than the steps of what it quantized itself come to.
    """
    e, g = numbers(expected), numbers(got)
    finite = e.isfinite()
    if not torch.equal(finite, g.isfinite()):
        return "finite values where the graph has them", f"{int((finite != g.isfinite()).sum())} others"
    error = torch.where(finite, g - e, 0.0).abs()
    if not error.numel():
        return None
    largest = error.max().item()
    if node.target is DEQUANTIZE and isinstance(node.args[1], float):
        step = node.args[1]
        if largest <= 2.01 * step and rms(error) <= 0.7 * step:
            return None
        return "values within a step of the graph's", f"{largest / step:.1f} steps off, {_share(error > 2.01 * step)}"
    size, most = rms(torch.where(finite, e, 0.0)), torch.where(finite, e, 0.0).abs().max().item()
    if rms(error) <= 0.03 * size + 1e-6 and largest <= 0.1 * most + 1e-5:
        return None
    return f"the graph's values, up to {most:.3g}", f"values that are off by {largest:.3g}"


def _share(wrong: Tensor) -> str:
    return f"{wrong.double().mean().item():.1%} of them more than that"


def _mutable(value: Any) -> Any:
    """fx has immutable containers of its own."""
    if isinstance(value, dict):
        return {key: _mutable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mutable(item) for item in value]
    return tuple(map(_mutable, value)) if type(value) is tuple else value
