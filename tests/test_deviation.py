"""CONFORMANCE.md, section 3: what happens when a run leaves what was recorded. Never a KeyError, never garbage."""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import Call, convert, run, sqnr
from torch import nn

import dbrq
from dbrq import DeviationError, QuantizationError


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


DEVIATIONS = {
    "a different op": (lambda m, h: torch.relu(h), lambda m, h: h + h, "add"),
    "a different module": (lambda m, h: m.other(h), lambda m, h: m.conv(h[:, :3]), "conv2d"),
    "a function for a module": (lambda m, h: m.other(h), lambda m, h: F.conv2d(h, m.other.weight), "conv2d"),
    "fewer ops": (lambda m, h: m.other(torch.relu(h)), lambda m, h: h, "end"),
    "fewer ops at the end": (lambda m, h: torch.relu(m.other(h)), lambda m, h: m.other(h), "end"),
    "more ops": (lambda m, h: h, lambda m, h: torch.relu(h), "relu"),
    "more ops at the end": (lambda m, h: m.other(h), lambda m, h: m.other(h) * 2.0, "mul"),
    "another order": (lambda m, h: m.other(h).relu() * 2.0, lambda m, h: (m.other(h) * 2.0).relu(), "mul"),
    "a longer loop": (lambda m, h: m.other(h), lambda m, h: m.other(m.other(h)), "conv2d"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", DEVIATIONS)
def test_leaving_the_recorded_path_names_the_module_and_both_ops(case, strict, x):
    recorded, taken, op = DEVIATIONS[case]
    prepared = dbrq.prepare(model_with(recorded=recorded, taken=taken), x)
    run(prepared, x)
    converted = dbrq.convert(prepared, strict=strict)
    expected = run(converted, x)
    for model in (prepared, converted):
        model[0].way = "taken"
        with pytest.raises(DeviationError) as caught:
            run(model, x)
        error = caught.value
        assert error.path == "0"
        assert op in str(error.got) + str(error.expected)
        assert error.expected and error.got and error.hint
        assert isinstance(error, QuantizationError)
        model[0].way = "recorded"
    assert torch.equal(run(converted, x), expected), "the model is usable after the error"


def test_a_child_called_more_often_names_it(x):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child, self.times = Switch(recorded=lambda m, h: torch.relu(h)), 1

        def forward(self, x):
            return [self.child(x) for _ in range(self.times)]

    converted = convert(Parent(), x).quantized
    converted.times = 2
    with pytest.raises(DeviationError, match="child"):
        run(converted, x)
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
    converted = convert(model, x).quantized
    model.stride = converted.stride = 2
    try:
        got = run(converted, x)
    except DeviationError as error:
        assert "stride" in str(error)
    else:
        assert sqnr(run(model, x), got) > 25


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


def test_recursion():
    model, x = Recursive().eval(), torch.randn(32, 16)
    converted = convert(model, x).quantized
    assert sqnr(run(model, x), run(converted, x)) > 25
    assert len([r for r in dbrq.report(converted).rows if r.op == "linear"]) == 3
    with pytest.raises(DeviationError):
        run(converted, (x, 5))
    run(converted, x)
