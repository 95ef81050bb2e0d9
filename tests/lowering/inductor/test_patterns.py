"""What Inductor fuses, by its generated code and by numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import dbrq
from tests.helpers.cases import Case
from tests.helpers.inductor import lowered
from tests.helpers.int8_patterns import PATTERNS, fusions
from tests.helpers.judging import sqnr
from tests.helpers.reference import fake_quantized
from tests.helpers.running import floats, has_compiler, run

if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)


def counted(text: str) -> Counter[str]:
    """``"a; 2 x b"`` -> {"a": 1, "b": 2}."""
    found: Counter[str] = Counter()
    for part in text.split("; "):
        times, _, name = part.rpartition(" x ")
        found[name] += int(times or 1)
    return found


def grown(x: Tensor, dims: tuple[int, ...], times: int) -> Tensor:
    for dim in dims:
        x = torch.cat([x] * times, dim)
    return x


def test_every_pattern_is_expected():
    assert all(case.inductor for case in PATTERNS.values())


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name):
    pattern = PATTERNS[name]
    model, x = pattern.make(), pattern.example()
    quantized = dbrq.quantize(model, [x, -x, 1.1 * x])
    model_of_code = lowered(quantized, x, dtype=torch.bfloat16 if pattern.bfloat16 else torch.float32)
    assert_agrees(pattern, model_of_code, quantized, model, x)
    for times in (2, 3, 5) if pattern.free else ():
        assert_agrees(pattern, model_of_code, quantized, model, grown(x, pattern.free, times))
    assert fusions(dbrq.lowered_form(model_of_code).code) == counted(pattern.inductor), dbrq.lowered_form(
        model_of_code
    ).code
    assert len(dbrq.lowered_form(model_of_code).forms) == (2 if pattern.free else 1)


def assert_agrees(pattern: Case, got: nn.Module, quantized: nn.Module, model: nn.Module, x: Tensor) -> None:
    outputs = zip(floats(run(got, x)), floats(run(quantized, x)), floats(fake_quantized(quantized, model, x)),
                  strict=True)  # fmt: skip
    for ours, eager, reference in outputs:
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        least = 30 if pattern.bfloat16 else 45  # a value on the border between two integers is rounded either way
        assert sqnr(eager, ours) >= least and sqnr(reference, ours) >= least
