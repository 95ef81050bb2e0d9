"""Rounding of weights by what their layers make of it, instead of each element to the nearest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..eager.weights import levels_of
from ..kernels import ints
from ..record.record import SeenOp
from .layers import Layers
from .runs import Rounding, weights_of_rows

#: Layers with longer rows than this keep the nearest: the second moments of their inputs are a square of it.
_LONGEST = 4608
#: Rows of inputs that are used.
_ROWS = 2048
_DAMPING = 0.01
_STEPS, _RATE = 250, 0.02


def choose(layers: Layers, method: str) -> None:
    """Round the weights of all layers by ``method``, "gptq" or "adaround".

    Both see half of the sample; what they find is kept where it beats the nearest on the other half.
    """
    rounding = layers.rounding()
    by_weight: dict[tuple[str, str], list[SeenOp]] = {}
    for op in layers.ops:
        assert op.weight is not None
        by_weight.setdefault(op.weight.key, []).append(op)
    round_rows = _gptq if method == "gptq" else _adaround
    for key, ops in by_weight.items():
        if not all(layers.is_free(op) for op in ops) or ops[0].weight is None:
            continue
        found = _rounded(layers, ops[0], rounding, round_rows)
        if found is not None:
            layers.refined[key] = {**layers.parts(ops[0]), "int8": found}


def _rounded(layers: Layers, op: SeenOp, rounding: Rounding, round_rows: Callable[..., Tensor]) -> Tensor | None:
    """The integers of a layer's weight; None to leave them as they are."""
    parts = layers.parts(op)
    int8, scale = parts["int8"], parts["scale"]
    rows = _rows(layers, op, rounding)
    if rows is None or scale.numel() != len(int8):
        return None
    x, held_out = rows
    weight = layers.weight(op)
    if "smoothing" in parts:
        weight = weight / parts["smoothing"]
    weight = weight.flatten(1) / scale[:, None]  # in steps
    low, high = levels_of(op.qconfig)
    nearest = int8.flatten(1).to(torch.float32)
    importance = weights_of_rows(x @ (weight * scale[:, None]).T) if not op.row.ndim else torch.ones(len(x))
    weighted = x * importance.sqrt()[:, None]

    def error(levels: Tensor) -> float:
        return float((weighted[held_out] @ ((levels - weight) * scale[:, None]).T).square().sum())

    found = round_rows(weight, weighted[~held_out], low, high)
    if not error(found) < error(nearest):
        return None
    return round_rows(weight, weighted, low, high).reshape(int8.shape).to(torch.int8)


def _rows(layers: Layers, op: SeenOp, rounding: Rounding) -> tuple[Tensor, Tensor] | None:
    """What the rows of the weight are multiplied by, ``[n, in]`` as int8 makes it, and which of it is held out."""
    sample = layers.sample(op)
    assert op.weight is not None
    length = torch.Size(op.weight.shape[1:]).numel()
    if sample is None or length > _LONGEST or op.row.ndim not in (0, 2) or op.pad is not None:
        return None
    key, inputs = sample
    factors = layers.smoothing.get(op.weight.key)
    if not op.row.ndim:
        x = rounding.rounded(op, key, inputs.rows())
        x, held_out = (x if factors is None else x * factors), inputs.held_out()
    else:
        stride, padding, dilation, groups = op.constants[3:7]
        if groups != 1 or isinstance(padding, str):
            return None
        unfolded = []
        kernel, dilation, padding, stride = (
            (n[0], n[1]) for n in (ints(given, 2) for given in (op.weight.shape[2:], dilation, padding, stride))
        )
        for part in inputs.parts:
            columns = F.unfold(rounding.rounded(op, key, part), kernel, dilation, padding, stride)
            unfolded.append(columns.transpose(1, 2).flatten(0, 1))
        x = torch.cat(unfolded)
        held_out = torch.arange(len(x)) * 8 // max(1, len(x)) % 2 == 1
    if len(x) > _ROWS:
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_ROWS]
        x, held_out = x[chosen], held_out[chosen]
    return (x, held_out) if bool(held_out.any()) and not bool(held_out.all()) else None


def _gptq(weight: Tensor, x: Tensor, low: int, high: int) -> Tensor:
    """Column after column to the nearest, each one's error made up for by those that follow.

    Args:
        weight: ``[out, in]``, in steps.
        x: rows ``[n, in]`` that it will be multiplied by.
    """
    moments = (x.T @ x).to(torch.float64)
    mean = moments.diagonal().mean()
    if not bool(mean > 0):
        return weight.round().clamp(low, high)
    moments.diagonal().add_(_DAMPING * mean)
    order = moments.diagonal().argsort(descending=True)  # the heaviest first, while others can make up for them
    inverse = torch.linalg.inv(moments[order][:, order])
    factor = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True).to(torch.float32)
    left = weight[:, order].clone()
    levels = torch.empty_like(left)
    block = 128
    for start in range(0, left.shape[1], block):
        stop = min(start + block, left.shape[1])
        errors = torch.empty(len(left), stop - start)
        for column in range(start, stop):
            levels[:, column] = left[:, column].round().clamp(low, high)
            error = (left[:, column] - levels[:, column]) / factor[column, column]
            left[:, column:stop] -= error[:, None] * factor[column, column:stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    found = torch.empty_like(levels)
    found[:, order] = levels
    return found


def _adaround(weight: Tensor, x: Tensor, low: int, high: int) -> Tensor:
    """Which way to round each element, learnt by gradient descent on the error of the output, with a term that draws
    it to a decision.
    """
    moments = x.T @ x / len(x)
    floor = weight.floor()
    share = (weight - floor).clamp(0.01, 0.99)
    variable = torch.log((share + 0.1) / (1.1 - share)).requires_grad_()  # the stretched sigmoid gives ``share``
    optimizer = torch.optim.Adam([variable], lr=_RATE)
    with torch.enable_grad():
        for step in range(_STEPS):
            optimizer.zero_grad()
            up = (torch.sigmoid(variable) * 1.2 - 0.1).clamp(0, 1)
            off = floor + up - weight
            loss = (off @ moments * off).sum() / moments.diagonal().mean().clamp(min=1e-12)
            if step > _STEPS // 5:
                sharpness = 20 - 18 * (step / _STEPS)
                loss = loss + 0.1 * (1 - (2 * up - 1).abs().pow(sharpness)).sum()
            loss.backward()
            optimizer.step()
    up = (torch.sigmoid(variable.detach()) * 1.2 - 0.1).clamp(0, 1)
    return (floor + (up >= 0.5)).clamp(low, high)
