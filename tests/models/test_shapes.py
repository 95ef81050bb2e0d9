"""Batches of none, other batches, one output channel, views that keep the batch free."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.images import small_images
from tests.helpers.judging import assert_matches, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run


def test_reshape_by_the_batch_leaves_the_batch_free():
    model = Call(
        lambda m, x: m.last(m.conv(x).reshape(x.size(0), -1)), conv=nn.Conv2d(4, 4, 1), last=nn.Linear(256, 30)
    )
    converted = assert_matches(model, small_images(32, 4, 8, 8))
    for batch in (1, 5):
        x = small_images(batch, 4, 8, 8)
        assert sqnr(run(model, x), run(converted, x)) > 25


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(-1, 256),
        lambda x: x.view(2, 4, 64).view(2, 256),
        lambda x: F.relu(x).view(x.shape[0], -1),
        lambda x: x.view(x.size(0), -1).view(x.size(0), 256),
    ],
)
@pytest.mark.parametrize("fuse", [True, False])
def test_view_after_a_convolution(move, fuse):
    # oneDNN returns channels_last, of which no such view exists; FX graph mode fails here.
    model = Call(lambda m, x: m.last(move(m.conv(x))), conv=nn.Conv2d(4, 4, 3, padding=1), last=nn.Linear(256, 3))
    assert_matches(model, small_images(), fx=False, fuse=fuse)


@pytest.mark.parametrize(
    "cls, shape",
    [
        (nn.Conv1d, (2, 4, 1)),
        (nn.Conv2d, (2, 4, 1, 1)),
        (nn.Conv3d, (2, 4, 1, 1, 1)),
        (nn.Conv2d, (1, 4, 1, 7)),
        (nn.Conv2d, (1, 4, 7, 1)),
    ],
)
@pytest.mark.parametrize("kernel, padding", [(1, 0), (3, 1)])
def test_one_by_one_inputs(cls, shape, kernel, padding):
    model = nn.Sequential(cls(4, 6, kernel, padding=padding), nn.ReLU(), cls(6, 5, kernel, padding=padding))
    converted = assert_matches(model, torch.randn(shape), fx=False)
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_of_one_output_channel(cls, per_channel):
    # One scale is per-tensor or per-channel; some kernels tell by the count.
    n = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[cls]
    from torch.ao.quantization import (
        QConfig,
        default_observer,
        default_per_channel_weight_observer,
        default_weight_observer,
    )

    weight = default_per_channel_weight_observer if per_channel else default_weight_observer
    qconfig = QConfig(default_observer, weight)
    model = nn.Sequential(cls(4, 1, 3), nn.ReLU(), cls(1, 4, 1), cls(4, 1, 1))
    converted = assert_matches(model, torch.randn(2, 4, *[6] * n), qconfig, fx=False)
    assert dbrq.report(converted).coverage == 1.0


def test_linear_of_one_output_and_of_one_input():
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    converted = assert_matches(model, torch.randn(5, 8))
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize(
    "model, shape",
    [
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)), (4, 8, 8)),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 3, 1)), (4, 8, 8)),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)), (4, 8, 8)),
        (nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)), (8,)),
        (nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 6, 1)), (4, 8)),
        (nn.Sequential(nn.Conv3d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 6, 1)), (4, 4, 4, 4)),
        (
            Call(
                lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1) + 1),
                a=nn.Conv2d(4, 4, 1),
                b=nn.Conv2d(4, 4, 1),
                c=nn.Conv2d(8, 2, 1),
            ),
            (4, 8, 8),
        ),
        (
            Call(
                lambda m, x: m.c(F.relu(m.a(x) + m.b(x))),
                a=nn.Conv2d(4, 4, 1),
                b=nn.Conv2d(4, 4, 1),
                c=nn.Conv2d(4, 2, 1),
            ),
            (4, 8, 8),
        ),
    ],
)
def test_batch_of_none(model, shape):
    converted = convert(model, torch.randn(32, *shape)).quantized
    empty = torch.randn(0, *shape)
    got, expected = run(converted, empty), run(model, empty)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    full = torch.randn(3, *shape)
    assert sqnr(run(model, full), run(converted, full)) > 20, "the next call is as good as ever"


def test_a_batch_of_none_as_the_example():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)).eval()
    prepared = dbrq.prepare(model, torch.randn(0, 4, 8, 8))
    x = small_images()
    dbrq.calibrate(prepared, [x])
    assert sqnr(run(model, x), run(dbrq.convert(prepared), x)) > 25
