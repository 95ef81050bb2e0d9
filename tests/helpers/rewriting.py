"""How ``rewrite`` is judged: the graph, its TorchScript and its lowered form beside the converted model."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq.pytree import call_arguments, tree_leaves
from tests.helpers.judging import agreement, sqnr, step_of
from tests.helpers.running import convert, run


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
