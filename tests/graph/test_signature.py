"""What an audit found in graphs and in models lowered in parts: numbers that were silently wrong, and bad errors."""

from __future__ import annotations

import collections
import copy
import enum
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dbrq

X, Y, Z = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
BACKENDS = ["rewrite", "torchscript", "onednn", "inductor"]
FROM_PYTHON = ["rewrite", "onednn"]
REFUSES = (dbrq.QuantizationError, RuntimeError, AssertionError, KeyError, torch.jit.Error)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, *args):
        return self.function(self, *args)


def quantized(function, *example):
    torch.manual_seed(0)
    return dbrq.quantize(Net(function).eval(), [example])


def lowered(q, backend, *example):
    if backend == "inductor":
        pytest.importorskip("torch._inductor")
    return dbrq.rewrite(q, example) if backend == "rewrite" else dbrq.lower(q, example, backend=backend)


def assert_alike(got, expected):
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


# Containers


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_a_dict_go_by_its_keys(backend):
    q = quantized(lambda s, d: s.a(d["x"]) - 2 * s.b(d["y"]), {"x": X, "y": Y})
    low = lowered(q, backend, {"x": X, "y": Y})
    assert_alike(low({"y": Y.flip(0), "x": X.flip(0)}), q({"x": X.flip(0), "y": Y.flip(0)}))
    for wrong in ({"x": X, "z": Y}, {"x": X}, {"x": X, "y": Y, "z": Z}):
        with pytest.raises(REFUSES):
            low(wrong)


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn"])
def test_an_order_of_keys_that_matters_is_asserted(backend):
    q = quantized(lambda s, d: s.a(next(iter(d.values()))), {"x": X, "y": Y})
    low = lowered(q, backend, {"x": X, "y": Y})
    assert_alike(low({"x": X.flip(0), "y": X}), q({"x": X.flip(0), "y": X}))
    with pytest.raises(REFUSES, match="order"):
        low({"y": Y, "x": X})


@pytest.mark.parametrize("backend", ["onednn", "inductor"])
def test_another_nesting_is_refused(backend):
    def function(s, pairs):
        return s.a(sum(pairs[0])) - 2 * s.b(sum(pairs[1]))

    q = quantized(function, ((X, Y), (Z,)))
    low = lowered(q, backend, ((X, Y), (Z,)))
    with pytest.raises(dbrq.QuantizationError, match="another structure"):
        low(((X,), (Y, Z)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tuple_of_another_length_is_refused(backend):
    q = quantized(lambda s, t: s.a(sum(t)), (X, Y))
    low = lowered(q, backend, (X, Y))
    assert_alike(low((X.flip(0), Y)), q((X.flip(0), Y)))
    with pytest.raises(REFUSES):
        low((X, Y, Z))


@pytest.mark.parametrize("backend", ["rewrite", "onednn"])
def test_containers_survive_copies_and_files(backend, tmp_path):
    q = quantized(lambda s, d: s.a(d["x"]) - 2 * s.b(d["y"]), {"x": X, "y": Y})
    low = lowered(q, backend, {"x": X, "y": Y})
    if backend == "onednn":
        dbrq.save(low, tmp_path / "m")
        low = dbrq.load(tmp_path / "m")
    assert_alike(low({"y": Y.flip(0), "x": X.flip(0)}), q({"x": X.flip(0), "y": Y.flip(0)}))


# Values that are no tensors


class Mode(enum.Enum):
    A, B = 1, 2


class Level(enum.IntEnum):
    A, B = 1, 2


class Config:
    def __init__(self, k):
        self.k = k


@pytest.mark.parametrize("backend", FROM_PYTHON)
@pytest.mark.parametrize(
    ("function", "given", "other"),
    [
        (lambda s, x, m: s.a(x) if m is Mode.A else s.b(x), Mode.A, Mode.B),
        (lambda s, x, m: s.a(x) if m == 1 else s.b(x), Level.A, Level.B),
        (lambda s, x, m: s.a(x) * m, np.int64(2), np.int64(3)),
        (lambda s, x, m: s.a(x) * m, np.float32(2), np.float32(3)),
        (lambda s, x, m: s.a(x) * m, np.float64(2), np.float64(3)),
        (lambda s, x, m: s.a(x) * torch.from_numpy(m), np.ones(8, np.float32), np.arange(8, dtype=np.float32)),
        (lambda s, x, m: s.a(x) * m.imag, 1 + 1j, 1 + 5j),
        (lambda s, x, m: s.a(x)[m], slice(0, 2), slice(1, 3)),
        (lambda s, x, m: m(s.a(x)), torch.relu, torch.sigmoid),
        (lambda s, x, m: s.a(x) * m.k, Config(1.0), Config(5.0)),
        (lambda s, x, m: s.a(x) if "d" in m else s.b(x), {"d"}, {"e"}),
        (lambda s, x, m: s.a(x) * len(m), b"a", b"ab"),
        (lambda s, x, m: s.a(x) * len(m), range(2), range(3)),
        (lambda s, x, m: s.a(x).to(m).to(torch.float32), torch.float64, torch.int32),
    ],
)
def test_values_that_code_was_recorded_for_are_asserted(backend, function, given, other):
    q = quantized(function, X, given)
    low = lowered(q, backend, X, given)
    assert_alike(low(X.flip(0), given), q(X.flip(0), given))
    with pytest.raises(dbrq.QuantizationError, match="another value"):
        low(X, other)


def test_an_argument_that_cannot_be_compared_is_warned_of():
    def given(x):
        return x * 2

    q = quantized(lambda s, x, f: f(s.a(x)), X, given)
    with pytest.warns(UserWarning, match="another one"):
        dbrq.rewrite(q, (X, given))


def test_what_is_left_out_keeps_its_default():
    class WithDefault(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x, mode=Mode.A, shifts=(1.0, 2.0), *, y):
            return self.a(x) + shifts[0] if mode is Mode.A else self.a(y)

    q = dbrq.quantize(WithDefault().eval(), [{"x": X, "y": Y}])
    for backend in FROM_PYTHON:
        low = dbrq.rewrite(q, {"x": X, "y": Y}) if backend == "rewrite" else dbrq.lower(q, {"x": X, "y": Y},
                                                                                         backend=backend)  # fmt: skip
        assert_alike(low(x=X.flip(0), y=Y), q(x=X.flip(0), y=Y))
        assert_alike(low(x=X, mode=Mode.A, y=Y), q(x=X, y=Y))
        with pytest.raises(dbrq.QuantizationError, match="another value"):
            low(x=Y, mode=Mode.B, y=Z)


# Models in parts


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.l, self.m, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.gain, self.ctx = 1.0, torch.zeros(8)
        if kind == "hook":
            self.l.register_forward_hook(keep)

    def forward(self, h, out=None):
        h = torch.relu(self.l(h))
        if self.kind == "aux":
            self.aux = h
        if out is not None:
            out["h"] = h
        y = self.m(h)
        return y * self.gain if self.kind == "gain" else y + self.ctx if self.kind == "ctx" else y


def keep(module, args, output):
    module.kept = output


class InParts(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.block, self.x, self.o, self.kind = Block(kind), nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x, flag):
        if self.kind == "gain":
            self.block.gain = 3.0 if flag else 1.0
        if self.kind == "ctx":
            self.block.ctx = x.mean(0) * 5
        if self.kind == "outparam":
            out = {"h": x * 0}
            y = self.block(x, out) + 3 * out["h"]
        else:
            y = self.block(x)
        if self.kind == "aux":
            y = y + 3 * self.block.aux
        if self.kind == "hook":
            y = y + 3 * self.block.l.kept
        if flag:
            y = torch.relu(self.x(y))
        return self.o(y)


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
@pytest.mark.parametrize("kind", ["aux", "hook", "outparam", "gain", "ctx", "none"])
def test_parts_and_the_code_around_them_see_each_other(kind, backend):
    torch.manual_seed(0)
    prepared = dbrq.prepare(InParts(kind).eval(), (X, True))
    with torch.no_grad():
        prepared(X, True)
        prepared(Y, False)
        q = dbrq.convert(prepared)
        low = dbrq.lower(q, (X, True), backend=backend)
        for call in ((X, True), (Y, True), (Y, False)):
            assert_alike(low(*call), q(*call))
    states = low.__dict__["forward"].token.states
    assert bool(states["block"].parts) == (kind == "none")


def test_a_part_that_changes_the_whole_is_dropped(monkeypatch):
    from dbrq.lowering import submodules

    monkeypatch.setattr(submodules, "_traces", lambda *args: None)
    torch.manual_seed(0)
    prepared = dbrq.prepare(InParts("aux").eval(), (X, True))
    with torch.no_grad():
        prepared(X, True)
        prepared(Y, False)
        q = dbrq.convert(prepared)
        with pytest.warns(UserWarning, match="block stays as it was converted"):
            low = dbrq.lower(q, (X, True))
        assert_alike(low(Y, True), q(Y, True))


# What code reads of tensors


@pytest.mark.parametrize("backend", ["rewrite", "torchscript"])
def test_sizes_read_by_other_names_are_asserted_or_free(backend):
    q = quantized(lambda s, x, y: s.a(x) + y if x.is_same_size(y) else s.a(x) - y, X, Y)
    low = lowered(q, backend, X, Y)
    assert_alike(low(X, Y), q(X, Y))
    with pytest.raises(REFUSES):
        low(X, Y[:1].clone())
    q = quantized(lambda s, x: s.a(x) * (x.nbytes / 128), X)
    low = lowered(q, backend, X)
    six = torch.cat([X, X[:2]])
    assert_alike(low(six), q(six))


@pytest.mark.parametrize("backend", ["rewrite", "torchscript"])
def test_an_offset_in_memory_is_asserted(backend):
    q = quantized(lambda s, x: s.a(x.as_strided(x.shape, x.stride(), x.storage_offset())), X)
    low = lowered(q, backend, X)
    assert_alike(low(X), q(X))
    with pytest.raises(REFUSES):
        low(torch.cat([Y, X])[4:])


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: s.a(x) * (x.untyped_storage().size() / 128),
        lambda s, x: s.a(x) * (x.untyped_storage().nbytes() / 128),
        lambda s, x: s.a(x) if x._base is None else s.b(x),
        lambda s, x: s.b(x) if x._is_view() else s.a(x),
        lambda s, x: s.a(x) * (2 if x.requires_grad else 1),
    ],
)
def test_what_no_graph_can_assert_is_refused(function):
    q = quantized(function, X)
    with pytest.raises(dbrq.QuantizationError, match=r"memory of a value|has a gradient"):
        dbrq.rewrite(q, (X,))


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn"])
@pytest.mark.parametrize(
    "squeeze",
    [
        lambda x: x.squeeze(1),
        lambda x: x.squeeze(dim=1),
        lambda x: x.squeeze(-2),
        lambda x: torch.squeeze(x, 1),
        lambda x: torch.squeeze(x, (1,)),
        lambda x: torch.squeeze(input=x, dim=1),
        lambda x: x.clone().squeeze_(1),
    ],
)
def test_the_rank_behind_squeeze_is_asserted(squeeze, backend):
    def function(s, x):
        h = squeeze(x)
        return s.a(h) * 2 if h.dim() == 2 else s.a(h)

    example = X.reshape(4, 1, 8)
    q = quantized(function, example)
    low = lowered(q, backend, example)
    two = example[:2]
    assert_alike(low(two), q(two))
    with pytest.raises(REFUSES):
        low(torch.randn(4, 3, 8))


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn"])
def test_the_question_whether_a_number_is_one_is_asserted(backend):
    def function(s, x):
        v = x.max().item()
        return x * 0 if v != v else s.a(x)

    q = quantized(function, X)
    low = lowered(q, backend, X)
    assert_alike(low(X), q(X))
    bad = X.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(REFUSES):
        low(bad)


# State and containers that a graph does not keep


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


@pytest.mark.parametrize("backend", ["rewrite", "onednn"])
@pytest.mark.parametrize(
    ("function", "given"),
    [(cached, [Y]), (filled, {"h": Y}), (filled, {}), (replaced, [{"h": Y}]), (emptied, [X, Y, X, Y])],
)
def test_a_container_that_forward_fills_is_refused(function, given, backend):
    q = quantized(function, X, copy.deepcopy(given))
    with pytest.raises(dbrq.QuantizationError, match="changes a container"):
        lowered(q, backend, X, given)


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


# Settings that a range was recorded for


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn"])
@pytest.mark.parametrize(
    ("function", "given", "other"),
    [
        (lambda s, x, k: s.b(torch.add(s.a(x), x, alpha=k)), (X, 1), (X, 3)),
        (lambda s, x, k: s.b(s.a(x * 4).clamp(-k, k)), (X, 1), (X, 3)),
        (lambda s, x: s.b(s.a(x * 4).clamp(-x.shape[0] / 4, x.shape[0] / 4)), (X,), (X.repeat(3, 1),)),
        (lambda s, x: s.b(torch.nn.functional.hardtanh(s.a(x * 4), 0, x.shape[0] / 16)), (X,), (X.repeat(3, 1),)),
    ],
)
def test_settings_that_decide_a_range_are_asserted(function, given, other, backend):
    q = quantized(function, *given)
    low = lowered(q, backend, *given)
    assert_alike(low(*given), q(*given))
    with pytest.raises(REFUSES):
        low(*other)


@pytest.mark.parametrize("backend", ["rewrite", "torchscript"])
@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: s.b(nn.functional.pad(s.a(x), (0, 8 - x.shape[1], 0, x.shape[0]))),
        lambda s, x: s.b(s.a(x).view(x.shape[0] * 2, 4).reshape(x.shape[0], 8)),
        lambda s, x: s.b(nn.functional.interpolate(s.a(x)[None], size=8 * x.shape[0] // x.shape[0])[0]),
        lambda s, x: s.b(s.a(x) / x.shape[1] + x.shape[1]),
    ],
)
def test_sizes_that_only_shape_a_value_stay_free(function, backend):
    q = quantized(function, X)
    low = lowered(q, backend, X)
    six = torch.cat([X, X[:2]])
    assert_alike(low(six), q(six))


# Errors


def test_a_value_of_no_dimensions_leaves_onednn_in_float32():
    q = quantized(lambda s, x: (s.a(x), (torch.arange(x.shape[0]).float() * 1.5).sum()), X)
    low = dbrq.lower(q, (X,), backend="onednn", dtype=torch.bfloat16)
    assert low(X)[1].dtype is torch.float32 and low(X)[1] == 9


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn"])
def test_a_layer_under_vmap_is_refused(backend):
    q = quantized(lambda s, x: torch.vmap(s.b)(s.a(x)), X)
    with pytest.raises(dbrq.QuantizationError, match=r"torch\.func"):
        lowered(q, backend, X)
    assert dbrq.rewrite(quantized(lambda s, x: s.a(x), X), (X,))(X).shape == X.shape  # nothing of it is left behind


def test_a_part_may_store_what_nobody_can_change():
    """A new tuple that is equal to the old one is no change."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            self.hw, self.shape = (x.shape[0], x.shape[1]), x.shape
            return self.f(x)

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, flag):
            h = self.block(x)
            return h * 2 if flag else torch.relu(h - 1)

    model = Branching().eval()
    prepared = dbrq.prepare(model, (X, True))
    prepared(X, True)
    prepared(X, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low = dbrq.lower(dbrq.convert(prepared), (X, True), backend="onednn")
    assert low.__dict__["forward"].token.states["block"].parts
