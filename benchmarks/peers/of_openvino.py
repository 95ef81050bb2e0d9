"""OpenVINO, quantized by NNCF, its float parts kept in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def variants(name: str, model: nn.Module, calibration: list[Any], item: Any, threads: int) -> Iterator[tuple]:
    import nncf
    import openvino as ov

    example = item if isinstance(item, Tensor) else dict(item)
    converted = ov.convert_model(model, example_input=example)
    given = {i.get_any_name(): v for i, v in zip(converted.inputs, _values(item), strict=False)}
    if not isinstance(item, Tensor):
        given = {name: item[name] for name in (i.get_any_name() for i in converted.inputs)}
    converted.reshape({name: list(v.shape) for name, v in given.items()})
    dataset = nncf.Dataset(
        calibration, lambda c: c.numpy() if isinstance(c, Tensor) else {k: c[k].numpy() for k in given}
    )
    kind = None if isinstance(item, Tensor) and name != "vit_b_16" else nncf.ModelType.TRANSFORMER
    quantized = nncf.quantize(converted, dataset, subset_size=len(calibration), model_type=kind)
    compiled = ov.Core().compile_model(quantized, "CPU", {
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(threads),
    })  # fmt: skip
    arrays = {name: v.numpy() for name, v in given.items()}
    request = compiled.create_infer_request()
    yield "OpenVINO", lambda: request.infer(arrays)[0]


def _values(item: Any) -> list[Tensor]:
    return [item] if isinstance(item, Tensor) else list(item.values())
