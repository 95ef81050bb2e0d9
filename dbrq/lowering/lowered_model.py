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

from .._torch import count_function_modes, storage_id, without_function_modes
from ..calibration.surgery import random_state_kept
from ..errors import QuantizationError
from ..graph.nodes import leaves
from ..graph.structure import fitted, without_asserts
from ..graph.trials import owned
from ..guards import check_move, without_gradient
from ..inspection.rows import LOWERED_REPORT
from ..op_facts import Memory
from .graph_data import as_data


class Held(nn.Module):
    """A module of a lowered model's tree. What was made of its tensors, packed weights and plans, does not follow them:
    only those that calls write to may be changed.
    """

    _fixed: frozenset[str] = frozenset()  # names of the tensors that stay

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed:
            raise _fixed(name)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, {**local_metadata, "assign_to_params_buffers": False}, *rest)


def _fixed(name: str) -> QuantizationError:
    return QuantizationError(
        "a lowered model keeps what it was lowered with; only the state that its calls write to can be changed",
        got=f"another {name}", hint="load into the float or the converted model, and lower that again",
    )  # fmt: skip


class LoweredModel(Held):
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
        without_asserts(graph.graph)  # ``_fitted`` does it
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
        places = [(target, meta.get("structure")) for op, _, target, _, _, meta in data if op == "placeholder"]
        self._structures = [(i, *place) for i, place in enumerate(places) if place[1] is not None]
        self._begin(**options)
        self._hold()
        self.eval()

    def _hold(self) -> None:
        """Fix what calls do not write to, and know by heart what they do."""
        self._assignable: list[tuple[dict[str, Any], str, Tensor]] = []
        for path, module in self.named_modules():
            names = {n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
            state = {n for n in names if f"{path}.{n}".lstrip(".") in self._written}
            for name in sorted(state):
                tensors: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
                self._assignable.append((tensors, name, tensors[name]))
            if type(module) is nn.Module:
                module.__class__ = Held
            if isinstance(module, Held):
                module.__dict__["_fixed"] = frozenset(names - state)

    def share_state(self, model: nn.Module) -> set[tuple[int, str]]:
        """Have a model hold the tensors that calls write to, under their own names; returns where they are: (id of what
        holds them, name).
        """
        found = set()
        self._assignable = []
        for path, held in sorted(self.state().items()):
            owner: Any = model
            *way, name = path.split(".")
            for step in way:
                owner = owner._modules.get(step) if isinstance(owner, nn.Module) else None
            holds = isinstance(owner, nn.Module)
            places: tuple[Any, ...] = (owner._parameters, owner._buffers, owner.__dict__) if holds else ()
            for tensors in places:
                if isinstance(now := tensors.get(name), Tensor):
                    if now is not held and (now.shape, now.dtype) == (held.shape, held.dtype):
                        with torch.no_grad():
                            held.copy_(now)
                    tensors[name] = held
                    self._assignable.append((tensors, name, held))
                    found.add((id(tensors), name))
        return found

    def _take_assigned(self) -> None:
        """Copy what was assigned to the state (``model.h = zeros``) to where calls read and write it.

        Raises:
            QuantizationError: it has another shape or dtype.
        """
        for tensors, name, held in self._assignable:
            if (now := tensors.get(name)) is held:
                continue
            if not isinstance(now, Tensor) or now.shape != held.shape or now.dtype is not held.dtype:
                got = f"{tuple(now.shape)}, {now.dtype}" if isinstance(now, Tensor) else type(now).__name__
                tensors[name] = held
                raise QuantizationError(
                    f"the state {name} of a lowered model keeps its shape and dtype",
                    expected=f"{tuple(held.shape)}, {held.dtype}", got=got,
                    hint="assign a tensor like it, or lower the converted model with this one",
                )  # fmt: skip
            with torch.no_grad():
                held.copy_(now)
            tensors[name] = held

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        for path, held in without_code(self).state_dict().items():  # before anything is loaded
            given = state_dict.get(prefix + path)
            same = given is None or path in self._written
            if not same and not (isinstance(given, Tensor) and torch.equal(given, held)):
                raise _fixed(path)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _begin(self, *args: Any, **options: Any) -> None:
        """Get ready to run, as far as that does not depend on inputs; sets ``_written``."""
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        """What ``_begin`` was given, as it is now."""
        return {}

    def plain(self, args: Sequence[Any]) -> Any:
        """``forward`` for all of the graph's inputs, in order; the result is in plain containers."""
        raise NotImplementedError

    def called(self, args: Sequence[Any]) -> Any:
        """``plain``, on the state as it was assigned, and with new tensors on the CPU whatever a mode of torch says."""
        if self._assignable:
            self._take_assigned()
        if self._structures:
            args = self._fitted(args)
        if not count_function_modes():
            return self.plain(args)
        with without_function_modes():
            return self.plain(args)

    def warm(self, args: Sequence[Any]) -> Any:
        """Make what runs these inputs, and run it on copies of them; state and random state stay as they are."""
        kept = self._written_tensors()
        with random_state_kept():
            result = self.called(owned(tuple(args)))
        self._restore(kept)
        return result

    def state(self) -> dict[str, Tensor]:
        """The tensors that calls write to, by path."""
        held = without_code(self)  # a buffer may be called as a method of this class is
        return {path: operator.attrgetter(path)(held) for path in self._written}

    def _written_tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors that calls write to."""
        return {path: tensor.clone() for path, tensor in self.state().items()}

    def _restore(self, kept: Mapping[str, Tensor]) -> None:
        for path, tensor in self.state().items():
            tensor.copy_(kept[path])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self._signature.parameters):
            args = self._placed(args, kwargs)
        result = self.called(args)
        result = result if self._returned is None else self._returned(result)
        return without_gradient("", result, args) if torch.is_grad_enabled() else result

    def _placed(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def bound(self, args: tuple, kwargs: dict[str, Any]) -> Sequence[Any]:
        """What a call gives the graph."""
        return self._fitted(self._placed(args, kwargs))

    def _fitted(self, args: Sequence[Any]) -> Sequence[Any]:
        """All of the graph's inputs, their containers as the example had them."""
        args = list(args)
        for place, name, structure in self._structures:
            args[place] = fitted(args[place], structure, name)
        return args

    def _apply(self, fn: Callable, recurse: bool = True) -> LoweredModel:
        """What was made of the graph holds what its tensors were."""
        check_move(fn, "", "a lowered model", "lower again, with dtype=torch.bfloat16 perhaps")
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise QuantizationError(
            "a lowered model has no folder of its own", got="save_pretrained",
            hint="dbrq.save(lowered, path) keeps it; save_pretrained of the converted model writes a folder",
        )  # fmt: skip

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


def written_inputs(graph: fx.Graph) -> list[bool]:
    """For each placeholder, whether the graph writes to its memory."""
    memory = Memory(graph)
    return [memory.is_written(node) for node in graph.nodes if node.op == "placeholder"]


def write_back(args: Sequence[Any], used: Sequence[Any], written: Sequence[bool]) -> None:
    """Copy to the caller's tensors what a graph wrote to the copies of them that it ran on.

    Args:
        args: the caller's, one for each placeholder.
        used: what stood for their leaves.
        written: ``written_inputs``; an expanded input that is only read takes no copy.
    """
    leaf = iter(used)
    for arg, is_written in zip(args, written, strict=True):
        for given in leaves([arg]):
            if (now := next(leaf)) is not given and is_written:
                given.detach().copy_(now)


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


def number_key(value: Any) -> tuple[type, Any]:
    """Stands for an argument that is no tensor; 0.0 and -0.0 are equal, and not the same to every op."""
    return type(value), value.hex() if type(value) is float else value
