"""Functions, operations of two tensors, and the ways between float and int8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....errors import OneDNNError
from ....kernels import QParams
from .. import binding
from ..binding import Alg, Arg
from ..builder import Builder, Unsupported
from ..epilogue import Epilogue, Given
from ..layouts import channels_last, in_order
from ..partitions import BatchNorm, Function, Partition, Step, Weight, With
from ..values import Value
from .common import FLOATS, as_model_float, checked, dense, fitted_to, without_repeats
from .weights import folded


def elementwise(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """What stands alone: a function, or an operation of two tensors, and what follows."""
    return chain(b, arguments[0], p.steps, operands, p.out)


def chain(b: Builder, x: Any, steps: Sequence[Step], operands: list[Any], out: QParams | None) -> Value:
    if not isinstance(x, Given):
        raise Unsupported("its input is no tensor of the graph")
    first = steps[0] if steps else None
    e = Epilogue()
    dtype = b.dtype if out is None else torch.uint8
    if isinstance(first, With):
        return _of_two(b, x, first, steps[1:], operands, out)
    value = dense(b, as_model_float(b, x))
    if not value.shape:
        raise Unsupported("it has no dimensions")
    # As a post-op relu(-inf) is NaN, being -inf * 0.
    steps = [Function(Alg.CLIP, 0.0, math.inf) if s == Function(Alg.RELU) else s for s in steps]
    rest = steps if out is not None or first is None else steps[1:]
    e.steps(b, rest, operands, fitted_to(b, value.shape, value.strides))
    e.quantize(b, out, by_attributes=False)
    dst = b.new(value.shape, dtype, value.strides)
    if out is None and isinstance(first, Function):
        (first,) = (s for s in steps[:1] if isinstance(s, Function))
        primitive = binding.eltwise(first.alg, value.desc, dst.desc, first.alpha, first.beta, e.attributes)
        b.run(checked(primitive, value.numel), {**e.places, Arg.SRC: value, Arg.DST: dst})
        return dst
    # The primitive for functions writes its input's type only; adding nothing writes any.
    zero = b.numbers(0.0).like((1,) * len(value.shape), (1,) * len(value.shape))
    primitive = binding.binary(Alg.ADD, value.desc, zero.desc, dst.desc, e.attributes)
    b.run(checked(primitive, value.numel), {**e.places, Arg.SRC: value, Arg.SRC_1: zero, Arg.DST: dst})
    return dst


def _of_two(
    b: Builder, x: Given, first: With, steps: Sequence[Step], operands: list[Any], out: QParams | None
) -> Value:
    """An operation of two tensors; in float where no kernel reads their integers, repeated where none broadcasts."""
    other = operands[first.operand]
    if not isinstance(other, Given):
        raise Unsupported("an operand is a number that the graph computes")
    if first.alg in (Alg.ADD, Alg.MUL) and x.value.numel < other.value.numel:
        x, other = other, x
    ways = (
        [(False, False), (True, False), (True, True)] if x.qparams or other.qparams else [(True, False), (True, True)]
    )
    for number, (in_float, repeated) in enumerate(ways):
        try:
            return _of_two_in(b, x, other, first.alg, steps, operands, out, in_float, repeated)
        except (Unsupported, OneDNNError):
            if number == len(ways) - 1:
                raise
    raise AssertionError


def _of_two_in(b: Builder, x: Given, other: Given, alg: Alg, steps: Sequence[Step], operands: list[Any],
               out: QParams | None, in_float: bool, repeated: bool) -> Value:  # fmt: skip
    if not in_float and alg not in (Alg.ADD, Alg.SUB):
        raise Unsupported("integers are added only")
    one, two = (as_model_float(b, x), as_model_float(b, other)) if in_float else (x.value, other.value)
    value = dense(b, one)
    if not value.shape:
        raise Unsupported("it has no dimensions")
    # Where an axis of size 1 has a stride that is another's too, no kernel broadcasts.
    one = value.like(value.shape, in_order(value.shape, value.strides))
    fitted = fitted_to(b, one.shape, one.strides, repeated)
    two = fitted(two)
    e = Epilogue()
    offset = 0.0
    if not in_float:
        for arg, given, sign in ((Arg.SRC, x, 1.0), (Arg.SRC_1, other, 1.0 if alg is Alg.ADD else -1.0)):
            if given.qparams is not None:
                e.scale(arg, b.numbers(given.qparams.scale))
                offset -= sign * given.qparams.scale * given.qparams.zero_point
    e.linear(1.0, offset)
    e.steps(b, steps, operands, fitted)
    e.quantize(b, out, by_attributes=False)
    dst = b.new(one.shape, b.dtype if out is None else torch.uint8, one.strides)
    primitive = binding.binary(alg, one.desc, two.desc, dst.desc, e.attributes)
    b.run(checked(primitive, one.numel), {**e.places, Arg.SRC: one, Arg.SRC_1: two, Arg.DST: dst})
    return dst.like(value.shape, value.strides)


def batch_norm(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    """With running statistics: a factor and a shift for each channel."""
    x, mean, variance, weight, bias, training, _, epsilon = arguments[:8]
    held = (mean, variance, *(w for w in (weight, bias) if w is not None))
    if training or not isinstance(x, Given) or not all(isinstance(w, Weight) for w in held):
        raise Unsupported("its statistics are computed")
    norm = BatchNorm(mean.path, variance.path, weight and weight.path, bias and bias.path, float(epsilon))
    shape = (1, -1, *[1] * (len(x.value.shape) - 2))

    def constant(what: str, number: int) -> Given:
        ones = torch.ones(b.held(norm.mean).shape[0], 1)
        return Given(b.constant((norm, what, shape), lambda: folded(ones, None, b, norm)[number].reshape(shape)))

    added = [*operands, constant("factor", 0), constant("shift", 1)]
    first = [With(Alg.MUL, len(operands)), With(Alg.ADD, len(operands) + 1)]
    return chain(b, Given(as_model_float(b, x)), [*first, *p.steps], added, p.out)


def quantize(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    given, out = arguments[0], p.out
    assert out is not None
    value = given.value
    if given.qparams is None and value.dtype not in FLOATS:
        raise Unsupported(f"it reads {value.dtype}")
    once = without_repeats(value)
    last = p.channels_last and len(once.shape) > 2
    result = b.quantized(once, out, given.qparams, channels_last(once.shape) if last else None)
    if once is value:
        return result
    repeated = zip(result.strides, value.strides, value.shape, strict=True)
    return result.like(value.shape, tuple(0 if s == 0 and n > 1 else r for r, s, n in repeated))


def dequantize(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    return b.as_float(arguments[0].value, arguments[0].qparams)
