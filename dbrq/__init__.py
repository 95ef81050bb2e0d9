"""int8 quantization of eager PyTorch models on x86 CPUs, define-by-run."""

from .errors import QuantizationError
from .quantize import calibrate, convert, prepare, quantize

__all__ = ["QuantizationError", "calibrate", "convert", "prepare", "quantize"]
