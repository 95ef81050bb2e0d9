"""Runs of models that decide, the cases they make, and data and layers for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

D = 16


@dataclass(frozen=True, eq=False)
class Run:
    """One call: positional arguments, and what is set on the model before it."""

    args: tuple
    attributes: dict[str, Any] = field(default_factory=dict)


def run(*args: Any, **attributes: Any) -> Run:
    return Run(args, attributes)


@dataclass(frozen=True, eq=False)
class Off:
    """A run that leaves the recorded paths.

    Attributes:
        run: the call.
        warns: (module path, op) of every warning, with op "" for a leaf module; None: any, each once.
        may: what may warn as well: new ops that have no int8 kernel of their own, skipped producers.
    """

    run: Run
    warns: tuple[tuple[str, str], ...] | None
    may: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its runs.

    Attributes:
        make: makes the model.
        recorded: what calibration sees; the first one is the example of ``prepare``.
        served: other trip counts of recorded loops: int8 all the same, without a warning.
        off: runs that leave the recorded paths.
        paths: how many paths the root has after calibration, where that is beyond doubt.
    """

    make: Callable[[], nn.Module]
    recorded: Sequence[Run]
    served: Sequence[Run] = ()
    off: Sequence[Off] = ()
    paths: int | None = None


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (8, D)), generator=torch.Generator().manual_seed(seed))


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(D, D) for _ in range(count)]


def even(layers: list[nn.Linear]) -> list[nn.Linear]:
    """Layers that with a relu keep the range of their input, for use in any order."""
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layers


class Named(nn.Module):
    """Linear layers of D features under the names given, for models that need nothing else."""

    names = "a b c out"

    def __init__(self) -> None:
        super().__init__()
        for name in self.names.split():
            self.add_module(name, nn.Linear(D, D))
