"""Biases and weights: shared, chosen, replaced, assigned, written to, of odd kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.models import IMAGES, ROWS, Images, Rows
from tests.helpers.running import quantized, quantized_on, quietly, run
from tests.helpers.written import Layers, batches, calibrated

Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

# Biases, weights


class OneNumber(nn.Module):
    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("backend", ["converted", "torchscript"])
def test_a_bias_of_one_number(shape: tuple[int, ...], backend: str) -> None:
    model = OneNumber(shape)
    run = quantized(model, ROWS)
    run = run if backend == "converted" else dbrq.lower(run, ROWS[0], backend=backend)
    with torch.no_grad():
        assert sqnr(model(ROWS[0]), run(ROWS[0])) > 35


class Bank(nn.Linear):
    """A layer whose weight is one of several."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        del self._parameters["weight"]
        self.bank, self.index = nn.Parameter(torch.randn(2, 16, 16) * 0.3), 0

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.bank[self.index]


class Chooses(Rows):
    def __init__(self) -> None:
        super().__init__(lambda m, x, i: setattr(m.a, "index", i) or m.b(F.relu(m.a(x))))
        self.a = Bank()


def with_weight_of(other: str) -> Callable:
    def forward(m: Rows, x: Tensor, flag: bool) -> Tensor:
        if flag:
            m.a.weight = getattr(m, other).weight
        return m.b(F.relu(m.a(x)))

    return forward


def kept(m: Rows, x: Tensor, flag: bool) -> Tensor:
    """The weight is read in float too, so it stays as a parameter."""
    if flag:
        m.a.weight = nn.Parameter(m.a.weight.detach() * 3)
    return m.b(F.relu(m.a(x))) + m.a.weight.sin().sum()


def with_bias(m: Rows, x: Tensor, flag: bool) -> Tensor:
    if flag:
        m.a.bias = None
    return m.b(F.relu(m.a(x)))


@pytest.mark.parametrize(
    ("model", "recorded", "other"),
    [
        (Chooses(), 0, 1),
        (Rows(with_weight_of("b")), False, True),
        (Rows(kept), False, True),
        (Rows(with_bias), False, True),
    ],
    ids=["property", "used elsewhere", "kept", "no bias"],
)
def test_a_layer_has_another_weight(model: nn.Module, recorded: Any, other: Any) -> None:
    data = [(x, recorded) for x in ROWS]
    converted = quantized(model, data)
    with torch.no_grad():
        for value in (recorded, other):
            result, expected = quietly(converted, ROWS[0], value), copy.deepcopy(model)(ROWS[0], value)
            assert sqnr(expected, result) > 30, value


def test_weights_assigned_to_a_converted_model() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.LSTM(16, 16), nn.LSTM(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)[0] + self.b(x)[0]

    dynamic = torch.ao.quantization.QConfigMapping().set_global(torch.ao.quantization.default_dynamic_qconfig)
    for model, names in ((Rows(lambda m, x: m.b(F.relu(m.a(x)))), ["weight"]), (Recurrent(), ["weight_hh_l0"])):
        mapping = dynamic if isinstance(model, Recurrent) else None
        converted = dbrq.quantize(copy.deepcopy(model).eval(), ROWS, mapping, progress=False)
        with torch.no_grad():
            converted(ROWS[0])
            for name in names:
                setattr(model.a, name, getattr(model.b, name))
                setattr(converted.a, name, getattr(converted.b, name))
            assert sqnr(model(ROWS[0]), quietly(converted, ROWS[0])) > 25


# Arguments and weights of kinds that are seldom met


class Weighed(nn.Module):
    def __init__(self, function: Callable, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.w, self.b = function, nn.Parameter(torch.randn(*shape)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


STRANGE: dict[str, tuple[nn.Module, list[Tensor]]] = {
    "numpy slope": (Rows(lambda m, x: m.b(F.leaky_relu(m.a(x), np.float32(0.3)))), ROWS),
    "tensor slope": (Rows(lambda m, x: m.b(F.leaky_relu(m.a(x), torch.tensor(0.3)))), ROWS),
    "numpy strides": (
        Images(lambda m, x: F.conv2d(x, m.a.weight, m.a.bias, stride=(np.int64(2), np.int64(2)))), IMAGES),
    "a weight that is a vector": (Weighed(lambda m, x: m.b(x) + F.linear(x, m.w).unsqueeze(1), 16), ROWS),
    "no outputs": (nn.Sequential(nn.Linear(16, 0)), ROWS),
    "no inputs": (nn.Sequential(nn.Linear(0, 4)), [x[:, :0] for x in ROWS]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", STRANGE)
def test_arguments_and_weights_that_are_seldom_met(name: str) -> None:
    model, data = STRANGE[name]
    result, expected = quantized(model, data)(data[0]), model(data[0])
    assert result.shape == expected.shape
    assert not expected.numel() or torch.equal(expected, result) or sqnr(expected, result) > 30


@pytest.mark.parametrize(
    "look_up",
    [lambda m: m.a._parameters["weight"], lambda m: dict(m.named_parameters())["a.weight"]],
    ids=["_parameters", "named_parameters"],
)
def test_parameters_looked_up_by_name(look_up: Callable) -> None:
    converted = quantized(Rows(lambda m, x: F.linear(x, look_up(m), m.a.bias)), ROWS)
    with pytest.raises(dbrq.QuantizationError, match="int8 weight"):
        converted(ROWS[0])
    other = quantized(Rows(lambda m, x, key: {"a": m.a(x)}[key]), [(x, "a") for x in ROWS])
    with pytest.raises(KeyError):
        other(ROWS[0], "b")


def test_inputs_that_cannot_be_copied() -> None:
    class Plain(Tensor):
        pass

    with pytest.raises(dbrq.ConfigurationError, match="copied"):
        dbrq.prepare(nn.Sequential(nn.Linear(16, 4)), ROWS[0].as_subclass(Plain))


# Writes to int8 weights


def in_forward(code: Callable) -> Callable:
    def forward(m: Layers, x: Tensor, flag: bool = False) -> Tensor:
        if flag:
            code(m.b.weight)
        return m.b(F.relu(m.a(x)))

    return forward


WEIGHT_WRITES = {
    "init": lambda w: nn.init.zeros_(w),
    "init of a part": lambda w: nn.init.zeros_(w[8:]),
    "data": lambda w: w.data.zero_(),
    "data of a part": lambda w: w[:8].data.zero_(),
    "item": lambda w: w.__setitem__(0, 1.0),
    "view": lambda w: w.t().add_(1),
    "out": lambda w: torch.mul(w, 2, out=w[:]),
    "row": lambda w: next(iter(w)).fill_(3),
}


@pytest.mark.parametrize("write", WEIGHT_WRITES.values(), ids=WEIGHT_WRITES)
@torch.no_grad()
def test_a_write_to_an_int8_weight_is_refused(write: Callable) -> None:
    class Flagged(Layers):
        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            return self.code(self, x, flag)

    model = Flagged(in_forward(write)).eval()
    converted = calibrated(model, batches())
    before = converted(batches()[0])
    with pytest.raises(dbrq.QuantizationError, match="in place"):
        converted(batches()[0], True)
    with pytest.raises(dbrq.QuantizationError, match="in place"):
        write(converted.b.weight)
    assert torch.equal(converted(batches()[0]), before)


def test_a_replaced_weight_is_told():
    model = quantized_on(nn.Sequential(nn.Linear(16, 16)), Z)
    model[0].weight = nn.Parameter(torch.zeros(16, 16))
    with pytest.raises(dbrq.QuantizationError, match="replaced"):
        model(Z)


def test_a_bias_that_is_taken_away_is_told():
    float_ = nn.Sequential(nn.Linear(16, 16))
    model = quantized_on(float_, Z)
    float_[0].bias = model[0].bias = None
    with pytest.warns(UserWarning, match="0 runs in float"):
        result = model(Z)
    assert sqnr(run(float_, Z), result) > 35


def test_next_parameter_of_a_module_without_biases():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return self.linear(x.to(next(self.parameters()).dtype))

    model = nn.Sequential(Plain(), Plain())
    assert sqnr(run(model.eval(), Z), run(quantized_on(model, Z), Z)) > 25
