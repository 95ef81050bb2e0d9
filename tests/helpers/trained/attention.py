"""A vision transformer and a decoder in small: pre-norm blocks of attention and an MLP with GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """``(N, 3, 16, 16)`` -> ``(N, classes)`` logits: patches of 4 x 4, a class token, learned positions."""

    def __init__(self, classes: int, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*[_Block(width, heads, causal=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Decoder(nn.Module):
    """``(N, T)`` characters -> ``(N, T, characters)`` logits of the next ones, T up to ``context``; GPT-2 in small."""

    def __init__(self, characters: int, context: int, width: int = 96, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[_Block(width, heads, causal=True) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))
