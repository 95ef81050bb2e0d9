"""Op hooks of a converted model: what each op does with int8 values. One plan per recorded op, one class per role."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .._torch import without_function_modes
from ..errors import QuantizationError
from ..kernels import PackedLinear, dequantize, ints
from ..kernels.ranges import seven_bits
from ..mappings import Role
from ..pytree import tree_leaves, tree_map
from ..record.record import SeenOp
from ..tensors import Int8Tensor, Int8Weight, plain
from .conv_linear import ComputePlan, DynamicLinearPlan, FusedPlan
from .executor import Plan
from .float_reference import run_float
from .interfaces import Leaf, Run, State
from .recurrent import recurrent_weights, run_recurrent
from .weights import Watched, is_weight


class ElementwisePlan(Plan):
    """add, sub, mul, div: dequantize, compute, quantize. There is no stock int8 kernel for them that is right."""

    def run(self, call: Run, bound: list[Any]) -> Any:
        same = len(self.reads) == 2 and bound[0] is bound[1]
        for number, read in enumerate(self.reads):
            if not isinstance(bound[read.slot], Tensor):  # a number, on this path
                continue
            if same and number == 1:
                bound[1] = bound[0]
                continue
            found = self.read_int8(call, bound[read.slot], number)
            if found is None:
                return self.write(call, self.run_plain(bound))
            bound[read.slot] = dequantize(*found)
        return self.write(call, run_float(self.row, bound))


class PoolPlan(Plan):
    """Average pools: on exact integers held in float, then quantized with qparams of their own."""

    def run(self, call: Run, bound: list[Any]) -> Any:
        found = self.read_int8(call, bound[0], 0)
        if found is None:
            return self.write(call, self.run_plain(bound))
        q, qparams = found
        if qparams.zero_point and not self.row.name.startswith(("adaptive", "mean")):  # padding counts as zeros
            return self.write(call, run_float(self.row, [dequantize(q, qparams), *bound[1:]]))
        # Averaging is linear: shift and scale the few results rather than the many inputs.
        pooled = run_float(self.row, [q.to(torch.float32), *bound[1:]])
        return self.write(call, pooled.sub_(qparams.zero_point).mul_(qparams.scale))


class SharePlan(Plan):
    """cat, stack, max pools and nearest interpolation: on the integers, which all have the same qparams."""

    def run(self, call: Run, bound: list[Any]) -> Any:
        assert self.out is not None
        last = len(self.reads) - 1  # more may come than ever before
        found = [self.read_int8(call, x, min(i, last)) for i, x in enumerate(self._inputs(bound))]
        known = [f for f in found if f is not None]
        if call.unsure or len(known) < len(found):
            return self.write(call, self.run_plain(bound))
        data = [kernels.requantize(q, qparams, self.out) for q, qparams in known]
        result = self._on_integers(data, bound)
        return Int8Tensor(result.shape, result, self.out, self.tag)

    def _inputs(self, bound: list[Any]) -> Sequence[Tensor]:
        return bound[:1]

    def _on_integers(self, data: list[Tensor], bound: list[Any]) -> Tensor:
        raise AssertionError("subclasses say how")


class CatPlan(SharePlan):
    def _inputs(self, bound: list[Any]) -> Sequence[Tensor]:
        return bound[0]

    def _on_integers(self, data: list[Tensor], bound: list[Any]) -> Tensor:
        return (torch.cat if self.row.name == "cat" else torch.stack)(data, bound[1])


class MaxPoolPlan(SharePlan):
    def _on_integers(self, data: list[Tensor], bound: list[Any]) -> Tensor:
        n = self.row.ndim
        kernel = ints(bound[1], n)
        stride = kernel if bound[2] is None or bound[2] == [] else ints(bound[2], n)
        if data[0].dim() != n + 2 or not data[0].numel():
            pooled = run_float(self.row, [data[0].to(torch.float32), *bound[1:]])
            return pooled.to(torch.uint8)
        return kernels.max_pool(data[0], n, kernel, stride, ints(bound[3], n), ints(bound[4], n), bool(bound[5]))


class InterpolatePlan(SharePlan):
    def _on_integers(self, data: list[Tensor], bound: list[Any]) -> Tensor:
        return F.interpolate(data[0].to(torch.float32), *bound[1:]).to(torch.uint8)


class MatmulPlan(Plan):
    """matmul and bmm of two activations."""

    def run(self, call: Run, bound: list[Any]) -> Any:
        left, right = (self.read_int8(call, bound[i], i) for i in (0, 1))
        if left is None or right is None or not (bound[0].numel() and bound[1].numel()):
            return self.write(call, self.run_plain(bound))
        return self.write(call, kernels.int8_matmul(*left, *right))


class EmbeddingPlan(Plan):
    """embedding and embedding_bag: rows are looked up as int8, then scaled."""

    def __init__(self, state: State, op: SeenOp) -> None:
        super().__init__(state, op)
        assert op.weight is not None
        self.weight = op.weight
        self.modules = state.token.modules
        self.owner, self.name = self.modules[op.weight.path], op.weight.name
        self.axis = state.token.weight_axes[op.weight.key]

    def fits(self, bound: Sequence[Any]) -> bool:
        return self._is_stored(bound[1])

    def stored(self) -> list[tuple[str, Callable[[Any], bool]]]:
        return [("weight", self._is_stored)]

    def _is_stored(self, weight: Any) -> bool:
        return is_weight(weight, self.weight, self.modules)

    def _rows(self, index: Tensor) -> Tensor:
        buffers = self.owner._buffers
        weight, scale = buffers[f"{self.name}_int8"], buffers[f"{self.name}_scale"]
        zero_point = buffers.get(f"{self.name}_zero_point")
        assert weight is not None and scale is not None
        rows = F.embedding(index, weight).to(torch.float32)
        if self.axis not in (0, None):
            raise QuantizationError(
                "an embedding's scales must run along its rows", path=self.op.owner, op=self.op.path
            )
        if zero_point is not None:
            rows.sub_(zero_point if self.axis is None else zero_point[index].unsqueeze(-1))
        return rows.mul_(scale if self.axis is None else scale[index].unsqueeze(-1))

    def run(self, call: Run, bound: list[Any]) -> Any:
        index = bound[0]
        if self.row.name == "embedding":
            return self.write(call, self._rows(index))
        places = torch.arange(index.numel(), dtype=index.dtype).reshape(index.shape)
        padding = bound[10]
        if padding is not None and padding < 0:
            padding += self.weight.shape[0]
        if padding is not None and (is_padding := index == padding).any():
            padding = int(is_padding.flatten().nonzero()[0])
            places = torch.where(is_padding, torch.full_like(places, padding), places)
        else:
            padding = None
        rows = self._rows(index.flatten())
        if not index.numel():
            rows = torch.zeros(1, self.weight.shape[1])
        rest = [bound[2], None, bound[4], False, bound[6], False, plain(bound[8]), bound[9], padding]
        return self.write(call, F.embedding_bag(places, rows, *rest))


class RecurrentPlan(Plan):
    """LSTM, GRU, RNN and their cells with dynamic int8 activations."""

    def __init__(self, state: State, op: SeenOp) -> None:
        super().__init__(state, op)
        self._packed: tuple[Watched, dict[str, PackedLinear]] | None = None
        assert op.qconfig is not None
        self.reduce_range = seven_bits(op.qconfig.activation())

    def stored(self) -> list[tuple[str, Callable[[Any], bool]]]:
        module = self.state.token.modules[self.op.leaf or ""]
        return [(name, functools.partial(self._is_stored, name)) for name, _ in recurrent_weights(module)]

    def _is_stored(self, name: str, weight: Any) -> bool:
        owner = self.state.token.modules[self.op.leaf or ""]
        return isinstance(weight, Int8Weight) and weight.owner is owner and weight.parameter == name

    def module(self, call: Run, leaf: Leaf, args: tuple, kwargs: dict) -> Any:
        if not self.keeps_settings(leaf):
            return call.unrecorded_leaf(leaf, args, kwargs)
        given = [plain(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.is_followed(call, x) for x in given):
            with without_function_modes():
                args, kwargs = tree_map(plain, (tuple(args), dict(kwargs)))
                return self.float_result(call, leaf.original(*args, **kwargs))
        with torch.no_grad(), without_function_modes():
            args, kwargs = tree_map(plain, (tuple(args), dict(kwargs)))
            output = run_recurrent(leaf.module, self.packed(leaf.module), args, kwargs, self.reduce_range)
            return self._tagged(output)

    def packed(self, module: nn.Module) -> dict[str, PackedLinear]:
        if self._packed is None or not self._packed[0].unchanged():
            buffers: dict = module._buffers
            packed, sources = {}, []
            with torch.inference_mode(False), torch.no_grad():
                for name, bias_name in recurrent_weights(module):
                    bias = None if bias_name is None else module._parameters[bias_name]
                    packed[name] = PackedLinear(buffers[f"{name}_int8"], buffers[f"{name}_scale"], bias)
                    sources += [(buffers, f"{name}_int8"), (buffers, f"{name}_scale")]
                    if bias_name is not None:
                        sources.append((module._parameters, bias_name))
            self._packed = Watched(sources), packed
        return self._packed[1]


_BY_ROLE: dict[Role, type[Plan]] = {
    Role.COMPUTE: ComputePlan,
    Role.ELEMENTWISE: ElementwisePlan,
    Role.POOL: PoolPlan,
    Role.SHARE: MaxPoolPlan,
    Role.EMBEDDING: EmbeddingPlan,
    Role.RECURRENT: RecurrentPlan,
}
_BY_NAME: dict[str, type[Plan]] = {
    "matmul": MatmulPlan,
    "cat": CatPlan,
    "stack": CatPlan,
    "interpolate": InterpolatePlan,
}


def plan(state: State, op: SeenOp) -> Plan:
    """The plan of one recorded op."""
    decision = op.decision
    if decision.precision == "float":
        return Plan(state, op)
    if decision.member_of is not None:
        return FusedPlan(state, op)
    if op.row.role is Role.COMPUTE and decision.mode != "static":
        return DynamicLinearPlan(state, op)
    if op.row.name in _BY_NAME:
        return _BY_NAME[op.row.name](state, op)
    return _BY_ROLE[op.row.role](state, op)
