"""Models that take several paths: each recorded one runs in int8.

The models and their runs are in ``helpers/control_flow/``. int8 kernels are counted by torch's profiler, so
that the count holds whatever calls them.
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.ao.quantization import QConfigMapping, per_channel_dynamic_qconfig
from torch.overrides import TorchFunctionMode

import dbrq
from tests.helpers.control_flow.cases import CASES
from tests.helpers.control_flow.runs import Case, Off
from tests.helpers.judging import assert_same_tree
from tests.helpers.paths import (
    GOOD,
    SHARING,
    assert_equal,
    assert_int8,
    assert_warned,
    by_call,
    calibrated,
    call,
    cases,
    float_model,
    heard,
    prepared_model,
    quantized_model,
    saved,
    scaled,
    table,
    with_served,
    with_several,
    worst,
)
from tests.helpers.running import floats

# Recorded paths


@cases
def test_calibration_follows_the_float_model_wherever_it_goes(name):
    case, model = CASES[name], float_model(name)
    prepared = dbrq.prepare(model, case.recorded[0].args)
    for run in (*case.recorded, *case.served, *(off.run for off in case.off)):
        got, messages = heard(prepared, run)
        assert not messages
        assert_same_tree(got, call(model, run), "prepared")


@cases
def test_recorded_paths_run_in_int8(name):
    quantized = quantized_model(name)
    for run in CASES[name].recorded:
        assert_int8(float_model(name), quantized, run)
    assert dbrq.report(quantized).coverage > 0.9, str(dbrq.report(quantized))


class FakeQuantize(TorchFunctionMode):
    """Rounds the weights of convolutions and linear layers per channel, and what they read and write by its range.

    Nothing of dbrq takes part, no record and no qparams: each value has the range it has.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (F.linear, torch.conv2d):
            return func(*args, **(kwargs or {}))
        x, weight, *rest = args
        scale = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.dim() - 1)) / 127
        return rounded(func(rounded(x), (weight / scale).round() * scale, *rest, **(kwargs or {})))


def rounded(x: Tensor) -> Tensor:
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-12)
    return (x / scale).round() * scale


@cases
def test_recorded_paths_are_near_fake_quantization(name):
    model, quantized = float_model(name), quantized_model(name)
    for run in CASES[name].recorded:
        expected = call(model, run)
        with FakeQuantize():
            reference = call(model, run)
        assert worst(expected, call(quantized, run)) >= min(worst(expected, reference), 60) - SHARING


@with_several
def test_a_path_is_as_good_as_recorded_alone(name):
    model, quantized = float_model(name), quantized_model(name)
    for run in CASES[name].recorded:
        alone = dbrq.convert(calibrated(model, [run, run])) if not run.attributes else None
        if alone is None or not floats(expected := call(model, run)):
            continue
        assert worst(expected, call(quantized, run)) >= min(worst(expected, call(alone, run)) - SHARING, 60)


@with_several
def test_the_order_of_paths_does_not_matter(name):
    quantized, runs = quantized_model(name), CASES[name].recorded
    first = [call(quantized, run) for run in runs]
    for order in itertools.islice(itertools.permutations(range(len(runs))), 1, 6):
        for number in order:
            assert_equal(call(quantized, runs[number]), first[number])


@with_served
def test_other_trip_counts_run_in_int8(name):
    quantized = quantized_model(name)
    for run in CASES[name].served:
        assert_int8(float_model(name), quantized, run)
    for run in CASES[name].recorded:
        assert_int8(float_model(name), quantized, run)


@cases
def test_the_dynamic_recipe_takes_the_same_paths(name):
    case, model = CASES[name], float_model(name)
    mapping = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    quantized = dbrq.convert(calibrated(model, case.recorded, mapping))
    for run in (*case.recorded, *case.served):
        got, messages = heard(quantized, run)
        assert not messages
        assert worst(call(model, run), got) >= GOOD
    for off in case.off:
        got, messages = heard(quantized, off.run)
        assert worst(call(model, off.run), got) >= GOOD
        assert_warned(messages, Off(off.run, None))
        assert not heard(quantized, off.run)[1]


@cases
def test_paths_are_reported(name):
    case = CASES[name]
    for model in (prepared_model(name), quantized_model(name)):
        rows = dbrq.report(model).paths
        assert isinstance(rows, tuple)
        root = [row for row in rows if row.module == ""]
        assert {row.call for row in root} >= {0}
        assert sum(row.seen for row in root if row.call == 0) == len(case.recorded)
        if case.paths is not None:
            assert len(root) == case.paths, dbrq.report(model)
        for group in by_call(rows).values():
            assert [row.number for row in group] == list(range(len(group)))
            assert all(0 <= row.shared <= row.ops for row in group)
            assert len(group) > 1 or group[0].shared == 0
            assert 1 <= sum(row.seen for row in group) <= len(case.recorded)
        several = any(len(group) > 1 for group in by_call(rows).values())
        assert ("paths" in str(dbrq.report(model))) is several


COPIES = {
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "save": saved,
}


@cases
def test_copies_and_files_keep_the_paths(name, tmp_path):
    case, quantized = CASES[name], quantized_model(name)
    for copied in COPIES.values():
        other = copied(quantized, tmp_path)
        assert table(other) == table(quantized)
        for run in (*case.recorded, *case.served):
            got, messages = heard(other, run)
            assert not messages
            assert_equal(got, call(quantized, run))


@cases
def test_a_copy_of_a_prepared_model_goes_on_recording(name):
    case, model = CASES[name], float_model(name)
    prepared = dbrq.prepare(model, case.recorded[0].args)
    call(prepared, case.recorded[0])
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        for run in case.recorded[1:]:
            call(other, run)
        quantized = dbrq.convert(other)
        assert table(quantized) == table(prepared_model(name))
        for run in case.recorded:
            assert_equal(call(quantized, run), call(quantized_model(name), run))
    assert sum(row.seen for row in dbrq.report(prepared).paths if (row.module, row.call) == ("", 0)) == 1


@cases
def test_a_state_dict_carries_every_path(name):
    """Into a copy of other weights and ranges, calibrated on the same paths."""
    case, quantized = CASES[name], quantized_model(name)
    torch.manual_seed(1)
    other = case.make().eval()
    target = dbrq.convert(calibrated(other, [scaled(run, 2.0) for run in case.recorded]))
    result = target.load_state_dict(quantized.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    for run in case.recorded:
        assert_equal(call(target, run), call(quantized, run))


# Everything at once


def test_a_path_recorded_late_does_not_change_what_came_before():
    """Converted before and after another path was recorded: the first path's own layers are as good."""
    model, runs = float_model("branches that meet in linear"), CASES["branches that meet in linear"].recorded
    prepared = calibrated(model, runs[:1])
    early = dbrq.convert(prepared)
    call(prepared, runs[1])
    late = dbrq.convert(prepared)
    assert_int8(model, early, runs[0])
    assert_int8(model, late, runs[0])
    assert_int8(model, late, runs[1])
    assert heard(early, runs[1])[1], "the converted model does not share what its prepared one learns"


def test_the_path_of_prepare_is_not_one_of_calibration():
    """What prepare watched has no ranges if calibration only went elsewhere: it runs, in float where it must."""
    name = "branches that meet in linear"
    model, runs = float_model(name), CASES[name].recorded
    prepared = dbrq.prepare(model, runs[0].args)
    call(prepared, runs[1])
    quantized = dbrq.convert(prepared)
    assert_int8(model, quantized, runs[1])
    got, messages = heard(quantized, runs[0])
    assert worst(call(model, runs[0]), got) >= GOOD
    assert_warned(messages, Off(runs[0], None))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradient_modes(context):
    case, model, quantized = CASES["containers"], float_model("containers"), quantized_model("containers")
    for run in case.recorded:
        expected = call(quantized, run)
        with context():
            assert_equal(quantized(*copy.deepcopy(run.args)), expected)
        assert worst(call(model, run), expected) >= GOOD


def test_the_table_is_large_and_varied():
    """So that a case lost in an edit is noticed."""
    assert len(CASES) >= 50 and all(isinstance(case, Case) and case.recorded for case in CASES.values())
    assert sum(bool(case.off) for case in CASES.values()) >= 25
    assert sum(bool(case.served) for case in CASES.values()) >= 10
