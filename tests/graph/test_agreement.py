"""What ``rewrite`` and ``lower`` return computes what the model does: planted faults are found, named, and replaced."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbrq
import dbrq.kernels
import dbrq.lowering.onednn.model
from dbrq import selfcheck
from dbrq.graph import agreement
from dbrq.graph.agreement import Reference
from dbrq.graph.converted import Converted
from dbrq.graph.nodes import QUANTIZE
from dbrq.graph.trials import Trial
from dbrq.inspection.comparing import sqnr
from dbrq.kernels import script
from dbrq.lowering.inductor import InductorModel
from dbrq.lowering.lowered_model import LoweredModel
from tests.helpers.models import Call
from tests.helpers.running import has_compiler, run


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    ).eval()  # fmt: skip


def image() -> Tensor:
    return torch.randn(2, 3, 14, 14)


class Model(nn.Module):
    """A linear layer and what ``code`` does around it."""

    def __init__(self, code, **parts):
        super().__init__()
        self.code, self.layer = code, nn.Linear(8, 8)
        for name, part in parts.items():
            (self.register_buffer if isinstance(part, Tensor) else setattr)(name, part)

    def forward(self, *inputs):
        return self.code(self, *inputs)


# Faults of kernels


def lie(monkeypatch, backend: str, layer: str, channels: int) -> None:
    """Have the kernel of one layer halve what it gives."""
    if backend == "onednn":
        emit = dbrq.lowering.onednn.model.emit

        def lying(builder, partition, args):
            value = emit(builder, partition, args)
            if partition.op == layer:
                builder.call(lambda x: x.floor_divide_(2), (value,), {}, writes=True)
            return value

        monkeypatch.setattr(dbrq.lowering.onednn.model, "emit", lying)
        return
    init = script.Conv.__init__

    def biased(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.weight.shape[0] == channels:
            self.bias = self.bias + 1.0

    monkeypatch.setattr(script.Conv, "__init__", biased)


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_the_op_of_a_kernel_that_lies_is_named_and_runs_in_torch(backend, monkeypatch):
    model, x = convolutions(), image()
    quantized = dbrq.quantize(model, [x])
    lie(monkeypatch, backend, "4", 8)
    lowered = dbrq.lower(quantized, x, backend=backend)
    assert sqnr(run(quantized, x), run(lowered, x)) > 40
    rows = {row.path: row for row in dbrq.report(lowered).rows}
    assert rows["4"].precision == "float" and "does not give what the graph does" in rows["4"].reason
    assert rows["0"].precision == rows["2"].precision == rows["8"].precision == "int8"
    assert any(failure.geometry == "4" for failure in selfcheck.failures())
    assert sqnr(run(quantized, x), run(copy.deepcopy(lowered), x)) > 40


def test_a_fault_that_nothing_replaces_raises_and_says_where(monkeypatch):
    model, x = convolutions(), image()
    quantized = dbrq.quantize(model, [x])
    run_plain = dbrq.lowering.onednn.model.OneDNNModel.plain

    def wrong(self, args):
        result = run_plain(self, args)
        return result if result.shape[-1] != 10 else result + 1.0

    monkeypatch.setattr(dbrq.lowering.onednn.model.OneDNNModel, "plain", wrong)
    with pytest.raises(dbrq.MismatchError, match="does not give what the converted model gives") as error:
        dbrq.lower(quantized, x, backend="onednn")
    assert error.value.op == "8" and "the first call with the example" in str(error.value.got)


@pytest.mark.parametrize(
    ("backend", "fault"),
    [(b, f) for b in ("torchscript", "onednn") for f in ("frozen", "accumulates", "NaN", "one row", "small leaf")]
    + [pytest.param("inductor", "frozen", marks=pytest.mark.skipif(not has_compiler(), reason="no compiler"))],
)
def test_faults_that_one_call_does_not_show(backend, fault, monkeypatch):
    """What comes back is changed behind the backend, so that nothing can stand in."""
    code = (lambda m, x: (m.layer(x) * 100, m.layer(x).mean(1))) if fault == "small leaf" else lambda m, x: m.layer(x)
    x = torch.randn(1000 if fault == "one row" else 64, 8)
    quantized = dbrq.quantize(Model(code).eval(), [x])
    kept: list[Tensor] = []

    def changed(result):
        if fault == "small leaf":
            return (result[0], result[1] * 1.5) if isinstance(result, tuple) else result
        if isinstance(result, tuple) or result.dtype is not torch.float32:
            return result
        kept.append(result.clone())
        if fault == "frozen":
            return next(k for k in kept if k.shape == result.shape).clone()
        if fault == "accumulates":
            return result + 0.05 * len(kept)
        result = result.clone()
        if fault == "one row":
            result[77] = -result[77]
        else:
            result[3, 3] = float("nan")
        return result

    if backend == "torchscript":
        made = dbrq.lowering.BACKENDS[backend]

        class Changed(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, *args):
                return changed(self.inner(*args))

        monkeypatch.setitem(dbrq.lowering.BACKENDS, backend, lambda request: Changed(made(request)))
    else:
        kind = InductorModel if backend == "inductor" else dbrq.lowering.onednn.model.OneDNNModel
        plain = kind.plain
        monkeypatch.setattr(kind, "plain", lambda self, args: changed(plain(self, args)))
    with pytest.raises(dbrq.MismatchError):
        dbrq.lower(quantized, x, backend=backend)
    selfcheck.set_self_check(False)
    try:
        dbrq.lower(quantized, x, backend=backend)
    finally:
        selfcheck.set_self_check(True)


@pytest.mark.skipif(not has_compiler(), reason="no compiler")
def test_inductor_draws_the_numbers_that_torch_draws():
    model, x = Model(lambda m, x: m.layer(x) * torch.rand_like(x)).eval(), torch.randn(16, 8)
    quantized = dbrq.quantize(model, [x])
    outputs = []
    for each in (quantized, dbrq.lower(quantized, x, backend="inductor")):
        torch.manual_seed(5)
        outputs.append(run(each, x))
    assert sqnr(*outputs) > 40


def test_a_frozen_random_draw_is_found(monkeypatch):
    model = Model(lambda m, x: m.layer(x) * torch.rand(8)).eval()
    x = torch.randn(16, 8)
    quantized = dbrq.quantize(model, [x])
    reference = dbrq.lower(quantized, x, backend="onednn")
    torch.manual_seed(5)
    expected = run(quantized, x)
    torch.manual_seed(5)
    assert sqnr(expected, run(reference, x)) > 40
    drawn = torch.rand(8)
    plain = dbrq.lowering.onednn.model.OneDNNModel.plain

    def frozen(self, args):
        plain(self, args)
        return run(Model(lambda m, x: m.layer(x) * drawn), args[0])

    monkeypatch.setattr(dbrq.lowering.onednn.model.OneDNNModel, "plain", frozen)
    with pytest.raises(dbrq.MismatchError):
        dbrq.lower(quantized, x, backend="onednn")


@pytest.mark.parametrize("inputs", ["the example", "perturbed inputs"])
def test_a_wrong_eager_kernel_is_named_as_the_wrong_side(inputs, monkeypatch):
    model, x = convolutions(), image()
    quantized = dbrq.quantize(model, [x])
    bind = dbrq.kernels.PackedConv.bind

    def lying(self, *args, **kwargs):
        kernel = bind(self, *args, **kwargs)

        def called(q):
            result = kernel(q)
            return result // 2 if result.shape[1] == 8 else result

        return called

    monkeypatch.setattr(dbrq.kernels.PackedConv, "bind", lying)
    if inputs == "the example":
        monkeypatch.setattr(dbrq.rewriter, "_on_other_inputs", lambda *args: None)
    with pytest.raises(dbrq.MismatchError, match="an op of the converted model") as error:
        dbrq.rewrite(quantized, x)
    assert error.value.op == "5" and inputs in str(error.value)  # the ReLU that runs with layer 4
    with pytest.raises(dbrq.MismatchError, match="an op of the converted model"):
        dbrq.lower(quantized, x)


# What must be left alone


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        x[0] = 0.0
        y = self.layer(x) + 0.1 * torch.randn(8)
        self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        return y + self.mean


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_model_inputs_and_random_state_are_as_before(backend):
    model, x = Writing().train(), torch.randn(6, 8)
    quantized = dbrq.quantize(model, [torch.randn(6, 8)])
    given, state, calls = x.clone(), {k: v.clone() for k, v in quantized.state_dict().items()}, quantized.calls
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    lowered = dbrq.lower(quantized, x, backend=backend)
    assert torch.equal(x, given) and quantized.calls == calls and model.training and not quantized.training
    assert all(torch.equal(state[name], tensor) for name, tensor in quantized.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])
    for seed in range(3):  # the buffer that it writes to is what the converted model's is
        outputs = []
        for each in (quantized, lowered):
            torch.manual_seed(seed)
            outputs.append(run(each, x.clone()))
        assert sqnr(*outputs) > 40


def test_a_model_that_draws_nothing_leaves_the_generator_to_other_threads():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    quantized = dbrq.quantize(model, [x])
    torch.manual_seed(0)
    expected = [torch.rand(3) for _ in range(2000)]
    torch.manual_seed(0)
    drawn: list[Tensor] = []
    start, done = threading.Event(), threading.Event()

    def draw():
        start.wait()
        while len(drawn) < 2000 and not (done.is_set() and len(drawn) > 10):
            drawn.append(torch.rand(3))

    thread = threading.Thread(target=draw)
    thread.start()
    start.set()
    dbrq.lower(quantized, x)
    done.set()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=False))


# No false alarms


class Window(nn.Module):
    """A block of windowed attention, as Swin has them."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2)).view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3)
        q, k, v = self.qkv(y.reshape(-1, 16, c)).view(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = ((q @ k.mT) * (c // 2) ** -0.5).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(-1, 16, c)).view(b, h // 4, w // 4, 4, 4, c).transpose(2, 3)
        x = x + torch.roll(y.reshape(b, h, w, c), (2, 2), (1, 2))
        return x + self.mlp(x)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu_(self.body(x) + x)


DEEP = {
    "residual": lambda: (nn.Sequential(nn.Conv2d(3, 16, 3), *(Residual(16) for _ in range(8)), nn.AdaptiveAvgPool2d(1),
                                       nn.Flatten(), nn.Linear(16, 100)), torch.randn(1, 3, 18, 18)),
    "windows": lambda: (nn.Sequential(*(Window(16) for _ in range(6)), nn.Linear(16, 10)), torch.randn(1, 8, 8, 16)),
    "argmax": lambda: (Model(lambda m, x: (m.layer(x).argmax(-1), m.layer(x) > 0)), torch.randn(200, 8)),
    "masked": lambda: (
        Model(lambda m, x, k: (m.layer(x).masked_fill(k, float("-inf")), x[:0])),
        (torch.randn(9, 8), torch.eye(9, 8) > 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_deep_random_networks_and_legitimate_flips_do_not_raise(name, backend):
    model, x = DEEP[name]()
    x = x if isinstance(x, tuple) else (x,)
    quantized = dbrq.quantize(model.eval(), [x])
    before = len(selfcheck.failures())
    lowered = dbrq.lower(quantized, x, backend=backend)
    assert len(selfcheck.failures()) == before
    assert all(row.precision == "int8" for row in dbrq.report(lowered).rows if row.op in ("conv2d", "linear"))


@pytest.mark.filterwarnings("ignore:dbrq. values that are rounded otherwise:UserWarning")
@pytest.mark.parametrize("seed", [2, 4, 8, 11])
def test_masks_of_sums_that_cancel_in_integers_do_not_raise(seed):
    """Integers cancel to zero where floats leave a rest, and ``bool()`` tells (by the fuzzer, seed 8001202)."""
    torch.manual_seed(seed)
    layer, x = nn.Conv2d(8, 16, (3, 1), padding=2, groups=8, bias=False), torch.randn(2, 8, 9, 9)
    model = Model(lambda m, x: m.layer(x).bool().float()).eval()
    model.layer = layer
    quantized = dbrq.quantize(model, [x])
    graph = dbrq.rewrite(quantized, x)
    assert (graph(x) != quantized(x)).sum() <= 3


def test_the_reference_leaves_its_graph_alone():
    model, x = Writing(), torch.randn(6, 8)
    graph = dbrq.rewrite(dbrq.quantize(model, [x.clone()]), x)
    before = {name: tensor.clone() for name, tensor in graph.named_buffers()}
    reference, trial = Reference(graph), Trial("the example", (x,), 3)
    first, second = reference.call(trial), reference.call(trial)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first if "output" in k)
    assert "the buffer mean afterwards" in first and all(torch.equal(before[n], b) for n, b in graph.named_buffers())
    assert any(node.target is QUANTIZE for node in reference.graph.nodes)


# Inputs

TERMS = {
    "an input": lambda m, x, y: m.layer(x) + y,
    "a view of one": lambda m, x, y: y.view(2, 4).mT.reshape(8) + m.layer(x),
    "a part of a container": lambda m, x, y: m.layer(x) + y[1],
    "in place": lambda m, x, y: m.layer(x).add_(y),
}


@pytest.mark.parametrize("backend", ["torchscript", "onednn", "inductor"])
@pytest.mark.parametrize("name", TERMS)
def test_what_is_added_to_a_layer_stays_the_callers(name, backend):
    """torch's kernels add in place, and Inductor has them take an input of the graph for what they add to."""
    model, x, y = Model(TERMS[name]).eval(), torch.randn(2, 8), torch.randn(8 if "view" in name else (2, 8))
    args = (x, (torch.randn(2, 8), y)) if "container" in name else (x, y)
    quantized = dbrq.quantize(model, [args])
    lowered, before = dbrq.lower(quantized, args, backend=backend), y.clone()
    assert sqnr(quantized(*args), lowered(*args)) > 40 and torch.equal(y, before)


def test_a_backend_that_writes_to_what_it_is_given_is_found_out(monkeypatch):
    model, x = Model(lambda m, x: m.layer(x)).eval(), torch.randn(2, 8)
    quantized = dbrq.quantize(model, [x])
    kind = dbrq.lowering.onednn.model.OneDNNModel
    plain = kind.plain
    monkeypatch.setattr(kind, "plain", lambda self, args: (plain(self, args), args[0].add_(1))[0])
    with pytest.raises(dbrq.MismatchError, match="the inputs afterwards"):
        dbrq.lower(quantized, x, backend="onednn")


class Batch:
    """An object that keeps its tensors out of sight, as those of graph libraries do."""

    def __init__(self, x):
        self._store = {"x": x}

    @property
    def x(self):
        return self._store["x"]


def test_inputs_that_cannot_be_taken_are_named():
    model = Model(lambda m, data: m.layer(data.x)).eval()
    quantized = dbrq.quantize(model, [(Batch(torch.randn(2, 8)),)])
    with pytest.raises(dbrq.RewriteError, match="an object of class Batch that holds tensors"):
        dbrq.lower(quantized, (Batch(torch.randn(2, 8)),))


def test_torchscript_names_inputs_of_mixed_types():
    model = Model(lambda m, data: m.layer(data["x"] if data["kind"] == "text" else -data["x"])).eval()
    data = {"x": torch.randn(2, 8), "kind": "text"}
    quantized = dbrq.quantize(model, [(data,)])
    with pytest.raises(dbrq.RewriteError, match="a dict that holds Tensor and str"):
        dbrq.lower(quantized, (data,))
    assert sqnr(run(quantized, (data,)), run(dbrq.lower(quantized, (data,), backend="onednn"), (data,))) > 40


# Errors


def test_a_mistake_of_the_librarys_own_is_not_taken_for_one_of_the_users_code(monkeypatch):
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    quantized = dbrq.quantize(model, [x])
    monkeypatch.delattr(dbrq.graph.recorder.GraphRecorder, "quantized")
    with pytest.raises(AttributeError, match="quantized"):
        dbrq.rewrite(quantized, x)


def test_checks_cost_a_few_runs_only(monkeypatch):
    model, x = convolutions(), image()
    quantized = dbrq.quantize(model, [x])
    runs = {"graph": 0, "model": 0, "lowered": 0}

    def counted(owner, name, what):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            runs[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(Reference, "call", "graph")
    counted(dbrq.rewriter.Converted, "call", "model")
    counted(LoweredModel, "forward", "lowered")
    dbrq.lower(quantized, x, backend="onednn")
    assert runs == {"graph": 3, "model": 2, "lowered": 4}
    assert agreement.INFORMATIVE < 1


def test_what_the_model_warned_of_before_is_noted_again():
    """That it runs in float for some inputs, so that graph and model are not compared on those: seed 9100965."""

    def forward(m, x):
        y = m.a(x)
        y.contiguous().add_(1)
        return m.b(y)

    x = torch.randn(2, 3, 9)[..., 1:]
    quantized = dbrq.quantize(Call(forward, a=nn.Conv1d(3, 3, 1), b=nn.Conv1d(3, 3, 1)).eval(), [x], progress=False)
    reference = Reference(dbrq.rewrite(quantized, x))
    reference.expected(Trial("the example", (x,), None))
    with torch.no_grad(), pytest.warns(UserWarning, match="runs in float"):
        quantized(x.contiguous())
    converted = Converted(quantized, None)
    for given, warned in ((x, []), (x.contiguous(), ["layout of x"]), (x.contiguous(), ["layout of x"]), (x, [])):
        assert converted.call(Trial("", ((given,), {}), None), reference)[1] == warned
