"""How ``quantized_decomposed`` ops are written in ONNX. Imports onnxscript: only ``export_onnx`` imports it.

Parameters that are annotated as numbers arrive as plain numbers; dtypes arrive as ONNX's numbers for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.onnx_opset import opset18
from onnxscript.onnx_types import TensorType

from .._torch import OpOverload
from ..graph.nodes import (
    CHOOSE_QPARAMS,
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    DEQUANTIZE_ROWS,
    QUANTIZE,
    QUANTIZE_ROWS,
)

#: Untyped: onnxscript's annotations name the dtype of each tensor, which is known when a graph is written only.
op: Any = opset18


def _constant(value: Any, dtype: int) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(value, ir.DataType(dtype).numpy())))


def _float(value: Any) -> Any:
    return _constant(value, ir.DataType.FLOAT)


def _is_whole(quant_min: int, quant_max: int, dtype: int) -> bool:
    """Whether QuantizeLinear, which saturates, keeps values within the range by itself."""
    limits = np.iinfo(ir.DataType(dtype).numpy())
    return (quant_min, quant_max) == (limits.min, limits.max)


def quantize(x: TensorType, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> TensorType:
    x = _as_float(x)
    if not _is_whole(quant_min, quant_max, dtype):
        # In float, where it is exact too: runtimes look for DequantizeLinear right behind QuantizeLinear.
        low, high = (quant_min - zero_point) * scale, (quant_max - zero_point) * scale
        x = op.Clip(x, _float(low), _float(high))
    return op.QuantizeLinear(x, _float(scale), _constant(zero_point, dtype))


def dequantize(q: TensorType, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> TensorType:
    return op.DequantizeLinear(q, _float(scale), _constant(zero_point, dtype))


def choose_qparams(x: TensorType, quant_min: int, quant_max: int, eps: float, dtype: int) -> tuple[Any, Any]:
    """Scale and zero point, as tensors of one element, from the range of ``x`` with zero in it."""
    x = _as_float(x)
    low = op.Min(op.ReduceMin(x, keepdims=0), _float([0.0]))
    high = op.Max(op.ReduceMax(x, keepdims=0), _float([0.0]))
    scale = op.Max(op.Div(op.Sub(high, low), _float(quant_max - quant_min)), _float(eps))
    zero_point = op.Sub(_float(quant_min), op.Round(op.Div(low, scale)))
    zero_point = op.Cast(op.Clip(zero_point, _float(quant_min), _float(quant_max)), to=ir.DataType.INT64)
    scale.dtype = ir.DataType.FLOAT  # torch's op says double, and what has a dtype keeps it
    return scale, zero_point


def quantize_dynamic(
    x: TensorType, scale: TensorType, zero_point: TensorType, quant_min: int, quant_max: int, dtype: int
) -> TensorType:
    q = op.QuantizeLinear(_as_float(x), *_scalars(scale, zero_point, dtype))
    if _is_whole(quant_min, quant_max, dtype):
        return q
    return op.Clip(q, _constant(quant_min, dtype), _constant(quant_max, dtype))


def dequantize_dynamic(
    q: TensorType, scale: TensorType, zero_point: TensorType, quant_min: int, quant_max: int, dtype: int
) -> TensorType:
    return op.DequantizeLinear(q, *_scalars(scale, zero_point, dtype))


def quantize_rows(
    x: TensorType, scales: TensorType, zero_points: TensorType, quant_min: int, quant_max: int, dtype: int
) -> TensorType:
    """ONNX has scales of an axis of the tensor, not of all rows: as its float ops."""
    shifted = op.Round(op.Add(op.Div(_as_float(x), scales), zero_points))
    return op.Cast(op.Clip(shifted, _float(quant_min), _float(quant_max)), to=dtype)


def dequantize_rows(
    q: TensorType, scales: TensorType, zero_points: TensorType, quant_min: int, quant_max: int, dtype: int,
    output_dtype: int,
) -> TensorType:  # fmt: skip
    return op.Cast(op.Mul(op.Sub(op.Cast(q, to=ir.DataType.FLOAT), zero_points), scales), to=output_dtype)


def dequantize_per_channel(
    q: TensorType, scales: TensorType, zero_points: TensorType, axis: int, quant_min: int, quant_max: int, dtype: int
) -> TensorType:
    return op.DequantizeLinear(q, scales, op.Cast(zero_points, to=dtype), axis=axis)


def _as_float(x: Any) -> Any:
    """QuantizeLinear wants values and scale of one dtype; torch quantizes half and bfloat16 with float scales."""
    return x if x.dtype in (None, ir.DataType.FLOAT) else op.Cast(x, to=ir.DataType.FLOAT)


def _scalars(scale: Any, zero_point: Any, dtype: int) -> tuple[Any, Any]:
    """One element in one dimension would mean one channel."""
    return op.Squeeze(scale), op.Cast(op.Squeeze(zero_point), to=dtype)


#: torch op -> what writes it, for ``torch.onnx.export``.
TRANSLATIONS: dict[OpOverload, Callable] = {
    QUANTIZE.default: quantize,
    QUANTIZE.tensor: quantize_dynamic,
    DEQUANTIZE.default: dequantize,
    DEQUANTIZE.tensor: dequantize_dynamic,
    QUANTIZE_ROWS.default: quantize_rows,
    DEQUANTIZE_ROWS.default: dequantize_rows,
    DEQUANTIZE_PER_CHANNEL.default: dequantize_per_channel,
    CHOOSE_QPARAMS.tensor: choose_qparams,
}
