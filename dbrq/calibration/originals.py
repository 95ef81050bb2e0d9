"""Parameters that a throwaway copy shares with the user's model, kept as they were if forward writes to them."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from .._torch import storage_id
from ..mappings import FUNCTIONS
from ..op_facts import may_write
from ..pytree import tree_leaves


class Originals:
    """What shared parameters held before a run."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        shared = [p for p in parameters if p.layout is torch.strided and p.device.type != "meta"]
        self._data = [(p, p.data) for p in shared]
        self._by_storage = {storage_id(p.untyped_storage()): p for p in shared}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def before(self, func: Callable, given: object) -> Collection[int]:
        """Keep what ``func`` may be about to write to; returns what was kept, for ``after``."""
        if not may_write(func) or (isinstance(func, types.FunctionType) and func in FUNCTIONS):  # those do not
            return ()
        return self.keep(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))

    def keep(self, tensors: Iterable[Tensor]) -> Collection[int]:
        """Keep the parameters that ``tensors`` are, or are views of."""
        found = set()
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            storage = storage_id(tensor.untyped_storage())
            parameter = self._by_storage.get(storage)
            if parameter is not None and storage not in self._kept:
                self._kept[storage] = parameter, parameter.detach().clone()
                found.add(storage)
        return found

    def after(self, kept: Collection[int], written: Iterable[Tensor]) -> None:
        """Let go of what was kept and not written to."""
        if kept:
            touched = {storage_id(tensor.untyped_storage()) for tensor in written if tensor.layout is torch.strided}
            for storage in kept:
                if storage not in touched:
                    del self._kept[storage]

    def restore(self) -> None:
        """Give the parameters what they held."""
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        with torch.no_grad():
            for parameter, value in self._kept.values():
                parameter.copy_(value)
