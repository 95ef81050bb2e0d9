"""The inductor backend: the Q/DQ graph through TorchInductor, whose x86 passes turn its int8 patterns into oneDNN calls
and generate C++ for the rest (docs/inductor.md).

The graph goes to Inductor by way of ``torch.export`` rather than TorchDynamo: no code of the user's is left to capture,
and neither a guard nor a setting of the process is needed when the model is called.

``rewrites`` (of the graph, first), ``convolutions`` (that go wrong in int8), ``compiling`` (around Inductor), ``forms``
(compiled graphs, and the inputs they take), ``model`` (what ``lower`` returns).
"""

from .compiling import check_compiler
from .model import InductorModel
from .rewrites import prepare

__all__ = ["InductorModel", "check_compiler", "prepare"]
