"""State and containers that a graph does not keep are refused or noticed."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn

import dbrq
from dbrq.pytree import tree_leaves
from tests.helpers.graphs import X, Y, assert_alike, lowered, quantized
from tests.helpers.judging import sqnr


def cached(s, x, cache):
    h = s.a(x)
    cache.append(h)
    return h + cache[0]


def filled(s, x, out):
    out["h"] = s.a(x)
    return s.b(out["h"])


def replaced(s, x, nested):
    nested[0]["h"] = s.a(x)
    return nested[0]["h"]


def emptied(s, x, cache):
    return s.a(x) + cache.pop()


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn", "inductor"])
@pytest.mark.parametrize(
    ("function", "given"),
    [(cached, [Y]), (filled, {"h": Y}), (filled, {}), (replaced, [{"h": Y}]), (emptied, [X, Y, X, Y])],
)
def test_a_container_that_forward_fills(function, given, backend):
    q = quantized(function, X, copy.deepcopy(given))
    if backend in ("rewrite", "torchscript"):
        with pytest.raises(dbrq.QuantizationError, match="changes a container"):
            lowered(q, backend, X, copy.deepcopy(given))
        return
    fast = lowered(q, backend, X, copy.deepcopy(given))
    for x in (X, 0.5 * X):
        expected, got = copy.deepcopy(given), copy.deepcopy(given)
        assert sqnr(q(x, expected), fast(x, got)) > 40
        for a, b in zip(tree_leaves(expected), tree_leaves(got), strict=True):
            assert sqnr(a, b) > 40


class Box:
    def __init__(self):
        self.t = torch.zeros(1, 8)


class Remembering(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.l, self.kind = nn.Linear(8, 8), kind
        self.d, self.h, self.box, self.ema = {"h": torch.zeros(1, 8)}, [torch.zeros(1, 8)], Box(), {"v": 1.0}
        self.deque = collections.deque([torch.zeros(1, 8)], maxlen=1)

    def forward(self, x):
        h = torch.relu(self.l(x))
        if self.kind == "dict":
            p, self.d["h"] = self.d["h"], h
        if self.kind == "list":
            p = self.h.pop()
            self.h.append(h)
        if self.kind == "deque":
            p = self.deque[0]
            self.deque.append(h)
        if self.kind == "object":
            p, self.box.t = self.box.t, h
        if self.kind == "number":
            self.ema["v"] = 0.5 * self.ema["v"] + 0.5 * x.abs().mean().item()
            return h * self.ema["v"]
        if self.kind == "unread":
            p, self.d["h"] = x, h
        return h + p


@pytest.mark.parametrize("kind", ["dict", "list", "deque", "object", "number", "unread"])
def test_state_in_python_is_noticed_whatever_calibration_ended_with(kind):
    torch.manual_seed(0)
    q = dbrq.quantize(Remembering(kind).eval(), [X] * 8)
    if kind == "unread":
        assert_alike(dbrq.rewrite(q, (X,))(X), q(X))
        return
    with pytest.raises(dbrq.QuantizationError):
        dbrq.rewrite(q, (X,))
