"""SQNR and int8 coverage beside FX graph mode and PT2E, on one model and the same data: ``python
benchmarks/accuracy.py``.

PT2E (torchao's ``X86InductorQuantizer``) runs as its Q/DQ graph, without a compiler: the numbers are those of Inductor
up to rounding. A dash means that the peer cannot run the model; the reason is printed below the table.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from models import Benchmark, build
from peers.of_inductor import pt2e
from peers.of_torch import fx_quantized
from peers.worker import call
from tabulate import tabulate
from torch import Tensor, nn

import dbrq
from dbrq.inspection.comparing import sqnr

NAMES = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16", "bert-base", "minilm")


def run_dbrq(bench: Benchmark) -> nn.Module:
    return dbrq.quantize(bench.model, bench.calibration)


def run_fx(bench: Benchmark) -> nn.Module:
    if not isinstance(bench.calibration[0], Tensor):
        raise TypeError("FX tracing takes positional inputs only")
    return fx_quantized(bench.model, bench.calibration)


def run_pt2e(bench: Benchmark) -> nn.Module:
    free = torch.export.Dim.AUTO  # MiniLM's batches differ in size and length
    item = bench.calibration[0]
    shapes = None if isinstance(item, Tensor) else {name: {0: free, 1: free} for name in item}
    return pt2e(bench.name, bench.model, bench.calibration, shapes)


def int8_kernel_calls(model: nn.Module, item: Any) -> int:
    """Convolution and linear kernels of oneDNN that one run calls, counted by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        call(model, item)
    return sum(e.count for e in prof.key_averages() if e.key.startswith(("onednn::qconv", "onednn::qlinear")))


@torch.no_grad()
def measure(bench: Benchmark) -> tuple[list[Any], list[str]]:
    expected = [bench.output(call(bench.model, item)) for item in bench.test]
    row: list[Any] = [bench.name]
    notes = []
    for run in (run_dbrq, run_fx, run_pt2e):
        try:
            quantized = run(bench)
            got = [bench.output(call(quantized, item)) for item in bench.test]
            row.append(f"{sqnr(torch.cat([e.flatten() for e in expected]), torch.cat([g.flatten() for g in got])):.1f}")
        except Exception as error:
            row.append("-")
            notes.append(f"{bench.name}, {run.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        if run is run_dbrq:
            report = dbrq.report(quantized)
            ops = sum(r.macs > 0 and r.weighs for r in report.rows)
            coverage = [f"{report.coverage:.1%}", f"{int8_kernel_calls(quantized, bench.test[0])} of {ops}"]
            size = [sum(v.nbytes for v in m.state_dict().values()) for m in (quantized, bench.model)]
    return [*row, *coverage, f"{size[0] / size[1]:.3f}"], notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=NAMES)
    warnings.simplefilter("ignore")
    rows, notes = [], []
    for name in parser.parse_args().models:
        row, more = measure(build(name))
        rows.append(row)
        notes += more
    head = [
        "model",
        "dbrq (dB)",
        "FX onednn (dB)",
        "PT2E (dB)",
        "coverage",
        "int8 kernels of conv/linear ops",
        "bytes, int8/float",
    ]
    print(tabulate(rows, head, disable_numparse=True))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
