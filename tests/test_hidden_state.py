"""Modules as torch and users see them: type, attributes, containers and printing stay."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.phases import Net, X, in_phase, net, phases
from tests.helpers.running import convert, run


def _twice(conv, x):
    return F.conv2d(x, conv.weight, conv.bias, padding=1) * 2.0


@phases
def test_type_attributes_and_methods_stay(phase):
    model = in_phase(phase, net, X)
    assert type(model) is Net
    assert [type(m) for m in model.features] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]
    assert [name for name, _ in model.named_children()] == ["features", "heads"]
    assert len(model.features) == 4 and len(model.heads) == 2
    assert [type(m) for m in model.heads.children()] == [nn.Linear, nn.Linear]
    assert list(model._modules) == ["features", "heads"]
    import inspect

    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert next(model.parameters()).device.type == "cpu"


@phases
def test_iterating_containers_never_meets_the_state(phase):
    model = in_phase(phase, net, X)
    for container in (model, model.features, model.heads):
        assert not any("auto_quant" in name for name in dict(container.named_children()))
        assert not any(type(m).__name__ == "AutoQuantizationState" for m in container.children())
    assert type(model.features[-1]) is nn.Conv2d
    assert len(list(model.features)) == 4


def test_apply_reaches_modules_and_states():
    model = in_phase("prepared", net, X)
    seen = []
    assert model.apply(lambda m: seen.append(type(m).__name__)) is model
    assert "Conv2d" in seen and "HistogramObserver" in seen and seen[-1] == "Net"
    assert len([name for name in seen if name == "Conv2d"]) == 2


class MapsItsOwnTensors(nn.Module):
    """As ultralytics writes it: ``_apply`` takes the function alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.stride = nn.Linear(4, 4), torch.ones(1)

    def _apply(self, fn):
        super()._apply(fn)
        self.stride = fn(self.stride)
        return self

    def forward(self, x):
        return self.layer(x) * self.stride


@phases
def test_a_class_may_map_tensors_in_its_own_way(phase):
    x = torch.randn(8, 4)
    model = in_phase(phase, MapsItsOwnTensors, x)
    expected = run(model, x)
    assert model.to("cpu").float() is model
    assert torch.equal(run(model, x), expected)


@phases
def test_to_and_casts_of_nothing_keep_the_model(phase):
    model = in_phase(phase, net, X)
    expected = run(model, X)
    for change in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.eval(), lambda m: m.requires_grad_(False),
                   lambda m: m.share_memory(), lambda m: m.cpu()):  # fmt: skip
        assert change(model) is model
        assert torch.equal(run(model, X), expected)


@phases
def test_memory_format_of_a_model_does_not_matter(phase):
    model = in_phase(phase, net, X)
    expected = run(model, X)
    model.to(memory_format=torch.channels_last)
    assert sqnr(expected, run(model, X)) > 40
    if phase == "prepared":
        expected, model = run(dbrq.convert(in_phase(phase, net, X)), X), dbrq.convert(model)
        assert sqnr(expected, run(model, X)) > 40
    other = in_phase(phase, net, X)
    other.load_state_dict(model.state_dict() if phase == "quantized" else other.state_dict(), assign=True)
    assert sqnr(expected, run(other, X)) > (40 if phase == "quantized" else 20)


@phases
def test_a_channels_last_model_and_channels_last_inputs(phase):
    x = X.contiguous(memory_format=torch.channels_last)
    expected = run(in_phase(phase, net, X), X)
    model = in_phase(phase, lambda: net().to(memory_format=torch.channels_last), x)
    for given in (x, X):
        assert sqnr(expected, run(model, given)) > 35
    assert sqnr(expected, run(in_phase(phase, net, X), x)) > 35


def test_parameters_of_a_converted_model_are_frozen_and_float():
    model = in_phase("quantized", net, X)
    parameters = list(model.parameters())
    assert parameters and not any(p.requires_grad for p in parameters)
    assert all(isinstance(p, nn.Parameter) for p in parameters)
    assert isinstance(model.features[0].bias, nn.Parameter)


def test_weight_gives_float_on_demand():
    result = convert(net(), X)
    conv, quantized = result.model.features[3], result.quantized.features[3]
    assert quantized.weight.dtype is torch.float32 and quantized.weight.shape == conv.weight.shape
    assert quantized.weight.device.type == "cpu"
    error = (quantized.weight - conv.weight).abs().amax((1, 2, 3))
    assert (error <= conv.weight.abs().amax((1, 2, 3)) / 127).all()
    assert type(quantized.weight + 0) is torch.Tensor
    assert quantized.weight_int8.dtype is torch.int8


@phases
def test_printing_shows_ops_and_qparams(phase):
    model = in_phase(phase, net, X)
    text = repr(model._auto_quant_state) + repr(model.features._auto_quant_state)
    for shown in ("AutoQuantizationState", "conv2d", "features.0", "float32[4, 3, 9, 9]"):
        assert shown in text
    assert ("HistogramObserver" if phase == "prepared" else "scale=") in text


def test_hooks_of_the_user_on_modules_still_run():
    model, seen = net(), []
    model.features[0].register_forward_hook(lambda m, args, out: seen.append(type(out + 0)))
    model.features.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    result = convert(model, X)
    seen.clear()
    out = run(result.quantized, X)
    assert len(seen) == 2 and sqnr(run(model, X), out) > 20


def test_forward_given_to_the_instance_by_the_user():
    model = net()
    plain = model.features[3].forward
    model.features[3].forward = functools.partial(_twice, model.features[3])
    del plain
    converted = convert(model, X).quantized
    assert sqnr(run(model, X), run(converted, X)) > 20
