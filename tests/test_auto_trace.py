"""Interception: hooks and their order, layers called by themselves, and code that torch runs in its own ways."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.hidden_state import state_of
from dbrq.quantization_state import AutoQuantizationState
from tests.helpers.judging import sqnr
from tests.helpers.models import ROWS
from tests.helpers.running import convert, quantized, quantized_on, run

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Child(nn.Module):
    def forward(self, x):
        return x + x


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.child = Child()

    def forward(self, x):
        x = self.conv(x)
        x = self.child(x)
        return x


ORDER = """\
<root>.__call__ start
conv.__call__ start
conv.__call__ end
child.__call__ start
child::add.__torch_function__ start
child::add.__torch_function__ end
child.__call__ end
<root>.__call__ end"""


@pytest.fixture(params=["prepared", "converted"])
def model(request):
    both = convert(Parent(), torch.randn(2, 1, 4, 4))
    return both.prepared if request.param == "prepared" else both.quantized


def hooks_of(model: nn.Module, *args, caplog) -> str:
    with caplog.at_level(logging.DEBUG, "dbrq.hooks"):
        caplog.clear()
        run(model, args)
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "dbrq.hooks")


def test_the_order_of_the_hooks(model, caplog):
    assert hooks_of(model, torch.randn(2, 1, 4, 4), caplog=caplog) == ORDER


def test_the_order_of_the_hooks_with_children_in_children(caplog):
    inner = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    converted = convert(nn.Sequential(inner, Child()), torch.randn(2, 1, 4, 4)).quantized
    assert hooks_of(converted, torch.randn(2, 1, 4, 4), caplog=caplog).split("\n") == [
        "<root>.__call__ start",
        "0.__call__ start",
        "0.0.__call__ start",
        "0.0.__call__ end",
        "0.1.__call__ start",
        "0.1.__call__ end",
        "0.__call__ end",
        "1.__call__ start",
        "1::add.__torch_function__ start",
        "1::add.__torch_function__ end",
        "1.__call__ end",
        "<root>.__call__ end",
    ]


def test_an_op_hook_belongs_to_the_module_whose_forward_calls_it(caplog):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.child = Child()

        def forward(self, x):
            return F.linear(self.child(F.linear(x, self.weight)), self.weight.t())

    converted = convert(Two(), torch.randn(2, 4)).quantized
    lines = hooks_of(converted, torch.randn(2, 4), caplog=caplog).split("\n")
    functions = [line for line in lines if "__torch_function__ start" in line]
    assert functions == [
        "<root>::linear.__torch_function__ start",
        "child::add.__torch_function__ start",
        "<root>::linear.__torch_function__ start",
    ]


def test_logging_changes_no_result(caplog):
    x = torch.randn(2, 1, 4, 4)
    converted = convert(
        nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), Child(), nn.Conv2d(3, 2, 1)), x
    ).quantized
    quiet = run(converted, x)
    with caplog.at_level(logging.DEBUG, "dbrq.hooks"):
        assert torch.equal(run(converted, x), quiet)


# The state


def test_each_module_that_is_not_a_leaf_has_a_state(model):
    having = {
        path
        for path, m in model.named_modules()
        if isinstance(getattr(m, "_auto_quant_state", None), AutoQuantizationState)
    }
    assert having == {"", "child"}
    assert model._auto_quant_state is state_of(model)
    assert model.child._auto_quant_state.path == "child"
    assert not hasattr(model.conv, "_auto_quant_state")


def test_the_state_of_a_deep_tree():
    tree = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.ReLU(), Child())), nn.ModuleDict({"a": Child()})["a"]
    )
    both = convert(tree, torch.randn(2, 1, 4, 4))
    for model in (both.prepared, both.quantized):
        having = {path for path, m in model.named_modules() if hasattr(m, "_auto_quant_state")}
        assert having == {"", "0", "0.1", "0.1.1", "1"}


def test_a_root_that_is_a_leaf_has_a_state():
    both = convert(nn.Conv2d(1, 2, 1), torch.randn(2, 1, 4, 4))
    for model in (both.prepared, both.quantized):
        assert isinstance(model._auto_quant_state, AutoQuantizationState)
        assert [op.op for op in model._auto_quant_state.ops()] == ["conv2d"]


def test_the_state_says_what_was_seen(model):
    assert [op.op for op in model._auto_quant_state.ops()] == ["conv2d"]
    (add,) = model.child._auto_quant_state.ops()
    assert add.op == "add" and add.path == "child.add.0"
    assert [(info.shape, info.dtype) for info in add.inputs] == [((2, 1, 4, 4), torch.float32)] * 2
    assert [info.shape for info in add.outputs] == [(2, 1, 4, 4)]
    assert add.inputs[0].id == add.inputs[1].id == model._auto_quant_state.ops()[0].outputs[0].id
    assert add.site.startswith("test_auto_trace.py:")


def test_a_state_per_call_of_a_module():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return self.child(self.child(x) * 4)

    converted = convert(Twice(), torch.randn(2, 4)).quantized
    calls = converted.child._auto_quant_state.calls
    assert [[op.op for op in call.paths[0].ops] for call in calls] == [["linear", "relu"]] * 2
    first, second = (call.paths[0].ops[0].decision.reads[0].value for call in calls)
    assert first != second, "each call has qparams of its own"


# Printing


def test_a_prepared_model_prints_ops_tensor_infos_dtypes_and_observers():
    prepared = convert(Parent(), torch.randn(2, 1, 4, 4)).prepared
    text = repr(prepared)
    for part in (
        "(_auto_quant_state): AutoQuantizationState(",
        "conv: conv2d(",
        "child.add.0: add(",
        "float32[2, 1, 4, 4]",
        "HistogramObserver(",
        "test_auto_trace.py:",
    ):
        assert part in text, text
    assert "seen [" in text, "what the observers saw is printed"


def test_a_converted_model_prints_ops_tensor_infos_dtypes_and_qparams():
    model = nn.Sequential(Parent(), nn.Conv2d(1, 1, 1))
    converted = convert(model, torch.randn(2, 1, 4, 4)).quantized
    text = "\n".join(repr(module._auto_quant_state) for module in (converted, converted[0], converted[0].child))
    for part in (
        "0.conv: conv2d(",
        "0.child.add.0: add(",
        "float32[2, 1, 4, 4]",
        "scale=",
        "zero_point=",
        "int8, onednn.qconv2d",
    ):
        assert part in text, text
    assert "Observer" not in text


def test_printing_says_why_float():
    converted = convert(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), torch.randn(2, 4)).quantized
    row = next(row for row in dbrq.report(converted).rows if row.op == "sigmoid")
    assert row.reason in repr(converted._auto_quant_state)


# Layers called by themselves


def test_a_layer_by_itself_reads_with_all_its_ranges() -> None:
    class Inner(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * 100)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
            self.inner = Inner(self.a)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.a(x * 0.01)) + self.a(x * 10) + self.inner(x)

    model = Shared()
    converted = quantized(model, ROWS, strict=True)
    with torch.no_grad():
        for factor in (10, 100):
            assert sqnr(model.a(ROWS[0] * factor), converted.a(ROWS[0] * factor)) > 20
        assert torch.equal(converted.unused(ROWS[0]), model.unused(ROWS[0]))


BETWEEN = [
    nn.Upsample(scale_factor=2),
    nn.UpsamplingNearest2d(scale_factor=2),
    nn.UpsamplingBilinear2d(scale_factor=2),
    nn.SyncBatchNorm(8),
]


@pytest.mark.parametrize("between", BETWEEN, ids=str)
def test_modules_of_torch_that_have_no_row_but_call_functions_that_do(between):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), between, nn.Conv2d(8, 4, 1)).eval()
    assert sqnr(run(model, X), run(quantized_on(model, X), X)) > 30


def test_a_scripted_submodule_stays_float():
    script = torch.jit.script(nn.Tanh())
    model = nn.Sequential(nn.Linear(16, 16), script, nn.Linear(16, 4))
    assert sqnr(run(model.eval(), Z), run(quantized_on(model, Z), Z)) > 25


def test_vmap_in_forward():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(x) * torch.vmap(lambda i: i * 2)(torch.arange(8.0))[:, None]

    model = Masked()
    assert sqnr(run(model.eval(), Z), run(quantized_on(model, Z), Z)) > 25
