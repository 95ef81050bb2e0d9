"""``torch.compile`` around models."""

import functools

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.training import BATCH, close, small_net


@pytest.mark.parametrize("where", ["root", "root in place", "child", "child in place", "prepared", "converted"])
def test_compiled(where, tmp_path):
    """dbrq takes the wrapper off; a prepared or converted model that is compiled runs as it does otherwise."""
    torch._dynamo.reset()
    model, expected = small_net(), small_net()(BATCH)
    compiled = functools.partial(torch.compile, backend="eager")
    if where == "root":
        model = compiled(model)
    elif where == "child":
        model[0] = compiled(model[0], fullgraph=True)
    elif where.endswith("in place"):
        (model if "root" in where else model[0]).compile(backend="eager", fullgraph=True)
    prepared = dbrq.prepare(model, BATCH)
    assert type(prepared) is nn.Sequential and type(prepared[0]) is nn.Conv2d
    if where == "prepared":
        prepared = compiled(prepared)
    dbrq.calibrate(prepared, [BATCH])
    converted = dbrq.convert(prepared)
    eager = converted(BATCH)
    again = compiled(converted) if where == "converted" else converted
    with torch.no_grad():
        assert torch.equal(again(BATCH), eager) and torch.equal(again(BATCH[:2]), converted(BATCH[:2]))
    converted.compile(backend="eager")
    assert torch.equal(converted(BATCH), eager)
    assert close(expected, eager) and dbrq.report(again).coverage == 1.0
    assert close(expected, dbrq.lower(again, BATCH)(BATCH)) and dbrq.compare(model, again, BATCH).rows
    dbrq.save(again, tmp_path / "model")
    assert torch.equal(dbrq.load(tmp_path / "model")(BATCH), eager)


def test_a_prepared_model_is_not_prepared_again_through_a_wrapper():
    with pytest.raises(dbrq.ConfigurationError, match="already"):
        dbrq.prepare(torch.compile(dbrq.prepare(small_net(), BATCH), backend="eager"), BATCH)
