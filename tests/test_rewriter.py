"""``rewrite``: writes in place, what it cannot do, and what it leaves alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.errors import DeviationError, QuantizationError, RewriteError
from tests.helpers.graphs import X, lowered, quantized
from tests.helpers.judging import sqnr
from tests.helpers.rewriting import assert_close, assert_same, cases, model, rewritten, seq
from tests.helpers.running import convert, run

# Writing in place


def written(change):
    """``change`` is applied to a value between two layers, which is not rebound."""

    def forward(m, x):
        y = m.fc(x)
        change(y, x)
        return m.last(y)

    return forward


INPLACE = {
    "relu_": lambda y, x: y.relu_(),
    "add_": lambda y, x: y.add_(x, alpha=2),
    "tanh_": lambda y, x: y.tanh_(),
    "silu inplace=True": lambda y, x: F.silu(y, inplace=True),
    "x += y": lambda y, x: y.__iadd__(x),
    "y[:, 0] = number": lambda y, x: y.__setitem__((slice(None), 0), 0.5),
    "y[:, 0] = tensor": lambda y, x: y.__setitem__((slice(None), 0), x[:, 1]),
    "y[..., 0] = size": lambda y, x: y.__setitem__((..., 0), x.size(1)),
    "y[...] = tensor": lambda y, x: y.__setitem__(..., x),
    "y[:, -1] = item": lambda y, x: y.__setitem__((slice(None), -1), x.max().item()),
    "y[0][1] = number": lambda y, x: y[0].__setitem__(1, 1.0),
    "y[mask] = number": lambda y, x: y.__setitem__(x > 1, 0.0),
    "y[mask] = tensor": lambda y, x: y.__setitem__(x > 1, x[x > 1]),
    "y[:, list] = number": lambda y, x: y.__setitem__((slice(None), [0, 2]), 1.0),
    "y[:, :, mask] = number": lambda y, x: y.__setitem__((slice(None), slice(None), x[0, 0] > 0), 1.0),
    "y[tensor, tensor] = number": lambda y, x: y.__setitem__((torch.arange(1), torch.tensor([3])), 1.0),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 1, 0.0),
    "copy_": lambda y, x: y.copy_(x),
    "fill_ a slice": lambda y, x: y[:, : x.size(1) // 2].fill_(0.5),
    "clamp_ a view": lambda y, x: y[:, 1:].clamp_(min=0),
    "index_add_": lambda y, x: y.index_add_(1, torch.tensor([0]), x[:, :1]),
    "transpose_": lambda y, x: y.transpose_(0, 1),
    "through detach": lambda y, x: y.detach().add_(1.0),
    "out=": lambda y, x: torch.add(y, x, out=y),
    "the input": lambda y, x: (x.add_(1), y.mul_(x)),
    "relu_ of the input": lambda y, x: (x.relu_(), y.mul_(x)),
    "a slice of the input": lambda y, x: x.__setitem__((slice(None), 0), 7.0),
    "a view of the input": lambda y, x: x.view(-1)[::2].mul_(2.0),
}


@cases(INPLACE)
def test_writes_in_place_are_seen_by_the_layer_after_and_by_the_caller(case):
    module, x = model(written(case)), seq()
    _, g, _ = assert_same(module, x, seq(1), seq(2, 10))
    assert sqnr(run(module, x), run(g, x)) > 25


def test_an_alias_sees_what_is_written():
    def forward(m, x):
        y = m.fc(x)
        flat, half = y.view(-1, 8), y[..., :4]
        F.relu(y, inplace=True)
        half += x[..., :4]
        return m.last(flat)

    assert_same(model(forward), seq(), seq(3, 4))


def test_an_assignment_to_new_axes_and_tensors_says_what_to_do():
    module = model(written(lambda y, x: y.__setitem__((None, torch.arange(2)), 0.0)))
    with pytest.raises(RewriteError, match="two steps"):
        rewritten(module, seq())


def test_state_written_in_forward_stays_out_of_the_graph():
    def forward(m, x):
        m.seen, m.calls = x.mean(), getattr(m, "calls", 0) + 1
        return m.last(m.fc(x))

    q, _, _ = assert_same(model(forward), seq())
    assert q.calls >= 2


@pytest.mark.parametrize("chaotic", [False, True])
def test_a_disagreement_of_graph_and_model_raises_unless_the_model_disagrees_with_itself(chaotic, monkeypatch):
    def forward(m, x):
        x = m.fc(x)
        for _ in range(24 if chaotic else 0):
            x = torch.sin(9 * x)
        return x

    example = seq()
    quantized = dbrq.quantize(model(forward), [example])
    if chaotic:
        with pytest.warns(UserWarning, match="rounded otherwise change what this model gives"):
            dbrq.rewrite(quantized, example)
        return
    record = dbrq.rewriter._record

    def negated(*args):
        recording = record(*args)
        output = recording.graph.graph.output_node()
        with recording.graph.graph.inserting_before(output):
            output.args = (recording.graph.graph.call_function(torch.neg, output.args),)
        recording.graph.recompile()
        return recording

    monkeypatch.setattr(dbrq.rewriter, "_record", negated)
    with pytest.raises(dbrq.RewriteError, match="does not give what the model gives"):
        dbrq.rewrite(quantized, example)


@pytest.mark.parametrize("backend", ["rewrite", "torchscript", "onednn"])
def test_a_layer_under_vmap_is_refused(backend):
    q = quantized(lambda s, x: torch.vmap(s.b)(s.a(x)), X)
    with pytest.raises(dbrq.QuantizationError, match=r"torch\.func"):
        lowered(q, backend, X)
    assert dbrq.rewrite(quantized(lambda s, x: s.a(x), X), (X,))(X).shape == X.shape  # nothing of it is left behind


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
