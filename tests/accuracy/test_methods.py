"""What each method of a preset does: less error on data that it has not seen, on every backend, and nothing else."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq import Preset
from dbrq.accuracy.presets import PRESETS
from dbrq.inspection.comparing import sqnr

from .models import Convolutions, Functional, Outliers, batches

TOKENS, IMAGES = (4, 16, 64), (2, 3, 12, 12)


def converted(model: nn.Module, preset: Preset | str, data: list[Tensor]) -> nn.Module:
    prepared = dbrq.prepare(model, data[0], preset=preset)
    return dbrq.convert(dbrq.calibrate(prepared, data))


def gained(model: nn.Module, preset: Preset, shape: tuple[int, ...]) -> float:
    """dB that a preset gains on data that calibration has not seen."""
    *data, test = batches(*shape, count=9)
    with torch.no_grad():
        expected = model.eval()(test)
    before, after = (converted(model, each, data)(test) for each in ("fast", preset))
    return sqnr(expected, after) - sqnr(expected, before)


@pytest.mark.parametrize("make", [Outliers, Functional])
def test_smoothing_mends_wide_channels(make: Callable[[], nn.Module]) -> None:
    assert gained(make(), Preset(smoothing=True), TOKENS) > 6


def test_smoothing_is_off_where_it_does_not_help() -> None:
    model, data = nn.Sequential(nn.Linear(64, 32), nn.Tanh()), batches(*TOKENS)
    quantized = converted(model, Preset(smoothing=True), data)
    assert not [name for name, _ in quantized.named_buffers() if name.endswith("smoothing")]
    assert torch.equal(quantized(data[0]), converted(model, "fast", data)(data[0]))


def test_layers_that_read_one_value_share_factors() -> None:
    quantized = converted(Outliers(), Preset(smoothing=True), batches(*TOKENS))
    assert quantized.query.weight_smoothing is quantized.key.weight_smoothing  # type: ignore[union-attr]  # converted


def test_a_smoothed_weight_is_the_weight_in_float() -> None:
    model = Outliers()
    quantized = converted(model, Preset(smoothing=True), batches(*TOKENS))
    weight: Tensor = quantized.query.weight + 0  # type: ignore[union-attr,assignment,operator]  # float on demand
    assert sqnr(model.query.weight, weight) > 25


def test_a_smoothed_layer_reads_values_of_unknown_origin_rightly() -> None:
    model = Outliers().eval()
    x = torch.sigmoid(batches(*TOKENS)[0])
    with torch.no_grad():
        expected = model.query(x)
        plain, smoothed = (converted(model, p, batches(*TOKENS)).query(x) for p in (Preset(), Preset(smoothing=True)))  # type: ignore[operator]  # a layer
    assert sqnr(expected, smoothed) > sqnr(expected, plain)


BACKENDS = ["torchscript", "onednn", "inductor"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [Outliers, Functional])
def test_lowered_models_agree_with_smoothed_ones(make: Callable[[], nn.Module], backend: str) -> None:
    if backend == "onednn":
        pytest.importorskip("dbrq.lowering.onednn")
    *data, x = batches(*TOKENS)
    quantized = converted(make(), "transformer", data)
    lowered = dbrq.lower(quantized, x, backend=backend)
    assert sqnr(quantized(x), lowered(x)) > 40
    assert sqnr(quantized(x[:2, :5]), lowered(x[:2, :5])) > 40


def test_smoothed_models_are_copied_and_saved(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    *data, x = batches(*TOKENS)
    quantized = converted(Outliers(), "transformer", data)
    expected = quantized(x)
    assert torch.equal(copy.deepcopy(quantized)(x), expected)
    for name in ("model.pt", "model.safetensors"):
        dbrq.save(quantized, tmp_path / name)
        assert torch.equal(dbrq.load(tmp_path / name)(x), expected)
    other = converted(Outliers(), "transformer", data)
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(x), expected)


def test_other_weights_bring_their_factors() -> None:
    *data, x = batches(*TOKENS)
    torch.manual_seed(1)
    one, other = (converted(Outliers(), "transformer", [scale * d for d in data]) for scale in (1, 3))
    assert not torch.equal(one.query.weight_smoothing, other.query.weight_smoothing)  # type: ignore[union-attr,arg-type]  # converted
    expected = other(x)
    one(x)
    one.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(one(x), expected)


def test_smoothed_models_go_to_onnx(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    runtime = pytest.importorskip("onnxruntime")
    *data, x = batches(*TOKENS)
    quantized = converted(Outliers(), "transformer", data)
    dbrq.export_onnx(quantized, x, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert sqnr(quantized(x), torch.from_numpy(found)) > 30


def test_a_state_dict_with_broken_factors_is_refused() -> None:
    quantized = converted(Outliers(), "transformer", batches(*TOKENS))
    state = quantized.state_dict()
    state["query.weight_smoothing"] = -state["query.weight_smoothing"]
    with pytest.raises(dbrq.LoadError, match="weight_smoothing"):
        quantized.load_state_dict(state)


def shifted() -> nn.Module:
    """A layer whose rounding errors do not cancel: what it reads has a large mean."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Softplus(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8))
    with torch.no_grad():
        model[1].weight.mul_(torch.logspace(-2, 0, 64)[torch.randperm(64)])
    return model


@pytest.mark.parametrize("how", ["fast", "full"])
def test_bias_correction_takes_away_mean_errors(how: str) -> None:
    model, (*data, test) = shifted().eval(), batches(256, 64, count=9)
    with torch.no_grad():
        expected = model(test)

    def mean_error(preset: Preset) -> float:
        return float((converted(model, preset, data)(test) - expected).mean(0).norm())

    assert mean_error(Preset(bias_correction=how)) < 0.6 * mean_error(Preset())


def test_bias_correction_gives_layers_without_bias_one() -> None:
    model = nn.Sequential(nn.Softplus(), nn.Linear(64, 8, bias=False)).eval()
    with torch.no_grad():
        model[1].weight.mul_(torch.logspace(-2, 0, 64))
    *data, x = batches(256, 64)
    quantized = converted(model, Preset(bias_correction="fast"), data)
    assert quantized[1].bias is not None and model[1].bias is None  # type: ignore[index]  # a Sequential
    lowered = dbrq.lower(quantized, x)
    assert sqnr(quantized(x), lowered(x)) > 40


def test_equalization_makes_the_channels_of_a_depthwise_network_alike() -> None:
    assert gained(Convolutions(), Preset(equalization=True), IMAGES) > 1


def test_equalization_changes_no_number_in_float() -> None:
    *data, x = batches(*IMAGES)
    model = Convolutions().eval()
    quantized = converted(model, Preset(equalization=True, keep=("conv2",)), data)
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 25
    assert not torch.equal(quantized.norm1.weight, model.norm1.weight)


@pytest.mark.parametrize("method", ["gptq", "adaround"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_rounding_by_the_output_beats_the_nearest(method: str, kind: str) -> None:
    """Inputs whose channels move together, where errors can make up for each other; weights of few levels."""
    torch.manual_seed(0)
    mix = torch.randn(6, 32) + 0.1 * torch.randn(6, 32)
    few = torch.ao.quantization.QConfig(
        activation=dbrq.HistogramObserver,
        weight=torch.ao.quantization.PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-8, quant_max=7
        ),
    )
    if kind == "linear":
        model: nn.Module = nn.Linear(32, 16).eval()
        data = [torch.randn(128, 6) @ mix for _ in range(7)]
    else:
        model = nn.Conv2d(32, 16, 1).eval()
        data = [(torch.randn(4, 8, 8, 6) @ mix).permute(0, 3, 1, 2) for _ in range(7)]
    test = data.pop()
    errors = []
    for rounding in ("nearest", method):
        prepared = dbrq.prepare(model, data[0], few, preset=Preset(rounding=rounding))
        quantized = dbrq.convert(dbrq.calibrate(prepared, data))
        errors.append((quantized(test) - model(test)).norm().item())
        assert int(quantized.weight_int8.min()) >= -8 and int(quantized.weight_int8.max()) <= 7
    assert errors[1] < 0.85 * errors[0]


def test_ranges_by_percentile_leave_the_tails_out() -> None:
    data = batches(512, 8)
    data[0][0, 0] = 1000.0
    model = nn.Linear(8, 4)
    wide, narrow = (converted(model, Preset(ranges=share), data) for share in (100.0, 99.9))
    scales = [float(q._auto_quant_state.scale[0]) for q in (wide, narrow)]
    assert scales[0] == pytest.approx(1004 / 255, rel=0.02) and scales[1] < 0.05


def test_ranges_by_output_are_no_worse() -> None:
    assert gained(Outliers(), Preset(ranges="output"), TOKENS) > -0.2
    assert gained(Convolutions(), Preset(ranges="output"), IMAGES) > -0.2


def test_the_methods_work_together() -> None:
    assert gained(Outliers(), PRESETS["accurate"], TOKENS) > 6
    assert gained(Convolutions(), PRESETS["accurate"], IMAGES) > 0.8


def test_a_shared_layer_gets_one_set_of_factors() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64)
            with torch.no_grad():
                self.norm.weight[7] *= 70

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(torch.tanh(self.layer(self.norm(x)))))

    *data, x = batches(*TOKENS)
    model = Twice().eval()
    quantized = converted(model, "transformer", data)
    assert sqnr(model(x), quantized(x)) > 25
    lowered = dbrq.lower(quantized, x)
    assert sqnr(quantized(x), lowered(x)) > 40
