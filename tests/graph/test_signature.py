"""Arguments and results of graphs: what may come, in which containers, and what is returned."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbrq
from tests.helpers.graphs import BACKENDS, FROM_PYTHON, REFUSES, X, Y, Z, assert_alike, lowered, quantized
from tests.helpers.rewriting import assert_close, assert_same, cases, model, rewritten, seq
from tests.helpers.running import convert, run

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


_SAME = torch.Generator().manual_seed(0)  # whatever other modules draw while they are collected
POSITIVE, NEGATIVE = torch.rand(2, 6, 8, generator=_SAME), -torch.rand(2, 6, 8, generator=_SAME)


# Arguments


class Item(OrderedDict):
    """A dict with attributes, as transformers returns them."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Result:
    first: Tensor
    second: Tensor | None = None
    name: str = "result"


Pair = namedtuple("Pair", "left right")


def optional(m, x, mask=None, scale=2.0, *, flag=True, shift=None):
    y = m.fc(x) if mask is None else m.fc(x) * mask
    y = y * scale if flag else y
    return m.last(y if shift is None else y + shift)


def anything(m, *args, **kwargs):
    y = m.fc(sum(args))
    return m.last(y * kwargs["scale"]) if "scale" in kwargs else m.last(y)


MASK, OTHER_MASK = (torch.arange(6) < 4).float()[:, None], (torch.arange(9) < 4).float()[:, None]
ARGUMENTS = {
    "only what must be": (optional, (seq(),), (seq(3, 9),)),
    "positional": (optional, (seq(), MASK), (seq(3, 9), OTHER_MASK)),
    "keyword": (optional, {"x": seq(), "mask": MASK}, {"x": seq(3, 9), "mask": OTHER_MASK}),
    "keyword-only": (optional, {"x": seq(), "shift": MASK}, {"x": seq(3, 9), "shift": OTHER_MASK}),
    "a default given": (optional, {"x": seq(), "scale": 2.0, "flag": True}, {"x": seq(3), "scale": 2.0, "flag": True}),
    "None given": (optional, (seq(), None, 3.0), (seq(3), None, 3.0)),
    "*args": (anything, (seq(), seq()), (seq(3, 9), seq(3, 9))),
    "**kwargs": (anything, {"scale": MASK}, None),
    "*args and **kwargs": (anything, {"scale": MASK}, {"scale": OTHER_MASK}),
    "int": (lambda m, x, n: m.last(m.fc(x)[:, :n]), (seq(), 2), (seq(3), 4)),
    "bool, float, str": (
        lambda m, x, a, b, c: m.last(m.fc(x) * b if a and c == "on" else x),
        (seq(), True, 0.5, "on"), (seq(3), True, 0.5, "on")),
    "list": (lambda m, xs: m.last(m.fc(xs[0]) + xs[1]), ([seq(), seq()],), ([seq(3), seq(3)],)),
    "tuple": (lambda m, xs: m.last(m.fc(xs[0]) + xs[1]), ((seq(), MASK),), ((seq(3), MASK),)),
    "namedtuple": (lambda m, p: m.last(m.fc(p.left) + p.right), (Pair(seq(), MASK),), (Pair(seq(3), MASK),)),
    "dict": (lambda m, d: m.last(m.fc(d["x"]) + d["y"]), ({"x": seq(), "y": MASK},), ({"x": seq(3), "y": MASK},)),
    "nested": (
        lambda m, d: m.last(m.fc(d["xs"][0]) + d["xs"][1]), ({"xs": [seq(), seq()]},), ({"xs": [seq(3), seq(3)]},)),
    "the same tensor twice": (lambda m, x, y: m.last(m.fc(x) + y), (POSITIVE, POSITIVE), (seq(3), seq(3))),
    "ids": (lambda m, i: m.last(m.table(i)), (torch.arange(6)[None],), (torch.arange(9).view(3, 3),)),
}  # fmt: skip


@cases({name: case for name, case in ARGUMENTS.items() if "**" not in name})
def test_arguments(case):
    forward, example, other = case
    assert_same(model(forward, table=nn.Embedding(10, 8)), example, other)


def test_starred_arguments():
    module = model(anything)
    q = convert(module, [seq(), seq()], None).quantized
    assert run(dbrq.rewrite(q, (seq(), seq())), [seq(3), seq(3)]).shape == (3, 6, 4)
    prepared = dbrq.prepare(module, (seq(), seq()), example_kwargs={"scale": MASK})
    prepared(seq(), seq(), scale=MASK)
    q = dbrq.convert(prepared)
    g = dbrq.rewrite(q, (seq(), seq()), example_kwargs={"scale": MASK})
    x, y = seq(3, 9), seq(3, 9)
    expected = q(x, y, scale=OTHER_MASK)
    assert_close(g(x, y, scale=OTHER_MASK), expected, "rewritten")
    assert_close(torch.jit.script(g)(x, y, scale=OTHER_MASK), expected, "scripted")


def test_defaults_are_kept_and_what_was_not_given_cannot_be():
    q, g, s = rewritten(model(optional), (seq(), MASK))
    x = seq()
    for f in (g, s):
        assert_close(f(x=x, mask=MASK), q(x, MASK), "by keyword")
        with pytest.raises(Exception, match=r"mask|[Oo]ptional|None"):
            f(x)
        with pytest.raises(Exception, match=r"flag|argument"):
            f(x, MASK, flag=False)


@pytest.mark.parametrize("wrong", [(True, 0.5, "off"), (False, 0.5, "on"), (True, 0.75, "on")], ids=str)
def test_another_flag_raises(wrong):
    forward, example, _ = ARGUMENTS["bool, float, str"]
    _, g, s = rewritten(model(forward), example)
    for f in (g, s):
        with pytest.raises(Exception, match="dbrq: this graph holds for"):
            f(seq(), *wrong)


@pytest.mark.parametrize("wrong", [torch.randn(6, 8), seq().double(), torch.ones(2, 6, 8, dtype=torch.int64)])
def test_another_rank_or_dtype_raises(wrong):
    _, g, s = rewritten(model(lambda m, x: m.last(m.fc(x))), seq())
    for f in (g, s):
        with pytest.raises(Exception, match="dbrq: input x"):
            f(wrong)


# Outputs

OUTPUTS = {
    "list": lambda m, x: [m.fc(x), m.last(x)],
    "tuple": lambda m, x: (m.fc(x), m.last(x)),
    "nested": lambda m, x: (m.fc(x), [m.last(x), (x, m.fc(x))]),
    "dict": lambda m, x: {"a": m.fc(x), "b": m.last(x)},
    "dict of containers": lambda m, x: {"a": m.fc(x), "b": [m.last(x)], "c": {"d": (x * 2,)}},
    "dict with numbers": lambda m, x: {"a": m.fc(x), "n": x.size(1), "s": "text"},
    "dict with ints as keys": lambda m, x: {0: m.fc(x), 1: m.last(x)},
    "dict subclass": lambda m, x: Item(a=m.fc(x), b=None, c=m.last(x)),
    "OrderedDict": lambda m, x: OrderedDict(b=m.fc(x), a=m.last(x)),
    "dataclass": lambda m, x: Result(m.last(m.fc(x))),
    "namedtuple": lambda m, x: Pair(m.fc(x), [m.last(x)]),
    "None in a tuple": lambda m, x: (m.fc(x), None, m.last(x)),
    "None in a dict": lambda m, x: {"a": m.fc(x), "b": None},
    "constants": lambda m, x: (m.fc(x), 3, 0.5, "name", True),
    "twice the same": lambda m, x: (lambda y: (y, y))(m.fc(x)),
    "the input": lambda m, x: (x, m.fc(x)),
    "a parameter": lambda m, x: (m.fc(x), m.fc.bias),
    "list of lists": lambda m, x: [[m.fc(x)], [m.last(x), x]],
    "one-tuple": lambda m, x: (m.last(m.fc(x)),),
    "empty containers": lambda m, x: (m.fc(x), (), {}),
}


@cases(OUTPUTS)
def test_outputs_keep_structure_and_class(case):
    assert_same(model(case), seq(), seq(3, 9))


PLAIN = {
    "dict subclass": (dict, ["a", "c"]), "OrderedDict": (dict, ["b", "a"]), "dict": (dict, ["a", "b"]),
    "list": (list, None), "namedtuple": (tuple, None), "nested": (tuple, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_torchscript_returns_plain_containers(name):
    _, _, s = rewritten(model(OUTPUTS[name]), seq())
    got, (cls, keys) = s(seq()), PLAIN[name]
    assert type(got) is cls and (keys is None or list(got) == keys)


def test_two_calls_do_not_share_their_containers():
    _, g, _ = rewritten(model(OUTPUTS["dict subclass"]), seq())
    a, b = g(seq()), g(seq(3))
    assert a is not b and len(a.a) == 2 and len(b.a) == 3
    assert torch.equal(copy.deepcopy(g)(POSITIVE).a, g(POSITIVE).a)
