"""``lower``: one stock kernel for each int8 pattern that has one, and right numbers for all."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dbrq
from tests.helpers.cases import Case, last_step, made, table
from tests.helpers.computing import INT8_KERNELS, NAMES, calls, counted
from tests.helpers.judging import sqnr, step_of
from tests.helpers.models import Call
from tests.helpers.patterns import (
    ACTIVATIONS,
    CONVS,
    DYNAMIC,
    INTEGERS,
    LINEAR_CASES,
    MATMUL_CASES,
    MORE_SUMS,
    QCONFIGS,
    SAMPLE,
    SHARED,
    SUMS,
    TO_INT8,
    WEIGHT_ONLY,
)
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert, floats, graph_of, run


def assert_lowers(case: Case, out: str) -> None:
    """Right numbers, by an independent reference, the graph and the converted model; and what the case says runs."""
    model, x = made(case, out)
    quantized = convert(model, x, case.mapping).quantized
    lowered, graph = dbrq.lower(quantized, x), graph_of(quantized, x)
    assert isinstance(lowered, torch.jit.ScriptModule)
    got = floats(run(lowered, x))
    references = {"the graph": run(graph, x), "the converted model": run(quantized, x)}
    references["fake quantization"] = fake_quantized(quantized, model, x)
    for name, reference in references.items():
        for number, (a, b) in enumerate(zip(got, floats(reference), strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            in_steps = out == "int8" and number == 0 and case.mapping not in (DYNAMIC, WEIGHT_ONLY)
            unit, most, nearly = (last_step(graph), 2.5, 1.5) if in_steps else (step_of(b) * 255, 0.01, 0.001)
            apart = (a - b).abs() / unit
            assert apart.max() < most and (apart < nearly).float().mean() >= 0.999, f"{apart.max():.4f} off {name}"
    expected = case.stock(out)
    found = calls(lowered, x)
    if expected.pop("...", 0):
        found &= expected
    assert found == expected, f"{found} runs\n{lowered.code}"


@table(CONVS, ACTIVATIONS, SUMS, MORE_SUMS, LINEAR_CASES, MATMUL_CASES, SHARED)
def test_pattern(name, case, out):
    assert_lowers(case, out)


@table(INTEGERS, TO_INT8, outs=("int8",))
def test_pattern_that_ends_in_int8(name, case, out):
    assert_lowers(case, out)


@pytest.mark.parametrize("qconfig", QCONFIGS)
@pytest.mark.parametrize("name", SAMPLE)
def test_other_qconfigs(name, qconfig):
    case = {**CONVS, **SUMS, **MORE_SUMS, **INTEGERS}[name]
    assert_lowers(dataclasses.replace(case, mapping=QCONFIGS[qconfig]), "int8")


def test_the_profiler_sees_the_same_kernels():
    case = SUMS["conv + relu, int8"]
    model, x = made(case, "int8")
    lowered = dbrq.lower(convert(model, x).quantized, x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(lowered, x)
    names = Counter(event.name.partition("::")[2] for event in seen.events())
    assert counted("qconv qconv qconv_sum") == Counter({NAMES[n]: c for n, c in names.items() if n in INT8_KERNELS})
    assert not {"relu", "relu_", "add_"} & set(names) and names["add"] == 1  # which quantizes


def branches(m, x):
    """Convolutions with a sum, a pool, a product of activations, layers of each kind."""
    y = torch.relu(m.one(m.conv(x)) + m.two(x))
    rows = torch.nn.functional.max_pool2d(y, 2).flatten(1)
    a, b = m.left(rows), m.right(rows)
    return m.last((torch.relu(m.over(rows) + a) @ b.mT) @ b)


EMPTY = {
    "static": None,
    "dynamic": DYNAMIC,
    "weight only": WEIGHT_ONLY,
}


@pytest.mark.parametrize("mapping", EMPTY)
@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_an_empty_batch(backend, mapping):
    """An expert that gets no token ended the whole model."""
    model = Call(
        branches, conv=nn.Conv2d(3, 8, 3, padding=1), one=nn.Conv2d(8, 8, 1), two=nn.Conv2d(3, 8, 1),
        left=nn.Linear(32, 16), right=nn.Linear(32, 16), over=nn.Linear(32, 16), last=nn.Linear(16, 4),
    ).eval()  # fmt: skip
    x = torch.randn(4, 3, 4, 4)
    quantized = convert(model, x, EMPTY[mapping]).quantized
    lowered = dbrq.lower(quantized, x, backend=backend)
    for given in (x[:0], x, x[:0], x[:2]):
        found, expected = run(lowered, given), run(quantized, given)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert not len(given) or sqnr(expected, found) > 30
