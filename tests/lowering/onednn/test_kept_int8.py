"""Embedding tables and weights of recurrent layers stay int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dbrq
from dbrq.lowering.onednn.values import PrimitiveStep
from tests.helpers.cases import made
from tests.helpers.models import Call
from tests.helpers.onednn import assert_agrees, lower
from tests.helpers.patterns import DYNAMIC, SHARED
from tests.helpers.running import convert, run


def weights_of(name: str, out: str) -> tuple[nn.Module, Any, Any]:
    case = SHARED[name]
    model, x = made(case, out)
    return model, x, convert(model, x, case.mapping).quantized


@pytest.mark.parametrize("name", [n for n in SHARED if "embedding" in n])
def test_embedding_tables_stay_int8(name):
    _, x, quantized = weights_of(name, "float")
    lowered = lower(quantized, x)
    tables = [t for t in lowered.state_dict().values() if t.numel() == 40 * 16]
    assert tables and all(t.dtype in (torch.uint8, torch.int8) for t in tables)
    for runner in dbrq.lowered_form(lowered).plans:
        assert not any(
            b.tensor is not None and b.tensor.is_floating_point() and b.tensor.numel() == 640
            for step in runner.plan.steps
            for b in buffers_of(step)
        )


def buffers_of(step: Any) -> list[Any]:
    return [p.buffer for p in step.places.values()] if isinstance(step, PrimitiveStep) else []


RECURRENT = {
    "LSTM": lambda: nn.LSTM(16, 12),
    "two layers, both ways": lambda: nn.LSTM(16, 12, 2, bidirectional=True),
    "batch first": lambda: nn.LSTM(16, 12, batch_first=True),
    "no bias": lambda: nn.LSTM(16, 12, bias=False),
    "GRU": lambda: nn.GRU(16, 12),
    "LSTMCell": lambda: Call(lambda m, x: m.cell(x[0]), cell=nn.LSTMCell(16, 12)),
}


@pytest.mark.parametrize("mapping", ["default", "dynamic"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name, mapping):
    x = torch.randn(5, 3, 16)
    model = Call(
        lambda m, x: m.head(m.lstm(x)[0]), lstm=RECURRENT[name](), head=nn.Linear(24 if "both" in name else 12, 4)
    ).eval()
    quantized = convert(model, x, DYNAMIC if mapping == "dynamic" else None).quantized
    lowered = lower(quantized, x)
    for given in (x, torch.randn(5, 3, 16), torch.randn(5, 1, 16)):
        assert_agrees(run(lowered, given), run(dbrq.rewrite(quantized, x), given), "the graph", exact=5e-3, most=0.02)
