"""Faults of torch's kernels that are known are computed right, and nothing else is slowed by them."""

import io
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.kernels import NO_POST_OP, PackedConv, PostOp, QParams, choice, script
from dbrq.kernels.known_faults import FAULTS, Geometry, fault_of
from dbrq.lowering import inductor
from dbrq.lowering.engine import Lowering
from tests.helpers.models import model_and_input

pytestmark = pytest.mark.usefixtures("ledger")


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
