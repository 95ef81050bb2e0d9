"""``tune``: from the fastest settings to those that keep the user's metric, in few evaluations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..accuracy.presets import PRESETS, Preset
from ..accuracy.refining import ready
from ..errors import ConfigurationError
from ..inspection.tables import Table
from ..progress import Stages
from ..serialization.files import replacing
from ..serialization.recipes import save_recipe
from ..workflow import finished
from .sensitivity import Trials, calibrated

#: What is tried before ops go back to float, from the cheapest to the most thorough.
_LADDER = (
    "fast", Preset(bias_correction="fast"), "transformer", Preset(smoothing=True, bias_correction="full"), "accurate",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One converted model that was evaluated.

    Attributes:
        preset: what made it, in words.
        metric: what ``evaluate`` gave; without it, SQNR of the outputs in dB.
        drop: by how much that is worse than float.
        floats: paths of the ops that were kept in float for accuracy.
        slowdown: the share of the model's time in float that these ops take, which int8 does not make shorter.
    """

    preset: str
    metric: float
    drop: float
    floats: tuple[str, ...]
    slowdown: float


@dataclass
class TuneResult(Table):
    """What ``tune`` found. ``str()`` is a table of its trials.

    Attributes:
        model: the converted model.
        metric: what ``evaluate`` gives for it; without it, SQNR of the outputs in dB.
        float_metric: of the float model; inf without ``evaluate``.
        preset: the ``Preset`` that made it, the ops that stay in float among it.
        trials: all that were evaluated, in order.
        reached: whether the drop is within what was asked for; if not, ``model`` is the best that was found.

    >>> import torch
    >>> result = tune(nn.Sequential(nn.Linear(8, 2)), [torch.randn(64, 8)], max_drop=20)
    >>> result.trials[0].floats, result.preset.keep
    ((), ())
    """

    model: nn.Module
    metric: float
    float_metric: float
    preset: Preset
    trials: tuple[Trial, ...]
    reached: bool

    @property
    def rows(self) -> tuple[Trial, ...]:  # type: ignore[override]  # a property serves where an attribute is read
        return self.trials

    def save_recipe(self, path: str | os.PathLike) -> None:
        """Write the decisions, ranges and what else was found as JSON, which ``dbrq.load_recipe`` takes."""
        save_recipe(self.model, path)

    def head(self) -> list[str]:
        return ["preset", "metric", "drop", "ops in float", "their share of float time"]

    def cells(self, row: Trial) -> list[str]:
        return [row.preset, f"{row.metric:.6g}", f"{row.drop:.4g}", str(len(row.floats)), f"{row.slowdown:.1%}"]

    def title(self) -> str:
        reached = "reached" if self.reached else "not reached; the best found"
        return f"tune: metric {self.metric:.6g} (float {self.float_metric:.6g}), {reached}"

    def __str__(self) -> str:
        return f"{self.title()}\n{self.table()}"


def tune(
    model: nn.Module,
    data: Iterable[Any],
    evaluate: Callable[[nn.Module], float] | None = None,
    *,
    max_drop: float,
    budget: int | None = None,
    qconfig_mapping: Any = None,
    exclude: Any = (),
    unpack: Callable[[Any], Any] | None = None,
    max_batches: int | None = None,
    higher_is_better: bool = True,
    resume: str | os.PathLike | None = None,
    progress: bool | None = None,
) -> TuneResult:
    """The fastest int8 model whose metric is within ``max_drop`` of float's.

    The model is calibrated once. Presets are tried from "fast" to "accurate", until one is good enough; if none is,
    ops of the best go back to float, those first that gain most for the time that they lose (times are measured, what
    they gain is simulated), as many as it takes, found by halving.

    Args:
        model: a float model. It is not changed.
        data: calibration data, as ``calibrate`` takes it.
        evaluate: gives the metric of a model that is called as ``model`` is. None: SQNR in dB of the outputs for a
            sample of the calibration data.
        max_drop: by how much the metric may be worse than float's; without ``evaluate``, how many dB below 40 the SQNR
            may be.
        budget: how often a converted model may be evaluated at most.
        qconfig_mapping: as ``prepare`` takes it.
        exclude: as ``prepare`` takes it.
        unpack: as ``calibrate`` takes it.
        max_batches: as ``calibrate`` takes it.
        progress: as ``calibrate`` takes it.
        higher_is_better: whether a higher metric is; False for errors and perplexities.
        resume: a file that trials are written to; those that it holds are not run again.

    Returns:
        A result whose ``model`` is converted.

    Raises:
        ConfigurationError: ``max_drop`` is negative, ``budget`` not positive, or the file is of other trials.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> result = tune(model, [torch.randn(64, 8)], max_drop=20)
    >>> result.reached, result.trials[0].preset
    (True, 'fast')
    """
    if not max_drop >= 0:
        raise ConfigurationError("max_drop is by how much the metric may fall", expected="0 or more", got=max_drop)
    if budget is not None and budget < 1:
        raise ConfigurationError("a budget is a number of evaluations", expected="1 or more", got=budget)
    prepared = calibrated(model, data, "fast", qconfig_mapping, exclude, unpack, max_batches, progress)
    with Stages("tuning", progress) as stages:
        search = _Search(prepared, evaluate, max_drop, budget, 1.0 if higher_is_better else -1.0, resume, stages)
        return search.run()


#: Without a metric, SQNR above this counts as no loss.
_ENOUGH_DB = 40.0


class _Search:
    def __init__(
        self, prepared: nn.Module, evaluate: Callable[[nn.Module], float] | None, max_drop: float, budget: int | None,
        sign: float, resume: str | os.PathLike | None, stages: Stages,
    ) -> None:  # fmt: skip
        self.prepared, self.evaluate, self.max_drop, self.sign, self.stages = prepared, evaluate, max_drop, sign, stages
        self.left = math.inf if budget is None else budget
        self.log = _Log(resume)
        self.trials: list[Trial] = []
        self.best: tuple[Trial, nn.Module | None, Preset] | None = None
        stages.at("the float model")
        self.simulated = Trials(ready(prepared), None)
        if evaluate is None:
            self.float_metric = math.inf
        else:
            self.float_metric = self.log.kept("float", lambda: self.simulated.metric_of_float(evaluate))
        self.times = self.simulated.times()
        self.whole_time = sum(self.times.values()) or 1.0

    def run(self) -> TuneResult:
        for preset in _LADDER:
            if self._enough() or not self.left:
                break
            self._try(preset if isinstance(preset, str) else _words(preset), _as_preset(preset))
        if not self._enough() and self.left:
            self._return_to_float()
        assert self.best is not None
        trial, model, preset = self.best
        if model is None:  # its trial was read from the file
            model = self._converted(preset)
        return TuneResult(model, trial.metric, self.float_metric, preset, tuple(self.trials), self._enough())

    def _enough(self) -> bool:
        return self.best is not None and self.best[0].drop <= self.max_drop

    def _return_to_float(self) -> None:
        """Give ops back to float in the order that pays most, as many as it takes."""
        assert self.best is not None
        base, name = self.best[2], self.best[0].preset
        self.stages.at("what each op costs")
        order = self.log.kept(f"{name}: order", lambda: self._order(base))

        def keeps(count: int) -> bool:
            return self._try(name, dataclasses.replace(base, keep=(*base.keep, *map(_escaped, order[:count]))))

        low, high = 0, max(1, len(order) // 16)  # ``low`` ops are too few
        while self.left and order and not keeps(high):
            if high == len(order):
                return
            low, high = high, min(2 * high, len(order))
        while self.left and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(middle) else (middle, high)

    def _order(self, preset: Preset) -> list[str]:
        """Paths of ops, those first whose return to float gains most for each second that it costs."""
        found = Trials(ready(self.prepared, preset=preset), None).sensitivity(False)
        floor = self.whole_time / 1000
        gains = {
            row.path: max(found.loss**2 - row.only_float**2, 0.0) + row.only_int8**2 for row in found.rows
        }  # squared errors add up
        return sorted(gains, key=lambda path: -gains[path] / max(self.times.get(path, 0.0), floor))

    def _try(self, name: str, preset: Preset) -> bool:
        """Whether a preset keeps the metric."""
        self.stages.at(f"{name}, {len(preset.keep)} ops in float" if preset.keep else name)
        model: nn.Module | None = None

        def measured() -> float:
            nonlocal model
            model = self._converted(preset)
            self.left -= 1
            return float(self.evaluate(model)) if self.evaluate is not None else self.simulated.sqnr_of(model)

        metric = self.log.kept(f"{name} {sorted(preset.keep)}", measured)
        drop = self.sign * (self.float_metric - metric) if self.evaluate is not None else max(_ENOUGH_DB - metric, 0.0)
        floats = tuple(op.path for op in self._kept_ops(preset))
        slowdown = sum(self.times.get(path, 0.0) for path in floats) / self.whole_time
        trial = Trial(name, metric, drop, floats, slowdown)
        self.trials.append(trial)
        if self.best is None or self._rank(trial) < self._rank(self.best[0]):
            self.best = trial, model, preset
        return drop <= self.max_drop

    def _rank(self, trial: Trial) -> tuple[bool, float]:
        """Less is better: of those that are good enough the fastest, else the nearest."""
        enough = trial.drop <= self.max_drop
        return not enough, trial.slowdown if enough else trial.drop

    def _kept_ops(self, preset: Preset) -> list[Any]:
        kept = preset.floats(self.simulated.token.record)
        return [op for op in self.simulated.token.record.hooked() if op.path in kept]

    def _converted(self, preset: Preset) -> nn.Module:
        return finished(ready(self.prepared, preset=preset))


class _Log:
    """What was found, in a file if there is one."""

    def __init__(self, path: str | os.PathLike | None) -> None:
        self.path = path
        self.known: dict[str, Any] = _read(path) if path is not None and os.path.exists(path) else {}

    def kept(self, name: str, find: Callable[[], Any]) -> Any:
        """What was found under ``name``, or what ``find`` finds."""
        if name not in self.known:
            self.known[name] = find()
            if self.path is not None:
                with replacing(self.path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
                    json.dump({"dbrq trials": 1, "found": self.known}, file, indent=1)
        return self.known[name]


def _read(path: str | os.PathLike) -> dict[str, Any]:
    content: Any = None
    with contextlib.suppress(ValueError), open(path, encoding="utf-8") as file:
        content = json.load(file)
    found = content.get("found") if isinstance(content, Mapping) and content.get("dbrq trials") == 1 else None
    if not isinstance(found, dict) or not all(isinstance(value, (float, int, list)) for value in found.values()):
        raise ConfigurationError(
            "the file to resume from holds no trials of tune", expected="what tune(..., resume=path) wrote",
            got=str(path), hint="remove it, or name another file",
        )  # fmt: skip
    return found


def _as_preset(preset: str | Preset) -> Preset:
    return PRESETS[preset] if isinstance(preset, str) else preset


def _words(preset: Preset) -> str:
    return ", ".join(name if (value := getattr(preset, name)) is True else f"{name}={value}" for name in preset.methods)


def _escaped(path: str) -> str:
    """A pattern that matches ``path`` only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)
