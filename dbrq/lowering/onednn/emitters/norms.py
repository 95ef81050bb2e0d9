"""Layer norm and softmax."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import binding
from ..binding import Alg, Arg
from ..builder import Builder, Unsupported
from ..epilogue import Epilogue
from ..partitions import Partition, Weight
from ..values import Value
from .common import as_model_float, checked, dense, laid_out, rows_of


def layer_norm(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, normalized, weight, bias, epsilon = arguments[:5]
    value = as_model_float(b, x)
    normalized = [normalized] if isinstance(normalized, int) else list(normalized)
    count = len(normalized)
    if any(not (w is None or isinstance(w, Weight)) for w in (weight, bias)):
        raise Unsupported("its parameters are computed")
    if count != 1:
        value = laid_out(b, value, binding.row_major(value.shape))
        flat = (*value.shape[:-count], math.prod(normalized))
        value = value.like(flat, binding.row_major(flat))
    if value.shape[-1] != math.prod(normalized):
        raise Unsupported("the shapes do not fit")
    rows, width = rows_of(b, value), value.shape[-1]
    if rows.value.strides[0] != width:  # the kernel takes no notice of gaps
        rows = rows_of(b, b.reordered(value, value.dtype, binding.row_major(value.shape)))
    out = p.out if p.out is not None and (p.out.quant_min, p.out.quant_max) == (0, 255) else None
    e = Epilogue()
    shift: Value | None = None if bias is None else b.attribute(bias.path)
    if out is not None:
        e.scale(Arg.DST, b.numbers(out.scale))
        if out.zero_point:  # the primitive has no zero point for its result: the bias takes it along
            path, moved = None if bias is None else bias.path, out.scale * out.zero_point
            shift = b.constant(("shift", path, moved, width), lambda: (
                torch.zeros(width) if path is None else b.held(path).float()) + moved)  # fmt: skip
    dst = b.new(rows.value.shape, b.dtype if out is None else torch.uint8)
    primitive = binding.layer_norm(rows.value.desc, dst.desc, epsilon, weight is not None, shift is not None,
                                   e.attributes)  # fmt: skip
    places: dict[int, Any] = {**e.places, Arg.SRC: rows.value, Arg.DST: dst}
    for arg, held in ((Arg.SCALE, None if weight is None else b.attribute(weight.path)), (Arg.SHIFT, shift)):
        if held is not None:
            if held.dtype is not torch.float32:
                raise Unsupported("its parameters are not float32")
            places[arg] = held.like((width,), (1,))
    b.run(checked(primitive, dst.numel * 8), places)
    result = dst.like(value.shape, rows.strides(width))
    if count != 1:
        shape = (*value.shape[:-1], *normalized)
        result = result.like(shape, binding.row_major(shape))
    return result


def softmax(b: Builder, p: Partition, arguments: list[Any], operands: list[Any]) -> Value:
    x, dim, dtype = arguments[:3]
    value = dense(b, as_model_float(b, x))
    if dim is None or dtype not in (None, torch.float32) or not value.shape:
        raise Unsupported("its axis is not given, its dtype is another one, or it is one number")
    alg = Alg.SOFTMAX if p.row.name == "softmax" else Alg.LOG_SOFTMAX
    direct = p.out is not None and p.out.zero_point == 0 and p.out.quant_max == 255 and alg is Alg.SOFTMAX
    e = Epilogue()
    if direct:
        assert p.out is not None
        e.scale(Arg.DST, b.numbers(p.out.scale))
    dst = b.new(value.shape, torch.uint8 if direct else b.dtype, value.strides)
    primitive = binding.softmax(alg, value.desc, dst.desc, dim % len(value.shape), e.attributes)
    b.run(checked(primitive, value.numel), {**e.places, Arg.SRC: value, Arg.DST: dst})
    return dst
