"""Writes in forward, to values, views, inputs and buffers: lowered models beside the float model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.calls import BACKENDS, Cases, calls, check, check_draws
from tests.helpers.judging import sqnr
from tests.helpers.running import has_compiler

PYTHON_BACKENDS = ("onednn", "torchscript")

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
    assert not any(word in dbrq.lowered_form(lowered).stages()["plan"] for word in ("sin", "cos", "ones"))


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


class OtherIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, y):
        first = self.l(x)
        y.add_(1.0)
        return first, self.l(x) + x


class BufferIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("h", torch.randn(4, 8))

    def forward(self, x):
        first = self.l(x)
        self.h.add_(1.0)
        return first, self.l(x) + x


class InputInPlace(nn.Module):
    """An int8 op in place on an input, which is then written under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        x.add_(self.l(x))
        first = self.m(x)
        y.add_(1.0)
        return first, self.m(x)


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@pytest.mark.parametrize("cls", [OtherIsWritten, InputInPlace])
@torch.no_grad()
def test_writes_to_an_input_are_seen_through_another_input(cls, backend):
    model = cls().eval()
    mapping = dbrq.default_qconfig_mapping()
    mapping.set_object_type("add_", mapping.global_qconfig)
    data = [(2 * torch.randn(4, 8), 2 * torch.randn(4, 8)) for _ in range(8)]  # x + 1 is within these ranges
    lowered = dbrq.lower(dbrq.quantize(model, data, mapping), copy.deepcopy(data[0]), backend=backend)
    x = torch.randn(4, 8).clamp(-2, 2)
    a, b = x.clone(), x.clone()
    assert sqnr(model(a, a)[1], lowered(b, b)[1]) > 28
    assert torch.equal(a, b) or cls is InputInPlace


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@torch.no_grad()
def test_writes_to_a_buffer_are_seen_through_an_input(backend):
    model = BufferIsWritten().eval()
    data = [2 * torch.randn(4, 8) for _ in range(8)]
    lowered = dbrq.lower(dbrq.quantize(model, data), data[0], backend=backend)
    model.h.copy_(torch.randn(4, 8).clamp(-2, 2))
    lowered.h.copy_(model.h)
    assert sqnr(model(model.h)[1], lowered(lowered.h)[1]) > 28
