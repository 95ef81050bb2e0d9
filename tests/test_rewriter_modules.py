"""``rewrite``: modules of all kinds and qconfigs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig
from torch.nn.utils import parametrizations

import dbrq
from tests.helpers.rewriting import assert_same, cases, image, model, seq

# Modules: (forward, its parts), an example and others


def attention(batch_first, need_weights, mask=None):
    """Self-attention of the layer's output, weights returned or not."""

    def forward(m, x):
        y = m.fc(x)
        causal = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1) if mask == "causal" else None
        padding = (torch.arange(x.size(1)) > 2).expand(x.size(0), -1) if mask == "padding" else None
        y = y if batch_first else y.transpose(0, 1)
        out, weights = m.attention(
            y, y, y, key_padding_mask=padding, attn_mask=causal, need_weights=need_weights, average_attn_weights=True
        )
        return m.last(out if batch_first else out.transpose(0, 1)), weights

    return forward, {"attention": lambda: nn.MultiheadAttention(8, 2, batch_first=batch_first)}


def cross_attention(m, x):
    y = m.fc(x)
    return m.last(m.attention(y, x[:, :3], x[:, :3], need_weights=False)[0])


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    stack = functools.partial(nn.TransformerEncoder, layer, 2, enable_nested_tensor=False)
    return lambda m, x: m.last(m.encoder(x)), {"encoder": stack}


def recurrent(cls, **options):
    return lambda m, x: m.last(m.rnn(m.fc(x))[0]), {"rnn": lambda: cls(8, 8, batch_first=True, **options)}


def last_state(m, x):
    _, (h, _) = m.rnn(m.fc(x))
    return m.last(h[-1])


def created(m, x):
    torch.manual_seed(0)
    return m.last(nn.Hardtanh(-0.5, 0.5)(m.fc(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Returns(nn.Module):
    """A child with containers of its own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, *, scale=1.0, extra=None):
        return {"out": (self.fc(x) * scale, extra), "none": None}


class MyNorm(nn.BatchNorm1d):
    pass


class Renamed(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x, scale=2.0):
        return super().forward(x) * scale


def linears(n=3):
    return [nn.Linear(8, 8) for _ in range(n)]


SEQUENCE_MODULES = {
    "called several times": (lambda m, x: m.last(m.fc(m.fc(m.fc(x)))), {}),
    "in a loop": (lambda m, x: [x := m.fc(x).relu() for _ in range(3)][-1] + x, {}),
    "ModuleList": (
        lambda m, x: [x := layer(x) for layer in m.layers][-1], {"layers": lambda: nn.ModuleList(linears())}),
    "ModuleDict": (
        lambda m, x: m.last(sum(layer(x) for layer in m.layers.values())),
        {"layers": lambda: nn.ModuleDict(dict(zip("abc", linears(), strict=True)))}),
    "Sequential indexed": (
        lambda m, x: m.layers[2](m.layers[0](x)) + m.layers[1:](x), {"layers": lambda: nn.Sequential(*linears())}),
    "enumerate": (
        lambda m, x: m.last(sum(layer(x) * i for i, layer in enumerate(m.layers))),
        {"layers": lambda: nn.ModuleList(linears())}),
    "tied weights": (lambda m, x: m.last(m.tied(x)), {"tied": Tied}),
    "the same module under two names": (lambda m, x: m.last(m.again(m.fc(x))), {"again": lambda: None}),
    "weight of another layer": (lambda m, x: F.linear(m.fc(x), m.fc.weight), {}),
    "transposed weight": (lambda m, x: m.last(m.fc(x) @ m.fc.weight.t()), {}),
    "weight computed in forward": (lambda m, x: m.last(F.linear(x, m.fc.weight * 2)), {}),
    "part of a weight": (lambda m, x: m.last(F.linear(x, m.fc.weight[:8], m.fc.bias[:8])), {}),
    "computed bias": (lambda m, x: m.last(F.linear(x, m.fc.weight, torch.cat([m.fc.bias[:4], m.last.bias]))), {}),
    "bias computed from the input": (lambda m, x: m.last(F.linear(x, m.fc.weight, x.mean((0, 1)))), {}),
    "no bias": (lambda m, x: m.last(m.a(x)), {"a": lambda: nn.Linear(8, 8, bias=False)}),
    "created in forward": (created, {}),
    "child with containers": (
        lambda m, x: m.last(sum(v for v in m.child(x, scale=2.0, extra=x)["out"])), {"child": Returns}),
    "subclass": (lambda m, x: m.last(m.a(x, scale=0.5)), {"a": lambda: Renamed(8, 8)}),
    "parametrized weight": (lambda m, x: m.last(m.a(x)), {"a": lambda: parametrizations.weight_norm(nn.Linear(8, 8))}),
    "batch norm subclass": (lambda m, x: m.last(m.bn(m.fc(x).mT).mT), {"bn": lambda: MyNorm(8)}),
    "layer norm": (lambda m, x: m.last(m.norm(m.fc(x))), {"norm": lambda: nn.LayerNorm(8)}),
    "RMS norm": (lambda m, x: m.last(m.norm(m.fc(x))), {"norm": lambda: nn.RMSNorm(8)}),
    "PReLU": (lambda m, x: m.last(m.act(m.fc(x))), {"act": lambda: nn.PReLU()}),
    "dropout": (lambda m, x: m.last(m.drop(m.fc(x))), {"drop": lambda: nn.Dropout(0.5)}),
    "unused child": (lambda m, x: m.last(x), {"extra": lambda: nn.Linear(8, 8)}),
    "bilinear": (lambda m, x: m.last(m.a(m.fc(x), x)), {"a": lambda: nn.Bilinear(8, 8, 8)}),
    "LSTM": recurrent(nn.LSTM),
    "LSTM, two layers, both ways": (
        lambda m, x: m.last(m.rnn(x)[0].unflatten(-1, (2, 8)).sum(-2)),
        {"rnn": lambda: nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)}),
    "state of an LSTM": (last_state, {"rnn": lambda: nn.LSTM(8, 8, batch_first=True)}),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN),
    **{
        f"attention, {'batch first' if first else 'batch second'}{', weights' if weights else ''}"
        f"{', ' + mask if mask else ''}": attention(first, weights, mask)
        for first in (True, False) for weights in (True, False) for mask in (None, "causal", "padding")
    },
    "cross attention": (cross_attention, {"attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True)}),
    "encoder layer": encoder(),
    "encoder layer, norm first, GELU": encoder(norm_first=True, activation="gelu"),
    "scaled_dot_product_attention": (
        lambda m, x: m.last(F.scaled_dot_product_attention(m.fc(x), x, x, is_causal=True)), {}),
}  # fmt: skip
IMAGE_MODULES = {
    "padding='same'": (lambda m, x: m.head(m.c(x)), {"c": lambda: nn.Conv2d(3, 8, 3, padding="same", dilation=2)}),
    "even kernel, padding='same'": (lambda m, x: m.head(m.c(x)), {"c": lambda: nn.Conv2d(3, 8, 4, padding="same")}),
    **{
        f"{mode} padding": (
            lambda m, x: m.head(m.c(x)), {"c": lambda mode=mode: nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode)})
        for mode in ("circular", "reflect", "replicate")
    },
    "stride, groups": (lambda m, x: m.c(m.conv(x)), {"c": lambda: nn.Conv2d(8, 8, (3, 1), 2, (1, 0), groups=4)}),
    "batch norm folded": (
        lambda m, x: m.head(F.relu(m.bn(m.conv(x)), inplace=True)), {"bn": lambda: nn.BatchNorm2d(8)}),
    "batch norm alone": (lambda m, x: m.head(m.conv(m.bn(x))), {"bn": lambda: nn.BatchNorm2d(3)}),
    "add and relu": (lambda m, x: m.head(F.relu(m.conv(x) + m.c(x))), {"c": lambda: nn.Conv2d(3, 8, 1)}),
    "group norm": (lambda m, x: m.head(m.gn(m.conv(x))), {"gn": lambda: nn.GroupNorm(2, 8)}),
    "instance norm": (lambda m, x: m.head(m.norm(m.conv(x))), {"norm": lambda: nn.InstanceNorm2d(8)}),
    "transposed": (lambda m, x: m.head(m.up(m.conv(x))), {"up": lambda: nn.ConvTranspose2d(8, 8, 2, 2)}),
    "Upsample": (lambda m, x: m.head(m.up(m.conv(x))), {"up": lambda: nn.Upsample(scale_factor=2, mode="bilinear")}),
    "squeeze and excite": (
        lambda m, x: m.head((y := m.conv(x)) * torch.sigmoid(m.c(F.adaptive_avg_pool2d(y, 1)))),
        {"c": lambda: nn.Conv2d(8, 8, 1)}),
    "max pool with indices": (lambda m, x: F.max_pool2d(m.conv(x), 2, return_indices=True), {}),
    "conv weight as parameter": (lambda m, x: m.head(F.conv2d(x, m.conv.weight, m.conv.bias, padding=1)), {}),
    "depthwise by a view": (lambda m, x: F.conv2d(m.conv(x), m.conv.weight[:, :1], groups=8), {}),
}  # fmt: skip


def build(case) -> nn.Module:
    forward, parts = case
    module = model(forward, **{name: make() for name, make in parts.items()})
    if "again" in parts:
        module.again = module.fc
    return module.eval()


@cases(SEQUENCE_MODULES)
def test_modules_on_sequences(case):
    assert_same(build(case), seq(), seq(3), seq(2, 9))


@cases(IMAGE_MODULES)
def test_modules_on_images(case):
    assert_same(build(case), image(), image(3), image(1, 8, 6))


def test_attention_as_the_root_takes_other_queries_than_keys():
    q, k = seq(), seq(2, 9)
    assert_same(nn.MultiheadAttention(8, 2, batch_first=True).eval(), (q, k, k), (seq(3), seq(3, 4), seq(3, 4)))
    assert_same(nn.MultiheadAttention(8, 2, batch_first=True).eval(), (q, q, q))


UNBATCHED = {
    "linear": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(8)),
    "conv2d": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.randn(3, 6, 6)),
    "conv1d": (nn.Sequential(nn.Conv1d(3, 8, 3, padding="same"), nn.Conv1d(8, 4, 1)), torch.randn(3, 6)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(5, 8)),
    "four dimensions": (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 3, 4, 8)),
}


@cases(UNBATCHED)
def test_inputs_of_other_ranks(case):
    assert_same(case[0].eval(), case[1], torch.randn_like(case[1]))


# Qconfigs

DEFAULT = dbrq.default_qconfig_mapping
INT8_TABLES = [(cls, float_qparams_weight_only_qconfig) for cls in (nn.Embedding, nn.EmbeddingBag)]


def mapping(*object_types, base=None) -> QConfigMapping:
    found = base or DEFAULT()
    for cls, qconfig in object_types:
        found.set_object_type(cls, qconfig)
    return found


QCONFIGS = {
    "dynamic": QConfigMapping().set_global(default_dynamic_qconfig),
    "dynamic linear": mapping((nn.Linear, default_dynamic_qconfig)),
    "weight-only linear": mapping((nn.Linear, float_qparams_weight_only_qconfig)),
    "None for a layer": DEFAULT().set_module_name("fc", None),
    "None for a class": mapping((nn.Linear, None)),
    "None for all": QConfigMapping().set_global(None),
}


@cases(QCONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_qconfigs(case):
    module = model(lambda m, x: m.last(m.fc(x).relu()))
    assert_same(module, seq(), seq(3, 9), mapping=case)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one way", "both ways"])
def test_dynamically_quantized_recurrent_layers(cls, options):
    width = 16 if options else 8
    module = model(lambda m, x: m.out(m.rnn(m.fc(x))[0]), rnn=cls(8, 8, **options), out=nn.Linear(width, 4))
    _, g, _ = assert_same(module, seq(), seq(3), seq(2, 9), mapping=mapping((cls, default_dynamic_qconfig)))
    assert any(b.dtype is torch.int8 for n, b in g.named_buffers() if n.startswith("rnn."))


INDICES, OTHERS = torch.tensor([[1, 2, 0], [4, 0, 0]]), torch.tensor([[3, 0, 5, 1]])


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embeddings(int8, padding_idx):
    module = model(lambda m, i: m.last(m.table(i)), table=nn.Embedding(6, 8, padding_idx=padding_idx))
    _, g, _ = assert_same(module, INDICES, OTHERS, mapping=mapping(*INT8_TABLES) if int8 else None)
    assert hasattr(g.table, "weight_int8") == int8


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("mode", ["mean", "sum"])
@pytest.mark.parametrize("form", ["rows", "offsets"])
def test_embedding_bags(int8, padding_idx, mode, form):
    table = nn.EmbeddingBag(6, 8, mode=mode, padding_idx=padding_idx)
    chosen = mapping(*INT8_TABLES) if int8 else None
    if form == "rows":
        assert_same(model(lambda m, i: m.last(m.table(i)), table=table), INDICES, OTHERS, mapping=chosen)
    else:
        module = model(lambda m, i, o: m.last(m.table(i, o)), table=table)
        other = (OTHERS.flatten(), torch.tensor([0, 1]))
        assert_same(module, (INDICES.flatten(), torch.tensor([0, 2, 5])), other, mapping=chosen)


def test_weights_per_sample_of_an_embedding_bag():
    module = model(lambda m, i, w: m.last(m.table(i, per_sample_weights=w)), table=nn.EmbeddingBag(6, 8, mode="sum"))
    assert_same(module, (INDICES, torch.rand(2, 3)), (OTHERS, torch.rand(1, 4)), mapping=mapping(*INT8_TABLES))


def test_classes_that_are_not_looked_into():
    module = nn.Sequential(nn.Linear(8, 8), Tied(), nn.Linear(8, 4))
    _, g, _ = assert_same(module, seq(), seq(3, 9), non_traceable_module_classes=(Tied,))
    assert g.get_submodule("1.a").weight.dtype is torch.float32
