"""MobileNetV3 in small: inverted residuals, depthwise convolutions, squeeze-and-excitation, hardswish, batch norm."""

from __future__ import annotations

from torch import Tensor, nn

#: Kernel size, expanded and output channels, squeeze-and-excitation, activation, stride: the rows of the paper's table
#: for MobileNetV3-Small, fewer and narrower.
_BLOCKS = (
    (3, 16, 16, True, nn.ReLU, 1),
    (3, 64, 24, False, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 1),
    (5, 96, 40, True, nn.Hardswish, 2),
    (5, 160, 40, True, nn.Hardswish, 1),
    (5, 120, 48, True, nn.Hardswish, 1),
    (5, 144, 48, True, nn.Hardswish, 1),
    (5, 192, 64, True, nn.Hardswish, 2),
    (5, 256, 64, True, nn.Hardswish, 1),
)


class _ConvNorm(nn.Sequential):
    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, activation: type = nn.Identity
    ) -> None:
        conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out, eps=1e-3, momentum=0.03), activation())


class _SqueezeExcitation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, channels // 4, 1)
        self.relu = nn.ReLU()
        self.fc2 = nn.Conv2d(channels // 4, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))


class _InvertedResidual(nn.Module):
    def __init__(
        self, channels: int, kernel: int, expanded: int, out: int, squeezed: bool, activation: type, stride: int
    ) -> None:
        super().__init__()
        self.residual = stride == 1 and channels == out
        layers: list[nn.Module] = []
        if expanded != channels:
            layers.append(_ConvNorm(channels, expanded, activation=activation))
        layers.append(_ConvNorm(expanded, expanded, kernel, stride, expanded, activation))
        if squeezed:
            layers.append(_SqueezeExcitation(expanded))
        self.block = nn.Sequential(*layers, _ConvNorm(expanded, out))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.residual else self.block(x)


class MobileNet(nn.Module):
    """``(N, 3, 16, 16)`` -> ``(N, classes)`` logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_ConvNorm(3, 16, 3, 1, activation=nn.Hardswish)]
        channels = 16
        for row in _BLOCKS:
            layers.append(_InvertedResidual(channels, *row))
            channels = row[2]
        self.features = nn.Sequential(*layers, _ConvNorm(channels, 256, activation=nn.Hardswish))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(256, 256), nn.Hardswish(), nn.Dropout(0.1), nn.Linear(256, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))
