"""The onednn backend: each fusion pattern is one primitive, and computes what the other backends compute.

Cases are those of test_lowering.py, and patterns that stock kernels do not have. Each runs as it is ("float" out) and in
front of a layer that reads int8 and multiplies by one ("int8" out), on an input that its quantization does not change,
so that all who compute start from the same integers. A case says what runs beside reorders and moves: "layer" is a
convolution or linear layer with all that follows it, and "torch:..." a function of torch's.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import test_lowering as stock
import torch
import torch.nn.functional as F
from helpers import Call, convert, fake_quantized, floats, run, sqnr, step_of
from test_lowering import Case, conv, counted, let, linear, made, same
from torch import Tensor, fx, nn
from torch.ao.quantization import QConfigMapping

import dbrq
from dbrq.graph import QUANTIZE
from dbrq.lowering.engine import is_call
from dbrq.lowering.onednn.values import PrimitiveStep

MOVING = {
    "reorder", "cat", "torch:contiguous", "torch:reshape", "torch:flatten", "torch:stack", "torch:repeat", "torch:flip",
    "torch:roll", "torch:pixel_shuffle", "torch:channel_shuffle", "torch:pad", "torch:pad_mode", "torch:nearest",
    "torch:_own", "torch:clone", "torch:getitem",
}  # fmt: skip
LAYERS = {"linear", *(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2, 3))}


def steps(model: Any) -> list[str]:
    """What the newest plans execute, in words."""
    return [
        step.words if isinstance(step, PrimitiveStep) else f"torch:{step.described()[2]}"
        for runner in model.plans
        for step in runner.plan.steps
    ]


def computing(model: Any) -> Counter:
    """What computes, by the op that comes first; convolutions and linear layers are "layer"."""
    heads = (step.partition(" + ")[0] for step in steps(model) if step not in MOVING)
    return Counter("layer" if head in LAYERS else head for head in heads if head not in MOVING)


# Judging


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


def assert_agrees(got: Any, reference: Any, what: str, step: float | None = None, exact: float = 3e-5,
                  most: float = 0.01) -> None:  # fmt: skip
    """Within one ``step`` for 99.9 % of the elements; of what stays float, within ``exact`` of the range."""
    for number, (a, b) in enumerate(zip(floats(got), floats(reference), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        in_steps = step is not None and number == 0
        unit, nearly, furthest = (step, 1.01, 2.5) if in_steps else (step_of(b) * 255, exact, most)
        assert torch.equal(a.isfinite(), b.isfinite()), what
        apart = (a - b).abs()[b.isfinite()] / unit
        assert not apart.numel() or (
            apart.max() < furthest and (apart <= nearly).float().mean() >= 0.999
        ), f"{apart.max():.5f} off {what}, {(apart <= nearly).float().mean():.2%} near"


def lower(quantized: nn.Module, x: Any, **options: Any) -> Any:
    return dbrq.lower(quantized, x, backend="onednn", **options)


def assert_lowers(case: Case, out: str, expected: str | None, in_torch: bool = False, **tolerance: float) -> Any:
    """Right numbers, by an independent reference, the graph and the converted model; and what the case says runs."""
    model, x = made(case, out)
    quantized = convert(model, x, case.mapping).quantized
    graph = dbrq.rewrite(quantized, x)
    x = on_grid(graph, x)
    lowered = lower(quantized, x)
    got = run(lowered, x)
    in_steps = out == "int8" and case.mapping not in (stock.DYNAMIC, stock.WEIGHT_ONLY)
    step = stock.last_step(graph) if in_steps else None
    assert_agrees(got, run(quantized, x), "the converted model", step, **tolerance)
    assert_agrees(got, run(graph, x), "the graph", step, **tolerance)
    assert_agrees(got, fake_quantized(quantized, model, x), "fake quantization", step, **tolerance)
    assert all(map(torch.equal, floats(run(lowered, x)), floats(got))), "a second call gives another result"
    if expected is not None:
        assert computing(lowered) == counted(expected), "\n".join(steps(lowered))
        assert bool(lowered.in_torch) is in_torch, lowered.in_torch
    return lowered


def expected_of(case: Case, out: str) -> str:
    """What oneDNN runs where stock kernels run what the case says: activations and sums are part of their layers."""
    text = case.float if out == "float" else case.int8 or f"{case.float} {case.behind}"
    found = counted(text)
    layers = sum(found[name] for name in ("qconv", "qconv_sum", "qlinear", "convolution"))
    return f"layer*{layers} " + " ".join(f"torch:{name}" for name in ("softplus",) if found[name])


#: Case -> why it fails for now.
FAILING: dict[str, str] = {
    **dict.fromkeys(["chain of convs"], "B1: a sum in place writes over the layer's input"),
    **dict.fromkeys(["conv2d x.abs", "conv2d sqrt of abs"], "B2: builtins are not found again"),
    **dict.fromkeys(
        [f"conv2d {f}" for f in ("torch.tanh_", "x.sigmoid_", "F.leaky_relu_")] + ["linear x.sigmoid_"],
        "B4: an op in place, and layers run in torch",
    ),
    **dict.fromkeys(["linear, strided", "linear, expanded"], "B5: quantized by torch"),
    **dict.fromkeys(["other broadcasts-float", "one operand again-float"], "B6: int8 + int8 -> float is a reference"),
}


def table(*parts: dict[str, Case], outs: tuple = ("float", "int8")) -> Callable:
    """Runs a test for each case, with each kind of output."""
    params = []
    for name, case in (item for part in parts for item in part.items()):
        for out in outs:
            why = FAILING.get(name, FAILING.get(f"{name}-{out}"))
            marks = [] if why is None else [pytest.mark.xfail(strict=True, reason=why)]
            params.append(pytest.param(name, case, out, id=f"{name}-{out}", marks=marks))
    return pytest.mark.parametrize("name, case, out", params)


# Stock patterns

#: What runs where stock kernels lead one to expect something else: with float and int8 out.
INSTEAD = {
    "read twice": ("layer relu*2", "layer*2 relu"),
    "conv1d": ("layer*2 add", "layer*3 add"), "conv3d": ("layer*2 add", "layer*3 add"),
    "other broadcasts": ("layer*2 mean add", "layer*3 mean add"), "layer broadcasts": ("layer add", "layer*2 add"),
    "other is a number": ("layer*2", "layer*3"),  # oneDNN's "linear" function
    "other is of integers": ("layer torch:gt torch:long torch:add", "layer*2 torch:gt torch:long torch:add"),
    "alpha": ("layer torch:add", "layer*2 torch:add"), "with itself": ("layer torch:add", "layer*2 torch:add"),
    "one operand again": ("layer*2 add", "layer*3 add"), "an add that stays float, keywords": ("layer", "layer*2"),
}  # fmt: skip


@table(stock.CONVS, stock.ACTIVATIONS, stock.SUMS)
def test_pattern(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


@table(stock.MORE_SUMS, stock.LINEAR_CASES)
def test_sums_and_linear_layers(name, case, out):
    assert_lowers(case, out, INSTEAD[name][out == "int8"] if name in INSTEAD else expected_of(case, out))


# Functions behind layers

#: What oneDNN computes behind any layer, stock kernels only behind some.
BEHIND = {
    "relu": F.relu, "relu6": F.relu6, "clamp": lambda x: x.clamp(-0.3, 0.9), "clamp min": lambda x: x.clamp(min=-0.2),
    "clamp max": lambda x: x.clamp(max=0.4), "clamp positive": lambda x: x.clamp(min=0.1, max=0.7),
    "hardtanh": F.hardtanh, "hardswish": F.hardswish, "silu": F.silu, "x * sigmoid(x)": lambda x: x * x.sigmoid(),
    "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "elu": F.elu, "elu 0.3": lambda x: F.elu(x, 0.3), "mish": F.mish, "hardsigmoid": F.hardsigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1), "abs": torch.abs, "square": torch.square, "exp": torch.exp,
    "sqrt": lambda x: torch.sqrt(torch.abs(x)), "round": lambda x: torch.round(x),
    "gelu, then a number": lambda x: F.gelu(x) * 0.5, "numbers": lambda x: torch.sigmoid(x * 2.0 - 0.5) / 4 + 1.0,
    "1 - sigmoid": lambda x: 1.0 - torch.sigmoid(x), "1 / (1 + exp)": lambda x: 1.0 / (1.0 + torch.exp(x)),
    "four": lambda x: torch.tanh(F.leaky_relu(F.hardswish(x), 0.2)).square(),
}  # fmt: skip
EVERYWHERE = {
    f"{layer} {name}": Case(stock.behind_layer(make, fn), shape, "layer", "layer*2",
                            "qlinear" if layer == "linear" else "qconv")
    for layer, (make, shape) in stock.LAYERS.items() for name, fn in BEHIND.items()
}  # fmt: skip


@table(EVERYWHERE)
def test_function_behind_a_layer(name, case, out):
    loose = {"most": 0.02} if "round" in name else {}
    assert_lowers(case, out, getattr(case, out), **loose)
