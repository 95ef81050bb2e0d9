"""Memory does not grow with calls and shapes: each backend in a process of its own, its resident size measured.

``DBRQ_MEMORY_FULL=1`` makes 10,000 calls and 300 shapes of it. As a script this file is what runs in the process:
``python -m tests.models.test_memory onednn 10000 300`` prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests import ROOT

FULL = os.environ.get("DBRQ_MEMORY_FULL") == "1"
BACKENDS = ("converted", "torchscript", "onednn", *(["rewrite", "inductor"] if FULL else []))
CALLS, SHAPES = (10_000, 300) if FULL else (400, 40)
#: Megabytes by which the process may grow after the warm-up.
MOST = 20.0 if FULL else 8.0


def resident() -> float:
    """The process's resident memory in megabytes, with what malloc holds but does not use given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(backend: str, calls: int, shapes: int) -> dict[str, float]:
    """How much a backend grows over passes through ``shapes`` sizes, and then over ``calls`` calls of one size."""
    import torch
    from torch import nn

    import dbrq
    from tests.helpers.models import Call
    from tests.helpers.networks import writing

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Call(writing, first=nn.Conv2d(3, 8, 3, padding=1), second=nn.Conv2d(8, 8, 1), last=nn.Linear(16, 5)).eval()
    example = torch.randn(2, 3, 12, 12)
    model = dbrq.quantize(model, [example])
    if backend == "rewrite":
        model = dbrq.rewrite(model, example)
    elif backend != "converted":
        model = dbrq.lower(model, example, backend=backend)
    sizes = [(1 + n % 3, 3, 8 + n // 20, 8 + n % 20) for n in range(shapes)]

    def through_all() -> None:
        for size in sizes:
            model(torch.randn(size))

    with torch.no_grad():
        for _ in range(2):
            through_all()
        start = resident()
        for _ in range(3):
            through_all()
        after_shapes = resident()
        for _ in range(100):
            model(example)
        before_calls = resident()
        for _ in range(calls):
            model(example)
        return {"shapes": after_shapes - start, "calls": resident() - before_calls, "at": resident()}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_does_not_grow(backend: str) -> None:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, backend, str(CALLS), str(SHAPES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600 if FULL else 300)
    assert done.returncode == 0, done.stderr[-3000:]
    grown = json.loads(done.stdout.splitlines()[-1])
    assert grown["shapes"] < MOST and grown["calls"] < MOST, f"grew by {grown} MB"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
