"""What Inductor fuses, by its generated code and by numbers."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import dbrq
from tests.helpers.int8_patterns import PATTERNS, Pattern, fusions
from tests.helpers.judging import sqnr
from tests.helpers.reference import fake_quantized
from tests.helpers.running import floats, has_compiler, run

lowered = functools.partial(dbrq.lower, backend="inductor")
if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)
#: What each pattern becomes. ``benchmarks/patterns.py`` shows what PT2E with the x86 quantizer makes of it: the same,
#: but for conv1d, which that has in float, and values that dbrq has in uint8 where PT2E has float32.
EXPECTED = {
    "conv2d + nothing": "qconv -> uint8; qconv -> float32",
    "conv2d + relu": "qconv relu -> uint8; qconv -> float32",
    "conv2d + relu6": "qconv hardtanh -> uint8; qconv -> float32",
    "conv2d + hardtanh": "qconv hardtanh -> uint8; qconv -> float32",
    "conv2d + hardswish": "qconv hardswish -> uint8; qconv -> float32",
    "conv2d + silu": "qconv swish -> uint8; qconv -> float32",
    "conv2d + relu, float out": "qconv relu -> float32",
    "conv2d + add, other last": "qconv relu -> uint8; qconv sum -> float32; qconv -> float32",
    "conv2d + add, other first": "qconv relu -> uint8; qconv sum -> float32; qconv -> float32",
    "conv2d + add, two branches": "qconv -> uint8; qconv sum -> uint8; qconv -> float32",
    "conv2d + add + relu, other last": "qconv relu -> uint8; qconv sum relu -> float32; qconv -> float32",
    "conv2d + add + relu, other first": "qconv relu -> uint8; qconv sum relu -> float32; qconv -> float32",
    "conv2d + add + relu, two branches": "qconv -> uint8; qconv sum relu -> uint8; qconv -> float32",
    "conv1d + nothing": "qconv -> uint8; qconv -> float32",
    "conv1d + relu": "qconv relu -> uint8; qconv -> float32",
    "conv1d + relu6": "qconv hardtanh -> uint8; qconv -> float32",
    "conv1d + hardtanh": "qconv hardtanh -> uint8; qconv -> float32",
    "conv1d + hardswish": "qconv hardswish -> uint8; qconv -> float32",
    "conv1d + silu": "qconv swish -> uint8; qconv -> float32",
    "conv1d + relu, float out": "qconv relu -> float32",
    "conv1d + add, other last": "qconv relu -> uint8; qconv -> uint8; qconv -> float32",
    "conv1d + add + relu, other first": "qconv relu -> float32; 2 x qconv -> float32",
    "linear + nothing": "qlinear -> uint8; qlinear -> float32",
    "linear + relu": "qlinear relu -> uint8; qlinear -> float32",
    "linear + relu6": "2 x qlinear -> float32",
    "linear + hardtanh": "2 x qlinear -> float32",
    "linear + hardswish": "2 x qlinear -> float32",
    "linear + silu": "2 x qlinear -> float32",
    "linear + gelu": "qlinear gelu -> uint8; qlinear -> float32",
    "linear + gelu (tanh)": "qlinear gelu -> uint8; qlinear -> float32",
    "linear + relu, float out": "qlinear relu -> float32",
    "linear + add, other last": "qlinear relu -> uint8; qlinear add -> uint8; qlinear -> float32",
    "linear + add, other first": "qlinear relu -> uint8; qlinear add -> uint8; qlinear -> float32",
    "linear + add, two branches": "qlinear -> uint8; qlinear add -> uint8; qlinear -> float32",
    "linear + add + relu, other last": "qlinear relu -> uint8; qlinear add relu -> uint8; qlinear -> float32",
    "linear + add + relu, other first": "qlinear relu -> uint8; qlinear add relu -> uint8; qlinear -> float32",
    "linear + add + relu, two branches": "qlinear -> uint8; qlinear add relu -> uint8; qlinear -> float32",
    "linear + gelu, 3-d": "qlinear gelu -> uint8; qlinear -> float32",
    "max_pool2d": "qconv relu -> uint8; qconv -> float32; quantized.max_pool2d",
    "cat": "2 x qconv relu -> uint8; qconv -> float32",
    "flatten": "qconv relu -> uint8; qlinear -> float32; quantized.max_pool2d",
    "one input of several conv2d": "qconv relu -> float32; 2 x qconv -> float32",
    "one input of several linear": "qlinear relu -> float32; 2 x qlinear -> float32",
    "attention": "3 x qlinear -> float32; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32",
    "conv2d + relu, free batch and size": "qconv relu -> uint8; qconv -> float32",
    "linear + gelu, free batch": "qlinear gelu -> uint8; qlinear -> float32",
    "attention, free batch and length":
        "3 x qlinear -> float32; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32",
    "conv2d + relu, bfloat16": "qconv relu -> uint8; qconv -> bfloat16",
    "conv2d + add + relu, bfloat16": "qconv relu -> uint8; qconv sum relu -> float32; qconv -> bfloat16",
    "linear + gelu, bfloat16": "qlinear gelu -> uint8; qlinear -> bfloat16",
    "attention, bfloat16":
        "3 x qlinear -> bfloat16; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32",
}  # fmt: skip


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
    assert EXPECTED.keys() == PATTERNS.keys()


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name):
    pattern = PATTERNS[name]
    model, x = pattern.make(), pattern.example()
    quantized = dbrq.quantize(model, [x, -x, 1.1 * x])
    model_of_code = lowered(quantized, x, dtype=torch.bfloat16 if pattern.bfloat16 else torch.float32)
    assert_agrees(pattern, model_of_code, quantized, model, x)
    for times in (2, 3, 5) if pattern.free else ():
        assert_agrees(pattern, model_of_code, quantized, model, grown(x, pattern.free, times))
    assert fusions(model_of_code.code) == counted(EXPECTED[name]), model_of_code.code
    assert len(model_of_code.forms) == (2 if pattern.free else 1)


def assert_agrees(pattern: Pattern, got: nn.Module, quantized: nn.Module, model: nn.Module, x: Tensor) -> None:
    outputs = zip(floats(run(got, x)), floats(run(quantized, x)), floats(fake_quantized(quantized, model, x)),
                  strict=True)  # fmt: skip
    for ours, eager, reference in outputs:
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        least = 30 if pattern.bfloat16 else 45  # a value on the border between two integers is rounded either way
        assert sqnr(eager, ours) >= least and sqnr(reference, ours) >= least
