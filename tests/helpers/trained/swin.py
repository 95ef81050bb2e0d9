"""Swin in small: attention within shifted windows, a bias for relative positions, merging of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WINDOW = 4


class _WindowAttention(nn.Module):
    index: Tensor
    mask: Tensor

    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.shift = heads, size, shift
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.bias = nn.Parameter(0.02 * torch.randn((2 * _WINDOW - 1) ** 2, heads))
        self.softmax = nn.Softmax(-1)
        self.register_buffer("index", _relative_positions(), persistent=False)
        self.register_buffer("mask", _mask(size, shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, size, size, width)`` in and out."""
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = self._unwindowed(self._attend(self._windows(x)))
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x

    def _attend(self, x: Tensor) -> Tensor:
        tokens, width = x.shape[1], x.shape[2]
        qkv = self.qkv(x).reshape(-1, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] * (width // self.heads) ** -0.5) @ qkv[1].transpose(-2, -1)
        scores = scores + self.bias[self.index].reshape(tokens, tokens, self.heads).permute(2, 0, 1)
        if self.shift:
            windows = self.mask.shape[0]
            scores = scores.reshape(-1, windows, self.heads, tokens, tokens) + self.mask[:, None]
            scores = scores.reshape(-1, self.heads, tokens, tokens)
        return self.proj((self.softmax(scores) @ qkv[2]).transpose(1, 2).reshape(-1, tokens, width))

    def _windows(self, x: Tensor) -> Tensor:
        side = self.size // _WINDOW
        x = x.reshape(-1, side, _WINDOW, side, _WINDOW, x.shape[-1])
        return x.transpose(2, 3).reshape(-1, _WINDOW * _WINDOW, x.shape[-1])

    def _unwindowed(self, x: Tensor) -> Tensor:
        side = self.size // _WINDOW
        x = x.reshape(-1, side, side, _WINDOW, _WINDOW, x.shape[-1])
        return x.transpose(2, 3).reshape(-1, self.size, self.size, x.shape[-1])


def _relative_positions() -> Tensor:
    """The row of the table of biases for each pair of tokens in a window, flat."""
    places = torch.cartesian_prod(torch.arange(_WINDOW), torch.arange(_WINDOW))
    apart = places[:, None] - places[None] + _WINDOW - 1
    return (apart[..., 0] * (2 * _WINDOW - 1) + apart[..., 1]).flatten()


def _mask(size: int, shift: int) -> Tensor:
    """-100 for pairs of tokens that the shift brought into one window from opposite borders: ``(windows, 16, 16)``."""
    strip = torch.zeros(size)
    if shift:
        strip[-_WINDOW:], strip[-shift:] = 1, 2
    regions = 3 * strip[:, None] + strip
    side = size // _WINDOW
    windows = regions.reshape(side, _WINDOW, side, _WINDOW).transpose(1, 2).reshape(side * side, -1)
    return -100.0 * (windows[:, :, None] != windows[:, None]).float()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _WindowAttention(width, heads, size, shift)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Merging(nn.Module):
    """Half the height and width, twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """``(N, 3, 16, 16)`` -> ``(N, classes)`` logits: 8 x 8 patches, then 4 x 4."""

    def __init__(self, classes: int, width: int = 32, depths: tuple[int, ...] = (2, 2)) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        layers: list[nn.Module] = []
        size = 8
        for stage, depth in enumerate(depths):
            if stage:
                layers.append(_Merging(width))
                size, width = size // 2, 2 * width
            shift = _WINDOW // 2 if size > _WINDOW else 0  # one window has no borders to shift across
            layers += [_Block(width, width // 16, size, shift * (i % 2)) for i in range(depth)]
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        return self.head(self.norm(self.blocks(x)).mean((1, 2)))
