"""oneDNN's objects in Python: memory descriptors, attributes, primitives. Handles are released with the objects.

Everything here is immutable once made and may be shared by threads; memory objects, which hold addresses, may not.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import OneDNNError
from .library import ExecArg, library


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


_INFERENCE = 96
_ANY = 1  # dnnl_format_tag_any
_LAYER_NORM_FLAGS = {(False, False): 0, (True, False): 2, (False, True): 4, (True, True): 6}

DTYPES = {
    torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.int32: 4, torch.int8: 5, torch.uint8: 6,
}  # fmt: skip

# dnnl_query_t
_IMPLEMENTATION = 8
_SCRATCHPAD_MD, _EXEC_ARG_MD = 136, 255


def dims(values: Sequence[int]) -> Any:
    """``dnnl_dims_t``, of which as many are read as the tensor has dimensions."""
    return (c_int64 * 12)(*values)


class Desc:
    """A memory descriptor: shape, dtype and layout.

    Attributes:
        shape, dtype: None for what only oneDNN knows, such as scratchpads.
        size: in bytes.
        strides: in elements, for layouts that torch has too; None for oneDNN's own.
    """

    __slots__ = ("__weakref__", "dtype", "handle", "shape", "size", "strides")

    def __init__(self, handle: c_void_p, shape: tuple[int, ...] | None, dtype: torch.dtype | None,
                 strides: tuple[int, ...] | None = None) -> None:  # fmt: skip
        self.handle, self.shape, self.dtype, self.strides = handle, shape, dtype, strides
        self.size: int = library().call("memory_desc_get_size", handle)

    @classmethod
    def strided(cls, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Desc:
        """A layout of torch's; dense and row-major by default."""
        if strides is None:
            strides = row_major(shape)
        handle = library().make(
            "memory_desc_create_with_strides", len(shape), dims(shape), DTYPES[dtype], dims(strides)
        )
        return cls(handle, tuple(shape), dtype, tuple(strides))

    @classmethod
    def any(cls, shape: Sequence[int], dtype: torch.dtype) -> Desc:
        """oneDNN is to choose the layout."""
        handle = library().make("memory_desc_create_with_tag", len(shape), dims(shape), DTYPES[dtype], _ANY)
        return cls(handle, tuple(shape), dtype)

    def part(self, shape: Sequence[int], offsets: Sequence[int]) -> Desc:
        """A box in this memory; reads and writes go to the whole one's address."""
        handle = library().make("memory_desc_create_submemory", self.handle, dims(shape), dims(offsets))
        return Desc(handle, tuple(shape), self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Desc) and bool(library().call("memory_desc_equal", self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]

    def __del__(self) -> None:
        _release("memory_desc_destroy", self.handle)

    def __repr__(self) -> str:
        layout = "own layout" if self.strides is None else f"strides {self.strides}"
        return f"Desc({self.shape}, {self.dtype}, {layout})"


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


class Attributes:
    """Scales, zero points (masks: 0 per tensor, 2 per axis 1 ...) and post-ops of a primitive, by argument."""

    def __init__(
        self,
        scales: Mapping[int, int] | None = None,
        zero_points: Mapping[int, int] | None = None,
        post_ops: Sequence[PostOp] = (),
    ) -> None:
        lib = library()
        self.handle = lib.make("primitive_attr_create")
        lib.call("primitive_attr_set_scratchpad_mode", self.handle, 1)  # the user's
        for arg, mask in (scales or {}).items():
            lib.call("primitive_attr_set_scales_mask", self.handle, arg, mask)
        for arg, mask in (zero_points or {}).items():
            lib.call("primitive_attr_set_zero_points_mask", self.handle, arg, mask)
        if post_ops:
            ops = lib.make("post_ops_create")
            try:
                for op in post_ops:
                    _append(ops, op)
                lib.call("primitive_attr_set_post_ops", self.handle, ops)
            finally:
                lib.call("post_ops_destroy", ops)

    def __del__(self) -> None:
        _release("primitive_attr_destroy", self.handle)


def _append(ops: c_void_p, op: PostOp) -> None:
    lib = library()
    if isinstance(op, Sum):
        lib.call("post_ops_append_sum", ops, op.scale, op.zero_point, DTYPES[op.dtype] if op.dtype else 0)
    elif isinstance(op, Eltwise):
        lib.call("post_ops_append_eltwise", ops, op.alg, op.alpha, op.beta)
    else:
        lib.call("post_ops_append_binary", ops, op.alg, op.other.handle)


class Primitive:
    """A compiled kernel for given shapes, dtypes, layouts and attributes.

    Attributes:
        kind: such as "convolution".
        implementation: oneDNN's name of the kernel.
        scratchpad: what it needs beside its arguments, in bytes.
    """

    def __init__(self, kind: str, *args: Any, attributes: Attributes | None = None) -> None:
        lib = library()
        attributes = attributes or Attributes()
        self.kind = kind
        name = f"{kind}_primitive_desc_create"
        self._desc = lib.make(name, *args, attributes.handle)
        try:
            self.handle = lib.make("primitive_create", self._desc)
            text = c_char_p()
            lib.call("primitive_desc_query", self._desc, _IMPLEMENTATION, 0, byref(text))
            self.implementation = (text.value or b"").decode()
            self.scratchpad: int = lib.call(
                "memory_desc_get_size", lib.call("primitive_desc_query_md", self._desc, _SCRATCHPAD_MD, 0)
            )
        except BaseException:
            _release("primitive_desc_destroy", self._desc)
            raise

    @property
    def is_reference(self) -> bool:
        """Whether it is oneDNN's slow stand-in for what no kernel was written for."""
        return self.implementation.startswith("ref") or ":ref" in self.implementation

    def layout(self, arg: int, shape: Sequence[int], dtype: torch.dtype) -> Desc:
        """The layout it chose for an argument."""
        lib = library()
        found = lib.call("primitive_desc_query_md", self._desc, _EXEC_ARG_MD, int(arg))
        if not found or not lib.call("memory_desc_get_size", c_void_p(found)):
            raise OneDNNError(f"{self.kind} has no argument {arg}")
        return Desc(lib.make("memory_desc_clone", c_void_p(found)), tuple(shape), dtype)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            _release("primitive_destroy", self.handle)
            _release("primitive_desc_destroy", self._desc)


def _release(function: str, handle: c_void_p) -> None:
    with contextlib.suppress(Exception):  # the interpreter may be going down
        library().call(function, handle)


class Memory:
    """An address with a descriptor; the address may change between executions."""

    __slots__ = ("desc", "handle")

    def __init__(self, desc: Desc, address: int = 0) -> None:
        self.desc = desc
        # The null pointer means "no memory yet"; oneDNN would allocate for (void *) -1.
        self.handle = library().make("memory_create", desc.handle, library().engine, c_void_p(address))

    def point_to(self, address: int) -> None:
        library().call("memory_set_data_handle", self.handle, c_void_p(address))

    def __del__(self) -> None:
        _release("memory_destroy", self.handle)


def arguments(memories: Mapping[int, Memory]) -> Any:
    """The argument array of an execution. It does not keep the memories alive."""
    return (ExecArg * len(memories))(*(ExecArg(int(arg), memory.handle) for arg, memory in memories.items()))


def execute(primitive: Primitive, memories: Mapping[int, Memory]) -> None:
    """Run a primitive once, now, with a scratchpad of its own."""
    lib = library()
    pad = torch.empty(primitive.scratchpad, dtype=torch.uint8)
    if primitive.scratchpad:
        memories = {**memories, Arg.SCRATCHPAD: Memory(Desc.strided(pad.shape, torch.uint8), pad.data_ptr())}
    args = arguments(memories)
    lib.call("primitive_execute", primitive.handle, lib.stream, len(args), args)
    lib.call("stream_wait", lib.stream)


# Primitives, by kind


def _optional(desc: Desc | None) -> Any:
    return None if desc is None else desc.handle


def convolution(src: Desc, weights: Desc, bias: Desc | None, dst: Desc, stride: Sequence[int], padding: Sequence[int],
                dilation: Sequence[int], attributes: Attributes, padding_right: Sequence[int] | None = None,
                transposed: bool = False) -> Primitive:  # fmt: skip
    """A convolution, or a transposed one; ``dilation`` as torch counts it, 1 for none."""
    kind, alg = ("deconvolution", Alg.DECONVOLUTION) if transposed else ("convolution", Alg.CONVOLUTION)
    return Primitive(
        f"{kind}_forward", library().engine, _INFERENCE, alg, src.handle, weights.handle, _optional(bias), dst.handle,
        dims(stride), dims([d - 1 for d in dilation]), dims(padding),
        dims(padding if padding_right is None else padding_right), attributes=attributes,
    )  # fmt: skip


def matmul(src: Desc, weights: Desc, bias: Desc | None, dst: Desc, attributes: Attributes) -> Primitive:
    engine = library().engine
    return Primitive("matmul", engine, src.handle, weights.handle, _optional(bias), dst.handle, attributes=attributes)


def eltwise(alg: Alg, src: Desc, dst: Desc, alpha: float, beta: float, attributes: Attributes) -> Primitive:
    return Primitive("eltwise_forward", library().engine, _INFERENCE, alg, src.handle, dst.handle, alpha, beta,
                     attributes=attributes)  # fmt: skip


def binary(alg: Alg, src: Desc, other: Desc, dst: Desc, attributes: Attributes) -> Primitive:
    return Primitive("binary", library().engine, alg, src.handle, other.handle, dst.handle, attributes=attributes)


def reorder(src: Desc, dst: Desc, attributes: Attributes) -> Primitive:
    engine = library().engine
    return Primitive("reorder", src.handle, engine, dst.handle, engine, attributes=attributes)


def concat(sources: Sequence[Desc], dst: Desc, axis: int, attributes: Attributes) -> Primitive:
    handles = (c_void_p * len(sources))(*(s.handle for s in sources))
    return Primitive("concat", library().engine, dst.handle, len(sources), axis, handles, attributes=attributes)


def softmax(alg: Alg, src: Desc, dst: Desc, axis: int, attributes: Attributes) -> Primitive:
    return Primitive("softmax_forward", library().engine, _INFERENCE, alg, src.handle, dst.handle, axis,
                     attributes=attributes)  # fmt: skip


def layer_norm(src: Desc, dst: Desc, epsilon: float, scale: bool, shift: bool, attributes: Attributes) -> Primitive:
    flags = _LAYER_NORM_FLAGS[scale, shift]
    return Primitive("layer_normalization_forward", library().engine, _INFERENCE, src.handle, dst.handle, None, epsilon,
                     flags, attributes=attributes)  # fmt: skip


def pooling(alg: Alg, src: Desc, dst: Desc, stride: Sequence[int], kernel: Sequence[int], dilation: Sequence[int],
            padding: Sequence[int], padding_right: Sequence[int], attributes: Attributes) -> Primitive:  # fmt: skip
    """A pool; ``dilation`` as torch counts it, 1 for none."""
    return Primitive(
        "pooling_forward", library().engine, _INFERENCE, alg, src.handle, dst.handle, dims(stride), dims(kernel),
        dims([d - 1 for d in dilation]), dims(padding), dims(padding_right), attributes=attributes,
    )  # fmt: skip


def resampling(alg: Alg, src: Desc, dst: Desc, factors: Sequence[float], attributes: Attributes) -> Primitive:
    values = (ctypes.c_float * len(factors))(*factors)
    return Primitive("resampling_forward", library().engine, _INFERENCE, alg, values, src.handle, dst.handle,
                     attributes=attributes)  # fmt: skip
