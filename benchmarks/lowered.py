"""Speed of the torchscript backend beside the best that torch's own quantization gives without a compiler: ``python
benchmarks/lowered.py``.

Those are FX graph mode scripted and frozen (engine onednn) and, for models that it cannot trace, eager-mode
quantization of the
linear layers, traced and frozen. All variants of a model take turns in one run; ratios are to the first, slice by
slice.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import Benchmark, build
from peers.of_torch import scripted
from peers.worker import batched, call, first
from tabulate import tabulate
from timing import interleaved
from torch import Tensor, nn

import dbrq
from dbrq.inspection.comparing import sqnr

ROWS = (("resnet18", 1), ("resnet50", 1), ("resnet50", 16), ("mobilenet_v2", 1), ("vit_b_16", 1), ("bert-base", 1),
        ("minilm", 1))  # fmt: skip


def peer(bench: Benchmark) -> tuple[str, nn.Module]:
    """The best torch-only int8 form of the model."""
    item = bench.test[0]
    name = "FX scripted" if isinstance(item, Tensor) else "eager mode traced"
    return name, scripted(bench.model, bench.calibration, item)


@torch.no_grad()
def measure(name: str, batch: int, slices: int, bf16: bool) -> list[list[Any]]:
    bench = build(name)
    item = batched(bench.test[0], batch)
    peer_name, peer_model = peer(bench)
    quantized = dbrq.quantize(bench.model, bench.calibration)
    models: dict[str, nn.Module] = {peer_name: peer_model, "dbrq lowered": dbrq.lower(quantized, item)}
    if bf16:
        models["dbrq lowered, bf16"] = dbrq.lower(quantized, item, dtype=torch.bfloat16)
    models |= {"dbrq eager": quantized, "float eager": bench.model}
    expected = first(call(bench.model, item))

    def runner(model: Callable) -> Callable[[], object]:
        return lambda: call(model, item)

    timings = interleaved({label: runner(model) for label, model in models.items()}, slices)
    float_time = timings["float eager"].median
    return [
        [f"{name} b{batch}", label, f"{t.median:.2f}", f"{t.minimum:.2f}-{t.maximum:.2f}", f"{t.ratio:.3f}",
         f"{t.ratio_minimum:.3f}-{t.ratio_maximum:.3f}", f"{float_time / t.median:.2f}",
         f"{sqnr(expected, first(call(models[label], item))):.1f}"]
        for label, t in timings.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help="names, or name:batch")
    parser.add_argument("--slices", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--bf16", action="store_true", help="also the float parts in bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    chosen = [(m.partition(":")[0], int(m.partition(":")[2] or 1)) for m in options.models] or ROWS
    rows = []
    for name, batch in chosen:
        rows += measure(name, batch, options.slices, options.bf16)
        head = ["model", "variant", "ms", "min-max", "ratio", "min-max", "x float", "SQNR (dB)"]
    print(tabulate(rows, head, disable_numparse=True))


if __name__ == "__main__":
    main()
