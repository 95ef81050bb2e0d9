"""Matmuls and attention, masked and not, in oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.cases import Case, table
from tests.helpers.models import Call
from tests.helpers.onednn import assert_agrees, assert_lowers, computing, lower, steps
from tests.helpers.patterns import MATMUL_CASES
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert, run


@table(MATMUL_CASES)
def test_matmul(name, case, out):
    lowered = assert_lowers(case, out, None)
    found = computing(lowered)
    assert found["matmul"] == 1 and not dbrq.lowered_form(lowered).in_torch and not found["torch:matmul"], "\n".join(
        steps(lowered)
    )
    assert found["layer"] >= (2 if out == "float" else 3)


FLOAT_PRODUCTS = {
    "/ 4 + mask": lambda m, q, k: (q @ k.mT) / 4.0 + m.mask,
    "softmax": lambda m, q, k: (q @ k.mT * 0.25).softmax(-1),
    "bmm": lambda m, q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT),
    "vector": lambda m, q, k: torch.matmul(q, k[0, 0, 0]),
    "1 row": lambda m, q, k: q[:, :, :1] @ k.mT,
    "broadcast": lambda m, q, k: q @ k[:1, :1].mT,
    "einsum": lambda m, q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "baddbmm": lambda m, q, k: torch.baddbmm(m.mask.expand(6, 8, 8), q.flatten(0, 1), k.flatten(0, 1).mT),
    "masked_fill": lambda m, q, k: (q @ k.mT).masked_fill(m.mask > 0, -1e4),
}


@pytest.mark.parametrize("name", FLOAT_PRODUCTS)
def test_matmul_in_float(name):
    model = Call(
        lambda m, x: FLOAT_PRODUCTS[name](m, m.q(x), m.k(x)),
        q=nn.Linear(16, 16),
        k=nn.Linear(16, 16),
        mask=torch.randn(8, 8),
        w=torch.randn(16, 5),
    )
    assert_lowers(Case(lambda: model, (2, 3, 8, 16), "", behind="qlinear"), "float", None)


LENGTHS = (2, 3, 7, 16)
MASKS: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: torch.rand(2, 1, 7, 7) > 0.3,
    "bool, full": lambda: torch.rand(2, 3, 7, 7) > 0.3,
    "bool, 2-d": lambda: torch.rand(7, 7) > 0.3,
    "keys": lambda: (torch.arange(7) < torch.tensor([5, 7])[:, None])[:, None, None],
    "float": lambda: torch.randn(2, 1, 7, 7),
    "float, 2-d": lambda: torch.randn(7, 7),
    "float, full": lambda: torch.randn(2, 3, 7, 7),
    "-inf": lambda: torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf")),
    "1 query": lambda: torch.randn(1, 1, 1, 7),
    "expanded": lambda: torch.randn(2, 1, 1, 7).expand(2, 3, 7, 7),
}
ATTENTIONS: dict[str, Callable] = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "fewer queries": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :3], k, v),
    "fewer queries, causal": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :3], k, v, is_causal=True),
    "narrow values": lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :5]),
    "without heads": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0]),
    "one key": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :1], v[:, :, :1]),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "keys of one image": lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]),
    "transposed": lambda q, k, v: F.scaled_dot_product_attention(q.mT, k.mT, v.mT),
    "then heads merged": lambda q, k, v: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),
}


class Attending(nn.Module):
    """Heads by linear layers, as encoders make them, for ``fn(q, k, v)`` or ``fn(q, k, v, mask)``."""

    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn, self.q, self.k, self.v = fn, *(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x, *mask):
        b, h, n, d = x.shape
        x = x.transpose(1, 2).reshape(b, n, h * d)
        return self.fn(*(layer(x).view(b, n, h, d).transpose(1, 2) for layer in (self.q, self.k, self.v)), *mask)


def attending(fn: Callable) -> nn.Module:
    return Attending(fn).eval()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    model, x = attending(ATTENTIONS[name]), torch.randn(LENGTHS)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x)
    assert_agrees(run(lowered, x), run(quantized, x), "the converted model", exact=2e-3)
    assert_agrees(run(lowered, x), fake_quantized(quantized, model, x), "fake quantization", exact=2e-3)


@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_a_mask(mask):
    """A mask is an input, so that its kind and shape are known only when a plan is made."""
    model = attending(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask))
    inputs = (torch.randn(LENGTHS), MASKS[mask]())
    quantized = convert(model, inputs).quantized
    lowered = lower(quantized, inputs)
    for given in (inputs, (torch.randn(LENGTHS), MASKS[mask]()), inputs):
        expected = run(quantized, given)
        assert_agrees(run(lowered, given), expected, "the converted model", exact=2e-3)


def test_a_mask_that_hides_everything_gives_what_torch_gives():
    model = attending(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask))
    x, mask = torch.randn(LENGTHS), torch.ones(2, 1, 7, 7, dtype=torch.bool)
    mask[0, :, 2] = False
    quantized = convert(model, (x, mask)).quantized
    got, expected = (run(m, (x, mask)) for m in (lower(quantized, (x, mask)), quantized))
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert_agrees(got, expected, "the converted model", exact=2e-3)
