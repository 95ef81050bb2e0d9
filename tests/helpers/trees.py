"""A small tree of modules, and which of its layers stay in float, here and in FX graph mode."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, default_per_channel_weight_observer, get_default_qconfig

import dbrq
from tests.helpers.judging import assert_matches
from tests.helpers.running import fx_quantize

DEFAULT = get_default_qconfig("onednn")
WEIGHT = default_per_channel_weight_observer


def everything() -> QConfigMapping:
    return QConfigMapping().set_global(DEFAULT)


class Leaf(nn.Module):
    def __init__(self, activation=F.relu):
        super().__init__()
        self.a, self.b, self.activation = nn.Linear(8, 8), nn.Linear(8, 8), activation

    def forward(self, x):
        return self.b(self.activation(self.a(x)))


class Middle(nn.Module):
    def __init__(self, activation=F.relu):
        super().__init__()
        self.leaf, self.conv, self.other = Leaf(activation), nn.Linear(8, 8), Leaf(activation)

    def forward(self, x):
        return self.other(self.conv(self.leaf(x)))


class Tree(nn.Module):
    """Linear layers at three depths."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Middle(activation), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x)) + 1.0))


LAYERS = {
    "first",
    "last",
    "middle.conv",
    "middle.leaf.a",
    "middle.leaf.b",
    "middle.other.a",
    "middle.other.b",
}


def in_float(model: nn.Module, mapping: QConfigMapping, x=None) -> set[str]:
    """Paths of the linear layers that stay float; the model must be right, and each must say why."""
    converted = assert_matches(model, torch.randn(16, 8) if x is None else x, mapping, fx=False)
    found = [row for row in dbrq.report(converted).rows if row.op in ("linear", "conv2d") and row.precision == "float"]
    assert all(row.reason == "its qconfig is None" for row in found)
    return {row.path for row in found}


def in_float_by_fx(model: nn.Module, mapping: QConfigMapping, x=None) -> set[str]:
    x = torch.randn(16, 8) if x is None else x
    graph = fx_quantize(copy.deepcopy(model), x, mapping).graph_module
    return {
        path
        for path, module in graph.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        and ".quantized" not in type(module).__module__
        and "_packed_params" not in path
    }
