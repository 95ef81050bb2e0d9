"""Modules that programs are built from beside torch's own, each a small idiom of real models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """conv, norm, relu, conv, norm, sum with the input, relu."""

    def __init__(self, channels: int, inplace: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean((2, 3), keepdim=True)
        return x * self.expand(F.silu(self.reduce(gate))).sigmoid()


class Attention(nn.Module):
    """Self-attention written out: one projection, ``chunk``, heads by ``view`` and ``transpose``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n, t, width = x.shape
        q, k, v = (p.view(n, t, self.heads, width // self.heads).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        out = torch.matmul(scores.softmax(-1), v)
        return self.out(out.transpose(1, 2).reshape(n, t, width))


class FusedAttention(nn.Module):
    """The same with three projections and torch's own kernel."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=i != 1) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Named(nn.Module):
    """A child that takes and returns a dict, and keeps what it saw last."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.last: Tensor | None = None

    def forward(self, items: dict[str, Tensor]) -> dict[str, Tensor]:
        self.last = self.layer(items["x"])
        return {"x": items["x"], "y": self.last}
