"""What int8 costs a task: trained models' own metrics, beside SQNR: ``python benchmarks/task_accuracy.py``.

MiniLM retrieves sentences; the others (tests/helpers/trained) are trained here, a minute or two each, once on a
machine. FX graph mode (engine onednn) stands beside. A dash means that it cannot run the model; the reason is printed
below the table.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peers.of_torch import fx_quantized
from peers.worker import call, first
from tabulate import tabulate
from torch import Tensor, nn

import dbrq
from dbrq.inspection.comparing import sqnr

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from tests.helpers.trained import NAMES, Trained, load

#: Keyword arguments of ``dbrq.prepare``, by name.
RECIPES: dict[str, dict[str, Any]] = {"default": {}}
HEAD = ("model", "metric", "float", "recipe", "int8", "change", "SQNR (dB)", "coverage", "FX onednn", "FX SQNR (dB)")


def minilm() -> Trained:
    import minilm

    def retrieval(model: nn.Module) -> float:
        return minilm.evaluate(model, model)["retrieval accuracy"][1]

    batches = minilm.calibration_batches()
    return Trained("minilm", minilm.load_model(), batches, minilm.example_inputs(), "retrieval", retrieval)


def output(model: nn.Module, trained: Trained) -> Tensor:
    return first(call(model, trained.example_inputs))


def by_dbrq(trained: Trained, recipe: dict[str, Any]) -> nn.Module:
    prepared = dbrq.prepare(trained.model, trained.calibration[0], **recipe)
    dbrq.calibrate(prepared, trained.calibration, progress=False)
    return dbrq.convert(prepared)


def by_fx(trained: Trained) -> nn.Module:
    if not isinstance(trained.example_inputs, Tensor):
        raise TypeError("FX tracing takes positional inputs only")
    return fx_quantized(trained.model, trained.calibration)


@torch.no_grad()
def rows(trained: Trained, recipes: list[str], notes: list[str]) -> Iterator[list[str]]:
    expected, before = output(trained.model, trained), trained.evaluate(trained.model)
    try:
        peer = by_fx(trained)
        beside = [_shown(trained, trained.evaluate(peer)), f"{sqnr(expected, output(peer, trained)):.1f}"]
    except Exception as error:
        beside = ["-", "-"]
        notes.append(f"{trained.name}, FX: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    for recipe in recipes:
        quantized = by_dbrq(trained, RECIPES[recipe])
        after = trained.evaluate(quantized)
        near, covered = sqnr(expected, output(quantized, trained)), dbrq.report(quantized).coverage
        ours = [_shown(trained, after), _shown(trained, after - before, "+"), f"{near:.1f}", f"{covered:.1%}"]
        yield [trained.name, trained.metric, _shown(trained, before), recipe, *ours, *beside]


def _shown(trained: Trained, value: float, sign: str = "") -> str:
    """Accuracies in per cent, or points of it where they differ; other metrics in their own unit."""
    return f"{value:{sign}.4f}" if trained.metric == "bits per character" else f"{100 * value:{sign}.2f} %"


def main() -> None:
    names = (*NAMES, "minilm")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=names, help="of " + ", ".join(names) + "; all by default")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--short", action="store_true", help="the short training of the tests")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines: list[list[str]] = []
    notes: list[str] = []
    for name in options.models:
        trained = minilm() if name == "minilm" else load(name, short=options.short)
        lines += rows(trained, options.recipes, notes)
    print(tabulate(lines, HEAD, disable_numparse=True))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
