"""What ``lower`` returns for backends that run from Python: the model itself, of its own class, whose forward runs
lowered.

Where calls take or give objects, a graph is recorded for calls of one shape (graph/objects.py): which objects there
are, and what in them is no tensor. A decoder that fills an empty cache and one that adds to it are two graphs. The one
that the example takes is made by ``lower``; others when they are first needed, as plans are for new shapes of tensors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..auto_trace import NOT_RUN, InterceptedForward, active
from ..calibration.session import token_of, working_copy
from ..calibration.surgery import copied
from ..eager.weights import Watched
from ..errors import ERRORS_OF_CODE, QuantizationError, RewriteError, SeveralPathsError, is_bug
from ..graph.converted import held_at
from ..graph.objects import Boundary, Call, Within, is_object, names_of
from ..graph.signature import ObjectError
from ..graph.trials import owned, random_state_kept_if_drawn
from ..guards import check_move
from ..hidden_state import lowered_of, state_of
from ..progress import Stages
from ..pytree import call_arguments, tree_leaves
from ..rewriter import record, where_paths_part
from ..tensors import version_of
from .backends import Target
from .lowered_model import LoweredModel
from .onednn import OneDNNModel
from .passes import written_attributes
from .submodules import lower_parts

#: Graphs that one model keeps; what comes then runs as it was converted.
_MOST_GRAPHS = 32
#: Backends whose models run from Python, and so may hold Python's objects.
_FROM_PYTHON = ("onednn", "inductor")


def lower_model(
    quantized: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    target: Target,
    stages: Stages,
) -> nn.Module:
    """``lower``, for a converted model."""
    token = token_of(quantized, "int8", "lower")
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    from_python = target.backend in _FROM_PYTHON

    def lowered(recording: Any, module: nn.Module) -> nn.Module:
        return target.lowered(recording, module, stages)

    stages.at("recording the graph")
    if where_paths_part(token.record, "") is None:
        model = copied(quantized) if from_python else quantized
        try:
            if from_python:
                return straight(model, args, kwargs, target, stages)
            return lowered(record(model, args, kwargs), model)
        except ObjectError:
            if not from_python:
                raise
            return with_objects(model, args, kwargs, target, stages)
        except SeveralPathsError as error:
            stages.say(f"lowered in parts: {error}")
    elif from_python and _meets_objects(quantized, args, kwargs):
        return with_objects(copied(quantized), args, kwargs, target, stages)
    return lower_parts(quantized, example_inputs, example_kwargs, lowered, stages.verbose)


def _meets_objects(quantized: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether a call takes or gives objects that hold tensors."""
    if any(map(is_object, Call.of((), args, kwargs).apart.objects)):
        return True
    own_args, own_kwargs = owned((args, kwargs))
    with torch.inference_mode(False), torch.no_grad(), random_state_kept_if_drawn():
        output = working_copy(quantized, ())(*own_args, **own_kwargs)
    return any(map(is_object, tree_leaves(output)))


def straight(model: nn.Module, args: tuple, kwargs: dict, target: Target, stages: Stages) -> nn.Module:
    """A converted model, which is returned, has its forward run lowered, as one graph."""
    recording = record(model, args, kwargs)
    _hold_once(recording.graph, model)
    made = target.lowered(recording, model, stages)
    assert isinstance(made, LoweredModel)
    state_of(model).whole = Straight(target, model, made)
    return model


def _hold_once(graph: fx.GraphModule, model: nn.Module) -> None:
    """Let a graph hold the model's own tensors where calls do not write to them."""
    written = written_attributes(graph.graph)
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for path, module in graph.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                full = f"{path}.{name}".lstrip(".")
                own = held_at(model, full)
                if full in written or id(own) not in held or tensor is None or own is tensor:
                    continue
                if (own.shape, own.dtype, own.stride()) == (tensor.shape, tensor.dtype, tensor.stride()) and (
                    type(own) is type(tensor) and torch.equal(own, tensor)
                ):
                    tensors[name] = own


def lowered_form(model: nn.Module) -> nn.Module | None:
    """The graph that runs in place of a model's forward, for a look inside; None if there is none, or several.

    Args:
        model: what ``lower`` returned, or anything else.

    Returns:
        Of onednn a module with ``max_plans``, ``plans``, ``in_torch`` and ``stages()``, of inductor one with ``forms``,
        ``code`` and ``calls()``, of torchscript ``model`` itself.

    >>> import dbrq
    >>> model, x = nn.Linear(4, 3), torch.randn(8, 4)
    >>> lowered = dbrq.lower(dbrq.quantize(model, [x]), x, backend="onednn")
    >>> type(lowered), dbrq.lowered_form(lowered).max_plans
    (<class 'torch.nn.modules.linear.Linear'>, 16)
    """
    if isinstance(model, (LoweredModel, torch.jit.ScriptModule)):
        return model
    runs = lowered_of(model)
    return runs.model if isinstance(runs, Straight) else None


def with_objects(model: nn.Module, args: tuple, kwargs: dict, target: Target, stages: Stages) -> nn.Module:
    """A converted model, which is returned, has its forward run lowered, with the objects that it takes and gives."""
    intercepted: InterceptedForward = model.__dict__["forward"]
    whole = Whole(target, model)
    call = Call.of(names_of(intercepted.__signature__), *owned((args, kwargs)))
    whole.add(intercepted, call, stages)
    state_of(model).whole = whole
    return model


class InPlace:
    """What runs in place of a model's forward, as long as the model is what it was lowered with.

    Attributes:
        target: what it was lowered to.
    """

    def __init__(self, target: Target, model: nn.Module) -> None:
        self.target = target
        self._watched: Watched | None = None
        self._lock = threading.RLock()
        self.watch(model)

    @property
    def models(self) -> list[LoweredModel]:
        """The lowered graphs."""
        raise NotImplementedError

    @property
    def dbrq_report(self) -> str:
        """What ``report`` says of it."""
        return self.models[0].dbrq_report

    def check_move(self, fn: Callable) -> None:
        """Raise if ``fn`` gives tensors another dtype or device."""
        check_move(fn, "", "a lowered model", "lower again, with dtype=torch.bfloat16 perhaps")

    @property
    def words(self) -> str:
        """What runs, for people."""
        found = [graph.extra_repr() for graph in self.models]
        return found[0] if len(found) == 1 else f"{len(found)} graphs for {self.target.backend}"

    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """The model's output; ``NOT_RUN`` if it is to run as it was converted."""
        raise NotImplementedError

    def graph_of(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[nn.Module, tuple, dict]:
        """What runs a call, and what it is given."""
        raise NotImplementedError

    def watch(self, model: nn.Module) -> None:
        """Let calls read and write the state that the model has, and take its other tensors for what they are now."""
        written: set[tuple[int, str]] = set()
        for lowered in self.models:
            written |= lowered.share_state(model)
        places = [
            (tensors, name)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name in tensors
            if (id(tensors), name) not in written
        ]
        self._watched = Watched(places)

    def __call__(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        if self._watched is None:
            with self._lock:
                if self._watched is None:
                    self.watch(intercepted.module)
        elif not self._watched.unchanged():
            intercepted.state.whole = None  # type: ignore[union-attr]  # the root has one
            warnings.warn(
                "dbrq: the model runs as it was converted, not lowered: it has other weights than when it was lowered. "
                "Lower it again with dbrq.lower",
                stacklevel=2,
            )
            return NOT_RUN
        return self.run(intercepted, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


class Straight(InPlace):
    """One graph for all calls."""

    def __init__(self, target: Target, model: nn.Module, lowered: LoweredModel) -> None:
        self.model = lowered
        super().__init__(target, model)

    @property
    def models(self) -> list[LoweredModel]:
        return [self.model]

    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        return self.model(*args, **kwargs)

    def graph_of(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[nn.Module, tuple, dict]:
        return self.model, args, kwargs


class Graph:
    """A lowered graph, for calls of one shape."""

    def __init__(self, boundary: Boundary, model: LoweredModel) -> None:
        self.boundary, self.model = boundary, model

    def __call__(self, call: Call) -> Any:
        return self.boundary.restore(call, self.model(*call.args, **call.kwargs))

    def free_sizes(self, names: Sequence[str], call: Call) -> None:
        """Keep sizes free that grow with each call, as far as what comes next can be told from a call."""
        if not isinstance(self.model, OneDNNModel):
            return
        self.model.free_sizes(self.model.bound(call.args, call.kwargs))
        following = self._following(names, call)
        if following is not None:
            self.model.meets(self.model.bound(following.args, following.kwargs))

    def _following(self, names: Sequence[str], call: Call) -> Call | None:
        """A call like ``call`` with the objects as that leaves them; None if it is of another shape.

        What has the new size of something that grew, as a mask has that counts what a cache will hold, grows as well.
        """
        args, kwargs, _, _ = self.boundary.put_together(*owned((call.args, call.kwargs)))
        before = Call.of(names, args, kwargs)
        self.boundary.restore(before, self.model.warm(self.model.bound(before.args, before.kwargs)))
        after = Call.of(names, args, kwargs)
        if after.shape != call.shape:
            return None
        pairs = zip(before.apart.leaves, after.apart.leaves, strict=True)
        grown = {new: new - old for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)
                 for old, new in zip(a.shape, b.shape, strict=False) if new > old}  # fmt: skip
        if not grown:
            return after

        def larger(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            for axis, size in enumerate(leaf.shape):
                if size in grown:
                    leaf = torch.cat([leaf, leaf.narrow(axis, 0, grown[size])], axis)
            return leaf

        held = {name for name, is_held, _ in after.shape if is_held}
        after.args = tuple(x if i in held else larger(x) for i, x in enumerate(after.args))
        after.kwargs = {name: x if name in held else larger(x) for name, x in after.kwargs.items()}
        return after


class Whole(InPlace):
    """A graph for the calls of each shape, made when the first comes.

    Attributes:
        graphs: shape of the arguments -> the graphs for it, which differ in what forward decided on.
    """

    def __init__(self, target: Target, model: nn.Module) -> None:
        self.graphs: dict[tuple, list[Graph]] = {}
        self._names: tuple[str, ...] | None = None
        self._refused: set[tuple] = set()
        super().__init__(target, model)

    @property
    def models(self) -> list[LoweredModel]:
        return [graph.model for graphs in self.graphs.values() for graph in graphs]

    def run(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        if self._names is None:
            self._names = names_of(intercepted.__signature__)
        call = Call.of(self._names, args, kwargs)
        graphs = self.graphs.get(call.shape, ())
        for graph in list(graphs):
            versions = _versions(call)
            try:
                return graph(call)
            except ERRORS_OF_CODE as error:
                if is_bug(error) or versions != _versions(call):
                    raise  # else forward decided otherwise than for this graph, before it changed anything
        with self._lock:
            if len(self.graphs.get(call.shape, ())) > len(graphs):  # another thread made one
                return self.run(intercepted, args, kwargs)
            if not self._add(intercepted, call):
                return NOT_RUN
        return self.graphs[call.shape][-1](call)

    def graph_of(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[nn.Module, tuple, dict]:
        model(*owned(args), **owned(kwargs))  # makes a graph where there is none
        call = Call.of(self._names or (), args, kwargs)
        graphs = self.graphs.get(call.shape)
        return (model, args, kwargs) if not graphs else (graphs[-1].model, call.args, call.kwargs)

    def _add(self, intercepted: InterceptedForward, call: Call) -> bool:
        """Make a graph for a call; returns whether there is one now."""
        if call.shape in self._refused:
            return False
        try:
            if sum(map(len, self.graphs.values())) >= _MOST_GRAPHS:
                raise RewriteError(f"the model has {_MOST_GRAPHS} graphs for other calls", path="")
            with Stages(f"lowering to {self.target.backend}") as stages:
                self.add(intercepted, call, stages)
        except ERRORS_OF_CODE as error:
            if is_bug(error):
                raise
            self._refused.add(call.shape)
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, QuantizationError):
                why = ": ".join(filter(None, (error.message, str(error.got or ""))))
            intercepted.token.warn_once(
                f"not lowered: {why}", f"dbrq: a call runs as the model was converted, not lowered: {why}"
            )
            return False
        return True

    def add(self, intercepted: InterceptedForward, call: Call, stages: Stages) -> None:
        """Record a graph for a call, and lower it.

        Raises:
            QuantizationError: no graph can stand for it.
        """
        if problem := call.problem():
            raise RewriteError(
                "an input is an object that a graph cannot take apart", path="", got=problem,
                expected="tensors, numbers, containers, and objects of Python's own kind that hold them",
                hint="have forward take its tensors as arguments of their own, or leave it out",
            )  # fmt: skip
        model = intercepted.module
        plain = working_copy(model, [*model.parameters(), *model.buffers()])
        boundary = Boundary(call.shape)
        inner: InterceptedForward = plain.__dict__["forward"]
        inner.previous = Within(boundary, plain, inner.previous)
        previous, active.call = active.call, None
        try:
            recording = record(plain, call.args, call.kwargs, several=True)
            _hold_once(recording.graph, model)
            lowered = self.target.lowered(recording, plain, stages)
        finally:
            active.call = previous
        assert isinstance(lowered, LoweredModel)
        graph = Graph(boundary.copy(), lowered)
        stages.at("looking which sizes are free")
        graph.free_sizes(names_of(intercepted.__signature__), call)
        self.graphs.setdefault(call.shape, []).append(graph)
        self.watch(model)


def _versions(call: Call) -> list[Any]:
    """What tells whether a call has written to the tensors that it was given."""
    return [version_of(leaf) for leaf in call.apart.leaves if isinstance(leaf, Tensor)]
