"""``sensitivity`` finds the op that hurts, and ``tune`` stops at the metric."""

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq import Preset
from dbrq.inspection.comparing import sqnr

from ..accuracy.models import Outliers, batches


class OneBad(nn.Module):
    """Three layers, of which the second reads some rows that are far larger than the others, which int8 cannot hold
    together.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bad, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.where(x[:, :1] > 1.3, 300 * h, h)
        return self.last(torch.tanh(self.bad(h)))


DATA = batches(64, 32)


def test_the_op_that_hurts_comes_first() -> None:
    found = dbrq.sensitivity(OneBad(), DATA)
    worst = found.rows[0]
    assert worst.path == "bad" and found.worst(1) == ["bad"]
    assert worst.only_int8 > 3 * max(row.only_int8 for row in found.rows[1:])
    assert worst.only_float < 0.5 * found.loss
    assert worst.local < min(row.local for row in found.rows[1:])
    inherits = next(row for row in found.rows if row.path == "last")
    assert inherits.accumulated < inherits.local - 6  # a good op on bad inputs
    assert "bad" in str(found) and found.to_dicts()[0]["path"] == "bad"


def test_the_simulation_is_what_conversion_gives() -> None:
    """Losses of ops alone and together, beside converted models with the others kept in float."""
    model = OneBad().eval()
    with torch.no_grad():
        expected = torch.cat([model(x) for x in DATA])
    found = dbrq.sensitivity(model, DATA)
    paths = {row.path for row in found.rows}
    for row in found.rows:
        for kept, loss in ((paths - {row.path}, row.only_int8), ({row.path}, row.only_float)):
            quantized = dbrq.quantize(model, DATA, preset=Preset(keep=tuple(kept)))
            got = torch.cat([quantized(x) for x in DATA])
            assert float((got - expected).norm() / expected.norm()) == pytest.approx(loss, rel=0.1)


def test_losses_are_of_the_users_metric() -> None:
    model = OneBad().eval()
    x = torch.cat(DATA)
    target = model(x).argmax(1)

    def accuracy(m: nn.Module) -> float:
        return (m(x).argmax(1) == target).double().mean().item()

    found = dbrq.sensitivity(model, DATA, accuracy)
    assert found.metric == 1.0 and found.rows[0].path == "bad" and found.rows[0].only_int8 > 0
    errors = dbrq.sensitivity(model, DATA, lambda m: 1 - accuracy(m), higher_is_better=False)
    assert [row.only_int8 for row in errors.rows] == pytest.approx([row.only_int8 for row in found.rows])


def test_a_prepared_model_needs_no_data_again() -> None:
    prepared = dbrq.calibrate(dbrq.prepare(OneBad(), DATA[0], preset="transformer"), DATA)
    before = prepared(DATA[0])
    assert dbrq.sensitivity(prepared).rows[0].path == "bad"
    assert torch.equal(prepared(DATA[0]), before)
    with pytest.raises(dbrq.ConfigurationError, match="no sample"):
        dbrq.sensitivity(dbrq.calibrate(dbrq.prepare(OneBad(), DATA[0], preset="fast"), DATA))


def test_the_plot_is_drawn(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    pytest.importorskip("matplotlib")
    dbrq.sensitivity(OneBad(), DATA).plot(tmp_path / "sensitivity.svg")
    assert "bad" in (tmp_path / "sensitivity.svg").read_text()


def accuracy_of(model: nn.Module) -> tuple[nn.Module, list[int]]:
    """A metric for a model, and the list that it counts its calls in."""
    x = torch.cat(DATA)
    target = model.eval()(x).argmax(1)
    calls: list[int] = []

    def evaluate(m: nn.Module) -> float:
        calls.append(1)
        return (m(x).argmax(1) == target).double().mean().item()

    return evaluate, calls  # type: ignore[return-value]  # a function


def test_tune_returns_what_is_needed_to_float_and_no_more() -> None:
    model = OneBad()
    evaluate, calls = accuracy_of(model)
    result = dbrq.tune(model, DATA, evaluate, max_drop=0.01)
    assert result.reached and result.metric >= 0.99 and result.float_metric == 1.0
    assert evaluate(result.model) == result.metric
    floats = [row.path for row in dbrq.report(result.model).rows if "preset keeps" in row.reason]
    assert len(floats) < 3
    fewer = [trial for trial in result.trials if len(trial.floats) < len(floats)]
    assert fewer and all(trial.drop > 0.01 for trial in fewer)
    assert len(calls) <= 1 + len(result.trials) + 1
    assert result.trials[0].preset == "fast" and "metric" in str(result)


def test_tune_stops_at_the_first_that_is_good_enough() -> None:
    evaluate, calls = accuracy_of(OneBad())
    result = dbrq.tune(OneBad(), DATA, evaluate, max_drop=1.0)
    assert [trial.preset for trial in result.trials] == ["fast"] and len(calls) == 2


def test_tune_finds_smoothing() -> None:
    model, data = Outliers().eval(), batches(4, 16, 64)
    result = dbrq.tune(model, data, max_drop=6)
    assert result.reached and result.preset.smoothing and not result.preset.keep


def test_tune_within_a_budget_returns_the_best() -> None:
    evaluate, calls = accuracy_of(OneBad())
    result = dbrq.tune(OneBad(), DATA, evaluate, max_drop=0.0, budget=2)
    assert len(result.trials) == 2 and len(calls) == 3
    assert result.metric == max(trial.metric for trial in result.trials)


def test_tune_is_resumed(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    evaluate, calls = accuracy_of(OneBad())
    path = tmp_path / "trials.json"
    first = dbrq.tune(OneBad(), DATA, evaluate, max_drop=0.01, resume=path)
    done = len(calls)
    second = dbrq.tune(OneBad(), DATA, evaluate, max_drop=0.01, resume=path)
    assert len(calls) == done and second.metric == first.metric and second.preset == first.preset
    assert torch.equal(first.model(DATA[0]), second.model(DATA[0]))
    path.write_text("{}")
    with pytest.raises(dbrq.ConfigurationError, match="no trials"):
        dbrq.tune(OneBad(), DATA, evaluate, max_drop=0.01, resume=path)


def test_what_tune_found_is_a_recipe(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    evaluate, _ = accuracy_of(OneBad())
    result = dbrq.tune(OneBad(), DATA, evaluate, max_drop=0.01)
    result.save_recipe(tmp_path / "recipe.json")
    again = dbrq.convert(dbrq.load_recipe(dbrq.prepare(OneBad(), DATA[0]), tmp_path / "recipe.json"))
    assert torch.equal(again(DATA[0]), result.model(DATA[0]))


@pytest.mark.parametrize("arguments", [{"max_drop": -1}, {"max_drop": float("nan")}, {"max_drop": 1, "budget": 0}])
def test_arguments_that_make_no_sense_are_refused(arguments: dict) -> None:
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.tune(OneBad(), DATA, **arguments)


def test_ops_of_tried_models_agree_with_float_where_nothing_is_int8() -> None:
    model, data = Outliers().eval(), batches(4, 16, 64)
    metric = dbrq.sensitivity(model, data, lambda m: sqnr(model(data[0]), m(data[0]))).metric
    assert metric is not None and metric > 120
