"""ONNX Runtime, the model exported and quantized statically in QDQ form, per channel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def variants(name: str, model: nn.Module, calibration: list[Any], item: Any, threads: int) -> Iterator[tuple]:
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder = tempfile.TemporaryDirectory()
    plain, ready, int8 = (str(Path(folder.name) / f"{kind}.onnx") for kind in ("float", "ready", "int8"))
    args, kwargs = ((item,), None) if isinstance(item, Tensor) else ((), dict(item))
    names = ["input"] if kwargs is None else list(kwargs)
    torch.onnx.export(model, args, plain, kwargs=kwargs, input_names=names, dynamo=True, external_data=False)
    quant_pre_process(plain, ready, skip_symbolic_shape=True)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.items = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            given = next(self.items, None)
            return None if given is None else _arrays(names, given)

    quantize_static(ready, int8, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
                    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(int8, options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    arrays = {name: array for name, array in _arrays(names, item).items() if name in wanted}
    folder.cleanup()
    yield "ONNX Runtime", lambda: session.run(None, arrays)


def _arrays(names: list[str], item: Any) -> dict[str, Any]:
    return {names[0]: item.numpy()} if isinstance(item, Tensor) else {k: v.numpy() for k, v in item.items()}
