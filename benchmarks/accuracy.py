"""SQNR and int8 coverage beside FX graph mode and PT2E, on one model and the same data: ``python
benchmarks/accuracy.py``.

PT2E (torchao's ``X86InductorQuantizer``) runs as its Q/DQ graph, without a compiler: the numbers are those of Inductor
up to rounding. A dash means that the peer cannot run the model; the reason is printed below the table.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import Benchmark, build
from tabulate import tabulate
from torch import nn

import dbrq
from dbrq.containers import call_arguments
from dbrq.report import sqnr

NAMES = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16", "bert-base", "minilm")


def call(model: Callable, item: Any) -> Any:
    args, kwargs = call_arguments(item)
    return model(*args, **kwargs)


def run_dbrq(bench: Benchmark) -> nn.Module:
    return dbrq.quantize(bench.model, bench.calibration)


def run_fx(bench: Benchmark) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.backend_config import get_onednn_backend_config
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "onednn"
    config = get_onednn_backend_config()
    args, kwargs = call_arguments(bench.calibration[0])
    if kwargs:
        raise TypeError("FX tracing takes positional inputs only")
    prepared = prepare_fx(
        copy.deepcopy(bench.model), get_default_qconfig_mapping("onednn"), args, backend_config=config
    )
    for item in bench.calibration:
        call(prepared, item)
    return convert_fx(prepared, backend_config=config)


def run_pt2e(bench: Benchmark) -> nn.Module:
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as xiq
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    args, kwargs = call_arguments(bench.calibration[0])
    free = torch.export.Dim.AUTO  # MiniLM's batches differ in size and length
    shapes = {name: {0: free, 1: free} for name in kwargs} or None
    strict = bench.name.startswith(("resnet", "mobilenet"))
    exported = torch.export.export(bench.model, args, kwargs, dynamic_shapes=shapes, strict=strict).module()
    quantizer = xiq.X86InductorQuantizer().set_global(xiq.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for item in bench.calibration:
        call(prepared, item)
    return convert_pt2e(prepared)


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
            ops = sum(r.macs > 0 and r.op not in ("matmul", "scaled_dot_product_attention") for r in report.rows)
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
