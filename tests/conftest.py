"""What every test relies on: quiet threads, warnings not swallowed, equal random numbers, an importable torchvision."""

import contextlib
import functools
import gc
import inspect
import os
import random
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts its threads

import numpy as np
import pytest
import torch

from dbrq import selfcheck

gc.set_threshold(300_000, 5, 20)  # graphs are many small objects: the collector took a seventh of the suite's time
# Worker processes share the two cores: threads of both would wait for each other.
torch.set_num_threads(max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
# torch gives most warnings once in a process; the filter in setup.cfg must meet them in every test.
torch.set_warn_always(True)


def _remembered(read: Callable) -> Callable:
    """What ``read`` gives for functions, which never changes: ``torch.jit.script`` reads the source of the same few
    functions of torch for each module that it compiles, a tenth of what lowering takes.
    """
    remembered = functools.lru_cache(maxsize=1024)(read)

    @functools.wraps(read)
    def reading(subject: Any) -> Any:
        return remembered(subject) if type(subject) is FunctionType else read(subject)

    return reading


inspect.getsourcelines = _remembered(inspect.getsourcelines)
torch._jit_internal.get_type_hint_captures = _remembered(torch._jit_internal.get_type_hint_captures)
torch.jit.frontend.parse_def = _remembered(torch.jit.frontend.parse_def)


def _without_devices(*modules: Any) -> None:
    """``torch.manual_seed`` keeps the stack as text for each device that there might be one day, in every call."""
    for module in modules:
        if not module.is_available():
            for holder in (module, getattr(module, "random", module)):
                holder._lazy_call = lambda *args, **kwargs: None


_without_devices(torch.cuda, torch.xpu, torch.mtia)

# torchvision registers fakes for operators of its C++ library, which a build for another torch does not load.
_TORCHVISION = torch.library.Library("torchvision", "DEF")  # the operators live as long as this
for _schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
    with contextlib.suppress(RuntimeError):  # the real ones are there
        _TORCHVISION.define(_schema)


def pytest_collection_finish() -> None:
    """What imports made stays: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    yield


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> selfcheck._Ledger:
    """A process that has tried no kernel yet, and tries them."""
    fresh = selfcheck._Ledger()
    fresh.enabled = True
    monkeypatch.setattr(selfcheck, "_ledger", fresh)
    return fresh
