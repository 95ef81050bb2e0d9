"""What convolutions and linear layers share."""

# ruff: noqa: UP006, UP035, UP045 (TorchScript reads these annotations)

from typing import TYPE_CHECKING, Optional, Tuple, Type, TypeVar

import torch
from torch import Tensor, nn

from ..qparams import PostOp, QParams
from ..stock import zero_point_in_bias
from .values import dequantize

if TYPE_CHECKING:
    number = float  # TorchScript's name for int or float, which Python has not


def _output(out: Optional[QParams], dtype: torch.dtype) -> Tuple[float, int, int, int]:
    """Scale, zero point, kind (0 uint8, 1 float32, 2 bfloat16) and largest level of a kernel's result."""
    if out is not None:
        return out.scale, out.zero_point, 0, out.quant_max
    return 1.0, 0, 1 if dtype is torch.float32 else 2, 255


class Kernel(nn.Module):
    """What convolutions and linear layers share: the int8 weight, its scales and bias, and how the result is
    written.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor
    zero_points: Tensor
    packed: Tensor

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Optional[Tensor], input: QParams, out: Optional[QParams],
        post_op: PostOp, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        outputs = weight.shape[0]
        bias = torch.zeros(outputs) if bias is None else bias.detach().to(torch.float32)
        self.register_buffer("weight", weight.contiguous().clone())
        self.register_buffer("scale", scale.detach().to(torch.float32).clone())
        self.register_buffer("bias", bias.clone())
        self.zero_points = torch.zeros(outputs, dtype=torch.int64)
        self.input_scale, self.input_zero_point = input.scale, input.zero_point
        self.output_scale, self.output_zero_point, self.kind, self.top = _output(out, dtype)
        self.post_op, self.algorithm = post_op.name, post_op.algorithm
        self.arguments = len(post_op.args)
        self.first, self.second = (*map(float, post_op.args), 0.0, 0.0)[:2]

    def pack(self) -> Tensor:
        """The weight as the kernel takes it."""
        raise AssertionError("subclasses say how")

    def summed(self, result: Tensor, other: Tensor, other_scale: float, other_zero_point: int) -> Tensor:
        """A float32 result plus another value, with post-op and quantization, where shapes broadcast."""
        if other.dtype == torch.uint8:
            result = result + dequantize(other, other_scale, other_zero_point, torch.float32)
        else:
            result = result + other
        if self.post_op == "relu":
            result = torch.relu(result)
        if self.kind == 0:
            levels = torch.round(result / self.output_scale) + self.output_zero_point
            return levels.clamp(0, self.top).to(torch.int32).to(torch.uint8)
        return result.to(torch.float32 if self.kind == 1 else torch.bfloat16)

    def __reduce__(self) -> tuple:
        """Packed weights cannot be copied, so they are packed again. (TorchScript's copies go by ``__getstate__``.)"""
        return restored, (type(self), {k: v for k, v in self.__dict__.items() if k not in ("packed", "parts")})

    @torch.jit.export
    def __getstate__(self) -> Tuple[Tensor, Tensor, Tensor, bool]:
        return self.weight, self.scale, self.bias, self.training

    @torch.jit.export
    def __setstate__(self, state: Tuple[Tensor, Tensor, Tensor, bool]) -> None:
        weight, scale, bias, self.training = state
        self.weight, self.scale, self.bias = weight.clone(), scale.clone(), bias.clone()  # a copy's are its own
        self.zero_points = torch.zeros([self.weight.size(0)], dtype=torch.int64)
        self.packed = self.pack()

    def _bias_with_zero_point(self) -> None:
        """Without padding the input's zero point adds a constant per output channel."""
        self.bias.add_(zero_point_in_bias(self.weight, self.scale, self.input_scale, self.input_zero_point))
        self.input_zero_point = 0


_Kernel = TypeVar("_Kernel", bound=Kernel)


def restored(cls: Type[_Kernel], held: dict) -> _Kernel:
    """A copy of a kernel, from all but its packed weight."""
    new = cls.__new__(cls)
    new.__dict__.update(held)
    new.packed = new.pack()
    return new


KERNEL_CONSTANTS = ["input_scale", "input_zero_point", "output_scale", "output_zero_point", "kind", "top", "post_op",
                    "algorithm", "arguments", "first", "second"]  # fmt: skip
