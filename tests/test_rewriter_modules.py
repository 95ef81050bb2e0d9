"""``rewrite``: modules of all kinds and qconfigs, what it cannot do, what it leaves alone, and how the graph reads."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig
from torch.nn.utils import parametrizations

import dbrq
from dbrq.errors import DeviationError, QuantizationError, RewriteError
from tests.helpers import convert, run, sqnr
from tests.test_rewriter import assert_close, assert_same, cases, image, model, rewritten, seq

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


# What cannot be done


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Holder:
    def __init__(self, value):
        self.value = value


class Holding(nn.Module):
    def __init__(self, child):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), child, nn.Linear(8, 4))

    def forward(self, x):
        return self.inner(x)


def test_only_converted_models():
    module = model(lambda m, x: m.fc(x))
    for wrong in (module, dbrq.prepare(module, seq()), nn.Linear(2, 2)):
        with pytest.raises(QuantizationError):
            dbrq.rewrite(wrong, seq())


@pytest.mark.parametrize("example", [(), (seq(), seq()), {"y": seq()}], ids=["none", "two", "another name"])
def test_an_example_that_does_not_fit(example):
    q = convert(model(lambda m, x: m.fc(x)), seq()).quantized
    with pytest.raises(RewriteError, match="does not fit forward"):
        dbrq.rewrite(q, example)


@pytest.mark.parametrize("child", [nn.Tanh(), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))], ids=["leaf", "parameters"])
def test_a_scripted_child_names_the_module(child):
    q = convert(Holding(torch.jit.script(child)), seq()).quantized
    with pytest.raises(RewriteError, match="cannot follow") as error:
        dbrq.rewrite(q, seq())
    assert "in module inner" in str(error.value), "the module that made the value"


def test_an_autograd_function_is_followed_or_refused():
    class Doubling(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    q = convert(Holding(Doubling()), seq()).quantized
    try:
        g = dbrq.rewrite(q, seq())
    except RewriteError as error:
        assert "inner" in error.path
    else:
        x = seq(3, 9)
        assert_close(run(g, x), run(q, x), "rewritten")


def test_an_output_with_tensors_inside_an_object():
    q = convert(model(lambda m, x: Holder(m.fc(x))), seq()).quantized
    with pytest.raises(RewriteError, match="cannot build") as error:
        dbrq.rewrite(q, seq())
    assert error.value.got == "Holder"


def test_an_input_with_tensors_inside_an_object():
    q = convert(model(lambda m, h: m.fc(h.value)), (Holder(seq()),)).quantized
    with pytest.raises(RewriteError, match="cannot take apart"):
        dbrq.rewrite(q, (Holder(seq()),))


def test_an_example_on_another_path_than_prepare_saw():
    float_model = model(lambda m, x: m.last(m.fc(x)) if x.size(1) > 3 else m.last(m.fc(x) + x))
    prepared = dbrq.prepare(float_model, seq())
    run(prepared, seq())
    x = seq(2, 2)
    with pytest.raises(DeviationError):
        dbrq.rewrite(dbrq.convert(prepared, strict=True), x)
    with pytest.warns(UserWarning, match=r"dbrq: (add|last) runs in float"):
        graph = dbrq.rewrite(dbrq.convert(prepared), x)
    assert sqnr(run(float_model, x), run(graph, x)) > 25


# What is left alone


seen: list = []


def deciding(m, x):
    """Takes another way where it is told that it is being compiled, as transformers does."""
    seen.append((threading.get_ident(), bool(torch.compiler.is_compiling())))
    if not torch.compiler.is_compiling() and x.sum() > 1e9:
        raise AssertionError
    return m.last(m.fc(x))


def test_the_converted_model_is_untouched():
    module = model(deciding, norm=nn.BatchNorm1d(8))
    q, x = convert(module, seq()).quantized, seq()
    before, attributes = copy.deepcopy(q.state_dict()), {n: set(vars(c)) for n, c in q.named_modules()}
    expected = run(q, x)
    dbrq.rewrite(q, seq())
    assert torch.equal(run(q, x), expected)
    assert {n: set(vars(c)) for n, c in q.named_modules()} == attributes
    after = q.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)


def test_the_graph_owns_its_tensors():
    q, g, _ = rewritten(model(lambda m, x: m.last(m.fc(x))), seq())
    x = seq()
    expected = run(g, x)
    with torch.no_grad():
        q.fc.bias.zero_()
    assert torch.equal(run(g, x), expected)


def test_only_the_rewriting_thread_counts_as_compiling():
    q = convert(model(deciding), seq()).quantized
    x, expected, done, others = seq(), run(q, seq()).shape, threading.Event(), []

    def another():
        while not done.is_set():
            others.append(bool(torch.compiler.is_compiling()))
            assert run(q, x).shape == expected

    thread = threading.Thread(target=another)
    thread.start()
    try:
        seen.clear()
        for _ in range(5):
            dbrq.rewrite(q, x)
    finally:
        done.set()
        thread.join()
    assert others and not any(others) and not torch.compiler.is_compiling()
    assert not any(flag for ident, flag in seen if ident == thread.ident)
    assert any(flag for ident, flag in seen if ident == threading.get_ident())


def test_a_failed_rewrite_leaves_nothing_behind():
    q = convert(model(lambda m, x: Holder(m.fc(x)) if x.sum() < 1e9 else None), seq()).quantized
    with pytest.raises(RewriteError):
        dbrq.rewrite(q, seq())
    assert not torch.compiler.is_compiling()
    assert isinstance(run(q, seq()), Holder)
    assert torch.overrides._get_current_function_mode() is None


# How the graph reads


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


def plain_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip


WHOLE = {"cnn": (plain_cnn, image), "transformer block": (lambda: Block().eval(), seq)}


def test_names_follow_the_module_tree():
    q, g, _ = rewritten(nn.Sequential(nn.Linear(8, 8), Block()).eval(), seq())
    names = {node.name for node in g.graph.nodes}
    assert {"_0", "_1_norm_layer_norm", "_1_mlp_0", "_1_mlp_1", "_1_mlp_1_q", "_1_mlp_1_dq", "_1_mlp_2"} <= names
    buffers = dict(g.named_buffers())
    for path in ("0", "1.mlp.0", "1.mlp.2"):
        assert buffers[f"{path}.weight_int8"].dtype is torch.int8
        assert buffers[f"{path}.weight_scale"].shape == (q.get_submodule(path).out_features,)
    assert [n for n, p in g.named_parameters() if p.dim() > 1] == [], "linear weights are held in int8 only"


def test_nodes_say_where_they_come_from():
    _, g, _ = rewritten(model(lambda m, x: m.last(m.block(m.fc(x))), block=Block()), seq())
    nodes = {node.name: node for node in g.graph.nodes}
    for name in ("fc", "last", "block_mlp_0"):
        assert nodes[name].meta["path"] == name.replace("block_mlp_0", "block.mlp.0")
    assert "test_rewriter_modules.py:" in nodes["fc"].meta["site"]
    calls = [n for n in g.graph.nodes if n.op.startswith("call") and not n.name.startswith(("check_input", "_assert"))]
    unsaid = [
        n for n in calls if not {"path", "site"} <= set(n.meta) and {u.target for u in n.users} != {torch._assert}
    ]
    assert not unsaid


def test_code_is_short_and_without_what_has_no_effect():
    _, g, _ = rewritten(model(lambda m, x: (x * 3, m.last(m.fc(x)))[1]), seq())
    assert "mul" not in g.code
    assert g.code.count("quantized_decomposed.quantize_per_tensor") == 2
    assert len(g.code.splitlines()) < 30


@cases(WHOLE)
def test_rewriting_twice_gives_the_same_code(case):
    q, x = convert(case[0](), case[1]()).quantized, case[1]()
    assert dbrq.rewrite(q, x).code == dbrq.rewrite(q, x).code
    assert dbrq.rewrite(q, x).code == dbrq.rewrite(copy.deepcopy(q), x).code


@pytest.mark.filterwarnings("ignore:The input to trace is already a ScriptModule")
@cases(WHOLE)
def test_graphs_are_copied_exported_and_traced(case):
    make, inputs = case
    _, g, s = assert_same(make(), inputs(), inputs(3))
    x = inputs()
    expected = run(g, x)
    assert torch.equal(run(copy.deepcopy(g), x), expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(g, (x,)).module()(x), expected)
        torch.testing.assert_close(torch.jit.trace(s, x)(x), expected)
        torch.testing.assert_close(torch.jit.script(copy.deepcopy(g))(x), expected)


def test_rewriting_in_inference_mode():
    q, x = convert(model(lambda m, x: m.last(m.fc(x))), seq()).quantized, seq()
    with torch.inference_mode():
        g = dbrq.rewrite(q, seq())
    assert_close(run(g, x), run(q, x), "rewritten")


def test_no_gradient_flows():
    _, g, s = rewritten(model(lambda m, x: m.last(m.fc(x))), seq())
    assert not any(f(seq().requires_grad_()).requires_grad for f in (g, s) if not torch.is_inference_mode_enabled())
