"""Forms: a graph compiled for inputs of some sizes, and which inputs a form takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..._torch import FakeTensor, is_traceable_wrapper_subclass, pytree
from ...errors import KernelInputError
from ...op_facts import Memory, called
from ..lowered_model import number_key

#: What Inductor may have a kernel do in the memory of a term.
_SUMS = frozenset({"add", "add_", "iadd"})


@dataclass(frozen=True)
class Used:
    """What compiled code is given: free sizes, by (number of the tensor, dimension), then inputs, by number.

    The sizes come with the tensors too, but code that reads them off what was computed is code that Inductor's passes
    do not know.
    """

    sizes: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]

    def free(self, examples: Sequence[Any]) -> frozenset[tuple[int, int]]:
        """Sizes that stayed free, of ``examples`` of what is taken: not all that could have do, those of 1 never."""
        found: set[tuple[int, int]] = set()
        for i, example in zip(self.inputs, examples[len(self.sizes) :], strict=True):
            if isinstance(example, Tensor):
                sizes: Iterable[Any] = example.shape
                found |= {(i, d) for d, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
            elif isinstance(example, torch.SymInt):
                found.add((i, -1))
        return frozenset(found)

    def of(self, flat: Sequence[Any]) -> list[Any]:
        return [*(flat[i].shape[d] for i, d in self.sizes), *(flat[i] for i in self.inputs)]


@dataclass(frozen=True)
class Form:
    """The graph, compiled for one set of shapes, or for sizes that stay free.

    Attributes:
        key: what it was compiled for.
        free: which sizes may be others: (number of the tensor among the inputs, dimension).
        fits: whether it takes such inputs as these, if only free sizes are others.
        run: takes the tensors and numbers of the inputs, gives those of the outputs.
        used: which of the inputs it takes, and before them which sizes, as in ``free``.
        output: how the outputs are nested.
        code: what Inductor generated.
        checks: what it raises where the graph does not hold -> the message that says so.
    """

    key: tuple
    free: frozenset[tuple[int, int]]
    fits: Callable[[Sequence[Any]], bool]
    run: Callable[..., Any]
    used: Used
    output: pytree.TreeSpec
    code: str
    checks: dict[str, str]

    def takes(self, key: tuple, flat: Sequence[Any]) -> bool:
        """Whether it takes inputs, of which ``key`` is what they would be compiled for."""
        differing = differing_sizes(key, self.key)
        return differing is not None and differing <= self.free and self.fits(flat)


def added_inputs(graph: fx.Graph) -> list[bool]:
    """For each placeholder, whether its memory is a term of a sum: behind a layer Inductor has the kernel add to that
    very memory, the caller's too.
    """
    memory = Memory(graph)
    terms = {memory.root(n) for node in graph.nodes if called(node) in _SUMS for n in node.all_input_nodes}
    return [memory.root(node) in terms for node in graph.nodes if node.op == "placeholder"]


def key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.is_contiguous()
    return number_key(leaf)


def _like(key: tuple) -> tuple:
    """A key without sizes and integers."""
    return tuple((len(k[0]), *k[1:]) if isinstance(k, tuple) and isinstance(k[0], tuple)
                 else k[0] if isinstance(k, tuple) and k[0] is int else k for k in key)  # fmt: skip


def differing_sizes(key: tuple, other: tuple) -> frozenset[tuple[int, int]] | None:
    """Sizes in which two keys differ, as in ``Form.free``; None if they differ in more."""
    if _like(key) != _like(other):
        return None
    found: set[tuple[int, int]] = set()
    for i, (now, before) in enumerate(zip(key[1:], other[1:], strict=True)):
        if isinstance(now[0], tuple):  # of a tensor
            found |= {(i, d) for d, (a, b) in enumerate(zip(now[0], before[0], strict=True)) if a != b}
        elif now != before:
            found.add((i, -1))
    return frozenset(found)


def as_dense(leaf: Any) -> Any:
    """Compiled code counts on the strides it was compiled for: those of contiguous tensors, or of channels_last."""
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) is not Tensor or not leaf.is_cpu or leaf.layout is not torch.strided:
        _check_memory(leaf)
    if leaf.is_neg() or leaf.is_conj():  # a sign that its reader applies, which compiled code does not know of
        leaf = leaf.resolve_neg().resolve_conj()
    if leaf.is_contiguous() or leaf.is_contiguous(memory_format=_last(leaf)):
        return leaf
    return leaf.contiguous()


def _check_memory(leaf: Tensor) -> None:
    """Raise if a tensor has no memory of its own on the CPU: compiled code reads its address unasked."""
    if not leaf.is_cpu or leaf.layout is not torch.strided:
        raise KernelInputError(
            "compiled code takes dense tensors on the CPU", got=f"{leaf.layout} on {leaf.device}",
            hint="pass to_dense(), on the CPU",
        )  # fmt: skip
    if isinstance(leaf, FakeTensor) or is_traceable_wrapper_subclass(leaf):  # type: ignore[unreachable]  # torch's stubs clash
        raise KernelInputError("compiled code takes tensors that have memory", got=type(leaf).__name__)


def _last(tensor: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(tensor.dim(), torch.contiguous_format)
