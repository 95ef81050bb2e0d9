"""How a numeric case is judged, as CONFORMANCE.md has it: against FX graph mode, and against fake quantization."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, quantize_fx
from torch.ao.quantization.backend_config import get_onednn_backend_config
from torch.overrides import TorchFunctionMode

import dbrq
from dbrq import kernels, selfcheck
from dbrq.eager.arguments import activations
from dbrq.eager.decompositions import multi_head_attention_forward
from dbrq.hidden_state import state_of
from dbrq.inspection.report import ReportRow
from dbrq.kernels import QParams
from dbrq.lowering.inductor import check_compiler
from dbrq.mappings import FUNCTIONS, Role
from dbrq.pytree import call_arguments, tree_leaves, tree_map
from dbrq.record.record import SeenOp

#: CONFORMANCE.md: within one step for this share of the elements.
AGREEING = 0.999
#: CONFORMANCE.md: or as good as FX, give or take this many dB.
DECIBELS = 0.5


# Running things


def has_compiler() -> bool:
    """Whether the inductor backend can run."""
    try:
        check_compiler()
    except dbrq.CompilerError:
        return False
    return True


def run(model: Callable, inputs: Any, kwargs: dict | None = None) -> Any:
    """One call under ``no_grad`` on copies of the inputs, since forward may change them."""
    args, kwargs = call_arguments(copy.deepcopy(inputs), copy.deepcopy(kwargs))
    with torch.no_grad():
        return model(*args, **kwargs)


def floats(tree: Any) -> list[Tensor]:
    """The floating point tensors of an output, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def graph_of(quantized: nn.Module, x: Any) -> torch.fx.GraphModule:
    """The Q/DQ graph of a converted model, for tests that compare the two themselves."""
    checked = selfcheck.enabled()
    dbrq.set_self_check(False)
    try:
        return dbrq.rewrite(quantized, x)
    finally:
        dbrq.set_self_check(checked)


@contextlib.contextmanager
def old_quantization() -> Iterator[None]:
    """torch.ao's deprecated quantization: the oneDNN engine, and its warnings about itself kept out of our suite."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "onednn"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = engine


def fx_quantize(
    model: nn.Module, example: Any, qconfig_mapping: QConfigMapping | None = None, data: Sequence[Any] | None = None
) -> Callable:
    """``model`` through FX graph mode, calibrated on ``data`` or on the example; call it as the model is called."""
    backend = get_onednn_backend_config()
    mapping = dbrq.default_qconfig_mapping() if qconfig_mapping is None else qconfig_mapping
    args, kwargs = call_arguments(copy.deepcopy(example))
    with old_quantization():
        prepared = quantize_fx.prepare_fx(
            copy.deepcopy(model).eval(), copy.deepcopy(mapping), (*args, *kwargs.values()), backend_config=backend
        )
        for item in [example] if data is None else data:
            run(prepared, item)
        converted = quantize_fx.convert_fx(prepared, backend_config=backend)

    return FxModel(converted)


class FxModel:
    """A model converted by FX graph mode, run without its warnings."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self.graph_module = graph_module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with old_quantization():
            return self.graph_module(*args, **kwargs)

    def steps(self, inputs: Any) -> list[float | None]:
        """The quantization step of each output leaf, None where it was never quantized."""
        scales: dict[torch.fx.Node, float] = {}

        class Scales(torch.fx.Interpreter):
            def run_node(self, node: torch.fx.Node) -> Any:
                result = super().run_node(node)
                if isinstance(result, Tensor) and result.is_quantized:
                    scales[node] = result.q_scale()
                return result

        args, kwargs = call_arguments(copy.deepcopy(inputs))
        with old_quantization(), torch.no_grad():
            Scales(self.graph_module).run(*args, *kwargs.values())
        output = next(node for node in self.graph_module.graph.nodes if node.op == "output")
        found: list[float | None] = []

        def visit(node: torch.fx.Node) -> torch.fx.Node:
            source = node.args[0] if node.op == "call_method" and node.target == "dequantize" else None
            found.append(scales.get(source) if isinstance(source, torch.fx.Node) else None)
            return node

        torch.fx.node.map_arg(output.args[0], visit)
        return found


# Measures


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    noise = torch.linalg.vector_norm((reference - other).double()).item()
    signal = torch.linalg.vector_norm(reference.double()).item()
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def step_of(value: Tensor) -> float:
    """The step of a value that would be quantized to 8 bits: its range, zero included, by 255."""
    if not value.numel():
        return 1.0
    return max((max(value.max().item(), 0.0) - min(value.min().item(), 0.0)) / 255, 1e-12)


def agreement(a: Tensor, b: Tensor, step: float) -> float:
    """The share of elements that differ by one step at most."""
    if not a.numel():
        return 1.0
    return ((a - b).abs() <= step * 1.001 + 1e-6).float().mean().item()


# Judging


def assert_matches(
    model: nn.Module,
    example: Any,
    qconfig_mapping: Any = None,
    *,
    data: Sequence[Any] | None = None,
    fx: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare, calibrate, convert and judge; returns the converted model.

    All models are held against fake quantization, and against FX graph mode where ``fx`` is True, or None and it runs
    the model (it fails on many spellings). ``options`` go to ``prepare``.
    """
    model = model.eval()
    inputs = [example] if data is None else list(data)
    before = run(model, example)
    prepared = dbrq.prepare(model, example, qconfig_mapping, **options)
    assert_same_tree(run(prepared, example), before, "prepared")
    if data is not None:
        prepared = dbrq.prepare(model, example, qconfig_mapping, **options)
    for item in inputs if data is not None else []:
        run(prepared, item)
    converted = dbrq.convert(prepared)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")  # on the recorded path nothing falls back to float
        after = run(converted, example)
    assert_same_containers(after, before)
    assert_close_to_fake_quantized(converted, model, example)
    if fx is not False:
        try:
            reference = fx_quantize(model, example, as_fx_mapping(qconfig_mapping), data)
            theirs, steps = run(reference, example), reference.steps(example)
        except Exception:
            if fx:
                raise
            return converted
        assert_as_good(after, before, theirs, steps)
    return converted


def as_fx_mapping(qconfig_mapping: Any) -> QConfigMapping | None:
    if qconfig_mapping is None or isinstance(qconfig_mapping, QConfigMapping):
        return qconfig_mapping
    return QConfigMapping().set_global(qconfig_mapping)


def assert_same_containers(after: Any, before: Any) -> None:
    """Same classes all the way down; plain tensors of equal shape and dtype at the leaves."""
    assert type(after) is type(before), f"{type(after)} where the float model gives {type(before)}"
    if isinstance(before, Tensor):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert not after.__dict__, f"left on the output: {after.__dict__}"
    elif isinstance(before, dict):
        assert list(after) == list(before)
        for key in before:
            assert_same_containers(after[key], before[key])
    elif isinstance(before, (list, tuple)):
        assert len(after) == len(before)
        for a, b in zip(after, before, strict=True):
            assert_same_containers(a, b)


def assert_same_tree(after: Any, before: Any, what: str) -> None:
    assert_same_containers(after, before)
    for a, b in zip(floats(after), floats(before), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text: f"{what} differs from float: {text}")


def assert_as_good(ours: Any, float_: Any, theirs: Any, steps: Iterable[float | None] = ()) -> None:
    """Rule (a): within one step of FX's output, or no further from float than FX is."""
    given = list(steps)
    leaves = list(zip(floats(ours), floats(float_), floats(theirs), strict=True))
    for number, (a, f, b) in enumerate(leaves):
        assert torch.isfinite(a).all() or not torch.isfinite(f).all()
        step = given[number] if len(given) == len(leaves) else None
        share = agreement(a, b, step_of(b) if step is None else step)
        if share >= AGREEING:
            continue
        mine, other = sqnr(f, a), sqnr(f, b)
        assert mine >= other - DECIBELS, f"{share:.2%} within one step of FX; {mine:.2f} dB, and FX has {other:.2f} dB"


def assert_close_to_fake_quantized(
    converted: nn.Module, model: nn.Module, example: Any, share: float = AGREEING
) -> None:
    """Rule (c): within one step of fake quantization with the converted model's own qparams."""
    expected = fake_quantized(converted, model, example)
    got = run(converted, example)
    for a, b in zip(floats(got), floats(expected), strict=True):
        agreeing = agreement(a, b, step_of(b))
        assert agreeing >= share, (
            f"{agreeing:.2%} of the elements within one step of fake quantization; largest error "
            f"{(a - b).abs().max().item() / step_of(b):.1f} steps, {sqnr(b, a):.1f} dB"
        )


# The reference


def fake_quantize(x: Tensor, q: QParams) -> Tensor:
    levels = torch.clamp(torch.round(x / q.scale) + q.zero_point, q.quant_min, q.quant_max)
    return (levels - q.zero_point) * q.scale


def fake_quantized(converted: nn.Module, model: nn.Module, example: Any) -> Any:
    """The float model's output, with each value rounded where the converted model rounds it, and its int8 weights.

    Nothing of dbrq's run time takes part: only its decisions and qparams do.
    """
    stand_in = copy.deepcopy(model).eval()
    quantized = dict(converted.named_modules())
    with torch.no_grad():
        for path, module in stand_in.named_modules():
            for name, parameter in [*module._parameters.items(), *module._buffers.items()]:
                if parameter is not None and f"{name}_int8" in quantized[path]._buffers:
                    parameter.copy_(getattr(quantized[path], name).dequantize())
    with FakeQuantizeMode(converted):
        return run(stand_in, example)


class FakeQuantizeMode(TorchFunctionMode):
    """Rounds what each recorded op reads and writes, op by op in the recorded order."""

    def __init__(self, converted: nn.Module) -> None:
        token = state_of(converted).token
        self.ops = iter([op for op in token.record.hooked() if op.row.role is not Role.RECURRENT])
        self.qparams = {key: state.qparams(key) for state in token.states.values() for key in state.slots}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention_forward(*args, **kwargs)
        spelling = FUNCTIONS.get(func)
        if spelling is None or spelling.row.role in (Role.PASS, Role.FLOAT):
            return func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        op = next(self.ops)
        assert {op.op, spelling.row.name} in ({op.op}, {"relu6", "hardtanh"}), f"{op.path} was recorded, {func} runs"
        return self.run(op, func, spelling, args, kwargs)

    def run(self, op: SeenOp, func: Callable, spelling: Any, args: tuple, kwargs: dict) -> Any:
        found = dict(activations(spelling.row, spelling.bind(args, kwargs)))
        rounded = {id(found[read.slot]): fake_quantize(found[read.slot], self.qparams[read.value])
                   for read in op.decision.reads}  # fmt: skip
        if op.decision.precision == "int8" and op.decision.mode == "dynamic":
            x = found[0]
            reduce_range = bool(getattr(op.qconfig.activation(), "reduce_range", False))
            rounded[id(x)] = fake_quantize(x, kernels.dynamic_qparams(x, reduce_range))
        first, target = args[0] if args else next(iter(kwargs.values())), kwargs.get("out")
        args, kwargs = tree_map(lambda leaf: rounded.get(id(leaf), leaf), (args, kwargs))
        output = func(*args, **kwargs)
        if op.decision.writes is not None and not op.decision.chain:
            output = fake_quantize(output, self.qparams[op.decision.writes])
        if isinstance(target, Tensor):
            return target.copy_(output)
        if spelling.inplace or (op.inplace and isinstance(first, Tensor)):
            return first.copy_(output)
        return output


# Looking at decisions


def rows(model: nn.Module, op: str) -> list[ReportRow]:
    return [row for row in dbrq.report(model).rows if row.op == op]


def assert_precision(model: nn.Module, op: str, precision: str, count: int | None = None) -> None:
    """All rows of ``op`` run in ``precision``; the failure shows the report."""
    found = rows(model, op)
    assert found, f"no {op} in\n{dbrq.report(model)}"
    assert {row.precision for row in found} == {precision}, f"{op} should be {precision} in\n{dbrq.report(model)}"
    assert count is None or len(found) == count


# Building blocks


class Call(nn.Module):
    """A function as a module, with the modules and parameters it uses as its attributes: ``fn(self, *inputs)``.

    FX graph mode wants to know how many inputs there are, so there is a class for each number.
    """

    def __new__(cls, fn: Callable | None = None, inputs: int = 0, **attributes: Any) -> Call:
        if fn is None:  # a copy is being made
            return super().__new__(cls)
        count = inputs or len(inspect.signature(fn).parameters) - 1
        return super().__new__(_Call2 if count == 2 else _Call3 if count == 3 else Call)

    def __init__(self, fn: Callable, inputs: int = 0, **attributes: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, x):
        return self.fn(self, x)


class _Call2(Call):
    def forward(self, x, y):
        return self.fn(self, x, y)


class _Call3(Call):
    def forward(self, x, y, z):
        return self.fn(self, x, y, z)


class Between(nn.Module):
    """``op`` with a convolution before each of its inputs and a layer behind it, so that all around it is int8."""

    def __init__(self, op: Callable, inputs: int = 1, channels: int = 8, ndim: int = 2, size: int = 10) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{ndim}d")
        self.first = conv(4, channels, 3, padding=1)
        self.second = conv(4, channels, 3, padding=1) if inputs > 1 else None
        self.op = op
        self.example = torch.randn(2, 4, *[size] * ndim)
        with torch.no_grad():
            result = self._middle(self.example)
        if result.dim() == ndim + 2:
            self.after = conv(result.shape[1], 6, 1)
        else:
            self.after = nn.Linear(result.shape[-1], 6)

    def _middle(self, x):
        if self.second is None:
            return self.op(self.first(x))
        return self.op(self.first(x), self.second(x))

    def forward(self, x):
        return self.after(self._middle(x))


@dataclass
class Converted:
    """A converted model with what it came from."""

    model: nn.Module
    prepared: nn.Module
    quantized: nn.Module
    example: Any


def convert(model: nn.Module, example: Any, qconfig_mapping: Any = None, **options: Any) -> Converted:
    """Prepared, calibrated on the example, and converted."""
    model = model.eval()
    prepared = dbrq.prepare(model, example, qconfig_mapping, **options)
    run(prepared, example)
    return Converted(model, prepared, dbrq.convert(prepared), example)
