"""``lower``: from a converted model to what runs it fastest, by way of the Q/DQ graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping

from ..calibration.surgery import uncompiled
from ..errors import ConfigurationError
from ..guards import without_autocast
from ..hidden_state import state_of
from ..progress import Stages
from ..workflow import convert, prepare
from .backends import BACKENDS, Target, lower_graph
from .drop_in import lower_model, lowered_form

__all__ = ["BACKENDS", "lower", "lower_graph", "lowered_form"]

VERBOSE = bool(os.environ.get("DBRQ_VERBOSE"))


@without_autocast()
def lower(
    quantized: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    backend: str = "torchscript",
    dtype: torch.dtype = torch.float32,
    verbose: bool = False,
    cpp_wrapper: bool = False,
    progress: bool | None = None,
) -> nn.Module:
    """A converted model as a graph of fused int8 kernels.

    Args:
        quantized: what ``convert`` returned, or a float model, all of which then stays float. It is not changed.
        example_inputs: one call's arguments, as in ``rewrite``. For torchscript weights are packed for these shapes;
            other shapes run, other image sizes perhaps slower. For onednn each shape has a plan of its own, made when
            it is seen first.
        example_kwargs: keyword arguments beside them.
        backend: "torchscript": stock torch kernels in a ``torch.jit.ScriptModule`` that needs no dbrq to run.
            "onednn": oneDNN's own kernels, called without torch in between; faster, and run from Python
            (``pip install dbrq[onednn]``). "inductor": TorchInductor, which compiles C++ for what no kernel of
            oneDNN takes; it needs a C++ compiler where the model runs. Each new shape may be compiled again, once:
            the sizes in which it differs are free from then on.
        dtype: of what stays float: ``torch.float32`` or ``torch.bfloat16``. Inputs and outputs keep theirs.
        verbose: print what is being done, what fused where, and what did not and why. The environment variable
            DBRQ_VERBOSE does too.
        cpp_wrapper: for inductor, have C++ rather than Python call the kernels.
        progress: show what is being done, as large models take tens of seconds (needs tqdm); None means: if stderr is
            a terminal.

    Returns:
        The lowered model, in eval mode. ``report`` reads it, ``save`` and ``load`` keep it. A model for which
        calibration saw several paths is returned as a converted model of its own class, in which each straight-line
        module that holds int8 layers runs lowered and the code that decides is the user's.

    Raises:
        RewriteError: no graph cannot stand for the model, for the reason and the line that it names.
        ConfigurationError: no such backend or dtype.
        OneDNNError: libdnnl is not installed.
        CompilerError: for inductor, there is no C++ compiler.
        MismatchError: the lowered model does not give what the converted model gives, and no op could be found to run
            in another way; or the converted model itself does not give what its ops are defined to.

    >>> import dbrq
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> lowered = dbrq.lower(dbrq.quantize(model, [torch.randn(8, 4)]), torch.randn(8, 4))
    >>> [row.kernel for row in dbrq.report(lowered).rows]
    ['onednn.qlinear_pointwise + relu', 'fused into 0']
    """
    if backend not in BACKENDS:
        raise ConfigurationError("there is no such backend", expected=" or ".join(BACKENDS), got=backend)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigurationError("float parts run in float32 or bfloat16", got=dtype)
    quantized = uncompiled(quantized)
    if isinstance(quantized, nn.Module) and state_of(quantized) is None:
        float_only = QConfigMapping().set_global(None)
        prepared = prepare(quantized, example_inputs, float_only, example_kwargs=example_kwargs)
        quantized = convert(prepared, inplace=True)
    stages = Stages(f"lowering to {backend}", progress, verbose or VERBOSE)
    with stages:
        return lower_model(quantized, example_inputs, example_kwargs, Target(backend, dtype, cpp_wrapper), stages)
