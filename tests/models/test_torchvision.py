"""Models people use, lowered to oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

import dbrq
from tests.helpers.cases import settled
from tests.helpers.judging import sqnr
from tests.helpers.onednn import lower
from tests.helpers.running import run

ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mobilenet_v3_small": (lambda: torchvision.models.mobilenet_v3_small(), (1, 3, 64, 64)),
    "squeezenet": (lambda: torchvision.models.squeezenet1_1(), (1, 3, 64, 64)),
    "vit": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10), (2, 3, 32, 32)),
    "swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10),
        (1, 3, 64, 64),
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_model_that_people_use(name):
    make, shape = ZOO[name]
    model, xs = settled(make()), [torch.randn(shape) for _ in range(2)]
    prepared = dbrq.prepare(model, xs[0])
    dbrq.calibrate(prepared, xs)
    quantized = dbrq.convert(prepared)
    lowered = lower(quantized, xs[0])
    for x in (xs[0], torch.cat([xs[1]] * 3)):
        expected, got, reference = run(model, x), run(lowered, x), run(quantized, x)
        assert sqnr(expected, got) >= sqnr(expected, reference) - 1.0 or sqnr(reference, got) > 40
    layers = {
        row.path for row in dbrq.report(quantized).rows if row.op in ("conv2d", "linear") and row.precision == "int8"
    }
    assert not layers & set(dbrq.lowered_form(lowered).in_torch), dbrq.lowered_form(lowered).in_torch
