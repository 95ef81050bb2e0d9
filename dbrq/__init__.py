"""int8 quantization of eager PyTorch models on x86 CPUs, define-by-run.

>>> import torch, dbrq
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
>>> prepared = dbrq.prepare(model, torch.randn(1, 8))
>>> for _ in range(4):
...     _ = prepared(torch.randn(16, 8))
>>> quantized = dbrq.convert(prepared)
>>> dbrq.report(quantized).coverage
1.0
"""

from .accuracy.presets import Preset
from .calibration.observers import HistogramObserver, default_qconfig_mapping, dynamic_qconfig_mapping
from .errors import (
    CalibrationError,
    CompilerError,
    ConfigurationError,
    DeviationError,
    ExportError,
    KernelInputError,
    LoadError,
    MismatchError,
    NotCalibratedError,
    OneDNNError,
    QuantizationError,
    RecipeError,
    RewriteError,
    SeveralPathsError,
)
from .exporting.onnx import export_onnx
from .exporting.program import export
from .inspection.comparing import compare, log_values
from .inspection.doctor import doctor
from .inspection.profiling import profile
from .inspection.report import report
from .lowering import lower, lowered_form
from .rewriter import rewrite
from .selfcheck import set_self_check
from .serialization.calibrations import load_calibration, save_calibration
from .serialization.models import load, save
from .serialization.pretrained import from_pretrained
from .serialization.recipes import load_recipe, save_recipe
from .tuning.search import TuneResult, tune
from .tuning.sensitivity import sensitivity
from .version import __version__ as __version__
from .workflow import calibrate, convert, find_fusions, prepare, quantize

__all__ = [
    "CalibrationError",
    "CompilerError",
    "ConfigurationError",
    "DeviationError",
    "ExportError",
    "HistogramObserver",
    "KernelInputError",
    "LoadError",
    "MismatchError",
    "NotCalibratedError",
    "OneDNNError",
    "Preset",
    "QuantizationError",
    "RecipeError",
    "RewriteError",
    "SeveralPathsError",
    "TuneResult",
    "calibrate",
    "compare",
    "convert",
    "default_qconfig_mapping",
    "doctor",
    "dynamic_qconfig_mapping",
    "export",
    "export_onnx",
    "find_fusions",
    "from_pretrained",
    "load",
    "load_calibration",
    "load_recipe",
    "log_values",
    "lower",
    "lowered_form",
    "prepare",
    "profile",
    "quantize",
    "report",
    "rewrite",
    "save",
    "save_calibration",
    "save_recipe",
    "sensitivity",
    "set_self_check",
    "tune",
]
