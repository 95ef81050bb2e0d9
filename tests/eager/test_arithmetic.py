"""Sums, products and their like, integers, and matrix products."""

import operator

import pytest
import torch
from torch import nn
from torch.ao.quantization import QConfigMapping

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches, assert_precision, rows
from tests.helpers.models import Between, Call
from tests.helpers.running import convert, run

# Addition and its like


BINARY = {
    "x + y": lambda x, y: x + y,
    "operator.add": operator.add,
    "x.add(y)": lambda x, y: x.add(y),
    "x.add(other=y)": lambda x, y: x.add(other=y),
    "torch.add": lambda x, y: torch.add(x, y),
    "torch.add(other=)": lambda x, y: torch.add(x, other=y),
    "torch.add(input=, other=)": lambda x, y: torch.add(input=x, other=y),
    "alpha=1": lambda x, y: torch.add(x, y, alpha=1),
    "alpha=2": lambda x, y: torch.add(x, y, alpha=2),
    "x.add(alpha=-1)": lambda x, y: x.add(y, alpha=-1),
    "x += y": operator.iadd,
    "x.add_(y)": lambda x, y: x.add_(y),
    "x.add_(alpha=2)": lambda x, y: x.add_(y, alpha=2),
    "add_ of a sum": lambda x, y: (x + y).add_(y),
    "x - y": lambda x, y: x - y,
    "x.sub(y)": lambda x, y: x.sub(y),
    "torch.sub": lambda x, y: torch.sub(x, y),
    "torch.subtract": lambda x, y: torch.subtract(x, other=y),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "torch.rsub": lambda x, y: torch.rsub(x, y),
    "x -= y": operator.isub,
    "x.sub_(y)": lambda x, y: x.sub_(y),
    "x * y": lambda x, y: x * y,
    "x.mul(y)": lambda x, y: x.mul(y),
    "torch.mul": lambda x, y: torch.mul(x, y),
    "torch.mul(other=)": lambda x, y: torch.mul(x, other=y),
    "torch.multiply": lambda x, y: torch.multiply(input=x, other=y),
    "x *= y": operator.imul,
    "x.mul_(y)": lambda x, y: x.mul_(y),
    "x / y": lambda x, y: x / (y.abs() + 1.0),
    "torch.div": lambda x, y: torch.div(x, (y.abs() + 1.0)),
    "x /= y": lambda x, y: operator.itruediv(x, y.abs() + 1.0),
    "broadcast": lambda x, y: x + y.mean((2, 3), keepdim=True),
    "broadcast mul": lambda x, y: x * y.mean((2, 3), keepdim=True),
    "broadcast a row": lambda x, y: x + y[:, :, :1],
}  # fmt: skip


@by_name(BINARY, "op")
def test_binary(op):
    model = Between(op, 2)
    # FX graph mode fuses sums that broadcast, and crashes.
    assert_matches(model, model.example, fx=False if op in (BINARY["broadcast"], BINARY["broadcast a row"]) else None)


@pytest.mark.parametrize(
    "spelling", [s for s in BINARY if "/" not in s and "div" not in s and not s.startswith("broad")]
)
def test_binary_between_convolutions_is_int8(spelling):
    model = Between(BINARY[spelling], 2)
    converted = convert(model, model.example).quantized
    for op in ("add", "sub", "mul"):
        if rows(converted, op):
            assert_precision(converted, op, "int8")


UNARY = {
    "x + x": lambda x: x + x,
    "x.add(x)": lambda x: x.add(x),
    "x.add_(x)": lambda x: x.add_(x),
    "x + 1.0": lambda x: x + 1.0,
    "x + 1": lambda x: x + 1,
    "1.0 + x": lambda x: 1.0 + x,
    "torch.add(x, 1.0)": lambda x: torch.add(x, 1.0),
    "torch.add(x, other=1.0)": lambda x: torch.add(x, other=1.0),
    "x.add_(1.0)": lambda x: x.add_(1.0),
    "x += 1.0": lambda x: operator.iadd(x, 1.0),
    "alpha and a number": lambda x: torch.add(x, 2.0, alpha=0.5),
    "x - 1.0": lambda x: x - 1.0,
    "1.0 - x": lambda x: 1.0 - x,
    "x.sub_(1.0)": lambda x: x.sub_(1.0),
    "x * x": lambda x: x * x,
    "x * 2.0": lambda x: x * 2.0,
    "2.0 * x": lambda x: 2.0 * x,
    "x.mul_(0.5)": lambda x: x.mul_(0.5),
    "x / 2.0": lambda x: x / 2.0,
    "2.0 / x": lambda x: 2.0 / (x * x + 1.0),
    "x.div_(2.0)": lambda x: x.div_(2.0),
    "div floor": lambda x: torch.div(x, 0.1, rounding_mode="floor"),
}


@by_name(UNARY, "op")
def test_binary_with_itself_or_a_number(op):
    model = Between(op)
    assert_matches(model, model.example)


@by_name({**{k: (v, 2) for k, v in BINARY.items()}, **{k: (v, 1) for k, v in UNARY.items()}}, "op, count")
def test_binary_on_inputs_of_the_model(op, count):
    """Nothing here is int8 for certain, so a float result is right, and nothing breaks."""
    assert_matches(Call(lambda m, *xs: op(*xs), count), tuple(torch.randn(2, 3, 16, 16) for _ in range(count)))


@by_name({k: v for k, v in BINARY.items() if "=" in k or "_(" in k}, "op")
def test_in_place_without_rebinding_changes_the_value(op):
    """The left operand itself changes; later readers of it see that."""

    def inplace(x, y):
        kept = x
        op(x, y)
        return kept

    model = Between(inplace, 2)
    assert_matches(model, model.example, fx=False)


INT_OPS = {
    "cat": lambda x, y: torch.cat([x, y], 0),
    "stack": lambda x, y: torch.stack([x, y]),
    "add": lambda x, y: x + y,
    "torch.add": lambda x, y: torch.add(x, y, alpha=2),
    "add a number": lambda x, y: x + 1 + y,
    "add_": lambda x, y: x.add_(y),
    "mul": lambda x, y: x * y,
    "sub": lambda x, y: x - y,
    "div": lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
@by_name(INT_OPS, "op")
def test_integers_are_untouched(op, dtype):
    if dtype is torch.bool and op in (INT_OPS["sub"], INT_OPS["div"], INT_OPS["add a number"], INT_OPS["add_"]):
        pytest.skip("not defined for bool")
    x, y = (torch.randint(0, 2, (3, 4)).to(dtype) for _ in range(2))
    model = Call(lambda m, x, y: op(x, y))
    converted = convert(model, (x, y)).quantized
    expected, got = run(model, (x, y)), run(converted, (x, y))
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)


def test_integers_beside_int8_values():
    def forward(m, x, index):
        h = m.conv(x)
        return m.linear(h.flatten(1)) + (index + index)[:, None], torch.cat([index, index])

    model = Call(forward, conv=nn.Conv2d(4, 8, 3), linear=nn.Linear(8 * 4, 5))
    assert_matches(model, (torch.randn(3, 4, 4, 4), torch.arange(3)))


# Matrix products


MATMULS = {
    "x @ y": lambda x, y: x @ y.transpose(-1, -2),
    "torch.matmul": lambda x, y: torch.matmul(x, y.transpose(-1, -2)),
    "torch.matmul(other=)": lambda x, y: torch.matmul(input=x, other=y.transpose(-1, -2)),
    "x.matmul": lambda x, y: x.matmul(y.mT),
    "operator.matmul": lambda x, y: operator.matmul(x, y.mT),
    "torch.bmm": lambda x, y: torch.bmm(x.flatten(0, 1), y.flatten(0, 1).mT),
    "bmm(mat2=)": lambda x, y: torch.bmm(x.flatten(0, 1), mat2=y.flatten(0, 1).mT),
    "x.bmm": lambda x, y: x.flatten(0, 1).bmm(y.flatten(0, 1).mT),
}


@pytest.mark.parametrize("default", [True, False], ids=["by default float", "asked for int8"])
@by_name(MATMULS, "op")
def test_matmul(op, default):
    recipe = dbrq.default_qconfig_mapping()
    mapping = recipe if default else QConfigMapping().set_global(recipe.global_qconfig)
    model = Call(lambda m, x: op(m.q(x), m.k(x)), q=nn.Linear(16, 16), k=nn.Linear(16, 16))
    converted = assert_matches(model, torch.randn(2, 3, 8, 16), mapping)
    assert_precision(converted, "matmul", "float" if default else "int8", 1)
