"""What dbrq relies on of torch's private parts, one test for each: a new torch version fails here first."""

from __future__ import annotations

import inspect
import operator
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm
from torch.overrides import TorchFunctionMode

from dbrq import _torch
from dbrq.quiet import quietly

aten = torch.ops.aten


class Functions(TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Ops(_torch.TorchDispatchMode):
    """Notes the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    """A tensor without elements, as dbrq's own are."""

    __torch_function__ = _torch.no_torch_function

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Wrapper:
        return _torch.make_wrapper(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(torch.ones(a.shape) if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


# Modes


def test_without_function_modes_nothing_is_seen() -> None:
    x = torch.ones(2)
    with Functions() as mode:
        with _torch.without_function_modes():
            torch.add(x, x)
            assert x.shape == (2,)
        assert mode.seen == []
        torch.add(x, x)
    assert mode.seen == [torch.add]


def test_without_function_modes_subclasses_are_not_asked() -> None:
    class Asked(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("asked")

    x = torch.ones(2).as_subclass(Asked)
    with _torch.without_function_modes():
        torch.add(x, x)
    with pytest.raises(AssertionError, match="asked"):
        torch.add(x, x)


def test_a_function_mode_may_be_entered_again_where_they_are_off() -> None:
    with _torch.without_function_modes(), Functions() as mode:
        torch.ones(2) + 1
    assert mode.seen == []


def test_a_wrapper_has_no_elements_and_its_ops_are_seen_by_its_dispatch_alone() -> None:
    x = Wrapper((2, 3))
    assert x.shape == (2, 3) and x.dtype is torch.float32 and x.device.type == "cpu" and not x.requires_grad
    result = x + 1
    assert type(result) is Tensor and torch.equal(result, torch.full((2, 3), 2.0))
    with Functions() as mode:
        torch.relu(x)
    assert mode.seen == [torch.relu]  # function modes come before it
    assert _torch.make_wrapper(Wrapper, (2, 3), strides=(1, 2), dtype=torch.float32).stride() == (1, 2)


def test_one_hop_is_skipped_and_what_a_function_is_made_of_is_seen() -> None:
    class Looking(Functions):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            if func is F.gaussian_nll_loss:
                with self:
                    return _torch.skip_one_hop(func, types, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Looking() as mode:
        F.gaussian_nll_loss(x, x, x)
    assert mode.seen.count(F.gaussian_nll_loss) == 1 and len(mode.seen) > 1


def test_the_innermost_function_mode_is_known_and_hidden() -> None:
    assert _torch.current_function_mode() is None and _torch.count_function_modes() == 0
    with Functions() as outer, Functions() as inner:
        assert _torch.current_function_mode() is inner
        assert _torch.count_function_modes() == 2
        with _torch.without_current_function_mode():
            assert _torch.current_function_mode() is outer
            torch.ones(2)
        assert _torch.current_function_mode() is inner
    assert inner.seen == [] and torch.ones in outer.seen


def test_dispatch_modes_are_known_and_hidden() -> None:
    assert _torch.count_dispatch_modes() == 0 and _torch.dispatch_modes() == []
    with Ops() as mode:
        assert _torch.count_dispatch_modes() == 1 and _torch.dispatch_modes() == [mode]
        with _torch.without_dispatch_modes():
            assert _torch.count_dispatch_modes() == 0
            torch.ones(2) + 1
        assert mode.seen == []
        torch.ones(2) + 1
    assert mode.seen == [aten.ones.default, aten.add.Tensor]


def test_fake_tensors_are_made_where_their_mode_is_on() -> None:
    with _torch.FakeTensorMode() as mode:
        x = torch.ones(2)
        assert _torch.dispatch_modes() == [mode]
    assert isinstance(x, _torch.FakeTensor) and not isinstance(torch.ones(2), _torch.FakeTensor)
    assert _torch.detect_fake_mode([x]) is mode and _torch.detect_fake_mode([torch.ones(2)]) is None


def test_traceable_wrappers_are_told_from_tensors() -> None:
    class Traceable(Wrapper):
        def __tensor_flatten__(self):
            return [], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return Traceable(size)

    assert _torch.is_traceable_wrapper_subclass(Traceable((2,)))
    assert not _torch.is_traceable_wrapper_subclass(torch.ones(2))
    assert not _torch.is_traceable_wrapper_subclass(Wrapper((2,)))


def test_what_derivatives_and_transforms_are_on() -> None:
    seen: list[tuple] = []

    def look(x: Tensor) -> Tensor:
        seen.append((_torch.is_wrapped(x), _torch.transform_level(), _torch.dual_level()))
        return x.sum()

    x = torch.ones(2, 3)
    look(x)
    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.hessian(look)(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert seen == [
        (False, None, -1), (True, 1, -1), (True, 1, -1), (True, 1, 0), (True, 3, 0), (False, None, 0),
    ]  # fmt: skip


# Tensors


def test_versions_grow_with_writes() -> None:
    x = torch.zeros(4)
    before = _torch.version(x)
    x[1:].add_(1)  # through a view too
    assert _torch.version(x) == before + 1
    assert (x + 1) is not x and _torch.version(x) == before + 1
    assert _torch.version(torch.zeros(2)) == 0 == _torch.version(x.clone())
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        _torch.version(torch.zeros(2))


def test_the_base_of_a_view() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    assert _torch.base_of(weight.T) is weight and _torch.base_of(weight) is None
    with torch.no_grad():
        assert _torch.base_of(weight.T) is weight


def test_storages_have_numbers() -> None:
    x, y = torch.ones(4), torch.ones(4)
    number = _torch.storage_id(x.untyped_storage())
    assert isinstance(number, int) and number == _torch.storage_id(x[1:].untyped_storage())
    assert number != _torch.storage_id(y.untyped_storage())


def test_tensors_have_attributes_of_their_own() -> None:
    x = torch.ones(2)
    x.__dict__["mark"] = 1
    assert x.mark == 1 and not hasattr(x.clone(), "mark")


def test_asking_whether_a_tensor_is_a_view_is_a_method() -> None:
    assert torch.ones(2)[1:]._is_view() and not torch.ones(2)._is_view()


# Ops


def test_int_mm() -> None:
    a, b = torch.randint(0, 256, (3, 8), dtype=torch.uint8), torch.randint(-128, 128, (8, 4), dtype=torch.int8)
    out = torch.empty(3, 4, dtype=torch.int32)
    expected = (a.double() @ b.double()).to(torch.int32)
    assert torch.equal(_torch.int_mm(a, b, out=out), expected) and torch.equal(out, expected)
    assert torch.equal(_torch.int_mm(a, b), expected)


def test_int_mm_in_torchscript() -> None:
    @torch.jit.script
    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch._int_mm(a, b)

    a, b = torch.ones(2, 8, dtype=torch.uint8), torch.ones(8, 2, dtype=torch.int8)
    assert product(a, b).tolist() == [[8, 8], [8, 8]]


def test_grouped_mm() -> None:
    x, weights = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8, dtype=torch.bfloat16)
    found = _torch.grouped_mm(x, weights, offs=torch.tensor([1, 4], dtype=torch.int32), bias=None, out_dtype=None)
    assert torch.equal(found, torch.full((4, 8), 8.0, dtype=torch.bfloat16))


def test_assertions() -> None:
    _torch.assert_(True, "fine")
    with pytest.raises(AssertionError, match="wrong"):
        _torch.assert_(False, "wrong")
    _torch.check_traced(True, lambda: "fine")
    with pytest.raises(RuntimeError, match="wrong"):
        _torch.check_traced(False, lambda: "wrong")


def test_assertions_of_graphs_in_generated_code_and_torchscript() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(
        _torch.assert_, (graph.call_function(operator.eq, (graph.call_method("dim", (x,)), 1)), "wrong")
    )
    graph.output(x)
    module = fx.GraphModule(nn.Module(), graph)
    assert 'torch._assert(eq, "wrong")' in module.code.replace("'", '"')
    for form in (module, quietly(torch.jit.script, module)):
        form(torch.ones(1))
        with pytest.raises((AssertionError, torch.jit.Error), match="wrong"):
            form(torch.ones(1, 1))


def test_assertions_of_programs() -> None:
    arguments = [
        [a.name for a in _torch.schema_of(op).arguments] for op in (_torch.ASSERT_SCALAR, _torch.ASSERT_METADATA)
    ]
    assert arguments[0] == ["self", "assert_msg"] and arguments[1][0] == "a" and "dtype" in arguments[1]

    class Chosen(nn.Module):
        def forward(self, x):
            n = x.max().to(torch.int64).item()
            _torch.check_traced(n > 2, lambda: "too few")
            return x.to(torch.float64) + n

    graph = torch.export.export(Chosen(), (torch.full((3,), 3.0),), strict=False).graph
    found = graph.find_nodes(op="call_function", target=_torch.ASSERT_SCALAR)
    assert any(re.search("expression (.*) on node", node.args[1]) for node in found)
    assert graph.find_nodes(op="call_function", target=_torch.ASSERT_METADATA)


def test_quantized_decomposed_ops_are_registered() -> None:
    q = _torch.quantized_decomposed
    x = torch.tensor([0.0, 1.0, 2.0])
    levels = q.quantize_per_tensor.default(x, 0.5, 3, 0, 255, torch.uint8)
    assert levels.tolist() == [3, 5, 7] and levels.dtype is torch.uint8
    assert torch.equal(q.dequantize_per_tensor.default(levels, 0.5, 3, 0, 255, torch.uint8), x)
    scale, zero_point = q.choose_qparams.tensor(x, 0, 255, 1e-12, torch.uint8)
    assert scale.dtype is torch.float64 and zero_point.dtype is torch.int64
    levels = q.quantize_per_tensor.tensor(x, scale, zero_point, 0, 255, torch.uint8)
    assert q.dequantize_per_tensor.tensor(levels, scale, zero_point, 0, 255, torch.uint8).shape == x.shape
    weight, scales = torch.ones(2, 3, dtype=torch.int8), torch.tensor([0.5, 2.0])
    zeros = torch.zeros(2, dtype=torch.int64)
    dequantized = q.dequantize_per_channel.default(weight, scales, zeros, 0, -128, 127, torch.int8)
    assert dequantized[:, 0].tolist() == [0.5, 2.0]


def test_schemas_say_what_is_written_and_aliased() -> None:
    assert isinstance(aten.add_.Tensor, _torch.OpOverload) and isinstance(aten.add_, _torch.OpOverloadPacket)
    written = _torch.schema_of(aten.add_.Tensor)
    assert written.is_mutable and written.arguments[0].alias_info.is_write and written.name == "aten::add_"
    assert written.arguments[1].alias_info is None and isinstance(written.arguments[0].type, torch.TensorType)
    view = _torch.schema_of(aten.t.default)
    assert not view.is_mutable and not view.arguments[0].alias_info.is_write
    sets = [info.before_set | info.after_set for info in (view.arguments[0].alias_info, view.returns[0].alias_info)]
    assert sets[0] & sets[1]
    assert _torch.schema_of(aten.add.Tensor).returns[0].alias_info is None
    out = _torch.schema_of(aten.add.out)
    assert any(a.is_out for a in out.arguments) and not any(a.is_out for a in written.arguments)
    defaults = {a.name: a.default_value for a in _torch.schema_of(aten.scaled_dot_product_attention.default).arguments}
    assert defaults["dropout_p"] == 0.0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN in torch")
def test_layouts_of_packed_weights() -> None:
    weight, scale = torch.ones(16, 16, 3, 3, dtype=torch.int8), torch.ones(16)
    args = (weight, scale, 1.0, 0, [1, 1], [1, 1], [1, 1], 1)
    one, other = (torch.ops.onednn.qconv_prepack(*args, [1, 16, 8, 8]) for _ in range(2))
    layout = _torch.packed_layout(one)
    assert isinstance(layout, bytes) and layout and layout == _torch.packed_layout(other)


# Modules


def test_buffers_that_a_state_dict_leaves_out() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(1))
    module.register_buffer("b", torch.zeros(1), persistent=False)
    assert _torch.unsaved_buffers(module) == {"b"}
    _torch.unsaved_buffers(module).add("a")
    assert not module.state_dict()


def test_which_attention_a_model_of_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8)
    setattr(config, _torch.ATTENTION, "eager")
    assert getattr(transformers.BertModel(config).config, _torch.ATTENTION) == "eager"


def test_what_modules_keep() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(module._modules) == ["0", "1"] and list(module[0]._parameters) == ["weight", "bias"]
    assert "running_mean" in module[1]._buffers and module[0]._parameters["weight"] is module[0].weight
    other = nn.Module()
    other._modules.update(module._modules)
    assert other.get_submodule("0") is module[0]
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
        assert isinstance(getattr(module, hooks), OrderedDict) and not getattr(module, hooks), hooks


def test_hooks_of_modules_are_in_their_dicts() -> None:
    module, seen = nn.Linear(2, 2), []
    before = module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    behind = module.register_forward_hook(lambda m, args, out: seen.append("behind"))
    assert before.id in module._forward_pre_hooks and behind.id in module._forward_hooks
    module._forward_hooks = OrderedDict()
    module(torch.ones(1, 2))
    assert seen == ["before"]


def test_hooks_of_all_modules_are_in_one_dict() -> None:
    assert not _torch.global_forward_pre_hooks
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        assert list(_torch.global_forward_pre_hooks) == [hook.id]
    finally:
        hook.remove()
    assert not _torch.global_forward_pre_hooks


def test_an_attribute_named_forward_takes_the_place_of_the_method() -> None:
    module = nn.Linear(2, 2)
    module.__dict__["forward"] = lambda x: "taken"
    assert module(torch.ones(1, 2)) == "taken"


def test_apply_maps_all_tensors_and_children() -> None:
    class Watched(nn.Linear):
        calls = 0

        def _apply(self, fn, recurse=True):
            Watched.calls += 1
            return super()._apply(fn, recurse)

    nn.Sequential(Watched(2, 2)).double()
    assert Watched.calls == 1


def test_state_dicts_are_loaded_module_by_module() -> None:
    names = list(inspect.signature(nn.Module._load_from_state_dict).parameters)
    assert names[:3] == ["self", "state_dict", "prefix"]


def test_the_padding_of_a_padded_convolution() -> None:
    module = nn.Conv2d(1, 1, (3, 5), padding=(1, 2), padding_mode="circular")
    assert list(_torch.reversed_padding(module)) == [2, 2, 1, 1]


def test_flat_weights_of_recurrent_layers_are_made_anew() -> None:
    module = nn.LSTM(2, 3)
    old = module.weight_ih_l0
    del module._parameters["weight_ih_l0"]
    module.__dict__["weight_ih_l0"] = new = torch.ones(12, 2)
    _torch.init_flat_weights(module)
    assert any(w is new for w in module._flat_weights) and not any(w is old for w in module._flat_weights)


def test_hooks_that_compute_weights_keep_their_names() -> None:
    pruned = prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5)
    (hook,) = pruned._forward_pre_hooks.values()
    assert isinstance(hook, prune.BasePruningMethod) and getattr(hook, _torch.PRUNED) == "weight"
    assert "weight_orig" in pruned._parameters and "weight_mask" in pruned._buffers
    spectral = spectral_norm(nn.Linear(2, 2))
    (hook,) = spectral._forward_pre_hooks.values()
    assert hook.name == "weight" and {"weight_u", "weight_v"} <= set(spectral._buffers) and spectral._state_dict_hooks
    with pytest.warns(FutureWarning):
        normed = weight_norm(nn.Linear(2, 2))
    (hook,) = normed._forward_pre_hooks.values()
    assert hook.name == "weight" and {"weight_g", "weight_v"} <= set(normed._parameters)
    assert "weight" in pruned.__dict__ and "weight" in normed.__dict__


def test_parametrizations_are_a_child() -> None:
    module = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())
    assert "parametrizations" in module._modules and parametrize.type_before_parametrizations(module) is nn.Linear


def test_a_compiled_module_keeps_the_module() -> None:
    module = nn.Linear(2, 2)
    compiled = torch.compile(module)
    assert type(compiled).__name__ == "OptimizedModule" and compiled._modules[_torch.COMPILED] is module


def test_what_torch_takes_from_files_of_strangers() -> None:
    known = _torch.weights_only_globals()
    assert known["torch._utils._rebuild_tensor_v2"] is torch._utils._rebuild_tensor_v2
    assert known["collections.OrderedDict"] and not {"os.system", "builtins.eval", "builtins.getattr"} & set(known)


def test_functions_of_torch_are_pickled_as_methods_of_a_class() -> None:
    assert torch.relu.__reduce__() == (getattr, (_torch.FUNCTIONS, "relu"))
