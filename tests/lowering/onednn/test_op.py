"""Models lowered to oneDNN as one op in scripted graphs."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.models import Call
from tests.helpers.networks import CONTAINERS, OUTPUTS, by_network, name_for, network, two_layers
from tests.helpers.onednn import lower
from tests.helpers.running import convert, run


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("h", torch.zeros(4, 8))

    def forward(self, x):
        self.h.mul_(0.9).add_(self.l(x))
        return self.h + torch.randn(x.shape[0], 8)


class CallsTwice(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.m = model

    def forward(self, x):
        return self.m(x), self.m(x)


class IgnoresResult(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.m = model

    def forward(self, x):
        self.m(x * 2)
        return x


@torch.no_grad()
def test_scripted_calls_of_a_onednn_model_are_neither_merged_nor_dropped():
    x = torch.randn(4, 8)
    lowered = dbrq.lower(dbrq.quantize(Counting().eval(), [x]), x, backend="onednn")
    before, given, random = lowered.h.clone(), x.clone(), torch.get_rng_state()
    part = dbrq.lowered_form(lowered).scriptable(x)
    assert torch.equal(before, lowered.h) and torch.equal(x, given) and torch.equal(random, torch.get_rng_state())
    for outer in (CallsTwice, IgnoresResult):
        scripted = torch.jit.script(outer(part).eval())
        for _ in range(3):
            lowered.h.zero_()
            torch.manual_seed(1)
            expected = outer(lowered)(x)
            state, random = lowered.h.clone(), torch.get_rng_state()
            lowered.h.zero_()
            torch.manual_seed(1)
            torch.testing.assert_close(scripted(x), expected, rtol=0, atol=0)
            assert torch.equal(state, lowered.h) and torch.equal(random, torch.get_rng_state())


# As an op in scripted graphs


@by_network
def test_scripted_graphs_call_it(make, shape):
    lowered, _, x = network(name_for(shape))
    part = dbrq.lowered_form(lowered).scriptable(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(part, nn.Softmax(-1)))
    for given in (x, torch.randn(1, *shape[1:])):
        assert torch.equal(run(scripted, given), run(lowered, given).softmax(-1))
        assert torch.equal(run(part, given), run(lowered, given))


def test_scripted_graphs_take_several_outputs():
    model, x = two_layers(CONTAINERS["tuple"]), torch.randn(3, 16)
    lowered = lower(convert(model, x).quantized, x)
    part = dbrq.lowered_form(lowered).scriptable(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(part)
    for got, expected in zip(run(scripted, x), run(lowered, x), strict=True):
        assert torch.equal(got, expected)


def test_a_scripted_graph_whose_model_is_gone_says_so():
    model, x = two_layers(OUTPUTS["a layer's"]), torch.randn(3, 16)
    lowered = lower(convert(model, x).quantized, x)
    part = dbrq.lowered_form(lowered).scriptable(x)
    del lowered
    gc.collect()
    with pytest.raises(RuntimeError, match="dbrq::run: the model is gone"):
        run(part, x)


def test_what_bfloat16_narrows_lives_as_long_as_it_is_read():
    """The call that makes a plan runs on memory of its own; later ones in the arena, where lifetimes matter."""

    def forward(m, x):
        y = m.a(x)
        for _ in range(3):
            y = m.b(torch.logaddexp(y, x)) + torch.hypot(x, y)
        return y

    model, x = Call(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval(), torch.randn(4, 16)
    lowered = dbrq.lower(convert(model, x).quantized, x, backend="onednn", dtype=torch.bfloat16)
    other = torch.randn(9, 16)
    first = lowered(other)
    assert all(torch.equal(lowered(other), first) for _ in range(3))
