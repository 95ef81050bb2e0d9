"""How a numeric case is judged: against FX graph mode, and against fake quantization."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

import dbrq
from dbrq.inspection.report import ReportRow
from tests.helpers.reference import fake_quantized
from tests.helpers.running import floats, fx_quantize, run

#: Within one step for this share of the elements,
AGREEING = 0.999
#: or as good as FX, give or take this many dB.
DECIBELS = 0.5


# Measures


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    noise = torch.linalg.vector_norm((reference - other).double()).item()
    signal = torch.linalg.vector_norm(reference.double()).item()
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def step_of(value: Tensor) -> float:
    """The step of a value that would be quantized to 8 bits: its range, zero included, by 255."""
    if not value.numel():
        return 1.0
    return max((max(value.max().item(), 0.0) - min(value.min().item(), 0.0)) / 255, 1e-12)


def agreement(a: Tensor, b: Tensor, step: float) -> float:
    """The share of elements that differ by one step at most."""
    if not a.numel():
        return 1.0
    return ((a - b).abs() <= step * 1.001 + 1e-6).float().mean().item()


# Judging


def assert_matches(
    model: nn.Module,
    example: Any,
    qconfig_mapping: Any = None,
    *,
    data: Sequence[Any] | None = None,
    fx: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare, calibrate, convert and judge; returns the converted model.

    All models are held against fake quantization, and against FX graph mode where ``fx`` is True, or None and it runs
    the model (it fails on many spellings). ``options`` go to ``prepare``.
    """
    model = model.eval()
    inputs = [example] if data is None else list(data)
    before = run(model, example)
    prepared = dbrq.prepare(model, example, qconfig_mapping, **options)
    assert_same_tree(run(prepared, example), before, "prepared")
    if data is not None:
        prepared = dbrq.prepare(model, example, qconfig_mapping, **options)
    for item in inputs if data is not None else []:
        run(prepared, item)
    converted = dbrq.convert(prepared)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")  # on the recorded path nothing falls back to float
        after = run(converted, example)
    assert_same_containers(after, before)
    assert_close_to_fake_quantized(converted, model, example)
    if fx is not False:
        try:
            reference = fx_quantize(model, example, as_fx_mapping(qconfig_mapping), data)
            theirs, steps = run(reference, example), reference.steps(example)
        except Exception:
            if fx:
                raise
            return converted
        assert_as_good(after, before, theirs, steps)
    return converted


def as_fx_mapping(qconfig_mapping: Any) -> QConfigMapping | None:
    if qconfig_mapping is None or isinstance(qconfig_mapping, QConfigMapping):
        return qconfig_mapping
    return QConfigMapping().set_global(qconfig_mapping)


def assert_same_containers(after: Any, before: Any) -> None:
    """Same classes all the way down; plain tensors of equal shape and dtype at the leaves."""
    assert type(after) is type(before), f"{type(after)} where the float model gives {type(before)}"
    if isinstance(before, Tensor):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert not after.__dict__, f"left on the output: {after.__dict__}"
    elif isinstance(before, dict):
        assert list(after) == list(before)
        for key in before:
            assert_same_containers(after[key], before[key])
    elif isinstance(before, (list, tuple)):
        assert len(after) == len(before)
        for a, b in zip(after, before, strict=True):
            assert_same_containers(a, b)


def assert_same_tree(after: Any, before: Any, what: str) -> None:
    assert_same_containers(after, before)
    for a, b in zip(floats(after), floats(before), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text: f"{what} differs from float: {text}")


def assert_as_good(ours: Any, float_: Any, theirs: Any, steps: Iterable[float | None] = ()) -> None:
    """Rule (a): within one step of FX's output, or no further from float than FX is."""
    given = list(steps)
    leaves = list(zip(floats(ours), floats(float_), floats(theirs), strict=True))
    for number, (a, f, b) in enumerate(leaves):
        assert torch.isfinite(a).all() or not torch.isfinite(f).all()
        step = given[number] if len(given) == len(leaves) else None
        share = agreement(a, b, step_of(b) if step is None else step)
        if share >= AGREEING:
            continue
        mine, other = sqnr(f, a), sqnr(f, b)
        assert mine >= other - DECIBELS, f"{share:.2%} within one step of FX; {mine:.2f} dB, and FX has {other:.2f} dB"


def assert_close_to_fake_quantized(
    converted: nn.Module, model: nn.Module, example: Any, share: float = AGREEING
) -> None:
    """Rule (c): within one step of fake quantization with the converted model's own qparams."""
    expected = fake_quantized(converted, model, example)
    got = run(converted, example)
    for a, b in zip(floats(got), floats(expected), strict=True):
        agreeing = agreement(a, b, step_of(b))
        assert agreeing >= share, (
            f"{agreeing:.2%} of the elements within one step of fake quantization; largest error "
            f"{(a - b).abs().max().item() / step_of(b):.1f} steps, {sqnr(b, a):.1f} dB"
        )


# Looking at decisions


def rows(model: nn.Module, op: str) -> list[ReportRow]:
    return [row for row in dbrq.report(model).rows if row.op == op]


def assert_precision(model: nn.Module, op: str, precision: str, count: int | None = None) -> None:
    """All rows of ``op`` run in ``precision``; the failure shows the report."""
    found = rows(model, op)
    assert found, f"no {op} in\n{dbrq.report(model)}"
    assert {row.precision for row in found} == {precision}, f"{op} should be {precision} in\n{dbrq.report(model)}"
    assert count is None or len(found) == count


def assert_close(got: Any, expected: Any, tolerance: float = 0.02) -> None:
    """Within a share of the output's range, where an int8 value on the way may fall on the other side of a rounding."""
    for a, b in zip(floats(got), floats(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a - b).abs().max() <= tolerance * 255 * step_of(b)
