"""Models that choose among modules and weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.control_flow.runs import D, even, linears


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
