"""``lower``: from a converted model to what runs it fastest, by way of the Q/DQ graph."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.ao.quantization import QConfigMapping
from torch.fx.graph import CodeGen

from ..calibration.session import token_of
from ..calibration.surgery import random_state_kept, uncompiled
from ..errors import ERRORS_OF_CODE, ConfigurationError, RewriteError, SeveralPathsError, is_bug
from ..graph.located import marked, naming_ops, op_of
from ..graph.nodes import remove_dead
from ..guards import without_autocast
from ..hidden_state import state_of
from ..inspection.report import report
from ..inspection.rows import ReportRow, as_json
from ..op_facts import is_random
from ..progress import Stages
from ..quiet import quiet
from ..rewriter import Recording, record, where_paths_part
from ..version import __version__
from ..workflow import convert, prepare
from . import inductor, patterns, torchscript
from .agreement import Replaced, agreeing, returned_of
from .bfloat16 import in_bfloat16
from .engine import DEBUG, Lowering, verify
from .lowered_model import LoweredModel
from .onednn import OneDNNModel
from .passes import fold_constants, sizes_of_integers, written_as_laid_out, written_attributes
from .self_test import SelfTest, expected_outputs, widest_level
from .submodules import lower_parts

VERBOSE = bool(os.environ.get("DBRQ_VERBOSE"))
#: Held while a switch of the process may be off.
_WARMING = threading.Lock()
_SCRIPTING = threading.Lock()


@without_autocast()
def lower(
    quantized: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    backend: str = "torchscript",
    dtype: torch.dtype = torch.float32,
    verbose: bool = False,
    cpp_wrapper: bool = False,
    progress: bool | None = None,
) -> nn.Module:
    """A converted model as a graph of fused int8 kernels.

    Args:
        quantized: what ``convert`` returned, or a float model, all of which then stays float. It is not changed.
        example_inputs: one call's arguments, as in ``rewrite``. For torchscript weights are packed for these shapes;
            other shapes run, other image sizes perhaps slower. For onednn each shape has a plan of its own, made when
            it is seen first.
        example_kwargs: keyword arguments beside them.
        backend: "torchscript": stock torch kernels in a ``torch.jit.ScriptModule`` that needs no dbrq to run.
            "onednn": oneDNN's own kernels, called without torch in between; faster, and run from Python
            (``pip install dbrq[onednn]``). "inductor": TorchInductor, which compiles C++ for what no kernel of
            oneDNN takes; it needs a C++ compiler where the model runs. Each new shape may be compiled again, once:
            the sizes in which it differs are free from then on.
        dtype: of what stays float: ``torch.float32`` or ``torch.bfloat16``. Inputs and outputs keep theirs.
        verbose: print what is being done, what fused where, and what did not and why. The environment variable
            DBRQ_VERBOSE does too.
        cpp_wrapper: for inductor, have C++ rather than Python call the kernels.
        progress: show what is being done, as large models take tens of seconds (needs tqdm); None means: if stderr is
            a terminal.

    Returns:
        The lowered model, in eval mode. ``report`` reads it, ``save`` and ``load`` keep it. A model for which
        calibration saw several paths is returned as a converted model of its own class, in which each straight-line
        module that holds int8 layers runs lowered and the code that decides is the user's.

    Raises:
        RewriteError: no graph cannot stand for the model, for the reason and the line that it names.
        ConfigurationError: no such backend or dtype.
        OneDNNError: libdnnl is not installed.
        CompilerError: for inductor, there is no C++ compiler.
        MismatchError: the lowered model does not give what the converted model gives, and no op could be found to run
            in another way; or the converted model itself does not give what its ops are defined to.

    >>> import dbrq
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> lowered = dbrq.lower(dbrq.quantize(model, [torch.randn(8, 4)]), torch.randn(8, 4))
    >>> [row.kernel for row in dbrq.report(lowered).rows]
    ['onednn.qlinear_pointwise + relu', 'fused into 0']
    """
    if backend not in BACKENDS:
        raise ConfigurationError("there is no such backend", expected=" or ".join(BACKENDS), got=backend)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigurationError("float parts run in float32 or bfloat16", got=dtype)
    quantized = uncompiled(quantized)
    if isinstance(quantized, nn.Module) and state_of(quantized) is None:
        float_only = QConfigMapping().set_global(None)
        prepared = prepare(quantized, example_inputs, float_only, example_kwargs=example_kwargs)
        quantized = convert(prepared, inplace=True)
    verbose = verbose or VERBOSE
    stages = Stages(f"lowering to {backend}", progress, verbose)

    def lowered(recording: Recording, module: nn.Module) -> nn.Module:
        def build(graph: fx.GraphModule, inputs: tuple, in_torch: tuple[Replaced, ...]) -> nn.Module:
            stages.at("fusing")
            model = BACKENDS[backend](Request(graph, inputs, in_torch, module, dtype, stages, cpp_wrapper))
            stages.at("comparing with the converted model")
            return model

        with naming_ops(f"lowering to {backend}", recording.graph.graph):
            return agreeing(recording, build, dtype)

    with stages:
        stages.at("recording the graph")
        if where_paths_part(token_of(quantized, "int8", "lower").record, "") is None:
            try:
                return lowered(record(quantized, example_inputs, example_kwargs), quantized)
            except SeveralPathsError as error:
                if verbose:
                    print(f"lowered in parts: {error}", file=sys.stderr)
        return lower_parts(quantized, example_inputs, example_kwargs, lowered, verbose)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a backend is to lower, and how.

    Attributes:
        graph: the Q/DQ graph, which is used up.
        inputs: an example of its inputs.
        in_torch: ops that are to run in torch.
        quantized: the converted model that the graph is of.
        dtype: of what stays float.
        stages: told what it is at.
        cpp_wrapper: for inductor, have C++ rather than Python call the kernels.
    """

    graph: fx.GraphModule
    inputs: tuple
    in_torch: tuple[Replaced, ...]
    quantized: nn.Module
    dtype: torch.dtype
    stages: Stages
    cpp_wrapper: bool = False


def _on_torchscript(request: Request) -> nn.Module:
    graph, inputs, stages = request.graph, request.inputs, request.stages
    decisions = graph.meta.get("decisions", ())
    _check_scriptable(graph, inputs)
    # The generator is everybody's: to put its state back would repeat what other threads drew meanwhile.
    keeping = random_state_kept if any(map(is_random, graph.graph.nodes)) else contextlib.nullcontext
    with keeping():
        expected, widest = expected_outputs(graph, inputs), widest_level(graph.graph, graph)
    lowering = lower_graph(graph, request.dtype, request.in_torch)
    if request.dtype is torch.bfloat16:
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
    model = OneDNNModel(request.graph, returned_of(request.graph), request.dtype)
    for replaced in request.in_torch:
        model.keep_in_torch(replaced.nodes)
        model.lowering.reasons[replaced.op] = replaced.reason
    return _warmed(model, model.lowering, request)


def _on_inductor(request: Request) -> nn.Module:
    returned, lowering = returned_of(request.graph), Lowering(request.graph, request.dtype)
    inductor.prepare(lowering)
    model = inductor.InductorModel(request.graph, returned, request.dtype, cpp_wrapper=request.cpp_wrapper)
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
