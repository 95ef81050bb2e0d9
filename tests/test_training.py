"""What trains a prepared model: modes, casts, checkpointing, averaged copies."""

import functools

import pytest
import torch
from torch import nn
from torch.ao.quantization import disable_observer
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers.models import Call
from tests.helpers.training import BATCH, MAPPINGS, V, close, prepared_net, recipes


@recipes
def test_training_a_prepared_model(mapping):
    prepared = prepared_net(mapping)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.02)
    wrapped = nn.DataParallel(prepared)  # without CUDA it calls its module
    losses = []
    for _ in range(5):
        torch.manual_seed(0)
        loss = wrapped(BATCH).square().mean()
        loss.backward()
        clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        prepared.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in prepared.parameters())
    assert not BATCH.__dict__, "nothing is left on the user's batch"
    converted = dbrq.convert(prepared)
    assert close(prepared.eval()(BATCH), converted(BATCH)) and dbrq.report(converted).coverage == 1.0


@recipes
def test_modes_reach_dropout_and_batch_norm(mapping):
    prepared = prepared_net(mapping)
    seen: list = []
    prepared[3].register_forward_hook(lambda m, args, out: seen.append((out == 0).float().mean().item()))
    mean = prepared[1].running_mean.clone()
    prepared(BATCH)
    assert not torch.equal(prepared[1].running_mean, mean)
    prepared.eval()
    mean = prepared[1].running_mean.clone()
    prepared(BATCH)
    assert torch.equal(prepared[1].running_mean, mean)
    assert seen[0] > 0.6 > seen[1], "half of what relu left is dropped in training"


@recipes
def test_requires_grad(mapping):
    prepared = prepared_net(mapping)
    assert prepared.requires_grad_(False) is prepared and not prepared(BATCH).requires_grad
    prepared.requires_grad_()
    x = BATCH.clone().requires_grad_()
    for _ in range(2):  # the same batch again: nothing of the first graph is left on it
        prepared(x).square().sum().backward()
    assert x.grad.abs().sum() > 0 and all(p.grad is not None for p in prepared.parameters())


@recipes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_prepared_model_follows_casts_and_its_ranges_stay(mapping, dtype):
    prepared = prepared_net(mapping).eval()
    prepared(BATCH)
    expected = prepared(BATCH)
    before = {k: v.clone() for k, v in state_of(prepared).state_dict().items()}
    prepared.to(dtype)
    for key, value in state_of(prepared).state_dict().items():
        assert value.dtype is before[key].dtype and torch.equal(value, before[key]), key
    cast = prepared(BATCH.to(dtype))
    assert cast.dtype is dtype and close(expected, cast)
    cast.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype is dtype for p in prepared.parameters())
    with pytest.raises(dbrq.ConfigurationError, match=r"float\(\)"):
        dbrq.convert(prepared)
    assert cast.dtype is prepared(BATCH.to(dtype)).dtype
    assert close(expected, dbrq.convert(prepared.float())(BATCH))


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
    prepared(BATCH)
    prepared.apply(disable_observer)
    gradients = []
    for run in (prepared, functools.partial(checkpoint, prepared, use_reentrant=reentrant)):
        prepared.zero_grad()
        run(BATCH.clone().requires_grad_()).square().sum().backward()
        gradients.append([p.grad for p in prepared.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@recipes
def test_averaged_copies(mapping):
    prepared = prepared_net(mapping)
    prepared(BATCH)  # fake quantize takes its shape from what it sees first
    averages = (
        AveragedModel(prepared),
        AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    )
    for _ in range(2):
        for average in averages:
            average.update_parameters(prepared)
        prepared(BATCH)
    update_bn([BATCH, BATCH], prepared)
    for average in averages:
        model = average.module.eval()
        assert close(model(BATCH), dbrq.convert(model)(BATCH))


@recipes
def test_checkpoints(mapping, tmp_path):
    prepared, other = prepared_net(mapping), prepared_net(mapping)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.mul_(1.1)
    prepared(BATCH)
    torch.save({"model": prepared.state_dict()}, tmp_path / "checkpoint.pt")
    other.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["model"])
    assert torch.equal(dbrq.convert(prepared)(BATCH), dbrq.convert(other)(BATCH))
