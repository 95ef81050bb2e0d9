"""The kernels as modules and functions that TorchScript takes: what a lowered graph calls.

Shapes, ranks and element types are checked before a kernel sees them, here as in eager mode: some of these ops
corrupt memory when misused. Weights are kept as int8 and packed when the module is made, loaded or copied, for the
input shape of the example. The same code runs in Python, where it is slower.

``values`` (between float and integers), ``base`` (what the kernels share), ``conv`` and ``linear`` (the kernels),
``stand_ins`` (the same where a kernel is not right), ``functions`` (other ops), ``recurrent`` (LSTM, GRU and RNN).

TorchScript reads the annotations and finds what a method calls in the globals of the file that defines it: so none of
these files puts off annotations, each imports what its scripted code calls, and types are those of ``typing``.
"""

from ..padding import enlarged, pad, pad_mode
from .base import Kernel, restored
from .conv import Conv, ConvSum
from .functions import (
    additive_mask,
    int8_matmul,
    matmul_of_levels,
    max_pool,
    max_pool_of_levels,
    nearest,
    weight_only_linear,
)
from .linear import DynamicLinear, Linear, LinearAdd, PointwiseConv, PointwiseConvAdd
from .stand_ins import (
    LevelConv,
    LevelConvSum,
    LevelDynamicLinear,
    LevelLinear,
    LevelLinearAdd,
    LevelPointwiseConv,
    LevelPointwiseConvAdd,
    WindowConv,
    WindowConvSum,
    finished,
)
from .values import (
    AverageToInt8,
    Quantize,
    QuantizeImage,
    QuantizeSmoothed,
    Requantize,
    dequantize,
    dequantize_weight,
    levels,
    of_ones,
    quantize_rows,
    rescale_rows,
    scale_levels,
)

__all__ = [
    "AverageToInt8",
    "Conv",
    "ConvSum",
    "DynamicLinear",
    "Kernel",
    "LevelConv",
    "LevelConvSum",
    "LevelDynamicLinear",
    "LevelLinear",
    "LevelLinearAdd",
    "LevelPointwiseConv",
    "LevelPointwiseConvAdd",
    "Linear",
    "LinearAdd",
    "PointwiseConv",
    "PointwiseConvAdd",
    "Quantize",
    "QuantizeImage",
    "QuantizeSmoothed",
    "Requantize",
    "WindowConv",
    "WindowConvSum",
    "additive_mask",
    "dequantize",
    "dequantize_weight",
    "enlarged",
    "finished",
    "int8_matmul",
    "levels",
    "matmul_of_levels",
    "max_pool",
    "max_pool_of_levels",
    "nearest",
    "of_ones",
    "pad",
    "pad_mode",
    "quantize_rows",
    "rescale_rows",
    "restored",
    "scale_levels",
    "weight_only_linear",
]
