"""Models that branch: on data, arguments, attributes, sizes, kinds of inputs."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.control_flow.runs import D, Named, linears


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
