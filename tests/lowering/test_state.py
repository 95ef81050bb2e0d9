"""What an audit of lowered models, kernels and files found: wrong numbers unsaid, crashes, errors of torch's own."""

from __future__ import annotations

import copy
import operator
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dbrq
from dbrq import kernels
from dbrq.kernels import script

PYTHON_BACKENDS = ("onednn", "torchscript")
BACKENDS = ("onednn", "inductor", "torchscript")


def sqnr(expected: torch.Tensor, got: torch.Tensor) -> float:
    noise = (expected - got).norm()
    return float("inf") if not noise else float(20 * torch.log10(expected.norm() / noise))


@pytest.fixture(autouse=True)
def _without_gradient():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class OtherIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, y):
        first = self.l(x)
        y.add_(1.0)
        return first, self.l(x) + x


class BufferIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("h", torch.randn(4, 8))

    def forward(self, x):
        first = self.l(x)
        self.h.add_(1.0)
        return first, self.l(x) + x


class InputInPlace(nn.Module):
    """An int8 op in place on an input, which is then written under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        x.add_(self.l(x))
        first = self.m(x)
        y.add_(1.0)
        return first, self.m(x)


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
@pytest.mark.parametrize("cls", [OtherIsWritten, InputInPlace])
def test_writes_to_an_input_are_seen_through_another_input(cls, backend):
    model = cls().eval()
    mapping = dbrq.default_qconfig_mapping()
    mapping.set_object_type("add_", mapping.global_qconfig)
    data = [(2 * torch.randn(4, 8), 2 * torch.randn(4, 8)) for _ in range(8)]  # x + 1 is within these ranges
    lowered = dbrq.lower(dbrq.quantize(model, data, mapping), copy.deepcopy(data[0]), backend=backend)
    x = torch.randn(4, 8).clamp(-2, 2)
    a, b = x.clone(), x.clone()
    assert sqnr(model(a, a)[1], lowered(b, b)[1]) > 28
    assert torch.equal(a, b) or cls is InputInPlace


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
def test_writes_to_a_buffer_are_seen_through_an_input(backend):
    model = BufferIsWritten().eval()
    data = [2 * torch.randn(4, 8) for _ in range(8)]
    lowered = dbrq.lower(dbrq.quantize(model, data), data[0], backend=backend)
    model.h.copy_(torch.randn(4, 8).clamp(-2, 2))
    lowered.h.copy_(model.h)
    assert sqnr(model(model.h)[1], lowered(lowered.h)[1]) > 28


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.l, self.e = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("h", torch.zeros(16, 4))

    def forward(self, x):
        self.h = self.h * 0.9 + self.e(torch.relu(self.l(self.n(x))))
        return self.h * 1.0


def _normed(backend):
    x = torch.randn(16, 8)
    quantized = dbrq.quantize(Normed().eval(), [x])
    return x, quantized, dbrq.lower(quantized, x, backend=backend)


@pytest.mark.parametrize("outer", [False, True], ids=["itself", "inside another"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_weights_are_not_loaded_into_a_lowered_model(backend, outer):
    x, _, lowered = _normed(backend)
    _, _, other = _normed(backend)
    before = copy.deepcopy(lowered)(x)
    state = {k: v + 1 if v.is_floating_point() else v for k, v in other.state_dict().items()}
    target = nn.Sequential(lowered) if outer else lowered
    state = {f"0.{k}": v for k, v in state.items()} if outer else state
    if backend == "torchscript":
        assert set(lowered.state_dict()) == {"h"}  # in C++ and without dbrq there is nobody to raise
        return
    with pytest.raises(dbrq.QuantizationError, match="lower that again"):
        target.load_state_dict(state)
    with pytest.raises(dbrq.QuantizationError, match="lower that again"):
        lowered.n.weight = nn.Parameter(torch.ones(8))
    assert torch.equal(lowered(x), before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_is_loaded_into_a_lowered_model(backend, assign):
    x, _, lowered = _normed(backend)
    fresh, first = copy.deepcopy(lowered.state_dict()), lowered(x).clone()
    lowered(x)
    lowered.load_state_dict(fresh, assign=assign)
    assert torch.equal(lowered(x), first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_assigned_state_takes_effect(backend):
    x, quantized, lowered = _normed(backend)
    for _ in range(2):
        quantized(x), lowered(x)
    zeros = torch.zeros(16, 4)
    quantized.h = lowered.h = zeros
    assert sqnr(quantized(x), lowered(x)) > 40
    if backend != "torchscript":
        assert not zeros.any()  # it was copied
        lowered.h = torch.zeros(16, 5)
        with pytest.raises(dbrq.QuantizationError, match="keeps its shape"):
            lowered(x)
        lowered(x)


def test_a_copy_of_a_scripted_model_has_tensors_of_its_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.n, self.l = nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x):
            return self.l(self.n(self.c(x)))

    x = torch.randn(1, 3, 8, 8)
    lowered = dbrq.lower(dbrq.quantize(Net().eval(), [x]), x)
    other = copy.deepcopy(lowered)
    expected = lowered(x)
    names = ("c.weight", "c.scale", "c.bias", "l.weight", "l.scale", "l.bias", "n.weight")
    for name in names:
        tensors = [operator.attrgetter(name)(model) for model in (lowered, other)]
        assert tensors[0].data_ptr() != tensors[1].data_ptr(), name
        tensors[1].zero_()
    assert torch.equal(lowered(x), expected)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, z):
        return self.l(z.real) + z.imag


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2.0)
        return self.l(x)


def test_onednn_reads_the_numbers_of_conjugates_and_negatives():
    z = torch.randn(4, 16, dtype=torch.complex64)[:, ::2]
    plain, negative = z.imag, z.conj().imag
    quantized = dbrq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(4, 8) for _ in range(4)])
    for inputs in ((plain, negative), (negative, plain)):
        lowered = dbrq.lower(quantized, torch.randn(4, 8), backend="onednn")
        for x in inputs:
            torch.testing.assert_close(lowered(x), quantized(x))
    quantized = dbrq.quantize(Complex().eval(), [z])
    lowered = dbrq.lower(quantized, z, backend="onednn")
    for x in (z, z.conj()):
        torch.testing.assert_close(lowered(x), quantized(x))


def test_onednn_writes_to_negatives():
    quantized = dbrq.quantize(WritesInput().eval(), [torch.randn(2, 8) for _ in range(3)])
    lowered = dbrq.lower(quantized, torch.randn(2, 8), backend="onednn")
    z = torch.randn(2, 8, dtype=torch.complex64)
    a, b = (z.clone().conj().imag for _ in range(2))
    torch.testing.assert_close(lowered(b), quantized(a))
    assert a.is_neg() and torch.equal(a, b)


@pytest.mark.parametrize(
    "model, shape",
    [
        (lambda: nn.Linear(70_000, 2), (2, 70_000)),
        (lambda: nn.Conv2d(1024, 2, 9), (1, 1024, 9, 9)),
        (lambda: nn.Conv2d(2048, 4, 9, groups=2), (1, 2048, 9, 9)),
    ],
    ids=["linear", "conv2d", "groups"],
)
def test_sums_that_int32_does_not_hold_stay_float(model, shape):
    model = nn.Sequential(model()).eval()
    model[0].weight.uniform_(0.95, 1.0)
    x = torch.rand(shape) * 0.02 + 0.98
    quantized = dbrq.quantize(model, [x])
    (row,) = dbrq.report(quantized).rows
    assert row.precision == "float" and "int32 holds" in row.reason
    for backend in PYTHON_BACKENDS:
        assert sqnr(model(x), dbrq.lower(quantized, x, backend=backend)(x)) > 60


def test_sums_that_int32_just_holds_are_int8():
    model = nn.Sequential(nn.Linear(65_000, 2)).eval()
    model[0].weight.uniform_(0.99, 1.0)
    x = torch.rand(2, 65_000) * 0.01 + 0.99
    quantized = dbrq.quantize(model, [x])
    assert [row.precision for row in dbrq.report(quantized).rows] == ["int8"]
    for backend in PYTHON_BACKENDS:
        assert sqnr(model(x), dbrq.lower(quantized, x, backend=backend)(x)) > 40


_OPERANDS = {
    "rows repeated": lambda: torch.randint(256, (1, 1, 16)).expand(2, 32, 16),
    "columns repeated": lambda: torch.randint(256, (2, 32, 1)).expand(2, 32, 16),
    "one number": lambda: torch.randint(256, (1, 1, 1)).expand(2, 32, 16),
    "batch repeated": lambda: torch.randint(256, (1, 32, 16)).expand(2, 32, 16),
    "one row, strides 1": lambda: torch.randint(256, (2, 16, 1)).as_strided((2, 1, 16), (16, 1, 1)),
    "one row of a column": lambda: torch.randint(256, (2, 16, 3))[..., :1].transpose(1, 2),
    "part of more": lambda: torch.randint(256, (2, 32, 48))[..., 16:32],
}


@pytest.mark.parametrize("make", _OPERANDS.values(), ids=_OPERANDS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_int8_matmul_of_any_strides(make, side):
    def laid(x):
        """uint8 in the strides of ``x``, ``to`` choosing others."""
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(size, dtype=torch.uint8).as_strided(x.shape, x.stride())
        once = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
        memory[once] = x[once].to(torch.uint8)
        return memory

    a, b = laid(make()), laid(make()).transpose(1, 2)
    if side == "left":
        b = torch.randint(256, (2, 16, 5), dtype=torch.uint8)
    elif side == "right":
        a = torch.randint(256, (2, 7, 16), dtype=torch.uint8)
    expected = (a.double() - 3) @ (b.double() - 5)
    eager = kernels.int8_matmul(a, kernels.QParams(1.0, 3), b, kernels.QParams(1.0, 5))
    scripted = torch.jit.script(script.int8_matmul)(a, b, 1.0, 3, 5)
    torch.testing.assert_close(eager.double(), expected)
    torch.testing.assert_close(scripted.double(), expected)


def test_a_scripted_file_of_8_bits_is_refused_where_products_saturate(tmp_path):
    """The example's own products do not saturate: it is darker than what calibration saw."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    model[0].weight.abs_()
    x = torch.rand(2, 8, 8, 8)
    for name, reduce_range in (("wide", False), ("narrow", True)):
        mapping = dbrq.default_qconfig_mapping(reduce_range=reduce_range)
        lowered = dbrq.lower(dbrq.quantize(model, [x], mapping), x * 0.2)
        assert lowered.self_test()
        dbrq.save(lowered, tmp_path / f"{name}.pt")
        assert dbrq.load(tmp_path / f"{name}.pt").self_test()
    code = """
import sys, torch, dbrq
wide, narrow = sys.argv[1:]
print(torch.jit.load(wide).self_test(), torch.jit.load(narrow).self_test())
dbrq.load(narrow)
try:
    dbrq.load(wide)
except dbrq.errors.LoadError as error:
    print("saturate" in str(error))
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "wide.pt"), str(tmp_path / "narrow.pt")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"})
    if not kernels.has_exact_int8_dot():
        pytest.skip("this CPU's products saturate")
    assert run.stdout.split() == ["False", "True", "True"], run.stderr


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)
        self.register_buffer("h", torch.zeros(4, 8))

    def forward(self, x):
        self.h.mul_(0.9).add_(self.l(x))
        return self.h + torch.randn(x.shape[0], 8)


class CallsTwice(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.m = model

    def forward(self, x):
        return self.m(x), self.m(x)


class IgnoresResult(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.m = model

    def forward(self, x):
        self.m(x * 2)
        return x


def test_scripted_calls_of_a_onednn_model_are_neither_merged_nor_dropped():
    x = torch.randn(4, 8)
    lowered = dbrq.lower(dbrq.quantize(Counting().eval(), [x]), x, backend="onednn")
    before, given, random = lowered.h.clone(), x.clone(), torch.get_rng_state()
    part = lowered.scriptable(x)
    assert torch.equal(before, lowered.h) and torch.equal(x, given) and torch.equal(random, torch.get_rng_state())
    for outer in (CallsTwice, IgnoresResult):
        scripted = torch.jit.script(outer(part).eval())
        for _ in range(3):
            lowered.h.zero_()
            torch.manual_seed(1)
            expected = outer(lowered)(x)
            state, random = lowered.h.clone(), torch.get_rng_state()
            lowered.h.zero_()
            torch.manual_seed(1)
            torch.testing.assert_close(scripted(x), expected, rtol=0, atol=0)
            assert torch.equal(state, lowered.h) and torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_another_sign_are_other_numbers(backend, first):
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x, sign=0.0):
            return torch.copysign(self.l(x), sign)

    x = torch.randn(4, 8)
    quantized = dbrq.quantize(Signed().eval(), [(x, first)])
    lowered = dbrq.lower(quantized, (x, first), backend=backend)
    torch.testing.assert_close(lowered(x, first), quantized(x, first))
    with pytest.raises((RuntimeError, AssertionError, torch.jit.Error), match="the sign of argument sign"):
        lowered(x, -first)
    torch.testing.assert_close(lowered(x, first), quantized(x, first))


@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
def test_as_strided_counts_from_where_the_storage_begins(backend):
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return self.l(x) + x.as_strided((2, 4), (4, 1), 0)

    x, more = torch.randn(2, 4), torch.randn(6, 4)
    quantized = dbrq.quantize(Strided().eval(), [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    for given in (x, more[2:4], more[1:3], more[:2], x):
        torch.testing.assert_close(lowered(given), quantized(given))


@pytest.mark.parametrize("limits", [(1.0, -1.0), (-1.0, float("nan"))])
@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
def test_clamp_whose_limits_are_crossed_is_not_fused(backend, limits):
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.l(x).clamp(*limits), self.m(x)

    x = torch.randn(4, 8)
    model = Clamps().eval()
    if limits[1] != limits[1]:  # what calibration refuses behind an int8 layer, it need not fuse
        assert dbrq.mappings._hardtanh((None, *limits)) is None
        return
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    assert torch.equal(lowered(x)[0], model(x)[0]) and sqnr(model(x)[1], lowered(x)[1]) > 30


def test_a_kernel_that_raises_in_its_trial_has_a_problem():
    def trial():
        raise RuntimeError("could not append an elementwise post-op\nmore")

    assert (
        dbrq.selfcheck.problem_of(object(), trial) == "it raises RuntimeError: could not append an elementwise post-op"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_and_examples_with_a_history_are_copied(backend):
    with torch.enable_grad():
        before = nn.Linear(8, 8)
        x = before(torch.randn(4, 8))
        assert not x.is_leaf
        quantized = dbrq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [(x,), x])
        lowered = dbrq.lower(quantized, x, backend=backend)
        dbrq.doctor(quantized, x)
        assert x.grad_fn is not None
    assert sqnr(quantized(x), lowered(x)) > 60


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(8, 8), 0
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.l(x) + self.calls * torch.rand(())


@pytest.mark.parametrize("look", ["profile", "compare", "log_values", "doctor"])
@pytest.mark.parametrize("backend", PYTHON_BACKENDS)
def test_looking_at_a_model_does_not_advance_it(look, backend):
    x, model = torch.randn(4, 8), Steps().eval()
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, x, backend=backend)
    looks = {
        "profile": lambda: dbrq.profile(lowered, x, repeats=2),
        "compare": lambda: dbrq.compare(model, quantized, x),
        "log_values": lambda: dbrq.log_values(quantized, x),
        "doctor": lambda: dbrq.doctor(quantized, x),
    }
    models = (model, quantized, lowered)
    before, random = [m.calls.clone() for m in models], torch.get_rng_state()
    looks[look]()
    assert all(torch.equal(m.calls, b) for m, b in zip(models, before, strict=True))
    assert torch.equal(random, torch.get_rng_state())
