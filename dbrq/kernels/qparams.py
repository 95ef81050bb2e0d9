"""What kernels are called with: qparams, post-ops, and values between float and integers."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KernelInputError

# 1.5 * 2**23: a float32 of this size has a spacing of one, so adding it rounds half to even, in the same pass.
ROUND = 12582912.0


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
            torch.tensor(ROUND + self.zero_point, dtype=torch.float32),
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


def quantize(x: Tensor, qparams: QParams) -> Tensor:
    """float32 of any shape -> uint8, rounding half to even."""
    shift, inverse, _ = qparams._constants
    shifted = torch.add(shift, x, alpha=inverse)
    shifted.clamp_(ROUND + qparams.quant_min, ROUND + qparams.quant_max)
    return shifted.view(torch.int32).byte()


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


def ints(value: int | Sequence[int], count: int) -> list[int]:
    """One int per spatial dimension, from an int or a sequence of one or ``count``.

    >>> ints(2, 3)
    [2, 2, 2]
    """
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def require(condition: bool, op: str, expected: str, got: Tensor) -> None:
    if not condition:
        raise bad(op, expected, got)


def not_finite(got: str) -> KernelInputError:
    """NaN or infinity came where a range is found in each call."""
    return KernelInputError("a dynamically quantized activation has NaN or infinity", got=got,
                            hint="check the input, or keep this op in float with qconfig None")  # fmt: skip


def bad(op: str, expected: str, got: Tensor) -> KernelInputError:
    return KernelInputError(
        f"{op}: no kernel takes this tensor", op=op, expected=expected, got=f"{got.dtype} {tuple(got.shape)}"
    )
