"""Sizes stay free in graphs, and what code read of tensors is asserted where it decides."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.graphs import REFUSES, X, Y, assert_alike, lowered, quantized
from tests.helpers.judging import sqnr
from tests.helpers.rewriting import assert_same, cases, image, model, rewritten, seq, structure
from tests.helpers.running import run

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
