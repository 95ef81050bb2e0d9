"""Models whose activations are hard for int8 in the ways that presets mend."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Outliers(nn.Module):
    """Linear layers that read a norm's output, in which two channels are far wider than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.query = nn.Linear(64, 64)
        self.key = nn.Linear(64, 64, bias=False)
        self.out = nn.Linear(64, 32)
        with torch.no_grad():
            self.norm.weight[3] *= 60
            self.norm.weight[40] *= 25

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.out(F.gelu(self.query(h) + self.key(h))) + h[..., :32] * 0.01


class Functional(nn.Module):
    """The same in functions, without leaf modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64) / 8)
        self.bias = nn.Parameter(torch.zeros(32))
        self.wide = nn.Parameter(torch.ones(64))
        with torch.no_grad():
            self.wide[5] = 80.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(F.layer_norm(x, (64,), self.wide), self.weight, self.bias) / 8)


class Convolutions(nn.Module):
    """Convolutions with channels of unequal ranges between them, batch norms, a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.conv2 = nn.Conv2d(16, 8, 1)
        with torch.no_grad():
            self.norm1.weight.copy_(torch.logspace(-1, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.conv2(F.relu(self.depthwise(x)))


def batches(*shape: int, count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]
