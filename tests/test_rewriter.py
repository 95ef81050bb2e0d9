"""``rewrite``: the graph of a converted model computes what the model computes, for other sizes too, in Python and in TorchScript.

Each case is a forward in one table; what it is compared with is the converted model itself.
"""

import copy
import inspect
import math
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import agreement, run, sqnr, step_of
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qconfig,
)
from torch.nn.utils import parametrizations

import dbrq
from dbrq.containers import call_arguments, tree_leaves

BOTH = pytest.mark.parametrize("how", ["python", "script"])


class Parts(nn.Module):
    """What the forwards below are made of: ``[b, t, 8]`` and ``[b, 3, h, w]`` in."""

    def __init__(self, **parts):
        super().__init__()
        self.fc, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)


def model(forward, **parts) -> nn.Module:
    """A module with this ``forward``."""
    return type("Model", (Parts,), {"forward": forward})(**parts).eval()


def image_model(forward, **parts) -> nn.Module:
    return model(forward, conv=nn.Conv2d(3, 8, 3, padding=1), head=nn.Conv2d(8, 4, 1), **parts)


def seq(b=2, t=6) -> Tensor:
    return torch.randn(b, t, 8)


def image(b=2, h=6, w=8) -> Tensor:
    return torch.randn(b, 3, h, w)


def rewritten(module, example, mapping=None, data=None):
    """The converted model, its graph, and the graph scripted."""
    args, kwargs = call_arguments(copy.deepcopy(example))
    q = dbrq.quantize(module, copy.deepcopy(data or [example]), mapping)
    g = dbrq.rewrite(q, args, example_kwargs=kwargs)
    return q, g, torch.jit.script(g)


def leaves(output) -> list:
    """Tensors and numbers in order, for outputs whose containers differ; TorchScript has no None in tuples of tensors."""
    return [leaf for leaf in tree_leaves(output) if leaf is not None]


def assert_agree(got, expected, what: str) -> None:
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected), what
    for a, b in zip(got, expected, strict=True):
        if not isinstance(b, Tensor):
            assert a == pytest.approx(b) and type(a) is type(b), what
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        if not b.is_floating_point():
            assert torch.equal(a, b), what
            continue
        share = agreement(a, b, step_of(b))
        assert share >= 0.99, f"{what}: {share:.2%} within a step, {sqnr(b, a):.1f} dB"


def assert_same(module, example, *others, mapping=None):
    """Converted, rewritten and scripted agree on the example and on other inputs."""
    q, g, s = rewritten(module, example, mapping)
    for inputs in (example, *others):
        expected = run(q, inputs)
        got = run(g, inputs)
        assert type(got) is type(expected)
        assert_agree(got, expected, "rewritten")
        scripted = run(s, inputs)
        for a, b in zip(leaves(scripted), leaves(got), strict=True):
            torch.testing.assert_close(a, b)
    return q, g, s
