"""Why an op stays in float, and which kernel runs one that does not: words of reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..kernels.ranges import DEEPEST
from ..mappings import Role
from ..record.record import SeenOp

_FLOAT_REASONS = {
    Role.NORM: "it follows no int8 convolution or linear layer that it could fold into",
    Role.ACTIVATION: "it follows no int8 op that takes it in; between int8 ops it runs in float",
}


def unsuitable(op: SeenOp, constants: tuple) -> str:
    """Why the arguments of a soft op rule out int8; "" if they do not."""
    name = op.row.name
    if name == "div" and constants[2] is not None:
        return "division with rounding"
    if name.startswith("max_pool") and (constants[6] or len(op.slots()) != 1):
        return "it returns indices"
    if name == "interpolate" and constants[3] not in ("nearest", "nearest-exact"):
        return f"interpolation mode {constants[3]} computes new values"
    if name == "mean" and constants[3] not in (None, torch.float32):
        return "it changes the dtype"
    if op.row.role is Role.SHARE and op.row.ndim and len(op.inputs[0].shape) != op.row.ndim + 2:
        return "its input has no batch dimension"
    if op.row.role is Role.ELEMENTWISE or op.row.takes_list:
        tensors = [i for i in op.inputs if i.dtype is not torch.float32]
        return f"one operand is {tensors[0].dtype}" if tensors else ""
    return ""


def too_deep(op: SeenOp) -> str:
    """Why sums of so many products rule out int8; "" if they do not: int32 holds them whatever the values."""
    if op.row.role is Role.COMPUTE and op.outputs:
        depth = op.macs // max(math.prod(op.outputs[0].shape), 1)
    elif op.row.role is Role.RECURRENT and op.inputs:
        depth = op.inputs[0].shape[-1]
    else:
        return ""
    if depth <= DEEPEST:
        return ""
    return f"it sums {depth} products, and int32 holds the sums of {DEEPEST}"


def kernel_of(op: SeenOp, mode: str, chain: Sequence[SeenOp]) -> str:
    """What runs, in words for the report."""
    row = op.row
    if row.role is Role.RECURRENT:
        return "onednn.qlinear_pointwise per step (dynamic)"
    if row.role is Role.EMBEDDING:
        return "int8 rows"
    if mode == "weight_only":
        return "int8 weights, float activations"
    if row.name == "matmul":
        return "aten._int_mm"
    if row.role is Role.COMPUTE:
        base = "onednn.qlinear_pointwise" if row.ndim == 0 else f"onednn.qconv{row.ndim}d_pointwise"
        names = "".join(f" + {step.row.name}" for step in chain)
        return base + names + (" (dynamic)" if mode == "dynamic" else "")
    if row.role is Role.SHARE:
        return "quantized.max_pool2d" if row.name in ("max_pool1d", "max_pool2d") else "integers"
    return "dequantize, compute, quantize"
