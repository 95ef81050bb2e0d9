"""The backends that a Q/DQ graph is lowered to."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from ..calibration.surgery import random_state_kept
from ..errors import ERRORS_OF_CODE, RewriteError, is_bug
from ..graph.located import marked, naming_ops, op_of
from ..graph.nodes import remove_dead
from ..inspection.report import report
from ..inspection.rows import ReportRow, as_json
from ..op_facts import is_random
from ..progress import Stages
from ..quiet import quiet
from ..rewriter import Recording
from ..version import __version__
from . import inductor, patterns, torchscript
from .agreement import Replaced, agreeing, returned_of
from .bfloat16 import in_bfloat16
from .engine import DEBUG, Lowering, verify
from .lowered_model import LoweredModel
from .onednn import OneDNNModel
from .passes import fold_constants, sizes_of_integers, written_as_laid_out, written_attributes
from .self_test import SelfTest, expected_outputs, widest_level
from .smoothing import fold_factors

#: Held while a switch of the process may be off.
_WARMING = threading.Lock()
_SCRIPTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Target:
    """What models are lowered to.

    Attributes:
        backend: its name.
        dtype: of what stays float.
        cpp_wrapper: for inductor, have C++ rather than Python call the kernels.
    """

    backend: str
    dtype: torch.dtype = torch.float32
    cpp_wrapper: bool = False

    def lowered(self, recording: Recording, module: nn.Module, stages: Stages) -> nn.Module:
        """The lowered form of a recording of ``module``, which gives what the recorded graph does."""

        def build(graph: fx.GraphModule, inputs: tuple, in_torch: tuple[Replaced, ...]) -> nn.Module:
            stages.at("fusing")
            model = BACKENDS[self.backend](Request(graph, inputs, in_torch, module, self, stages))
            stages.at("comparing with the converted model")
            return model

        with naming_ops(f"lowering to {self.backend}", recording.graph.graph):
            return agreeing(recording, build, self.dtype)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a backend is to lower, and how.

    Attributes:
        graph: the Q/DQ graph, which is used up.
        inputs: an example of its inputs.
        in_torch: ops that are to run in torch.
        quantized: the converted model that the graph is of.
        target: how.
        stages: told what it is at.
    """

    graph: fx.GraphModule
    inputs: tuple
    in_torch: tuple[Replaced, ...]
    quantized: nn.Module
    target: Target
    stages: Stages


def _on_torchscript(request: Request) -> nn.Module:
    graph, inputs, stages = request.graph, request.inputs, request.stages
    decisions = graph.meta.get("decisions", ())
    _check_scriptable(graph, inputs)
    # The generator is everybody's: to put its state back would repeat what other threads drew meanwhile.
    keeping = random_state_kept if any(map(is_random, graph.graph.nodes)) else contextlib.nullcontext
    with keeping():
        expected, widest = expected_outputs(graph, inputs), widest_level(graph.graph, graph)
    lowering = lower_graph(graph, request.target.dtype, request.in_torch)
    if request.target.dtype is torch.bfloat16:
        in_bfloat16(lowering.module, inputs)
    if stages.verbose:
        print(lowering, *(f"asserted in the graph: {decision}" for decision in decisions), sep="\n", file=sys.stderr)
    test = SelfTest(lowering, inputs, expected, widest)
    test.hold(lowering.module)
    stages.at("compiling TorchScript")
    scripted = _scripted(lowering, request.quantized)
    stages.at("running the example")
    written = lowering.writes
    kept = {name: tensor.clone() for name, tensor in scripted.named_buffers()} if written else {}
    with keeping():
        _warm(scripted, inputs)
    for name, tensor in scripted.named_buffers():
        if name in kept:
            tensor.copy_(kept[name])
    with _without_fusion(), keeping():
        test.define(scripted)
    return scripted


def _on_onednn(request: Request) -> nn.Module:
    model = OneDNNModel(request.graph, returned_of(request.graph), request.target.dtype)
    for replaced in request.in_torch:
        model.keep_in_torch(replaced.nodes)
        model.lowering.reasons[replaced.op] = replaced.reason
    return _warmed(model, model.lowering, request)


def _on_inductor(request: Request) -> nn.Module:
    returned, lowering = returned_of(request.graph), Lowering(request.graph, request.target.dtype)
    inductor.prepare(lowering)
    target = request.target
    model = inductor.InductorModel(request.graph, returned, target.dtype, cpp_wrapper=target.cpp_wrapper)
    return _warmed(model, lowering, request)


def _warmed(model: LoweredModel, lowering: Lowering, request: Request) -> nn.Module:
    """A model that runs from Python, with its report and what runs the example."""
    model.dbrq_report = _report_json(lowering, request.quantized)
    if request.stages.verbose:
        print(lowering, file=sys.stderr)
    request.stages.at("making kernels for the example")
    model.warm(request.inputs)
    return model


#: Name -> what lowers a graph to it.
BACKENDS: dict[str, Callable[[Request], nn.Module]] = {
    "torchscript": _on_torchscript, "onednn": _on_onednn, "inductor": _on_inductor,
}  # fmt: skip


def _check_scriptable(graph: fx.GraphModule, inputs: tuple) -> None:
    """Raise if TorchScript has no type for an input."""
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        problem = _without_type(value)
        if problem:
            raise RewriteError(
                "TorchScript has no type for an input", path="",
                expected="tensors, numbers, strings, tuples, and lists and dicts whose values are of one type",
                got=f"{node.target}: {problem}",
                hint="have forward take what it holds as arguments of its own, or lower with "
                'backend="onednn", which takes any containers',
            )  # fmt: skip


def _without_type(value: Any) -> str:
    """What of an input TorchScript cannot type, in words; "" if nothing."""
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str):
        return ""
    if not isinstance(value, (list, tuple, Mapping)):
        return f"an object of class {type(value).__name__}"
    items = list(value.values()) if isinstance(value, Mapping) else list(value)
    kinds = sorted({type(item).__name__ for item in items})
    if len(kinds) > 1 and not isinstance(value, tuple):
        return f"a {type(value).__name__} that holds {' and '.join(kinds)}"
    return next(filter(None, map(_without_type, items)), "")


def _warm(scripted: torch.jit.ScriptModule, inputs: tuple) -> None:
    """Run the example, so that TorchScript settles its plan now."""
    with _without_fusion(), torch.no_grad():
        for _ in range(3):
            scripted(*copy.deepcopy(inputs))


@contextlib.contextmanager
def _without_fusion() -> Iterator[None]:
    """Not with oneDNN Graph fusion, a switch of the whole process under which torch 2.13 fails on scripted graphs
    ("partition compile failed"): a plan once made no longer asks for it (docs/lowering.md). torch has no such switch
    for one module or thread. So it is turned off only where the user has turned it on, by one thread at a time; what
    another thread scripts meanwhile and runs for the first time is merely not fused.
    """
    with _WARMING:
        fuses = torch.jit.onednn_fusion_enabled()
        if fuses:
            torch.jit.enable_onednn_fusion(False)
        try:
            yield
        finally:
            if fuses:
                torch.jit.enable_onednn_fusion(True)


def lower_graph(
    graph: fx.GraphModule, dtype: torch.dtype = torch.float32, in_torch: tuple[Replaced, ...] = ()
) -> Lowering:
    """Apply the torchscript backend's rewrites to a Q/DQ graph, which is used up; the result's ``module`` runs in
    Python too. What is ``in_torch`` keeps its nodes.
    """
    graph.graph.set_codegen(CodeGen())
    lowering = Lowering(graph, dtype)
    lowering.kept = written_as_laid_out(graph.graph).union(*(replaced.nodes for replaced in in_torch))
    lowering.reasons.update((replaced.op, replaced.reason) for replaced in in_torch)

    def check(state: Lowering) -> None:
        verify(state, torchscript.problem)

    torchscript.check_said(lowering)
    fold_constants(lowering)
    sizes_of_integers(lowering)
    fold_factors(lowering)
    lowering.apply(torchscript.REWRITES, check if DEBUG else None)
    torchscript.merge_linears(lowering)
    patterns.add_masks_once(lowering)
    torchscript.own_accumulators(lowering)
    patterns.free_of_strides(lowering)
    remove_dead(lowering.graph)
    torchscript.keep_draws(lowering)
    torchscript.prove_kernels(lowering)
    check(lowering)
    lowering.module = _rebuilt(lowering)
    return lowering


def _rebuilt(lowering: Lowering) -> fx.GraphModule:
    """A module that holds what the graph still uses, and nothing else."""
    graph = lowering.graph
    taken = {node.name for node in graph.nodes}
    for node in graph.nodes:  # what replaced a node takes over its name
        if (name := node.meta.get("name", node.name)) not in taken:
            node.name = name
            taken.add(name)
    held: dict[str, Any] = {n.target: lowering.tensor(n) for n in graph.nodes if n.op == "get_attr"}
    for node in graph.nodes:
        if node.op == "call_module":
            kernel = lowering.modules.get(node.target) or lowering.module.get_submodule(node.target)
            if any(path.startswith(f"{node.target}.") for path in held if path not in lowering.modules):
                node.target = f"{node.target}_kernel"  # beside the tensors that ops in float still read
            held[node.target] = kernel
    return fx.GraphModule(held, lowering.graph, class_name=type(lowering.module).__name__).eval()


def _report_json(lowering: Lowering, quantized: nn.Module) -> str:
    """The converted model's report with the kernels that run now, for keeping with the lowered model."""

    def now(row: ReportRow) -> ReportRow:
        if row.precision == "float":
            return row
        if (reason := lowering.reasons.get(row.path)) is not None:
            return dataclasses.replace(row, precision="float", reason=reason, kernel="")
        return dataclasses.replace(row, kernel=lowering.kernels.get(row.path, row.kernel))

    found = report(quantized)
    return as_json([now(row) for row in found.rows], dataclasses.replace(found.facts, stage="lowered"))


def _keep_to_state(module: nn.Module, written: frozenset[str]) -> None:
    """Leave the tensors that calls write to in the state dict, and no others: what was made of those, packed weights
    and folded bias, would not follow what is loaded.
    """
    for path, inner in module.named_modules():
        for tensors in (inner._parameters, inner._buffers):
            for name in [n for n in tensors if f"{path}.{n}".lstrip(".") not in written]:
                tensor = tensors.pop(name)
                inner.__dict__[name] = None if tensor is None else tensor.detach()


def _scripted(lowering: Lowering, quantized: nn.Module) -> torch.jit.ScriptModule:
    module = lowering.module
    _keep_to_state(module, written_attributes(lowering.graph))
    module.dbrq_version = __version__  # type: ignore[assignment]  # torch's stubs know tensors and modules only
    module.dbrq_report = _report_json(lowering, quantized)  # type: ignore[assignment]  # likewise
    # Else torch.jit.script asks of each attribute of the fx.Graph, a property that is no tensor, what type it has.
    module.__jit_ignored_attributes__ = ["_graph"]  # type: ignore[assignment]  # likewise
    try:
        # One at a time: CPython 3.11's parser, which torch.jit calls, loses count of its depth in several threads.
        # Quiet of torch.jit's end, and of annotations of fx.GraphModule's own.
        with _SCRIPTING, quiet(DeprecationWarning, UserWarning):
            return torch.jit.script(module)
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        node = marked(lowering.graph, error)
        raise RewriteError(
            f"TorchScript does not take the graph: {error}",
            path="" if node is None else node.meta.get("path", ""),
            op=None if node is None else op_of(node),
            got=type(quantized).__name__ if node is None else node.meta.get("site"),
            hint="dbrq.rewrite gives the graph itself, which runs in Python",
        ) from error
