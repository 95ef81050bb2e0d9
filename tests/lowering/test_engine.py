"""The engine: every rewrite is made by some case, and the verifier finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import dbrq
from dbrq.errors import RewriteError
from dbrq.graph.nodes import DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE
from dbrq.kernels import script
from dbrq.lowering import lower_graph, torchscript
from dbrq.lowering.engine import Lowering, is_dequantize, is_quantize, verify
from tests.helpers.cases import made
from tests.helpers.patterns import ACTIVATIONS, CONVS, INTEGERS, MATMUL_CASES, SHARED, SUMS
from tests.helpers.running import convert

EXERCISING = [  # cases that between them make every rewrite
    ("conv2d x * sigmoid(x)", "int8"), ("conv2d ReLU()", "float"), ("linear GELU(approximate='none')", "float"),
    ("linear GELU(approximate='tanh')", "int8"), ("conv + relu, int8", "int8"), ("conv + relu, int8", "float"),
    ("conv y + b(x), int8", "int8"), ("conv y + b(x), int8", "float"), ("linear + relu, int8", "int8"),
    ("linear + relu, int8", "float"), ("linear y + b(x), int8", "int8"), ("linear y + b(x), int8", "float"),
    ("matmul, / number", "float"), ("matmul, @", "float"), ("dynamic", "float"), ("weight-only", "float"),
    ("nn.MaxPool2d", "int8"), ("average, mean", "int8"), ("conv1d same, asymmetric", "int8"),
]  # fmt: skip


def averaging_graph() -> fx.GraphModule:
    """A Q/DQ graph written by hand: an average of int8 values that is read in float, times an int8 weight."""
    graph, qparams = fx.Graph(), (0.02, 7, 0, 255, torch.uint8)
    q = graph.call_function(QUANTIZE, (graph.placeholder("x"), *qparams))
    value = graph.call_function(DEQUANTIZE, (q, *qparams))
    q.meta["dtype"], value.meta["dtype"] = torch.uint8, torch.float32
    held = {"w": torch.tensor([[-3], [5]]).to(torch.int8), "s": torch.tensor([0.5, 0.25]), "z": torch.tensor([0, 0])}
    weight = (*map(graph.get_attr, held), 0, -128, 127, torch.int8)
    mean = graph.call_function(F.adaptive_avg_pool1d, (value, 1))
    graph.output(graph.call_function(torch.mul, (mean, graph.call_function(DEQUANTIZE_PER_CHANNEL, weight))))
    root = nn.Module()
    for name, tensor in held.items():
        root.register_buffer(name, tensor)
    return fx.GraphModule(root, graph)


def smoothing_graph() -> fx.GraphModule:
    """A Q/DQ graph written by hand: an input whose channels are multiplied by factors and quantized."""
    graph, qparams = fx.Graph(), (0.02, 7, 0, 255, torch.uint8)
    product = graph.call_function(torch.mul, (graph.placeholder("x"), graph.get_attr("factors")))
    q = graph.call_function(QUANTIZE, (product, *qparams))
    graph.output(graph.call_function(DEQUANTIZE, (q, *qparams)))
    product.meta.update(dtype=torch.float32, smooths=True)
    q.meta["dtype"] = torch.uint8
    root = nn.Module()
    root.register_buffer("factors", torch.tensor([0.5, 2.0]))
    return fx.GraphModule(root, graph)


def test_every_rewrite_is_made_by_some_case():
    cases = {**CONVS, **ACTIVATIONS, **SUMS, **MATMUL_CASES, **INTEGERS, **SHARED}
    lowerings = [lower_graph(averaging_graph()), lower_graph(smoothing_graph())]
    for name, out in EXERCISING:
        model, x = made(cases[name], out)
        lowerings.append(lower_graph(dbrq.rewrite(convert(model, x, cases[name].mapping).quantized, x)))
    made_ones = (entry for lowering in lowerings for entry in lowering.entries if not entry.outcome.startswith("no:"))
    assert {rewrite.name for rewrite in torchscript.REWRITES} <= {entry.rewrite for entry in made_ones}


def test_an_average_of_int8_values_in_float():
    x = torch.randn(3, 2, 9)
    torch.testing.assert_close(lower_graph(averaging_graph()).module(x), averaging_graph()(x))


def sum_lowering() -> Lowering:
    model, x = made(SUMS["conv + relu, int8"], "int8")
    return lower_graph(dbrq.rewrite(convert(model, x).quantized, x))


def kernel_call(lowering: Lowering, kind: type) -> tuple[fx.Node, Any]:
    calls = ((n, lowering.module.get_submodule(n.target)) for n in lowering.graph.nodes if n.op == "call_module")
    return next((node, kernel) for node, kernel in calls if type(kernel) is kind)


def read_later(node: fx.Node, kernel: script.ConvSum) -> None:
    kernel.owned = True
    with node.graph.inserting_after(node):
        node.graph.call_method("clone", (node.args[1],))


SPOILERS = {
    "scale": (script.Conv, lambda node, kernel: setattr(kernel, "input_scale", kernel.input_scale * 1.01)),
    "dtype": (script.Conv, lambda node, kernel: node.args[0].meta.update(dtype=torch.float32)),
    "other scale": (script.ConvSum, lambda node, kernel: setattr(kernel, "other_scale", kernel.other_scale * 2)),
    "other dtype": (script.ConvSum, lambda node, kernel: node.args[1].meta.update(dtype=torch.float32)),
    "an owned value is read later": (script.ConvSum, read_later),
    "order": (script.ConvSum, lambda node, kernel: node.args[1].prepend(node)),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_the_verifier_finds_what_is_wrong(name):
    kind, spoil = SPOILERS[name]
    lowering = sum_lowering()
    verify(lowering, torchscript.problem)
    spoil(*kernel_call(lowering, kind))
    with pytest.raises(RuntimeError if name == "order" else RewriteError):
        verify(lowering, torchscript.problem)


@pytest.mark.parametrize(("place", "value"), [(1, 0.5), (2, 3), (0, None)])
def test_the_verifier_finds_qparams_and_dtypes_that_do_not_agree(place, value):
    graph = averaging_graph()
    verify(Lowering(graph), torchscript.problem)
    node = next(filter(is_dequantize, graph.graph.nodes))
    node.update_arg(place, next(n for n in graph.graph.nodes if is_quantize(n)).args[0] if value is None else value)
    node.all_input_nodes[0].meta.setdefault("dtype", torch.float32)
    with pytest.raises(RewriteError):
        verify(Lowering(graph), torchscript.problem)
