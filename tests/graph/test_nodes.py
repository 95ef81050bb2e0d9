"""Nodes of graphs."""

import pytest
import torch

from dbrq.graph.nodes import DEQUANTIZE_PER_CHANNEL, quicker


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_is_quicker_computes_the_same(axis, shifted):
    int8 = torch.randint(-128, 128, (5, 7, 3), dtype=torch.int8)
    n = int8.shape[axis]
    scale = torch.rand(n) * 10 ** torch.linspace(-6, 3, n)
    zero_point = torch.arange(n) if shifted else torch.zeros(n, dtype=torch.int64)
    call = (int8, scale, zero_point, axis, -128, 127, torch.int8)
    assert torch.equal(quicker(DEQUANTIZE_PER_CHANNEL)(*call), DEQUANTIZE_PER_CHANNEL(*call))
    assert quicker(torch.relu) is torch.relu
