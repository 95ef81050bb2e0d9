"""Int8 ops other than convolutions and linear layers, in eager mode."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from ..errors import KernelInputError
from . import padding
from .choice import is_matmul_right, is_max_pool_right
from .qparams import QParams, not_finite, require


def weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 ``[..., in]`` times int8 ``[out, in]`` with a scale per output; the activation is not quantized."""
    require(
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
    require(q.dtype is torch.uint8 and q.dim() == ndim + 2, f"max_pool{ndim}d", f"uint8 of rank {ndim + 2}", q)
    require(min(q.shape) > 0, f"max_pool{ndim}d", "a tensor that is not empty", q)
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


def int8_matmul(a: Tensor, qa: QParams, b: Tensor, qb: QParams) -> Tensor:
    """Batched ``a @ b`` of two uint8 tensors with equal batch dimensions -> float32, exact until the last scaling.

    ``aten::_int_mm`` wants s8 on the right: shifting u8 by 128 changes the zero point only.
    """
    require(a.dtype is torch.uint8 and a.dim() >= 2, "matmul", "uint8 of rank 2 or more", a)
    require(b.dtype is torch.uint8 and b.dim() >= 2 and a.shape[-1] == b.shape[-2], "matmul", "matching inner sizes", b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    left = _in_order(a.expand(*batch, m, k).reshape(-1, m, k))
    right = _in_order((b ^ 128).view(torch.int8).expand(*batch, k, n).reshape(-1, k, n))
    out = torch.empty(left.shape[0], m, n, dtype=torch.int32)
    if out.numel() and is_matmul_right(m, k, n):
        for i in range(left.shape[0]):
            _torch.int_mm(left[i], right[i], out=out[i])
    else:
        out.copy_(torch.bmm(left.to(torch.float32), right.to(torch.float32)))
    za, zb = qa.zero_point, qb.zero_point - 128
    result = out.to(torch.float32)
    if za:
        result.sub_(right.sum(1, keepdim=True, dtype=torch.int32).to(torch.float32), alpha=za)
    if zb:
        result.sub_(left.sum(2, keepdim=True, dtype=torch.int32).to(torch.float32), alpha=zb)
    return result.add_(float(za * zb * k)).mul_(qa.scale * qb.scale).reshape(*batch, m, n)


def _in_order(x: Tensor) -> Tensor:
    """``[batch, rows, columns]`` in strides that ``aten::_int_mm`` reads rightly: it goes by the strides of dimensions
    of one element too, and takes those of expanded ones for a layout without repetition.
    """
    if 0 in x.stride() or 1 in x.shape[1:]:
        return x.contiguous().flatten().reshape(x.shape)
    return x


def dynamic_qparams(x: Tensor, reduce_range: bool) -> QParams:
    """qparams of a float tensor from its own minimum and maximum, as dynamic quantization uses them."""
    low, high = (v.item() for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    top = 127 if reduce_range else 255
    scale = (high - low) / top
    if not math.isfinite(scale):
        raise not_finite(f"range {low} to {high}")
    if scale < 1e-12:  # constant zero
        return QParams(1.0, 0, 0, top)
    return QParams(scale, min(top, max(0, round(-low / scale))), 0, top)


def pad_mode(q: Tensor, pads: Sequence[int], mode: str) -> Tensor:
    """``F.pad`` with mode "circular", "reflect" or "replicate", as ``padding.pad_mode`` has it."""
    most = {"circular": 0, "reflect": -1}.get(mode)
    for i, given in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        size = q.shape[q.dim() - 1 - i]
        if most is not None and max(given) > size + most:
            raise KernelInputError(
                f"{mode} padding must be {'at most the size of' if most == 0 else 'smaller than'} the input",
                got=f"padding {given}, size {size}",
            )
    return padding.pad_mode(q, list(pads), mode)
