"""State of lowered models: it lasts, is loaded and copied, and looking at it does not advance it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.calls import BACKENDS, calls
from tests.helpers.judging import sqnr
from tests.helpers.models import Call

PYTHON_BACKENDS = ("onednn", "torchscript")
ALL_BACKENDS = ("onednn", "inductor", "torchscript")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.l, self.e = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("h", torch.zeros(16, 4))

    def forward(self, x):
        self.h = self.h * 0.9 + self.e(torch.relu(self.l(self.n(x))))
        return self.h * 1.0


def _normed(backend):
    x = torch.randn(16, 8)
    quantized = dbrq.quantize(Normed().eval(), [x])
    return x, quantized, dbrq.lower(quantized, x, backend=backend)


@pytest.mark.parametrize("outer", [False, True], ids=["itself", "inside another"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@torch.no_grad()
def test_other_weights_in_a_lowered_model(backend, outer):
    """A program of TorchScript has none; a model whose forward was replaced gets its own forward back."""
    x, quantized, lowered = _normed(backend)
    _, _, other = _normed(backend)
    state = {k: v + 1 if v.is_floating_point() else v for k, v in other.state_dict().items()}
    target = nn.Sequential(lowered) if outer else lowered
    state = {f"0.{k}": v for k, v in state.items()} if outer else state
    if backend == "torchscript":
        assert set(lowered.state_dict()) == {"h"}  # in C++ and without dbrq there is nobody to raise
        return
    target.load_state_dict(state)
    expected = copy.deepcopy(quantized)
    expected.load_state_dict({k.removeprefix("0."): v for k, v in state.items()})
    with pytest.warns(UserWarning, match="other weights than when it was lowered"):
        assert torch.equal(lowered(x), expected(x))
    again = dbrq.lower(lowered, x, backend=backend)
    again.n.weight = nn.Parameter(torch.ones(8), requires_grad=False)
    expected.n.weight = nn.Parameter(torch.ones(8), requires_grad=False)
    expected.h.copy_(again.h)
    with pytest.warns(UserWarning, match="other weights than when it was lowered"):
        assert torch.equal(again(x), expected(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@torch.no_grad()
def test_state_is_loaded_into_a_lowered_model(backend, assign):
    x, _, lowered = _normed(backend)
    fresh, first = copy.deepcopy(lowered.state_dict()), lowered(x).clone()
    lowered(x)
    lowered.load_state_dict(fresh, assign=assign)
    assert torch.equal(lowered(x), first)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@torch.no_grad()
def test_assigned_state_takes_effect(backend):
    x, quantized, lowered = _normed(backend)
    for _ in range(2):
        quantized(x), lowered(x)
    zeros = torch.zeros(16, 4)
    quantized.h = lowered.h = zeros
    assert sqnr(quantized(x), lowered(x)) > 40
    if backend != "torchscript":
        assert not zeros.any()  # it was copied
        lowered.h = torch.zeros(16, 5)
        with pytest.raises(dbrq.QuantizationError, match="keeps its shape"):
            lowered(x)
        lowered(x)


@torch.no_grad()
def test_a_copy_of_a_scripted_model_has_tensors_of_its_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.n, self.l = nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x):
            return self.l(self.n(self.c(x)))

    x = torch.randn(1, 3, 8, 8)
    lowered = dbrq.lower(dbrq.quantize(Net().eval(), [x]), x)
    other = copy.deepcopy(lowered)
    expected = lowered(x)
    names = ("c.weight", "c.scale", "c.bias", "l.weight", "l.scale", "l.bias", "n.weight")
    for name in names:
        tensors = [operator.attrgetter(name)(model) for model in (lowered, other)]
        assert tensors[0].data_ptr() != tensors[1].data_ptr(), name
        tensors[1].zero_()
    assert torch.equal(lowered(x), expected)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(8, 8), 0
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.l(x) + self.calls * torch.rand(())


@pytest.mark.parametrize("look", ["profile", "compare", "log_values", "doctor"])
@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@torch.no_grad()
def test_looking_at_a_model_does_not_advance_it(look, backend):
    x, model = torch.randn(4, 8), Steps().eval()
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    looks = {
        "profile": lambda: dbrq.profile(lowered, x, repeats=2),
        "compare": lambda: dbrq.compare(model, quantized, x),
        "log_values": lambda: dbrq.log_values(quantized, x),
        "doctor": lambda: dbrq.doctor(quantized, x),
    }
    models = (model, quantized, lowered)
    before, random = [m.calls.clone() for m in models], torch.get_rng_state()
    looks[look]()
    assert all(torch.equal(m.calls, b) for m, b in zip(models, before, strict=True))
    assert torch.equal(random, torch.get_rng_state())


# State that forward keeps


class Stateful(nn.Module):
    """Runs one of the cases on a linear layer's output, with buffers to remember things in."""

    def __init__(self, case: Callable[[Stateful, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.linear = case, nn.Linear(8, 8)
        for name, shape in (("count", ()), ("mean", (8,)), ("other", (8,)), ("cache", (6, 8)), ("both", (2, 3, 8))):
            self.register_buffer(name, torch.zeros(shape))
        self.first, self.held = self.both[0], [torch.zeros(3, 8)]
        self.place = torch.zeros(1, dtype=torch.long)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.case(self, x).clone()


def _counts(m: Stateful, x: Tensor) -> Tensor:
    m.count += 1
    return m.count


def _assigned(m: Stateful, x: Tensor) -> Tensor:
    before = m.mean
    m.mean = m.mean * 0.5 + x.mean(0)
    return before + 2 * m.mean


def _swapped(m: Stateful, x: Tensor) -> Tensor:
    m.mean, m.other = m.other, m.mean
    m.mean = m.mean + x.mean(0)
    return m.mean - m.other


def _read_first(m: Stateful, x: Tensor) -> Tensor:
    number = m.count.item()
    m.count += 1
    return x * number


def _read_first_and_assigned(m: Stateful, x: Tensor) -> Tensor:
    number = float(m.count)
    m.count = m.count + 1
    return x * number


def _cached(m: Stateful, x: Tensor) -> Tensor:
    m.cache.index_copy_(0, m.place, x[:1])
    m.place.add_(1).remainder_(6)
    return m.cache


def _rolled(m: Stateful, x: Tensor) -> Tensor:
    m.cache[:1] = x[:1]
    m.cache.copy_(torch.roll(m.cache, 1, 0))
    return m.cache


def _in_a_part(m: Stateful, x: Tensor) -> Tensor:
    m.first.add_(x)
    return m.both * 2


def _in_the_whole(m: Stateful, x: Tensor) -> Tensor:
    m.both.add_(x)
    return m.first * 2


def _in_a_list(m: Stateful, x: Tensor) -> Tensor:
    m.held[0].add_(x)
    return m.held[0]


def _statistics(m: Stateful, x: Tensor) -> Tensor:
    y = F.batch_norm(torch.sin(x), m.mean, m.other, training=True)
    return y + m.mean


STATES = {
    case.__name__.strip("_"): case
    for case in (_counts, _assigned, _swapped, _read_first, _read_first_and_assigned, _cached, _rolled, _in_a_part,
                 _in_the_whole, _in_a_list, _statistics)
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STATES)
def test_state_lasts_as_in_the_converted_model(name, backend):
    """And each copy has its own."""
    inputs = calls(4)
    with torch.no_grad():
        quantized = dbrq.quantize(Stateful(STATES[name]).eval(), inputs[:1])
        expected = copy.deepcopy(quantized)
        lowered = dbrq.lower(quantized, inputs[0], backend=backend)
        another = copy.deepcopy(lowered)
        wanted = [expected(x)[1] for x in inputs]
        for model in (lowered, another):
            for x, value in zip(inputs, wanted, strict=True):
                torch.testing.assert_close(model(x)[1], value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_keeps_its_digits_in_bfloat16(backend):
    def case(m: Stateful, x: Tensor) -> Tensor:
        m.count += 1
        m.both.add_(m.linear(x))
        m.both[0].index_put_((torch.tensor([2]),), m.linear(x)[:1])
        return torch.cat([m.count.view(1), m.both.flatten()])

    inputs = calls(4)
    with torch.no_grad():
        quantized = dbrq.quantize(Stateful(case).eval(), inputs[:1])
        quantized.count.fill_(1000.0)
        lowered = dbrq.lower(quantized, inputs[0], backend=backend, dtype=torch.bfloat16)
        for x in inputs:
            got, expected = lowered(x)[1].float(), quantized(x)[1]
            torch.testing.assert_close(got[1:], expected[1:], atol=0.1, rtol=0.02)
        assert abs(got[0] - expected[0]) <= 4  # bfloat16 as it is returned


def test_a_state_that_grows_is_refused():
    def grows(m: Stateful, x: Tensor) -> Tensor:
        m.cache = torch.cat([m.cache, x])
        return m.cache.sum(0)

    quantized = dbrq.quantize(Stateful(grows).eval(), calls(1))
    with pytest.raises(dbrq.RewriteError, match="of another shape"):
        dbrq.rewrite(quantized, calls()[0])


class Counts(nn.Module):
    """Counts its calls in a Python number, which it reads or not."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear, self.reads, self.calls = nn.Linear(8, 8), reads, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (self.calls if self.reads else 1)


def test_a_number_that_forward_counts_with_is_refused_where_it_matters():
    x = torch.randn(4, 8)
    quantized = dbrq.quantize(Counts(reads=True).eval(), [x])
    before = quantized.calls
    with pytest.raises(dbrq.RewriteError, match="calls"):
        dbrq.rewrite(quantized, x)
    assert quantized.calls == before
    assert dbrq.rewrite(dbrq.quantize(Counts(reads=False).eval(), [x]), x)(x).shape == (4, 8)


@pytest.mark.parametrize("then", ["called", "copied", "reset"])
def test_a_model_that_counts_passes_its_self_test(then, tmp_path):
    """It ran the example from the state at hand: after one call it failed, and ``load`` blamed the CPU."""
    model = Call(lambda m, x: m.layer(x) + m.count.add_(1), layer=nn.Linear(4, 4)).eval()
    model.register_buffer("count", torch.zeros(1))
    x = torch.randn(2, 4)
    lowered = dbrq.lower(dbrq.quantize(model, [x]), x)
    state = {name: torch.zeros_like(tensor) for name, tensor in lowered.state_dict().items()}
    with torch.no_grad():
        for _ in range(3):
            lowered(x)
        if then == "copied":
            lowered = copy.deepcopy(lowered)
        if then == "reset":
            lowered.load_state_dict(state)
        before = {name: tensor.clone() for name, tensor in lowered.state_dict().items()}
        assert lowered.self_test()
        assert all(torch.equal(tensor, before[name]) for name, tensor in lowered.state_dict().items())
        dbrq.save(lowered, tmp_path / "model.pt")
        assert torch.equal(dbrq.load(tmp_path / "model.pt")(x), lowered(x))
