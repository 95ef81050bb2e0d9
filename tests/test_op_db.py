"""torch's own op database between int8 layers, converted and lowered: every op is right, or refused by name.

One sample of each op by default. ``DBRQ_OP_DB=all`` takes every sample in every spelling, and ``DBRQ_OP_DB_BACKENDS``
other backends (``torchscript,onednn,inductor``): that takes hours.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.testing._internal import common_methods_invocations

import dbrq

pytest.importorskip("expecttest")

from op_db_cases import OPS, Case, Quantized, case_of, called, refusal, samples_of, spellings_of  # noqa: E402

EVERYTHING = os.environ.get("DBRQ_OP_DB") == "all"
BACKENDS = os.environ.get("DBRQ_OP_DB_BACKENDS", "torchscript,onednn").split(",")
#: Ops in one model.
TOGETHER = 8

#: Op -> why it is not tried.
NOT_TRIED = {
    **{name: "runs on GPUs only" for name in OPS if name.startswith("jiterator")},
    **{name: "has no samples on the CPU in dtypes that layers give"
       for name in ("torch._scaled_mm", "torch._scaled_mm_v2", "torch.ops.aten._flash_attention_forward",
                    "torch.ops.aten._efficient_attention_forward", "nn.functional.batch_norm.without_cudnn")},
}  # fmt: skip
#: Ops that give memory as it is -> they are filled, since no value is right.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
             "resize_as_"}  # fmt: skip
#: Op -> backends that refuse its first sample. "converted": it cannot be converted.
REFUSED: dict[str, set[str]] = {}


@pytest.fixture(autouse=True)
def own_random_state(monkeypatch):
    """The database sets the seed inside of ops, which no graph can do; here the state is set before each call."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases(name: str) -> Iterator[Case]:
    spellings = spellings_of(OPS[name])
    samples = samples_of(OPS[name])
    for number, sample in enumerate(samples if EVERYTHING else samples[:1]):
        for spelling, function in spellings.items() if EVERYTHING else itertools.islice(spellings.items(), 1):
            if name in UNDEFINED:
                function = _filled(function)
            try:
                yield case_of(name, sample, function)
            except (RuntimeError, TypeError, ValueError, IndexError):
                if spelling == "function" and number == 0:
                    raise  # other spellings do not take all samples, and nudged inputs may leave an op's domain


def _filled(function):
    return lambda *args, **kwargs: function(*args, **kwargs).fill_(1.5)


def failures(tried: Sequence[Case], refused: set[tuple[str, str]]) -> list[str]:
    """What is wrong with cases in one model; one by one, if the model is refused as a whole.

    Args:
        refused: takes (op, backend) of refusals that name the op.
    """
    found: list[str] = []
    backend = "converted"
    try:
        quantized = Quantized(tried)
        found += [f"{name}, converted: {problem}" for name, problem in quantized.problems(quantized.converted)]
        for backend in BACKENDS:
            lowered = quantized.lowered(backend)
            found += [f"{name}, {backend}: {problem}" for name, problem in quantized.problems(lowered)]
    except Exception as error:
        if len(tried) > 1:
            return [line for case in tried for line in failures([case], refused)]
        (name,) = (case.name for case in tried)
        problem = refusal(error, name) if isinstance(error, dbrq.QuantizationError) else f"{type(error).__name__}: {error}"
        found += [f"{name}, {backend}: {problem}"] if problem else []
        refused.add((name, backend))
    return found


TRIED = [name for name in OPS if name not in NOT_TRIED]
GROUPS = [TRIED[i : i + TOGETHER] for i in range(0, len(TRIED), TOGETHER)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}..{names[-1]}")
def test_right_or_refused(names):
    refused: set[tuple[str, str]] = set()
    tried = [case for name in names for case in cases(name)]
    missing = set(names) - {case.name for case in tried}
    assert not missing, f"no sample of {missing}"
    size = TOGETHER
    found = [line for i in range(0, len(tried), size) for line in failures(tried[i : i + size], refused)]
    assert not found, "\n".join(found)
    if not EVERYTHING:
        assert refused == {(name, backend) for name in names for backend in REFUSED.get(name, ()) if backend in (*BACKENDS, "converted")}
