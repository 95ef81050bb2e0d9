"""Two linear layers and a function of them, quantized, and lowered to each backend."""

import pytest
import torch
from torch import nn

import dbrq

X, Y, Z = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
BACKENDS = ["rewrite", "torchscript", "onednn", "inductor"]
FROM_PYTHON = ["rewrite", "onednn"]
REFUSES = (dbrq.QuantizationError, RuntimeError, AssertionError, KeyError, torch.jit.Error)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, *args):
        return self.function(self, *args)


def quantized(function, *example):
    torch.manual_seed(0)
    return dbrq.quantize(Net(function).eval(), [example])


def lowered(q, backend, *example):
    if backend == "inductor":
        pytest.importorskip("torch._inductor")
    return dbrq.rewrite(q, example) if backend == "rewrite" else dbrq.lower(q, example, backend=backend)


def assert_alike(got, expected):
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
