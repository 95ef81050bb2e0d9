"""Digits: a small residual network, trained here in seconds on scikit-learn's 8 x 8 handwritten digits."""

import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

SEED = 0
EPOCHS = 8


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; ``(N, channels, H, W)`` in and out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + x)


class DigitNet(nn.Module):
    """``(N, 1, 8, 8)`` images in 0 to 1 -> ``(N, 10)`` logits."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block1 = ResidualBlock(width)
        self.down = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.block2 = ResidualBlock(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(self.stem(x))
        x = self.block2(self.down(x))
        return self.head(x.mean((2, 3)))


@functools.cache
def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(train images, test images, train labels, test labels)``: 1347 and 450, always the same split."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=450, random_state=SEED, stratify=labels)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in split[:2])
    train_y, test_y = (torch.tensor(part) for part in split[2:])
    return train_x, test_x, train_y, test_y


def load_model() -> DigitNet:
    """The trained network, in eval mode. The global random state is left as it was."""
    images, _, labels, _ = load_data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = DigitNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(images)).split(64):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


def calibration_batches(batch_size: int = 32, batches: int = 8) -> list[Tensor]:
    """Training images, ``(batch_size, 1, 8, 8)`` each."""
    return list(load_data()[0].split(batch_size)[:batches])


def example_inputs() -> Tensor:
    """The batch that is timed: 32 test images."""
    return load_data()[1][:32]


@torch.no_grad()
def evaluate(float_model: nn.Module, int8_model: nn.Module) -> dict[str, tuple[float, float]]:
    """``{metric: (float, int8)}`` on held-out digits, between 0 and 1; "same digit" compares int8 with float."""
    _, images, _, labels = load_data()
    float_digits, int8_digits = float_model(images).argmax(1), int8_model(images).argmax(1)
    return {
        "accuracy": (_share(float_digits == labels), _share(int8_digits == labels)),
        "same digit": (1.0, _share(float_digits == int8_digits)),
    }


def _share(hits: Tensor) -> float:
    return hits.double().mean().item()
