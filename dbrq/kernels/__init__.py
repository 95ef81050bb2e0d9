"""The int8 kernels: torch's own, called where they proved right, and what stands in for them where they did not.

``qparams`` (values), ``stock`` (the calls), ``script`` (the same, scriptable), ``formulations`` (other ways to compute
convolutions and linear layers), ``trials`` (runs on data of their own), ``choice`` (the first way that proved
right), ``packed`` and ``functions`` (what eager models call), ``known_faults`` (geometries that are wrong somewhere).
"""

from .functions import dynamic_qparams, int8_matmul, max_pool, pad_mode, weight_only_linear
from .packed import PackedConv, PackedLinear
from .qparams import (
    NO_POST_OP,
    RELU,
    SUPPORTED_POST_OPS,
    PostOp,
    QParams,
    along,
    dequantize,
    ints,
    quantize,
    quantize_weight,
    requantize,
    together,
)
from .stock import has_exact_int8_dot

__all__ = [
    "NO_POST_OP",
    "RELU",
    "SUPPORTED_POST_OPS",
    "PackedConv",
    "PackedLinear",
    "PostOp",
    "QParams",
    "along",
    "dequantize",
    "dynamic_qparams",
    "has_exact_int8_dot",
    "int8_matmul",
    "ints",
    "max_pool",
    "pad_mode",
    "quantize",
    "quantize_weight",
    "requantize",
    "together",
    "weight_only_linear",
]
