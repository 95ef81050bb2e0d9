"""Decisions about long chains of ops: found without recursion, each value looked at a few times however they branch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers.images import small_images
from tests.helpers.judging import assert_matches, assert_precision, sqnr
from tests.helpers.models import Between, Call
from tests.helpers.running import convert, run


class Chain(nn.Module):
    """``count`` rounds of ops around linear layers."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        self.kind, self.count = kind, count
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "before the first layer":
            for _ in range(self.count):
                x = x * x + x
            return self.last(x)
        x = self.first(x)
        if self.kind == "behind a float op":
            x = torch.sin(x)
        for _ in range(self.count):
            x = x.transpose(1, 2) if self.kind == "views" else x * 0.999 + 0.001
        return self.last(x)


@pytest.mark.parametrize("kind", ["before the first layer", "behind a float op", "views", "between layers"])
def test_two_thousand_ops_in_a_row(kind):
    """``x * x + x`` doubled the time of each round, and 250 views met Python's limit of recursion."""
    model, x = Chain(kind, 1000), -torch.rand(2, 4, 4)
    prepared = dbrq.prepare(model.eval(), x)
    decisions = [op.decision.precision for op in prepared._auto_quant_state.ops() if op.row.takes_weight]
    assert set(decisions) == {"int8"}


@pytest.mark.parametrize("kind", ["before the first layer", "behind a float op", "views", "between layers"])
def test_a_long_chain_is_decided_on_as_a_short_one(kind):
    x = -torch.rand(2, 4, 4)
    short, long = (convert(Chain(kind, count), x).quantized for count in (3, 60))
    ops = ({op.op: op.decision.precision for op in m._auto_quant_state.ops()} for m in (short, long))
    assert next(ops) == next(ops)
    reasons = ({row.reason for row in dbrq.report(m).rows} for m in (short, long))
    assert next(reasons) == next(reasons)


def test_two_ops_that_read_each_other_on_different_paths():
    """Values of all paths together may form a circle; looking for who made them went round for ever."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, swap: bool) -> torch.Tensor:
            for step in (1, 0) if swap else (0, 1):
                x = x + 1.0 if step else x * 2.0
            return self.layer(x)

    model, x = Either().eval(), torch.rand(8, 4)
    prepared = dbrq.prepare(model, (x, False))
    for swap in (False, True):
        run(prepared, (x, swap))
    converted = dbrq.convert(prepared)
    for swap in (False, True):
        assert sqnr(run(model, (x, swap)), run(converted, (x, swap))) > 30


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_integers_among_what_cat_joins(backend):
    """They were counted among the values that it reads as int8, so that the next one was taken for another."""
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(18, 4)}
    model = Call(lambda m, x, i: m.c(torch.cat([m.a(x), i, m.b(x)], 1)), **layers).eval()
    inputs = torch.randn(4, 8), torch.randint(0, 3, (4, 2))
    quantized = dbrq.quantize(model, [inputs], progress=False)
    with torch.no_grad():
        assert sqnr(model(*inputs), quantized(*inputs)) > 25
        assert sqnr(model(*inputs), dbrq.lower(quantized, inputs, backend=backend)(*inputs)) > 25


def qparams(model: nn.Module) -> dict:
    token = state_of(model).token
    return {key: state.qparams(key) for state in token.states.values() for key in state.slots}


def recorded(model: nn.Module, name: str) -> list:
    return [op for op in state_of(model).token.record.ops if op.op == name]


# Sharing


NINE = [
    lambda x: F.max_pool2d(x, 2, 1),
    lambda x: x.transpose(2, 3),
    lambda x: torch.cat([x, x], 1),
    lambda x: x.flatten(2),
    lambda x: x.unflatten(2, (7, 7)),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: x[:, ::2],
    lambda x: x.permute(0, 1, 3, 2),
    lambda x: F.max_pool2d(x, 2),
]


def test_nine_ops_in_a_row_share_their_qparams():
    def nine(x):
        for op in NINE:
            x = op(x)
        return x

    model = Between(nine, size=8)
    converted = assert_matches(model, model.example, fx=False)
    first, last = recorded(converted, "conv2d")
    assert first.decision.writes is not None
    assert last.decision.reads[0].value == first.decision.writes
    assert len(qparams(converted)) == 2, "the model's input, and the one they share"
    for name in ("max_pool2d", "cat", "interpolate", "transpose", "permute"):
        assert {op.decision.precision for op in recorded(converted, name)} == {"int8"}


def test_nine_pools_in_a_row():
    model = Between(lambda x: [x := F.max_pool2d(x, 2, 1) for _ in range(9)][-1], size=12)
    converted = assert_matches(model, model.example)
    assert_precision(converted, "max_pool2d", "int8", 9)
    assert len(qparams(converted)) == 2


def test_cats_of_cats_share_one_observer():
    def forward(m, x):
        a, b, c = m.a(x), m.b(x), m.c(x)
        ab = torch.cat([a, b], 1)
        return m.last(torch.cat([ab, torch.cat([c, a], 1)], 1))

    model = Call(forward, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(4, 4, 1), last=nn.Conv2d(16, 3, 1))
    converted = assert_matches(model, small_images())
    assert len({op.decision.writes for op in recorded(converted, "conv2d")[:3]}) == 1


def test_a_value_read_by_several_layers_is_quantized_once():
    model = Call(
        lambda m, x: m.a(x) @ m.b(x).mT + m.c(x) @ m.a(x).mT, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)
    )
    converted = assert_matches(model, torch.randn(2, 5, 8), fx=False)
    reads = {read.value for op in recorded(converted, "linear") for read in op.decision.reads}
    assert len(reads) == 1
