"""Models that take several paths: each recorded one runs in int8, any other one runs correctly, and says so once.

The models and their runs are in ``control_flow_models.py``. int8 kernels are counted by torch's profiler, so that the
count holds whatever calls them.
"""

import contextlib
import copy
import functools
import itertools
import pickle
import re
import sys
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, per_channel_dynamic_qconfig
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode

import dbrq
from dbrq import DeviationError
from tests.control_flow_models import CASES, Case, D, Named, Off, Run, data, even, linears, trips
from tests.helpers import assert_same_containers, assert_same_tree, floats, sqnr

#: dB against float that any path of these small random networks must reach.
GOOD = 20
#: dB that a path may lose for sharing ranges with other paths.
SHARING = 12


def call(model, run: Run):
    """One call under ``no_grad`` on copies of the arguments, attributes set for the call."""
    before = {name: getattr(model, name) for name in run.attributes}
    for name, value in run.attributes.items():
        setattr(model, name, value)
    try:
        with torch.no_grad():
            return model(*copy.deepcopy(run.args))
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def heard(model, run: Run) -> tuple[object, list[str]]:
    """The output of one call, and the texts of dbrq's warnings, repeated ones too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = call(model, run)
    ours = [w for w in caught if str(w.message).startswith("dbrq")]
    assert all(issubclass(w.category, UserWarning) for w in ours)
    return output, [str(w.message) for w in ours]


def kernel_calls(model, run: Run) -> tuple[int, int]:
    """How many convolutions and linear layers one call computes in int8, and how many in float."""
    with profile() as profiled, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(model, run)
    names = Counter(event.name for event in profiled.function_events)
    int8 = sum(names[f"onednn::q{op}_pointwise"] for op in ("conv", "conv1d", "conv2d", "conv3d", "linear"))
    return int8, names["aten::linear"] + names["aten::convolution"]


def worst(expected, got) -> float:
    """The lowest SQNR among the float tensors of two outputs of one structure; integers are equal."""
    assert_same_containers(got, expected)
    if isinstance(expected, Tensor) and not expected.is_floating_point():
        assert torch.equal(got, expected)
    return min((sqnr(a, b) for a, b in zip(floats(expected), floats(got), strict=True)), default=float("inf"))


@functools.cache
def float_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().eval()


def calibrated(model: nn.Module, runs, qconfig_mapping=None) -> nn.Module:
    prepared = dbrq.prepare(model, runs[0].args, qconfig_mapping)
    for run in runs:
        call(prepared, run)
    return prepared


@functools.cache
def prepared_model(name: str) -> nn.Module:
    """Calibrated on every recorded run once. Not to be run again."""
    return calibrated(float_model(name), CASES[name].recorded)


@functools.cache
def quantized_model(name: str) -> nn.Module:
    """Converted once; stays on the recorded paths."""
    return dbrq.convert(prepared_model(name))


def fresh(name: str, **options) -> nn.Module:
    """Converted anew: what has warned of nothing yet."""
    return dbrq.convert(prepared_model(name), **options)


def assert_int8(model: nn.Module, quantized: nn.Module, run: Run, bound: float = GOOD) -> None:
    """Silent, close to float, and every convolution and linear layer in int8."""
    expected = call(model, run)
    got, messages = heard(quantized, run)
    assert not messages, f"a recorded path warns: {messages}\n{dbrq.report(quantized)}"
    assert worst(expected, got) >= bound
    int8, in_float = kernel_calls(quantized, run)
    assert in_float == 0, f"{in_float} layers ran in float, {int8} in int8\n{dbrq.report(quantized)}"
    if floats(expected):  # else nothing needs to be computed
        assert int8 >= kernel_calls(model, run)[1]


cases = pytest.mark.parametrize("name", list(CASES))
with_off = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.off])
with_served = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.served])
with_several = pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.recorded) > 1])


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


def by_call(rows) -> dict:
    """Rows of each module call, in the order of their numbers."""
    groups: dict[tuple[str, int], list] = {}
    for row in rows:
        groups.setdefault((row.module, row.call), []).append(row)
    return {key: sorted(group, key=lambda row: row.number) for key, group in groups.items()}


def table(model) -> list[tuple]:
    """The report's paths as plain values."""
    return [(r.module, r.call, r.number, r.seen, r.ops, r.shared) for r in dbrq.report(model).paths]


def assert_equal(a, b) -> None:
    assert_same_containers(a, b)
    assert all(torch.equal(x, y) for x, y in zip(floats(a), floats(b), strict=True))


def saved(model, folder):
    dbrq.save(model, folder / "model.pt")
    return dbrq.load(folder / "model.pt")


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


def scaled(run: Run, factor: float) -> Run:
    """The run on other values that take the same path."""

    def change(value):
        if isinstance(value, Tensor):
            return value * factor if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items()}
        return type(value)(map(change, value)) if isinstance(value, (list, tuple)) else value

    return Run(tuple(map(change, run.args[:1])) + run.args[1:], run.attributes)


# Paths never recorded


def matches(message: str, path: str, op: str) -> bool:
    """Whether a warning is about this module path and op; what it says after "runs in float" is about others."""
    head = message.partition(" runs in float")[0]
    named = re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", head) if path else True
    return bool(named) and op in head


def assert_warned(messages: list[str], off: Off) -> None:
    """Each of ``off.warns`` once, besides these only ``off.may``, each once at most."""
    assert all(message.startswith("dbrq: ") for message in messages)
    heads = [message.partition(" runs in float")[0] for message in messages]
    assert len(set(heads)) == len(heads), f"told twice: {messages}"
    if off.warns is None:
        return
    rest = list(messages)
    for path, op in sorted(off.warns, reverse=True):  # the longer, more particular paths first
        found = [message for message in rest if matches(message, path, op)]
        assert found, f"no warning about {op or 'the layer'} at {path!r} in {messages}"
        rest.remove(found[0])
    allowed = list(off.may)
    for message in rest:
        found = [known for known in allowed if matches(message, *known)]
        assert found, f"not expected: {message!r} among {messages}"
        allowed.remove(found[0])


def float_calls(model: nn.Module, off: Off) -> int:
    """How often the run calls what is expected to run in float."""
    calls: list[str] = []
    layers = [path for path, op in (*off.warns, *off.may) if not op]
    hooks = [model.get_submodule(path).register_forward_hook(lambda *_: calls.append("")) for path in layers]
    call(model, off.run)
    for hook in hooks:
        hook.remove()
    return len(calls) + sum(op in ("linear", "conv2d") for _, op in off.warns)


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


# Ranges belong to occurrences and edges


class Growing(nn.Module):
    """Each trip multiplies the range by about five: one range for all would drown the first trips."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, D, bias=False)
        with torch.no_grad():
            self.body.weight.mul_(5 * 1.7)

    def forward(self, x, trips):
        outputs = []
        for _ in range(trips):
            x = self.body(x)
            outputs.append(x)
        return outputs


def test_each_occurrence_has_its_own_range():
    model = Growing().eval()
    for counts in ((6,), (6, 3), (3, 6), (1, 6, 3)):
        quantized = dbrq.convert(calibrated(model, trips(*counts)))
        for run in trips(*counts):
            assert_int8(model, quantized, run)


def test_a_layer_called_at_two_lines_has_a_range_for_each():
    class Lines(Named):
        def forward(self, x, loud):
            if loud:
                h = self.a(x * 100.0)
                h = h / 100.0
            else:
                h = self.a(x)
            return self.out(h)

    model = Lines().eval()
    with torch.no_grad():
        model.a.bias.zero_()
    quantized = dbrq.convert(calibrated(model, trips(False, True)))
    for run in trips(False, True):
        assert_int8(model, quantized, run)


def test_what_only_one_path_makes_keeps_the_range_of_that_path():

    class Loud(Named):
        def forward(self, x, loud):
            if loud:
                return self.b(self.a(x) * 1000.0)
            return self.out(self.c(x))

    model = Loud().eval()
    quantized = dbrq.convert(calibrated(model, trips(False, True)))
    for run in trips(False, True):
        assert_int8(model, quantized, run)


def test_a_value_read_in_the_loop_from_before_it_and_from_inside():
    class Carried(Named):
        def forward(self, x, trips):
            h = self.a(x)
            memory = torch.softmax(x, -1)
            for _ in range(trips):
                h = torch.relu(self.b(memory)) + h
                memory = torch.softmax(h, -1)
            return self.out(h)

    model = Carried().eval()
    quantized = dbrq.convert(calibrated(model, trips(1, 3)))
    for run in (*trips(1, 3), *trips(2, 5, seed=7)):
        assert_int8(model, quantized, run)


def test_a_range_is_not_used_for_a_value_of_another_origin():
    """Recorded after softmax (0 to 1), and met with values a thousand times as large."""

    class Fed(Named):
        def forward(self, x, by):
            h = torch.softmax(x, -1) if by == "softmax" else torch.exp(x.clamp(-1, 6)) * 10.0
            return self.out(h)

    model = Fed().eval()
    quantized = dbrq.convert(calibrated(model, trips("softmax")))
    run = trips("exp", seed=3)[0]
    got, messages = heard(quantized, run)
    assert worst(call(model, run), got) >= GOOD
    assert sum(matches(message, "out", "") for message in messages) == 1
    assert len(messages) <= 3  # the clamp and the product are new as well


# Weights chosen at run time


@pytest.mark.parametrize("name", ["experts as one parameter", "one of several parameters"])
def test_a_choice_of_weights_is_never_anothers(name):
    model, quantized = float_model(name), fresh(name)
    for index in range(3):
        for run in trips(index, index, seed=10 + index):
            assert worst(call(model, run), heard(quantized, run)[0]) >= GOOD


def test_choices_inside_one_run():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, D, D) * 0.2)
            self.out = nn.Linear(D, D)

        def forward(self, x, chosen):
            h = x
            for index in chosen:
                h = torch.relu(F.linear(h, self.weight[index]))
            return self.out(h)

    model = Several().eval()
    runs = trips((0, 1), (1, 0), (2, 2))
    recorded = [Run((r.args[0], tuple(r.args[1:]))) for r in runs]
    quantized = dbrq.convert(calibrated(model, recorded))
    for run in recorded:
        assert_int8(model, quantized, run)
    other = Run((data(seed=8), (3, 1)))
    got, messages = heard(quantized, other)
    assert worst(call(model, other), got) >= GOOD
    assert messages and all("linear" in message or "out" in message or "relu" in message for message in messages)


# Reports


def test_a_model_of_one_path_has_no_second_table():
    quantized = dbrq.quantize(nn.Sequential(*linears(2)), [data()])
    text = str(dbrq.report(quantized))
    assert "paths" not in text
    rows = dbrq.report(quantized).paths
    assert rows and {row.number for row in rows} == {0}
    assert {row.shared for row in rows} == {0}


def test_the_rows_of_paths_say_what_they_took():
    runs = trips(True, False, True, True)
    model = float_model("branches that meet in add")
    quantized = dbrq.convert(calibrated(model, runs))
    rows = by_call(dbrq.report(quantized).paths)["", 0]
    assert [row.seen for row in rows] == [3, 1]
    with_relu = max(row.ops for row in rows)
    assert {row.ops for row in rows} == {with_relu, with_relu - 1}
    # a, add and out are on both
    assert all(row.shared >= 3 for row in rows) and len({row.shared for row in rows}) == 1
    text = str(dbrq.report(quantized))
    assert "paths" in text and text.index("paths") > text.index("out")


def test_calls_of_a_child_have_paths_of_their_own():
    rows = by_call(dbrq.report(quantized_model("two calls of a child")).paths)
    assert len(rows["child", 0]) == len(rows["child", 1]) == 2
    assert ("child", 2) not in rows
    assert sum(row.seen for row in rows["child", 0]) == 4


def test_a_path_of_prepare_alone_counts_as_not_seen():
    model = float_model("branches that meet in add")
    prepared = dbrq.prepare(model, trips(True)[0].args)
    assert [row.seen for row in dbrq.report(prepared).paths if row.module == ""] in ([], [0])
    call(prepared, trips(False)[0])
    seen = [row.seen for row in dbrq.report(prepared).paths if row.module == ""]
    assert sorted(seen) in ([1], [0, 1])


def test_calibrate_records_paths_as_calls_do():
    model, runs = float_model("branches that meet in cat"), CASES["branches that meet in cat"].recorded
    prepared = dbrq.calibrate(dbrq.prepare(model, runs[0].args), [run.args for run in runs])
    by_calls = quantized_model("branches that meet in cat")
    quantized = dbrq.convert(prepared)
    assert table(quantized) == table(by_calls)
    for run in runs:
        assert_equal(call(quantized, run), call(by_calls, run))


def test_quantize_records_the_paths_of_its_data():
    model, runs = float_model("branch on data"), CASES["branch on data"].recorded
    quantized = dbrq.quantize(model, [run.args for run in runs])
    for run in runs:
        assert_int8(model, quantized, run)


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


# Submodules called from outside


class Pair(nn.Module):
    """What is called in parts: an encoder with two ways, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = CASES["branch on an argument"].make(), nn.Sequential(*linears(2))

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))

    def encode(self, x, mode):
        return torch.relu(self.encoder(x, mode))


@pytest.mark.parametrize("mode", ["b", "c"])
def test_a_submodule_called_from_outside(mode):
    model, x = Pair().eval(), data()
    prepared = dbrq.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        assert_same_tree(prepared.encoder(x, mode), model.encoder(x, mode), "prepared")
    quantized = dbrq.convert(prepared)
    assert_int8(model, quantized, Run((x,)))
    assert_int8(model.encoder, quantized.encoder, Run((x, mode)))
    assert_int8(model, quantized, Run((x,)))


@pytest.mark.parametrize("mode", ["b", "c"])
def test_a_method_of_the_model_that_calls_parts_of_it(mode):
    model, x = Pair().eval(), data()
    prepared = dbrq.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        assert_same_tree(prepared.encode(x, mode), model.encode(x, mode), "prepared")
    quantized = dbrq.convert(prepared)
    run = Run((x, mode))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", "dbrq:")
        assert sqnr(model.encode(*run.args), quantized.encode(*run.args)) >= GOOD
    assert_int8(model, quantized, Run((x,)))


def test_a_submodule_on_an_unrecorded_path_from_outside():
    model, x = Pair().eval(), data()
    prepared = dbrq.prepare(model, x)
    call(prepared, Run((x,)))
    call(prepared.encoder, Run((x,)))
    quantized = dbrq.convert(prepared)
    run = Run((x, "neither"))
    got, messages = heard(quantized.encoder, run)
    assert worst(call(model.encoder, run), got) >= GOOD
    assert_warned(messages, Off(run, (("encoder", "add"), ("encoder.out", ""))))
    assert not heard(quantized.encoder, run)[1]
    assert_int8(model, quantized, Run((x,)))


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


# Long loops, odd code


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = even(linears(2))
        self.weight = nn.Parameter(self.body.weight.detach().clone())

    def forward(self, x, trips):
        h = x
        for _ in range(trips):
            h = torch.relu(F.linear(torch.relu(self.body(h)), self.weight))
            h = h / h.abs().amax()
        return self.out(h)


def test_a_trip_takes_as_long_however_many_there_are():
    quantized = dbrq.convert(calibrated(Long().eval(), trips(3)))

    def per_trip(count: int) -> float:
        call(quantized, run := trips(count)[0])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call(quantized, run)
            times.append(time.perf_counter() - start)
        return min(times) / count

    assert per_trip(3000) < 4 * per_trip(150)


def test_many_recorded_trips_are_found_quickly():
    """Hooks of n ops are made in time n."""
    quantized = dbrq.convert(calibrated(Long().eval(), trips(300)))
    with profile_calls() as calls:
        call(quantized, trips(300)[0])
    assert calls() < 3000 * 300


@contextlib.contextmanager
def profile_calls():
    """Counts calls of Python functions."""
    count = 0

    def tick(frame, event, arg) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tick)
    try:
        yield lambda: count
    finally:
        sys.setprofile(None)


def test_what_a_fusion_leaves_out_has_no_range():
    """linear-relu fuses; another call of the layer reads what is before the relu, which was never seen alone."""

    class Again(Named):
        def forward(self, x, again):
            h = self.a(x)
            h = self.b(h)
            h = self.b(h) if again else torch.relu(h)
            return h * 1.0

    model = Again().eval()
    quantized = dbrq.convert(calibrated(model, trips(False)))
    got, messages = heard(quantized, run := trips(True)[0])
    assert worst(call(model, run), got) >= GOOD
    assert_warned(messages, Off(run, None))


def test_classes_made_by_exec():
    source = (
        "class Made(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)\n"
        "    def forward(self, x, long):\n"
        "        h = torch.relu(self.a(x))\n"
        "        return self.b(torch.relu(h + x)) if long else self.b(h)\n"
    )
    scope: dict = {"nn": nn, "torch": torch, "__builtins__": __builtins__}  # and no __name__
    exec(compile(source, "<ipython-input-3-abc>", "exec"), scope)
    model = scope["Made"]().eval()
    quantized = dbrq.convert(calibrated(model, trips(False, True)))
    for run in trips(False, True):
        assert_int8(model, quantized, run)
