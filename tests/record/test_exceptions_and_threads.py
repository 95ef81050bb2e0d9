"""Exceptions leave no half path, and threads on different paths do not disturb each other."""

import copy
import sys
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.control_flow.cases import CASES, trips
from tests.helpers.control_flow.runs import Named, Off, Run
from tests.helpers.judging import assert_same_tree
from tests.helpers.paths import (
    GOOD,
    assert_equal,
    assert_int8,
    assert_warned,
    calibrated,
    call,
    float_model,
    fresh,
    heard,
    quantized_model,
    worst,
)

# Exceptions


@dataclass
class Trap:
    """Raises when armed."""

    armed: bool = False

    def __call__(self, h):
        if self.armed:
            raise ValueError("of the user's own")
        return h


class Trapped(Named):
    """An exception leaves forward after some of its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.trap = Trap()

    def forward(self, x, long):
        h = torch.relu(self.a(x))
        if long:
            h = torch.relu(self.b(h))
        h = self.trap(h)
        return self.out(self.c(h))


@pytest.mark.parametrize("long", [True, False])
def test_an_exception_in_calibration_leaves_no_half_path(long):
    model, runs = Trapped().eval(), trips(False, True)
    prepared = dbrq.prepare(model, runs[0].args)
    call(prepared, runs[0])
    prepared.trap.armed = True
    for _ in range(2):
        with pytest.raises(ValueError, match="of the user's own"):
            call(prepared, runs[long])
    prepared.trap.armed = False
    assert_same_tree(call(prepared, runs[1]), call(model, runs[1]), "prepared")
    quantized = dbrq.convert(prepared)
    for run in runs:
        assert_int8(model, quantized, run)
    root = [row for row in dbrq.report(quantized).paths if row.module == ""]
    assert len(root) == 2 and [row.seen for row in root] == [1, 1]
    assert torch.overrides._get_current_function_mode() is None


def test_an_exception_in_the_only_calibration_of_a_path():
    """What ran before it may serve or run in float; it is right either way, and recorded paths stay what they were."""
    model, runs = Trapped().eval(), trips(False, True)
    prepared = calibrated(model, runs[:1])
    prepared.trap.armed = True
    with pytest.raises(ValueError, match="of the user's own"):
        call(prepared, runs[1])
    prepared.trap.armed = False
    quantized = dbrq.convert(prepared)
    assert_int8(model, quantized, runs[0])
    got, messages = heard(quantized, runs[1])
    assert worst(call(model, runs[1]), got) >= GOOD
    assert_warned(messages, Off(runs[1], None))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_in_a_converted_model_leaves_it_usable(strict):
    model, runs = Trapped().eval(), trips(False, True)
    quantized = dbrq.convert(calibrated(model, runs), strict=strict)
    expected = [call(quantized, run) for run in runs]
    quantized.trap.armed = True
    for run in runs:
        with pytest.raises(ValueError, match="of the user's own"):
            call(quantized, run)
    quantized.trap.armed = False
    for run, before in zip(runs, expected, strict=True):
        assert_equal(call(quantized, run), before)
    assert torch.overrides._get_current_function_mode() is None


# Threads


@pytest.mark.parametrize("name", ["branch on data", "module body", "tree", "two calls of a child", "router, top k"])
def test_threads_on_different_paths(name):
    case, quantized = CASES[name], quantized_model(name)
    runs = [*case.recorded, *case.served]
    expected = [call(quantized, run) for run in runs]
    wrong: list = []
    barrier = threading.Barrier(len(runs))

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(15):
                assert_equal(call(quantized, runs[number]), expected[number])
        except BaseException as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(runs))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_thread_on_an_unrecorded_path_disturbs_no_other():
    name = "branch on data, one side recorded"
    case, quantized = CASES[name], fresh(name)
    model, runs = float_model(name), [case.recorded[0], case.off[0].run]
    expected, wrong = call(quantized, runs[0]), []

    def work(number: int) -> None:
        try:
            for _ in range(15):
                got = call(quantized, runs[number])
                if number:
                    assert worst(call(model, runs[1]), got) >= GOOD
                else:
                    assert_equal(got, expected)
        except BaseException as error:
            wrong.append((number, error))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1, 0, 1)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not wrong


def test_threads_that_come_first_make_the_hooks_together():
    case, quantized = CASES["module body"], quantized_model("module body")
    runs = [*case.recorded, *case.served]
    expected = [call(quantized, run) for run in runs]
    for _ in range(5):
        assert not in_threads(runs, copy.deepcopy(quantized), expected)


@pytest.mark.parametrize("name", ["branch on data", "module body", "tree", "two calls of a child", "router, top k"])
def test_threads_calibrate_one_model(name):
    case, model = CASES[name], float_model(name)
    prepared = dbrq.prepare(model, case.recorded[0].args)
    runs = [run for run in case.recorded if not run.attributes]
    assert not in_threads(runs, prepared)
    quantized = dbrq.convert(prepared)
    for run in runs:
        assert_int8(model, quantized, run)


def in_threads(runs: list[Run], model: nn.Module, expected: list | None = None) -> list:
    """Each run in a thread of its own, all at once, switching often; what went wrong."""
    wrong: list = []
    barrier = threading.Barrier(len(runs))

    def work(number: int) -> None:
        try:
            barrier.wait()
            got = call(model, runs[number])
            if expected is not None:
                assert_equal(got, expected[number])
        except BaseException as error:
            wrong.append((number, error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(runs))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(interval)
    return wrong
