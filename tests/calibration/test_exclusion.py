"""Names that match nothing raise and suggest the nearest; what is excluded stays float and says so."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import dbrq

X = torch.randn(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.norm(F.linear(torch.relu(self.fc(x)), self.weight) + x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.decoder = nn.Sequential(Block())
        self.lm_head = nn.Linear(8, 8)

    def forward(self, x):
        return self.lm_head(self.decoder(self.encoder(x)))


def rows(exclude, model: nn.Module | None = None, x: torch.Tensor = X) -> dict[str, dbrq.inspection.report.ReportRow]:
    quantized = dbrq.quantize(Model().eval() if model is None else model, [x], exclude=exclude, progress=False)
    with torch.no_grad():
        assert quantized(x).isfinite().all()
    return {row.path: row for row in dbrq.report(quantized).rows}


def in_float(found) -> set[str]:
    return {path for path, row in found.items() if row.reason.startswith("excluded: ")}


LINEAR = {"encoder.0.fc", "encoder.1.fc", "decoder.0.fc", "lm_head"}


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        (["*.lm_head"], {"lm_head"}),
        ("lm_head", {"lm_head"}),
        (["decoder.*"], {"decoder.0.fc"}),
        (("decoder",), {"decoder.0.fc"}),
        (["*.fc"], LINEAR - {"lm_head"}),
        (["encoder.?.fc", "lm_head"], LINEAR - {"decoder.0.fc"}),
        (["encoder.[!1]"], {"encoder.0.fc"}),
        (nn.Linear, LINEAR),
        ([Block], LINEAR - {"lm_head"}),
        (iter([nn.Linear, "*"]), LINEAR),
        ("*", LINEAR),
        ([], set()),
    ],
)
def test_patterns_and_classes_stay_float(exclude, expected):
    found = rows(exclude)
    assert in_float(found) & LINEAR == expected
    assert all(found[path].precision == ("float" if path in expected else "int8") for path in LINEAR)


def test_all_inside_is_excluded_functions_and_norms_too():
    found = rows("encoder.0")
    assert {path for path in found if path.startswith("encoder.0")} == in_float(found)
    assert found["encoder.0.linear.0"].reason == "excluded: 'encoder.0'"
    assert rows(Block)["decoder.0.linear.0"].reason == "excluded: Block"


def test_excluded_followers_do_not_fuse():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    found = rows("1", model, x)
    assert [found[path].precision for path in ("0", "1", "2")] == ["int8", "float", "float"]
    assert found["1"].reason == "excluded: '1'" and "+" not in found["0"].kernel
    assert rows(nn.ReLU, model, x)["2"].reason == "excluded: ReLU"


def test_a_module_of_two_names_is_excluded_under_both():
    model = nn.Sequential(nn.Linear(8, 8))
    model.add_module("tied", model[0])
    assert in_float(rows("tied", model)) == {"0", "0@1"}


def test_paths_met_later_are_excluded_too():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else self.b(x)

    found = dbrq.quantize(Branches().eval(), [torch.ones(2, 8), -torch.ones(2, 8)], exclude="b", progress=False)
    by_path = {row.path: row for row in dbrq.report(found).rows}
    assert by_path["a"].precision == "int8" and by_path["b"].reason == "excluded: 'b'"


def test_excluded_models_lower_save_and_have_recipes(tmp_path):
    model = Model().eval()
    prepared = dbrq.calibrate(dbrq.prepare(model, X, exclude="decoder"), [X])
    dbrq.save_recipe(prepared, tmp_path / "recipe.json")
    converted = dbrq.convert(prepared)
    report = dbrq.report(dbrq.lower(converted, X))
    assert next(row.reason for row in report.rows if row.path == "decoder.0.fc") == "excluded: 'decoder'"
    again = dbrq.convert(dbrq.load_recipe(dbrq.prepare(model, X), tmp_path / "recipe.json"))
    with torch.no_grad():
        assert again(X).equal(converted(X))


@pytest.mark.parametrize(
    ("exclude", "words"),
    [
        (["*.lm_haed"], ["'*.lm_haed'", "did you mean 'lm_head'?"]),
        ("decodr.*", ["did you mean 'decoder"]),
        ("encoder.0.fx", ["did you mean 'encoder.0.fc'"]),
        (["lm_head", "nothing.like.it"], ["'nothing.like.it'", "there is"]),
        (nn.Conv2d, ["Conv2d", "there is"]),
        (nn.LSTM, ["LSTM"]),
    ],
)
def test_an_exclusion_that_matches_nothing_raises(exclude, words):
    model = Model().eval()
    with pytest.raises(dbrq.ConfigurationError) as raised:
        dbrq.prepare(model, X, exclude=exclude)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("exclude", [3, [3], [F.linear], [torch.Tensor], [None], None])
def test_what_is_no_exclusion_raises(exclude):
    with pytest.raises(dbrq.ConfigurationError, match="exclude takes patterns"):
        dbrq.prepare(Model(), X, exclude=exclude)


# Mappings


def default() -> QConfigMapping:
    return dbrq.default_qconfig_mapping()


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (lambda: default().set_module_name("encoder.0.fx", None), ["'encoder.0.fx'", "did you mean 'encoder.0.fc'"]),
        (lambda: default().set_module_name("lm_heads", None), ["did you mean 'lm_head'?"]),
        (lambda: default().set_module_name("enc", None), ["'enc'", "encoder"]),
        (lambda: default().set_module_name("", None), ["set_global"]),
        (lambda: default().set_module_name("lm_head.weight", None), ["did you mean 'lm_head'?"]),
        (lambda: default().set_module_name_regex(r"encodr\.\d+", None), ["regex", "did you mean 'encoder"]),
        (lambda: default().set_module_name_regex(r"fc", None), ["from the start"]),
        (lambda: default().set_module_name_regex(r"enc(", None), ["a regex that is none"]),
        (
            lambda: default().set_module_name_object_type_order("encodr.0", nn.Linear, 0, None),
            ["did you mean", "'encoder.0'"],
        ),
        (
            lambda: default().set_module_name_object_type_order("encoder.0", nn.Linear, 3, None),
            ["Linear number 3", "from 0 to 0"],
        ),
        (lambda: default().set_module_name_object_type_order("encoder.0", nn.Conv2d, 0, None), ["Conv2d number 0"]),
        (lambda: default().set_module_name_object_type_order("encoder.0", F.linear, 1, None), ["linear number 1"]),
        (lambda: default().set_object_type("matmull", None), ["did you mean 'matmul'"]),
    ],
)
def test_an_entry_of_a_mapping_that_matches_nothing_raises(mapping, words):
    with pytest.raises(dbrq.ConfigurationError) as raised:
        dbrq.prepare(Model().eval(), X, mapping())
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    "mapping",
    [
        default,
        lambda: get_default_qconfig_mapping("onednn"),
        lambda: get_default_qconfig_mapping("x86"),
        lambda: get_default_qat_qconfig_mapping("onednn"),
        lambda: default().set_object_type(nn.Conv3d, None).set_object_type(F.conv1d, None),
        lambda: default().set_module_name("encoder", None).set_module_name("decoder.0.norm", None),
        lambda: default().set_module_name_regex(r".*\.fc", None).set_module_name_regex("", None),
        lambda: default().set_module_name_object_type_order("encoder.0", F.linear, 0, None),
        lambda: default().set_module_name_object_type_order("encoder.0", nn.Linear, 0, None),
    ],
)
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
def test_what_matches_and_kinds_of_ops_do_not_raise(mapping):
    dbrq.prepare(Model().eval(), X, mapping())


def test_the_model_is_as_it_was_after_an_error():
    model = Model().eval()
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.prepare(model, X, exclude="nothing", inplace=True)
    assert "forward" not in model.__dict__
    dbrq.prepare(model, X, inplace=True)


# Recipes


def edited(tmp_path, change):
    prepared = dbrq.calibrate(dbrq.prepare(Model().eval(), X), [X])
    path = tmp_path / "recipe.json"
    dbrq.save_recipe(prepared, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def named(content, path):
    return next(op for op in content["ops"] if op["path"] == path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: named(c, "lm_head").update(path="lm_haed"), ["lm_haed", "did you mean 'lm_head'?"]),
        (lambda c: named(c, "decoder.0.fc").update(op="linaer"), ["linaer", "linear"]),
        (lambda c: c["ops"].append(copy.deepcopy(c["ops"][0]) | {"path": "encoder.7.fc"}), ["encoder.7.fc"]),
        (lambda c: c["values"].update({"4711": next(iter(c["values"].values()))}), ["value 4711"]),
        (lambda c: named(c, "lm_head")["inputs"][0].update(slot=5), ["lm_head", "slot", "5"]),
    ],
)
def test_an_entry_of_a_recipe_that_matches_nothing_raises(tmp_path, change, words):
    path = edited(tmp_path, change)
    with pytest.raises(dbrq.RecipeError) as raised:
        dbrq.load_recipe(dbrq.prepare(Model().eval(), X), path)
    assert all(word in str(raised.value) for word in words), raised.value


def test_ops_without_entries_are_told(tmp_path):
    path = edited(tmp_path, lambda c: c["ops"].pop())
    with pytest.raises(dbrq.RecipeError, match="another model"):
        dbrq.load_recipe(dbrq.prepare(Model().eval(), X), path)


def test_every_name_of_a_shared_module_names_it():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    for name in ("0", "2"):
        quantized = dbrq.quantize(model, [X], get_default_qconfig_mapping("onednn").set_module_name(name, None))
        assert {row.precision for row in dbrq.report(quantized).rows if row.op == "linear"} == {"float"}


@pytest.mark.parametrize("kind", [F.softmax, nn.Dropout])
def test_an_op_by_order_may_be_one_that_is_float(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(8, 8), nn.Dropout()

        def forward(self, x):
            return F.softmax(self.drop(self.fc(x)), -1)

    mapping = get_default_qconfig_mapping("onednn").set_module_name_object_type_order("", kind, 0, None)
    assert dbrq.report(dbrq.quantize(Model().eval(), [X], mapping)).coverage == 1
