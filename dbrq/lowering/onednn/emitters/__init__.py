"""How each op of the op table becomes primitives: one emitter a row, or a few rows.

An emitter gets the builder, the partition and its head's arguments, and returns the value of the result. It raises
``Unsupported`` where no primitive fits; the partition then falls apart (docs/onednn.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....errors import OneDNNError
from ....kernels import QParams
from ..builder import Builder, Unsupported
from ..epilogue import Given
from ..partitions import Operand, Partition
from ..values import Value
from .attention import attention, matmul
from .common import FLOATS, as_model_float, expressible
from .elementwise import batch_norm, chain, dequantize, elementwise, quantize
from .norms import layer_norm, softmax
from .pools import adaptive_pool, average_pool, concat, max_pool, mean
from .weights import convolution, deconvolution, linear, linear_by_row

Emitter = Callable[[Builder, Partition, list[Any], list[Any]], Value]


def emit(b: Builder, partition: Partition, inputs: Sequence[Any]) -> Value:
    """Compile a partition for its inputs, execute it, and return its result.

    Raises:
        Unsupported: no primitive fits.
    """
    operands = [
        Given(value, operand.qparams) if isinstance(value, Value) else value
        for value, operand in zip(inputs, partition.operands, strict=True)
    ]
    for given in operands:
        if isinstance(given, Given):
            expected = (torch.uint8,) if given.qparams else (*FLOATS, torch.bool, torch.uint8)
            if given.value.dtype not in expected:
                raise Unsupported(f"an operand is {given.value.dtype}")
            if not given.value.numel:
                raise Unsupported("an operand is empty")
    operands = [expressible(b, given) for given in operands]

    def resolved(argument: Any) -> Any:
        if isinstance(argument, Operand):
            return operands[argument.index]
        if isinstance(argument, (list, tuple)):
            return [resolved(item) for item in argument]
        return argument

    arguments = [resolved(a) for a in partition.arguments]
    try:
        return _emitted(b, partition, arguments, operands)
    except Unsupported:
        if len(partition.steps) + (partition.out is not None) + (partition.row.name != "elementwise") < 2:
            raise
    return _in_parts(b, partition, arguments, operands)


def _emitted(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    try:
        result = EMITTERS[p.row.name](b, p, arguments, operands)
    except OneDNNError as error:
        raise Unsupported(str(error)) from error
    if p.out is not None and result.dtype is not torch.uint8:  # not by the primitive itself
        return b.quantized(result, p.out)
    return result


def _in_parts(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """A primitive that quantizes behind one for all else, as there is none that multiplies floats and writes uint8; or
    a primitive for the head, and one for each step, the last of which quantizes.
    """
    if p.row.name != "elementwise" and p.steps and p.out is not None:
        with contextlib.suppress(Unsupported):
            return b.quantized(_emitted(b, p.in_float(), arguments, operands), p.out)
    result = arguments[0]
    if p.row.name != "elementwise":
        result = Given(_emitted(b, dataclasses.replace(p, steps=(), out=None), arguments, operands))
    last = p.steps[-1:] if p.out is not None else ()
    try:
        for step in p.steps[: len(p.steps) - len(last)]:
            result = Given(chain(b, result, [step], operands, None))
        if last:
            with contextlib.suppress(Unsupported, OneDNNError):
                return chain(b, result, last, operands, p.out)
            result = Given(chain(b, result, last, operands, None))
    except OneDNNError as error:
        raise Unsupported(str(error)) from error
    return result.value if p.out is None else b.quantized(as_model_float(b, result), p.out)


def emit_conversion(b: Builder, value: Value, qparams: QParams, to_int8: bool) -> Value:
    """Quantize a float value, or dequantize a uint8 one.

    Raises:
        Unsupported: it has another type, or is empty.
    """
    if not value.numel or value.dtype not in (FLOATS if to_int8 else (torch.uint8,)):
        raise Unsupported(f"it reads {value.dtype}")
    value = expressible(b, Given(value)).value
    return b.quantized(value, qparams) if to_int8 else b.as_float(value, qparams)


EMITTERS: dict[str, Emitter] = {
    **{f"conv{n}d": convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": deconvolution for n in (1, 2, 3)},
    "linear": linear,
    "linear_by_row": linear_by_row,
    "matmul": matmul,
    "scaled_dot_product_attention": attention,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "log_softmax": softmax,
    "elementwise": elementwise,
    "quantize": quantize,
    "dequantize": dequantize,
    **{f"max_pool{n}d": max_pool for n in (1, 2, 3)},
    **{f"avg_pool{n}d": average_pool for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": adaptive_pool for n in (1, 2, 3)},
    "mean": mean,
    "batch_norm": batch_norm,
    "cat": concat,
}

__all__ = ["EMITTERS", "Emitter", "emit", "emit_conversion"]
