"""The op table: every spelling is what torch passes on, and every row keeps the promise of its role.

Everything here is generated from ``dbrq.mappings``; a new row fails these tests until it has an example.
"""

import inspect
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qconfig,
)
from torch.overrides import TorchFunctionMode

import dbrq
from dbrq.hidden_state import state_of
from dbrq.kernels import SUPPORTED_POST_OPS
from dbrq.mappings import FUNCTIONS, LEAVES, TABLE, Role, Spelling, function_name, leaf_row
from dbrq.op_facts import mutates, reads_values
from tests.helpers import Between, Call, assert_matches, assert_precision, convert, rows, run, sqnr

EVERYTHING = QConfigMapping().set_global(get_default_qconfig("onednn"))
BY_NAME = {row.name: row for row in TABLE}


def of_role(*roles: Role) -> list[str]:
    return [row.name for row in TABLE if row.role in roles]


# Spellings


def image(n: int = 2, channels: int = 4) -> Tensor:
    return torch.rand(2, channels, *[6] * n) + 0.5


#: Row -> arguments by the row's own parameter names, as any of its spellings takes them.
ARGUMENTS = {
    **{f"conv{n}d": lambda n=n: {"input": image(n), "weight": torch.randn(3, 4, *[1] * n)} for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": lambda n=n: {"input": image(n), "weight": torch.randn(4, 3, *[1] * n)} for n in (1, 2, 3)
    },
    "linear": lambda: {"input": torch.rand(2, 4), "weight": torch.randn(3, 4)},
    "matmul": lambda: {"input": torch.rand(2, 3, 4), "other": torch.rand(2, 4, 5)},
    "embedding": lambda: {"input": torch.tensor([0, 2]), "weight": torch.randn(5, 4)},
    "embedding_bag": lambda: {"input": torch.tensor([[0, 2]]), "weight": torch.randn(5, 4)},
    "batch_norm": lambda: {"input": image(), "running_mean": torch.zeros(4), "running_var": torch.ones(4)},
    **{name: lambda: {"input": image(), "other": image()} for name in ("add", "sub", "mul", "div")},
    **{name: lambda: {"input": [image(), image()], "dim": 1} for name in ("cat", "stack")},
    **{
        f"{kind}_pool{n}d": lambda n=n: {"input": image(n), "kernel_size": 2}
        for n in (1, 2, 3)
        for kind in ("max", "avg")
    },
    **{f"adaptive_avg_pool{n}d": lambda n=n: {"input": image(n), "output_size": 2} for n in (1, 2, 3)},
    "interpolate": lambda: {"input": image(), "scale_factor": 2},
    "clamp": lambda: {"input": image(), "min": 0.0},
    "clamp_min": lambda: {"input": image(), "min": 0.0},
    "leaky_relu": lambda: {"input": image()},
    "pad": lambda: {"input": image(), "pad": [1, 1]},
    "layer_norm": lambda: {"input": image(), "normalized_shape": [6]},
    **{name: lambda: {"input": image(), "dim": 1} for name in ("softmax", "log_softmax")},
    "scaled_dot_product_attention": lambda: {name: image() for name in ("query", "key", "value")},
    "pow": lambda: {"input": image(), "exponent": 2},
    **{name: lambda: {"input": torch.rand(3, 4), "other": torch.rand(4, 5)} for name in ("mm", "linalg_matmul")},
    "mv": lambda: {"input": torch.rand(3, 4), "vec": torch.rand(4)},
    "dot": lambda: {"input": torch.rand(4), "tensor": torch.rand(4)},
    "inner": lambda: {"input": torch.rand(3, 4), "other": torch.rand(5, 4)},
    "addmm": lambda: {"input": torch.rand(3, 5), "mat1": torch.rand(3, 4), "other": torch.rand(4, 5)},
    "addmv": lambda: {"input": torch.rand(3), "mat": torch.rand(3, 4), "vec": torch.rand(4)},
    "baddbmm": lambda: {"input": torch.rand(2, 3, 5), "batch1": torch.rand(2, 3, 4), "batch2": torch.rand(2, 4, 5)},
    "addbmm": lambda: {"input": torch.rand(3, 5), "batch1": torch.rand(2, 3, 4), "batch2": torch.rand(2, 4, 5)},
    "bilinear": lambda: {"input1": torch.rand(2, 3), "input2": torch.rand(2, 4), "weight": torch.rand(5, 3, 4)},
    "einsum": lambda: {"equation": "ij,jk", "operands": [torch.rand(3, 4), torch.rand(4, 5)]},
    "tensordot": lambda: {"a": torch.rand(3, 4), "b": torch.rand(4, 5), "dims": 1},
    "chain_matmul": lambda: {"matrices": torch.rand(3, 4)},
    "multi_dot": lambda: {"input": [torch.rand(3, 4), torch.rand(4, 5)]},
    "grouped_mm": lambda: {"input": torch.rand(2, 8, 16), "other": torch.rand(2, 16, 8)},
}
#: Moves with arguments beside the input, positional.
MOVES = {
    "view": (2, -1),
    "view_as": (torch.zeros(2, 144),),
    "reshape": ((2, -1),),
    "reshape_as": (torch.zeros(2, 144),),
    "unflatten": (1, (2, 2)),
    "permute": ((0, 2, 3, 1),),
    "transpose": (1, 2),
    "swapaxes": (1, 2),
    "swapdims": (1, 2),
    "movedim": (1, 2),
    "moveaxis": (1, 2),
    "unsqueeze": (0,),
    "expand": (2, 4, 6, 6),
    "expand_as": (torch.zeros(2, 4, 6, 6),),
    "broadcast_to": ((2, 4, 6, 6),),
    "repeat": (1, 1, 1, 2),
    "repeat_interleave": (2, 1),
    "tile": ((1, 2),),
    "narrow": (1, 0, 2),
    "select": (1, 0),
    "__getitem__": (0,),
    "chunk": (2, 1),
    "split": (2, 1),
    "tensor_split": (2, 1),
    "hsplit": (2,),
    "vsplit": (2,),
    "split_with_sizes": ([1, 3], 1),
    "unsafe_chunk": (2, 1),
    "unsafe_split": (2, 1),
    "flip": ((1,),),
    "roll": (1, 1),
    "index_select": (1, torch.tensor([0, 2])),
    "unfold": (2, 2, 2),
    "pixel_shuffle": (2,),
    "pixel_unshuffle": (2,),
    "channel_shuffle": (2,),
    "T": (),
    "H": (),
    "t": (),
    "adjoint": (),
    "rot90": (1, (2, 3)),
}
FLAT = ("t", "T", "H")
#: The row ``to`` has spellings that take other arguments.
CONVERSIONS = {torch.Tensor.to: (torch.float32,), torch.Tensor.float: (), torch.Tensor.type_as: (torch.zeros(1),)}

#: Spellings that torch turns into another one before anybody can see them.
NEVER_ARRIVES = {
    F.tanh: "calls Tensor.tanh",
    F.sigmoid: "calls Tensor.sigmoid",
    torch.Tensor.__matmul__: "x @ y is Tensor.matmul by then",
}


class Recording(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def arguments(func, spelling: Spelling) -> list:
    """Positional arguments in the spelling's own order."""
    name = spelling.row.name
    if BY_NAME[name].role is Role.PASS and name not in ARGUMENTS:
        x = torch.rand(4, 6) if name in FLAT else image(1 if name == "dropout1d" else 2)
        return [x, *(CONVERSIONS[func] if name == "to" else MOVES.get(name, ()))]
    given = ARGUMENTS.get(name, lambda: {"input": image()})()
    named = [n for n in spelling.names if n in given]
    count = len(named)
    if spelling.names[:count] == tuple(named):
        return [given[n] for n in named]
    last = max(i for i, n in enumerate(spelling.names) if n in given)
    return [given.get(n, spelling.defaults.get(n)) for n in spelling.names[: last + 1]]


def readable(func) -> str:
    """A name for test ids: function or method."""
    if getattr(func, "__name__", "") == "__get__":
        return f"Tensor.{func.__self__.__name__}"
    owner = (
        "Tensor" if getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func else func.__module__ or "torch"
    )
    return f"{owner}.{getattr(func, '__name__', func)}"


@pytest.mark.parametrize("func", list(FUNCTIONS), ids=readable)
def test_a_spelling_is_what_torch_passes_to_a_mode(func):
    spelling = FUNCTIONS[func]
    args = arguments(func, spelling)
    with Recording() as recording:
        func(*args)
    if func in NEVER_ARRIVES:
        assert func not in recording.seen and FUNCTIONS[recording.seen[0]].row is spelling.row, NEVER_ARRIVES[func]
    else:
        assert recording.seen[0] == func  # == since property getters are made anew each time


@pytest.mark.parametrize("func", [f for f in FUNCTIONS if f not in NEVER_ARRIVES], ids=readable)
def test_binding_gives_the_arguments_in_the_rows_order(func):
    spelling = FUNCTIONS[func]
    name = spelling.row.name
    if spelling.row.params == "input":
        return  # of moves only the input is bound
    given = ARGUMENTS.get(name, lambda: {"input": image()})()
    args = arguments(func, spelling)
    bound = dict(
        zip([item.partition("=")[0] for item in spelling.row.params.split()], spelling.bind(args, {}), strict=True)
    )
    for parameter, value in zip(spelling.names, args, strict=False):
        assert bound[parameter] is value
    by_keyword = spelling.bind([], dict(zip(spelling.names, args, strict=False)))
    assert all(a is b for a, b in zip(by_keyword, bound.values(), strict=True))
    assert set(given) <= set(bound)


OPERATORS = [(row.name, op) for row in TABLE for op in row.operators]


@pytest.mark.parametrize("name, op", OPERATORS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("other", ["tensor", "number"])
def test_operators_arrive_as_a_spelling_of_their_row(name, op, other):
    x, y = torch.rand(3, 3), torch.rand(3, 3) if other == "tensor" else 2.0
    if op is operator.matmul and other == "number":
        return  # numbers have no matmul
    with Recording() as recording:
        if op in (abs, operator.neg):
            op(x)
            return
        op(x, y)
        if op not in (operator.matmul, operator.iadd, operator.isub, operator.imul, operator.itruediv):
            op(y, x)
    for func in recording.seen:
        assert FUNCTIONS[func].row.name == name
        assert FUNCTIONS[func].inplace == op.__name__.startswith("i")


@pytest.mark.parametrize("name", [row.name for row in TABLE if row.inplace])
def test_inplace_spellings_are_known_to_write(name):
    for func, spelling in FUNCTIONS.items():
        if spelling.row.name == name:
            assert spelling.inplace == mutates(func), readable(func)


def test_rows_have_distinct_names_and_spellings_one_row_each():
    assert len(BY_NAME) == len(TABLE)
    assert all(function_name(func) == spelling.row.name for func, spelling in FUNCTIONS.items())
    assert all(reads_values(func) for func in FUNCTIONS)


@pytest.mark.parametrize("row", [row for row in TABLE if row.methods], ids=lambda row: row.name)
def test_methods_exist(row):
    missing = [m for m in row.methods if not hasattr(torch.Tensor, m)]
    assert not missing


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.reason or row.role is Role.FLOAT], ids=lambda row: row.name
)
def test_rows_that_stay_float_say_why(row):
    assert row.reason


@pytest.mark.parametrize("func", [f for f in FUNCTIONS if inspect.isfunction(f)], ids=readable)
def test_defaults_of_the_table_are_those_of_torch(func):
    spelling = FUNCTIONS[func]
    for name, parameter in inspect.signature(func).parameters.items():
        if name in spelling.defaults and parameter.default is not inspect.Parameter.empty:
            assert spelling.defaults[name] == parameter.default, name


# Leaf modules

MODULES = {
    **{
        getattr(nn, f"Conv{n}d"): (lambda n=n: getattr(nn, f"Conv{n}d")(4, 3, 1), lambda n=n: image(n))
        for n in (1, 2, 3)
    },
    **{
        getattr(nn, f"ConvTranspose{n}d"): (
            lambda n=n: getattr(nn, f"ConvTranspose{n}d")(4, 3, 1),
            lambda n=n: image(n),
        )
        for n in (1, 2, 3)
    },
    **{
        getattr(nn, f"{kind}Pool{n}d"): (lambda n=n, kind=kind: getattr(nn, f"{kind}Pool{n}d")(2), lambda n=n: image(n))
        for n in (1, 2, 3)
        for kind in ("Max", "Avg", "AdaptiveAvg")
    },
    **{
        getattr(nn, f"BatchNorm{n}d"): (lambda n=n: getattr(nn, f"BatchNorm{n}d")(4), lambda n=n: image(n))
        for n in (1, 2, 3)
    },
    nn.Linear: (lambda: nn.Linear(4, 3), lambda: torch.rand(2, 4)),
    nn.Dropout1d: (nn.Dropout1d, lambda: image(1)),
    nn.Embedding: (lambda: nn.Embedding(5, 4), lambda: torch.tensor([[0, 2]])),
    nn.EmbeddingBag: (lambda: nn.EmbeddingBag(5, 4), lambda: torch.tensor([[0, 2]])),
    **{cls: (lambda cls=cls: cls(4, 3), lambda: torch.rand(5, 2, 4)) for cls in (nn.LSTM, nn.GRU, nn.RNN)},
    **{cls: (lambda cls=cls: cls(4, 3), lambda: torch.rand(2, 4)) for cls in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
}


@pytest.mark.parametrize("cls", [cls for row in TABLE for cls in row.modules], ids=lambda cls: cls.__name__)
def test_a_leaf_modules_attributes_complete_the_rows_parameters(cls):
    make, example = MODULES.get(cls, (cls, image))
    module = make().eval()
    row, attributes = leaf_row(module)
    assert LEAVES[cls.forward][1] is not None
    parameters = [item.partition("=")[0] for item in row.params.split()]
    if attributes and row.role is not Role.RECURRENT:
        assert all(hasattr(module, name) for name in attributes)
        assert len(attributes) <= len(parameters) - 1
        renamed = {"training"}  # a module's own flag, which several functions take as a parameter
        assert [n for n in attributes if n not in renamed] == [
            n for n in parameters[1 : 1 + len(attributes)] if n not in renamed
        ]
    model = nn.Sequential(module)
    converted = convert(model, example()).quantized
    assert {r.op for r in dbrq.report(converted).rows} <= {row.name}


# Roles. Every model feeds an op from int8 layers and feeds its result to another one.


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
    mapping = QConfigMapping().set_global(get_default_qconfig("onednn"))
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
    mapping = QConfigMapping().set_global(get_default_qconfig("onednn")).set_object_type(cls, default_dynamic_qconfig)
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
