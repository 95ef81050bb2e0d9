"""Why an op stays in float, and which kernel runs one that does not: words of reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..kernels.ranges import DEEPEST, by_row
from ..mappings import Role
from ..record.record import Record, SeenOp
from .qconfigs import symmetric_weight

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


def unfit(record: Record, op: SeenOp, mode: str) -> str:
    """Why an op with weights cannot be int8 in ``mode``, a matmul included; "" if it can."""
    values = record.values
    bad = [i.dtype for _, vid in op.activations if (i := values[vid].info).dtype is not torch.float32]
    if bad:
        return f"its input is {bad[0]}, and int8 kernels stand in for float32"
    if (made := values[op.result.id].info.dtype) is not torch.float32:  # autocast in forward
        return f"its result is {made}, and int8 kernels stand in for float32"
    if problem := _too_deep(op) or _unfit_kind(record, op, mode) or op.weight_problem:
        return problem
    return "" if op.weight is None else record.varying.get(op.weight.key, "")


def _unfit_kind(record: Record, op: SeenOp, mode: str) -> str:
    """The same, of what ops of its kind want."""
    if op.row.role is Role.EMBEDDING:
        if mode != "weight_only":
            return "embeddings take a weight-only qconfig"
        return "max_norm changes its weights in forward" if op.constants[3] is not None else ""
    if op.row.role is Role.RECURRENT:
        return "" if mode == "dynamic" else "recurrent layers take a dynamic qconfig"
    return _unfit_product(record, op, mode)


def _unfit_product(record: Record, op: SeenOp, mode: str) -> str:
    """The same, of what convolutions, linear layers and matmuls want."""
    if op.row.name == "matmul":
        if mode != "static":
            return "matmul takes a static qconfig"
        constant = any(record.values[vid].info.constant for _, vid in op.activations)
        flat = any(len(record.values[vid].info.shape) < 2 for _, vid in op.activations)
        return "one operand is a constant or a vector" if constant or flat or len(op.slots()) < 2 else ""
    assert op.qconfig is not None
    if not symmetric_weight(op.qconfig):
        return "its qconfig asks for affine weights, and kernels take symmetric int8"
    if op.row.name != "linear" and mode != "static":
        return f"no {mode} int8 kernel for convolutions"
    if op.row.name != "linear" and reads_constants(record, op):
        return "its input is a parameter, or comes from code that no hook sees"
    return ""


def reads_constants(record: Record, op: SeenOp) -> bool:
    """Whether no op made what ``op`` reads: parameters, buffers, tensors that the user's code keeps.

    Nothing tells one of them from another that comes there later, so a range that was observed would not hold. Linear
    layers take each by its own range.
    """
    constant = [record.values[vid].info.constant for _, vid in op.activations]
    return op.row.role is Role.COMPUTE and op.row.name != "matmul" and all(constant)


def _too_deep(op: SeenOp) -> str:
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
        assert op.qconfig is not None
        rows = ", by row" if by_row(op.qconfig.activation()) else ""
        return base + names + (f" (dynamic{rows})" if mode == "dynamic" else "")
    if row.role is Role.SHARE:
        return "quantized.max_pool2d" if row.name in ("max_pool1d", "max_pool2d") else "integers"
    return "dequantize, compute, quantize"
