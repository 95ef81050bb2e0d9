"""What self-checks cost: ``python benchmarks/self_check.py``.

``convert`` of a ResNet-50 (which tries the kernels for the shapes that calibration saw), its first eager call, that
with another batch, and ``lower`` to torchscript and to onednn, each in a fresh process with ``DBRQ_SELF_CHECK`` 1 and 0
in turn; seconds. What comes before a step ran with the same switch. Trials of kernels are timed apart: the rest of what
checks cost is the comparison of the lowered model with the converted one, which runs the plans that the first call
would have made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable

import models  # noqa: F401  (makes torchvision importable)
import torch
import torchvision
from tabulate import tabulate

import dbrq
from dbrq import selfcheck

STEPS = ("convert", "first eager call", "first eager call, batch of 2", "lower, torchscript", "lower, onednn")


def seconds(step: str) -> tuple[float, float]:
    """One measurement, in this process: of the step, and of the trials of kernels in it."""
    torch.manual_seed(0)
    model, x = torchvision.models.resnet50().eval(), torch.randn(1, 3, 224, 224)
    prepared = dbrq.prepare(model, x)
    dbrq.calibrate(prepared, [x], progress=False)
    trials = timed_trials()
    start = time.perf_counter()
    quantized = dbrq.convert(prepared)
    if step != STEPS[0]:
        trials.clear()
        start = time.perf_counter()
        if step.startswith("first"):
            with torch.no_grad():
                quantized(x if step == STEPS[1] else torch.cat([x, x]))
        else:
            dbrq.lower(quantized, x, backend=step.rpartition(" ")[2])
    return time.perf_counter() - start, sum(trials)


def timed_trials() -> list[float]:
    """Takes the time of each trial from now on."""
    taken: list[float] = []
    problem_of = selfcheck.problem_of

    def timed(key: Hashable, trial: Callable[[], str]) -> str:
        def run() -> str:
            start, inner = time.perf_counter(), len(taken)
            problem = trial()
            spent = time.perf_counter() - start - sum(taken[inner:])  # a trial may need kernels that are tried too
            taken.append(spent)
            return problem

        return problem_of(key, run)

    selfcheck.problem_of = timed
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        print(*seconds(options.step))
        return
    table = []
    for step in STEPS:
        taken: dict[str, list[float]] = {"1": [], "0": []}
        trials: list[float] = []
        for _ in range(options.rounds):
            for switch, times in taken.items():
                environment = {**os.environ, "DBRQ_SELF_CHECK": switch}
                command = [sys.executable, "-W", "ignore", __file__, "--step", step]
                run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                total, in_trials = map(float, run.stdout.split()[-2:])
                times.append(total)
                if switch == "1":
                    trials.append(in_trials)
        cells = [f"{statistics.median(t):.3f} ({min(t):.3f} to {max(t):.3f})" for t in (*taken.values(), trials)]
        without = statistics.median(taken["0"])
        cells += [f"{statistics.median(t) / without:.1%}" for t in (trials, [t - without for t in taken["1"]])]
        table.append([step, *cells])
    headers = ["step", "with checks: median (range)", "without", "in trials of kernels", "trials, of without",
               "all checks, of without"]  # fmt: skip
    print(tabulate(table, headers))


if __name__ == "__main__":
    main()
