"""Found by an audit of converted models: silent wrong numbers, and errors that were none of dbrq's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers import run, sqnr

ROWS = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
IMAGES = [torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(4)]


class Rows(nn.Module):
    """Layers for a forward to choose from."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.elu = nn.ELU()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Images(Rows):
    def __init__(self, function: Callable):
        super().__init__(function)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)


def quantized(model: nn.Module, data: Sequence[Any], strict: bool = False) -> nn.Module:
    prepared = dbrq.prepare(copy.deepcopy(model).eval(), data[0])
    dbrq.calibrate(prepared, data, progress=False)
    return dbrq.convert(prepared, strict=strict)


def quietly(model: Callable, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(*args)


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


# Derivatives in forward, and of a converted model


def forces(m: Rows, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.b(torch.tanh(m.a(x))).sum() + 0.01 * (x**2).sum()
        return torch.autograd.grad(energy, x)[0]


def scalar(m: Rows, z: Tensor) -> Tensor:
    return torch.tanh(m.b(z)).sum() + 0.1 * (z**2).sum()


def added(m: Rows, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(((F.relu(h + z) + z) ** 2).sum(), z)[0]


DIFFERENTIATES: dict[str, Callable] = {
    "autograd.grad": forces,
    "an add": added,
    "func.grad": lambda m, x: torch.func.grad(lambda z: scalar(m, z))(x),
    "func.jacrev": lambda m, x: torch.func.jacrev(lambda z: torch.tanh(m.b(z)))(x[0]),
    "jacobian": lambda m, x: torch.autograd.functional.jacobian(lambda z: torch.tanh(m.b(z)).sum(0) + z.sum(0), x),
    "vmap": lambda m, x: m.b(F.relu(torch.vmap(m.a)(x))),
    "vmap of an int8 value": lambda m, x: m.b(F.relu(torch.vmap(m.c)(F.relu(m.a(x))))),
}


@pytest.mark.parametrize("name", DIFFERENTIATES)
def test_derivatives_in_forward(name: str) -> None:
    model = Rows(DIFFERENTIATES[name])
    converted, strict = quantized(model, ROWS), quantized(model, ROWS, strict=True)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="derivative"):
            assert sqnr(model(ROWS[0]), converted(ROWS[0])) > 35
        with pytest.raises(dbrq.DeviationError, match="derivative"):
            strict(ROWS[0])


@pytest.mark.parametrize("recurrent", [False, True])
def test_derivatives_in_forward_of_dynamic_layers(recurrent: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.LSTM(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                return torch.autograd.grad(self.b(self.a(z)[0] if recurrent else z).tanh().sum(), z)[0]

    mapping = torch.ao.quantization.QConfigMapping().set_global(torch.ao.quantization.default_dynamic_qconfig)
    model = Recurrent().eval()
    converted = dbrq.quantize(model, ROWS, mapping, progress=False)
    assert sqnr(model(ROWS[0]), quietly(converted, ROWS[0])) > 30


def test_forward_mode_derivatives_of_a_converted_model_are_refused() -> None:
    run = quantized(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), ROWS)
    x = ROWS[0]
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        torch.func.jvp(run, (x,), (x,))
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        torch.func.jacfwd(run)(x)
    with torch.autograd.forward_ad.dual_level():
        run(x)  # of which none is asked for
        with pytest.raises(dbrq.QuantizationError, match="no gradient"):
            run(torch.autograd.forward_ad.make_dual(x, x))


# Other dtypes


def test_autocast_in_forward() -> None:
    def forward(m: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
            g = F.linear(x, m.c.weight)
        return h, m.b(h.float()) + g

    model = Rows(forward)
    converted = quantized(model, ROWS, strict=True)
    with torch.no_grad():
        for expected, result in zip(model(ROWS[0]), converted(ROWS[0]), strict=True):
            assert result.dtype is expected.dtype and sqnr(expected.float(), result.float()) > 30
    rows = {row.path: row for row in dbrq.report(converted).rows}
    assert [rows[name].precision for name in ("a", "b", "linear.0")] == ["float", "int8", "float"]
    assert "bfloat16" in rows["a"].reason


# Values, as the user's code has them

RESHAPES: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "squeeze_": lambda h: h.squeeze_(),
    "t_": lambda h: h.t_(),
    "transpose_": lambda h: h.transpose_(0, 1),
    "swapaxes_": lambda h: h.swapaxes_(0, 1),
    "resize_": lambda h: h.resize_(4, 16),
    "resize_as_": lambda h: h.resize_as_(torch.zeros(2, 2)),
    "as_strided_": lambda h: h.as_strided_((2, 2), (1, 1)),
    "set_": lambda h: h.set_(torch.zeros(3)),
    "data": lambda h: setattr(h, "data", torch.zeros(3)),
}


@pytest.mark.parametrize("name", RESHAPES)
@pytest.mark.parametrize("fused", [False, True])
def test_an_in_place_op_that_changes_the_shape(name: str, fused: bool) -> None:
    def forward(m: Rows, x: Tensor, flag: bool) -> Tensor:
        h = F.relu(m.a(x)) if fused else m.a(x)
        if not flag:
            return m.b(h)
        RESHAPES[name](h)
        m.seen = tuple(h.shape)
        return h + 1.0

    model, rows = Rows(forward), [x[:1] if name == "squeeze_" else x for x in ROWS]
    never = quantized(model, [(x, False) for x in rows])
    with torch.no_grad():
        expected = model(rows[0], True)
        try:
            result = quietly(never, rows[0], True)
        except dbrq.QuantizationError:
            assert sqnr(model(rows[0], False), never(rows[0], False)) > 30
        else:
            assert result.shape == expected.shape and sqnr(expected, result) > 30
            assert never.seen == model.seen


# Layers called by themselves


def test_a_layer_by_itself_reads_with_all_its_ranges() -> None:
    class Inner(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * 100)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
            self.inner = Inner(self.a)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.a(x * 0.01)) + self.a(x * 10) + self.inner(x)

    model = Shared()
    converted = quantized(model, ROWS, strict=True)
    with torch.no_grad():
        for factor in (10, 100):
            assert sqnr(model.a(ROWS[0] * factor), converted.a(ROWS[0] * factor)) > 20
        assert torch.equal(converted.unused(ROWS[0]), model.unused(ROWS[0]))


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


# What forward asks of values and weights


def test_tied_weights_are_one_object() -> None:
    class Tied(Rows):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.b(F.relu(m.a(x))) * (3.0 if m.a.weight is m.b.weight else 1.0))
            self.b.weight = self.a.weight

    model = Tied()
    converted = quantized(model, ROWS)
    with torch.no_grad():
        for run in (converted, copy.deepcopy(converted)):
            assert sqnr(model(ROWS[0]), run(ROWS[0])) > 30


NOTES = ("stage", "tag", "alias", "deferred")


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("follower", [F.gelu, torch.sin, lambda h: h.view(8, 16)[:4]])
def test_attributes_that_forward_sets_on_values(name: str, follower: Callable) -> None:
    def forward(m: Rows, x: Tensor) -> Tensor:
        h = m.a(x)
        unset = not any(hasattr(h, note) for note in NOTES)
        setattr(h, name, "a note")
        h = m.b(follower(h))
        setattr(h, name, 1)
        return m.c(h) * (2.0 if unset and getattr(h, name) == 1 else 1.0)

    model = Rows(forward)
    with torch.no_grad():
        assert sqnr(model(ROWS[0]), quantized(model, ROWS, strict=True)(ROWS[0])) > 30


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
