"""Embeddings and embedding bags."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, float_qparams_weight_only_qconfig

from tests.helpers.cases import by_name
from tests.helpers.judging import agreement, assert_matches, assert_precision, rows
from tests.helpers.models import Call
from tests.helpers.running import convert, fx_quantize, run


class Scaled(nn.Embedding):
    """A subclass with a forward of its own: it is looked into, not replaced."""

    def forward(self, index):
        return super().forward(index) * 2.0


class Renamed(nn.Embedding):
    """A subclass that is an embedding all the same."""


EMBEDDINGS = QConfigMapping().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig).set_object_type(
    nn.EmbeddingBag, float_qparams_weight_only_qconfig).set_object_type(F.embedding, float_qparams_weight_only_qconfig
    ).set_object_type(F.embedding_bag, float_qparams_weight_only_qconfig).set_object_type(
    Renamed, float_qparams_weight_only_qconfig).set_object_type(Scaled, float_qparams_weight_only_qconfig)  # fmt: skip


@by_name(
    {
        "module": lambda: nn.Sequential(nn.Embedding(40, 16)),
        "padding_idx": lambda: nn.Sequential(nn.Embedding(40, 16, padding_idx=3)),
        "subclass": lambda: nn.Sequential(Renamed(40, 16)),
        "function": lambda: Call(lambda m, i: F.embedding(i, m.weight), weight=torch.randn(40, 16)),
        "function keywords": lambda: Call(
            lambda m, i: F.embedding(input=i, weight=m.weight, padding_idx=0), weight=torch.randn(40, 16)
        ),
        "torch.embedding": lambda: Call(lambda m, i: torch.embedding(m.weight, i), weight=torch.randn(40, 16)),
    },
    "make",
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding(make, dtype):
    index = torch.randint(0, 40, (5, 7), dtype=dtype)
    converted = assert_matches(make(), index, EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding", "int8", 1)
    assert not any(t.is_floating_point() and t.numel() >= 40 * 16 for t in converted.state_dict().values())


def test_embedding_module_against_fx():
    model, index = nn.Sequential(nn.Embedding(40, 16)), torch.randint(0, 40, (5, 7))
    ours = convert(model, index, EMBEDDINGS).quantized
    step = (model[0].weight.amax(1) - model[0].weight.amin(1)).max().item() / 255
    assert agreement(run(ours, index), run(fx_quantize(model, index, EMBEDDINGS), index), step) == 1.0


def test_embedding_subclass_with_its_own_forward_is_looked_into():
    converted = assert_matches(nn.Sequential(Scaled(40, 16)), torch.randint(0, 40, (5, 7)), EMBEDDINGS, fx=False)
    assert rows(converted, "embedding")[0].path == "0.embedding.0"
    assert_precision(converted, "embedding", "int8", 1)


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("layout", ["2-d", "offsets", "padding_idx", "last offset"])
def test_embedding_bag(mode, layout):
    options = {"padding_idx": {"padding_idx": 1}, "last offset": {"include_last_offset": True}}.get(layout, {})
    bag = nn.EmbeddingBag(40, 16, mode=mode, **options)
    index = torch.randint(0, 40, (5, 7))
    inputs = (index,)
    if layout in ("offsets", "last offset"):
        inputs = (index.flatten(), torch.tensor([0, 4, 4, 20] + ([35] if layout == "last offset" else [])))
    converted = assert_matches(Call(lambda m, *xs: m.bag(*xs), len(inputs), bag=bag), inputs, EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding_bag", "int8", 1)


def test_embedding_bag_function_and_weights_per_sample():
    def forward(m, index, share):
        weighted = F.embedding_bag(index, m.weight, per_sample_weights=share, mode="sum")
        return weighted + F.embedding_bag(input=index, weight=m.weight, mode="sum")

    index = torch.randint(0, 40, (5, 7))
    model = Call(forward, weight=torch.randn(40, 16))
    converted = assert_matches(model, (index, torch.rand(5, 7)), EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding_bag", "int8", 2)


def test_embedding_bag_module_with_keywords():
    model = Call(
        lambda m, i, w: m.bag(input=i, per_sample_weights=w) + m.bag(i, per_sample_weights=w),
        bag=nn.EmbeddingBag(40, 16, mode="sum"),
    )
    converted = assert_matches(model, (torch.randint(0, 40, (5, 7)), torch.rand(5, 7)), EMBEDDINGS, fx=False)
    assert_precision(converted, "embedding_bag", "int8", 2)
