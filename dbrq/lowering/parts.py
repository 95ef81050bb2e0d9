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
from torch import Tensor, nn

from ..attachment import state_of
from ..auto_trace import NOT_RUN, TAG, InterceptedForward, RunCall, active
from ..containers import call_arguments, tree_leaves, tree_map
from ..copies import copied
from ..errors import QuantizationError
from ..graph_io import RestoringCodeGen
from ..mappings import Role
from ..quantization_state import AutoQuantizationState
from ..record import Record, SeenOp, Tag, TensorSpec
from ..rewriter import Recording, record, where_paths_part
from ..tensors import plain

#: A recording and the module it is of -> its lowered form, as ``lower`` makes it.
LowerGraph = Callable[[Recording, nn.Module], nn.Module]


@dataclass
class Lowered:
    """One call of a straight-line module in lowered form. It is what an ``AutoQuantizationState`` keeps in ``parts``.

    Attributes:
        path: the module's.
        model: what runs.
        restore: makes the user's containers of what ``model`` returns; None if it returns them.
        tags: who made each tensor of the output.
        inside: path -> how often the call calls the modules inside.
    """

    path: str
    model: nn.Module
    restore: Callable[[Any], Any] | None
    tags: tuple[Tag, ...]
    inside: dict[str, int]

    def __call__(self, call: RunCall, args: tuple, kwargs: dict) -> Any:
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map(plain, (args, kwargs))
            try:
                output = self.model(*args, **kwargs)
            except Exception as error:  # other inputs than the graph's: the module itself runs, or says what is wrong
                call.token.warn_once(
                    f"part {self.path}",
                    f"dbrq: {self.path} runs as it was converted, since its lowered form does not take these inputs: "
                    f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}",
                )
                return NOT_RUN
            if self.restore is not None:
                output = self.restore(output)
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            for tensor, tag in zip(tensors, self.tags, strict=False):
                tensor.__dict__[TAG] = tag
        states: dict[str, AutoQuantizationState] = call.token.states  # type: ignore[attr-defined]
        for path, count in self.inside.items():
            state = id(states[path])
            call.counts[state] = call.counts.get(state, 0) + count
        return output

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.model, torch.jit.ScriptModule):
            file = io.BytesIO()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.jit.*")
                torch.jit.save(self.model, file)
            state["model"] = file.getvalue()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["model"], bytes):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.jit.*")
                state = {**state, "model": torch.jit.load(io.BytesIO(state["model"]), map_location="cpu")}
        self.__dict__.update(state)


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
    examples = _Examples(token.record, *call_arguments(example_inputs, example_kwargs))
    examples.collect(model)
    parts = _Parts(token.record, examples, lower_graph)
    parts.descend(model, "")
    if verbose:
        print(*parts.log, sep="\n", file=sys.stderr)
    return model


class _Parts:
    """Lowers the modules of a tree, from the root down."""

    def __init__(self, record: Record, examples: _Examples, lower_graph: LowerGraph) -> None:
        self.record, self.examples, self.lower_graph = record, examples, lower_graph
        self.log: list[str] = []

    def descend(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            intercepted = child.__dict__.get("forward")
            known = isinstance(intercepted, InterceptedForward)
            if known and intercepted.path != inner:  # another name of a module that has been dealt with
                continue
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
            return parting.got or str(parting)
        made = {}
        for call in range(len(state.calls)):
            example = self.examples.of(state.path, call)
            if example is None:
                return "no example of its inputs is known"
            try:
                recording = record(module, example[0], example[1], call)
                if any(node.meta.get("writes") for node in recording.graph.graph.nodes):
                    return "it writes to what it is given, or to its own buffers"
                codegen = recording.graph.graph._codegen
                lowered = self.lower_graph(recording, module)
            except QuantizationError as error:
                return error.message
            except Exception as error:  # torch's own, of code that no graph can have
                return f"{type(error).__name__}: {error}"
            restore = None
            if isinstance(codegen, RestoringCodeGen) and isinstance(lowered, torch.jit.ScriptModule):
                restore = codegen.returned
            inside = _calls_inside(self.record, state.path, call)
            made[call] = Lowered(state.path, lowered, restore, recording.tags, dict(inside))
        if not made:
            return "it was never reached"
        state.parts = made  # type: ignore[assignment]
        return ""


def _calls_inside(record: Record, path: str, call: int) -> Counter[str]:
    """How often one call of a straight-line module calls each module inside of it."""
    found: Counter[str] = Counter()
    seen = record.calls[path][call]
    for step in seen.paths[0].steps:
        if isinstance(step, SeenOp):
            continue
        number = seen.before.get(step, 0) + found[step]
        found[step] += 1
        if step in record.calls and number < len(record.calls[step]):
            found += _calls_inside(record, step, number)
    return found


class _Examples:
    """The arguments with which each call of each module is made, in the example's run or as calibration saw them."""

    def __init__(self, record: Record, args: tuple, kwargs: dict) -> None:
        self.record, self.args, self.kwargs = record, args, kwargs
        self._held: dict[tuple[str, int], tuple[tuple, dict]] = {}

    def collect(self, model: nn.Module) -> None:
        """Run the example and keep what its modules are called with."""
        intercepted: InterceptedForward = model.__dict__["forward"]
        run = _Collecting(intercepted.token, self._held)
        args, kwargs = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        previous = active.call
        try:
            run.run(intercepted, args, kwargs)
        finally:
            active.call = previous

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


class _Collecting(RunCall):
    """A run that keeps what modules are called with."""

    def __init__(self, token: Any, held: dict[tuple[str, int], tuple[tuple, dict]]) -> None:
        super().__init__(token)
        self.held = held

    def _module(self, intercepted: InterceptedForward, state: Any, args: tuple, kwargs: dict) -> Any:
        if self.frame is not None:
            with torch._C.DisableTorchFunction():
                self.held[state.path, self.counts.get(id(state), 0)] = tree_map(
                    lambda leaf: plain(leaf).clone() if isinstance(leaf, Tensor) else leaf, (args, dict(kwargs))
                )
        return super()._module(intercepted, state, args, kwargs)
