"""Quantize a trained model and see what it cost and what it saved.

    python examples/quickstart.py                  # a sentence encoder, on a small retrieval task
    python examples/quickstart.py --model digits   # a convolutional network, on handwritten digits

Everything that concerns dbrq is four lines of ``main``:

    quantized = dbrq.quantize(model, task.calibration_batches())
    lowered = dbrq.lower(quantized, task.example_inputs())
    fastest = dbrq.lower(quantized, task.example_inputs(), backend="onednn")
    dbrq.report(quantized).coverage

``quantize`` runs the model once to see which operations it consists of, runs it on all of the data to learn the range
of every activation, and returns a copy with int8 kernels inside. The copy is used as the model was: same class, same
arguments, same kind of output. Some dozens of samples are enough, and they need no labels; take them from what the
model will meet in use. ``dbrq.report(quantized).table()`` lists every operation, and why those in float stayed so.
To take the steps one by one, call ``dbrq.prepare``, ``dbrq.calibrate`` and ``dbrq.convert``.

``lower`` makes a graph of fused kernels of it, a ``torch.jit.ScriptModule`` that needs no dbrq where it runs:

    python examples/quickstart.py --save model.pt      # then: python examples/serve.py model.pt model.pt.inputs

With ``backend="onednn"`` the graph runs on oneDNN's own kernels, which is faster still, from Python.
"""

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import dbrq

SLICE_SECONDS = 0.4


def megabytes(model: nn.Module) -> float:
    """The size of the model's state on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        torch.save(model.state_dict(), path)
        return path.stat().st_size / 1e6


@torch.no_grad()
def milliseconds(models: tuple[Callable, ...], inputs: Any, slices: int = 8) -> tuple[float, ...]:
    """The median latency of each model, or function. They take turns, so that a busy moment of the machine hits all."""
    times: list[list[float]] = [[] for _ in models]
    for model in models:
        for _ in range(3):
            run(model, inputs)  # the first calls also prepare kernels
    for _ in range(slices):
        for model, sample in zip(models, times, strict=True):
            end = time.perf_counter() + SLICE_SECONDS
            while (start := time.perf_counter()) < end:
                run(model, inputs)
                sample.append(1e3 * (time.perf_counter() - start))
    return tuple(map(statistics.median, times))


def run(model: Callable, inputs: Any) -> Any:
    """Call the model as dbrq does: a mapping holds keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantize a trained model and compare it with the original.")
    parser.add_argument("--model", choices=["minilm", "digits"], default="minilm")
    parser.add_argument("--save", metavar="PATH", help="save the lowered model, and an example beside it")
    options = parser.parse_args()
    task = importlib.import_module(options.model)

    model = task.load_model()
    quantized = dbrq.quantize(model, task.calibration_batches())
    lowered = dbrq.lower(quantized, task.example_inputs())
    fastest = dbrq.lower(quantized, task.example_inputs(), backend="onednn")

    measured = task.evaluate(model, quantized)
    measured["size on disk (MB)"] = (megabytes(model), megabytes(quantized))
    before, eager, fused, direct = milliseconds((model, quantized, lowered, fastest), task.example_inputs())
    measured["latency (ms, median)"] = (before, eager)
    measured["latency, lowered to torchscript"] = (before, fused)
    measured["latency, lowered to onednn"] = (before, direct)
    rows = [(name, before, after, after / before) for name, (before, after) in measured.items()]
    print(tabulate(rows, headers=["", "float", "int8", "int8 / float"], floatfmt=("", ".3f", ".3f", ".3f")))
    if options.save:
        dbrq.save(lowered, options.save)
        inputs = task.example_inputs()
        torch.save(dict(inputs) if isinstance(inputs, Mapping) else inputs, f"{options.save}.inputs")
    print(f"\n{dbrq.report(quantized).coverage:.1%} of all multiply-accumulates with weights run in int8.")


if __name__ == "__main__":
    main()
