"""Errors are clear, and can be pickled."""

import pytest
import torch
from torch import nn

import dbrq
from dbrq import QuantizationError
from tests.helpers.phases import X, net, pickled
from tests.helpers.running import quantized_on, run

Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def test_clear_errors():
    with pytest.raises(dbrq.QuantizationError, match="lazy"):
        dbrq.prepare(nn.Sequential(nn.LazyLinear(4)), Z)
    with pytest.raises(dbrq.QuantizationError, match="takes a tensor"):
        quantized_on(nn.Sequential(nn.Linear(16, 4)), Z)(None)
    with pytest.raises(dbrq.QuantizationError):
        dbrq.save(quantized_on(nn.Sequential(nn.Linear(16, 4)), Z), "no/such/folder/model.pt")


def test_wrong_arguments_are_clear_errors():
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.prepare("no module", X)
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.prepare(net(), X, {"": None})
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.convert(net())
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.calibrate(net(), [X])
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.report(net())
    prepared = dbrq.prepare(net(), X)
    with pytest.raises(dbrq.ConfigurationError, match="already"):
        dbrq.prepare(prepared, X)
    run(prepared, X)
    converted = dbrq.convert(prepared)
    for misuse in (
        lambda: dbrq.convert(converted),
        lambda: dbrq.prepare(converted, X),
        lambda: dbrq.calibrate(converted, [X]),
    ):
        with pytest.raises(dbrq.ConfigurationError):
            misuse()


def test_errors_pickle():
    error = QuantizationError("message", path="a.b", op="conv2d", expected=1, got=2, hint="do")
    again = pickled(error)
    assert str(again) == str(error) and again.path == "a.b" and again.op == "conv2d"
