"""Runs of a model that are compared: inputs of their own, a random state that is given back, and all that comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._torch import TorchDispatchMode, without_function_modes
from ..pytree import copied_inputs, tree_map


class Drawing(TorchDispatchMode):
    """Sees whether this thread draws from torch's generator.

    Attributes:
        drew: it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        with without_function_modes():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def random_state_kept_if_drawn() -> Iterator[Drawing]:
    """The random state is what it was, if what runs inside changes it.

    torch's generator is the process's: it is put back only if this thread drew from it, so that threads that draw
    meanwhile lose nothing to a model that does not. Python's and numpy's are put back if they changed.
    """
    python, numpy, state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with Drawing() as drawing:
        try:
            yield drawing
        finally:
            if drawing.drew:
                torch.set_rng_state(state)
            if random.getstate() != python:
                random.setstate(python)
            if not _equal_states(np.random.get_state(), numpy):
                np.random.set_state(numpy)


def _equal_states(a: Any, b: Any) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2:] == b[2:]


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Random numbers begin at ``seed`` inside, and outside go on as if nothing had been; None: nobody draws any."""
    if seed is None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def owned(inputs: Any) -> Any:
    """A copy of inputs that may be changed, made of ordinary tensors."""
    with torch.inference_mode(False):
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
            copied_inputs(inputs),
        )


def perturbed(inputs: Any, integers: bool) -> Any:
    """Other inputs of the same range: elements change places, so that what is valid, sorted orders aside, stays valid.

    A leaf's result depends on nothing but the leaf, and has its strides: code may go by them. Flags and masks (two
    values, or values that are not finite) stay.

    Args:
        integers: tensors of integers are shuffled too.
    """
    known: dict[int, Tensor] = {}  # what is given twice is given twice

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _perturbed(leaf, integers)
        return known[id(leaf)]

    return tree_map(other, owned(inputs))


def smaller(inputs: Any) -> Any:
    """Inputs of which not even sums and ranges are what they were."""

    def halved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf * 0.5 if _is_dense(leaf) else _with_elements(leaf, lambda values: values * 0.5)

    return tree_map(halved, inputs)


def _perturbed(leaf: Tensor, integers: bool) -> Tensor:
    if leaf.layout is not torch.strided or not leaf.is_cpu or not leaf.numel() or leaf.is_quantized:
        return leaf
    if leaf.is_complex() or leaf.dtype is torch.bool or not (integers or leaf.is_floating_point()):
        return leaf
    return _with_elements(leaf, _other_values)


def _other_values(values: Tensor) -> Tensor:
    """Others for the elements of an input; themselves if there are none."""
    generator = torch.Generator().manual_seed(values.numel())
    if values.is_floating_point():
        if not bool(values.isfinite().all()):
            return values
        if bool((values == values[0]).all()):  # zeros, ones, or a single number
            noise = torch.rand(values.shape, generator=generator)
            return values + (noise - 0.5) if not values[0] else values * (0.5 + 0.5 * noise)
    if values.unique().numel() <= 2:
        return values
    return values[torch.randperm(len(values), generator=generator)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element has a place of its own in memory, with no gaps between them."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    return torch.empty_like(tensor).stride() == tensor.stride()


def _with_elements(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with the same strides in memory of its own, with gaps (``x[..., 1:]``) and elements that share a place
    (``expand``) where the tensor has them.

    Args:
        change: given the elements, each place in memory once, returns as many.
    """
    values = tensor.detach().flatten()
    if _is_dense(tensor):
        return torch.empty_like(tensor).copy_(change(values).reshape(tensor.shape))
    spans = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    offsets = torch.arange(1 + sum(spans)).as_strided(tensor.shape, tensor.stride()).flatten()
    places, number = offsets.unique(return_inverse=True)
    elements = values.new_empty(len(places)).index_put_((number,), values)
    memory = values.new_zeros(1 + sum(spans)).index_put_((places,), change(elements).to(values.dtype))
    return memory.as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True)
class Trial:
    """A call that the forms of a model are compared on.

    Attributes:
        words: which inputs these are.
        inputs: values for the graph's placeholders, or args and kwargs of the model; nothing changes them.
        seed: what random numbers begin at; None if the model draws none.
    """

    words: str
    inputs: Any
    seed: int | None


#: How an outcome calls what a call left in the model.
STATE = "the buffer "


def outcome(output: Any, inputs: Any = None, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """All that a call left behind, leaf by leaf.

    Args:
        inputs: what it was given, as it is after the call.
        buffers: tensors of the model that it writes to.
    """
    found: dict[str, Any] = {}
    _collect(output, "the output", found)
    if inputs is not None:
        changed: dict[str, Any] = {}
        _collect(inputs, "the inputs afterwards", changed)
        found.update((path, leaf) for path, leaf in changed.items() if isinstance(leaf, Tensor))
    for name, tensor in (buffers or {}).items():
        found[f"{STATE}{name} afterwards"] = tensor.clone()
    return found


def _collect(tree: Any, path: str, found: dict[str, Any]) -> None:
    if isinstance(tree, Mapping):
        found[path] = type(tree), *map(str, tree)
        for key, value in tree.items():
            _collect(value, f"{path}[{key!r}]", found)
    elif isinstance(tree, (list, tuple)):
        found[path] = type(tree), len(tree)
        for number, value in enumerate(tree):
            _collect(value, f"{path}[{number}]", found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        found[path] = (type(tree),)
        for each in dataclasses.fields(tree):
            _collect(getattr(tree, each.name, None), f"{path}.{each.name}", found)
    else:
        found[path] = tree.detach().clone() if isinstance(tree, Tensor) else tree  # it may be a buffer


#: What a call gave: where in the output, among the inputs or the buffers -> a tensor, a number, or a container's class.
Outcome = Mapping[str, Any]
