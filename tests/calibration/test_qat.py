"""Quantization aware training: fake quantize in forward, gradients through it, and a conversion that keeps it all."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    FakeQuantizeBase,
    QConfigMapping,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    quantize_fx,
)
from torch.ao.quantization.backend_config import get_onednn_backend_config

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers.judging import sqnr, step_of
from tests.helpers.models import Call
from tests.helpers.running import old_quantization, run

MAPPING = get_default_qat_qconfig_mapping("onednn")
GLOBAL = QConfigMapping().set_global(get_default_qat_qconfig("onednn"))
MODELS = {
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)),
    "conv function": lambda: Call(
        lambda m, x: F.conv2d(F.relu(F.conv2d(x, m.w, m.b)), m.v),
        w=torch.randn(6, 3, 3, 3) * 0.2,
        b=torch.randn(6),
        v=torch.randn(4, 6, 3, 3) * 0.2,
    ),
    "conv bn": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)),
    "conv bn relu": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)),
    "conv bn without bias": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
    ),
    "conv bn add relu": lambda: Call(
        lambda m, x: m.c(F.relu(m.bn(m.a(x)) + m.b(x))),
        a=nn.Conv2d(3, 6, 3),
        bn=nn.BatchNorm2d(6),
        b=nn.Conv2d(3, 6, 3),
        c=nn.Conv2d(6, 4, 3),
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4)),
    "shared weight": lambda: Call(lambda m, x: F.conv2d(F.conv2d(x, m.w), m.w), w=torch.randn(3, 3, 3, 3) * 0.3),
}


def images(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8)


def prepare(model: nn.Module, mapping: QConfigMapping = MAPPING) -> nn.Module:
    return dbrq.prepare(model.train(), images(2), mapping)


def fake_quants(model: nn.Module) -> list[FakeQuantizeBase]:
    return [m for m in model.modules() if isinstance(m, FakeQuantizeBase)]


def train(model: nn.Module, steps: int = 3, lr: float = 1e-2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    x = images()
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_forward_rounds_activations_and_weights(name):
    model = MODELS[name]()
    prepared = prepare(model)
    assert prepared.training and fake_quants(prepared)
    x = images()
    with torch.no_grad():
        rounded, exact = prepared(x), copy.deepcopy(model).train()(x)
    assert 15 < sqnr(exact, rounded) < 60


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_inputs_and_weights(name):
    model = MODELS[name]()
    prepared = prepare(model)
    x, same = images().requires_grad_(), None
    prepared(x).square().mean().backward()
    same = x.detach().clone().requires_grad_()
    model.train()(same).square().mean().backward()
    assert F.cosine_similarity(x.grad.flatten(), same.grad.flatten(), 0) > 0.9
    expected = dict(model.named_parameters())
    found = dict(prepared.named_parameters())
    assert found.keys() == expected.keys()
    for path, parameter in found.items():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all()
        theirs = expected[path].grad.flatten()
        if theirs.norm() > 1e-5:
            assert F.cosine_similarity(parameter.grad.flatten(), theirs, 0) > 0.85, path


@pytest.mark.parametrize("name", MODELS)
def test_training_then_converting(name):
    prepared = prepare(MODELS[name]())
    losses = train(prepared, 6)
    assert losses[-1] < losses[0]
    converted = dbrq.convert(prepared)
    assert not converted.training and not fake_quants(converted)
    assert dbrq.report(converted).coverage == 1.0
    x = images()
    learned = run(prepared.eval().apply(disable_observer), x)
    got = run(converted, x)
    off = (got - learned).abs() / step_of(learned)
    assert (off <= 1.0).float().mean() >= 0.999, f"{off.max():.1f} steps, {sqnr(learned, got):.1f} dB"
    assert sqnr(learned, got) > 45, "it is rounded as it was in training"
    assert not any(p.requires_grad for p in converted.parameters())


def test_the_model_learns_through_rounding():
    torch.manual_seed(3)
    x, target = images(32), torch.randn(32, 4)
    prepared = prepare(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    )
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = F.mse_loss(prepared(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    converted = dbrq.convert(prepared)
    prepared.eval().apply(disable_observer)
    assert F.mse_loss(run(converted, x), target) < F.mse_loss(run(prepared, x), target) * 1.2 + 0.02


# The modules of fake quantize


def test_fake_quants_are_found_by_apply():
    prepared = prepare(MODELS["conv bn relu"]())
    assert len(fake_quants(prepared)) == 4, "two inputs and two weights"
    prepared(images())
    prepared.apply(disable_observer)
    assert all(int(m.observer_enabled) == 0 for m in fake_quants(prepared))
    before = [m.scale.clone() for m in fake_quants(prepared)]
    prepared(images() * 100)
    assert all(torch.equal(a, m.scale) for a, m in zip(before, fake_quants(prepared), strict=True))
    prepared.apply(enable_observer)
    prepared(images() * 100)
    assert not all(torch.equal(a, m.scale) for a, m in zip(before, fake_quants(prepared), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_without_fake_quantize_the_model_is_the_float_one(name):
    model = MODELS[name]().train()
    prepared = prepare(model)
    prepared.apply(disable_fake_quant)
    x = images()
    torch.testing.assert_close(prepared(x), copy.deepcopy(model)(x), atol=1e-5, rtol=1e-4)
    prepared.apply(enable_fake_quant)
    with torch.no_grad():
        assert not torch.allclose(prepared(x), model(x), atol=1e-5, rtol=1e-4)


def test_ranges_that_were_frozen_are_those_that_are_converted():
    prepared = prepare(MODELS["conv"]())
    train(prepared, 2)
    prepared.apply(disable_observer)
    frozen = sorted(m.scale.item() for m in fake_quants(prepared) if m.scale.numel() == 1)
    train(prepared, 2)
    converted = dbrq.convert(prepared)
    token = state_of(converted).token
    found = {state.qparams(key).scale for state in token.states.values() for key in state.slots}
    assert sorted(found) == pytest.approx(frozen)


def test_batch_norm_statistics_move_in_training_only():
    prepared = prepare(MODELS["conv bn relu"]())
    before = prepared[1].running_mean.clone()
    prepared.eval()
    prepared(images())
    assert torch.equal(prepared[1].running_mean, before)
    prepared.train()
    prepared(images())
    assert not torch.equal(prepared[1].running_mean, before)


def test_prepare_for_training_changes_no_statistics():
    model = MODELS["conv bn relu"]().train()
    before = copy.deepcopy(model.state_dict())
    prepared = dbrq.prepare(model, images(2), MAPPING)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor) and torch.equal(prepared.state_dict()[name], tensor)


def test_copies_and_state_dicts_while_training():
    prepared = prepare(MODELS["conv bn relu"]())
    train(prepared, 2)
    twin = copy.deepcopy(prepared)
    other = prepare(MODELS["conv bn relu"]())
    other(images())
    other.load_state_dict(prepared.state_dict())
    x = images()
    for model in (twin, other):
        assert torch.equal(run(dbrq.convert(model), x), run(dbrq.convert(prepared), x))
    train(twin, 1)
    assert not torch.equal(twin[0].weight, prepared[0].weight)


def test_dropout_drops_in_training():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 4))
    prepared = prepare(model)
    x = images()
    with torch.no_grad():
        assert not torch.equal(prepared(x), prepared(x))
        prepared.eval().apply(disable_observer)
        assert torch.equal(prepared(x), prepared(x))


# Against FX graph mode


def fx_prepared(model: nn.Module, mapping: QConfigMapping) -> nn.Module:
    with old_quantization():
        prepared = quantize_fx.prepare_qat_fx(
            copy.deepcopy(model).train(), mapping, (images(2),), backend_config=get_onednn_backend_config()
        )
    output = next(node for node in prepared.graph.nodes if node.op == "output").args[0]
    if "activation_post_process" in str(output.target):
        prepared.get_submodule(output.target).apply(disable_fake_quant)  # dbrq leaves the model's output as it is
    return prepared


def fx_parameters(prepared: nn.Module) -> dict[tuple, nn.Parameter]:
    """Convolution weights in order, since FX renames modules as it fuses them."""
    return {(tuple(p.shape), i): p for i, p in enumerate(p for p in prepared.parameters() if p.dim() == 4)}


@pytest.mark.parametrize("name", ["conv", "conv bn", "conv bn relu", "conv bn without bias"])
def test_training_is_that_of_fx(name):
    torch.manual_seed(5)
    model = MODELS[name]().train()
    ours, theirs = dbrq.prepare(model, images(2), GLOBAL), fx_prepared(model, GLOBAL)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (ours, theirs)]
    for _ in range(4):
        x = images()
        outputs = []
        for prepared, optimizer in zip((ours, theirs), optimizers, strict=True):
            with old_quantization():
                y = prepared(x.clone())
            outputs.append(y.detach())
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
        assert sqnr(outputs[1], outputs[0]) > 30
    for a, b in zip(fx_parameters(ours).values(), fx_parameters(theirs).values(), strict=True):
        assert sqnr(b.detach(), a.detach()) > 30
    x = images()
    with old_quantization():
        reference = quantize_fx.convert_fx(theirs.eval(), backend_config=get_onednn_backend_config())
        expected = run(reference, x)
    assert sqnr(expected, run(dbrq.convert(ours), x)) > 25


# Configuration


def test_a_layer_kept_in_float_is_not_rounded():
    prepared = prepare(MODELS["conv"](), get_default_qat_qconfig_mapping("onednn").set_module_name("0", None))
    assert len(fake_quants(prepared)) == 2
    train(prepared, 2)
    converted = dbrq.convert(prepared)
    assert {row.path: row.precision for row in dbrq.report(converted).rows if row.op == "conv2d"} == {
        "0": "float",
        "2": "int8",
    }


def test_converting_without_a_step_is_told():
    with pytest.raises(dbrq.NotCalibratedError):
        dbrq.convert(prepare(MODELS["conv"]()))


def test_training_after_calibrating_in_eval_mode():
    prepared = prepare(MODELS["conv bn relu"]()).eval()
    dbrq.calibrate(prepared, [images()])
    prepared.train()
    losses = train(prepared, 4)
    assert losses[-1] < losses[0]
