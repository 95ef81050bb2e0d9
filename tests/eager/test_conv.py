"""Convolutions in every spelling, against FX graph mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches, assert_precision, rows, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, quantized_on, run

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

SIZES = {1: (20,), 2: (9, 8), 3: (5, 6, 4)}
NDIMS = pytest.mark.parametrize("ndim", [1, 2, 3])


def conv_example(ndim: int) -> torch.Tensor:
    return torch.randn(2, 4, *SIZES[ndim])


def conv_weight(ndim: int, groups: int = 1) -> torch.Tensor:
    return torch.randn(6, 4 // groups, *[3] * ndim) * 0.2


@NDIMS
@by_name(
    {
        "defaults": {},
        "no bias": {"bias": False},
        "stride": {"stride": 2},
        "padding": {"padding": 1},
        "same": {"padding": "same"},
        "valid": {"padding": "valid"},
        "dilation": {"dilation": 2},
        "groups": {"groups": 2},
        "depthwise": {"groups": 4, "out_channels": 8},
        "one output channel": {"out_channels": 1},
        "everything": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
    },
    "options",
)
def test_conv_module(ndim, options):
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    conv = getattr(nn, f"Conv{ndim}d")(**options)
    size = (9,) * ndim if ndim == 3 else SIZES[ndim]
    converted = assert_matches(nn.Sequential(conv), torch.randn(2, 4, *size))
    assert_precision(converted, f"conv{ndim}d", "int8", 1)


@NDIMS
def test_conv_module_with_keyword(ndim):
    conv = getattr(nn, f"Conv{ndim}d")(4, 6, 3)
    converted = assert_matches(Call(lambda m, x: m.conv(input=x), conv=conv), conv_example(ndim))
    assert_precision(converted, f"conv{ndim}d", "int8", 1)


@NDIMS
def test_conv_as_the_model_itself(ndim):
    converted = assert_matches(getattr(nn, f"Conv{ndim}d")(4, 6, 3), conv_example(ndim), fx=False)
    assert_precision(converted, f"conv{ndim}d", "int8", 1)


@NDIMS
@by_name(
    {
        "required only": lambda conv: lambda m, x: conv(x, m.weight),
        "with bias": lambda conv: lambda m, x: conv(x, m.weight, m.bias),
        "all positional": lambda conv: lambda m, x: conv(x, m.weight, m.bias, 2, 1, 1, 1),
        "some keywords": lambda conv: lambda m, x: conv(x, m.weight, m.bias, stride=2, padding=1),
        "all keywords": lambda conv: (
            lambda m, x: conv(input=x, weight=m.weight, bias=m.bias, stride=1, padding=2, dilation=2, groups=1)
        ),
        "bias None": lambda conv: lambda m, x: conv(x, m.weight, None, padding=1),
        "same": lambda conv: lambda m, x: conv(x, m.weight, m.bias, padding="same"),
    },
    "spelled",
)
def test_conv_function(ndim, spelled):
    fn = spelled(getattr(F, f"conv{ndim}d"))
    converted = assert_matches(Call(fn, weight=conv_weight(ndim), bias=torch.randn(6)), conv_example(ndim))
    assert_precision(converted, f"conv{ndim}d", "int8", 1)


@NDIMS
def test_conv_function_of_torch(ndim):
    fn = getattr(torch, f"conv{ndim}d")
    model = Call(
        lambda m, x: fn(x, m.weight, m.bias, padding=[1] * ndim), weight=conv_weight(ndim), bias=torch.randn(6)
    )
    assert_precision(assert_matches(model, conv_example(ndim)), f"conv{ndim}d", "int8", 1)


@NDIMS
def test_conv_function_with_groups(ndim):
    fn = getattr(F, f"conv{ndim}d")
    model = Call(lambda m, x: fn(x, m.weight, groups=2), weight=conv_weight(ndim, 2))
    assert_precision(assert_matches(model, conv_example(ndim)), f"conv{ndim}d", "int8", 1)


@by_name(
    {
        "view": lambda m, x: F.conv2d(x, m.weight.view(6, 4, 3, 3)),
        "detach": lambda m, x: F.conv2d(x, m.weight.detach()),
        "slice of outputs": lambda m, x: F.conv2d(x, m.weight[:3]),
        "transposed": lambda m, x: F.conv2d(x, m.weight.transpose(2, 3)),
        "chunk": lambda m, x: F.conv2d(x, m.weight.chunk(2)[1]),
    },
    "fn",
)
def test_conv_with_a_view_of_a_parameter_is_int8(fn):
    converted = assert_matches(Call(fn, weight=conv_weight(2)), conv_example(2), fx=False)
    assert_precision(converted, "conv2d", "int8", 1)


@NDIMS
def test_transposed_conv_is_right_and_says_why_float(ndim):
    conv = getattr(nn, f"ConvTranspose{ndim}d")(4, 6, 3, stride=2)
    model, x = nn.Sequential(conv), conv_example(ndim)
    converted = convert(model, x).quantized
    row = rows(converted, f"conv_transpose{ndim}d")[0]
    assert row.precision == "int8" or row.reason
    assert sqnr(run(model, x), run(converted, x)) > 30


@pytest.mark.parametrize(
    "options", [{"kernel_size": 2}, {"kernel_size": 4}, {"kernel_size": (2, 3), "dilation": (3, 1)}]
)
def test_same_padding_that_is_uneven(options):
    model = nn.Sequential(nn.Conv2d(3, 4, padding="same", **options), nn.Conv2d(4, 4, 1))
    got = run(quantized_on(model, X), X)
    assert got.shape == run(model, X).shape
    assert sqnr(run(model, X), got) > 30
