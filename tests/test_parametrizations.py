"""Parametrizations train, and are baked at conversion."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.running import convert, quantized_on, run
from tests.helpers.training import BATCH, V, close, recipes, small_net

Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def test_a_leaf_whose_bias_is_parametrized():
    class Doubled(nn.Module):
        def forward(self, bias):
            return 2 * bias

    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.utils.parametrize.register_parametrization(model[0], "bias", Doubled())
    assert sqnr(run(model.eval(), Z), run(quantized_on(model, Z), Z)) > 25


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
    model = small_net()
    change(model)
    model.train()(BATCH)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    prepared = dbrq.prepare(model.eval(), BATCH, mapping)
    assert prepared.state_dict().keys() >= before.keys()
    prepared.train()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(2):
        prepared(BATCH).square().mean().backward()
        assert all(p.grad is not None for p in prepared.parameters())
        optimizer.step()
        optimizer.zero_grad()
    expected = prepared.eval()(BATCH)
    converted = dbrq.convert(prepared)
    assert dbrq.report(converted).coverage == 1.0 and close(expected, converted(BATCH))
    assert type(converted[0]) is nn.Conv2d and not any("param" in k or "orig" in k for k in converted.state_dict())
    dbrq.save(converted, tmp_path / "model")
    for other in (copy.deepcopy(converted), dbrq.load(tmp_path / "model")):
        assert torch.equal(other(BATCH), converted(BATCH))
    assert close(expected, dbrq.lower(converted, BATCH)(BATCH))
    model.eval()(BATCH)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model is as it was"
    assert prepared(BATCH).requires_grad, "and so is the prepared one"


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
    model = small_net()
    parametrizations.weight_norm(model[5])
    converted = dbrq.quantize(model, [BATCH], dbrq.default_qconfig_mapping().set_object_type(nn.Linear, None))
    assert {r.precision for r in dbrq.report(converted).rows if r.op == "linear"} == {"float"}
