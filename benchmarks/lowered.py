"""Speed of the torchscript backend beside the best that torch's own quantization gives without a compiler: ``python
benchmarks/lowered.py``.

Those are FX graph mode scripted and frozen (engine onednn) and, for models that it cannot trace, eager-mode
quantization of the
linear layers, traced and frozen. All variants of a model take turns in one run; ratios are to the first, slice by
slice.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accuracy import call, run_fx
from models import Benchmark, build
from tabulate import tabulate
from timing import interleaved
from torch import Tensor, nn

import dbrq
from dbrq.containers import call_arguments, tree_map
from dbrq.report import sqnr

ROWS = (("resnet18", 1), ("resnet50", 1), ("resnet50", 16), ("mobilenet_v2", 1), ("vit_b_16", 1), ("bert-base", 1),
        ("minilm", 1))  # fmt: skip


def frozen(model: nn.Module, args: tuple, kwargs: dict, trace: bool) -> nn.Module:
    if trace:
        scripted = torch.jit.trace(
            model, args or None, example_kwarg_inputs=kwargs or None, strict=False, check_trace=False
        )
    else:
        scripted = torch.jit.script(model)
    return torch.jit.freeze(scripted.eval())


def peer(bench: Benchmark) -> tuple[str, nn.Module]:
    """The best torch-only int8 form of the model."""
    args, kwargs = call_arguments(bench.test[0])
    if not kwargs:
        return "FX scripted", frozen(run_fx(bench), args, kwargs, trace=False)
    from torch.ao.quantization import QuantWrapper, convert, get_default_qconfig, prepare

    torch.backends.quantized.engine = "onednn"
    model = copy.deepcopy(bench.model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                wrapped = QuantWrapper(child)
                wrapped.qconfig = get_default_qconfig("onednn")  # type: ignore[assignment]
                setattr(module, name, wrapped)
    prepare(model, inplace=True)
    for item in bench.calibration:
        call(model, item)
    convert(model, inplace=True)
    model.config.return_dict = False
    return "eager mode traced", frozen(model, args, kwargs, trace=True)


def batched(item: Any, batch: int) -> Any:
    return tree_map(
        lambda leaf: leaf.repeat(batch, *[1] * (leaf.dim() - 1)) if isinstance(leaf, Tensor) else leaf, item
    )


def first(output: Any) -> Tensor:
    """The model's main output, in whatever container a backend returns it."""
    if isinstance(output, dict):
        return next(iter(output.values()))
    return output if isinstance(output, Tensor) else output[0]


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
