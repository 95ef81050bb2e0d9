"""The models that the benchmarks share: definitions from torchvision and transformers, weights random or, for MiniLM,
trained.

Random weights get batch-norm statistics from a few training-mode passes, and damped residual branches, since a deep
random network amplifies any rounding beyond use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

if torch.version.cuda is None:  # torchvision's compiled ops load beside a CUDA build only
    _stub_ops = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _stub_ops.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass
class Benchmark:
    """A model with inputs: ``example_inputs`` of a call, and how to get the tensor to compare from its output."""

    name: str
    model: nn.Module
    calibration: list[Any]
    test: list[Any]
    output: Callable[[Any], Tensor] = lambda out: out


def build(name: str) -> Benchmark:
    """resnet18, resnet50, mobilenet_v2, vit_b_16, bert-base or minilm, always the same."""
    torch.manual_seed(0)
    if name == "bert-base":
        return _bert()
    if name == "minilm":
        return _minilm()
    import torchvision

    model = getattr(torchvision.models, name)()
    if name == "vit_b_16":
        nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros by default
    _settle(model)
    images = [torch.randn(1, 3, 224, 224) for _ in range(8)]
    return Benchmark(name, model.eval(), images[:4], images[4:])


def compared(name: str) -> Benchmark:
    """The model of ``build`` with one example of the size that comparisons use: 128 tokens of text for MiniLM."""
    bench = build(name)
    if name == "minilm":
        import minilm
        from sentences import CALIBRATION

        texts = [" ".join(topic) for topic in CALIBRATION.values()]
        whole = [dict(minilm.load_tokenizer()(" ".join(texts[i:] + texts[:i]), truncation=True, max_length=128,
                                              return_tensors="pt")) for i in range(len(texts))]  # fmt: skip
        whole = [item for item in whole if item["input_ids"].shape[1] == 128]
        bench.calibration, bench.test = whole[1:5], whole[:1]
    return bench


@torch.no_grad()
def _settle(model: nn.Module) -> None:
    blocks = [m for m in model.modules() if type(m).__name__ in ("BasicBlock", "Bottleneck", "InvertedResidual")]
    for block in blocks:
        norms = [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]
        last = block.bn3 if hasattr(block, "bn3") else block.bn2 if hasattr(block, "bn2") else norms[-1]
        if getattr(block, "use_res_connect", True):
            nn.init.constant_(last.weight, 0.25)
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        model.train()
        for _ in range(3):
            model(torch.randn(8, 3, 224, 224))


def _bert() -> Benchmark:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(), add_pooling_layer=False).eval()
    texts = [
        {"input_ids": torch.randint(0, 30000, (1, 128)), "attention_mask": torch.ones(1, 128, dtype=torch.long)}
        for _ in range(8)
    ]
    return Benchmark("bert-base", model, texts[:4], texts[4:], lambda out: out.last_hidden_state)


def _minilm() -> Benchmark:
    import minilm

    batches = list(minilm.calibration_batches())
    return Benchmark(
        "minilm", minilm.load_model(), batches, [minilm.example_inputs()], lambda out: out.last_hidden_state
    )
