"""Primitives by kind, each proved on this CPU before anybody uses it, and shared by all that ask for the same.

This is where primitives come from. What is asked for is compared as a whole (``Spec.key``): kernels differ for layouts
that lead to the same addresses, so these are different primitives here, though not to the library's own cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from ctypes import c_void_p
from typing import Any

import torch

from ... import selfcheck
from ...selfcheck import Failure
from . import trials
from .handles import (
    DTYPES,
    Alg,
    Arg,
    Attributes,
    Binary,
    Desc,
    Eltwise,
    Implementation,
    Memory,
    PostOp,
    Primitive,
    Spec,
    Sum,
    arguments,
    dims,
    execute,
    row_major,
)  # fmt: skip
from .library import Unimplemented, library

__all__ = [
    "DTYPES", "Alg", "Arg", "Attributes", "Binary", "Desc", "Disproved", "Eltwise", "Implementation", "Memory",
    "PostOp", "Primitive", "Spec", "Sum", "arguments", "binary", "concat", "convolution", "dims", "eltwise", "execute",
    "layer_norm", "matmul", "pooling", "reorder", "replacements", "resampling", "row_major", "softmax",
]  # fmt: skip

_INFERENCE = 96
_LAYER_NORM_FLAGS = {(False, False): 0, (True, False): 2, (False, True): 4, (True, True): 6}
#: Primitives kept for those that ask again: 20 to 100 MB.
_KEPT = 512
#: Multiply-accumulates that a reference kernel may take, on trial or later: about a tenth of a second's.
_BEARABLE = 1 << 22
#: Leaking primitives that are destroyed before others are preferred. Those kept by then will follow: 15 MB in all.
_LEAKS = 64


class Disproved(Unimplemented):
    """oneDNN has kernels for it, none of which is right on this CPU."""


class _Shared:
    """The primitives of this process: the newest are kept, others as long as somebody uses them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.alive: weakref.WeakValueDictionary[Hashable, Primitive] = weakref.WeakValueDictionary()
        self.newest: OrderedDict[Hashable, Primitive] = OrderedDict()
        self.failed: dict[Hashable, tuple[Failure, ...]] = {}
        self.leaked = 0
        self.heard = threading.local()

    def find(self, key: Hashable) -> Primitive | None:
        with self.lock:
            found = self.alive.get(key)
            return None if found is None else self._used(key, found)

    def keep(self, key: Hashable, primitive: Primitive) -> Primitive:
        """The primitive, or the one that another thread has made meanwhile."""
        with self.lock:
            return self._used(key, self.alive.setdefault(key, primitive))

    def _used(self, key: Hashable, primitive: Primitive) -> Primitive:
        self.newest[key] = primitive
        self.newest.move_to_end(key)
        if len(self.newest) > _KEPT:
            self.newest.popitem(last=False)
        return primitive

    def count_leak(self) -> None:
        self.leaked += 1

    def clear(self) -> None:
        with self.lock:
            self.newest.clear()
            self.alive.clear()


_shared = _Shared()


@contextlib.contextmanager
def replacements() -> Iterator[list[Failure]]:
    """Collects what was wrong with kernels that this thread asks for meanwhile, found now or known before."""
    before = getattr(_shared.heard, "failures", None)
    failures: list[Failure] = []
    _shared.heard.failures = failures
    try:
        yield failures
    finally:
        _shared.heard.failures = before


def _made(spec: Spec, *args: Any) -> Primitive:
    """The primitive that computes ``spec``, the library's first choice that is right.

    Args:
        args: of the C function, but for the attributes.

    Raises:
        Unimplemented: there is none; ``Disproved`` if there are some and all are wrong.
    """
    key = hashlib.blake2b(
        repr((spec.key, torch.get_num_threads(), selfcheck.enabled())).encode(), digest_size=16
    ).digest()
    found = _shared.find(key)
    if found is None:
        found = _shared.keep(key, _proved(spec, args, key))
    _tell(_shared.failed.get(key, ()))
    return found


def _tell(failures: Sequence[Failure]) -> None:
    heard = getattr(_shared.heard, "failures", None)
    if heard is not None:
        heard += [f for f in failures if f not in heard]


def _proved(spec: Spec, args: Sequence[Any], key: Hashable) -> Primitive:
    """The first implementation that is right; of these, one that does not leak once too many have."""
    failures: list[Failure] = []
    for primitive in _candidates(spec, args):
        problem = _problem(primitive, key)
        if not problem:
            break
        failures.append(Failure(f"onednn {spec.kind} {primitive.implementation}", str(spec), problem))
    else:
        primitive = None
    stand_in = "other primitives, or torch"
    if primitive is not None:
        slow = ", or torch where that is too slow" if primitive.is_reference else ""
        stand_in = f"onednn {spec.kind} {primitive.implementation}{slow}"
    known = tuple(dataclasses.replace(failure, stand_in=stand_in) for failure in failures)
    for failure in known:
        selfcheck.note_failure(failure)
    if known:
        _shared.failed[key] = known
    if primitive is None:
        _tell(known)
        raise Disproved(f"no kernel is right on this CPU: {failures[0].kernel}: {failures[0].problem}")
    if _leaks(spec, primitive.implementation):
        weakref.finalize(primitive, _shared.count_leak).atexit = False
    return primitive


def _candidates(spec: Spec, args: Sequence[Any]) -> Iterator[Primitive]:
    """Implementations in the order in which to take them, each compiled when its turn comes.

    Raises:
        Unimplemented: there is none at all.
    """
    leaking: list[Implementation] = []
    references: list[Implementation] = []
    others = 0
    for number in itertools.count():
        try:
            chosen = Implementation(spec, args, number)
        except Unimplemented:
            if not number:
                raise
            break
        if _leaks(spec, chosen.name) and _shared.leaked >= _LEAKS:
            leaking.append(chosen)
        elif chosen.is_reference:
            references.append(chosen)
        else:
            others += 1
            yield Primitive(spec, chosen)
    if references and spec.work > _BEARABLE:
        if not others and not leaking:
            raise Unimplemented(f"oneDNN has only {references[0].name} for it")
        references = []
    yield from (Primitive(spec, chosen) for chosen in (*leaking, *references))


def _problem(primitive: Primitive, key: Hashable) -> str:
    if not trials.is_provable(primitive.spec):
        return ""
    return selfcheck.problem_of(
        ("onednn", key, primitive.implementation), lambda: trials.problem_of(primitive, _plain_reorder)
    )


def _plain_reorder(source: Desc, result: Desc) -> Primitive:
    return reorder(source, result, Attributes())


def _leaks(spec: Spec, implementation: str) -> bool:
    """Whether the library (3.2 at least) keeps 10 to 40 KB of each such primitive for ever."""
    return implementation.startswith("brgconv") and any(
        isinstance(op, (Sum, Eltwise)) for op in spec.attributes.post_ops
    )


def _settled(desc: Desc) -> Desc:
    """An image of one pixel, if its channels lie together, as channels last.

    By its strides it could as well be contiguous, and the kernel of 3.2 takes it for both at once: its operation for
    one, the operations behind it for the other.
    """
    shape, strides = desc.shape or (), desc.strides or ()
    if len(strides) < 3 or max(shape[2:]) > 1 or strides[1] != 1 or strides[0] < shape[1]:
        return desc
    return Desc.strided(shape, desc.dtype or torch.float32, (*strides[:2], *[shape[1]] * (len(shape) - 2)))


# By kind


def _handle(desc: Desc | None) -> Any:
    return None if desc is None else desc.handle


def _with_bias(bias: Desc | None, descs: dict[int, Desc]) -> dict[int, Desc]:
    return descs if bias is None else {**descs, Arg.BIAS: bias}


def convolution(src: Desc, weights: Desc, bias: Desc | None, dst: Desc, stride: Sequence[int], padding: Sequence[int],
                dilation: Sequence[int], attributes: Attributes, padding_right: Sequence[int] | None = None,
                transposed: bool = False, levels: int = 255) -> Primitive:  # fmt: skip
    """A convolution, or a transposed one; ``dilation`` as torch counts it, 1 for none.

    Args:
        levels: the highest number that a uint8 source holds.
    """
    kind, alg = ("deconvolution", Alg.DECONVOLUTION) if transposed else ("convolution", Alg.CONVOLUTION)
    right = padding if padding_right is None else padding_right
    descs = _with_bias(bias, {Arg.SRC: src, Arg.WEIGHTS: weights, Arg.DST: dst})
    spec = Spec(f"{kind}_forward", descs, attributes, alg, tuple(stride), tuple(padding), tuple(right),
                tuple(dilation), levels=levels)  # fmt: skip
    return _made(spec, library().engine, _INFERENCE, alg, src.handle, weights.handle, _handle(bias), dst.handle,
                 dims(stride), dims([d - 1 for d in dilation]), dims(padding), dims(right))  # fmt: skip


def matmul(src: Desc, weights: Desc, bias: Desc | None, dst: Desc, attributes: Attributes,
           levels: int = 255) -> Primitive:  # fmt: skip
    """A product of matrices, or of stacks of them; ``levels`` as for ``convolution``."""
    descs = _with_bias(bias, {Arg.SRC: src, Arg.WEIGHTS: weights, Arg.DST: dst})
    spec = Spec("matmul", descs, attributes, levels=levels)
    return _made(spec, library().engine, src.handle, weights.handle, _handle(bias), dst.handle)


def eltwise(alg: Alg, src: Desc, dst: Desc, alpha: float, beta: float, attributes: Attributes) -> Primitive:
    spec = Spec("eltwise_forward", {Arg.SRC: src, Arg.DST: dst}, attributes, alg, alpha=alpha, beta=beta)
    return _made(spec, library().engine, _INFERENCE, alg, src.handle, dst.handle, alpha, beta)


def binary(alg: Alg, src: Desc, other: Desc, dst: Desc, attributes: Attributes) -> Primitive:
    src, other, dst = map(_settled, (src, other, dst))
    if any(isinstance(op, Binary) for op in attributes.post_ops):
        ops = [Binary(op.alg, _settled(op.other)) if isinstance(op, Binary) else op for op in attributes.post_ops]
        attributes = Attributes(attributes.scales, attributes.zero_points, ops)
    spec = Spec("binary", {Arg.SRC: src, Arg.SRC_1: other, Arg.DST: dst}, attributes, alg)
    return _made(spec, library().engine, alg, src.handle, other.handle, dst.handle)


def reorder(src: Desc, dst: Desc, attributes: Attributes) -> Primitive:
    engine = library().engine
    return _made(Spec("reorder", {Arg.SRC: src, Arg.DST: dst}, attributes), src.handle, engine, dst.handle, engine)


def concat(sources: Sequence[Desc], dst: Desc, axis: int, attributes: Attributes) -> Primitive:
    handles = (c_void_p * len(sources))(*(s.handle for s in sources))
    descs: dict[int, Desc] = {Arg.MULTIPLE_SRC + i: s for i, s in enumerate(sources)}
    descs[Arg.DST] = dst
    return _made(
        Spec("concat", descs, attributes, axis=axis), library().engine, dst.handle, len(sources), axis, handles
    )


def softmax(alg: Alg, src: Desc, dst: Desc, axis: int, attributes: Attributes) -> Primitive:
    spec = Spec("softmax_forward", {Arg.SRC: src, Arg.DST: dst}, attributes, alg, axis=axis)
    return _made(spec, library().engine, _INFERENCE, alg, src.handle, dst.handle, axis)


def layer_norm(src: Desc, dst: Desc, epsilon: float, scale: bool, shift: bool, attributes: Attributes) -> Primitive:
    one = Desc.strided((src.shape or ())[-1:], torch.float32)
    given: dict[int, Desc] = {arg: one for arg, there in ((Arg.SCALE, scale), (Arg.SHIFT, shift)) if there}
    spec = Spec("layer_normalization_forward", {Arg.SRC: src, Arg.DST: dst, **given}, attributes, alpha=epsilon)
    return _made(spec, library().engine, _INFERENCE, src.handle, dst.handle, None, epsilon,
                 _LAYER_NORM_FLAGS[scale, shift])  # fmt: skip


def pooling(alg: Alg, src: Desc, dst: Desc, stride: Sequence[int], kernel: Sequence[int], dilation: Sequence[int],
            padding: Sequence[int], padding_right: Sequence[int], attributes: Attributes) -> Primitive:  # fmt: skip
    """A pool; ``dilation`` as torch counts it, 1 for none."""
    spec = Spec("pooling_forward", {Arg.SRC: src, Arg.DST: dst}, attributes, alg, tuple(stride), tuple(padding),
                tuple(padding_right), tuple(dilation), tuple(kernel))  # fmt: skip
    return _made(spec, library().engine, _INFERENCE, alg, src.handle, dst.handle, dims(stride), dims(kernel),
                 dims([d - 1 for d in dilation]), dims(padding), dims(padding_right))  # fmt: skip


def resampling(alg: Alg, src: Desc, dst: Desc, factors: Sequence[float], attributes: Attributes) -> Primitive:
    values = (ctypes.c_float * len(factors))(*factors)
    spec = Spec("resampling_forward", {Arg.SRC: src, Arg.DST: dst}, attributes, alg, factors=tuple(factors))
    return _made(spec, library().engine, _INFERENCE, alg, values, src.handle, dst.handle)
