"""Intel's extension (archived), which needs torch 2.8 and so an environment of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .worker import call


def variants(name: str, model: nn.Module, calibration: list[Any], item: Any, threads: int) -> Iterator[tuple]:
    import intel_extension_for_pytorch as ipex
    from intel_extension_for_pytorch.quantization import convert, prepare

    model = copy.deepcopy(model)
    if not isinstance(item, Tensor):
        model.config.return_dict = False
    given = {"example_inputs": (item,)} if isinstance(item, Tensor) else {"example_kwarg_inputs": dict(item)}
    prepared = prepare(model, ipex.quantization.default_static_qconfig_mapping, inplace=False, **given)
    for c in calibration:
        call(prepared, c)
    converted = convert(prepared)
    if isinstance(item, Tensor):
        traced = torch.jit.trace(converted, item, strict=False, check_trace=False)
    else:
        traced = torch.jit.trace(converted, example_kwarg_inputs=dict(item), strict=False, check_trace=False)
    traced = torch.jit.freeze(traced)
    for _ in range(3):
        call(traced, item)
    yield "Intel extension", lambda: call(traced, item)
