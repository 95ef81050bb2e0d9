"""``lower(backend="inductor")``: the model around Inductor's code."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig

import dbrq
from tests.helpers.inductor import assert_same, lowered
from tests.helpers.int8_patterns import Attention, Chain, conv, linear
from tests.helpers.judging import sqnr
from tests.helpers.running import has_compiler, run

if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, nn.Module]:
    """A converted model of images of any size, and its lowered form."""
    torch.manual_seed(0)
    quantized = dbrq.quantize(Chain(conv(2, 3), torch.relu, conv()), [torch.randn(2, 3, 8, 8) for _ in range(3)])
    return quantized, lowered(quantized, torch.randn(2, 3, 8, 8))


def test_memory_formats_and_strides(small):
    quantized, model = small
    x = torch.randn(2, 3, 8, 8)
    for given in (x.to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 16)[..., ::2], x.transpose(2, 3)):
        assert_same(model, quantized, given)


def test_a_form_of_free_sizes_serves_all_sizes(small):
    quantized, model = small[0], copy.deepcopy(small[1])
    assert not dbrq.lowered_form(model).forms
    for batch, height in ((2, 8), (3, 8), (5, 8), (7, 8), (2, 8), (3, 12), (9, 17), (4, 31)):
        assert_same(model, quantized, torch.randn(batch, 3, height, 8))
    assert [set(form.free) for form in dbrq.lowered_form(model).forms] == [set(), {(0, 0)}, {(0, 0), (0, 2)}]


def test_one_is_a_size_of_its_own(small):
    quantized, model = small[0], copy.deepcopy(small[1])
    for batch in (2, 1, 3, 4, 1):
        assert_same(model, quantized, torch.randn(batch, 3, 8, 8))
    assert [set(form.free) for form in dbrq.lowered_form(model).forms] == [set(), set(), {(0, 0)}]


def test_the_oldest_form_goes_first(small):
    quantized, model = small[0], copy.deepcopy(small[1])
    dbrq.lowered_form(model).max_forms = 1
    for batch in (2, 3, 2):
        assert_same(model, quantized, torch.randn(batch, 3, 8, 8))
        assert len(dbrq.lowered_form(model).forms) == 1


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
    assert len(found) == 4 and min(found) > 60 and all(dbrq.lowered_form(model).calls() for model in models)
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
    assert config.save_config() == before and not dbrq.lowered_form(model).forms
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
    assert [set(form.free) for form in dbrq.lowered_form(model).forms] == [set()] * 3
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
    assert (
        dbrq.lowered_form(model).calls() == {"onednn.qlinear_pointwise": 2}
        and "aoti_torch" in dbrq.lowered_form(model).code
    )
    for shape in ((4, 5, 16), (2, 7, 16), (6, 3, 16)):
        assert_same(model, quantized, torch.randn(shape))
    assert len(dbrq.lowered_form(model).forms) == 2 and dbrq.lowered_form(copy.deepcopy(model)).cpp_wrapper


def test_dynamic_quantization():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 32)
    quantized = dbrq.quantize(Attention().eval(), [x], QConfigMapping().set_global(default_dynamic_qconfig))
    model = lowered(quantized, x)
    assert dbrq.lowered_form(model).calls()["onednn.qlinear_pointwise"] == 6
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
