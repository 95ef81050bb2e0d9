"""How calls are written in graphs: spellings that the op table's own tests leave out, between int8 layers, on the
backends that need no compiler; and what is said of calls that no graph has.

Several spellings share a model, since making a graph of many ops costs little more than making one of a single op.
"""

import math
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.lowering import engine
from dbrq.lowering.onednn import mapping as onednn_mapping
from tests.helpers.judging import agreement, step_of
from tests.helpers.models import Call
from tests.helpers.reference import fake_quantized
from tests.helpers.running import run

W1, W2, W3 = (torch.randn(4, 4, *size, generator=torch.Generator().manual_seed(0)) * 0.2
              for size in ((3,), (3, 3), (3, 3, 3)))  # fmt: skip
SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def unbatched(n: int, weight: torch.Tensor) -> dict:
    conv, transposed = getattr(F, f"conv{n}d"), getattr(F, f"conv_transpose{n}d")
    found = {
        "conv": lambda x: conv(x, weight),
        "conv, keywords": lambda x: conv(input=x, weight=weight, padding=1, stride=2),
        "conv, same": lambda x: conv(x, weight, padding="same"),
        "transposed": lambda x: transposed(x, weight, stride=2),
        "adaptive_max": lambda x: getattr(F, f"adaptive_max_pool{n}d")(x, 2),
        "adaptive_avg": lambda x: getattr(F, f"adaptive_avg_pool{n}d")(x, 2),
        "adaptive_avg, uneven": lambda x: getattr(F, f"adaptive_avg_pool{n}d")(input=x, output_size=(4,) * n),
    }
    for kind in ("max", "avg"):
        pool = getattr(F, f"{kind}_pool{n}d")
        found[f"{kind}"] = lambda x, pool=pool: pool(x, 2)
        found[f"{kind}, keywords"] = lambda x, pool=pool: pool(
            input=x, kernel_size=3, stride=2, padding=1, ceil_mode=True
        )
    return found


#: Shape of what a layer gives -> what is made of it.
SPELLINGS = {
    "unbatched, 1 dimension": ((4, 6), unbatched(1, W1)),
    "unbatched, 2 dimensions": ((4, 6, 6), {
        **unbatched(2, W2),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pad": lambda x: F.pad(x, (1, 1), mode="replicate"),
        "attention": lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x, is_causal=True),
    }),
    "unbatched, 3 dimensions": ((4, 6, 6, 6), unbatched(3, W3)),
    "numbers": ((3, 4), {
        "mul": lambda x: x * x.sum(), "relu": lambda x: x.sum().relu_() + x,
        "alpha": lambda x: torch.add(x.mean(), x, alpha=2), "clamp": lambda x: x.mean().clamp(0, 1) + x,
        "softmax": lambda x: x.mean().softmax(0) + x, "log_softmax": lambda x: F.log_softmax(x.mean(), -1) + x,
        "mean": lambda x: x.mean().mean(0) + x.mean().mean(-1) + x, "flatten": lambda x: x.sum().flatten() + x,
        "reshape": lambda x: x.sum().reshape(1, 1) + x, "unsqueeze": lambda x: x.sum().unsqueeze(-1) + x,
        "stack": lambda x: torch.stack([x.sum(), x.mean()])[1] + x, "gelu": lambda x: F.gelu(x.sum()) + x,
        "div": lambda x: x / x.abs().sum() + x.sum() / (x.abs() + 1), "sub": lambda x: x.sum() - x,
        "t": lambda x: x.sum().t() + x, "permute": lambda x: x.sum().permute(()) + x,
        "expand": lambda x: x.sum().expand(3, 4) + x, "index": lambda x: x[0, 1] + x,
        "maximum": lambda x: torch.maximum(x, x.mean()), "pow": lambda x: x.abs() ** x.mean().abs(),
        "linear": lambda x: F.linear(x[0], SQUARE),
    }),
    "integers and truth values": ((3, 4), {
        "add": lambda x: x + torch.arange(4), "radd": lambda x: torch.arange(4) + x, "mul": lambda x: x * (x > 0),
        "rmul": lambda x: (x > 0) * x, "rsub": lambda x: torch.arange(4) - x, "div": lambda x: x / torch.arange(1, 5),
        "rdiv": lambda x: torch.arange(1, 5) / (x.abs() + 1), "add ints": lambda x: x + (x.int() + x.int()),
        "div ints": lambda x: x + x.argmax(1, True) / x.argmin(1, True).clamp(min=1),
        "floordiv": lambda x: x + x.argmax(1, True) // 2, "mul by float": lambda x: x + x.argmax(1, True) * 0.5,
        "relu": lambda x: x + (x * 5).long().relu(), "clamp": lambda x: x + (x * 5).int().clamp(-1.5, 3.0),
        "abs, neg": lambda x: x + abs(-(x * 5).int()), "pow": lambda x: x + (x * 5).int() ** 2,
        "cat": lambda x: torch.cat([x, (x * 5).int()], -1),
        "cat bools": lambda x: torch.cat([x > 0, x > 1], -1).float(),
        "mean": lambda x: x + (x * 5).int().mean(dtype=torch.float32),
        "softmax": lambda x: x + (x * 3).int().softmax(-1, dtype=torch.float32),
        "float64": lambda x: (x * torch.ones(4, dtype=torch.float64)).float(),
        "mean in float64": lambda x: x + x.mean(-1, keepdim=True, dtype=torch.float64).float(),
    }),
    "casts": ((3, 4), {
        **{name: lambda x, name=name: getattr(x.abs() * 3, name)().float() * x
           for name in ("byte", "char", "short", "int", "long", "double", "float")},
        "half": lambda x: x.half().float(), "bool": lambda x: x.bool() * x,
        "with a layout": lambda x: x.double(memory_format=torch.contiguous_format).float(),
        "float with a layout": lambda x: x.float(memory_format=torch.contiguous_format) * 2,
        "complex": lambda x: torch.view_as_real(x.cfloat()).sum(-1),
        "type, a class": lambda x: x.type(torch.FloatTensor) * 2,
        "type, its name": lambda x: x.type("torch.IntTensor") * x,
        "type, a dtype": lambda x: x.type(dtype=torch.int32) * x, "type_as": lambda x: x.type_as(torch.zeros(1)) * 2,
        "type, asked for": lambda x: x + 1 if x.type() == "torch.FloatTensor" else x,
        "view, same dtype": lambda x: x.view(torch.float32) * 2,
        "view, by keyword": lambda x: x.view(dtype=torch.float32),
    }),
    "axes": ((2, 3, 4), {
        "cat": lambda x: torch.cat(tensors=[x, x.relu()], axis=-2),
        "stack": lambda x: torch.stack([x, x], dim=-1).flatten(-2),
        "chunk": lambda x: x.chunk(2, dim=-1)[1], "split": lambda x: x.split(split_size=2, dim=-1)[1],
        "unbind": lambda x: x.unbind(dim=-2)[1], "select": lambda x: torch.select(x, dim=-2, index=-1),
        "narrow": lambda x: torch.narrow(input=x, dim=-1, start=-3, length=2),
        "movedim": lambda x: torch.movedim(x, (-1, 0), (0, -1)), "permute": lambda x: x.permute(-1, 0, -2),
        "transpose": lambda x: torch.transpose(x, dim0=-1, dim1=-2), "flip": lambda x: torch.flip(x, dims=[-1]),
        "unflatten": lambda x: x.unflatten(-1, (2, -1)).flatten(-2),
        "roll": lambda x: x.roll(shifts=(1, -1), dims=(-1, 0)),
        "squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze((1, -1)), "unfold": lambda x: x.unfold(-1, 2, 2),
        "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]), dim=-2),
        "index_select": lambda x: torch.index_select(input=x, dim=-2, index=torch.tensor([1])),
        "sum": lambda x: x.sum(axis=-1, keepdims=True) + x, "mean": lambda x: x.mean(axis=-1, keepdims=True) + x,
        "mean of two": lambda x: torch.mean(input=x, dim=(0, -1)), "softmax": lambda x: F.softmax(input=x, dim=-2),
        "max": lambda x: x.max(dim=-1, keepdim=True)[0] + x, "mean of none": lambda x: x.mean(()) + x,
    }),
    "arguments": ((2, 4, 4), {
        "ints for floats": lambda x: F.hardtanh(x, -1, 2) + F.leaky_relu(x, 1) + F.elu(x, 2) + F.softplus(x, 2, 3),
        "clamp": lambda x: x.clamp(0) + torch.clamp(x, max=1) + x.clip(min=-1, max=1),
        "numpy's": lambda x: torch.add(x1=x, x2=x.relu()), "sub": lambda x: torch.sub(input=x, other=x.relu(), alpha=2),
        "rsub": lambda x: torch.rsub(x, x.relu(), alpha=2), "div": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
        "iadd": lambda x: operator.iadd(x.clone(), 1), "baddbmm": lambda x: torch.baddbmm(x, x, x, beta=0.5, alpha=2),
        "embedding": lambda x: torch.embedding(SQUARE, indices=x.argmax(-1)),
        "layer_norm": lambda x: F.layer_norm(input=x, normalized_shape=(4,), eps=1e-3),
        "norm": lambda x: x / x.norm(p="fro", dim=-1, keepdim=True).clamp_min(0.1),
        "atleast": lambda x: torch.atleast_1d(x) + torch.atleast_2d(x, x)[1],
        "meshgrid": lambda x: torch.meshgrid(x[0, 0])[0],
        "variadic": lambda x: torch.broadcast_tensors(x, x[:1])[1] + torch.block_diag(x[0], x[1])[:4, :4],
        "cartesian_prod": lambda x: torch.cartesian_prod(x[0, 0], x[0, 1]),
        "overload": lambda x: torch.ops.aten.slice.Tensor(x, -1, 1, 3),
        "segments": lambda x: torch.segment_reduce(x[0], "sum", lengths=torch.tensor([1, 3]), axis=0),
        "nonzero": lambda x: (x.abs() + 1).nonzero(as_tuple=True)[0].float(),
        "infinite": lambda x: x.masked_fill(x > x.mean(-1, keepdim=True), -math.inf).softmax(-1),
        "not a number": lambda x: x.masked_fill(x > 0, math.nan).nansum(-1) + torch.full((4,), math.nan).nan_to_num(),
        "sizes of tensors": lambda x: x * x.new_full((4,), 2), "split of a method": lambda x: x.unsafe_chunk(2, -1)[0],
    }),
    "functions made of others": ((4, 4), {
        "triplets": lambda x: F.triplet_margin_with_distance_loss(
            x, x + 1, x * 2, distance_function=nn.PairwiseDistance()),
        "gaussian_nll": lambda x: F.gaussian_nll_loss(x, x * 2, x.abs() + 1),
        "linear_cross_entropy": lambda x: F.linear_cross_entropy(x, SQUARE, torch.arange(4)),
        "unravel_index": lambda x: torch.unravel_index(x.argmax(-1), (2, 2))[1] + x,
        "ctc": lambda x: F.ctc_loss(x[:, None].log_softmax(-1), torch.tensor([[1, 2]]), [4], [2]),
        "unique": lambda x: x.unique(sorted=True),
    }),
}  # fmt: skip


class Many(nn.Module):
    """A layer, and all of these of what it gives."""

    def __init__(self, shape: tuple[int, ...], functions) -> None:
        super().__init__()
        self.head, self.functions = nn.Linear(shape[-1], shape[-1]), list(functions)
        self.tails = nn.ModuleList()

    def forward(self, x):
        made = [function(self.head(x)) for function in self.functions]
        if not self.tails:
            return made
        return [tail(y) if y.dim() else y for tail, y in zip(self.tails, made, strict=True)]


@pytest.mark.parametrize("shape, functions", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.filterwarnings("ignore:torch.meshgrid", "ignore:.*torch.jit")
def test_spellings(shape, functions):
    model = Many(shape, functions.values()).eval()
    inputs = [torch.randn(shape) for _ in range(3)]
    model.tails = nn.ModuleList(nn.Linear(y.size(-1), 5) if y.dim() else nn.Identity() for y in run(model, inputs[0]))
    prepared = dbrq.prepare(model, inputs[0])
    for x in inputs:
        run(prepared, x)
    converted = dbrq.convert(prepared)
    lowered = {backend: dbrq.lower(converted, inputs[0], backend=backend) for backend in ("torchscript", "onednn")}
    for x in inputs:
        expected = run(converted, x)
        found = {"converted": (expected, fake_quantized(converted, model, x)),
                 **{backend: (run(module, x), expected) for backend, module in lowered.items()}}  # fmt: skip
        for what, (got, wanted) in found.items():
            for name, a, b in zip(functions, got, wanted, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name}, {what}"
                steps = (a - b).abs().max() / step_of(b)
                assert agreement(a, b, step_of(b)) >= 0.95, f"{name}, {what}: {steps:.1f} steps"


# What no graph has


class Once(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def quantized(function) -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(3, 4)
    return dbrq.quantize(Once(function).eval(), [x]), x


def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(4)


def seeded_for_a_while(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.randint(0, 9, (4,))


REFUSED = {
    "a seed": (seeded, "rand"),
    "a seed, put back": (seeded_for_a_while, "randint"),
    "a generator": (lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(1)), "rand"),
    "a function": (lambda x: x.cpu().apply_(lambda v: v + 1), "apply_"),
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("function, op", REFUSED.values(), ids=REFUSED)
def test_what_no_graph_can_do_is_refused(function, op, seed):
    q, x = quantized(function)
    torch.manual_seed(seed)  # that of forward itself, too
    torch.rand(1)
    for make in (dbrq.rewrite, dbrq.lower):
        with pytest.raises(dbrq.QuantizationError) as caught:
            make(q, x)
        assert caught.value.op == op and "test_torchscript_form.py" in str(caught.value.got)


def test_other_bits_are_seen_where_a_backend_can():
    q, x = quantized(lambda y: y.view(torch.int32).view(dtype=torch.uint8).view(torch.float32) * 2)
    expected = run(q, x)
    torch.testing.assert_close(run(dbrq.rewrite(q, x), x), expected)
    torch.testing.assert_close(run(dbrq.lower(q, x, backend="onednn"), x), expected)
    with pytest.raises(dbrq.RewriteError) as caught:
        dbrq.lower(q, x)  # TorchScript has no such operator
    assert caught.value.op == "view" and "test_torchscript_form.py" in str(caught.value.got)


def test_sparse_values_between_dense_ones():
    q, x = quantized(lambda y: torch.sparse.mm(y.relu().to_sparse(), SQUARE))
    torch.testing.assert_close(run(dbrq.lower(q, x, backend="onednn"), x), run(q, x))


def test_compressed_sparse_inputs_are_refused():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, weights):
            return weights @ self.layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = SQUARE.relu().to_sparse_csr()
    with pytest.raises(dbrq.ConfigurationError, match="compressed"):
        dbrq.prepare(Sparse(), (torch.randn(4, 4), weights))


def test_an_error_in_a_rewrite_names_the_op(monkeypatch):
    def broken(lowering, nodes):
        return [][0]

    where = {"torchscript": dbrq.lowering.torchscript, "onednn": onednn_mapping}
    q, x = quantized(lambda y: F.softmax(y, -1))
    for backend, module in where.items():
        fails = engine.Rewrite("broken", [lambda n: n.name.endswith("softmax")], lambda *_: "", broken)
        monkeypatch.setattr(module, "REWRITES", [fails, *module.REWRITES])
        with pytest.raises(dbrq.RewriteError, match=f"lowering to {backend} failed") as caught:
            dbrq.lower(q, x, backend=backend)
        assert isinstance(caught.value.__cause__, IndexError)
        assert "softmax" in caught.value.op and "test_torchscript_form.py" in caught.value.got


def test_a_mistake_of_the_users_is_raised_as_torch_has_it():
    q, _ = quantized(lambda y: y + torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        dbrq.rewrite(q, torch.randn(5, 4))
    assert not isinstance(caught.value, dbrq.QuantizationError)


def test_ints_stay_ints_where_a_schema_takes_both():
    q, x = quantized(lambda y: y + torch.tensor(3) * torch.full((4,), 2))
    scripted = torch.jit.script(dbrq.rewrite(q, x))
    torch.testing.assert_close(scripted(x), run(q, x))


LISTS = {
    "ints and floats": lambda x: torch.tensor([1, 0.5, 2]).sum(),
    "nested": lambda x: torch.tensor([[1, 0.5]] * 4).sum(),
    "sizes": lambda x: torch.tensor([x.size(0), 8.0]).prod(),
    "bools": lambda x: torch.tensor([True, 2, 0.5]).sum(),
    "new_tensor": lambda x: x.new_tensor([1, 2.0] * 4),
    "as_tensor": lambda x: torch.as_tensor([1, 0.5]).sum(),
    "dtype": lambda x: torch.tensor([1, 2.5], dtype=torch.int64).sum(),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_numbers_of_several_types(name):
    """TorchScript has lists of one type."""
    model = Call(lambda m, x: m.layer(x) * LISTS[name](x), layer=nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8)
    quantized = dbrq.quantize(model, [x])
    lowered = dbrq.lower(quantized, x)
    for given in (x, x[:3]):
        assert torch.allclose(run(lowered, given), run(quantized, given), atol=1e-5)
