"""Every row of the op table keeps the promise of its role.

Every model feeds an op from int8 layers and feeds its result to another one.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
)

import dbrq
from dbrq.hidden_state import state_of
from dbrq.kernels import SUPPORTED_POST_OPS
from dbrq.mappings import FUNCTIONS, TABLE, Role
from tests.helpers.judging import assert_matches, assert_precision, rows, sqnr
from tests.helpers.models import Between, Call
from tests.helpers.op_examples import BY_NAME, DEFAULT, EVERYTHING, image
from tests.helpers.running import convert, run


def of_role(*roles: Role) -> list[str]:
    return [row.name for row in TABLE if row.role in roles]


def recorded(model: nn.Module, name: str) -> list:
    return [op for op in state_of(model).token.record.ops if op.op == name]


def check_all_int8(model: nn.Module, example, name: str, mapping=None) -> nn.Module:
    converted = assert_matches(model, example, mapping, fx=False)
    assert_precision(converted, name, "int8")
    assert all(not row.reason for row in rows(converted, name))
    assert dbrq.report(converted).coverage == 1.0
    return converted


COMPUTE = {
    **{
        f"conv{n}d": lambda n=n: Between(getattr(nn, f"Conv{n}d")(8, 8, 3, padding=1), ndim=n, size=6)
        for n in (1, 2, 3)
    },
    "linear": lambda: Between(nn.Linear(6, 5), size=6),
    "matmul": lambda: Between(lambda x, y: x @ y, inputs=2, size=6),
}


@pytest.mark.parametrize("name", of_role(Role.COMPUTE))
def test_compute_runs_in_int8(name):
    model = COMPUTE[name]()
    converted = check_all_int8(model, model.example, name, EVERYTHING)
    assert all("_int_mm" in row.kernel or "onednn.q" in row.kernel for row in rows(converted, name))


ELEMENTWISE = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x: x / 3.0,
}


@pytest.mark.parametrize("name", of_role(Role.ELEMENTWISE))
def test_elementwise_reads_and_writes_int8(name):
    op = ELEMENTWISE[name]
    model = Between(op, inputs=len(inspect.signature(op).parameters))
    converted = check_all_int8(model, model.example, name)
    decision = recorded(converted, name)[-1].decision
    assert decision.reads and decision.writes is not None


POOLS = {
    **{f"avg_pool{n}d": (n, lambda x, n=n: getattr(F, f"avg_pool{n}d")(x, 2)) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": (n, lambda x, n=n: getattr(F, f"adaptive_avg_pool{n}d")(x, 2)) for n in (1, 2, 3)},
    "mean": (2, lambda x: x.mean((2, 3))),
}


@pytest.mark.parametrize("name", of_role(Role.POOL))
def test_pools_average_integers(name):
    ndim, op = POOLS[name]
    model = Between(op, ndim=ndim, size=6)
    check_all_int8(model, model.example, name)


SHARES = {
    "cat": (2, lambda x, y: torch.cat([x, y], 1)),
    "stack": (2, lambda x, y: torch.stack([x, y], 1).flatten(1, 2)),
    **{f"max_pool{n}d": (n, lambda x, n=n: getattr(F, f"max_pool{n}d")(x, 2)) for n in (1, 2, 3)},
    "interpolate": (2, lambda x: F.interpolate(x, scale_factor=2)),
}


@pytest.mark.parametrize("name", of_role(Role.SHARE))
def test_ops_on_integers_share_the_qparams_of_their_inputs(name):
    ndim, op = SHARES[name]
    model = Between(
        op, inputs=len(inspect.signature(op).parameters) if name in ("cat", "stack") else 1, ndim=ndim, size=6
    )
    converted = check_all_int8(model, model.example, name)
    decision = recorded(converted, name)[0].decision
    assert {read.value for read in decision.reads} == {decision.writes}


class Head(nn.Module):
    """A layer, the activation, another layer."""

    def __init__(self, ndim: int, op) -> None:
        super().__init__()
        self.op = op
        self.example = torch.randn(2, 4, *[6] * ndim)
        if ndim:
            conv = getattr(nn, f"Conv{ndim}d")
            self.first, self.last = conv(4, 8, 3, padding=1), conv(8, 5, 1)
        else:
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.op(self.first(x)))


EXTRA = {"clamp": (-0.5, 0.5), "clamp_min": (0.0,), "leaky_relu": (0.2,)}


def spelled_out(name: str):
    row = BY_NAME[name]
    return lambda x: row.functions[0](x, *EXTRA.get(name, ()))


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
@pytest.mark.parametrize("name", of_role(Role.ACTIVATION))
def test_activations_fuse_where_a_kernel_takes_them_and_say_why_not_elsewhere(name, ndim):
    row = BY_NAME[name]
    model = Head(ndim, spelled_out(name))
    converted = assert_matches(model, model.example, fx=False)
    bound = [None, *EXTRA.get(name, ()), *[None] * 4] if name in EXTRA else FUNCTIONS[row.functions[0]].bind([None], {})
    post_op = row.post_op(bound) if row.post_op is not None else None
    fuses = post_op is not None and post_op.name in SUPPORTED_POST_OPS[ndim]
    found = [r for r in dbrq.report(converted).rows if r.op in (name, "hardtanh" if name == "relu6" else name)]
    assert len(found) == 1
    assert (found[0].precision == "int8") == fuses
    assert ("fused into first" in found[0].kernel) == fuses
    assert bool(found[0].reason) != fuses
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_norm_folds_into_the_convolution_before_it(ndim):
    norm = getattr(nn, f"BatchNorm{ndim}d")(8)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.uniform_(norm.running_mean, -1, 1)
    nn.init.uniform_(norm.weight, -1, 1)
    model = Head(ndim, norm)
    converted = check_all_int8(model, model.example, "batch_norm")
    assert "fused into first" in rows(converted, "batch_norm")[0].kernel


def test_norm_that_folds_into_nothing_says_why():
    model = nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    converted = assert_matches(model, image(), fx=False)
    assert "fold" in rows(converted, "batch_norm")[0].reason


@pytest.mark.parametrize("name", of_role(Role.EMBEDDING))
def test_embeddings_look_up_int8_rows(name):
    table = nn.Embedding(20, 8) if name == "embedding" else nn.EmbeddingBag(20, 8)
    mapping = QConfigMapping().set_global(DEFAULT)
    mapping.set_object_type(type(table), float_qparams_weight_only_qconfig)
    model = nn.Sequential(table, nn.Linear(8, 4))
    converted = check_all_int8(model, torch.randint(0, 20, (3, 5)), name, mapping)
    assert converted[0].weight_int8.dtype is torch.int8
    assert sum(p.numel() for p in converted[0].parameters()) == 0


@pytest.mark.parametrize("name", of_role(Role.RECURRENT))
def test_recurrent_layers_run_in_dynamic_int8(name):
    cls = next(iter(BY_NAME[name].modules))

    def forward(m, x):
        out = m.recurrent(m.first(x))
        while isinstance(out, tuple):
            out = out[0]
        return m.last(out)

    model = Call(forward, first=nn.Linear(6, 8), recurrent=cls(8, 8), last=nn.Linear(8, 4))
    x = torch.randn(3, 6) if name.endswith("cell") else torch.randn(5, 3, 6)
    mapping = QConfigMapping().set_global(DEFAULT).set_object_type(cls, default_dynamic_qconfig)
    converted = convert(model, x, mapping).quantized
    assert_precision(converted, name, "int8", 1)
    assert_precision(converted, "linear", "int8", 2)
    assert sqnr(run(model, x), run(converted, x)) > 25


PASSES = {
    "view": lambda x: x.view(2, 8, -1),
    "view_as": lambda x: x.view_as(torch.empty(2, 8, 36)),
    "reshape": lambda x: x.reshape(x.size(0), -1),
    "reshape_as": lambda x: x.reshape_as(torch.empty(2, 8, 36)),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (2, 4)).flatten(1, 2),
    "ravel": lambda x: x.ravel(),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(2, 3),
    "t": lambda x: x.flatten(1).t(),
    "adjoint": lambda x: x.adjoint(),
    "swapaxes": lambda x: x.swapaxes(2, 3),
    "swapdims": lambda x: x.swapdims(2, 3),
    "movedim": lambda x: x.movedim(1, -1),
    "moveaxis": lambda x: x.moveaxis(1, -1),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1).flatten(1, 2),
    "expand": lambda x: x[:, :1].expand(-1, 8, -1, -1),
    "expand_as": lambda x: x[:, :1].expand_as(torch.empty(2, 8, 6, 6)),
    "broadcast_to": lambda x: torch.broadcast_to(x[:, :1], (2, 8, 6, 6)),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "tile": lambda x: x.tile((1, 2, 1, 1)),
    "narrow": lambda x: x.narrow(1, 0, 4),
    "select": lambda x: x.select(1, 0),
    "__getitem__": lambda x: x[:, 2:6, ::2],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: x.split(2, 1)[1],
    "tensor_split": lambda x: x.tensor_split(2, 1)[1],
    "split_with_sizes": lambda x: x.split_with_sizes([2, 6], 1)[1],
    "hsplit": lambda x: x.hsplit(2)[0],
    "vsplit": lambda x: x.vsplit(2)[0],
    "unbind": lambda x: x.unbind(1)[0],
    "contiguous": lambda x: x.mT.contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "flip": lambda x: x.flip(2),
    "fliplr": lambda x: x.fliplr(),
    "flipud": lambda x: x.flipud(),
    "roll": lambda x: x.roll(1, 2),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2, 5])),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, 1)[0],
    "unsafe_split": lambda x: x.unsafe_split(4, 1)[0],
    "unfold": lambda x: x.unfold(2, 2, 2),
    "T": lambda x: x.flatten(1).T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.flatten(1).H,
    "mH": lambda x: x.mH,
    "data": lambda x: x.data,
    "identity": nn.Identity(),
    **{
        name: lambda x, name=name: getattr(F, name)(x, 0.5, False)
        for name in ("dropout", "dropout2d", "alpha_dropout", "feature_alpha_dropout")
    },
    "dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.5, False),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(2), 0.5, False).flatten(1, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 0)),
    "to": lambda x: x.to(torch.float32),
}


@pytest.mark.parametrize("name", of_role(Role.PASS))
def test_what_only_moves_elements_passes_integers_and_qparams_through(name):
    model = Between(PASSES[name], size=6)
    converted = assert_matches(model, model.example, fx=False)
    seen = recorded(converted, name)
    assert seen and {op.decision.precision for op in seen} == {"int8"}, f"{seen}\n{dbrq.report(converted)}"
    first, last = recorded(converted, "conv2d")[0], state_of(converted).token.record.hooked()[-1]
    assert last.decision.reads[0].value == first.decision.writes, "the qparams of the value are those before the move"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_row_has_an_example_here(row):
    examples = {
        Role.COMPUTE: COMPUTE,
        Role.ELEMENTWISE: ELEMENTWISE,
        Role.POOL: POOLS,
        Role.SHARE: SHARES,
        Role.PASS: PASSES,
    }.get(row.role)
    assert examples is None or row.name in examples


# What FX graph mode gets wrong


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_padding_modes(mode, ndim):
    conv = getattr(nn, f"Conv{ndim}d")
    model = Between(conv(8, 8, 3, padding=1, padding_mode=mode), ndim=ndim, size=6)
    check_all_int8(model, model.example, f"conv{ndim}d")
    model = Between(conv(8, 8, 3, padding="same", padding_mode=mode), ndim=ndim, size=6)
    check_all_int8(model, model.example, f"conv{ndim}d")


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("spelled", ["module", "function"])
def test_prelu_runs_in_float_between_int8_layers(count, spelled):
    module = nn.PReLU(count, init=0.3)
    model = Between(module if spelled == "module" else lambda x: F.prelu(x, torch.full((count,), 0.3)))
    converted = assert_matches(model, model.example, fx=False)
    assert dbrq.report(converted).coverage == 1.0
    found = rows(converted, "prelu")
    assert len(found) == 1 and found[0].precision == "float" and found[0].reason
