"""Padding of integers, in eager mode and in TorchScript."""

# ruff: noqa: UP006, UP035 (TorchScript reads these annotations)

from typing import List

import torch
from torch import Tensor


def enlarged(q: Tensor, spatial: List[int], before: List[int], fill: int) -> Tensor:
    """uint8 ``[batch, channels, *]`` in the middle of a tensor with the sizes ``spatial``, in the kernel's layout.

    ``before``: how far from the start of each spatial dimension.
    """
    sizes = list(q.size())[:2] + spatial
    if len(spatial) == 2:
        result = torch.empty(sizes, dtype=torch.uint8, memory_format=torch.channels_last)
    else:
        result = torch.empty(sizes, dtype=torch.uint8)
    result.fill_(fill)
    inner = result
    for i in range(len(spatial)):
        inner = inner.narrow(i + 2, before[i], q.size(i + 2))
    inner.copy_(q)
    return result


def pad(q: Tensor, pads: List[int], zero_point: int) -> Tensor:
    """Zero padding of a quantized value."""
    return torch.nn.functional.pad(q, pads, "constant", float(zero_point))


def pad_mode(q: Tensor, pads: List[int], mode: str) -> Tensor:
    """``F.pad`` with mode "circular", "reflect" or "replicate", by indexing, for tensors of any dtype.

    ``pads`` is in ``F.pad``'s order: last dimension first, two numbers each.
    """
    for i in range(len(pads) // 2):
        left, right = pads[2 * i], pads[2 * i + 1]
        dim = q.dim() - 1 - i
        size = q.size(dim)
        if left != 0 or right != 0:
            index = torch.arange(-left, size + right)
            if mode == "circular":
                assert left <= size and right <= size, "dbrq: circular padding must be at most the input's size"
                index = index % size
            elif mode == "replicate":
                index = index.clamp(0, size - 1)
            else:
                assert left < size and right < size, "dbrq: reflect padding must be smaller than the input"
                index = (size - 1) - ((size - 1) - index.abs()).abs()
            q = q.index_select(dim, index)
    return q
