"""What a model remembers of its first calls, to be quick in the next, is only taken for calls that are alike."""

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq.errors import DeviationError


class Products(nn.Module):
    """Two products with weights as GPT-2 writes them, and a factor that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(8))
        self.factor, self.swapped = 0.5, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addmm(self.bias, x, self.second if self.swapped else self.first)
        x = torch.sin(x) * self.factor
        return torch.addmm(self.bias, x, self.second)


@pytest.fixture
def called() -> nn.Module:
    """A strict converted model that was called so often that it knows its calls."""
    x = torch.randn(4, 8)
    quantized = dbrq.convert(dbrq.calibrate(dbrq.prepare(Products().eval(), x), [x]), strict=True)
    results = [quantized(x) for _ in range(3)]
    assert all(torch.equal(result, results[0]) for result in results)
    return quantized


def test_another_weight_in_a_product_is_noticed(called: nn.Module) -> None:
    called.swapped = True
    with pytest.raises(DeviationError):
        called(torch.randn(4, 8))


def test_another_number_in_a_float_op_is_noticed(called: nn.Module) -> None:
    called.factor = 50.0
    with pytest.raises(DeviationError):
        called(torch.randn(4, 8))


def test_other_shapes_are_computed_anew(called: nn.Module) -> None:
    x = torch.randn(6, 8)
    assert torch.equal(called(x)[:4], called(x[:4]))
