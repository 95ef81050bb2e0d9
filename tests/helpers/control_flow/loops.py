"""Models that loop and recurse."""

from __future__ import annotations

import functools
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.control_flow.runs import D, Named, even, linears


class WhileTensor(Named):
    def forward(self, x, left):
        h = self.a(x)
        while left > 0:
            h = torch.relu(self.b(h))
            left = left - 1
        return self.out(h)


class ModuleBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = linears(2)
        self.block = nn.Sequential(nn.Linear(D, D), nn.ReLU())

    def forward(self, x, trips):
        h = self.stem(x)
        for _ in range(trips):
            h = self.block(h)
        return self.out(h)


class FunctionalBody(Named):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) * 0.15)
        self.bias = nn.Parameter(torch.randn(D) * 0.1)

    def forward(self, x, trips):
        h = self.a(x)
        for _ in range(trips):
            h = F.relu(F.linear(h, self.weight, self.bias)) + x
        return self.out(h)


class NestedLoops(Named):
    def forward(self, x, outer, inner):
        h = self.a(x)
        for _ in range(outer):
            for _ in range(inner):
                h = torch.relu(self.b(h))
            h = self.c(h) + x
        return self.out(h)


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(3))
        self.out = nn.Linear(D, D)

    def forward(self, x, keep):
        h = x
        for layer, kept in zip(self.layers, keep, strict=True):
            if kept:
                h = h + layer(h)
        return self.out(h)


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*linears(4))
        self.exits = nn.ModuleList(nn.Linear(D, 4) for _ in range(4))

    def forward(self, x, exit):
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if number == exit:
                return self.exits[number](x)
        return x


class ForElse(Named):
    """Leaves the loop by break, or goes on to its else."""

    def forward(self, x, stop):
        h = torch.relu(self.a(x))
        for step in range(3):
            if step == stop:
                break
            h = torch.relu(self.b(h))
        else:
            h = self.c(h)
        return self.out(h)


class Generator(Named):
    def states(self, h, trips):
        for _ in range(trips):
            h = torch.relu(self.b(h))
            yield h

    def forward(self, x, trips):
        h = self.a(x)
        for state in self.states(h, trips):
            h = h + state
        return self.out(h)


class LeftGenerator(Generator):
    """The loop ends while its generator could go on."""

    def forward(self, x, trips):
        for number, state in enumerate(self.states(self.a(x), 9)):
            h = state
            if number == trips:
                break
        return self.out(h)


class Comprehension(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, D), nn.Linear(D, D)

    def forward(self, x, width):
        return self.out(torch.stack([torch.relu(self.body(part)) for part in x.split(4, 1)[:width]]).sum(0))


class Reduce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(linears(3)), nn.Linear(D, D)

    def forward(self, x, count):
        return self.out(functools.reduce(lambda h, layer: torch.relu(layer(h)), self.layers[:count], x))


class CalledTimes(nn.Module):
    """A child called 0 to n times with the same input; its results are in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.stem = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 4)), nn.Linear(D, D)

    def forward(self, x, times):
        h = torch.relu(self.stem(x))
        return [self.child(h) for _ in range(times)], h


class VaryingCat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(linears(3)), nn.Linear(D, D)

    def forward(self, x, count):
        return self.out(torch.cat([head(x) for head in self.heads[:count]], 0))


class RandomLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(even(linears(4))), nn.Linear(D, D)

    def forward(self, x, seed):
        dice = random.Random(seed)
        for number in dice.sample(range(4), dice.randint(1, 4)):
            x = torch.relu(self.layers[number](x))
        return self.out(x)


class Halting(Named):
    """Adaptive computation: each row has its number of steps."""

    def forward(self, x, steps):
        h = torch.relu(self.a(x))
        while (steps > 0).any():
            h = torch.where((steps > 0)[:, None], torch.relu(self.b(h)), h)
            steps = steps - 1
        return self.out(h)


class GrowingCache(nn.Module):
    """A decoder's loop: each step appends to the cache and attends to all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, steps):
        keys = values = None
        outputs = []
        for _ in range(steps):
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            keys = k if keys is None else torch.cat([keys, k], 1)
            values = v if values is None else torch.cat([values, v], 1)
            x = self.out((torch.softmax(q @ keys.transpose(1, 2) / 4, -1) @ values).squeeze(1)) + x
            outputs.append(x)
        return torch.stack(outputs, 1)


class Recurrence(nn.Module):
    """A gated cell written by hand, over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new, self.out = nn.Linear(2 * D, D), nn.Linear(2 * D, D), nn.Linear(D, D)

    def forward(self, x):
        h = torch.zeros(x.shape[0], D)
        for step in range(x.shape[1]):
            both = torch.cat([x[:, step], h], -1)
            z = torch.sigmoid(self.gate(both))
            h = h + z * (torch.tanh(self.new(both)) - h)
        return self.out(h)


class Pyramid(nn.Module):
    """Halves the image until it is small: the size of the image says how often."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        while min(x.shape[2:]) > 4:
            x = F.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.out(x.mean((2, 3)))


# Recursion


class Depth(Named):
    names = "linear"

    def forward(self, x, depth):
        h = torch.relu(self.linear(x))
        return self(h, depth - 1) + h if depth else h


class Tree(nn.Module):
    """A tree LSTM over nested pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.gates, self.new = nn.Linear(D, D), nn.Linear(2 * D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, tree):
        if isinstance(tree, Tensor):
            return torch.tanh(self.leaf(tree))
        both = torch.cat([self(tree[0]), self(tree[1])], -1)
        left, right = torch.sigmoid(self.gates(both)).chunk(2, -1)
        kept, added = both.chunk(2, -1)
        return left * kept + right * added + torch.tanh(self.new(both))


class ThroughChild(nn.Module):
    class Child(Named):
        names = "a"

        def forward(self, x, depth, parent):
            h = torch.relu(self.a(x))
            return parent(h, depth - 1) if depth else h

    def __init__(self) -> None:
        super().__init__()
        self.child, self.out = ThroughChild.Child(), nn.Linear(D, D)

    def forward(self, x, depth):
        return self.out(self.child(x, depth, self))
