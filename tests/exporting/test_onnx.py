"""``export_onnx``: the files are valid, hold int8 weights, and give in ONNX Runtime and OpenVINO what dbrq gives."""

from __future__ import annotations

import collections
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import openvino as ov
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_per_channel_weight_observer,
)

import dbrq
from tests import ROOT
from tests.helpers.models import Call
from tests.helpers.onnx import (
    DEFAULT,
    DYNAMIC,
    INT8_TABLE,
    TEXT,
    WEIGHT_ONLY,
    Attention,
    Exported,
    Residual,
    SmallResNet,
    conv,
    encoder_layer,
    export,
    images,
    in_onnxruntime,
    in_openvino,
    linear_pair,
    norm,
)
from tests.helpers.running import run

#: name -> model, shape of the example, another shape, QuantizeLinear nodes, int8 weights, mapping.
CASES: dict[str, tuple] = {
    "conv-bn-relu": (lambda: nn.Sequential(conv(), norm(), nn.ReLU()), (2, 8, 10, 10), (3, 8, 7, 12), 1, 1),
    "depthwise": (lambda: nn.Sequential(conv(groups=8), norm(), nn.ReLU6(), conv()), (2, 8, 9, 9), (1, 8, 5, 6), 2, 2),
    "conv 1d": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)), (2, 4, 9), (1, 4, 7), 2, 2),
    "transposed": (lambda: nn.Sequential(conv(), nn.ConvTranspose2d(8, 4, 2, 2)), (1, 8, 6, 6), (2, 8, 5, 4), 1, 1),
    "conv-add-relu": (Residual, (2, 8, 10, 10), (1, 8, 6, 7), 2, 2),
    "linear-gelu": (lambda: linear_pair(nn.GELU()), TEXT, (3, 9, 16), 2, 2),
    "linear-silu": (lambda: linear_pair(nn.SiLU()), TEXT, (3, 9, 16), 2, 2),
    "linear-hardswish": (lambda: linear_pair(nn.Hardswish()), TEXT, (1, 1, 16), 2, 2),
    "linear-sigmoid": (lambda: linear_pair(nn.Sigmoid()), TEXT, (1, 1, 16), 2, 2),
    "matrix": (lambda: linear_pair(nn.ReLU()), (4, 16), (1, 16), 2, 2),
    "max pool": (lambda: nn.Sequential(conv(), nn.MaxPool2d(2), conv()), (2, 8, 10, 10), (1, 8, 8, 6), 3, 2),
    "avg pool": (lambda: nn.Sequential(conv(), nn.AvgPool2d(2), conv()), (2, 8, 10, 10), (1, 8, 8, 6), 3, 2),
    "cat": (lambda: Call(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=conv(), b=conv(), c=conv(16)),
            (2, 8, 10, 10), (1, 8, 8, 6), 4, 3),
    "mul": (lambda: Call(lambda m, x: m.c(m.a(x) * m.b(x)), a=conv(), b=conv(), c=conv()),
            (2, 8, 10, 10), (1, 8, 8, 6), 4, 3),
    "flatten": (lambda: nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)), (2, 8, 4, 4), (5, 8, 4, 4),
                3, 2),
    "interpolate": (lambda: Call(lambda m, x: m.b(F.interpolate(m.a(x), scale_factor=2)), a=conv(), b=conv()),
                    (2, 8, 5, 5), (1, 8, 4, 6), 3, 2),
    "layer norm": (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)), TEXT, (3, 9, 16),
                   2, 2),
    "attention": (Attention, TEXT, (3, 9, 16), 2, 2),
    "transformer encoder layer": (encoder_layer, TEXT, (3, 9, 16), 4, 6),
    "small ResNet": (SmallResNet, (2, 3, 32, 32), (3, 3, 40, 48), 9, 6),
    "7 bits": (lambda: nn.Sequential(conv(), nn.ReLU(), conv()), (2, 8, 9, 9), (1, 8, 5, 6), 2, 2, DEFAULT(True)),
    "dynamic": (lambda: linear_pair(nn.ReLU()), TEXT, (3, 9, 16), 2, 2, DYNAMIC),
    "dynamic, by row": (lambda: linear_pair(nn.ReLU()), TEXT, (3, 9, 16), 0, 2, dbrq.dynamic_qconfig_mapping()),
    "weight-only": (lambda: linear_pair(nn.ReLU()), TEXT, (3, 9, 16), 0, 2, WEIGHT_ONLY),
    "all in float": (lambda: linear_pair(nn.ReLU()), TEXT, (3, 9, 16), 0, 0, QConfigMapping().set_global(None)),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple]:
    model, shape, other, quantized, weights, *mapping = CASES[request.param]
    yield model(), torch.randn(shape), torch.randn(other), quantized, weights, (mapping or [None])[0]


def test_models(case, tmp_path):
    model, x, other, quantized, weights, mapping = case
    exported = export(tmp_path, model, x, mapping, [x, other])
    nodes = exported.nodes
    assert (nodes["QuantizeLinear"], len(exported.int8_weights)) == (quantized, weights), nodes
    exported.check(x, other)


# What the file holds


def test_weights_are_stored_as_int8_only(tmp_path):
    """Per channel, transposed to what MatMul reads, and no float copy of them."""
    exported = export(tmp_path, nn.Sequential(conv(), norm(), nn.Conv2d(8, 4, 1)), images())
    assert {t.name: tuple(t.dims) for t in exported.int8_weights} == {
        "0.weight_int8": (8, 8, 3, 3), "2.weight_int8": (4, 8, 1, 1)
    }  # fmt: skip
    assert all(len(t.dims) <= 1 for t in exported.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)

    exported = export(tmp_path, linear_pair(nn.ReLU()), torch.randn(TEXT))
    weights = {t.name: t for t in exported.int8_weights}
    assert {name: tuple(t.dims) for name, t in weights.items()} == {"0.weight_int8": (16, 32), "2.weight_int8": (32, 8)}
    axes = [{a.name: a.i for a in node.attribute}["axis"] for node in exported.graph.node if node.input[0] in weights]
    assert axes == [1, 1]
    assert exported.nodes["Transpose"] == 0
    expected = dict(exported.quantized.state_dict())["0.weight_int8"].t()
    assert torch.equal(torch.as_tensor(onnx.numpy_helper.to_array(weights["0.weight_int8"]).copy()), expected)


def test_a_weight_that_two_layers_read(tmp_path):
    """One reads it as it is stored, one transposed."""
    model = Call(lambda m, x: m.a(x).flatten(0, 1) @ m.a.weight, a=nn.Linear(16, 16))
    export(tmp_path, model, torch.randn(TEXT)).check(torch.randn(3, 4, 16))


def test_runtimes_run_int8_kernels(tmp_path):
    exported = export(tmp_path, nn.Sequential(conv(), norm(), nn.ReLU(), conv(), conv()), images())
    in_onnxruntime(exported.path, images(), "ENABLE_EXTENDED", tmp_path / "optimized.onnx")
    fused = collections.Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert fused["QLinearConv"] == 2  # the last one's output is float

    compiled = ov.Core().compile_model(str(exported.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    infos = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    kinds = [(info["layerType"].astype(str), info["runtimePrecision"].astype(str)) for info in infos]
    assert collections.Counter(kinds)["Convolution", "u8"] == 3


def test_linear_layers_run_in_int8_in_onnxruntime(tmp_path):
    for mapping in (None, DYNAMIC):
        exported = export(tmp_path, linear_pair(nn.ReLU()), torch.randn(TEXT), mapping)
        in_onnxruntime(exported.path, torch.randn(TEXT), "ENABLE_EXTENDED", tmp_path / "optimized.onnx")
        fused = collections.Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
        assert fused["MatMulIntegerToFloat"] == 2


@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
def test_seven_bits_stay_seven_bits(tmp_path):
    """Values beyond the calibrated range saturate at 127."""
    model = nn.Sequential(nn.Linear(4, 4))
    exported = export(tmp_path, model, torch.randn(8, 4), DEFAULT(reduce_range=True))
    exported.check(100 * torch.randn(8, 4))
    assert exported.nodes["Clip"] == 1
    dynamic = QConfigMapping().set_global(QConfig(
        MinMaxObserver.with_args(is_dynamic=True, reduce_range=True), default_per_channel_weight_observer
    ))  # fmt: skip
    exported = export(tmp_path, model, torch.randn(8, 4), dynamic)
    exported.check(100 * torch.randn(8, 4), torch.zeros(3, 4))


@pytest.mark.parametrize("opset", [18, 20, 22])
def test_opsets(opset, tmp_path):
    exported = export(tmp_path, nn.Sequential(conv(), nn.ReLU(), conv()), images(), opset_version=opset)
    assert onnx.load(exported.path).opset_import[0].version == opset
    exported.check(images())


def test_nothing_of_this_machine_is_in_the_file(tmp_path):
    content = export(tmp_path, SmallResNet(), images(2, 3, 32, 32)).path.read_bytes()
    for text in (str(ROOT), str(Path(torch.__file__).parent), 'File "', "stack_trace"):
        assert text.encode() not in content


def test_the_converted_model_is_left_as_it_was(tmp_path):
    model, x = SmallResNet().eval(), images(2, 3, 32, 32)
    quantized = dbrq.quantize(model, [x])
    before = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    expected, modules = run(quantized, x), list(dict(quantized.named_modules()))
    dbrq.export_onnx(quantized, x, tmp_path / "model.onnx")
    assert list(dict(quantized.named_modules())) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in quantized.state_dict().items())
    assert torch.equal(run(quantized, x), expected)


# Inputs and outputs


def inputs_of(exported: Exported) -> dict[str, list]:
    return {given.name: [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
            for given in exported.graph.input}  # fmt: skip


def outputs_of(exported: Exported) -> list[str]:
    return [output.name for output in exported.graph.output]


class Named(nn.Module):
    """Keyword arguments, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, left: Tensor, scale: float = 2.0, right: Tensor | None = None) -> dict[str, Any]:
        x = self.first(left)
        if right is not None:
            x = x * scale + right
        return {"linear": self.second(x), "left": left, "both": (x, x), "nothing": None}


def test_keyword_arguments_and_names(tmp_path):
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    exported = export(tmp_path, Named(), {"left": x, "right": y})
    assert inputs_of(exported) == {"left": ["left_dim0", 8], "right": ["left_dim0", 8]}
    assert outputs_of(exported) == ["linear", "left_out", "both_0", "both_1"]
    exported.check({"left": torch.randn(5, 8), "right": torch.randn(5, 8)})

    quantized = exported.quantized
    dbrq.export_onnx(quantized, (x,), exported.path, example_kwargs={"right": y})
    assert list(inputs_of(exported)) == ["left", "right"]


def test_what_is_not_given_is_no_input(tmp_path):
    exported = export(tmp_path, Named(), torch.randn(3, 8))
    assert list(inputs_of(exported)) == ["left"]
    exported.check(torch.randn(2, 8))


def test_several_outputs(tmp_path):
    model = Call(lambda m, x: (m.a(x), [x.sum(), x.shape[0]]), a=nn.Linear(8, 4))
    exported = export(tmp_path, model, torch.randn(3, 8))
    assert outputs_of(exported) == ["output_0", "output_1_0", "output_1_1"]
    exported.check(torch.randn(5, 8))
    assert in_openvino(exported.path, torch.randn(5, 8))[2] == 5


def test_inputs_in_containers(tmp_path):
    model = Call(lambda m, x: m.a(x["a"]) + x["b"][0], a=nn.Linear(8, 4))
    exported = export(tmp_path, model, ({"a": torch.randn(3, 8), "b": [torch.randn(3, 4)]},))
    assert list(inputs_of(exported)) == ["x_a", "x_b_0"]
    onnx.checker.check_model(str(exported.path), full_check=True)


def test_numbers_are_inputs(tmp_path):
    model = Call(lambda m, x, n: m.a(x) * n, a=nn.Linear(8, 4))
    exported = export(tmp_path, model, (torch.randn(3, 8), 3))
    assert len(inputs_of(exported)) == 2
    exported.check((torch.randn(5, 8), 7))


def test_fixed_sizes(tmp_path):
    quantized = dbrq.quantize(conv(), [images()])
    path = tmp_path / "model.onnx"
    batch = {0: torch.export.Dim("batch")}
    dbrq.export_onnx(quantized, images(), path, dynamic_shapes={"input": batch})
    assert inputs_of(Exported(conv(), quantized, path)) == {"input": ["input_dim0", 8, 10, 10]}


def test_text_models(tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )

    def text(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, length // 2 :] = 0
        return {"input_ids": torch.randint(0, 100, (batch, length)), "attention_mask": mask}

    exported = export(tmp_path, BertModel(config), text(2, 9))
    assert list(inputs_of(exported)) == ["input_ids", "attention_mask"]
    assert outputs_of(exported) == ["last_hidden_state", "pooler_output"]
    assert len(exported.int8_weights) == 13
    exported.check(text(2, 9), text(1, 5), text(4, 17))


@pytest.mark.parametrize("mapping", [None, INT8_TABLE], ids=["float", "int8"])
def test_embeddings(mapping, tmp_path):
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8))
    exported = export(tmp_path, model, torch.randint(0, 50, (2, 7)), mapping)
    integers = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    tables = [t for t in exported.graph.initializer if list(t.dims) == [50, 16] and t.data_type in integers]
    assert len(tables) == (mapping is not None)
    exported.check(torch.randint(0, 50, (3, 4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype, tmp_path):
    model, x = linear_pair(nn.ReLU()).to(dtype), torch.randn(4, 16).to(dtype)
    exported = export(tmp_path, model, x)
    onnx.checker.check_model(str(exported.path), full_check=True)
    if dtype is not torch.bfloat16:  # numpy has none
        exported.check(torch.randn(3, 16).to(dtype))


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_dynamically_quantized_recurrent_layers(cls, tmp_path):
    model = Call(lambda m, x: m.out(m.rnn(x)[0]), rnn=cls(8, 16), out=nn.Linear(16, 4))
    with pytest.raises(dbrq.RewriteError, match=r"torch.export does not take the graph"):
        export(tmp_path, model, torch.randn(5, 2, 8), DYNAMIC)


# Files and errors


def test_large_weights_go_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.onnx._internal.exporter._onnx_program, "_LARGE_MODEL_THRESHOLD", 0)
    exported = export(tmp_path, linear_pair(nn.ReLU()), torch.randn(TEXT))
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    exported.check(torch.randn(TEXT))


def test_a_failed_export_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    quantized = dbrq.quantize(nn.Linear(4, 4), [torch.randn(2, 4)])

    def fail(*args: Any, **kwargs: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", fail)
    with pytest.raises(dbrq.ExportError, match="the disk is full"):
        dbrq.export_onnx(quantized, torch.randn(2, 4), path)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_the_folder_must_be_there(tmp_path):
    quantized = dbrq.quantize(nn.Linear(4, 4), [torch.randn(2, 4)])
    with pytest.raises(dbrq.ExportError, match="the folder must exist"):
        dbrq.export_onnx(quantized, torch.randn(2, 4), tmp_path / "missing" / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_onnx(package, tmp_path, monkeypatch):
    quantized = dbrq.quantize(nn.Linear(4, 4), [torch.randn(2, 4)])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(dbrq.QuantizationError, match=r"pip install dbrq\[onnx\]"):
        dbrq.export_onnx(quantized, torch.randn(2, 4), tmp_path / "model.onnx")
    assert not os.listdir(tmp_path)


def test_models_that_are_not_converted(tmp_path):
    prepared = dbrq.prepare(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(dbrq.QuantizationError, match="convert"):
        dbrq.export_onnx(prepared, torch.randn(2, 4), tmp_path / "model.onnx")
    with pytest.raises(dbrq.ConfigurationError, match="18 or newer"):
        dbrq.export_onnx(prepared, torch.randn(2, 4), tmp_path / "model.onnx", opset_version=13)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)


def test_models_with_several_paths(tmp_path):
    x = torch.ones(2, 4)
    quantized = dbrq.quantize(Deciding(), [x, -x])
    with pytest.raises(dbrq.SeveralPathsError, match="decides on values"):
        dbrq.export_onnx(quantized, x, tmp_path / "model.onnx")
    assert not os.listdir(tmp_path)


def test_decisions_on_values_are_told(tmp_path):
    """The graph asserts them, and a file cannot."""
    x = torch.ones(2, 4)
    quantized = dbrq.quantize(Deciding(), [x])
    with pytest.warns(UserWarning, match="does not check: a number that the code decides on was True"):
        dbrq.export_onnx(quantized, x, tmp_path / "model.onnx")


def test_no_warnings_otherwise(tmp_path, recwarn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(tmp_path, Attention(), torch.randn(TEXT))


def test_ops_that_onnx_lacks(tmp_path):
    quantized = dbrq.quantize(Call(lambda m, x: torch.linalg.svdvals(m.a(x)), a=nn.Linear(4, 4)), [torch.randn(2, 4)])
    with pytest.raises(dbrq.ExportError, match="svd"):
        dbrq.export_onnx(quantized, torch.randn(2, 4), tmp_path / "model.onnx")
    assert not os.listdir(tmp_path)
