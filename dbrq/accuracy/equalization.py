"""Equalization of channels between two layers: equal ranges, so that one scale serves them all.

Where only what multiplies lies between two layers (relu, leaky relu, max pooling, and moving elements about), a factor
for each channel can be taken from the second's weight and given to the first's (Nagel et al., Data-Free Quantization,
2019). The first layer's rows have scales of their own, so it loses nothing; a depthwise second layer has so too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibration.observers import HistogramObserver
from ..calibration.session import qparams_of
from ..mappings import Role
from ..record.parameters import ParameterRef, source_of
from ..record.record import SeenOp
from .layers import Layers, ends

#: Ops between the layers whose result for a positive multiple is that multiple of their result.
_MULTIPLYING = {"relu", "leaky_relu", "max_pool1d", "max_pool2d", "max_pool3d", "dropout"}
#: The factor of a channel is at most this, or its inverse.
_MOST = 16.0


def equalize(layers: Layers) -> None:
    """Equalize channels wherever two layers allow; weights, biases and batch norms of the model change."""
    touched: set[tuple[str, str]] = set()
    for op in layers.ops:
        pair = _producer_of(layers, op)
        if pair is None:
            continue
        producer, scaled = pair
        keys = {ref.key for ref in scaled} | {op.weight.key if op.weight else ("", "")}
        sample = layers.sample(op)
        if touched & keys or sample is None or len(layers.keys(op)) != 1:
            continue
        key, inputs = sample
        factors = _factors(layers, op, torch.cat([_channels(op, part) for part in inputs.parts]))
        if factors is None or len(factors) != (producer.weight.shape[0] if producer.weight else 0):
            continue
        touched |= keys
        _apply(layers, op, scaled, factors)
        _measure(layers, op, key, factors)


def _producer_of(layers: Layers, op: SeenOp) -> tuple[SeenOp, list[ParameterRef]] | None:
    """The layer before ``op``, if all between only multiplies, and what of it a factor of its output goes to."""
    record = layers.token.record
    if not layers.is_free(op) or len(op.activations) != 1:
        return None
    value = record.values[op.activations[0][1]]
    norm: SeenOp | None = None
    while True:
        producer = value.producer
        if producer is None or len(value.readers) != 1 or value.is_output or value.is_exposed or value.is_input:
            return None
        if producer in layers.ops:
            break
        moved = producer.row.role is Role.PASS and producer.row.name == "dropout"
        if producer.row.role is Role.NORM and norm is None and producer.norm:
            norm = producer
        elif not (moved or (producer.row.name in _MULTIPLYING and norm is None)):
            return None
        if not producer.inputs:
            return None
        value = record.values[producer.inputs[0].id]
    assert producer.weight is not None
    chain = producer.decision.chain
    if norm is not None:
        folds = bool(chain) and chain[0].op.role is Role.NORM and chain[0].value == norm.result.id
        refs = norm.norm[2:4]
        if not folds or any(ref is None or not ref.whole for ref in refs):
            return None
        return producer, [ref for ref in refs if ref is not None]
    biases = [] if producer.bias is None else [producer.bias]
    if not layers.is_free(producer) or producer.bias_computed or not all(bias.whole for bias in biases):
        return None
    return producer, [producer.weight, *biases]


def _channels(op: SeenOp, x: Tensor) -> Tensor:
    """``[n, in]``: the width of each channel in each part."""
    return x if not op.row.ndim else x.abs().flatten(2).amax(2)


def _factors(layers: Layers, op: SeenOp, x: Tensor) -> Tensor | None:
    """What each channel of the value is multiplied by."""
    wide = x.abs().amax(0)
    if not bool(wide.amax() > 0):
        return None
    wide = wide.clamp(min=wide.amax() * 1e-3)
    weight = layers.weight(op)
    grouped = op.row.ndim and op.constants[6] != 1
    if grouped and weight.shape[1] != 1:
        return None
    if grouped:  # depthwise: its rows have scales of their own, whatever the factor
        factors = wide.amax() / wide
    else:
        taken = weight.abs().transpose(0, 1).flatten(1).amax(1).clamp(min=1e-8)
        factors = (taken / wide).sqrt()
        factors = factors / factors.log().mean().exp()
    return factors.clamp(1 / _MOST, _MOST)


def _apply(layers: Layers, op: SeenOp, scaled: list[ParameterRef], factors: Tensor) -> None:
    for ref in scaled:
        registered, name = source_of(ref, layers.modules)
        layers.changed.add(ref.key)
        registered[name].data.mul_(factors.reshape(-1, *[1] * (registered[name].dim() - 1)))
    assert op.weight is not None
    layers.changed.add(op.weight.key)
    registered, name = source_of(op.weight, layers.modules)
    weight = registered[name].data
    depthwise = op.row.ndim and op.constants[6] != 1
    if depthwise:
        per_channel = factors.repeat_interleave(len(weight) // len(factors))
        weight.div_(per_channel.reshape(-1, *[1] * (weight.dim() - 1)))
    else:
        weight.div_(factors.reshape(1, -1, *[1] * (weight.dim() - 2)))


def _measure(layers: Layers, op: SeenOp, key: int, factors: Tensor) -> None:
    """The range of a value whose channels have been multiplied."""
    inputs, before = layers.inputs[key], layers.qparams[key]
    observer = HistogramObserver(quant_min=before.quant_min, quant_max=before.quant_max)
    shape = [1, -1, *[1] * op.row.ndim] if op.row.ndim else [-1]
    inputs.parts = [part * factors.reshape(shape) for part in inputs.parts]
    for part in inputs.parts:
        observer(part)
    if inputs.is_rows:
        low, high = inputs.ends()
        inputs.low, inputs.high = low * factors, high * factors
    found = qparams_of(observer, op)
    layers.qparams[key] = found if ends(found)[1] > ends(found)[0] else before
