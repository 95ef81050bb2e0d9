"""How far ONNX Runtime and OpenVINO, running the file of ``dbrq.export_onnx``, are from dbrq: ``python
benchmarks/onnx_files.py``.

A step is 1/255 of the range of dbrq's own output. ONNX Runtime runs the graph as it is written, and then optimized,
with its int8 kernels; OpenVINO keeps float parts in float32. *itself* is how far dbrq's converted model is from itself
when its float inputs change by a millionth, or its graph (``rewrite``) from it where there are no float inputs: what
rounding alone does to the model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import Benchmark, build
from peers.worker import call, first, sqnr
from tabulate import tabulate
from torch import Tensor, nn

import dbrq

NAMES = ("resnet50", "mobilenet_v2", "vit_b_16", "bert-base")
#: Last layers of the residual branches of ViT and BERT.
BRANCHES = ("self_attention.out_proj", "mlp.3", "attention.output.dense", "output.dense")


@torch.no_grad()
def damp(model: nn.Module) -> None:
    """What models.py does to the branches of random convolutional networks."""
    for path, module in model.named_modules():
        if path.endswith(BRANCHES):
            module.weight.mul_(0.25)


def arrays(names: list[str], item: Any) -> dict[str, Any]:
    values = dict(zip(names, [item], strict=True)) if isinstance(item, Tensor) else item
    return {name: values[name].numpy() for name in names}


def in_onnxruntime(path: str, optimized: bool) -> Callable[[Any], Tensor]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = 2, 1
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return lambda item: torch.from_numpy(session.run(None, arrays(names, item))[0])


def in_openvino(path: str) -> Callable[[Any], Tensor]:
    import openvino as ov

    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2})
    names = [given.get_any_name() for given in compiled.inputs]
    return lambda item: torch.from_numpy(compiled(arrays(names, item))[0].copy())


def itself(quantized: nn.Module, item: Any) -> Callable[[Any], Any]:
    if isinstance(item, Tensor):
        return lambda item: quantized(item * (1 + 1e-6 * torch.randn_like(item)))
    graph = dbrq.rewrite(quantized, item)
    return lambda item: graph(**item)


def runtimes(quantized: nn.Module, item: Any, path: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "itself", itself(quantized, item)
    yield "ONNX Runtime", in_onnxruntime(path, False)
    yield "ONNX Runtime, optimized", in_onnxruntime(path, True)
    yield "OpenVINO", in_openvino(path)


@torch.no_grad()
def measure(bench: Benchmark) -> Iterator[list[Any]]:
    quantized = dbrq.quantize(bench.model, bench.calibration)
    item = bench.test[0]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        dbrq.export_onnx(quantized, item, path)
        size = os.path.getsize(path) / 1e6
        floats = [bench.output(call(bench.model, item)) for item in bench.test]
        ours = [bench.output(call(quantized, item)) for item in bench.test]
        yield [
            bench.name,
            "dbrq",
            f"{size:.0f} MB",
            "-",
            "-",
            "-",
            f"{sqnr(torch.stack(floats), torch.stack(ours)):.1f}",
        ]
        for name, run in runtimes(quantized, item, path):
            theirs = [first(run(item)) for item in bench.test]
            steps = [(a - b).abs() / ((a.max() - a.min()) / 255) for a, b in zip(ours, theirs, strict=True)]
            yield [bench.name, name, "", f"{max(s.max().item() for s in steps):.2f}",
                   f"{torch.stack(steps).mean().item():.3f}", f"{sqnr(torch.stack(ours), torch.stack(theirs)):.1f}",
                   f"{sqnr(torch.stack(floats), torch.stack(theirs)):.1f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=NAMES)
    parser.add_argument("--damp", action="store_true", help="damp the residual branches of transformers, by 0.25")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        bench = build(name)
        if options.damp:
            damp(bench.model)
        rows += measure(bench)
    head = ["model", "runs in", "file", "largest difference (steps)", "mean (steps)", "SQNR to dbrq (dB)",
            "SQNR to float (dB)"]  # fmt: skip
    print(tabulate(rows, head, disable_numparse=True))


if __name__ == "__main__":
    main()
