"""Products of two activations, and attention."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from ....errors import OneDNNError
from ....kernels import QParams
from .. import binding
from ..binding import Alg, Arg
from ..builder import Builder, Unsupported
from ..epilogue import Epilogue, Given
from ..layouts import in_order
from ..partitions import Partition, Weight, With
from ..values import Kind, Value
from .common import as_model_float, checked, fitted_to, repeated, without_repeats


def matmul(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """A product of two activations, and what follows it, whose repeats are written out where no kernel broadcasts."""
    try:
        return _product(b, p, arguments, operands, repeats=False)
    except (Unsupported, OneDNNError):
        if not any(isinstance(step, With) for step in p.steps):
            raise
    return _product(b, p, arguments, operands, repeats=True)


def _product(b: Builder, p: Partition, arguments: list[Any], operands: list[Any], repeats: bool) -> Value:
    left, right = arguments[:2]
    if not isinstance(left, Given) or not isinstance(right, Given):
        raise Unsupported("an operand is a parameter")
    qa, qb = left.qparams, right.qparams
    int8 = qa is not None and qb is not None
    a, w = (left.value, right.value) if int8 else (as_model_float(b, left), as_model_float(b, right))
    if len(a.shape) < 2 or len(w.shape) < 2 or a.shape[-1] != w.shape[-2]:
        raise Unsupported("an operand is a vector")
    ndim = max(len(a.shape), len(w.shape), 3)
    a, w = (_at_rank(v, ndim) for v in (a, w))
    batch = tuple(max(m, n) for m, n in zip(a.shape[:-2], w.shape[:-2], strict=True))
    shape = (*batch, a.shape[-2], w.shape[-1])
    macs = math.prod(shape) * a.shape[-1]
    e = Epilogue()
    a, w = (_plain_matrix(b, without_repeats(v)) for v in (a, w))
    if qa is not None and qb is not None:
        w = _signed(b, w)
        e.scale(Arg.SRC, b.numbers(qa.scale))
        e.scale(Arg.WEIGHTS, b.numbers(qb.scale))
        e.zero_point(b, Arg.SRC, qa.zero_point)
        e.zero_point(b, Arg.WEIGHTS, qb.zero_point - 128)
    strides = binding.row_major(shape)
    e.steps(b, p.steps, operands, fitted_to(b, shape, strides, repeats))
    e.quantize(b, p.out, by_attributes=int8)
    dst = b.new(shape, b.dtype if p.out is None else torch.uint8, strides)
    levels = qa.quant_max if int8 and qa is not None else 255
    b.run(checked(binding.matmul(a.desc, w.desc, None, dst.desc, e.attributes, levels), macs),
          {**e.places, Arg.SRC: a, Arg.WEIGHTS: w, Arg.DST: dst}, macs)  # fmt: skip
    drop = ndim - max(len(left.value.shape), len(right.value.shape))
    return dst.like(shape[drop:], strides[drop:])


def _at_rank(value: Value, ndim: int) -> Value:
    missing = ndim - len(value.shape)
    return value.like((1,) * missing + value.shape, (value.numel,) * missing + value.strides) if missing else value


def _plain_matrix(b: Builder, value: Value) -> Value:
    """Rows or columns next to each other, as matmuls want them.

    oneDNN compares strides of axes of size 1 too when it looks for a layout that it knows.
    """
    if 1 in (value.strides[-1], value.strides[-2]):
        strides = (value.numel if n == 1 else s for n, s in zip(value.shape[:-2], value.strides[:-2], strict=True))
        return value.like(value.shape, (*strides, *value.strides[-2:]))
    return b.reordered(value, value.dtype, binding.row_major(value.shape))


def _signed(b: Builder, value: Value) -> Value:
    """uint8 levels as int8, 128 less."""

    def make() -> Value:
        result = b.new(value.shape, torch.int8, in_order(value.shape, value.strides))
        b.convert(value, result, QParams(1.0, 128))
        return result

    return b.derived((value.buffer, value.offset, value.shape, value.strides, "signed"), make)


def attention(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """Attention, the repeats of whose mask are written out where no kernel broadcasts."""
    try:
        return _attention(b, arguments, repeats=False)
    except (Unsupported, OneDNNError):
        if arguments[3] is None and not arguments[5]:
            raise
    return _attention(b, arguments, repeats=True)


def _attention(b: Builder, arguments: list[Any], repeats: bool) -> Value:
    """softmax(q k^T * scale + mask) v, the scores in one buffer."""
    query, key, value, mask, dropout, causal, scale, grouped = arguments[:8]
    if dropout or grouped:
        raise Unsupported("it has dropout or grouped queries")
    q, k, v = (as_model_float(b, given) for given in (query, key, value))
    if not (len(q.shape) == len(k.shape) == len(v.shape)) or len(q.shape) < 3:
        raise Unsupported("its operands have other ranks")
    if q.shape[:-2] != k.shape[:-2] or k.shape[:-1] != v.shape[:-1]:
        raise Unsupported("its operands broadcast")
    scores_shape = (*q.shape[:-1], k.shape[-2])
    macs = math.prod(scores_shape)
    e = Epilogue()
    e.linear(scale if scale is not None else 1 / math.sqrt(q.shape[-1]), 0.0)
    fitted = fitted_to(b, scores_shape, binding.row_major(scores_shape), repeats)
    idle: _Idle | None = None
    if isinstance(mask, Weight):
        mask = Given(b.attribute(mask.path))
    if isinstance(mask, Given):
        idle = b.derived((mask.value.buffer, "idle", mask.value.offset, mask.value.shape, mask.value.strides),
                         lambda: _idle(b, mask.value))  # fmt: skip
        added = mask.value
        if added.dtype is torch.bool:  # as uint8: 0 for what may be attended to, else what makes any weight 0
            levels = Value(added.buffer, added.shape, torch.uint8, added.strides, added.offset)
            added = b.as_float(without_repeats(levels), QParams(1e38, 1))
        e.steps(b, [With(Alg.ADD, 0)], [Given(added)], fitted)
    if causal:
        upper = b.constant(("causal", scores_shape[-2:], b.dtype), lambda: torch.full(
            scores_shape[-2:], -math.inf).triu(1).to(b.dtype))  # fmt: skip
        e.steps(b, [With(Alg.ADD, 0)], [Given(upper)], fitted)
    q, k, v = (_plain_matrix(b, repeated(b, t)) for t in (q, k, v))
    turned = k.like((*k.shape[:-2], k.shape[-1], k.shape[-2]), (*k.strides[:-2], k.strides[-1], k.strides[-2]))
    scores = b.new(scores_shape, b.dtype)
    first = binding.matmul(q.desc, turned.desc, None, scores.desc, e.attributes)
    b.run(checked(first, macs), {**e.places, Arg.SRC: q, Arg.WEIGHTS: turned, Arg.DST: scores},
          macs * q.shape[-1])  # fmt: skip
    plain = Epilogue().attributes
    if b.dtype is torch.float32:
        b.call(_softmax_, (scores,), {}, writes=True)
    else:
        primitive = binding.softmax(Alg.SOFTMAX, scores.desc, scores.desc, len(scores_shape) - 1, plain)
        b.run(primitive, {Arg.SRC: scores, Arg.DST: scores}, words="softmax")
    shape = (*q.shape[:-1], v.shape[-1])
    # As torch's own kernel lays it out: heads next to each other, for the layer behind.
    order = (*range(len(shape) - 3), len(shape) - 2, len(shape) - 3, len(shape) - 1)
    inner = binding.row_major([shape[i] for i in order])
    strides = tuple(inner[order.index(i)] for i in range(len(shape)))
    result = b.new(shape, b.dtype, strides)
    second = binding.matmul(scores.desc, v.desc, None, result.desc, plain)
    b.run(checked(second, macs), {Arg.SRC: scores, Arg.WEIGHTS: v, Arg.DST: result}, macs * v.shape[-1])
    if idle is not None:
        b.call(idle.clear, (result,), {}, writes=True, watch=False)
    return result


def _softmax_(scores: Tensor) -> Tensor:
    """In place: torch's kernel takes four fifths of the time of oneDNN 3.2's."""
    return torch.softmax(scores, -1, out=scores)


class _Idle(threading.local):
    """Queries that may attend to nothing, as one call's mask has it: torch gives zeros for them, softmax anything."""

    busy: Tensor | None = None

    def look(self, mask: Tensor) -> None:
        truth = mask.dtype is torch.bool
        if (mask.view(torch.uint8) if truth else mask).amin() > (0 if truth else -math.inf):  # the common case, at once
            self.busy = None
            return
        busy = (mask if truth else mask != -math.inf).any(-1, keepdim=True)
        self.busy = None if busy.all() else busy

    def clear(self, result: Tensor) -> None:
        if self.busy is not None:
            result.masked_fill_(self.busy.logical_not(), 0.0)


def _idle(b: Builder, mask: Value) -> _Idle | None:
    """None for a mask that never changes and leaves no query idle."""
    idle = _Idle()
    if mask.buffer.kind is Kind.CONSTANT:
        idle.look(b.tensor(mask))
        if idle.busy is None:
            return None
    b.call(idle.look, (mask,), {}, writes=True, watch=False)
    return idle
