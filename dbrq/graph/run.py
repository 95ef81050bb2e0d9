"""One run of a converted model that records its Q/DQ graph.

It takes the place of the run that computes in int8 (``RunCall``): the user's Python is the same, the recorded hooks and
their decisions are the same, but each op is recorded on float tensors, with quantize and dequantize where the
decisions say that a value is read or written as int8.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import current_function_mode, skip_one_hop, without_function_modes
from ..auto_trace import InterceptedForward, ModelToken, RunCall, active
from ..eager import views
from ..eager.arguments import asymmetric_padding, bind_leaf, has_float
from ..eager.conv_linear import ComputePlan
from ..eager.decompositions import decomposed
from ..eager.float_reference import run_float
from ..eager.ops import RecurrentPlan
from ..eager.recurrent import recurrent_weights
from ..eager.weights import norm_scale, norm_shift
from ..errors import DeviationError, RewriteError
from ..kernels import QParams, along, ints
from ..kernels.known_faults import plain_dilation
from ..kernels.script.recurrent import recurrent
from ..mappings import DROPOUTS, FUNCTIONS, OpRow, Role, Spelling, asks_inplace, function_name
from ..op_facts import reads_values, writes
from ..pytree import tree_leaves, tree_map
from ..record.callsite import border, user_line
from ..record.parameters import tensor_of
from ..record.record import Tag
from ..tensors import Int8Weight
from .nodes import CHOOSE_QPARAMS, DEQUANTIZE, DEQUANTIZE_ROWS, QUANTIZE, QUANTIZE_ROWS, leaves
from .recorder import GraphRecorder
from .signature import Inputs
from .special import ARITHMETIC, GO_ON, SPECIAL, decided, has_tensor, int8_embedding, with_range_decided
from .torchscript_form import holdable, name_of, scriptable

_SAME = views.SAME | {"to", "clone", "detach", "data"}


class GraphRun(RunCall):
    """Records one run of a converted model.

    Override ``RunCall``'s ways in: ``_leaf`` for leaf modules, ``__torch_function__`` for functions, ``_opaque`` for
    what is not looked into.
    """

    def __init__(self, token: ModelToken, recorder: GraphRecorder, inputs: Inputs) -> None:
        super().__init__(token)
        self.inputs = inputs
        if inputs.inside is not None:
            self.counts = inputs.inside.counts(inputs.state)
        self.recorder = recorder
        self.slow = self.lenient = True
        self._reads: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._plain = 0  # depth inside code whose ops are recorded as they are
        self._inside: set[Callable] = set()  # functions that are looked into now

    @border
    def record(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """Run the model; returns its output, whose tensors and numbers the recorder knows."""
        previous, active.call = active.call, self
        try:
            with torch.no_grad(), self.recorder.watching(), self, self.plainly():
                return intercepted.module(*args, **kwargs)  # its own hooks are in the graph, and not in the record
        finally:
            active.call = previous

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Record ops as they are, without hooks."""
        self._plain += 1
        try:
            with self._mode():
                yield
        finally:
            self._plain -= 1

    def _mode(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if current_function_mode() is self else self

    @contextlib.contextmanager
    def _at(self, path: str, op: str | None = None) -> Iterator[None]:
        recorder = self.recorder
        before = recorder.path, recorder.op
        recorder.path, recorder.op = path, op
        try:
            yield
        finally:
            recorder.path, recorder.op = before

    # Modules

    def enter(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        with self._at(intercepted.path):
            return super().enter(intercepted, args, kwargs) if self.frame else self._root(intercepted, args, kwargs)

    def _root(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        with without_function_modes():
            for name, tensors in intercepted.tensors_by_name(args, kwargs).items():
                for tensor, tag in zip(tensors, self.inputs.tags_of(name, tensors), strict=True):
                    self._with_tag(tensor, tag)
        plain, self._plain = self._plain, 0
        try:
            return super().enter(intercepted, args, kwargs)
        finally:
            self._plain = plain

    def _opaque(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        with self.plainly():
            output = intercepted.original(*args, **kwargs)
        return self._made_by(type(intercepted.module).__name__, output, (args, kwargs))

    def _made_by(self, tag: str, output: Any, given: Any) -> Any:
        """Say who made the tensors of an output that were not given."""
        before = list(tree_leaves(given))
        for leaf in tree_leaves(output):
            known = self.recorder.known(leaf)
            if known is not None and not any(leaf is g for g in before):
                known.tag = tag
        return output

    def _leaf(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        row = intercepted.row
        if row is not None and row.role is Role.PASS:
            return args[0] if args else next(iter(kwargs.values()))
        if row is None or self.frame is None or self._plain or row.role is Role.FLOAT:
            return self._opaque(intercepted, args, kwargs)
        hook = self.frame.leaf(row, intercepted.path)
        if hook is None:
            self.frame.state.unrecorded(row.name, intercepted.path)
            return self._opaque(intercepted, args, kwargs)
        with self._at(intercepted.path, hook.op.path):
            if hook.op.decision.precision == "float":
                with self.plainly():
                    return self._tagged(hook, intercepted.original(*args, **kwargs))
            if row.role is Role.RECURRENT:
                assert isinstance(hook, RecurrentPlan)
                return self._recurrent(hook, intercepted, args, kwargs)
            bound = bind_leaf(intercepted, args, kwargs)
            return self._finish(hook, bound[0], self._int8(hook, bound), hook.op.inplace)

    def look(self, hook: Callable, module: nn.Module, path: str, args: tuple) -> Any:
        """What only looks is no part of a graph; hooks of the root are."""
        return hook(module, *args) if self.frame is None else None

    # Functions

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("dequantize", "quantize_per_tensor"):
            return self.recorder.call(func, args, kwargs)
        if (special := SPECIAL.get(name)) is not None and (
            result := special(self.recorder, func, args, kwargs)
        ) is not GO_ON:
            return result
        if torch.is_autocast_enabled("cpu"):
            raise RewriteError(
                "forward runs under autocast, whose casts a graph does not have", path=self.recorder.path,
                got=user_line(), hint="cast in the model's code, or lower with dtype=torch.bfloat16",
            )  # fmt: skip
        if name in ARITHMETIC and args and not has_tensor(args, kwargs):
            args = (self.recorder.call(torch.tensor, args[:1], {}), *args[1:])
        if not self._plain and (parts := decomposed(func, args, kwargs)) is not None:
            with self:
                return parts(*args, **kwargs)
        if not reads_values(func):
            return self.recorder.execute(func, args, kwargs)
        if kwargs.get("generator") is not None:
            raise RewriteError(
                "a function draws from a generator of its own, which a graph cannot hold", path=self.recorder.path,
                op=name_of(func), got=user_line(), hint="draw from torch's own generator, or outside of forward",
            )  # fmt: skip
        if FUNCTIONS.get(func) is None and func not in self._inside and not self._can_hold(func, args, kwargs):
            return self._looked_into(func, types, args, kwargs)
        spelling = FUNCTIONS.get(func)
        if spelling is not None and spelling.row.role is Role.PASS:
            return self._moved(func, spelling.row, args, kwargs)
        if self._plain or spelling is None or spelling.row.role is Role.FLOAT or not has_float(args, kwargs):
            return self._float(func, args, kwargs)
        assert self.frame is not None
        bound = spelling.bind(args, kwargs) if spelling.row.takes_weight else None
        if bound is not None:
            bound[3:7] = map(decided, bound[3:7])
        hook = self.frame.function(spelling.row, bound)
        if hook is None:
            self.frame.unrecorded(spelling.row.name, None)
            return self._float(func, args, kwargs)
        with self._at(self.recorder.path, hook.op.path):
            return self._hooked(hook, func, spelling, args, kwargs)

    def _can_hold(self, func: Callable, args: tuple, kwargs: dict) -> bool:
        """Whether a function can be one node: TorchScript has it, and all arguments are of a graph's types."""
        stranger = next((leaf for leaf in leaves((args, kwargs)) if not holdable(leaf)), None)
        if stranger is not None and not inspect.isfunction(func):
            raise RewriteError(
                f"an argument of {name_of(func)} is an object that a graph cannot hold", path=self.recorder.path,
                op=name_of(func), expected="tensors, numbers and the like",
                got=f"{type(stranger).__name__} at {user_line()}",
                hint="do what it does by functions of torch, or keep using the converted model",
            )  # fmt: skip
        return stranger is None and scriptable(func)

    def _looked_into(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """Record the functions that a function of torch's Python is made of, each as it is."""
        self._inside.add(func)
        try:
            with self.plainly():
                output = skip_one_hop(func, types, args, kwargs)
        finally:
            self._inside.discard(func)
        return self._made_by(function_name(func), output, (args, kwargs))

    def _hooked(self, hook: Any, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        if hook.op.decision.precision == "float" or kwargs.get("out") is not None:
            return self._tagged(hook, self.recorder.call(func, args, kwargs))
        bound = with_range_decided(hook.op, spelling.bind(args, kwargs))
        if hook.op.weight is not None and hook.op.weight.computed and self.recorder.depends(bound[1]):
            return self._tagged(hook, self.recorder.call(func, args, kwargs))  # it comes from an input, this time
        inplace = spelling.inplace or (hook.op.inplace and asks_inplace(spelling.row, bound))
        return self._finish(hook, bound[0], self._int8(hook, bound), inplace)

    def _float(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        given = list(tree_leaves((args, kwargs)))
        output = self.recorder.call(func, args, kwargs)
        for leaf in tree_leaves(output):
            known = self.recorder.known(leaf)
            written = known is not None and writes(known.node)
            if known is not None and known.tag is None and (written or not any(leaf is g for g in given)):
                known.tag = function_name(func)
        return output

    def _moved(self, func: Callable, row: OpRow, args: tuple, kwargs: dict) -> Any:
        """An op that only moves elements: qparams pass through."""
        if views.makes_elements(func, row, args, kwargs):
            return self._float(func, args, kwargs)
        subject: Any = args[0] if args else kwargs.get("input")
        known = self.recorder.known(subject)
        if row.name in DROPOUTS:
            return subject
        if isinstance(subject, Int8Weight) and args:
            with without_function_modes():  # still a weight, for what multiplies with it
                part = views.move(func, row, subject, args, kwargs)
            if part is not None:
                return part
        if known is None or isinstance(subject, Int8Weight):
            return self.recorder.call(func, args, kwargs)
        tag, qparams = known.tag, known.qparams
        if qparams is None or (row.name == "to" and not views.keeps_float32(args, kwargs)):
            return tree_map(lambda leaf: self._with_tag(leaf, tag), self.recorder.call(func, args, kwargs))
        if row.name in _SAME:
            return self.recorder.alias(self.recorder.execute(func, args, kwargs), subject)
        reshape: Any = views.RESHAPED.get(row.name, func)
        output = self.recorder.call(reshape, args, kwargs)

        def int8(leaf: Any) -> Any:
            return self._with_tag(self.recorder.quantized(leaf, qparams), tag) if isinstance(leaf, Tensor) else leaf

        return tree_map(int8, output)

    def _with_tag(self, leaf: Any, tag: Tag) -> Any:
        known = self.recorder.known(leaf)
        if known is not None:
            known.tag = tag
        return leaf

    # int8 ops

    def _int8(self, hook: Any, bound: list[Any]) -> Any:
        """The op with its reads and writes quantized, never in place."""
        op, decision, row = hook.op, hook.op.decision, hook.row
        with self.plainly():
            if decision.member_of is not None:
                return self._member(hook, bound)
            if row.role is Role.EMBEDDING:
                return self._write(hook, int8_embedding(self.recorder, hook, bound))
            if row.role is Role.COMPUTE and row.name != "matmul":
                return self._compute(hook, bound)
            values = list(bound[0]) if row.takes_list else bound
            for number, read in enumerate(hook.reads):
                x = self._read(hook, values[read.slot], number)
                if x is None:
                    return self._write(hook, run_float(row, bound))
                if row.role is Role.SHARE and self._qparams(x) != hook.out:
                    x = self.recorder.quantized(x, hook.out)
                values[read.slot] = x
            if row.takes_list:
                bound = [values, *bound[1:]]
            return self._write(hook, run_float(row, bound, op.pad))

    def _compute(self, hook: ComputePlan, bound: Sequence[Any]) -> Any:
        """A convolution or linear layer, batch norm folded into its weight."""
        op, row = hook.op, hook.row
        weight, bias = self._weight(hook, hook.folds)
        if op.decision.mode != "static":
            x = bound[0] if op.decision.mode == "weight_only" else self._dynamic(hook, bound[0])
            result = run_float(row, [x, weight, bias])
            return self._with_tag(result + bound[2] if op.bias_computed else result, op.result.tag)
        x = self._read(hook, bound[0], 0)
        if x is None:
            return self._with_tag(run_float(row, bound, op.pad), op.result.tag)
        rest = [decided(value) for value in bound[3:]]
        batched = not row.ndim or x.dim() == row.ndim + 2
        if not batched:
            x = self.recorder.quantized(x.unsqueeze(0), self._qparams(x))
        if op.pad is not None:
            x, rest[1] = self.recorder.quantized(F.pad(x, op.pad[0], mode=op.pad[1]), self._qparams(x)), 0
        elif (pads := asymmetric_padding(op)) is not None:
            x, rest[1] = self.recorder.quantized(F.pad(x, pads), self._qparams(x)), 0
        elif row.ndim and isinstance(rest[1], str):
            kernel = weight.shape[2:]
            rest[1] = [0] * row.ndim if rest[1] == "valid" else [
                d * (k - 1) // 2 for d, k in zip(ints(rest[2], row.ndim), kernel, strict=True)
            ]  # fmt: skip
        if row.ndim:  # along an axis of one element it means nothing, and kernels of torch read beside it
            rest[2] = plain_dilation(list(weight.shape[2:]), ints(rest[2], row.ndim))
        result = run_float(row, [x, weight, bias, *rest])
        if op.bias_computed:
            result = result + (along(bound[2], 1, result.dim()) if row.ndim else bound[2])
        if not batched:
            result = self.recorder.call(torch.Tensor.squeeze, (result, 0), {})  # of one element, for certain
        known = self.recorder.surely_known(result)
        known.value = op.result.id
        if op.decision.chain and not op.bias_computed:
            known.tag = op.result.tag
            return result
        return self._write(hook, result)

    def _weight(self, hook: ComputePlan, folded: bool) -> tuple[Tensor, Tensor | None]:
        op, recorder, ref = hook.op, self.recorder, hook.op.weight
        assert ref is not None
        norm = hook.steps[0].norm if folded else None
        key = ("weight", *ref.key, ref.geometry, op.bias, norm)  # tied weights may have biases of their own

        def make() -> tuple[Tensor, Tensor | None]:
            modules = hook.modules
            scale, bias = hook.weight.scale(modules), None
            if op.bias is not None:
                bias = recorder.parameter_part(op.bias, tensor_of(op.bias, modules))
            if folded:
                factor = norm_scale(hook.steps[0], modules)
                scale, bias = scale * factor, norm_shift(hook.steps[0], modules, factor, bias)
                recorder.name(bias, f"{ref.path}.bias".lstrip("."))
            int8 = hook.weight.int8(modules)
            return recorder.weight(str(ref), int8, scale), bias

        with without_function_modes():
            return recorder.part(key, make)

    def _dynamic(self, hook: Any, x: Tensor) -> Tensor:
        """Quantized with qparams of its own values."""
        top = 127 if hook.reduce_range else 255
        if hook.by_row:
            return self._by_row(x, top)
        scale, zero_point = self.recorder.call(CHOOSE_QPARAMS, (x, 0, top, 1e-12, torch.uint8), {})
        constants = (scale, zero_point, 0, top, torch.uint8)
        q = self.recorder.call(QUANTIZE, (x, *constants), {})
        return self.recorder.call(DEQUANTIZE, (q, *constants), {})

    def _by_row(self, x: Tensor, top: int) -> Tensor:
        """The same, each row with qparams of its own, as ``kernels.script.quantize_rows`` finds them: there is no op
        that finds them in 7 bits, or with zero in their range.
        """
        call = self.recorder.call
        low = call(torch.clamp, (call(torch.amin, (x, -1, True), {}),), {"max": 0.0})
        high = call(torch.clamp, (call(torch.amax, (x, -1, True), {}),), {"min": 0.0})
        scale = call(torch.clamp, (call(torch.div, (call(torch.sub, (high, low), {}), top), {}),), {"min": 1e-12})
        levels = call(torch.neg, (call(torch.round, (call(torch.div, (low, scale), {}),), {}),), {})
        constants = (scale, call(torch.clamp, (levels, 0, top), {}), 0, top, torch.uint8)
        q = self.recorder.call(QUANTIZE_ROWS, (x, *constants), {})
        return self.recorder.call(DEQUANTIZE_ROWS, (q, *constants, torch.float32), {})

    def _member(self, hook: Any, bound: list[Any]) -> Any:
        """An op fused behind a convolution or linear layer: nothing is quantized between them."""
        op, expected = hook.op, hook.op.decision.member_of
        adds = hook.row.role is Role.ELEMENTWISE
        slots = bound[:2] if adds else bound[:1]
        slot = next((i for i, x in enumerate(slots) if self._continues(x, expected)), None)
        if hook.row.role is Role.NORM:
            if slot is None:
                raise DeviationError(
                    "a batch norm reads another value than was recorded", path=op.owner, op=op.path,
                    hint="rewrite with example_inputs that take the path prepare saw",
                )  # fmt: skip
        elif slot is not None and adds and hook.reads:
            other = self._read(hook, bound[1 - slot], 0)
            if other is None:
                slot = None
            else:
                bound[1 - slot] = other
        result = bound[0] if hook.row.role is Role.NORM else run_float(hook.row, bound)
        if slot is not None:
            self.recorder.surely_known(result).value = op.result.id
        return self._write(hook, result)

    def _continues(self, x: Any, expected: int) -> bool:
        known = self.recorder.known(x)
        return known is not None and known.value == expected

    def _recurrent(self, hook: RecurrentPlan, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        """A dynamically quantized LSTM, GRU, RNN or cell: one submodule of the graph, since it loops over its steps."""
        module = intercepted.module
        given = {**dict(zip(("input", "hx"), args, strict=False)), **kwargs}
        x, hx = given["input"], given.get("hx")
        if not isinstance(x, Tensor):
            raise RewriteError(
                "a recurrent layer of a graph takes plain batches", path=intercepted.path, op=hook.op.path,
                got=type(x).__name__, hint="pad the batch, or leave this layer in float (qconfig None)",
            )  # fmt: skip
        is_lstm = isinstance(module, (nn.LSTM, nn.LSTMCell))
        h0, c0 = (hx if is_lstm else (hx, None)) if hx is not None else (None, None)
        with without_function_modes():
            kernel = self.recorder.part(
                ("recurrent", intercepted.path),
                lambda: recurrent(module, dict(recurrent_weights(module)), 127 if hook.reduce_range else 255),
            )
            made = self.recorder.call_module(intercepted.path, kernel, (x, h0, c0))
        if isinstance(module, nn.RNNCellBase):
            output = made if is_lstm else made[0]
        else:
            output = made[0], (made[1:] if is_lstm else made[1])
        return self._tagged(hook, output)

    # Reading and writing values

    def _read(self, hook: Any, x: Any, number: int) -> Tensor | None:
        """``x`` as quantized and dequantized; None if it is a float value of another origin than the record's."""
        if not isinstance(x, Tensor):
            return None
        known = self.recorder.known(x)
        if known is not None and known.qparams is not None and hook.smoothing is None:
            return x
        tag = None if known is None else known.tag
        qparams = hook.edge(number, tag)
        if qparams is None:
            hook.unrecorded(tag, number)
            return None
        key = ("read", id(x), self.recorder.writes_to(x), qparams, id(hook.smoothing))
        cached = self._reads.get(key)
        if cached is not None and cached[0] is x:
            return cached[1]
        smoothed = x if hook.smoothing is None else self._smoothed(x, hook.smoothing)
        result = self.recorder.quantized(smoothed, qparams)
        self._reads[key] = x, result
        return result

    def _smoothed(self, x: Tensor, factors: Tensor) -> Tensor:
        name = f"{self.recorder.node_of(x).name}_smoothed"
        result = self.recorder.call(torch.mul, (x, factors), {}, name=name)
        self.recorder.node_of(result).meta["smooths"] = True  # for backends, which multiply in other places
        return result

    def _qparams(self, x: Tensor) -> QParams:
        """Those of what ``_read`` gave."""
        qparams = self.recorder.surely_known(x).qparams
        assert qparams is not None
        return qparams

    def _write(self, hook: Any, result: Tensor) -> Tensor:
        if hook.out is not None:
            result = self.recorder.quantized(result, hook.out)
        return self._with_tag(result, hook.op.result.tag)

    def _tagged(self, hook: Any, output: Any) -> Any:
        tags = iter(hook.op.outputs)
        for leaf in tree_leaves(output):
            info = next(tags, None) if isinstance(leaf, Tensor) else None
            if info is not None:
                self._with_tag(leaf, info.tag)
        return output

    def _finish(self, hook: Any, target: Any, output: Any, inplace: bool) -> Any:
        """An in-place int8 op: its target takes the value."""
        if not inplace or not isinstance(target, Tensor) or output is target:
            return output
        known = self.recorder.known(target)
        if known is not None and known.is_input:  # the caller sees the change, and may change it through another name
            self.recorder.call(torch.Tensor.copy_, (target, output), {})
            return self._with_tag(target, self.recorder.surely_known(output).tag)
        self.recorder.execute(target.copy_, (output,), {})
        return self.recorder.alias(target, output)
