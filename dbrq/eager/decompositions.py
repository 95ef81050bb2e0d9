"""Functions that are made of ops of the table, and must be seen as those.

``F.multi_head_attention_forward`` composes its projections inside one function, where no hook sees them, and calls
itself when re-entered under a function mode: the one here gives the same results from ``F.linear``, matmul and softmax,
each of which is hooked. A product with a parameter is a linear layer, however it is spelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import base_of
from ..tensors import Int8Weight


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Arguments, shapes and results as ``torch.nn.functional.multi_head_attention_forward``: ``[L, N, E]`` or ``[L,
    E]``.
    """
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, embed_dim = query.shape
    if embed_dim != embed_dim_to_check:
        raise AssertionError(f"was expecting embedding dimension of {embed_dim_to_check}, but got {embed_dim}")
    head_dim = embed_dim // num_heads

    q, k, v = _project(
        query, key, value, embed_dim, in_proj_weight, in_proj_bias,
        (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None,
    )  # fmt: skip
    extra = 0  # keys that the masks do not know
    if bias_k is not None and bias_v is not None:
        k, v, extra = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)]), extra + 1
    q = q.reshape(length, batch * num_heads, head_dim).transpose(0, 1)
    k = static_k if static_k is not None else k.reshape(k.shape[0], batch * num_heads, head_dim).transpose(0, 1)
    v = static_v if static_v is not None else v.reshape(v.shape[0], batch * num_heads, head_dim).transpose(0, 1)
    if add_zero_attn:
        zeros = torch.zeros(batch * num_heads, 1, head_dim, dtype=q.dtype)
        k, v, extra = torch.cat([k, zeros], 1), torch.cat([v, zeros], 1), extra + 1
    sources = k.shape[1]
    mask = _merge_masks(attn_mask, key_padding_mask, is_causal, batch, num_heads, length, sources, extra, q.dtype)

    q, k, v = (t.reshape(batch, num_heads, t.shape[1], head_dim) for t in (q, k, v))
    dropout_p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = torch.matmul(q * (1.0 / math.sqrt(head_dim)), k.transpose(-2, -1))
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        if dropout_p > 0.0:
            weights = F.dropout(weights, p=dropout_p)
        attended = torch.matmul(weights, v)
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    attended = attended.permute(2, 0, 1, 3).reshape(length * batch, embed_dim)
    output = F.linear(attended, out_proj_weight, out_proj_bias)
    output = output.reshape(length, batch, output.shape[-1])
    if not batched:
        return output.squeeze(1), None if weights is None else weights.squeeze(0)
    return output, weights


def _project(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, weight: Tensor | None, bias: Tensor | None,
    separate: tuple[Any, ...] | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The three input projections; equal inputs share one quantization, since they are one value."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if separate is None:
        assert weight is not None
        separate = weight.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), separate, biases, strict=True))


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, batch: int, heads: int, length: int,
    sources: int, extra: int, dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """One additive float mask that broadcasts to ``[batch, heads, length, sources]``, or None."""
    if attn_mask is None and key_padding_mask is None:
        if not is_causal:
            return None
        attn_mask = torch.ones(length, sources - extra, dtype=torch.bool).triu(1)
    total = None
    if attn_mask is not None:
        attn_mask = F.pad(_additive(attn_mask, dtype), (0, extra))
        total = attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(-1, heads, length, sources)
    if key_padding_mask is not None:
        padding = F.pad(_additive(key_padding_mask, dtype), (0, extra)).reshape(batch, 1, 1, sources)
        total = padding if total is None else total + padding
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -math.inf)


def _is_weight(value: Any) -> bool:
    """Whether a matrix is a parameter or, as in ``x @ self.weight.T``, a view of a parameter that is a matrix."""
    if not isinstance(value, Tensor) or len(value.size()) != 2:
        return False
    if isinstance(value, (nn.Parameter, Int8Weight)):
        return True
    base = base_of(value)
    return isinstance(base, nn.Parameter) and len(base.size()) == 2


def _linear_of_addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.t(), bias)


def _linear_of_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.t())


def decomposed(func: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """What to call, under the function mode, in place of ``func`` with the same arguments; None for most functions."""
    if func is F.multi_head_attention_forward:
        return multi_head_attention_forward
    if func in _ADDMM and not kwargs and len(args) == 3 and _is_weight(args[2]):
        bias = args[0]
        return _linear_of_addmm if isinstance(bias, nn.Parameter) and len(bias.size()) == 1 else None
    if func in _MATMUL and not kwargs and len(args) == 2 and _is_weight(args[1]) and not _is_weight(args[0]):
        return _linear_of_matmul
    return None


class Product:
    """A product with an int8 weight, which was found to be some linear layer, and is known again by identity.

    Attributes:
        weight, bias: as they are given.
        turned: the weight as ``F.linear`` takes it.
    """

    __slots__ = ("bias", "turned", "weight")

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.weight, self.bias, self.turned = weight, bias, weight.t()

    @classmethod
    def of(cls, func: Callable, args: tuple) -> Product | None:
        """That of a call for which ``decomposed`` has an answer; None where the weight is another object each time."""
        if func not in _ADDMM and func not in _MATMUL:
            return None
        weight = args[-1]
        held = isinstance(weight, Int8Weight) and weight.is_whole
        return cls(weight, args[0] if func in _ADDMM else None) if held else None

    def as_linear(self, args: tuple, kwargs: dict) -> tuple | None:
        """The arguments of ``F.linear`` for a call of the same function; None if that has other weights."""
        if kwargs or args[-1] is not self.weight or len(args) != (2 if self.bias is None else 3):
            return None
        if self.bias is None:
            return args[0], self.turned
        return (args[1], self.turned, self.bias) if args[0] is self.bias else None


_ADDMM = frozenset({torch.addmm, torch.Tensor.addmm})
_MATMUL = frozenset({torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__})
#: Functions that ``decomposed`` may have an answer for.
DECOMPOSABLE = _ADDMM | _MATMUL | {F.multi_head_attention_forward}
