"""Models of several paths, prepared and converted, and what a call of them says and runs."""

import copy
import functools
import re
import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

import dbrq
from tests.helpers.control_flow.cases import CASES
from tests.helpers.control_flow.runs import Off, Run
from tests.helpers.judging import assert_same_containers, sqnr
from tests.helpers.running import floats

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


def scaled(run: Run, factor: float) -> Run:
    """The run on other values that take the same path."""

    def change(value):
        if isinstance(value, Tensor):
            return value * factor if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items()}
        return type(value)(map(change, value)) if isinstance(value, (list, tuple)) else value

    return Run(tuple(map(change, run.args[:1])) + run.args[1:], run.attributes)


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
