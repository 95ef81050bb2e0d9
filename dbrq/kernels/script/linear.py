"""Linear layers by torch's int8 kernel, and pointwise convolutions, which are linear layers over pixels."""

# ruff: noqa: RUF005, RUF012, UP006, UP035, UP045 (TorchScript reads these annotations)

from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch
from torch import Tensor

from ..qparams import NO_POST_OP, PostOp, QParams
from .base import KERNEL_CONSTANTS, Kernel
from .values import of_ones, quantize_rows, rescale_rows

if TYPE_CHECKING:
    from .base import number


class Linear(Kernel):
    """linear of a uint8 tensor ``[..., in]``, with a post-op."""

    __constants__ = [*KERNEL_CONSTANTS, "fuses_sum"]
    words = ""
    fuses_sum = True

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Optional[Tensor], input: QParams, out: Optional[QParams],
        post_op: PostOp = NO_POST_OP, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(weight, scale, bias, input, out, post_op, dtype)
        self.packed = self.pack()

    def pack(self) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(self.weight, None)

    def prepared(self, q: Tensor) -> Tensor:
        """The input, checked and contiguous."""
        assert q.dtype == torch.uint8, "dbrq: an int8 linear layer takes uint8"
        assert q.dim() > 0 and q.size(-1) == self.weight.size(1), (
            f"dbrq: a linear layer of {self.weight.size(1)} inputs got {q.size(-1)}"
        )
        return q.contiguous()

    def product(
        self, rows: Tensor, input_scale: float, input_zero_point: int, scale: float, zero_point: int,
        dtype: torch.dtype, post_op: str,
    ) -> Tensor:  # fmt: skip
        """The layer of a prepared input of two dimensions or more, which has the qparams given first."""
        if rows.numel() == 0:  # which the kernel does not take
            return torch.empty(list(rows.size())[:-1] + [self.weight.size(0)], dtype=dtype)
        arguments: List[Optional[number]] = []
        if post_op != "none" and self.arguments > 0:
            arguments.append(self.first)
        if post_op != "none" and self.arguments > 1:
            arguments.append(self.second)
        return torch.ops.onednn.qlinear_pointwise(
            rows, input_scale, input_zero_point, self.packed, self.scale, self.zero_points, self.bias, scale,
            zero_point, dtype, post_op, arguments, self.algorithm,
        )  # fmt: skip

    def forward(self, q: Tensor) -> Tensor:
        return self.linear(q)

    def linear(self, q: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        x = self.prepared(q)
        result = self.product(
            x if q.dim() > 1 else x.unsqueeze(0), self.input_scale, self.input_zero_point, self.output_scale,
            self.output_zero_point, dtype, self.post_op,
        )  # fmt: skip
        if self.top != 255:
            result = result.clamp_(0, self.top)
        return result if q.dim() > 1 else result.squeeze(0)


class PointwiseConv(Linear):
    """conv2d with a 1x1 kernel, as the linear layer that it is.

    That kernel costs less to call, and its packed weight does not depend on the image's size.
    """

    def __init__(self, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(weight.flatten(1), *args, **kwargs)
        self._bias_with_zero_point()

    def forward(self, q: Tensor) -> Tensor:
        return _image(self.linear(_pixels(q)), q)


def _pixels(x: Tensor) -> Tensor:
    """``[N, C, H, W]`` -> ``[N * H * W, C]``, without a copy for what is channels_last."""
    assert x.dim() == 4, f"dbrq: an int8 convolution takes 4 dimensions and got {x.dim()}"
    assert x.size(2) > 0 and x.size(3) > 0, "dbrq: an int8 convolution takes images of one pixel or more"
    channels = x.size(1)
    x = x.contiguous(memory_format=torch.channels_last)
    return x.as_strided([x.size(0) * x.size(2) * x.size(3), channels], [channels, 1])


def _image(rows: Tensor, like: Tensor) -> Tensor:
    """``[N * H * W, C]`` -> ``[N, C, H, W]`` in channels_last, N, H and W as in ``like``."""
    c, h, w = rows.size(1), like.size(2), like.size(3)
    return rows.as_strided([like.size(0), c, h, w], [h * w * c, 1, w * c, c])


class LinearAdd(Linear):
    """linear plus another value [+ relu].

    A float other is read (``add``). A uint8 one is written over (``sum``) where ``owned``; else it is read as raw
    integers, as ``add`` does, with everything else in units of its scale.
    """

    __constants__ = [*Linear.__constants__, "other_scale", "other_zero_point", "binary", "owned", "unit", "reads_int8"]

    def __init__(self, *args: Any, other: Optional[QParams], owned: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.other_scale, self.other_zero_point = (1.0, 0) if other is None else (other.scale, other.zero_point)
        self.binary, self.owned, self.reads_int8 = "add", owned, other is not None
        self.unit = 1.0

    def settle(self) -> None:
        """Choose the kernel, now that it is known whether the other value may be written over."""
        if self.reads_int8 and self.owned:
            self.binary = "sum"
        elif self.reads_int8:
            self.unit = self.other_scale
            self.scale.div_(self.unit)
            self.bias.div_(self.unit).sub_(self.other_zero_point)

    # torch means ``forward`` to take what it likes in each class; TorchScript takes no reason behind an ignore.
    def forward(self, q: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return self.added(q, other)

    def added(self, q: Tensor, other: Tensor) -> Tensor:
        """``q`` ``[..., in]`` and ``other`` ``[..., out]`` -> ``[..., out]``."""
        x = self.prepared(q)
        dtype = torch.uint8 if self.kind == 0 else torch.float32 if self.kind == 1 else torch.bfloat16
        expected = list(x.size())
        expected[-1] = self.weight.size(0)
        assert (other.dtype == torch.uint8) == self.reads_int8, (
            "dbrq: the other operand of a fused add has the wrong type"
        )
        assert self.reads_int8 or other.is_floating_point(), "dbrq: the other operand of a fused add has the wrong type"
        if not self.fuses_sum or list(other.size()) != expected or x.numel() == 0:
            return self.separately(x, other)  # it broadcasts, which the kernel would take for memory that is not there
        other = other.contiguous()
        if x.dim() == 1:
            x, other = x.unsqueeze(0), other.unsqueeze(0)
        scale = self.other_scale if self.binary == "sum" else 1.0
        zero_point = self.other_zero_point if self.binary == "sum" else 0
        result = torch.ops.onednn.qlinear_pointwise(
            x, self.input_scale, self.input_zero_point, self.packed, self.scale, self.zero_points, other,
            self.bias, self.output_scale / self.unit, self.output_zero_point, dtype, scale, zero_point,
            self.binary, 1.0, self.post_op, [], "",
        )  # fmt: skip
        if self.top != 255:
            result = result.clamp_(0, self.top)
        return result if q.dim() > 1 else result.squeeze(0)

    def separately(self, x: Tensor, other: Tensor) -> Tensor:
        """The same in two steps."""
        return self.summed(self.unsummed(x), other, self.other_scale, self.other_zero_point)

    def unsummed(self, x: Tensor) -> Tensor:
        """The linear layer alone, float32."""
        result = self.product(
            x if x.dim() > 1 else x.unsqueeze(0), self.input_scale, self.input_zero_point, 1.0, 0, torch.float32, "none"
        )
        result = result if x.dim() > 1 else result.squeeze(0)
        if self.reads_int8 and self.binary == "add":
            result = (result + self.other_zero_point) * self.unit
        return result


class PointwiseConvAdd(LinearAdd):
    """conv2d with a 1x1 kernel plus another value [+ relu], as the linear layer that it is."""

    def __init__(self, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(weight.flatten(1), *args, **kwargs)
        self._bias_with_zero_point()

    # As in ``LinearAdd``.
    def forward(self, q: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        if other.dim() != 4 or [q.size(0), q.size(2), q.size(3)] != [other.size(0), other.size(2), other.size(3)]:
            return self.separately_as_images(q, other)
        return _image(self.added(_pixels(q), _pixels(other)), q)

    def separately_as_images(self, q: Tensor, other: Tensor) -> Tensor:
        """The same for an other value that broadcasts."""
        result = _image(self.unsummed(self.prepared(_pixels(q))), q)
        return self.summed(result, other, self.other_scale, self.other_zero_point)


class DynamicLinear(Linear):
    """linear whose input is quantized with qparams of its own values; float in, float out.

    ``by_row``: each row of the input, a token, has qparams of its own.
    """

    __constants__ = [*Linear.__constants__, "by_row", "levels"]
    column: Tensor

    def __init__(self, *args: Any, levels: int, by_row: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.levels, self.by_row = levels, by_row
        self.column = self.summed_weight()

    def summed_weight(self) -> Tensor:
        """``of_ones``; empty where no rows have qparams of their own."""
        return of_ones(self.weight, self.scale) if self.by_row else torch.empty([0])

    @torch.jit.export
    def __setstate__(self, state: Tuple[Tensor, Tensor, Tensor, bool]) -> None:
        weight, scale, bias, self.training = state
        self.weight, self.scale, self.bias = weight.clone(), scale.clone(), bias.clone()  # as in ``Kernel``
        self.zero_points = torch.zeros([self.weight.size(0)], dtype=torch.int64)
        self.packed = self.pack()
        self.column = self.summed_weight()

    def forward(self, x: Tensor) -> Tensor:
        assert x.size(-1) == self.weight.size(1), (
            f"dbrq: a linear layer of {self.weight.size(1)} inputs got {x.size(-1)}"
        )
        dtype = torch.float32 if self.kind == 1 else torch.bfloat16
        if x.numel() == 0:  # it has no range
            return torch.empty(list(x.size())[:-1] + [self.weight.size(0)], dtype=dtype)
        if self.by_row and x.numel() > x.size(-1):
            return self.linear_by_row(x).to(dtype)
        low, high = torch.aminmax(x)
        lowest, highest = float(low.item()), float(high.item())
        finite = lowest > -3.5e38 and highest < 3.5e38  # false for NaN, which min and max would swallow
        assert finite, "dbrq: a dynamically quantized activation has NaN or infinity"
        bottom, top = min(lowest, 0.0), max(highest, 0.0)
        scale = max((top - bottom) / self.levels, 1e-12)
        zero_point = int(min(float(self.levels), max(0.0, float(round(-bottom / scale)))))
        q = torch.mul(x, 1.0 / scale).round_().add_(zero_point).clamp_(0, self.levels).to(torch.uint8)
        rows = q.contiguous() if x.dim() > 1 else q.unsqueeze(0)
        result = self.product(rows, scale, zero_point, 1.0, 0, dtype, "none")
        return result if x.dim() > 1 else result.squeeze(0)

    def linear_by_row(self, x: Tensor) -> Tensor:
        """The layer where there are several rows: their qparams are applied behind the kernel, which takes one."""
        rows = x.reshape(-1, x.size(-1)).to(torch.float32)
        q, scale, zero_point = quantize_rows(rows, self.levels)
        finite = float(scale.max().item()) < 3.5e38  # false for NaN
        assert finite, "dbrq: a dynamically quantized activation has NaN or infinity"
        result = self.product(q.contiguous(), 1.0, 0, 1.0, 0, torch.float32, "none")
        result = rescale_rows(result, scale, zero_point, self.column, self.bias)
        return result.reshape(list(x.size())[:-1] + [self.weight.size(0)])
