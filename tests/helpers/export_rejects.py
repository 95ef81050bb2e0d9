"""Small models as people write them, each of which ``torch.export.export`` of torch 2.13 rejects, strict and not.

Most look at values and go one way on all good inputs: they validate, guard against rare cases, stop when nothing
changes. A run follows them; a trace without values cannot.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its calls.

    Attributes:
        make: makes the model.
        example: what it is exported, calibrated and lowered with.
        other: good arguments of other sizes; None: the model allows none.
        off: arguments for which the code would go another way, which the graph has to notice; None: there are none.
    """

    make: Callable[[], nn.Module]
    example: Callable[[], tuple]
    other: Callable[[], tuple] | None
    off: Callable[[], tuple] | None = None


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, 8)


def image(batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, 8, 8)


class Rows(nn.Module):
    """``[n, 8]`` to ``[n, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def layers(self, x):
        return self.last(F.relu(self.first(x)))


class Image(nn.Module):
    """``[b, 3, h, w]`` to ``[b, 4, h, w]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def layers(self, x):
        return self.last(F.relu(self.first(x)))


# Looking at values, and going on


class Validates(Rows):
    """Raises on bad input, rather than give NaN."""

    def forward(self, x):
        if not torch.isfinite(x).all():
            raise ValueError("the input holds NaN or infinity")
        return self.layers(x)


class Rescales(Image):
    """Takes images of 0 to 1, or of 0 to 255."""

    def forward(self, x):
        if x.max().item() > 1.5:
            x = x / 255
        return self.layers(x)


class DropsPadding(Rows):
    """Leaves rows of zeros out, where there are any."""

    def forward(self, x):
        padding = x.abs().sum(-1).eq(0)
        if padding.any():
            x = x[~padding]
        return self.layers(x)


class Scope(Rows):
    """A context manager, whose end looks at what was computed inside."""

    @contextlib.contextmanager
    def finite(self):
        kept: list[Tensor] = []
        yield kept
        for value in kept:
            if value.isnan().any():
                raise ArithmeticError("NaN")

    def forward(self, x):
        with self.finite() as kept:
            y = self.layers(x)
            kept.append(y)
        return y


class Stages(Rows):
    """A generator that is told, by ``send``, whether to go on."""

    def stages(self, x):
        hidden = F.relu(self.first(x))
        if (yield hidden):
            yield self.last(hidden)

    def forward(self, x):
        stages = self.stages(x)
        hidden = next(stages)
        return stages.send(bool((hidden > 0).any()))


class Counts(Rows):
    """A buffer that counts calls, and is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        if self.calls.item() > 1_000_000:
            self.calls.zero_()
        return self.layers(x)


# Steering by tensors


class Plan(Rows):
    """Which layer comes when is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("plan", torch.tensor([1, 0]))

    def forward(self, x):
        for which in self.plan.tolist():
            x = torch.tanh(self.middle[which](x)) if which else self.middle[which](x)
        return self.layers(x)


class Settles(Rows):
    """A loop for as long as values move."""

    def forward(self, x):
        steps = 0
        while x.abs().mean() > 1e-6 and steps < 2:
            x, steps = torch.tanh(self.first(x)), steps + 1
        return self.last(x)


class LeavesEarly(Rows):
    """Leaves a stack of layers if one of them changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.stack:
            new = torch.tanh(layer(x))
            if torch.allclose(new, x):
                break
            x = new
        return self.last(x)


class Descends(Rows):
    """Calls itself, until there is nothing left."""

    def descend(self, x, depth: int):
        if depth == 0 or x.norm() < 1e-6:
            return x
        return self.descend(torch.tanh(self.first(x)) + x, depth - 1)

    def forward(self, x):
        return self.last(self.descend(x, 2))


# Sizes that are values


class ByKind(Rows):
    """Rows of one kind at a time."""

    def forward(self, x, kind):
        out = torch.zeros_like(x)
        for k in kind.unique():
            chosen = kind == k
            out[chosen] = torch.tanh(self.first(x[chosen]))
        return self.last(out)


class Experts(Rows):
    """A mixture of experts, of which idle ones are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        which = x[:, 0].gt(0).long()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = torch.where(which == number)[0]
            if mine.numel():
                out.index_add_(0, mine, expert(x[mine]))
        return self.last(out)


class Chosen(Rows):
    """The rows that a mask names, if it names any."""

    def forward(self, x, mask):
        chosen = mask.nonzero().flatten()
        if chosen.numel() == 0:
            return self.layers(x)
        return self.layers(x[chosen])


class Lengths(Rows):
    """A mask as wide as the longest sequence, which cuts the padding that nobody needs."""

    def forward(self, x, lengths):
        mask = torch.arange(lengths.max().item()) < lengths[:, None]
        if mask.shape[1] != x.shape[1]:
            x = x[:, : mask.shape[1]]
        y = F.relu(self.first(x)) * mask[..., None]
        return self.last(y.sum(1) / lengths[:, None])


# Objects


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Bag(dict):
    """A dict with attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ReturnsDataclass(Rows):
    def forward(self, x):
        hidden = F.relu(self.first(x))
        return Output(self.last(hidden), hidden)


class ReturnsBag(Rows):
    def forward(self, x):
        hidden = F.relu(self.first(x))
        return Bag(logits=self.last(hidden), hidden=hidden)


class OwnMemory(Rows):
    """Makes sure that it does not write to the caller's memory."""

    def forward(self, x):
        y = x.contiguous()
        if y.data_ptr() == x.data_ptr():
            y = y.clone()
        return self.layers(y.mul_(0.5))


class DeepCopies(Rows):
    """Keeps the input as it came."""

    def forward(self, x):
        before = copy.deepcopy(x)
        return self.layers(x) + before[..., :4]


CASES = {
    case.make.__name__: case
    for case in (
        Case(Validates, lambda: (rows(5),), lambda: (rows(7),), lambda: (rows(5) * float("nan"),)),
        Case(Rescales, lambda: (image(),), lambda: (image(3),), lambda: (image() * 255,)),
        Case(DropsPadding, lambda: (rows(5),), lambda: (rows(7),), lambda: (rows(5) * torch.eye(5)[:, :1],)),
        Case(Scope, lambda: (rows(5),), lambda: (rows(7),)),
        Case(Stages, lambda: (rows(5),), lambda: (rows(7),)),
        Case(Counts, lambda: (rows(5),), lambda: (rows(7),)),
        Case(Plan, lambda: (rows(5),), lambda: (rows(7),)),
        Case(Settles, lambda: (rows(5),), lambda: (rows(7),), lambda: (torch.zeros(5, 8),)),
        Case(LeavesEarly, lambda: (rows(5),), lambda: (rows(7),)),
        Case(Descends, lambda: (rows(5),), lambda: (rows(7),), lambda: (torch.zeros(5, 8),)),
        Case(ByKind, lambda: (rows(5), torch.tensor([0, 3, 0, 3, 0])), lambda: (rows(3), torch.tensor([1, 1, 2])),
             lambda: (rows(5), torch.arange(5))),
        Case(Experts, lambda: (rows(8),), lambda: (rows(12),), lambda: (rows(8).abs(),)),
        Case(Chosen, lambda: (rows(5), torch.tensor([1, 0, 1, 1, 0])), lambda: (rows(4), torch.tensor([1, 0, 0, 1])),
             lambda: (rows(5), torch.zeros(5, dtype=torch.long))),
        Case(Lengths, lambda: (rows(2, 6), torch.tensor([3, 5])), lambda: (rows(3, 7), torch.tensor([3, 2, 4])),
             lambda: (rows(2, 6), torch.tensor([3, 6]))),
        Case(ReturnsDataclass, lambda: (rows(5),), lambda: (rows(7),)),
        Case(ReturnsBag, lambda: (rows(5),), lambda: (rows(7),)),
        Case(OwnMemory, lambda: (rows(5),), lambda: (rows(7),)),
        Case(DeepCopies, lambda: (rows(5),), lambda: (rows(7),)),
    )
}  # fmt: skip
