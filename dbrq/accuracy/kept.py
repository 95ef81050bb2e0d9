"""The sample of the calibration data that a prepared model keeps, for methods that look at more than ranges."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import torch
from torch import Tensor

from ..pytree import copied_inputs, tree_leaves, tree_map

Batch = tuple[tuple, dict[str, Any]]
#: Bytes of inputs that a sample holds, one batch at least.
BUDGET = 64 << 20
#: Batches that a sample holds at most: each costs a run for each method.
MOST = 32


class KeptBatches:
    """Batches drawn from all that came, each with the same chance (Vitter's reservoir), in bounded memory.

    Attributes:
        batches: the arguments of calls, as copies.
        seen: how many calls there were.
    """

    def __init__(self, budget: int = BUDGET, most: int = MOST) -> None:
        self.budget, self.most = budget, most
        self.batches: list[Batch] = []
        self.seen = 0
        self._draw = random.Random(0)

    def offer(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """A call is about to run: keep a copy of its arguments, or not."""
        self.seen += 1
        size = _bytes((args, kwargs))
        room = self.budget - sum(map(_bytes, self.batches))
        if not self.batches or (size <= room and len(self.batches) < self.most):
            place = len(self.batches)
        else:
            place = self._draw.randrange(self.seen)
            if place >= len(self.batches) or size > room + _bytes(self.batches[place]):
                return
        try:
            self.batches[place : place + 1] = [_copy(args, kwargs)]
        except (TypeError, RuntimeError, copy.Error, pickle.PickleError):
            return  # what cannot be copied is calibrated on, and not kept

    def __deepcopy__(self, memo: dict) -> KeptBatches:
        new = KeptBatches(self.budget, self.most)
        new.batches, new.seen = list(self.batches), self.seen  # nobody writes to a batch
        new._draw.setstate(self._draw.getstate())
        return new

    def __len__(self) -> int:
        return len(self.batches)


def _copy(args: tuple, kwargs: dict[str, Any]) -> Batch:
    def owned(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    with torch.inference_mode(False), torch.no_grad():
        return tree_map(owned, copied_inputs((args, kwargs)))


def _bytes(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
