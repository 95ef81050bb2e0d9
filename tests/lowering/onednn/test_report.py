"""``report`` and ``profile`` of models lowered to oneDNN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.networks import Counts, by_network, name_for, network
from tests.helpers.onednn import lower
from tests.helpers.patterns import SIZES, conv
from tests.helpers.running import convert, run


@by_network
def test_report(make, shape):
    lowered, _, _ = network(name_for(shape))
    rows = {row.path: row for row in dbrq.report(lowered).rows}
    assert dbrq.report(lowered).coverage == 1.0
    layers = [row for row in rows.values() if row.op in ("conv2d", "linear")]
    assert layers and all(row.kernel.startswith(("onednn: conv2d", "onednn: linear")) for row in layers), dbrq.report(
        lowered
    )


@by_network
def test_profile(make, shape):
    lowered, _, x = network(name_for(shape))
    found = dbrq.profile(lowered, x, repeats=3)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert all(row.microseconds > 0 for row in found.rows)
    layers = [row for row in found.rows if row.computes.startswith(("conv2d", "linear"))]
    assert layers and all(row.gops and "torch" not in row.kernel for row in layers)
    for word in ("op", "computes", "kernel", "us", "share", layers[0].kernel, layers[0].op):
        assert word in str(found)
    assert torch.equal(run(lowered, x), run(lowered, x))


def test_profile_of_what_is_not_lowered():
    with pytest.raises(dbrq.errors.ConfigurationError, match="lower"):
        dbrq.profile(nn.Linear(2, 2), torch.randn(1, 2))


def test_profile_of_models_that_write_leaves_their_state():
    x = torch.randn(3, 16)
    lowered = lower(convert(Counts().eval(), x).quantized, x)
    before = lowered.state_dict()["calls"].clone()
    dbrq.profile(lowered, x, repeats=5)
    assert torch.equal(lowered.state_dict()["calls"], before)


def test_stages_can_be_looked_at():
    lowered, _, x = network("convnet")
    run(lowered, x)
    stages = dbrq.lowered_form(lowered).stages()
    assert list(stages) == ["graph", "partitions", "segments", "plan"] and all(stages.values())
    assert "decomposed.quantize_per_tensor" in stages["graph"]
    assert "decomposed.quantize_per_tensor" not in stages["partitions"] and "conv2d" in stages["plan"]


def test_what_is_fused_can_be_printed(capsys):
    model, x = nn.Sequential(conv(), nn.GELU(), conv(2, 8)).eval(), torch.randn(SIZES[2])
    lower(convert(model, x).quantized, x, verbose=True)
    said = capsys.readouterr()
    assert not said.out and "conv2d + gelu + quantize" in said.err
