"""Values that share memory or are still alive are not written over; in-place ops show where they should."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.images import small_images
from tests.helpers.judging import assert_matches
from tests.helpers.models import Call


def read_after_add(m, x):
    a = m.first(x)
    b = m.second(x)
    s = a + b  # the kernel accumulates into one operand, which lives on
    return m.last(s), m.last(b), a


@pytest.mark.parametrize(
    "fn",
    [
        read_after_add,
        lambda m, x: (m.last(x + m.first(x)), x),
        lambda m, x: (m.second(x).add_(m.first(x)), x),
        lambda m, x: (F.relu_(m.first(x)), m.second(x)),
        lambda m, x: [m.last(y.add_(m.first(x))) for y in [m.second(x)]] + [x],
    ],
)
def test_a_value_that_is_still_alive_is_not_overwritten(fn):
    model = Call(fn, first=nn.Conv2d(4, 4, 1), second=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 3, 1))
    x = small_images()
    before = x.clone()
    converted = assert_matches(model, x, fx=False)
    with torch.no_grad():
        converted(x)
    assert torch.equal(x, before)


def test_a_residual_stream_kept_in_a_list():
    def forward(m, x):
        kept = [x]
        for conv in (m.first, m.second, m.last):
            kept.append(kept[-1] + conv(kept[-1]))
        return sum(kept)

    model = Call(forward, first=nn.Conv2d(4, 4, 1), second=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 4, 1))
    assert_matches(model, small_images(), fx=False)


def test_in_place_through_a_view_is_seen_by_the_base():
    def forward(m, x):
        y = m.first(x)
        y[:, :2].mul_(2.0)
        return m.last(y)

    model = Call(forward, first=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 3, 1))
    assert_matches(model, small_images(), fx=False)


def test_buffers_that_each_run_writes_to():
    """What a run knows of a tensor that outlives it is forgotten: the next one would take it for another value."""

    class Follows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x):
            y = torch.relu(self.first(x))
            self.seen.mul_(0.9).add_(y.mean(0) * 0.1)
            return self.last(y - self.seen)

    torch.manual_seed(0)
    x = torch.randn(16, 8)
    quantized = dbrq.quantize(Follows().eval(), [x, x])
    graph = dbrq.rewrite(quantized, x)
    for _ in range(3):
        assert torch.allclose(quantized(x), graph(x), atol=1e-5)  # which has int8 in every run
        assert not quantized.seen.__dict__
