"""How many bits activations have: as the model was made, wherever its qparams went, and as this CPU can compute."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver, QConfig, default_per_channel_weight_observer

import dbrq
from dbrq import kernels
from dbrq.kernels import QParams, dequantize, has_exact_int8_dot, quantize, ranges
from tests import ROOT
from tests.helpers.ranges import data, positive
from tests.helpers.running import convert, run

needs_exact = pytest.mark.skipif(not has_exact_int8_dot(), reason="files of 8 bits are made where products are exact")


def recipe_of(reduce_range: bool):
    return dbrq.default_qconfig_mapping(reduce_range=reduce_range)


def widths(model: nn.Module) -> set[int]:
    token = model._auto_quant_state.token
    return {state.qparams(key).quant_max for state in token.states.values() for key in state.slots}


@pytest.fixture
def saturating(monkeypatch):
    """A CPU that says its products saturate."""
    monkeypatch.setattr(ranges, "has_exact_int8_dot", lambda: False)


# qparams


@pytest.mark.parametrize(
    "q",
    [
        QParams(0.1, 0),
        QParams(0.1, 128),
        QParams(0.02, 255),
        QParams(3e-5, 77),
        QParams(0.1, 128, 1, 255),
        QParams(0.1, 128, 64, 191),
        QParams(0.1, 100, 100, 227),
    ],
)
def test_seven_bits_hold_the_same_range(q, saturating):
    narrow = ranges.for_this_cpu(q)
    assert narrow.quant_min == 0 and narrow.quant_max <= 127 and ranges.makes_sense(narrow)
    low, high = ((level - q.zero_point) * q.scale for level in (q.quant_min, q.quant_max))
    x = torch.linspace(low, high, 1001)
    error = (dequantize(quantize(x, narrow), narrow) - x).abs().max()
    assert error <= narrow.scale * 1.01, "half a step of rounding, and half a step of the zero point's"
    assert dequantize(quantize(torch.zeros(1), narrow), narrow).item() == 0.0
    if q.quant_max - q.quant_min <= 127:
        assert torch.equal(dequantize(quantize(x, narrow), narrow), dequantize(quantize(x, q), q)), "bit for bit"


def test_qparams_of_seven_bits_stay(saturating):
    assert ranges.for_this_cpu(QParams(0.1, 3, 0, 127)) == QParams(0.1, 3, 0, 127)


def test_nothing_changes_where_products_are_exact(monkeypatch):
    monkeypatch.setattr(ranges, "has_exact_int8_dot", lambda: True)
    assert ranges.for_this_cpu(QParams(0.1, 3)) == QParams(0.1, 3)


# A CPU that saturates


CHILD = """
import json, sys, warnings
import torch, dbrq
from tests.helpers.judging import sqnr
from tests.helpers.ranges import data, positive
from tests.helpers.running import run
from torch.ao.quantization import (
    HistogramObserver, MinMaxObserver, QConfig, default_dynamic_qconfig, default_per_channel_weight_observer,
)
from dbrq.kernels import has_exact_int8_dot
torch.set_num_threads(1)
assert not has_exact_int8_dot()
model, x = positive(), data()
found, told = {}, {}
def note(name, make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized = make()
        found[name] = sqnr(run(model, x), run(quantized, x))
    told[name] = sum("saturate" in str(w.message) for w in caught)
    return quantized
def loaded_recipe():
    return dbrq.convert(dbrq.load_recipe(dbrq.prepare(model, x), "recipe.json"))
def loaded_state():
    quantized = dbrq.quantize(model, [x])
    quantized.load_state_dict(torch.load("state.pt"))
    return quantized
wide = QConfig(HistogramObserver, default_per_channel_weight_observer)
signed = QConfig(MinMaxObserver.with_args(dtype=torch.qint8, reduce_range=True), default_per_channel_weight_observer)
note("made here", lambda: dbrq.quantize(model, [x]))
again = note("file", lambda: dbrq.load("model.pt"))
dbrq.save(again, "again.pt")
note("saved here", lambda: dbrq.load("again.pt"))
note("recipe", loaded_recipe)
note("state dict", loaded_state)
note("wide qconfig", lambda: dbrq.quantize(model, [x], wide))
note("signed qconfig", lambda: dbrq.quantize(model, [x], signed))
note("dynamic qconfig", lambda: dbrq.quantize(model, [x], default_dynamic_qconfig))
note("lowered here", lambda: dbrq.lower(dbrq.load("model.pt"), x))
try:
    dbrq.load("lowered.pt")
except dbrq.LoadError as error:
    told["lowered"] = str(error)
print(json.dumps([found, told]))
"""


@needs_exact
@pytest.mark.skipif(sys.platform != "linux", reason="oneDNN reads the variable there")
def test_models_of_eight_bits_are_right_on_a_cpu_that_saturates(tmp_path):
    """They lost 40 dB and nothing said so; a state dict in a model that was made there, 50."""
    model, x = positive(), data()
    quantized = dbrq.quantize(model, [x])
    dbrq.save(quantized, tmp_path / "model.pt")
    dbrq.save_recipe(quantized, tmp_path / "recipe.json")
    torch.save(quantized.state_dict(), tmp_path / "state.pt")
    pytest.importorskip("dbrq.lowering.onednn")
    try:
        dbrq.save(dbrq.lower(quantized, x, backend="onednn"), tmp_path / "lowered.pt")
    except dbrq.OneDNNError:
        (tmp_path / "lowered.pt").touch()
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], cwd=tmp_path, capture_output=True, text=True,
                          env=environment, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, told = json.loads(done.stdout)
    assert {k: v for k, v in found.items() if v < 55} == {}
    assert told.pop("lowered") != "" and told.pop("made here") == 0 and told.pop("signed qconfig") == 0
    assert all(told.values()), told
    assert run(dbrq.load(tmp_path / "again.pt"), x).equal(run(quantized, x)), "it has its 8 bits again where they serve"


@needs_exact
def test_files_keep_eight_bits(tmp_path, monkeypatch):
    model, x = positive(), data()
    quantized = dbrq.quantize(model, [x])
    dbrq.save(quantized, tmp_path / "a.pt")
    with monkeypatch.context() as patched:
        patched.setattr(ranges, "has_exact_int8_dot", lambda: False)
        with pytest.warns(UserWarning, match="saturate"):
            narrow = dbrq.load(tmp_path / "a.pt")
        assert widths(narrow) == {127}
        dbrq.save(narrow, tmp_path / "b.pt")
        dbrq.save_recipe(narrow, tmp_path / "b.json")
        pickled = pickle.dumps(narrow)
        graph = dbrq.rewrite(narrow, x)
        assert {n.args[4] for n in graph.graph.nodes if "quantize_per_tensor" in str(n.target)} == {127}
    for again in (dbrq.load(tmp_path / "b.pt"), pickle.loads(pickled), copy.deepcopy(quantized)):
        assert widths(again) == {255}
        assert torch.equal(run(again, x), run(quantized, x))
    prepared = dbrq.load_recipe(dbrq.prepare(model, x), tmp_path / "b.json")
    assert torch.equal(run(dbrq.convert(prepared), x), run(quantized, x))


def test_one_warning_for_a_model(saturating):
    model, x = positive(), data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized = dbrq.quantize(model, [x], recipe_of(reduce_range=False))
        run(quantized, x)
        quantized.load_state_dict(quantized.state_dict())
    assert sum("saturate" in str(w.message) for w in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(dbrq.quantize(model, [x], recipe_of(reduce_range=True)), x)


# State dicts


@needs_exact
@pytest.mark.parametrize("of, into", [(True, False), (False, True), (False, False)])
def test_a_state_dict_brings_its_bits(of, into):
    x = data()
    source = dbrq.quantize(positive(0), [x], recipe_of(reduce_range=of))
    target = dbrq.quantize(positive(1), [x * 3 - 1], recipe_of(reduce_range=into))
    run(target, x)
    target.load_state_dict(source.state_dict())
    assert torch.equal(run(target, x), run(source, x))
    assert widths(target) == {127 if of else 255}
    assigned = dbrq.quantize(positive(1), [x], recipe_of(reduce_range=into))
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(run(assigned, x), run(source, x))


def test_a_state_dict_that_does_not_say_its_bits_loads_with_a_warning():
    x = data()
    source, target = (dbrq.quantize(positive(seed), [x]) for seed in (0, 1))
    old = {key: value for key, value in source.state_dict().items() if not key.endswith(("quant_min", "quant_max"))}
    assert len(old) == len(source.state_dict()) - 2
    with pytest.warns(UserWarning, match="older version"):
        target.load_state_dict(old)
    assert torch.equal(run(target, x), run(source, x))


def test_a_file_that_kept_its_bits_elsewhere_loads():
    x = data()
    source = dbrq.quantize(positive(), [x], recipe_of(reduce_range=True))
    state = source._auto_quant_state
    old = copy.deepcopy(state)
    old.__dict__["ranges"] = dict.fromkeys(state.slots, (0, 127))
    del old._buffers["quant_min"], old._buffers["quant_max"]
    again = pickle.loads(pickle.dumps(old))
    assert {again.stored(key) for key in again.slots} == {state.stored(key) for key in state.slots}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


SCALE, ZERO, MOST, WEIGHT = (
    f"body._auto_quant_state.{name}" for name in ("scale", "zero_point", "quant_max", "")
)  # fmt: skip
WRONG = {
    "a scale that is NaN": (SCALE, lambda t: t * float("nan")),
    "a scale that is infinite": (SCALE, lambda t: t * float("inf")),
    "a scale of zero": (SCALE, lambda t: t * 0),
    "a negative scale": (SCALE, lambda t: -t),
    "a denormal scale": (SCALE, lambda t: t * 0 + 1e-45),
    "scales of another type": (SCALE, lambda t: t.double()),
    "scales of another shape": (SCALE, lambda t: t[:1]),
    "one scale for all": (SCALE, lambda t: t[0]),
    "scales on no device": (SCALE, lambda t: t.to("meta")),
    "sparse scales": (SCALE, lambda t: t.to_sparse()),
    "a zero point out of range": (ZERO, lambda t: t + 300),
    "a zero point of another type": (ZERO, lambda t: t.double() * 0 + 1e30),
    "a negative zero point": (ZERO, lambda t: t - 256),
    "a range of no values": (MOST, lambda t: t * 0),
    "weights that are float": ("head.weight_int8", lambda t: t.float()),
    "weights of another shape": ("head.weight_int8", lambda t: t.t()),
    "a weight's scale that is NaN": ("head.weight_scale", lambda t: t * float("nan")),
    "a weight's scale of zero": ("head.weight_scale", lambda t: t * 0),
    "a weight's scale of another shape": ("body.2.weight_scale", lambda t: t[:1]),
    "no tensor": (SCALE, lambda t: t.tolist()),
}


@pytest.fixture(scope="module")
def nested():
    torch.manual_seed(0)
    x = torch.randn(2, 2, 8, 8)
    return convert(Nested(), x).quantized, convert(Nested(), x).quantized.state_dict(), x


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("assign", [False, True])
def test_a_wrong_state_dict_is_told_and_changes_nothing(nested, name, assign):
    """All of these were cast, broadcast or taken as they were, or told when half of the model had changed."""
    quantized, state, x = nested
    before, expected = copy.deepcopy(quantized.state_dict()), run(quantized, x)
    key, change = WRONG[name]
    with pytest.raises(dbrq.LoadError) as error:
        quantized.load_state_dict({**state, key: change(state[key])}, assign=assign)
    assert error.value.path == key.rpartition(".")[0].removesuffix("._auto_quant_state") and error.value.hint
    for (key, a), (_, b) in zip(quantized.state_dict().items(), before.items(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(run(quantized, x), expected)


def test_a_wrong_state_dict_of_one_layer_is_told(nested):
    layer = nested[0].head
    wrong = {**layer.state_dict(), "weight_scale": -layer.state_dict()["weight_scale"]}
    with pytest.raises(dbrq.LoadError, match="weight_scale"):
        layer.load_state_dict(wrong)
    layer.load_state_dict(layer.state_dict())


def test_what_an_observer_cannot_mean_is_told():
    class Odd(MinMaxObserver):
        def calculate_qparams(self):
            return torch.tensor([0.1]), torch.tensor([1000])

    with pytest.raises(dbrq.QuantizationError, match="qparams"):
        dbrq.quantize(positive(), [data()], QConfig(Odd, default_per_channel_weight_observer))


@torch.no_grad()
def test_a_scripted_file_of_8_bits_is_refused_where_products_saturate(tmp_path):
    """The example's own products do not saturate: it is darker than what calibration saw."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    model[0].weight.abs_()
    x = torch.rand(2, 8, 8, 8)
    for name, reduce_range in (("wide", False), ("narrow", True)):
        mapping = dbrq.default_qconfig_mapping(reduce_range=reduce_range)
        lowered = dbrq.lower(dbrq.quantize(model, [x], mapping), x * 0.2)
        assert lowered.self_test()
        dbrq.save(lowered, tmp_path / f"{name}.pt")
        assert dbrq.load(tmp_path / f"{name}.pt").self_test()
    code = """
import sys, torch, dbrq
wide, narrow = sys.argv[1:]
print(torch.jit.load(wide).self_test(), torch.jit.load(narrow).self_test())
dbrq.load(narrow)
try:
    dbrq.load(wide)
except dbrq.errors.LoadError as error:
    print("saturate" in str(error))
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "wide.pt"), str(tmp_path / "narrow.pt")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"})
    if not kernels.has_exact_int8_dot():
        pytest.skip("this CPU's products saturate")
    assert run.stdout.split() == ["False", "True", "True"], run.stderr
