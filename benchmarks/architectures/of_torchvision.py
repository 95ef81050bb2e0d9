"""All classification, segmentation, detection, video and optical-flow models that torchvision lists."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from . import BATCHES, Architecture, images

#: Arguments of models that take a fixed image size, or have a branch for training that would only cost time.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": True}, "inception_v3": {"init_weights": True}, "vit_h_14": {"image_size": 56},
    **{name: {"image_size": 64} for name in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32")},
}  # fmt: skip
_SIZES: dict[str, tuple[int, ...]] = {
    "inception_v3": (96, 128, 112), "maxvit_t": (224,), "vit_h_14": (56,), "s3d": (224,), "alexnet": (64, 96, 80),
    **dict.fromkeys(("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32"), (64,)),
    **dict.fromkeys(("mvit_v1_b", "mvit_v2_s"), (224,)),
}  # fmt: skip


#: Detection, video and optical flow, which the bars do not count.
OTHER = "torchvision-other"


def every() -> Iterator[Architecture]:
    kinds = torchvision.models
    for name in kinds.list_models(module=kinds):
        yield _architecture(name, images(*_SIZES.get(name, (64, 96, 80))))
    for name in kinds.list_models(module=kinds.segmentation):
        yield _architecture(name, images(64, 96, 80), weights_backbone=None)
    for name in kinds.list_models(module=kinds.video):
        frames = 16 if name.startswith(("s3d", "mvit")) else 8
        yield _architecture(name, images(*_SIZES.get(name, (64, 96, 80)), frames=frames), OTHER)
    for name in kinds.list_models(module=kinds.optical_flow):
        yield _architecture(name, _frame_pairs, OTHER)
    for name in kinds.list_models(module=kinds.detection):
        sizes = {} if name.startswith("ssd") else {"min_size": 128, "max_size": 160}
        yield _architecture(name, _pictures, OTHER, weights_backbone=None, **sizes)


def _architecture(
    name: str, item: Callable[[int], Any], library: str = "torchvision", **arguments: Any
) -> Architecture:
    return Architecture(library, name, functools.partial(_make, name, arguments), item)


def _make(name: str, arguments: dict[str, Any]) -> nn.Module:
    _stand_in()
    return torchvision.models.get_model(name, **_ARGUMENTS.get(name, {}), **arguments)


def _frame_pairs(number: int) -> dict[str, Any]:
    height = (128, 144, 136)[number]
    pair = torch.randn(2, BATCHES[number], 3, height, 128)
    return {"image1": pair[0], "image2": pair[1], "num_flow_updates": 2}


def _pictures(number: int) -> tuple[list[Tensor]]:
    """What detectors take: a list of images, here of one size."""
    return ([torch.rand(3, 128, (128, 144, 136)[number]) for _ in range(BATCHES[number])],)


@functools.cache
def _stand_in() -> None:
    """Non-maximum suppression in Python, where torchvision's compiled one does not load (roi_align has its own)."""
    if torchvision.extension._has_ops():
        return
    torchvision.extension._has_ops = lambda: True
    torch.library.impl("torchvision::nms", "CPU")(_nms)
    roi_align = sys.modules["torchvision.ops.roi_align"]
    roi_align._roi_align = roi_align._roi_align.__wrapped__  # not compiled, as the op that it stands for would not be


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes (N, 4) kept, best score (N,) first."""
    overlap = torchvision.ops.box_iou(boxes, boxes)
    order = scores.argsort(descending=True).tolist()
    dropped, kept = set(), []
    for i in order:
        if i not in dropped:
            kept.append(i)
            dropped.update((overlap[i] > iou_threshold).nonzero().flatten().tolist())
    return torch.tensor(kept, dtype=torch.long)
