"""Submodules and methods of a model of several paths, called from outside."""

import warnings

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.control_flow.cases import CASES
from tests.helpers.control_flow.runs import Off, Run, data, linears
from tests.helpers.judging import assert_same_tree, sqnr
from tests.helpers.paths import GOOD, assert_int8, assert_warned, call, heard, worst


class Pair(nn.Module):
    """What is called in parts: an encoder with two ways, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = CASES["branch on an argument"].make(), nn.Sequential(*linears(2))

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))

    def encode(self, x, mode):
        return torch.relu(self.encoder(x, mode))


@pytest.mark.parametrize("mode", ["b", "c"])
def test_a_submodule_called_from_outside(mode):
    model, x = Pair().eval(), data()
    prepared = dbrq.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        assert_same_tree(prepared.encoder(x, mode), model.encoder(x, mode), "prepared")
    quantized = dbrq.convert(prepared)
    assert_int8(model, quantized, Run((x,)))
    assert_int8(model.encoder, quantized.encoder, Run((x, mode)))
    assert_int8(model, quantized, Run((x,)))


@pytest.mark.parametrize("mode", ["b", "c"])
def test_a_method_of_the_model_that_calls_parts_of_it(mode):
    model, x = Pair().eval(), data()
    prepared = dbrq.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        assert_same_tree(prepared.encode(x, mode), model.encode(x, mode), "prepared")
    quantized = dbrq.convert(prepared)
    run = Run((x, mode))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", "dbrq:")
        assert sqnr(model.encode(*run.args), quantized.encode(*run.args)) >= GOOD
    assert_int8(model, quantized, Run((x,)))


def test_a_submodule_on_an_unrecorded_path_from_outside():
    model, x = Pair().eval(), data()
    prepared = dbrq.prepare(model, x)
    call(prepared, Run((x,)))
    call(prepared.encoder, Run((x,)))
    quantized = dbrq.convert(prepared)
    run = Run((x, "neither"))
    got, messages = heard(quantized.encoder, run)
    assert worst(call(model.encoder, run), got) >= GOOD
    assert_warned(messages, Off(run, (("encoder", "add"), ("encoder.out", ""))))
    assert not heard(quantized.encoder, run)[1]
    assert_int8(model, quantized, Run((x,)))
