"""``prepare``, ``calibrate`` and ``convert`` change nothing of the user's, and share nothing between threads."""

from __future__ import annotations

import copy
import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping

import dbrq
from dbrq import NotCalibratedError, QuantizationError
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.phases import Net, X, in_phase, models, net, phases
from tests.helpers.running import convert, run

ALL_BACKENDS = ("onednn", "inductor", "torchscript")
Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Chaotic(nn.Module):
    """Uses every random generator, has batch norm and dropout, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.log: list = []

    def forward(self, x):
        self.calls += 1
        self.log.append(x.shape)
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return self.drop(self.norm(self.conv(x))) + 0.0 * noise


@pytest.mark.parametrize("training", [True, False])
def test_prepare_changes_nothing_of_the_users(training):
    model = Chaotic().train(training)
    model.conv.eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    before = copy.deepcopy(
        {"state": model.state_dict(), "dict": {k: v for k, v in model.__dict__.items() if k != "_modules"}}
    )
    kept = x.detach().clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    prepared = dbrq.prepare(model, x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert model.training is training and model.norm.training is training and not model.conv.training
    assert [m.training for m in prepared.modules() if type(m) is nn.BatchNorm2d] == [training]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before["state"][name]), name
    assert model.log == [] and model.calls == 0 and prepared.log == [] and prepared.calls == 0
    assert "forward" not in model.conv.__dict__ and "_auto_quant_state" not in model.__dict__
    assert set(model.__dict__) == {*before["dict"], "_modules"}
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert torch.equal(x, kept) and x.requires_grad and x.grad is None and x._version == 0
    assert not x.__dict__
    assert type(model).forward is Chaotic.forward


def test_calibrate_and_convert_leave_the_float_model_bit_for_bit():
    model = net()
    before = copy.deepcopy(model.state_dict())
    expected = run(model, X)
    dbrq.quantize(model, [X, X * 2])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(run(model, X), expected)
    assert all(p.requires_grad for p in model.parameters())


def test_observers_see_nothing_of_the_watching_run():
    prepared = dbrq.prepare(net(), X * 1000)
    with pytest.raises(NotCalibratedError):
        dbrq.convert(prepared)
    run(prepared, X)
    assert torch.equal(run(dbrq.convert(prepared), X), run(convert(net(), X).quantized, X))


def test_the_mapping_of_the_user_is_not_changed():
    mapping = (
        QConfigMapping().set_global(dbrq.default_qconfig_mapping().global_qconfig).set_object_type(nn.Linear, None)
    )
    before = copy.deepcopy(mapping.to_dict())
    convert(net(), X, mapping)
    assert str(mapping.to_dict()) == str(before)


def test_example_and_calibration_data_are_not_changed():
    batch = {"x": X.clone()}
    data = [(X.clone(),), [X.clone()], X.clone(), batch]
    dbrq.quantize(net(), data)
    assert torch.equal(data[0][0], X) and torch.equal(batch["x"], X)
    assert not data[2].__dict__ and not batch["x"].__dict__


@phases
def test_nothing_global_changes(phase):
    """No class of torch is patched, no mode stays on, no setting is another."""
    watched = {cls: dict(cls.__dict__) for cls in (nn.Module, nn.Conv2d, nn.Linear, nn.Sequential, torch.Tensor, Net)}
    functions = dict(vars(F))

    def settings():
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.backends.quantized.engine,
        )

    before_settings = settings()
    filters = list(warnings.filters)
    model = in_phase(phase, net, X)
    model(X)
    for cls, before in watched.items():
        assert dict(cls.__dict__) == before, cls
    assert vars(F) == functions
    assert settings() == before_settings
    assert torch.overrides._get_current_function_mode() is None
    assert list(warnings.filters) == filters


def test_another_thread_with_a_float_model_notices_nothing():
    inside, go_on = threading.Event(), threading.Event()

    def pause(m, x):
        h = m.conv(x)
        if inside is not None and m.__dict__.get("waits"):
            inside.set()
            assert go_on.wait(20)
        return m.last(h)

    slow = convert(Call(pause, conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1)), X).quantized
    slow.__dict__["waits"] = True
    other = net()
    expected = run(other, X)
    results: list = []
    thread = threading.Thread(target=lambda: results.append(run(slow, X)))
    thread.start()
    assert inside.wait(20)
    try:
        got = run(other, X)
        assert torch.equal(got, expected) and not got.__dict__
        assert torch.overrides._get_current_function_mode() is None
        assert type(torch.ones(2) + 1) is torch.Tensor
        fresh = nn.Linear(3, 3)
        assert "forward" not in fresh.__dict__
    finally:
        go_on.set()
        thread.join()
    slow.__dict__["waits"] = False
    assert torch.equal(results[0], run(slow, X))


@models
def test_many_threads_call_one_converted_model(make, x, mapping):
    model = in_phase("quantized", make, x, mapping)
    fresh = copy.deepcopy(model)  # its plans are made by whichever thread comes first
    inputs = [x if not x.is_floating_point() else x * (i + 1) for i in range(4)]
    expected = [run(model, i) for i in inputs]
    failures: list = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        try:
            for _ in range(15):
                assert torch.equal(run(fresh, inputs[number]), expected[number])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def test_one_quantized_model_inside_another_model():
    inner = in_phase("quantized", net, X)
    outer = nn.Sequential(inner, nn.Linear(16, 4))
    assert torch.allclose(run(outer, X), run(outer[1], run(inner, X)))
    with pytest.raises(QuantizationError, match="already"):
        dbrq.prepare(outer, X)


def test_one_quantized_model_called_by_another():
    inner = in_phase("quantized", net, X)
    expected = run(inner, X)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x):
            out = hidden(x)
            assert torch.equal(out, expected)
            return self.linear(out)

    hidden = inner
    outer = Outer().eval()
    converted = convert(outer, X).quantized
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")
        assert sqnr(run(outer, X), run(converted, X)) > 25


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@torch.no_grad()
def test_data_and_examples_with_a_history_are_copied(backend):
    with torch.enable_grad():
        before = nn.Linear(8, 8)
        x = before(torch.randn(4, 8))
        assert not x.is_leaf
        quantized = dbrq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [(x,), x])
        lowered = dbrq.lower(quantized, x, backend=backend)
        dbrq.doctor(quantized, x)
        assert x.grad_fn is not None
    assert sqnr(quantized(x), lowered(x)) > 60


def test_inputs_are_known_by_name_however_the_call_is_spelled():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x, mask=None, y=None):
            out = self.a(x) + self.b(y)
            return out if mask is None else out * mask

    model = Two().eval()
    x, y = Z, 100 * Z.flip(0)
    prepared = dbrq.prepare(model, {"x": x, "y": y})
    run(prepared, {"y": y, "x": x})
    converted = dbrq.convert(prepared, strict=True)
    expected = run(model, {"x": x, "y": y})
    for spelled in ({"y": y, "x": x}, (x, None, y)):
        assert sqnr(expected, run(converted, spelled)) > 30
    with torch.no_grad():
        assert torch.equal(converted(x, y=y), converted(y=y, x=x))
