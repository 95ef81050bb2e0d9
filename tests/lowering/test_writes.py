"""What a call leaves behind and what it draws: lowered models called again and again, beside the float model.

Each family of cases is one model, whose outputs bear the cases' names, so that it is converted and lowered once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers import has_compiler

BACKENDS = ("torchscript", "onednn")


class Cases(nn.Module):
    """Runs each case on the input and on what a linear layer of it gives.

    Args:
        cases: name -> function of (this module, input, float input) that returns tensors.
    """

    def __init__(self, cases: dict[str, Callable[[Cases, Tensor], Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cases = cases
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(3, 8))
        self.register_buffer("index", torch.tensor([0, 1, 1]))
        self.scale = nn.Parameter(torch.rand(3, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"linear": self.linear(x)} | {name: case(self, x) for name, case in self.cases.items()}


def calls(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 8, generator=generator) for _ in range(count)]


def results(model: nn.Module, inputs: list[Tensor]) -> list[dict[str, Tensor]]:
    """What calls return, on copies of the inputs, and as it was when they returned."""
    with torch.no_grad():
        return [{name: value.clone() for name, value in model(x.clone()).items()} for x in inputs]


def check(model: nn.Module, backend: str, tolerance: float = 1e-5, linear: float = 0.2) -> None:
    """Raise unless converted and lowered models give in each of three calls what the float model gives."""
    inputs = calls()
    expected = results(copy.deepcopy(model), inputs)
    quantized = dbrq.quantize(copy.deepcopy(model), inputs)
    lowered = dbrq.lower(quantized, inputs[0], backend=backend)
    wrong = []
    for kind, one in (("converted", copy.deepcopy(quantized)), (backend, lowered)):
        for number, (got, wanted) in enumerate(zip(results(one, inputs), expected, strict=True)):
            for name, value in wanted.items():
                bound = linear if name == "linear" else tolerance
                if got[name].shape != value.shape or not torch.allclose(got[name], value, atol=bound, rtol=1e-4):
                    wrong.append(f"{kind}, call {number}: {name}")
    assert not wrong


# Tensors made from shapes or constants, then written to

MADE: dict[str, Callable[[Cases, Tensor], Tensor]] = {
    "zeros": lambda m, x: torch.zeros(x.shape[0], 8),
    "zeros of constant size": lambda m, x: torch.zeros(3, 8),
    "new_zeros": lambda m, x: x.new_zeros(x.shape[0], 8),
    "zeros_like": lambda m, x: torch.zeros_like(x),
    "ones": lambda m, x: torch.ones(x.size(0), 8),
    "full": lambda m, x: torch.full((x.shape[0], 8), 2.0),
    "new_full": lambda m, x: x.new_full((x.shape[0], 8), 2.0),
    "empty and fill_": lambda m, x: torch.empty(x.shape[0], 8).fill_(1.0),
    "arange": lambda m, x: torch.arange(x.shape[0] * 8, dtype=torch.float32).view(-1, 8),
    "linspace": lambda m, x: torch.linspace(0, 1, x.shape[0] * 8).reshape(-1, 8),
    "tril_": lambda m, x: torch.ones(x.shape[0], 8).tril_(),
    "eye": lambda m, x: torch.eye(x.shape[0], 8),
    "tensor": lambda m, x: torch.tensor([[1.0] * 8] * 3),
    "numpy": lambda m, x: torch.from_numpy(np.zeros((3, 8), dtype=np.float32)),
    "clone of a buffer": lambda m, x: m.table.clone(),
    "sum with a buffer": lambda m, x: m.table + 1,
    "part of a buffer, copied": lambda m, x: m.table[m.index],
    "repeated buffer": lambda m, x: m.table[:1].repeat(3, 1),
    "clone of a parameter": lambda m, x: m.scale.clone(),
    "cat": lambda m, x: torch.cat([m.table[:1], torch.zeros(x.shape[0] - 1, 8)]),
    "buffer in another dtype and back": lambda m, x: m.table.to(torch.float64).to(torch.float32),
}


def _setitem(t: Tensor, m: Cases, x: Tensor) -> None:
    t[:, 1:3] = x[:, 1:3]


def _set_by_mask(t: Tensor, m: Cases, x: Tensor) -> None:
    t[x > 0] = 3.0


def _augmented(t: Tensor, m: Cases, x: Tensor) -> None:
    t += x


def _parts(t: Tensor, m: Cases, x: Tensor) -> None:
    for i, row in enumerate(t.unbind(0)):
        row.add_(i)


WRITTEN: dict[str, Callable[[Tensor, Cases, Tensor], object]] = {
    "scatter_add_": lambda t, m, x: t.scatter_add_(0, m.index[:, None].expand(-1, 8), x),
    "scatter_reduce_": lambda t, m, x: t.scatter_reduce_(0, m.index[:, None].expand(-1, 8), x, "sum"),
    "index_put_": lambda t, m, x: t.index_put_((m.index,), x, accumulate=True),
    "index_add_": lambda t, m, x: t.index_add_(0, m.index, x),
    "index_copy_": lambda t, m, x: t.index_copy_(0, torch.tensor([2, 1, 0]), x),
    "index_fill_": lambda t, m, x: t.index_fill_(0, m.index, 4.0),
    "masked_fill_": lambda t, m, x: t.masked_fill_(x > 0, 5.0),
    "copy_ to a slice": lambda t, m, x: t[:, 2:4].copy_(x[:, 2:4]),
    "setitem": _setitem,
    "setitem by a mask": _set_by_mask,
    "+=": _augmented,
    "out=": lambda t, m, x: torch.sin(x, out=t),
    "out= that reads it": lambda t, m, x: torch.add(t, x, out=t),
    "relu, inplace=True": lambda t, m, x: F.relu(t.sub_(x), inplace=True),
    "threshold, inplace": lambda t, m, x: F.threshold(t.sub_(x), 0.0, -1.0, True),
    "addcmul_": lambda t, m, x: t.addcmul_(x, x),
    "cumsum_": lambda t, m, x: t.add_(x).cumsum_(0),
    "gt_": lambda t, m, x: t.add_(x).gt_(0.1),
    "lerp_": lambda t, m, x: t.lerp_(x, 0.5),
    "two views at once": lambda t, m, x: (t[0].add_(x[1]), t.mul_(2.0), t[0].add_(1.0)),
}

VIEWS: dict[str, Callable[[Tensor, Cases, Tensor], object]] = {
    "view": lambda t, m, x: t.view(-1)[3:].add_(x.sum()),
    "view of views": lambda t, m, x: t.t().unsqueeze(0)[0].diagonal().mul_(2.0).add_(x[0, 0]),
    "reshape": lambda t, m, x: t.reshape(-1).add_(1.0),
    "flatten": lambda t, m, x: t.flatten().add_(1.0),
    "contiguous": lambda t, m, x: t.contiguous().add_(x),
    "to": lambda t, m, x: t.to(torch.float32).add_(x),
    "as_strided": lambda t, m, x: torch.as_strided(t, (2,), (9,)).add_(x.sum()),
    "split": lambda t, m, x: t.split(4, 1)[1].add_(x[:, :4]),
    "chunk": lambda t, m, x: t.chunk(2, 1)[0].sub_(x[:, 4:]),
    "unsafe_chunk": lambda t, m, x: torch.unsafe_chunk(t, 2, 1)[0].add_(1.0),
    "unsafe_split": lambda t, m, x: t.unsafe_split(4, 1)[0].add_(1.0),
    "hsplit": lambda t, m, x: torch.hsplit(t, 2)[1].add_(x[:, 4:]),
    "dsplit": lambda t, m, x: torch.dsplit(t.unsqueeze(0), 2)[0].add_(2.0),
    "tensor_split": lambda t, m, x: torch.tensor_split(t, 2, 1)[1].add_(x[:, 4:]),
    "unbind": _parts,
    "alias": lambda t, m, x: torch.ops.aten.alias(t).add_(x),
    "detach": lambda t, m, x: t.detach().add_(x),
    "data": lambda t, m, x: t.data.add_(x),
    "einsum": lambda t, m, x: torch.einsum("ab->ba", t).add_(x.t()),
    "movedim": lambda t, m, x: t.movedim(0, 1).add_(x.t()),
    "permute": lambda t, m, x: t.permute(1, 0).add_(x.t()),
    "T": lambda t, m, x: t.T.add_(x.t()),
    "select": lambda t, m, x: t.select(1, 2).add_(5.0),
    "narrow": lambda t, m, x: t.narrow(1, 2, 3).add_(5.0),
    "squeeze": lambda t, m, x: t.unsqueeze(0).squeeze().add_(5.0),
    "expand of one column": lambda t, m, x: t[:, :1].expand(3, 1).add_(5.0),
    "unfold": lambda t, m, x: t.unfold(1, 2, 2).add_(1.0),
    "unflatten": lambda t, m, x: t.unflatten(1, (4, 2))[:, 1].add_(1.0),
    "complex": lambda t, m, x: torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (4, 2)))).add_(1.0),
    "imag": lambda t, m, x: torch.view_as_complex(t.unflatten(-1, (4, 2))).imag.add_(1.0),
    "broadcast_tensors": lambda t, m, x: torch.broadcast_tensors(t, x)[0].add_(x),
}  # fmt: skip


def _case(made: Callable[[Cases, Tensor], Tensor], written: Callable[[Tensor, Cases, Tensor], object]) -> Callable:
    def case(m: Cases, x: Tensor) -> Tensor:
        t = made(m, x)
        written(t, m, x)
        return t + 0

    return case


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_made_in_each_call_is_new_in_each_call(backend):
    writers = [WRITTEN["+="], WRITTEN["setitem"], WRITTEN["index_put_"]]
    check(Cases({n: _case(made, writers[i % 3]) for i, (n, made) in enumerate(MADE.items())}).eval(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("written", [WRITTEN, VIEWS], ids=["directly", "through views"])
def test_writes_do_not_last(written, backend):
    made = [MADE["zeros"], MADE["clone of a buffer"]]
    check(Cases({n: _case(made[i % 2], how) for i, (n, how) in enumerate(written.items())}).eval(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_through_views_of_values_are_seen_by_their_bases(backend):
    """Of what an op made of the input, and of what a quantized layer made."""
    made = [lambda m, x: torch.sin(x), lambda m, x: m.linear(x)]
    cases = {n: _case(made[i % 2], how) for i, (n, how) in enumerate(VIEWS.items())}
    check(Cases(cases).eval(), backend, tolerance=0.2)


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
def test_inductor_keeps_no_writes_and_draws_anew():
    def noise(m: Cases, x: Tensor) -> Tensor:
        return torch.bernoulli(m.scale * 0.5 + 0.2)

    names = ("zeros", "clone of a buffer", "numpy")
    model = Cases({name: _case(MADE[name], WRITTEN["setitem"]) for name in names}).eval()
    check(model, "inductor")
    model.cases = {"noise": noise}
    inputs = calls()
    lowered = dbrq.lower(dbrq.quantize(model, inputs), inputs[0], backend="inductor")
    check_draws(model, lowered, inputs)


def test_torchscript_refuses_writes_that_it_would_drop():
    """Its passes go by schemas, which do not tell of lists, nor of the statistics of a batch norm."""
    unsaid = {
        "list": lambda m, x: torch._foreach_add_([m.table.clone()], 1.0),
        "statistics": lambda m, x: F.batch_norm(x, x.new_zeros(8), x.new_ones(8), training=True),
    }
    for name, write in unsaid.items():
        model = Cases({name: lambda m, x, write=write: (write(m, x), x + 0)[1]}).eval()
        with pytest.raises(dbrq.RewriteError, match="TorchScript does not see"):
            dbrq.lower(dbrq.quantize(model, calls()), calls()[0])


# The inputs and what is returned


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_caller_sees_inputs_change_where_the_float_model_changes_them(backend):
    def write(m: Cases, x: Tensor) -> Tensor:
        x[:, 1:3].mul_(2.0)
        x.t()[0].copy_(m.table[0, 0])
        torch.einsum("ab->ba", x).diagonal().add_(1.0)
        return x * 2

    model = Cases({"write": write}).eval()
    lowered = dbrq.lower(dbrq.quantize(copy.deepcopy(model), calls()), calls()[0], backend=backend)
    for x in calls():
        for layout in (x, x.t().contiguous().t()):
            mine, theirs = layout.clone(), layout.clone()
            with torch.no_grad():
                lowered(mine), model(theirs)
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_returned_belongs_to_the_caller(backend):
    """Constants are computed once, but given away as copies."""
    cases = {
        "clone": lambda m, x: m.table.clone(), "sum": lambda m, x: m.table + 1, "zeros": lambda m, x: torch.zeros(3),
        "computed from zeros": lambda m, x: torch.zeros(3).cos().view(1, 3),
        "view of a sum": lambda m, x: (m.table + 2).t()[1:],
    }  # fmt: skip
    model = Cases(cases).eval()
    lowered = dbrq.lower(dbrq.quantize(model, calls()), calls()[0], backend=backend)
    with torch.no_grad():
        expected = model(calls()[0])
        for _ in range(3):
            got = lowered(calls()[0])
            for name in cases:
                torch.testing.assert_close(got[name], expected[name])
                got[name].fill_(9.0)


def test_constants_that_nobody_writes_to_are_computed_once():
    model = Cases({"sum": lambda m, x: x + (m.table * 2).sin(), "zeros": lambda m, x: x + torch.ones(8).cos()}).eval()
    lowered = dbrq.lower(dbrq.quantize(model, calls()), calls()[0])
    assert "torch.sin(" not in lowered.code
    lowered = dbrq.lower(dbrq.quantize(model, calls()), calls()[0], backend="onednn")
    assert not any(word in lowered.stages()["plan"] for word in ("sin", "cos", "ones"))


class Image(nn.Module):
    """A convolution beside a write through a view of what was made of the image."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.made = nn.Conv2d(3, 8, 1), made

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = self.made(x)
        v[..., -1].zero_()
        v[:, :, 1] += 1.0
        return v, self.conv(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("made", [torch.clone, lambda x: torch.cat([x, x], -1), lambda x: F.interpolate(x, (9, 9))],
                         ids=["clone", "cat", "interpolate"])  # fmt: skip
def test_writes_through_views_of_channels_last_values(made, backend):
    model, x = Image(made).eval(), torch.randn(2, 3, 5, 5)
    lowered = dbrq.lower(dbrq.quantize(model, [x]), x, backend=backend)
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=layout)
        with torch.no_grad():
            torch.testing.assert_close(lowered(given)[0], model(given)[0])


class AddThenWrite(nn.Module):
    """The other operand of an add is written to before what follows the add runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        r = torch.sin(self.a(x))
        total = self.b(r) + r
        r.add_(3.0)
        return F.relu(total)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fusions_do_not_reach_over_writes(backend):
    model, x = AddThenWrite().eval(), torch.randn(2, 3, 6, 6)
    lowered = dbrq.lower(dbrq.quantize(model, [x]), x, backend=backend)
    with torch.no_grad():
        assert (lowered(x) - model(x)).abs().max() < 0.1


# Random numbers

RANDOM: dict[str, Callable[[Cases, Tensor], Tensor]] = {
    "bernoulli of probabilities": lambda m, x: torch.bernoulli(m.scale),
    "bernoulli of a number": lambda m, x: torch.bernoulli(m.table, 0.5),
    "bernoulli of the input": lambda m, x: torch.bernoulli(x.sigmoid()),
    "randn_like": lambda m, x: torch.randn_like(m.table),
    "rand_like": lambda m, x: torch.rand_like(x),
    "rand": lambda m, x: torch.rand(3, 8),
    "rand of a size": lambda m, x: torch.rand(x.shape[0], 8),
    "normal": lambda m, x: torch.normal(m.table, m.scale),
    "dropout of a buffer": lambda m, x: F.dropout(m.table, 0.5, True),
    "dropout of the input": lambda m, x: F.dropout(x, 0.5, True),
    "dropout, inplace": lambda m, x: F.dropout(x.clone(), 0.5, True, True),
    "alpha_dropout": lambda m, x: F.alpha_dropout(m.table, 0.5, True),
    "dropout1d": lambda m, x: F.dropout1d(m.table[None], 0.5, True),
    "native_dropout": lambda m, x: torch.native_dropout(m.table, 0.5, True)[0],
    "multinomial": lambda m, x: torch.multinomial(m.scale, 3).float(),
    "poisson": lambda m, x: torch.poisson(m.scale * 10),
    "binomial": lambda m, x: torch.binomial(m.scale * 10, m.scale),
    "randint": lambda m, x: torch.randint(0, 1000, (4,)).float(),
    "randperm": lambda m, x: torch.randperm(20).float(),
    "rrelu": lambda m, x: F.rrelu(m.table, training=True),
    "uniform_": lambda m, x: m.table.clone().uniform_(),
    "normal_": lambda m, x: torch.zeros(3, 8).normal_(),
    "bernoulli_": lambda m, x: torch.empty(3, 8).bernoulli_(m.scale),
    "random_": lambda m, x: torch.empty(3, 8).random_(1000),
    "exponential_": lambda m, x: torch.empty_like(m.table).exponential_(),
    "through a view": lambda m, x: (m.table.clone().view(-1)[4:].normal_(), m.table)[0],
    "gumbel_softmax": lambda m, x: F.gumbel_softmax(m.table),
    "attention with dropout": lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "a number": lambda m, x: m.table * torch.rand(()).item(),
}  # fmt: skip


def check_draws(model: nn.Module, lowered: nn.Module, inputs: list[Tensor]) -> None:
    """Raise unless a model draws what the float model draws, after the same seed, and something else in each call."""
    torch.manual_seed(3)
    expected = results(model, inputs)
    torch.manual_seed(3)
    got = results(lowered, inputs)
    wrong = [
        f"call {i}: {name}" for i in range(len(inputs)) for name, value in expected[i].items()
        if name != "linear" and not torch.allclose(got[i][name], value, atol=1e-5)
    ]  # fmt: skip
    assert not wrong
    assert not [name for name in expected[0] if torch.equal(got[0][name], got[1][name])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_are_drawn_in_each_call_as_the_float_model_draws_them(backend):
    model, inputs = Cases(RANDOM).eval(), calls()
    quantized = dbrq.quantize(copy.deepcopy(model), inputs)
    check_draws(model, quantized, inputs)
    before = torch.get_rng_state()
    lowered = dbrq.lower(quantized, inputs[0], backend=backend)
    assert torch.equal(before, torch.get_rng_state())
    check_draws(model, copy.deepcopy(lowered), inputs)
    check_draws(model, lowered, inputs)


# State


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


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x) + self.b(y)))


def test_a_fused_add_that_broadcasts_does_not_depend_on_earlier_calls():
    x, model = torch.randn(3, 5, 8), Sum().eval()
    quantized = dbrq.quantize(model, [(x, x)])
    one, empty = torch.randn(1, 1, 8), torch.randn(3, 0, 8)
    with torch.no_grad():
        for a, b in ((one, one), (empty, one), (one, empty), (one, x), (x, one)):
            assert quantized(a, b).shape == model(a, b).shape
        torch.testing.assert_close(quantized(x, one), model(x, one), atol=0.1, rtol=0.1)


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
