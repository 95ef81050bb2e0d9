"""``lower(backend="inductor")``: what Inductor fuses, by its generated code and by numbers, and the model around it."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig

import dbrq
from dbrq.lowering import inductor
from dbrq.lowering.engine import Lowering, bind
from dbrq.lowering.patterns import computes
from tests.helpers import fake_quantized, floats, has_compiler, run, sqnr
from tests.int8_patterns import PATTERNS, Attention, Chain, Pattern, conv, fusions, linear

if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)

lowered = functools.partial(dbrq.lower, backend="inductor")

#: What each pattern becomes. ``benchmarks/patterns.py`` shows what PT2E with the x86 quantizer makes of it: the same,
#: but for conv1d, which that has in float, and values that dbrq has in uint8 where PT2E has float32.
EXPECTED = {
    "conv2d + nothing": "qconv -> uint8; qconv -> float32",
    "conv2d + relu": "qconv relu -> uint8; qconv -> float32",
    "conv2d + relu6": "qconv hardtanh -> uint8; qconv -> float32",
    "conv2d + hardtanh": "qconv hardtanh -> uint8; qconv -> float32",
    "conv2d + hardswish": "qconv hardswish -> uint8; qconv -> float32",
    "conv2d + silu": "qconv swish -> uint8; qconv -> float32",
    "conv2d + relu, float out": "qconv relu -> float32",
    "conv2d + add, other last": "qconv relu -> uint8; qconv sum -> float32; qconv -> float32",
    "conv2d + add, other first": "qconv relu -> uint8; qconv sum -> float32; qconv -> float32",
    "conv2d + add, two branches": "qconv -> uint8; qconv sum -> uint8; qconv -> float32",
    "conv2d + add + relu, other last": "qconv relu -> uint8; qconv sum relu -> float32; qconv -> float32",
    "conv2d + add + relu, other first": "qconv relu -> uint8; qconv sum relu -> float32; qconv -> float32",
    "conv2d + add + relu, two branches": "qconv -> uint8; qconv sum relu -> uint8; qconv -> float32",
    "conv1d + nothing": "qconv -> uint8; qconv -> float32",
    "conv1d + relu": "qconv relu -> uint8; qconv -> float32",
    "conv1d + relu6": "qconv hardtanh -> uint8; qconv -> float32",
    "conv1d + hardtanh": "qconv hardtanh -> uint8; qconv -> float32",
    "conv1d + hardswish": "qconv hardswish -> uint8; qconv -> float32",
    "conv1d + silu": "qconv swish -> uint8; qconv -> float32",
    "conv1d + relu, float out": "qconv relu -> float32",
    "conv1d + add, other last": "qconv relu -> uint8; qconv -> uint8; qconv -> float32",
    "conv1d + add + relu, other first": "qconv relu -> float32; 2 x qconv -> float32",
    "linear + nothing": "qlinear -> uint8; qlinear -> float32",
    "linear + relu": "qlinear relu -> uint8; qlinear -> float32",
    "linear + relu6": "2 x qlinear -> float32",
    "linear + hardtanh": "2 x qlinear -> float32",
    "linear + hardswish": "2 x qlinear -> float32",
    "linear + silu": "2 x qlinear -> float32",
    "linear + gelu": "qlinear gelu -> uint8; qlinear -> float32",
    "linear + gelu (tanh)": "qlinear gelu -> uint8; qlinear -> float32",
    "linear + relu, float out": "qlinear relu -> float32",
    "linear + add, other last": "qlinear relu -> uint8; qlinear add -> uint8; qlinear -> float32",
    "linear + add, other first": "qlinear relu -> uint8; qlinear add -> uint8; qlinear -> float32",
    "linear + add, two branches": "qlinear -> uint8; qlinear add -> uint8; qlinear -> float32",
    "linear + add + relu, other last": "qlinear relu -> uint8; qlinear add relu -> uint8; qlinear -> float32",
    "linear + add + relu, other first": "qlinear relu -> uint8; qlinear add relu -> uint8; qlinear -> float32",
    "linear + add + relu, two branches": "qlinear -> uint8; qlinear add relu -> uint8; qlinear -> float32",
    "linear + gelu, 3-d": "qlinear gelu -> uint8; qlinear -> float32",
    "max_pool2d": "qconv relu -> uint8; qconv -> float32; quantized.max_pool2d",
    "cat": "2 x qconv relu -> uint8; qconv -> float32",
    "flatten": "qconv relu -> uint8; qlinear -> float32; quantized.max_pool2d",
    "one input of several conv2d": "qconv relu -> float32; 2 x qconv -> float32",
    "one input of several linear": "qlinear relu -> float32; 2 x qlinear -> float32",
    "attention": "3 x qlinear -> float32; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32",
    "conv2d + relu, free batch and size": "qconv relu -> uint8; qconv -> float32",
    "linear + gelu, free batch": "qlinear gelu -> uint8; qlinear -> float32",
    "attention, free batch and length":
        "3 x qlinear -> float32; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32",
    "conv2d + relu, bfloat16": "qconv relu -> uint8; qconv -> bfloat16",
    "conv2d + add + relu, bfloat16": "qconv relu -> uint8; qconv sum relu -> float32; qconv -> bfloat16",
    "linear + gelu, bfloat16": "qlinear gelu -> uint8; qlinear -> bfloat16",
    "attention, bfloat16":
        "3 x qlinear -> bfloat16; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32",
}  # fmt: skip


def counted(text: str) -> Counter[str]:
    """``"a; 2 x b"`` -> {"a": 1, "b": 2}."""
    found: Counter[str] = Counter()
    for part in text.split("; "):
        times, _, name = part.rpartition(" x ")
        found[name] += int(times or 1)
    return found


def grown(x: Tensor, dims: tuple[int, ...], times: int) -> Tensor:
    for dim in dims:
        x = torch.cat([x] * times, dim)
    return x


def test_every_pattern_is_expected():
    assert EXPECTED.keys() == PATTERNS.keys()


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name):
    pattern = PATTERNS[name]
    model, x = pattern.make(), pattern.example()
    quantized = dbrq.quantize(model, [x, -x, 1.1 * x])
    model_of_code = lowered(quantized, x, dtype=torch.bfloat16 if pattern.bfloat16 else torch.float32)
    assert_agrees(pattern, model_of_code, quantized, model, x)
    for times in (2, 3, 5) if pattern.free else ():
        assert_agrees(pattern, model_of_code, quantized, model, grown(x, pattern.free, times))
    assert fusions(model_of_code.code) == counted(EXPECTED[name]), model_of_code.code
    assert len(model_of_code.forms) == (2 if pattern.free else 1)


def assert_agrees(pattern: Pattern, got: nn.Module, quantized: nn.Module, model: nn.Module, x: Tensor) -> None:
    outputs = zip(floats(run(got, x)), floats(run(quantized, x)), floats(fake_quantized(quantized, model, x)),
                  strict=True)  # fmt: skip
    for ours, eager, reference in outputs:
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        least = 30 if pattern.bfloat16 else 45  # a value on the border between two integers is rounded either way
        assert sqnr(eager, ours) >= least and sqnr(reference, ours) >= least


# The model around the code


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, nn.Module]:
    """A converted model of images of any size, and its lowered form."""
    torch.manual_seed(0)
    quantized = dbrq.quantize(Chain(conv(2, 3), torch.relu, conv()), [torch.randn(2, 3, 8, 8) for _ in range(3)])
    return quantized, lowered(quantized, torch.randn(2, 3, 8, 8))


def assert_same(got: nn.Module, quantized: nn.Module, x: Any, least: float = 60) -> None:
    for a, b in zip(floats(run(got, x)), floats(run(quantized, x)), strict=True):
        assert a.shape == b.shape and sqnr(b, a) >= least


def test_memory_formats_and_strides(small):
    quantized, model = small
    x = torch.randn(2, 3, 8, 8)
    for given in (x.to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 16)[..., ::2], x.transpose(2, 3)):
        assert_same(model, quantized, given)


def test_a_form_of_free_sizes_serves_all_sizes(small):
    quantized, model = small[0], copy.deepcopy(small[1])
    assert not model.forms
    for batch, height in ((2, 8), (3, 8), (5, 8), (7, 8), (2, 8), (3, 12), (9, 17), (4, 31)):
        assert_same(model, quantized, torch.randn(batch, 3, height, 8))
    assert [set(form.free) for form in model.forms] == [set(), {(0, 0)}, {(0, 0), (0, 2)}]


def test_one_is_a_size_of_its_own(small):
    quantized, model = small[0], copy.deepcopy(small[1])
    for batch in (2, 1, 3, 4, 1):
        assert_same(model, quantized, torch.randn(batch, 3, 8, 8))
    assert [set(form.free) for form in model.forms] == [set(), set(), {(0, 0)}]


def test_the_oldest_form_goes_first(small):
    quantized, model = small[0], copy.deepcopy(small[1])
    model.max_forms = 1
    for batch in (2, 3, 2):
        assert_same(model, quantized, torch.randn(batch, 3, 8, 8))
        assert len(model.forms) == 1


def test_threads(small):
    quantized, model = small
    failed = []

    def work(number: int) -> None:
        try:
            for batch in (1, 2, 3, 4):
                assert_same(model, quantized, torch.randn(batch + number % 2, 3, 8, 8))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_calls_share_nothing_with_an_export_in_another_thread(small, monkeypatch):
    # While one thread exports, what keeps TorchDynamo out of a function notes that in a dict of the process.
    _, model = small
    x = torch.randn(2, 3, 8, 8)
    expected = run(model, x)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    monkeypatch.setattr(torch.fx.traceback, "annotate", lambda _: pytest.fail("a dict that threads share is changed"))
    assert torch.equal(run(model, x), expected)


def test_save_load_and_report(small, tmp_path):
    quantized, model = small
    dbrq.save(model, tmp_path / "model")
    loaded = dbrq.load(tmp_path / "model")
    assert_same(loaded, quantized, torch.randn(2, 3, 8, 8))
    for report in (dbrq.report(model), dbrq.report(loaded)):
        assert report.coverage == 1 and [row.precision for row in report.rows] == ["int8"] * 3


def test_profile(small):
    assert any("qconv" in row.kernel for row in dbrq.profile(small[1], torch.randn(2, 3, 8, 8)).rows)


def test_wrong_inputs_say_so(small):
    for wrong, words in ((torch.randn(3, 8, 8), "4 dimensions"), (torch.randn(2, 3, 8, 8).double(), "another dtype")):
        with pytest.raises(RuntimeError, match=words):
            small[1](wrong)


def test_inputs_without_memory_say_so(small):
    x = torch.randn(2, 3, 8, 8)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for wrong in (x.to("meta"), x.to_sparse(), x.to_mkldnn(), fake):
        with pytest.raises(dbrq.errors.KernelInputError):
            small[1](wrong)
    for wrong in (None, 1.0):
        with pytest.raises(RuntimeError, match="input x must be a tensor"):
            small[1](wrong)


def test_it_moves_and_learns_nothing(small):
    model = small[1]
    for wrong in (model.half, lambda: model.to(torch.float64)):
        with pytest.raises(dbrq.QuantizationError, match="keeps its dtypes"):
            wrong()
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        model(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()


def test_settings_of_inductor_are_left_as_they_were(small):
    from torch._inductor import config

    before = config.save_config()
    copy.deepcopy(small[1])(torch.randn(2, 3, 8, 8))
    assert config.save_config() == before
    compiled = torch.compile(nn.Linear(4, 4))  # which goes on as if nothing had been
    assert compiled(torch.randn(2, 4)).requires_grad


def test_models_compile_in_threads_of_their_own():
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    before, writes, found = config.save_config(), GraphLowering.save_output_code, []
    quantized = [dbrq.quantize(Chain(linear(), F.relu, linear()), [torch.randn(n, 16)]) for n in (2, 3)]
    models = [lowered(model, torch.randn(4, 16)) for model in quantized]

    def work(number: int) -> None:
        for batch in (5, 3):
            x = torch.randn(batch, 16)
            found.append(sqnr(quantized[number](x), models[number](x)))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and min(found) > 60 and all(model.calls() for model in models)
    assert config.save_config() == before and GraphLowering.save_output_code is writes


def test_settings_are_left_when_compiling_fails(small, monkeypatch):
    from torch._inductor import compile_fx, config

    def fails(*args: Any, **kwargs: Any) -> Any:
        assert config.freezing
        raise ValueError("on purpose")

    monkeypatch.setattr(compile_fx, "compile_fx", fails)
    before, model = config.save_config(), copy.deepcopy(small[1])
    with pytest.raises(dbrq.CompilerError, match="on purpose"):
        model(torch.randn(2, 3, 8, 8))
    assert config.save_config() == before and not model.forms
    monkeypatch.undo()
    assert_same(model, small[0], torch.randn(2, 3, 8, 8))


def test_sizes_that_torch_cannot_leave_free(small, monkeypatch):
    from torch._inductor import compile_fx
    from torch._inductor.exc import InductorError

    original = compile_fx.compile_fx

    def fails(module: Any, examples: Any, **options: Any) -> Any:
        if any(isinstance(example, torch.SymInt) for example in examples) or every:
            raise InductorError(ValueError("on purpose"), None)
        return original(module, examples, **options)

    every = False
    monkeypatch.setattr(compile_fx, "compile_fx", fails)
    quantized, model = small[0], copy.deepcopy(small[1])
    for batch in (2, 3, 4):
        assert_same(model, quantized, torch.randn(batch, 3, 8, 8))
    assert [set(form.free) for form in model.forms] == [set()] * 3
    every = True
    with pytest.raises(dbrq.CompilerError, match="on purpose"):
        model(torch.randn(5, 3, 8, 8))


def test_without_a_compiler(small):
    from torch._inductor import config

    none = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with none, pytest.raises(dbrq.CompilerError, match="torchscript"):
        lowered(small[0], torch.randn(2, 3, 8, 8))


def test_cpp_wrapper():
    torch.manual_seed(0)
    quantized = dbrq.quantize(Chain(linear(), F.gelu, linear()), [torch.randn(4, 5, 16) for _ in range(3)])
    model = lowered(quantized, torch.randn(4, 5, 16), cpp_wrapper=True)
    assert model.calls() == {"onednn.qlinear_pointwise": 2} and "aoti_torch" in model.code
    for shape in ((4, 5, 16), (2, 7, 16), (6, 3, 16)):
        assert_same(model, quantized, torch.randn(shape))
    assert len(model.forms) == 2 and copy.deepcopy(model).cpp_wrapper


def test_dynamic_quantization():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 32)
    quantized = dbrq.quantize(Attention().eval(), [x], QConfigMapping().set_global(default_dynamic_qconfig))
    model = lowered(quantized, x)
    assert model.calls()["onednn.qlinear_pointwise"] == 6
    for given in (x, 3 * x, torch.randn(2, 9, 32)):
        assert_same(model, quantized, given, 40)


def test_int8_weights_and_float_activations():
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    mapping = QConfigMapping().set_global(float_qparams_weight_only_qconfig)
    quantized = dbrq.quantize(Chain(linear(), F.gelu, linear()).eval(), [x], mapping)
    assert_same(lowered(quantized, x), quantized, x)


class Decides(nn.Module):
    """Code that takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (Chain(conv(2, inner), torch.relu, conv()) for inner in (3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.a(y) if x.mean() > 0 else self.b(y)


def test_models_that_decide_are_lowered_in_parts():
    torch.manual_seed(0)
    items = [sign * torch.rand(2, 3, 8, 8) for sign in (1, -1, 2, -3)]
    quantized = dbrq.quantize(Decides().eval(), items)
    parts = lowered(quantized, items[0])
    assert isinstance(parts, Decides)
    for x in items:
        assert_same(parts, quantized, x)


class Mixed(nn.Module):
    """Inputs in a dict, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch, times: int = 2, mask=None):
        y = self.layer(batch["x"]).repeat(times, 1)
        return {"y": y if mask is None else y * mask, "n": times}


def test_inputs_of_other_kinds():
    x = {"x": torch.randn(3, 8)}
    quantized = dbrq.quantize(Mixed().eval(), [(x, 2)])
    model = lowered(quantized, (x, 2))
    for given in ((x, 2), ({"x": torch.randn(5, 8)}, 2), ({"x": torch.randn(5, 8)}, 4), (x, 6)):
        assert_same(model, quantized, given)
        assert model(*given)["n"] == given[1]


def test_what_has_no_int8_kernel_says_so():
    x = torch.randn(2, 4, 6, 6, 6)
    quantized = dbrq.quantize(nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU()).eval(), [x])
    model = lowered(quantized, x)
    row = dbrq.report(model).rows[0]
    assert row.precision == "float" and "Inductor" in row.reason
    assert_same(model, quantized, x)


@pytest.mark.parametrize("ndim", [1, 2])
def test_convolutions_of_one_channel(ndim):
    """torch 2.13 is wrong about their layout where sizes are free."""
    torch.manual_seed(0)
    model = Chain(conv(ndim, 1), F.gelu, conv(ndim)).eval()
    quantized = dbrq.quantize(model, [torch.randn(4, 1, *[9] * ndim)])
    model = lowered(quantized, torch.randn(4, 1, *[9] * ndim))
    for shape in ((3, 9), (5, 9)):
        assert_same(model, quantized, torch.randn(shape[0], 1, *[shape[1]] * ndim))


# What torch's passes or kernels do wrong


class Between(nn.Module):
    """A function between two int8 layers."""

    def __init__(self, function: Any, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.function, self.first, self.last = function, first, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.first, x))


SUMS = {
    "relu(y + y)": lambda y, f, x: F.relu(y + y),
    "y + the same view": lambda y, f, x: F.relu(y + y.reshape(y.shape)),
    "y + the same again": lambda y, f, x: F.relu(y + f(x)),
}


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_what_is_added_to_itself(kind):
    """Inductor asserts that the other operand is another: a bare AssertionError for each of these."""
    torch.manual_seed(0)
    shape = (3, 16) if kind == "linear" else (1, 16, 5, 5)
    layers = (nn.Linear(16, 8), nn.Linear(8, 4)) if kind == "linear" else (nn.Conv2d(16, 8, 1), nn.Conv2d(8, 4, 1))
    x = torch.randn(shape)
    both = Between(lambda y, f, x: torch.cat([s(y, f, x) for s in SUMS.values()]), *layers).eval()
    quantized = dbrq.quantize(both, [x])
    assert sqnr(fake_quantized(quantized, both, x), run(lowered(quantized, x), x)) > 45


def test_negative_bit():
    """As of ``z.conj().imag``; compiled code reads memory and knows of no such bit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(8, 16)
    quantized = dbrq.quantize(model, [x, -x])
    model_of_code = lowered(quantized, x)
    for given in (torch._neg_view(x), torch.complex(x, x).conj().imag):
        assert given.is_neg()
        for _ in range(2):
            assert sqnr(run(model, -x), run(model_of_code, given)) > 30


def one_column() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=(1, 3), groups=16), nn.ReLU(), nn.Conv2d(32, 8, 1))
    return model.eval(), torch.randn(2, 16, 20, 5)


def test_a_convolution_of_one_column():
    """torch's int8 kernel is wrong for it: -1 dB."""
    model, x = one_column()
    quantized = dbrq.quantize(model, [x])
    model_of_code = lowered(quantized, x)
    assert sqnr(run(model, x), run(model_of_code, x)) > 30
    first, *_, last = dbrq.report(model_of_code).rows
    assert (first.precision, last.precision) == ("float", "int8") and "one column" in first.reason


def test_a_convolution_that_comes_to_one_column_later(monkeypatch):
    """The width is free by then: the form of free sizes does not take it, and one of its own has no int8 kernel."""

    def uncompiled(self: Any, module: Any, examples: list) -> Any:
        return torch.fx.Interpreter(module).run, str(module.graph)

    monkeypatch.setattr(inductor.InductorModel, "_through_inductor", uncompiled)
    model, _ = one_column()
    quantized = dbrq.quantize(model, [torch.randn(2, 16, 20, 12)])
    model_of_code = lowered(quantized, torch.randn(2, 16, 20, 12))
    for batch, width, forms in ((2, 14, 2), (2, 5, 3), (2, 9, 3), (3, 5, 4)):
        x = torch.randn(batch, 16, 20, width)
        assert sqnr(run(model, x), run(model_of_code, x)) > 20
        assert len(model_of_code.forms) == forms
    assert ["in_float" in form.code for form in model_of_code.forms] == [False, False, True, True]
    assert [set(form.free) for form in model_of_code.forms] == [set(), {(0, 3)}, set(), set()]


def prepared(quantized: nn.Module, x: Tensor) -> Any:
    """The graph that Inductor is given."""
    graph = dbrq.rewrite(quantized, x)
    lowering = Lowering(graph)
    inductor.prepare(lowering)
    graph.recompile()
    return graph


def test_a_faulty_convolution_leaves_other_readers_of_its_weight_in_int8():
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, stride=(1, 2), padding=(1, 0))
    model, x = Between(lambda y, f, x: f(y), layer, nn.Conv2d(16, 8, 1)).eval(), torch.randn(2, 16, 9, 9)
    quantized = dbrq.quantize(model, [x])
    graph = prepared(quantized, x)
    assert sum(map(computes(2), graph.graph.nodes)) == 2
    assert sqnr(dbrq.rewrite(quantized, x)(x), graph(x)) > 60


def test_a_kernel_of_one_element_dilates_nothing():
    """Given to oneDNN, with padding, it reads out of bounds."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 16, (3, 1), dilation=(1, 3), padding=(1, 0)), nn.Conv2d(16, 8, (1, 3), dilation=2)
    ).eval()
    x = torch.randn(2, 16, 9, 9)
    quantized = dbrq.quantize(model, [x])
    graph = prepared(quantized, x)
    convolutions = [bind(node)[1] for node in graph.graph.nodes if computes(2)(node)]
    assert [list(bound[5]) for bound in convolutions] == [[1, 1], [1, 2]]
    assert sqnr(dbrq.rewrite(quantized, x)(x), graph(x)) > 60


# Nothing of the process


def test_warnings_and_log_records_of_others_arrive_while_this_thread_is_quiet(caplog):
    from dbrq.quiet import quiet

    logger = logging.getLogger("dbrq_test_quiet.inner")
    level = logger.level

    def speak() -> list[str]:
        caplog.clear()
        logger.warning("logged")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with quiet() if inside else contextlib.nullcontext():
                warnings.warn("said", UserWarning, stacklevel=1)
        return [*(record.message for record in caplog.records), *(str(w.message) for w in caught)]

    inside, heard = True, []
    with quiet(loggers=("dbrq_test_quiet",)):
        assert speak() == [] and logger.level == level
        inside = False
        other = threading.Thread(target=lambda: heard.extend(speak()))
        other.start()
        other.join()
    assert heard == ["logged", "said"] and speak() == ["logged", "said"]


def test_a_compile_of_the_users_meanwhile_is_the_users_own(monkeypatch):
    """Another thread compiles, with torch.compile, between the settings of ours and their end."""
    from torch._inductor import compile_fx, config, mkldnn_ir
    from torch._inductor.graph import GraphLowering

    torch.manual_seed(0)
    quantized = dbrq.quantize(Chain(linear(), F.relu, linear()), [torch.randn(4, 16)])
    names = [(GraphLowering, "save_output_code"), (mkldnn_ir, "_prepare_convolution_fusion_create")]
    before = [getattr(owner, name) for owner, name in names]
    layer, x = nn.Linear(16, 8), torch.randn(4, 16)
    found: dict[str, Any] = {}
    inner = compile_fx.compile_fx_inner

    def meanwhile() -> None:
        found["freezing"] = config.freezing, config.joint_custom_post_pass
        found["patched"] = [getattr(owner, name) for owner, name in names] != before
        with torch.no_grad(), warnings.catch_warnings(record=True) as found["warned"]:
            warnings.simplefilter("always")
            warnings.warn("the user's own", UserWarning, stacklevel=1)
        found["levels"] = logging.getLogger("torch._export").level

    def slowly(*args: Any, **kwargs: Any) -> Any:
        assert config.freezing
        other = threading.Thread(target=meanwhile)
        other.start()
        other.join()
        return inner(*args, **kwargs)

    level = logging.getLogger("torch._export").level
    monkeypatch.setattr(compile_fx, "compile_fx_inner", slowly)
    users = threading.Thread(target=lambda: found.update(output=torch.compile(layer)(x)))
    users.start()  # which waits for us, or we for it
    model = lowered(quantized, x)
    users.join()
    assert found["freezing"] == (False, None) and not found["patched"] and found["levels"] == level
    assert [str(w.message) for w in found["warned"]] == ["the user's own"]
    torch.testing.assert_close(found["output"], layer(x))
    assert found["output"].requires_grad
    assert_same(model, quantized, x)


# What torch 2.13 does to graphs that are not rewritten first. When one of these fails, its rewrite can go.


def unprepared(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> Any:
    monkeypatch.setattr(inductor, "prepare", lambda lowering: None)
    return lowered(dbrq.quantize(model.eval(), [x]), x)


class Pools(nn.Module):
    """Pools 9x9 to 5x5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(self.first(x), 2, ceil_mode=True))


def test_pools_that_round_up(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9, 9)
    with pytest.raises((RuntimeError, AssertionError)):
        assert unprepared(monkeypatch, Pools(), x)(x).shape == (2, 16, 5, 5)
    monkeypatch.undo()
    quantized = dbrq.quantize(Pools().eval(), [x])
    assert_same(lowered(quantized, x), quantized, x)


def test_convolutions_over_lengths_take_few_activations(monkeypatch):
    with pytest.raises(RuntimeError, match="hardswish"):
        unprepared(monkeypatch, Chain(conv(1), F.hardswish, conv(1)), torch.randn(2, 16, 9))


def test_rewrites_are_logged_and_change_no_number():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9)
    graph = dbrq.rewrite(dbrq.quantize(Chain(conv(1), F.hardswish, conv(1)).eval(), [x]), x)
    expected = graph(x)
    lowering = Lowering(graph)
    inductor.prepare(lowering)
    graph.recompile()
    assert [entry.rewrite for entry in lowering.entries] == ["conv1d_activation_quantize", "conv1d"]
    assert sqnr(expected, graph(x)) > 60
