"""The door to the int8 kernels: the only module that calls ``torch.ops.onednn`` and its relatives.

Some of those ops corrupt memory or answer silently wrong when misused (docs/kernels.md), so every function here checks
shapes, dtypes and layouts before it calls one, and each kernel proves itself once before its first result is used
(``formulations``). Activations are ``uint8``, weights ``int8`` and symmetric.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelInputError
from ..selfcheck import Failure, note_failure, problem_of
from .known_faults import Geometry, lies_in_padding, plain_dilation

# 1.5 * 2**23: a float32 of this size has a spacing of one, so adding it rounds half to even, in the same pass.
_ROUND = 12582912.0
# Above this many elements, padding the input by hand costs more than the weights' reorder that it saves.
_PAD_BY_HAND_BELOW = 400_000
_qconv = torch.ops.onednn.qconv_pointwise.default
_qconv_sum = torch.ops.onednn.qconv2d_pointwise.binary
_qlinear = torch.ops.onednn.qlinear_pointwise.default
_qlinear_sum = torch.ops.onednn.qlinear_pointwise.binary


@dataclass(frozen=True)
class QParams:
    """How one activation is quantized: ``real = (q - zero_point) * scale``, ``q`` a uint8 in ``[quant_min,
    quant_max]``.
    """

    scale: float
    zero_point: int
    quant_min: int = 0
    quant_max: int = 255

    def __str__(self) -> str:
        bits = "" if (self.quant_min, self.quant_max) == (0, 255) else f", [{self.quant_min}, {self.quant_max}]"
        return f"scale={self.scale:.6g}, zero_point={self.zero_point}{bits}"

    @functools.cached_property
    def _constants(self) -> tuple[Tensor, float, Tensor]:
        """Zero-dim tensors, which the two-operand form of ``torch.add`` takes without a pass of their own."""
        return (
            torch.tensor(_ROUND + self.zero_point, dtype=torch.float32),
            1.0 / self.scale,
            torch.tensor(-self.zero_point * self.scale, dtype=torch.float32),
        )

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "_constants"}


def together(qparams: Sequence[QParams]) -> QParams:
    """qparams whose range holds those of all ``qparams``."""
    first = qparams[0]
    if all(q == first for q in qparams):
        return first
    low = min((q.quant_min - q.zero_point) * q.scale for q in qparams)
    high = max((q.quant_max - q.zero_point) * q.scale for q in qparams)
    quant_min, quant_max = max(q.quant_min for q in qparams), min(q.quant_max for q in qparams)
    scale = (high - low) / (quant_max - quant_min)
    zero_point = round(quant_min - low / scale)
    return QParams(scale, min(max(zero_point, quant_min), quant_max), quant_min, quant_max)


@dataclass(frozen=True)
class PostOp:
    """An element-wise function fused behind a convolution or linear layer, in the kernels' own words."""

    name: str = "none"
    args: Sequence[float] = ()
    algorithm: str = ""


NO_POST_OP, RELU = PostOp(), PostOp("relu")
#: Post-ops the stock kernels take, by number of spatial dimensions (0 is linear).
SUPPORTED_POST_OPS: dict[int, frozenset[str]] = {
    0: frozenset({"none", "relu", "leaky_relu", "tanh", "gelu", "hardtanh", "hardswish", "swish"}),
    1: frozenset({"none", "relu"}),
    2: frozenset({"none", "relu", "hardtanh", "hardswish", "swish"}),
    3: frozenset({"none"}),
}


@functools.cache
def has_exact_int8_dot() -> bool:
    """Whether u8 x s8 products accumulate exactly on this CPU (VNNI or AMX).

    Without VNNI pairs of products saturate at 16 bits. Asked of the kernel itself rather than of CPU flags, since
    that is what matters: 255 * 127 * 2 does not fit 16 bits.
    """
    k = 64
    x = torch.full((4, k), 255, dtype=torch.uint8)
    weight = torch.full((16, k), 127, dtype=torch.int8)
    packed = PackedLinear(weight, torch.ones(16), None)
    return bool((packed.stock(x, QParams(1.0, 0)) == 255.0 * 127.0 * k).all())


def quantize(x: Tensor, qparams: QParams) -> Tensor:
    """float32 of any shape -> uint8, rounding half to even."""
    shift, inverse, _ = qparams._constants
    shifted = torch.add(shift, x, alpha=inverse)
    shifted.clamp_(_ROUND + qparams.quant_min, _ROUND + qparams.quant_max)
    return shifted.view(torch.int32).to(torch.uint8)


def dequantize(q: Tensor, qparams: QParams) -> Tensor:
    """uint8 -> float32."""
    if qparams.zero_point == 0:
        return q.to(torch.float32).mul_(qparams.scale)
    return q.to(torch.float32).sub_(qparams.zero_point).mul_(qparams.scale)


def requantize(q: Tensor, old: QParams, new: QParams) -> Tensor:
    """uint8 with qparams ``old`` -> uint8 with qparams ``new``."""
    return q if old == new else quantize(dequantize(q, old), new)


def quantize_weight(weight: Tensor, scale: Tensor, axis: int | None, quant_min: int, quant_max: int) -> Tensor:
    """float32 weight -> int8, symmetric; ``scale`` has one element, or one per index of ``axis``."""
    return torch.clamp(torch.round(weight / along(scale, axis, weight.dim())), quant_min, quant_max).to(torch.int8)


def along(values: Tensor, axis: int | None, ndim: int) -> Tensor:
    """A vector shaped so that it broadcasts along ``axis`` of an ``ndim``-dimensional tensor."""
    if axis is None:
        return values.reshape(())
    return values.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _pad_zero_point(q: Tensor, pads: Sequence[int], zero_point: int) -> Tensor:
    """Pads the last ``len(pads)`` dims on both sides; keeps channels_last, where ``F.pad`` would be slow."""
    shape = list(q.shape)
    first = q.dim() - len(pads)
    for i, pad in enumerate(pads):
        shape[first + i] += 2 * pad
    format_ = torch.channels_last if q.dim() == 4 else torch.contiguous_format
    out = torch.empty(shape, dtype=torch.uint8, memory_format=format_).fill_(zero_point)
    inner = out
    for i, pad in enumerate(pads):
        inner = inner.narrow(first + i, pad, q.shape[first + i])
    inner.copy_(q)
    return out


class PackedConv:
    """An int8 convolution, ready to run: conv1d, conv2d or conv3d by the rank of ``weight``.

    Args:
        weight: int8 ``[out, in / groups, *kernel]``.
        scale: float32 ``[out]``, one per output channel.
        bias: float32 ``[out]`` or None.
        stride, padding, dilation: one int per spatial dimension.
        groups: as in ``torch.nn.Conv2d``.

    Safe to call from several threads: what is derived is rebuilt whole and assigned once.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        _require(
            weight.dtype is torch.int8 and weight.dim() in (3, 4, 5), "conv", "an int8 weight of rank 3 to 5", weight
        )
        self.ndim = weight.dim() - 2
        self.weight = weight.contiguous()
        self.scale = scale.to(torch.float32).contiguous()
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self.kernel = list(weight.shape[2:])
        self.stride, self.padding = list(stride), list(padding)
        self.dilation = plain_dilation(self.kernel, list(dilation))
        self.groups = groups
        self._pads = lies_in_padding(self.kernel, self.padding, self.dilation)
        self.in_channels = weight.shape[1] * groups
        self._zero_points = torch.zeros(weight.shape[0], dtype=torch.int64)
        self._packed: dict[tuple, Tensor] = {}  # padding and input shape -> one of ...
        self._layouts: dict[bytes, Tensor] = {}  # layout -> packed weight
        self._shifted_bias: dict[tuple[float, int], Tensor] = {}
        self._shapes: dict[torch.Size, torch.Size] = {}
        self._ways: dict[tuple, Any] = {}  # what decides -> formulations.Way, None for the stock kernel
        self._stand_ins: dict[tuple, Callable[..., Tensor]] = {}
        self.words = ""  # what computes this instead of the stock kernel, for reports

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the result for an input of ``shape`` ``[batch, in, *spatial]``; raises for what no kernel takes."""
        known = self._shapes.get(shape)
        if known is not None:
            return known
        if len(shape) != self.ndim + 2 or shape[1] != self.in_channels:
            raise KernelInputError(
                f"conv{self.ndim}d cannot take this input",
                expected=f"[batch, {self.in_channels}, {self.ndim} spatial dims]",
                got=tuple(shape),
                hint="pass the shape the layer was built for",
            )
        spatial = [
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, pad, dil, k, step in zip(
                shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        if min(spatial, default=1) <= 0:
            raise KernelInputError(
                f"conv{self.ndim}d: the input is smaller than the kernel",
                expected=f"spatial sizes of at least the kernel {self.kernel} after padding {self.padding}",
                got=tuple(shape),
            )
        result = torch.Size([shape[0], self.weight.shape[0], *spatial])
        if len(self._shapes) > 256:
            self._shapes.clear()
        self._shapes[shape] = result
        return result

    def __call__(self, q: Tensor, qparams: QParams, post_op: PostOp = NO_POST_OP, out: QParams | None = None) -> Tensor:
        """uint8 input -> uint8 with qparams ``out``, or float32 where ``out`` is None."""
        if q.dtype is not torch.uint8:
            raise _bad("conv", "a uint8 tensor", q)
        if q.shape not in self._shapes:
            self.output_shape(q.shape)
        instead = self._instead(q.shape, qparams, post_op, out)
        return self.stock(q, qparams, post_op, out) if instead is None else instead(q)

    def stock(
        self, q: Tensor, qparams: QParams, post_op: PostOp, out: QParams | None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The same by torch's kernel, whether or not it is right; ``dtype`` where ``out`` is None."""
        q, zero_point, packed, bias, padding = self._operands(q, qparams)
        scale, zero, dtype = (1.0, 0, dtype) if out is None else (out.scale, out.zero_point, torch.uint8)
        result = _qconv(
            q, qparams.scale, zero_point, packed, self.scale, self._zero_points, bias,
            self.stride, padding, self.dilation, self.groups, scale, zero, dtype,
            post_op.name, post_op.args, post_op.algorithm,
        )  # fmt: skip
        return result if out is None or out.quant_max == 255 else result.clamp_(out.quant_min, out.quant_max)

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
                raise _bad("conv", f"uint8 {tuple(shape)}", q)
            return _qconv(q.contiguous(memory_format=torch.channels_last), *arguments)

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
        after = (
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
                raise _bad("conv + sum", f"uint8 {tuple(shape)} and {tuple(result_shape)}", other)
            accumulator = other.clone(memory_format=torch.channels_last)
            return _qconv_sum(q.contiguous(memory_format=torch.channels_last), *before, accumulator, *after)

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
            raise _bad("conv + sum", "a conv2d and a uint8 tensor", q)
        shape = self.output_shape(q.shape)
        dtype = torch.float32 if accumulated is None else torch.uint8
        if accumulator.shape != shape or accumulator.dtype is not dtype or (accumulated is None) != (out is None):
            raise _bad("conv + sum", f"an accumulator of {dtype} {tuple(shape)}", accumulator)
        accumulator = accumulator.contiguous(memory_format=torch.channels_last)
        summed = True if accumulated is None else accumulated
        instead = self._instead(q.shape, qparams, RELU if relu else NO_POST_OP, out, summed)
        if instead is not None:
            return instead(q, accumulator)
        return self.stock_sum(q, qparams, accumulator, accumulated, relu, out)

    def stock_sum(
        self, q: Tensor, qparams: QParams, accumulator: Tensor, accumulated: QParams | None, relu: bool,
        out: QParams | None, dtype: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        """The same by torch's kernel, whether or not it is right; the accumulator has its layout."""
        q, zero_point, packed, bias, padding = self._operands(q, qparams)
        dtype = dtype if out is None else torch.uint8
        scale, zero = (1.0, 0) if out is None else (out.scale, out.zero_point)
        acc_scale, acc_zero = (1.0, 0) if accumulated is None else (accumulated.scale, accumulated.zero_point)
        result = _qconv_sum(
            q, qparams.scale, zero_point, packed, self.scale, self._zero_points, accumulator, bias,
            self.stride, padding, self.dilation, self.groups, scale, zero, dtype,
            acc_scale, acc_zero, "sum", 1.0, "relu" if relu else "none", [], "",
        )  # fmt: skip
        return result if out is None or out.quant_max == 255 else result.clamp_(out.quant_min, out.quant_max)

    def _operands(self, q: Tensor, qparams: QParams) -> tuple[Tensor, int, Tensor, Tensor | None, list[int]]:
        """Input, zero point, packed weight, bias and padding as the kernel is best given them.

        A zero point other than 0 makes the kernel reorder its weights at every call. Without padding its effect is a
        constant per output channel, so it goes into the bias; with padding the input is first padded by hand.
        """
        zero_point, padding, bias = qparams.zero_point, self.padding, self.bias
        if self._pads_by_hand(q.shape, zero_point):
            q = _pad_zero_point(q, padding, zero_point)  # and into channels_last, in the same copy
            padding = [0] * self.ndim
        if self.ndim == 2:
            q = q.contiguous(memory_format=torch.channels_last)
        if zero_point and not any(padding):
            zero_point, bias = 0, self._bias_with_zero_point(qparams)
        return q, zero_point, self._pack(padding, q.shape), bias, padding

    def _pads_by_hand(self, shape: torch.Size, zero_point: int) -> bool:
        small = zero_point != 0 and any(self.padding) and shape.numel() <= _PAD_BY_HAND_BELOW
        return small or self._pads

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
                found = formulations.stand_in(
                    self.weight, self.scale, self.bias, self._geometry(shape, self.padding), way, qparams, post_op, out,
                    summed,
                )  # fmt: skip
            if len(self._stand_ins) > 16:
                self._stand_ins.clear()
            self._stand_ins[key] = found
        return found

    def _way(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None, summed: QParams | bool
    ) -> Any:
        zero_point, padding = qparams.zero_point != 0, self.padding
        if self._pads_by_hand(shape, qparams.zero_point):
            shape = torch.Size([*shape[:2], *(s + 2 * p for s, p in zip(shape[2:], padding, strict=True))])
            padding = [0] * self.ndim
        geometry = self._geometry(shape, padding)
        dtype = torch.float32 if out is None else torch.uint8
        call = formulations.call_of(
            zero_point and any(padding), qparams.quant_max, dtype, post_op, dtype if summed is not False else None
        )
        way = formulations.way_of_convolution(geometry, call)
        if formulations.is_stock(geometry, way):
            return None
        self.words = way.value if way is not formulations.Way.NATIVE else ""
        return way

    def _geometry(self, shape: torch.Size, padding: list[int]) -> Geometry:
        return Geometry(
            tuple(shape), self.weight.shape[0], tuple(self.kernel), tuple(self.stride), tuple(padding),
            tuple(self.dilation), self.groups,
        )  # fmt: skip

    def _pack(self, padding: list[int], shape: torch.Size) -> Tensor:
        """The weight in the layout the kernel wants for this input shape; with another it would reorder at every
        call.
        """
        key = (*padding, *shape)
        packed = self._packed.get(key)
        if packed is None:
            packed = torch.ops.onednn.qconv_prepack(
                self.weight, self.scale, 1.0, 0, self.stride, padding, self.dilation, self.groups, list(shape)
            )
            layout = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())
            packed = self._layouts.setdefault(layout, packed)
            if len(self._packed) > 256:
                self._packed.clear()
            self._packed[key] = packed
        return packed

    def _bias_with_zero_point(self, qparams: QParams) -> Tensor:
        key = (qparams.scale, qparams.zero_point)
        bias = self._shifted_bias.get(key)
        if bias is None:
            sums = self.weight.to(torch.float64).flatten(1).sum(1) * self.scale.to(torch.float64)
            shift = sums * (-qparams.scale * qparams.zero_point)
            bias = (shift if self.bias is None else shift + self.bias).to(torch.float32)
            if len(self._shifted_bias) > 64:
                self._shifted_bias.clear()
            self._shifted_bias[key] = bias
        return bias


class PackedLinear:
    """An int8 linear layer, ready to run.

    Args:
        weight: int8 ``[out, in]``.
        scale: float32 ``[out]`` or ``[1]``.
        bias: float32 ``[out]`` or None.
    """

    ndim = 0

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        _require(weight.dtype is torch.int8 and weight.dim() == 2, "linear", "an int8 weight of rank 2", weight)
        self.weight, self.weight_shape = weight, weight.shape
        self.scale = scale.to(torch.float32).contiguous()
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._zero_points = torch.zeros(self.scale.numel(), dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._right: dict[tuple, bool] = {}  # what decides -> whether the stock kernel is right
        self.words = ""  # what computes this instead of the stock kernel, for reports

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the result for an input of ``shape`` ``[..., in]``; raises for what no kernel takes."""
        if len(shape) < 1 or shape[-1] != self.weight_shape[1]:
            raise KernelInputError(
                "linear cannot take this input", expected=f"[..., {self.weight_shape[1]}]", got=tuple(shape)
            )
        return shape[:-1] + self.weight_shape[:1]

    def __call__(self, q: Tensor, qparams: QParams, post_op: PostOp = NO_POST_OP, out: QParams | None = None) -> Tensor:
        """uint8 input ``[..., in]`` -> uint8 with qparams ``out``, or float32 where ``out`` is None."""
        if q.dtype is not torch.uint8:
            raise _bad("linear", "a uint8 tensor", q)
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

    def stock(
        self, rows: Tensor, qparams: QParams, post_op: PostOp = NO_POST_OP, out: QParams | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        """The same by torch's kernel, whether or not it is right, of two dimensions or more; ``dtype`` where ``out`` is
        None.
        """
        scale, zero, dtype = (1.0, 0, dtype) if out is None else (out.scale, out.zero_point, torch.uint8)
        return _qlinear(
            rows, qparams.scale, qparams.zero_point, self._packed, self.scale, self._zero_points, self.bias, scale,
            zero, dtype, post_op.name, post_op.args, post_op.algorithm,
        )  # fmt: skip

    def prove(
        self, shape: torch.Size, qparams: QParams, post_op: PostOp, out: QParams | None, summed: QParams | bool = False
    ) -> None:
        """As ``PackedConv.prove``."""
        dtype = torch.float32 if out is None else torch.uint8
        self._tried(self._rows(shape.numel()), qparams, post_op, dtype, None if summed is False else dtype)

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
        call = formulations.call_of(qparams.zero_point != 0, qparams.quant_max, dtype, post_op, summed)
        right = not count or formulations.is_linear_right(count, self.weight_shape[1], self.weight_shape[0], call)
        self.words = self.words if right else formulations.IN_LEVELS
        return right

    def _in_levels(self, rows: Tensor, qparams: QParams, post_op: PostOp, out: QParams | None) -> Tensor:
        """The same in float32, which is exact but for the last rounding."""
        sums = F.linear(rows.to(torch.float32) - qparams.zero_point, self.weight.to(torch.float32))
        result = sums * (self.scale * qparams.scale)
        result = result if self.bias is None else result + self.bias
        scale, zero, dtype = (1.0, 0, torch.float32) if out is None else (out.scale, out.zero_point, torch.uint8)
        first, second = (*map(float, post_op.args), 0.0, 0.0)[:2]
        return script.finished(result, scale, zero, dtype, post_op.name, first, second, post_op.algorithm)

    def add_(self, q: Tensor, qparams: QParams, accumulator: Tensor, relu: bool) -> Tensor:
        """linear(q) + accumulator [+ relu], written over the float32 ``accumulator``, which must be the caller's
        own.
        """
        if q.dtype is not torch.uint8:
            raise _bad("linear + sum", "a uint8 tensor", q)
        shape = self.output_shape(q.shape)
        if accumulator.shape != shape or accumulator.dtype is not torch.float32 or not accumulator.is_contiguous():
            raise _bad("linear + sum", f"a contiguous float32 accumulator of shape {tuple(shape)}", accumulator)
        if q.dim() == 1:
            return self.add_(q.unsqueeze(0), qparams, accumulator.unsqueeze(0), relu).squeeze(0)
        q, post_op = q.contiguous(), RELU if relu else NO_POST_OP
        if not self._is_right(q.numel(), qparams, post_op, torch.float32, torch.float32):
            result = accumulator.add_(self._in_levels(q, qparams, NO_POST_OP, None))
            return result.relu_() if relu else result
        return self.stock_sum(q, qparams, accumulator, None, relu, None)

    def stock_sum(
        self, rows: Tensor, qparams: QParams, accumulator: Tensor, accumulated: QParams | None, relu: bool,
        out: QParams | None, dtype: torch.dtype = torch.float32, binary: str = "sum",
    ) -> Tensor:  # fmt: skip
        """The same by torch's kernel, whether or not it is right; ``binary`` "add" only reads the other value."""
        scale, zero, dtype = (1.0, 0, dtype) if out is None else (out.scale, out.zero_point, torch.uint8)
        other_scale, other_zero = (1.0, 0) if accumulated is None else (accumulated.scale, accumulated.zero_point)
        return _qlinear_sum(
            rows, qparams.scale, qparams.zero_point, self._packed, self.scale, self._zero_points, accumulator,
            self.bias, scale, zero, dtype, other_scale, other_zero, binary, 1.0, "relu" if relu else "none", [], "",
        )  # fmt: skip


def weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 ``[..., in]`` times int8 ``[out, in]`` with a scale per output; the activation is not quantized."""
    _require(
        x.dtype is torch.float32 and x.shape[-1] == weight.shape[1], "linear", f"float32 [..., {weight.shape[1]}]", x
    )
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    out = F.linear(flat, weight.to(torch.float32)) * scale
    return out.reshape(*x.shape[:-1], weight.shape[0])


def max_pool(q: Tensor, ndim: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], ceil_mode: bool) -> Tensor:  # fmt: skip
    """Max pooling of a batched uint8 tensor, on the integers; 1, 2 or 3 spatial dimensions."""
    _require(q.dtype is torch.uint8 and q.dim() == ndim + 2, f"max_pool{ndim}d", f"uint8 of rank {ndim + 2}", q)
    _require(min(q.shape) > 0, f"max_pool{ndim}d", "a tensor that is not empty", q)
    for k, p in zip(kernel, padding, strict=True):
        if not 0 <= p <= k // 2:
            raise KernelInputError(
                "padding of a max pool must be at most half its kernel", got=f"kernel {k}, padding {p}"
            )
    if ndim == 2 and is_max_pool_right(q.shape, q.stride(), kernel, stride, padding, dilation, ceil_mode):
        return torch.ops.quantized.max_pool2d(q, kernel, stride, padding, dilation, ceil_mode)
    if ndim == 1:
        out = max_pool(q.unsqueeze(2), 2, [1, *kernel], [1, *stride], [0, *padding], [1, *dilation], ceil_mode)
        return out.squeeze(2)
    # No integer kernel for three dimensions: uint8 is exact in float32, so pooling there loses nothing.
    pool: Callable[..., Tensor] = F.max_pool2d if ndim == 2 else F.max_pool3d
    return pool(q.to(torch.float32), kernel, stride, padding, dilation, ceil_mode).to(torch.uint8)


def is_max_pool_right(
    shape: Sequence[int], strides: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool,
) -> bool:  # fmt: skip
    """Whether ``quantized.max_pool2d`` is right here."""
    arguments = (*map(tuple, (shape, strides, kernel, stride, padding, dilation)), ceil_mode)
    problem = problem_of(("max_pool2d", *arguments), lambda: trials.max_pool(*arguments))  # type: ignore[arg-type]
    if problem:
        note_failure(Failure("quantized.max_pool2d", f"{arguments}", problem, "float32 max pool of levels"))
    return not problem


def is_matmul_right(m: int, k: int, n: int) -> bool:
    """Whether ``aten._int_mm`` is right here."""
    problem = problem_of(("_int_mm", m, k, n, torch.get_num_threads()), lambda: trials.matmul(m, k, n))
    if problem:
        note_failure(Failure("aten._int_mm", f"[{m}, {k}] x [{k}, {n}]", problem, "float32 product of levels"))
    return not problem


def int8_matmul(a: Tensor, qa: QParams, b: Tensor, qb: QParams) -> Tensor:
    """Batched ``a @ b`` of two uint8 tensors with equal batch dimensions -> float32, exact until the last scaling.

    ``aten::_int_mm`` wants s8 on the right: shifting u8 by 128 changes the zero point only.
    """
    _require(a.dtype is torch.uint8 and a.dim() >= 2, "matmul", "uint8 of rank 2 or more", a)
    _require(
        b.dtype is torch.uint8 and b.dim() >= 2 and a.shape[-1] == b.shape[-2], "matmul", "matching inner sizes", b
    )
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    left = a.expand(*batch, m, k).reshape(-1, m, k)
    right = (b ^ 128).view(torch.int8).expand(*batch, k, n).reshape(-1, k, n)
    out = torch.empty(left.shape[0], m, n, dtype=torch.int32)
    if out.numel() and is_matmul_right(m, k, n):
        for i in range(left.shape[0]):
            torch._int_mm(left[i], right[i], out=out[i])
    else:
        out.copy_(torch.bmm(left.to(torch.float32), right.to(torch.float32)))
    za, zb = qa.zero_point, qb.zero_point - 128
    result = out.to(torch.float32)
    if za:
        result.sub_(right.sum(1, keepdim=True, dtype=torch.int32).to(torch.float32), alpha=za)
    if zb:
        result.sub_(left.sum(2, keepdim=True, dtype=torch.int32).to(torch.float32), alpha=zb)
    return result.add_(float(za * zb * k)).mul_(qa.scale * qb.scale).reshape(*batch, m, n)


def dynamic_qparams(x: Tensor, reduce_range: bool) -> QParams:
    """qparams of a float tensor from its own minimum and maximum, as dynamic quantization uses them."""
    low, high = (v.item() for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    top = 127 if reduce_range else 255
    scale = (high - low) / top
    if not math.isfinite(scale):
        raise KernelInputError("a dynamically quantized activation has NaN or infinity", got=f"range {low} to {high}",
                               hint="check the input, or keep this op in float with qconfig None")  # fmt: skip
    if scale < 1e-12:  # constant zero
        return QParams(1.0, 0, 0, top)
    return QParams(scale, min(top, max(0, round(-low / scale))), 0, top)


def pad_mode(q: Tensor, pads: Sequence[int], mode: str) -> Tensor:
    """``F.pad`` with mode "circular", "reflect" or "replicate" for tensors of any dtype, by indexing.

    ``pads`` is in ``F.pad``'s order: last dimension first, two numbers each.
    """
    for i, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = q.dim() - 1 - i
        size = q.shape[dim]
        if not (left or right):
            continue
        index = torch.arange(-left, size + right)
        if mode == "circular":
            index = index % size
        elif mode == "replicate":
            index = index.clamp(0, size - 1)
        else:
            if max(left, right) >= size:
                raise KernelInputError(
                    "reflect padding must be smaller than the input", got=f"padding {(left, right)}, size {size}"
                )
            index = (size - 1) - ((size - 1) - index.abs()).abs()
        q = q.index_select(dim, index)
    return q


def _require(condition: bool, op: str, expected: str, got: Tensor) -> None:
    if not condition:
        raise _bad(op, expected, got)


def _bad(op: str, expected: str, got: Tensor) -> KernelInputError:
    return KernelInputError(
        f"{op}: no kernel takes this tensor", op=op, expected=expected, got=f"{got.dtype} {tuple(got.shape)}"
    )


def ints(value: int | Sequence[int], count: int) -> list[int]:
    """One int per spatial dimension, from an int or a sequence of one or ``count``.

    >>> ints(2, 3)
    [2, 2, 2]
    """
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


from . import formulations, script, trials  # noqa: E402 (they build on what is above)
