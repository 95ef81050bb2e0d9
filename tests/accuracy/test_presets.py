"""Names of presets, their arguments, and the sample of the data that they need."""

import pytest
import torch
from torch import nn

import dbrq
from dbrq import Preset
from dbrq.accuracy.kept import KeptBatches

from .models import Outliers, batches


@pytest.mark.parametrize("preset", ["fast", "default", "accurate", "transformer", "dynamic"])
def test_every_name_converts(preset: str) -> None:
    data = batches(4, 16, 64, count=2)
    quantized = dbrq.quantize(Outliers(), data, preset=preset)
    assert torch.isfinite(quantized(data[0])).all() and dbrq.report(quantized).coverage == 1


def test_qat_prepares_for_training() -> None:
    data = batches(4, 16, 64, count=2)
    prepared = dbrq.prepare(Outliers(), data[0], preset="qat")
    prepared(data[0]).sum().backward()
    assert dbrq.convert(prepared)(data[0]).shape == (4, 16, 32)


@pytest.mark.parametrize("arguments", [
    {"rounding": "up"}, {"bias_correction": "slow"}, {"ranges": "wide"}, {"ranges": 12}, {"smoothing": "much"},
])  # fmt: skip
def test_settings_that_are_none_are_refused(arguments: dict) -> None:
    with pytest.raises(dbrq.ConfigurationError, match=next(iter(arguments))):
        Preset(**arguments)


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(dbrq.ConfigurationError, match="did you mean 'accurate'"):
        dbrq.prepare(nn.Linear(2, 2), torch.zeros(1, 2), preset="acurate")


def test_a_preset_that_is_a_mapping_takes_no_other() -> None:
    with pytest.raises(dbrq.ConfigurationError, match="qconfig mapping"):
        dbrq.prepare(nn.Linear(2, 2), torch.zeros(1, 2), dbrq.default_qconfig_mapping(), preset="dynamic")


def test_ops_by_name_stay_float() -> None:
    data = batches(4, 16, 64, count=2)
    quantized = dbrq.quantize(Outliers(), data, preset=Preset(keep=("ke*", "out")))
    rows = {row.path: row for row in dbrq.report(quantized).rows}
    assert [rows[name].precision for name in ("query", "key", "out")] == ["int8", "float", "float"]
    assert "the preset keeps it in float: 'out'" in rows["out"].reason
    with pytest.raises(dbrq.ConfigurationError, match="matches no op"):
        dbrq.quantize(Outliers(), data, preset=Preset(keep="outt"))


def test_residuals_stay_float() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first(x))
            return torch.relu(self.second(y) + y)

    data = batches(2, 4, 8, 8, count=2)
    rows = dbrq.report(dbrq.quantize(Residual(), data, preset=Preset(keep="residuals"))).rows
    assert next(row.precision for row in rows if row.op == "add") == "float"


def test_one_calibration_serves_several_presets() -> None:
    data = batches(4, 16, 64)
    prepared = dbrq.calibrate(dbrq.prepare(Outliers(), data[0], preset="transformer"), data)
    first, second = dbrq.convert(prepared, preset="fast"), dbrq.convert(prepared)
    assert not hasattr(first.query, "weight_smoothing") and hasattr(second.query, "weight_smoothing")
    assert torch.equal(first(data[0]), dbrq.quantize(Outliers_like(prepared), data)(data[0]))


def Outliers_like(prepared: nn.Module) -> nn.Module:
    """A float model with the weights of a prepared one."""
    model = Outliers()
    model.load_state_dict({name: prepared.state_dict()[name] for name in model.state_dict()})
    return model


def test_conversion_takes_no_mapping() -> None:
    data = batches(4, 16, 64, count=2)
    prepared = dbrq.calibrate(dbrq.prepare(Outliers(), data[0]), data)
    for preset in ("dynamic", "qat"):
        with pytest.raises(dbrq.ConfigurationError, match="by which models are prepared"):
            dbrq.convert(prepared, preset=preset)


def test_a_method_without_its_data_raises() -> None:
    data = batches(4, 16, 64, count=2)
    prepared = dbrq.calibrate(dbrq.prepare(Outliers(), data[0], preset="fast"), data)
    with pytest.raises(dbrq.NotCalibratedError, match="sample of the calibration data"):
        dbrq.convert(prepared, preset="accurate")


def test_the_float_model_is_untouched() -> None:
    model, data = Outliers(), batches(4, 16, 64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = dbrq.calibrate(dbrq.prepare(model, data[0], preset="accurate"), data)
    dbrq.convert(prepared)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(before[name], prepared.state_dict()[name]) for name in before)


def test_the_sample_is_bounded_and_every_batch_has_its_chance() -> None:
    counts = [0] * 100
    for seed in range(40):
        kept = KeptBatches(budget=10 * 400)
        kept._draw.seed(seed)
        for number in range(100):
            kept.offer((torch.full((100,), float(number)),), {})
        assert len(kept) == 10 and kept.seen == 100
        for (x,), _ in kept.batches:
            counts[int(x[0])] += 1
    assert sum(counts[:50]) > 140 and sum(counts[50:]) > 140  # 200 each, but for chance


def test_a_recipe_holds_what_the_methods_found(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    model, data = Outliers(), batches(4, 16, 64)
    for preset in ("transformer", "accurate"):
        quantized = dbrq.quantize(model, data, preset=preset)
        dbrq.save_recipe(quantized, tmp_path / "recipe.json")
        again = dbrq.convert(dbrq.load_recipe(dbrq.prepare(model, data[0]), tmp_path / "recipe.json"))
        assert torch.equal(again(data[0]), quantized(data[0]))


def test_a_recipe_with_tensors_of_another_shape_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    import json

    model, data, path = Outliers(), batches(4, 16, 64), tmp_path / "recipe.json"
    dbrq.save_recipe(dbrq.quantize(model, data, preset="transformer"), path)
    content = json.loads(path.read_text())
    for broken in ([1.0], [-1.0] * 64, ["x"], "x", [float("nan")] * 64):
        content["tensors"]["query.weight"]["smoothing"] = broken
        path.write_text(json.dumps(content))
        with pytest.raises(dbrq.RecipeError, match=r"query\.weight"):
            dbrq.load_recipe(dbrq.prepare(model, data[0]), path)
