"""``rewrite``: from a converted model to a ``torch.fx.GraphModule`` in Q/DQ form.

The graph is recorded from one run (graph_run.py), so Python control flow is resolved by that run. What the run
depended on is asserted in the graph: ranks and dtypes of the inputs, and every number that steered a decision.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .auto_trace import InterceptedForward
from .capturing import capturing
from .containers import call_arguments, tree_leaves, tree_map
from .copies import uncompiled
from .errors import QuantizationError, RewriteError, SeveralPathsError
from .graph import GraphRecorder, Sizes, remove_dead
from .graph_io import Inputs, Inside, InsideRun, RestoringCodeGen, Returned
from .graph_run import GraphRun
from .guards import without_autocast
from .record import ModuleStep, Record, SeenOp, Tag
from .report import sqnr
from .watch import random_state_kept
from .workflow import token_of


def rewrite(
    quantized: nn.Module, example_inputs: Any = (), *, example_kwargs: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """The Q/DQ graph of a converted model: float ops between quantize and dequantize, int8 weights, no Python left.

    Args:
        quantized: what ``convert`` returned. It is not changed.
        example_inputs, example_kwargs: one call's arguments, as in ``prepare``. Only inputs given here become inputs
        of the graph.

    Returns:
        A GraphModule that computes what ``quantized`` does, in ``quantized_decomposed`` ops; ``torch.jit.script`` takes
        it. Sizes that the code computed from tensors stay free. A number that the code decided on (a size in an ``if``,
        ``.item()`` in a loop bound) is asserted: another one raises; ``graph.meta["decisions"]`` lists them.

    Raises:
        RewriteError: one graph cannot stand for the model, for the reason and the line that it names.
        DeviationError: the run leaves the path that ``prepare`` saw.

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
    """

    graph: fx.GraphModule
    inputs: tuple
    given: frozenset[str]
    decisions: int
    tags: tuple[Tag, ...]


@without_autocast()
def record(
    quantized: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    inside: Inside | None = None,
) -> Recording:
    """What ``rewrite`` does, with what it learned. ``inside``: it is a module inside of a model."""
    quantized = uncompiled(quantized)
    token = token_of(quantized, "int8", "rewrite")
    parting = where_paths_part(token.record, quantized.__dict__["forward"].path)
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    try:
        with random_state_kept():
            recording = _recorded(quantized, args, kwargs, inside)
    except SeveralPathsError:  # it knows the very line that decides
        raise
    except Exception as error:
        raise (error if parting is None else parting) from None
    if parting is not None:
        raise parting
    _check_agreement(quantized, recording, args, kwargs, inside)
    return recording


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


#: In dB. A graph differs from its model by values that are rounded otherwise, which deep random networks amplify.
_AGREEMENT = 5.0


def _check_agreement(
    quantized: nn.Module, recording: Recording, args: tuple, kwargs: dict, inside: Inside | None
) -> None:
    """Raise unless the graph gives what the model gives, on the example."""
    outputs = []
    with torch.inference_mode(False), torch.no_grad(), random_state_kept():
        state = torch.get_rng_state()
        for run in (
            lambda: _run_copy(quantized, *_owned((args, kwargs)), inside),
            lambda: copy.deepcopy(recording.graph)(*_owned(recording.inputs)),
        ):
            torch.set_rng_state(state)
            leaves = tree_leaves(run())
            outputs.append([leaf.flatten().float() for leaf in leaves if _is_float(leaf)])
    expected, got = (torch.cat([torch.zeros(1), *leaves]) for leaves in outputs)
    if expected.shape == got.shape:
        if not torch.isfinite(expected).all() or not expected.any():
            return
        decibels = sqnr(expected, got)
        if decibels >= _AGREEMENT:
            return
        if _amplifies_rounding(quantized, args, kwargs, inside, expected):
            warnings.warn(
                f"dbrq: graph and model agree to {decibels:.1f} dB only, and the model agrees as little with itself "
                "when its inputs change by a thousandth",
                stacklevel=2,
            )
            return
    raise RewriteError(
        "the graph does not give what the model gives for the example", path="",
        expected=f"{_AGREEMENT} dB or more",
        got="another shape" if expected.shape != got.shape else f"{sqnr(expected, got):.1f} dB",
        hint="the model does what no graph follows: keep using the converted model, and please report it",
    )  # fmt: skip


def _run_copy(quantized: nn.Module, args: tuple, kwargs: dict, inside: Inside | None) -> Any:
    """What a converted model gives, which is left as it is."""
    model = copy.deepcopy(quantized)
    if inside is None:
        return model(*args, **kwargs)
    intercepted: InterceptedForward = model.__dict__["forward"]
    return InsideRun(intercepted, inside).run(intercepted, args, kwargs)


def _amplifies_rounding(
    quantized: nn.Module, args: tuple, kwargs: dict, inside: Inside | None, expected: Tensor
) -> bool:
    """Whether the model itself strays as far when float inputs change by a thousandth, as deep random networks do.

    A thousandth is a quarter of an 8-bit step: less could be lost as the inputs are quantized.

    Args:
        expected: its float outputs for ``args`` and ``kwargs`` in a row, after one 0.
    """
    generator = torch.Generator().manual_seed(0)

    def nudged(leaf: Any) -> Any:
        if not _is_float(leaf):
            return leaf
        return leaf * (1 + 1e-3 * torch.randn(leaf.shape, generator=generator)).to(leaf.dtype)

    with torch.inference_mode(False), torch.no_grad(), random_state_kept():
        args, kwargs = tree_map(nudged, _owned((args, kwargs)))
        output = _run_copy(quantized, args, kwargs, inside)
        got = torch.cat([torch.zeros(1), *(leaf.flatten().float() for leaf in tree_leaves(output) if _is_float(leaf))])
    return got.shape == expected.shape and sqnr(expected, got) < _AGREEMENT + 5


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided


def _recorded(quantized: nn.Module, args: tuple, kwargs: dict, inside: Inside | None) -> Recording:
    try:
        return _free_of_values(quantized, args, kwargs, inside, Sizes.FREE)
    except QuantizationError:
        raise
    except Exception as error:  # some code wants truth values or sizes to be bools or ints and nothing like them
        with contextlib.suppress(Exception):
            return _free_of_values(quantized, args, kwargs, inside, Sizes.COMPARED)
        try:
            recording = _free_of_values(quantized, args, kwargs, inside, Sizes.FIXED)
        except QuantizationError:
            raise
        except Exception:
            raise error from None
        warnings.warn(
            "dbrq: the graph holds for the shapes of the example only; the model's code does not take sizes that are "
            f"no plain ints: {type(error).__name__}: {error}",
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
        with contextlib.suppress(Exception), capturing():
            other = _record(quantized, args, kwargs, inside, sizes)
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
    with torch.inference_mode(False):
        model = copy.deepcopy(quantized)  # the run may leave traces in it
        args, kwargs = _owned((args, kwargs))
    intercepted: InterceptedForward = model.__dict__["forward"]
    recorder = GraphRecorder(model, sizes, intercepted.token.record.numbers, state)  # type: ignore[attr-defined]
    _name_leaves(model, recorder)
    inputs = Inputs(recorder, intercepted, args, kwargs, inside)
    run = GraphRun(intercepted.token, recorder, inputs)
    with torch.inference_mode(False):
        output = recorder.write_back(run.record(intercepted, inputs.args, inputs.kwargs))
    changed = frozenset(recorder.changed_state())
    if recorder.reads_constants and not changed <= state:  # some of the constants are none
        return _record(quantized, args, kwargs, inside, sizes, changed | state)
    known = [recorder.known(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    tags = tuple(None if k is None else k.tag for k in known)
    returned = Returned.of(output, recorder)
    recorder.graph.output(returned.plain)
    if not returned.is_plain:
        recorder.graph.set_codegen(RestoringCodeGen(returned))
    remove_dead(recorder.graph)
    recorder.graph.lint()
    graph = fx.GraphModule(recorder.root, recorder.graph, class_name=type(quantized).__name__)
    graph.meta["decisions"] = tuple(recorder.decisions)
    given = frozenset(name for name, _, _, is_given, _ in inputs.placeholders if is_given)
    return Recording(graph.eval(), inputs.example, given, recorder.value_decisions, tags)


def _owned(inputs: Any) -> Any:
    """A copy of the inputs that may be changed, made of ordinary tensors."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
                    copy.deepcopy(inputs))  # fmt: skip


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
