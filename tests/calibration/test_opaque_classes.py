"""Classes that are not looked into: they run in float, and what is around them in int8."""

import warnings

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.running import convert, run
from tests.helpers.trees import Leaf, Tree


class Opaque(nn.Module):
    """With control flow that no recording could hold."""

    def __init__(self):
        super().__init__()
        self.linear, self.child = nn.Linear(8, 8), Leaf()

    def forward(self, x):
        for _ in range(int(x.shape[0] % 3)):
            x = self.linear(x)
        return self.child(x) if x.sum() > 0 else x


def with_opaque_in_the_middle() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Opaque(), nn.Linear(8, 8)), nn.Linear(8, 8))


def assert_right(converted: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(run(model, x), run(converted, x)) > 25


@pytest.mark.parametrize("rows_", [3, 4, 5, 6])
def test_a_class_in_the_middle_of_the_tree(rows_):
    model, x = with_opaque_in_the_middle(), torch.randn(6, 8)
    converted = convert(model, x, non_traceable_module_classes=[Opaque]).quantized
    assert_right(converted, model, x)
    report = dbrq.report(converted)
    assert {row.path for row in report.rows if row.precision == "int8"} == {"0", "1.0", "1.2", "2"}
    below = [row for row in report.rows if row.path.startswith("1.1")]
    assert below and all(row.precision == "float" and row.reason for row in below)
    assert isinstance(converted[1][1].linear.weight, nn.Parameter)
    x = torch.randn(rows_, 8)
    assert run(converted, x).shape == (rows_, 8), "its own control flow is its own business"


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_a_class_as_the_root(phase):
    model, x = Opaque(), torch.randn(5, 8)
    both = convert(model, x, non_traceable_module_classes=(Opaque,))
    torch.testing.assert_close(run(getattr(both, phase), x), run(model, x))
    assert all(row.precision == "float" for row in dbrq.report(both.quantized).rows)
    assert dbrq.report(both.quantized).coverage == 0.0


@pytest.mark.parametrize("cls", [nn.Linear, nn.Conv2d])
def test_a_leaf_class(cls):
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(128, 4))
    x = torch.randn(2, 4, 4, 4)
    converted = convert(model, x, non_traceable_module_classes=(cls,)).quantized
    assert_right(converted, model, x)
    for row in dbrq.report(converted).rows:
        if row.path in ("0", "2", "4"):
            assert (row.precision == "float") == isinstance(model[int(row.path)], cls)


def test_subclasses_are_not_looked_into_either():
    class Special(Opaque):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Special())
    converted = convert(model, torch.randn(6, 8), non_traceable_module_classes=(Opaque,)).quantized
    assert isinstance(converted[1].linear.weight, nn.Parameter)


@pytest.mark.parametrize("classes", [["Opaque"], [Opaque()], [None]])
def test_what_is_no_class_is_told(classes):
    with pytest.raises(dbrq.ConfigurationError, match="classes"):
        dbrq.prepare(Tree(), torch.randn(2, 8), non_traceable_module_classes=classes)
