"""The reference: float models whose values are rounded where the converted model rounds them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dbrq import kernels
from dbrq.eager.arguments import activations
from dbrq.eager.decompositions import multi_head_attention_forward
from dbrq.hidden_state import state_of
from dbrq.kernels import QParams
from dbrq.kernels.ranges import by_row, seven_bits
from dbrq.mappings import FUNCTIONS, Role
from dbrq.pytree import tree_leaves, tree_map
from dbrq.record.record import SeenOp
from tests.helpers.running import run


def fake_quantize(x: Tensor, q: QParams) -> Tensor:
    levels = torch.clamp(torch.round(x / q.scale) + q.zero_point, q.quant_min, q.quant_max)
    return (levels - q.zero_point) * q.scale


def fake_quantize_by_own_range(x: Tensor, reduce_range: bool, by_row: bool) -> Tensor:
    """As dynamic quantization rounds: a tensor as a whole, or each row of it."""
    if not by_row:
        return fake_quantize(x, kernels.dynamic_qparams(x, reduce_range))
    rows = [fake_quantize(row, kernels.dynamic_qparams(row, reduce_range)) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape)


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
        self.modules = token.modules
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
        factors = 1.0
        if op.weight is not None:
            factors = self.modules[op.weight.path]._buffers.get(f"{op.weight.name}_smoothing", 1.0)
        rounded = {id(found[read.slot]): fake_quantize(found[read.slot] * factors, self.qparams[read.value]) / factors
                   for read in op.decision.reads}  # fmt: skip
        if op.decision.precision == "int8" and op.decision.mode == "dynamic":
            x = found[0]
            activation = op.qconfig.activation()
            rounded[id(x)] = fake_quantize_by_own_range(x, seven_bits(activation), by_row(activation))
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
