"""Convolutions, linear layers and what is fused behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from .._torch import without_function_modes
from ..errors import QuantizationError
from ..kernels import NO_POST_OP, RELU, PackedConv, PackedLinear, PostOp, QParams, along, dequantize, ints, quantize
from ..kernels.ranges import by_row, seven_bits
from ..mappings import Role, Spelling
from ..record.parameters import source_of, tensor_of
from ..record.record import SeenOp, Step, Tag
from ..tensors import UNSURE, Int8Tensor, Int8Weight, plain, row_major, set_tag
from .arguments import activations, asymmetric_padding, constant
from .executor import Plan, Quantized
from .interfaces import Leaf, Run, State
from .weights import StoredWeight, Watched, is_weight, levels_of, norm_scale, norm_shift, rounds_to


class Fused:
    """A fusion under way: an int8 convolution or linear layer whose followers are not all known yet.

    Running it is put off until its reader is: the recorded one continues it, any other gets the float value so far.
    """

    __slots__ = ("other", "plan", "q", "qparams", "unsure")

    def __init__(self, plan: ComputePlan, q: Tensor, qparams: QParams, unsure: bool, other: Any = None) -> None:
        self.plan, self.q, self.qparams, self.unsure, self.other = plan, q, qparams, unsure, other

    def value(self, stage: int) -> Tensor:
        with without_function_modes():
            result = self.plan.execute(self.q, self.qparams, stage, self.other, None)
            set_tag(result, self.tag(stage))
            return result

    def tag(self, stage: int) -> Tag:
        return UNSURE if self.unsure else self.plan.value_ids[stage]


class ComputePlan(Plan):
    """conv1d, conv2d, conv3d and linear with int8 activations, and what is fused behind them."""

    def __init__(self, state: State, op: SeenOp) -> None:
        super().__init__(state, op)
        self.steps = op.decision.chain
        self.modules = state.token.modules
        assert op.weight is not None
        self.weight = StoredWeight(op.weight, state.token.weight_axes[op.weight.key])
        self._levels = levels_of(op.qconfig)
        kept = op.weight.key in state.token.kept_weights
        self.replaced = {} if kept else self.modules[op.weight.path]._parameters
        self._packed: dict[bool, tuple[Watched, PackedConv | PackedLinear]] = state.token.packed_for(op)
        self._post_ops: dict[int, PostOp] = {}
        self._bound: dict[tuple, tuple] = {}  # input shape and stage -> what it was bound to, and the callable
        self._usual: dict[torch.Size, torch.Size] = {}  # input shapes that need no care -> output shape
        self._tags: set[Tag] = set()  # makers of int8 inputs that need none either
        self.contiguous = op.result.contiguous
        self.folds = bool(self.steps) and self.steps[0].op.role is Role.NORM
        self.same_padding = asymmetric_padding(op)
        self.plain_input = op.pad is None and self.same_padding is None
        self.value_ids = [op.result.id, *(step.value for step in self.steps)]

    @property
    def smoothing(self) -> Tensor | None:
        return self.weight.smoothing(self.modules)  # looked up, since other weights may have been loaded

    def fits(self, bound: Sequence[Any]) -> bool:
        if self.row.ndim and tuple(map(constant, bound[3:7])) != self.op.constants[3:7]:
            return False
        if not self._is_bias(bound[2]):
            return False
        if not self.weight.ref.computed:
            return is_weight(bound[1], self.weight.ref, self.modules)
        return self._is_stored(bound[1])

    def stored(self) -> list[tuple[str, Callable[[Any], bool]]]:
        return [("weight", self._is_stored), ("bias", self._is_bias)]

    def _is_stored(self, weight: Any) -> bool:
        """Whether a leaf module's weight is the int8 one, or the float one that this was made of."""
        if isinstance(weight, Int8Weight):
            return is_weight(weight, self.weight.ref, self.modules)
        if self.replaced.get(self.weight.ref.name) is not None:
            return True  # ``packed`` says more
        with without_function_modes():
            return rounds_to(weight, self.weight.int8(self.modules), self.weight.scale(self.modules), *self._levels)

    def _is_bias(self, bias: Any) -> bool:
        """Whether a bias is the one that was recorded; any tensor is, where forward computes it."""
        if self.op.bias_computed or self.op.bias is None:
            return isinstance(bias, Tensor) == self.op.bias_computed
        return is_weight(bias, self.op.bias, self.modules)

    def leaf(self, call: Run, leaf: Leaf, x: Any) -> Any:
        if type(x) is Int8Tensor and x.data_u8 is not None:
            shape = self._usual.get(x.size_)
            if shape is not None and x.tag_ in self._tags and self.keeps_settings(leaf):
                if self.steps:
                    return Int8Tensor.under_way(shape, Fused(self, x.data_u8, x.qparams, False), 0)
                with without_function_modes():
                    return self._result(x.data_u8, x.qparams, shape)
        return self.module(call, leaf, (x,), {})

    def module(self, call: Run, leaf: Leaf, args: tuple, kwargs: dict) -> Any:
        if kwargs or self.op.bias_computed:
            return super().module(call, leaf, args, kwargs)
        if not self.keeps_settings(leaf):
            return call.unrecorded_leaf(leaf, args, kwargs)
        with without_function_modes():
            return self.run(call, args)

    def function(self, call: Run, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("out") is not None:
            return super().function(call, func, spelling, args, kwargs)
        return self.run(call, spelling.bind(args, kwargs))  # ``fits`` has seen to its settings

    def run(self, call: Run, bound: Sequence[Any]) -> Any:
        x = bound[0]
        found = self.read_int8(call, x, 0)
        if found is None:
            return self._unusual(None, call, bound)
        q, qparams = found
        if type(x) is Int8Tensor and self.smoothing is None and not call.unsure:
            self._tags.add(x.tag_)
        if not self.steps and not call.unsure and (usual := self._usual.get(q.shape)) is not None:
            return self._result(q, qparams, usual)
        if (self.row.ndim and q.dim() != self.row.ndim + 2) or not q.numel():
            return self._unusual((q, qparams), call, bound)
        if self.op.pad is not None:
            q = kernels.pad_mode(q, *self.op.pad)
        if self.same_padding is not None:
            q = F.pad(q, self.same_padding, value=qparams.zero_point)
        shape = self.packed(self.folds).output_shape(q.shape)
        if self.plain_input and not self.op.bias_computed and len(self._usual) < 256:
            self._usual[q.shape] = shape
        if self.op.bias_computed:
            bias = plain(bound[2])
            result = self.execute(q, qparams, 0, None, None)
            return self.write(call, result + (along(bias, 1, result.dim()) if self.row.ndim else bias))
        if self.steps:
            unsure, call.unsure = call.unsure, False
            return Int8Tensor.under_way(shape, Fused(self, q, qparams, unsure), 0)
        if call.unsure:
            return self.float_result(call, self.execute(q, qparams, 0, None, None))
        return self._result(q, qparams, shape)

    def _result(self, q: Tensor, qparams: QParams, shape: torch.Size) -> Tensor:
        result = self.execute(q, qparams, 0, None, self.out)
        return self._tagged(result) if self.out is None else Int8Tensor(shape, result, self.out, self.tag)

    def _unusual(self, found: Quantized | None, call: Run, bound: Sequence[Any]) -> Any:
        """Inputs without batch dimension, empty ones, and values of another origin."""
        if found is not None and found[0].numel() and self.plain_input and not self.op.bias_computed:
            q, qparams = found
            return self.float_result(call, self.execute(q.unsqueeze(0), qparams, 0, None, None).squeeze(0))
        if self.op.leaf is not None:
            module = self.modules[self.op.leaf]
            return self.float_result(call, type(module).forward(module, plain(bound[0])))
        return self.float_result(call, self.run_plain(list(bound)))

    # Kernels

    def packed(self, folded: bool) -> PackedConv | PackedLinear:
        """The packed weight, with or without the batch norm that follows folded in."""
        if self.replaced.get(self.weight.ref.name) is not None:
            raise QuantizationError(
                "the weight of an int8 layer was replaced",
                path=self.weight.ref.path,
                op=self.op.path,
                hint="change the float model and convert it again, or load a state dict of another converted copy",
            )
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
            bias = tensor_of(self.op.bias, self.modules).expand(scale.shape)  # of linear, it may be one number
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
        dilation = ints(dilation, n)
        if not self.plain_input:
            padding = 0
        elif isinstance(padding, str):
            padding = [
                0 if padding == "valid" else d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True)
            ]
        return Watched(sources), PackedConv(weight, scale, bias, ints(stride, n), ints(padding, n), dilation, groups)

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
        result = packed(q, qparams, post_op, out)
        if out is None and self.contiguous and (laid_out := row_major(result)) is not result:
            return laid_out
        if out is not None or isinstance(packed, PackedLinear):
            ready = packed.bind(q.shape, qparams, post_op, out)
            self._keep_bound((q.shape, stage), (packed, qparams, None, out, ready))
        return result

    def prove(self) -> None:
        token = self.state.token
        values, stage = token.record.values, len(self.steps)
        last = values[self.steps[-1].value].producer if stage else self.op
        assert last is not None
        writes = None if self.op.bias_computed else last.decision.writes
        out = None if writes is None else token.states[last.owner].qparams(writes)
        addition = next((step for step in self.steps if step.other_slot is not None), None)
        for vid in self.op.slots().get(0, ()):
            given = values[vid].info.shape
            shape = self._as_read(given)
            if shape is None:
                continue
            if len(shape) != len(given):  # without a batch nothing is fused
                self.packed(False).prove(shape, self.read_qparams[0], NO_POST_OP, None)
            elif addition is not None:
                self._prove_sum(shape, addition, out)
            else:
                packed = self.packed(self.folds and stage > 0)
                packed.prove(shape, self.read_qparams[0], self._post_op(stage), out)

    def _prove_sum(self, shape: torch.Size, step: Step, out: QParams | None) -> None:
        """As ``prove``, for what ``_sum`` does with the addition ``step``."""
        token = self.state.token
        adds = token.record.values[step.value].producer
        assert adds is not None
        others = [token.record.values[vid].info.shape for slot, vid in adds.activations if slot == step.other_slot]
        if len(others) != 1 or (step.other is None and out is not None):
            return  # whether it comes as int8 shows when it comes
        packed, qparams = self.packed(self.folds), self.read_qparams[0]
        if others[0] != packed.output_shape(shape):
            packed.prove(shape, qparams, NO_POST_OP, None)
            return
        post_op = RELU if self.steps[-1].op.role is Role.ACTIVATION else NO_POST_OP
        if self.row.ndim and step.other is not None and out is not None:
            packed.prove(shape, qparams, post_op, out, token.states[adds.owner].qparams(step.other.value))
        else:
            packed.prove(shape, qparams, post_op, None, True)

    def _as_read(self, shape: tuple[int, ...]) -> torch.Size | None:
        """The shape that the kernel sees for an input of ``shape``; None if it sees none."""
        if 0 in shape or not shape:
            return None
        if self.row.ndim and len(shape) == self.row.ndim + 1 and self.plain_input:
            return torch.Size([1, *shape])
        if self.row.ndim and len(shape) != self.row.ndim + 2:
            return None
        pads = self.op.pad[0] if self.op.pad is not None else self.same_padding or ()
        sizes = list(shape)
        for i, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
            sizes[-1 - i] += left + right
        return torch.Size(sizes)

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
        return row_major(result) if self.contiguous else result


class FusedPlan(Plan):
    """An op fused behind a convolution or linear layer: continues what is under way, or runs in float on anything
    else.
    """

    def __init__(self, state: State, op: SeenOp) -> None:
        super().__init__(state, op)
        self.follows = op.decision.member_of
        self.adds = self.row.role is Role.ELEMENTWISE
        self.modules = state.token.modules

    def leaf(self, call: Run, leaf: Leaf, x: Any) -> Any:
        if not self._continues(x):
            return self.module(call, leaf, (x,), {})
        if not self.keeps_settings(leaf):
            return call.unrecorded_leaf(leaf, (x,), {})
        return self._continue(x, x.deferred_, self.op.inplace)

    def function(self, call: Run, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        if not self.adds or kwargs or len(args) != 2:
            return super().function(call, func, spelling, args, kwargs)
        x, other = args
        if not self._continues(x) and not spelling.inplace:
            x, other = other, x
        read = self._other(call, other) if self._continues(x) else None
        if read is None:
            return super().function(call, func, spelling, args, kwargs)
        return self._continue(x, self._with(call, x.deferred_, read), spelling.inplace)

    def _with(self, call: Run, fused: Fused, other: Any) -> Fused:
        """The fusion with the other operand of its add."""
        unsure, call.unsure = fused.unsure or call.unsure, False
        return Fused(fused.plan, fused.q, fused.qparams, unsure, other)

    def run(self, call: Run, bound: list[Any]) -> Any:
        slots = bound[:2] if self.adds else bound[:1]
        slot = next((i for i, x in enumerate(slots) if self._continues(x)), None)
        if slot is None:
            return self._alone(call, bound)
        x = bound[slot]
        fused = x.deferred_
        if self.adds:
            other = self._other(call, bound[1 - slot])
            if other is None:
                return self.write(call, self.run_plain(bound))
            fused = self._with(call, fused, other)
        return self._continue(x, fused)

    def _alone(self, call: Run, bound: list[Any]) -> Any:
        """The op by itself: somebody looked at the value inside the fusion, or it comes from elsewhere."""
        for _, x in activations(self.row, bound):
            tag = call.tag_of(x)
            if not self.expects(tag):
                if tag != UNSURE:
                    self.unrecorded(tag)
                call.unsure = call.strays = True
        return self.write(call, self.run_plain(bound))

    def has_settings(self, bound: Sequence[Any]) -> bool:
        """As in any op; of a batch norm, the statistics and what it scales and shifts by are settings too."""
        if not super().has_settings(bound):
            return False
        return self.row.role is not Role.NORM or all(
            tensor is None if ref is None else is_weight(tensor, ref, self.modules)
            for ref, tensor in zip(self.op.norm, bound[1:5], strict=True)
        )

    def _continues(self, x: Any) -> bool:
        """Whether ``x`` is the fusion this op is recorded in, come as far as this op."""
        if type(x) is not Int8Tensor or x.deferred_ is None:
            return False
        return x.deferred_.plan.value_ids[x.stage_] == self.follows

    def _continue(self, x: Int8Tensor, fused: Fused, inplace: bool = False) -> Any:
        """One op further: run what is now complete, or put it off again; in ``x`` itself if the op is in place."""
        stage, plan = x.stage_ + 1, fused.plan
        shape = x.size_
        if fused.other is not None and fused.other[0].shape != shape:  # an add that broadcasts
            shape = torch.broadcast_shapes(shape, fused.other[0].shape)
        if stage < len(plan.steps):
            if not inplace:
                return Int8Tensor.under_way(shape, fused, stage)
            x.deferred_, x.stage_ = fused, stage
            return x
        if self.out is None or fused.unsure:
            result = fused.value(stage)
            if inplace:
                x.become(result)
                return x
            return result
        with without_function_modes():
            data = plan.execute(fused.q, fused.qparams, stage, fused.other, self.out)
        if not inplace:
            return Int8Tensor(shape, data, self.out, self.tag)
        x.data_u8, x.qparams, x.tag_, x.deferred_ = data, self.out, self.tag, None
        return x

    def _other(self, call: Run, x: Any) -> Any:
        """The other operand of a fused add, as (elements, qparams or None for float); a copy where the user may change
        it.
        """
        if not isinstance(x, Tensor):
            return None
        if self.reads:
            return self.read_int8(call, x, 0)
        if isinstance(x, Int8Tensor) and x.data_u8 is not None:
            if not self.expects(x.tag_):
                call.unsure = call.strays = True
            return x.data_u8, x.qparams
        value, tag = plain(x), call.tag_of(x)
        if self.is_followed(call, value):
            return None
        if value.dim():
            self.require_float32(value)
        if not self.expects(tag):
            if tag != UNSURE:
                self.unrecorded(tag)
            call.unsure = call.strays = True
        return (value.detach().clone() if self.op.decision.writes is None and value is x else value.detach(), None)


class DynamicLinearPlan(ComputePlan):
    """linear with activations quantized by their own range at run time, or not at all; the result is float32.

    Attributes:
        by_row: each row of the input (a token) has a range of its own. Of one row, that is the range of all.
    """

    def __init__(self, state: State, op: SeenOp) -> None:
        super().__init__(state, op)
        assert op.qconfig is not None
        activation = op.qconfig.activation()
        self.reduce_range, self.by_row = seven_bits(activation), by_row(activation)

    def prove(self) -> None:
        if self.op.decision.mode == "weight_only":
            return
        top = 127 if self.reduce_range else 255
        for vid in self.op.slots().get(0, ()):
            shape = self._as_read(self.state.token.record.values[vid].info.shape)
            if shape is not None:
                middle = 0 if self._has_rows(shape) else top // 2
                self.packed(False).prove(shape, QParams(1.0, middle, 0, top), NO_POST_OP, None)

    def _has_rows(self, shape: torch.Size) -> bool:
        """Whether there are several ranges to find."""
        return self.by_row and shape.numel() > shape[-1]

    def run(self, call: Run, bound: Sequence[Any]) -> Any:
        x = plain(bound[0])
        if self.is_followed(call, x):
            return self._unusual(None, call, bound)
        self.require_float32(x)
        if not x.numel():
            return self._unusual(None, call, bound)
        if self.op.decision.mode == "weight_only":
            bias = None if self.op.bias is None else tensor_of(self.op.bias, self.modules)
            result = kernels.weight_only_linear(x, self.weight.int8(self.modules), self.weight.scale(self.modules))
            result = result if bias is None else result.add_(bias)
        else:
            x, packed = x.detach(), self.packed(False)
            if self._has_rows(x.shape):
                assert isinstance(packed, PackedLinear)
                result = packed.by_row(x, 127 if self.reduce_range else 255)
            else:
                qparams = kernels.dynamic_qparams(x, self.reduce_range)
                result = packed(quantize(x, qparams), qparams)
        return self._tagged(result + plain(bound[2]) if self.op.bias_computed else result)
