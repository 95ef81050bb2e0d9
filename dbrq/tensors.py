"""What int8 values look like to the user's code: float32 tensors that know how to become plain ones.

``Int8Tensor`` is an activation, ``Int8Weight`` a weight. Both are subclasses of ``torch.Tensor`` with the shape the
code expects and no storage of their own. Inside a converted model the function mode handles them; wherever else one
turns up (a cache, a closure, C++ code) ``__torch_dispatch__`` gives the op plain float tensors.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ._torch import make_wrapper, no_torch_function, schema_of, storage_id, version, without_function_modes
from .errors import QuantizationError
from .kernels import QParams, along, dequantize
from .pytree import tree_map
from .record.record import Tag

#: Sizes, strides and offset of a view in its storage.
Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]

# Elements may be asked for while a function mode is on, which must not see how they are made.
#: Tag of what was made of a value that was never seen where it was read: its range is not known.
UNSURE = "a value of another origin than was recorded"


#: Attribute of a tensor that a call made: the call's stamp, and who in the call made it.
_MADE = "_dbrq_made"


class Provenance:
    """Who made the float tensors that one call of a model meets, and the int8 elements they were rounded to.

    Other threads run the same model on the same buffers, parameters and inputs. So of tensors that come from outside of
    the call, nothing is written on the tensor: they are known here, held weakly, and compared, since a new tensor may
    get the ``id`` of one that is gone. What the call itself made bears its stamp, which means nothing to another call.
    """

    __slots__ = ("_foreign", "_int8", "_stamp")

    def __init__(self) -> None:
        self._stamp = object()
        self._foreign: dict[int, tuple[weakref.ref, Tag]] = {}
        self._int8: dict[int, tuple[_Keyed, QParams, Tensor, int]] = {}

    def tag(self, tensor: Tensor) -> Tag:
        """Who made ``tensor``; None for what came from outside of the call and was not given to it."""
        made = tensor.__dict__.get(_MADE)
        if made is not None and made[0] is self._stamp:  # then it is none of the others
            return made[1]
        known = self._foreign.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def set_tag(self, tensor: Tensor, tag: Tag) -> None:
        """Note who made ``tensor``: a new one, or one that this knows to come from outside."""
        known = self._foreign.get(id(tensor))
        if known is not None and known[0]() is tensor:
            self._foreign[id(tensor)] = known[0], tag
        else:
            tensor.__dict__[_MADE] = self._stamp, tag

    def set_tag_of_any(self, tensor: Tensor, tag: Tag) -> None:
        """Note who made ``tensor``, which may come from anywhere."""
        made = tensor.__dict__.get(_MADE)
        if made is not None and made[0] is self._stamp:
            tensor.__dict__[_MADE] = self._stamp, tag
        else:
            self._foreign[id(tensor)] = weakref.ref(tensor), tag

    def written(self, tensor: Any) -> None:
        """``tensor`` is written to: those that share its memory have other elements now."""
        self._int8.clear()
        if type(tensor) is Tensor:
            self.set_tag_of_any(tensor, self.tag(tensor))

    def end(self) -> None:
        """The call is over."""
        self._int8.clear()

    def int8(self, tensor: Tensor, meaning: Any) -> Tensor | None:
        """The elements of ``tensor`` as integers, if they were quantized already, with the qparams ``meaning`` (and the
        smoothing that it names).
        """
        known = self._int8.get(id(tensor))
        if known is None or known[1] != meaning or known[0]() is not tensor or known[3] != version_of(tensor):
            return None
        return known[2]

    def keep_int8(self, tensor: Tensor, meaning: Any, q: Tensor) -> None:
        """Keep ``q`` for the next who reads ``tensor``, as long as that lives."""
        self._int8[id(tensor)] = (_Keyed(tensor, self._dropped), meaning, q, version_of(tensor))

    def _dropped(self, reference: _Keyed) -> None:
        known = self._int8.get(reference.key)
        if known is not None and known[0] is reference:
            del self._int8[reference.key]


class _Keyed(weakref.ref):
    """A reference to a tensor that still knows the ``id`` of one that is gone."""

    __slots__ = ("key",)
    key: int

    def __new__(cls, tensor: Tensor, dropped: Callable[[_Keyed], None]) -> _Keyed:
        self = super().__new__(cls, tensor, dropped)
        self.key = id(tensor)
        return self


class _Current(threading.local):
    """The provenance of the call that this thread runs, if it runs one."""

    provenance: Provenance | None = None


current = _Current()


def set_tag(tensor: Tensor, tag: Tag) -> None:
    """Note who made a plain tensor, in the call that runs."""
    if (provenance := current.provenance) is not None:
        provenance.set_tag(tensor, tag)


def row_major(tensor: Tensor) -> Tensor:
    """A tensor as ``contiguous`` gives it, in the strides of axes of size 1 too: by these, torch tells images that are
    channels_last from others, and makes its results as it takes its inputs to be.
    """
    tensor = tensor.contiguous()
    if 1 not in tensor.shape:
        return tensor
    strides = [1] * tensor.dim()
    for i in range(tensor.dim() - 1, 0, -1):
        strides[i - 1] = strides[i] * max(tensor.shape[i], 1)
    return tensor if tensor.stride() == tuple(strides) else tensor.as_strided(tensor.shape, strides)


class Lazy(torch.Tensor):
    """A tensor whose float elements are computed when an op wants them."""

    # The function mode comes first, and outside of one __torch_dispatch__ does; a third stop would only cost time.
    __torch_function__ = no_torch_function

    def float_value(self) -> Tensor:
        """The value as a plain float32 tensor."""
        raise AssertionError("subclasses say how")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # to torch's stubs it is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        written = args[0] if args and schema_of(func).is_mutable else None
        if isinstance(written, Lazy):
            return written._apply_in_place(func, args, kwargs or {})
        args, kwargs = tree_map(plain, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    def _apply_in_place(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        self.refuse_write(func)
        return self

    def refuse_write(self, by: object) -> None:
        raise QuantizationError(
            f"{by} would change an int8 {type(self).__name__} in place",
            hint="clone it first, or change it before conversion",
        )

    def dequantize(self) -> Tensor:
        return self.float_value().clone()

    # Those that need a storage are not ops, so dispatch never sees them.
    def numpy(self, *, force: bool = False) -> Any:
        return self.float_value().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.float_value().__array__(dtype)

    def tolist(self) -> Any:
        return self.float_value().tolist()

    def data_ptr(self) -> int:
        return self.float_value().data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops names here
        return f"{type(self).__name__}({self.float_value()!r})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.float_value().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.float_value().clone().__reduce_ex__(protocol)


class Fusion(Protocol):
    """What runs a fusion. ``value_ids``: the value of its head, and after each follower."""

    value_ids: list[int]


class Deferred(Protocol):
    """A fusion under way: its value after ``stage`` followers of its head, and that value's tag."""

    @property
    def plan(self) -> Fusion: ...

    def value(self, stage: int) -> Tensor: ...

    def tag(self, stage: int) -> int | str | None: ...


class Int8Tensor(Lazy):
    """An activation: uint8 elements with their qparams, or a fusion under way, or (once asked for) float32 elements.

    Code may set attributes of its own on tensors, and look for them: those here have names that it will not choose.

    Attributes:
        size_: the shape, readable without passing the function mode.
        data_u8: the elements, in any memory layout, or None.
        qparams: what they mean; None where there are none.
        tag_: who made them, or made what they were moved from; of a fusion under way, ``deferred_`` says it.
        deferred_, stage_: a fusion under way and how far it has come, until it is read.
        alias_: all views of one value, held weakly; None while there is only one.
    """

    size_: torch.Size
    data_u8: Tensor | None = None
    if TYPE_CHECKING:  # who reads it knows of ``data_u8``

        @property
        def qparams(self) -> QParams: ...

        @qparams.setter
        def qparams(self, qparams: QParams | None) -> None: ...
    else:
        qparams = None
    tag_: int | str | None = None
    deferred_: Deferred | None = None
    stage_: int = 0
    alias_: list[weakref.ref] | None = None
    _float: Tensor | None = None
    _given: int | None = None  # version of the float elements when they were given away

    @staticmethod
    def __new__(
        cls, shape: torch.Size, data_u8: Tensor | None, qparams: QParams | None, tag: int | str | None
    ) -> Int8Tensor:
        self = make_wrapper(cls, shape, dtype=torch.float32)
        self.size_, self.data_u8, self.qparams, self.tag_ = shape, data_u8, qparams, tag
        return self

    @classmethod
    def under_way(cls, shape: torch.Size, deferred: Deferred, stage: int) -> Int8Tensor:
        self = make_wrapper(cls, shape, dtype=torch.float32)
        self.size_, self.deferred_, self.stage_ = shape, deferred, stage
        return self

    def float_value(self) -> Tensor:
        if self._float is None:
            with without_function_modes():
                if self.data_u8 is not None:
                    self._float = row_major(dequantize(self.data_u8, self.qparams))
                else:
                    assert self.deferred_ is not None
                    self._float = self.deferred_.value(self.stage_)
                    self.tag_, self.deferred_ = self.deferred_.tag(self.stage_), None
        return self._float

    def become(self, other: Tensor) -> None:
        """Take another value, as an in-place op does."""
        shape = other.size_ if isinstance(other, Int8Tensor) else other.shape
        if shape != self.size_:
            raise QuantizationError(
                "an in-place op changes the shape of an int8 value", expected=tuple(self.size_), got=tuple(shape),
                hint="let example_inputs take this path, which keeps the value in float, or write the op out of place",
            )  # fmt: skip
        if self.alias_ is not None and any(view() is not None and view() is not self for view in self.alias_):
            raise QuantizationError(
                "an in-place op writes to an int8 value that has views",
                expected="the in-place op to be recorded in the watching run, which keeps such values in float",
                hint="let example_inputs take this path, or write the op out of place",
            )
        if isinstance(other, Int8Tensor):
            self.data_u8, self.qparams, self.tag_, self._float = other.data_u8, other.qparams, other.tag_, other._float
            self.deferred_, self.stage_ = other.deferred_, other.stage_
        else:
            self.data_u8 = self.qparams = self.deferred_ = self._given = None
            self._float = other
            self.tag_ = None if current.provenance is None else current.provenance.tag(other)

    def give_away(self) -> None:
        """Stay float, since somebody else may write to the float elements."""
        value = self.float_value()
        self.data_u8 = self.qparams = None
        self._given = version_of(value)

    def is_changed(self) -> bool:
        """Whether somebody wrote to the elements that were given away."""
        return self._given is not None and self._float is not None and version_of(self._float) != self._given

    def view_as_moved(self, data_u8: Tensor, shares: bool = False) -> Int8Tensor:
        """Other elements' order or choice of the same value, qparams unchanged.

        Args:
            shares: a write to the result may be one to this value, wherever the integers lie.
        """
        moved = Int8Tensor(data_u8.shape, data_u8, self.qparams, self.tag_)
        assert self.data_u8 is not None
        if shares or storage_id(data_u8.untyped_storage()) == storage_id(self.data_u8.untyped_storage()):
            if self.alias_ is None:
                self.alias_ = [weakref.ref(self)]
            self.alias_.append(weakref.ref(moved))
            moved.alias_ = self.alias_
        return moved

    def _apply_in_place(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        value = self.float_value()
        args, kwargs = tree_map(plain, (tuple(args[1:]), kwargs))
        value = value.clone() if self.data_u8 is not None else value
        func(value, *args, **kwargs)
        self.become(value)
        return self


#: What an int8 weight consists of, as buffers ``{parameter}_int8`` and so on; the last two are not always there.
WEIGHT_PARTS = ("int8", "scale", "zero_point", "smoothing")


class Int8Weight(Lazy):
    """A weight of a converted module, or a pure view of one; float elements are computed anew at each use.

    It holds no elements: it reads the int8 buffer and the scale of the module that owns it, so that ``.to``,
    ``load_state_dict`` and copies of the module need not know about it. Where the layer's inputs are smoothed, the
    kernel multiplies each channel of them by a factor (``{parameter}_smoothing``, ``[in]``), and the integers are those
    of the weight without it; in float, it is part of the weight.

    Attributes:
        owner: the module that holds ``{parameter}_int8`` and ``{parameter}_scale``.
        parameter: the parameter's name before conversion.
        axis: the axis of the scales, None for one scale.
        geometry: sizes, strides and offset in the contiguous whole.
        is_whole: whether this is all of it.
    """

    owner: nn.Module
    parameter: str
    axis: int | None
    geometry: Geometry
    is_whole: bool

    @staticmethod
    def __new__(cls, owner: nn.Module, name: str, axis: int | None, geometry: Geometry, whole: bool) -> Int8Weight:
        shape, stride, _ = geometry
        self = make_wrapper(cls, shape, strides=stride, dtype=torch.float32)
        self.owner, self.parameter, self.axis, self.geometry, self.is_whole = owner, name, axis, geometry, whole
        return self

    @classmethod
    def whole(cls, owner: nn.Module, name: str, axis: int | None) -> Int8Weight:
        """The weight that ``owner`` holds as ``{name}_int8`` and ``{name}_scale``."""
        int8 = owner._buffers[f"{name}_int8"]
        assert int8 is not None
        return cls(owner, name, axis, geometry_of(int8.contiguous()), True)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # to torch's stubs it is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """A view of a weight is a weight, so that a write to it is refused and does not go to float elements that
        nobody keeps.
        """
        weight, returns = args[0] if args else None, schema_of(func).returns
        if isinstance(weight, Int8Weight) and returns and returns[0].alias_info is not None:
            view = None if returns[0].alias_info.is_write else weight.moved(func, args[1:], kwargs or {})
            if view is not None:
                return view
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _held(self, suffix: str) -> Tensor:
        """A buffer of the owner that the weight consists of."""
        held = self.owner._buffers[f"{self.parameter}_{suffix}"]
        assert held is not None
        return held

    def _part(self, whole: Tensor) -> Tensor:
        """This view of the whole weight, whatever memory layout that has by now."""
        whole = whole.contiguous()
        return whole if self.is_whole else whole.as_strided(*self.geometry)

    def int8(self) -> Tensor:
        """The int8 elements, contiguous or a view of contiguous ones."""
        return self._part(self._held("int8"))

    def float_value(self) -> Tensor:
        with without_function_modes():
            whole, scale = self._held("int8"), self._held("scale")
            zero_point = self.owner._buffers.get(f"{self.parameter}_zero_point")
            levels = whole.to(torch.float32)
            if zero_point is not None:
                levels = levels - along(zero_point, self.axis, whole.dim())
            value = levels * along(scale, self.axis, whole.dim())
            smoothing = self.owner._buffers.get(f"{self.parameter}_smoothing")
            return self._part(value if smoothing is None else value * smoothing)

    def moved(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """``func`` applied to the elements' places only; None unless the result is a view."""
        stored = self.int8()
        result = func(stored, *args, **kwargs)
        storage = storage_id(stored.untyped_storage())

        def wrap(leaf: Any) -> Any:
            same = isinstance(leaf, Tensor) and storage_id(leaf.untyped_storage()) == storage
            if same and leaf.dtype is stored.dtype:
                return Int8Weight(self.owner, self.parameter, self.axis, geometry_of(leaf), False)
            raise _NotAView

        try:
            return tree_map(wrap, result)
        except _NotAView:
            return None

    def __deepcopy__(self, memo: dict) -> Int8Weight:
        return Int8Weight(copy.deepcopy(self.owner, memo), self.parameter, self.axis, self.geometry, self.is_whole)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Int8Weight, (self.owner, self.parameter, self.axis, self.geometry, self.is_whole)


class _NotAView(Exception):
    pass


def geometry_of(tensor: Tensor) -> Geometry:
    """Where a view's elements lie in its storage."""
    offset = tensor.storage_offset()
    return tuple(tensor.shape), tuple(tensor.stride()), offset  # type: ignore[return-value]  # torch's stubs: or SymInt


def layout_of(tensor: Tensor) -> tuple | None:
    """How a tensor lies in memory, whatever its sizes: the order of its axes, and whether there are no gaps.

    By this, torch makes results contiguous or channels_last, and views or copies. None for a tensor without strides.
    """
    if tensor.layout is not torch.strided:
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return order, tensor.is_contiguous() or tensor.permute(order).is_contiguous()


def unmarked(value: Any) -> Any:
    """``value`` as the user gets it: plain, and without what a call notes on tensors."""
    value = plain(value)
    if type(value) is Tensor:
        value.__dict__.pop(_MADE, None)
    return value


def plain(value: Any) -> Any:
    """``value``, or its float tensor if it is one of ours."""
    return value.float_value() if isinstance(value, Lazy) else value


#: Classes of what an op may be given that is none of ours and holds none of ours.
_OTHERS = frozenset({
    Tensor, nn.Parameter, int, float, bool, str, slice, type(None), type(...), torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
})  # fmt: skip


def are_plain(values: Iterable[Any]) -> bool:
    """Whether ``plain`` is sure to leave each of ``values``, and what is in them, as it is."""
    for value in values:
        cls = type(value)
        if cls not in _OTHERS and not ((cls is tuple or cls is list) and _OTHERS.issuperset(map(type, value))):
            return False
    return True


def version_of(tensor: Tensor) -> int:
    """Changes when ``tensor`` is written to; -1 where torch keeps no count."""
    return -1 if tensor.is_inference() else version(tensor)


class Versions:
    """Tensors, and how often each had been written to when this was made."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._before = [(tensor, version_of(tensor)) for tensor in tensors]

    def written(self) -> list[Tensor]:
        """Those of the tensors that were written to since."""
        return [tensor for tensor, before in self._before if version_of(tensor) != before]
