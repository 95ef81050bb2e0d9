"""What self-checks cost: ``python benchmarks/self_check.py``.

``convert`` of a ResNet-50 (which tries the kernels for the shapes that calibration saw), its first eager call, that with
another batch, and ``lower`` to torchscript and to onednn, each in a fresh process with ``DBRQ_SELF_CHECK`` 1 and 0 in
turn; seconds. What comes before a step ran with the same switch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import models  # noqa: F401  (makes torchvision importable)
import torch
import torchvision
from tabulate import tabulate

import dbrq

STEPS = ("convert", "first eager call", "first eager call, batch of 2", "lower, torchscript", "lower, onednn")


def seconds(step: str) -> float:
    """One measurement, in this process."""
    torch.manual_seed(0)
    model, x = torchvision.models.resnet50().eval(), torch.randn(1, 3, 224, 224)
    prepared = dbrq.prepare(model, x)
    dbrq.calibrate(prepared, [x], progress=False)
    start = time.perf_counter()
    quantized = dbrq.convert(prepared)
    if step != STEPS[0]:
        start = time.perf_counter()
        if step.startswith("first"):
            with torch.no_grad():
                quantized(x if step == STEPS[1] else torch.cat([x, x]))
        else:
            dbrq.lower(quantized, x, backend=step.rpartition(" ")[2])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        print(seconds(options.step))
        return
    table = []
    for step in STEPS:
        taken: dict[str, list[float]] = {"1": [], "0": []}
        for _ in range(options.rounds):
            for switch, times in taken.items():
                environment = {**os.environ, "DBRQ_SELF_CHECK": switch}
                command = [sys.executable, "-W", "ignore", __file__, "--step", step]
                run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                times.append(float(run.stdout.split()[-1]))
        cells = [f"{statistics.median(t):.3f} ({min(t):.3f} to {max(t):.3f})" for t in taken.values()]
        share = statistics.median(taken["1"]) / statistics.median(taken["0"]) - 1
        table.append([step, *cells, f"{share:+.1%}"])
    print(tabulate(table, ["step", "with checks: median (range)", "without", "more"]))


if __name__ == "__main__":
    main()
