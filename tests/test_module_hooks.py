"""Hooks of the user on modules: those that look, those that change values, global ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import dbrq
from tests.helpers.running import convert
from tests.helpers.training import BATCH, close, recipes, small_net


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.seq = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True))

    def forward(self, x, scale=1.0):
        return self.seq(self.act(self.norm(self.conv(x)))) * scale


class Looker:
    """A hook that keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list = []

    def __call__(self, module, args, output):
        self.seen.append((output, output.mean().item(), output.detach().clone().numpy()))

    def __deepcopy__(self, memo):  # the copies of the model tell the same one
        return self


HOOKS = {
    "output * 2": lambda m: m.register_forward_hook(lambda m, args, out: out * 2),
    "output in place": lambda m: m.register_forward_hook(lambda m, args, out: out.mul_(0.5)),
    "output, keywords": lambda m: m.register_forward_hook(lambda m, args, kwargs, out: out + 1, with_kwargs=True),
    "output, always": lambda m: m.register_forward_hook(lambda m, args, out: -out, always_call=True),
    "input": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
    "input, keywords": lambda m: m.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] + 0.25,), kwargs), with_kwargs=True
    ),
}
changing = pytest.mark.parametrize("register", list(HOOKS.values()), ids=list(HOOKS))
places = pytest.mark.parametrize("where", ["conv", "norm", "act", "seq", "seq.1", ""])


@places
@changing
def test_hooks_that_change_values_are_part_of_the_model(where, register):
    model = Block().eval()
    register(model.get_submodule(where))
    converted = convert(model, BATCH).quantized
    with torch.no_grad():
        assert close(model(BATCH), converted(BATCH)) and dbrq.report(converted).coverage == 1.0
        assert close(model(BATCH), dbrq.lower(converted, BATCH)(BATCH)), "those of the root too"


@pytest.mark.parametrize("where", ["conv", "act", "seq", ""])
@changing
@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_hooks_that_come_later_may_not_change_values(where, register, phase):
    result = convert(Block(), BATCH)
    model = getattr(result, phase)
    with torch.no_grad():
        expected = model(BATCH)
        handle = register(model.get_submodule(where))
        if where:
            with pytest.raises(dbrq.ConfigurationError, match="before prepare") as caught:
                model(BATCH)
            assert caught.value.path == where
        else:  # outside of the model's own run
            assert not torch.equal(model(BATCH), expected)
            if phase == "quantized":
                assert torch.equal(dbrq.rewrite(model, BATCH)(BATCH), dbrq.rewrite(model, BATCH)(BATCH))
                assert close(model(BATCH), dbrq.lower(model, BATCH)(BATCH))
        handle.remove()
        assert torch.equal(model(BATCH), expected)


@places
@pytest.mark.parametrize("when", ["before", "prepared", "converted"])
def test_hooks_that_look(where, when):
    model, looker, reference = Block().eval(), Looker(), Looker()
    plain = copy.deepcopy(model)
    plain.get_submodule(where).register_forward_hook(reference)
    with torch.no_grad():
        plain(BATCH)
        unseen = convert(model, BATCH).quantized(BATCH)
        handle = model.get_submodule(where).register_forward_hook(looker) if when == "before" else None
        prepared = dbrq.prepare(model, BATCH)
        handle = handle or (prepared.get_submodule(where).register_forward_hook(looker) if when == "prepared" else None)
        prepared(BATCH)
        converted = dbrq.convert(prepared)
        handle = handle or converted.get_submodule(where).register_forward_hook(looker)
        looker.seen.clear()
        got = converted(BATCH)
        assert len(looker.seen) == 1 and close(plain(BATCH), got)
        (value, mean, array), (theirs, their_mean, _) = looker.seen[0], reference.seen[0]
        assert value.dtype is torch.float32 and close(theirs, value + 0) and mean == pytest.approx(their_mean, abs=0.05)
        assert torch.equal(torch.from_numpy(array), value.clone())
        if when != "before":
            assert type(value) is torch.Tensor and not value.__dict__ and torch.equal(got, unseen)
            assert close(unseen, dbrq.lower(converted, BATCH)(BATCH))


def test_a_root_hook_that_makes_the_input():
    """forward never sees what the caller passes."""
    model = small_net()
    model.register_forward_pre_hook(lambda m, args: (args[0].float() / 64 - 2,))
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    converted = dbrq.quantize(model, [images])
    assert close(model(images), converted(images)) and dbrq.report(converted).coverage == 1.0
    assert close(model(images), dbrq.lower(converted, images)(images))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@recipes
def test_backward_hooks(mapping):
    seen: list = []
    model = small_net().train()
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append("conv"))
    model[7].register_full_backward_pre_hook(lambda m, go: seen.append("last"))
    prepared = dbrq.prepare(model, BATCH, mapping)
    prepared[5].register_full_backward_hook(lambda m, gi, go: seen.append("linear"))
    kept: list = []
    handle = prepared[2].register_forward_hook(lambda m, args, out: kept.append(out) or out.retain_grad())
    prepared(BATCH).sum().backward()
    assert seen == ["last", "linear", "conv"] and kept[0].grad.abs().sum() > 0
    handle.remove()
    converted = dbrq.convert(prepared)
    assert torch.equal(converted(BATCH), converted(BATCH)) and seen == ["last", "linear", "conv"]


def test_global_hooks():
    """One that computes with values must be there from prepare on, since its ops are recorded; one that does not may
    come and go.
    """
    model, expected = small_net(), small_net()(BATCH)
    converted = convert(model, BATCH).quantized
    calls: list = []
    handle = torch_module.register_module_forward_hook(lambda m, args, out: calls.append(getattr(out, "shape", None)))
    try:
        assert close(expected, converted(BATCH)) and len(calls) == 1 + len(model)
    finally:
        handle.remove()
    handle = torch_module.register_module_forward_hook(lambda m, args, out: calls.append(out.mean().item()))
    try:
        with pytest.warns(UserWarning, match="dbrq: mean runs in float"):
            assert close(expected, converted(BATCH))
        assert close(expected, dbrq.quantize(model, [BATCH])(BATCH))
    finally:
        handle.remove()
    assert close(expected, converted(BATCH))
