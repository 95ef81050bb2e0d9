"""What the lowered models that run from Python share: a graph and its tensors, called as the model it was made from."""

from __future__ import annotations

import copy
import inspect
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import storage_id
from ..calibration.surgery import random_state_kept
from ..guards import check_move, without_gradient
from ..inspection.report import LOWERED_REPORT
from .graph_data import as_data


class LoweredModel(nn.Module):
    """A graph in a form that a backend runs. Copies and files keep the graph; what is made of it is made again.

    Float inputs may have any layout; outputs are new tensors that own their memory. Calls from several threads do not
    share memory.

    Args:
        graph: the Q/DQ graph, with the tensors it reads.
        returned: makes the user's containers of what the graph returns; None if it returns them.
        dtype: of what stays float.
        options: the backend's own, which copies and files keep.
    """

    #: Paths of the tensors that calls write to.
    _written: frozenset[str]
    #: What ``report`` says of it, as ``rows_as_json`` writes it.
    dbrq_report: str

    def __init__(
        self, graph: fx.GraphModule, returned: Callable[[Any], Any] | None, dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__()
        self._start(as_data(graph.graph), without_code(graph), returned, dtype, "", options)

    def _start(
        self, data: list[tuple], root: nn.Module, returned: Any, dtype: torch.dtype, rows: str, options: dict[str, Any]
    ) -> None:
        self._data, self._returned, self.dtype = data, returned, dtype
        self._modules.update(root._modules)
        self._parameters.update(root._parameters)
        self._buffers.update(root._buffers)
        setattr(self, LOWERED_REPORT, rows)
        self._lock = threading.RLock()
        self._signature = inspect.Signature(
            [
                inspect.Parameter(target, inspect.Parameter.POSITIONAL_OR_KEYWORD,
                                  default=args[0] if args else inspect.Parameter.empty)
                for op, _, target, args, _, _ in data if op == "placeholder"
            ]
        )  # fmt: skip
        self._begin(**options)
        self.eval()

    def _begin(self, *args: Any, **options: Any) -> None:
        """Get ready to run, as far as that does not depend on inputs; sets ``_written``."""
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        """What ``_begin`` was given, as it is now."""
        return {}

    def plain(self, args: Sequence[Any]) -> Any:
        """``forward`` for all of the graph's inputs, in order; the result is in plain containers."""
        raise NotImplementedError

    def warm(self, args: Sequence[Any]) -> None:
        """Make what runs these inputs; what calls write to, and torch's random state, stay as they are."""
        kept = self._written_tensors()
        with random_state_kept():
            self.plain(args)
        self._restore(kept)

    def _written_tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors that calls write to."""
        held = without_code(self)  # a buffer may be called as a method of this class is
        return {path: operator.attrgetter(path)(held).clone() for path in self._written}

    def _restore(self, kept: Mapping[str, Tensor]) -> None:
        held = without_code(self)
        for path, tensor in kept.items():
            operator.attrgetter(path)(held).copy_(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self._signature.parameters):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        result = self.plain(args)
        result = result if self._returned is None else self._returned(result)
        return without_gradient("", result, args) if torch.is_grad_enabled() else result

    def _apply(self, fn: Callable, recurse: bool = True) -> LoweredModel:
        """What was made of the graph holds what its tensors were."""
        check_move(fn, "", "a lowered model", "lower again, with dtype=torch.bfloat16 perhaps")
        return self

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        return {
            "data": self._data, "root": without_code(self), "returned": self._returned, "dtype": self.dtype,
            "rows": getattr(self, LOWERED_REPORT), "options": self._options(),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._start(*(state[name] for name in ("data", "root", "returned", "dtype", "rows", "options")))

    def __deepcopy__(self, memo: dict) -> LoweredModel:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new


def without_code(module: nn.Module) -> nn.Module:
    """The tensors of a module tree, without its code."""
    bare = nn.Module()
    bare._parameters.update(module._parameters)
    bare._buffers.update(module._buffers)
    bare._modules.update(module._modules)
    return bare.eval()


def sharing(values: Sequence[Any]) -> tuple:
    """Which of the tensors share memory, and how: (number of the first of them, bytes behind it) for each."""
    tensors = [v for v in values if isinstance(v, Tensor)] if len(values) > 1 else ()
    if len(tensors) < 2:
        return ()
    first: dict[int, int] = {}
    owners = [first.setdefault(storage_id(t.untyped_storage()), i) for i, t in enumerate(tensors)]
    if len(first) == len(tensors):
        return ()
    return tuple((i, t.data_ptr() - tensors[i].data_ptr()) for i, t in zip(owners, tensors, strict=True))
