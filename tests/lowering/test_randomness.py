"""Random numbers are drawn in each call as the float model draws them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dbrq
from tests.helpers.calls import BACKENDS, Cases, calls, check_draws

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
