"""Paths never recorded: the model is right, and says once what runs in float, or raises where strict."""

import pytest
import torch
import torch.nn.functional as F

import dbrq
from dbrq import DeviationError
from tests.helpers.control_flow.cases import CASES, trips
from tests.helpers.control_flow.runs import D, Named, Off
from tests.helpers.paths import (
    GOOD,
    assert_equal,
    assert_int8,
    assert_warned,
    calibrated,
    call,
    float_calls,
    float_model,
    fresh,
    heard,
    kernel_calls,
    quantized_model,
    with_off,
    with_several,
    worst,
)


@with_off
def test_an_unrecorded_path_is_right_and_says_once_what_runs_in_float(name):
    case, model = CASES[name], float_model(name)
    for off in case.off:
        quantized = fresh(name)
        expected = call(model, off.run)
        got, messages = heard(quantized, off.run)
        assert worst(expected, got) >= GOOD
        assert_warned(messages, off)
        again, messages = heard(quantized, off.run)
        assert not messages, f"told again: {messages}"
        assert_equal(again, got)
        if off.warns is not None:
            needed = kernel_calls(model, off.run)[1] - float_calls(model, off)
            assert kernel_calls(quantized, off.run)[0] >= needed, "recorded ops run in int8 on other paths too"
        for run in case.recorded:
            assert_int8(model, quantized, run)


@with_several
def test_whichever_run_is_left_out_of_calibration_is_right(name):
    case, model = CASES[name], float_model(name)
    for left_out in case.recorded[1:]:
        kept = [run for run in case.recorded if run is not left_out]
        quantized = dbrq.convert(calibrated(model, kept))
        got, messages = heard(quantized, left_out)
        assert worst(call(model, left_out), got) >= GOOD
        assert_warned(messages, Off(left_out, None))
        assert not heard(quantized, left_out)[1]
        for run in kept:
            assert not heard(quantized, run)[1]


@with_off
def test_strict_raises_and_the_model_works_on(name):
    case = CASES[name]
    strict, relaxed = fresh(name, strict=True), quantized_model(name)
    for off in case.off:
        if not off.warns:
            continue
        with pytest.raises(DeviationError) as caught:
            call(strict, off.run)
        assert str(caught.value)
        for run in case.recorded:
            got, messages = heard(strict, run)
            assert not messages
            assert_equal(got, call(relaxed, run))


def test_strict_models_say_nothing_about_recorded_paths():
    for name in ("branch on data", "containers", "router, top k", "tree"):
        strict = fresh(name, strict=True)
        for run in CASES[name].recorded:
            assert not heard(strict, run)[1]


def test_two_new_ops_and_two_modules_are_told_apart():
    model, quantized = float_model("early exit"), fresh("early exit")
    one, two = (off.run for off in CASES["early exit"].off)
    assert len(heard(quantized, one)[1]) == 1
    assert len(heard(quantized, two)[1]) == 1
    assert not heard(quantized, one)[1] and not heard(quantized, two)[1]
    assert worst(call(model, two), call(quantized, two)) >= GOOD


def test_a_new_op_in_a_loop_is_told_once():
    class Loop(Named):
        def forward(self, x, trips, new):
            h = torch.relu(self.a(x))
            for _ in range(trips):
                if new:
                    h = self.c(h) * 0.5
            return self.out(h)

    model = Loop().eval()
    quantized = dbrq.convert(calibrated(model, trips((2, False))))
    for count in (3, 2, 5):
        got, messages = heard(quantized, run := trips((count, True))[0])
        assert worst(call(model, run), got) >= GOOD
        assert_warned(messages, Off(run, (("c", ""), ("", "mul"), ("out", "")) if count == 3 else ()))


FLOAT_ONLY = {
    "softmax": lambda h: torch.softmax(h, -1),
    "layer_norm": lambda h: F.layer_norm(h, (D,)),
    "exp": lambda h: torch.exp(h.clamp_max(1.0)),
    "code between": lambda h: h.cumsum(-1),
    "numbers": lambda h: h if float(h.abs().sum()) >= 0 else -h,
}


@pytest.mark.parametrize("op", list(FLOAT_ONLY))
def test_ops_without_a_kernel_never_warn(op):
    class Ends(Named):
        """The op's result is not read by an int8 op."""

        def forward(self, x, new):
            h = self.out(torch.relu(self.a(x)))
            return FLOAT_ONLY[op](h) if new else h

    model = Ends().eval()
    quantized = dbrq.convert(calibrated(model, trips(False, False)))
    run = trips(True, seed=3)[0]
    got, messages = heard(quantized, run)
    assert not messages
    assert worst(call(model, run), got) >= GOOD
