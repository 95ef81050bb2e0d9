"""Trips of loops take as long however many there are."""

import contextlib
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.control_flow.cases import trips
from tests.helpers.control_flow.runs import even, linears
from tests.helpers.paths import calibrated, call


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = even(linears(2))
        self.weight = nn.Parameter(self.body.weight.detach().clone())

    def forward(self, x, trips):
        h = x
        for _ in range(trips):
            h = torch.relu(F.linear(torch.relu(self.body(h)), self.weight))
            h = h / h.abs().amax()
        return self.out(h)


def test_a_trip_takes_as_long_however_many_there_are():
    quantized = dbrq.convert(calibrated(Long().eval(), trips(3)))

    def per_trip(count: int) -> float:
        call(quantized, run := trips(count)[0])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call(quantized, run)
            times.append(time.perf_counter() - start)
        return min(times) / count

    assert per_trip(3000) < 4 * per_trip(150)


def test_many_recorded_trips_are_found_quickly():
    """Hooks of n ops are made in time n."""
    quantized = dbrq.convert(calibrated(Long().eval(), trips(300)))
    with profile_calls() as calls:
        call(quantized, trips(300)[0])
    assert calls() < 3000 * 300


@contextlib.contextmanager
def profile_calls():
    """Counts calls of Python functions."""
    count = 0

    def tick(frame, event, arg) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tick)
    try:
        yield lambda: count
    finally:
        sys.setprofile(None)
