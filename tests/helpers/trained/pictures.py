"""scikit-learn's handwritten digits, 8 x 8, somewhat turned and moved, in colour, on a cluttered ground.

The last third of the digits is kept for tests; all else about a picture is drawn from a seed.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

SIZE = 16
CLASSES = 10
#: Digits that are trained on: the first ones, as neighbours in the data set may be of one writer.
_TRAINING = 1197


def pictures(count: int, seed: int, *, test: bool = False) -> tuple[Tensor, Tensor]:
    """``(count, 3, 16, 16)`` pictures of about mean 0 and deviation 1, and their digits, ``(count,)``."""
    draw = torch.Generator().manual_seed(seed)
    digits, classes = _digits(test)
    chosen = torch.randint(len(digits), (count,), generator=draw)
    if test:  # each of them as often
        chosen = torch.arange(count) % len(digits)
    ink = _placed(digits[chosen], draw)
    ground = _uniform(draw, 0, 0.6, count, 3, 1, 1)
    colour = ground + _uniform(draw, 0.25, 0.8, count, 3, 1, 1)
    made = ink * colour + (1 - ink) * (ground + _clutter(count, draw))
    made = made + 0.05 * torch.randn(made.shape, generator=draw)
    light = (0.3 * torch.randn(count, 1, 1, 1, generator=draw)).exp()
    return ((made * light).clip(0, 3) - 0.5) / 0.35, classes[chosen]


@functools.cache
def _digits(test: bool) -> tuple[Tensor, Tensor]:
    images, classes = load_digits(return_X_y=True)
    part = slice(_TRAINING, None) if test else slice(_TRAINING)
    return torch.tensor(images[part], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(classes[part])


def _placed(digits: Tensor, draw: torch.Generator) -> Tensor:
    """How much ink is on each pixel, 0 to 1: ``(count, 1, SIZE, SIZE)``."""
    count = len(digits)
    turn, lean = _uniform(draw, -0.15, 0.15, count), _uniform(draw, -0.15, 0.15, count)
    wide, high = _uniform(draw, 1.0, 1.25, count), _uniform(draw, 1.0, 1.25, count)
    shift = _uniform(draw, -0.12, 0.12, count, 2)
    rows = [
        torch.stack([turn.cos() * wide, lean - turn.sin(), shift[:, 0]], 1),
        torch.stack([turn.sin(), turn.cos() * high, shift[:, 1]], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), [count, 1, SIZE, SIZE], align_corners=False)
    return F.grid_sample(digits, grid, align_corners=False)


def _clutter(count: int, draw: torch.Generator) -> Tensor:
    """A slope and two straight edges of some contrast: ``(count, 3, SIZE, SIZE)``."""
    place = torch.linspace(-1, 1, SIZE)
    made = torch.zeros(count, 3, SIZE, SIZE)
    for hardness in (0.7, 30.0, 30.0):
        turn, offset = _uniform(draw, 0, 2 * math.pi, count, 1, 1), _uniform(draw, -1, 1, count, 1, 1)
        edge = (hardness * (place * turn.cos() + place[:, None] * turn.sin() + offset)).tanh()
        made += _uniform(draw, -0.12, 0.12, count, 3, 1, 1) * edge[:, None]
    return made


def _uniform(draw: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=draw)
