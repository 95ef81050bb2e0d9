"""Model definitions of torchvision, timm and transformers with random weights, for ``zoo.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import models  # noqa: F401  declares the compiled ops that importing torchvision, which timm does too, asks for
import torch
import torch.nn.functional as F
from peers.worker import call
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: The batch of each of the three shapes: two to calibrate on, one that only comes at inference.
BATCHES = (2, 3, 1)


@dataclass(frozen=True)
class Architecture:
    """How to make one model and its inputs.

    Attributes:
        library: where the definition comes from.
        name: unique within the library.
        make: gives the model, in any mode.
        item: shape number (0 and 1 to calibrate on, 2 for inference only) -> one call's fresh random arguments: a
            tensor, a tuple of positional arguments, or a dict of keyword arguments.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    item: Callable[[int], Any]

    def build(self) -> nn.Module:
        """The model in eval mode, always the same."""
        torch.manual_seed(0)
        model = self.make().eval()
        _settle(model, self.item)
        return model


def images(*sizes: int, channels: int = 3, frames: int = 0) -> Callable[[int], Tensor]:
    """Square images, or films of ``frames``: one size for each shape number, or one size for all."""
    inner = (channels, frames) if frames else (channels,)

    def item(number: int) -> Tensor:
        size = sizes[number % len(sizes)]
        return torch.randn(BATCHES[number], *inner, size, size)

    return item


def every() -> Iterator[Architecture]:
    """All architectures of the libraries."""
    from . import of_timm, of_torchvision, of_transformers

    return itertools.chain(of_transformers.every(), of_timm.every(), of_torchvision.every())


@torch.no_grad()
def _settle(model: nn.Module, item: Callable[[int], Any]) -> None:
    """Weights and statistics as they might be after training: random, but no branch silent and no signal dying out."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
        elif parameter.dim() == 1 and parameter.numel() > 1 and 0 < parameter.abs().max() < 1e-3:
            parameter.fill_(0.1)  # layer scale
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
            continue
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            # An initial deviation of 0.02 is meant for wide layers: in narrow ones ten of them leave nothing.
            gain = weight.std() * weight[0].numel() ** 0.5
            if gain < 0.5:
                weight.mul_(0.7 / gain)
        elif weight.dim() == 1 and not weight.any():  # a norm that begins by switching off its residual branch
            weight.fill_(0.25)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        return
    with _Residuals() as residuals:
        call(model, item(0))
    for scale in residuals.found.values():  # at full strength, a deep random network amplifies any rounding beyond use
        scale.fill_(0.25)
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the average over all passes
    for number in (0, 1):
        call(model, _joined([item(number) for _ in range(8)]))
    for norm in norms:
        norm.eval()


class _Residuals(TorchFunctionMode):
    """Finds the batch norms whose result is summed with something else: the ends of residual branches.

    Attributes:
        found: id -> the scale of such a norm; of a sum of two norms the first one's.
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}  # id of a result -> scale, and the result, kept alive

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _SUMS:
            scale = next((self._scales[id(a)][0] for a in args[:2] if id(a) in self._scales), None)
            if scale is not None:
                self.found[id(scale)] = scale
        result = func(*args, **(kwargs or {}))
        if func is F.batch_norm and isinstance(scale := (kwargs or {}).get("weight", (*args, *[None] * 4)[3]), Tensor):
            self._scales[id(result)] = scale, result
        return result


_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


def _joined(items: list[Any]) -> Any:
    """Calls' arguments as those of one call with a larger batch; the first one where they are not all tensors."""
    first = items[0]
    if isinstance(first, Tensor):
        return torch.cat(items)
    if isinstance(first, dict) and all(isinstance(value, Tensor) for value in first.values()):
        return {name: torch.cat([item[name] for item in items]) for name in first}
    return first
