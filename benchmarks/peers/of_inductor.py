"""Float Inductor and PT2E with the x86 quantizer (torchao), both frozen, and dbrq's own inductor backend beside them.
Needs a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import dbrq
from dbrq.pytree import call_arguments

from .worker import call


def variants(name: str, model: nn.Module, calibration: list[Any], item: Any, threads: int) -> Iterator[tuple]:
    import torch._inductor.config as config

    config.freezing = True
    torch._dynamo.reset()
    compiled = torch.compile(model)
    yield "float Inductor", lambda: call(compiled, item)
    quantized = torch.compile(pt2e(name, model, calibration))
    yield "PT2E + Inductor", lambda: call(quantized, item)
    ours = dbrq.quantize(model, calibration)
    lowered = dbrq.lower(ours, item, backend="inductor")
    yield "dbrq inductor", lambda: call(lowered, item)
    in_cpp = dbrq.lower(ours, item, backend="inductor", cpp_wrapper=True)
    yield "dbrq inductor, C++ wrapper", lambda: call(in_cpp, item)


def pt2e(name: str, model: nn.Module, calibration: list[Any], dynamic_shapes: Any = None) -> nn.Module:
    """The Q/DQ graph of PT2E, calibrated."""
    item = calibration[0]
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as xiq
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    args, kwargs = call_arguments(item)
    strict = name.startswith(("resnet", "mobilenet"))
    exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict).module()
    quantizer = xiq.X86InductorQuantizer().set_global(xiq.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for given in calibration:
        call(prepared, given)
    return convert_pt2e(prepared)
