"""Recipes: decisions and qparams as JSON, which a person may edit and load without calibrating again."""

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq import RecipeError
from tests.helpers.judging import sqnr
from tests.helpers.running import convert, run


class Net(nn.Module):
    """A residual network that has most kinds of ops."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.conv3 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.fc = nn.Linear(8, 20)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.conv2(x) + x)
        y = self.conv3(torch.cat([F.max_pool2d(x, 2), F.max_pool2d(y, 2)], 1))
        return self.fc(torch.sigmoid(y).mean((2, 3)))


EXAMPLE = (4, 3, 8, 8)


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(EXAMPLE)


def fresh(model: nn.Module, x: torch.Tensor, **options) -> nn.Module:
    return dbrq.prepare(model, torch.zeros_like(x), **options)


def saved(model: nn.Module, path) -> dict:
    dbrq.save_recipe(model, path)
    return json.loads(path.read_text())


def entry(recipe: dict, path: str) -> dict:
    return next(op for op in recipe["ops"] if op["path"] == path)


def loaded(model: nn.Module, x: torch.Tensor, recipe: dict, path) -> nn.Module:
    path.write_text(json.dumps(recipe))
    return dbrq.convert(dbrq.load_recipe(fresh(model, x), path))


# Round trips


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_a_loaded_recipe_gives_the_calibrated_model_bit_for_bit(model, x, phase, tmp_path):
    both = convert(model, x)
    dbrq.save_recipe(getattr(both, phase), tmp_path / "recipe.json")
    prepared = fresh(model, x)
    assert dbrq.load_recipe(prepared, tmp_path / "recipe.json") is prepared
    again = dbrq.convert(prepared)
    assert torch.equal(run(again, x), run(both.quantized, x))
    assert dbrq.report(again).rows == dbrq.report(both.quantized).rows
    for (name, a), (other, b) in zip(again.state_dict().items(), both.quantized.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)


def test_saving_what_was_loaded_gives_the_same_file(model, x, tmp_path):
    dbrq.save_recipe(convert(model, x).prepared, tmp_path / "a.json")
    prepared = dbrq.load_recipe(fresh(model, x), tmp_path / "a.json")
    dbrq.save_recipe(prepared, tmp_path / "b.json")
    dbrq.save_recipe(dbrq.convert(prepared), tmp_path / "c.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text() == (tmp_path / "c.json").read_text()


def test_a_recipe_serves_other_weights_of_the_same_model(model, x, tmp_path):
    dbrq.save_recipe(convert(model, x).prepared, tmp_path / "recipe.json")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight.add_(0.01)
    converted = dbrq.convert(dbrq.load_recipe(fresh(other, x), tmp_path / "recipe.json"))
    assert sqnr(run(other, x), run(converted, x)) > 20


def test_data_shown_after_loading_does_not_change_the_qparams(model, x, tmp_path):
    both = convert(model, x)
    dbrq.save_recipe(both.prepared, tmp_path / "recipe.json")
    prepared = dbrq.load_recipe(fresh(model, x), tmp_path / "recipe.json")
    run(prepared, x * 100)
    assert torch.equal(run(dbrq.convert(prepared), x), run(both.quantized, x))


def test_a_copy_of_a_prepared_model_keeps_its_recipe(model, x, tmp_path):
    both = convert(model, x)
    dbrq.save_recipe(both.prepared, tmp_path / "recipe.json")
    prepared = copy.deepcopy(dbrq.load_recipe(fresh(model, x), tmp_path / "recipe.json"))
    assert torch.equal(run(dbrq.convert(prepared), x), run(both.quantized, x))


# Reading


def test_the_file_can_be_read_by_a_person(model, x, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    text = (tmp_path / "recipe.json").read_text()
    assert len(text.splitlines()) > 50, "indented"
    conv = entry(recipe, "conv2")
    assert conv["op"] == "conv2d" and conv["precision"] == "int8" and conv["site"].startswith("test_recipes.py:")
    value = recipe["values"][str(conv["inputs"][0]["value"])]
    assert value["scale"] > 0 and 0 <= value["zero_point"] <= 255
    assert entry(recipe, "sigmoid.0")["precision"] == "float" and entry(recipe, "sigmoid.0")["reason"]
    assert {op["path"] for op in recipe["ops"]} >= {"conv1", "bn1", "relu.0", "conv2", "add.0", "cat.0", "fc", "mean.0"}


def test_the_qparams_are_those_of_the_converted_model(model, x, tmp_path):
    both = convert(model, x)
    before = saved(both.prepared, tmp_path / "a.json")["values"]
    after = saved(both.quantized, tmp_path / "b.json")["values"]
    assert before.keys() == after.keys()
    assert all(before[key]["scale"] == pytest.approx(after[key]["scale"]) for key in before)


# Editing


@pytest.mark.parametrize("path", ["conv1", "conv2", "conv3", "fc", "cat.0", "max_pool2d.0"])
def test_an_op_can_be_kept_in_float(model, x, path, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    assert entry(recipe, path)["precision"] == "int8"
    entry(recipe, path)["precision"] = "float"
    converted = loaded(model, x, recipe, tmp_path / "edited.json")
    row = next(row for row in dbrq.report(converted).rows if row.path == path)
    assert row.precision == "float" and row.reason == "a recipe keeps it in float"
    assert sqnr(run(model, x), run(converted, x)) > 20


@pytest.mark.parametrize("path", ["conv1", "conv2", "fc"])
def test_an_input_can_be_kept_in_float(model, x, path, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    entry(recipe, path)["inputs"][0]["precision"] = "float"
    converted = loaded(model, x, recipe, tmp_path / "edited.json")
    row = next(row for row in dbrq.report(converted).rows if row.path == path)
    assert row.precision == "float" and row.reason
    assert sqnr(run(model, x), run(converted, x)) > 20


def test_keeping_every_layer_in_float_gives_the_float_model(model, x, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    for op in recipe["ops"]:
        op["precision"] = "float"
    converted = loaded(model, x, recipe, tmp_path / "edited.json")
    torch.testing.assert_close(run(converted, x), run(model, x))
    assert dbrq.report(converted).coverage == 0.0


def test_an_edited_scale_is_used(model, x, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    key = str(entry(recipe, "fc")["inputs"][0]["value"])
    recipe["values"][key].update(scale=1 / 64, zero_point=3)
    again = saved(loaded(model, x, recipe, tmp_path / "edited.json"), tmp_path / "again.json")
    assert (again["values"][key]["scale"], again["values"][key]["zero_point"]) == (1 / 64, 3)


def test_precision_float_of_what_was_float_stays(model, x, tmp_path):
    from torch.ao.quantization import QConfigMapping

    mapping: QConfigMapping = dbrq.default_qconfig_mapping().set_module_name("fc", None)
    prepared = dbrq.prepare(model, x, mapping)
    run(prepared, x)
    dbrq.save_recipe(prepared, tmp_path / "recipe.json")
    converted = dbrq.convert(dbrq.load_recipe(fresh(model, x), tmp_path / "recipe.json"))
    assert next(row for row in dbrq.report(converted).rows if row.path == "fc").precision == "float"


# What is wrong


def damaged(name: str, recipe: dict) -> str:
    text = json.dumps(recipe)
    if name == "half of it":
        return text[: len(text) // 2]
    if name == "not JSON":
        return "scale: 1"
    if name == "a list":
        return "[]"
    if name == "another version":
        return json.dumps({**recipe, "dbrq recipe": 99})
    if name == "no ops":
        return json.dumps({k: v for k, v in recipe.items() if k != "ops"})
    if name == "no values":
        return json.dumps({k: v for k, v in recipe.items() if k != "values"})
    if name == "ops of another kind":
        return json.dumps({**recipe, "ops": ["conv"] * len(recipe["ops"])})
    if name == "values that are not numbered":
        return json.dumps({**recipe, "values": {f"a{k}": v for k, v in recipe["values"].items()}})
    if name == "inputs of another kind":
        return json.dumps({**recipe, "ops": [{**op, "inputs": ["x"]} for op in recipe["ops"]]})
    return ""


DAMAGES = [
    "half of it",
    "not JSON",
    "a list",
    "another version",
    "no ops",
    "no values",
    "ops of another kind",
    "values that are not numbered",
    "inputs of another kind",
    "empty",
]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_told_and_changes_nothing(model, x, name, tmp_path):
    both = convert(model, x)
    recipe = saved(both.prepared, tmp_path / "recipe.json")
    (tmp_path / "damaged.json").write_text(damaged(name, recipe))
    prepared = fresh(model, x)
    with pytest.raises(RecipeError):
        dbrq.load_recipe(prepared, tmp_path / "damaged.json")
    run(prepared, x)
    assert torch.equal(run(dbrq.convert(prepared), x), run(both.quantized, x)), "it can still be calibrated"


def test_binary_files_are_told(model, x, tmp_path):
    (tmp_path / "recipe.json").write_bytes(b"\x80\x04\xff")
    with pytest.raises(RecipeError):
        dbrq.load_recipe(fresh(model, x), tmp_path / "recipe.json")


def test_no_such_file(model, x, tmp_path):
    with pytest.raises(FileNotFoundError):
        dbrq.load_recipe(fresh(model, x), tmp_path / "none.json")


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0},
        {"scale": -1.0},
        {"scale": float("nan")},
        {"scale": "wide"},
        {"zero_point": 300},
        {"zero_point": -1},
        {"quant_max": 1000},
        {"quant_min": 9, "quant_max": 3},
        {"scale": None},
    ],
)
def test_qparams_that_make_no_sense_are_told(model, x, change, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    key = next(iter(recipe["values"]))
    recipe["values"][key].update(change)
    with pytest.raises(RecipeError, match=key):
        loaded(model, x, recipe, tmp_path / "edited.json")


ODD_SCALES = ["1" + "0" * 400, "1e400", "Infinity", "-Infinity", "NaN", "1e-45", "1e-39", "3e38", "true", '"1"', "[1]"]
ODD_INTEGERS = ["3.5", "3.0", "true", "null", "-1", "256", "1" + "0" * 400, "1" + "0" * 5000, "NaN", '"3"', "{}"]
ODD_NUMBERS = [("scale", n) for n in ODD_SCALES] + [(f, n) for f in ("zero_point", "quant_max") for n in ODD_INTEGERS]


@pytest.fixture(scope="module")
def once():
    """A prepared model that all may fail to load recipes into, and a recipe of it."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(EXAMPLE)
    prepared = convert(model, x).prepared
    with tempfile.TemporaryDirectory() as folder:
        return prepared, saved(prepared, Path(folder) / "recipe.json")


@pytest.mark.parametrize("field, number", ODD_NUMBERS)
def test_numbers_that_are_none_are_told(once, field, number, tmp_path):
    """Some gave bare errors, some were cast, and denormal scales loaded and failed when the model ran."""
    prepared, recipe = once[0], copy.deepcopy(once[1])
    key = next(iter(recipe["values"]))
    recipe["values"][key][field] = "HERE"
    (tmp_path / "edited.json").write_text(json.dumps(recipe).replace('"HERE"', number))
    with pytest.raises(RecipeError) as error:
        dbrq.load_recipe(prepared, tmp_path / "edited.json")
    assert f"value {key}" in str(error.value) and len(str(error.value)) < 1000


TEXTS = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "a name twice": '{"dbrq recipe": 1, "values": {}, "values": {}, "ops": []}',
    "a value twice": '{"dbrq recipe": 1, "values": {"1": {"scale": 1}, "1": {"scale": 2}}, "ops": []}',
    "a version that is true": '{"dbrq recipe": true, "values": {}, "ops": []}',
    "a value that is not quite a number": '{"dbrq recipe": 1, "values": {"\u00b2": {}}, "ops": []}',
    "a value with a leading zero": '{"dbrq recipe": 1, "values": {"01": {}}, "ops": []}',
    "a value of many digits": '{"dbrq recipe": 1, "values": {"' + "1" * 5000 + '": {}}, "ops": []}',
    "a value that is a list": '{"dbrq recipe": 1, "values": {"1": []}, "ops": []}',
    "an op without a name": '{"dbrq recipe": 1, "values": {}, "ops": [{"path": "conv1"}]}',
    "an op that is a number": '{"dbrq recipe": 1, "values": {}, "ops": [3]}',
    "a number": "3",
    "null": "null",
    "two documents": "{} {}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_odd_files_are_told(once, name, tmp_path):
    (tmp_path / "recipe.json").write_text(TEXTS[name], encoding="utf-8")
    with pytest.raises(RecipeError):
        dbrq.load_recipe(once[0], tmp_path / "recipe.json")


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\xff\xfe{\x00}\x00", b"PK\x03\x04", bytes(range(256))])
def test_other_bytes_are_told(once, content, tmp_path):
    (tmp_path / "recipe.json").write_bytes(content)
    for path in (tmp_path / "recipe.json", tmp_path):
        with pytest.raises(RecipeError):
            dbrq.load_recipe(once[0], path)


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "int4"},
        {"precision": None},
        {"precision": 8},
        {"reason": ["no"], "precision": "float"},
        {"inputs": {}},
        {"inputs": None},
        {"inputs": [{"precision": "int16"}]},
        {"inputs": [{}]},
        {"inputs": ["int8"]},
        {"op": 3},
        {"path": None},
    ],
)
def test_what_an_op_cannot_be_is_told_by_name(once, change, tmp_path):
    recipe = copy.deepcopy(once[1])
    number = recipe["ops"].index(entry(recipe, "conv2"))
    recipe["ops"][number].update(change)
    (tmp_path / "edited.json").write_text(json.dumps(recipe))
    with pytest.raises(RecipeError) as error:
        dbrq.load_recipe(once[0], tmp_path / "edited.json")
    assert f"op {number}" in str(error.value)


def test_a_recipe_that_fails_leaves_calibration_and_edits_as_they_were(model, x, tmp_path):
    """Deciding anew, to see whether a recipe fits, dropped the observers of what it keeps in float."""
    both = convert(model, x)
    recipe = saved(both.prepared, tmp_path / "recipe.json")
    expected = run(both.quantized, x)
    entry(recipe, "conv2")["precision"] = "float"  # so that other ops read and write int8 ...
    del recipe["values"][str(entry(recipe, "conv1")["inputs"][0]["value"])]  # ... and one has no qparams
    (tmp_path / "wrong.json").write_text(json.dumps(recipe))
    with pytest.raises(RecipeError):
        dbrq.load_recipe(both.prepared, tmp_path / "wrong.json")
    assert torch.equal(run(dbrq.convert(both.prepared), x), expected)

    edited = saved(both.prepared, tmp_path / "recipe.json")
    entry(edited, "fc")["precision"] = "float"
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    prepared = dbrq.load_recipe(fresh(model, x), tmp_path / "edited.json")
    with pytest.raises(RecipeError):
        dbrq.load_recipe(prepared, tmp_path / "wrong.json")
    row = next(row for row in dbrq.report(dbrq.convert(prepared)).rows if row.path == "fc")
    assert row.reason == "a recipe keeps it in float"


def test_a_recipe_that_cannot_be_written_leaves_the_old_one(model, x, tmp_path, monkeypatch):
    both = convert(model, x)
    text = json.dumps(saved(both.prepared, tmp_path / "recipe.json"))

    def fails(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(json, "dump", fails)
    with pytest.raises(OSError, match="no space"):
        dbrq.save_recipe(both.quantized, tmp_path / "recipe.json")
    assert json.dumps(json.loads((tmp_path / "recipe.json").read_text())) == text
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


def test_missing_qparams_name_the_op_that_needs_them(model, x, tmp_path):
    recipe = saved(convert(model, x).prepared, tmp_path / "recipe.json")
    key = str(entry(recipe, "conv1")["inputs"][0]["value"])
    del recipe["values"][key]
    with pytest.raises(RecipeError) as error:
        loaded(model, x, recipe, tmp_path / "edited.json")
    assert error.value.op == "conv1" and key in str(error.value)


@pytest.mark.parametrize(
    "other, shape",
    [
        (nn.Sequential(nn.Linear(8, 8)), (2, 8)),
        (nn.Sequential(nn.Conv2d(3, 8, 3)), EXAMPLE),
        (nn.ReLU(), EXAMPLE),
    ],
)
def test_a_recipe_of_another_model_is_told(model, x, other, shape, tmp_path):
    dbrq.save_recipe(convert(model, x).prepared, tmp_path / "recipe.json")
    with pytest.raises(RecipeError, match="another model"):
        dbrq.load_recipe(dbrq.prepare(other.eval(), torch.randn(shape)), tmp_path / "recipe.json")
    dbrq.save_recipe(convert(other, torch.randn(shape)).prepared, tmp_path / "other.json")
    with pytest.raises(RecipeError, match="another model"):
        dbrq.load_recipe(fresh(model, x), tmp_path / "other.json")


def test_what_has_no_recipe_is_told(model, x, tmp_path):
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.save_recipe(model, tmp_path / "recipe.json")
    with pytest.raises(dbrq.NotCalibratedError):
        dbrq.save_recipe(fresh(model, x), tmp_path / "recipe.json")
    assert not (tmp_path / "recipe.json").exists()
    both = convert(model, x)
    dbrq.save_recipe(both.prepared, tmp_path / "recipe.json")
    for wrong in (model, both.quantized, "model"):
        with pytest.raises(dbrq.ConfigurationError):
            dbrq.load_recipe(wrong, tmp_path / "recipe.json")
