"""Which ops of a record fuse: decided after the fact, from everything that was seen to read each value.

A value inside a fusion is quantized nowhere, so fusing changes speed and never numbers. One is fused behind another
only if nothing else, quantizeable or not, reads what lies between them.
"""

from __future__ import annotations

import torch

from .kernels import SUPPORTED_POST_OPS
from .mappings import Role
from .record.record import Record, SeenOp, Step


def find_chains(record: Record, heads: list[SeenOp]) -> dict[int, list[SeenOp]]:
    """The ops fused behind each head: index of the head in ``heads`` -> ops in order, empty ones left out.

    ``heads`` are convolutions and linear layers that run in int8. The later of two heads gets an add they could share,
    since by then the other's result exists.
    """
    taken: set[int] = set()
    chains: dict[int, list[SeenOp]] = {}
    for number in reversed(range(len(heads))):
        chain = _chain(record, heads[number], taken)
        taken.update(id(op) for op in chain)
        if chain:
            chains[number] = chain
    return chains


def _chain(record: Record, head: SeenOp, taken: set[int]) -> list[SeenOp]:
    chain: list[SeenOp] = []
    if head.bias_computed:
        return chain
    at = head
    while (op := _only_reader(record, at)) is not None and id(op) not in taken and _fits(record, head, chain, at, op):
        chain.append(op)
        at = op
    return chain


def _only_reader(record: Record, op: SeenOp) -> SeenOp | None:
    value = record.values[op.result.id]
    if len(value.readers) == 1 and any(len(vids) > 1 for vids in value.readers[0].slots().values()):
        return None  # on another path it reads something else
    if len(value.readers) != 1 or value.is_output or value.is_exposed or len(op.outputs) != 1:
        return None
    return value.readers[0]


def _fits(record: Record, head: SeenOp, chain: list[SeenOp], before: SeenOp, op: SeenOp) -> bool:
    if not op.hooked or op.excluded or record.values[op.result.id].is_exposed:
        return False
    roles = [step.row.role for step in chain]
    if op.row.role is Role.NORM:
        return not chain and _folds(head, op)
    if op.qconfig is None or op.other_constants:
        return False
    if op.row.name == "add":
        return set(roles) <= {Role.NORM} and head.row.ndim in (0, 2) and _is_sum(record, before, op)
    if op.row.role is Role.ACTIVATION:
        if Role.ACTIVATION in roles:
            return False
        post_op = op.row.post_op(op.constants) if op.row.post_op is not None else None
        allowed = {"relu"} if Role.ELEMENTWISE in roles else SUPPORTED_POST_OPS[head.row.ndim]
        return post_op is not None and post_op.name in allowed
    return False


def _folds(head: SeenOp, norm: SeenOp) -> bool:
    """Whether the batch norm is over the head's output channels, with statistics that belong to the model."""
    mean, variance = norm.norm[:2]
    channels = head.result.shape[1] if head.row.ndim else head.result.shape[-1]
    over_channels = bool(head.row.ndim) or len(head.result.shape) == 2
    return (
        mean is not None and variance is not None and over_channels and mean.shape == (channels,)
        and not norm.constants[5] and norm.pad is None
        and len(head.result.shape) == (head.row.ndim or 0) + 2
    )  # fmt: skip


def _is_sum(record: Record, before: SeenOp, op: SeenOp) -> bool:
    """Whether ``op`` adds one other float tensor of the same shape."""
    if op.constants[2] != 1 or len(op.activations) != 2:
        return False
    own = before.result
    others = [record.values[vid].info for _, vid in op.activations if vid != own.id]
    return (
        len(others) == 1
        and others[0].shape == own.shape
        and others[0].dtype is torch.float32
        and not others[0].constant
    )


def step_of(op: SeenOp, before: SeenOp) -> Step:
    """One fused op, without its other operand's reading, which placement decides."""
    other_slot = None
    if op.row.name == "add":
        other_slot = next(slot for slot, vid in op.activations if vid != before.result.id)
    eps = op.constants[7] if op.row.role is Role.NORM else 0.0
    return Step(op.row, op.constants, op.result.id, op.norm, eps, None, other_slot)
