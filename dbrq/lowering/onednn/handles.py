"""oneDNN's objects in Python: memory descriptors, attributes, primitives. Each destroys its handle once, with itself.

Everything here is immutable once made and may be shared by threads; memory objects, which hold addresses, may not.
Primitives are made by the functions of binding.py, which prove them first.
"""

from __future__ import annotations

import enum
import functools
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import OneDNNError
from .library import ExecArg, Unimplemented, failure, library


class Arg(enum.IntEnum):
    """Arguments of an execution (``DNNL_ARG_*``)."""

    SRC = 1
    SRC_1 = 2
    DST = 17
    WEIGHTS = 33
    BIAS = 41
    SCALE = 51
    SHIFT = 52
    SCRATCHPAD = 80
    MULTIPLE_SRC = 1024
    SCALES = 4096
    ZERO_POINTS = 8192
    POST_OP = 32768


class Alg(enum.IntEnum):
    """Algorithms (``dnnl_alg_kind_t``)."""

    CONVOLUTION = 0x1
    DECONVOLUTION = 0xA
    RELU = 0x20
    TANH = 0x21
    ELU = 0x22
    SQUARE = 0x23
    ABS = 0x24
    SQRT = 0x25
    LINEAR = 0x26
    HARDSIGMOID = 0x28
    LOGISTIC = 0x29
    EXP = 0x2A
    GELU_TANH = 0x2B
    SWISH = 0x2C
    LOG = 0x2D
    CLIP = 0x2F  # clip_v2
    POW = 0x30
    GELU_ERF = 0x31
    ROUND = 0x32
    MISH = 0x33
    HARDSWISH = 0x34
    POOLING_MAX = 0x1FF
    POOLING_AVG_INCLUDE_PADDING = 0x2FF
    POOLING_AVG_EXCLUDE_PADDING = 0x3FF
    ADD = 0x1FFF0
    MUL = 0x1FFF1
    MAX = 0x1FFF2
    MIN = 0x1FFF3
    DIV = 0x1FFF4
    SUB = 0x1FFF5
    NEAREST = 0x2FFF0
    LINEAR_RESAMPLING = 0x2FFF1
    SOFTMAX = 0x30000
    LOG_SOFTMAX = 0x30001


_ANY = 1  # dnnl_format_tag_any

DTYPES = {
    torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.int32: 4, torch.int8: 5, torch.uint8: 6,
}  # fmt: skip

# dnnl_query_t
_IMPLEMENTATION = 8
_SCRATCHPAD_MD, _EXEC_ARG_MD = 136, 255


def dims(values: Sequence[int]) -> Any:
    """``dnnl_dims_t``, of which as many are read as the tensor has dimensions."""
    return (c_int64 * 12)(*values)


class Handle:
    """Owns one object of the library.

    The call that creates the object writes to ``handle`` itself, and each object has one owner: whatever is raised
    meanwhile, and wherever, it is destroyed once. After a failed creation there is nothing to destroy.
    """

    __slots__ = ("handle",)
    _DESTROY: ClassVar[str]

    def _create(self, name: str, *args: Any) -> None:
        self.handle = c_void_p()
        library().call(name, byref(self.handle), *args)

    def __del__(self) -> None:
        # At the interpreter's end the process takes everything back, and modules may be gone.
        if sys.is_finalizing() or not getattr(self, "handle", None):
            return
        handle, self.handle = self.handle, c_void_p()
        library().call(self._DESTROY, handle)


class Desc(Handle):
    """A memory descriptor: shape, dtype and layout.

    Attributes:
        shape, dtype: None for what only oneDNN knows, such as scratchpads.
        size: in bytes.
        strides: in elements, for layouts that torch has too; None for oneDNN's own.
    """

    __slots__ = ("__weakref__", "_key", "dtype", "shape", "size", "strides")
    _DESTROY = "memory_desc_destroy"

    def __init__(self, shape: Sequence[int] | None, dtype: torch.dtype | None, strides: Sequence[int] | None,
                 create: str, *args: Any) -> None:  # fmt: skip
        self.shape = None if shape is None else tuple(shape)
        self.dtype, self.strides = dtype, None if strides is None else tuple(strides)
        self._key: tuple | None = None
        self._create(create, *args)
        self.size: int = library().call("memory_desc_get_size", self.handle)

    @classmethod
    def strided(cls, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Desc:
        """A layout of torch's; dense and row-major by default."""
        if strides is None:
            strides = row_major(shape)
        return cls(
            shape, dtype, strides,
            "memory_desc_create_with_strides", len(shape), dims(shape), DTYPES[dtype], dims(strides),
        )  # fmt: skip

    @classmethod
    def any(cls, shape: Sequence[int], dtype: torch.dtype) -> Desc:
        """oneDNN is to choose the layout."""
        found = cls(shape, dtype, None, "memory_desc_create_with_tag", len(shape), dims(shape), DTYPES[dtype], _ANY)
        found._key = (found.shape, dtype, "any")
        return found

    @classmethod
    def copied(cls, handle: c_void_p, shape: Sequence[int], dtype: torch.dtype) -> Desc:
        """What another object of the library describes."""
        return cls(shape, dtype, None, "memory_desc_clone", handle)

    def part(self, shape: Sequence[int], offsets: Sequence[int]) -> Desc:
        """A box in this memory; reads and writes go to the whole one's address."""
        return Desc(shape, self.dtype, None, "memory_desc_create_submemory", self.handle, dims(shape), dims(offsets))

    @property
    def key(self) -> tuple:
        """Equal for equal descriptors only. Strides of axes of size 1 count, unlike for ``==``: kernels see them."""
        if self._key is None:
            layout = _layouts.number(self) if self.strides is None else self.strides
            self._key = (self.shape, self.dtype, layout)
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Desc) and bool(library().call("memory_desc_equal", self.handle, other.handle))

    def __repr__(self) -> str:
        layout = "own layout" if self.strides is None else f"strides {self.strides}"
        return f"Desc({self.shape}, {self.dtype}, {layout})"


class _Layouts:
    """Numbers for oneDNN's own layouts, whose descriptors can only be compared."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[Desc]] = {}
        self._lock = threading.Lock()

    def number(self, desc: Desc) -> str:
        with self._lock:
            known = self._known.setdefault((desc.shape, desc.dtype, desc.size), [])
            if desc not in known:
                known.append(desc)
            return f"{desc.size} bytes, layout {known.index(desc)}"


_layouts = _Layouts()


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Sum:
    """Adds what the destination held: ``scale * (dst - zero_point)``, the memory read as ``dtype``."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Eltwise:
    """A function of one value; see ``dnnl_eltwise_*`` for what ``alpha`` and ``beta`` are."""

    alg: Alg
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class Binary:
    """An operation with another tensor, which broadcasts where its sizes are 1."""

    alg: Alg
    other: Desc


PostOp = Sum | Eltwise | Binary


class Attributes(Handle):
    """Scales, zero points (masks: 0 per tensor, 2 per axis 1 ...) and post-ops of a primitive, by argument."""

    __slots__ = ("post_ops", "scales", "zero_points")
    _DESTROY = "primitive_attr_destroy"

    def __init__(
        self,
        scales: Mapping[int, int] | None = None,
        zero_points: Mapping[int, int] | None = None,
        post_ops: Sequence[PostOp] = (),
    ) -> None:
        self.scales = {int(arg): mask for arg, mask in (scales or {}).items()}
        self.zero_points = {int(arg): mask for arg, mask in (zero_points or {}).items()}
        self.post_ops = tuple(post_ops)
        lib = library()
        self._create("primitive_attr_create")
        lib.call("primitive_attr_set_scratchpad_mode", self.handle, 1)  # the user's
        for arg, mask in self.scales.items():
            lib.call("primitive_attr_set_scales_mask", self.handle, arg, mask)
        for arg, mask in self.zero_points.items():
            lib.call("primitive_attr_set_zero_points_mask", self.handle, arg, mask)
        if post_ops:
            ops = _PostOps(self.post_ops)  # which the attributes copy
            lib.call("primitive_attr_set_post_ops", self.handle, ops.handle)

    @property
    def key(self) -> tuple:
        ops = tuple((op.alg, op.other.key) if isinstance(op, Binary) else op for op in self.post_ops)
        return tuple(sorted(self.scales.items())), tuple(sorted(self.zero_points.items())), ops


class _PostOps(Handle):
    __slots__ = ()
    _DESTROY = "post_ops_destroy"

    def __init__(self, post_ops: Sequence[PostOp]) -> None:
        lib = library()
        self._create("post_ops_create")
        for op in post_ops:
            if isinstance(op, Sum):
                dtype = DTYPES[op.dtype] if op.dtype else 0
                lib.call("post_ops_append_sum", self.handle, op.scale, op.zero_point, dtype)
            elif isinstance(op, Eltwise):
                lib.call("post_ops_append_eltwise", self.handle, op.alg, op.alpha, op.beta)
            else:
                lib.call("post_ops_append_binary", self.handle, op.alg, op.other.handle)


@dataclass(frozen=True, eq=False)
class Spec:
    """What a primitive computes, all that its result depends on but the numbers.

    Attributes:
        kind: such as "convolution_forward".
        descs: by argument; those of operands of post-ops are in ``attributes``.
        stride, padding, padding_right, dilation, kernel: of windows, one number for each axis; ``dilation`` as torch
            counts it, 1 for none; ``kernel`` of pools.
        axis: of softmax and concat.
        alpha, beta: of the function; ``alpha`` is the epsilon of a layer norm.
        factors: of a resampling.
        levels: the highest number that a uint8 source holds. Where products saturate, kernels are right up to 127.
    """

    kind: str
    descs: Mapping[int, Desc]
    attributes: Attributes
    alg: Alg | None = None
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    padding_right: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    axis: int = -1
    alpha: float = 0.0
    beta: float = 0.0
    factors: tuple[float, ...] = ()
    levels: int = 255

    @functools.cached_property
    def key(self) -> tuple:
        descs = tuple((arg, desc.key) for arg, desc in sorted(self.descs.items()))
        windows = (self.stride, self.padding, self.padding_right, self.dilation, self.kernel)
        numbers = (self.axis, self.alpha, self.beta, self.factors, self.levels)
        return self.kind, self.alg, descs, self.attributes.key, windows, numbers

    @property
    def dst(self) -> Desc:
        return self.descs[Arg.DST]

    @property
    def work(self) -> int:
        """Multiply-accumulates, or what comes near."""
        count = math.prod(self.dst.shape or ())
        if self.kind == "matmul":
            return count * (self.descs[Arg.SRC].shape or (1,))[-1]
        if Arg.WEIGHTS in self.descs:
            weights = self.descs[Arg.WEIGHTS].shape or ()
            return count * math.prod(weights[len(weights) - len(self.stride) - 1 :])
        return count * math.prod(self.kernel)

    def __str__(self) -> str:
        """For people: one line."""
        parts = [f"{Arg(arg).name.lower() if arg in _NAMES else f'src{arg - Arg.MULTIPLE_SRC}'} {_text(desc)}"
                 for arg, desc in sorted(self.descs.items())]  # fmt: skip
        for name in ("stride", "padding", "padding_right", "dilation", "kernel", "factors"):
            if values := getattr(self, name):
                parts.append(f"{name} {values}")
        if self.alg is not None:
            parts.insert(0, self.alg.name.lower())
        ops = [op.alg.name.lower() if not isinstance(op, Sum) else "sum" for op in self.attributes.post_ops]
        if ops:
            parts.append("+ " + " + ".join(ops))
        return ", ".join(parts)


_NAMES = frozenset(Arg)


def _text(desc: Desc) -> str:
    layout = "" if desc.strides is None else f" strides {desc.strides}"
    return f"{desc.shape} {str(desc.dtype).removeprefix('torch.')}{layout}"


class Implementation(Handle):
    """One of the kernels that the library has for what is asked for; not compiled yet.

    Attributes:
        name: oneDNN's.

    Args:
        args: of the C function that creates its descriptor, but for the attributes.
        number: 0 for the one that the library prefers.

    Raises:
        Unimplemented: there are not so many.
    """

    __slots__ = ("name",)
    _DESTROY = "primitive_desc_destroy"

    def __init__(self, spec: Spec, args: Sequence[Any], number: int = 0) -> None:
        lib = library()
        self._create(f"{spec.kind}_primitive_desc_create", *args, spec.attributes.handle)
        try:
            for _ in range(number):
                lib.call("primitive_desc_next_impl", self.handle)
        except OneDNNError as error:
            raise Unimplemented(f"oneDNN has {number} implementations of it at most") from error
        text = c_char_p()
        lib.call("primitive_desc_query", self.handle, _IMPLEMENTATION, 0, byref(text))
        self.name = (text.value or b"").decode()

    @property
    def is_reference(self) -> bool:
        """Whether it is oneDNN's slow stand-in for what no kernel was written for."""
        return self.name.startswith("ref") or ":ref" in self.name


class _Compiled(Handle):
    __slots__ = ()
    _DESTROY = "primitive_destroy"

    def __init__(self, chosen: Implementation) -> None:
        self._create("primitive_create", chosen.handle)


class Primitive:
    """A compiled kernel for given shapes, dtypes, layouts and attributes.

    Attributes:
        implementation: oneDNN's name of the kernel.
        scratchpad: what it needs beside its arguments, in bytes.
    """

    def __init__(self, spec: Spec, chosen: Implementation) -> None:
        lib = library()
        self.spec, self._chosen, self.implementation = spec, chosen, chosen.name
        self._compiled = _Compiled(chosen)
        found = lib.call("primitive_desc_query_md", chosen.handle, _SCRATCHPAD_MD, 0)
        self.scratchpad: int = lib.call("memory_desc_get_size", found)

    @property
    def kind(self) -> str:
        """Such as "convolution_forward"."""
        return self.spec.kind

    @property
    def handle(self) -> c_void_p:
        return self._compiled.handle

    @property
    def is_reference(self) -> bool:
        return self._chosen.is_reference

    def layout(self, arg: int, shape: Sequence[int], dtype: torch.dtype) -> Desc:
        """The layout it chose for an argument."""
        lib = library()
        found = lib.call("primitive_desc_query_md", self._chosen.handle, _EXEC_ARG_MD, int(arg))
        if not found or not lib.call("memory_desc_get_size", c_void_p(found)):
            raise OneDNNError(f"{self.kind} has no argument {arg}")
        return Desc.copied(c_void_p(found), shape, dtype)


class Memory(Handle):
    """An address with a descriptor; the address may change between executions."""

    __slots__ = ("desc",)
    _DESTROY = "memory_destroy"

    def __init__(self, desc: Desc, address: int = 0) -> None:
        self.desc = desc
        # The null pointer means "no memory yet"; oneDNN would allocate for (void *) -1.
        self._create("memory_create", desc.handle, library().engine, c_void_p(address))

    def point_to(self, address: int) -> None:
        library().call("memory_set_data_handle", self.handle, c_void_p(address))


def arguments(memories: Mapping[int, Memory]) -> Any:
    """The argument array of an execution. It does not keep the memories alive."""
    return (ExecArg * len(memories))(*(ExecArg(int(arg), memory.handle) for arg, memory in memories.items()))


def execute(primitive: Primitive, memories: Mapping[int, Memory]) -> None:
    """Run a primitive once, now, with a scratchpad of its own where none is given."""
    lib = library()
    pad = torch.empty(0 if Arg.SCRATCHPAD in memories else primitive.scratchpad, dtype=torch.uint8)
    if pad.numel():
        memories = {**memories, Arg.SCRATCHPAD: Memory(Desc.strided(pad.shape, torch.uint8), pad.data_ptr())}
    args = arguments(memories)
    status = lib.execute(primitive.handle, lib.stream, c_int(len(args)), byref(args))
    if status:
        raise failure("dnnl_primitive_execute", status)
    lib.call("stream_wait", lib.stream)
