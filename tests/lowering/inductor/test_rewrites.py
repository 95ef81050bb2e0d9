"""What torch 2.13 does to graphs that are not rewritten first. When one of these fails, its rewrite can go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig

import dbrq
from dbrq.lowering import inductor
from dbrq.lowering.engine import Lowering
from tests.helpers.inductor import assert_same, lowered
from tests.helpers.int8_patterns import Chain, conv
from tests.helpers.judging import sqnr
from tests.helpers.running import has_compiler, run

if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)


def unprepared(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> Any:
    monkeypatch.setattr(inductor, "prepare", lambda lowering: None)
    return lowered(dbrq.quantize(model.eval(), [x]), x)


class Pools(nn.Module):
    """Pools 9x9 to 5x5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(self.first(x), 2, ceil_mode=True))


def test_pools_that_round_up(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9, 9)
    with pytest.raises((RuntimeError, AssertionError)):
        assert unprepared(monkeypatch, Pools(), x)(x).shape == (2, 16, 5, 5)
    monkeypatch.undo()
    quantized = dbrq.quantize(Pools().eval(), [x])
    assert_same(lowered(quantized, x), quantized, x)


def test_convolutions_over_lengths_take_few_activations(monkeypatch):
    with pytest.raises(RuntimeError, match="hardswish"):
        unprepared(monkeypatch, Chain(conv(1), F.hardswish, conv(1)), torch.randn(2, 16, 9))


def test_rewrites_are_logged_and_change_no_number():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9)
    graph = dbrq.rewrite(dbrq.quantize(Chain(conv(1), F.hardswish, conv(1)).eval(), [x]), x)
    expected = graph(x)
    lowering = Lowering(graph)
    inductor.prepare(lowering)
    graph.recompile()
    assert [entry.rewrite for entry in lowering.entries] == ["conv1d_activation_quantize", "conv1d"]
    assert sqnr(expected, graph(x)) > 60


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.LogSigmoid(), nn.ReLU()])
def test_a_range_that_is_found_at_run_time_has_zero(act):
    """Inductor's own qparams leave zero out, and with it all beyond the span of the values."""
    model = nn.Sequential(nn.Linear(3, 8), act, nn.Linear(8, 8)).eval()
    x = torch.randn(4, 3)
    quantized = dbrq.quantize(model, [x], QConfigMapping().set_global(default_dynamic_qconfig))
    lowered = dbrq.lower(quantized, x, backend="inductor")
    for given in (x, x[:2] * 3):
        assert sqnr(run(quantized, given), run(lowered, given)) > 60
