"""Building blocks: a function as a module, an op between int8 layers, layers for a forward to choose from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Call(nn.Module):
    """A function as a module, with the modules and parameters it uses as its attributes: ``fn(self, *inputs)``.

    FX graph mode wants to know how many inputs there are, so there is a class for each number.
    """

    def __new__(cls, fn: Callable | None = None, inputs: int = 0, **attributes: Any) -> Call:
        if fn is None:  # a copy is being made
            return super().__new__(cls)
        count = inputs or len(inspect.signature(fn).parameters) - 1
        return super().__new__(_Call2 if count == 2 else _Call3 if count == 3 else Call)

    def __init__(self, fn: Callable, inputs: int = 0, **attributes: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, x):
        return self.fn(self, x)


class _Call2(Call):
    def forward(self, x, y):
        return self.fn(self, x, y)


class _Call3(Call):
    def forward(self, x, y, z):
        return self.fn(self, x, y, z)


class Between(nn.Module):
    """``op`` with a convolution before each of its inputs and a layer behind it, so that all around it is int8."""

    def __init__(self, op: Callable, inputs: int = 1, channels: int = 8, ndim: int = 2, size: int = 10) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{ndim}d")
        self.first = conv(4, channels, 3, padding=1)
        self.second = conv(4, channels, 3, padding=1) if inputs > 1 else None
        self.op = op
        self.example = torch.randn(2, 4, *[size] * ndim)
        with torch.no_grad():
            result = self._middle(self.example)
        if result.dim() == ndim + 2:
            self.after = conv(result.shape[1], 6, 1)
        else:
            self.after = nn.Linear(result.shape[-1], 6)

    def _middle(self, x):
        if self.second is None:
            return self.op(self.first(x))
        return self.op(self.first(x), self.second(x))

    def forward(self, x):
        return self.after(self._middle(x))


ROWS = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
IMAGES = [torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(4)]


class Rows(nn.Module):
    """Layers for a forward to choose from."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.elu = nn.ELU()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Images(Rows):
    def __init__(self, function: Callable):
        super().__init__(function)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)


def model_and_input() -> tuple[nn.Module, Tensor]:
    """Two convolutions and a linear layer, and images for them; the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 5))
    return model.eval(), torch.randn(2, 4, 8, 8)
