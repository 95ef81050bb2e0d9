"""Arguments for every spelling of the op table, and a module of every leaf class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

import dbrq
from dbrq.mappings import TABLE, Role, Spelling

#: Of all ops, matmuls too. (torch.ao's default differs in its observer, which takes ten times as long to find a range.)
DEFAULT = dbrq.default_qconfig_mapping().global_qconfig
EVERYTHING = QConfigMapping().set_global(DEFAULT)
BY_NAME = {row.name: row for row in TABLE}


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
