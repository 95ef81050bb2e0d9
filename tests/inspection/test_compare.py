"""What the comparison and the log of values say, on models small enough to compute by hand."""

import math

import pytest
import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run

# Compare


def network() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.Sigmoid(), nn.Linear(16, 4)
    ).eval(), torch.randn(4, 3, 8, 8)


def test_compare_gives_each_op_worst_first():
    model, x = network()
    converted = convert(model, x).quantized
    result = dbrq.compare(model, converted, x)
    assert [r.path for r in sorted(result.rows, key=lambda r: r.path)] == ["1", "3", "4", "5"]
    values = [r.sqnr for r in result.rows]
    assert values == sorted(values) and all(15 < v < 80 for v in values)
    assert {r.path: r.op for r in result.rows} == {"1": "relu", "3": "linear", "4": "sigmoid", "5": "linear"}


def test_the_sqnr_of_the_last_op_is_that_of_the_output():
    model, x = network()
    converted = convert(model, x).quantized
    last = next(r for r in dbrq.compare(model, converted, x).rows if r.path == "5")
    assert last.sqnr == pytest.approx(sqnr(run(model, x), run(converted, x)), abs=1e-3)


def test_compare_finds_the_layer_that_was_spoiled():
    model, x = network()
    with torch.no_grad():
        model[3].weight[0] *= 3000  # one scale serves all inputs of the sigmoid's layer
    converted = convert(model, x, get_default_qconfig("onednn")).quantized
    with torch.no_grad():
        converted[3].weight_scale.mul_(1.5)
    assert dbrq.compare(model, converted, x).rows[0].path in ("3", "4")


def test_comparing_a_model_with_itself_gives_infinity():
    model, x = network()
    assert all(r.sqnr == math.inf for r in dbrq.compare(model, model, x).rows)
    prepared = convert(model, x).prepared
    result = dbrq.compare(model, prepared, x)
    assert len(result.rows) == 5 and all(r.sqnr > 100 for r in result.rows)


def test_compare_takes_a_prepared_model_for_the_float_one():
    model, x = network()
    both = convert(model, x)
    a, b = dbrq.compare(both.prepared, both.quantized, x), dbrq.compare(model, both.quantized, x)
    assert [(r.path, pytest.approx(r.sqnr, abs=0.01)) for r in a.rows] == [(r.path, r.sqnr) for r in b.rows]


def test_the_table_of_a_comparison():
    model, x = network()
    result = dbrq.compare(model, convert(model, x).quantized, x)
    lines = str(result).splitlines()
    assert lines[0].split()[:2] == ["path", "op"] and len(lines) == 2 + len(result.rows)
    assert lines[2].split()[0] == result.rows[0].path


def test_compare_takes_keyword_arguments():
    model = Call(lambda m, x, y: m.fc(x) + y, fc=nn.Linear(4, 4))
    inputs = {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    converted = convert(model, inputs).quantized
    for result in (dbrq.compare(model, converted, inputs), dbrq.compare(model, converted, example_kwargs=inputs)):
        assert {r.path for r in result.rows} <= {"fc", "add.0"} and result.rows


def test_compare_changes_neither_model():
    model, x = network()
    model.train()
    converted = convert(network()[0], x).quantized
    model.load_state_dict(network()[0].state_dict())
    before = run(converted, x)
    dbrq.compare(model, converted, x)
    assert model.training and not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(run(converted, x), before)


# Values


def test_values_of_a_float_model_are_those_of_its_ops():
    model, x = network()
    values = dbrq.log_values(model, x)
    with torch.no_grad():
        expected = {"0": model[0](x), "1": model[:2](x), "3": model[:4](x), "4": model[:5](x), "5": model(x)}
    assert list(values) == list(expected)
    for path, value in values.items():
        torch.testing.assert_close(value, expected[path])


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_values_are_plain_float_tensors(phase):
    model, x = network()
    values = dbrq.log_values(getattr(convert(model, x), phase), x)
    assert values and all(
        type(v) is torch.Tensor and v.dtype is torch.float32 and not v.__dict__ for v in values.values()
    )
    torch.testing.assert_close(values["5"], run(getattr(convert(model, x), phase), x))


def test_values_are_kept_as_they_were_when_made():
    def forward(m, x):
        y = m.a(x)
        z = m.b(y)
        y.mul_(0.0)
        return z + y

    model, x = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4)
    values = dbrq.log_values(model, x)
    torch.testing.assert_close(values["a"], model.a(x))
    assert (dbrq.log_values(convert(model, x).quantized, x)["a"] != 0).any()


def test_values_of_a_module_called_twice():
    model, x = Call(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(4, 4)), torch.randn(2, 4)
    assert list(dbrq.log_values(model, x)) == ["a", "tanh.0", "a@1"]
    assert list(dbrq.log_values(convert(model, x).quantized, x))[-1] == "a@1"


def test_logging_does_not_disturb_another_call():
    model, x = network()
    converted = convert(model, x).quantized
    before = run(converted, x)
    dbrq.log_values(converted, x)
    assert torch.equal(run(converted, x), before)


def test_local_errors_after_an_op_of_several_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.fc = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)

        def forward(self, x):
            return self.fc(self.lstm(x)[1][0][-1])

    torch.manual_seed(0)
    mapping = QConfigMapping().set_global(get_default_qconfig("onednn"))
    mapping.set_object_type(nn.LSTM, default_dynamic_qconfig)
    model, x = Model().eval(), torch.randn(4, 5, 8)
    row = next(row for row in dbrq.compare(model, dbrq.quantize(model, [x], mapping), x).rows if row.path == "fc")
    assert row.local > row.sqnr
