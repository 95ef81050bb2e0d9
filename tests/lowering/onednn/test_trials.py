"""oneDNN's primitives prove themselves: planted faults are found, replaced and named; what is proved is shared."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from ctypes import c_uint8, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq import selfcheck
from dbrq.kernels import has_exact_int8_dot
from dbrq.lowering.onednn import binding, handles, trials
from dbrq.lowering.onednn.binding import (
    Alg,
    Arg,
    Attributes,
    Binary,
    Desc,
    Eltwise,
    Implementation,
    Primitive,
    Spec,
    Sum,
)
from dbrq.lowering.onednn.layouts import channels_last
from dbrq.lowering.onednn.library import OneDNNError, library

#: Without VNNI products of more saturate.
LEVELS = 255 if has_exact_int8_dot() else 127
Fault = Callable[[Primitive, dict[int, int]], None]


pytestmark = pytest.mark.usefixtures("nothing_proved")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes executions of some primitives go wrong, in plans and in trials alike."""
    known: dict[int, Primitive] = {}
    made, lib = Primitive.__init__, library()
    execute, address_of = lib.execute, lib.dll.dnnl_memory_get_data_handle
    address_of.argtypes = [c_void_p, ctypes.POINTER(c_void_p)]

    def remembered(self: Primitive, *args: Any) -> None:
        made(self, *args)
        known[self.handle.value or 0] = self

    def address(memory: int) -> int:
        found = c_void_p()
        address_of(memory, ctypes.byref(found))
        return found.value or 0

    def planted(faulty: Callable[[Primitive], bool], fault: Fault) -> None:
        def executed(handle: c_void_p, stream: c_void_p, count: ctypes.c_int, args: Any) -> int:
            status = execute(handle, stream, count, args)
            primitive = known.get(handle.value or 0)
            if primitive is not None and faulty(primitive):
                fault(primitive, {a.arg: address(a.memory) for a in args._obj})
            return status

        monkeypatch.setattr(lib, "execute", executed)

    monkeypatch.setattr(Primitive, "__init__", remembered)
    return planted


def layer() -> tuple[nn.Module, Tensor]:
    """A layer of 8-bit results, and its input, quantized."""
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 1)).eval()
    x = torch.randn(2, 16, 9, 9)
    return dbrq.quantize(model, [x]), x


def preferred() -> str:
    """The library's first choice for the 3x3 layer."""
    x, y = (2, 16, 9, 9), (2, 32, 7, 7)
    spec = convolution_spec(x, y, (32, 16, 3, 3))
    return Implementation(spec, arguments_of(spec)).name


def convolution_spec(x: tuple[int, ...], y: tuple[int, ...], weight: tuple[int, ...], *post_ops: Any) -> Spec:
    descs = {
        Arg.SRC: Desc.strided(x, torch.uint8, channels_last(x)), Arg.WEIGHTS: Desc.any(weight, torch.int8),
        Arg.DST: Desc.strided(y, torch.uint8, channels_last(y)),
    }  # fmt: skip
    attributes = Attributes({Arg.WEIGHTS: 1, Arg.DST: 0}, {}, post_ops)
    return Spec("convolution_forward", descs, attributes, Alg.CONVOLUTION, (1, 1), (0, 0), (0, 0), (1, 1))


def arguments_of(spec: Spec) -> tuple[Any, ...]:
    d, n = spec.descs, handles.dims
    return (
        library().engine, 96, Alg.CONVOLUTION, d[Arg.SRC].handle, d[Arg.WEIGHTS].handle, None, d[Arg.DST].handle,
        n([1, 1]), n([0, 0]), n([0, 0]), n([0, 0]),
    )  # fmt: skip


# Faults


def moves_a_channel(primitive: Primitive, addresses: dict[int, int]) -> None:
    """The last one of each result in 8 bits, by 20 levels."""
    channels = primitive.spec.dst.shape[1]  # type: ignore[index]
    for at in range(channels - 1, primitive.spec.dst.size, channels):
        byte = c_uint8.from_address(addresses[Arg.DST] + at)
        byte.value = byte.value + 20 if byte.value < 200 else byte.value - 20


def writes_too_far(primitive: Primitive, addresses: dict[int, int]) -> None:
    c_uint8.from_address(addresses[Arg.DST] + primitive.spec.dst.size).value = 1


def is_right_for_zeros(primitive: Primitive, addresses: dict[int, int]) -> None:
    """The result of an input of zeros without padding, whatever the input is: that of its first pixel."""
    dst = primitive.spec.dst
    pixel = dst.shape[1]  # type: ignore[index]
    for at in range(pixel, dst.size, pixel):
        ctypes.memmove(addresses[Arg.DST] + at, addresses[Arg.DST], pixel)


def only_on_trial(fault: Fault) -> Fault:
    """A fault that would corrupt the heap of the tests elsewhere."""
    trying: list[bool] = []

    def found(primitive: Primitive, addresses: dict[int, int]) -> None:
        if trying:
            fault(primitive, addresses)

    tried = trials._Trial.problem

    def problem(self: Any) -> str:
        trying.append(True)
        try:
            return tried(self)
        finally:
            trying.pop()

    found.patch = problem  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("fault", [moves_a_channel, is_right_for_zeros, writes_too_far], ids=lambda f: f.__name__)
def test_a_kernel_that_is_wrong_is_replaced_by_the_next(fault, plant, monkeypatch):
    quantized, x = layer()
    if fault is writes_too_far:
        fault = only_on_trial(fault)
        monkeypatch.setattr(trials._Trial, "problem", fault.patch)
    name = preferred()
    plant(lambda p: p.kind == "convolution_forward" and p.implementation == name, fault)
    lowered = dbrq.lower(quantized, x, backend="onednn")
    (failure, *_) = selfcheck.failures()
    assert failure.kernel == f"onednn convolution_forward {name}" and "(2, 16, 9, 9)" in failure.geometry
    assert ("beside its dst" if fault.__name__ == "found" else "results are wrong") in failure.problem
    assert name not in failure.stand_in and "convolution_forward" in failure.stand_in
    assert failure in [f for found in dbrq.lowered_form(lowered).replaced.values() for f in found]
    assert not dbrq.lowered_form(lowered).in_torch or "torch" in failure.stand_in
    graph = dbrq.rewrite(quantized, x)
    for given in (x, x.flip(0)):
        assert (lowered(given) - graph(given)).abs().max() < 0.02 * graph(given).abs().max()


def test_where_every_kernel_is_wrong_torch_computes(plant):
    quantized, x = layer()
    plant(lambda p: p.kind == "convolution_forward" and p.spec.dst.dtype is not None, spoils)
    lowered = dbrq.lower(quantized, x, backend="onednn")
    assert len(dbrq.lowered_form(lowered).in_torch) == 2 and all(
        "no kernel is right" in why for why in dbrq.lowered_form(lowered).in_torch.values()
    )
    assert all("torch" in f.stand_in for f in selfcheck.failures())
    torch.testing.assert_close(lowered(x), dbrq.rewrite(quantized, x)(x), atol=1e-5, rtol=1e-5)


def spoils(primitive: Primitive, addresses: dict[int, int]) -> None:
    ctypes.memset(addresses[Arg.DST], 0, primitive.spec.dst.size)


def test_the_switch_turns_checks_off_and_on_again(plant):
    quantized, x = layer()
    name = preferred()
    plant(lambda p: p.kind == "convolution_forward" and p.implementation == name, spoils)
    selfcheck.set_self_check(False)
    assert not dbrq.lowered_form(dbrq.lower(quantized, x, backend="onednn")).replaced and not selfcheck.failures()
    selfcheck.set_self_check(True)
    lowered = dbrq.lower(quantized, x, backend="onednn")
    assert dbrq.lowered_form(lowered).replaced and lowered(x).abs().sum() > 0


def test_each_primitive_is_tried_once_and_shared(monkeypatch):
    quantized, x = layer()
    tried: list[str] = []
    problem_of = trials.problem_of
    monkeypatch.setattr(trials, "problem_of", lambda p, r: tried.append(str(p.spec)) or problem_of(p, r))
    one = dbrq.lower(quantized, x, backend="onednn")
    count = len(tried)
    assert count >= 3 and len(set(tried)) == count
    two = dbrq.lower(quantized, x, backend="onednn")
    assert len(tried) == count
    assert not dbrq.lowered_form(one).replaced and not selfcheck.failures()
    primitives = [
        [s.primitive for s in dbrq.lowered_form(m).plans[-1].plan.steps if hasattr(s, "primitive")] for m in (one, two)
    ]
    assert len(primitives[0]) >= 3 and all(a is b for a, b in zip(*primitives, strict=True))
    binding._shared.clear()
    del one, two, primitives
    gc.collect()
    dbrq.lower(quantized, x, backend="onednn")
    assert len(tried) == count, "what was proved is remembered, though its primitive is gone"


def test_other_strides_are_another_primitive():
    """To the library's own cache these are equal, as strides of axes of size 1 lead nowhere."""
    one, two = (Desc.strided((2, 8, 1), torch.float32, s) for s in ((8, 1, 1), (8, 1, 8)))
    assert one == two and one.key != two.key
    relu = [binding.eltwise(Alg.RELU, d, d, 0.0, 0.0, Attributes()) for d in (one, two, one)]
    assert relu[0] is relu[2] and relu[0] is not relu[1]


# Trials find what is wrong, and nothing else


def made(kind: str, *post_ops: Any, dtype: torch.dtype = torch.float32, out: torch.dtype | None = None) -> Primitive:
    """A primitive of each kind, with what may follow it."""
    shape, out = (2, 16, 7, 6), out or dtype
    x, y = Desc.strided(shape, dtype, channels_last(shape)), Desc.strided(shape, out, channels_last(shape))
    attributes = Attributes(post_ops=post_ops)
    weights = torch.int8 if dtype is torch.uint8 else dtype
    rows, product = Desc.strided((20, 16), dtype), Desc.strided((20, 12), out)
    if kind in ("convolution", "depthwise", "transposed"):
        weight = {"convolution": (16, 16, 3, 3), "depthwise": (16, 1, 1, 3, 3), "transposed": (16, 16, 3, 3)}[kind]
        scales = {} if weights is not torch.int8 else {Arg.WEIGHTS: 3 if kind == "depthwise" else 1, Arg.DST: 0}
        attributes = Attributes(scales, {Arg.SRC: 0} if scales else {}, post_ops)
        return binding.convolution(x, Desc.any(weight, weights), Desc.strided((16,), torch.float32), y, [1, 1], [1, 1],
                                   [1, 1], attributes, transposed=kind == "transposed", levels=LEVELS)  # fmt: skip
    if kind == "matmul":
        scales = {} if weights is not torch.int8 else {Arg.SRC: 0, Arg.WEIGHTS: 2, Arg.DST: 0}
        return binding.matmul(rows, Desc.any((16, 12), weights), None, product,
                              Attributes(scales, {Arg.DST: 0} if scales else {}, post_ops), LEVELS)  # fmt: skip
    if kind == "pooling":
        return binding.pooling(Alg.POOLING_AVG_EXCLUDE_PADDING, x, y, [1, 1], [3, 3], [1, 1], [1, 1], [1, 1],
                               attributes)  # fmt: skip
    if kind == "binary":
        return binding.binary(Alg.MUL, x, Desc.strided((1, 16, 1, 1), dtype), y, attributes)
    if kind == "softmax":
        return binding.softmax(Alg.SOFTMAX, rows, Desc.strided((20, 16), out), 1, attributes)
    if kind == "layer_norm":
        return binding.layer_norm(rows, Desc.strided((20, 16), out), 1e-5, True, True, attributes)
    if kind == "concat":
        return binding.concat([x, x], Desc.strided((2, 32, 7, 6), out, channels_last((2, 32, 7, 6))), 1, attributes)
    if kind == "resampling":
        big = (2, 16, 14, 12)
        return binding.resampling(Alg.LINEAR_RESAMPLING, x, Desc.strided(big, out, channels_last(big)), [2.0, 2.0],
                                  attributes)  # fmt: skip
    return binding.reorder(x, Desc.strided(shape, out), attributes)


_OTHER = Desc.strided((1, 16, 1, 1), torch.float32)
_FUNCTIONS = [alg for alg in trials.reference._FUNCTIONS if alg not in (Alg.POW, Alg.LOG, Alg.SQRT)]
CASES: dict[str, tuple] = {
    **{f"convolution + {alg.name}": ("convolution", Eltwise(alg, 0.5, 2.0)) for alg in _FUNCTIONS},
    **{f"convolution + binary {alg.name}": ("convolution", Binary(alg, _OTHER)) for alg in trials.reference.OPERATIONS},
    "depthwise + sum": ("depthwise", Sum(0.5, 3), Eltwise(Alg.CLIP, 0.0, 6.0)),
    **{kind: (kind,) for kind in ("transposed", "matmul", "pooling", "binary", "softmax", "layer_norm", "concat",
                                  "resampling", "reorder")},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_right_passes(name, dtype):
    kind, *post_ops = CASES[name]
    if dtype is torch.uint8:
        post_ops = [Sum(op.scale, op.zero_point, torch.uint8) if isinstance(op, Sum) else op for op in post_ops]
    elif post_ops and isinstance(post_ops[0], Sum):
        post_ops[0] = Sum()
    try:
        primitive = made(kind, *post_ops, dtype=dtype)
    except binding.Disproved:
        raise
    except OneDNNError:
        pytest.skip("oneDNN has none")
    assert not selfcheck.failures()
    assert trials.problem_of(primitive, binding._plain_reorder) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", ["convolution", "depthwise", "transposed", "matmul", "pooling", "binary", "concat"])
def test_one_wrong_channel_shows(kind, dtype, plant):
    """One in the middle, wrong by the least that counts: a level, or a thousandth."""

    def fault(primitive: Primitive, addresses: dict[int, int]) -> None:
        dst = primitive.spec.dst
        result = torch.frombuffer((c_uint8 * dst.size).from_address(addresses[Arg.DST]), dtype=dst.dtype)
        column = result[5 :: dst.shape[1]]  # type: ignore[index]
        if dtype is torch.uint8:
            column.copy_(torch.where(column < 255, column + 1, 254))
        else:
            column.add_(column.abs().max() / 1000)

    plant(lambda p: p.kind != "reorder", fault)
    with pytest.raises(OneDNNError) as raised:
        made(kind, dtype=dtype)
    if not isinstance(raised.value, binding.Disproved):
        pytest.skip("oneDNN has none")


def test_a_fault_of_the_library_shows():
    """3.2 takes a one-pixel image for contiguous and for channels last at once; dbrq never asks for it any more."""
    x, other = (Desc.strided(s, torch.float32, (8, 1, 1)) for s in ((2, 8, 1), (1, 8, 1)))
    attributes = Attributes(post_ops=[Binary(Alg.ADD, other)])
    spec = Spec("binary", {Arg.SRC: x, Arg.SRC_1: other, Arg.DST: x}, attributes, Alg.MUL)
    chosen = Implementation(spec, (library().engine, Alg.MUL, x.handle, other.handle, x.handle))
    primitive = Primitive(spec, chosen)
    if library().version != (3, 2, 0) or primitive.is_reference:
        pytest.skip("another library")
    assert "results are wrong" in trials.problem_of(primitive, binding._plain_reorder)


def test_where_products_saturate_only_seven_bits_are_tried():
    """Without VNNI a kernel is right for sources up to 127, and is tried with these if the model has 7 bits."""
    spec = convolution_spec((2, 16, 9, 9), (2, 32, 7, 7), (32, 16, 3, 3))
    for levels in (127, 255):
        limited = Spec(spec.kind, spec.descs, spec.attributes, spec.alg, spec.stride, spec.padding, spec.padding_right,
                       spec.dilation, levels=levels)  # fmt: skip
        trial = trials._Trial(
            Primitive(limited, Implementation(limited, arguments_of(limited))), binding._plain_reorder
        )
        assert trial.tensors[Arg.SRC].max() == levels and trial.tensors[Arg.SRC].min() == 0


# Norms of images of one pixel


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_norms_of_one_pixel(norm):
    """Whatever ran before: contiguous, and as a pool or a convolution leaves it."""
    n = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[norm]
    model = norm(8).eval()
    for held in (model.running_mean, model.weight.data, model.bias.data):
        held.normal_()
    model.running_var.uniform_(0.5, 2)
    shape = (2, 8, *[1] * n)
    x = torch.randn(shape)
    for strides in ((8, 1, *[1] * n), channels_last(shape), (1, 2, *[1] * n), (8, 1, *[1] * n)):
        given = torch.empty_strided(shape, strides).copy_(x)
        lowered = dbrq.lower(model, given, backend="onednn")
        torch.testing.assert_close(lowered(given), model(x), atol=1e-5, rtol=1e-5)
    assert not selfcheck.failures()
