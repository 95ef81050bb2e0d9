"""Int8 ops other than convolutions and linear layers, as functions."""

# ruff: noqa: RUF005, UP006, UP035, UP045 (TorchScript reads these annotations)

from typing import List, Optional

import torch
from torch import Tensor


def max_pool(
    q: Tensor, kernel: List[int], stride: List[int], padding: List[int], dilation: List[int], ceil_mode: bool
) -> Tensor:
    """Max pooling of a batched uint8 tensor, on the integers; 1, 2 or 3 spatial dimensions."""
    n = len(kernel)
    assert q.dim() == n + 2, "dbrq: an int8 max pool takes a batch"
    if n == 3 or q.numel() == 0:
        return max_pool_of_levels(q, kernel, stride, padding, dilation, ceil_mode)
    if n == 2:
        return torch.ops.quantized.max_pool2d(q, kernel, stride, padding, dilation, ceil_mode)
    wide = torch.ops.quantized.max_pool2d(
        q.unsqueeze(2), [1, kernel[0]], [1, stride[0]], [0, padding[0]], [1, dilation[0]], ceil_mode
    )
    return wide.squeeze(2)


def max_pool_of_levels(
    q: Tensor, kernel: List[int], stride: List[int], padding: List[int], dilation: List[int], ceil_mode: bool
) -> Tensor:
    """The same in float32, which holds levels exactly."""
    assert q.dim() == len(kernel) + 2, "dbrq: an int8 max pool takes a batch"
    levels = q.to(torch.float32)
    if len(kernel) == 1:
        levels = torch.max_pool1d(levels, kernel, stride, padding, dilation, ceil_mode)
    elif len(kernel) == 2:
        levels = torch.max_pool2d(levels, kernel, stride, padding, dilation, ceil_mode)
    else:
        levels = torch.max_pool3d(levels, kernel, stride, padding, dilation, ceil_mode)
    return levels.to(torch.uint8)


def in_order(x: Tensor) -> Tensor:
    """``[batch, rows, columns]`` in strides that ``aten::_int_mm`` reads rightly; see ``kernels.int8_matmul``."""
    if 0 in x.stride() or x.size(1) == 1 or x.size(2) == 1:
        return x.contiguous().flatten().reshape(x.size())
    return x


def int8_matmul(a: Tensor, b: Tensor, scale: float, za: int, zb: int) -> Tensor:
    """Batched ``a @ b`` of two uint8 tensors -> float32, exact until the last scaling; see ``kernels.int8_matmul``."""
    assert a.dtype == torch.uint8 and b.dtype == torch.uint8, "dbrq: an int8 matmul takes uint8"
    assert a.dim() >= 2 and b.dim() >= 2 and a.size(-1) == b.size(-2), (
        "dbrq: an int8 matmul of shapes that do not match"
    )
    if a.numel() == 0 or b.numel() == 0:
        return matmul_of_levels(a, b, scale, za, zb)
    m, k, n = a.size(-2), a.size(-1), b.size(-1)
    batch = list(torch.empty(list(a.size())[:-2] + [0]).add(torch.empty(list(b.size())[:-2] + [0])).size())[:-1]
    left = in_order(a.expand(batch + [m, k]).reshape([-1, m, k]))
    right = in_order(torch.bitwise_xor(b, 128).to(torch.int8).expand(batch + [k, n]).reshape([-1, k, n]))
    out = torch.empty([left.size(0), m, n], dtype=torch.int32)
    for i in range(left.size(0)):
        out[i].copy_(torch._int_mm(left[i], right[i]))
    result = out.to(torch.float32)
    shift = zb - 128
    if za != 0:
        result.sub_(right.sum([1], keepdim=True, dtype=torch.int32).to(torch.float32), alpha=za)
    if shift != 0:
        result.sub_(left.sum([2], keepdim=True, dtype=torch.int32).to(torch.float32), alpha=shift)
    return result.add_(float(za * shift * k)).mul_(scale).reshape(batch + [m, n])


def matmul_of_levels(a: Tensor, b: Tensor, scale: float, za: int, zb: int) -> Tensor:
    """``int8_matmul`` in float32."""
    assert a.dtype == torch.uint8 and b.dtype == torch.uint8, "dbrq: an int8 matmul takes uint8"
    return torch.matmul(a.to(torch.float32) - za, b.to(torch.float32) - zb).mul_(scale)


def weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Optional[Tensor]) -> Tensor:
    """float ``[..., in]`` times int8 ``[out, in]`` with a scale per output; the activation is not quantized."""
    out = torch.nn.functional.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
    return out if bias is None else out + bias


def nearest(q: Tensor, size: Optional[List[int]], scale_factor: Optional[List[float]], mode: str) -> Tensor:
    """Interpolation that chooses elements, on the integers; torch's kernels take uint8 in some layouts only."""
    return (
        torch.nn.functional.interpolate(q.to(torch.float32), size, scale_factor, mode).to(torch.int32).to(torch.uint8)
    )


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of what may be attended to, as what is added to the scores."""
    return torch.zeros(mask.size(), dtype=dtype).masked_fill_(mask.logical_not(), -float("inf"))
