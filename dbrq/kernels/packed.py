"""Int8 convolutions and linear layers that are right: kernels prove themselves before their first result is used."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import stock
from .choice import is_linear_right, way_of_convolution
from .formulations import IN_LEVELS, Way, call_of, is_stock, stand_in
from .known_faults import Geometry
from .qparams import NO_POST_OP, RELU, PostOp, QParams, bad, not_finite
from .script import finished, of_ones, quantize_rows, rescale_rows
from .stock import StockConv, StockLinear


class PackedConv(StockConv):
    """An int8 convolution, ready to run: as ``StockConv``, by the first way that proved right on this CPU."""

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int,
    ) -> None:  # fmt: skip
        super().__init__(weight, scale, bias, stride, padding, dilation, groups)
        self._ways: dict[tuple, Way | None] = {}  # what decides -> None for the stock kernel
        self._stand_ins: dict[tuple, Callable[..., Tensor]] = {}
        self.words = ""  # what computes this instead of the stock kernel, for reports

    def __call__(self, q: Tensor, qparams: QParams, post_op: PostOp = NO_POST_OP, out: QParams | None = None) -> Tensor:
        """uint8 input -> uint8 with qparams ``out``, or float32 where ``out`` is None."""
        if q.dtype is not torch.uint8:
            raise bad("conv", "a uint8 tensor", q)
        if q.shape not in self._shapes:
            self.output_shape(q.shape)
        instead = self._instead(q.shape, qparams, post_op, out)
        return self.stock(q, qparams, post_op, out) if instead is None else instead(q)

    def bind(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None
    ) -> Callable[[Tensor], Tensor] | None:
        """A callable for many inputs of one shape, its checks done beforehand; None where each needs care of its
        own.
        """
        by_hand = qparams.zero_point != 0 and any(self.padding)
        if self.ndim != 2 or by_hand or self._pads or (out is not None and out.quant_max != 255):
            return None
        self.output_shape(shape)
        if self._instead(shape, qparams, post_op, out) is not None:
            return None
        bias = self.bias if qparams.zero_point == 0 else self._bias_with_zero_point(qparams)
        scale, zero, dtype = (1.0, 0, torch.float32) if out is None else (out.scale, out.zero_point, torch.uint8)
        arguments = (
            qparams.scale, 0, self._pack(self.padding, shape), self.scale, self._zero_points, bias,
            self.stride, self.padding, self.dilation, self.groups, scale, zero, dtype,
            post_op.name, post_op.args, post_op.algorithm,
        )  # fmt: skip

        def run(q: Tensor) -> Tensor:
            if q.shape != shape or q.dtype is not torch.uint8:
                raise bad("conv", f"uint8 {tuple(shape)}", q)
            return stock.qconv(q.contiguous(memory_format=torch.channels_last), *arguments)

        return run

    def bind_sum(
        self, shape: torch.Size, qparams: QParams, accumulated: QParams, relu: bool, out: QParams
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """``add_`` for many uint8 inputs of one shape, as ``bind``; the callable leaves its second argument as it
        is.
        """
        by_hand = qparams.zero_point != 0 and any(self.padding)
        if self.ndim != 2 or by_hand or self._pads or out.quant_max != 255:
            return None
        result_shape = self.output_shape(shape)
        if self._instead(shape, qparams, RELU if relu else NO_POST_OP, out, accumulated) is not None:
            return None
        bias = self.bias if qparams.zero_point == 0 else self._bias_with_zero_point(qparams)
        before = (qparams.scale, 0, self._pack(self.padding, shape), self.scale, self._zero_points)
        after: tuple[Any, ...] = (
            bias, self.stride, self.padding, self.dilation, self.groups, out.scale, out.zero_point, torch.uint8,
            accumulated.scale, accumulated.zero_point, "sum", 1.0, "relu" if relu else "none", [], "",
        )  # fmt: skip

        def run(q: Tensor, other: Tensor) -> Tensor:
            if (
                q.shape != shape
                or other.shape != result_shape
                or q.dtype is not torch.uint8
                or other.dtype is not torch.uint8
            ):
                raise bad("conv + sum", f"uint8 {tuple(shape)} and {tuple(result_shape)}", other)
            accumulator = other.clone(memory_format=torch.channels_last)
            return stock.qconv_sum(q.contiguous(memory_format=torch.channels_last), *before, accumulator, *after)

        return run

    def add_(
        self,
        q: Tensor,
        qparams: QParams,
        accumulator: Tensor,
        accumulated: QParams | None,
        relu: bool,
        out: QParams | None,
    ) -> Tensor:
        """conv2d(q) + accumulator [+ relu], written over ``accumulator``, which must be the caller's own.

        ``accumulator`` is uint8 with qparams ``accumulated`` and the result uint8 with ``out``; or both are float32.
        """
        if self.ndim != 2 or q.dtype is not torch.uint8:
            raise bad("conv + sum", "a conv2d and a uint8 tensor", q)
        shape = self.output_shape(q.shape)
        dtype = torch.float32 if accumulated is None else torch.uint8
        if accumulator.shape != shape or accumulator.dtype is not dtype or (accumulated is None) != (out is None):
            raise bad("conv + sum", f"an accumulator of {dtype} {tuple(shape)}", accumulator)
        accumulator = accumulator.contiguous(memory_format=torch.channels_last)
        summed = True if accumulated is None else accumulated
        instead = self._instead(q.shape, qparams, RELU if relu else NO_POST_OP, out, summed)
        if instead is not None:
            return instead(q, accumulator)
        return self.stock_sum(q, qparams, accumulator, accumulated, relu, out)

    def prove(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None, summed: QParams | bool = False
    ) -> None:
        """Try the kernel for inputs of ``shape`` beforehand; arguments as those of ``__call__``.

        Args:
            summed: qparams of another value that is added, True where that is float32, False for none.
        """
        self._way(shape, qparams, post_op, out, summed)

    def _instead(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None, summed: QParams | bool = False
    ) -> Callable[..., Tensor] | None:
        """What computes this for inputs of ``shape`` instead of the stock kernel; None where that is right.

        Args:
            summed: qparams of another value that is added, True where that is float32, False for none.
        """
        kind = summed if isinstance(summed, bool) else 2
        key: tuple = (shape, qparams.zero_point != 0, qparams.quant_max, post_op.name, out is None, kind)
        if key not in self._ways:
            if len(self._ways) > 256:
                self._ways.clear()
            self._ways[key] = self._way(shape, qparams, post_op, out, summed)
        way = self._ways[key]
        if way is None:
            return None
        key = (way, shape, qparams, post_op.name, tuple(post_op.args), post_op.algorithm, out, summed)
        found = self._stand_ins.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = stand_in(
                    self.weight, self.scale, self.bias, self._geometry(shape, self.padding), way, qparams, post_op, out,
                    summed,
                )  # fmt: skip
            if len(self._stand_ins) > 16:
                self._stand_ins.clear()
            self._stand_ins[key] = found
        return found

    def _way(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None, summed: QParams | bool
    ) -> Way | None:
        zero_point, padding = qparams.zero_point != 0, self.padding
        if self._pads_by_hand(shape, qparams.zero_point):
            shape = torch.Size([*shape[:2], *(s + 2 * p for s, p in zip(shape[2:], padding, strict=True))])
            padding = [0] * self.ndim
        geometry = self._geometry(shape, padding)
        dtype = torch.float32 if out is None else torch.uint8
        call = call_of(
            zero_point and any(padding), qparams.quant_max, dtype, post_op, dtype if summed is not False else None
        )
        way = way_of_convolution(geometry, call)
        if is_stock(geometry, way):
            return None
        self.words = way.value if way is not Way.NATIVE else ""
        return way

    def _geometry(self, shape: torch.Size, padding: list[int]) -> Geometry:
        return Geometry(
            tuple(shape), self.weight.shape[0], tuple(self.kernel), tuple(self.stride), tuple(padding),
            tuple(self.dilation), self.groups,
        )  # fmt: skip


class PackedLinear(StockLinear):
    """An int8 linear layer, ready to run: as ``StockLinear``, where that proved right on this CPU."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, scale, bias)
        self._right: dict[tuple, bool] = {}  # what decides -> whether the stock kernel is right
        self._of_ones: tuple[Tensor, Tensor] | None = None  # what ``by_row`` adds to the rows
        self.words = ""  # what computes this instead of the stock kernel, for reports

    def __call__(self, q: Tensor, qparams: QParams, post_op: PostOp = NO_POST_OP, out: QParams | None = None) -> Tensor:
        """uint8 input ``[..., in]`` -> uint8 with qparams ``out``, or float32 where ``out`` is None."""
        if q.dtype is not torch.uint8:
            raise bad("linear", "a uint8 tensor", q)
        shape = self.output_shape(q.shape)
        q = q.contiguous()
        rows = q if q.dim() > 1 else q.unsqueeze(0)
        dtype = torch.float32 if out is None else torch.uint8
        if self._is_right(rows.numel(), qparams, post_op, dtype, None):
            result = self.stock(rows, qparams, post_op, out)
        else:
            result = self._in_levels(rows, qparams, post_op, out)
        if out is not None and out.quant_max != 255:
            result.clamp_(out.quant_min, out.quant_max)
        return result if q.dim() > 1 else result.reshape(shape)

    def bind(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None
    ) -> Callable[[Tensor], Tensor] | None:
        """As ``PackedConv.bind``."""
        self.output_shape(shape)
        dtype = torch.float32 if out is None else torch.uint8
        if len(shape) < 2 or (out is not None and out.quant_max != 255):
            return None
        if not self._is_right(shape.numel(), qparams, post_op, dtype, None):
            return None
        scale, zero = (1.0, 0) if out is None else (out.scale, out.zero_point)
        arguments = (
            qparams.scale, qparams.zero_point, self._packed, self.scale, self._zero_points, self.bias, scale, zero,
            dtype, post_op.name, post_op.args, post_op.algorithm,
        )  # fmt: skip

        def run(q: Tensor) -> Tensor:
            if q.shape != shape or q.dtype is not torch.uint8:
                raise bad("linear", f"uint8 {tuple(shape)}", q)
            return stock.qlinear(q.contiguous(), *arguments)

        return run

    def prove(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None, summed: QParams | bool = False
    ) -> None:
        """As ``PackedConv.prove``."""
        dtype = torch.float32 if out is None else torch.uint8
        self._tried(self._rows(shape.numel()), qparams, post_op, dtype, None if summed is False else dtype)

    def by_row(self, x: Tensor, top: int) -> Tensor:
        """float32 ``[..., in]``, each row of it quantized to at most ``top`` by its own range -> float32."""
        shape = self.output_shape(x.shape)
        q, scale, zero_point = quantize_rows(x.reshape(-1, x.shape[-1]), top)
        if not math.isfinite(scale.max().item()):
            raise not_finite(f"a row whose range is {scale.max().item()} wide")
        if self._of_ones is None:
            column = of_ones(self.weight, self.scale)
            self._of_ones = column, torch.zeros_like(column) if self.bias is None else self.bias
        result = self(q, QParams(1.0, 0, 0, top))
        return rescale_rows(result, scale, zero_point, *self._of_ones).reshape(shape)

    def _is_right(
        self, numel: int, qparams: QParams, post_op: PostOp, dtype: torch.dtype, summed: torch.dtype | None
    ) -> bool:
        """Whether the stock kernel is, for an input of this many elements."""
        count = self._rows(numel)
        key = (count, qparams.zero_point != 0, qparams.quant_max, post_op.name, dtype, summed)
        right = self._right.get(key)
        if right is None:
            if len(self._right) > 4096:
                self._right.clear()
            right = self._right[key] = self._tried(count, qparams, post_op, dtype, summed)
        return right

    def _rows(self, numel: int) -> int:
        return numel // self.weight_shape[1] if self.weight_shape[1] else 0

    def _tried(
        self, count: int, qparams: QParams, post_op: PostOp, dtype: torch.dtype, summed: torch.dtype | None
    ) -> bool:
        call = call_of(qparams.zero_point != 0, qparams.quant_max, dtype, post_op, summed)
        right = not count or is_linear_right(count, self.weight_shape[1], self.weight_shape[0], call)
        self.words = self.words if right else IN_LEVELS
        return right

    def _in_levels(self, rows: Tensor, qparams: QParams, post_op: PostOp, out: QParams | None) -> Tensor:
        """The same in float32, which is exact but for the last rounding."""
        sums = F.linear(rows.to(torch.float32) - qparams.zero_point, self.weight.to(torch.float32))
        result = sums * (self.scale * qparams.scale)
        result = result if self.bias is None else result + self.bias
        scale, zero, dtype = (1.0, 0, torch.float32) if out is None else (out.scale, out.zero_point, torch.uint8)
        first, second = (*map(float, post_op.args), 0.0, 0.0)[:2]
        return finished(result, scale, zero, dtype, post_op.name, first, second, post_op.algorithm)

    def add_(self, q: Tensor, qparams: QParams, accumulator: Tensor, relu: bool) -> Tensor:
        """linear(q) + accumulator [+ relu], written over the float32 ``accumulator``, which must be the caller's
        own.
        """
        if q.dtype is not torch.uint8:
            raise bad("linear + sum", "a uint8 tensor", q)
        shape = self.output_shape(q.shape)
        if accumulator.shape != shape or accumulator.dtype is not torch.float32 or not accumulator.is_contiguous():
            raise bad("linear + sum", f"a contiguous float32 accumulator of shape {tuple(shape)}", accumulator)
        if q.dim() == 1:
            return self.add_(q.unsqueeze(0), qparams, accumulator.unsqueeze(0), relu).squeeze(0)
        q, post_op = q.contiguous(), RELU if relu else NO_POST_OP
        if not self._is_right(q.numel(), qparams, post_op, torch.float32, torch.float32):
            result = accumulator.add_(self._in_levels(q, qparams, NO_POST_OP, None))
            return result.relu_() if relu else result
        return self.stock_sum(q, qparams, accumulator, None, relu, None)
