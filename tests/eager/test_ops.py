"""CONFORMANCE.md, section 1: single ops in every spelling, against FX graph mode."""

import copy
import operator
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    per_channel_dynamic_qconfig,
)

import dbrq
from tests.helpers import (
    Between,
    Call,
    agreement,
    assert_matches,
    assert_precision,
    convert,
    fx_quantize,
    rows,
    run,
    sqnr,
)

SIZES = {1: (20,), 2: (9, 8), 3: (5, 6, 4)}
NDIMS = pytest.mark.parametrize("ndim", [1, 2, 3])


def by_name(cases: dict, *names: str):
    return pytest.mark.parametrize(",".join(names), list(cases.values()), ids=list(cases))


# Convolutions


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


def _standardized(weight, gain):
    deviation, mean = torch.std_mean(weight, (1, 2, 3), keepdim=True)
    return (weight - mean) / deviation * gain


def _standardized_by_batch_norm(weight, gain):
    flat = weight.reshape(1, weight.size(0), -1)
    return F.batch_norm(flat, None, None, (gain * 0.7).view(-1), training=True, momentum=0.0).reshape_as(weight)


COMPUTED = by_name(
    {
        "scaled": lambda weight, gain: weight * 2.0,
        "sum": lambda weight, gain: weight + weight,
        "with a gain": lambda weight, gain: weight * gain,
        "normalized": lambda weight, gain: weight / weight.flatten(1).norm(dim=1)[:, None, None, None],
        "standardized": _standardized,
        "standardized by batch norm": _standardized_by_batch_norm,
        "parts": lambda weight, gain: torch.cat([part.contiguous() * i for i, part in enumerate(weight.split(2), 1)]),
        "flipped": lambda weight, gain: weight.flip(-1),
        "padded": lambda weight, gain: F.pad(weight, (1, 0)),
        "with a product": lambda weight, gain: weight + (weight.flatten(1) @ weight.flatten(1).T @ weight.flatten(1))
        .view_as(weight),
        "made of numbers": lambda weight, gain: torch.ones(6, 4, 3, 3) * torch.tensor([1.0, 2.0, 1.0]),
    },
    "compute",
)  # fmt: skip


def computed_weight(compute) -> tuple[nn.Module, torch.Tensor]:
    parameters = {"weight": nn.Parameter(conv_weight(2)), "gain": nn.Parameter(torch.rand(6, 1, 1, 1) + 0.5)}
    return Call(lambda m, x: F.conv2d(x, compute(m.weight, m.gain)).relu(), **parameters), conv_example(2)


@COMPUTED
def test_conv_with_a_weight_computed_from_parameters_is_as_with_a_parameter(compute):
    model, x = computed_weight(compute)
    baked = Call(lambda m, x: F.conv2d(x, m.weight).relu(), weight=compute(model.weight, model.gain).detach())
    converted, other = convert(model, x).quantized, convert(baked, x).quantized
    assert_precision(converted, "conv2d", "int8", 1)
    torch.testing.assert_close(run(converted, x), run(other, x), rtol=0, atol=0)
    graph = dbrq.rewrite(converted, x)
    torch.testing.assert_close(run(graph, x), run(dbrq.rewrite(other, x), x))
    assert len(graph.graph.nodes) == len(dbrq.rewrite(other, x).graph.nodes)  # nothing is left of what computes it
    torch.testing.assert_close(run(dbrq.lower(converted, x), x), run(dbrq.lower(other, x), x))
    loaded = copy.deepcopy(converted)
    loaded.load_state_dict(converted.state_dict())
    torch.testing.assert_close(run(loaded, x), run(converted, x), rtol=0, atol=0)


def test_layers_with_computed_weights_in_a_loop_hold_one_each():
    weights = [nn.Parameter(torch.randn(4, 4) * 3**n) for n in range(3)]

    def fn(m, x):
        for weight in m.weights:
            x = F.linear(x, weight / weight.norm() * 2)
        return x

    model, x = Call(fn, weights=nn.ParameterList(weights)), torch.randn(5, 4)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 3)
    assert sqnr(run(model, x), run(converted, x)) > 25
    assert sum(name.endswith("_int8") for name in converted.state_dict()) == 3


def test_computed_weight_is_that_of_the_trained_parameters():
    model, x = computed_weight(_standardized)
    prepared = dbrq.prepare(model, x)
    run(prepared, x)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
    converted = dbrq.convert(prepared)
    assert_precision(converted, "conv2d", "int8", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(run(prepared, x), run(converted, x)) > 30


def test_prepared_model_with_a_computed_weight_can_be_pickled():
    model, x = Call(_rows_of_product, weight=nn.Parameter(torch.randn(4, 6))), torch.randn(5, 4)
    prepared = dbrq.prepare(model, x)
    run(prepared, x)
    converted = dbrq.convert(pickle.loads(pickle.dumps(prepared)))
    assert_precision(converted, "linear", "int8", 1)
    assert sqnr(run(model, x), run(converted, x)) > 30


def _rows_of_product(m, x):
    return F.linear(x, (1 - m.weight).T * 2)


def test_computed_weight_in_quantization_aware_training():
    model, x = computed_weight(_standardized)
    prepared = dbrq.prepare(model, x, torch.ao.quantization.get_default_qat_qconfig_mapping("onednn"))
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    for _ in range(4):
        prepared.train()(x).square().mean().backward()
        assert prepared.gain.grad.abs().sum() > 0
        optimizer.step()
        optimizer.zero_grad()
    expected = run(prepared.eval(), x)
    converted = dbrq.convert(prepared)
    assert_precision(converted, "conv2d", "int8", 1)
    assert sqnr(expected, run(converted, x)) > 80


@pytest.mark.filterwarnings("ignore:dbrq. relu.0 runs in float")
def test_parameters_of_a_computed_weight_that_change_after_conversion_are_noticed():
    model, x = computed_weight(_standardized)
    converted = convert(model, x).quantized
    model.weight.data = torch.randn(6, 4, 3, 3)
    converted.load_state_dict(model.state_dict(), strict=False)
    with pytest.warns(UserWarning, match="not computed as it was"):
        torch.testing.assert_close(run(converted, x), run(model, x))
    strict = dbrq.convert(convert(model, x).prepared, strict=True)
    strict.gain.mul_(1.5)
    with pytest.raises(dbrq.DeviationError):
        run(strict, x)


def _counting(m, x):
    m.count += 1
    return F.conv2d(x, m.weight * m.count)


def _drifting(m, x):
    m.number = getattr(m, "number", 0.0) + 0.5
    return F.conv2d(x, m.weight * m.number)


def _through_a_view(m, x):
    weight = m.weight * 2
    weight.view(-1)[0] = x.mean()
    return F.conv2d(x, weight)


@by_name(
    {
        "input": lambda m, x: F.conv2d(x, m.weight * x.mean()),
        "size of the input": lambda m, x: F.conv2d(x, m.weight * torch.full((), x.amax().item())),
        "random": lambda m, x: F.conv2d(x, m.weight * (1 + torch.rand(1) * 0)),
        "changed in place": lambda m, x: F.conv2d(x, (m.weight * 2).mul_(x.mean())),
        "changed through a view": _through_a_view,
        "buffer that changes": _counting,
        "number that changes": _drifting,
    },
    "fn",
)
def test_conv_with_another_weight_each_time_stays_float(fn):
    model, x = Call(fn, weight=conv_weight(2)), conv_example(2)
    model.register_buffer("count", torch.zeros(()))
    prepared = dbrq.prepare(model, x)
    for scale in (1, 2):
        run(prepared, x * scale)
    converted = dbrq.convert(prepared)
    assert_precision(converted, "conv2d", "float", 1)
    assert "its weight is computed in forward" in rows(converted, "conv2d")[0].reason


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


# Linear


LINEAR_INPUTS = {"2-d": (5, 16), "3-d": (3, 5, 16), "4-d": (2, 3, 5, 16), "1-d": (16,)}


@by_name(LINEAR_INPUTS, "shape")
@pytest.mark.parametrize("bias", [True, False])
def test_linear_module(shape, bias):
    converted = assert_matches(nn.Sequential(nn.Linear(16, 24, bias)), torch.randn(shape))
    assert_precision(converted, "linear", "int8", 1)


@by_name(LINEAR_INPUTS, "shape")
@by_name(
    {
        "no bias": lambda m, x: F.linear(x, m.weight),
        "bias": lambda m, x: F.linear(x, m.weight, m.bias),
        "bias=": lambda m, x: F.linear(x, m.weight, bias=m.bias),
        "weight=": lambda m, x: F.linear(x, weight=m.weight),
        "weight= bias=": lambda m, x: F.linear(x, weight=m.weight, bias=m.bias),
        "input= weight= bias=": lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias),
    },
    "fn",
)
def test_linear_function(fn, shape):
    model = Call(fn, weight=torch.randn(24, 16) * 0.2, bias=torch.randn(24))
    assert_precision(assert_matches(model, torch.randn(shape)), "linear", "int8", 1)


@by_name(
    {
        "w.t()": ((16, 24), lambda m, x: F.linear(x, m.weight.t())),
        "w.T": ((16, 24), lambda m, x: F.linear(x, m.weight.T)),
        "w.mT": ((16, 24), lambda m, x: F.linear(x, m.weight.mT)),
        "permute": ((16, 24), lambda m, x: F.linear(x, m.weight.permute(1, 0))),
        "transpose": ((16, 24), lambda m, x: F.linear(x, torch.transpose(m.weight, 0, 1))),
        "view": ((24, 4, 4), lambda m, x: F.linear(x, m.weight.view(24, 16))),
        "flatten": ((24, 4, 4), lambda m, x: F.linear(x, m.weight.flatten(1))),
        "squeeze": ((24, 16, 1), lambda m, x: F.linear(x, m.weight.squeeze(-1))),
        "rows": ((48, 16), lambda m, x: F.linear(x, m.weight[24:])),
        "columns": ((24, 32), lambda m, x: F.linear(x, m.weight[:, 16:])),
        "chunk": ((72, 16), lambda m, x: torch.cat([F.linear(x, w) for w in m.weight.chunk(3)], -1)),
        "select": ((2, 24, 16), lambda m, x: F.linear(x, m.weight[1])),
    },
    "shape, fn",
)
def test_linear_with_a_pure_view_counts_as_the_parameter(shape, fn):
    converted = assert_matches(Call(fn, weight=torch.randn(shape) * 0.2), torch.randn(5, 16), fx=False)
    assert_precision(converted, "linear", "int8")


@by_name(
    {
        "x @ w": ((16, 24), lambda m, x: x @ m.weight),
        "x @ w.T": ((24, 16), lambda m, x: x @ m.weight.T),
        "matmul, w.t()": ((24, 16), lambda m, x: torch.matmul(x, m.weight.t())),
        "mm, rows": ((32, 24), lambda m, x: torch.mm(x, m.weight[16:])),
        "addmm, w.T": ((24, 16), lambda m, x: torch.addmm(m.bias, x, m.weight.T)),
    },
    "shape, fn",
)
def test_product_with_a_parameter_or_its_view_is_a_linear_layer(shape, fn):
    model, x = Call(fn, weight=torch.randn(shape) * 0.2, bias=torch.randn(24)), torch.randn(5, 16)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 1)
    expected = run(converted, x)
    assert sqnr(run(model, x), expected) > 30
    for backend in ("torchscript", "onednn"):
        torch.testing.assert_close(run(dbrq.lower(converted, x, backend=backend), x), expected, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(converted(x), expected)


@by_name(
    {
        "scaled": lambda m, x: F.linear(x, m.weight * 0.5),
        "masked": lambda m, x: F.linear(x, m.weight.masked_fill(m.weight < 0, 0.0)),
        "copied rows": lambda m, x: F.linear(x, torch.cat([m.weight, m.weight])),
    },
    "fn",
)
def test_linear_with_a_computed_weight(fn):
    model, x = Call(fn, weight=torch.randn(24, 16)), torch.randn(5, 16)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 1)
    assert sqnr(run(model, x), run(converted, x)) > 30


@by_name({"per tensor": default_dynamic_qconfig, "per channel": per_channel_dynamic_qconfig}, "qconfig")
@by_name(
    {
        "module": (lambda: nn.Sequential(nn.Linear(16, 24))),
        "function": (
            lambda: Call(lambda m, x: F.linear(x, m.weight, m.bias), weight=torch.randn(24, 16), bias=torch.randn(24))
        ),
    },
    "make",
)
def test_dynamic_linear_is_float_in_and_out(make, qconfig):
    mapping = QConfigMapping().set_global(qconfig)
    converted = assert_matches(make(), torch.randn(32, 16), mapping)
    assert_precision(converted, "linear", "int8", 1)
    assert "dynamic" in rows(converted, "linear")[0].kernel


def test_dynamic_linear_follows_the_range_of_its_input():
    model, x = nn.Sequential(nn.Linear(16, 24)), torch.randn(32, 16)
    converted = convert(model, x, QConfigMapping().set_global(default_dynamic_qconfig)).quantized
    for factor in (0.01, 1.0, 1000.0):
        assert sqnr(run(model, x * factor), run(converted, x * factor)) > 25


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


# cat and stack


CATS = {
    "list": lambda x, y: torch.cat([x, y], 1),
    "tuple": lambda x, y: torch.cat((x, y), 1),
    "dim=": lambda x, y: torch.cat([x, y], dim=1),
    "tensors=": lambda x, y: torch.cat(tensors=[x, y], dim=1),
    "negative dim": lambda x, y: torch.cat([x, y], -3),
    "default dim": lambda x, y: torch.cat([x, y]),
    "last dim": lambda x, y: torch.cat((x, y), 3),
    "the same twice": lambda x, y: torch.cat([x, x], 1),
    "the same twice and another": lambda x, y: torch.cat([x, y, x], 1),
    "one": lambda x, y: torch.cat([x], 1),
    "concat": lambda x, y: torch.concat([x, y], 1),
    "concatenate": lambda x, y: torch.concatenate([x, y], 1),
    "concatenate axis": lambda x, y: torch.concatenate([x, y], axis=1),
    "cat of a cat": lambda x, y: torch.cat([torch.cat([x, y], 1), y], 1),
    "stack": lambda x, y: torch.stack([x, y], 2).flatten(1, 2),
    "stack keyword": lambda x, y: torch.stack(tensors=(x, y), dim=-1).sum(-1),
}


@by_name(CATS, "op")
def test_cat(op):
    model = Between(op, 2)
    assert_matches(model, model.example)


@pytest.mark.parametrize("spelling", [s for s in CATS if not s.startswith("stack keyword")])
def test_cat_of_two_producers_is_int8_with_shared_qparams(spelling):
    model = Between(CATS[spelling], 2)
    converted = convert(model, model.example).quantized
    found = [op for op in converted._auto_quant_state.ops() if op.op in ("cat", "stack")]
    for op in found:
        assert op.decision.precision == "int8"
        assert {read.value for read in op.decision.reads} == {op.decision.writes}


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


# Embeddings


class Scaled(nn.Embedding):
    """A subclass with a forward of its own: it is looked into, not replaced."""

    def forward(self, index):
        return super().forward(index) * 2.0


class Renamed(nn.Embedding):
    """A subclass that is an embedding all the same."""


EMBEDDINGS = QConfigMapping().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig).set_object_type(
    nn.EmbeddingBag, float_qparams_weight_only_qconfig).set_object_type(F.embedding, float_qparams_weight_only_qconfig
    ).set_object_type(F.embedding_bag, float_qparams_weight_only_qconfig).set_object_type(
    Renamed, float_qparams_weight_only_qconfig).set_object_type(Scaled, float_qparams_weight_only_qconfig)  # fmt: skip


@by_name(
    {
        "module": lambda: nn.Sequential(nn.Embedding(40, 16)),
        "padding_idx": lambda: nn.Sequential(nn.Embedding(40, 16, padding_idx=3)),
        "subclass": lambda: nn.Sequential(Renamed(40, 16)),
        "function": lambda: Call(lambda m, i: F.embedding(i, m.weight), weight=torch.randn(40, 16)),
        "function keywords": lambda: Call(
            lambda m, i: F.embedding(input=i, weight=m.weight, padding_idx=0), weight=torch.randn(40, 16)
        ),
        "torch.embedding": lambda: Call(lambda m, i: torch.embedding(m.weight, i), weight=torch.randn(40, 16)),
    },
    "make",
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding(make, dtype):
    index = torch.randint(0, 40, (5, 7), dtype=dtype)
    converted = assert_matches(make(), index, EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding", "int8", 1)
    assert not any(t.is_floating_point() and t.numel() >= 40 * 16 for t in converted.state_dict().values())


def test_embedding_module_against_fx():
    model, index = nn.Sequential(nn.Embedding(40, 16)), torch.randint(0, 40, (5, 7))
    ours = convert(model, index, EMBEDDINGS).quantized
    step = (model[0].weight.amax(1) - model[0].weight.amin(1)).max().item() / 255
    assert agreement(run(ours, index), run(fx_quantize(model, index, EMBEDDINGS), index), step) == 1.0


def test_embedding_subclass_with_its_own_forward_is_looked_into():
    converted = assert_matches(nn.Sequential(Scaled(40, 16)), torch.randint(0, 40, (5, 7)), EMBEDDINGS, fx=False)
    assert rows(converted, "embedding")[0].path == "0.embedding.0"
    assert_precision(converted, "embedding", "int8", 1)


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("layout", ["2-d", "offsets", "padding_idx", "last offset"])
def test_embedding_bag(mode, layout):
    options = {"padding_idx": {"padding_idx": 1}, "last offset": {"include_last_offset": True}}.get(layout, {})
    bag = nn.EmbeddingBag(40, 16, mode=mode, **options)
    index = torch.randint(0, 40, (5, 7))
    inputs = (index,)
    if layout in ("offsets", "last offset"):
        inputs = (index.flatten(), torch.tensor([0, 4, 4, 20] + ([35] if layout == "last offset" else [])))
    converted = assert_matches(Call(lambda m, *xs: m.bag(*xs), len(inputs), bag=bag), inputs, EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding_bag", "int8", 1)


def test_embedding_bag_function_and_weights_per_sample():
    def forward(m, index, share):
        weighted = F.embedding_bag(index, m.weight, per_sample_weights=share, mode="sum")
        return weighted + F.embedding_bag(input=index, weight=m.weight, mode="sum")

    index = torch.randint(0, 40, (5, 7))
    model = Call(forward, weight=torch.randn(40, 16))
    converted = assert_matches(model, (index, torch.rand(5, 7)), EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding_bag", "int8", 2)


def test_embedding_bag_module_with_keywords():
    model = Call(
        lambda m, i, w: m.bag(input=i, per_sample_weights=w) + m.bag(i, per_sample_weights=w),
        bag=nn.EmbeddingBag(40, 16, mode="sum"),
    )
    converted = assert_matches(model, (torch.randint(0, 40, (5, 7)), torch.rand(5, 7)), EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding_bag", "int8", 2)


# Recurrent layers


@by_name(
    {
        "lstm": lambda: nn.LSTM(12, 16, num_layers=2, batch_first=True),
        "bidirectional": lambda: nn.LSTM(12, 16, bidirectional=True, batch_first=True),
        "gru": lambda: nn.GRU(12, 16, batch_first=True),
        "rnn": lambda: nn.RNN(12, 16, batch_first=True),
    },
    "make",
)
def test_recurrent_in_dynamic_mode(make):
    model, x = nn.Sequential(make()), torch.randn(4, 6, 12)
    mapping = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    converted = convert(model, x, mapping).quantized
    (expected, _), (got, _) = run(model, x), run(converted, x)
    assert dbrq.report(converted).rows[0].precision == "int8"
    assert sqnr(expected, got) > 30


def test_lstm_keeps_its_interface():
    def forward(m, x, h, c):
        out, (hn, cn) = m.lstm(input=x, hx=(h, c))
        return {"out": out, "state": (hn, cn)}

    model = Call(forward, lstm=nn.LSTM(12, 16))
    inputs = (torch.randn(6, 4, 12), torch.randn(1, 4, 16), torch.randn(1, 4, 16))
    converted = convert(model, inputs, QConfigMapping().set_global(default_dynamic_qconfig)).quantized
    got, expected = run(converted, inputs), run(model, inputs)
    assert sqnr(expected["out"], got["out"]) > 25
    assert sqnr(expected["state"][1], got["state"][1]) > 25


# Pools and activations


POOLS = {
    "max_pool2d module": nn.MaxPool2d(2),
    "max_pool2d options": nn.MaxPool2d(3, stride=2, padding=1, dilation=1, ceil_mode=True),
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "F.max_pool2d keywords": lambda x: F.max_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, [2, 2]),
    "avg_pool2d module": nn.AvgPool2d(2),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive_avg_pool2d module": nn.AdaptiveAvgPool2d(1),
    "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "mean method": lambda x: x.mean((2, 3), keepdim=True),
    "mean keywords": lambda x: x.mean(dim=[2, 3], keepdim=True),
    "torch.mean": lambda x: torch.mean(x, (2, 3), True),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate nearest": lambda x: F.interpolate(x, size=(7, 7), mode="nearest"),
}


@by_name(POOLS, "op")
def test_pool_between_convolutions(op):
    model = Between(op)
    converted = assert_matches(model, model.example)
    assert {row.precision for row in dbrq.report(converted).rows} == {"int8"}


def test_bilinear_interpolation_says_why_float():
    model = Between(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))
    converted = assert_matches(model, model.example)
    assert "bilinear" in rows(converted, "interpolate")[0].reason


def test_max_pool_that_returns_indices():
    model = Between(lambda x: F.max_pool2d(x, 2, return_indices=True)[0])
    assert_matches(model, model.example, fx=False)


@pytest.mark.parametrize("ndim", [1, 3])
@pytest.mark.parametrize("kind", ["MaxPool", "AvgPool", "AdaptiveAvgPool"])
def test_pool_of_other_rank(ndim, kind):
    model = Between(getattr(nn, f"{kind}{ndim}d")(2), ndim=ndim)
    assert_matches(model, model.example, fx=False)


ACTIVATIONS = {
    "ReLU": nn.ReLU(),
    "ReLU in place": nn.ReLU(inplace=True),
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "x.relu()": lambda x: x.relu(),
    "x.relu_()": lambda x: x.relu_(),
    "relu(input=)": lambda x: F.relu(input=x),
    "ReLU6": nn.ReLU6(),
    "F.relu6": F.relu6,
    "Hardtanh": nn.Hardtanh(),
    "F.hardtanh": lambda x: F.hardtanh(x, -0.5, max_val=0.5),
    "F.hardtanh_": lambda x: F.hardtanh_(x),
    "clamp": lambda x: x.clamp(0, 0.5),
    "torch.clamp": lambda x: torch.clamp(x, min=-0.3, max=0.3),
    "clamp_": lambda x: x.clamp_(min=0.0),
    "clip": lambda x: torch.clip(x, -0.2, 0.4),
    "clamp min only": lambda x: x.clamp(min=-0.1),
    "clamp max only": lambda x: x.clamp(max=0.1),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "clamp with tensors": lambda x: torch.clamp(x, x.mean(), x.max()),
    "Hardswish": nn.Hardswish(),
    "F.hardswish": F.hardswish,
    "SiLU": nn.SiLU(),
    "SiLU in place": nn.SiLU(inplace=True),
    "F.silu": F.silu,
    "GELU": nn.GELU(),
    "GELU tanh": nn.GELU(approximate="tanh"),
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "LeakyReLU": nn.LeakyReLU(0.2),
    "F.leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.1),
    "F.leaky_relu_": lambda x: F.leaky_relu_(x, 0.1),
    "Tanh": nn.Tanh(),
    "x.tanh()": lambda x: x.tanh(),
    "torch.tanh_": torch.tanh_,
    "Sigmoid": nn.Sigmoid(),
    "x.sigmoid_()": lambda x: x.sigmoid_(),
    "ELU": nn.ELU(),
    "F.elu_": lambda x: F.elu_(x, 0.5),
    "Mish": nn.Mish(),
    "Hardsigmoid": nn.Hardsigmoid(),
    "x * sigmoid(x)": lambda x: x * torch.sigmoid(x),
    "PReLU": nn.PReLU(),
    "Softplus": nn.Softplus(),
    "Softmax": nn.Softmax(1),
    "softmax method": lambda x: x.softmax(dim=1),
    "threshold": nn.Threshold(0.1, 0.0),
    "abs": torch.abs,
    "exp": torch.exp,
    "neg": operator.neg,
    "square": torch.square,
}


@pytest.mark.parametrize("head", ["conv", "linear"])
@by_name(ACTIVATIONS, "op")
def test_activation_between_int8_layers(op, head):
    if isinstance(op, nn.PReLU):
        pytest.skip("FX graph mode is wrong here: see test_traps.py")
    op = copy.deepcopy(op)
    if head == "conv":
        model = Between(op)
        assert_matches(model, model.example)
    else:
        model = Call(lambda m, x: m.second(m.op(m.first(x))), first=nn.Linear(16, 32), second=nn.Linear(32, 24), op=op)
        assert_matches(model, torch.randn(64, 16))


# Ops that move elements


MOVES = {
    "view": lambda x: x.view(x.size(0), -1),
    "view twice": lambda x: x.view(2, 8, -1).view(2, 8, 10, 10),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "torch.reshape": lambda x: torch.reshape(x, (2, -1)),
    "flatten": lambda x: x.flatten(1),
    "torch.flatten": lambda x: torch.flatten(x, start_dim=1),
    "Flatten": nn.Flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 4)).flatten(1, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute tuple": lambda x: x.permute((0, 1, 3, 2)),
    "torch.permute": lambda x: torch.permute(x, dims=(0, 3, 1, 2)),
    "transpose": lambda x: x.transpose(1, 2),
    "swapaxes": lambda x: torch.swapaxes(x, 2, 3),
    "movedim": lambda x: torch.movedim(x, 1, -1),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze all": lambda x: x[:1].squeeze(),
    "expand": lambda x: x[:, :1].expand(2, 8, 10, 10),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "tile": lambda x: torch.tile(x, (1, 1, 2, 1)),
    "narrow": lambda x: x.narrow(1, 2, 4),
    "select": lambda x: x.select(2, 3),
    "slice": lambda x: x[:, ::2, 1:-1],
    "index": lambda x: x[:, [0, 2, 4]],
    "mask": lambda x: x[torch.tensor([True, False])],
    "ellipsis": lambda x: x[..., None][..., 0],
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "torch.chunk": lambda x: torch.chunk(x, chunks=4, dim=1)[2],
    "split": lambda x: x.split(3, dim=1)[1],
    "torch.split": lambda x: torch.split(x, [2, 6], dim=1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=1)[0],
    "unbind": lambda x: x.unbind(2)[1],
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: torch.roll(x, 1, 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 1])),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "PixelShuffle": nn.PixelShuffle(2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "ChannelShuffle": nn.ChannelShuffle(2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "pad value": lambda x: F.pad(x, (1, 1), value=0.5),
    "pad reflect": lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect"),
    "ZeroPad2d": nn.ZeroPad2d(1),
    "ReflectionPad2d": nn.ReflectionPad2d(1),
    "Dropout": nn.Dropout(0.5),
    "F.dropout": lambda x: F.dropout(x, 0.5, training=False),
    "Dropout2d": nn.Dropout2d(0.5),
    "Identity": nn.Identity(),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to a device": lambda x: x.to("cpu"),
    "double and back": lambda x: x.double().float(),
    "data": lambda x: x.data,
}


@by_name(MOVES, "op")
def test_moves_keep_values_and_qparams(op):
    """Against fake quantization: FX graph mode fails on views of what oneDNN gives as channels_last."""
    model = Between(copy.deepcopy(op))
    converted = assert_matches(model, model.example, fx=False)
    plain = {row.precision for row in dbrq.report(converted).rows if row.op.startswith(("conv", "linear"))}
    assert plain == {"int8"}


@by_name(MOVES, "op")
def test_moves_of_an_output_and_of_an_input(op):
    op = op.eval() if isinstance(op, nn.Module) else op
    conv = nn.Conv2d(4, 8, 3, padding=1)
    assert_matches(Call(lambda m, x: op(m.conv(x)), conv=conv), torch.randn(2, 4, 10, 10), fx=False)
    assert_matches(Call(lambda m, x: m.conv(op(x) * 1.0) if op(x).dim() == 4 and op(x).shape[1] == 8 else op(x),
                        conv=nn.Conv2d(8, 4, 1)), torch.randn(2, 8, 10, 10), fx=False)  # fmt: skip
