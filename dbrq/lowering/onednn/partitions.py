"""Partitions: ops of the Q/DQ graph that one primitive computes, as data.

A partition is a head (a convolution, a matmul, a pool, an addition ...), what follows it element by element, and how
its result is quantized. It keeps the nodes it stands for: where no primitive fits a call's shapes, torch runs them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...kernels import QParams
from ...mappings import OpRow
from .binding import Alg


@dataclass(frozen=True)
class Function:
    """A function of one value, as oneDNN parametrizes it."""

    alg: Alg
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class With:
    """An operation with another tensor: input number ``operand`` of the partition."""

    alg: Alg
    operand: int


Step = Function | With


@dataclass(frozen=True)
class Operand:
    """Stands for input number ``index`` among a head's arguments.

    Attributes:
        qparams: set where the input is uint8, and what it means.
    """

    index: int
    qparams: QParams | None = None


@dataclass(frozen=True)
class Weight:
    """A parameter among a head's arguments: paths of its tensors.

    Attributes:
        path: float, or int8 with float32 ``scale`` per output channel.
    """

    path: str
    scale: str | None = None


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm that folds into a float convolution: paths of its tensors, None where it has none."""

    mean: str
    variance: str
    weight: str | None
    bias: str | None
    epsilon: float


@dataclass(frozen=True)
class Partition:
    """One fused op.

    Attributes:
        name: unique in the graph.
        op: path of the head's op in reports.
        row: the head.
        arguments: the head's arguments in the row's order; tensors are ``Operand`` or ``Weight``, and so are sizes that
            the graph computes.
        operands: one for each input of the partition's node.
        steps: what follows the head.
        out: qparams of the uint8 result; None for a float one.
        norm: the batch norm that folds into a float convolution.
        reference: the graph's own nodes, with placeholders for the inputs: what torch runs where no primitive fits.
        channels_last: the layout in which the result is read.
    """

    name: str
    op: str | None
    row: OpRow
    arguments: tuple[Any, ...]
    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    out: QParams | None
    reference: fx.Graph
    norm: BatchNorm | None = None
    channels_last: bool = False

    def in_float(self) -> Partition:
        """The same, its result not quantized."""
        return dataclasses.replace(self, out=None)

    @property
    def words(self) -> str:
        """What it computes, for people."""
        names = [self.row.name, *(_word(step) for step in self.steps)]
        if self.norm is not None:
            names.insert(1, "batch_norm")
        if self.row.name == "elementwise":
            names = names[1:]
        if self.out is not None and self.row.name != "quantize":
            names.append("quantize")
        return " + ".join(names)


def _word(step: Step) -> str:
    return step.alg.name.lower() if isinstance(step, With) else _FUNCTIONS.get(step.alg, step.alg.name.lower())


_FUNCTIONS = {Alg.LOGISTIC: "sigmoid", Alg.SWISH: "silu", Alg.GELU_ERF: "gelu", Alg.CLIP: "clamp", Alg.LINEAR: "scale"}
