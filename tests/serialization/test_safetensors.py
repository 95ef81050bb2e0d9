"""Files of safetensors: tensors and JSON, from which a converted model comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig

import dbrq
from dbrq.serialization import tensor_files
from tests import ROOT
from tests.helpers.running import run


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.sizes, self.names = nn.Linear(8, 8, bias=False), (2, 4), {"a": [1, 2.5, None], 3: torch.float32}
        self.none, self.path, self.also, self.kind = None, "", self.names, nn.ReLU
        self.register_module("empty", None)
        self.register_buffer("shift", torch.randn(8), persistent=False)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return F.linear(torch.relu(self.fc(x)), self.weight) + self.shift * self.sizes[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.parts.append(self.parts[0])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.parts[1].fc.weight

    def forward(self, x, deep=True):
        for part in self.parts:
            x = part(x)
        return self.head(x) if x.sum() > 0 else {"x": -self.head(x)}


class Objects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.activation = nn.Linear(8, 8), F.relu

    def forward(self, x):
        return self.activation(self.fc(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.gru = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.GRU(8, 4)

    def forward(self, ids):
        return self.gru(self.lstm(self.table(ids))[0])[0]


def convolutional() -> nn.Module:
    circular = nn.Conv2d(8, 8, 3, padding_mode="circular", padding=1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), circular, nn.Flatten(), nn.Linear(8 * 36, 5))


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))


def dynamic() -> QConfigMapping:
    return (QConfigMapping().set_global(default_dynamic_qconfig)
            .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig))  # fmt: skip


MODELS = {
    "convolutional": (convolutional, [torch.randn(2, 3, 8, 8)], None),
    "classes of one's own": (Net, [torch.randn(4, 8), -torch.randn(4, 8).abs()], None),
    "recurrent": (Recurrent, [torch.arange(12).view(3, 4)], dynamic),
    "linear alone": (lambda: nn.Linear(8, 4), [torch.randn(2, 8)], None),
    "weight norm": (normed, [torch.randn(2, 8)], None),
}


def quantized(name: str = "classes of one's own") -> nn.Module:
    torch.manual_seed(0)
    make, data, mapping = MODELS[name]
    return dbrq.quantize(make().eval(), data, None if mapping is None else mapping(), progress=False)


def same(a, b) -> bool:
    return all(map(torch.equal, dbrq.pytree.tree_leaves(a), dbrq.pytree.tree_leaves(b)))


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_is_the_model(name, tmp_path):
    model, data = quantized(name), MODELS[name][1]
    dbrq.save(model, tmp_path / "file", format="safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = dbrq.load(tmp_path / "file")
    assert type(again) is type(model) and not again.training
    for x in data:
        assert same(run(again, x), run(model, x))
    assert str(dbrq.report(again)) == str(dbrq.report(model))
    state, expected = again.state_dict(), model.state_dict()
    assert list(state) == list(expected) and all(state[key].equal(expected[key]) for key in state)
    dbrq.save(again, tmp_path / "again", format="safetensors")
    second = dbrq.load(tmp_path / "again")
    assert same(run(second, data[0]), run(model, data[0]))


def test_attributes_and_ties_come_back(tmp_path):
    model = quantized()
    dbrq.save(model, tmp_path / "file.safetensors")
    again = dbrq.load(tmp_path / "file.safetensors")
    part = again.parts[0]
    assert part.sizes == (2, 4) and part.names == {"a": [1, 2.5, None], 3: torch.float32} and part.none is None
    assert part.also is part.names and part.kind is nn.ReLU
    assert part is again.parts[2] and again.head.weight is again.parts[1].fc.weight
    assert part.empty is None and "shift" not in part.state_dict()
    assert [path for path, _ in again.named_modules()] == [path for path, _ in model.named_modules()]
    assert dbrq.lower(quantized("convolutional"), MODELS["convolutional"][1][0]) is not None


def test_a_model_from_a_file_is_lowered(tmp_path):
    model, x = quantized("convolutional"), MODELS["convolutional"][1][0]
    dbrq.save(model, tmp_path / "file.safetensors")
    again = dbrq.load(tmp_path / "file.safetensors")
    assert run(dbrq.lower(again, x), x).equal(run(dbrq.lower(model, x), x))


def test_a_file_of_safetensors_holds_tensors_and_json(tmp_path):
    from safetensors import safe_open

    dbrq.save(quantized(), tmp_path / "file.safetensors")
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        content = json.loads(file.metadata()["dbrq"])
        assert file.get_tensor("parts.1.fc.weight_int8").dtype is torch.int8
    assert content["format"] == "dbrq" and content["described"]["modules"]


def test_attributes_of_a_file_cannot_replace_those_of_modules(tmp_path):
    dbrq.save(quantized("linear alone"), tmp_path / "file.safetensors")
    for name, value in (("_parameters", 3), ("_forward_hooks", []), ("_modules", {"dict": []})):
        content, tensors = tensor_files.read(tmp_path / "file.safetensors")
        content["described"]["skeleton"][0][2][name] = value
        tensor_files.write(tmp_path / "changed.safetensors", content, tensors)
        with pytest.raises(dbrq.LoadError, match="attribute"):
            dbrq.load(tmp_path / "changed.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(version=99),
        lambda d: d.pop("record"),
        lambda d: d.update(record=3),
        lambda d: d.update(objects=[]),
        lambda d: d.update(skeleton=[]),
        lambda d: d.update(axes=[["nowhere", "weight", 0]]),
        lambda d: d.update(states={}),
        lambda d: d.update(held=[]),
        lambda d: d["skeleton"][0].__setitem__(1, "torch.nn.modules.conv.Conv2d"),
        lambda d: d["skeleton"].append(["x.y", "torch.nn.modules.linear.Linear", {}, [], None]),
        lambda d: d["objects"].__setitem__(0, ["os", {}]),
        lambda d: d["objects"].__setitem__(0, d["objects"][1]),
    ],
)
def test_descriptions_that_make_no_sense_are_told(change, tmp_path):
    dbrq.save(quantized("linear alone"), tmp_path / "file.safetensors")
    content, tensors = tensor_files.read(tmp_path / "file.safetensors")
    change(content["described"])
    tensor_files.write(tmp_path / "file.safetensors", content, tensors)
    with pytest.raises(dbrq.LoadError):
        dbrq.load(tmp_path / "file.safetensors")


def test_tensors_that_are_others_are_told(tmp_path):
    dbrq.save(quantized("linear alone"), tmp_path / "file.safetensors")
    content, tensors = tensor_files.read(tmp_path / "file.safetensors")
    for name, other in (("weight_scale", -tensors["weight_scale"]), ("weight_int8", tensors["weight_int8"].float()),
                        ("_auto_quant_state.scale", -tensors["_auto_quant_state.scale"])):  # fmt: skip
        tensor_files.write(tmp_path / "other.safetensors", content, {**tensors, name: other})
        with pytest.raises(dbrq.LoadError):
            dbrq.load(tmp_path / "other.safetensors")


def test_damage_is_noticed(tmp_path):
    path = tmp_path / "file.safetensors"
    dbrq.save(quantized("linear alone"), path)
    whole = path.read_bytes()
    for position in (3, 9, 60, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(dbrq.LoadError):
            dbrq.load(path)
    for length in (0, 5, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(dbrq.LoadError):
            dbrq.load(path)


# What safetensors does not hold


def test_what_tensors_and_json_do_not_say_is_refused(tmp_path):
    model = dbrq.quantize(Objects().eval(), [torch.randn(4, 8)], progress=False)
    with pytest.raises(dbrq.QuantizationError, match="activation"):
        dbrq.save(model, tmp_path / "file.safetensors")
    assert not (tmp_path / "file.safetensors").exists()


def test_classes_that_are_not_imported_are_named(tmp_path):
    dbrq.save(quantized(), tmp_path / "file.safetensors")
    content, tensors = tensor_files.read(tmp_path / "file.safetensors")
    for name in ("elsewhere.Net", "os.system", "torch.nn.functional.relu", "collections.OrderedDict", "dbrq.load", ""):
        content["described"]["skeleton"][0][1] = name
        tensor_files.write(tmp_path / "other.safetensors", content, tensors)
        with pytest.raises(dbrq.LoadError, match="names " + name.replace(".", r"\.")):
            dbrq.load(tmp_path / "other.safetensors")


def test_a_class_in_an_attribute_is_named_too(tmp_path):
    dbrq.save(quantized(), tmp_path / "file.safetensors")
    content, tensors = tensor_files.read(tmp_path / "file.safetensors")
    content["described"]["skeleton"][0][2]["kind"] = {"class": "elsewhere.Net"}
    tensor_files.write(tmp_path / "other.safetensors", content, tensors)
    with pytest.raises(dbrq.LoadError, match=r"names elsewhere\.Net"):
        dbrq.load(tmp_path / "other.safetensors")


def test_hooks_are_no_data(tmp_path):
    model = convolutional().eval()
    model[0].register_forward_hook(lambda module, args, output: output)
    converted = dbrq.quantize(model, MODELS["convolutional"][1], progress=False)
    with pytest.raises(dbrq.QuantizationError, match="hooks"):
        dbrq.save(converted, tmp_path / "file", format="safetensors")


def test_lowered_models_are_programs(tmp_path):
    model, x = quantized("convolutional"), MODELS["convolutional"][1][0]
    with pytest.raises(dbrq.QuantizationError, match="a lowered one is a program"):
        dbrq.save(dbrq.lower(model, x), tmp_path / "file", format="safetensors")


@pytest.mark.parametrize("format", ["safetensor", "pickle", "", 3])
def test_formats_that_are_none(format, tmp_path):
    with pytest.raises(dbrq.ConfigurationError, match="format"):
        dbrq.save(quantized("linear alone"), tmp_path / "file", format=format)


def test_float_models_are_refused(tmp_path):
    for wrong in (nn.Linear(1, 1), dbrq.prepare(nn.Linear(1, 1), torch.zeros(1, 1)), None):
        with pytest.raises(dbrq.QuantizationError, match="convert"):
            dbrq.save(wrong, tmp_path / "file.safetensors")


def test_files_of_others(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(dbrq.LoadError, match="not written by dbrq"):
        dbrq.load(tmp_path / "other.safetensors")


def test_another_process_needs_the_class_alone(tmp_path):
    model, x = quantized(), MODELS["classes of one's own"][1][0]
    dbrq.save(model, tmp_path / "file.safetensors")
    torch.save({"x": x, "y": run(model, x)}, tmp_path / "run.pt")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        f"import os, torch, dbrq\nos.chdir({str(tmp_path)!r})\n"
        f"from {__name__} import Net, Part\n"
        "model, run = dbrq.load('file.safetensors'), torch.load('run.pt')\n"
        "with torch.no_grad(): y = model(run['x'])\n"
        "assert all(map(torch.equal, dbrq.pytree.tree_leaves(y), dbrq.pytree.tree_leaves(run['y'])))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(dbrq.QuantizationError, match=r"dbrq\[safetensors\]"):
        dbrq.save(quantized("linear alone"), tmp_path / "file.safetensors")
