"""What one may rely on: copies, files, threads, errors, and that nothing of the user's changes."""

import copy
import functools
import io
import pickle
import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Call, convert, run, sqnr
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig

import dbrq
from dbrq import CalibrationError, NotCalibratedError, QuantizationError


class Net(nn.Module):
    """A bit of everything: modules that fuse, functions with parameters of their own, embedding, attention, sharing."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.weight = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.heads = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        h = self.features(x)
        h = F.linear(F.adaptive_avg_pool2d(h, 1).flatten(1), self.weight) * self.mask
        for head in self.heads:
            h = torch.relu(head(h)) + h
        return h


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 8, batch_first=True)
        self.out = nn.Linear(8, 30)

    def forward(self, index):
        h = self.embed(index)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(self.lstm(h)[0])


def net() -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    model.train()
    with torch.no_grad():
        model(torch.randn(16, 3, 9, 9) * 2 + 1)
    return model.eval()


def words() -> nn.Module:
    torch.manual_seed(1)
    return Words().eval()


X = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(5))
WORDS = torch.arange(24).reshape(4, 6)
#: LSTM in dynamic mode and embeddings weight-only, beside static linear layers.
MIXED = (
    dbrq.default_qconfig_mapping().set_object_type(nn.LSTM, default_dynamic_qconfig)
    .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
)  # fmt: skip
MODELS = {"net": (net, X, None), "words": (words, WORDS, MIXED)}
models = pytest.mark.parametrize("make, x, mapping", list(MODELS.values()), ids=list(MODELS))
phases = pytest.mark.parametrize("phase", ["prepared", "quantized"])


def in_phase(phase: str, make, x, mapping=None) -> nn.Module:
    return getattr(convert(make(), x, mapping), phase)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Copies and files

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": torch_saved,
    "deepcopy of a copy": lambda m: copy.deepcopy(pickled(m)),
}


@models
@phases
@pytest.mark.parametrize("copied", list(COPIES.values()), ids=list(COPIES))
def test_copies_give_the_same_and_go_their_own_way(make, x, mapping, phase, copied):
    model = in_phase(phase, make, x, mapping)
    expected = run(model, x)
    other = copied(model)
    assert type(other) is type(model)
    assert torch.equal(run(other, x), expected)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.5)
    assert torch.equal(run(model, x), expected), "the copy shares state with the original"
    assert not torch.equal(run(other, x), expected)


@models
def test_a_copy_of_a_prepared_model_calibrates_and_converts_by_itself(make, x, mapping):
    prepared = dbrq.prepare(make(), x, mapping)
    one, other = copy.deepcopy(prepared), pickled(prepared)
    run(one, x)
    converted = dbrq.convert(one)
    for untouched in (other, prepared):
        with pytest.raises(NotCalibratedError):
            dbrq.convert(untouched)
    run(other, x)
    assert torch.equal(run(dbrq.convert(other), x), run(converted, x))


def test_convert_leaves_the_prepared_model_alone():
    result = convert(net(), X)
    before = run(result.prepared, X)
    assert torch.allclose(before, run(result.model, X))
    assert torch.equal(run(dbrq.convert(result.prepared), X), run(result.quantized, X))
    run(result.prepared, X * 3)
    assert not torch.equal(run(dbrq.convert(result.prepared), X), run(result.quantized, X))


def test_inplace_changes_the_model_itself():
    model = net()
    prepared = dbrq.prepare(model, X, inplace=True)
    assert prepared is model
    run(prepared, X)
    converted = dbrq.convert(prepared, inplace=True)
    assert converted is model
    assert torch.equal(run(converted, X), run(convert(net(), X).quantized, X))


@models
@phases
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_state_dict_loads_into_a_copy_with_other_weights(make, x, mapping, phase, weights_only, assign):
    """And refreshes every plan made from it: the copy ran before."""
    source = in_phase(phase, make, x, mapping)
    expected = run(source, x)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
    other_x = x * 2 if x.is_floating_point() else x.flip(0)
    target = getattr(convert(model, other_x, mapping), phase)
    assert not torch.allclose(run(target, x), expected, rtol=0.1)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    result = target.load_state_dict(torch.load(file, weights_only=weights_only), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(run(target, x), expected)
    if phase == "prepared":
        assert torch.equal(run(dbrq.convert(target), x), run(dbrq.convert(source), x))


@models
@phases
def test_state_dict_holds_tensors_only_and_no_float_copy_of_a_weight(make, x, mapping, phase):
    model = in_phase(phase, make, x, mapping)
    state = model.state_dict()
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
    assert not any(value.is_mkldnn or value.is_quantized for value in state.values())
    if phase == "quantized":
        matrices = [name for name, t in state.items() if t.is_floating_point() and t.dim() > 1]
        assert matrices == []
        assert any(t.dtype is torch.int8 for t in state.values())


def test_a_missing_or_unexpected_key_is_told():
    model = in_phase("quantized", net, X)
    state = model.state_dict()
    expected = run(model, X)
    name = next(key for key in state if key.endswith("weight_int8"))
    del state[name]
    with pytest.raises(RuntimeError, match="weight_int8"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError):
        model.load_state_dict({**model.state_dict(), "features.0.surplus": torch.zeros(1)})
    assert torch.equal(run(model, X), expected)


def test_a_float_state_dict_does_not_load_silently():
    model = in_phase("quantized", net, X)
    with pytest.raises(RuntimeError):
        model.load_state_dict(net().state_dict())


@models
def test_save_and_load(make, x, mapping, tmp_path):
    model = in_phase("quantized", make, x, mapping)
    expected, file = run(model, x), tmp_path / "model.pt"
    dbrq.save(model, file)
    loaded = dbrq.load(file)
    assert type(loaded) is type(model)
    assert torch.equal(run(loaded, x), expected)
    assert str(dbrq.report(loaded)) == str(dbrq.report(model))
    floats = io.BytesIO()
    torch.save(make(), floats)
    big = nn.Sequential(nn.Linear(512, 512))
    dbrq.save(convert(big, torch.randn(4, 512)).quantized, file)
    assert file.stat().st_size < 0.3 * 512 * 512 * 4


def test_load_tells_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError):
        dbrq.load(tmp_path / "nothing")
    (tmp_path / "garbage").write_bytes(b"garbage")
    torch.save({"a": 1}, tmp_path / "other")
    for name in ("garbage", "other"):
        with pytest.raises(dbrq.LoadError):
            dbrq.load(tmp_path / name)
    for model in (net(), dbrq.prepare(net(), X)):
        with pytest.raises(QuantizationError):
            dbrq.save(model, tmp_path / "model")


# Modules as torch and users see them


@phases
def test_type_attributes_and_methods_stay(phase):
    model = in_phase(phase, net, X)
    assert type(model) is Net
    assert [type(m) for m in model.features] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]
    assert [name for name, _ in model.named_children()] == ["features", "heads"]
    assert len(model.features) == 4 and len(model.heads) == 2
    assert [type(m) for m in model.heads.children()] == [nn.Linear, nn.Linear]
    assert list(model._modules) == ["features", "heads"]
    import inspect

    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert next(model.parameters()).device.type == "cpu"


@phases
def test_iterating_containers_never_meets_the_state(phase):
    model = in_phase(phase, net, X)
    for container in (model, model.features, model.heads):
        assert not any("auto_quant" in name for name in dict(container.named_children()))
        assert not any(type(m).__name__ == "AutoQuantizationState" for m in container.children())
    assert type(model.features[-1]) is nn.Conv2d
    assert len(list(model.features)) == 4


def test_apply_reaches_modules_and_states():
    model = in_phase("prepared", net, X)
    seen = []
    assert model.apply(lambda m: seen.append(type(m).__name__)) is model
    assert "Conv2d" in seen and "HistogramObserver" in seen and seen[-1] == "Net"
    assert len([name for name in seen if name == "Conv2d"]) == 2


@phases
def test_to_and_casts_of_nothing_keep_the_model(phase):
    model = in_phase(phase, net, X)
    expected = run(model, X)
    for change in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.eval(), lambda m: m.requires_grad_(False),
                   lambda m: m.share_memory(), lambda m: m.cpu()):  # fmt: skip
        assert change(model) is model
        assert torch.equal(run(model, X), expected)


@phases
def test_memory_format_of_a_model_does_not_matter(phase):
    model = in_phase(phase, net, X)
    expected = run(model, X)
    model.to(memory_format=torch.channels_last)
    assert sqnr(expected, run(model, X)) > 40
    if phase == "prepared":
        expected, model = run(dbrq.convert(in_phase(phase, net, X)), X), dbrq.convert(model)
        assert sqnr(expected, run(model, X)) > 40
    other = in_phase(phase, net, X)
    other.load_state_dict(model.state_dict() if phase == "quantized" else other.state_dict(), assign=True)
    assert sqnr(expected, run(other, X)) > (40 if phase == "quantized" else 20)


@phases
def test_a_channels_last_model_and_channels_last_inputs(phase):
    x = X.contiguous(memory_format=torch.channels_last)
    expected = run(in_phase(phase, net, X), X)
    model = in_phase(phase, lambda: net().to(memory_format=torch.channels_last), x)
    for given in (x, X):
        assert sqnr(expected, run(model, given)) > 35
    assert sqnr(expected, run(in_phase(phase, net, X), x)) > 35


def test_parameters_of_a_converted_model_are_frozen_and_float():
    model = in_phase("quantized", net, X)
    parameters = list(model.parameters())
    assert parameters and not any(p.requires_grad for p in parameters)
    assert all(isinstance(p, nn.Parameter) for p in parameters)
    assert isinstance(model.features[0].bias, nn.Parameter)


def test_weight_gives_float_on_demand():
    result = convert(net(), X)
    conv, quantized = result.model.features[3], result.quantized.features[3]
    assert quantized.weight.dtype is torch.float32 and quantized.weight.shape == conv.weight.shape
    assert quantized.weight.device.type == "cpu"
    error = (quantized.weight - conv.weight).abs().amax((1, 2, 3))
    assert (error <= conv.weight.abs().amax((1, 2, 3)) / 127).all()
    assert type(quantized.weight + 0) is torch.Tensor
    assert quantized.weight_int8.dtype is torch.int8


@phases
def test_printing_shows_ops_and_qparams(phase):
    model = in_phase(phase, net, X)
    text = repr(model._auto_quant_state) + repr(model.features._auto_quant_state)
    for shown in ("AutoQuantizationState", "conv2d", "features.0", "float32[4, 3, 9, 9]"):
        assert shown in text
    assert ("HistogramObserver" if phase == "prepared" else "scale=") in text


# The user's things


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


# Data


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


# Modes of torch


@phases
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_autograd(phase, context):
    model = in_phase(phase, net, X)
    expected = run(model, X)
    with context():
        got = model(X)
        assert torch.equal(got, expected)
    assert torch.equal(run(model, X), expected)
    assert torch.isfinite(got + 1).all()


def test_everything_in_inference_mode():
    with torch.inference_mode():
        prepared = dbrq.prepare(net(), X)
        prepared(X)
        converted = dbrq.convert(prepared)
        expected = converted(X).clone()
    assert torch.equal(run(converted, X), expected)
    assert torch.equal(run(copy.deepcopy(converted), X), expected)


def test_inputs_that_require_grad():
    converted = in_phase("quantized", net, X)
    x = X.clone().requires_grad_()
    assert torch.equal(converted(x).detach(), run(converted, X))


def test_autocast_around_a_converted_model():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    converted = convert(model, torch.randn(4, 16)).quantized
    with torch.autocast("cpu", torch.bfloat16):
        got = run(converted, torch.randn(4, 16))
    assert torch.isfinite(got.float()).all()


@phases
def test_outputs_carry_nothing_of_ours(phase):
    model = in_phase(phase, net, X)
    x = X.clone()
    out = model(x)
    assert type(out) is torch.Tensor and not out.__dict__ and not x.__dict__
    model = in_phase(phase, lambda: nn.Sequential(nn.Identity(), nn.Flatten()), X)
    out = model(x)
    assert torch.equal(out, x.flatten(1)) and not out.__dict__ and not x.__dict__
    with pytest.raises(AttributeError):
        out.data_u8  # noqa: B018


def test_hooks_of_the_user_on_modules_still_run():
    model, seen = net(), []
    model.features[0].register_forward_hook(lambda m, args, out: seen.append(type(out + 0)))
    model.features.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    result = convert(model, X)
    seen.clear()
    out = run(result.quantized, X)
    assert len(seen) == 2 and sqnr(run(model, X), out) > 20


def test_forward_given_to_the_instance_by_the_user():
    model = net()
    plain = model.features[3].forward
    model.features[3].forward = functools.partial(_twice, model.features[3])
    del plain
    converted = convert(model, X).quantized
    assert sqnr(run(model, X), run(converted, X)) > 20


def _twice(conv, x):
    return F.conv2d(x, conv.weight, conv.bias, padding=1) * 2.0


def test_wrong_arguments_are_clear_errors():
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.prepare("no module", X)
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.prepare(net(), X, {"": None})
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.convert(net())
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.calibrate(net(), [X])
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.report(net())
    prepared = dbrq.prepare(net(), X)
    with pytest.raises(dbrq.ConfigurationError, match="already"):
        dbrq.prepare(prepared, X)
    run(prepared, X)
    converted = dbrq.convert(prepared)
    for misuse in (
        lambda: dbrq.convert(converted),
        lambda: dbrq.prepare(converted, X),
        lambda: dbrq.calibrate(converted, [X]),
    ):
        with pytest.raises(dbrq.ConfigurationError):
            misuse()


def test_errors_pickle():
    error = QuantizationError("message", path="a.b", op="conv2d", expected=1, got=2, hint="do")
    again = pickled(error)
    assert str(again) == str(error) and again.path == "a.b" and again.op == "conv2d"


def test_a_qconfig_alone_is_a_global_one():
    recipe = dbrq.default_qconfig_mapping().global_qconfig
    assert isinstance(recipe, QConfig)
    one = convert(net(), X, recipe).quantized
    other = convert(net(), X, QConfigMapping().set_global(recipe)).quantized
    assert torch.equal(run(one, X), run(other, X))
