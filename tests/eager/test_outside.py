"""Writes that no schema tells of: functions in Python, operators of extensions, views that torch functions return.

An int8 value, or the integers that are kept for a float one, stood for what was no longer there.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.models import Call

X = torch.randn(2, 8, 6, 6)


@torch.library.custom_op("dbrq_tests::halve_second", mutates_args=("b",))
def halve_second(a: Tensor, b: Tensor) -> None:
    b.mul_(-0.5)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "threshold": lambda y: F.threshold(y, 0.1, 0.0, inplace=True),
    "Threshold": lambda y: nn.Threshold(0.1, 0.0, inplace=True)(y),
    "celu": lambda y: F.celu(y, inplace=True),
    "selu": lambda y: F.selu(y, inplace=True),
    "relu": lambda y: F.relu(y, inplace=True),
    "init": lambda y: nn.init.constant_(y, 0.3),
    "an operator's second argument": lambda y: halve_second(y.clone(), y),
    "dropout": lambda y: F.dropout(y, 1.0, True, inplace=True),
    "cpu": lambda y: y.cpu().zero_(),
    "type": lambda y: y.type(torch.float32).zero_(),
    "positive": lambda y: torch.positive(y).neg_(),
    "real": lambda y: torch.real(y).zero_(),
    "dsplit": lambda y: y.dsplit(2)[0].zero_(),
    "atleast": lambda y: torch.atleast_3d(y).zero_(),
    "outputs of max": lambda y: torch.max(torch.ones(2, 3, 6, 6), 1, out=(y[:, 0], torch.zeros(2, 6, 6).long())),
    "view": lambda y: y.view(2, -1).zero_(),
    "flatten": lambda y: y.flatten(1)[:, :99].zero_(),
    "storage": lambda y: y.untyped_storage().fill_(0),
}


def model_of(forward: Callable) -> nn.Module:
    layers = {name: nn.Conv2d(8, 8, 3, padding=1) for name in "abc"}
    return Call(forward, **layers).eval()


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", [name for name in WRITES if name != "storage"])
def test_a_write_between_two_readers(name: str, inference: bool) -> None:
    def forward(m, x):
        y = m.a(x)
        first = m.b(y)
        WRITES[name](y)
        return torch.cat([first, m.c(y)])

    model = model_of(forward)
    with torch.inference_mode() if inference else torch.no_grad():
        quantized = dbrq.quantize(model, [X], progress=False)
        expected, result = model(X), quantized(X)
        half = len(X)
        assert sqnr(expected[:half], result[:half]) > 20 and sqnr(expected[half:], result[half:]) > 20


@pytest.mark.parametrize("name", WRITES)
def test_a_write_on_a_path_that_calibration_did_not_see(name: str) -> None:
    """It is followed, or refused."""

    def forward(m, x, flag):
        y = m.a(x)
        if flag:
            WRITES[name](y)
        return m.b(y)

    model = model_of(forward)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = dbrq.quantize(model, [(X, False)], progress=False)
        try:
            result = quantized(X, True)
        except dbrq.QuantizationError:
            return
        assert sqnr(model(X, True), result) > 18


def test_inputs_that_share_memory_and_are_written_to_are_refused_by_compiled_code() -> None:
    pytest.importorskip("torch._inductor")
    model = model_of(lambda m, a, b: (a.mul_(-0.5), m.a(b))[1])
    a, b = torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
    lowered = dbrq.lower(dbrq.quantize(model, [(a.clone(), b)], progress=False), (a.clone(), b), backend="inductor")
    x = torch.randn(2, 8, 6, 6)
    with torch.no_grad():
        assert sqnr(model(a.clone(), b), lowered(a.clone(), b)) > 25
        with pytest.raises(dbrq.DeviationError, match="share memory"):
            lowered(x, x)
