"""A small net for what trains, prepared and converted."""

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.running import convert

MAPPINGS = {"observed": None, "fake quantized": get_default_qat_qconfig_mapping("onednn")}
recipes = pytest.mark.parametrize("mapping", list(MAPPINGS.values()), ids=list(MAPPINGS))


def small_net() -> nn.Sequential:
    torch.manual_seed(1)
    features = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(288, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


BATCH = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
V = torch.randn(5, 8, generator=torch.Generator().manual_seed(6))


def prepared_net(mapping=None) -> nn.Sequential:
    return dbrq.prepare(small_net().train(), BATCH, mapping)


def converted_net() -> nn.Sequential:
    return convert(small_net(), BATCH).quantized


def close(expected, got, decibels: float = 30) -> bool:
    return sqnr(expected.detach().float(), got.detach().float()) > decibels
