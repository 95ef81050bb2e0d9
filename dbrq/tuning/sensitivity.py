"""``sensitivity``: what each op costs in accuracy, tried one by one in a simulation of int8."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..accuracy.kept import KeptBatches
from ..accuracy.presets import Preset
from ..accuracy.refining import Ready, ready
from ..accuracy.runs import Looking, Simulation, rounding_of, run_with
from ..calibration.surgery import uncompiled
from ..errors import ConfigurationError
from ..hidden_state import state_of
from ..inspection.comparing import sqnr
from ..inspection.tables import Table
from ..mappings import Role
from ..progress import counted
from ..pytree import copied_inputs, tree_leaves
from ..record.record import SeenOp
from ..workflow import prepared_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SensitivityRow:
    """What one op costs.

    Attributes:
        path: as in reports.
        op: name in the op table.
        only_int8: the loss when nothing but it is int8.
        only_float: the loss when all but it is int8.
        local: SQNR in dB of its output on float inputs: its own error.
        accumulated: SQNR in dB of its output as it runs in int8, with the errors of all before it.
    """

    path: str
    op: str
    only_int8: float
    only_float: float
    local: float
    accumulated: float


@dataclass(frozen=True)
class Sensitivity(Table):
    """Ops sorted by what they cost, worst first. ``str()`` is a table.

    Attributes:
        rows: of all ops that int8 values come to.
        loss: when all of them are int8: with ``evaluate``, by how much the metric is worse than in float; without, the
            error of the outputs relative to their size (root mean square).
        metric: of the float model; None without ``evaluate``.
    """

    rows: tuple[SensitivityRow, ...]
    loss: float
    metric: float | None = None

    def worst(self, count: int = 5) -> list[str]:
        """Paths of the ops that are worst to have in int8, to be excluded: ``Preset(keep=...)`` takes them.

        Ops whose output is no worse than their input makes it are left out: float would not mend them.
        """
        own = [row for row in self.rows if row.only_int8 > 0 or self.loss - row.only_float > 0]
        return [row.path for row in own[:count]]

    def head(self) -> list[str]:
        return ["path", "op", "only it int8", "only it float", "local (dB)", "accumulated (dB)"]

    def cells(self, row: SensitivityRow) -> list[str]:
        losses = (f"{row.only_int8:.4g}", f"{row.only_float:.4g}")
        return [row.path, row.op, *losses, f"{row.local:.1f}", f"{row.accumulated:.1f}"]

    def title(self) -> str:
        what = "relative error of the outputs" if self.metric is None else f"loss of the metric ({self.metric:.6g})"
        return f"{what[0].upper()}{what[1:]}: {self.loss:.4g} with all of these in int8, worst first"

    def __str__(self) -> str:
        return f"{self.title()}\n{self.table()}"

    def plot(self, path: str | None = None) -> Figure:
        """Bars of the losses of the 30 worst ops; saved to ``path`` if that is given.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError(
                "a plot needs matplotlib, which is not installed", expected="the package matplotlib", got=str(error),
                hint="pip install 'dbrq[report]'",
            ) from error  # fmt: skip
        rows = self.rows[:30]
        figure = Figure(figsize=(8, 1 + 0.28 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(rows))
        axes.barh([p - 0.2 for p in places], [row.only_int8 for row in rows], height=0.4, label="only it is int8")
        gains = [self.loss - row.only_float for row in rows]
        axes.barh([p + 0.2 for p in places], gains, height=0.4, label="gained when it alone is float")
        axes.set_yticks(places, labels=[row.path for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("loss of the metric" if self.metric is not None else "relative error of the outputs")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def sensitivity(
    model: nn.Module,
    data: Iterable[Any] = (),
    evaluate: Callable[[nn.Module], float] | None = None,
    *,
    preset: str | Preset | None = None,
    qconfig_mapping: Any = None,
    exclude: Any = (),
    unpack: Callable[[Any], Any] | None = None,
    max_batches: int | None = None,
    higher_is_better: bool = True,
    progress: bool | None = None,
) -> Sensitivity:
    """What each op costs in accuracy: the loss when only it is int8, and when only it is float.

    int8 is simulated in float, so nothing is converted for each trial; what the simulation gives and what int8 kernels
    give agree to a quantization step in each op. Recurrent layers, whose steps are not simulated, stay in float.

    Args:
        model: a float model; or a prepared and calibrated one, for which ``data`` is not needed.
        data: calibration data, as ``calibrate`` takes it.
        evaluate: gives the metric of a model that is called as ``model`` is. None: the error of the outputs for a
            sample of the calibration data.
        preset: as ``prepare`` takes it.
        qconfig_mapping: as ``prepare`` takes it.
        exclude: as ``prepare`` takes it.
        unpack: as ``calibrate`` takes it.
        max_batches: as ``calibrate`` takes it.
        progress: as ``calibrate`` takes it.
        higher_is_better: whether a higher metric is; False for errors and perplexities.

    Returns:
        Rows sorted by what ops cost. ``local`` beside ``accumulated`` tells a bad op from one that inherits errors.

    Raises:
        ConfigurationError, NotCalibratedError: as ``prepare`` and ``convert`` raise them.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = sensitivity(model, [torch.randn(4, 8)])
    >>> sorted(row.path for row in found.rows), found.rows[0].only_int8 > 0
    (['0', '2'], True)
    """
    prepared = calibrated(model, data, preset, qconfig_mapping, exclude, unpack, max_batches, progress)
    trials = Trials(ready(prepared), evaluate, higher_is_better)
    return trials.sensitivity(progress)


def calibrated(
    model: nn.Module, data: Iterable[Any], preset: Any, qconfig_mapping: Any, exclude: Any,
    unpack: Callable[[Any], Any] | None, max_batches: int | None, progress: bool | None,
) -> nn.Module:  # fmt: skip
    """``model``, prepared and calibrated on ``data`` if it is not yet, with a sample of the data."""
    model = uncompiled(model)
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is not None and state.token.phase == "observe":
        if state.token.kept is None or not state.token.kept.batches:
            raise ConfigurationError(
                "the prepared model has kept no sample of its calibration data", got="a preset that needs none",
                hint="pass the float model and the data, or prepare it with preset='default' or another that needs "
                "data",
            )  # fmt: skip
        return model
    return prepared_on(
        model, data, qconfig_mapping, unpack=unpack, max_batches=max_batches, progress=progress, preset=preset,
        exclude=exclude, keep_data=True,
    )  # fmt: skip


def is_tried(op: SeenOp) -> bool:
    """Whether an op rounds anything: it reads values as int8, or has an int8 weight."""
    decision = op.decision
    if decision.precision != "int8" or op.row.role is Role.RECURRENT:
        return False
    return bool(decision.reads) or (op.weight is not None and decision.member_of is None)


class Trials:
    """Simulated runs of one model with some of its ops in int8.

    Attributes:
        ops: those that may be, by path.
        float_metric: of the model in float; None without ``evaluate``.
    """

    def __init__(
        self, prepared: Ready, evaluate: Callable[[nn.Module], float] | None, higher_is_better: bool = True
    ) -> None:
        self.prepared, self.evaluate, self.sign = prepared, evaluate, 1.0 if higher_is_better else -1.0
        self.token = prepared.token
        self.rounding = rounding_of(self.token, prepared.refined.qparams, prepared.refined.weights)
        self.kept: KeptBatches = self.token.kept
        self.ops: dict[str, SeenOp] = {op.path: op for op in self.token.record.hooked() if is_tried(op)}
        self.outputs: list[list[Tensor]] = []
        self.float_metric: float | None = None
        if evaluate is None:
            self.outputs = [_tensors(self._run(batch, None)) for batch in self.kept.batches]
        else:
            self.float_metric = self.metric_of_float(evaluate)

    def _run(self, batch: Any, chosen: Callable[[SeenOp], bool] | None) -> Any:
        looking = Looking(self.token) if chosen is None else Simulation(self.token, self.rounding, chosen)
        return run_with(self.prepared.root, self.token, looking, batch)

    def metric_of_float(self, evaluate: Callable[[nn.Module], float]) -> float:
        """What ``evaluate`` gives while nothing is int8."""
        return self._metric(lambda op: False, evaluate)

    def _metric(self, chosen: Callable[[SeenOp], bool], evaluate: Callable[[nn.Module], float]) -> float:
        self.token.simulate = lambda: Simulation(self.token, self.rounding, chosen)
        try:
            return float(evaluate(self.prepared.model))
        finally:
            self.token.simulate = None

    def loss(self, chosen: Callable[[SeenOp], bool]) -> float:
        """By how much the model is worse than in float, with the ``chosen`` ones of its ops in int8."""
        if self.evaluate is not None and self.float_metric is not None:
            return self.sign * (self.float_metric - self._metric(chosen, self.evaluate))
        noise = signal = 0.0
        for batch, expected in zip(self.kept.batches, self.outputs, strict=True):
            for before, now in zip(expected, _tensors(self._run(batch, chosen)), strict=True):
                noise += float((before - now).double().square().sum())
                signal += float(before.double().square().sum())
        return math.sqrt(noise / signal) if signal else 0.0

    def sqnr_of(self, model: nn.Module) -> float:
        """SQNR in dB of what ``model``, whatever it is made of, gives for the kept batches."""
        found: list[Tensor] = []
        with torch.no_grad():
            for args, kwargs in self.kept.batches:
                args, kwargs = copied_inputs((args, kwargs))
                found += _tensors(model(*args, **kwargs))
        return sqnr(_flat([t for its in self.outputs for t in its]), _flat(found))

    def sensitivity(self, progress: bool | None = None) -> Sensitivity:
        """Of each op: two trials, and its errors in a run."""
        paths = list(self.ops)
        local, accumulated = self._errors()
        whole = self.loss(lambda op: True)
        rows = []
        for path in counted(paths, "sensitivity", progress):
            only_int8 = self.loss(lambda op, path=path: op.path == path)  # type: ignore[misc]  # a default binds it
            only_float = self.loss(lambda op, path=path: op.path != path)  # type: ignore[misc]  # a default binds it
            errors = (local.get(path, math.inf), accumulated.get(path, math.inf))
            rows.append(SensitivityRow(path, self.ops[path].op, only_int8, only_float, *errors))
        rows.sort(key=lambda row: (-(row.only_int8 + whole - row.only_float), row.local))
        return Sensitivity(tuple(rows), whole, self.float_metric)

    def _errors(self) -> tuple[dict[str, float], dict[str, float]]:
        """SQNR of each op's output, on float inputs and as it runs, over the first kept batch."""
        batch = self.kept.batches[0]
        local = _Local(self.token, self.rounding)
        run_with(self.prepared.root, self.token, local, batch)
        running = _Outputs(self.token, self.rounding)
        run_with(self.prepared.root, self.token, running, batch)
        accumulated = {
            path: sqnr(_flat(expected), _flat(running.found[path]))
            for path, expected in local.expected.items()
            if [t.shape for t in expected] == [t.shape for t in running.found.get(path, [])]
        }
        own = {path: sqnr(_flat(local.expected[path]), _flat(values)) for path, values in local.found.items()}
        return own, accumulated

    def times(self, repeats: int = 3) -> dict[str, float]:
        """Path of each op -> seconds that it takes in float, the least of some runs."""
        best: dict[str, float] = {}
        for _ in range(repeats):
            timing = _Timing(self.token)
            run_with(self.prepared.root, self.token, timing, self.kept.batches[0])
            best = {path: min(taken, best.get(path, math.inf)) for path, taken in timing.taken.items()}
        return best


class _Local(Simulation):
    """Computes each op in float and, on the same inputs, rounded; the run goes on with the float result."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected: dict[str, list[Tensor]] = defaultdict(list)
        self.found: dict[str, list[Tensor]] = defaultdict(list)

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        rounded = None if inplace or not is_tried(op) else super().run(op, edges, bound, lambda: None, inplace)
        output = original()
        if isinstance(rounded, Tensor) and isinstance(output, Tensor):
            self.expected[op.path].append(output.detach().to(torch.float32).clone())
            self.found[op.path].append(rounded.detach().to(torch.float32))
        return output


class _Outputs(Simulation):
    """Notes what ops give in the simulation of int8."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: dict[str, list[Tensor]] = defaultdict(list)

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        output = super().run(op, edges, bound, original, inplace)
        if isinstance(output, Tensor) and is_tried(op) and not inplace:
            self.found[op.path].append(output.detach().to(torch.float32).clone())
        return output


class _Timing(Looking):
    def __init__(self, token: Any) -> None:
        super().__init__(token)
        self.taken: dict[str, float] = defaultdict(float)

    def run(
        self, op: SeenOp, edges: Sequence[tuple[int, int, Tensor]], bound: list[Any], original: Callable, inplace: bool
    ) -> Any:
        start = time.perf_counter()
        output = original()
        self.taken[op.path] += time.perf_counter() - start
        return output


def _tensors(output: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.detach().to(torch.float32).clone() for leaf in found]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
