"""``profile``: where the time of a lowered or converted model goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..calibration.surgery import random_state_kept, uncompiled
from ..errors import ConfigurationError
from ..hidden_state import lowered_of, state_of
from ..lowering.lowered_model import LoweredModel
from ..lowering.onednn import OneDNNModel
from ..pytree import copied_inputs
from .rows import lowered_report
from .stopwatch import profile_converted
from .timing import Profile, profile_of


def profile(model: nn.Module, *inputs: Any, repeats: int = 20, **kwargs: Any) -> Profile:
    """Time per kernel of a lowered model, or per op of a converted one, and why that is slow.

    Args:
        model: what ``lower`` or ``convert`` returned. Of models for the onednn backend each primitive is timed by
            itself, in the order of a call; of others torch's profiler gives the time of each of torch's ops. (Code that
            Inductor generated is none of them.) Of a converted model each op is timed, with what it takes to turn
            floats into integers and back; the rest of a call is Python. (Fused ops count where the fusion begins; a
            dynamic layer's quantizing is part of its kernel.)
        inputs: a call's arguments.
        repeats: how often the model runs; the least time of each kernel counts, or of converted models the fastest
            call.
        kwargs: keyword arguments of the call.

    Raises:
        ConfigurationError: ``model`` is neither, or ``repeats`` is less than 1.

    >>> import dbrq
    >>> model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU()), torch.randn(8, 64)
    >>> quantized = dbrq.quantize(model, [x])
    >>> any("qlinear_pointwise" in row.kernel for row in dbrq.profile(dbrq.lower(quantized, x), x).rows)
    True
    >>> any("dbrq.lower" in sentence for sentence in dbrq.profile(quantized, x).why)
    True
    """
    model = uncompiled(model)
    lowered = lowered_report(model) is not None
    state = state_of(model) if isinstance(model, nn.Module) else None
    if not lowered and (state is None or state.token.phase != "int8"):
        raise ConfigurationError(
            "profile takes converted and lowered models", got=type(model).__name__, hint="see dbrq.convert, dbrq.lower"
        )
    if repeats < 1:
        raise ConfigurationError("a profile takes calls", expected="repeats of 1 or more", got=repeats)
    inputs, kwargs = copied_inputs((inputs, kwargs))
    with torch.no_grad(), random_state_kept():
        if not lowered:
            return profile_converted(model, inputs, kwargs, repeats)
        with _state_kept(model):
            runs = lowered_of(model)
            graph, inputs, kwargs = (model, inputs, kwargs) if runs is None else runs.graph_of(model, inputs, kwargs)
            if isinstance(graph, OneDNNModel):
                return profile_of(graph.timed(inputs, kwargs, repeats))
            return profile_of(_torch_times(model, inputs, kwargs, repeats))


@contextlib.contextmanager
def _state_kept(lowered: nn.Module) -> Iterator[None]:
    """What calls write to is what it was, afterwards."""
    runs = lowered_of(lowered)
    graphs = [lowered] if isinstance(lowered, LoweredModel) else [] if runs is None else runs.models
    states = [graph.state() for graph in graphs] or [dict(lowered.named_buffers())]  # TorchScript's hold nothing else
    kept = [(tensor, tensor.clone()) for state in states for tensor in state.values()]
    try:
        yield
    finally:
        for tensor, before in kept:
            tensor.copy_(before)


def _torch_times(model: nn.Module, inputs: tuple, kwargs: dict, repeats: int) -> list[tuple]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for _ in range(3):
        model(*inputs, **kwargs)
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            model(*inputs, **kwargs)
    rows = [
        (event.key, event.key, event.key, (), event.self_cpu_time_total / repeats, 0)
        for event in profiler.key_averages()
        if "::" in event.key
    ]
    return sorted(rows, key=lambda row: -row[4])
