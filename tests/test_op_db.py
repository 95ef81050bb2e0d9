"""torch's own op database between int8 layers, converted and lowered: every op is right, or refused by name.

One sample of each op by default. ``DBRQ_OP_DB=all`` takes every sample in every spelling, and ``DBRQ_OP_DB_BACKENDS``
other backends (``torchscript,onednn,inductor``): that takes hours.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.testing._internal import common_methods_invocations

import dbrq
from tests.helpers.op_db_cases import OPS, Case, Quantized, case_of, refusal, samples_of, spellings_of
from tests.helpers.running import has_compiler

pytest.importorskip("expecttest")
EVERYTHING = os.environ.get("DBRQ_OP_DB") == "all"
DEFAULT_BACKENDS = "torchscript,onednn"
BACKENDS = os.environ.get("DBRQ_OP_DB_BACKENDS", DEFAULT_BACKENDS)
#: Ops in one model.
TOGETHER = 8
#: Op -> why it is not tried.
NOT_TRIED = {
    **{name: "runs on GPUs only" for name in OPS if name.startswith("jiterator")},
    "torch._scaled_mm": "takes float8 only",
    "torch._scaled_mm_v2": "takes float8 only",
    "torch.ops.aten._flash_attention_forward": "has no samples on the CPU",
    "torch.ops.aten._efficient_attention_forward": "has no samples on the CPU",
    "nn.functional.batch_norm.without_cudnn": "has no samples on the CPU",
}
#: Ops that give memory as it is: they are filled, since no value is right.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
             "resize_as_"}  # fmt: skip
#: Op -> the first backend that refuses its first sample; "converted": it cannot be converted.
REFUSED = {
    "sparse.mm.reduce": "converted",  # the sample is of a compressed sparse layout
    "sparse.sampled_addmm": "converted",
    "torch.ops.aten._safe_softmax.default": "converted",  # the sample has infinite values, which nothing quantizes
    "resize_": "torchscript",  # it changes what a tensor is, which no graph follows
    "_unsafe_masked_index": "torchscript",  # TorchScript has no literal for its list of optional tensors
    "_unsafe_masked_index_put_accumulate": "torchscript",
    "nn.functional.linear_cross_entropy.chunked": "torchscript",  # it asks whether its input has a gradient
}
_RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
TRIED = [name for name in OPS if name not in NOT_TRIED]
_TAKEN = [name for name in TRIED if name not in REFUSED]
#: What is refused stands alone: a model that is refused is tried again, member by member.
GROUPS = [*(_TAKEN[i : i + TOGETHER] for i in range(0, len(_TAKEN), TOGETHER)), *([name] for name in REFUSED)]


@pytest.fixture(autouse=True)
def own_random_state(monkeypatch):
    """The database sets the seed inside of ops, which no graph can do; here it is set before each call."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}..{names[-1]}")
def test_right_or_refused(names):
    tried = [case for name in names for case in cases(name)]
    refused: dict[str, str] = {}
    found = [line for i in range(0, len(tried), TOGETHER) for line in failures(tried[i : i + TOGETHER], refused)]
    assert not found, "\n".join(found)
    if not EVERYTHING and BACKENDS == DEFAULT_BACKENDS:
        assert {case.name for case in tried} == set(names)
        assert refused == {name: REFUSED[name] for name in names if name in REFUSED}


#: Compiling takes seconds, so for a few only.
COMPILED = ["addmm", "cumsum", "index_add", "masked_fill", "nn.functional.gelu", "softmax", "topk", "view"]


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_right_on_inductor():
    quantized = Quantized([next(cases(name)) for name in COMPILED])
    assert not list(quantized.problems(quantized.lowered("inductor")))


def test_a_wrong_result_is_found():
    case = next(cases("mul"))
    quantized = Quantized([case])

    def lies(*inputs):
        ((read, h, (result,), last),) = quantized.converted(*inputs)
        return [(read, h, [result * 1.01], last)]

    assert list(quantized.problems(lies))
    assert not list(quantized.problems(quantized.converted))


def cases(name: str) -> Iterator[Case]:
    """An op's samples, each in the function's spelling at least."""
    spellings = spellings_of(OPS[name])
    for number, sample in enumerate(samples_of(OPS[name], None if EVERYTHING else 1)):
        for spelling, function in spellings.items() if EVERYTHING else itertools.islice(spellings.items(), 1):
            try:
                yield case_of(name, sample, _filled(function) if name in UNDEFINED else function)
            except _RAISED:
                if number == 0 and spelling == "function":
                    raise  # other spellings do not take all samples, and nudged inputs may leave an op's domain


def _filled(function: Callable) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs).fill_(1.5)


def failures(tried: Sequence[Case], refused: dict[str, str]) -> list[str]:
    """What is wrong with cases in one model; one by one, if the model is refused as a whole.

    Args:
        refused: takes op -> backend that refuses it by name.
    """
    found: list[str] = []
    backend = "converted"
    try:
        quantized = Quantized(tried)
        found += [f"{name}, converted: {problem}" for name, problem in quantized.problems(quantized.converted)]
        for backend in BACKENDS.split(","):
            lowered = quantized.lowered(backend)
            found += [f"{name}, {backend}: {problem}" for name, problem in quantized.problems(lowered)]
    except _RAISED as error:
        if len(tried) > 1:
            return [line for case in tried for line in failures([case], refused)]
        name = tried[0].name
        refused[name] = backend
        named = isinstance(error, dbrq.QuantizationError)
        problem = refusal(error, name) if named else f"{type(error).__name__}: {error}"
        found += [f"{name}, {backend}: {problem}"] if problem else []
    return found
