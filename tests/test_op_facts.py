"""What is known of calls: that they write, draw random numbers, or give views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dbrq
from dbrq import op_facts
from dbrq.lowering.graph_data import as_data, from_data


class Call(nn.Module):
    """One call of torch beside a linear layer."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call, self.linear = call, nn.Linear(8, 8)
        self.register_buffer("table", torch.rand(3, 8))

    def forward(self, x: Tensor) -> tuple:
        return self.linear(x), self.call(self, x)


def node_of(call) -> fx.Node:
    """The last node that a call was recorded as."""
    x = torch.randn(3, 8)
    graph = dbrq.rewrite(dbrq.quantize(Call(call).eval(), [x]), x).graph
    return [n for n in graph.nodes if "facts" in n.meta and n.op != "output" and "linear" not in n.name][-1]


#: Call -> (does it write, is it random, does its result share memory with what it was given).
CALLS = {
    "add": (lambda m, x: x + 1, (False, False, False)),
    "add_": (lambda m, x: x.add_(1), (True, False, True)),
    "+=": (lambda m, x: x.__iadd__(1), (True, False, True)),
    "an overload": (lambda m, x: torch.ops.aten.add_.Tensor(x, 1), (True, False, True)),
    "out": (lambda m, x: torch.sin(m.table, out=x), (True, False, True)),
    "inplace": (lambda m, x: F.selu(x, inplace=True), (True, False, True)),
    "reshape, which may copy": (lambda m, x: x.t().reshape(-1), (False, False, True)),
    "einsum that permutes": (lambda m, x: torch.einsum("ab->ba", x), (False, False, True)),
    "einsum that sums": (lambda m, x: torch.einsum("ab->b", x), (False, False, False)),
    "clone": (lambda m, x: x.clone(), (False, False, False)),
    "data": (lambda m, x: x.data, (False, False, True)),
    "as_strided": (lambda m, x: torch.as_strided(x, (2, 2), (1, 2)), (False, False, True)),
    "statistics": (lambda m, x: F.batch_norm(x, x[0] * 0, x[0] * 0 + 1, training=True), (True, False, False)),
    "bernoulli": (lambda m, x: torch.bernoulli(m.table), (False, True, False)),
    "dropout": (lambda m, x: F.dropout(x, 0.5, True), (False, True, False)),
    "uniform_": (lambda m, x: m.table.clone().uniform_(), (True, True, True)),
    "gumbel_softmax": (lambda m, x: F.gumbel_softmax(x), (False, True, False)),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None]), (False, False, False)),
    "attention with dropout": (
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), (False, True, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_does_is_recorded(name):
    call, expected = CALLS[name]
    node = node_of(call)
    assert (op_facts.writes(node), op_facts.is_random(node), bool(op_facts.sources(node))) == expected


def test_tensors_of_inference_mode_are_no_different():
    """torch counts no versions for them."""
    with torch.inference_mode():
        model, x = Call(lambda m, x: m.table.add_(1)).eval(), torch.randn(3, 8)
        quantized = dbrq.quantize(model, [x])
        graph = dbrq.rewrite(quantized, x).graph
    assert any(op_facts.writes(n) for n in graph.nodes)


def test_facts_are_of_the_call_and_not_of_the_node_that_took_over_its_meta():
    node = node_of(lambda m, x: x.add_(1))
    with node.graph.inserting_after(node):
        other = node.graph.call_method("exp", (node,))
    other.meta = dict(node.meta)
    assert not op_facts.writes(other) and not op_facts.sources(other)


def test_facts_survive_files_and_copies():
    graph = node_of(lambda m, x: (torch.bernoulli(m.table), x.t().add_(1))).graph
    again = from_data(as_data(graph))
    assert [op_facts.facts_of(n) for n in again.nodes] == [op_facts.facts_of(n) for n in graph.nodes]
    assert any(map(op_facts.is_random, again.nodes)) and any(map(op_facts.writes, again.nodes))


def test_memory_is_followed_through_views_of_views():
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    copied = graph.call_method("clone", (x,))
    view = graph.call_method("t", (graph.call_method("view", (copied, -1)),))
    write = graph.call_method("add_", (view, other))
    graph.output((copied, write))
    memory = op_facts.Memory(graph)
    assert all(map(memory.is_written, (copied, view, write))) and memory.is_returned(view)
    assert not memory.is_written(x) and not memory.is_written(other) and memory.is_foreign(other)
    assert op_facts.family(write) == op_facts.family(copied) and x not in op_facts.family(copied)
    assert memory.written_between(copied, graph.output_node(), [view])
    assert not memory.written_between(copied, graph.output_node(), [x])


@pytest.mark.parametrize("name", ["add_", "index_put_", "copy_", "__iadd__", "__setitem__", "fill_", "t_", "dropout_"])
def test_in_place_functions_mutate(name):
    function = getattr(torch.Tensor, name, None) or getattr(torch, name)
    assert op_facts.mutates(function)


@pytest.mark.parametrize("name", ["add", "requires_grad_", "__index__", "__int__", "__invert__", "view", "clone"])
def test_others_do_not(name):
    assert not op_facts.mutates(getattr(torch.Tensor, name))
