"""What reads shapes and numbers of tensors, or is written otherwise in a graph than the user wrote it.

Each function returns ``GO_ON`` for a call that it does not serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..eager.ops import EmbeddingPlan
from ..errors import RewriteError
from ..mappings import Role
from ..pytree import tree_leaves, tree_map
from ..record.callsite import user_line
from ..record.record import SeenOp, is_number
from .nodes import leaves
from .recorder import GraphRecorder
from .symbols import Traced
from .torchscript_form import property_name

GO_ON = object()

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "pow", "sqrt", "abs",
                         "ceil", "floor", "minimum", "maximum", "clamp", "exp", "log", "eq", "lt", "gt", "le",
                         "ge"})  # fmt: skip


def has_tensor(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))


def decided(value: Any) -> Any:
    """Settings of a kernel are constants."""
    return tree_map(lambda leaf: leaf.decided() if isinstance(leaf, Traced) else leaf, value)


def with_range_decided(op: SeenOp, bound: list[Any]) -> list[Any]:
    """An int8 op's arguments, of which those that its range was recorded for (the bounds of a clamp, the factor of an
    add) are constants, or are asserted to be such that the range holds. What only shapes a value stays free, and so do
    numbers that are operands: like other data, what comes of them is cut off at the range.
    """
    first = {Role.ACTIVATION: 1, Role.ELEMENTWISE: 2}.get(op.row.role, len(bound))
    return [*bound[:first], *(_in_range(op, i, bound[i]) for i in range(first, len(bound)))]


def _in_range(op: SeenOp, position: int, value: Any) -> Any:
    span = op.number_range(position) if isinstance(value, Traced) and is_number(value.value) else None
    if span is None:
        return decided(value)
    low, high = span  # a comparison is a decision, which the graph asserts
    return value if (low == -math.inf or value >= low) and (high == math.inf or value <= high) else decided(value)


def _size(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is not None:
        return recorder.size(x, int(dim))
    return torch.Size([recorder.size(x, i) for i in range(len(recorder.execute(func, (x,), {})))])


def _property(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    name = property_name(func)
    if name == "shape":
        return _size(recorder, torch.Tensor.size, args[:1], {})
    if name == "nbytes":
        return recorder.number(args[0], "numel") * args[0].element_size()
    if name == "_base":
        return _of_memory(recorder, func, args, kwargs)
    if name in ("requires_grad", "grad_fn", "is_leaf"):
        return _of_gradient(recorder, func, args, kwargs)
    return GO_ON


def _of_gradient(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs have no gradients; whether an input has one is the caller's to say, in each call anew."""
    known = recorder.known(args[0])
    if known is None or not known.is_input:
        return recorder.execute(func, args, kwargs)
    raise RewriteError(
        "the code asks whether an input has a gradient, which is no part of a graph", path=recorder.path,
        op=property_name(func), got=user_line(), hint="ask torch.is_grad_enabled() or self.training first",
    )  # fmt: skip


def _of_memory(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    """What says where elements are in memory: kernels that stand for ops put them elsewhere."""
    known = recorder.known(args[0])
    if known is None or known.static:
        return recorder.execute(func, args, kwargs)
    name = property_name(func) if func.__name__ == "__get__" else func.__name__
    if name == "data_ptr":  # two values have the same, or not, as the layouts of inputs have it
        recorder.hold_layouts_behind(known.node)
        return recorder.execute(func, args, kwargs)
    raise RewriteError(
        "the code looks at the memory of a value, which is another in a graph", path=recorder.path, op=name,
        expected="code that depends on shapes, dtypes and elements", got=user_line(),
        hint="use numel() and element_size() for sizes, and clone() for memory of its own",
    )  # fmt: skip


def _storage_offset(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    known = recorder.known(args[0])
    if known is None or not known.is_input:
        return _of_memory(recorder, func, args, kwargs)
    return recorder.number(args[0], "storage_offset").decided()


def _is_same_size(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> bool:
    shapes = [_size(recorder, torch.Tensor.size, (x,), {}) for x in (*args, *kwargs.values())]
    return len(shapes[0]) == len(shapes[1]) and all(bool(a == b) for a, b in zip(*shapes, strict=True))


def _numel(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return recorder.number(args[0], "numel") if isinstance(args[0], Tensor) else GO_ON


def _stride(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is not None:
        return recorder.number(x, "stride", int(dim))
    return tuple(recorder.number(x, "stride", i) for i in range(recorder.execute(torch.Tensor.dim, (x,), {})))


def _is_contiguous(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> bool:
    """The layout of an input is the caller's, and what the code does about it is asserted; any other follows from
    those of inputs.
    """
    known = recorder.known(args[0])
    if known is None or not known.is_input:
        if known is not None and not known.static:
            recorder.hold_layouts_behind(known.node)
        return recorder.execute(func, args, kwargs)
    return recorder.number(args[0], "is_contiguous", *args[1:], *kwargs.values()).decided()


def _len(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> int:
    return int(recorder.size(args[0], 0))


def _item(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return recorder.number(args[0], "item")


def _tolist(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if not x.dim():
        return _item(recorder, func, args, kwargs)
    return [_tolist(recorder, func, (recorder.call(torch.Tensor.__getitem__, (x, i), {}),), {}) for i in range(len(x))]


def _number(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    result = recorder.call(func, args, kwargs)
    return result.decided() if isinstance(result, Traced) else result


def _iter(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return iter(recorder.call(torch.unbind, args[:1], {}))


def _contains(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    found = recorder.call(torch.any, (recorder.call(torch.eq, args, {}),), {})
    return _number(recorder, torch.Tensor.__bool__, (found,), {})


def _elements(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    """All elements leave torch: the graph holds for these."""
    x = args[0]
    if recorder.depends(x):
        same = recorder.call(torch.equal, (x, recorder.execute(torch.clone, (x,), {})), {})
        same.decided()
    recorder.reads_constants = True
    return recorder.execute(func, args, kwargs)


def _as_it_is(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return recorder.execute(func, args, kwargs)


def _type(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    """The name of a tensor's class of old, unless it is a cast."""
    return _as_it_is(recorder, func, args, kwargs) if len(args) == 1 and "dtype" not in kwargs else GO_ON


def _same(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return args[0]


def _deepcopy(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return recorder.call(torch.clone, args[:1], {})


def _new_tensor(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    return recorder.call(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs})


def _tensor(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    """``torch.tensor`` of a list that holds tensors."""
    items = args[0] if args else kwargs.get("data")
    if not isinstance(items, (list, tuple)) or not any(isinstance(i, Tensor) for i in items):
        return GO_ON
    parts = [i if isinstance(i, Tensor) else recorder.call(torch.tensor, (i,), {}) for i in items]
    stacked = recorder.call(torch.stack, ([recorder.call(torch.reshape, (p, ()), {}) for p in parts],), {})
    dtype = recorder.execute(func, args, kwargs).dtype
    return recorder.call(torch.Tensor.to, (stacked, dtype), {})


def _setitem(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> None:
    """``x[index] = value``, as a write to a view or an ``index_put_``."""
    x, index, value = args
    indices = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(i, (Tensor, list)) for i in indices):
        view = x if index is Ellipsis else recorder.call(torch.Tensor.__getitem__, (x, index), {})
        if isinstance(value, Tensor):
            recorder.call(torch.Tensor.copy_, (view, value), {})
        else:
            recorder.call(torch.Tensor.fill_, (view, value), {})
    else:
        if any(i is None for i in indices):
            raise RewriteError(
                "an assignment to new axes and tensor indices at once", path=recorder.path, op="setitem", got=index,
                hint="write it in two steps: a view first, then the tensor index",
            )  # fmt: skip
        if Ellipsis in [i for i in indices if not isinstance(i, (Tensor, list))]:
            at = next(n for n, i in enumerate(indices) if i is Ellipsis)
            taken = sum(i.dim() if isinstance(i, Tensor) and i.dtype is torch.bool else 1 for i in indices) - 1
            rank = recorder.execute(torch.Tensor.dim, (x,), {})
            indices = (*indices[:at], *[slice(None)] * (rank - taken), *indices[at + 1 :])
        if any(isinstance(i, slice) and i != slice(None) for i in indices):  # slices first, which make a view
            chosen = tuple(i if isinstance(i, slice) else slice(None) for i in indices)
            view = recorder.call(torch.Tensor.__getitem__, (x, chosen), {})
        else:
            view = x
        places = [None if isinstance(i, slice) else torch.as_tensor(i) for i in indices]
        if not isinstance(value, Tensor):
            value = recorder.call(torch.tensor, (value,), {"dtype": x.dtype})
        elif value.dtype is not x.dtype:
            value = recorder.call(torch.Tensor.to, (value, x.dtype), {})
        recorder.call(torch.ops.aten.index_put_, (view, places, value), {})
    known = recorder.known(x)
    if known is not None:
        known.tag = "__setitem__"


def _squeeze(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Which axes go is for sizes to decide: the same as here, the graph asserts."""
    x = args[0] if args else kwargs.get("input")
    named = args[1:] or [kwargs[name] for name in ("dim", "axis") if name in kwargs]
    if isinstance(x, Tensor) and recorder.symbolic:
        rank = recorder.execute(torch.Tensor.dim, (x,), {})
        dims = [int(dim) for dim in leaves(list(named))] if named else range(rank)
        for dim in dims:
            if -rank <= dim < rank:  # else torch says what is wrong
                bool(recorder.size(x, dim) == 1)
    return GO_ON


def _out_of_reach(recorder: GraphRecorder, func: Callable, args: tuple, kwargs: dict) -> Any:
    raise RewriteError(
        "a tensor is changed in a way a graph cannot follow", path=recorder.path, op=getattr(func, "__name__", "?"),
        got=user_line(), hint="assign to its elements instead",
    )  # fmt: skip


SPECIAL: dict[str, Callable[[GraphRecorder, Callable, tuple, dict], Any]] = {
    "size": _size, "__get__": _property, "numel": _numel, "nelement": _numel, "stride": _stride,
    "is_contiguous": _is_contiguous, "__len__": _len, "is_same_size": _is_same_size, "storage_offset": _storage_offset,
    "untyped_storage": _of_memory, "storage": _of_memory, "_typed_storage": _of_memory, "data_ptr": _of_memory,
    "_is_view": _of_memory,
    "item": _item, "tolist": _tolist, "__bool__": _number, "__int__": _number, "__index__": _number, "__float__":
    _number,
    "is_nonzero": _number, "__iter__": _iter, "__contains__": _contains, "numpy": _elements, "__array__": _elements,
    "__repr__": _as_it_is, "__format__": _as_it_is, "__str__": _as_it_is, "__reduce_ex__": _elements,
    "tensor": _tensor, "type": _type, "squeeze": _squeeze, "squeeze_": _squeeze,
    "requires_grad_": _same, "__deepcopy__": _deepcopy, "new_tensor": _new_tensor, "__setitem__": _setitem,
    "__set__": _out_of_reach, "set_": _out_of_reach, "resize_": _out_of_reach,
}  # fmt: skip


def int8_embedding(recorder: GraphRecorder, hook: EmbeddingPlan, bound: list[Any]) -> Tensor:
    """Rows are looked up as int8, then scaled."""
    name, ref = hook.name, hook.op.weight
    assert ref is not None
    prefix = f"{ref.path}.{name}".lstrip(".")
    held = {s: hook.owner._buffers.get(f"{name}_{s}") for s in ("int8", "scale", "zero_point")}
    for suffix, tensor in held.items():
        if tensor is not None:
            recorder.name(tensor, f"{prefix}_{suffix}")
    int8, scale, zero_point = held.values()
    assert int8 is not None and scale is not None

    def rows(index: Tensor) -> Tensor:
        found = F.embedding(index, int8).to(torch.float32)
        if zero_point is not None:
            found = found - (zero_point if hook.axis is None else zero_point[index].unsqueeze(-1))
        return found * (scale if hook.axis is None else scale[index].unsqueeze(-1))

    index = bound[0]
    if hook.row.name == "embedding":
        return rows(index)
    found = rows(index.flatten())
    places = torch.arange(index.numel(), dtype=index.dtype).reshape(index.shape)
    padding = None
    if bound[10] is not None:  # padding entries all look at one row more, which counts as padding
        found = torch.cat([found, torch.zeros(1, int8.shape[1])])
        places, padding = places.masked_fill(index == bound[10], index.numel()), -1
    return F.embedding_bag(
        places, found, bound[2], None, float(bound[4]), False, bound[6], False, bound[8], bound[9], padding
    )
