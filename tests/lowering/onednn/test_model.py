"""Models lowered to oneDNN as modules: shapes, layouts, modes, containers, and who owns outputs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import assert_close
from tests.helpers.models import Call
from tests.helpers.networks import CONTAINERS, NETWORKS, OUTPUTS, SHAPES, by_network, name_for, network, two_layers
from tests.helpers.onednn import assert_agrees, lower
from tests.helpers.running import convert, floats, run

# Shapes and layouts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_new_shape_runs_right_the_first_time_and_repeats(shape):
    lowered, graph, example = network(name_for(shape))
    x = torch.randn(shape)
    first, second = run(lowered, x), run(lowered, x)
    assert_close(first, run(graph, x))
    assert torch.equal(first, second)
    run(lowered, example)
    assert torch.equal(run(lowered, x), first)


def sliced(x: Tensor) -> Tensor:
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "every other": lambda x: torch.stack([x, x], -1)[..., 1],
    "sliced": sliced,
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "reversed axes": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "a parameter": lambda x: nn.Parameter(x.clone()),
    "of numpy": lambda x: torch.from_numpy(x.numpy()),
}


@by_network
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(make, shape, layout):
    lowered, graph, x = network(name_for(shape))
    with torch.no_grad():
        expected = lowered(x)
        for _ in range(2):
            assert_close(lowered(LAYOUTS[layout](x)), expected, 0.004)
    assert_close(run(lowered, LAYOUTS[layout](x + 0.5)), run(graph, x + 0.5))


@by_network
def test_expanded_inputs(make, shape):
    lowered, graph, x = network(name_for(shape))
    for given in (x[:1].expand(shape), x[..., :1].expand(shape)):
        for _ in range(2):
            assert_close(run(lowered, given), run(graph, given.contiguous()))


@by_network
def test_gradients_are_an_error_where_they_are_wanted(make, shape):
    lowered, _, x = network(name_for(shape))
    expected = run(lowered, x)
    got = lowered(x.clone().requires_grad_())
    assert torch.equal(got, expected)
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        got.sum().backward()
    with torch.enable_grad():
        again = lowered(x)
    assert torch.equal(again, expected) and not again.requires_grad


@by_network
def test_inference_mode(make, shape):
    lowered, _, x = network(name_for(shape))
    expected = run(lowered, x)
    with torch.inference_mode():
        assert torch.equal(lowered(x.clone()), expected)
        new = torch.randn(1, *shape[1:])
        inside = lowered(new)
    with torch.no_grad():
        assert torch.equal(lowered(new.clone()), inside)
        assert torch.equal(lowered(new), inside)


@by_network
def test_number_of_threads(make, shape):
    lowered, _, x = network(name_for(shape))
    expected, threads = run(lowered, x), torch.get_num_threads()
    try:
        for count in (1, threads, 1):
            torch.set_num_threads(count)
            assert_close(run(lowered, x), expected, 0.004)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(run(lowered, x), expected)


# Calling


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, y=None, scale: float = 1.0, *, flip: bool = False):
        z = self.a(x) * scale
        z = z if y is None else z + self.b(y)
        return z.flip(0) if flip else z


def test_keyword_arguments():
    model, x, y = Options().eval(), torch.randn(3, 16), torch.randn(3, 16)
    quantized = convert(model, (x, y)).quantized
    lowered = dbrq.lower(quantized, x, example_kwargs={"y": y}, backend="onednn")
    expected = run(quantized, (x, y))
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"x": x, "y": y}), ((), {"y": y, "x": x})):
        assert_agrees(lowered(*args, **kwargs), expected, "the converted model", exact=1e-3)


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_outputs(name):
    model, x = two_layers(CONTAINERS[name]), torch.randn(3, 16)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x)
    expected = run(quantized, x)
    for _ in range(2):
        got = run(lowered, x)
        assert type(got) is type(expected)
        torch.testing.assert_close(floats(got), floats(expected), atol=1e-5, rtol=1e-4)
    if "output" in name:
        assert got.a is got["a"] and list(got) == ["a", "b"]
    if name == "with numbers":
        assert got[1:] == expected[1:]


def test_dicts_and_lists_as_inputs():
    model = Call(lambda m, x: m.a(x["one"]) + m.b(x["two"][0]), a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval()
    given = {"one": torch.randn(3, 16), "two": [torch.randn(3, 16)]}
    prepared = dbrq.prepare(model, (given,))
    run(prepared, (given,))
    quantized = dbrq.convert(prepared)
    lowered = lower(quantized, (given,))
    for _ in range(3):
        assert_agrees(run(lowered, (given,)), run(quantized, (given,)), "the converted model", exact=2e-3)
        given = {"one": torch.randn(3, 16), "two": [torch.randn(3, 16)]}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_own_their_memory(name):
    model, x = two_layers(OUTPUTS[name]), torch.randn(3, 16)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x)
    kept = copy.deepcopy(lowered.state_dict())
    expected = copy.deepcopy(run(quantized, x))
    outputs = []
    for _ in range(3):
        with torch.no_grad():
            outputs.append(lowered(x.clone()))
    for a in outputs:
        torch.testing.assert_close(a, expected, atol=1e-5, rtol=1e-4)
    for leaf in dbrq.pytree.tree_leaves(outputs[0]):
        leaf.copy_(torch.full_like(leaf, 7)) if 0 not in leaf.stride() else None
    for later in (outputs[1], run(lowered, x)):
        torch.testing.assert_close(later, expected, atol=1e-5, rtol=1e-4)
    for key, tensor in lowered.state_dict().items():
        assert torch.equal(tensor, kept[key]), f"a caller that writes to its output changes {key}"


@by_network
def test_outputs_outlive_the_model(make, shape):
    lowered, _, x = network(name_for(shape))
    expected, other = run(lowered, x), copy.deepcopy(lowered)
    got = run(other, x)
    del other
    gc.collect()
    torch.randn(1 << 20)
    assert torch.equal(got, expected)


def test_an_input_is_not_changed():
    for name in NETWORKS:
        lowered, _, x = network(name)
        kept = x.clone()
        with torch.no_grad():
            lowered(x)
        assert torch.equal(x, kept)
