"""Models trained here: they reach their bar, are int8 throughout, and the task hardly notices."""

import functools

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.trained import NAMES, Trained, load
from tests.helpers.trained.training import Schedule, train

#: The metric that the short training reaches at least, and how much of it int8 may lose.
BARS = {"mobilenet": (0.8, 0.01), "vit": (0.75, 0.01), "swin": (0.75, 0.01), "decoder": (3.4, 0.01)}
trained = pytest.mark.parametrize("name", NAMES)


@functools.cache
def model(name: str) -> Trained:
    return load(name, short=True)


@trained
def test_training_reaches_the_bar(name):
    reached, (bar, _) = model(name).evaluate(model(name).model), BARS[name]
    assert reached >= bar if model(name).higher else reached <= bar


@trained
def test_int8_keeps_the_metric(name):
    of = model(name)
    quantized = dbrq.quantize(of.model, of.calibration)
    assert dbrq.report(quantized).coverage == 1
    assert of.loss(of.evaluate(of.model), of.evaluate(quantized)) <= BARS[name][1]
    assert sqnr(of.model(of.example_inputs), quantized(of.example_inputs)) > 15


def test_training_is_the_same_each_time_and_leaves_random_numbers_alone():
    def batches(steps):
        for step in range(steps):
            draw = torch.Generator().manual_seed(step)
            yield torch.randn(16, 4, generator=draw), torch.randint(3, (16,), generator=draw)

    before = torch.get_rng_state()
    first, second = (train(lambda: nn.Linear(4, 3), batches, Schedule(20, 1e-2)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(torch.get_rng_state(), before)
