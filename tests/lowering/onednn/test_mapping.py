"""The onednn backend: each fusion pattern is one primitive, and computes what the other backends compute.

Cases are those of ``helpers/patterns.py``, and patterns that stock kernels do not have. Each runs as it is ("float"
out), and in front of a layer that reads int8 ("int8" out).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.cases import Case, Followed, let, table
from tests.helpers.computing import counted
from tests.helpers.judging import assert_close, sqnr
from tests.helpers.models import Call
from tests.helpers.onednn import assert_agrees, assert_lowers, computing, expected_of, lower, on_grid, residual, steps
from tests.helpers.patterns import (
    ACTIVATIONS,
    ALIVE,
    CONVS,
    IMAGE,
    INTEGERS,
    LAYER_AND_SHAPE,
    LAYERS,
    LINEAR_CASES,
    MORE_SUMS,
    QCONFIGS,
    REDUCED,
    SAMPLE,
    SHARED,
    SIZES,
    SUMS,
    TO_INT8,
    behind_layer,
    conv,
    same,
    three,
)
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert, floats, run

# Stock patterns


@table(CONVS, SUMS)
def test_pattern(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


@table(ACTIVATIONS, outs=("int8",))
def test_spellings_of_functions(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


@table(MORE_SUMS, LINEAR_CASES)
def test_sums_and_linear_layers(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


# Functions behind layers

#: What oneDNN computes behind any layer, stock kernels only behind some.
BEHIND = {
    "relu": F.relu,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.3, 0.9),
    "clamp min": lambda x: x.clamp(min=-0.2),
    "clamp max": lambda x: x.clamp(max=0.4),
    "clamp positive": lambda x: x.clamp(min=0.1, max=0.7),
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "x * sigmoid(x)": lambda x: x * x.sigmoid(),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "elu 0.3": lambda x: F.elu(x, 0.3),
    "mish": F.mish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "abs": torch.abs,
    "square": torch.square,
    "exp": torch.exp,
    "sqrt": lambda x: torch.sqrt(torch.abs(x)),
    "round": lambda x: torch.round(x),
    "numbers": lambda x: torch.sigmoid(x * 2.0 - 0.5) / 4 + 1.0,
    "1 - sigmoid": lambda x: 1.0 - torch.sigmoid(x),
    "1 / (1 + exp)": lambda x: 1.0 / (1.0 + torch.exp(x)),
    "four": lambda x: torch.tanh(F.leaky_relu(F.hardswish(x), 0.2)).square(),
}
EVERYWHERE = {
    f"{layer} {name}": Case(
        behind_layer(make, fn), shape, behind="qlinear" if layer == "linear" else "qconv", onednn=("layer", "layer*2")
    )
    for layer, (make, shape) in LAYERS.items()
    for name, fn in BEHIND.items()
}


@table(EVERYWHERE)
def test_function_behind_a_layer(name, case, out):
    loose = {"most": 0.02} if "round" in name else {}
    assert_lowers(case, out, expected_of(case, out), **loose)


OWN_SUMS = {
    "silu(y + b(x))": (lambda m, x, y: F.silu(y + m.b(x)), "layer*2", "layer*3"),
    "gelu(b(x)) + y": (lambda m, x, y: F.gelu(m.b(x)) + y, "layer*2", "layer*3"),
    "b(x) - softplus(y)": (lambda m, x, y: m.b(x) - F.softplus(y), "layer*2 torch:softplus", "layer*3 torch:softplus"),
    "b(x) * sigmoid(y)": (lambda m, x, y: m.b(x) * torch.sigmoid(y), "layer*2", "layer*3"),
    "sum of three": (lambda m, x, y: F.relu(m.b(x) + y) + m.c(x), "layer*3", "layer*4"),
    "y twice": (lambda m, x, y: let(m.b(F.elu(y)), lambda z: (z + y) * 0.5 + y), None, None),
    "the layer's input": (lambda m, x, y: F.relu(m.b(y) + y), "layer*2", "layer*3"),
    "the layer's input, then again": (
        lambda m, x, y: let(F.relu(m.b(y) + y), lambda z: m.c(z) + z),
        "layer*3",
        "layer*4",
    ),
    "the other is read by two": (lambda m, x, y: F.relu(m.b(y) + y) + m.c(m.d(y)), "layer*4", "layer*5"),
    "a view of the input": (lambda m, x, y: m.b(y) + y.view(y.shape), None, None),
    "two functions between": (lambda m, x, y: F.elu(m.b(x)) * torch.sigmoid(F.softplus(y)), None, None),
}
OWN = {
    f"{kind} {name}": Case(residual(fn, layer), shape, behind=behind, onednn=tuple(runs))
    for kind, layer, shape, behind in (
        ("conv2d", same, IMAGE, "qconv"),
        ("conv1d", lambda: conv(1, 8, padding=1), (2, 8, 13), "qconv"),
        ("conv3d", lambda: conv(3, 8, padding=1), (2, 8, 4, 5, 6), "qconv"),
        ("linear", lambda: nn.Linear(16, 16), (3, 7, 16), "qlinear"),
        ("linear 2-d", lambda: nn.Linear(16, 16), (5, 16), "qlinear"),
    )
    for name, (fn, *runs) in OWN_SUMS.items()
    if kind in ("conv2d", "linear") or "input" in name
}


@table(OWN)
def test_sum(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


@pytest.mark.parametrize("name", ALIVE)
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_a_value_that_is_alive_is_not_written_over(name, kind):
    layer = same if kind == "conv" else lambda: nn.Linear(10, 10)
    parts = {"a": layer(), "b": layer(), "c": layer(), "d": conv(2, 4) if kind == "conv" else layer()}
    model = Call(lambda m, x: ALIVE[name](m, x, m.a(x)), **parts, w=torch.randn(IMAGE)).eval()
    x = torch.randn(IMAGE)
    quantized = convert(model, x).quantized
    x = on_grid(dbrq.rewrite(quantized, x), x)
    before, lowered = x.clone(), lower(quantized, x)
    with torch.no_grad():
        first, second = lowered(x), lowered(x)
    assert torch.equal(x, before)
    assert_agrees(first, run(quantized, x), "the converted model", exact=1e-3)
    assert_agrees(first, fake_quantized(quantized, model, x), "fake quantization", exact=1e-3)
    assert all(map(torch.equal, floats(first), floats(second)))


@pytest.mark.parametrize("kind", LAYER_AND_SHAPE)
@pytest.mark.parametrize("out", ["float", "int8"])
def test_an_other_operand_that_broadcasts_only_at_run_time(kind, out):
    layer, shape = LAYER_AND_SHAPE[kind]
    x, y = torch.randn(shape), torch.randn(shape)
    model: nn.Module = Call(lambda m, x, y: F.relu(m.a(x) + y), a=layer())
    if out == "int8":
        model = Followed(model, (x, y), "qlinear" if kind == "linear" else "qconv")
    quantized = convert(model, (x, y)).quantized
    lowered, graph = lower(quantized, (x, y)), dbrq.rewrite(quantized, (x, y))
    for inputs in ((x, y[:1]), (x[:1], y), (x, y[..., :1]), (x, y[:, :1]), (x, y[:1, :1, :1]), (x, y), (x, y[0])):
        for given in (inputs, on_grid(graph, inputs)):
            if given[1].dim() == len(shape):  # the recorded model takes no other rank
                assert_close(run(lowered, given), run(graph, given))


# Float in, int8 out; what works on integers


def to_int8(fn: Callable, shape: Any = (3, 7, 16), one: str = "", behind: str = "qlinear", **parts: Any) -> Case:
    """``fn`` in front of a layer: its result is quantized by its own primitive, if ``one`` names it."""
    runs = None, f"{one} layer" if one else None
    return Case(lambda: Call(lambda m, x: fn(m, x), **copy.deepcopy(parts)), shape, behind=behind, onednn=runs)


QUANTIZED = {
    "layer_norm": to_int8(lambda m, x: m.norm(x), one="layer_norm", norm=nn.LayerNorm(16)),
    "layer_norm, settled": to_int8(
        lambda m, x: F.layer_norm(x, (16,), m.w, m.b, 1e-3), one="layer_norm", w=torch.rand(16) + 0.5, b=torch.randn(16)
    ),
    "layer_norm, no parameters": to_int8(lambda m, x: F.layer_norm(x, (16,)), one="layer_norm"),
    "layer_norm, weight only": to_int8(lambda m, x: F.layer_norm(x, (16,), m.w), one="layer_norm", w=torch.rand(16)),
    "layer_norm, no bias": to_int8(lambda m, x: m.norm(x), one="layer_norm", norm=nn.LayerNorm(16, bias=False)),
    "layer_norm, two axes": to_int8(lambda m, x: m.norm(x), one="layer_norm", norm=nn.LayerNorm((7, 16))),
    "layer_norm of a view": to_int8(lambda m, x: m.norm(x.transpose(0, 1)), one="layer_norm", norm=nn.LayerNorm(16)),
    "layer_norm, one row": to_int8(lambda m, x: m.norm(x), (16,), "layer_norm", norm=nn.LayerNorm(16)),
    "softmax": to_int8(lambda m, x: x.softmax(-1), one="softmax"),
    "softmax, another axis": to_int8(lambda m, x: torch.softmax(x, 1)),
    "log_softmax": to_int8(lambda m, x: F.log_softmax(x, -1), one="log_softmax"),
    "softmax of doubles": to_int8(lambda m, x: F.softmax(x, -1, dtype=torch.float64).float()),
    "gelu": to_int8(lambda m, x: F.gelu(x), one="gelu"),
    "gelu tanh": to_int8(lambda m, x: F.gelu(x, approximate="tanh"), one="gelu_tanh"),
    "silu": to_int8(lambda m, x: F.silu(x), one="silu"),
    "sigmoid": to_int8(lambda m, x: x.sigmoid(), one="sigmoid"),
    "a chain": to_int8(lambda m, x: F.elu(x.tanh()) * 0.7),
    "a sum of inputs": to_int8(lambda m, x: F.relu(x + F.softplus(x))),
    "a product": to_int8(lambda m, x: x * F.softplus(x)),
    "rms norm": to_int8(lambda m, x: m.norm(x), norm=nn.RMSNorm(16)),
    "batch norm": to_int8(lambda m, x: m.norm(x), (5, 16), norm=nn.BatchNorm1d(16)),
    "prelu": to_int8(lambda m, x: m.act(x), act=nn.PReLU()),
    "cumsum": to_int8(lambda m, x: x.cumsum(1)),
    "where": to_int8(lambda m, x: torch.where(x > 0, x, x * 0.1)),
    "norm of an image": to_int8(lambda m, x: m.norm(x), (2, 8, 9, 10), behind="qconv", norm=nn.GroupNorm(2, 8)),
    "instance norm": to_int8(lambda m, x: F.instance_norm(x), (2, 8, 9, 10), behind="qconv"),
    "layer_norm of channels": to_int8(
        lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        (2, 8, 9, 10),
        behind="qconv",
        norm=nn.LayerNorm(8),
    ),
}


@table(QUANTIZED, outs=("int8",))
def test_float_in_int8_out(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


#: Pools that oneDNN has no kernel for: in torch, with the reason.
POOLS_IN_TORCH = {
    "dilation",
    "rectangle",
    "average, 3x5",
    "average, F.adaptive_avg_pool2d",
    "average, nn.AdaptiveAvgPool3d",
    "average, torch.mean",
    "average, ceil_mode",
    "average, divisor",
    "F.max_pool1d",
}


@table(INTEGERS, outs=("int8",))
def test_on_integers(name, case, out):
    lowered = assert_lowers(case, out, None)
    found = computing(lowered)
    why = [
        reason for part, reason in dbrq.lowered_form(lowered).in_torch.items() if "cat" not in part
    ]  # cat only moves
    assert not why or name in POOLS_IN_TORCH, why
    assert found["layer"] == sum(counted(case.int8)[kernel] for kernel in ("qconv", "qlinear")), steps(lowered)
    if name not in POOLS_IN_TORCH:
        pools = {head: n for head, n in found.items() if "pool" in head or head == "mean"}
        assert found == Counter(layer=found["layer"], **pools), "\n".join(steps(lowered))
        assert sum(pools.values()) == counted(case.int8)["max_pool"] + (name.startswith("average") or "3d" in name)


@table(TO_INT8, outs=("int8",))
def test_stock_patterns_that_end_in_int8(name, case, out):
    assert_lowers(case, out, None)


# Deconvolutions

DECONVS = {
    name: Case(
        lambda n=n, options=options: nn.Sequential(
            getattr(nn, f"ConvTranspose{n}d")(4, **{"out_channels": 8, "kernel_size": 3, **options}), nn.ReLU()
        ),
        SIZES[n],
        onednn=("layer", "layer*2"),
    )
    for name, n, options in [
        ("1d", 1, {}),
        ("2d", 2, {}),
        ("3d", 3, {}),
        ("stride", 2, {"stride": 2}),
        ("no bias", 2, {"bias": False}),
        ("output_padding", 2, {"stride": 2, "padding": 1, "output_padding": 1}),
        ("groups", 2, {"groups": 2}),
        ("dilation", 2, {"dilation": 2}),
        ("all", 2, {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 1), "groups": 4, "dilation": (1, 2)}),
        ("1d all", 1, {"stride": 2, "padding": 1, "groups": 2}),
    ]
}


@table(DECONVS)
def test_transposed_convolution(name, case, out):
    assert_lowers(case, out, expected_of(case, out))


# Inputs that are shared; other kinds of quantization; fewer bits


@table(SHARED)
def test_shared_inputs_and_other_kinds(name, case, out):
    assert_lowers(case, out, None, exact=2e-3 if name == "query, key and value" else 3e-5)


def test_several_linears_of_one_input_quantize_it_once():
    model, x = Call(lambda m, x: (m.q(x), m.k(x), m.v(x)), **three()).eval(), torch.randn(3, 7, 16)
    lowered = lower(convert(model, x).quantized, x)
    assert Counter(steps(lowered)) == {"quantize": 1, "linear": 3}


@pytest.mark.parametrize("qconfig", QCONFIGS)
@pytest.mark.parametrize("name", SAMPLE)
def test_other_qconfigs(name, qconfig):
    """Seven bits; one scale for all output channels."""
    case = {**CONVS, **SUMS, **MORE_SUMS, **INTEGERS}[name]
    made_case = dataclasses.replace(case, mapping=QCONFIGS[qconfig])
    lowered = assert_lowers(made_case, "int8", None)
    assert not dbrq.lowered_form(lowered).in_torch


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fn", [F.relu, F.gelu, torch.tanh, lambda x: x], ids=["relu", "gelu", "tanh", "none"])
def test_seven_bits_are_kept_to(layer, fn):
    make, shape = LAYERS[layer]
    case = Case(
        behind_layer(make, fn),
        shape,
        "layer",
        "layer*2",
        "qlinear" if layer == "linear" else "qconv",
        REDUCED,
    )
    assert_lowers(case, "int8", "layer*2")


@pytest.mark.parametrize("function", [F.leaky_relu, F.elu, torch.clamp])
def test_a_setting_that_is_a_tensor_is_no_number(function):
    model = Call(lambda m, x, s: function(m.a(x), s), inputs=2, a=nn.Linear(8, 8)).eval()
    calls = [(torch.randn(4, 8), torch.tensor(0.25)), (torch.randn(4, 8), torch.tensor(0.125))]
    quantized = dbrq.quantize(model, calls)
    lowered = dbrq.lower(quantized, calls[0], backend="onednn")
    for call in calls:
        assert sqnr(run(quantized, call), run(lowered, call)) > 40
