"""Images, batch norms with statistics of their own, and the kernels of a report."""

import torch
from torch import nn

import dbrq


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 12, 12))


def trained(model: nn.Module, example: torch.Tensor, batches: int = 4) -> nn.Module:
    """With batch-norm statistics and affine parameters that are not those of a new model."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    model.train()
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn_like(example))
    return model.eval()


def kernels_of(model: nn.Module) -> list[str]:
    return [row.kernel for row in dbrq.report(model).rows]


def small_images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 4, 8, 8))
