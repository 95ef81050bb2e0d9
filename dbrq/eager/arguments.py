"""What ops and modules are called with: arguments in a row's order, the tensors among them, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from ..kernels import ints
from ..mappings import OpRow, Role
from ..pytree import tree_map
from ..record.record import SeenOp, TensorSpec
from .interfaces import Leaf


def bind_leaf(leaf: Leaf, args: tuple, kwargs: dict) -> list[Any]:
    """A leaf module's call as a list in its row's order."""
    module = leaf.module
    first = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
    if isinstance(module, nn.EmbeddingBag):
        given = {**dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)), **kwargs}
        offsets, per_sample = given.get("offsets"), given.get("per_sample_weights")
        return [
            given["input"],
            module.weight,
            offsets,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.mode,
            module.sparse,
            per_sample,
            module.include_last_offset,
            module.padding_idx,
        ]
    return [first, *(getattr(module, name) for name in leaf.attributes)]


def activations(row: OpRow, bound: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """The arguments of an op that are data, each with its slot: a bound position, or an index into the list of
    ``cat``.
    """
    if row.role is Role.ELEMENTWISE or row.name == "matmul":
        candidates: list[Any] = list(bound[:2])
    elif row.takes_list:
        candidates = list(bound[0])
    elif row.role is Role.EMBEDDING:
        candidates = []
    else:
        candidates = list(bound[:1])
    return [(slot, t) for slot, t in enumerate(candidates) if isinstance(t, Tensor)]


def specified(args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """A call's arguments with specs for tensors; None if that is not all they are made of."""
    plain = True

    def specify(leaf: Any) -> Any:
        nonlocal plain
        if isinstance(leaf, Tensor):
            return TensorSpec(tuple(leaf.shape), leaf.dtype)
        plain = plain and (leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype)))
        return leaf

    specified = tree_map(specify, (args, dict(kwargs)))
    return specified if plain else None


def settings(row: OpRow, bound: Sequence[Any]) -> tuple:
    """A call's arguments as the record keeps them: constants; "a tensor" for a bound of a function that is one."""
    if row.role is not Role.ACTIVATION:
        return tuple(map(constant, bound))
    return tuple("a tensor" if i and isinstance(b, Tensor) else constant(b) for i, b in enumerate(bound))


def constant(value: Any) -> Any:
    """An argument as the record keeps it: plain values, numpy's among them, None for tensors and anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float, bool, str, torch.dtype)) or value is None:
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, float, np.number)) for v in value):
        return tuple(map(constant, value))
    return None


def spelled_name(func: Callable) -> str:
    name = resolve_name(func)
    return name or getattr(func, "__name__", str(func))


def has_float(args: tuple, kwargs: dict) -> bool:
    """Whether a floating point tensor is among the arguments of a call, or first in a list of them."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            if arg.dtype.is_floating_point:
                return True
        elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor) and arg[0].dtype.is_floating_point:
            return True
    return False


def asymmetric_padding(op: SeenOp) -> tuple[int, ...] | None:
    """Padding in ``F.pad``'s order where ``"same"`` asks for more on the right than on the left; None elsewhere."""
    if not op.row.ndim or op.constants[4] != "same" or op.pad is not None:
        return None
    assert op.weight is not None
    totals = [d * (k - 1) for d, k in zip(ints(op.constants[5], op.row.ndim), op.weight.shape[2:], strict=True)]
    if all(total % 2 == 0 for total in totals):
        return None
    return tuple(n for total in reversed(totals) for n in (total // 2, total - total // 2))
