"""What running the user's own Python costs: ``python benchmarks/eager_overhead.py``.

Three tables: microseconds that interception adds to one op; a converted model's time relative to FX graph mode's eager
quantized model (engine onednn); and calibration's time relative to the float forward.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable

import models  # noqa: F401  (makes torchvision importable)
import torch
import torchvision
from tabulate import tabulate
from timing import interleaved
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.backend_config import get_onednn_backend_config
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import dbrq
from dbrq.kernels import PackedConv, PostOp, QParams, dequantize, quantize

COUNT = 50


class ConvBlocks(nn.Module):
    """``COUNT`` blocks of convolution, batch norm and relu on a map so small that the kernel is mostly its own
    overhead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(COUNT))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(COUNT))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.relu(norm(conv(x)))
        return x


class Adds(nn.Module):
    """A convolution and ``COUNT`` adds that all run on int8 values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(COUNT):
            x = x + x
        return self.last(x)


class Unquantizeable(nn.Module):
    """``COUNT`` ops that no int8 kernel exists for, behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(COUNT):
            x = torch.neg(x)
        return x


def conv_by_hand(x: Tensor) -> Callable[[], object]:
    conv = PackedConv(
        torch.ones(16, 16, 1, 1, dtype=torch.int8), torch.ones(16), torch.zeros(16), [1, 1], [0, 0], [1, 1], 1
    )
    q, qparams, relu = (
        quantize(x.contiguous(memory_format=torch.channels_last), QParams(0.02, 0)),
        QParams(0.02, 0),
        PostOp("relu"),
    )
    return lambda: [conv(q, qparams, relu, qparams) for _ in range(COUNT)]


def add_by_hand(x: Tensor) -> Callable[[], object]:
    q, qparams = quantize(x.contiguous(memory_format=torch.channels_last), QParams(0.02, 0)), QParams(0.02, 0)

    def run() -> None:
        for _ in range(COUNT):
            value = dequantize(q, qparams)
            quantize(value + value, qparams)

    return run


def negations(x: Tensor) -> Callable[[], object]:
    return lambda: [torch.neg(x) for _ in range(COUNT)]


def overhead(name: str, model: nn.Module, by_hand: Callable[[Tensor], Callable[[], object]], ops: int) -> list[object]:
    x = torch.randn(1, 16, 4, 4)
    quantized = dbrq.quantize(model.eval(), [x])
    times = interleaved({"hand": by_hand(x), "dbrq": lambda: quantized(x)})
    added = {
        k: (getattr(times["dbrq"], k) - getattr(times["hand"], k)) * 1e3 / COUNT
        for k in ("median", "minimum", "maximum")
    }
    return [name, ops, *(f"{added[k]:.1f}" for k in ("median", "minimum", "maximum")), f"{added['median'] / ops:.1f}"]


def beside_fx(name: str, size: int) -> list[object]:
    model, x = getattr(torchvision.models, name)().eval(), torch.randn(1, 3, size, size)
    mapping = get_default_qconfig_mapping("onednn")
    ours = dbrq.quantize(model, [x], mapping)
    torch.backends.quantized.engine = "onednn"
    prepared = prepare_fx(copy.deepcopy(model), mapping, (x,), backend_config=get_onednn_backend_config())
    prepared(x)
    fx = convert_fx(prepared, backend_config=get_onednn_backend_config())
    return _row(name, size, interleaved({"FX eager": lambda: fx(x), "dbrq": lambda: ours(x)}), "FX eager", "dbrq")


def calibration(name: str, size: int = 224) -> list[object]:
    model, x = getattr(torchvision.models, name)().eval(), torch.randn(1, 3, size, size)
    prepared = dbrq.prepare(model, x)
    return _row(
        name, size, interleaved({"float": lambda: model(x), "calibrating": lambda: prepared(x)}), "float", "calibrating"
    )


def _row(name, size, times, base, ours) -> list[object]:
    t = times[ours]
    return [
        name,
        size,
        f"{times[base].median:.2f}",
        f"{t.median:.2f}",
        f"{t.ratio:.2f}",
        f"{t.ratio_minimum:.2f}",
        f"{t.ratio_maximum:.2f}",
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    head = ["", "ops", "added us, median", "min", "max", "per op"]
    rows = [
        overhead("conv + batch norm + relu", ConvBlocks(), conv_by_hand, 3),
        overhead("quantized add", Adds(), add_by_hand, 1),
        overhead("unquantizeable op", Unquantizeable(), negations, 1),
    ]
    print(tabulate(rows, head, disable_numparse=True), end="\n\n")
    head = ["model", "size", "FX eager ms", "dbrq ms", "ratio, median", "min", "max"]
    print(
        tabulate([beside_fx("mobilenet_v2", 224), beside_fx("resnet18", 32), beside_fx("resnet18", 224)], head),
        end="\n\n",
    )
    head = ["model", "size", "float ms", "calibrating ms", "ratio, median", "min", "max"]
    print(tabulate([calibration(n) for n in ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16")], head))


if __name__ == "__main__":
    main()
