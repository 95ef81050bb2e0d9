"""What a lowered model is: layouts, shapes, copies, threads, and the errors it raises."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dbrq
from tests.helpers.cases import Followed, let, made, settled
from tests.helpers.judging import assert_close
from tests.helpers.models import Call
from tests.helpers.networks import BAD, MIXED, MODELS, NETWORKS, SHAPES, by_network, convnet
from tests.helpers.patterns import (
    ACTIVATIONS,
    ASKED,
    CONVS,
    DYNAMIC,
    IMAGE,
    INTEGERS,
    LAYER_AND_SHAPE,
    MORE_SUMS,
    SHARED,
    SIZES,
    SUMS,
    TO_INT8,
    conv,
    sum_of,
    three,
)
from tests.helpers.running import convert, floats, run

ALL_BACKENDS = ("onednn", "inductor", "torchscript")


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@torch.no_grad()
def test_lowered_models_run_on_the_cpu_whatever_the_default_device(backend):
    code = """
import sys, torch, dbrq
from torch import nn
backend = sys.argv[1]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.n, self.e = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("h", torch.zeros(8))
    def forward(self, x):
        self.h = self.h * 0.5 + x.mean(0)
        return self.e(torch.relu(self.l(self.n(x)))) + self.h
x = torch.randn(2, 8)
with torch.no_grad():
    quantized = dbrq.quantize(Net().eval(), [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    for y in (x, torch.randn(5, 8)):
        expected = quantized(y)
        torch.set_default_device("meta")
        result = lowered(y)
        torch.set_default_device(None)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code, backend], capture_output=True, text=True)
    assert not run.returncode, run.stderr


# What a lowered model is: layouts, shapes, copies, threads


def lowered_and_graph(model: nn.Module, *example: Tensor, mapping: Any = None, **options: Any) -> tuple[Any, Any]:
    quantized = convert(settled(model), example, mapping).quantized
    return dbrq.lower(quantized, example, **options), dbrq.rewrite(quantized, example)


LAYOUTS = {
    **{name: (case.make, case.shape) for name, case in CONVS.items() if "plain" in name or name in ("as linear",
        "without a batch")},
    "sum": (sum_of(lambda m, x: x + m.a(x)), IMAGE),
    "operand": (sum_of(lambda m, x: let(m.b(x), lambda y: (y, m.a(x) + y))), IMAGE),
    "permuted": (sum_of(lambda m, x: m.a(x).permute(0, 2, 3, 1).contiguous()), IMAGE),
    "elu": (sum_of(lambda m, x: F.elu(m.a(x))), IMAGE), "slice": (sum_of(lambda m, x: m.a(x)[:1]), IMAGE),
    "one image": (sum_of(lambda m, x: m.a(x)[0]), IMAGE),
    "stack": (sum_of(lambda m, x: torch.stack([m.a(x), x])), IMAGE),
    "five dimensions": (sum_of(lambda m, x: m.a(x).unflatten(1, (2, 4))), IMAGE),
    "several linears": (lambda: Call(lambda m, x: (m.a(x), m.b(x)), **three(a=3, b=5)), (5, 16)),
    "max pool": (lambda: nn.Sequential(conv(), nn.MaxPool2d(2)), SIZES[2]),
    "linear": (lambda: nn.Linear(16, 4), (3, 7, 5, 16)),
    "average": (lambda: nn.Sequential(conv(), nn.AvgPool2d(2)), SIZES[2]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_are_contiguous_where_those_of_the_float_model_are(name):
    model, x = LAYOUTS[name][0](), torch.randn(LAYOUTS[name][1])
    lowered, _ = lowered_and_graph(model, x)
    for a, b in zip(floats(run(lowered, x)), floats(run(model, x)), strict=True):
        assert a.is_contiguous() >= b.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_shapes_and_layouts(shape):
    make, example = NETWORKS["convnet" if len(shape) == 4 else "transformer"]
    lowered, graph = lowered_and_graph(make(), torch.randn(example))
    x = torch.randn(shape)
    for given in (x, x.transpose(1, -1).contiguous().transpose(1, -1), torch.stack([x, x], -1)[..., 1]):
        assert_close(run(lowered, given), run(graph, given))


@pytest.mark.parametrize("kind", LAYER_AND_SHAPE)
@pytest.mark.parametrize("out", ["float", "int8"])
def test_an_other_operand_that_broadcasts_only_at_run_time(kind, out):
    layer, shape = LAYER_AND_SHAPE[kind]
    x, y = torch.randn(shape), torch.randn(shape)
    model = Call(lambda m, x, y: F.relu(m.a(x) + y), a=layer())
    model = Followed(model, (x, y), "qlinear" if kind == "linear" else "qconv") if out == "int8" else model
    lowered, graph = lowered_and_graph(model, x, y)
    for inputs in ((x, y[:1]), (x[:1], y), (x, y[..., :1]), (x, y[:, :1]), (x, y[:1, :1, :1])):
        assert_close(run(lowered, inputs), run(graph, inputs))


@by_network
def test_copies_and_files_compute_the_same(make, shape, tmp_path):
    x = torch.randn(shape)
    lowered, _ = lowered_and_graph(make(), x)
    expected = run(lowered, x)
    assert torch.equal(run(copy.deepcopy(copy.deepcopy(lowered)), x), expected)
    torch.jit.save(lowered, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(run(torch.jit.freeze(torch.jit.load(file)), x), expected)
    torch.jit.save(copy.deepcopy(lowered), tmp_path / "model.pt")
    torch.save((x, expected), tmp_path / "run.pt")
    code = """if True:
        import sys, torch
        model, (x, expected) = torch.jit.load("model.pt"), torch.load("run.pt")
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        assert "dbrq" not in sys.modules"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path, timeout=100)


def test_two_threads_run_one_lowered_model_with_several_shapes():
    lowered, _ = lowered_and_graph(convnet(), torch.randn(2, 3, 32, 32))
    inputs = [torch.randn(n, 3, 24 + 4 * n, 32) for n in (1, 2, 3)]
    expected, wrong = [run(lowered, x) for x in inputs], []

    def work(offset: int) -> None:
        for i in range(offset, offset + 24):
            if not torch.equal(run(lowered, inputs[i % 3]), expected[i % 3]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", MIXED)
def test_what_stays_float_can_be_bfloat16(name):
    model, x = made({**CONVS, **SUMS, **MORE_SUMS, **ACTIVATIONS, **TO_INT8, **INTEGERS, **SHARED}[name], "int8")
    lowered, graph = lowered_and_graph(model, x, dtype=torch.bfloat16)
    assert_close(run(lowered, x), run(graph, x), 0.06)


FITS = {(name, "too small") for name in ("image", "pointwise", "sum", "linear sum")}


@functools.cache
def bad_input_model(name: str) -> tuple[Any, fx.GraphModule]:
    make, shape = MODELS[name]
    return lowered_and_graph(make(), torch.randn(shape), mapping=ASKED if name == "matmul" else None)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", MODELS)
def test_inputs_that_no_kernel_takes_raise(name, bad):
    """Or give what the graph gives, where that is a result without elements."""
    x = BAD[bad](torch.randn(MODELS[name][1]))
    lowered, graph = bad_input_model(name)
    if (name, bad) in FITS:
        return assert_close(run(lowered, x), run(graph, x))
    if not x.numel():
        with contextlib.suppress(RuntimeError):
            expected, found = run(graph, x), run(lowered, x)
            assert not expected.numel() and (found.shape, found.dtype) == (expected.shape, expected.dtype)
            return None
    with pytest.raises((RuntimeError, torch.jit.Error), match="dbrq"):
        run(lowered, x)


@pytest.mark.parametrize("kind", LAYER_AND_SHAPE)
@pytest.mark.parametrize("bad", ["batch", "channels", "rank", "double", "empty"])
def test_other_operands_that_do_not_fit_raise(kind, bad):
    layer, shape = LAYER_AND_SHAPE[kind]
    x, y = torch.randn(shape), torch.randn(shape)
    lowered, _ = lowered_and_graph(Call(lambda m, x, y: m.a(x) + y, a=layer()), x, y)
    wrong = {"batch": y.repeat(2, *(1 for _ in shape[1:])), "channels": torch.cat([y, y], 1), "rank": y[0],
             "double": y.double(), "empty": y[:0]}[bad]  # fmt: skip
    with pytest.raises((RuntimeError, torch.jit.Error)):
        run(lowered, (x, wrong))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dynamic_quantization_does_not_hide_what_is_not_finite(bad):
    x = torch.randn(3, 16)
    lowered, _ = lowered_and_graph(nn.Sequential(nn.Linear(16, 5)), x, mapping=DYNAMIC)
    x[0, 0] = bad
    with contextlib.suppress(RuntimeError, torch.jit.Error):  # to raise would do as well
        assert not run(lowered, x)[0].isfinite().any()
