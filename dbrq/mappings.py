"""The op table: one row per op, the only place that says which spellings an op has and what dbrq does with it.

Hooks, fusion, placement, reports, the coverage tests and the table in docs/ops.md are derived from it. Adding an op is
adding a row; a role with no executor yet also needs one in ``eager/ops.py``.
"""

import ast
import enum
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import macs
from ._torch import grouped_mm
from .kernels import PostOp
from .macs import Multiplied


class Role(enum.Enum):
    """What an op does with quantized values."""

    COMPUTE = "computes in int8"
    EMBEDDING = "looks up int8 weights"
    RECURRENT = "computes in int8 in dynamic mode"
    NORM = "folds into the op before it"
    ELEMENTWISE = "reads int8, writes int8 with its own qparams"
    POOL = "averages int8, writes int8 with its own qparams"
    SHARE = "works on integers; inputs and output share one observer"
    ACTIVATION = "fuses into the op before it, else float"
    PASS = "moves integers; qparams pass through"
    FLOAT = "float only"


@dataclass(frozen=True, eq=False)
class OpRow:
    """One op.

    Attributes:
        name: its name in reports and recipes.
        role: see ``Role``.
        params: its parameters in order, defaults included, as in ``"input weight bias=None"``.
        functions: functions that spell it; their arguments bind to ``params``.
        methods: names of Tensor methods that spell it.
        inplace: functions or method names that spell it and write to their first argument.
        modules: module class -> the attributes that follow the positional inputs in ``params``.
        operators: ``operator`` functions, for looking up qconfigs only (they arrive as methods).
        variants: spellings with parameters in another order: spelling -> params.
        weight_axis: the output channel axis of ``weight``, for per-channel scales.
        post_op: bound arguments -> the fused form, or None where no kernel has one.
        ndim: spatial dimensions, where the row is for one number of them.
        reason: why it stays float, for rows that do.
        macs: how its multiply-accumulates are counted, for ops that have any.
    """

    name: str
    role: Role
    params: str = "input"
    functions: tuple[Callable, ...] = ()
    methods: tuple[str, ...] = ()
    inplace: tuple[Callable | str, ...] = ()
    modules: Mapping[type[nn.Module], str] = field(default_factory=dict)
    operators: tuple[Callable, ...] = ()
    variants: Mapping[Callable | str, str] = field(default_factory=dict)
    weight_axis: int = 0
    post_op: Callable[[Sequence[Any]], PostOp | None] | None = None
    ndim: int = 0
    reason: str = ""
    macs: Callable[[Multiplied], int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, in order."""
        return _names(self.params)

    @functools.cached_property
    def takes_weight(self) -> bool:
        """Whether its second parameter is a weight."""
        return self.role in (Role.COMPUTE, Role.EMBEDDING) and self.name != "matmul"

    @property
    def always_weighs(self) -> bool:
        """Whether it multiplies with what counts as a weight, wherever that comes from."""
        return self.takes_weight or self.role is Role.RECURRENT or self.name.startswith("conv_transpose")

    @functools.cached_property
    def settings(self) -> tuple[int, ...]:
        """Positions of the parameters that say what is computed, and so which values may come of it.

        The others are data, or say how much there is and where: calls differ in them as their shapes do.
        """
        any_ = self.role is Role.ELEMENTWISE  # whose operands may be numbers
        return tuple(i for i, name in enumerate(self.names) if any_ or name not in _NO_SETTINGS)

    @functools.cached_property
    def inplace_at(self) -> int | None:
        """The position of its parameter ``inplace``."""
        return self.names.index("inplace") if "inplace" in self.names else None

    @functools.cached_property
    def takes_list(self) -> bool:
        """Whether its first parameter is a list of tensors."""
        return self.name in ("cat", "stack")

    def __reduce__(self) -> tuple:
        return row_named, (self.name,)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


@dataclass(eq=False)
class Spelling:
    """One way to write a row: its parameters in this spelling's order, and whether it writes to its first argument."""

    row: OpRow
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    inplace: bool = False

    @functools.cached_property
    def _tail(self) -> list[Any] | None:
        """Defaults in the row's order, if this spelling has that order too."""
        names = self.row.names
        return [self.defaults.get(n) for n in names] if self.names == names else None

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Arguments as a list in the row's own order, defaults filled in."""
        if self._tail is not None and (not kwargs or len(args) <= len(self._tail)):
            bound = [*args, *self._tail[len(args) :]]
            for name, value in kwargs.items():
                place = self._places.get(name)
                if place is not None or (place := self._places.get(_ALIASES.get(name, name))) is not None:
                    bound[place] = value
            return bound
        values = {**self.defaults, **dict(zip(self.names, args, strict=False))}
        for name, value in kwargs.items():
            values[name if name in self.names else _ALIASES.get(name, name)] = value
        return [values.get(name) for name in self.row.names]


#: numpy's names for parameters, which torch's own functions take too.
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
#: Names that torch's functions also give their parameters.
_ALIASES = {"tensors": "input", "self": "input", "tensor1": "input", "mat2": "other", "tensor2": "other",
            "indices": "input", **NUMPY_NAMES}  # fmt: skip
_NO_SETTINGS = frozenset({
    "input", "other", "weight", "bias", "running_mean", "running_var", "momentum", "offsets", "per_sample_weights",
    "include_last_offset", "sparse", "padding_idx", "scale_grad_by_freq", "kernel_size", "stride", "padding",
    "dilation", "groups", "ceil_mode", "output_size", "size", "scale_factor", "recompute_scale_factor", "keepdim",
    "inplace",
})  # fmt: skip


@functools.cache
def _names(params: str) -> tuple[str, ...]:
    return tuple(item.partition("=")[0] for item in params.split())


@functools.cache
def _defaults(params: str) -> dict[str, Any]:
    pairs = (item.partition("=") for item in params.split())
    return {name: ast.literal_eval(value) for name, equals, value in pairs if equals}


def _hardtanh(args: Sequence[Any]) -> PostOp | None:
    low, high = args[1], args[2]
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return PostOp("hardtanh", (float(low), float(high))) if low <= high else None  # torch takes any, kernels do not
    return PostOp("relu") if low == 0 and high is None and not isinstance(low, Tensor) else None


def _fixed(name: str, *args: float) -> Callable[[Sequence[Any]], PostOp]:
    return lambda _: PostOp(name, args)


_CONV = "weight bias stride padding dilation groups"
_CONV_PARAMS = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_TRANSPOSED = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"
_MAX_POOL = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_MAX_POOL_ATTRIBUTES = "kernel_size stride padding dilation ceil_mode return_indices"
_AVG_POOL = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None"
_NO_TRANSPOSED = "stock torch has no transposed convolution on plain integers"

_COMPUTE = [
    *(
        OpRow(f"conv{n}d", Role.COMPUTE, _CONV_PARAMS, (getattr(torch, f"conv{n}d"),),
              modules={getattr(nn, f"Conv{n}d"): _CONV}, ndim=n, macs=macs.with_weight(1))
        for n in (1, 2, 3)
    ),
    OpRow("linear", Role.COMPUTE, "input weight bias=None", (F.linear,), modules={nn.Linear: "weight bias"},
          macs=macs.with_weight(1)),
    OpRow("matmul", Role.COMPUTE, "input other", (torch.matmul, torch.bmm), ("matmul", "bmm", "__matmul__"),
          operators=(operator.matmul,), macs=macs.product(0)),
    *(
        OpRow(f"conv_transpose{n}d", Role.FLOAT, _TRANSPOSED, (getattr(torch, f"conv_transpose{n}d"),),
              modules={getattr(nn, f"ConvTranspose{n}d"): ""}, weight_axis=1, ndim=n, reason=_NO_TRANSPOSED,
              macs=macs.transposed)
        for n in (1, 2, 3)
    ),
]  # fmt: skip

_EMBEDDING_PARAMS = "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False"
_BAG_PARAMS = (
    "input weight offsets=None max_norm=None norm_type=2.0 scale_grad_by_freq=False mode='mean' sparse=False "
    "per_sample_weights=None include_last_offset=False padding_idx=None"
)
_WEIGHTS = [
    OpRow("embedding", Role.EMBEDDING, _EMBEDDING_PARAMS, (F.embedding,), modules={nn.Embedding: _EMBEDDING_PARAMS[6:]},
          variants={torch.embedding: "weight input padding_idx=-1 scale_grad_by_freq=False sparse=False"}),
    OpRow("embedding_bag", Role.EMBEDDING, _BAG_PARAMS, (F.embedding_bag,), modules={nn.EmbeddingBag: ""}),
    OpRow("lstm", Role.RECURRENT, modules={nn.LSTM: ""}, macs=macs.recurrent),
    OpRow("gru", Role.RECURRENT, modules={nn.GRU: ""}, macs=macs.recurrent),
    OpRow("rnn", Role.RECURRENT, modules={nn.RNN: ""}, macs=macs.recurrent),
    OpRow("lstm_cell", Role.RECURRENT, modules={nn.LSTMCell: ""}, macs=macs.recurrent),
    OpRow("gru_cell", Role.RECURRENT, modules={nn.GRUCell: ""}, macs=macs.recurrent),
    OpRow("rnn_cell", Role.RECURRENT, modules={nn.RNNCell: ""}, macs=macs.recurrent),
    OpRow("batch_norm", Role.NORM,
          "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-5", (F.batch_norm,),
          modules=dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
                                "running_mean running_var weight bias training momentum eps")),
]  # fmt: skip

_ELEMENTWISE = [
    OpRow("add", Role.ELEMENTWISE, "input other alpha=1", (torch.add,), ("add",), ("add_",),
          operators=(operator.add, operator.iadd)),
    OpRow("sub", Role.ELEMENTWISE, "input other alpha=1", (torch.sub, torch.subtract), ("sub", "subtract"),
          ("sub_", "subtract_"), operators=(operator.sub, operator.isub),
          variants={torch.rsub: "other input alpha=1", "__rsub__": "other input"}),
    OpRow("mul", Role.ELEMENTWISE, "input other", (torch.mul, torch.multiply), ("mul", "multiply"),
          ("mul_", "multiply_"), operators=(operator.mul, operator.imul)),
    OpRow("div", Role.ELEMENTWISE, "input other rounding_mode=None", (torch.div, torch.divide, torch.true_divide),
          ("div", "divide", "true_divide"), ("div_", "divide_", "true_divide_"),
          operators=(operator.truediv, operator.itruediv), variants={"__rdiv__": "other input"}),
]  # fmt: skip

_INTEGER = [
    OpRow("cat", Role.SHARE, "input dim=0", (torch.cat, torch.concat, torch.concatenate)),
    OpRow("stack", Role.SHARE, "input dim=0", (torch.stack,)),
    *(
        OpRow(f"max_pool{n}d", Role.SHARE, _MAX_POOL, (getattr(F, f"max_pool{n}d"), getattr(torch, f"max_pool{n}d")),
              modules={getattr(nn, f"MaxPool{n}d"): _MAX_POOL_ATTRIBUTES}, ndim=n)
        for n in (1, 2, 3)
    ),
    OpRow("interpolate", Role.SHARE, "input size=None scale_factor=None mode='nearest' align_corners=None "
          "recompute_scale_factor=None antialias=False", (F.interpolate,)),
    OpRow("avg_pool1d", Role.POOL, _AVG_POOL.removesuffix(" divisor_override=None"), (F.avg_pool1d,),
          modules={nn.AvgPool1d: "kernel_size stride padding ceil_mode count_include_pad"}, ndim=1),
    *(
        OpRow(f"avg_pool{n}d", Role.POOL, _AVG_POOL, (getattr(F, f"avg_pool{n}d"),), ndim=n,
              modules={getattr(nn, f"AvgPool{n}d"):
                       "kernel_size stride padding ceil_mode count_include_pad divisor_override"})
        for n in (2, 3)
    ),
    *(
        OpRow(f"adaptive_avg_pool{n}d", Role.POOL, "input output_size",
              (getattr(F, f"adaptive_avg_pool{n}d"), *((torch.adaptive_avg_pool1d,) if n == 1 else ())),
              modules={getattr(nn, f"AdaptiveAvgPool{n}d"): "output_size"}, ndim=n)
        for n in (1, 2, 3)
    ),
    OpRow("mean", Role.POOL, "input dim=None keepdim=False dtype=None", (torch.mean,), ("mean",)),
]  # fmt: skip

_ACTIVATIONS = [
    OpRow("relu", Role.ACTIVATION, "input inplace=False", (F.relu, torch.relu), ("relu",), (torch.relu_, "relu_"),
          {nn.ReLU: "inplace"}, post_op=_fixed("relu")),
    OpRow("relu6", Role.ACTIVATION, "input inplace=False", (F.relu6,), modules={nn.ReLU6: "inplace"},
          post_op=_fixed("hardtanh", 0.0, 6.0)),
    OpRow("hardtanh", Role.ACTIVATION, "input min_val=-1.0 max_val=1.0 inplace=False", (F.hardtanh,), (),
          (F.hardtanh_,), {nn.Hardtanh: "min_val max_val inplace"}, post_op=_hardtanh),
    OpRow("clamp", Role.ACTIVATION, "input min=None max=None", (torch.clamp, torch.clip), ("clamp", "clip"),
          (torch.clamp_, torch.clip_, "clamp_", "clip_"), post_op=_hardtanh),
    OpRow("clamp_min", Role.ACTIVATION, "input min max=None", (torch.clamp_min,), ("clamp_min",), ("clamp_min_",),
          post_op=_hardtanh),
    OpRow("hardswish", Role.ACTIVATION, "input inplace=False", (F.hardswish,), modules={nn.Hardswish: "inplace"},
          post_op=_fixed("hardswish")),
    OpRow("silu", Role.ACTIVATION, "input inplace=False", (F.silu,), modules={nn.SiLU: "inplace"},
          post_op=_fixed("swish")),
    OpRow("gelu", Role.ACTIVATION, "input approximate='none'", (F.gelu,), modules={nn.GELU: "approximate"},
          post_op=lambda args: PostOp("gelu", (), args[1])),
    OpRow("leaky_relu", Role.ACTIVATION, "input negative_slope=0.01 inplace=False", (F.leaky_relu,), (),
          (F.leaky_relu_,), {nn.LeakyReLU: "negative_slope inplace"},
          post_op=lambda args: PostOp("leaky_relu", (float(args[1]),)) if isinstance(args[1], (int, float)) else None),
    OpRow("tanh", Role.ACTIVATION, "input", (torch.tanh, F.tanh), ("tanh",), (torch.tanh_, "tanh_"), {nn.Tanh: ""},
          post_op=_fixed("tanh")),
    OpRow("sigmoid", Role.ACTIVATION, "input", (torch.sigmoid, F.sigmoid), ("sigmoid",),
          (torch.sigmoid_, "sigmoid_"), {nn.Sigmoid: ""}),
    OpRow("elu", Role.ACTIVATION, "input alpha=1.0 inplace=False", (F.elu,), (), (), {nn.ELU: "alpha inplace"}),
    OpRow("mish", Role.ACTIVATION, "input inplace=False", (F.mish,), modules={nn.Mish: "inplace"}),
    OpRow("hardsigmoid", Role.ACTIVATION, "input inplace=False", (F.hardsigmoid,),
          modules={nn.Hardsigmoid: "inplace"}),
]  # fmt: skip

#: Ops that move elements, as methods and, where torch has one of that name, as functions.
_MOVES = (
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "permute", "transpose", "t",
    "adjoint", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as",
    "broadcast_to", "repeat", "repeat_interleave", "tile", "narrow", "select", "__getitem__", "chunk",
    "split", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "unbind", "contiguous", "clone",
    "detach", "flip", "fliplr", "flipud", "roll", "rot90", "index_select", "diagonal", "unsafe_chunk",
    "unsafe_split", "unfold",
)  # fmt: skip
#: Those of them, and ``pad``, whose result may lack elements, however many it has.
PARTS = frozenset(
    ("narrow", "select", "__getitem__", "chunk", "split", "tensor_split", "split_with_sizes", "hsplit", "vsplit",
     "unbind", "index_select", "diagonal", "unsafe_chunk", "unsafe_split", "unfold", "pad")
)  # fmt: skip
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

_PASS = [
    *(
        OpRow(name, Role.PASS, functions=(getattr(torch, name),) if name != "unfold" and hasattr(torch, name) else (),
              methods=(name,))
        for name in _MOVES
    ),
    *(
        OpRow(name, Role.PASS, functions=(getattr(torch.Tensor, name).__get__,))
        for name in ("T", "mT", "H", "mH", "data")
    ),
    OpRow("identity", Role.PASS, modules={nn.Identity: ""}),
    *(
        OpRow(name, Role.PASS, f"input p=0.5 training={'alpha' not in name} inplace=False", (getattr(F, name),),
              modules={cls: "p training inplace"})
        for name, cls in zip(DROPOUTS, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
                                         nn.FeatureAlphaDropout), strict=True)
    ),
    OpRow("pixel_shuffle", Role.PASS, functions=(torch.pixel_shuffle,)),
    OpRow("pixel_unshuffle", Role.PASS, functions=(torch.pixel_unshuffle,)),
    OpRow("channel_shuffle", Role.PASS, functions=(torch.channel_shuffle,)),
    OpRow("pad", Role.PASS, "input pad mode='constant' value=None", (F.pad,)),
    OpRow("to", Role.PASS, methods=("to", "float", "type_as")),
]  # fmt: skip

_OPERATORS: dict[str, tuple[Callable, ...]] = {"abs": (abs,), "neg": (operator.neg,)}
_NO_INT8 = "no int8 kernel for this op"
_NO_GROUPS = (
    "no int8 kernel for grouped products; linear layers called one by one have one "
    "(transformers: experts_implementation='eager')"
)
#: Ops that always compute in float; their rows serve backends with float kernels.
_FLOAT = [
    OpRow("layer_norm", Role.FLOAT, "input normalized_shape weight=None bias=None eps=1e-5", (F.layer_norm,),
          reason=_NO_INT8),
    *(
        OpRow(name, Role.FLOAT, "input dim=None dtype=None", (getattr(torch, name),), (name,),
              variants={getattr(F, name): "input dim=None _stacklevel=3 dtype=None"}, reason=_NO_INT8)
        for name in ("softmax", "log_softmax")
    ),
    OpRow("scaled_dot_product_attention", Role.FLOAT,
          "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
          (F.scaled_dot_product_attention,), reason=_NO_INT8, macs=macs.attention),
    *(
        OpRow(name, Role.FLOAT, "input decimals=0" if name == "round" else "input", (getattr(torch, name),), (name,),
              operators=_OPERATORS.get(name, ()), reason=_NO_INT8)
        for name in ("abs", "square", "exp", "sqrt", "round", "neg", "reciprocal", "rsqrt")
    ),
    OpRow("pow", Role.FLOAT, "input exponent", (torch.pow,), ("pow",), reason=_NO_INT8),
    OpRow("mm", Role.FLOAT, "input other", (torch.mm,), ("mm",), reason=_NO_INT8, macs=macs.product(0)),
    OpRow("mv", Role.FLOAT, "input vec", (torch.mv,), ("mv",), reason=_NO_INT8, macs=macs.all_of(0)),
    OpRow("dot", Role.FLOAT, "input tensor", (torch.dot,), ("dot",), reason=_NO_INT8, macs=macs.all_of(0)),
    OpRow("inner", Role.FLOAT, "input other", (torch.inner,), ("inner",), reason=_NO_INT8, macs=macs.product(0)),
    OpRow("linalg_matmul", Role.FLOAT, "input other", (torch.linalg.matmul,), reason=_NO_INT8, macs=macs.product(0)),
    OpRow("addmm", Role.FLOAT, "input mat1 other beta=1 alpha=1", (torch.addmm,), ("addmm",), ("addmm_",),
          reason=_NO_INT8, macs=macs.product(1)),
    OpRow("addmv", Role.FLOAT, "input mat vec beta=1 alpha=1", (torch.addmv,), ("addmv",), ("addmv_",),
          reason=_NO_INT8, macs=macs.all_of(1)),
    OpRow("baddbmm", Role.FLOAT, "input batch1 batch2 beta=1 alpha=1", (torch.baddbmm,), ("baddbmm",), ("baddbmm_",),
          reason=_NO_INT8, macs=macs.product(1)),
    OpRow("addbmm", Role.FLOAT, "input batch1 batch2 beta=1 alpha=1", (torch.addbmm,), ("addbmm",), ("addbmm_",),
          reason=_NO_INT8, macs=macs.all_of(1, 2)),
    OpRow("bilinear", Role.FLOAT, "input1 input2 weight bias=None", (F.bilinear,), reason=_NO_INT8,
          macs=macs.with_weight(2)),
    OpRow("einsum", Role.FLOAT, "equation operands=None", (torch.einsum,), reason=_NO_INT8, macs=macs.einsum),
    OpRow("tensordot", Role.FLOAT, "a b dims=2 out=None", (torch.tensordot,), reason=_NO_INT8, macs=macs.tensordot),
    OpRow("chain_matmul", Role.FLOAT, "matrices", (torch.chain_matmul,), reason=_NO_INT8, macs=macs.chain),
    OpRow("multi_dot", Role.FLOAT, "input", (torch.linalg.multi_dot,), reason=_NO_INT8, macs=macs.chain),
    OpRow("grouped_mm", Role.FLOAT, "input other offs=None bias=None out_dtype=None", (grouped_mm,),
          reason=_NO_GROUPS, macs=macs.grouped),
]  # fmt: skip

TABLE: tuple[OpRow, ...] = (*_COMPUTE, *_WEIGHTS, *_ELEMENTWISE, *_INTEGER, *_ACTIVATIONS, *_PASS, *_FLOAT)
#: Stands for every op that has no row.
OTHER = OpRow("other", Role.FLOAT)
_BY_NAME = {row.name: row for row in (*TABLE, OTHER)}


def row_named(name: str) -> OpRow:
    """The row of that name, as files have it."""
    return _BY_NAME[name]


_row = row_named  # files of dbrq 0.1 name it so


def _spellings() -> dict[Callable, Spelling]:
    found: dict[Callable, Spelling] = {}

    def enter(spelled: Callable | str, row: OpRow, inplace: bool, params: str) -> None:
        function = getattr(torch.Tensor, spelled, None) if isinstance(spelled, str) else spelled
        if function is not None and function not in found:
            found[function] = Spelling(row, _names(params), {**_defaults(row.params), **_defaults(params)}, inplace)

    for row in TABLE:
        for spelled, params in row.variants.items():
            enter(spelled, row, False, params)
        spellings: tuple[Callable | str, ...] = (*row.functions, *row.methods)
        for spelled in spellings:
            enter(spelled, row, False, row.params)
        for spelled in row.inplace:
            enter(spelled, row, True, row.params)
    return found


#: Function (as ``__torch_function__`` receives it) -> spelling.
FUNCTIONS: Mapping[Callable, Spelling] = _spellings()
#: ``forward`` of a leaf module class -> (row, attributes that follow the inputs in the row's params).
LEAVES: Mapping[Callable, tuple[OpRow, tuple[str, ...]]] = {
    cls.forward: (row, _names(attributes)) for row in TABLE for cls, attributes in row.modules.items()
}
#: Tensor methods that give the code a Python number.
READS_NUMBER = frozenset(
    getattr(Tensor, name) for name in ("item", "__bool__", "__int__", "__float__", "__index__", "is_nonzero")
)


#: What ``forward`` of torch's own layers leaves to other methods.
_CALLED_BY_FORWARD = ("_conv_forward", "_output_padding")


def _is_overridden(module: nn.Module, name: str) -> bool:
    """Whether a class or an instance of the user's has a method of its own in place of torch's."""
    method = getattr(type(module), name, None)
    return method is not None and (name in module.__dict__ or not method.__module__.startswith("torch.nn.modules"))


def leaf_row(module: nn.Module) -> tuple[OpRow, tuple[str, ...]] | None:
    """The row of a module that is one op of the table; None for others and for subclasses with a ``forward`` of their
    own.

    >>> leaf_row(nn.Conv2d(1, 1, 1))[0].name
    'conv2d'
    """
    found = LEAVES.get(type(module).forward)
    if found is None or "forward" in module.__dict__:  # the user may have given the instance another forward
        return None
    if any(_is_overridden(module, name) for name in _CALLED_BY_FORWARD):
        return None
    if isinstance(module, nn.ReLU6):  # inherits Hardtanh's forward and attributes
        return _BY_NAME["hardtanh"], ("min_val", "max_val", "inplace")
    return found


def is_torch_leaf(module: nn.Module) -> bool:
    """Whether the module is torch's own and holds no others: its ops belong to the module that calls it."""
    if "forward" in module.__dict__ or module._modules:
        return False
    where = getattr(type(module).forward, "__module__", None) or ""  # None in code made by exec
    return where.startswith("torch.nn.modules")


def asks_inplace(row: OpRow, bound: Sequence[Any]) -> bool:
    """Whether the arguments of a call say ``inplace=True``."""
    return row.inplace_at is not None and bool(bound[row.inplace_at])


def drops(row: OpRow, bound: Sequence[Any]) -> bool:
    """Whether a call is a dropout that drops: what is left is larger than what was given."""
    return row.name in DROPOUTS and bool(bound[1] and bound[2])


def function_name(func: Callable) -> str:
    """A readable name for any function torch passes to ``__torch_function__``."""
    spelled = FUNCTIONS.get(func)
    if spelled is not None:
        return spelled.row.name
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
