"""Weights that forward changes stay float, and the user's model keeps its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import rows, sqnr
from tests.helpers.written import Layers, batches, calibrated


def halved_buffer(m: Layers, x: Tensor) -> Tensor:
    y = F.linear(F.relu(m.a(x)), m.fast)
    m.fast.mul_(0.5)
    return y


def assigned_buffer(m: Layers, x: Tensor) -> Tensor:
    y = F.linear(F.relu(m.a(x)), m.fast)
    m.fast = m.fast * 0.5
    return y


def halved_weight(m: Layers, x: Tensor) -> Tensor:
    y = m.b(F.relu(m.a(x)))
    with torch.no_grad():
        m.b.weight.mul_(0.5)
        m.b.bias.mul_(0.5)
    return y


def renormed_weight(m: Layers, x: Tensor) -> Tensor:
    m.b.weight.data = torch.renorm(m.b.weight.data, 2, 0, 0.9 * float(m.b.weight.data.norm(dim=1).max()))
    return m.b(F.relu(m.a(x)))


@pytest.mark.parametrize("code", [halved_buffer, assigned_buffer, halved_weight, renormed_weight])
def test_weights_that_forward_changes_stay_float(code: Callable) -> None:
    model = Layers(code).eval()
    model.register_buffer("fast", torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))
    before = copy.deepcopy(model.state_dict())
    x = batches()[0]
    converted = calibrated(model, [x])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.load_state_dict(
        {name: getattr(converted.get_submodule(path), leaf).detach().clone() if name in ("fast", "b.weight", "b.bias")
         else before[name] for name in before for path, _, leaf in [name.rpartition(".")]}
    )  # fmt: skip
    with torch.no_grad():
        for _ in range(4):
            assert sqnr(model(x), converted(x)) > 28
    reasons = [row.reason for row in rows(converted, "linear") if row.precision == "float"]
    assert reasons == ["its weight is computed in forward, or is no parameter of the model"] or reasons == [
        "forward changes its weight"
    ]


@pytest.mark.parametrize("embedding", [nn.Embedding(20, 16, max_norm=0.5), nn.EmbeddingBag(20, 16, max_norm=0.5)])
def test_prepare_leaves_a_table_with_max_norm_as_it_is(embedding: nn.Module) -> None:
    model = nn.Sequential(embedding, nn.Linear(16, 4)).eval()
    before = copy.deepcopy(model.state_dict())
    dbrq.prepare(model, torch.arange(20).reshape(4, 5))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
