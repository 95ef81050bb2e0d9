"""Odd data: no samples, constants, infinities, channels of zeros; in calibration and at run time."""

import pytest
import torch
from torch import nn

import dbrq
from dbrq import CalibrationError, NotCalibratedError
from dbrq.hidden_state import state_of
from tests.helpers.images import small_images
from tests.helpers.judging import assert_matches, sqnr
from tests.helpers.models import Call
from tests.helpers.phases import X, in_phase, net
from tests.helpers.running import convert, run


def qparams(model: nn.Module) -> dict:
    token = state_of(model).token
    return {key: state.qparams(key) for state in token.states.values() for key in state.slots}


# Ranges


@pytest.mark.parametrize("cls, shape", [(nn.Conv2d, (4, 8, 8)), (nn.Linear, (8,))])
@pytest.mark.parametrize("channels", [[0], [0, 3], list(range(6))])
def test_channels_of_zeros_in_a_weight(cls, shape, channels):
    first = cls(4, 6, 3) if cls is nn.Conv2d else cls(8, 6)
    with torch.no_grad():
        first.weight[channels] = 0.0
    last = nn.Conv2d(6, 3, 1) if cls is nn.Conv2d else nn.Linear(6, 3)
    model = nn.Sequential(first, nn.ReLU(), last)
    converted = assert_matches(model, torch.randn(2, *shape), fx=False)
    assert (converted[0].weight_scale > 0).all() and torch.isfinite(converted[0].weight_scale).all()
    assert (converted[0].weight_int8[channels] == 0).all()


def test_tiny_and_huge_channels_side_by_side():
    conv = nn.Conv2d(4, 6, 3)
    with torch.no_grad():
        conv.weight[0] *= 1e-30
        conv.weight[1] *= 1e20
        conv.bias.zero_()
    x = small_images()
    converted = convert(nn.Sequential(conv), x).quantized
    a, b = run(nn.Sequential(conv), x), run(converted, x)
    assert torch.isfinite(b).all()
    for channel in (1, 2):
        assert sqnr(a[:, channel], b[:, channel]) > 25


@pytest.mark.parametrize("variance", [0.0, 1e-12, 1e12])
@pytest.mark.parametrize("gamma", [0.0, 1.0, -1.0])
def test_batch_norm_with_dead_channels(variance, gamma):
    norm = nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.running_var[1] = variance
        norm.weight[1] = gamma
    model = nn.Sequential(nn.Conv2d(4, 6, 3), norm, nn.ReLU())
    x = small_images()
    converted = convert(model, x).quantized
    got, expected = run(converted, x), run(model, x)
    assert torch.isfinite(got).all()
    for channel in range(6):
        a, b = expected[:, channel], got[:, channel]
        assert torch.allclose(a, b, atol=0.05 * (a.abs().max().item() + 1e-3))


@pytest.mark.parametrize("value", [0.0, 1.0, -4.0, 1e-20, 1e20])
def test_constant_input(value):
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    x = torch.full((2, 4, 8, 8), value)
    converted = convert(model, x).quantized
    assert all(q.scale > 0 for q in qparams(converted).values())
    got = run(converted, x)
    assert torch.isfinite(got).all()
    assert torch.allclose(got, run(model, x), atol=0.05 * (1 + abs(value)), rtol=0.05)


def test_calibration_on_one_sample():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    x = small_images(1, 4, 8, 8)
    converted = assert_matches(model, x)
    other = small_images(8, 4, 8, 8)
    assert sqnr(run(model, other), run(converted, other)) > 15


def test_calibration_on_one_number():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    converted = convert(model, torch.tensor([[0.5]])).quantized
    assert torch.allclose(run(converted, torch.tensor([[0.5]])), run(model, torch.tensor([[0.5]])), atol=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_in_calibration_names_the_op(value):
    model = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)).eval()
    prepared = dbrq.prepare(model, small_images())
    bad = small_images()
    bad[0, 0, 0, 0] = value
    with pytest.raises(dbrq.CalibrationError) as error:
        dbrq.calibrate(prepared, [bad])
    assert error.value.op == "0"
    x = small_images()
    dbrq.calibrate(prepared, [x])
    assert sqnr(run(model, x), run(dbrq.convert(prepared), x)) > 25, "the observers were not spoiled"


def test_a_module_never_reached():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.rarely = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, rare=False):
            return self.rarely(x) if rare else self.often(x)

    model = Rare().eval()
    converted = convert(model, torch.randn(2, 4)).quantized
    row = next(r for r in dbrq.report(converted).rows if r.path == "rarely")
    assert row.precision == "float" and "never reached" in row.reason
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match="dbrq: rarely runs in float"):
        assert torch.equal(run(converted, (x, True)), run(model, (x, True)))


# At run time


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_at_run_time_is_no_crash(value):
    model = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    converted = convert(model, small_images()).quantized
    bad = small_images()
    bad[0] = value
    assert run(converted, bad).shape == run(model, bad).shape


# What ``calibrate`` and models take


BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


@pytest.mark.parametrize("value", list(BAD.values()), ids=list(BAD))
def test_nan_or_infinity_in_calibration_is_a_clear_error(value):
    prepared = dbrq.prepare(net(), X)
    bad = X.clone()
    bad[1, 2, 3, 4] = value
    with pytest.raises(CalibrationError) as caught:
        dbrq.calibrate(prepared, [X, bad])
    assert caught.value.op and ("NaN" in str(caught.value) or "finite" in str(caught.value))
    run(prepared, X)
    assert torch.isfinite(run(dbrq.convert(prepared), X)).all()


def test_infinity_inside_a_mask_is_fine():
    """What no int8 op reads may be infinite."""
    model = Call(lambda m, x: m.out(torch.softmax(m.linear(x) + m.mask, -1)), linear=nn.Linear(16, 16),
                 out=nn.Linear(16, 4),
                 mask=torch.full((16, 16), -float("inf")).triu(1))  # fmt: skip
    converted = convert(model, torch.randn(16, 16)).quantized
    assert torch.isfinite(run(converted, torch.randn(16, 16))).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30, 1e-40])
def test_odd_values_at_run_time_do_no_harm(value):
    converted = in_phase("quantized", net, X)
    expected, odd = run(converted, X), X.clone()
    odd[0, 0, 0, 0] = value
    run(converted, odd)
    assert torch.equal(run(converted, X), expected)


def test_zero_batches():
    prepared = dbrq.prepare(net(), X)
    assert dbrq.calibrate(prepared, []) is prepared
    with pytest.raises(NotCalibratedError, match="calibrate"):
        dbrq.convert(prepared)
    with pytest.raises(NotCalibratedError):
        dbrq.quantize(net(), [])


def test_a_batch_of_none_in_calibration():
    prepared = dbrq.prepare(net(), X)
    run(prepared, X[:0])
    with pytest.raises(NotCalibratedError):
        dbrq.convert(prepared)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-30, 1e30])
def test_constant_input_gives_a_scale_that_is_sane(value):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    x = torch.full((4, 8), value)
    converted = convert(model, x).quantized
    for state in (converted._auto_quant_state,):
        assert (state.scale > 0).all() and torch.isfinite(state.scale).all()
    got, expected = run(converted, x), run(model, x)
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max() <= 0.03 * expected.abs().max() + 1e-6


def test_one_sample():
    converted = dbrq.quantize(net(), [X[:1]])
    assert sqnr(run(net(), X[:1]), run(converted, X[:1])) > 20


def test_batch_zero():
    converted = in_phase("quantized", net, X)
    out = run(converted, X[:0])
    assert out.shape == (0, 16) and out.dtype is torch.float32
    assert torch.isfinite(run(converted, X)).all()


def test_calibrate_takes_items_as_prepare_does_and_unpacks():
    prepared = dbrq.prepare(net(), X)
    data = [(X, 1), (X * 2, 0), (X * 1000, 0)]
    dbrq.calibrate(prepared, data, unpack=lambda item: item[0], max_batches=2, progress=False)
    other = dbrq.prepare(net(), X)
    dbrq.calibrate(other, iter([X, {"x": X * 2}]))
    assert torch.equal(run(dbrq.convert(prepared), X), run(dbrq.convert(other), X))


def test_calibrate_stops_reading_at_max_batches():
    prepared, taken = dbrq.prepare(net(), X), []

    def endless():
        while True:
            taken.append(1)
            yield X

    dbrq.calibrate(prepared, endless(), max_batches=3)
    assert len(taken) <= 3
    assert dbrq.quantize(net(), endless(), max_batches=2) is not None
