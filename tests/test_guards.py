"""What a converted model refuses, what it takes, and gradients that go through it or through lowered models."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dbrq
from tests.helpers.models import Call
from tests.helpers.running import convert
from tests.helpers.training import BATCH, V, close, converted_net, small_net

REFUSED = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.float16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "cuda": lambda m: m.cuda(),
    "to cuda": lambda m: m.to("cuda"),
    "to meta": lambda m: m.to("meta"),
    "type": lambda m: m.type(torch.float64),
    "to_empty": lambda m: m.to_empty(device="meta"),
}
FINE = {
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "to cpu": lambda m: m.to("cpu"),
    "to float32": lambda m: m.to(torch.float32),
    "to channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "share_memory": lambda m: m.share_memory(),
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "requires_grad_(False)": lambda m: m.requires_grad_(False),
    "zero_grad": lambda m: m.zero_grad() or m,
}


@pytest.mark.parametrize("change", list(REFUSED.values()), ids=list(REFUSED))
@pytest.mark.parametrize("part", ["", "0", "5", "wrapper", "loaded", "copy"])
def test_a_converted_model_refuses_before_anything_changes(change, part, tmp_path):
    model = converted_net()
    if part == "loaded":
        dbrq.save(model, tmp_path / "model")
        model = dbrq.load(tmp_path / "model")
    model = copy.deepcopy(model) if part == "copy" else model
    expected, state = model(BATCH), {k: v.clone() for k, v in model.state_dict().items()}
    target = (
        nn.Sequential(model)
        if part == "wrapper"
        else model.get_submodule(part)
        if part.isdigit() or not part
        else model
    )
    with pytest.raises(dbrq.ConfigurationError) as caught:
        change(target)
    assert caught.value.expected and caught.value.hint and caught.value.path is not None
    for key, value in model.state_dict().items():
        assert value.dtype is state[key].dtype and value.device.type == "cpu" and torch.equal(value, state[key])
    assert torch.equal(model(BATCH), expected)


@pytest.mark.parametrize("change", list(FINE.values()), ids=list(FINE))
def test_a_converted_model_takes_what_changes_nothing(change):
    model = converted_net()
    expected = model(BATCH)
    assert change(model) is model
    assert close(expected, model(BATCH), 60)
    assert not any(m.training for m in model.modules()), "it stays in eval mode"


def test_a_converted_model_inside_one_that_trains():
    inner = converted_net()
    expected = inner(BATCH)
    outer = nn.Sequential(inner, nn.Linear(4, 2)).train()
    assert outer.training and not inner.training and not inner[3].training
    inner[3].train()
    outer(BATCH).square().sum().backward()
    assert outer[1].weight.grad is not None and torch.equal(inner(BATCH), expected)
    assert not inner(BATCH).requires_grad, "nothing is added where nobody asks for gradients"


def _containers(m, x, more):
    y = m.linear(x)
    return {"y": y, "more": [y.relu(), more["n"]], "x": more["x"]}


def test_backward_through_a_converted_model():
    model = converted_net()
    x = BATCH.clone().requires_grad_()
    expected = model(BATCH)
    for run in (model, nn.Sequential(nn.Identity(), model), lambda x: checkpoint(model, x, use_reentrant=False)):
        y = run(x)
        assert torch.equal(y, expected) and y.requires_grad
        with pytest.raises(dbrq.QuantizationError, match="no gradient"):
            y.sum().backward()
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        model.requires_grad_()
    assert x.grad is None and torch.equal(model(BATCH), expected)
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert not model(x).requires_grad
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):  # a part of it, called by itself
        model[5](torch.randn(2, 288, requires_grad=True)).sum().backward()


def test_backward_through_containers():
    converted = convert(Call(_containers, linear=nn.Linear(8, 4)), (V, {"n": 1, "x": V})).quantized
    x = V.clone().requires_grad_()
    out = converted(V, {"n": 1, "x": x})
    assert out["more"][1] == 1 and out["x"] is x, "what passes through keeps its gradient"
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        out["more"][0].sum().backward()
    out["x"].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("quantized", [True, False])
def test_lowered_to_onednn(quantized):
    model = dbrq.lower(converted_net() if quantized else small_net(), BATCH, backend="onednn")
    expected = model(BATCH)
    for change in REFUSED.values():
        with pytest.raises(dbrq.ConfigurationError):
            change(model)
        assert torch.equal(model(BATCH), expected)
    for change in FINE.values():
        assert change(model) is model
        assert torch.equal(model(BATCH), expected)
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        model(BATCH.clone().requires_grad_()).sum().backward()


def test_lowered_to_torchscript():
    """A ScriptModule is torch's own: a cast is not refused, but what is lowered is none of its parameters."""
    model = dbrq.lower(converted_net(), BATCH)
    expected = model(BATCH)
    for cast in (torch.nn.Module.half, torch.nn.Module.double):
        assert torch.equal(cast(model)(BATCH), expected)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(BATCH.clone().requires_grad_()).sum().backward()
