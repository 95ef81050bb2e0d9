"""A minute that touches every public function and every backend, with nothing but dbrq and pytest installed.

``pytest -m smoke`` runs it. CI runs it on a wheel without extras too: what needs an extra is skipped there.
"""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq.errors import OneDNNError

pytestmark = pytest.mark.smoke


class Small(nn.Module):
    """Convolutions with a residual sum, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(self.block(x) + x)
        return self.head(x.mean((2, 3)))


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
BACKENDS = ("torchscript", "onednn", "inductor")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def quantized(model) -> nn.Module:
    return dbrq.quantize(model, [X], progress=False)


def sqnr(expected: Tensor, got: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (expected - got).norm()))


def lowered(quantized: nn.Module, backend: str) -> nn.Module:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    try:
        return dbrq.lower(quantized, X, backend=backend)
    except OneDNNError as error:
        if "not found" in str(error) or "install" in str(error):
            pytest.skip("libdnnl is not installed")
        raise


def steps(model, quantized, path):
    prepared = dbrq.prepare(model, X)
    dbrq.calibrate(prepared, [X], progress=False)
    assert sqnr(model(X), dbrq.convert(prepared)(X)) > 25


def settings(model, quantized, path):
    prepared = dbrq.prepare(model, X, dbrq.default_qconfig_mapping(reduce_range=True))
    observers = [m for m in prepared.modules() if isinstance(m, dbrq.HistogramObserver)]
    assert observers
    prepared(X)
    assert sqnr(model(X), dbrq.convert(prepared)(X)) > 20
    dynamic = dbrq.quantize(model, [X], dbrq.dynamic_qconfig_mapping())
    assert sqnr(model(X), dynamic(X)) > 25


def fusions(model, quantized, path):
    assert ["stem.0", "stem.1", "stem.2"] in dbrq.find_fusions(model, X)


def reports(model, quantized, path):
    assert dbrq.report(quantized).coverage == 1.0
    assert min(row.sqnr for row in dbrq.compare(model, quantized, X).rows) > 15
    assert dbrq.log_values(quantized, X)


def checks(model, quantized, path):
    dbrq.set_self_check(False)
    try:
        assert sqnr(model(X), quantized(X)) > 25
    finally:
        dbrq.set_self_check(True)
    assert "cpu" in str(dbrq.doctor()).lower()


def files(model, quantized, path):
    dbrq.save(quantized, path / "model.pt")
    assert torch.equal(dbrq.load(path / "model.pt")(X), quantized(X))
    dbrq.save_recipe(quantized, path / "recipe.json")
    again = dbrq.convert(dbrq.load_recipe(dbrq.prepare(model, X), path / "recipe.json"))
    assert sqnr(quantized(X), again(X)) > 40
    dbrq.save_calibration(dbrq.calibrate(dbrq.prepare(model, X), [X]), path / "calibration.pt")
    dbrq.convert(dbrq.load_calibration(dbrq.prepare(model, X), path / "calibration.pt"))


def graphs(model, quantized, path):
    graph = dbrq.rewrite(quantized, X)
    assert sqnr(model(X), graph(X)) > 25
    assert sqnr(model(X), dbrq.export(quantized, X).module()(X)) > 25


def onnx(model, quantized, path):
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        pytest.skip("onnx is not installed")
    dbrq.export_onnx(quantized, X, path / "model.onnx")
    assert (path / "model.onnx").stat().st_size > 1000


def accuracy(model, quantized, path):
    again = dbrq.quantize(model, [X], preset=dbrq.Preset(smoothing=True, bias_correction="fast"))
    assert sqnr(model(X), again(X)) > 25
    assert dbrq.sensitivity(model, [X]).rows
    result = dbrq.tune(model, [X], max_drop=30)
    assert isinstance(result, dbrq.TuneResult) and result.reached


def profiles(model, quantized, path):
    lowered = dbrq.lower(quantized, X)
    assert dbrq.profile(lowered, X, repeats=2).rows
    assert dbrq.lowered_form(lowered) is lowered and dbrq.lowered_form(quantized) is None


#: What each case is for.
CASES: dict[Callable, tuple[str, ...]] = {
    steps: ("prepare", "calibrate", "convert"),
    settings: ("default_qconfig_mapping", "dynamic_qconfig_mapping", "HistogramObserver"),
    fusions: ("find_fusions",),
    reports: ("report", "compare", "log_values"),
    checks: ("set_self_check", "doctor"),
    files: ("save", "load", "save_recipe", "load_recipe", "save_calibration", "load_calibration"),
    graphs: ("rewrite", "export"),
    onnx: ("export_onnx",),
    profiles: ("profile", "lowered_form"),
    accuracy: ("Preset", "sensitivity", "tune", "TuneResult"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_public_functions(case: Callable, model: nn.Module, quantized: nn.Module, tmp_path: Path) -> None:
    with torch.no_grad():
        case(model, quantized, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend: str, model: nn.Module, quantized: nn.Module) -> None:
    run = lowered(quantized, backend)
    with torch.no_grad():
        for x in (X, X[:1], X.flip(0)):
            assert sqnr(model(x), run(x)) > 25


def test_every_public_function_is_covered() -> None:
    covered = {name for names in CASES.values() for name in names} | {"quantize", "lower"}
    covered.add("from_pretrained")  # serialization/test_pretrained.py: it takes transformers
    functions = {
        name
        for name in dbrq.__all__
        if not (isinstance(getattr(dbrq, name), type) and issubclass(getattr(dbrq, name), Exception))
    }
    assert covered == functions
