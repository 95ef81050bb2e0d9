"""Whether a lowered model computes what the graph does that it was made from, shown before ``lower`` returns it.

It runs twice on the example and twice on perturbed inputs, in turns, so that what was frozen shows, and what is left
from call to call. Where it strays from the graph, the graph is bisected: cut behind one node after the other, lowered
and compared again, until the first node is found behind which it is wrong. That op then runs in torch, in float
between its roundings, or if that is not to be had, ``lower`` raises.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from .. import selfcheck
from .._torch import codegen_of
from ..errors import ERRORS_OF_CODE, MismatchError, is_bug
from ..graph.agreement import Reference
from ..graph.difference import Difference
from ..graph.nodes import is_impure
from ..graph.signature import RestoringCodeGen
from ..graph.trials import Trial, outcome, owned, seeded
from ..pytree import tree_leaves
from ..rewriter import Recording
from .engine import is_weight
from .lowered_model import LoweredModel, without_code

#: Ops that may be replaced in one model before it is given up.
_MOST = 8


@dataclass(frozen=True)
class Replaced:
    """An op that runs in torch since its kernel was wrong.

    Attributes:
        path: of its module.
        op: its name in reports, or its node's in the graph.
        nodes: names of its nodes in the graph.
        problem: what was wrong.
    """

    path: str
    op: str
    nodes: frozenset[str]
    problem: str

    @property
    def reason(self) -> str:
        return f"its kernel does not give what the graph does: {self.problem}"


#: Makes the lowered form of a graph, which it uses up; the inputs; what must run in torch.
Build = Callable[[fx.GraphModule, tuple, tuple[Replaced, ...]], nn.Module]


def agreeing(recording: Recording, build: Build, dtype: torch.dtype) -> nn.Module:
    """The lowered form of a recording, which gives what the recorded graph does.

    Args:
        dtype: of what the lowered model computes in float.

    Raises:
        MismatchError: it does not, and no other way was found to compute the op that is wrong.
    """
    replaced: tuple[Replaced, ...] = ()
    with seeded(0 if recording.draws else None):
        if not selfcheck.enabled():
            return build(recording.graph, recording.inputs, ())
        model = build(_copied(recording.graph), recording.inputs, ())
        reference = recording.reference
        if reference is None or dtype is not reference.dtype:
            reference = Reference(recording.graph, dtype)
        trials = recording.trials()
        while (problem := _problem(model, reference, trials)) is not None:
            wrong = _first_wrong(recording, build, dtype, replaced, trials)
            if wrong is None or len(replaced) == _MOST or any(wrong.op == before.op for before in replaced):
                raise _mismatch(model, problem, wrong)
            replaced = (*replaced, wrong)
            selfcheck.note_failure(selfcheck.Failure(type(model).__name__, wrong.op, wrong.problem, "torch, in float"))
            model = build(_copied(recording.graph), recording.inputs, replaced)
    return model


def _mismatch(model: nn.Module, problem: tuple[str, Difference], wrong: Replaced | None) -> MismatchError:
    when, found = problem
    unknown = "no single op: they agree as far as the graph was cut"
    return MismatchError(
        "the lowered model does not give what the converted model gives", path="" if wrong is None else wrong.path,
        op=unknown if wrong is None else wrong.op, expected=f"{found.where}: {found.expected}",
        got=f"{found.got} ({when})" + ("" if wrong is None else f"; the first op that differs: {wrong.problem}"),
        hint=f"another backend may run this model (this is {type(model).__name__}), and the converted model is right; "
        "leave this op in float (qconfig None), and please report it",
    )  # fmt: skip


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own, of the same tensors."""
    return fx.GraphModule(graph, copy.deepcopy(graph.graph), class_name=type(graph).__name__)


# Comparing


def _problem(model: nn.Module, reference: Reference, trials: list[Trial]) -> tuple[str, Difference] | None:
    """When a lowered model strays from the graph, and where; None if it never does."""
    for turn in ("first", "second"):
        for trial in trials:
            reference.expected(trial)  # which shows what calls write to
            found = reference.difference(trial, _outcome(model, reference, trial))
            if found is not None:
                return f"the {turn} call with {trial.words}", found
    return None


def _outcome(model: nn.Module, reference: Reference, trial: Trial) -> dict[str, Any]:
    """What a call leaves behind; the model is as it was before."""
    buffers = _buffers(model, reference.changed)
    kept = {name: tensor.clone() for name, tensor in buffers.items()}
    inputs = owned(trial.inputs)
    try:
        with torch.inference_mode(False), torch.no_grad(), seeded(trial.seed):
            output = model(*inputs)
        if reference.returned is not None and not isinstance(model, LoweredModel):
            output = reference.returned(output)
        return outcome(output, inputs if reference.writes or _changed(inputs, trial.inputs) else None, buffers)
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in kept.items():
                buffers[name].copy_(tensor)


def _changed(inputs: tuple, given: tuple) -> bool:
    """Whether a call wrote to its inputs: some of torch's kernels do, to add to what they are given."""
    pairs = zip(tree_leaves(inputs), tree_leaves(given), strict=True)
    return any(
        isinstance(b, Tensor)
        and b.layout is torch.strided
        and not b.is_meta
        and not torch.equal(a, b)
        and not bool(b.isnan().any())
        for a, b in pairs
    )


def _buffers(model: nn.Module, names: set[str]) -> dict[str, Tensor]:
    held = without_code(model) if isinstance(model, LoweredModel) else model
    return {name: operator.attrgetter(name)(held) for name in names}


# Bisecting


def _first_wrong(
    recording: Recording, build: Build, dtype: torch.dtype, replaced: tuple[Replaced, ...], trials: list[Trial]
) -> Replaced | None:
    """The first op behind which the graph, cut there and lowered, does not give what it gives in float."""
    graph = recording.graph.graph
    places = [
        node for node in graph.nodes
        if node.op.startswith("call_") and "shape" in node.meta and not is_weight(node) and not is_impure(node)
    ]  # fmt: skip
    found: dict[int, str] = {}

    def wrong(place: int) -> bool:
        part = _cut(recording.graph, places[place].name)
        reference = Reference(part, dtype)
        try:
            problem = _problem(build(part, recording.inputs, replaced), reference, trials)
        except ERRORS_OF_CODE as error:  # torch's, of a graph that ends where none was meant to end
            if is_bug(error):
                raise
            return False
        if problem is not None:
            found[place] = f"{problem[1].got} instead of {problem[1].expected}, {problem[0]}"
        return problem is not None

    low, high = -1, len(places) - 1
    if not places or not wrong(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle, high)
    node = places[high]
    op = node.meta.get("op")
    names = frozenset(n.name for n in graph.nodes if n is node or (op is not None and n.meta.get("op") == op))
    return Replaced(node.meta.get("path") or "", op or node.name, names, found[high])


def _cut(module: fx.GraphModule, name: str) -> fx.GraphModule:
    """The graph up to a node, which it returns."""
    graph = copy.deepcopy(module.graph)
    graph.set_codegen(CodeGen())
    nodes = list(graph.nodes)
    last = next(i for i, node in enumerate(nodes) if node.name == name)
    for node in reversed(nodes[last + 1 :]):
        if node.op != "placeholder":
            graph.erase_node(node)
    graph.output(nodes[last])
    for node in reversed(nodes[:last]):
        if not node.users and not is_impure(node):
            graph.erase_node(node)
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


def returned_of(graph: fx.GraphModule) -> Any:
    """What makes the user's containers of what a graph returns; None if it returns them."""
    codegen = codegen_of(graph.graph)
    return codegen.returned if isinstance(codegen, RestoringCodeGen) else None
