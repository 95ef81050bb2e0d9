"""The int8 patterns that TorchInductor's x86 passes know, with what each becomes.

Each has a layer behind that reads what it gives in int8. ``benchmarks/patterns.py`` shows what PT2E with the x86
quantizer makes of it: the same, but for conv1d, which that has in float, and values that dbrq has in uint8 where PT2E
has float32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.cases import Case


class Chain(nn.Module):
    """A layer, what follows it, and a layer that reads that in int8."""

    def __init__(self, first: nn.Module, after: Callable[[Tensor], Tensor], last: nn.Module | None) -> None:
        super().__init__()
        self.first, self.after, self.last = first, after, last

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.first(x))
        return x if self.last is None else self.last(x)


class Residual(nn.Module):
    """``layer(x) + other`` or ``other + layer(x)``, where other is what a layer before made, or its input."""

    def __init__(self, layers: tuple[nn.Module, nn.Module, nn.Module], relu: bool, swapped: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = layers
        self.relu, self.swapped = relu, swapped

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = self.second(x)
        y = x + y if self.swapped else y + x
        return self.last(torch.relu(y) if self.relu else y)


class TwoBranches(nn.Module):
    """Two layers of one input, added."""

    def __init__(self, layers: tuple[nn.Module, nn.Module, nn.Module], relu: bool) -> None:
        super().__init__()
        self.a, self.b, self.last = layers
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x)
        return self.last(torch.relu(y) if self.relu else y)


class Shared(nn.Module):
    """One value read by several layers and by an op in float."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.a, self.b = make(), make(), make()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.relu(self.first(x))
        return self.a(x), self.b(x), torch.sigmoid(x)


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(torch.relu(self.first(x)), 3, 2, 1))


class Cat(nn.Module):
    """Two values that are quantized alike, since one layer reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = conv(), conv(), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1))


class Flatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(), nn.Linear(4 * 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.first(x)), 4)
        return self.last(torch.flatten(x, 1))


class Attention(nn.Module):
    """Self-attention of two heads, spelled out, with a residual connection and a feed-forward part."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(size, size), nn.Linear(size, 64), nn.Linear(64, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def conv(n: int = 2, inner: int = 16, outer: int = 16) -> nn.Module:
    return getattr(nn, f"Conv{n}d")(inner, outer, 3, padding=1)


def linear(inner: int = 16, outer: int = 16) -> nn.Module:
    return nn.Linear(inner, outer)


def identity(x: Tensor) -> Tensor:
    return x


#: Functions, and what convolutions and linear layers call them; None where they do not take them.
AFTER: dict[str, tuple[Callable[[Tensor], Tensor], str | None, str | None]] = {
    "nothing": (identity, "", ""), "relu": (torch.relu, " relu", " relu"), "relu6": (F.relu6, " hardtanh", None),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.7), " hardtanh", None), "hardswish": (F.hardswish, " hardswish", None),
    "silu": (F.silu, " swish", None), "gelu": (F.gelu, None, " gelu"),
    "gelu (tanh)": (lambda x: F.gelu(x, approximate="tanh"), None, " gelu"),
}  # fmt: skip
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "conv2d": (lambda: conv(2), (2, 16, 8, 8), "qconv"), "conv1d": (lambda: conv(1), (2, 16, 12), "qconv"),
    "linear": (linear, (4, 16), "qlinear"),
}  # fmt: skip
#: What a sum of a layer with what another made becomes, and one of two branches; with a relu behind, or without.
ADDED = {
    "conv2d": ("qconv sum{} -> float32", "qconv sum{} -> uint8"),
    "linear": ("qlinear add{} -> uint8", "qlinear add{} -> uint8"),
}
ATTENTION = "3 x qlinear -> {}; qlinear add -> uint8; qlinear gelu -> uint8; qlinear sum -> float32"
OTHERS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], str, dict[str, Any]]] = [
    ("linear + gelu, 3-d", lambda: Chain(linear(), F.gelu, linear()), (2, 5, 16),
        "qlinear gelu -> uint8; qlinear -> float32", {}),
    ("max_pool2d", Pool, (2, 16, 9, 9), "qconv relu -> uint8; qconv -> float32; quantized.max_pool2d", {}),
    ("cat", Cat, (2, 16, 8, 8), "2 x qconv relu -> uint8; qconv -> float32", {}),
    ("flatten", Flatten, (2, 16, 8, 8), "qconv relu -> uint8; qlinear -> float32; quantized.max_pool2d", {}),
    ("one input of several conv2d", lambda: Shared(lambda: conv(2)), (2, 16, 8, 8),
        "qconv relu -> float32; 2 x qconv -> float32", {}),
    ("one input of several linear", lambda: Shared(linear), (4, 16),
        "qlinear relu -> float32; 2 x qlinear -> float32", {}),
    ("attention", Attention, (2, 6, 32), ATTENTION.format("float32"), {}),
    ("conv2d + relu, free batch and size", lambda: Chain(conv(), torch.relu, conv()), (2, 16, 8, 8),
        "qconv relu -> uint8; qconv -> float32", {"free": (0, 2, 3)}),
    ("linear + gelu, free batch", lambda: Chain(linear(), F.gelu, linear()), (4, 16),
        "qlinear gelu -> uint8; qlinear -> float32", {"free": (0,)}),
    ("attention, free batch and length", Attention, (2, 6, 32), ATTENTION.format("float32"), {"free": (0, 1)}),
    ("conv2d + relu, bfloat16", lambda: Chain(conv(), torch.relu, conv()), (2, 16, 8, 8),
        "qconv relu -> uint8; qconv -> bfloat16", {"bfloat16": True}),
    ("conv2d + add + relu, bfloat16", lambda: Residual((conv(), conv(), conv()), True, False), (2, 16, 8, 8),
        "qconv relu -> uint8; qconv sum relu -> float32; qconv -> bfloat16", {"bfloat16": True}),
    ("linear + gelu, bfloat16", lambda: Chain(linear(), F.gelu, linear()), (4, 16),
        "qlinear gelu -> uint8; qlinear -> bfloat16", {"bfloat16": True}),
    ("attention, bfloat16", Attention, (2, 6, 32), ATTENTION.format("bfloat16"), {"bfloat16": True}),
]  # fmt: skip


def _patterns() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], inductor: str, **options: Any) -> None:
        def seeded() -> nn.Module:
            torch.manual_seed(0)
            return make().eval()

        def example() -> Tensor:
            return torch.randn(shape, generator=torch.Generator().manual_seed(1))

        found[name] = Case(seeded, example, inductor=inductor, **options)

    def residual(make: Callable[[], nn.Module], relu: bool, swapped: bool) -> Callable[[], nn.Module]:
        return lambda: Residual((make(), make(), make()), relu, swapped)

    for layer, (make, shape, q) in LAYERS.items():
        for name, (after, in_conv, in_linear) in AFTER.items():
            post_op = in_linear if layer == "linear" else in_conv
            if layer == "linear" or post_op is not None:
                fused = "2 x qlinear -> float32" if post_op is None else f"{q}{post_op} -> uint8; {q} -> float32"
                add(f"{layer} + {name}", lambda m=make, a=after: Chain(m(), a, m()), shape, fused)
        add(f"{layer} + relu, float out", lambda m=make: Chain(m(), torch.relu, None), shape, f"{q} relu -> float32")
        if layer == "conv1d":  # which becomes a conv2d, whatever follows
            add("conv1d + add, other last", residual(make, False, False), shape,
                "qconv relu -> uint8; qconv -> uint8; qconv -> float32")  # fmt: skip
            add("conv1d + add + relu, other first", residual(make, True, True), shape,
                "qconv relu -> float32; 2 x qconv -> float32")  # fmt: skip
            continue
        for relu in (False, True):
            words = f"{layer} + add{' + relu' * relu}"
            one, two = (text.format(" relu" * relu) for text in ADDED[layer])
            for order in ("other last", "other first"):
                add(f"{words}, {order}", residual(make, relu, order == "other first"), shape,
                    f"{q} relu -> uint8; {one}; {q} -> float32")  # fmt: skip
            add(f"{words}, two branches", lambda m=make, r=relu: TwoBranches((m(), m(), m()), r), shape,
                f"{q} -> uint8; {two}; {q} -> float32")  # fmt: skip
    for name, make, shape, inductor, options in OTHERS:
        add(name, make, shape, inductor, **options)
    return found


PATTERNS = _patterns()


def fusions(code: str) -> Counter[str]:
    """The int8 kernels that Inductor's Python calls, with what is fused into them: ``"qlinear gelu -> uint8"``."""
    found: Counter[str] = Counter()
    for name, arguments in re.findall(r"torch\.ops\.onednn\.(\w+?)2?d?_pointwise\.\w+\((.*)\)", code):
        post_ops = [text for text in re.findall(r"'(\w+)'", arguments) if text not in ("none", "tanh")]
        dtype = re.findall(r"torch\.(\w+)", arguments)[-1]
        found[" ".join([name, *post_ops, "->", dtype])] += 1
    found["quantized.max_pool2d"] = code.count("torch.ops.quantized.max_pool2d")
    return +found
