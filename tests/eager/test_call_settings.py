"""An op is the recorded one only if it is called with what was recorded: its bias, statistics, settings and methods.

Each of these gave the numbers of another call, silently, on paths that calibration had seen.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, float_qparams_weight_only_qconfig

import dbrq
from tests.helpers import sqnr

X, ROWS = torch.randn(2, 8, 6, 6), torch.randn(4, 8)


class Layers(nn.Module):
    """Layers, parameters and norms for a forward to choose from."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.linear, self.slope = nn.Linear(8, 8), nn.LeakyReLU(0.1)
        self.biases = nn.Parameter(torch.randn(3, 8) * 4)
        self.one, self.other = nn.Parameter(torch.randn(8) * 4), nn.Parameter(torch.randn(8) * 4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 4)

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


def norm(m: Layers, x: Tensor, k: int, **settings: Any) -> Tensor:
    n = m.norms[k]
    return torch.relu(F.batch_norm(m.a(x), n.running_mean, n.running_var, n.weight, n.bias, momentum=0.0, **settings))


def assigned(m: Layers, name: str, attribute: str, value: Any) -> nn.Module:
    setattr(m.get_submodule(name), attribute, value)
    return m


def functional_call(m: Layers, x: Tensor, k: int) -> Tensor:
    parameters = dict((m.b if k else m.a).named_parameters())
    return torch.func.functional_call(m.a, parameters, (x,)) + 0.0


#: name -> forward, the first call, another that is calibrated too, one that calibration does not see
CASES: dict[str, tuple[Callable, tuple, tuple, tuple | None]] = {
    "bias": (lambda m, x, k: F.conv2d(x, m.a.weight, m.biases[k]), (X, 0), (X, 1), (X, 2)),
    "no bias": (lambda m, x, k: F.conv2d(x, m.a.weight, m.one if k else None), (X, 0), (X, 1), None),
    "linear": (lambda m, x, k: F.linear(x, m.linear.weight, m.biases[k]), (ROWS, 0), (ROWS, 1), (ROWS, 2)),
    "addmm": (lambda m, x, k: torch.addmm(m.biases[k], x, m.linear.weight.t()), (ROWS, 0), (ROWS, 1), (ROWS, 2)),
    "statistics": (norm, (X, 0), (X, 1), (X, 2)),
    "eps": (lambda m, x, e: norm(m, x, 0, eps=e), (X, 1e-5), (X, 5.0), (X, 1.0)),
    "training": (lambda m, x, t: norm(m, x, 0, training=t), (X, False), (X, True), None),
    "dilation": (
        lambda m, x, d: assigned(assigned(m, "a", "dilation", (d, d)), "a", "padding", (d, d)).a(x),
        (X, 1), (X, 2), (X, 3)),
    "stride": (lambda m, x, s: assigned(m, "a", "stride", (s, s)).a(x), (X, 1), (X, 2), None),
    "padding mode": (
        lambda m, x, p: assigned(m, "a", "padding_mode", p).a(x), (X, "zeros"), (X, "zeros"), (X, "circular")),
    "eps of a module": (
        lambda m, x, e: torch.relu(assigned(m, "norms.0", "eps", e).norms[0](m.a(x))), (X, 1e-5), (X, 5.0), (X, 1.0)),
    "slope": (lambda m, x, s: assigned(m, "slope", "negative_slope", s).slope(m.a(x)), (X, 0.1), (X, 0.1), (X, 0.9)),
    "bias of a module": (
        lambda m, x, k: assigned(m, "a", "bias", m.one if k else m.other).a(x), (X, 0), (X, 1), None),
    "functional_call": (functional_call, (X, 0), (X, 1), None),
    "bound that is a tensor": (
        lambda m, x, high: m.b(torch.clamp(m.a(x), 0, high)), (X, None), (X, torch.tensor(0.1)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_call_is_given(name: str) -> None:
    forward, *calls = CASES[name]
    model = Layers(forward).eval()
    with torch.no_grad():
        quantized = dbrq.quantize(copy.deepcopy(model), calls[:2], progress=False)
        for call in (*calls, calls[0]):
            if call is None:
                continue
            expected = copy.deepcopy(model)(*call)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a path was not recorded
                result = quantized(*call)
            assert result.shape == expected.shape and sqnr(expected, result) > 25, call[1]


@pytest.mark.parametrize("name", ["bias", "statistics", "dilation"])
def test_strict_models_refuse_what_was_not_recorded(name: str) -> None:
    forward, first, other, unseen = CASES[name]
    prepared = dbrq.prepare(Layers(forward).eval(), first)
    dbrq.calibrate(prepared, [first, first], progress=False)
    quantized = dbrq.convert(prepared, strict=True)
    with pytest.raises(dbrq.DeviationError):
        quantized(*(unseen or other))


class Standardized(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight * 3 + 0.1, bias)


@pytest.mark.parametrize("backend", ["converted", "torchscript", "onednn"])
def test_layers_that_override_what_their_forward_calls(backend: str) -> None:
    """They were taken for torch's own."""
    if backend == "onednn":
        pytest.importorskip("dbrq.lowering.onednn")
    model = nn.Sequential(Standardized(8, 8, 3), nn.ReLU()).eval()
    run = dbrq.quantize(model, [X], progress=False)
    run = run if backend == "converted" else dbrq.lower(run, X, backend=backend)
    with torch.no_grad():
        assert sqnr(model(X), run(X)) > 25


def test_a_padding_index_that_counts_from_the_end() -> None:
    table = nn.Embedding(10, 4)

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, index):
            return F.embedding_bag(index, self.table.weight, mode="mean", padding_idx=-1)

    index = torch.tensor([[1, 9, 2], [9, 9, 3]])
    model, mapping = Bag().eval(), QConfigMapping().set_global(float_qparams_weight_only_qconfig)
    quantized = dbrq.quantize(model, [index], mapping, progress=False)
    assert sqnr(model(index), quantized(index)) > 30
