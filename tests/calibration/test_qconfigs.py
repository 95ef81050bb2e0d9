"""QConfigMapping in full: who gets which qconfig."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, get_default_qconfig_mapping

import dbrq
from tests.helpers.judging import assert_matches, assert_precision, rows
from tests.helpers.models import Call
from tests.helpers.phases import X, net
from tests.helpers.running import convert, run
from tests.helpers.trees import DEFAULT, LAYERS, Leaf, Tree, everything, in_float, in_float_by_fx

MAPPINGS = {
    "global None": (lambda m: m.set_global(None), LAYERS),
    "module class": (lambda m: m.set_object_type(nn.Linear, None), LAYERS),
    "class of a parent": (lambda m: m.set_object_type(Leaf, None), set()),
    "name at depth one": (lambda m: m.set_module_name("first", None), {"first"}),
    "name at depth two": (lambda m: m.set_module_name("middle.conv", None), {"middle.conv"}),
    "name at depth three": (lambda m: m.set_module_name("middle.leaf.a", None), {"middle.leaf.a"}),
    "name of a parent": (lambda m: m.set_module_name("middle.leaf", None), {"middle.leaf.a", "middle.leaf.b"}),
    "name of a grandparent": (lambda m: m.set_module_name("middle", None), LAYERS - {"first", "last"}),
    "child differs from its parent": (
        lambda m: m.set_module_name("middle", None).set_module_name("middle.leaf.b", DEFAULT),
        LAYERS - {"first", "last", "middle.leaf.b"},
    ),
    "regex": (lambda m: m.set_module_name_regex(r"middle\..*\.a", None), {"middle.leaf.a", "middle.other.a"}),
    "the first regex that matches": (
        lambda m: m.set_module_name_regex(r".*\.a", DEFAULT).set_module_name_regex(r"middle.*", None),
        {"middle.conv", "middle.leaf.b", "middle.other.b"},
    ),
    "name before regex": (
        lambda m: m.set_module_name_regex(".*", None).set_module_name("middle.leaf.a", DEFAULT),
        LAYERS - {"middle.leaf.a"},
    ),
    "regex before type": (
        lambda m: m.set_object_type(nn.Linear, None).set_module_name_regex(r"first", DEFAULT),
        LAYERS - {"first"},
    ),
    "type before global": (lambda m: m.set_global(None).set_object_type(nn.Linear, DEFAULT), set()),
    "order": (lambda m: m.set_module_name_object_type_order("middle.leaf", nn.Linear, 1, None), {"middle.leaf.b"}),
    "order in the root": (lambda m: m.set_module_name_object_type_order("", nn.Linear, 1, None), {"last"}),
    "order counts per parent": (
        lambda m: m.set_module_name_object_type_order("middle", nn.Linear, 0, None),
        {"middle.conv"},
    ),
    "order before name": (
        lambda m: m.set_module_name("middle", None).set_module_name_object_type_order(
            "middle.other", nn.Linear, 0, DEFAULT
        ),
        LAYERS - {"first", "last", "middle.other.a"},
    ),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_which_layers_stay_float(name):
    change, expected = MAPPINGS[name]
    assert in_float(Tree(), change(everything())) == expected


@pytest.mark.parametrize("name", MAPPINGS)
def test_precedence_is_that_of_fx(name):
    change, _ = MAPPINGS[name]
    model = Tree(F.softplus).eval()  # relu would fuse, and FX wants its qconfig to be the same then
    assert in_float(model, change(everything())) == in_float_by_fx(model, change(everything()))


def functional() -> nn.Module:
    def forward(m, x):
        y = F.linear(x, m.w1)
        z = torch.conv1d(y.unsqueeze(0), m.w2).squeeze(0)
        return F.linear(z.add(y) + y, m.w1)

    return Call(forward, w1=torch.randn(8, 8), w2=torch.randn(16, 16, 1))


def precisions(model: nn.Module, mapping: QConfigMapping) -> dict[str, str]:
    converted = assert_matches(model, torch.randn(16, 8), mapping, fx=False)
    return {row.path: row.precision for row in dbrq.report(converted).rows}


FUNCTIONS = {
    "function": (lambda m: m.set_object_type(F.linear, None), {"linear.0", "linear.1"}),
    "function, by order": (lambda m: m.set_module_name_object_type_order("", F.linear, 1, None), {"linear.1"}),
    "another function": (lambda m: m.set_object_type(F.conv1d, None), {"conv1d.0"}),
    "function as torch names it": (lambda m: m.set_object_type(torch.conv1d, None), {"conv1d.0"}),
    "method, by its name": (lambda m: m.set_object_type("add", None), {"add.0"}),
    "global None": (lambda m: m.set_global(None), {"linear.0", "linear.1", "conv1d.0", "add.0", "add.1"}),
    "only functions": (lambda m: m.set_global(None).set_object_type(F.linear, DEFAULT), {"conv1d.0", "add.0", "add.1"}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_ops(name):
    change, expected = FUNCTIONS[name]
    found = {path for path, precision in precisions(functional(), change(everything())).items() if precision == "float"}
    assert expected <= found, found
    assert {path for path in found if "add" not in path} == {path for path in expected if "add" not in path}


@pytest.mark.parametrize("key", [operator.add, torch.add, "add"])
def test_any_spelling_of_an_operator_names_it(key):
    model = Call(lambda m, x: m.b(m.a(x) + m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    converted = assert_matches(model, torch.randn(16, 8), everything().set_object_type(key, None), fx=False)
    assert_precision(converted, "add", "float", 1)
    assert rows(converted, "add")[0].reason == "its qconfig is None"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.set_module_name("child", None),
        lambda m: m.set_module_name_regex("chi.*", None),
        lambda m: m.set_object_type(Call(lambda m, x: x).__class__, None),
    ],
)
def test_functional_ops_follow_the_module_they_are_in(change):
    child = Call(lambda m, x: F.linear(x, m.w), w=torch.randn(8, 8))
    model = nn.Sequential()
    model.add_module("first", nn.Linear(8, 8))
    model.add_module("child", child)
    converted = assert_matches(model, torch.randn(16, 8), change(everything()), fx=False)
    assert {row.path: row.precision for row in dbrq.report(converted).rows} == {
        "first": "int8",
        "child.linear.0": "float",
    }


def test_the_mapping_is_not_changed():
    mapping = get_default_qconfig_mapping("onednn").set_module_name("first", None).set_module_name_regex("f.*", DEFAULT)
    mapping.set_module_name_object_type_order("middle", nn.Linear, 0, None)
    before, ids = copy.deepcopy(mapping.to_dict()), {k: id(v) for k, v in vars(mapping).items()}
    convert(Tree(), torch.randn(4, 8), mapping)
    assert repr(mapping.to_dict()) == repr(before) and {k: id(v) for k, v in vars(mapping).items()} == ids


@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
@pytest.mark.parametrize(
    "mapping",
    [
        DEFAULT,
        everything(),
        get_default_qconfig_mapping("onednn"),
        get_default_qconfig_mapping("x86"),
        get_default_qconfig_mapping("fbgemm"),
        None,
    ],
)
def test_mappings_of_torch_ao(mapping):
    converted = assert_matches(Tree(), torch.randn(64, 8), mapping)
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("mapping", ["int8", {"": DEFAULT}, 8, [DEFAULT]])
def test_what_is_no_mapping_is_told(mapping):
    with pytest.raises(dbrq.ConfigurationError, match="QConfigMapping"):
        dbrq.prepare(Tree(), torch.randn(2, 8), mapping)


def test_a_qconfig_alone_is_a_global_one():
    recipe = dbrq.default_qconfig_mapping().global_qconfig
    assert isinstance(recipe, QConfig)
    one = convert(net(), X, recipe).quantized
    other = convert(net(), X, QConfigMapping().set_global(recipe)).quantized
    assert torch.equal(run(one, X), run(other, X))
