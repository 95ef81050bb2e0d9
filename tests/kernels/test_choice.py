"""Kernels prove themselves: what lies, or writes where it should not, is found, replaced and named."""

import copy
import io
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import default_dynamic_qconfig

import dbrq
from dbrq import _torch, kernels, selfcheck
from dbrq.kernels import NO_POST_OP, PackedConv, PostOp, QParams, choice, formulations, script, stock, trials
from dbrq.kernels.known_faults import FAULTS, Geometry, fault_of
from dbrq.lowering import inductor
from dbrq.lowering.engine import Lowering
from dbrq.selfcheck import Failure, Guarded

OUT = QParams(0.5, 100)


@pytest.fixture(autouse=True)
def ledger(monkeypatch):
    """A process that has tried nothing yet."""
    fresh = selfcheck._Ledger()
    fresh.enabled = True
    monkeypatch.setattr(selfcheck, "_ledger", fresh)
    return fresh


# The ledger, and guarded memory


def test_a_trial_runs_once_for_each_key_also_from_several_threads(ledger):
    ran = []

    def trial() -> str:
        ran.append(1)
        return "bad"

    threads = [threading.Thread(target=selfcheck.problem_of, args=("key", trial)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert selfcheck.problem_of("key", trial) == "bad" and len(ran) == 1
    assert selfcheck.problem_of("other", lambda: "") == ""


def test_switched_off_nothing_is_tried():
    dbrq.set_self_check(False)
    assert selfcheck.problem_of("key", lambda: pytest.fail("it was tried")) == "" and not selfcheck.enabled()


def test_the_switch_of_the_environment():
    code = "import os; os.environ['DBRQ_SELF_CHECK'] = '0'; from dbrq import selfcheck; print(selfcheck.enabled())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_failure_is_kept_once_with_what_stands_in_for_it():
    selfcheck.note_failure(Failure("kernel", "geometry", "wrong"))
    selfcheck.note_failure(Failure("kernel", "geometry", "wrong", "another"))
    assert selfcheck.failures() == (Failure("kernel", "geometry", "wrong", "another"),)


@pytest.mark.parametrize("offset", [-1, 0])
def test_guarded_memory_shows_what_is_written_beside_it(offset):
    tensor = torch.arange(24, dtype=torch.float32).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    zone = Guarded(96)
    held = zone.holding(tensor)
    assert torch.equal(held, tensor) and held.stride() == tensor.stride() and held.data_ptr() % 64 == 0 and zone.intact
    zone._whole[zone._start + (offset if offset < 0 else 96)] = 0
    assert not zone.intact


def test_integers_are_the_same_each_time_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    numbers = selfcheck.integers((300, 300), -3, 5, torch.int8)
    assert torch.equal(numbers, selfcheck.integers((300, 300), -3, 5, torch.int8))
    assert numbers.min() == -3 and numbers.max() == 5 and not torch.equal(numbers[0], numbers[1])
    assert torch.equal(torch.get_rng_state(), state)


# Planted faults


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 5))
    return model.eval(), torch.randn(2, 4, 8, 8)


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


# Known faults


#: Geometries of each row of the table: in, out, kernel, size, stride, padding, dilation, groups.
KNOWN = {
    "one element, dilated": (8, 16, (1, 1), (1, 1), (1, 2), (3, 3), (1, 3), 1),
    "padding alone": (17, 17, (2, 2), (3, 1), (2, 2), (1, 3), (1, 2), 1),
    "padding alone, grouped lengths": (64, 48, (1,), (1,), (3,), (1,), (1,), 16),
    "one frame": (4, 8, (3, 3, 3), (1, 8, 8), (1, 1, 1), (1, 1, 1), (1, 1, 1), 4),
    "one frame, full": (17, 16, (3, 3, 3), (1, 6, 6), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    "columns in one": (32, 32, (4, 4), (12, 12), (4, 4), (0, 0), (1, 1), 1),
    "columns in one, half": (16, 24, (4, 4), (12, 12), (2, 2), (0, 0), (1, 1), 1),
    "patches as wide as the image": (32, 32, (8, 8), (16, 8), (8, 8), (0, 0), (1, 1), 1),
    "patches of ViT-B/32": (3, 32, (32, 32), (64, 64), (32, 32), (0, 0), (1, 1), 1),
    "wide kernel": (16, 32, (8, 8), (11, 12), (1, 1), (0, 0), (1, 1), 1),
    "wide kernel, lengths": (24, 32, (32,), (50,), (1,), (16,), (1,), 1),
    "wav2vec": (96, 96, (128,), (49,), (1,), (64,), (1,), 2),
    "one column, grouped": (16, 32, (3, 3), (20, 5), (1, 3), (0, 0), (1, 1), 16),
    "one column, padded": (32, 32, (3, 3), (20, 5), (1, 3), (1, 0), (1, 1), 32),
    "one column, dilated": (32, 32, (4, 5), (8, 8), (2, 2), (2, 1), (1, 2), 1),
    "one column, frames": (16, 8, (3, 3, 3), (3, 7, 1), (1, 2, 2), (1, 1, 1), (1, 1, 1), 1),
    "as wide as kernel and stride": (16, 16, (7, 7), (7, 7), (7, 7), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("zero_point", [0, 37])
@pytest.mark.parametrize("name", KNOWN)
def test_known_faults_are_computed_right(name, zero_point, ledger):
    ledger.enabled = False
    inner, outer, kernel, size, stride, padding, dilation, groups = KNOWN[name]
    n = len(kernel)
    top = 127
    weight = torch.randint(-127, 128, (outer, inner // groups, *kernel), dtype=torch.int8)
    q = torch.randint(0, top, (2, inner, *size), dtype=torch.uint8)
    options = (stride, padding, dilation, groups)
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    exact = function(q.double() - zero_point, weight.double(), None, *options).float()
    assert fault_of(Geometry((2, inner, *size), outer, kernel, stride, padding, dilation, groups)) is not None
    scale, one = torch.ones(outer), QParams(1.0, zero_point, 0, top)
    packed = PackedConv(weight, scale, None, *options)
    torch.testing.assert_close(packed(q, one), exact, rtol=1e-6, atol=1.0)
    out = QParams((exact.abs().max().item() + 1) / 100, 100)
    levels = (exact.relu() / out.scale + 100).round().clamp(0, 255)
    assert (packed(q, one, PostOp("relu") if n < 3 else NO_POST_OP, out) - levels).abs().max() <= 1 or n == 3
    arguments = (weight, scale, None, *options, one, None)
    there = Conv(*arguments, (2, inner, *size))
    elsewhere = Conv(*arguments, (1, inner, *(s + 40 for s in size)))  # packed for an image that is no fault
    for module in (there, elsewhere):
        torch.testing.assert_close(reloaded(module)(q), exact, rtol=1e-6, atol=1.0)
    if n == 2:
        other = torch.randn_like(exact)
        summed = packed.add_(q, one, other.clone(memory_format=torch.channels_last), None, False, None)
        torch.testing.assert_close(summed, exact + other, rtol=1e-6, atol=1.0)


def Conv(*arguments) -> nn.Module:
    kernel = script.Conv(*arguments)
    return choice.proven(kernel, arguments[-1], 127)[0]


def reloaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def test_every_row_of_the_table_has_a_case():
    held = {
        fault.name
        for inner, outer, kernel, size, *rest in KNOWN.values()
        for fault in FAULTS
        if fault.holds(Geometry((2, inner, *size), outer, kernel, *rest))
    }
    assert held == {fault.name for fault in FAULTS}


def test_ordinary_networks_keep_their_kernels():
    for shape, outer, k, stride, padding, groups in [
        ((1, 3, 224, 224), 64, 7, 2, 3, 1), ((1, 4, 230, 230), 64, 7, 2, 0, 1), ((1, 64, 56, 56), 64, 3, 1, 1, 1),
        ((1, 256, 56, 56), 512, 1, 2, 0, 1), ((1, 3, 224, 224), 32, 3, 2, 1, 1), ((1, 96, 56, 56), 96, 3, 2, 1, 96),
        ((1, 128, 56, 56), 128, 3, 1, 1, 32), ((1, 240, 14, 14), 240, 5, 1, 2, 240), ((1, 960, 7, 7), 160, 1, 1, 0, 1),
        ((1, 512, 4, 4), 512, 3, 1, 1, 1), ((1, 16, 112, 112), 24, 3, 1, 1, 1), ((1, 512, 1, 1), 512, 1, 1, 0, 1),
        ((1, 3, 224, 224), 64, 11, 4, 2, 1), ((1, 48, 27, 27), 192, 5, 1, 2, 1),
    ]:  # fmt: skip
        geometry = Geometry(shape, outer, (k, k), (stride, stride), (padding, padding), (1, 1), groups)
        assert fault_of(geometry) is None, geometry


def test_inductor_leaves_known_faults_in_float():
    model, x = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 4, stride=4), nn.Conv1d(32, 8, 1)), None
    model, x = nn.Sequential(*model[:2], nn.Flatten(2), model[2]).eval(), torch.randn(1, 3, 10, 10)
    lowering = Lowering(dbrq.rewrite(dbrq.quantize(model, [x], progress=False), x))
    inductor.prepare(lowering)
    assert list(lowering.reasons) == ["1"] and "wrong on some CPU for several columns" in lowering.reasons["1"]


def test_a_dilated_1x1_convolution_with_padding_does_not_crash():
    code = """
        import torch, dbrq
        from torch import nn
        last = nn.Conv2d(8, 64, 1, stride=(1, 2), padding=3, dilation=(1, 3))
        model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), last)
        x = torch.rand(3, 8, 1, 1)
        quantized = dbrq.quantize(model.eval(), [x], progress=False)
        for run in (quantized, dbrq.lower(quantized, x)):
            assert ((run(x) - model(x)).norm() < 0.05 * model(x).norm()).item()
        print("right")
    """
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.stdout.strip() == "right", run.stderr


def test_8_bit_values_on_a_cpu_that_saturates_are_computed_in_float(tmp_path):
    code = """
        import torch, dbrq
        from dbrq import kernels, selfcheck
        q = torch.full((4, 64), 255, dtype=torch.uint8)
        layer = kernels.PackedLinear(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16), None)
        assert (layer(q, kernels.QParams(1.0, 0)) == 255.0 * 127 * 64).all()
        weight = torch.full((16, 64, 1, 1), 127, dtype=torch.int8)
        conv = kernels.PackedConv(weight, torch.ones(16), None, [1, 1], [0, 0], [1, 1], 1)
        assert (conv(q.reshape(4, 64, 1, 1), kernels.QParams(1.0, 0)) == 255.0 * 127 * 64).all()
        assert len(selfcheck.failures()) == 2 * (not kernels.has_exact_int8_dot())
        low = kernels.QParams(1.0, 0, 0, 127)
        conv((q // 2).reshape(4, 64, 1, 1), low), layer(q // 2, low)
        assert len(selfcheck.failures()) == 2 * (not kernels.has_exact_int8_dot())  # none for 7 bits
        print("right")
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.stdout.strip() == "right", run.stderr


# Files that test themselves


class Several(nn.Module):
    """Optional and nested inputs and outputs, of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None = None, scale: float = 2.0):
        y = torch.relu(self.a(x)) + pair[0] * scale
        y = y if mask is None else y * mask
        return {"logits": self.b(y), "best": self.b(y).argmax(-1)}, [y, pair[1]]


class Counting(nn.Module):
    """Writes state in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.total += y.sum(0)
        return y + self.total


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(x.shape[0], 4)


def lowered_of(model: nn.Module, *inputs) -> torch.jit.ScriptModule:
    return dbrq.lower(dbrq.quantize(model.eval(), [inputs], progress=False), inputs)


def elsewhere(lowered: torch.jit.ScriptModule, path, code: str) -> str:
    """What ``code`` prints about the saved ``model`` in a process that cannot import dbrq."""
    torch.jit.save(lowered, path / "model.pt")
    program = f"""
import sys, torch
sys.modules["dbrq"] = None
model = torch.jit.load({str(path / "model.pt")!r})
{code}
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    return run.stdout.strip()


def test_a_file_tests_itself_without_dbrq_and_finds_other_weights(tmp_path):
    model, x = model_and_input()
    lowered = lowered_of(model, x)
    assert lowered.self_test() is True and lowered.self_test_sqnr() > 30
    code = """
print(model.self_test())
layer = getattr(model, "2")
layer.scale.mul_(-1)
print(model.self_test())
layer.scale.mul_(-1)
layer.weight.copy_(layer.weight.flip(0))
import io
file = io.BytesIO(); torch.jit.save(model, file); file.seek(0)
print(model.self_test(), torch.jit.load(file).self_test())
"""
    assert elsewhere(lowered, tmp_path, code).split() == ["True", "False", "True", "False"]  # it is packed when loaded


def test_self_test_of_several_inputs_and_outputs(tmp_path):
    torch.manual_seed(0)
    lowered = lowered_of(Several(), torch.randn(3, 8), (torch.randn(3, 8), torch.ones(2)), None, 0.5)
    assert lowered.self_test() and elsewhere(lowered, tmp_path, "print(model.self_test())") == "True"


class ByLayout(nn.Module):
    """What it does with its input depends on how that lies in memory."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) if x.is_contiguous() else self.a(-x) + x.contiguous().sum()


@pytest.mark.parametrize(
    "example",
    [
        lambda: torch.randn(1, 8).expand(3, 8),
        lambda: torch.randn(3, 16)[:, ::2],
        lambda: torch.randn(8, 3).t(),
        lambda: torch.randn(10).unfold(0, 8, 1),
        lambda: torch.randn(1, 3, 1).expand(2, 3, 8)[:, 1:],
    ],
    ids=["expanded", "sliced", "transposed", "overlapping", "a slice of expanded"],
)
def test_self_test_of_an_example_that_is_not_contiguous(example, tmp_path):
    """The graph refuses inputs of other layouts, so the example has to keep its own."""
    torch.manual_seed(0)
    lowered = lowered_of(ByLayout(), example())
    assert lowered.self_test() and elsewhere(lowered, tmp_path, "print(model.self_test())") == "True"


def test_self_test_leaves_state_as_it_is():
    lowered = lowered_of(Counting(), torch.randn(3, 8))
    before = {name: tensor.clone() for name, tensor in lowered.named_buffers()}
    assert lowered.self_test() and lowered.self_test()
    assert all(torch.equal(tensor, before[name]) for name, tensor in lowered.named_buffers())


def test_self_test_of_what_is_drawn_at_random_compares_shapes():
    lowered = lowered_of(Noisy(), torch.zeros(3, 8))
    assert lowered.self_test() and lowered.self_test() and lowered.self_test_shapes_only
