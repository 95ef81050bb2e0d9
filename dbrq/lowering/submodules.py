"""A model whose code decides, lowered in parts: the straight-line modules inside of it, each as a graph of its own.

The code that decides stays the user's Python. Between the parts values are float32, as at the borders of any lowered
model; the ops that are in no part run in the converted model's own int8 kernels.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import op_facts, selfcheck
from .._torch import codegen_of, without_function_modes
from ..auto_trace import NOT_RUN, InterceptedForward, RunCall
from ..calibration.session import QuantizedModelToken, working_copy
from ..calibration.surgery import copied
from ..eager.interfaces import Part, Run
from ..errors import ERRORS_OF_CODE, MismatchError, QuantizationError, is_bug
from ..graph.held import differing, held, shown
from ..graph.nodes import DEQUANTIZE, QUANTIZE, remove_dead
from ..graph.signature import Inside, InsideRun, RestoringCodeGen, check_input
from ..graph.trials import owned, random_state_kept_if_drawn
from ..hidden_state import state_of
from ..kernels import QParams, quantize
from ..mappings import Role
from ..pytree import call_arguments, tree_leaves, tree_map
from ..quantization_state import AutoQuantizationState
from ..quiet import quietly
from ..record.record import Record, SeenOp, Tag, TensorSpec
from ..rewriter import Recording, record, where_paths_part
from ..tensors import Int8Tensor, plain, set_tag
from .assembled import disagreeing
from .engine import first_input, qparams_of

#: A recording and the module it is of -> its lowered form, as ``lower`` makes it.
LowerGraph = Callable[[Recording, nn.Module], nn.Module]


@dataclass
class Lowered:
    """One call of a straight-line module in lowered form. ``AutoQuantizationState.parts`` keeps them.

    Attributes:
        path: the module's.
        model: what runs.
        restore: makes the user's containers of what ``model`` returns; None if it returns them.
        names: what the module's forward takes by position.
        makers: argument -> who made its tensors; of values of other origin the graph knows no range.
        reads: argument -> qparams, for those that the model takes as uint8.
        writes: for each tensor of the output, its qparams where it is uint8.
        tags: who made each tensor of the output.
        inside: path -> how often the call calls the modules inside.
    """

    path: str
    model: nn.Module
    restore: Callable[[Any], Any] | None
    names: tuple[str, ...]
    makers: dict[str, tuple[Tag, ...]]
    reads: dict[str, QParams]
    writes: tuple[QParams | None, ...]
    tags: tuple[Tag, ...]
    inside: dict[str, int]

    def __call__(self, call: Run, args: tuple, kwargs: dict) -> Any:
        assert isinstance(call, RunCall) and isinstance(call.token, QuantizedModelToken)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name, makers in self.makers.items():
            tensors = [leaf for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
            if len(tensors) != len(makers):
                return NOT_RUN
            if any(m is not None and call.tag_of(t) != m for t, m in zip(tensors, makers, strict=True)):
                return NOT_RUN
        with without_function_modes():
            taken = [self._taken(name, x) for name, x in zip(self.names, args, strict=False)]
            taken += tree_map(plain, list(args[len(self.names) :]))
            options = {name: self._taken(name, x) for name, x in kwargs.items()}
            try:
                output = self.model(*taken, **options)
            except ERRORS_OF_CODE as error:
                if is_bug(error):
                    raise  # else these are other inputs than the graph's: the module runs, or says what is wrong
                call.token.warn_once(
                    f"part {self.path}",
                    f"dbrq: {self.path} runs as it was converted, since its lowered form does not take these inputs: "
                    f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}",
                )
                return NOT_RUN
            if self.restore is not None:
                output = self.restore(output)
            made = iter(zip(self.tags, self.writes, strict=True))
            output = tree_map(lambda leaf: _made(leaf, *next(made)) if isinstance(leaf, Tensor) else leaf, output)
        for path, count in self.inside.items():
            state = id(call.token.states[path])
            call.counts[state] = call.counts.get(state, 0) + count
        return output

    def _taken(self, name: str, x: Any) -> Any:
        """An argument as the model takes it."""
        qparams = self.reads.get(name)
        if qparams is None:
            return tree_map(plain, x)
        if isinstance(x, Int8Tensor) and x.data_u8 is not None and x.qparams == qparams:
            return x.data_u8
        return quantize(plain(x), qparams)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.model, torch.jit.ScriptModule):
            file = io.BytesIO()
            quietly(torch.jit.save, self.model, file)
            state["model"] = file.getvalue()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["model"], bytes):
            state = {**state, "model": quietly(torch.jit.load, io.BytesIO(state["model"]), map_location="cpu")}
        self.__dict__.update(state)


def _made(tensor: Tensor, tag: Tag, qparams: QParams | None) -> Tensor:
    """A tensor of the output as the run knows it."""
    if qparams is not None:
        return Int8Tensor(tensor.shape, tensor, qparams, tag)
    set_tag(tensor, tag)
    return tensor


def lower_parts(
    quantized: nn.Module, example_inputs: Any, example_kwargs: Any, lower_graph: LowerGraph, verbose: bool
) -> nn.Module:
    """A copy of a converted model in which each maximal straight-line module runs lowered.

    Args:
        quantized: what ``convert`` returned.
        example_inputs, example_kwargs: one call's arguments. Modules that this call does not reach are lowered for
            made-up inputs of the shapes that calibration saw.
        lower_graph: makes the lowered form of one part.
        verbose: say to stderr what was lowered, and why what was not.
    """
    model = copied(quantized)
    token = state_of(model).token
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    examples = _Examples(token.record, args, kwargs)
    with random_state_kept_if_drawn():
        examples.collect(copied(quantized))  # whose buffers the run may change
    parts = _Parts(token.record, examples, lower_graph)
    parts.descend(model, "")
    if selfcheck.enabled():
        made = {path: state.parts for path, state in token.states.items() if state.parts}
        for path in disagreeing(quantized, made, args, kwargs) if made else ():
            token.states[path].parts = {}
            parts.log.append(f"{path}: not lowered as one part: with it the model does not give what it gave")
            warnings.warn(
                f"dbrq: {path or 'the model'} stays as it was converted: lowered as one part, it changes what the "
                "model gives, by something that a graph does not follow",
                stacklevel=3,
            )
    if verbose:
        print(*parts.log, sep="\n", file=sys.stderr)
    return model


class _Parts:
    """Lowers the modules of a tree, from the root down."""

    def __init__(self, record: Record, examples: _Examples, lower_graph: LowerGraph) -> None:
        self.record, self.examples, self.lower_graph = record, examples, lower_graph
        self.log: list[str] = []
        self._int8_makers = {op.result.tag for op in record.hooked() if op.decision.writes is not None}

    def descend(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            intercepted = child.__dict__.get("forward")
            known = isinstance(intercepted, InterceptedForward)
            if isinstance(intercepted, InterceptedForward) and intercepted.path != inner:
                continue  # another name of a module that has been dealt with
            state = state_of(child)
            if known and state is not None and not state.opaque and self._worth(inner):
                reason = self._lower(child, state)
                self.log.append(f"{inner}: " + (f"not lowered as one part: {reason}" if reason else "lowered"))
                if not reason:
                    continue
            if state is None or not state.opaque:
                self.descend(child, inner)

    def _worth(self, path: str) -> bool:
        """Whether an int8 layer runs inside."""
        inside = f"{path}."
        return any(
            op.row.role is Role.COMPUTE and op.decision.precision == "int8" and f"{op.owner}.".startswith(inside)
            for op in self.record.hooked()
        )

    def _lower(self, module: nn.Module, state: AutoQuantizationState) -> str:
        """Lower each call of a module; returns why not, or ""."""
        parting = where_paths_part(self.record, state.path)
        if parting is not None:
            return str(parting.got or parting)
        if (names := self.examples.set_from_outside(state.path)) is not None:
            return f"code outside of it sets what it may read: {', '.join(names)}"
        made: dict[int, list[Part]] = {}
        for number, call in enumerate(state.calls):
            for tags in call.all_input_tags():
                lowered = self._lower_call(module, state, number, tags)
                if isinstance(lowered, str):
                    return lowered
                made.setdefault(number, []).append(lowered)
        if not made:
            return "it was never reached"
        state.parts = made
        return ""

    def _lower_call(
        self, module: nn.Module, state: AutoQuantizationState, number: int, tags: dict[str, tuple[Tag, ...]]
    ) -> Lowered | str:
        """One call of a module with values of one origin, lowered; or why not."""
        example = self.examples.of(state.path, number)
        if example is None:
            return "no example of its inputs is known"
        try:
            recording = record(module, example[0], example[1], Inside(number, tags))
            if any(map(op_facts.writes, recording.graph.graph.nodes)):
                return "it writes to what it is given, or to its own buffers"
            if (traces := _traces(module, Inside(number, tags), example)) is not None:
                return f"it leaves values in what code outside of it may read: {', '.join(traces)}"
            reads, writes = _int8_borders(recording, self._int8_makers, tags)
            codegen = codegen_of(recording.graph.graph)
            lowered = self.lower_graph(recording, module)
        except MismatchError:
            raise
        except QuantizationError as error:
            return error.message
        except ERRORS_OF_CODE as error:  # torch's own, of code that no graph can have
            if is_bug(error):
                raise
            return f"{type(error).__name__}: {error}"
        restore = None
        if isinstance(codegen, RestoringCodeGen) and isinstance(lowered, torch.jit.ScriptModule):
            restore = codegen.returned
        return Lowered(
            state.path, lowered, restore, module.__dict__["forward"].parameter_names,
            {name: its for name, its in tags.items() if any(tag is not None for tag in its)},
            reads, writes, recording.tags, dict(_calls_inside(self.record, state.path, number)),
        )  # fmt: skip


def _traces(module: nn.Module, inside: Inside, example: tuple[tuple, dict]) -> list[str] | None:
    """What a call changes in its module's attributes and in the containers that it is given; None if nothing."""
    model = working_copy(module, ())
    intercepted: InterceptedForward = model.__dict__["forward"]
    call = args, kwargs = owned(example)
    before, given = held(model), shown(call)
    with torch.inference_mode(False), torch.no_grad(), random_state_kept_if_drawn():
        InsideRun(intercepted, inside).run(intercepted, args, kwargs)
    found = differing(before, held(model))
    if not found and shown(call) != given:
        found = ["an argument"]
    return found or None


def _int8_borders(
    recording: Recording, int8_makers: set[Tag], tags: dict[str, tuple[Tag, ...]]
) -> tuple[dict[str, QParams], tuple[QParams | None, ...]]:
    """Let a graph take and return uint8 where it would only quantize and dequantize.

    Args:
        recording: its graph and example are changed.
        int8_makers: tags of values that arrive as int8.
        tags: argument -> who made its tensors.

    Returns:
        Argument -> qparams, and those of each tensor of the output.
    """
    graph = recording.graph.graph
    reads: dict[str, QParams] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs, others = list(recording.inputs), None if recording.others is None else list(recording.others)
    for position, node in enumerate(placeholders):
        users = [user for user in node.users if user.target is not check_input]
        checks = [user for user in node.users if user.target is check_input]
        its = tags.get(str(node.target), ())
        constants = {tuple(user.args[1:]) for user in users if user.target is QUANTIZE}
        if len(its) != 1 or its[0] not in int8_makers or len(constants) != 1 or not checks:
            continue
        if any(user.target is not QUANTIZE for user in users):
            continue
        (scale, zero_point, low, high, _) = constants.pop()
        reads[str(node.target)] = qparams = QParams(scale, zero_point, low, high)
        for user in users:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        for check in checks:
            check.args = (*check.args[:3], torch.uint8)
        node.meta["dtype"] = torch.uint8
        inputs[position] = quantize(inputs[position], qparams)
        if others is not None:
            others[position] = quantize(others[position], qparams)
    object.__setattr__(recording, "inputs", tuple(inputs))
    object.__setattr__(recording, "others", None if others is None else tuple(others))
    object.__setattr__(recording, "reference", None)
    output = next(node for node in graph.nodes if node.op == "output")
    writes: list[QParams | None] = []

    def written(node: fx.Node) -> fx.Node:
        if "dtype" not in node.meta:  # a number
            return node
        if node.target is not DEQUANTIZE or not isinstance(node.args[1], float):
            writes.append(None)
            return node
        writes.append(qparams_of(node))
        return first_input(node)

    output.args = fx.map_arg(output.args, written)
    remove_dead(graph)
    recording.graph.recompile()
    return reads, tuple(writes)


def _calls_inside(record: Record, path: str, call: int) -> Counter[str]:
    """How often one call of a straight-line module calls each module inside of it."""
    found: Counter[str] = Counter()
    seen = record.calls[path][call]
    for step in seen.paths[0].steps:
        if isinstance(step, SeenOp):
            continue
        number = seen.before.get(step.module, 0) + found[step.module]
        found[step.module] += 1
        if number < len(record.calls.get(step.module, ())):
            found += _calls_inside(record, step.module, number)
    return found


class _Examples:
    """The arguments with which each call of each module is made, in the example's run or as calibration saw them."""

    def __init__(self, record: Record, args: tuple, kwargs: dict) -> None:
        self.record, self.args, self.kwargs = record, args, kwargs
        self._held: dict[tuple[str, int], tuple[tuple, dict]] = {}
        self._set: dict[str, list[str]] = {}

    def set_from_outside(self, path: str) -> list[str] | None:
        """Attributes of a module, and of those inside, that were others when it was called than they had been."""
        return self._set.get(path)

    def collect(self, model: nn.Module) -> None:
        """Run the example and keep what its modules are called with."""
        intercepted: InterceptedForward = model.__dict__["forward"]
        run = _Collecting(intercepted.token, self._held, self._set, model)
        args, kwargs = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        run.run(intercepted, args, kwargs)

    def of(self, path: str, call: int) -> tuple[tuple, dict] | None:
        """(args, kwargs) of one call."""
        held = self._held.get((path, call))
        if held is not None:
            return held
        specified = self.record.calls[path][call].arguments
        return None if specified is None else tree_map(_made_up, specified)


def _made_up(leaf: Any) -> Any:
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.dtype.is_floating_point:
        return torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0)).to(leaf.dtype)
    return (
        torch.ones(leaf.shape, dtype=leaf.dtype) if leaf.dtype is torch.bool else torch.zeros(leaf.shape).to(leaf.dtype)
    )


def _inside(path: str, outer: str) -> bool:
    return f"{path}.".startswith(f"{outer}." if outer else "")


class _Collecting(RunCall):
    """A run that keeps what modules are called with, and what of their attributes was set since it began."""

    def __init__(
        self, token: Any, given: dict[tuple[str, int], tuple[tuple, dict]], changed: dict[str, list[str]],
        model: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__(token)
        self.given, self.changed, self.before = given, changed, held(model)

    def _module(self, intercepted: InterceptedForward, state: Any, args: tuple, kwargs: dict) -> Any:
        if self.frame is not None:
            with without_function_modes():
                now = held(intercepted.module, state.path)
                before = {key: value for key, value in self.before.items() if key in now or _inside(key[0], state.path)}
                if names := differing(before, now):
                    self.changed[state.path] = names
                self.given[state.path, self.counts.get(id(state), 0)] = tree_map(
                    lambda leaf: plain(leaf).clone() if isinstance(leaf, Tensor) else leaf, (args, dict(kwargs))
                )
        return super()._module(intercepted, state, args, kwargs)
