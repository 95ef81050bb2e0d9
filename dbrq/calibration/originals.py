"""Parameters that a throwaway copy shares with the user's model, kept as they were if forward writes to them."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from ..mappings import FUNCTIONS
from ..op_facts import may_write, memory_of
from ..pytree import tree_leaves


class Originals:
    """What shared parameters held before a run."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        shared = [p for p in parameters if p.layout is torch.strided and p.device.type != "meta"]
        self._data = [(p, p.data) for p in shared]
        self._by_memory = {memory_of(p): p for p in shared}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def before(self, func: Callable, given: object) -> Collection[int]:
        """Keep what ``func`` may be about to write to; returns what was kept, for ``after``."""
        if not may_write(func) or (isinstance(func, types.FunctionType) and func in FUNCTIONS):  # those do not
            return ()
        return self.keep(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))

    def keep(self, tensors: Iterable[Tensor]) -> Collection[int]:
        """Keep the parameters that ``tensors`` are, or are views of."""
        found = set()
        for memory in map(memory_of, tensors):
            parameter = self._by_memory.get(memory)
            if memory is not None and parameter is not None and memory not in self._kept:
                self._kept[memory] = parameter, parameter.detach().clone()
                found.add(memory)
        return found

    def after(self, kept: Collection[int], written: Iterable[Tensor]) -> None:
        """Let go of what was kept and not written to."""
        if kept:
            touched = set(map(memory_of, written))
            for memory in kept:
                if memory not in touched:
                    del self._kept[memory]

    def restore(self) -> None:
        """Give the parameters what they held."""
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        with torch.no_grad():
            for parameter, value in self._kept.values():
                parameter.copy_(value)
