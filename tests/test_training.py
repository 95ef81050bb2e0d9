"""What of torch's machinery around a model works with prepared, converted and lowered ones, and what says that it does
not: casts and moves, training, gradients, torch.compile, inference mode, autocast, hooks and parametrizations.
"""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig, disable_observer, get_default_qat_qconfig_mapping
from torch.nn.modules import module as torch_module
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers import Call, convert, sqnr

MAPPINGS = {"observed": None, "fake quantized": get_default_qat_qconfig_mapping("onednn")}
recipes = pytest.mark.parametrize("mapping", list(MAPPINGS.values()), ids=list(MAPPINGS))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    features = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(288, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
V = torch.randn(5, 8, generator=torch.Generator().manual_seed(6))


def prepared_net(mapping=None) -> nn.Sequential:
    return dbrq.prepare(net().train(), X, mapping)


def converted_net() -> nn.Sequential:
    return convert(net(), X).quantized


def close(expected, got, decibels: float = 30) -> bool:
    return sqnr(expected.detach().float(), got.detach().float()) > decibels


# Prepared models


@recipes
def test_training_a_prepared_model(mapping):
    prepared = prepared_net(mapping)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.02)
    wrapped = nn.DataParallel(prepared)  # without CUDA it calls its module
    losses = []
    for _ in range(5):
        torch.manual_seed(0)
        loss = wrapped(X).square().mean()
        loss.backward()
        clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        prepared.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in prepared.parameters())
    assert not X.__dict__, "nothing is left on the user's batch"
    converted = dbrq.convert(prepared)
    assert close(prepared.eval()(X), converted(X)) and dbrq.report(converted).coverage == 1.0


@recipes
def test_modes_reach_dropout_and_batch_norm(mapping):
    prepared = prepared_net(mapping)
    seen: list = []
    prepared[3].register_forward_hook(lambda m, args, out: seen.append((out == 0).float().mean().item()))
    mean = prepared[1].running_mean.clone()
    prepared(X)
    assert not torch.equal(prepared[1].running_mean, mean)
    prepared.eval()
    mean = prepared[1].running_mean.clone()
    prepared(X)
    assert torch.equal(prepared[1].running_mean, mean)
    assert seen[0] > 0.6 > seen[1], "half of what relu left is dropped in training"


@recipes
def test_requires_grad(mapping):
    prepared = prepared_net(mapping)
    assert prepared.requires_grad_(False) is prepared and not prepared(X).requires_grad
    prepared.requires_grad_()
    x = X.clone().requires_grad_()
    for _ in range(2):  # the same batch again: nothing of the first graph is left on it
        prepared(x).square().sum().backward()
    assert x.grad.abs().sum() > 0 and all(p.grad is not None for p in prepared.parameters())


@recipes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_prepared_model_follows_casts_and_its_ranges_stay(mapping, dtype):
    prepared = prepared_net(mapping).eval()
    prepared(X)
    expected = prepared(X)
    before = {k: v.clone() for k, v in state_of(prepared).state_dict().items()}
    prepared.to(dtype)
    for key, value in state_of(prepared).state_dict().items():
        assert value.dtype is before[key].dtype and torch.equal(value, before[key]), key
    cast = prepared(X.to(dtype))
    assert cast.dtype is dtype and close(expected, cast)
    cast.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype is dtype for p in prepared.parameters())
    with pytest.raises(dbrq.ConfigurationError, match=r"float\(\)"):
        dbrq.convert(prepared)
    assert cast.dtype is prepared(X.to(dtype)).dtype
    assert close(expected, dbrq.convert(prepared.float())(X))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole_module", [True, False])
def test_gradient_checkpointing(reentrant, whole_module):
    """Right where nothing rounds; where fake quantize does, the second forward would not, so it is refused."""

    def forward(m, x):
        part = m.block if whole_module else lambda h: m.block(h).tanh()
        return m.last(checkpoint(part, m.first(x), use_reentrant=reentrant))

    def model():
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        return Call(forward, first=nn.Linear(8, 8), block=block, last=nn.Linear(8, 2)).train()

    plain, prepared = model(), dbrq.prepare(model(), V)
    for m in (plain, prepared):
        m(V).square().sum().backward()
    for ours, theirs in zip(prepared.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    rounding = dbrq.prepare(model(), V, MAPPINGS["fake quantized"])
    with pytest.raises(dbrq.QuantizationError, match="checkpoint"):
        rounding(V)
    with torch.no_grad():
        rounding(V)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_a_whole_model(reentrant):
    """Its second forward is a run as the first was."""
    prepared = prepared_net(MAPPINGS["fake quantized"]).eval()
    prepared(X)
    prepared.apply(disable_observer)
    gradients = []
    for run in (prepared, functools.partial(checkpoint, prepared, use_reentrant=reentrant)):
        prepared.zero_grad()
        run(X.clone().requires_grad_()).square().sum().backward()
        gradients.append([p.grad for p in prepared.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@recipes
def test_averaged_copies(mapping):
    prepared = prepared_net(mapping)
    prepared(X)  # fake quantize takes its shape from what it sees first
    averages = (
        AveragedModel(prepared),
        AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    )
    for _ in range(2):
        for average in averages:
            average.update_parameters(prepared)
        prepared(X)
    update_bn([X, X], prepared)
    for average in averages:
        model = average.module.eval()
        assert close(model(X), dbrq.convert(model)(X))


@recipes
def test_checkpoints(mapping, tmp_path):
    prepared, other = prepared_net(mapping), prepared_net(mapping)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.mul_(1.1)
    prepared(X)
    torch.save({"model": prepared.state_dict()}, tmp_path / "checkpoint.pt")
    other.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["model"])
    assert torch.equal(dbrq.convert(prepared)(X), dbrq.convert(other)(X))


# Converted and lowered models

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
    expected, state = model(X), {k: v.clone() for k, v in model.state_dict().items()}
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
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("change", list(FINE.values()), ids=list(FINE))
def test_a_converted_model_takes_what_changes_nothing(change):
    model = converted_net()
    expected = model(X)
    assert change(model) is model
    assert close(expected, model(X), 60)
    assert not any(m.training for m in model.modules()), "it stays in eval mode"


def test_a_converted_model_inside_one_that_trains():
    inner = converted_net()
    expected = inner(X)
    outer = nn.Sequential(inner, nn.Linear(4, 2)).train()
    assert outer.training and not inner.training and not inner[3].training
    inner[3].train()
    outer(X).square().sum().backward()
    assert outer[1].weight.grad is not None and torch.equal(inner(X), expected)
    assert not inner(X).requires_grad, "nothing is added where nobody asks for gradients"


def _containers(m, x, more):
    y = m.linear(x)
    return {"y": y, "more": [y.relu(), more["n"]], "x": more["x"]}


def test_backward_through_a_converted_model():
    model = converted_net()
    x = X.clone().requires_grad_()
    expected = model(X)
    for run in (model, nn.Sequential(nn.Identity(), model), lambda x: checkpoint(model, x, use_reentrant=False)):
        y = run(x)
        assert torch.equal(y, expected) and y.requires_grad
        with pytest.raises(dbrq.QuantizationError, match="no gradient"):
            y.sum().backward()
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        model.requires_grad_()
    assert x.grad is None and torch.equal(model(X), expected)
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
    model = dbrq.lower(converted_net() if quantized else net(), X, backend="onednn")
    expected = model(X)
    for change in REFUSED.values():
        with pytest.raises(dbrq.ConfigurationError):
            change(model)
        assert torch.equal(model(X), expected)
    for change in FINE.values():
        assert change(model) is model
        assert torch.equal(model(X), expected)
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        model(X.clone().requires_grad_()).sum().backward()


def test_lowered_to_torchscript():
    """A ScriptModule is torch's own: a cast is not refused, but what is lowered is none of its parameters."""
    model = dbrq.lower(converted_net(), X)
    expected = model(X)
    for cast in (torch.nn.Module.half, torch.nn.Module.double):
        assert torch.equal(cast(model)(X), expected)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(X.clone().requires_grad_()).sum().backward()


# torch.compile


@pytest.mark.parametrize("where", ["root", "root in place", "child", "child in place", "prepared", "converted"])
def test_compiled(where, tmp_path):
    """dbrq takes the wrapper off; a prepared or converted model that is compiled runs as it does otherwise."""
    torch._dynamo.reset()
    model, expected = net(), net()(X)
    compiled = functools.partial(torch.compile, backend="eager")
    if where == "root":
        model = compiled(model)
    elif where == "child":
        model[0] = compiled(model[0], fullgraph=True)
    elif where.endswith("in place"):
        (model if "root" in where else model[0]).compile(backend="eager", fullgraph=True)
    prepared = dbrq.prepare(model, X)
    assert type(prepared) is nn.Sequential and type(prepared[0]) is nn.Conv2d
    if where == "prepared":
        prepared = compiled(prepared)
    dbrq.calibrate(prepared, [X])
    converted = dbrq.convert(prepared)
    eager = converted(X)
    again = compiled(converted) if where == "converted" else converted
    with torch.no_grad():
        assert torch.equal(again(X), eager) and torch.equal(again(X[:2]), converted(X[:2]))
    converted.compile(backend="eager")
    assert torch.equal(converted(X), eager)
    assert close(expected, eager) and dbrq.report(again).coverage == 1.0
    assert close(expected, dbrq.lower(again, X)(X)) and dbrq.compare(model, again, X).rows
    dbrq.save(again, tmp_path / "model")
    assert torch.equal(dbrq.load(tmp_path / "model")(X), eager)


def test_a_prepared_model_is_not_prepared_again_through_a_wrapper():
    with pytest.raises(dbrq.ConfigurationError, match="already"):
        dbrq.prepare(torch.compile(dbrq.prepare(net(), X), backend="eager"), X)


# Inference mode and autocast

#: Around prepare, calibration, conversion, inference: none, each alone, all.
MODES = [(False,) * 4, *(tuple(i == j for i in range(4)) for j in range(4)), (True,) * 4]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode(modes, made_inside):
    inside = [torch.inference_mode if mode else nullcontext for mode in modes]
    with torch.inference_mode() if made_inside else nullcontext():
        model, x = net(), X.clone()
        expected = model(x)
    with inside[0]():
        prepared = dbrq.prepare(model, x)
    assert not any(t.is_inference() for t in prepared.state_dict().values())
    with torch.no_grad(), inside[1]():
        prepared(x)
    dbrq.calibrate(prepared, [x * 0.5])
    with torch.inference_mode():
        prepared(x * 0.7)
    with inside[2]():
        converted = dbrq.convert(prepared)
    with torch.no_grad():
        outside = converted(x)
    with inside[3]():
        assert torch.equal(converted(x), outside) and close(expected.clone(), outside)
        lowered = dbrq.lower(converted, x)
        assert close(expected.clone(), lowered(x))
    assert torch.equal(dbrq.convert(copy.deepcopy(prepared))(X), outside)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return self.c(torch.softmax(h @ h.mT, -1) @ self.b(x))


class Inside(Attention):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = F.gelu(self.a(x))
        return self.c(self.b(h.float()))


def narrowed():
    return torch.autocast("cpu", torch.bfloat16)


@recipes
@pytest.mark.parametrize("modes", MODES)
def test_autocast_around(mapping, modes):
    """It does not reach in: what dtypes ops take was recorded without it."""
    inside = [narrowed if mode else nullcontext for mode in modes]
    torch.manual_seed(0)
    model = Attention()
    with inside[0]():
        prepared = dbrq.prepare(model.train(), V, mapping)
    with inside[1]():
        out = prepared(V)
        out.square().sum().backward()
    assert out.dtype is torch.float32 and close(model(V), out, 20)
    with inside[2]():
        converted = dbrq.convert(prepared)
    with inside[3]():
        assert converted(V).dtype is torch.float32 and close(model(V).float(), converted(V), 20)
        for backend in ("torchscript", "onednn"):
            assert close(model(V).float(), dbrq.lower(converted, V, backend=backend)(V), 20)
    assert dbrq.report(converted).coverage == 1.0


@recipes
def test_autocast_inside(mapping):
    torch.manual_seed(0)
    model = Inside()
    prepared = dbrq.prepare(model, V, mapping)
    prepared(V).sum().backward()
    converted = dbrq.convert(prepared)
    assert close(model(V), converted(V), 20)
    with narrowed():
        assert close(model(V).float(), converted(V).float(), 20)
    with pytest.raises(dbrq.RewriteError, match="autocast"):
        dbrq.lower(converted, V)


# Hooks


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
    converted = convert(model, X).quantized
    with torch.no_grad():
        assert close(model(X), converted(X)) and dbrq.report(converted).coverage == 1.0
        assert close(model(X), dbrq.lower(converted, X)(X)), "those of the root too"


@pytest.mark.parametrize("where", ["conv", "act", "seq", ""])
@changing
@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_hooks_that_come_later_may_not_change_values(where, register, phase):
    result = convert(Block(), X)
    model = getattr(result, phase)
    with torch.no_grad():
        expected = model(X)
        handle = register(model.get_submodule(where))
        if where:
            with pytest.raises(dbrq.ConfigurationError, match="before prepare") as caught:
                model(X)
            assert caught.value.path == where
        else:  # outside of the model's own run
            assert not torch.equal(model(X), expected)
            if phase == "quantized":
                assert torch.equal(dbrq.rewrite(model, X)(X), dbrq.rewrite(model, X)(X))
                assert close(model(X), dbrq.lower(model, X)(X))
        handle.remove()
        assert torch.equal(model(X), expected)


@places
@pytest.mark.parametrize("when", ["before", "prepared", "converted"])
def test_hooks_that_look(where, when):
    model, looker, reference = Block().eval(), Looker(), Looker()
    plain = copy.deepcopy(model)
    plain.get_submodule(where).register_forward_hook(reference)
    with torch.no_grad():
        plain(X)
        unseen = convert(model, X).quantized(X)
        handle = model.get_submodule(where).register_forward_hook(looker) if when == "before" else None
        prepared = dbrq.prepare(model, X)
        handle = handle or (prepared.get_submodule(where).register_forward_hook(looker) if when == "prepared" else None)
        prepared(X)
        converted = dbrq.convert(prepared)
        handle = handle or converted.get_submodule(where).register_forward_hook(looker)
        looker.seen.clear()
        got = converted(X)
        assert len(looker.seen) == 1 and close(plain(X), got)
        (value, mean, array), (theirs, their_mean, _) = looker.seen[0], reference.seen[0]
        assert value.dtype is torch.float32 and close(theirs, value + 0) and mean == pytest.approx(their_mean, abs=0.05)
        assert torch.equal(torch.from_numpy(array), value.clone())
        if when != "before":
            assert type(value) is torch.Tensor and not value.__dict__ and torch.equal(got, unseen)
            assert close(unseen, dbrq.lower(converted, X)(X))


def test_a_root_hook_that_makes_the_input():
    """forward never sees what the caller passes."""
    model = net()
    model.register_forward_pre_hook(lambda m, args: (args[0].float() / 64 - 2,))
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    converted = dbrq.quantize(model, [images])
    assert close(model(images), converted(images)) and dbrq.report(converted).coverage == 1.0
    assert close(model(images), dbrq.lower(converted, images)(images))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@recipes
def test_backward_hooks(mapping):
    seen: list = []
    model = net().train()
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append("conv"))
    model[7].register_full_backward_pre_hook(lambda m, go: seen.append("last"))
    prepared = dbrq.prepare(model, X, mapping)
    prepared[5].register_full_backward_hook(lambda m, gi, go: seen.append("linear"))
    kept: list = []
    handle = prepared[2].register_forward_hook(lambda m, args, out: kept.append(out) or out.retain_grad())
    prepared(X).sum().backward()
    assert seen == ["last", "linear", "conv"] and kept[0].grad.abs().sum() > 0
    handle.remove()
    converted = dbrq.convert(prepared)
    assert torch.equal(converted(X), converted(X)) and seen == ["last", "linear", "conv"]


def test_global_hooks():
    """One that computes with values must be there from prepare on, since its ops are recorded; one that does not may
    come and go.
    """
    model, expected = net(), net()(X)
    converted = convert(model, X).quantized
    calls: list = []
    handle = torch_module.register_module_forward_hook(lambda m, args, out: calls.append(getattr(out, "shape", None)))
    try:
        assert close(expected, converted(X)) and len(calls) == 1 + len(model)
    finally:
        handle.remove()
    handle = torch_module.register_module_forward_hook(lambda m, args, out: calls.append(out.mean().item()))
    try:
        with pytest.warns(UserWarning, match="dbrq: mean runs in float"):
            assert close(expected, converted(X))
        assert close(expected, dbrq.quantize(model, [X])(X))
    finally:
        handle.remove()
    assert close(expected, converted(X))


# Parametrizations


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def both(change):
    return lambda m: [change(m[0]), change(m[5])]


PARAMETRIZED = {
    "weight_norm": both(parametrizations.weight_norm),
    "spectral_norm": both(parametrizations.spectral_norm),
    "orthogonal": lambda m: parametrizations.orthogonal(m[5]),
    "of one's own": both(lambda layer: parametrize.register_parametrization(layer, "weight", Halved())),
    "of a bias": both(lambda layer: parametrize.register_parametrization(layer, "bias", Halved())),
    "of a batch norm": lambda m: parametrize.register_parametrization(m[1], "weight", Halved()),
    "two": both(
        lambda layer: [
            parametrizations.weight_norm(layer),
            parametrize.register_parametrization(layer, "bias", Halved()),
        ]
    ),
    "pruned": both(lambda layer: prune.l1_unstructured(layer, "weight", 0.4)),
    "pruned twice": both(
        lambda layer: [prune.l1_unstructured(layer, n, 0.3) for n in ("weight", "bias", "weight")]
    ),
    "pruned in rows": both(lambda layer: prune.ln_structured(layer, "weight", 0.4, n=2, dim=0)),
    "old weight_norm": both(old_weight_norm),
    "old spectral_norm": both(old_spectral_norm),
}  # fmt: skip


@recipes
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("change", list(PARAMETRIZED.values()), ids=list(PARAMETRIZED))
def test_parametrizations_train_and_are_baked_at_conversion(mapping, change, tmp_path):
    model = net()
    change(model)
    model.train()(X)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    prepared = dbrq.prepare(model.eval(), X, mapping)
    assert prepared.state_dict().keys() >= before.keys()
    prepared.train()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(2):
        prepared(X).square().mean().backward()
        assert all(p.grad is not None for p in prepared.parameters())
        optimizer.step()
        optimizer.zero_grad()
    expected = prepared.eval()(X)
    converted = dbrq.convert(prepared)
    assert dbrq.report(converted).coverage == 1.0 and close(expected, converted(X))
    assert type(converted[0]) is nn.Conv2d and not any("param" in k or "orig" in k for k in converted.state_dict())
    dbrq.save(converted, tmp_path / "model")
    for other in (copy.deepcopy(converted), dbrq.load(tmp_path / "model")):
        assert torch.equal(other(X), converted(X))
    assert close(expected, dbrq.lower(converted, X)(X))
    model.eval()(X)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model is as it was"
    assert prepared(X).requires_grad, "and so is the prepared one"


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)
        parametrize.register_parametrization(self, "weight", Symmetric())

    def forward(self, x):
        return self.last(F.linear(x, self.weight).relu())


def _parametrized(module, name):
    parametrizations.weight_norm(module, name)
    return module.eval()


WHOLE = {
    "a parameter of one's own": (lambda: Own().eval(), (V,), None),
    "attention": (lambda: _parametrized(nn.MultiheadAttention(8, 2), "in_proj_weight"), (V, V, V), None),
    "lstm": (
        lambda: _parametrized(nn.LSTM(8, 8), "weight_hh_l0"),
        (V,),
        dbrq.default_qconfig_mapping().set_object_type(nn.LSTM, default_dynamic_qconfig),
    ),
}


@pytest.mark.parametrize("make, inputs, mapping", list(WHOLE.values()), ids=list(WHOLE))
def test_parametrizations_of_what_is_no_layer(make, inputs, mapping):
    model = make()
    converted = convert(model, inputs, mapping).quantized
    expected, got = model(*inputs), converted(*inputs)
    expected, got = (out[0] if isinstance(out, tuple) else out for out in (expected, got))
    assert close(expected, got) and {
        r.precision for r in dbrq.report(converted).rows if r.op in ("linear", "lstm")
    } == {"int8"}
    assert parametrize.is_parametrized(model) and not parametrize.is_parametrized(converted)


def test_a_mapping_names_a_parametrized_layer_by_its_class():
    model = net()
    parametrizations.weight_norm(model[5])
    converted = dbrq.quantize(model, [X], dbrq.default_qconfig_mapping().set_object_type(nn.Linear, None))
    assert {r.precision for r in dbrq.report(converted).rows if r.op == "linear"} == {"float"}
