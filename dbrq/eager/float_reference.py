"""Every op of the table as a float function of its bound arguments: for fallbacks, and for training with fake
quantize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..mappings import OpRow, asks_inplace

_SPECIAL: dict[str, Callable[..., Any]] = {
    "add": lambda x, other, alpha=1: torch.add(x, other, alpha=alpha),
    "sub": lambda x, other, alpha=1: _tensor(x, other).sub(other, alpha=alpha),
    "div": lambda x, other, rounding_mode=None: torch.div(_tensor(x, other), other, rounding_mode=rounding_mode),
    "cat": lambda x, dim=0: torch.cat(x, dim),
    "stack": lambda x, dim=0: torch.stack(x, dim),
    "interpolate": lambda x, *rest: F.interpolate(x, *rest),
    "mean": lambda x, dim, keepdim, dtype: torch.mean(x, dim, bool(keepdim), dtype=dtype) if dim is not None
    else torch.mean(x, dtype=dtype),
    "relu": lambda x, inplace=False: torch.relu(x),
    "clamp": lambda x, low=None, high=None: torch.clamp(x, low, high),
    "clamp_min": lambda x, low, high=None: torch.clamp_min(x, low),
    "gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "embedding_bag": lambda x, weight, offsets, max_norm, norm_type, by_freq, mode, sparse, per_sample, last, padding: (
        F.embedding_bag(x, weight, offsets, max_norm, norm_type, by_freq, mode, sparse, per_sample, last, padding)
    ),
}  # fmt: skip


def run_float(row: OpRow, bound: Sequence[Any], pad: tuple[tuple[int, ...], str] | None = None) -> Any:
    """The op on plain tensors, never in place. ``pad`` is a convolution's padding of another kind than zeros."""
    if asks_inplace(row, bound):
        place = row.names.index("inplace")
        bound = [*bound[:place], False, *bound[place + 1 :]]
    if pad is not None:
        bound = [F.pad(bound[0], pad[0], mode=pad[1]), *bound[1:4], 0, *bound[5:]]
    function = _SPECIAL.get(row.name) or row.functions[0]
    return function(*bound)


def _tensor(x: Any, other: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=other.dtype)
