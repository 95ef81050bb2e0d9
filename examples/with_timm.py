"""timm: ``create_model``, timm's own transforms, a ``DataLoader`` of (image, label), logits and features in int8.

    pip install 'dbrq[examples]' && pip install --no-deps timm torchvision==0.28.0   # the torchvision of your torch
    python examples/with_timm.py

No weights are downloaded: the network is trained here, on scikit-learn's handwritten digits; with ``pretrained=True``
nothing else changes. ``dbrq.quantize`` takes the loader as it is. Printed: accuracy of the classifier, and of nearest
neighbours in the features that ``forward_features`` gives, in float and in int8, and the time of a batch.
"""

import argparse
from collections.abc import Sequence

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dbrq
from digits import load_data
from quickstart import milliseconds


def load_images(model: nn.Module) -> tuple[Tensor, Tensor]:
    """``(train, test)``, prepared as timm prepares pictures for this model."""
    transform = timm.data.create_transform(**timm.data.resolve_data_config({"input_size": (3, 32, 32)}, model=model))

    def prepared(images: Tensor) -> Tensor:
        pictures = [Image.fromarray((255 * image[0]).byte().numpy()).convert("RGB") for image in images]
        return torch.stack([transform(picture) for picture in pictures])

    train_x, test_x, _, _ = load_data()
    return prepared(train_x), prepared(test_x)


def train(model: nn.Module, loader: DataLoader, epochs: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * len(loader))
    for _ in range(epochs):
        for images, labels in loader:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model.eval()


def features(model: nn.Module, images: Tensor) -> Tensor:
    """What comes before the classifier, of unit length."""
    return F.normalize(model.forward_head(model.forward_features(images), pre_logits=True))


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description="Train a model of timm on digits, quantize it, compare both.")
    parser.add_argument("--model", default="resnet10t", help="any of timm.list_models() that takes 32 x 32 pixels")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    model = timm.create_model(options.model, num_classes=10)
    _, _, train_y, test_y = load_data()
    train_x, test_x = load_images(model)
    loader = DataLoader(list(zip(train_x, train_y, strict=True)), batch_size=64, shuffle=True)
    with torch.enable_grad():
        train(model, loader, options.epochs)
    quantized = dbrq.quantize(model, loader, max_batches=8)  # the labels are dropped, with a note

    measured: dict[str, tuple[float, float]] = {}
    both = (model, quantized)
    right = [(one(test_x).argmax(1) == test_y).double().mean().item() for one in both]
    measured["accuracy"] = (right[0], right[1])
    nearest = [(features(one, test_x) @ features(one, train_x).T).argmax(1) for one in both]
    right = [(train_y[found] == test_y).double().mean().item() for found in nearest]
    measured["accuracy, nearest neighbour"] = (right[0], right[1])
    before, after = milliseconds(both, test_x[:16])
    measured["16 images (ms)"] = (before, after)
    rows = [(name, *values) for name, values in measured.items()]
    print(tabulate(rows, headers=["", "float", "int8"], floatfmt=".3f"))
    print(f"\n{dbrq.report(quantized).coverage:.1%} of multiply-accumulates with weights run in int8.")
    return measured | {"coverage": (0.0, dbrq.report(quantized).coverage)}


if __name__ == "__main__":
    main()
