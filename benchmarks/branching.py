"""What deciding code costs a lowered model: ``python benchmarks/branching.py``.

A ResNet whose forward can leave early, on data, is lowered in parts; its straight-line twin, with the same weights, as
one graph. The speed-up of each is over its own float form, all in one interleaved run.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from tabulate import tabulate
from timing import interleaved
from torch import Tensor, nn

import dbrq
from dbrq.inspection.comparing import sqnr


class Block(nn.Module):
    """Two 3x3 convolutions and the sum around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18; ``decides`` says whether it may leave after its third stage, where values are large."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.decides = decides
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        sizes = (64, 64, 128, 256, 512)
        self.stages = nn.ModuleList(
            nn.Sequential(Block(i, o, 1 if i == o else 2), Block(o, o, 1)) for i, o in itertools.pairwise(sizes)
        )
        self.early, self.head = nn.Linear(256, 1000), nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if self.decides and number == 2 and x.mean() > 1e4:
                return self.early(x.mean((2, 3)))
        return self.head(x.mean((2, 3)))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    branching, straight = ResNet(True).eval(), ResNet(False).eval()
    straight.load_state_dict(branching.state_dict())
    x = torch.randn(1, 3, 224, 224)
    early = x * 1e6
    quantized = {
        "branching": dbrq.quantize(branching, [x, early]),
        "straight": dbrq.quantize(straight, [x]),
    }
    rows = []
    for backend in ("torchscript", "onednn"):
        lowered = {name: dbrq.lower(model, x, backend=backend) for name, model in quantized.items()}
        timings = interleaved(
            {
                "straight, float": lambda: straight(x),
                "branching, float": lambda: branching(x),
                "branching, eager int8": lambda: quantized["branching"](x),
                "straight, lowered": lambda lowered=lowered: lowered["straight"](x),
                "branching, lowered": lambda lowered=lowered: lowered["branching"](x),
            },
            options.slices,
        )
        speedups = {name: timings[f"{name}, float"].median / timings[f"{name}, lowered"].median for name in lowered}
        for name, timing in timings.items():
            rows.append([backend, name, f"{timing.median:.2f}", f"{timing.minimum:.2f}-{timing.maximum:.2f}", ""])
        share = speedups["branching"] / speedups["straight"]
        agrees = min(sqnr(quantized["branching"](y), lowered["branching"](y)) for y in (x, early))
        rows.append([backend, "share of the straight twin's speed-up", f"{share:.2f}", "", f"{agrees:.0f}"])
    print(tabulate(rows, ["backend", "", "ms", "min-max", "dB to converted"]))


if __name__ == "__main__":
    main()
