"""A model whose products saturate in 16 bits, and its data."""

import torch
from torch import nn


def positive(seed: int = 0) -> nn.Module:
    """Layers whose products are as large as they can be."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.weight.abs_().add_(0.05)
            layer.weight[:, ::7] *= -0.5
    return model


def data() -> torch.Tensor:
    return torch.rand(16, 64, generator=torch.Generator().manual_seed(1))
