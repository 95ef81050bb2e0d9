"""Attention and transformer layers have every projection in int8."""

import warnings

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches, assert_precision, sqnr
from tests.helpers.models import Call
from tests.helpers.running import run


@by_name(
    {
        "self": (lambda m, x: m.mha(x, x, x)[0], {}),
        "no weights": (lambda m, x: m.mha(x, x, x, need_weights=False)[0], {}),
        "weights": (lambda m, x: m.mha(x, x, x, average_attn_weights=False), {}),
        "batch first": (lambda m, x: m.mha(x, x, x), {"batch_first": True}),
        "cross": (lambda m, x: m.mha(x[:3], x, x * 2), {}),
        "other sizes": (lambda m, x: m.mha(x, x[..., :16], x[..., :24])[0], {"kdim": 16, "vdim": 24}),
        "no bias": (lambda m, x: m.mha(x, x, x)[0], {"bias": False}),
        "bias k, v": (lambda m, x: m.mha(x, x, x)[0], {"add_bias_kv": True}),
        "zero attention": (lambda m, x: m.mha(x, x, x)[0], {"add_zero_attn": True}),
        "masks": (
            lambda m, x: m.mha(
                x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
                key_padding_mask=torch.zeros(4, 6, dtype=torch.bool)
            ), {},
        ),
        "unbatched": (lambda m, x: m.mha(x[:, 0], x[:, 0], x[:, 0]), {}),
    },
    "fn, options",
)  # fmt: skip
def test_multi_head_attention_has_every_projection_in_int8(fn, options):
    model = Call(fn, mha=nn.MultiheadAttention(32, 4, **options)).eval()
    x = torch.randn(6, 4, 32)
    nn.init.normal_(model.mha.out_proj.weight, std=0.2)
    converted = assert_matches(model, x, fx=False)
    assert_precision(converted, "linear", "int8", 4)
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_layer_has_every_projection_in_int8(norm_first, activation, batch_first):
    """In eval mode torch takes a fast path that skips Python; the quantized model must not."""
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, norm_first=norm_first, activation=activation, batch_first=batch_first
    ).eval()
    x = torch.randn(4, 6, 32)
    converted = assert_matches(layer, x, fx=False)
    assert_precision(converted, "linear", "int8", 6)
    assert sqnr(run(layer, x), run(converted, x)) > 25


def test_transformer_encoder_and_decoder():
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    inputs = (torch.randn(2, 6, 32), torch.randn(2, 5, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        converted = assert_matches(model, inputs, fx=False)
    assert dbrq.report(converted).coverage == 1.0


def test_encoder_with_padding_mask():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    model = Call(lambda m, x, mask: m.encoder(x, src_key_padding_mask=mask), encoder=encoder)
    converted = assert_matches(model, (torch.randn(2, 6, 32), mask), fx=False)
    assert dbrq.report(converted).coverage == 1.0
