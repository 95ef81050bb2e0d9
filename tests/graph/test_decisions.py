"""Sizes and values that Python decided on: a graph holds for their outcome, and says so elsewhere."""

import contextlib
import math
import warnings

import numpy as np
import pytest
import torch

import dbrq
from dbrq.errors import DeviationError, RewriteError
from tests.helpers.rewriting import assert_same, cases, model, seq
from tests.helpers.running import run

#: forward, the example, the same outcome, another outcome
SIZE_DECISIONS = {
    "if n > 4": (lambda m, x: m.last(m.fc(x) if x.size(1) > 4 else x), seq(), seq(3, 7), seq(2, 3)),
    "range(n)": (lambda m, x: m.last(sum(m.fc(x)[:, i] for i in range(x.size(1)))), seq(), seq(3), seq(2, 3)),
    "int(n)": (lambda m, x: m.last(m.fc(x)) * int(x.size(1)), seq(), seq(3), seq(2, 3)),
    "math.sqrt(n)": (lambda m, x: m.last(m.fc(x)) / math.sqrt(x.size(1)), seq(), seq(3), seq(2, 3)),
    "np.sqrt(n)": (lambda m, x: m.last(m.fc(x)) / float(np.sqrt(x.size(1))), seq(), seq(3), seq(2, 3)),
    "dict key": (lambda m, x: m.last(m.fc(x)) * {6: 2.0, 3: 3.0}[x.size(1)], seq(), seq(3), seq(2, 3)),
    "n == m": (lambda m, x: m.last(m.fc(x)) * (2 if x.size(0) == x.size(1) else 1), seq(), seq(3), seq(3, 3)),
    "shape ==": (lambda m, x: m.last(m.fc(x)) * (2 if x.shape[1:] == (6, 8) else 3), seq(), seq(3), seq(2, 7)),
    "n in": (lambda m, x: m.last(m.fc(x)) * (2 if x.size(1) in (6, 7) else 3), seq(), seq(3), seq(2, 9)),
    "if n % 2": (lambda m, x: m.last(m.fc(x)) * (2 if x.size(1) % 2 else 3), seq(), seq(3), seq(2, 7)),
    "isinstance": (lambda m, x: m.last(m.fc(x)) * (5 if isinstance(x.size(1), int) else 3), seq(), seq(3), None),
    "for row in x": (lambda m, x: m.last(sum(m.fc(row) for row in x)), seq(), seq(2, 9), seq(3)),
    "len(x)": (lambda m, x: m.last(m.fc(x)) * len(x), seq(), seq(2, 9), seq(3)),
    "a, b = chunk": (lambda m, x: (lambda a, b: m.last(a + b))(*m.fc(x).chunk(2, 1)), seq(), seq(3, 4), seq(2, 1)),
    "unbind": (lambda m, x: m.last(sum(m.fc(x).unbind(1))), seq(), seq(3), seq(2, 3)),
    "split in a list": (
        lambda m, x: m.last(torch.cat([p * 2 for p in m.fc(x).split(2, 1)], 1)), seq(), seq(3, 5), seq(2, 3)),
    "index of a list": (lambda m, x: m.last(m.fc(x)) * [1.0, 2.0, 3.0, 4.0][x.size(0)], seq(), seq(2, 9), seq(3)),
}  # fmt: skip
_SAME = torch.Generator().manual_seed(0)  # whatever other modules draw while they are collected
POSITIVE, NEGATIVE = torch.rand(2, 6, 8, generator=_SAME), -torch.rand(2, 6, 8, generator=_SAME)
VALUE_DECISIONS = {
    "if x.sum() > 0": lambda m, x: m.last(m.fc(x)) if x.sum() > 0 else m.fc(x),
    ".item() in a comparison": lambda m, x: m.last(m.fc(x)) * (2 if x.sum().item() > 0 else 3),
    ".item() of a bool": lambda m, x: m.last(m.fc(x)) * (2 if (x > 0).all().item() else 3),
    "bool(tensor)": lambda m, x: m.last(m.fc(x)) * (2 if bool((x > 0).any()) else 3),
    "int(tensor)": lambda m, x: m.last(m.fc(x)) * int((x > 0).all()),
    "float(tensor)": lambda m, x: m.last(m.fc(x)) * float((x > 0).all()),
    "range of an item": lambda m, x: m.last(sum(m.fc(x) for _ in range((x > 0).all().long().item() + 1))),
    "tolist": lambda m, x: m.last(m.fc(x)) * (2 if (x > 0).long().amin((0, 1)).tolist()[0] else 3),
    "tolist of bools": lambda m, x: m.last(m.fc(x)) * (2 if (x > 0).all(1).all(0).tolist()[0] else 3),
    "numpy": lambda m, x: m.last(m.fc(x)) * (2 if (x > 0).all().numpy() else 3),
    "in": lambda m, x: m.last(m.fc(x)) * (2 if True in (x > 0) else 3),
    "and": lambda m, x: m.last(m.fc(x)) * (2 if (x > 0).any() and x.sum() > 0 else 3),
    "torch.equal": lambda m, x: m.last(m.fc(x)) * (2 if torch.equal(x, x.abs()) else 3),
    "is_nonzero": lambda m, x: m.last(m.fc(x)) * (2 if torch.is_nonzero((x > 0).any()) else 3),
    "index of a list": lambda m, x: m.last(m.fc(x)) * [3.0, 2.0][(x > 0).all().long()],
    "max of tensors": lambda m, x: m.last(m.fc(x)) * max(x.sum(), x.new_zeros(()) - 1),
}
VALUES = {
    ".item()": lambda m, x: m.last(m.fc(x)) * x.sum().item(),
    ".item() of a count": lambda m, x: m.last(m.fc(x)) + torch.arange((x > 0).sum().item()).sum(),
    "tolist": lambda m, x: m.last(m.fc(x)) * x.flatten()[:2].tolist()[0],
    "full": lambda m, x: m.last(m.fc(x)) * torch.full((1,), x.sum().item()),
    "torch.tensor of numbers": lambda m, x: m.last(m.fc(x)) * torch.tensor([x.sum().item(), 2.0])[0],
    "torch.tensor of tensors": lambda m, x: m.last(m.fc(x)) * torch.tensor([x.sum(), x.mean()])[0],
    "returned": lambda m, x: (m.last(m.fc(x)), x.sum().item(), (x > 0).sum().item(), (x.sum() > 0).item()),
    "boolean mask": lambda m, x: m.last(m.fc(x)[x.sum(-1) > 0]),
    "slice": lambda m, x: m.last(m.fc(x)[:, : (x > 0).all().long() + 2]),
    "round": lambda m, x: m.last(m.fc(x)) * round((x > 0).float().mean().item()),
}


def assert_holds_for_one_outcome(forward, example, same, other):
    _, g, s = assert_same(model(forward), example, same)
    for f in (g, s):
        with pytest.raises(Exception, match=r"(?s)dbrq: this graph holds for .*test_decisions\.py:\d+"):
            run(f, other)


@cases({name: case for name, case in SIZE_DECISIONS.items() if case[3] is not None})
def test_a_size_that_python_decided_on_holds_for_its_outcome(case):
    assert_holds_for_one_outcome(*case)


def test_sizes_count_as_ints():
    assert_same(model(SIZE_DECISIONS["isinstance"][0]), seq(), seq(3))


@cases(VALUE_DECISIONS)
def test_a_value_that_python_decided_on_holds_for_its_outcome(case):
    assert_holds_for_one_outcome(case, POSITIVE, POSITIVE * 0.5, NEGATIVE)


@cases(VALUES)
def test_values_in_arithmetic_stay_free(case):
    assert_same(model(case), POSITIVE, POSITIVE[:, :4] - 0.3, -POSITIVE[:1])


def test_several_outcomes_in_calibration_name_the_line():
    module = model(VALUE_DECISIONS["if x.sum() > 0"])
    prepared = dbrq.prepare(module, POSITIVE)
    with contextlib.suppress(DeviationError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(prepared, POSITIVE), run(prepared, NEGATIVE)
    with pytest.raises(RewriteError, match=r"(?s)decides on values.*test_decisions\.py:\d+"):
        dbrq.rewrite(dbrq.convert(prepared), POSITIVE)


def test_one_line_with_an_outcome_for_each_of_its_calls_is_one_path():
    def doubled(x):
        return x * 2 if x.sum() > 0 else x

    assert_same(model(lambda m, x: m.last(doubled(m.fc(doubled(x).abs()).abs()) + doubled(-x.abs()))), POSITIVE)
