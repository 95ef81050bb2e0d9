"""An op is the recorded one only if it is called with what was recorded: its bias, statistics, settings and methods.

Each of these gave the numbers of another call, silently, on paths that calibration had seen.
"""

from __future__ import annotations

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
from tests.helpers.judging import sqnr
from tests.helpers.models import IMAGES, ROWS, Images, Rows
from tests.helpers.running import quantized, run

X, TOKENS = torch.randn(2, 8, 6, 6), torch.randn(4, 8)


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
    "linear": (lambda m, x, k: F.linear(x, m.linear.weight, m.biases[k]), (TOKENS, 0), (TOKENS, 1), (TOKENS, 2)),
    "addmm": (lambda m, x, k: torch.addmm(m.biases[k], x, m.linear.weight.t()), (TOKENS, 0), (TOKENS, 1), (TOKENS, 2)),
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


# Settings of functions

#: name -> model, what calibration gives beside the data, what it never gave
SETTINGS: dict[str, tuple[nn.Module, tuple, Any]] = {
    "interpolate": (
        Images(lambda m, x, mode: m.b(F.interpolate(F.relu(m.a(x)), scale_factor=2, mode=mode))), ("nearest",),
        "bicubic"),
    "a number": (Rows(lambda m, x, k: m.b(F.relu(m.a(x)) * k)), (1.0,), 50.0),
    "a number, in place": (Rows(lambda m, x, k: m.b(F.relu(m.a(x)).mul_(k))), (1.0,), 50.0),
    "a tensor for a number": (Rows(lambda m, x, k: m.b(F.relu(m.a(x)) * k)), (1.0,), torch.full((8, 16), 50.0)),
    "a number for a tensor": (Rows(lambda m, x, k: m.b(m.a(x) + k)), (torch.full((8, 16), 0.5),), 50.0),
    "one of several numbers": (Rows(lambda m, x, k: m.b(F.relu(m.a(x)) * k)), (1.0, 3.0, 2.0), 50.0),
    "alpha": (Rows(lambda m, x, k: m.c(torch.add(m.a(x), m.b(x), alpha=k))), (1,), 40),
    "rounding": (Rows(lambda m, x, k: m.b(torch.div(m.a(x), 0.5, rounding_mode=k))), (None,), "floor"),
    "slope": (Rows(lambda m, x, k: m.b(F.leaky_relu(torch.sin(m.a(x)), k))), (0.1,), 30.0),
    "bound": (Rows(lambda m, x, k: m.b(torch.clamp(torch.exp(m.a(x)), k, 50.0))), (0.1,), 40.0),
    "pad": (Rows(lambda m, x, k: m.b(F.pad(m.a(x), (0, 4), value=k)[:, 4:])), (0.0,), 50.0),
    "dropout": (Rows(lambda m, x, k: m.b(F.dropout(m.a(x), 0.99, training=k))), (False,), True),
    "divisor": (
        Images(lambda m, x, k: m.b(F.avg_pool2d(F.relu(m.a(x)), 2, divisor_override=k))), (None,), 1),
    "indices": (
        Images(lambda m, x, k: (lambda y: m.b(y[0] if k else y))(F.max_pool2d(F.relu(m.a(x)), 2, return_indices=k))),
        (False,), True),
    "a module's": (
        Rows(lambda m, x, k: setattr(m.elu, "alpha", k) or m.b(m.elu(torch.sin(m.a(x))))), (1.0,), 60.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_than_were_recorded(name: str) -> None:
    model, recorded, other = SETTINGS[name]
    data = [(x, recorded[i % len(recorded)]) for i, x in enumerate(IMAGES if isinstance(model, Images) else ROWS)]
    converted, strict = quantized(model, data), quantized(model, data, strict=True)
    x = data[0][0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # what was recorded is no cause to warn
        for value in recorded:
            assert sqnr(model(x, value), converted(x, value)) > 25
    with torch.no_grad(), pytest.warns(UserWarning, match="runs in float"):
        torch.manual_seed(0)
        result = converted(x, other)
    torch.manual_seed(0)
    assert sqnr(model(x, other), result) > 20
    with torch.no_grad(), pytest.raises(dbrq.DeviationError):
        strict(x, other)


def test_a_number_between_those_recorded_is_none_of_these() -> None:
    model = Rows(lambda m, x, k: m.b(F.relu(m.a(x)) * k))
    strict = quantized(model, [(x, k) for x, k in zip(ROWS, (1.0, 2.0, 4.0, 4.0), strict=True)], strict=True)
    with torch.no_grad():
        assert sqnr(model(ROWS[0], 3.0), strict(ROWS[0], 3.0)) > 25


def test_sizes_are_no_settings() -> None:
    def forward(m: Images, x: Tensor) -> Tensor:
        h = F.avg_pool2d(F.pad(F.relu(m.a(x)), (0, x.shape[-1] % 4)), x.shape[-1] // 4)
        return m.b(F.interpolate(h, size=(h.shape[-1] + 3, 8)) + 0.0)

    model = Images(forward)
    strict = quantized(model, IMAGES, strict=True)
    with torch.no_grad():
        for size in (12, 17, 20):
            x = torch.randn(2, 3, size, size)
            assert sqnr(model(x), strict(x)) > 15


def test_a_recorded_pad_with_a_number_has_a_range_of_its_own() -> None:
    model = Rows(lambda m, x: m.b(F.pad(m.a(x), (0, 4), value=50.0)[:, 4:]) + m.c(m.a(x)))
    strict = quantized(model, ROWS, strict=True)
    with torch.no_grad():
        assert sqnr(model(ROWS[0]), strict(ROWS[0])) > 25


@pytest.mark.parametrize("strict", [False, True])
def test_numbers_made_of_sizes_are_fine_while_what_comes_of_them_is_in_range(strict: bool) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).sum(1) / x.shape[1])

    model, x = Pooled().eval(), torch.randn(16, 8, 8)
    prepared = dbrq.prepare(model, x)
    prepared(x)
    converted = dbrq.convert(prepared, strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(run(model, x[:, :6]), run(converted, x[:, :6])) > 25
