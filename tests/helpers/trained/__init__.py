"""Small models that are trained here, from code and seeds: what int8 costs a task shows on no random weights.

``load("mobilenet")`` trains for a minute or two, once on each machine; ``load("mobilenet", short=True)``, for tests, in
a fraction of that. MobileNetV3, ViT and Swin in small read the digits of ``pictures.py``; a decoder predicts
the characters of Python's documentation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import text
from .attention import Decoder, VisionTransformer
from .mobilenet import MobileNet
from .pictures import CLASSES, pictures
from .swin import Swin
from .training import Schedule, weights

CONTEXT = 64
_BATCH = 32


@dataclass(frozen=True)
class Trained:
    """A trained model, and the data to quantize and to judge it.

    Attributes:
        name: one of ``NAMES``.
        model: in eval mode, a new one for each ``load``.
        calibration: batches of what it was trained on.
        example_inputs: one batch of what it was not.
        metric: what ``evaluate`` measures, for a head of a table.
        evaluate: the metric of a model, on data that it was not trained on.
        higher: whether more of the metric is better.
    """

    name: str
    model: nn.Module
    calibration: list[Tensor]
    example_inputs: Tensor
    metric: str
    evaluate: Callable[[nn.Module], float]
    higher: bool = True

    def loss(self, before: float, after: float) -> float:
        """What the metric lost, positive where it got worse."""
        return before - after if self.higher else after - before


@dataclass(frozen=True)
class _Recipe:
    make: Callable[[], nn.Module]
    full: Schedule
    short: Schedule


_VISION = {
    "mobilenet": _Recipe(lambda: MobileNet(CLASSES), Schedule(600, 1e-2), Schedule(220, 1e-2)),
    "vit": _Recipe(lambda: VisionTransformer(CLASSES), Schedule(2800, 2e-3, 1.0), Schedule(900, 2e-3, 1.0)),
    "swin": _Recipe(lambda: Swin(CLASSES), Schedule(2800, 1.5e-3, 1.0), Schedule(1200, 1e-3, 1.0)),
}
_DECODER = _Recipe(lambda: Decoder(text.COUNT, CONTEXT), Schedule(1800, 3e-3, 1.0), Schedule(400, 3e-3, 1.0))
NAMES = (*_VISION, "decoder")


def load(name: str, *, short: bool = False) -> Trained:
    """A model of ``NAMES``, trained, or read from the user's cache (``$XDG_CACHE_HOME/dbrq-trained``)."""
    recipe = _DECODER if name == "decoder" else _VISION[name]
    batches = _passages if name == "decoder" else _batches
    with torch.random.fork_rng(devices=[]):
        model = recipe.make()
    model.load_state_dict(weights(name, recipe.make, batches, recipe.short if short else recipe.full))
    if name == "decoder":
        calibration = [ids for ids, _ in batches(16)]
        return Trained(name, model.eval(), calibration, _held()[0][:32], "bits per character", _bits, higher=False)
    calibration = [images for images, _ in batches(16)]
    return Trained(name, model.eval(), calibration, _test_pictures()[0][:32], "accuracy", _accuracy)


def _batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """New pictures in each step: none is seen twice."""
    for step in range(steps):
        yield pictures(_BATCH, seed=1000 + step)


def _passages(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    ids, generator = text.text()[0], torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield text.passages(ids, torch.randint(len(ids) - CONTEXT, (_BATCH // 2,), generator=generator), CONTEXT)


@functools.cache
def _test_pictures() -> tuple[Tensor, Tensor]:
    return pictures(1800, seed=1, test=True)


@functools.cache
def _held() -> tuple[Tensor, Tensor]:
    ids = text.text()[1]
    return text.passages(ids, torch.arange(0, len(ids) - CONTEXT, CONTEXT)[:512], CONTEXT)


@torch.inference_mode()
def _accuracy(model: nn.Module) -> float:
    images, labels = _test_pictures()
    guesses = torch.cat([model(part).argmax(1) for part in images.split(250)])
    return (guesses == labels).double().mean().item()


@torch.inference_mode()
def _bits(model: nn.Module) -> float:
    ids, following = _held()
    logits = torch.cat([model(part) for part in ids.split(64)])
    return F.cross_entropy(logits.flatten(0, 1), following.flatten()).item() / math.log(2)
