"""Float eager, the best of torch's own quantization without a compiler, and dbrq: all on torch's thread pool."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import dbrq

from .worker import call


def variants(name: str, model: nn.Module, calibration: list[Any], item: Any, threads: int) -> Iterator[tuple]:
    yield "float eager", lambda: call(model, item)
    yield from _attempt("torch int8 scripted", lambda: scripted(model, calibration, item), item)
    quantized = dbrq.quantize(model, calibration)
    yield "dbrq eager", lambda: call(quantized, item)
    yield from _attempt("dbrq torchscript", lambda: dbrq.lower(quantized, item), item)
    yield from _attempt("dbrq onednn", lambda: dbrq.lower(quantized, item, backend="onednn"), item)
    yield from _attempt("dbrq onednn, float", lambda: dbrq.lower(model, item, backend="onednn"), item)


def _attempt(name: str, make: Callable[[], Callable], item: Any) -> Iterator[tuple]:
    """A variant, or why there is none."""
    try:
        made = make()
    except Exception as error:
        yield name, error
        return
    yield name, lambda: call(made, item)


def fx_quantized(model: nn.Module, calibration: list[Any]) -> nn.Module:
    """FX graph mode, engine onednn."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.backend_config import get_onednn_backend_config
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "onednn"
    config = get_onednn_backend_config()
    mapping = get_default_qconfig_mapping("onednn")
    prepared = prepare_fx(copy.deepcopy(model), mapping, (calibration[0],), backend_config=config)
    for given in calibration:
        call(prepared, given)
    return convert_fx(prepared, backend_config=config)


def scripted(model: nn.Module, calibration: list[Any], item: Any) -> nn.Module:
    """FX graph mode scripted and frozen; for transformers, which it cannot trace, eager mode traced and frozen."""
    if isinstance(item, Tensor):
        return torch.jit.freeze(torch.jit.script(fx_quantized(model, calibration)).eval())
    from torch.ao.quantization import QuantWrapper, convert, get_default_qconfig, prepare

    torch.backends.quantized.engine = "onednn"
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                wrapped = QuantWrapper(child)
                wrapped.qconfig = get_default_qconfig("onednn")  # type: ignore[assignment]
                setattr(module, name, wrapped)
    prepare(model, inplace=True)
    for given in calibration:
        call(model, given)
    convert(model, inplace=True)
    model.config.return_dict = False
    traced = torch.jit.trace(model, example_kwarg_inputs=dict(item), strict=False, check_trace=False)
    return torch.jit.freeze(traced.eval())
