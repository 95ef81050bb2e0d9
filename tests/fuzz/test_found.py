"""What the fuzzer found, each as small as it became: one test per fault, named for it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig

import dbrq
from dbrq.kernels import has_exact_int8_dot
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.running import has_compiler

BACKENDS = ("rewrite", "torchscript", "onednn")
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)


def quantized(model: nn.Module, example: Any, mapping: QConfigMapping | None = None) -> nn.Module:
    """Calibrated on the example; the float model keeps its state."""
    return dbrq.quantize(copy.deepcopy(model).eval(), [example], mapping)


def lowered(converted: nn.Module, example: Any, backend: str) -> nn.Module:
    if backend == "rewrite":
        return dbrq.rewrite(converted, example)
    return dbrq.lower(converted, example, backend=backend)


def runs(model: nn.Module, calls: Sequence[Any]) -> list[Any]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [model(call) for call in calls]


class Counter(nn.Module):
    def __init__(self, assigned: bool) -> None:
        super().__init__()
        self.layer, self.assigned = nn.Linear(4, 4), assigned
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.assigned:
            self.seen = self.seen * 2
        else:
            self.seen.mul_(2)
        return self.layer(x) + self.seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("assigned", [False, True], ids=["in place", "assigned"])
def test_state_that_forward_writes_goes_on_from_where_the_converted_model_is(backend: str, assigned: bool) -> None:
    """An assignment was frozen; runs that check and warm up counted, in the graph and in the converted model."""
    x = torch.randn(3, 4)
    model = Counter(assigned)
    converted = quantized(model, x)
    try:
        graph = lowered(converted, x, backend)
    except dbrq.RewriteError:
        assert assigned  # may be refused, but not be wrong
        return
    assert converted.seen == 2  # type: ignore[comparison-overlap]
    for result, count in zip(runs(graph, [x, x, x]), (4.0, 8.0, 16.0), strict=True):
        assert sqnr(model.layer(x).detach() + count, result) > 30
    assert converted.seen == 2  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("backend", ["converted", *BACKENDS])
def test_an_empty_batch_of_a_dynamic_model_runs_or_says_why(backend: str) -> None:
    """The converted model raised a TypeError, its graph torch's own about aminmax."""
    example = torch.randn(3, 6)
    converted = quantized(nn.Linear(6, 8), example, DYNAMIC)
    model = converted if backend == "converted" else lowered(converted, example, backend)
    try:
        (result,) = runs(model, [torch.randn(0, 6)])
    except Exception as error:  # in the graph by itself, torch's own of choosing a range
        assert backend != "converted" and ("dbrq: " in str(error) or backend == "rewrite")
        return
    assert result.shape == (0, 8)


@pytest.mark.parametrize("backend", ["converted", *BACKENDS])
def test_an_empty_batch_of_multihead_attention_runs_or_says_why(backend: str) -> None:
    """``reshape(0, 1, -1, 4)`` is ambiguous."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Call(lambda m, x: m.last(m.attention(x, x, x)[0]), attention=attention, last=nn.Linear(4, 4))
    example = torch.randn(3, 5, 4)
    converted = quantized(model, example)
    run = converted if backend == "converted" else lowered(converted, example, backend)
    try:
        (result,) = runs(run, [torch.randn(0, 5, 4)])
    except Exception as error:
        assert backend != "converted" and "dbrq: " in str(error)
        return
    assert result.shape == (0, 5, 4)


def test_none_in_a_dict_survives_torchscript() -> None:
    """The key went away without a word."""
    model = Call(lambda m, x: {"out": m.layer(x), "none": None}, layer=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    scripted = lowered(quantized(model, x), x, "torchscript")
    assert list(runs(scripted, [x])[0]) == ["out", "none"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_are_exactly_zero_are_no_disagreement(backend: str) -> None:
    """A convolution that reads padding alone gives 0 in float, and a few 1e-7 where zero points cancel."""
    model, x = nn.Conv1d(12, 4, 1, stride=4, padding=2, groups=2, bias=False), torch.randn(2, 12, 1)
    (result,) = runs(lowered(quantized(model, x), x, backend), [x])
    assert result.abs().max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_may_fall_in_another_order(backend: str) -> None:
    """``empty_like`` of a channels_last value is filled in another order: the same numbers at other places.

    That graph and model then disagree may be refused.
    """
    layers = nn.Sequential(nn.Conv3d(1, 1, 1, padding=3), nn.BatchNorm3d(1), nn.ReLU6())

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layers(x)
        y = torch.cat([y, y[:, :1]], 1)
        return y * torch.empty_like(y).bernoulli_(0.5)

    model, x = Call(forward, layers=layers), torch.randn(3, 1, 2, 10, 6)
    try:
        graph = lowered(quantized(model, x), x, backend)
    except dbrq.QuantizationError:
        return
    mean = torch.stack(runs(graph, [x] * 60)).mean(0)
    assert sqnr(layers.eval()(x).detach().repeat(1, 2, 1, 1, 1) / 2, mean) > 10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("layer", "seen", "shape"),
    [
        (nn.MaxPool1d(2), lambda y: y[..., ::2], (8, 5, 8)),
        (nn.Conv3d(8, 3, 2, padding=(2, 2, 3)), lambda y: torch.complex(y, y).conj().imag, (2, 8, 1, 5, 8)),
    ],
    ids=["every other", "imaginary"],
)
def test_numbers_are_drawn_in_the_order_of_the_run(backend: str, layer: Any, seen: Any, shape: Any) -> None:
    """``rand_like`` draws in the order of memory, where kernels laid a value out otherwise: refused (seed 9009320)."""
    model = Call(lambda m, x: seen(m.layer(x)) + 0.5 * torch.rand_like(seen(m.layer(x))), layer=layer).eval()
    x = torch.randn(shape)
    graph = lowered(quantized(model, x), x, backend)
    torch.manual_seed(1)
    (expected,) = runs(model, [x])
    torch.manual_seed(1)
    (result,) = runs(graph, [x])
    assert sqnr(expected, result) > 25


def test_a_decision_is_asserted_before_what_depends_on_it_runs() -> None:
    """Another branch with another shape: torch's own error came first."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return m.layer(x)
        return x * 0.5

    graph = lowered(Call(forward, layer=nn.Linear(1, 1)).eval(), torch.ones(1, 8, 4, 1), "onednn")
    with pytest.raises(Exception, match="dbrq: this graph holds for one path"):
        graph(-torch.ones(2, 8, 4, 4))


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
def test_lowering_leaves_the_random_state_alone(backend: str) -> None:
    """Also where a model is lowered in parts."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x) + torch.rand(())
        return m.last(y) if y.sum() > 0 else y

    x = torch.randn(2, 4)
    converted = quantized(Call(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 4)), x)
    before = torch.get_rng_state()
    lowered(converted, x, backend)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_behind_a_norm_of_a_padded_line(backend: str) -> None:
    """A bare AssertionError: a quantization was left without qparams."""
    conv = nn.Conv1d(1, 8, 3, stride=4, padding=3, padding_mode="reflect")
    model, x = nn.Sequential(conv, nn.BatchNorm1d(8), nn.LeakyReLU(0.1)).eval(), torch.randn(2, 1, 16)[::2]
    (result,) = runs(lowered(quantized(model, x), x, backend), [x])
    assert sqnr(model(x).detach(), result) > 25


@pytest.mark.parametrize("backend", ["converted", *BACKENDS])
def test_out_arguments_are_written(backend: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.gelu(m.layer(x))
        made = torch.zeros_like(y)
        torch.add(y, 1.0, out=made)
        made.unsqueeze(0)[0].add_(y)
        return made

    model, x = Call(forward, layer=nn.Linear(6, 5)).eval(), torch.randn(4, 6)
    converted = quantized(model, x)
    run = converted if backend == "converted" else lowered(converted, x, backend)
    (expected,) = runs(model, [x])
    for result in runs(run, [x, x]):
        assert sqnr(expected, result) > 25


@pytest.mark.parametrize("backend", BACKENDS)
def test_reshape_is_a_view_or_a_copy_as_the_layout_has_it(backend: str) -> None:
    """A write through ``reshape(-1)`` reached the base in a plan for an input for which the model makes a copy."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x * 1.5
        F.relu(y.reshape(-1), inplace=True)
        return y

    model, example = Call(forward), torch.randn(2, 32, 1, 1, 1)
    graph = lowered(quantized(model, example), example, backend)
    inputs = [example, torch.randn(3, 32, 1, 1, 1), torch.randn(1, 1, 1, 32, 5).permute(4, 3, 2, 1, 0)]
    expected = runs(model, inputs)
    try:
        results = runs(graph, inputs)
    except (AssertionError, RuntimeError, torch.jit.Error) as error:
        assert "dbrq: " in str(error)
        return
    for one, other in zip(expected, results, strict=True):
        assert sqnr(one, other) > 60


@pytest.mark.parametrize("backend", BACKENDS)
def test_deciding_on_the_layout_is_a_decision(backend: str) -> None:
    """``if x.is_contiguous()`` was neither followed nor asserted."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(x) if x.is_contiguous() else x * 0.5

    model = Call(forward, layer=nn.Linear(3, 3)).eval()
    other = torch.randn(5, 4)[:, 1:]
    with torch.no_grad():
        graph = lowered(quantized(model, torch.randn(5, 3)), torch.randn(5, 3), backend)
        try:
            result = graph(other)
        except Exception as error:
            assert "dbrq: " in str(error)
            return
    assert sqnr(other * 0.5, result) > 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_like_a_layers_result(backend: str) -> None:
    """``randn_like`` of a value whose layout the kernel chooses: the same draws in another order, no disagreement."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.silu(m.layer(x) * x)
        return y + 0.1 * torch.randn_like(y)

    model, x = Call(forward, layer=nn.Conv2d(32, 32, 3, padding=1)).eval(), torch.randn(1, 32, 9, 2)
    graph = lowered(quantized(model, x), x, backend)
    first, second = runs(graph, [x, x])
    assert not torch.equal(first, second)
    mean = torch.stack(runs(graph, [x] * 40)).mean(0)
    assert sqnr(torch.stack(runs(model, [x] * 40)).mean(0), mean) > 15


WRITES = {
    "unflatten": lambda y: y.unflatten(1, (1, -1)).neg_(),
    "select": lambda y: y[0].copy_(y[0] * 2),
    "squeeze": lambda y: y.squeeze().copy_(y.squeeze() * 2),
    "slice": lambda y: y[:, 1:3].mul_(3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_a_view_of_a_layers_result(backend: str, write: str) -> None:
    """On onednn the base was read as it had been."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        WRITES[write](y)
        return F.relu(y)

    model, x = Call(forward, layer=nn.Conv2d(32, 5, 3, padding=2, dilation=2)).eval(), torch.randn(5, 32, 10, 1)
    for mapping in (None, DYNAMIC):
        graph = lowered(quantized(model, x, mapping), x, backend)
        assert sqnr(runs(model, [x])[0], runs(graph, [x])[0]) > 25


DRAWS = {
    "bernoulli": lambda x: torch.bernoulli(torch.full((1,), 0.5)),
    "poisson": lambda x: torch.poisson(torch.ones_like(x)),
    "normal": lambda x: torch.normal(x, 0.1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1), "randperm": lambda x: x[torch.randperm(len(x))],
    "written to": lambda x: F.relu(F.dropout(torch.ones_like(x), 0.5, training=True) * x, inplace=True),
    "randn_like": torch.randn_like, "dropout": lambda x: F.dropout(x, 0.3, training=True),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_that_nothing_reads(backend: str, draw: str) -> None:
    """A dead draw was dropped, the later ones then differed from the model's, and the graph was refused."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x * DRAWS[draw](x)
        return m.layer(x) + torch.randn(x.shape) * 0.1

    model, x = Call(forward, layer=nn.Linear(6, 6)).eval(), torch.randn(3, 6)
    graph = lowered(quantized(model, x), x, backend)
    mean = torch.stack(runs(graph, [x] * 40)).mean(0)
    assert sqnr(model.layer(x).detach(), mean) > 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_contiguous_is_the_tensor_itself_or_a_copy_as_the_layout_has_it(backend: str) -> None:
    """For a contiguous example it is the input itself, and the graph took it for that with other layouts too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.contiguous()
        y.mul_(2)
        return m.layer(x)

    model, example = Call(forward, layer=nn.Conv1d(8, 8, 3)).eval(), torch.randn(1, 8, 12)
    graph = lowered(quantized(model, example.clone()), example.clone(), backend)
    x = torch.randn(12, 8, 2).permute(2, 1, 0)
    (expected,) = runs(model, [x.clone()])
    try:
        (result,) = runs(graph, [x.clone()])
    except (AssertionError, RuntimeError, torch.jit.Error) as error:
        assert "dbrq: " in str(error)
        return
    assert sqnr(expected, result) > 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_layer_called_ten_times_and_more(backend: str) -> None:
    """On onednn values of 1e5 came out from the tenth call of one Conv1d on, with a relu before the first."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).relu()
        for _ in range(12):
            y = y + m.layer(y)
        return y

    model = Call(forward, first=nn.Conv1d(16, 16, 1), layer=nn.Conv1d(16, 16, 3, padding=1)).eval()
    x = torch.randn(5, 16, 4)
    (result,) = runs(lowered(quantized(model, x), x, backend), [x])
    assert sqnr(runs(model, [x])[0], result) > 25


@pytest.mark.parametrize("backend", BACKENDS)
def test_contiguous_of_a_clone(backend: str) -> None:
    """A clone keeps a channels_last layout, of which ``contiguous`` is a copy."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.contiguous().exp_()
        return m.layer(F.relu(y))

    model, example = Call(forward, layer=nn.Conv2d(8, 8, 3)).eval(), torch.randn(2, 8, 6, 5)
    graph = lowered(quantized(model, example), example, backend)
    x = torch.randn(3, 8, 7, 5).to(memory_format=torch.channels_last)
    try:
        (result,) = runs(graph, [x])
    except (AssertionError, RuntimeError, torch.jit.Error) as error:
        assert "dbrq: " in str(error)
        return
    assert sqnr(runs(model, [x])[0], result) > 20


def by_layout(how: str, y: Tensor, m: Any) -> Tensor:
    if how == "is_contiguous":
        return m.layer(y) if y.is_contiguous() else y * 0.5
    if how == "as_strided":
        return m.layer(y) + y.as_strided((8,), (1,))
    y.flatten(1).mul_(0.5)
    return m.layer(y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["is_contiguous", "as_strided", "flatten"])
def test_code_that_goes_by_the_layout_of_a_value_it_computed(backend: str, how: str) -> None:
    """The graph took the example's layout for that of all inputs."""
    model = Call(lambda m, x: by_layout(how, F.gelu(x), m), layer=nn.Linear(8, 8)).eval()
    example = torch.randn(1, 5, 6, 8)
    graph = lowered(quantized(model, example), example, backend)
    alike, other = torch.randn(2, 5, 6, 8), torch.randn(2, 8, 5, 6).permute(0, 2, 3, 1)
    assert sqnr(*runs(model, [alike]), *runs(graph, [alike])) > 25
    with pytest.raises((AssertionError, RuntimeError, torch.jit.Error), match="dbrq: "):
        runs(graph, [other])


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_layouts_neither_of_which_is_contiguous(backend: str) -> None:
    model = Call(lambda m, x: m.layer(x) * 2 + m.layer(x).as_strided((1,), (1,)), layer=nn.Conv2d(5, 2, 1)).eval()
    example = torch.randn(5, 3, 7, 8).transpose(0, 1)
    graph = lowered(quantized(model, example), example, backend)
    with pytest.raises((AssertionError, RuntimeError, torch.jit.Error), match="dbrq: "):
        runs(graph, [torch.randn(3, 5, 7, 7).to(memory_format=torch.channels_last)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_recording_starts_from_the_inputs_given(backend: str) -> None:
    """State that is read makes dbrq record again: from inputs that the first run had written to."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x.add_(x)) * m.factor
        m.mean.mul_(0.9).add_(0.1 * y.mean())
        return y - m.mean

    model = Call(forward, layer=nn.Conv1d(3, 3, 1)).eval()
    model.factor = nn.Parameter(torch.randn(3, 1))
    model.register_buffer("mean", torch.zeros(()))
    x = torch.randn(5, 3, 8)
    graph = lowered(quantized(model, x.clone()), x.clone(), backend)
    model.mean.zero_()
    (result,) = runs(graph, [x.clone()])
    assert sqnr(runs(model, [x.clone()])[0], result) > 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_squeeze_of_another_number_of_axes(backend: str) -> None:
    """An error of torch's about a dimension deep in the graph, where the graph holds for another number of axes."""
    model = Call(lambda m, x: m.layer(x.squeeze()).sum(-2), layer=nn.Linear(8, 4)).eval()
    graph = lowered(quantized(model, torch.randn(4, 5, 8)), torch.randn(4, 5, 8), backend)
    x = torch.randn(6, 3, 8)
    assert sqnr(*runs(model, [x]), *runs(graph, [x])) > 25
    with pytest.raises((AssertionError, RuntimeError, torch.jit.Error), match="dbrq: "):
        runs(graph, [torch.randn(1, 5, 8)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_of_the_model_itself_with_a_batch_norm_behind(backend: str) -> None:
    """The folded bias was named after the weight's module, which has no name."""
    model = Call(lambda m, x: m.norm(F.conv2d(x, m.weight, None, padding=1)), norm=nn.BatchNorm2d(6)).eval()
    model.weight = nn.Parameter(torch.randn(6, 4, 3, 3) * 0.3)
    x = torch.randn(2, 4, 5, 6)
    graph = lowered(quantized(model, x), x, backend)
    assert sqnr(*runs(model, [x]), *runs(graph, [x])) > 25


class Named(nn.Module):
    """Takes a dict and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.layer(batch["x"])}


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_part_that_takes_a_dict(backend: str) -> None:
    """Who made its tensors was asked of the dict itself."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.named({"x": x})["y"]
        return m.last(y) if y.sum() > 0 else y * 0.5

    model = Call(forward, named=Named(), last=nn.Linear(6, 6)).eval()
    data = [torch.randn(2, 8) for _ in range(12)]
    converted = dbrq.quantize(model, data, progress=False)
    graph = lowered(converted, data[0], backend)
    assert any(state.parts for state in graph.forward.token.states.values())
    for x, a, b in zip(data, runs(model, data), runs(graph, data), strict=True):
        assert sqnr(a, b) > 20, x


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_convolution_whose_result_is_empty(backend: str) -> None:
    model = Call(
        lambda m, x: m.layer(m.first(x)), first=nn.Conv3d(4, 4, 1), layer=nn.ConvTranspose3d(4, 6, 2, padding=1)
    )
    model, example = model.eval(), torch.randn(2, 4, 2, 2, 8)
    graph = lowered(quantized(model, example), example, backend)
    x = torch.randn(2, 4, 1, 5, 9)
    assert [y.shape for y in runs(graph, [x])] == [y.shape for y in runs(model, [x])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_that_the_graphs_layout_does_not_allow(backend: str) -> None:
    """torch's bare error left the library, from the comparison of graph and model."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.second(m.first(x).permute(3, 2, 0, 1))
        return y.view(y.shape[0], 2, -1).unbind(1)[1]

    layers = nn.Sequential(
        nn.Conv2d(5, 16, (1, 3), padding=2, dilation=2, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
    )
    first = nn.Conv2d(5, 5, 3, stride=2, groups=5, padding_mode="replicate")
    model, x = Call(forward, first=first, second=layers).eval(), torch.randn(2, 5, 12, 3)
    try:
        graph = lowered(quantized(model, x), x, backend)
    except dbrq.RewriteError:
        return
    assert sqnr(*runs(model, [x]), *runs(graph, [x])) > 20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["split", "max_pool2d"])
def test_a_write_by_layout_behind_an_op_that_returns_several_tensors(backend: str, how: str) -> None:
    """The layout of inputs was not asserted where ``split`` or a pool with indices came between."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if how == "split":
            one, other = x.split(4, 1)
            y = F.relu(one + other)
        else:
            y = F.max_pool2d(m.layer(x), 2, return_indices=True)[0]
        y.flatten(1).mul_(0.5)
        return y * 1.5

    model, example = Call(forward, layer=nn.Conv2d(8, 3, 1)).eval(), torch.randn(5, 8, 4, 6)
    graph = lowered(quantized(model, example), example, backend)
    inputs = [example, torch.randn(6, 4, 8, 5).permute(3, 2, 1, 0), example.to(memory_format=torch.channels_last)]
    for expected, x in zip(runs(model, inputs), inputs, strict=True):
        try:
            (result,) = runs(graph, [x])
        except (AssertionError, RuntimeError, torch.jit.Error) as error:
            assert x is not example and "dbrq: " in str(error)
            continue
        assert sqnr(expected, result) > 25


@pytest.mark.skipif(not has_exact_int8_dot(), reason="kernels of other CPUs round otherwise")
@pytest.mark.parametrize("backend", ["converted", *BACKENDS])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_over_padding_alone_a_convolution_gives_zero(backend: str, dims: int) -> None:
    """It gave 1e-8, of which ``atan2(y, y)`` made -2.4."""
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](8, 16, 3, padding=4, bias=False)
    model, x = nn.Sequential(layer).eval(), torch.randn(2, 8, *(5,) * dims)
    converted = quantized(model, x)
    run = converted if backend == "converted" else lowered(converted, x, backend)
    (expected,), (result,) = runs(model, [x]), runs(run, [x])
    assert (expected == 0).any() and not result[expected == 0].any()


def test_an_int8_image_of_one_channel_has_the_strides_of_its_own_model() -> None:
    """Its strides said channels_last, so the float op behind it made its result so, and ``view`` failed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.up(m.layer(x))
        return y.view(y.shape[0], 2, -1)

    model = Call(forward, layer=nn.Conv2d(12, 1, 1), up=nn.ConvTranspose2d(1, 16, 3)).eval()
    x = torch.randn(2, 12, 8, 5)
    (expected,), (result,) = runs(model, [x]), runs(quantized(model, x), [x])
    assert sqnr(expected, result) > 25


COPIES = {
    "contiguous": lambda y: y.transpose(2, 3).contiguous(),
    "of a part": lambda y: y[:, ::2].contiguous(),
    "channels_last": lambda y: y.contiguous(memory_format=torch.channels_last),
    "to channels_last": lambda y: y.to(memory_format=torch.channels_last),
    "there and back": lambda y: y.contiguous(memory_format=torch.channels_last).contiguous(),
    "to": lambda y: y.to(torch.float32, copy=True),
    "expanded": lambda y: y[:, :1].expand_as(y).contiguous(),
    "reshaped": lambda y: y.transpose(2, 3).reshape(y.shape[0], -1),
    "the value itself": lambda y: y.contiguous(),
}


@pytest.mark.parametrize("backend", ["converted", *BACKENDS])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_write_to_what_may_be_a_copy_of_an_int8_value(backend: str, copy: Any) -> None:
    """The int8 value itself stood for its copy, so that the write changed it too; or the write was refused."""

    def forward(m: Any, x: Tensor) -> tuple:
        y = m.a(x)
        z = copy(y)
        z.mul_(0.5)
        return m.b(y), z

    model = Call(forward, a=nn.Conv2d(8, 8, 3, padding=1), b=nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 8, 6, 6)
    converted = quantized(model, x)
    run = converted if backend == "converted" else lowered(converted, x, backend)
    (expected,), (result,) = runs(model, [x]), runs(run, [x])
    for one, other in zip(expected, result, strict=True):
        assert sqnr(one, other) > 25


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_to_what_is_channels_last_or_made_so(backend: str) -> None:
    """For a channels_last input ``to`` gives the value itself; the graph went by the example, for which it copies."""

    def forward(m: Any, x: Tensor) -> tuple:
        y = m.a(x)
        z = y.to(memory_format=torch.channels_last)
        z.mul_(2)
        return y, m.b(y)

    model = Call(forward, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1)).eval()
    example = torch.randn(2, 4, 7, 4)
    graph = lowered(quantized(model, example), example, backend)
    other = torch.randn(4, 4, 7, 4).to(memory_format=torch.channels_last)
    for x in (example, other):
        (expected,) = runs(model, [x])
        try:
            (result,) = runs(graph, [x])
        except (AssertionError, RuntimeError, torch.jit.Error) as error:
            assert x is other and "dbrq: " in str(error)
            continue
        assert all(sqnr(a, b) > 25 for a, b in zip(expected, result, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [lambda y: y.data.contiguous(), lambda y: y.mT.ravel()], ids=["contiguous", "ravel"])
def test_a_write_to_a_view_of_what_comes_of_an_expanded_image(backend: str, view: Any) -> None:
    """Torch's convolution of such an image is row-major, that of its dequantized copy channels_last: seed 9002061."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.b(m.a(x.swapaxes(1, 3)))
        view(y).mul_(0.5)
        return m.c(y)

    model = Call(forward, **{name: nn.Conv2d(3, 3, 1) for name in "abc"}).eval()
    x = torch.randn(1, 17, 1, 3).expand(5, 17, 1, 3)
    (expected,), (result,) = runs(model, [x]), runs(lowered(quantized(model, x), x, backend), [x])
    assert sqnr(expected, result) > 25


def test_a_write_to_the_last_view_of_an_int8_value() -> None:
    """It was refused, as if the value were there to see it."""
    model = Call(lambda m, x: m.b(m.a(x)[:, ::2].contiguous().mul_(0.5)), a=nn.Linear(8, 8), b=nn.Linear(4, 4)).eval()
    x = torch.randn(4, 8)
    (expected,), (result,) = runs(model, [x]), runs(quantized(model, x), [x])
    assert sqnr(expected, result) > 25


@pytest.mark.parametrize(
    "other", [lambda x: torch.stack([x, x], -1)[..., 1], lambda x: torch.cat([x, x], -1)[..., ::2]]
)
def test_one_row_with_gaps_is_added_to_a_linear_layer(other: Any) -> None:
    """Of one row, onednn took the elements next to each other."""
    model = Call(lambda m, x: F.relu(m.b(m.a(x))) + other(m.a(x)), a=nn.Linear(6, 8), b=nn.Linear(8, 8)).eval()
    example = torch.randn(8, 1, 6)
    converted = quantized(model, example)
    graph = lowered(converted, example, "onednn")
    for x in (example, torch.randn(1, 1, 6)):
        (expected,), (result,) = runs(converted, [x]), runs(graph, [x])
        assert sqnr(expected, result) > 60


@pytest.mark.parametrize(
    "backend",
    ["onednn", pytest.param("inductor", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler"))],
)
def test_an_expanded_input_beside_state_that_is_written(backend: str) -> None:
    """What an input was made dense as was written back to it, though only the state is written to."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.state[1:3] = x.mean()
        return m.a(x) * (m.state.sum() + 1)

    model = Call(forward, a=nn.Linear(8, 8)).eval()
    model.register_buffer("state", torch.zeros(4))
    example = torch.randn(3, 8)
    converted = quantized(model, example)
    graph = lowered(converted, example, backend)
    for x in (torch.randn(1, 8).expand(3, 8), (torch.randn(1, 8) + 0j).conj().imag.expand(3, 8) + 0):
        (expected,), (result,) = runs(converted, [x]), runs(graph, [x])
        assert sqnr(expected, result) > 60


@pytest.mark.parametrize("backend", BACKENDS)
def test_lowering_does_not_depend_on_what_the_model_ran_on_before(backend: str) -> None:
    """Graph and model were compared on inputs for which the model runs in float, since it had said so before: seeds
    9100965 and 9023201.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y.contiguous().add_(1)
        return m.c(m.b(y).relu())

    for seed in range(6):
        torch.manual_seed(seed)
        model = Call(forward, **{name: nn.Conv1d(3, 3, 1) for name in "abc"}).eval()
        x = torch.randn(2, 3, 9)[..., 1:]
        converted = quantized(model, x)
        runs(converted, [x.contiguous()])
        (expected,), (result,) = runs(converted, [x]), runs(lowered(converted, x, backend), [x])
        assert sqnr(expected, result) > 20
