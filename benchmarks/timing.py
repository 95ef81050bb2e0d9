"""Interleaved timing: variants take turns in slices, so that a drifting machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call (median, minimum, maximum over slices) and the median ratio to the first variant, slice by
    slice.
    """

    median: float
    minimum: float
    maximum: float
    ratio: float
    ratio_minimum: float
    ratio_maximum: float


def interleaved(
    variants: Mapping[str, Callable[[], object]], slices: int = 9, seconds: float = 0.3
) -> dict[str, Timing]:
    """Time each variant in ``slices`` slices of ``seconds``, taking turns; the first is the one ratios refer to."""
    calls = {}
    for name, run in variants.items():
        for _ in range(5):
            run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(seconds / (time.perf_counter() - start)))
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(slices):
        for name, run in variants.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            taken[name].append((time.perf_counter() - start) / calls[name] * 1e3)
    first = taken[next(iter(variants))]
    ratios = {name: [t / f for t, f in zip(times, first, strict=True)] for name, times in taken.items()}
    return {
        name: Timing(statistics.median(times), min(times), max(times),
                     statistics.median(ratios[name]), min(ratios[name]), max(ratios[name]))
        for name, times in taken.items()
    }  # fmt: skip
