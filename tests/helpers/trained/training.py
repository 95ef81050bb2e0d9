"""How the models are trained, and where the weights are kept: in the user's cache, under a hash of all this code.

A machine gets the same weights each time: the seeds and the number of threads are fixed. Another machine's differ, for
sums are taken in another order there.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SEED = 0
_THREADS = 2
#: Gives as many pairs of inputs and classes to predict as it is asked for.
Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Schedule:
    """Adam without weight decay, the rate rising over a tenth of ``steps`` and falling as a cosine.

    No weight decay and a high rate let outliers among the channels grow, as they do over long training.
    """

    steps: int
    rate: float
    clip: float = float("inf")


def weights(name: str, make: Callable[[], nn.Module], batches: Batches, by: Schedule) -> dict[str, Tensor]:
    """The state dict of ``make()`` after training on ``batches``, or what was kept of that."""
    path = _cache() / f"{name}-{by.steps}-{_digest()}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):  # tests run in several processes
            if not path.exists():
                trained = train(make, batches, by)
                torch.save(trained, path.with_suffix(".part"))
                path.with_suffix(".part").replace(path)
            return torch.load(path)
    except OSError:  # no place to write: train in each process
        return train(make, batches, by)


def train(make: Callable[[], nn.Module], batches: Batches, by: Schedule) -> dict[str, Tensor]:
    """As ``weights``, trained now. The global random state and the number of threads are left as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(_SEED)
            model = make().train()
            _descend(model, batches(by.steps), by)
    finally:
        torch.set_num_threads(threads)
    return model.state_dict()


def _descend(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], by: Schedule) -> None:
    optimizer = torch.optim.Adam(model.parameters(), by.rate, fused=True)
    rise = by.steps // 10

    def rate(step: int) -> float:
        return (step + 1) / rise if step < rise else 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (by.steps - rise))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for inputs, classes in batches:
        loss = F.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), by.clip)
        optimizer.step()
        schedule.step()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dbrq-trained"


@functools.cache
def _digest() -> str:
    """Of all that the weights depend on: this package, the libraries, Python (its documentation is a text), the CPU."""
    versions = (torch.__version__, np.__version__, platform.python_version(), torch.backends.cpu.get_cpu_capability())
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(repr(versions).encode() + b"".join(sources)).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
