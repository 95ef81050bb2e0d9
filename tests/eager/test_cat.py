"""``cat`` and ``stack``, against FX graph mode."""

import pytest
import torch

from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches
from tests.helpers.models import Between
from tests.helpers.running import convert

CATS = {
    "list": lambda x, y: torch.cat([x, y], 1),
    "tuple": lambda x, y: torch.cat((x, y), 1),
    "dim=": lambda x, y: torch.cat([x, y], dim=1),
    "tensors=": lambda x, y: torch.cat(tensors=[x, y], dim=1),
    "negative dim": lambda x, y: torch.cat([x, y], -3),
    "default dim": lambda x, y: torch.cat([x, y]),
    "last dim": lambda x, y: torch.cat((x, y), 3),
    "the same twice": lambda x, y: torch.cat([x, x], 1),
    "the same twice and another": lambda x, y: torch.cat([x, y, x], 1),
    "one": lambda x, y: torch.cat([x], 1),
    "concat": lambda x, y: torch.concat([x, y], 1),
    "concatenate": lambda x, y: torch.concatenate([x, y], 1),
    "concatenate axis": lambda x, y: torch.concatenate([x, y], axis=1),
    "cat of a cat": lambda x, y: torch.cat([torch.cat([x, y], 1), y], 1),
    "stack": lambda x, y: torch.stack([x, y], 2).flatten(1, 2),
    "stack keyword": lambda x, y: torch.stack(tensors=(x, y), dim=-1).sum(-1),
}


@by_name(CATS, "op")
def test_cat(op):
    model = Between(op, 2)
    assert_matches(model, model.example)


@pytest.mark.parametrize("spelling", [s for s in CATS if not s.startswith("stack keyword")])
def test_cat_of_two_producers_is_int8_with_shared_qparams(spelling):
    model = Between(CATS[spelling], 2)
    converted = convert(model, model.example).quantized
    found = [op for op in converted._auto_quant_state.ops() if op.op in ("cat", "stack")]
    for op in found:
        assert op.decision.precision == "int8"
        assert {read.value for read in op.decision.reads} == {op.decision.writes}
