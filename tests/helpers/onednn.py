"""How models lowered to oneDNN are judged: by numbers, and by the steps of their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import dbrq
from dbrq.graph.nodes import QUANTIZE
from dbrq.lowering.engine import is_call
from dbrq.lowering.onednn.values import PrimitiveStep
from tests.helpers.cases import Case, last_step, made
from tests.helpers.computing import counted
from tests.helpers.judging import step_of
from tests.helpers.models import Call
from tests.helpers.patterns import DYNAMIC, WEIGHT_ONLY, same
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert, floats, graph_of, run

LAYER_STEPS = {"linear", *(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2, 3))}
MOVING = {
    "quantize",
    "reorder",
    "cat",
    "torch:cat",
    "torch:contiguous",
    "torch:reshape",
    "torch:flatten",
    "torch:stack",
    "torch:repeat",
    "torch:flip",
    "torch:roll",
    "torch:pixel_shuffle",
    "torch:channel_shuffle",
    "torch:pad",
    "torch:pad_mode",
    "torch:nearest",
    "torch:_own",
    "torch:clone",
    "torch:getitem",
}


def steps(model: Any) -> list[str]:
    """What the newest plans execute, in words."""
    return [
        step.words if isinstance(step, PrimitiveStep) else f"torch:{step.described()[2]}"
        for runner in dbrq.lowered_form(model).plans
        for step in runner.plan.steps
    ]


def computing(model: Any) -> Counter:
    """What computes, by the op that comes first; convolutions and linear layers are "layer"."""
    heads = (step.partition(" + ")[0] for step in steps(model) if step not in MOVING)
    return Counter("layer" if head in LAYER_STEPS else head for head in heads if head not in MOVING)


def on_grid(graph: fx.GraphModule, x: Any) -> Any:
    """Inputs that stay as they are when the graph quantizes them."""
    given = x if isinstance(x, tuple) else (x,)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]

    def levelled(node: fx.Node, value: Any) -> Any:
        found = [user.args[1:5] for user in node.users if is_call(user, QUANTIZE)]
        if not found or not isinstance(value, Tensor) or not all(isinstance(n, (int, float)) for n in found[0]):
            return value
        scale, zero_point, low, high = found[0]
        return (((value / scale).round() + zero_point).clamp(low, high) - zero_point) * scale

    levels = tuple(map(levelled, placeholders, given))
    return levels if isinstance(x, tuple) else levels[0]


def assert_agrees(
    got: Any, reference: Any, what: str, step: float | None = None, exact: float = 3e-5, most: float = 0.01
) -> None:
    """Within one ``step`` for 99.9 % of the elements; of what stays float, within ``exact`` of the range."""
    for number, (a, b) in enumerate(zip(floats(got), floats(reference), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        in_steps = step is not None and number == 0
        unit, nearly, furthest = (step, 1.01, 2.5) if in_steps else (step_of(b) * 255, exact, most)
        assert torch.equal(a.isfinite(), b.isfinite()), what
        apart = (a - b).abs()[b.isfinite()] / unit
        assert not apart.numel() or (apart.max() < furthest and (apart <= nearly).float().mean() >= 0.999), (
            f"{apart.max():.5f} off {what}, {(apart <= nearly).float().mean():.2%} near"
        )


def lower(quantized: nn.Module, x: Any, **options: Any) -> Any:
    return dbrq.lower(quantized, x, backend="onednn", **options)


def assert_lowers(case: Case, out: str, expected: str | None, in_torch: bool = False, **tolerance: float) -> Any:
    """Right numbers, by an independent reference, the graph and the converted model; and what the case says runs."""
    model, x = made(case, out)
    quantized = convert(model, x, case.mapping).quantized
    graph = graph_of(quantized, x)
    x = on_grid(graph, x)
    lowered = lower(quantized, x)
    got = run(lowered, x)
    in_steps = out == "int8" and case.mapping not in (DYNAMIC, WEIGHT_ONLY)
    step = last_step(graph) if in_steps else None
    assert_agrees(got, run(quantized, x), "the converted model", step, **tolerance)
    assert_agrees(got, run(graph, x), "the graph", step, **tolerance)
    assert_agrees(got, fake_quantized(quantized, model, x), "fake quantization", step, **tolerance)
    assert all(map(torch.equal, floats(run(lowered, x)), floats(got))), "a second call gives another result"
    if expected is not None:
        assert computing(lowered) == counted(expected), "\n".join(steps(lowered))
        assert bool(dbrq.lowered_form(lowered).in_torch) is in_torch, dbrq.lowered_form(lowered).in_torch
    return lowered


def expected_of(case: Case, out: str) -> str | None:
    if case.onednn is not None:
        return case.onednn[out == "int8"]
    found = case.stock(out)
    layers = sum(found[name] for name in ("qconv", "qconv_sum", "qlinear", "convolution"))
    return f"layer*{layers} " + " ".join(f"torch:{name}" for name in ("softplus",) if found[name])


def residual(fn: Callable, layer: Callable = same, **parts: Callable) -> Callable[[], nn.Module]:
    """``fn(m, x, y)`` with ``y`` a layer's result."""
    return lambda: Call(
        lambda m, x: fn(m, x, m.a(x)),
        a=layer(),
        b=layer(),
        c=layer(),
        d=layer(),
        **{name: make() for name, make in parts.items()},
    )
