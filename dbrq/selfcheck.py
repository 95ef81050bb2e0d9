"""Whether kernels compute what they should on this CPU.

A kernel (for one geometry, attributes, instruction set) is tried once in a process, before its first result is used: on
integers of its own, in memory with guard zones around it, against exact arithmetic. What fails is replaced, and the
failure is kept for reports and ``dbrq.doctor``. This module knows no kernel: those who call kernels bring the trials.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ERRORS_OF_CODE, is_bug

#: The environment variable that turns the checks off where it is "0".
VARIABLE = "DBRQ_SELF_CHECK"
#: Bytes before and behind a guarded buffer.
ZONE = 4096


@dataclass(frozen=True)
class Failure:
    """A kernel that failed its check here.

    Attributes:
        kernel: its name, as in reports.
        geometry: shapes, attributes and types it was asked for.
        problem: what was wrong with its result.
        stand_in: what computes this instead; "" until it is known.
    """

    kernel: str
    geometry: str
    problem: str
    stand_in: str = ""


class _Ledger:
    """What was tried in this process."""

    def __init__(self) -> None:
        self.enabled = os.environ.get(VARIABLE, "1") != "0"
        self.problems: dict[Hashable, str] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.lock = threading.RLock()


_ledger = _Ledger()


def set_self_check(enabled: bool) -> None:
    """Turn the checks of kernels and of lowered models on (the default) or off, for this process from now on.

    The environment variable ``DBRQ_SELF_CHECK=0`` turns them off from the start. Geometries that are known to go wrong
    on some CPU are computed by another formulation either way.

    >>> import dbrq
    >>> dbrq.set_self_check(True)
    """
    _ledger.enabled = enabled


def enabled() -> bool:
    return _ledger.enabled


def problem_of(key: Hashable, trial: Callable[[], str]) -> str:
    """What is wrong with a kernel; "" if nothing is, or if checks are off.

    Args:
        key: kernel, geometry, attributes, instruction set: what the answer depends on.
        trial: runs the kernel and compares; returns what is wrong. Called once for each key, on one thread at a time.
    """
    if not _ledger.enabled:
        return ""
    found = _ledger.problems.get(key)
    if found is None:
        with _ledger.lock:
            found = _ledger.problems.get(key)
            if found is None:
                found = _ledger.problems[key] = _tried(trial)
    return found


def _tried(trial: Callable[[], str]) -> str:
    """What a trial finds; a kernel that raises is no way to compute either."""
    try:
        return trial()
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        return f"it raises {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def note_failure(failure: Failure) -> None:
    """Keep a failure, or what now stands in for its kernel."""
    with _ledger.lock:
        _ledger.failures[failure.kernel, failure.geometry] = failure


def failures() -> tuple[Failure, ...]:
    """Kernels that failed their check in this process so far."""
    with _ledger.lock:
        return tuple(_ledger.failures.values())


def integers(shape: Sequence[int], low: int, high: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random integers from ``low`` to ``high``, both included; torch's own generator is left alone.

    Args:
        shape: of the result, which is contiguous.
        seed: other data for another seed.
    """
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    period = min(count, 65_537)  # a prime: rows of weights do not repeat each other
    numbers = torch.randint(low, high + 1, (period,), generator=generator, dtype=torch.int32).to(dtype)
    if count > period:
        numbers = numbers.repeat(-(-count // period))[:count]
    return numbers.reshape(tuple(shape))


class Guarded:
    """A buffer between two zones of known bytes, which show what writes beside it and are no zeros to what reads there.

    Attributes:
        bytes: uint8 ``[size]``, 64-byte aligned.
    """

    def __init__(self, size: int, pattern: int = 0xA5) -> None:
        self._pattern = pattern
        whole = torch.full((size + 2 * ZONE + 64,), pattern, dtype=torch.uint8)
        start = ZONE + (-(whole.data_ptr() + ZONE)) % 64
        self._whole, self._start, self._end = whole, start, start + size
        self.bytes = whole[start : start + size]

    def holding(self, tensor: Tensor) -> Tensor:
        """A copy of a dense ``tensor``, in its layout, in this buffer."""
        size = tensor.numel() * tensor.element_size()
        flat = self.bytes[:size].view(tensor.dtype)
        copy = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
        return copy.copy_(tensor)

    @property
    def intact(self) -> bool:
        """Whether nothing was written beside the buffer."""
        before, behind = self._whole[: self._start], self._whole[self._end :]
        return bool((before == self._pattern).all()) and bool((behind == self._pattern).all())
