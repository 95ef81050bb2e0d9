"""Factors that smooth what linear layers read cost no pass of their own, and change no number."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.accuracy import smoothing
from dbrq.lowering.engine import is_smoothing
from dbrq.lowering.onednn.binding import Arg
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.onednn import assert_agrees, steps
from tests.helpers.patterns import DYNAMIC
from tests.helpers.running import floats, graph_of, has_compiler, run

BACKENDS = ("onednn", "torchscript", "inductor")


@pytest.fixture(autouse=True)
def all_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of layers that may have factors gets some, whether it gains by them or not."""

    def run(search: Any) -> tuple[Tensor, tuple[float, float]]:
        width = search.x.shape[1]
        return 0.25 + 2 * torch.rand(width, generator=torch.Generator().manual_seed(width)), (1.0, 1.0)

    monkeypatch.setattr(smoothing._Search, "run", run)


@dataclass(frozen=True)
class Smoothed:
    """A model, and what runs once it is lowered.

    Attributes:
        onednn: steps of the plan.
        products: multiplications that the pass does which quantizes.
        exclude, mapping: as for ``prepare``.
    """

    make: Callable[[], nn.Module]
    onednn: Sequence[str]
    products: int = 0
    shape: tuple[int, ...] = (3, 7, 19)
    exclude: Any = ()
    mapping: Any = None


def _random(module: Any) -> Any:
    """Parameters of which none is one or zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)
    return module


def _norm(width: int = 19, **options: Any) -> nn.Module:
    return _random(nn.LayerNorm(width, **options))


def _linear(inner: int = 19, outer: int = 21) -> nn.Module:
    return nn.Linear(inner, outer)


def _spelled_out(m: Any, x: Tensor) -> Tensor:
    """RMSNorm as transformers has it."""
    return m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _attention(m: Any, x: Tensor) -> Tensor:
    y = m.n(x)
    q, k, v = (layer(y).unflatten(-1, (2, 5)).transpose(1, 2) for layer in (m.a, m.b, m.c))
    return m.d(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


FOLDED = {
    "layer norm": Smoothed(
        lambda: Call(lambda m, x: m.a(m.n(x)), n=_norm(), a=_linear()), ["layer_norm + quantize", "linear"]
    ),
    "layer norm of rows": Smoothed(
        lambda: Call(lambda m, x: m.a(m.n(x)), n=_norm(33), a=_linear(33)), ["layer_norm + quantize", "linear"],
        shape=(5, 33),
    ),
    "layer norm without bias": Smoothed(
        lambda: Call(lambda m, x: m.a(m.n(x)), n=_norm(bias=False), a=_linear()), ["layer_norm + quantize", "linear"]
    ),
    "layer norm without parameters": Smoothed(
        lambda: Call(lambda m, x: m.a(F.layer_norm(x, (19,), eps=1e-3)), a=_linear()),
        ["layer_norm + quantize", "linear"],
    ),
    "layer norm with positional arguments": Smoothed(
        lambda: Call(lambda m, x: m.a(F.layer_norm(x, (19,), m.w, m.b, 1e-3)), a=_linear(), w=torch.rand(19),
                     b=torch.rand(19)),
        ["layer_norm + quantize", "linear"],
    ),
    "layer norm along two axes": Smoothed(
        lambda: Call(lambda m, x: m.a(m.n(x)), n=_norm((7, 19)), a=_linear()), ["layer_norm + quantize", "linear"]
    ),
    "layer norm along two axes, without parameters": Smoothed(
        lambda: Call(lambda m, x: m.a(F.layer_norm(x, (7, 19))), a=_linear()), ["layer_norm + quantize", "linear"]
    ),
    "one norm, two layers": Smoothed(
        lambda: Call(lambda m, x: (lambda y: (m.a(y), m.b(y)))(m.n(x)), n=_norm(), a=_linear(), b=_linear()),
        ["layer_norm + quantize", "linear", "linear"],
    ),
    "rms norm": Smoothed(
        lambda: Call(lambda m, x: m.a(m.n(x)), n=_random(nn.RMSNorm(19)), a=_linear()),
        ["torch:rms_norm", "quantize", "linear"],
    ),
    "rms norm without weight": Smoothed(
        lambda: Call(lambda m, x: m.a(F.rms_norm(x, (19,), eps=1e-3)), a=_linear()),
        ["torch:rms_norm", "quantize", "linear"],
    ),
    "rms norm spelled out": Smoothed(
        lambda: Call(lambda m, x: m.a(_spelled_out(m, x)), weight=torch.rand(19), a=_linear()),
        ["square", "reorder", "mean + scale + pow", "torch:_repeat", "mul + mul + quantize", "linear"],
    ),
    "float layer": Smoothed(
        lambda: Call(lambda m, x: m.b(m.a(x)), a=_linear(19, 23), b=_linear(23)),
        ["linear + quantize", "quantize", "linear"],
        exclude=["a"],
    ),
    "float layer without bias": Smoothed(
        lambda: Call(lambda m, x: m.b(m.a(x)), a=nn.Linear(19, 23, bias=False), b=_linear(23)),
        ["linear + quantize", "quantize", "linear"], exclude=["a"],
    ),
    "int8 layer": Smoothed(
        lambda: Call(lambda m, x: m.b(m.a(x)), a=_linear(19, 23), b=_linear(23)), ["quantize", "linear"],
        mapping=lambda: dbrq.default_qconfig_mapping().set_module_name("a", DYNAMIC.global_qconfig),
    ),
}  # fmt: skip
WITH_QUANTIZE = {
    "read by a sum too": Smoothed(
        lambda: Call(lambda m, x: (lambda y: m.a(y) + y)(m.n(x)), n=_norm(), a=_linear(19, 19)),
        ["layer_norm", "mul + quantize", "linear + add"], 1,
    ),
    "returned too": Smoothed(
        lambda: Call(lambda m, x: (lambda y: (m.a(y), y))(m.n(x)), n=_norm(), a=_linear()),
        ["layer_norm", "mul + quantize", "linear"], 1,
    ),
    "an input": Smoothed(lambda: Call(lambda m, x: m.a(x), a=_linear()), ["mul + quantize", "linear"], 1),
    "an image's channels": Smoothed(
        lambda: Call(lambda m, x: m.a(x), a=_linear()), ["mul + quantize", "linear"], 1, shape=(2, 5, 3, 19)
    ),
    "attention": Smoothed(
        lambda: Call(_attention, n=_norm(), a=_linear(19, 10), b=_linear(19, 10), c=_linear(19, 10), d=_linear(10)),
        ["layer_norm + quantize", "linear", "linear", "linear", "scaled_dot_product_attention", "torch:_softmax_",
         "scaled_dot_product_attention", "mul + quantize", "linear"], 1,
    ),
    "gelu behind a float layer": Smoothed(
        lambda: Call(lambda m, x: m.b(F.gelu(m.a(x))), a=_linear(19, 23), b=_linear(23)),
        ["linear + gelu + mul + quantize", "quantize", "linear"], 1, exclude=["a"],
    ),
    "exp behind an int8 layer": Smoothed(
        lambda: Call(lambda m, x: m.b(torch.exp(m.a(x))), a=_linear(19, 23), b=_linear(23)),
        ["mul + quantize", "linear + exp + mul + quantize", "linear"], 2,
    ),
    "gelu spelled out": Smoothed(
        lambda: Call(lambda m, x: m.b(_tanh_gelu(m.a(x))), a=_linear(19, 23), b=_linear(23)), (), 2,
    ),
}  # fmt: skip
CASES = {**FOLDED, **WITH_QUANTIZE}


def converted(case: Smoothed) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, *case.shape)
    options: dict[str, Any] = {"exclude": case.exclude} if case.exclude else {}
    mapping = case.mapping and case.mapping()
    prepared = dbrq.prepare(case.make().eval(), x[0], mapping, preset=dbrq.Preset(smoothing=True), **options)
    for item in x:
        prepared(item)
    return dbrq.convert(prepared), x[0]


def assert_right(lowered: Any, quantized: nn.Module, x: Tensor) -> None:
    for given in (x, x.flip(0), x * 0.7):
        assert_agrees(run(lowered, given), run(graph_of(quantized, x), given), "the graph", exact=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_onednn(name):
    case = CASES[name]
    quantized, x = converted(case)
    lowered = dbrq.lower(quantized, x, backend="onednn")
    assert_right(lowered, quantized, x)
    found = steps(lowered)
    if case.onednn:
        computed = [step for step in found if name != "int8 layer" or not step.startswith("torch:")]
        assert Counter(case.onednn) <= Counter(computed), found
        if name != "int8 layer":
            assert sorted(found) == sorted(case.onednn)
    assert sum("mul + quantize" in step for step in found) >= case.products
    assert not dbrq.lowered_form(lowered).in_torch
    kernels = {row.path: row.kernel for row in dbrq.report(lowered).rows}
    assert not any(kernel.startswith("onednn: mul") for path, kernel in kernels.items() if path in "abcd"), kernels


def test_onednn_broadcasts_factors_to_one_sequence():
    """Written out for all tokens they would be as much to read as the value itself."""
    quantized, x = converted(dataclasses.replace(CASES["read by a sum too"], shape=(1, 7, 19)))
    (runner,) = dbrq.lowered_form(dbrq.lower(quantized, x, backend="onednn")).plans
    (product,) = [step for step in runner.plan.steps if step.described()[2] == "mul + quantize"]
    assert product.places[Arg.SRC_1].desc.shape == (1, 1, 19)


@pytest.mark.parametrize("name", CASES)
def test_torchscript(name):
    case = CASES[name]
    quantized, x = converted(case)
    lowered = dbrq.lower(quantized, x)
    assert_right(lowered, quantized, x)
    kinds = Counter(child.original_name for child in lowered.children())
    assert kinds["QuantizeSmoothed"] == case.products, kinds
    assert "torch.mul(" not in lowered.code or "spelled out" in name, lowered.code


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    "name", ["layer norm", "rms norm spelled out", "float layer", "read by a sum too", "attention"]
)
def test_inductor(name):
    quantized, x = converted(CASES[name])
    assert_right(dbrq.lower(quantized, x, backend="inductor"), quantized, x)


@pytest.mark.parametrize("backend", ["onednn", "torchscript"])
@pytest.mark.parametrize("name", ["layer norm", "rms norm spelled out", "read by a sum too"])
def test_bfloat16(name, backend):
    quantized, x = converted(CASES[name])
    lowered = dbrq.lower(quantized, x, backend=backend, dtype=torch.bfloat16)
    for a, b in zip(floats(run(lowered, x)), floats(run(quantized, x)), strict=True):
        assert (a - b).abs().max() < 0.03 * b.abs().max()


def test_graph_names_the_multiplication():
    quantized, x = converted(CASES["one norm, two layers"])
    (product,) = filter(is_smoothing, graph_of(quantized, x).graph.nodes)
    assert product.name == "n_layer_norm_smoothed" and len(product.users) == 1


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_factors_in_files(backend, tmp_path):
    quantized, x = converted(CASES["layer norm"])
    lowered = dbrq.lower(quantized, x, backend=backend)
    dbrq.save(lowered, tmp_path / "model.dbrq")
    loaded = dbrq.load(tmp_path / "model.dbrq", allow=True)
    assert torch.equal(run(loaded, x), run(lowered, x))
    if backend == "onednn":
        assert steps(loaded) == ["layer_norm + quantize", "linear"]


def test_one_norm_for_two_readers_keeps_its_weight():
    """A weight that two norms share is multiplied for the one that a layer reads."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(m.n(x)) + m.n(x * 2)

    case = Smoothed(lambda: Call(forward, n=_norm(), a=_linear(19, 19)), ())
    quantized, x = converted(case)
    before = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    for backend in BACKENDS[:2]:
        assert_right(dbrq.lower(quantized, x, backend=backend), quantized, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in quantized.state_dict().items())


def test_one_weight_of_two_layers():
    """The scales of tied int8 weights differ once one of the layers has factors in them."""
    layer = _linear(19, 19)

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.b(m.a(x)), m.a(x * 2)

    mapping = lambda: dbrq.default_qconfig_mapping().set_module_name("a", DYNAMIC.global_qconfig)  # noqa: E731
    quantized, x = converted(Smoothed(lambda: Call(forward, a=layer, b=_linear()), (), mapping=mapping))
    for backend in BACKENDS[:2]:
        assert_right(dbrq.lower(quantized, x, backend=backend), quantized, x)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_weight_that_calls_write_to_stays(backend):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = _linear()
            self.register_buffer("w", torch.ones(19))

        def forward(self, x: Tensor) -> Tensor:
            self.w.add_(0.125)
            return self.a(F.layer_norm(x, (19,), self.w))

    quantized, x = converted(Smoothed(Counting, ()))
    lowered = dbrq.lower(quantized, x, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(run(lowered, x), run(quantized, x), atol=0.02, rtol=0)


def test_a_layer_that_nobody_reads_leaves_its_factors_to_others() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(64, 8)
            with torch.no_grad():
                self.norm.weight[7] *= 70

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            self.first(x)
            return self.second(x)

    torch.manual_seed(0)
    data = [torch.randn(4, 16, 64) for _ in range(4)]
    quantized = dbrq.quantize(Unread().eval(), data, preset="transformer")
    assert hasattr(quantized.second, "weight_smoothing")
    assert sqnr(quantized(data[0]), dbrq.rewrite(quantized, data[0])(data[0])) > 40
