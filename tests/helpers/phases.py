"""Two models in every phase: float, prepared, calibrated, converted; and ways to copy them."""

import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig, float_qparams_weight_only_qconfig

import dbrq
from tests.helpers.running import convert


class Net(nn.Module):
    """A bit of everything: modules that fuse, functions with parameters of their own, embedding, attention, sharing."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.weight = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.heads = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        h = self.features(x)
        h = F.linear(F.adaptive_avg_pool2d(h, 1).flatten(1), self.weight) * self.mask
        for head in self.heads:
            h = torch.relu(head(h)) + h
        return h


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 8, batch_first=True)
        self.out = nn.Linear(8, 30)

    def forward(self, index):
        h = self.embed(index)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(self.lstm(h)[0])


def net() -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    model.train()
    with torch.no_grad():
        model(torch.randn(16, 3, 9, 9) * 2 + 1)
    return model.eval()


def words() -> nn.Module:
    torch.manual_seed(1)
    return Words().eval()


X = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(5))
WORDS = torch.arange(24).reshape(4, 6)
#: LSTM in dynamic mode and embeddings weight-only, beside static linear layers.
MIXED = (
    dbrq.default_qconfig_mapping().set_object_type(nn.LSTM, default_dynamic_qconfig)
    .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
)  # fmt: skip
MODELS = {"net": (net, X, None), "words": (words, WORDS, MIXED)}
models = pytest.mark.parametrize("make, x, mapping", list(MODELS.values()), ids=list(MODELS))
phases = pytest.mark.parametrize("phase", ["prepared", "quantized"])


def in_phase(phase: str, make, x, mapping=None) -> nn.Module:
    return getattr(convert(make(), x, mapping), phase)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
