"""``profile``: where the time of a lowered model goes, kernel by kernel."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from ..calibration.surgery import random_state_kept
from ..errors import ConfigurationError
from ..lowering.lowered_model import LoweredModel, without_code
from ..lowering.onednn import OneDNNModel
from ..pytree import copied_inputs
from .report import LOWERED_REPORT


@dataclass(frozen=True)
class ProfileRow:
    """One kernel of one call.

    Attributes:
        op: path of the op it belongs to, as in reports; of torchscript models, torch's name of the kernel.
        kernel: what computes: oneDNN's name of the implementation, or torch's of the function.
        computes: in words, what is fused included.
        shape: of its result.
        microseconds: the least of some executions.
        gops: billions of operations a second, two for each multiply-accumulate; None where they do not count.
        share: of the whole, 0 to 1.
    """

    op: str
    kernel: str
    computes: str
    shape: tuple[int, ...]
    microseconds: float
    gops: float | None
    share: float


@dataclass(frozen=True)
class Profile:
    """Kernels in the order in which they run. ``str()`` is a table, with a line for each kind of kernel below."""

    rows: tuple[ProfileRow, ...]

    @property
    def microseconds(self) -> float:
        """Of all kernels together."""
        return sum(row.microseconds for row in self.rows)

    def __str__(self) -> str:
        table = [
            [row.op, row.computes, row.kernel, "x".join(map(str, row.shape)), f"{row.microseconds:.1f}",
             "" if row.gops is None else f"{row.gops:.0f}", f"{row.share:.1%}"]
            for row in self.rows
        ]  # fmt: skip
        head = ["op", "computes", "kernel", "shape", "us", "GOP/s", "share"]
        kinds: dict[str, float] = {}
        for row in self.rows:
            kinds[row.computes] = kinds.get(row.computes, 0.0) + row.share
        summary = [[kind, f"{share:.1%}"] for kind, share in sorted(kinds.items(), key=lambda item: -item[1])]
        return "\n\n".join([tabulate(table, head, disable_numparse=True), tabulate(summary, ["computes", "share"]),
                            f"{self.microseconds:.0f} us in {len(self.rows)} kernels"])  # fmt: skip


def profile(lowered: nn.Module, *inputs: Any, repeats: int = 20, **kwargs: Any) -> Profile:
    """Time per kernel of a lowered model.

    Args:
        lowered: what ``lower`` returned. Of models for the onednn backend each primitive is timed by itself, in the
            order of a call; of others torch's profiler gives the time of each of torch's ops. (Code that Inductor
            generated is none of them.)
        inputs, kwargs: a call's arguments.
        repeats: how often the model runs; the least time of each kernel counts.

    Raises:
        ConfigurationError: ``lowered`` is no lowered model.

    >>> import dbrq
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    >>> lowered = dbrq.lower(dbrq.quantize(model, [torch.randn(8, 64)]), torch.randn(8, 64))
    >>> any("qlinear_pointwise" in row.kernel for row in dbrq.profile(lowered, torch.randn(8, 64)).rows)
    True
    """
    if not isinstance(getattr(lowered, LOWERED_REPORT, None), str):
        raise ConfigurationError("profile takes lowered models", got=type(lowered).__name__, hint="see dbrq.lower")
    inputs, kwargs = copied_inputs((inputs, kwargs))
    with torch.no_grad(), random_state_kept(), _state_kept(lowered):
        if isinstance(lowered, OneDNNModel):
            found = lowered.timed(inputs, kwargs, repeats)
        else:
            found = _torch_times(lowered, inputs, kwargs, repeats)
    total = sum(row[4] for row in found) or 1.0
    return Profile(tuple(
        ProfileRow(op, kernel, computes, shape, us, 2e-3 * macs / us if macs and us else None, us / total)
        for op, kernel, computes, shape, us, macs in found
    ))  # fmt: skip


@contextlib.contextmanager
def _state_kept(lowered: nn.Module) -> Iterator[None]:
    """What calls write to is what it was, afterwards."""
    held = without_code(lowered) if isinstance(lowered, LoweredModel) else lowered
    names = lowered._written if isinstance(lowered, LoweredModel) else dict(lowered.named_buffers())
    kept = {name: operator.attrgetter(name)(held).clone() for name in names}
    try:
        yield
    finally:
        for name, tensor in kept.items():
            operator.attrgetter(name)(held).copy_(tensor)


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
