"""Parameters as a record names them, and weights that forward computes from parameters alone.

As weight standardization does. Such a weight is as constant as the parameters are. Conversion computes it once more,
from the parameters as they are by then (training may have changed them), and quantizes the result. The user's Python
goes on computing it in float, so each run of a converted model can tell whether it is still the weight that was
quantized (``rounds_to`` in eager/weights.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import without_function_modes
from ..errors import QuantizationError
from ..mappings import function_name
from ..op_facts import may_be_random, mutates
from ..pytree import tree_leaves

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEPEST = 100


@dataclass(frozen=True)
class ParameterRef:
    """A parameter or buffer of the model, or a pure view of one: where it is registered and which part is meant.

    ``shape``, ``stride`` and ``offset`` of a part are those in the contiguous parameter. A ``computed`` one is no
    parameter, but what forward computes from parameters alone (``Computed``); ``name`` is where conversion puts it.
    """

    path: str
    name: str
    whole: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    computed: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.name

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        return self.shape, self.stride, self.offset

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def tensor_of(ref: ParameterRef, modules: dict[str, nn.Module]) -> Tensor:
    """The parameter or buffer, or the part of it, that ``ref`` means."""
    module = modules[ref.path]
    whole = module._parameters.get(ref.name)
    whole = getattr(module, ref.name, None) if whole is None else whole  # a buffer, or parametrized
    if whole is None:
        raise QuantizationError(
            "a parameter of the converted model is gone", path=ref.path, expected=str(ref), got="None"
        )
    return whole if ref.whole else whole.contiguous().as_strided(*ref.geometry)


def source_of(ref: ParameterRef, modules: dict[str, nn.Module]) -> tuple[dict, str]:
    """The dict that registers a parameter or buffer, and its name."""
    module = modules[ref.path]
    return (module._parameters if ref.name in module._parameters else module._buffers), ref.name


@dataclass(frozen=True, eq=False)
class Computed:
    """What a function makes of parameters, buffers, other computed tensors and numbers.

    Attributes:
        function, args, kwargs: the call; ``ParameterRef`` and ``Computed`` stand in them for tensors.
        index: which of its results, None for the only one.
        sources: the parameters and buffers that it comes from in the end.
        kind: stands for the functions and the sources; the same in every run, whatever numbers the run has.
        exact: stands for the numbers too.
    """

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    index: int | None = None
    sources: tuple[ParameterRef, ...] = ()
    kind: str = ""
    exact: str = ""
    depth: int = field(default=0, repr=False)

    def value(self, modules: dict[str, nn.Module], known: dict[int, Any] | None = None) -> Tensor:
        """It, from the parameters that ``modules`` have now."""
        known = {} if known is None else known

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, ParameterRef):
                return tensor_of(leaf, modules).detach()
            return leaf.value(modules, known) if isinstance(leaf, Computed) else leaf

        call = id(self.args)  # the results of one call share its arguments
        if call not in known:
            with without_function_modes():
                known[call] = self.function(*_mapped(plain, self.args), **_mapped(plain, self.kwargs))
        return known[call] if self.index is None else known[call][self.index]

    def ref(self, shape: Sequence[int], owner: str) -> ParameterRef:
        """Where its int8 form is kept: beside the largest tensor that it comes from, else in module ``owner``."""
        largest = max(self.sources, key=lambda ref: torch.Size(ref.shape).numel(), default=None)
        path, name = (owner, "") if largest is None else (largest.path, f"{largest.name}_")
        stride = torch.empty(shape, device="meta").stride()
        return ParameterRef(path, f"{name}computed_{self.kind[:6]}", True, tuple(shape), stride, 0, computed=True)

    def __deepcopy__(self, memo: dict) -> Computed:
        return self

    def __getstate__(self) -> dict[str, Any]:
        function: Any = self.function
        getter = getattr(function, "__name__", "") == "__get__"  # of x.T and the like, which pickle does not take
        return {**self.__dict__, "function": function.__self__.__name__ if getter else function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(function := state["function"], str):
            self.__dict__["function"] = getattr(Tensor, function).__get__


_TENSORS = (Computed, ParameterRef)
Source = Callable[[Tensor], Computed | ParameterRef | None]


def computed(
    function: Callable,
    args: tuple,
    kwargs: dict,
    output: Any,
    source: Source,
) -> list[tuple[Tensor, Computed]]:
    """The tensors of ``output`` with how they are computed; none unless ``source`` knows all tensors given, and the
    function always makes the same of them.
    """
    name = function_name(function)
    undefined = name == "grad" or name.startswith(("empty", "new_empty"))
    if undefined or may_be_random(function) or mutates(function) or kwargs.get("out") is not None:
        return []
    given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    try:
        args, kwargs = _mapped(lambda leaf: _source(leaf, source), (args, kwargs))
    except _Unknown:
        return []
    leaves: list[Any] = []
    _mapped(leaves.append, (args, kwargs))
    parts = [leaf for leaf in leaves if isinstance(leaf, Computed)]
    depth = 1 + max((part.depth for part in parts), default=0)
    if depth > _DEEPEST:
        return []
    refs = [leaf for leaf in leaves if isinstance(leaf, ParameterRef)]
    sources = tuple(dict.fromkeys((*refs, *(ref for part in parts for ref in part.sources))))
    made = []
    results = enumerate(output) if isinstance(output, (tuple, list)) else [(None, output)]
    for index, tensor in results:
        if isinstance(tensor, Tensor) and id(tensor) not in given:
            kind = _digest(name, index, *(_named(leaf, "kind") for leaf in leaves if isinstance(leaf, _TENSORS)))
            exact = _digest(name, index, *(_named(leaf, "exact") for leaf in leaves), *kwargs)
            made.append((tensor, Computed(function, args, kwargs, index, sources, kind, exact, depth)))
    return made


class _Unknown(Exception):
    pass


def _source(leaf: Any, source: Source) -> Any:
    if isinstance(leaf, Tensor):
        leaf = source(leaf)
        if leaf is None:
            raise _Unknown
    elif not isinstance(leaf, _PLAIN) and leaf is not Ellipsis:
        raise _Unknown
    return leaf


def _mapped(function: Callable, tree: Any) -> Any:
    """``tree`` with ``function`` applied to what is no tuple, list, dict or slice."""
    if isinstance(tree, torch.Size):
        return torch.Size(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(function, item) for item in tree)
    if type(tree) is dict:
        return {key: _mapped(function, item) for key, item in tree.items()}
    if type(tree) is slice:
        return slice(*(_mapped(function, item) for item in (tree.start, tree.stop, tree.step)))
    return function(tree)


def _named(leaf: Any, attribute: str) -> str:
    return getattr(leaf, attribute) if isinstance(leaf, Computed) else repr(leaf)


def _digest(*parts: Any) -> str:
    return hashlib.sha1(repr(parts).encode(), usedforsecurity=False).hexdigest()
