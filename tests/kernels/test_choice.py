"""Kernels prove themselves: planted faults are found, replaced and named."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import default_dynamic_qconfig

import dbrq
from dbrq import _torch, kernels, selfcheck
from dbrq.kernels import NO_POST_OP, PostOp, QParams, choice, formulations, script, stock, trials
from dbrq.kernels.known_faults import Geometry
from tests.helpers.models import model_and_input

pytestmark = pytest.mark.usefixtures("ledger")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x) + self.b(x)))


def one_off(op):
    """An element of the last channel is wrong in every image."""

    def lying(*args):
        result = op(*args)
        result[:, -1, -1, 0] += 1 if result.dtype is not torch.uint8 else 3
        return result

    return lying


def right_for_zeros(op):
    return lambda q, *args: op(torch.zeros_like(q), *args)


def writes_too_far(op):
    def writing(*args):
        result = op(*args)
        other = args[6]
        flat = other.as_strided((other.numel() + 1,), (1,), other.storage_offset())
        flat[-1] = 0
        return result

    return writing


def plant(monkeypatch, lie) -> None:
    """Have torch's convolution lie, by both of the names that Python calls it by."""
    monkeypatch.setattr(stock, "qconv", lie(stock.qconv))
    monkeypatch.setattr(torch.ops.onednn, "qconv_pointwise", lie(torch.ops.onednn.qconv_pointwise))


def right(quantized: nn.Module, x: Tensor) -> bool:
    """Whether a converted model agrees with its Q/DQ graph, run in float."""
    with torch.no_grad():
        return _db(dbrq.rewrite(quantized, x)(x), quantized(x)) > 35


def _db(reference: Tensor, other: Tensor) -> float:
    noise = (reference - other).norm()
    return float("inf") if noise == 0 else 20 * torch.log10(reference.norm() / noise).item()


@pytest.mark.parametrize("lie", [one_off, right_for_zeros], ids=lambda f: f.__name__)
def test_a_convolution_that_lies_is_replaced_and_named(monkeypatch, lie):
    model, x = model_and_input()
    quantized = dbrq.quantize(model, [x], progress=False)
    plant(monkeypatch, lie)
    assert right(quantized, x)
    assert {failure.kernel for failure in selfcheck.failures()} == {"onednn.qconv2d_pointwise"}
    assert all("wrong" in f.problem and "windows" in f.stand_in for f in selfcheck.failures())
    kernel = {row.path: row.kernel for row in dbrq.report(quantized).rows}
    assert kernel["0"] == "onednn.qlinear_pointwise of windows + relu" and kernel["4"] == "onednn.qlinear_pointwise"
    lowered = dbrq.lower(quantized, x)
    assert "onednn.qlinear_pointwise of windows" in dbrq.report(lowered).rows[0].kernel
    assert "qconv_pointwise" not in str(lowered.inlined_graph) and _db(quantized(x), lowered(x)) > 35


@pytest.mark.parametrize("lie", [one_off, right_for_zeros, writes_too_far], ids=lambda f: f.__name__)
def test_a_sum_that_lies_or_writes_too_far_is_replaced(monkeypatch, lie):
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 4, 8, 8)
    quantized = dbrq.quantize(model, [x], progress=False)
    monkeypatch.setattr(stock, "qconv_sum", lie(stock.qconv_sum))
    assert right(quantized, x)
    (failure,) = selfcheck.failures()
    assert failure.kernel == "onednn.qconv2d_pointwise + sum" and failure.stand_in
    assert ("beside" in failure.problem) == (lie is writes_too_far)


def test_a_linear_layer_that_lies_is_computed_in_float(monkeypatch):
    model, x = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 5)).eval(), torch.randn(7, 32)
    quantized = dbrq.quantize(model, [x], progress=False)
    op = stock.qlinear
    monkeypatch.setattr(stock, "qlinear", lambda q, *args: op(q, *args).roll(1, -1))
    assert right(quantized, x)
    assert "float32 product of levels" in dbrq.report(quantized).rows[0].kernel
    lowered = dbrq.lower(quantized, x)
    assert "qlinear_pointwise" not in str(lowered.inlined_graph) and _db(quantized(x), lowered(x)) > 35


def test_where_windows_fail_too_levels_are_convolved_in_float(monkeypatch):
    model, x = model_and_input()
    quantized = dbrq.quantize(model, [x], progress=False)
    plant(monkeypatch, one_off)
    monkeypatch.setattr(script.WindowConv, "forward", lambda self, q: script.Conv.forward(self, q).mul(2))
    assert right(quantized, x)
    assert selfcheck.failures()[0].stand_in == "float32 convolution of levels"


def test_a_max_pool_and_a_product_that_lie(monkeypatch):
    q = torch.randint(0, 256, (1, 4, 6, 6), dtype=torch.uint8)
    monkeypatch.setattr(torch.ops.quantized, "max_pool2d", lambda x, *a: torch.zeros(1, 4, 3, 3, dtype=torch.uint8))
    assert torch.equal(
        kernels.max_pool(q, 2, [2, 2], [2, 2], [0, 0], [1, 1], False).float(), F.max_pool2d(q.float(), 2)
    )
    op = _torch.int_mm
    monkeypatch.setattr(_torch, "int_mm", lambda a, b, out: op(a, b, out=out).add_(1))
    a, b = q[0], q[0].transpose(1, 2).contiguous()
    one = QParams(1.0, 3)
    assert torch.equal(kernels.int8_matmul(a, one, b, one), (a.float() - 3) @ (b.float() - 3))
    assert {f.kernel for f in selfcheck.failures()} == {"quantized.max_pool2d", "aten._int_mm"}


def test_kernels_are_tried_once_for_each_geometry(monkeypatch, ledger):
    model, x = model_and_input()
    first, second = (dbrq.quantize(model, [x], progress=False) for _ in range(2))
    first(x)
    tried = dict(ledger.problems)
    second(x), first(x), dbrq.quantize(model, [x], progress=False)(x)
    assert tried and set(ledger.problems) == set(tried) and not selfcheck.failures()


def layers_of_all_kinds() -> dict[str, tuple[nn.Module, Tensor]]:
    reflecting, even = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 6, 2, padding="same")
    norm = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    image = torch.randn(2, 4, 8, 8)
    return {
        "chain": model_and_input(), "residual": (Residual(), image), "norm": (norm, image),
        "one image": (model_and_input()[0][:3], image[0]), "reflected": (reflecting, image), "even": (even, image),
        "lengths": (nn.Conv1d(8, 6, 3), image[0]), "frames": (nn.Conv3d(2, 6, 3), torch.randn(1, 2, 4, 8, 8)),
        "one row": (nn.Linear(8, 4), image[0, 0, 0]),
        "sentences": (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), image),
    }  # fmt: skip


@pytest.mark.parametrize("name", layers_of_all_kinds())
def test_convert_tries_the_kernels_of_recorded_shapes(name, ledger):
    model, x = layers_of_all_kinds()[name]
    quantized = dbrq.quantize(model.eval(), [x], progress=False)
    tried = set(ledger.problems)
    quantized(x)
    assert tried and set(ledger.problems) == tried
    quantized(torch.cat([x, x], 0) if x.dim() > 3 else x)
    assert x.dim() < 4 or set(ledger.problems) > tried


def test_convert_tries_dynamic_layers_too(ledger):
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(3, 8)
    quantized = dbrq.convert(dbrq.prepare(model.eval(), x, default_dynamic_qconfig))
    tried = set(ledger.problems)
    quantized(x)
    assert len(tried) == 2 and set(ledger.problems) == tried


def test_switched_off_the_kernel_is_believed(monkeypatch):
    dbrq.set_self_check(False)
    model, x = model_and_input()
    quantized = dbrq.quantize(model, [x], progress=False)
    graph = dbrq.rewrite(quantized, x)
    plant(monkeypatch, right_for_zeros)
    assert _db(graph(x), copy.deepcopy(quantized)(x)) < 10
    assert not selfcheck.failures()


@pytest.mark.parametrize(
    "post_op", [NO_POST_OP, PostOp("relu"), PostOp("hardtanh", (0.0, 6.0)), PostOp("swish")], ids=str
)
@pytest.mark.parametrize("out", [torch.uint8, torch.float32, torch.bfloat16], ids=str)
def test_right_kernels_pass_in_every_way(post_op, out):
    top = 255 if kernels.has_exact_int8_dot() else 127
    geometry = Geometry((2, 12, 9, 10), 20, (3, 2), (2, 1), (1, 1), (1, 2), 1)
    call = formulations.call_of(True, top, out, post_op)
    for way in formulations.ways(geometry):
        assert way is formulations.Way.LEVELS or trials.convolution(geometry, call, way) == ""
    for added, summed in ((False, None), (False, out), (True, torch.uint8)):
        call = formulations.call_of(True, top, out, NO_POST_OP if summed else PostOp("gelu", (), "none"), summed)
        assert choice.is_linear_right(9, 24, 17, call, added), selfcheck.failures()


@torch.no_grad()
def test_a_kernel_that_raises_in_its_trial_has_a_problem():
    def trial():
        raise RuntimeError("could not append an elementwise post-op\nmore")

    assert (
        dbrq.selfcheck.problem_of(object(), trial) == "it raises RuntimeError: could not append an elementwise post-op"
    )
