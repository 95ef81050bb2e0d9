"""Small models whose forward decides what it runs, and the runs that record their paths: tables for the tests.

What decides is always exact (arguments, attributes, sizes, raw inputs), never a quantized value, so that the quantized
model takes the path of the float model. And what an unrecorded run meets has about the range that was recorded, so that
no right implementation clips it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 16


@dataclass(frozen=True, eq=False)
class Run:
    """One call: positional arguments, and what is set on the model before it."""

    args: tuple
    attributes: dict[str, Any] = field(default_factory=dict)


def run(*args: Any, **attributes: Any) -> Run:
    return Run(args, attributes)


@dataclass(frozen=True, eq=False)
class Off:
    """A run that leaves the recorded paths.

    Attributes:
        run: the call.
        warns: (module path, op) of every warning, with op "" for a leaf module; None: any, each once.
        may: what may warn as well: new ops that have no int8 kernel of their own, skipped producers.
    """

    run: Run
    warns: tuple[tuple[str, str], ...] | None
    may: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its runs.

    Attributes:
        make: makes the model.
        recorded: what calibration sees; the first one is the example of ``prepare``.
        served: other trip counts of recorded loops: int8 all the same, without a warning.
        off: runs that leave the recorded paths.
        paths: how many paths the root has after calibration, where that is beyond doubt.
    """

    make: Callable[[], nn.Module]
    recorded: Sequence[Run]
    served: Sequence[Run] = ()
    off: Sequence[Off] = ()
    paths: int | None = None


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (8, D)), generator=torch.Generator().manual_seed(seed))


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(D, D) for _ in range(count)]


def even(layers: list[nn.Linear]) -> list[nn.Linear]:
    """Layers that with a relu keep the range of their input, for use in any order."""
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layers


class Named(nn.Module):
    """Linear layers of D features under the names given, for models that need nothing else."""

    names = "a b c out"

    def __init__(self) -> None:
        super().__init__()
        for name in self.names.split():
            self.add_module(name, nn.Linear(D, D))


# Branches


class DataBranch(Named):
    def forward(self, x):
        h = self.a(x)
        if x[0, 0] > 0.5:
            h = self.b(h)
        elif x[0, 0] > -0.5:
            h = torch.relu(self.c(h))
        else:
            h = h * 0.5
        return self.out(h)


class NestedBranch(Named):
    def forward(self, x, outer, inner):
        h = torch.relu(self.a(x))
        if outer:
            h = self.b(h)
            h = torch.relu(h) + x if inner else self.c(h)
        elif inner:
            h = h * x
        return self.out(h)


class ArgumentBranch(Named):
    def forward(self, x, mode="b"):
        match mode:
            case "b":
                h = self.b(self.a(x))
            case "c":
                h = self.c(self.a(x)) * 2.0
            case _:
                h = self.a(x) + x
        return self.out(h)


class AttributeBranch(Named):
    way = "short"

    def forward(self, x):
        h = torch.relu(self.a(x))
        if self.way == "long":
            h = torch.relu(self.b(h))
            h = torch.relu(self.c(h))
        return self.out(h)


class SizeBranch(Named):
    def forward(self, x):
        h = self.a(x)
        h = self.b(h) if x.shape[0] > 4 else h + x
        return self.out(h)


class OptionalArgument(Named):
    def forward(self, x, context=None):
        h = self.a(x)
        if context is not None:
            h = h + self.b(context)
        return self.out(torch.relu(h))


class InputKinds(Named):
    """Takes a tensor, a list or a dict."""

    def forward(self, x):
        if isinstance(x, dict):
            h = self.a(x["left"]) + self.b(x["right"])
        elif isinstance(x, list):
            h = self.a(torch.cat(x, 0))
        else:
            h = self.c(x)
        return self.out(h)


class Rank(Named):
    def forward(self, x):
        h = torch.relu(self.a(x))
        if x.dim() == 3:
            h = h + self.b(h.mean(1, keepdim=True))
        return self.out(h)


class FloatBranch(Named):
    """The branches differ in ops without a kernel."""

    def forward(self, x, kind):
        h = self.a(x)
        if kind == "softmax":
            h = torch.softmax(h, -1)
        elif kind == "sigmoid":
            h = torch.sigmoid(h)
        else:
            h = torch.sin(h)
        return self.out(h)


class Join(Named):
    """Two branches that meet in an add, a cat or a linear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.wide = kind, nn.Linear(2 * D, D)

    def forward(self, x, left):
        h = self.a(x)
        y = self.b(h) if left else torch.relu(self.c(h))
        if self.kind == "add":
            return self.out(h + y)
        if self.kind == "cat":
            return self.wide(torch.cat([h, y], -1))
        return self.out(y)


class ConvReluOrResidual(nn.Module):
    """conv-relu fuses on one path; on the other the convolution has a second reader."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x, twice):
        y = self.conv(x)
        z = torch.relu(y)
        if twice:
            z = z + y
        return self.out(z)


class SumOrNot(nn.Module):
    """conv-bn-add-relu fuses on one path, conv-bn-relu on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x, residual):
        x = torch.relu(self.stem(x))
        h = self.bn(self.conv(x))
        if residual:
            h = h + x
        return self.out(torch.relu(h))


class Stride(nn.Module):
    """A convolution whose settings are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2)
        self.out = nn.Linear(8, 4)

    def forward(self, x, stride, padding=0):
        h = torch.relu(F.conv2d(x, self.weight, stride=stride, padding=padding))
        return self.out(F.adaptive_avg_pool2d(h, 2).flatten(2).transpose(1, 2))


class Slope(Named):
    def forward(self, x, slope):
        return self.out(F.leaky_relu(self.a(x), slope))


class Containers(Named):
    def forward(self, x, kind):
        h = torch.relu(self.a(x))
        if kind == "none":
            return None
        if kind == "tuple":
            return self.b(h), h
        if kind == "dict":
            return {"b": self.b(h), "c": [self.c(h), None]}
        return self.out(h)


class InPlace(Named):
    def forward(self, x, how):
        h = self.a(x)
        kept = h
        if how == "relu":
            h.relu_()
        elif how == "add":
            h.add_(x)
        elif how == "item":
            h[:, :4] = 0.0
        return self.out(h) + kept


class InputItself(Named):
    def forward(self, x, early):
        if early:
            return x
        return self.out(torch.relu(self.a(x)))


class Dispatch(Named):
    def forward(self, x, name, times=1.0):
        h = torch.relu(self.a(x))
        table = {
            "partial": functools.partial(self.scaled, factor=2.0),
            "lambda": lambda h: self.c(h),
            "method": self.squared,
        }
        return self.out(table[name](h))

    def scaled(self, h, factor):
        return self.b(h) * factor

    def squared(self, h):
        return h * h


class IntegersOnly(Named):
    def forward(self, x):
        if not x.is_floating_point():
            return x * 2 + 1
        return self.out(torch.relu(self.a(x)))


class Caught(nn.Module):
    """A child raises after it has run half of its ops; the parent catches."""

    class Risky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linears(2)

        def forward(self, x, fail):
            h = torch.relu(self.first(x))
            if fail:
                raise ValueError("of the user's own")
            return self.second(h)

    def __init__(self) -> None:
        super().__init__()
        self.risky, self.backup, self.out = Caught.Risky(), *linears(2)

    def forward(self, x, fail):
        try:
            h = self.risky(x, fail)
        except ValueError:
            h = self.backup(x)
        return self.out(h)


class Ways(nn.Module):
    """A child with two ways, called twice in a run."""

    class Child(Named):
        def forward(self, x, way):
            return torch.relu(self.a(x)) if way else self.b(self.c(x))

    def __init__(self) -> None:
        super().__init__()
        self.child, self.out = Ways.Child(), nn.Linear(D, D)

    def forward(self, x, first, second):
        return self.out(self.child(self.child(x, first), second))


# Loops


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


# Choices of modules and weights


def experts(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D)) for _ in range(count))


class Top1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = experts(4), nn.Linear(D, D)

    def forward(self, x):
        chosen = x[:, :4].argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                y[rows] = expert(x[rows])
        return self.out(y)


class TopK(nn.Module):
    """As mixture-of-experts models have it: weights by a gate, results collected with ``index_add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.out = nn.Linear(D, 4), experts(4), nn.Linear(D, D)

    def forward(self, x):
        weights = torch.softmax(self.gate(x), -1)
        chosen = x[:, :4].topk(2, -1).indices
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).any(-1).nonzero()[:, 0]
            y.index_add_(0, rows, self.experts[number](x[rows]) * weights[rows, number, None])
        return self.out(y + x)


class Stacked(nn.Module):
    """Experts as one parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, D, D) * torch.tensor([0.12, 0.2, 0.35]).view(3, 1, 1))
        self.bias = nn.Parameter(torch.randn(3, D) * 0.1)
        self.out = nn.Linear(D, D)

    def forward(self, x, index):
        return self.out(torch.relu(F.linear(x, self.weight[index], self.bias[index])))


class OneOfSeveral(nn.Module):
    """One of several parameters, at one line."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(D, D) * scale for scale in (0.12, 0.2, 0.35))
        self.out = nn.Linear(D, D)

    def forward(self, x, index):
        return self.out(torch.relu(F.linear(x, self.weights[index])))


class StateMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("start", "middle", "other", "end")
        self.states = nn.ModuleDict(dict(zip(names, even(linears(4)), strict=True)))

    def forward(self, x, program):
        for name in program.split():
            x = torch.relu(self.states[name](x))
        return self.states["end"](x)


def _marked(mark: float, seed: int = 0) -> Tensor:
    """Data whose first element says where to go."""
    x = data(seed=seed)
    x[0, 0] = mark
    return x


def _images(size: int = 10, seed: int = 0) -> Tensor:
    return data(2, 3, size, size, seed=seed)


def _experts(*chosen: int, seed: int = 0, rows: int = 12) -> Tensor:
    """Rows whose first four features are largest at the experts named, in turn."""
    x = data(rows, D, seed=seed)
    x[:, :4] = x[:, :4].clamp(-1, 1)
    for row in range(rows):
        x[row, chosen[(row + 1) % len(chosen)]] = 2.0
        x[row, chosen[row % len(chosen)]] = 2.5
    return x


def _tree(shape: Any, seed: int = 0) -> Any:
    """Nested pairs of zeros as nested pairs of tensors."""
    if shape == 0:
        return data(4, D, seed=seed)
    return _tree(shape[0], 2 * seed + 1), _tree(shape[1], 2 * seed + 2)


def trips(*counts: Any, seed: int = 0) -> list[Run]:
    """One run for each count (or tuple of arguments), each with data of its own."""
    return [run(data(seed=seed + n), *(c if isinstance(c, tuple) else (c,))) for n, c in enumerate(counts)]


def _left(*counts: int) -> list[Run]:
    return [run(data(seed=n), torch.tensor(count)) for n, count in enumerate(counts)]


def _steps(*steps: int) -> Run:
    return run(data(len(steps), D), torch.tensor(steps))


OUT = ("out", "")
CASES: dict[str, Case] = {
    # Branches
    "branch on data": Case(
        DataBranch,
        [run(_marked(1.0)), run(_marked(0.0, seed=1))],
        off=[Off(run(_marked(-1.0, seed=2)), (("", "mul"), OUT))],
        paths=2,
    ),
    "branch on data, one side recorded": Case(
        DataBranch,
        [run(_marked(1.0)), run(_marked(1.0, seed=1))],
        off=[Off(run(_marked(0.0, seed=2)), (("c", ""), OUT), may=(("", "relu"),))],
        paths=1,
    ),
    "nested branch": Case(
        NestedBranch,
        trips((True, True), (True, False), (False, False)),
        off=[Off(run(data(seed=5), False, True), (("", "mul"), OUT))],
        paths=3,
    ),
    "branch on an argument": Case(
        ArgumentBranch,
        [run(data()), run(data(seed=1), "c")],
        off=[Off(run(data(seed=2), "neither"), (("", "add"), OUT))],
        paths=2,
    ),
    "branch on an attribute": Case(
        AttributeBranch, [run(data(), way="short"), run(data(seed=1), way="long")], paths=2
    ),
    "branch on an attribute, short side recorded": Case(
        AttributeBranch,
        [run(data(), way="short")],
        off=[Off(run(data(seed=1), way="long"), (("b", ""), ("c", ""), OUT), may=(("", "relu"),))],
        paths=1,
    ),
    "branch on size": Case(SizeBranch, [run(data(8, D)), run(data(2, D))], paths=2),
    "branch on size, one side recorded": Case(
        SizeBranch, [run(data(8, D)), run(data(5, D))], off=[Off(run(data(2, D)), (("", "add"), OUT))], paths=1
    ),
    "optional argument": Case(OptionalArgument, [run(data()), run(data(seed=1), data(seed=2))], paths=2),
    "kind of input": Case(
        InputKinds,
        [run(data()), run([data(4, D), data(3, D, seed=1)]), run({"left": data(seed=3), "right": data(seed=4)})],
        paths=3,
    ),
    "branches of float ops": Case(
        FloatBranch, trips("softmax", "sigmoid"), off=[Off(run(data(seed=2), "sin"), (OUT,))]
    ),
    "one branch of float ops": Case(
        FloatBranch,
        trips("softmax", "softmax"),
        off=[Off(run(data(seed=2), "sigmoid"), (OUT,), may=(("", "sigmoid"),)), Off(run(data(seed=2), "sin"), (OUT,))],
    ),
    **{f"branches that meet in {kind}": Case(functools.partial(Join, kind), trips(True, False), paths=2)
       for kind in ("add", "cat", "linear")},
    "a new producer for an add": Case(
        functools.partial(Join, "add"), trips(True, True),
        off=[Off(run(data(seed=2), False), (("c", ""), ("", "add")), may=(("", "relu"),))],
    ),
    "a new producer for a linear": Case(
        functools.partial(Join, "linear"), trips(True, True),
        off=[Off(run(data(seed=2), False), (("c", ""), OUT), may=(("", "relu"),))],
    ),
    "fusion valid on one path": Case(
        ConvReluOrResidual, [run(_images(), False), run(_images(seed=1), True)], paths=2
    ),
    "fusion valid on one path, the other first": Case(
        ConvReluOrResidual, [run(_images(), True), run(_images(seed=1), False)], paths=2
    ),
    "fusion recorded, the residual not": Case(
        ConvReluOrResidual, [run(_images(), False)],
        off=[Off(run(_images(seed=1), True), (("", "add"), OUT))],
    ),
    "residual recorded, the fusion not": Case(
        ConvReluOrResidual, [run(_images(), True)],
        off=[Off(run(_images(seed=1), False), (), may=(("", "relu"), OUT))],
    ),
    "sum fused on one path": Case(SumOrNot, [run(_images(), False), run(_images(seed=1), True)], paths=2),
    "stride": Case(
        Stride, [run(_images(), 1), run(_images(seed=1), 2), run(_images(seed=2), 1, 1)],
        off=[Off(run(_images(seed=3), 3), None)],
    ),
    "slope": Case(Slope, trips(0.3, 0.1), off=[Off(run(data(seed=3), 0.2), None)]),
    "containers": Case(Containers, trips("tensor", "tuple", "dict", "none")),
    "in place on one path": Case(InPlace, trips("not", "relu", "add", "item")),
    "the input itself": Case(InputItself, trips(False, True), paths=2),
    "the input itself, first in the example": Case(InputItself, trips(True, False), paths=2),
    "dispatch": Case(
        Dispatch, trips("partial", "lambda"), off=[Off(run(data(seed=2), "method"), (("", "mul"), OUT))], paths=2
    ),
    "integers only": Case(IntegersOnly, [run(data()), run(torch.arange(8))]),
    "integers only, first in the example": Case(IntegersOnly, [run(torch.arange(8)), run(data())]),
    "rank of the input": Case(Rank, [run(data()), run(data(4, 3, D, seed=1))], paths=2),
    "exception caught": Case(Caught, trips(False, True)),
    "exception caught, first in the example": Case(Caught, trips(True, False)),
    "two calls of a child": Case(Ways, trips((True, False), (False, True), (False, False), (True, True))),
    # Loops
    "while on a tensor": Case(WhileTensor, _left(2, 4), served=_left(1, 3, 6)),
    "module body": Case(ModuleBody, trips(2, 4), served=trips(1, 3, 7, seed=5), paths=2),
    "module body, once": Case(ModuleBody, trips(1), served=trips(2, 5, seed=5), paths=1),
    "functional body": Case(FunctionalBody, trips(2, 4), served=trips(1, 3, 7, seed=5), paths=2),
    "functional body, none and some": Case(FunctionalBody, trips(0, 3), served=trips(1, 2, 5, seed=5)),
    "no trip": Case(ModuleBody, trips(0, 2), served=trips(1, 3, seed=5)),
    "no trip after some": Case(ModuleBody, trips(2, 3), off=[Off(run(data(seed=9), 0), (), may=(OUT,))]),
    "some trips after none": Case(
        ModuleBody, trips(0), off=[Off(run(data(seed=9), 2), (("block.0", ""), OUT), may=(("block.1", ""),))]
    ),
    "nested loops": Case(NestedLoops, trips((1, 2), (3, 1), (2, 3)), served=trips((2, 2), (4, 2), (3, 4), seed=5)),
    "layers skipped": Case(LayerDrop, trips(((1, 1, 1),), ((1, 0, 1),), ((0, 1, 0),))),
    "layers skipped that were not": Case(
        LayerDrop, [run(data(), (1, 1, 1))], off=[Off(run(data(seed=9), keep), None) for keep in ((1, 0, 1), (0, 1, 1))]
    ),
    "early exit": Case(
        EarlyExit, trips(0, 2, 9),
        off=[Off(run(data(seed=9), 1), (("exits.1", ""),)), Off(run(data(seed=9), 3), (("exits.3", ""),))], paths=3,
    ),
    "for and else": Case(ForElse, trips(9, 1, 2), off=[Off(run(data(seed=9), 0), (), may=(OUT,))]),
    "generator left early": Case(LeftGenerator, trips(1, 3), served=trips(2, 4, seed=5)),
    "generator": Case(Generator, trips(1, 3), served=trips(2, 5, seed=5)),
    "comprehension": Case(Comprehension, trips(2, 4), served=trips(1, 3, seed=5)),
    "reduce": Case(Reduce, trips(1, 3), off=[Off(run(data(seed=9), 2), (), may=(OUT,))]),
    "child called 0 to n times": Case(CalledTimes, trips(0, 2, 3), served=trips(1, 5, seed=5)),
    "cat of varying number": Case(VaryingCat, trips(1, 3), off=[Off(run(data(seed=9), 2), None)]),
    "random layers": Case(RandomLayers, trips(0, 1, 2, 3), off=[Off(run(data(seed=9), 7), None)]),
    "halting": Case(Halting, [_steps(0, 2, 3), _steps(3, 2, 0)], served=[_steps(4, 1, 5), _steps(1, 1)]),
    "growing cache": Case(GrowingCache, trips(2, 4), served=trips(1, 3, 6, seed=5)),
    "recurrence": Case(
        Recurrence, [run(data(6, n, D, seed=n)) for n in (3, 5)], served=[run(data(6, n, D, seed=n)) for n in (2, 4, 8)]
    ),
    "pyramid": Case(
        Pyramid, [run(_images(8)), run(_images(16))], served=[run(_images(32)), run(_images(64))]
    ),
    # Recursion
    "depth": Case(Depth, trips(0, 1, 2, 3), off=[Off(run(data(seed=9), 6), None)]),
    "tree": Case(
        Tree, [run(_tree(0)), run(_tree((0, 0))), run(_tree(((0, 0), 0), 3)), run(_tree((0, (0, (0, 0))), 5))],
        off=[Off(run(_tree(((0, 0), (0, (0, 0))), 9)), None)],
    ),
    "through a child": Case(ThroughChild, trips(0, 1, 3), off=[Off(run(data(seed=9), 2), None)]),
    # Choices
    "router, top 1": Case(
        Top1, [run(_experts(0, 1)), run(_experts(0, 1, 2, seed=1)), run(_experts(2, seed=2))],
        off=[Off(run(_experts(0, 3, seed=3)), (("experts.3.0", ""), ("experts.3.2", "")),
                 may=(("experts.3.1", ""), OUT))],
    ),
    "router, top k": Case(
        TopK, [run(_experts(0, 1)), run(_experts(0, 1, 2, seed=1)), run(_experts(1, 2, seed=2))],
        off=[Off(run(_experts(0, 3, seed=3)), None)],
    ),
    "experts as one parameter": Case(
        Stacked, trips(0, 1), off=[Off(run(data(seed=2), 2), (("", "linear"),), may=(("", "relu"), OUT))]
    ),
    "experts as one parameter, all recorded": Case(Stacked, trips(0, 1, 2, 0)),
    "one of several parameters": Case(
        OneOfSeveral, trips(2, 1), off=[Off(run(data(seed=2), 0), (("", "linear"),), may=(("", "relu"), OUT))]
    ),
    "one of several parameters, all recorded": Case(OneOfSeveral, trips(0, 1, 2)),
    "state machine": Case(
        StateMachine, trips("start middle", "start middle middle", "middle start"),
        off=[Off(run(data(seed=9), "start other"), (("states.other", ""),), may=(("", "relu"), ("states.end", "")))],
    ),
}  # fmt: skip
