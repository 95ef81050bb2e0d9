"""Models run and converted: one call on copies, and FX graph mode to compare with."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, quantize_fx
from torch.ao.quantization.backend_config import get_onednn_backend_config

import dbrq
from dbrq import selfcheck
from dbrq.lowering.inductor import check_compiler
from dbrq.pytree import call_arguments, tree_leaves


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
    """torch.ao's deprecated quantization: the oneDNN engine, and its warnings about itself kept out of our suite.

    Its tracer looks for the lines that a node's stack trace names, which takes as long as all else that it does.
    """
    engine, traces = torch.backends.quantized.engine, torch.fx.config.do_not_emit_stack_traces
    torch.backends.quantized.engine, torch.fx.config.do_not_emit_stack_traces = "onednn", True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine, torch.fx.config.do_not_emit_stack_traces = engine, traces


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


def quantized(model: nn.Module, data: Sequence[Any], strict: bool = False) -> nn.Module:
    """A copy of the model, calibrated on ``data`` and converted."""
    prepared = dbrq.prepare(copy.deepcopy(model).eval(), data[0])
    dbrq.calibrate(prepared, data, progress=False)
    return dbrq.convert(prepared, strict=strict)


def quietly(model: Callable, *args: Any) -> Any:
    """A call whose warnings are of no interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(*args)


def quantized_on(model: nn.Module, x: Any) -> nn.Module:
    """The model, quantized with one example."""
    return dbrq.quantize(model.eval(), [x])
