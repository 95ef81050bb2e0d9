"""What must raise, and what must go on afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

import dbrq
from tests.helpers.cases import settled
from tests.helpers.judging import assert_close
from tests.helpers.models import Call
from tests.helpers.networks import BAD, MODELS, network
from tests.helpers.onednn import assert_agrees, lower
from tests.helpers.patterns import ASKED
from tests.helpers.running import convert, run


@functools.cache
def bad_input_model(name: str) -> tuple[Any, Any, Tensor]:
    make, shape = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model, x = settled(make()), torch.randn(shape)
        quantized = convert(model, x, ASKED if name == "matmul" else None).quantized
        return lower(quantized, x), dbrq.rewrite(quantized, x), x


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", MODELS)
def test_inputs_that_no_kernel_takes_raise(name, bad):
    lowered, graph, example = bad_input_model(name)
    before = run(lowered, example)
    x = BAD[bad](example)
    if x.shape == example.shape and x.dtype is example.dtype:
        pytest.skip("it is the example")
    try:
        expected = run(graph, x)
    except Exception:
        with pytest.raises((RuntimeError, ValueError, TypeError, AssertionError)):
            run(lowered, x)
    else:  # the graph takes it: so does the backend, or it says why not
        try:
            got = run(lowered, x)
        except (RuntimeError, AssertionError) as error:
            assert "dbrq" in str(error) or "size" in str(error) or "shape" in str(error)
        else:
            assert_agrees(got, expected, "the graph", exact=1e-2, most=0.05)
    assert torch.equal(run(lowered, example), before)


CALLS: dict[str, tuple[Callable, type | tuple]] = {
    "nothing": (lambda m, x: m(), TypeError),
    "too many": (lambda m, x: m(x, x), TypeError),
    "an unknown keyword": (lambda m, x: m(x, mask=x), TypeError),
    "twice": (lambda m, x: m(x, input=x), TypeError),
    "None": (lambda m, x: m(None), (TypeError, RuntimeError, AttributeError)),
    "a number": (lambda m, x: m(3.0), (TypeError, RuntimeError, AttributeError)),
    "an array": (lambda m, x: m(x.numpy()), (TypeError, RuntimeError)),
    "a list": (lambda m, x: m([x]), (TypeError, RuntimeError, AttributeError)),
    "sparse": (lambda m, x: m(x[0].to_sparse()), (RuntimeError, NotImplementedError)),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name):
    lowered, _, x = network("convnet")
    before = run(lowered, x)
    call, error = CALLS[name]
    with pytest.raises(error):
        call(lowered, x)
    assert torch.equal(run(lowered, x), before)


def test_tensors_without_memory_raise():
    lowered, _, x = network("convnet")
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        lowered(x.to("meta"))


def test_an_error_in_the_middle_of_a_plan_leaves_the_model_usable():
    """An assertion of the graph that fails in some calls."""
    model = Call(
        lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.a(m.b(x)), inputs=1, a=nn.Linear(16, 16), b=nn.Linear(16, 16)
    )
    x = torch.rand(3, 16)
    quantized = convert(model.eval(), x).quantized
    lowered, graph = lower(quantized, x), dbrq.rewrite(quantized, x)
    expected = run(lowered, x)
    for bad in (-x, -x[:2]):
        with pytest.raises((RuntimeError, AssertionError), match="dbrq"):
            run(graph, bad)
        for _ in range(2):
            with pytest.raises((RuntimeError, AssertionError), match="dbrq"):
                run(lowered, bad)
    assert torch.equal(run(lowered, x), expected)
    assert_close(run(lowered, x[:2]), run(graph, x[:2]))


def test_a_backend_that_is_not_there():
    with pytest.raises(dbrq.errors.ConfigurationError, match="onednn"):
        dbrq.lower(nn.Linear(2, 2), torch.randn(1, 2), backend="openvino")


EMPTY: dict[str, tuple[Callable, tuple]] = {
    "in float": (lambda: Call(lambda m, x: F.relu(x) * 2), (3, 4)),
    "softmax": (lambda: Call(lambda m, x: x.softmax(-1)), (3, 4)),
    "cat": (lambda: Call(lambda m, x: torch.cat([x, x])), (3, 4)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_of_what_torch_takes(name):
    make, shape = EMPTY[name]
    model, x = make().eval(), torch.randn(shape)
    lowered = lower(convert(model, x, QConfigMapping()).quantized, x)
    assert torch.equal(run(lowered, x[:0]), run(model, x[:0]))
    torch.testing.assert_close(run(lowered, x), run(model, x))
