"""Models exported to ONNX, run by ONNX Runtime and OpenVINO, and compared with what dbrq gives."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import openvino as ov
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    NoopObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_per_channel_weight_observer,
    float_qparams_weight_only_qconfig,
)

import dbrq
from tests.helpers.judging import sqnr, step_of
from tests.helpers.running import floats, run

#: The largest difference between a runtime's output and ours, in steps of 1/255 of the range of ours.
STEPS = 2.0
#: Runtimes are as near to the float model as we are, give or take this many dB.
DECIBELS = 1.0


def named_arrays(names: list[str], item: Any) -> dict[str, Any]:
    """What a runtime is given: an item's tensors by name, or in order."""
    values = dict(item) if isinstance(item, Mapping) else item if isinstance(item, tuple) else (item,)
    if not isinstance(values, dict):
        values = dict(zip(names, values, strict=True))
    return {name: torch.as_tensor(values[name]).numpy() for name in names}


def in_onnxruntime(path: Path, item: Any, level: str, optimized: Path | None = None) -> list[Tensor]:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    arrays = named_arrays([given.name for given in session.get_inputs()], item)
    return [torch.as_tensor(array) for array in session.run(None, arrays)]


def in_openvino(path: Path, item: Any) -> list[Tensor]:
    compiled = ov.Core().compile_model(
        str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    )
    result = compiled(named_arrays([given.get_any_name() for given in compiled.inputs], item))
    return [torch.as_tensor(result[i].copy()) for i in range(len(compiled.outputs))]


RUNTIMES: dict[str, Callable[[Path, Any], list[Tensor]]] = {
    "ONNX Runtime": lambda path, item: in_onnxruntime(path, item, "DISABLE_ALL"),
    "ONNX Runtime, optimized": lambda path, item: in_onnxruntime(path, item, "ENABLE_ALL"),
    "OpenVINO": in_openvino,
}


@dataclass
class Exported:
    """A converted model and its file."""

    model: nn.Module
    quantized: nn.Module
    path: Path

    @property
    def graph(self) -> onnx.GraphProto:
        return onnx.load(self.path).graph

    @property
    def nodes(self) -> collections.Counter:
        return collections.Counter(node.op_type for node in self.graph.node)

    @property
    def int8_weights(self) -> list[onnx.TensorProto]:
        """int8 initializers but for zero points."""
        zeros = {node.input[2] for node in self.graph.node if node.op_type == "DequantizeLinear"}
        return [t for t in self.graph.initializer if t.data_type == onnx.TensorProto.INT8 and t.name not in zeros]

    def check(self, *items: Any) -> None:
        """Valid, and each runtime gives what we give."""
        onnx.checker.check_model(str(self.path), full_check=True)
        for item, (name, runtime) in itertools.product(items, RUNTIMES.items()):
            expected, ours = floats(run(self.model, item)), floats(run(self.quantized, item))
            got = runtime(self.path, item)
            theirs = [leaf for leaf in got if leaf.is_floating_point()]
            for reference, mine, other in zip(expected, ours, theirs, strict=True):
                assert other.shape == mine.shape
                steps = (mine - other).abs().max().item() / step_of(mine)
                assert steps <= STEPS, f"{name}: {steps:.2f} steps from ours"
                assert sqnr(reference, other) >= min(sqnr(reference, mine), 60) - DECIBELS, name


def export(
    folder: Path, model: nn.Module, item: Any, mapping: Any = None, data: list[Any] | None = None, **options: Any
) -> Exported:
    model = model.eval()
    prepared = dbrq.prepare(model, item, mapping)
    for each in [item] if data is None else data:
        run(prepared, each)
    quantized = dbrq.convert(prepared)
    path = folder / "model.onnx"
    dbrq.export_onnx(quantized, item, path, **options)
    return Exported(model, quantized, path)


# Models


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 8, 10, 10)))


def conv(i: int = 8, o: int = 8, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=k // 2, **options)


def norm(channels: int = 8) -> nn.BatchNorm2d:
    module = nn.BatchNorm2d(channels)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    nn.init.uniform_(module.bias, -0.3, 0.3)
    nn.init.uniform_(module.running_var, 0.5, 1.5)
    return module


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(), norm(), conv(), norm()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8, 7, stride=2), norm(), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(Residual(), Residual())
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1), 1))


class Attention(nn.Module):
    """Self-attention as people write it by hand, with sizes read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q @ k.transpose(-2, -1)) * 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)


def linear_pair(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 8))


DEFAULT = dbrq.default_qconfig_mapping
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
WEIGHT_ONLY = QConfigMapping().set_global(QConfig(NoopObserver, default_per_channel_weight_observer))
INT8_TABLE = DEFAULT().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
TEXT = (2, 5, 16)
