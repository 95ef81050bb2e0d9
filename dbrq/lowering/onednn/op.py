"""A lowered model as an op of torch, ``dbrq::run``, so that scripted graphs of this process can hold it."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from ...errors import OneDNNError, RewriteError
from ...pytree import tree_leaves, tree_map


class Runs(Protocol):
    """A lowered model, as far as the op calls it."""

    placeholders: list[fx.Node]

    def called(self, inputs: list[Any]) -> Any: ...


_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@functools.cache
def _library() -> torch.library.Library:
    """Defines the op, once for the process."""
    library = torch.library.Library("dbrq", "DEF")
    # A call writes to state and draws random numbers, of which no schema can tell: none is merged, dropped or moved.
    library.define("run(int model, Tensor[] inputs) -> Tensor[]", "CONSERVATIVE")
    library.impl("run", _run, "CompositeExplicitAutograd")
    return library


def _run(number: int, inputs: list[Tensor]) -> list[Tensor]:
    model = _models.get(number)
    if model is None:
        raise OneDNNError("dbrq::run: the model is gone", hint="keep it as long as scripted graphs call it")
    return [leaf for leaf in tree_leaves(model.called(inputs)) if isinstance(leaf, Tensor)]


def scriptable(model: Runs, outputs: Any) -> fx.GraphModule:
    """A module that ``torch.jit.script`` takes and that calls ``model``, as long as somebody keeps that.

    Args:
        outputs: what the model's graph returns, in nested containers: ``None`` for what is no tensor.
    """
    _library()
    number = next(_numbers)
    _models[number] = model
    graph = fx.Graph()
    names = [n.name for n in model.placeholders]
    if any(n.meta.get("dtype") is None for n in model.placeholders):
        raise RewriteError("a scripted graph gives tensors only", got=f"inputs {', '.join(names)}")
    inputs = [graph.placeholder(name, Tensor) for name in names]
    results = graph.call_function(torch.ops.dbrq.run, (number, inputs))
    count = itertools.count()

    def part(leaf: Any) -> Any:
        return graph.call_function(_item, (results, next(count))) if isinstance(leaf, Tensor) else leaf

    graph.output(tree_map(part, outputs))
    return fx.GraphModule(nn.Module(), graph, class_name="ScriptableOneDNN")


def _item(results: list[Tensor], index: int) -> Tensor:
    return results[index]
