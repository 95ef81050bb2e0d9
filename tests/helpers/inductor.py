"""Models lowered to Inductor, and how they are compared."""

import functools
from typing import Any

from torch import nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.running import floats, run

lowered = functools.partial(dbrq.lower, backend="inductor")


def assert_same(got: nn.Module, quantized: nn.Module, x: Any, least: float = 60) -> None:
    for a, b in zip(floats(run(got, x)), floats(run(quantized, x)), strict=True):
        assert a.shape == b.shape and sqnr(b, a) >= least
