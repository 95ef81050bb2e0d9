"""``rewrite``: from a converted model to a ``torch.fx.GraphModule`` in Q/DQ form.

The graph is recorded from one run (graph/run.py), so Python control flow is resolved by that run. What the run
depended on is asserted in the graph: ranks and dtypes of the inputs, and every number that steered a decision.
"""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import selfcheck
from .auto_trace import InterceptedForward
from .calibration.session import token_of, working_copy
from .calibration.surgery import uncompiled
from .errors import ERRORS_OF_CODE, MismatchError, QuantizationError, RewriteError, SeveralPathsError, is_bug
from .graph.agreement import INFORMATIVE, Reference
from .graph.compile_flag import capturing
from .graph.converted import Converted, placed
from .graph.nodes import DEQUANTIZE, QUANTIZE, remove_dead
from .graph.objects import Boundary, boundary_of
from .graph.recorder import GraphRecorder
from .graph.run import GraphRun
from .graph.signature import Inputs, Inside, RestoringCodeGen, Returned
from .graph.structure import free_of_order, in_another_order, ordered
from .graph.trials import STATE, Outcome, Trial, owned, perturbed, random_state_kept_if_drawn, seeded
from .graph.writer import Sizes
from .guards import without_autocast
from .pytree import call_arguments, tree_leaves
from .record.record import ModuleStep, Record, SeenOp, Tag


def rewrite(
    quantized: nn.Module, example_inputs: Any = (), *, example_kwargs: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """The Q/DQ graph of a converted model: float ops between quantize and dequantize, int8 weights, no Python left.

    Args:
        quantized: what ``convert`` returned. It is not changed.
        example_inputs: one call's arguments, as in ``prepare``. Only inputs given here become inputs of the graph.
        example_kwargs: keyword arguments beside them.

    Returns:
        A GraphModule that computes what ``quantized`` does, in ``quantized_decomposed`` ops; ``torch.jit.script`` takes
        it. Sizes that the code computed from tensors stay free. A number that the code decided on (a size in an ``if``,
        ``.item()`` in a loop bound) is asserted: another one raises; ``graph.meta["decisions"]`` lists them.

    Raises:
        RewriteError: one graph cannot stand for the model, for the reason and the line that it names.
        DeviationError: the run leaves the path that ``prepare`` saw.
        MismatchError: the converted model runs an op on a kernel that is wrong; graph and model are compared on the
            example and on inputs like it.

    >>> import dbrq
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> graph = dbrq.rewrite(dbrq.quantize(model, [torch.randn(8, 4)]), torch.randn(8, 4))
    >>> [node.target for node in graph.graph.nodes if node.op == "call_function"][-1]
    <built-in method relu of type object at ...>
    """
    return record(quantized, example_inputs, example_kwargs).graph


@dataclass(frozen=True)
class Recording:
    """A graph and what was learned of it.

    Attributes:
        inputs: the example's values for its placeholders.
        given: names of those placeholders that the example gives values for; the others have their defaults.
        decisions: how many values of tensors the code decided on.
        tags: who made each tensor that it returns.
        draws: the model draws random numbers.
        others: as ``inputs``, perturbed; None if the model or the graph do not take such inputs.
        reference: the graph, run in float for ``trials``; None if it was not yet.
        boundary: what the run saw of objects; None if there were to be none.
    """

    graph: fx.GraphModule
    inputs: tuple
    given: frozenset[str]
    decisions: int
    tags: tuple[Tag, ...]
    draws: bool = False
    others: tuple | None = None
    reference: Reference | None = None
    boundary: Boundary | None = None

    def trials(self) -> list[Trial]:
        """Calls of the graph to compare what is made of it on."""
        found = [Trial("the example", self.inputs, 0 if self.draws else None)]
        if self.others is not None:
            found.append(Trial("perturbed inputs", self.others, 1 if self.draws else None))
        return found


@without_autocast()
def record(
    quantized: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    inside: Inside | None = None,
    several: bool = False,
) -> Recording:
    """What ``rewrite`` does, with what it learned.

    Args:
        inside: it is a module inside of a model.
        several: the code may have taken several paths in calibration: the graph asserts what decides.
    """
    quantized = uncompiled(quantized)
    token = token_of(quantized, "int8", "rewrite")
    parting = None if several else where_paths_part(token.record, quantized.__dict__["forward"].path)
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    try:
        recording = _recorded(quantized, args, kwargs, inside)
        if recording.boundary is not None:  # of several attempts to record, what this one saw
            boundary_of(quantized).__dict__.update(recording.boundary.__dict__)
        if parting is None and selfcheck.enabled():
            recording = _agreeing(recording, Converted(quantized, inside), args, kwargs)
    except SeveralPathsError:  # it knows the very line that decides
        raise
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        if parting is not None:
            raise parting from None
        if not isinstance(error, QuantizationError) and _in_transform(error):
            raise RewriteError(
                "forward runs code under a transform of torch.func, such as vmap, which graphs do not have",
                path="",
                hint="call it on the whole batch: layers take any number of leading dimensions, and einsum, matmul or "
                "torch.linalg.vecdot do what vmap is used for most; the converted model runs it as it is",
            ) from error  # fmt: skip
        if isinstance(error, QuantizationError) or inside is not None or not _runs(quantized, args, kwargs):
            raise
        raise RewriteError(
            f"the graph of this model does not run as the model does: {error}", path="", got=type(error).__name__,
            expected="ops that take what the ops before them give in a graph", hint="keep using the converted model, "
            "or spell it otherwise (reshape instead of view, where values have another layout)",
        ) from error  # fmt: skip
    if parting is not None:
        raise parting
    return recording


def _in_transform(error: BaseException) -> bool:
    """Whether an error was raised inside of a transform of torch.func, which says little of what it does not take."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("_functorch" in frame.filename.replace("\\", "/").split("/") for frame in frames)


def _runs(quantized: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether the converted model itself takes these arguments."""
    args, kwargs = owned((args, kwargs))
    try:
        with torch.inference_mode(False), torch.no_grad(), seeded(0):
            working_copy(quantized, ())(*args, **kwargs)
    except ERRORS_OF_CODE:
        return False
    return True


#: Of a model's outputs, relative to their size: what changes more by rounding alone deserves a warning.
_AMPLIFIED = 0.5

_SEVERAL = "dbrq.lower lowers the parts of such a model and leaves the code that decides as it is"


def where_paths_part(record: Record, path: str) -> SeveralPathsError | None:
    """Says where the code of a module, or of one inside of it, took several paths in calibration; None if nowhere."""
    inside = f"{path}." if path else ""
    for module, calls in record.calls.items():
        if module != path and not module.startswith(inside):
            continue
        for call in calls:
            if len(call.paths) > 1:
                first, second = (list(map(_step, p.steps)) for p in call.paths[:2])
                at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
                          min(len(first), len(second)))  # fmt: skip
                ways = [steps[at] if at < len(steps) else "the end of forward" for steps in (first, second)]
                after = first[at - 1] if at else "the beginning of forward"
                return SeveralPathsError(
                    "one graph cannot stand for a model whose code takes several paths", path=module,
                    expected="one path in calibration", hint=_SEVERAL,
                    got=f"{len(call.paths)} paths, which part after {after}: to {ways[0]} and to {ways[1]}",
                )  # fmt: skip
    return None


def _step(step: SeenOp | ModuleStep) -> str:
    if isinstance(step, SeenOp):
        return f"{step.path} ({step.op}, {step.site})"
    return f"the call of {step.module} ({step.line})"


def _agreeing(recording: Recording, converted: Converted, args: tuple, kwargs: dict) -> Recording:
    """The recording, with perturbed inputs for trials.

    Raises:
        MismatchError: an op of the converted model gives something else than the same op of the graph.
        RewriteError: the outcomes of model and graph differ, though no op does.
    """
    reference = Reference(recording.graph)
    example = recording.trials()[0]
    call = dataclasses.replace(example, inputs=(args, kwargs))
    reference.expected(example)
    got, warned = converted.call(call, reference)
    recording = dataclasses.replace(recording, reference=reference)
    _compare(converted, reference, example, call, got)
    _check_state(converted, reference, example)
    _hold_orders(recording, converted, reference, call)
    values: dict[str, list[Tensor]] = {}
    found = _on_other_inputs(recording, converted, reference, call, warned, values)
    if found is None:
        converted.call(call, reference, values)
        _check_ops(reference, example, values)
        return recording
    other, call, got = found
    _check_ops(reference, other, values)
    _compare(converted, reference, other, call, got)
    return dataclasses.replace(recording, others=other.inputs)


def _check_state(converted: Converted, reference: Reference, example: Trial) -> None:
    """Raise if the model gives something else when it is called again: a graph keeps tensors, and no other state."""
    if converted.again is None:
        return
    names, outcome_of_second = converted.again
    found = reference.difference(example, outcome_of_second)
    if found is not None:
        raise RewriteError(
            "the model gives something else when it is called again, by state that a graph does not keep", path="",
            expected="state in buffers", got=f"what forward assigns to {names}",
            hint="register it as a buffer and change that, or keep using the converted model",
        )  # fmt: skip


def _hold_orders(recording: Recording, converted: Converted, reference: Reference, call: Trial) -> None:
    """Let the graph's mappings come with their keys in any order, unless the model gives something else then."""
    graph = recording.graph
    if not any(ordered(node.meta.get("structure")) for node in graph.graph.find_nodes(op="placeholder")):
        return
    turned = dataclasses.replace(call, inputs=in_another_order(call.inputs))
    try:
        if reference.difference(recording.trials()[0], converted.call(turned, reference)[0]) is not None:
            return
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        return
    free_of_order(graph.graph)
    graph.recompile()


def _on_other_inputs(
    recording: Recording, converted: Converted, reference: Reference, example: Trial, warned: list[str],
    values: dict[str, list[Tensor]],
) -> tuple[Trial, Trial, dict[str, Any]] | None:  # fmt: skip
    """Perturbed inputs that model and graph take, for the graph and for the model, and what the model gives; None if
    there are none: integers may mean sizes or sorted indices, and code may decide on any value.
    """
    intercepted: InterceptedForward = converted.quantized.__dict__["forward"]
    for integers in (True, False):
        call = Trial("perturbed inputs", perturbed(example.inputs, integers), None if example.seed is None else 1)
        inputs = tuple(placed(intercepted, *call.inputs)[: len(recording.inputs)])
        trial = dataclasses.replace(call, inputs=inputs)
        values.clear()
        try:
            got, now = converted.call(call, reference, values)
            if now != warned:
                continue
            reference.expected(trial)
        except ERRORS_OF_CODE as error:
            if is_bug(error):
                raise
            continue
        return trial, call, got
    values.clear()
    return None


def _compare(converted: Converted, reference: Reference, trial: Trial, call: Trial, got: Outcome) -> None:
    """Raise unless the converted model gives what the graph does.

    Args:
        trial, call: the inputs, for the graph and for the model.
    """
    expected = reference.expected(trial)
    elsewhere = {path: expected[path] for path in expected if path not in got and path.startswith(STATE)}
    found = reference.difference(trial, {**got, **elsewhere})
    noise = reference.noise(trial)
    if found is not None or noise > INFORMATIVE:
        values: dict[str, list[Tensor]] = {}
        converted.call(call, reference, values)
        _check_ops(reference, trial, values)
    if found is not None:
        raise RewriteError(
            f"the graph does not give what the model gives for {trial.words}", path="",
            expected=f"{found.where}: {found.expected}", got=found.got,
            hint="each op of the model is right by itself, but the model does what no graph follows: keep using the "
            "converted model, and please report it",
        )  # fmt: skip
    if noise > _AMPLIFIED:
        warnings.warn(
            "dbrq: values that are rounded otherwise change what this model gives by "
            f"{noise:.0%}; that graph and model agree was shown op by op",
            stacklevel=2,
        )


def _ends_op(node: fx.Node) -> bool:
    """Whether a node has a value that its op computed, quantized perhaps, and not one that the op quantizes, or
    multiplies by factors, to read.
    """
    op = node.meta["op"]
    while node.target in (QUANTIZE, DEQUANTIZE) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.meta.get("op") == op and "smooths" not in node.meta


def _check_ops(reference: Reference, trial: Trial, values: Mapping[str, list[Tensor]]) -> None:
    """Raise if an op of the converted model is wrong for the very inputs that it had there.

    Args:
        values: path of an op -> what it gave, each time.
    """
    ends = {node.meta["op"]: node for node in reference.graph.nodes if node.meta.get("op") in values and _ends_op(node)}
    wrong = reference.wrong_op(trial, {node: values[op][0] for op, node in ends.items() if len(values[op]) == 1})
    if wrong is not None:
        raise MismatchError(
            "an op of the converted model does not compute what it does in the fake-quantize graph", path=wrong.path,
            op=wrong.op, expected=wrong.expected, got=f"{wrong.got} (on {trial.words})",
            hint="the graph is right, and the kernel that the converted model runs is wrong, on this CPU perhaps: "
            "leave this op in float (qconfig None), and please report it",
        )  # fmt: skip


def _recorded(quantized: nn.Module, args: tuple, kwargs: dict, inside: Inside | None) -> Recording:
    try:
        return _free_of_values(quantized, args, kwargs, inside, Sizes.FREE)
    except QuantizationError:
        raise
    except ERRORS_OF_CODE as error:  # some code wants truth values or sizes to be bools or ints and nothing like them
        if is_bug(error):
            raise
        failed = error
    try:
        return _free_of_values(quantized, args, kwargs, inside, Sizes.COMPARED)
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
    try:
        recording = _free_of_values(quantized, args, kwargs, inside, Sizes.FIXED)
    except QuantizationError:
        raise
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        raise failed from None
    warnings.warn(
        "dbrq: the graph holds for the shapes of the example only; the model's code does not take sizes that are "
        f"no plain ints: {type(failed).__name__}: {failed}",
        stacklevel=2,
    )
    return recording


def _free_of_values(quantized: nn.Module, args: tuple, kwargs: dict, inside: Inside | None, sizes: Sizes) -> Recording:
    """A graph that depends on no values, if the code has such a path for those who capture it."""
    recording = None
    try:
        recording = _record(quantized, args, kwargs, inside, sizes)
    except SeveralPathsError as error:
        failed = error
    if recording is None or recording.decisions:
        try:
            with capturing():
                other = _record(quantized, args, kwargs, inside, sizes)
        except ERRORS_OF_CODE as error:  # that path is not for every kind of capturing
            if is_bug(error):
                raise
        else:
            if recording is None or other.decisions < recording.decisions:
                return other
    if recording is None:
        raise failed
    return recording


def _record(
    quantized: nn.Module,
    args: tuple,
    kwargs: dict,
    inside: Inside | None,
    sizes: Sizes,
    state: frozenset[str] = frozenset(),
) -> Recording:
    """One run's recording.

    Args:
        state: paths of the model's tensors that runs change, as far as that is known before the run.
    """
    kept = [t for name, t in quantized.named_buffers() if t.dtype is torch.int8]  # nothing but dbrq has to do with them
    model = working_copy(quantized, kept)  # the run may leave traces in it
    own_args, own_kwargs = owned((args, kwargs))
    intercepted: InterceptedForward = model.__dict__["forward"]
    recorder = GraphRecorder(model, sizes, intercepted.token.record.numbers, state)
    _name_leaves(model, recorder)
    inputs = Inputs(recorder, intercepted, own_args, own_kwargs, inside)
    run = GraphRun(intercepted.token, recorder, inputs)
    with torch.inference_mode(False), random_state_kept_if_drawn() as drawing:
        output = recorder.write_back(run.record(intercepted, inputs.args, inputs.kwargs))
    inputs.check_contents()
    changed = frozenset(recorder.changed_state())
    if recorder.reads_constants and not changed <= state:  # some of the constants are none
        return _record(quantized, args, kwargs, inside, sizes, changed | state)
    known = [recorder.known(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    tags = tuple(None if k is None else k.tag for k in known)
    returned = Returned.of(output, recorder)
    recorder.graph.output(returned.plain)
    recorder.settle_layouts()
    if not returned.is_plain:
        recorder.graph.set_codegen(RestoringCodeGen(returned))
    remove_dead(recorder.graph)
    recorder.graph.lint()
    graph = fx.GraphModule(recorder.root, recorder.graph, class_name=type(quantized).__name__)
    graph.meta["decisions"] = tuple(recorder.decisions)
    given = frozenset(name for name, _, _, is_given, _ in inputs.placeholders if is_given)
    seen = boundary_of(model)
    return Recording(graph.eval(), inputs.example, given, recorder.value_decisions, tags, drawing.drew,
                     boundary=None if seen is None else seen.copy())  # fmt: skip


def _name_leaves(model: nn.Module, recorder: GraphRecorder) -> None:
    """torch's own leaves run unintercepted; in a graph their ops bear their names."""
    for path, module in model.named_modules():
        if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            continue

        def forward(*args: Any, _path: str = path, _module: nn.Module = module, **kwargs: Any) -> Any:
            outer, recorder.path = recorder.path, _path
            try:
                return type(_module).forward(_module, *args, **kwargs)
            finally:
                recorder.path = outer

        module.__dict__["forward"] = forward
