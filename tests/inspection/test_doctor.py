"""``doctor``: what it says of the machine and of models, as data and as text. It changes nothing, whatever it meets."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dbrq
from dbrq import selfcheck
from dbrq.inspection.doctor import Diagnosis
from dbrq.kernels import has_exact_int8_dot
from dbrq.lowering.onednn import library as library_module
from tests import ROOT
from tests.helpers.models import Call


def advised(found: Diagnosis, what: str) -> list[str]:
    return [advice.to for advice in found.advice if what in advice.what]


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4), nn.Unflatten(1, (4, 1)),
                         nn.ConvTranspose1d(4, 64, 8)).eval()  # fmt: skip


def example() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture(scope="module")
def quantized() -> nn.Module:
    torch.manual_seed(0)
    return dbrq.quantize(model(), [example()])


def test_the_machine():
    found = dbrq.doctor()
    facts = found.to_dict()
    assert json.loads(json.dumps(facts)) == facts and facts["model"] is None
    assert facts["torch"]["version"] == str(torch.__version__)
    assert facts["torch"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert facts["threads"]["of_torch"] == torch.get_num_threads() and facts["cpu"]["cores"] >= 1
    assert facts["kernels"]["bits_of_activations"] == (7 if facts["kernels"]["products_saturate"] else 8)
    assert facts["kernels"]["self_checks"] is selfcheck.enabled()
    assert facts["libdnnl"]["path"] == library_module.library().path
    for words in ("libdnnl", "g++", facts["cpu"]["name"], "advice"):
        assert words in str(found) or not facts["compiler"]["found"]


LIMITED = """
import json, torch, dbrq
from torch import nn
model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(64, 64)
quantized = dbrq.quantize(model, [x])
print(json.dumps(dbrq.doctor(quantized, x).to_dict()))
"""


def limited(**variables: str) -> dict:
    code = LIMITED
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True,
                          capture_output=True, text=True, timeout=100)  # fmt: skip
    return json.loads(done.stdout)


def test_a_machine_without_vnni_and_without_libdnnl():
    facts = limited(ONEDNN_MAX_CPU_ISA="AVX2", DBRQ_LIBDNNL="/nowhere/libdnnl.so.3", DBRQ_SELF_CHECK="0")
    assert facts["kernels"]["products_saturate"] and facts["kernels"]["bits_of_activations"] == 7
    assert facts["model"]["bits"] == 7 and not facts["kernels"]["self_checks"]
    assert facts["cpu"]["environment"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert not facts["libdnnl"]["found"] and facts["libdnnl"]["looked_at"][0]["path"] == "/nowhere/libdnnl.so.3"
    assert facts["libdnnl"]["looked_at"][0]["problem"]
    said = {advice["what"]: advice["to"] for advice in facts["advice"]}
    assert {"instruction sets", "bits", "self-checks", "libdnnl"} <= said.keys()
    assert 'backend="torchscript"' in said["stage"]


def test_kernels_that_failed_their_check(monkeypatch):
    monkeypatch.setattr(selfcheck, "_ledger", selfcheck._Ledger())
    selfcheck.note_failure(selfcheck.Failure("some_conv", "2x3x8x8", "-4 dB", "unfold + linear"))
    found = dbrq.doctor()
    assert found.to_dict()["kernels"]["failed_here"][0]["problem"] == "-4 dB"
    assert "unfold + linear" in advised(found, "some_conv")[0] and "some_conv" in str(found)


@pytest.mark.skipif(not has_exact_int8_dot(), reason="no model gets 8 bits here")
def test_eight_bits_where_products_saturate(quantized, monkeypatch):
    monkeypatch.setattr(sys.modules["dbrq.inspection.doctor"], "has_exact_int8_dot", lambda: False)
    assert any("made with 8 bits" in to for to in advised(dbrq.doctor(quantized, example()), "bits"))


def test_each_stage_says_what_comes_next(quantized):
    float_model, x = model(), example()
    stages = {
        "float": (float_model, "quantize"),
        "prepared": (dbrq.prepare(float_model, x), "calibrate"),
        "converted": (quantized, "dbrq.lower"),
    }
    for stage, (given, words) in stages.items():
        found = dbrq.doctor(given, x)
        assert found.model["stage"] == stage and words in advised(found, "stage")[0], found
        assert found.model["coverage"] == pytest.approx(dbrq.report(stages["prepared"][0]).coverage)
        assert found.model["float_by_share"][0]["path"] == "5" and "transposed" in str(found)
        assert found.model["problem"] == "" and found.model["tiny"] == ["0", "3"]


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_lowered_models(quantized, backend):
    x = example()
    lowered = dbrq.lower(quantized, x, backend=backend)
    found = dbrq.doctor(lowered, x)
    assert (found.model["stage"], found.model["backend"], found.model["problem"]) == ("lowered", backend, "")
    assert not advised(found, "stage") and bool(advised(found, "backend")) == (backend == "torchscript")


class Counts(nn.Module):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_it_changes_nothing():
    counts, y = Counts(), torch.randn(2, 8)
    prepared = dbrq.prepare(counts, y)
    prepared(y)
    converted = dbrq.convert(prepared)
    lowered = dbrq.lower(converted, y)
    for given in (counts, prepared, converted, lowered):
        before = {name: copy.deepcopy(value) for name, value in given.state_dict().items()}
        training = given.training
        assert dbrq.doctor(given, y).model["problem"] == ""
        after = given.state_dict()
        assert given.training == training and before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before if isinstance(before[name], torch.Tensor))


def test_odd_models_are_findings_and_no_errors(quantized):
    def fails(m, x):
        raise KeyError("on purpose")

    for odd, inputs, words in (
        (Call(fails), example(), "KeyError"),
        (model(), (), "TypeError"),
        (quantized, torch.randn(2, 4, 8, 8), "KernelInputError"),
        (nn.Module(), example(), "forward"),
    ):
        found = dbrq.doctor(odd, inputs)
        assert words in found.model["problem"] and "does not run" in str(found)
    assert dbrq.doctor(nn.Identity(), example()).model["coverage"] == 0.0


@pytest.mark.parametrize("wrong", [("model",), (nn.Linear,), (None, torch.zeros(1)), (torch.zeros(1),)])
def test_wrong_arguments(wrong):
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.doctor(*wrong)


def test_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    assert "set_num_threads" in advised(dbrq.doctor(), "threads")[0]
