"""``rewrite``: the graph computes what the converted model computes, for other sizes too, in Python and in TorchScript.

Each case is a forward in a table. What its graph is compared with is the converted model itself.
"""

import contextlib
import copy
import math
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.errors import DeviationError, RewriteError
from dbrq.pytree import call_arguments, tree_leaves
from tests.helpers import agreement, convert, run, sqnr, step_of

# How a case is judged


class Parts(nn.Module):
    """Layers for the forwards below. ``[b, t, 8]`` or ``[b, 3, h, w]`` in."""

    def __init__(self, **parts):
        super().__init__()
        self.fc, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)


def model(forward, **parts) -> nn.Module:
    """A module with this ``forward``."""
    return type("Model", (Parts,), {"forward": forward})(**parts).eval()


def seq(b=2, t=6) -> Tensor:
    return torch.randn(b, t, 8)


def image(b=2, h=6, w=8) -> Tensor:
    return torch.randn(b, 3, h, w)


@contextlib.contextmanager
def no_complaints():
    """Nothing may fall back to float, and no size may be frozen."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")
        yield


def rewritten(module, example, mapping=None, data=None, **options):
    """The converted model, calibrated on the example or on ``data``, its graph, and the graph scripted."""
    prepared = convert(module, copy.deepcopy(example), mapping, **options).prepared
    for inputs in data or ():
        run(prepared, inputs)
    q = dbrq.convert(prepared)
    with no_complaints():
        args, kwargs = call_arguments(example)
        g = dbrq.rewrite(q, args, example_kwargs=kwargs)
    return q, g, torch.jit.script(g)


def leaves(output) -> list:
    """Tensors and numbers in order; the script's containers are others, and need not hold what is None."""
    return [leaf for leaf in tree_leaves(output) if leaf is not None]


def assert_close(got, expected, what: str) -> None:
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected), what
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(b), what
        if not isinstance(b, Tensor):
            assert a == (b if isinstance(b, str) else pytest.approx(b)), what
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        assert b.is_floating_point() or torch.equal(a, b), what
        if b.is_floating_point():
            share = agreement(a, b, step_of(b))
            assert share >= 0.98, f"{what}: {share:.2%} within one step of the converted model, {sqnr(b, a):.1f} dB"


def structure(tree):
    """The classes of an output's containers and what is in them, tensors left out."""
    if isinstance(tree, dict):
        return type(tree), {k: structure(v) for k, v in tree.items()}, vars(tree) if hasattr(tree, "__dict__") else None
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree), [structure(v) for v in tree]
    if hasattr(tree, "__dataclass_fields__"):
        return type(tree), {k: structure(v) for k, v in vars(tree).items()}
    return type(tree) if isinstance(tree, (Tensor, float)) else tree


def assert_same(module, example, *others, mapping=None, data=None, **options):
    """Converted, rewritten and scripted agree on the example and on other inputs; returns the three."""
    q, g, s = rewritten(module, example, mapping, data, **options)
    for inputs in (example, *others):
        mine, theirs, scripts = (copy.deepcopy(inputs) for _ in range(3))
        expected, got, scripted = [call(f, x) for f, x in ((q, mine), (g, theirs), (s, scripts))]
        assert structure(got) == structure(expected)
        assert_close(got, expected, "rewritten")
        for a, b in zip(leaves(scripted), leaves(got), strict=True):
            if isinstance(b, str):
                assert a == b
            else:
                torch.testing.assert_close(a, b, msg=lambda text: f"scripted: {text}")
        for changed in (theirs, scripts):
            assert_close(changed, mine, "the caller's inputs afterwards")
    return q, g, s


def call(f, inputs):
    args, kwargs = call_arguments(inputs)
    with torch.no_grad():
        return f(*args, **kwargs)


def cases(table: dict):
    return pytest.mark.parametrize("case", [pytest.param(value, id=name) for name, value in table.items()])


# Sizes stay free

SIZES = {
    "view(x.size(0), -1)": lambda m, x: m.last(m.fc(x).view(x.size(0), -1).view(x.size(0), x.size(1), 8)),
    "b, t, d = x.shape": lambda m, x: (lambda b, t, d: m.last(m.fc(x).reshape(b * t, d)).view(b, t, 4))(*x.shape),
    "arange": lambda m, x: m.last(m.fc(x) + torch.arange(x.size(1))[:, None]),
    "shape[-2:]": lambda m, x: m.last(m.fc(x) + torch.ones(x.shape[-2:])),
    "math.prod": lambda m, x: m.last(m.fc(x).reshape(math.prod(x.shape[:2]), 8)),
    "n // 2": lambda m, x: m.last(m.fc(x)[:, : x.size(1) // 2]),
    "n * 2 + 1": lambda m, x: m.last(F.pad(m.fc(x), (0, 0, 0, x.size(1) * 2 + 1))),
    "-n % 4": lambda m, x: m.last(F.pad(m.fc(x), (0, 0, 0, -x.size(1) % 4))),
    "n >> 1": lambda m, x: m.last(m.fc(x)[:, : x.size(1) >> 1]),
    "divmod": lambda m, x: m.last(m.fc(x)[:, : divmod(x.size(1), 2)[0]]),
    "slice from the end": lambda m, x: m.last(m.fc(x)[:, -(x.size(1) - 1) :]),
    "math.ceil": lambda m, x: m.last(F.pad(m.fc(x), (0, 0, 0, math.ceil(x.size(1) / 4)))),
    "power of a negative number": lambda m, x: m.last(m.fc(x)) * (-1) ** x.size(1),
    "zeros": lambda m, x: m.last(m.fc(x) + torch.zeros(x.size(1), 8)),
    "new_zeros": lambda m, x: m.last(torch.cat([m.fc(x), x.new_zeros(x.size(0), 1, 8)], 1)),
    "full": lambda m, x: m.last(m.fc(x) + torch.full((x.size(1), 1), 0.5)),
    "tensor of a size": lambda m, x: m.last(m.fc(x) * torch.tensor(x.size(1))),
    "expand": lambda m, x: m.last(m.cls.expand(x.size(0), -1, -1) + m.fc(x)),
    "repeat": lambda m, x: m.last(m.fc(x) + m.cls.repeat(x.size(0), 1, 1)),
    "torch.Size + tuple": lambda m, x: m.last(m.fc(x).reshape(x.shape[:-1] + (2, 4)).flatten(-2)),  # noqa: RUF005
    "torch.Size + torch.Size": lambda m, x: m.last(m.fc(x).reshape(x.size()[:2] + torch.Size([8]))),
    "split": lambda m, x: m.last(torch.cat(m.fc(x).split(x.size(1) // 2, 1)[::-1], 1)),
    "split_with_sizes": lambda m, x: m.last(torch.cat(m.fc(x).split([1, x.size(1) - 1], 1)[::-1], 1)),
    "positions": lambda m, x: m.last(m.fc(x) + m.pos[:, : x.size(1)]),
    "causal mask": lambda m, x: m.last(
        m.fc(x).matmul(x.mT).masked_fill(torch.ones(x.size(1), x.size(1)).tril() == 0, -1e4).softmax(-1) @ x
    ),
    "heads": lambda m, x: m.last(m.fc(x).view(*x.shape[:2], 2, 4).transpose(1, 2).transpose(1, 2).flatten(2)),
    "unflatten": lambda m, x: m.last(m.fc(x).flatten(0, 1).unflatten(0, x.shape[:2])),
    "index": lambda m, x: m.last(m.fc(x)[torch.arange(x.size(0)), x.size(1) - 1]),
    "as_strided": lambda m, x: m.last(m.fc(x).as_strided((x.size(0), 8), (x.size(1) * 8, 1))),
    "returned": lambda m, x: (m.fc(x), x.size(1), x.size(0) * 2.5),
    "shape returned": lambda m, x: (m.fc(x), x.shape),
    "max(n, 2)": lambda m, x: m.last(m.fc(x)[:, : max(x.size(1), 2)]),
    "comparison as a flag": lambda m, x: m.last(
        F.scaled_dot_product_attention(*[m.fc(x)[:, None]] * 3, is_causal=x.size(1) > 1)[:, 0]
    ),
}
IMAGE_SIZES = {
    "interpolate(2h, 2w)": lambda m, x: m.head(F.interpolate(m.conv(x), size=(2 * x.size(2), 2 * x.size(3)))),
    "interpolate bilinear": lambda m, x: m.head(F.interpolate(m.conv(x)[..., ::2], size=x.shape[-2:], mode="bilinear")),
    "pad to a multiple": lambda m, x: m.head(F.pad(m.conv(x), (0, -x.size(3) % 8, 0, -x.size(2) % 8))),
    "windows": lambda m, x: (
        lambda b, c, h, w: m.head(
            m.conv(x).view(b, 8, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 8, 2, 2)
        )
    )(*x.shape),
    "pool of the whole": lambda m, x: m.head(F.avg_pool2d(m.conv(x), x.shape[-2:])),
    "max pool of the whole": lambda m, x: m.head(F.max_pool2d(m.conv(x), x.shape[-2:])),
    "flat after a convolution": lambda m, x: m.conv(x).view(x.size(0), -1),
    "tokens": lambda m, x: m.last(m.fc(m.conv(x).flatten(2).transpose(1, 2))),
    "roll": lambda m, x: m.head(m.conv(x).roll((x.size(2) // 2, x.size(3) // 2), (2, 3))),
    "meshgrid": lambda m, x: m.head(
        m.conv(x) + sum(torch.meshgrid(torch.arange(x.size(2)), torch.arange(x.size(3)), indexing="ij")) / 10.0
    ),
}


@cases(SIZES)
def test_sizes_of_a_sequence_stay_free(case):
    module = model(case, cls=torch.randn(1, 1, 8), pos=torch.randn(1, 16, 8))
    assert_same(module, seq(), seq(3), seq(2, 10), seq(1, 4))


FACTORS = {
    "numel": lambda m, x: m.last(m.fc(x) / x.numel()),
    "sum of a shape": lambda m, x: m.last(m.fc(x) * (1.0 / sum(x.shape))),
    "power": lambda m, x: m.last(m.fc(x) * x.size(1) ** -0.5),
    "an argument": lambda m, x, n: m.last(m.fc(x) * n),
}


@cases(FACTORS)
def test_numbers_that_multiply_stay_free_within_what_calibration_saw(case):
    calls = [(seq(),), (seq(3),), (seq(2, 10),), (seq(1, 4),)]
    if case is FACTORS["an argument"]:
        calls = [(x, n) for (x,), n in zip(calls, (2, 4, 3, 1), strict=True)]
    assert_same(model(case), *calls, data=calls)


@cases({name: FACTORS[name] for name in ("numel", "an argument")})  # the others stay within the range
def test_numbers_that_calibration_did_not_see_are_cut_off_in_graphs_and_not_in_converted_models(case):
    x = seq()
    example, larger = [x], [x[:1, :4]]
    if case is FACTORS["an argument"]:
        example, larger = [*example, 2], [*larger, 40]
    module = model(case)
    q, g, _ = rewritten(module, example)
    with pytest.warns(UserWarning, match="has the settings"):
        result = run(q, larger)
    assert sqnr(run(module, larger), result) > 25
    assert structure(run(g, larger)) == structure(result)


@cases(IMAGE_SIZES)
def test_sizes_of_an_image_stay_free(case):
    assert_same(model(case), image(), image(3), image(2, 8, 6), image(1, 10, 12))


def test_a_number_of_parts_that_varies_along_dimensions_not_looked_at():
    assert_same(model(lambda m, x: m.last(m.fc(x).unbind(2)[0][..., None] + x)), seq(), seq(4, 9))


# Sizes and values that become decisions: (forward, the example, the same outcome, another outcome)

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
        with pytest.raises(Exception, match=r"(?s)dbrq: this graph holds for .*test_rewriter\.py:\d+"):
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
    with pytest.raises(RewriteError, match=r"(?s)decides on values.*test_rewriter\.py:\d+"):
        dbrq.rewrite(dbrq.convert(prepared), POSITIVE)


def test_one_line_with_an_outcome_for_each_of_its_calls_is_one_path():
    def doubled(x):
        return x * 2 if x.sum() > 0 else x

    assert_same(model(lambda m, x: m.last(doubled(m.fc(doubled(x).abs()).abs()) + doubled(-x.abs()))), POSITIVE)


# Writing in place


def written(change):
    """``change`` is applied to a value between two layers, which is not rebound."""

    def forward(m, x):
        y = m.fc(x)
        change(y, x)
        return m.last(y)

    return forward


INPLACE = {
    "relu_": lambda y, x: y.relu_(),
    "add_": lambda y, x: y.add_(x, alpha=2),
    "tanh_": lambda y, x: y.tanh_(),
    "silu inplace=True": lambda y, x: F.silu(y, inplace=True),
    "x += y": lambda y, x: y.__iadd__(x),
    "y[:, 0] = number": lambda y, x: y.__setitem__((slice(None), 0), 0.5),
    "y[:, 0] = tensor": lambda y, x: y.__setitem__((slice(None), 0), x[:, 1]),
    "y[..., 0] = size": lambda y, x: y.__setitem__((..., 0), x.size(1)),
    "y[...] = tensor": lambda y, x: y.__setitem__(..., x),
    "y[:, -1] = item": lambda y, x: y.__setitem__((slice(None), -1), x.max().item()),
    "y[0][1] = number": lambda y, x: y[0].__setitem__(1, 1.0),
    "y[mask] = number": lambda y, x: y.__setitem__(x > 1, 0.0),
    "y[mask] = tensor": lambda y, x: y.__setitem__(x > 1, x[x > 1]),
    "y[:, list] = number": lambda y, x: y.__setitem__((slice(None), [0, 2]), 1.0),
    "y[:, :, mask] = number": lambda y, x: y.__setitem__((slice(None), slice(None), x[0, 0] > 0), 1.0),
    "y[tensor, tensor] = number": lambda y, x: y.__setitem__((torch.arange(1), torch.tensor([3])), 1.0),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 1, 0.0),
    "copy_": lambda y, x: y.copy_(x),
    "fill_ a slice": lambda y, x: y[:, : x.size(1) // 2].fill_(0.5),
    "clamp_ a view": lambda y, x: y[:, 1:].clamp_(min=0),
    "index_add_": lambda y, x: y.index_add_(1, torch.tensor([0]), x[:, :1]),
    "transpose_": lambda y, x: y.transpose_(0, 1),
    "through detach": lambda y, x: y.detach().add_(1.0),
    "out=": lambda y, x: torch.add(y, x, out=y),
    "the input": lambda y, x: (x.add_(1), y.mul_(x)),
    "relu_ of the input": lambda y, x: (x.relu_(), y.mul_(x)),
    "a slice of the input": lambda y, x: x.__setitem__((slice(None), 0), 7.0),
    "a view of the input": lambda y, x: x.view(-1)[::2].mul_(2.0),
}


@cases(INPLACE)
def test_writes_in_place_are_seen_by_the_layer_after_and_by_the_caller(case):
    module, x = model(written(case)), seq()
    _, g, _ = assert_same(module, x, seq(1), seq(2, 10))
    assert sqnr(run(module, x), run(g, x)) > 25


def test_an_alias_sees_what_is_written():
    def forward(m, x):
        y = m.fc(x)
        flat, half = y.view(-1, 8), y[..., :4]
        F.relu(y, inplace=True)
        half += x[..., :4]
        return m.last(flat)

    assert_same(model(forward), seq(), seq(3, 4))


def test_an_assignment_to_new_axes_and_tensors_says_what_to_do():
    module = model(written(lambda y, x: y.__setitem__((None, torch.arange(2)), 0.0)))
    with pytest.raises(RewriteError, match="two steps"):
        rewritten(module, seq())


def test_state_written_in_forward_stays_out_of_the_graph():
    def forward(m, x):
        m.seen, m.calls = x.mean(), getattr(m, "calls", 0) + 1
        return m.last(m.fc(x))

    q, _, _ = assert_same(model(forward), seq())
    assert q.calls >= 2


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


@pytest.mark.parametrize("chaotic", [False, True])
def test_a_disagreement_of_graph_and_model_raises_unless_the_model_disagrees_with_itself(chaotic, monkeypatch):
    def forward(m, x):
        x = m.fc(x)
        for _ in range(24 if chaotic else 0):
            x = torch.sin(9 * x)
        return x

    example = seq()
    quantized = dbrq.quantize(model(forward), [example])
    if chaotic:
        with pytest.warns(UserWarning, match="rounded otherwise change what this model gives"):
            dbrq.rewrite(quantized, example)
        return
    record = dbrq.rewriter._record

    def negated(*args):
        recording = record(*args)
        output = recording.graph.graph.output_node()
        with recording.graph.graph.inserting_before(output):
            output.args = (recording.graph.graph.call_function(torch.neg, output.args),)
        recording.graph.recompile()
        return recording

    monkeypatch.setattr(dbrq.rewriter, "_record", negated)
    with pytest.raises(dbrq.RewriteError, match="does not give what the model gives"):
        dbrq.rewrite(quantized, example)
