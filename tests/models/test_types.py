"""Inputs, outputs and models of other types than float32."""

import pytest
import torch
from torch import nn

import dbrq
from dbrq import QuantizationError
from tests.helpers.cases import by_name
from tests.helpers.images import images
from tests.helpers.judging import assert_matches, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run


def test_integer_inputs():
    model = Call(lambda m, x: m.conv(x / 255.0), conv=nn.Conv2d(3, 8, 3))
    assert_matches(model, torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8), fx=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_types_are_right_or_a_clear_error(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(dtype)
    x = images().to(dtype)
    try:
        converted = convert(model, x).quantized
        got = run(converted, x)
    except QuantizationError as error:
        assert str(dtype).removeprefix("torch.") in str(error)
    else:
        assert got.dtype is dtype and sqnr(run(model, x).double(), got.double()) > 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_input_of_another_type_than_recorded_is_a_clear_error_or_right(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    converted = convert(model, images()).quantized
    with pytest.raises(QuantizationError, match="dtype"):
        run(converted, images().to(dtype))
    run(converted, images())


def test_a_model_in_two_types():
    def forward(m, x):
        return m.last(m.wide(m.first(x).double()).float())

    model = Call(forward, first=nn.Linear(16, 16), wide=nn.Linear(16, 16).double(), last=nn.Linear(16, 8))
    converted = assert_matches(model, torch.randn(64, 16), fx=False)
    report = {row.path: row for row in dbrq.report(converted).rows}
    assert report["wide"].precision == "float" and "float64" in report["wide"].reason
    assert report["first"].precision == report["last"].precision == "int8"


@by_name(
    {
        "str": lambda h: "text",
        "int": lambda h: int(h.argmax()),
        "float": lambda h: h.sum().item(),
        "None": lambda h: None,
        "bool": lambda h: bool((h > 0).any()),
        "list of numbers": lambda h: h[0, 0, 0].tolist(),
        "numpy": lambda h: h.detach().numpy().shape,
    },
    "wrap",
)
def test_outputs_that_are_no_tensors(wrap):
    model = Call(lambda m, x: wrap(m.last(m.conv(x))), conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1))
    converted = convert(model, images()).quantized
    assert type(run(converted, images())) is type(run(model, images()))
