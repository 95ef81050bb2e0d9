"""How the graph of ``rewrite`` reads: names, sites, code, copies."""

import copy

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.rewriting import assert_close, assert_same, cases, image, model, rewritten, seq
from tests.helpers.running import convert, run


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
    assert "test_writer.py:" in nodes["fc"].meta["site"]
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
