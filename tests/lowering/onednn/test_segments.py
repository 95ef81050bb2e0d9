"""Models that write to memory, that look at values, and that torch computes between plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.cases import let
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.onednn import assert_agrees, computing, lower
from tests.helpers.patterns import IMAGE, same
from tests.helpers.running import convert, run


class Counting(nn.Module):
    """Updates a buffer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = F.relu(self.layer(x))
        self.calls += 1
        self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - self.mean, self.calls * 1


class Cached(nn.Module):
    """Writes to a part of a buffer and reads all of it, as caches of keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(4, 5, 16))

    def forward(self, x):
        self.cache[:-1] = self.cache[1:].clone()
        self.cache[-1] = self.layer(x)
        return self.cache.mean(0), self.cache


WRITING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a view in place": (
        lambda: Call(lambda m, x: let(m.a(x), lambda y: (y[:, :4].add_(1.0), y)[1]), a=nn.Linear(16, 16)),
        (5, 16),
    ),
    "index assignment": (lambda: Call(assigning, a=nn.Linear(16, 16)), (5, 16)),
    "index_put": (
        lambda: Call(lambda m, x: m.a(x).index_put_((torch.tensor([0, 2]),), torch.zeros(16)), a=nn.Linear(16, 16)),
        (5, 16),
    ),
    "fill of a slice": (
        lambda: Call(
            lambda m, x: let(m.a(x), lambda y: (y[::2].zero_(), m.b(y))[1]), a=nn.Linear(16, 16), b=nn.Linear(16, 4)
        ),
        (5, 16),
    ),
    "conv, in place on channels": (
        lambda: Call(lambda m, x: let(m.a(x), lambda y: (y[:, :2].mul_(2.0), m.b(y))[1]), a=same(), b=same()),
        IMAGE,
    ),
    "copy into zeros": (
        lambda: Call(
            lambda m, x: let(x.new_zeros(5, 16), lambda y: (y[:, 2:].copy_(m.a(x)[:, 2:]), y)[1]), a=nn.Linear(16, 16)
        ),
        (5, 16),
    ),
    "masked_fill_": (lambda: Call(lambda m, x: m.a(x).masked_fill_(x > 0, -1.0), a=nn.Linear(16, 16)), (5, 16)),
    "a sum into a view": (
        lambda: Call(
            lambda m, x: let(m.a(x), lambda y: let(y.view(-1), lambda v: (v.add_(m.b(x).view(-1)), y.relu())[1])),
            a=nn.Linear(16, 16),
            b=nn.Linear(16, 16),
        ),
        (5, 16),
    ),
    "in place between layers": (lambda: Call(lambda m, x: m.b(m.a(x).tanh_()), a=same(), b=same()), IMAGE),
    "random": (lambda: Call(lambda m, x: m.a(x) + 0 * torch.rand_like(x), a=nn.Linear(16, 16)), (5, 16)),
    "buffers": (Counting, (5, 16)),
    "cache": (Cached, (5, 16)),
}


def assigning(m, x):
    y = m.a(x)
    y[1] = 0.5
    y[:, 3:5] = y[:, 1:3] * 2
    return y


@pytest.mark.parametrize("name", WRITING)
def test_models_that_write_to_memory(name):
    make, shape = WRITING[name]
    model, xs = make().eval(), [torch.randn(shape) for _ in range(4)]
    quantized = convert(model, xs[0]).quantized
    reference, lowered = copy.deepcopy(quantized), lower(quantized, xs[0])
    for buffer, other in zip(lowered.buffers(), lowered.buffers(), strict=True):
        assert buffer is other
    for x in [*xs, xs[0]]:
        assert_agrees(run(lowered, x), run(reference, x), "the converted model", exact=5e-3, most=0.02)
    held = dict(reference.named_buffers())
    for path, buffer in lowered.named_buffers():
        if path in ("calls", "mean", "cache"):
            torch.testing.assert_close(buffer, held[path], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", WRITING)
def test_layers_stay_int8_where_memory_is_written_to(name):
    make, shape = WRITING[name]
    model, x = make().eval(), torch.randn(shape)
    lowered = lower(convert(model, x).quantized, x)
    assert not {"a", "b", "layer"} & set(dbrq.lowered_form(lowered).in_torch) and computing(lowered)["layer"] >= 1


LOOKING: dict[str, Callable] = {
    "nonzero": lambda m, x: let(m.a(x), lambda y: y[(x.sum(1) > 0).nonzero().flatten()]),
    "boolean mask": lambda m, x: m.b(m.a(x)[x.sum(1) > 0]),
    "masked_select": lambda m, x: torch.masked_select(m.a(x), x > 0).relu(),
    "unique": lambda m, x: (m.a(x), (x * 2).round().unique()),
    "where": lambda m, x: let(torch.where(x.sum(1) > 0), lambda i: m.b(m.a(x)[i[0]])),
    "argwhere": lambda m, x: (m.a(x) > 0).argwhere(),
    "item in arithmetic": lambda m, x: m.b(m.a(x) * x.abs().max().item()),
    "item in a size": lambda m, x: m.b(m.a(x)).narrow(0, 0, (x[:, 0] > 0).sum().item() + 1),
    "repeat_interleave": lambda m, x: m.b(m.a(x).repeat_interleave((x.sum(1) > 0).long() + 1, 0)),
    "bincount": lambda m, x: (m.a(x), torch.bincount((x[:, 0] > 0).long() + (x[:, 1] > 0).long())),
    "layers before and after": lambda m, x: let(
        F.relu(m.a(x)), lambda y: m.b(y[y.sum(1) > y.sum(1).mean()]).sum(0) + y.mean(0)
    ),
}


def repeated(m: Any, x: Tensor) -> tuple:
    first = m.head(x)[:1]
    return first.expand(x.shape), m.tail(first.expand(x.shape)), first.sum().expand(9)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (5, 4)], ids=str)
def test_a_result_that_repeats_an_element_does_not_hold_its_buffer(shape):
    # it has as many elements as the layer's result, but less memory: the layer wrote behind what the caller got
    model = Call(repeated, head=nn.Linear(4, 4), tail=nn.Linear(4, 4)).eval()
    x, y = torch.randn(shape), torch.randn(shape)
    converted = convert(model, x).model
    lowered = dbrq.lower(converted, x, backend="onednn")
    for _ in range(3):
        for inputs in (x, y):
            for found, expected in zip(run(lowered, inputs), run(converted, inputs), strict=True):
                assert found.shape == expected.shape and sqnr(expected, found) > 30


@pytest.mark.parametrize("write", [False, True])
def test_inputs_that_share_memory_once(write):
    def forward(m: Any, a: Tensor, b: Tensor) -> tuple:
        a, b = torch.broadcast_tensors(a, b)
        return m.one(a), m.two(b.clone().clamp_(max=1) if write else b)

    model = Call(forward, one=nn.Linear(4, 4), two=nn.Linear(4, 4)).eval()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    both = torch.randn(6, 4)
    pairs = [(x, x), (x, y), (both[:3], both[3:]), (both[3:], both[:3]), (y, x), (y, y), (x[:1], x[1:2]),
             (y[:1], x[:1])]  # fmt: skip
    prepared = dbrq.prepare(model, pairs[0])
    for pair in pairs:
        run(prepared, pair)
    converted = dbrq.convert(prepared)
    for backend in ("torchscript", "onednn"):
        lowered = dbrq.lower(converted, pairs[0], backend=backend)
        for pair in pairs:
            for found, expected in zip(run(lowered, pair), run(converted, pair), strict=True):
                assert sqnr(expected, found) > 30, backend


@pytest.mark.parametrize("name", LOOKING)
def test_shapes_that_depend_on_values(name):
    model = Call(LOOKING[name], inputs=1, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval()
    xs = [torch.randn(6, 16) for _ in range(4)]
    prepared = dbrq.prepare(model, xs[0])
    dbrq.calibrate(prepared, xs)
    quantized = dbrq.convert(prepared)
    graph = dbrq.rewrite(quantized, xs[0])
    lowered = lower(quantized, xs[0])
    for x in [*xs, xs[0], torch.randn(9, 16)]:
        try:
            expected = run(graph, x)
        except RuntimeError:  # asserted, as in the graph
            with pytest.raises(RuntimeError):
                run(lowered, x)
            continue
        got = run(lowered, x)
        assert_agrees(got, expected, "the graph", exact=5e-3, most=0.02)


@pytest.mark.parametrize("name", ["nonzero", "boolean mask", "where", "masked_select", "repeat_interleave"])
def test_nothing_is_selected(name):
    """Tensors without elements inside."""
    model = Call(LOOKING[name], inputs=1, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval()
    x = torch.randn(6, 16)
    quantized = convert(model, x).quantized
    lowered, graph = lower(quantized, x), dbrq.rewrite(quantized, x)
    for given in (-x.abs(), x, -x.abs(), x.abs()):
        assert_agrees(run(lowered, given), run(graph, given), "the graph", exact=5e-3, most=0.02)


class Split(nn.Module):
    """Integers say where."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, places):
        return torch.cat([part.mean(0, keepdim=True) for part in torch.tensor_split(self.layer(x), places)])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.before(x), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.after(padded)


@pytest.mark.parametrize(
    ("model", "shape", "numbers"),
    [(Split, (6, 8), [[2, 4], [1, 5], [2, 4]]), (Packed, (2, 5, 8), [[5, 3], [2, 5], [4, 4], [3, 5]])],
)
def test_integers_that_torch_reads_by_itself_are_read_in_each_call(model, shape, numbers):
    """No op below these calls says so: offsets and lengths stayed those of the first call."""
    torch.manual_seed(0)
    calls = [(torch.randn(shape), torch.tensor(given)) for given in numbers]
    model = model().eval()
    quantized = dbrq.quantize(model, calls)
    lowered = lower(quantized, calls[0])
    for call in calls:
        assert sqnr(run(quantized, call), run(lowered, call)) > 40


def test_sizes_of_integers_are_no_values(monkeypatch):
    """A plan for all of a model of token ids: their sizes, dimensions and dtype are known when it is made."""

    def dynamic_nodes(*args):
        raise AssertionError("looked for")

    def forward(m, ids):
        b, n = ids.size()
        h = m.b(torch.relu(m.a(m.e(ids)))).view(b, -1, 8) + torch.zeros(len(ids), 1, 1)
        return h.masked_fill((ids == 3)[..., None], 0.0).index_select(1, torch.arange(n)) * torch.ones_like(h[..., :1])

    model = Call(forward, inputs=1, e=nn.Embedding(50, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    ids = torch.randint(0, 50, (2, 7))
    quantized = dbrq.quantize(model, [ids])
    monkeypatch.setattr(dbrq.lowering.onednn.model, "dynamic_nodes", dynamic_nodes)
    lowered = lower(quantized, ids)
    assert sqnr(run(quantized, ids[:, :5]), run(lowered, ids[:, :5])) > 40
