"""``export``: what the program holds, what stays free in it, and that torch's own tools take it.

What a program is compared with is the converted model, of which it is another form.
"""

import copy
import io
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.ao.quantization import QConfig, QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig
from torch.ao.quantization.observer import PlaceholderObserver, default_per_channel_weight_observer
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

import dbrq
from dbrq.errors import RewriteError, SeveralPathsError
from dbrq.graph.writer import ONE_PATH
from tests.helpers.judging import agreement, step_of
from tests.helpers.running import has_compiler, run


class Layers(nn.Module):
    """``[..., 8]`` to ``[..., 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def layers(self, x):
        return self.last(F.relu(self.first(x)))

    def forward(self, x):
        return self.layers(x)


class Pictures(nn.Module):
    """``[b, 3, h, w]`` to ``[b, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def model(forward) -> nn.Module:
    """A module with this ``forward`` and the layers above."""
    return type("Model", (Layers,), {"forward": forward})().eval()


def exported(module, example, mapping=None, **options):
    """The converted model and its program."""
    args = copy.deepcopy(example)
    q = dbrq.quantize(module.eval(), [args] * 2, mapping)
    return q, dbrq.export(q, copy.deepcopy(example), **options)


def assert_same(program, q, *calls) -> None:
    """As many values within one quantization step as a graph and its model have; containers may be others."""
    module = program.module()
    for call in calls:
        got, expected = tree_leaves(run(module, call)), values(run(q, call))
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            if not isinstance(b, Tensor):
                assert a == b
                continue
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert agreement(a.float(), b.float(), step_of(b.float())) >= 0.98


def values(tree) -> list:
    """Leaves in order, of dataclasses too."""
    tree = vars(tree) if hasattr(tree, "__dataclass_fields__") else tree
    return [leaf for leaf in tree_leaves(dict(tree) if isinstance(tree, dict) else tree) if leaf is not None]


def ops(program) -> Counter:
    return Counter(str(node.target).split(".")[1] for node in program.graph.nodes
                   if "quantized_decomposed" in str(node.target))  # fmt: skip


# What it is


def test_a_program_of_float_ops_between_quantize_and_dequantize():
    """Two values are quantized, the input and what relu gives, and two weights."""
    q, program = exported(Layers(), torch.randn(4, 8))
    assert isinstance(program, ExportedProgram)
    assert ops(program) == {"quantize_per_tensor": 2, "dequantize_per_tensor": 2, "dequantize_per_channel": 2}
    assert {tensor.dtype for name, tensor in program.state_dict.items() if name.endswith("_int8")} == {torch.int8}
    assert not any(name.endswith("weight") for name in program.state_dict), "a float copy of a weight"
    assert_same(program, q, torch.randn(4, 8), torch.randn(9, 8))


def test_a_batch_norm_is_in_the_weight():
    q, program = exported(Pictures(), torch.rand(2, 3, 8, 8))
    assert ops(program)["dequantize_per_channel"] == 2
    assert not any("batch_norm" in str(node.target) for node in program.graph.nodes)
    assert_same(program, q, torch.rand(2, 3, 8, 8), torch.rand(3, 3, 10, 12))


def test_save_and_load(tmp_path):
    _, program = exported(Pictures(), torch.rand(2, 3, 8, 8))
    torch.export.save(program, tmp_path / "model.pt2")
    x = torch.rand(5, 3, 9, 8)
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert torch.equal(run(loaded.module(), x), run(program.module(), x))


def test_the_model_is_left_alone():
    """As are the example and the random state."""
    module = model(lambda self, x: self.layers(x.mul_(2) + torch.rand_like(x) * 0.01))
    example = torch.randn(4, 8)
    q = dbrq.quantize(module, [example.clone()] * 2)
    before, given, random = copy.deepcopy(q.state_dict()), example.clone(), torch.get_rng_state()
    dbrq.export(q, example)
    assert torch.equal(example, given)
    assert torch.equal(torch.get_rng_state(), random)
    after = q.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_model_without_quantized_parts():
    q, program = exported(Layers(), torch.randn(4, 8), QConfigMapping())
    assert not ops(program)
    x = torch.randn(3, 8)
    torch.testing.assert_close(run(program.module(), x), run(q, x))


# Recipes


def test_dynamic_quantization():
    q, program = exported(Layers(), torch.randn(4, 8), QConfigMapping().set_global(default_dynamic_qconfig))
    assert ops(program)["choose_qparams"] == 2
    assert_same(program, q, torch.randn(4, 8), torch.randn(7, 8))


def test_weights_only():
    """Values stay float, so the program is as close as float sums are."""
    weight_only = QConfig(PlaceholderObserver.with_args(dtype=torch.float32), default_per_channel_weight_observer)
    q, program = exported(Layers(), torch.randn(4, 8), QConfigMapping().set_global(weight_only))
    assert ops(program) == {"dequantize_per_channel": 2}
    x = torch.randn(7, 8)
    torch.testing.assert_close(run(program.module(), x), run(q, x))


def test_an_embedding_of_int8_rows():
    module = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    mapping = dbrq.default_qconfig_mapping().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
    q, program = exported(module, torch.randint(16, (2, 5)), mapping)
    assert_same(program, q, torch.randint(16, (2, 5)), torch.randint(16, (3, 4)))


# What stays free


@pytest.mark.parametrize("example", [(1, 6), (2, 1), (1, 1), (2, 6)], ids=str)
def test_sizes_are_free_also_from_an_example_of_one(example):
    q, program = exported(model(lambda self, x: self.layers(x).reshape(x.size(0) * x.size(1), 4)),
                          torch.randn(*example, 8))  # fmt: skip
    assert_same(program, q, *[torch.randn(b, t, 8) for b, t in ((1, 1), (1, 6), (3, 2), (2, 6))])


def test_integers_are_free():
    def forward(self, x, n: int, scale: float = 2.0):
        return self.layers(x[:, :n] * scale)

    q, program = exported(model(forward), (torch.randn(2, 6, 8), 4))
    assert_same(program, q, (torch.randn(2, 6, 8), 4), (torch.randn(3, 7, 8), 5))


def test_dynamic_shapes_of_the_user():
    """They are the user's to say: what is not named is fixed."""
    q, program = exported(Layers(), torch.randn(2, 6, 8), dynamic_shapes={"x": {0: Dim("batch", min=1, max=64)}})
    assert_same(program, q, torch.randn(2, 6, 8), torch.randn(5, 6, 8))
    for wrong in (torch.randn(2, 7, 8), torch.randn(65, 6, 8)):
        with pytest.raises((RuntimeError, AssertionError)):
            program.module()(wrong)


def test_keywords():
    def forward(self, x, mask=None, bias=None):
        x = self.layers(x)
        x = x if mask is None else x * mask[..., None]
        return x if bias is None else x + bias

    module = model(forward)
    named = {"x": torch.randn(2, 6, 8), "bias": torch.ones(4)}
    q, program = exported(module, named)
    assert_same(program, q, named, {"x": torch.randn(3, 5, 8), "bias": torch.zeros(4)})
    x, mask = torch.randn(2, 6, 8), torch.ones(2, 6)
    q = dbrq.quantize(module, [{"x": x, "mask": mask}])
    program = dbrq.export(q, x, example_kwargs={"mask": mask})
    got = program.module()(torch.randn(3, 5, 8), mask=torch.ones(3, 5))
    assert got.shape == (3, 5, 4)


def test_any_number_of_arguments():
    def forward(self, *parts, **more):
        return self.layers(torch.cat(parts)) + more["bias"]

    prepared = dbrq.prepare(model(forward), (torch.randn(2, 8), torch.randn(3, 8)),
                            example_kwargs={"bias": torch.ones(4)})  # fmt: skip
    prepared(torch.randn(2, 8), torch.randn(3, 8), bias=torch.ones(4))
    q = dbrq.convert(prepared)
    parts = torch.randn(2, 8), torch.randn(3, 8)
    program = dbrq.export(q, parts, example_kwargs={"bias": torch.ones(4)})
    bias = torch.zeros(4)
    torch.testing.assert_close(program.module()(*parts, bias=bias), q(*parts, bias=bias), atol=0.05, rtol=0)


@pytest.mark.parametrize("inputs", [
    lambda b: ([torch.randn(b, 8), torch.randn(b, 8)],),
    lambda b: ((torch.randn(b, 8), torch.randn(b, 8)),),
    lambda b: ({0: torch.randn(b, 8), 1: torch.randn(b, 8)},),
], ids=["list", "tuple", "dict"])  # fmt: skip
def test_containers_of_inputs(inputs):
    q, program = exported(model(lambda self, x: self.layers(x[0]) + self.layers(x[1])), inputs(2))
    assert_same(program, q, inputs(2), inputs(5))


# What it returns

Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def test_containers_that_pytree_knows_are_kept():
    for returned in (Pair, lambda a, b: {"logits": a, "hidden": b}, lambda a, b: [a, (b, 3)]):
        _, program = exported(model(lambda self, x, r=returned: r(self.layers(x), x * 2)), torch.randn(4, 8))
        x = torch.randn(3, 8)
        got, expected = run(program.module(), x), returned(torch.zeros(3, 4), x * 2)
        assert type(got) is type(expected)
        assert [type(leaf) for leaf in tree_leaves(got)] == [type(leaf) for leaf in tree_leaves(expected)]


NESTED = {
    "dict of more": (lambda y: {"a": y, "b": (y, [y]), "c": None}, lambda y: {"a": y, "b": (y, [y]), "c": None}),
    "ordered dict": (lambda y: OrderedDict(a=y), lambda y: OrderedDict(a=y)),
    "dataclass with more": (lambda y: Output(y, (y,)), lambda y: {"logits": y, "hidden": (y,)}),
    "shape": (lambda y: (y, y.shape), lambda y: (y, tuple(y.shape))),
}


@pytest.mark.parametrize("output, plain", NESTED.values(), ids=NESTED)
def test_outputs_are_nested_as_the_model_nests_them(output, plain):
    quantized = dbrq.quantize(Returns(output), [torch.randn(3, 4)])
    program = dbrq.export(quantized, torch.randn(3, 4))
    x = torch.randn(5, 4)
    quantized.output = lambda y: y
    got, expected = program.module()(x), plain(quantized(x))
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        assert torch.allclose(a, b, atol=1e-5) if isinstance(a, torch.Tensor) else a == b


class Returns(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.fc, self.output = nn.Linear(4, 4), output

    def forward(self, x):
        return self.output(self.fc(x) * 2)


def test_other_containers_become_plain_ones(tmp_path):
    """A program that is loaded elsewhere could not make them."""
    q, program = exported(model(lambda self, x: Output(self.layers(x), x * 2)), torch.randn(4, 8))
    got = run(program.module(), torch.randn(3, 8))
    assert type(got) is dict
    assert list(got) == ["logits", "hidden"]
    assert_same(program, q, torch.randn(3, 8))
    torch.export.save(program, tmp_path / "model.pt2")
    assert type(run(torch.export.load(tmp_path / "model.pt2").module(), torch.randn(3, 8))) is dict


def test_outputs_of_transformers_stay_what_they_are():
    """transformers tells pytree of its classes."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = outputs.BaseModelOutput
    q, program = exported(model(lambda self, x: made(last_hidden_state=self.layers(x))), torch.randn(4, 8))
    got = run(program.module(), torch.randn(3, 8))
    assert type(got) is made
    assert_same(program, q, torch.randn(3, 8))


# State


def test_a_buffer_that_forward_writes():
    """It is the program's own: a mutation of a buffer. Exporting counts no call."""

    def forward(self, x):
        self.calls += 1
        return self.layers(x) * (self.calls > 0), self.calls * 1

    module = model(forward)
    module.register_buffer("calls", torch.zeros((), dtype=torch.long))
    q = dbrq.quantize(module, [torch.randn(4, 8)])
    start = int(q.calls)
    program = dbrq.export(q, torch.randn(4, 8))
    assert list(program.run_decompositions().graph_signature.buffers_to_mutate.values()) == ["calls"]
    assert int(q.calls) == start
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    called = torch.export.load(file).module()
    counts = [int(run(called, torch.randn(2, 8))[1]) for _ in range(3)]
    assert counts == [start + 1, start + 2, start + 3]
    assert int(q.calls) == start


# Weights that several ops read


def test_a_weight_of_several_ops_is_dequantized_for_each():
    """Inductor's int8 patterns want one reader; else all but one of the calls compute in float."""

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.first(x))
        return self.last(x)

    q, program = exported(model(forward), torch.randn(4, 8))
    assert ops(program)["dequantize_per_channel"] == 4
    assert sum(name.endswith("first.weight_int8") for name in program.state_dict) == 1
    assert_same(program, q, torch.randn(4, 8), torch.randn(7, 8))


# Decisions

DECISIONS = {
    "a float": (lambda x: x.max().item() > 50, lambda x: x * 1000),
    "floats computed with": (lambda x: x.max().item() * 2 + 1 > 100 - x.min().item(), lambda x: x * 1000),
    "an integer": (lambda x: x.argmax().item() > 1000, lambda x: torch.cat([x * 0] * 200 + [x])),
    "a bool": (lambda x: bool((x > 50).any()), lambda x: x * 1000),
    "bools": (lambda x: bool((x > 50).any()) or not bool((x < 50).all()), lambda x: x * 1000),
    "a bool's item": (lambda x: (x > 50).any().item(), lambda x: x * 1000),
    "equal": (lambda x: torch.equal(x, x.abs()), lambda x: x.abs()),
    "allclose": (lambda x: torch.allclose(x, x.abs()), lambda x: x.abs()),
    "is_nonzero": (lambda x: torch.is_nonzero((x > 50).sum()), lambda x: x * 1000),
    "a count of none": (lambda x: (x > 50).nonzero().shape[0] > 0, lambda x: x + F.one_hot(torch.tensor(1), 8) * 90),
    "a count": (lambda x: (x > 50).nonzero().shape[0] > 0, lambda x: x * 1000),
    "a number as a condition": (lambda x: (x > 50).sum().item(), lambda x: x * 1000),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_on_values_are_checked_when_a_program_runs(name):
    """torch 2.13 by itself checks nothing of floats. The message names the line, as the graph's does."""
    decide, other = DECISIONS[name]

    def forward(self, x):
        return self.layers(-x if decide(x) else x)

    x = torch.randn(4, 8)
    q, program = exported(model(forward), x)
    assert_same(program, q, x, torch.randn(6, 8))
    with pytest.raises(RuntimeError, match=ONE_PATH):
        program.module()(other(x))


def test_a_number_in_an_if_may_be_any_other_number():
    """What was decided is that it is not zero."""

    def forward(self, x, mask):
        chosen = mask.nonzero().flatten()
        return self.layers(x[chosen] if chosen.numel() else x)

    q, program = exported(model(forward), (torch.randn(4, 8), torch.tensor([1, 0, 1, 0])))
    assert_same(program, q, (torch.randn(3, 8), torch.tensor([1, 1, 1])))
    with pytest.raises(RuntimeError, match=ONE_PATH):
        program.module()(torch.randn(3, 8), torch.tensor([0, 0, 0]))


# Around it


def test_autocast_and_inference_mode_around_it():
    q, expected = exported(Layers(), torch.randn(4, 8))
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        program = dbrq.export(q, torch.randn(4, 8))
    assert torch.equal(run(program.module(), x), run(expected.module(), x))
    with torch.inference_mode():
        program = dbrq.export(q, torch.randn(4, 8))
    assert torch.equal(run(program.module(), x), run(expected.module(), x))


def test_inference_mode_in_forward():
    """Its tensors have no versions, by which writes are told elsewhere."""

    def forward(self, x):
        with torch.inference_mode():
            y = self.layers(x)
            y.mul_(3)
            y[:, 0] = 1
            return y

    q, program = exported(model(forward), torch.randn(4, 8))
    assert_same(program, q, torch.randn(4, 8), torch.randn(7, 8))
    assert run(program.module(), torch.randn(2, 8))[:, 0].eq(1).all()


# Errors


def test_what_cannot_be_exported_is_an_error_that_says_why():
    def two_paths(self, x):
        return self.layers(x if x.sum() > 0 else -2 * x)

    def to_sparse(self, x):
        return torch.sparse.mm(self.layers(x).to_sparse(), torch.eye(4))

    with pytest.raises(dbrq.QuantizationError, match="convert"):
        dbrq.export(Layers(), torch.randn(4, 8))
    q = dbrq.quantize(model(two_paths), [torch.ones(4, 8), -torch.ones(4, 8)])
    with pytest.raises(SeveralPathsError, match="one graph cannot stand"):
        dbrq.export(q, torch.ones(4, 8))
    q = dbrq.quantize(model(to_sparse), [torch.ones(4, 8)])
    with pytest.raises(RewriteError, match=r"torch.export does not take the graph.*_to_sparse"):
        dbrq.export(q, torch.ones(4, 8))


# Ahead of time


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_compiled_ahead_of_time(tmp_path):
    """The package runs without dbrq, for other sizes too, and with oneDNN's int8 kernels."""
    q, program = exported(Pictures(), torch.rand(2, 3, 8, 8))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"),
                                                    inductor_configs={"freezing": True})  # fmt: skip
    packaged = torch._inductor.aoti_load_package(path)
    for x in (torch.rand(2, 3, 8, 8), torch.rand(3, 3, 8, 8)):
        got, expected = packaged(x), run(q, x)
        assert agreement(got, expected, step_of(expected)) >= 0.98
