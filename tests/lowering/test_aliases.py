"""A value that is alive is not written over by the kernel that sums into it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.judging import assert_close
from tests.helpers.models import Call
from tests.helpers.patterns import ALIVE, IMAGE, conv, same
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert, floats, run


@pytest.mark.parametrize("kind", ["conv", "linear"])
@pytest.mark.parametrize("name", ALIVE)
def test_a_value_that_is_alive_is_not_written_over(name, kind):
    layer = same if kind == "conv" else lambda: nn.Linear(10, 10)
    parts = {"a": layer(), "b": layer(), "c": layer(), "d": conv(2, 4) if kind == "conv" else layer()}
    model = Call(lambda m, x: ALIVE[name](m, x, m.a(x)), **parts, w=torch.randn(IMAGE)).eval()
    x = torch.randn(IMAGE)
    quantized, before = convert(model, x).quantized, x.clone()
    lowered = dbrq.lower(quantized, x)
    with torch.no_grad():
        first, second = lowered(x), lowered(x)
    assert torch.equal(x, before)
    assert_close(first, run(dbrq.rewrite(quantized, x), x))
    assert_close(first, fake_quantized(quantized, model, x))
    assert all(map(torch.equal, floats(first), floats(second)))
