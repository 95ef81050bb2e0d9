"""What happens when a run leaves what was recorded. Never a KeyError, never garbage."""

import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq import DeviationError, QuantizationError
from tests.helpers.images import small_images
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert, run


class Switch(nn.Module):
    """Takes the path that ``self.way`` names, in a child so that errors have a path to tell."""

    def __init__(self, **ways) -> None:
        super().__init__()
        self.conv, self.other, self.way = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), "recorded"
        self.ways = ways

    def forward(self, x):
        return self.ways[self.way](self, self.conv(x))


def model_with(**ways) -> nn.Sequential:
    return nn.Sequential(Switch(**ways), nn.Conv2d(8, 4, 1)).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 12, 12)


#: recorded branch, taken branch, the op that a strict error names, and the paths that a warning names.
DEVIATIONS = {
    "a different op": (lambda m, h: torch.relu(h), lambda m, h: h + h, "add", ("0.add", "1")),
    "a different module": (lambda m, h: m.other(h), lambda m, h: m.conv(h[:, :3]), "end", ()),
    "a function for a module": (
        lambda m, h: m.other(h), lambda m, h: F.conv2d(h, m.other.weight), "conv2d", ("0.conv2d", "1"),
    ),
    "fewer ops": (lambda m, h: m.other(torch.relu(h)), lambda m, h: h, "end", ("1",)),
    "fewer ops at the end": (lambda m, h: torch.relu(m.other(h)), lambda m, h: m.other(h), "end", ("1",)),
    "more ops": (lambda m, h: h, lambda m, h: torch.relu(h), "relu", ("0.relu", "1")),
    "more ops at the end": (lambda m, h: m.other(h), lambda m, h: m.other(h) * 2.0, "mul", ("0.mul", "1")),
    "another order": (
        lambda m, h: m.other(h).relu() * 2.0, lambda m, h: (m.other(h) * 2.0).relu(), "mul", ("0.mul.0",),
    ),
}  # fmt: skip


def said(model, *inputs) -> tuple[torch.Tensor, list[str]]:
    """The output of one run, and the paths that warnings name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = run(model, *inputs)
    found = [re.match(r"dbrq: (\S+) runs in float: ", str(w.message)) for w in caught]
    assert all(found), [str(w.message) for w in caught]
    return output, [match.group(1) for match in found if match]


def deviating(case) -> tuple[nn.Module, nn.Module]:
    """The float model, and the prepared one, calibrated on the recorded branch."""
    recorded, taken, *_ = DEVIATIONS[case]
    model = model_with(recorded=recorded, taken=taken)
    prepared = dbrq.prepare(model, example := torch.randn(2, 3, 12, 12))
    run(prepared, example)
    return model, prepared


@pytest.mark.parametrize("case", DEVIATIONS)
def test_leaving_the_recorded_path_is_right_and_says_once_what_runs_in_float(case, x):
    model, prepared = deviating(case)
    converted = dbrq.convert(prepared)
    expected = run(converted, x)
    model[0].way = converted[0].way = "taken"
    got, paths = said(converted, x)
    assert tuple(paths) == DEVIATIONS[case][3]
    assert sqnr(run(model, x), got) > 25
    assert said(converted, x)[1] == []
    converted[0].way = "recorded"
    assert torch.equal(run(converted, x), expected)


@pytest.mark.parametrize("case", DEVIATIONS)
def test_leaving_the_recorded_path_of_a_strict_model_names_the_module_and_both_ops(case, x):
    _, prepared = deviating(case)
    converted, op = dbrq.convert(prepared, strict=True), DEVIATIONS[case][2]
    expected = run(converted, x)
    converted[0].way = "taken"
    with pytest.raises(DeviationError) as caught:
        run(converted, x)
    error = caught.value
    assert error.path == "0"
    assert error.op.startswith("0.")
    assert op in str(error.op) + str(error.got) + str(error.expected)
    assert error.expected and error.got and error.hint
    assert isinstance(error, QuantizationError)
    converted[0].way = "recorded"
    assert torch.equal(run(converted, x), expected), "the model is usable after the error"


@pytest.mark.parametrize("case", DEVIATIONS)
def test_a_prepared_model_records_wherever_it_goes(case, x):
    model, prepared = deviating(case)
    model[0].way = prepared[0].way = "taken"
    got, paths = said(prepared, x)
    assert torch.allclose(got, run(model, x), atol=1e-5) and not paths
    converted = dbrq.convert(prepared, strict=True)
    for way in ("recorded", "taken"):
        model[0].way = converted[0].way = way
        got, paths = said(converted, x)
        assert sqnr(run(model, x), got) > 25 and not paths


@pytest.mark.parametrize("strict", [False, True])
def test_a_longer_loop_is_no_deviation(strict, x):
    class Loop(Switch):
        times = 2

        def forward(self, x):
            h = self.conv(x)
            for _ in range(self.times):
                h = torch.relu(self.other(h))
            return h

    model = nn.Sequential(Loop()).eval()
    prepared = dbrq.prepare(model, x)
    run(prepared, x)
    converted = dbrq.convert(prepared, strict=strict)
    for times in (7, 2, 1, 3):
        model[0].times = converted[0].times = times
        got, paths = said(converted, x)
        assert sqnr(run(model, x), got) > 20 and not paths


@pytest.mark.parametrize("strict", [False, True])
def test_a_child_called_more_often_or_not_at_all(strict, x):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.times = Switch(recorded=lambda m, h: torch.relu(h)), 1

        def forward(self, x):
            return [self.child(x) for _ in range(self.times)]

    model = Parent().eval()
    prepared = dbrq.prepare(model, x)
    run(prepared, x)
    converted = dbrq.convert(prepared, strict=strict)
    model.times = converted.times = 2
    got, paths = said(converted, x)
    assert all(sqnr(a, b) > 25 for a, b in zip(run(model, x), got, strict=True)) and not paths
    converted.times = 0
    assert run(converted, x) == []
    converted.times = 1
    run(converted, x)


FLOAT_BRANCHES = {
    "another one": (torch.exp, torch.sin),
    "one more": (lambda h: h, lambda h: h.cumsum(1)),
    "one less": (lambda h: h.softmax(1), lambda h: h),
    "in place": (torch.exp, lambda h: h.sin_()),
    "of another range": (torch.sin, lambda h: torch.exp(h.abs())),
}


@pytest.mark.parametrize("case", FLOAT_BRANCHES)
def test_branch_over_ops_without_a_kernel_runs_its_reader_in_float(case, x):
    """qparams belong to edges: those of the recorded producer are not used for another."""
    recorded, taken = FLOAT_BRANCHES[case]
    model = nn.Sequential(Switch(recorded=lambda m, h: m.other(recorded(h)), taken=lambda m, h: m.other(taken(h))))
    converted = convert(model, x).quantized
    model[0].way = converted[0].way = "taken"
    with pytest.warns(UserWarning, match=r"dbrq: 0\.other runs in float"):
        got = run(converted, x)
    assert sqnr(run(model, x), got) > 25
    model[0].way = converted[0].way = "recorded"
    assert sqnr(run(model, x), run(converted, x)) > 25


def test_strict_raises_instead_of_running_in_float(x):
    prepared = dbrq.prepare(model_with(recorded=lambda m, h: m.other(h), taken=lambda m, h: m.other(torch.sin(h))), x)
    run(prepared, x)
    converted = dbrq.convert(prepared, strict=True)
    converted[0].way = "taken"
    with pytest.raises(DeviationError, match="sin"):
        run(converted, x)


@pytest.mark.parametrize(
    "shape", [(1, 3, 12, 12), (7, 3, 12, 12), (2, 3, 20, 9), (2, 3, 3, 3), (0, 3, 12, 12), (3, 12, 12)]
)
def test_other_batch_or_spatial_size(shape, x):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(-3), nn.Linear(8, 5)
    )
    converted = convert(model, x).quantized
    y = torch.randn(shape)
    got, expected = run(converted, y), run(model, y)
    assert got.shape == expected.shape
    if y.numel():
        assert sqnr(expected, got) > 10


def test_other_number_of_channels_is_an_error_and_never_a_crash(x):
    converted = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x).quantized
    for shape in ((2, 4, 12, 12), (2, 3, 1, 1), (2, 3), (2, 3, 4, 4, 4)):
        with pytest.raises((QuantizationError, RuntimeError)):
            run(converted, torch.randn(shape))
    linear = convert(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), torch.randn(4, 16)).quantized
    for shape in ((4, 15), (4, 17), ()):
        with pytest.raises((QuantizationError, RuntimeError)):
            run(linear, torch.randn(shape))


def test_another_convolution_setting_than_recorded(x):
    model = Call(lambda m, x: F.conv2d(x, m.weight, stride=m.stride), weight=torch.randn(8, 3, 3, 3), stride=1)
    converted = convert(model, x)
    strict, quantized = dbrq.convert(converted.prepared, strict=True), converted.quantized
    model.stride = quantized.stride = strict.stride = 2
    got, paths = said(quantized, x)
    assert sqnr(run(model, x), got) > 25
    assert paths == ["conv2d"]
    with pytest.raises(DeviationError, match="conv2d"):
        run(strict, x)


def test_many_threads_run_one_model(x):
    model = model_with(recorded=lambda m, h: m.other(torch.relu(h)) + h)
    converted = convert(model, x).quantized
    inputs = [torch.randn(2, 3, 12, 12) for _ in range(4)]
    expected = [run(converted, i) for i in inputs]
    wrong: list = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(20):
                if not torch.equal(run(converted, inputs[number]), expected[number]):
                    wrong.append(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


class Failing(nn.Module):
    fail = False

    def forward(self, x):
        if self.fail:
            raise ValueError("of the user's own")
        return x * 1.0


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_after_an_exception_the_next_call_works(phase, x):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Failing(), nn.Conv2d(8, 4, 1))
    subject = getattr(convert(model, x), phase)
    expected = run(subject, x)
    subject[1].fail = True
    with pytest.raises(ValueError, match="of the user's own"):
        run(subject, x)
    subject[1].fail = False
    assert torch.equal(run(subject, x), expected)
    assert torch.overrides._get_current_function_mode() is None


def test_after_an_exception_inside_a_leaf_the_next_call_works(x):
    subject = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)), x).quantized
    expected = run(subject, x)
    with pytest.raises((QuantizationError, RuntimeError)):
        run(subject, torch.randn(2, 5, 12, 12))
    assert torch.equal(run(subject, x), expected)


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_a_submodule_called_outside_the_root(phase, x):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Conv2d(8, 4, 1)).eval()
    subject = getattr(convert(model, x), phase)
    with torch.no_grad():
        block, leaf = subject[0](x), subject[0][0](x)
        assert type(block) is type(leaf) is torch.Tensor and not block.__dict__ and not leaf.__dict__
        assert sqnr(model[0](x), block) > 30
        assert sqnr(model[0][0](x), leaf) > 30
        assert sqnr(model[1](model[0](x)), subject[1](subject[0](x))) > 25
    assert sqnr(run(model, x), run(subject, x)) > 25


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, depth=2):
        h = torch.relu(self.linear(x))
        return self(h, depth - 1) + h if depth else h


@pytest.mark.parametrize("strict", [False, True])
def test_recursion(strict):
    model, x = Recursive().eval(), torch.randn(32, 16)
    converted = dbrq.convert(convert(model, x).prepared, strict=strict)
    assert sqnr(run(model, x), run(converted, x)) > 25
    assert len([r for r in dbrq.report(converted).rows if r.op == "linear"]) == 3
    for depth in (5, 0, 2):
        got, paths = said(converted, (x, depth))
        assert sqnr(run(model, (x, depth)), got) > 25 and not paths


def test_nothing_warns_on_the_recorded_path():
    model = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)).eval()
    x = small_images()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = dbrq.quantize(model, [x])
        run(converted, x)
        assert fake_quantized(converted, model, x) is not None
