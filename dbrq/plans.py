"""Op hooks of a converted model: what each op does with int8 values. One plan per recorded op, one class per role.

A plan is derived from the op's ``Decision`` and the qparams and weights of the model; it holds no truth of its own. Plans
are read-only while they run, so threads share them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .auto_trace import INT8, TAG, InterceptedForward, RunCall
from .containers import tree_leaves, tree_map
from .errors import DeviationError, KernelInputError, QuantizationError
from .kernels import NO_POST_OP, PackedConv, PackedLinear, PostOp, QParams, dequantize, quantize
from .mappings import Role, Spelling, asks_inplace
from .recurrent import recurrent_weights, run_recurrent
from .record import Read, SeenOp, Step
from .reference import run_float
from .tensors import Int8Tensor, plain
from .watch import bind_leaf
from .weights import StoredWeight, Watched, norm_scale, norm_shift, source_of, tensor_of

if TYPE_CHECKING:
    from .quantization_state import AutoQuantizationState

Quantized = tuple[Tensor, QParams]
_disabled = torch._C.DisableTorchFunction


def plan(state: AutoQuantizationState, op: SeenOp) -> Plan:
    """The plan of one recorded op."""
    decision = op.decision
    if decision.precision == "float" or op.row is None:
        return Plan(state, op)
    if decision.member_of is not None:
        return FusedPlan(state, op)
    if op.row.role is Role.COMPUTE and decision.mode != "static":
        return DynamicLinearPlan(state, op)
    if op.row.name in _BY_NAME:
        return _BY_NAME[op.row.name](state, op)
    return _BY_ROLE[op.row.role](state, op)


class Plan:
    """An op that runs in float, and what all plans have in common. Subclasses override ``run``."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        assert op.row is not None
        self.state, self.op, self.row, self.module_path = state, op, op.row, op.module
        self.reads: Sequence[Read] = op.decision.reads
        self.tag = op.result.tag
        self.out = None if op.decision.writes is None else state.qparams(op.decision.writes)
        self.read_qparams = [state.qparams(read.value) for read in self.reads]

    # The two ways an op is spelled

    def leaf(self, call: RunCall, leaf: InterceptedForward, x: Any) -> Any:
        """The op as a leaf module with one argument; the hot path, runs under the function mode."""
        return self.module(call, leaf, (x,), {})

    def module(self, call: RunCall, leaf: InterceptedForward, args: tuple, kwargs: dict, alone: bool = False) -> Any:
        """The op as a leaf module."""
        with _disabled():
            if self.op.decision.precision == "float":
                return self._tagged(leaf.original(*tree_map(plain, args), **tree_map(plain, kwargs)))
            bound = bind_leaf(leaf, args, kwargs)
            return self._finish(bound[0], self.run(call, bound), self.op.inplace)

    def function(self, call: RunCall, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        """The op as a function, method or operator."""
        if self.op.decision.precision == "float" or "out" in kwargs:
            return self._tagged(call.run_float(func, args, kwargs, spelling.inplace))
        bound = spelling.bind(args, kwargs)
        inplace = spelling.inplace or (self.op.inplace and asks_inplace(spelling.row, bound))
        return self._finish(bound[0], self.run(call, bound), inplace)

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        """The op on arguments in the row's order; int8 or float, never in place."""
        raise AssertionError("subclasses say how")

    # Reading and writing values

    def read_int8(self, call: RunCall, x: Tensor, number: int) -> Quantized | None:
        """``x`` as integers, or None if it is a float value of another origin than the record's."""
        if type(x) is Int8Tensor:
            if x.data_u8 is not None:
                return x.data_u8, x.qparams  # type: ignore[return-value]
            x = x.float_value()
        qparams, read = self.read_qparams[number], self.reads[number]
        inputs = id(x) in call.input_tags
        cached = call.quantized_inputs.get(id(x)) if inputs else x.__dict__.get(INT8)
        if cached is not None and cached[0] == qparams and cached[2] == call.mutations and cached[3] is call:
            return cached[1], qparams
        if call.tag_of(x) != read.tag:
            self._unrecorded(f"a value made by {call.tag_of(x)!r}", f"the value that {read.tag!r} made")
            return None
        if x.dtype is not torch.float32:
            raise KernelInputError(
                "an int8 op got another dtype", path=self.op.owner, op=self.op.path, expected="torch.float32", got=x.dtype,
                hint="pass float32, as in the watching run",
            )  # fmt: skip
        q = quantize(x.detach(), qparams)
        entry = (qparams, q, call.mutations, call)
        if inputs:
            call.quantized_inputs[id(x)] = entry
        else:
            x.__dict__[INT8] = entry
        return q, qparams

    def _unrecorded(self, got: str, expected: str) -> None:
        if self.state.token.strict:
            raise DeviationError("an op reads another value than was recorded", path=self.op.owner, op=self.op.path,
                                 expected=expected, got=got, hint="prepare with example_inputs that take this path")  # fmt: skip
        warnings.warn(f"dbrq: {self.op.path} runs in float: it reads {got} and was recorded with {expected}", stacklevel=2)

    def write(self, value: Tensor) -> Tensor:
        """A float result as the record wants it: quantized, or tagged."""
        if self.out is None:
            return self._tagged(value)
        return Int8Tensor(value.shape, quantize(value, self.out), self.out)

    def _tagged(self, output: Any) -> Any:
        if type(output) is Tensor:
            output.__dict__[TAG] = self.tag
        elif isinstance(output, Int8Tensor):  # written to, and float now
            self._tagged(output._float)
        elif isinstance(output, (tuple, list)):
            tags = iter(self.op.outputs)
            for leaf in tree_leaves(output):
                info = next(tags, None) if isinstance(leaf, Tensor) else None
                if info is not None and type(leaf) is Tensor:
                    leaf.__dict__[TAG] = info.tag
        return output

    def _finish(self, target: Any, output: Any, inplace: bool) -> Any:
        if not inplace or not isinstance(target, Tensor):
            return output
        if isinstance(target, Int8Tensor):
            target.become(output)
        else:
            target.copy_(plain(output))
            self._tagged(target)
            target.__dict__.pop(INT8, None)
        return target

    def run_plain(self, bound: list[Any]) -> Any:
        """The op in float."""
        return run_float(self.row, tree_map(plain, bound), self.op.pad)


class Fused:
    """A fusion under way: an int8 convolution or linear layer whose followers are not all known yet.

    Running it is put off until its reader is: the recorded one continues it, any other gets the float value so far.
    """

    __slots__ = ("other", "plan", "q", "qparams")

    def __init__(self, plan: ComputePlan, q: Tensor, qparams: QParams, other: Any = None) -> None:
        self.plan, self.q, self.qparams, self.other = plan, q, qparams, other

    def value(self, stage: int) -> Tensor:
        with _disabled():
            result = self.plan.execute(self.q, self.qparams, stage, self.other, None)
            result.__dict__[TAG] = self.plan.value_ids[stage]
            return result


class ComputePlan(Plan):
    """conv1d, conv2d, conv3d and linear with int8 activations, and what is fused behind them."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        super().__init__(state, op)
        self.steps = op.decision.chain
        self.modules = state.modules_by_path
        assert op.weight is not None
        self.weight = StoredWeight(op.weight, state.token.weight_axes[op.weight.key])  # type: ignore[attr-defined]
        self._packed: dict[bool, tuple[Watched, PackedConv | PackedLinear]] = {}
        self._post_ops: dict[int, PostOp] = {}
        self._bound: dict[tuple, tuple] = {}  # input shape and stage -> what it was bound to, and the callable
        self._usual: dict[torch.Size, torch.Size] = {}  # input shapes that need no care -> output shape
        self.contiguous = op.result.contiguous
        self.folds = bool(self.steps) and self.steps[0].op.role is Role.NORM
        self.adds = any(step.op.name == "add" for step in self.steps)
        self.value_ids = [op.result.id, *(step.value for step in self.steps)]

    def leaf(self, call: RunCall, leaf: InterceptedForward, x: Any) -> Any:
        if type(x) is Int8Tensor and x.data_u8 is not None:
            shape = self._usual.get(x.size_)
            if shape is not None:
                if self.steps:
                    return Int8Tensor.under_way(shape, Fused(self, x.data_u8, x.qparams), 0)  # type: ignore[arg-type]
                with _disabled():
                    return self._result(x.data_u8, x.qparams, shape)  # type: ignore[arg-type]
        return self.module(call, leaf, (x,), {})

    def module(self, call: RunCall, leaf: InterceptedForward, args: tuple, kwargs: dict, alone: bool = False) -> Any:
        if kwargs or alone:
            return plain(super().module(call, leaf, args, kwargs)) if alone else super().module(call, leaf, args, kwargs)
        with _disabled():
            return self.run(call, args)

    def run(self, call: RunCall, bound: Sequence[Any]) -> Any:
        x = bound[0]
        if type(x) is Int8Tensor and x.data_u8 is not None:
            q, qparams = x.data_u8, x.qparams
        else:
            found = self.read_int8(call, x, 0)
            if found is None:
                return self._unusual(None, call, bound)
            q, qparams = found
        if (self.row.ndim and q.dim() != self.row.ndim + 2) or not q.numel():
            return self._unusual((q, qparams), call, bound)
        if self.row.ndim and self.op.module is None:
            self._check_settings(bound)
        if self.op.pad is not None:
            q = kernels.pad_mode(q, *self.op.pad)
        shape = self.packed(self.folds).output_shape(q.shape)
        if self.op.pad is None and len(self._usual) < 256:
            self._usual[q.shape] = shape
        if self.steps:
            return Int8Tensor.under_way(shape, Fused(self, q, qparams), 0)
        return self._result(q, qparams, shape)

    def _result(self, q: Tensor, qparams: QParams, shape: torch.Size) -> Tensor:
        result = self.execute(q, qparams, 0, None, self.out)
        return self._tagged(result) if self.out is None else Int8Tensor(shape, result, self.out)

    def _unusual(self, found: Quantized | None, call: RunCall, bound: Sequence[Any]) -> Any:
        """Inputs without batch dimension, empty ones, and values of another origin."""
        if found is not None and found[0].numel() and self.op.pad is None:
            q, qparams = found
            return self._tagged(self.execute(q.unsqueeze(0), qparams, 0, None, None).squeeze(0))
        if self.op.module is not None:
            module = self.modules[self.op.module]
            return self._tagged(type(module).forward(module, plain(bound[0])))
        return self._tagged(self.run_plain(list(bound)))

    def _check_settings(self, bound: Sequence[Any]) -> None:
        constants = tuple(tuple(b) if isinstance(b, list) else b for b in bound[3:7])
        if constants != tuple(self.op.constants[3:7]):
            raise DeviationError(
                "a convolution runs with other settings than were recorded", path=self.op.owner, op=self.op.path,
                expected=f"stride, padding, dilation, groups = {self.op.constants[3:7]}", got=constants,
                hint="keep them fixed, or set this op's qconfig to None",
            )  # fmt: skip

    # Kernels

    def packed(self, folded: bool) -> PackedConv | PackedLinear:
        """The packed weight, with or without the batch norm that follows folded in."""
        entry = self._packed.get(folded)
        if entry is not None and entry[0].unchanged():
            return entry[1]
        with torch.inference_mode(False), torch.no_grad():
            entry = self._pack(folded)
        self._packed[folded] = entry
        return entry[1]

    def _pack(self, folded: bool) -> tuple[Watched, PackedConv | PackedLinear]:
        sources = self.weight.sources(self.modules)
        scale = self.weight.scale(self.modules)
        bias = None
        if self.op.bias is not None:
            bias = tensor_of(self.op.bias, self.modules)
            sources.append(source_of(self.op.bias, self.modules))
        if folded:
            sources += [source_of(ref, self.modules) for ref in self.steps[0].norm if ref is not None]
            factor = norm_scale(self.steps[0], self.modules)
            scale, bias = scale * factor, norm_shift(self.steps[0], self.modules, factor, bias)
        weight = self.weight.int8(self.modules).contiguous()
        if self.row.ndim == 0:
            return Watched(sources), PackedLinear(weight, scale, bias)
        stride, padding, dilation, groups = self.op.constants[3:7]
        n = self.row.ndim
        dilation = _ints(dilation, n)
        if self.op.pad is not None:
            padding = 0
        elif isinstance(padding, str):
            padding = [0 if padding == "valid" else d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return Watched(sources), PackedConv(weight, scale, bias, _ints(stride, n), _ints(padding, n), dilation, groups)

    def execute(self, q: Tensor, qparams: QParams, stage: int, other: Any, out: QParams | None) -> Tensor:
        """The layer and its first ``stage`` followers: uint8 with qparams ``out``, or float32 where that is None."""
        packed = self.packed(self.folds and stage > 0)
        bound = self._bound.get((q.shape, stage))
        meaning = None if other is None else other[1]
        if bound is not None and bound[:4] == (packed, qparams, meaning, out):
            return bound[4](q) if other is None else bound[4](q, other[0])
        if other is not None:
            return self._sum(packed, q, qparams, other, stage, out)
        post_op = self._post_ops.get(stage)
        if post_op is None:
            post_op = self._post_ops[stage] = self._post_op(stage)
        if out is not None and isinstance(packed, PackedConv):
            ready = packed.bind(q.shape, qparams, post_op, out)
            self._keep_bound((q.shape, stage), (packed, qparams, None, out, ready))
        result = packed(q, qparams, post_op, out)
        return result if out is not None or not self.contiguous else result.contiguous()

    def _keep_bound(self, key: tuple, entry: tuple) -> None:
        if entry[-1] is not None:
            if len(self._bound) > 64:
                self._bound.clear()
            self._bound[key] = entry

    def _post_op(self, stage: int) -> PostOp:
        step = self.steps[stage - 1] if stage else None
        if step is None or step.op.post_op is None:
            return NO_POST_OP
        found = step.op.post_op(step.constants)
        assert found is not None
        return PostOp(found.name, list(found.args), found.algorithm)

    def _sum(self, packed: Any, q: Tensor, qparams: QParams, other: Any, stage: int, out: QParams | None) -> Tensor:
        """The layer plus another value, accumulated into a copy of that value."""
        data, meaning = other
        relu = self.steps[stage - 1].op.role is Role.ACTIVATION
        if data.shape != packed.output_shape(q.shape):
            result = packed(q, qparams) + (data if meaning is None else dequantize(data, meaning))
            result = result.relu_() if relu else result
            return result if out is None else quantize(result, out)
        if self.row.ndim and meaning is not None and out is not None:
            ready = packed.bind_sum(q.shape, qparams, meaning, relu, out)
            self._keep_bound((q.shape, stage), (packed, qparams, meaning, out, ready))
            return packed.add_(q, qparams, data.clone(memory_format=torch.channels_last), meaning, relu, out)
        accumulator = data.clone() if meaning is None else dequantize(data, meaning)
        if self.row.ndim:
            accumulator = accumulator.contiguous(memory_format=torch.channels_last)
            result = packed.add_(q, qparams, accumulator, None, relu, None)
        else:
            result = packed.add_(q, qparams, accumulator.contiguous(), relu)
        if out is not None:
            return quantize(result, out)
        return result.contiguous() if self.contiguous else result


def _ints(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


class FusedPlan(Plan):
    """An op fused behind a convolution or linear layer: continues what is under way, or runs in float on anything else."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        super().__init__(state, op)
        self.expects = op.decision.member_of
        self.adds = self.row.role is Role.ELEMENTWISE

    def leaf(self, call: RunCall, leaf: InterceptedForward, x: Any) -> Any:
        if not self._continues(x):
            return self.module(call, leaf, (x,), {})
        return self._continue(x, x.deferred, self.op.inplace)

    def function(self, call: RunCall, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        if not self.adds or kwargs or len(args) != 2:
            return super().function(call, func, spelling, args, kwargs)
        x, other = args
        swapped = not self._continues(x)
        if swapped:
            x, other = other, x
        if not (self._continues(x) if swapped else True):
            return super().function(call, func, spelling, args, kwargs)
        read = self._other(call, other)
        if read is None or (spelling.inplace and swapped):
            return super().function(call, func, spelling, args, kwargs)
        fused = x.deferred
        return self._continue(x, Fused(fused.plan, fused.q, fused.qparams, read), spelling.inplace)

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        slots = bound[:2] if self.adds else bound[:1]
        slot = next((i for i, x in enumerate(slots) if self._continues(x)), None)
        if slot is None:
            return self.write(self.run_plain(bound))
        x = bound[slot]
        fused = x.deferred
        if self.adds:
            other = self._other(call, bound[1 - slot])
            if other is None:
                return self.write(self.run_plain(bound))
            fused = Fused(fused.plan, fused.q, fused.qparams, other)
        return self._continue(x, fused)

    def _continues(self, x: Any) -> bool:
        """Whether ``x`` is the fusion this op is recorded in, come as far as this op."""
        if type(x) is not Int8Tensor or x.deferred is None:
            return False
        return x.deferred.plan.value_ids[x.stage] == self.expects  # type: ignore[attr-defined]

    def _continue(self, x: Int8Tensor, fused: Fused, inplace: bool = False) -> Any:
        """One op further: run what is now complete, or put it off again; in ``x`` itself if the op is in place."""
        stage, plan = x.stage + 1, fused.plan
        if stage < len(plan.steps):
            if not inplace:
                return Int8Tensor.under_way(x.size_, fused, stage)
            x.deferred, x.stage = fused, stage
            return x
        if self.out is None:
            result = self._tagged(fused.value(stage))
            if inplace:
                x.become(result)
                return x
            return result
        with _disabled():
            data = plan.execute(fused.q, fused.qparams, stage, fused.other, self.out)
        if not inplace:
            return Int8Tensor(x.size_, data, self.out)
        x.data_u8, x.qparams, x.deferred = data, self.out, None
        return x

    def _other(self, call: RunCall, x: Any) -> Any:
        """The other operand of a fused add, as (elements, qparams or None for float); a copy where the user may change it."""
        if not isinstance(x, Tensor):
            return None
        if self.reads:
            return self.read_int8(call, x, 0)
        if isinstance(x, Int8Tensor) and x.data_u8 is not None:
            return x.data_u8, x.qparams
        value = plain(x)
        return (value.detach().clone() if self.op.decision.writes is None and value is x else value.detach(), None)


class DynamicLinearPlan(ComputePlan):
    """linear with activations quantized by their own range at run time, or not at all; the result is float32."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        super().__init__(state, op)
        activation = op.qconfig.activation()  # type: ignore[union-attr]
        self.reduce_range = bool(getattr(activation, "reduce_range", False))

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        x = plain(bound[0])
        if x.dtype is not torch.float32:
            raise KernelInputError("an int8 op got another dtype", path=self.op.owner, op=self.op.path,
                                   expected="torch.float32", got=x.dtype)  # fmt: skip
        if not x.numel():
            return self._tagged(self.run_plain(bound))
        if self.op.decision.mode == "weight_only":
            bias = None if self.op.bias is None else tensor_of(self.op.bias, self.modules)
            result = kernels.weight_only_linear(x, self.weight.int8(self.modules), self.weight.scale(self.modules))
            return self._tagged(result if bias is None else result.add_(bias))
        x = x.detach()
        qparams = kernels.dynamic_qparams(x, self.reduce_range)
        return self._tagged(self.packed(False)(quantize(x, qparams), qparams))


class ElementwisePlan(Plan):
    """add, sub, mul, div: dequantize, compute, quantize. There is no stock int8 kernel for them that is right."""

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        same = len(self.reads) == 2 and bound[0] is bound[1]
        for number, read in enumerate(self.reads):
            if same and number == 1:
                bound[1] = bound[0]
                continue
            found = self.read_int8(call, bound[read.slot], number)
            if found is None:
                return self.write(self.run_plain(bound))
            bound[read.slot] = dequantize(*found)
        return self.write(run_float(self.row, bound))


class PoolPlan(Plan):
    """Average pools: on exact integers held in float, then quantized with qparams of their own."""

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        found = self.read_int8(call, bound[0], 0)
        if found is not None:
            bound[0] = dequantize(*found)
        return self.write(self.run_plain(bound))


class SharePlan(Plan):
    """cat, stack, max pools and nearest interpolation: on the integers, which all have the same qparams."""

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        assert self.out is not None
        found = [self.read_int8(call, x, i) for i, x in enumerate(self._inputs(bound))]
        if any(f is None for f in found):
            return self.write(self.run_plain(bound))
        data = [kernels.requantize(*f, self.out) for f in found]  # type: ignore[misc]
        result = self._on_integers(data, bound)
        return Int8Tensor(result.shape, result, self.out)

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
        kernel = _ints(bound[1], n)
        stride = kernel if bound[2] is None or bound[2] == [] else _ints(bound[2], n)
        if data[0].dim() != n + 2 or not data[0].numel():
            pooled = run_float(self.row, [data[0].to(torch.float32), *bound[1:]])
            return pooled.to(torch.uint8)
        return kernels.max_pool(data[0], n, kernel, stride, _ints(bound[3], n), _ints(bound[4], n), bool(bound[5]))


class InterpolatePlan(SharePlan):
    def _on_integers(self, data: list[Tensor], bound: list[Any]) -> Tensor:
        return F.interpolate(data[0].to(torch.float32), *bound[1:]).to(torch.uint8)


class MatmulPlan(Plan):
    """matmul and bmm of two activations."""

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        left, right = (self.read_int8(call, bound[i], i) for i in (0, 1))
        if left is None or right is None or not (bound[0].numel() and bound[1].numel()):
            return self.write(self.run_plain(bound))
        return self.write(kernels.int8_matmul(*left, *right))


class EmbeddingPlan(Plan):
    """embedding and embedding_bag: rows are looked up as int8, then scaled."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        super().__init__(state, op)
        assert op.weight is not None
        self.owner, self.name = state.modules_by_path[op.weight.path], op.weight.name
        self.axis = state.token.weight_axes[op.weight.key]  # type: ignore[attr-defined]
        self.whole = op.weight.offset == 0 and len(op.weight.shape) == 2

    def _rows(self, index: Tensor) -> Tensor:
        buffers = self.owner._buffers
        weight, scale = buffers[f"{self.name}_int8"], buffers[f"{self.name}_scale"]
        zero_point = buffers.get(f"{self.name}_zero_point")
        rows = F.embedding(index, weight).to(torch.float32)  # type: ignore[arg-type]
        if self.axis not in (0, None):
            raise QuantizationError("an embedding's scales must run along its rows", path=self.op.owner, op=self.op.path)
        if zero_point is not None:
            rows.sub_(zero_point if self.axis is None else zero_point[index].unsqueeze(-1))
        return rows.mul_(scale if self.axis is None else scale[index].unsqueeze(-1))  # type: ignore[index]

    def run(self, call: RunCall, bound: list[Any]) -> Any:
        index = bound[0]
        if self.row.name == "embedding":
            return self.write(self._rows(index))
        places = torch.arange(index.numel(), dtype=index.dtype).reshape(index.shape)
        padding = bound[10]
        if padding is not None and (is_padding := index == padding).any():
            padding = int(is_padding.flatten().nonzero()[0])
            places = torch.where(is_padding, torch.full_like(places, padding), places)
        else:
            padding = None
        rows = self._rows(index.flatten())
        if not index.numel():
            rows = torch.zeros(1, self.op.weight.shape[1])  # type: ignore[union-attr]
        rest = [bound[2], None, bound[4], False, bound[6], False, plain(bound[8]), bound[9], padding]
        return self.write(F.embedding_bag(places, rows, *rest))


class RecurrentPlan(Plan):
    """LSTM, GRU, RNN and their cells with dynamic int8 activations."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        super().__init__(state, op)
        self._packed: tuple[Watched, dict[str, PackedLinear]] | None = None
        self.reduce_range = bool(getattr(op.qconfig.activation(), "reduce_range", False))  # type: ignore[union-attr]

    def module(self, call: RunCall, leaf: InterceptedForward, args: tuple, kwargs: dict, alone: bool = False) -> Any:
        with torch.no_grad(), _disabled():
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

__all__ = ["Fused", "Plan", "Step", "plan"]
