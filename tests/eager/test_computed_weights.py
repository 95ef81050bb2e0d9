"""Convolutions whose weight forward computes from parameters."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.judging import assert_precision, rows, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run

SIZES = {1: (20,), 2: (9, 8), 3: (5, 6, 4)}


def conv_example(ndim: int) -> torch.Tensor:
    return torch.randn(2, 4, *SIZES[ndim])


def conv_weight(ndim: int, groups: int = 1) -> torch.Tensor:
    return torch.randn(6, 4 // groups, *[3] * ndim) * 0.2


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
