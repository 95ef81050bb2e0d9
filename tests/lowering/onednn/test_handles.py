"""Handles of libdnnl: destroyed once, whatever interrupts or fails."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any

import pytest
import torch

from dbrq import selfcheck
from dbrq.lowering.onednn import binding
from dbrq.lowering.onednn.binding import Alg, Arg, Attributes, Binary, Desc, Eltwise, Memory, Sum
from dbrq.lowering.onednn.layouts import channels_last
from dbrq.lowering.onednn.library import OneDNNError, library
from tests.helpers.memory import resident


def a_descriptor(i: int) -> None:
    Desc.strided((2, 3 + i % 7, 4), torch.float32)


def attributes_with_post_ops(i: int) -> None:
    Attributes(
        {Arg.DST: 0}, {Arg.SRC: 0}, [Eltwise(Alg.RELU), Sum(0.5), Binary(Alg.ADD, Desc.strided((1, 3), torch.float32))]
    )


def a_memory(i: int) -> None:
    Memory(Desc.strided((2, 3), torch.float32)).point_to(64)


def a_primitive(i: int) -> None:
    x = Desc.strided((4, 3 + i % 5), torch.float32)
    binding.eltwise(Alg.RELU, x, x, 0.0, 0.0, Attributes())


def a_failing_primitive(i: int) -> None:
    with pytest.raises(OneDNNError):
        binding.eltwise(
            Alg.RELU, Desc.strided((4, 3), torch.float32), Desc.strided((3, 4), torch.float32), 0, 0, Attributes()
        )


@pytest.mark.parametrize("make", [a_descriptor, attributes_with_post_ops, a_memory, a_primitive, a_failing_primitive])
def test_handles_are_released(make: Callable[[int], None]):
    for i in range(2000):
        make(i)
    before = resident()
    for i in range(20000 if make is not a_failing_primitive else 3000):
        make(i)
    assert resident() - before < 3 << 20


def test_a_layout_outlives_its_primitive():
    primitive = binding.matmul(
        Desc.strided((64, 64), torch.uint8),
        Desc.any((64, 64), torch.int8),
        None,
        Desc.strided((64, 64), torch.float32),
        Attributes(),
    )
    layout = primitive.layout(Arg.WEIGHTS, (64, 64), torch.int8)
    again = layout.size
    del primitive
    gc.collect()
    assert layout.size == again and layout == layout and "own layout" in repr(layout)


def test_sequences_of_sizes_are_taken_as_they_come():
    shape: Sequence[int] = torch.Size([2, 3])
    assert Desc.strided(shape, torch.float32) == Desc.strided([2, 3], torch.float32)


pytestmark = pytest.mark.usefixtures("nothing_proved")


def test_shapes_in_rotation_leak_no_more_than_a_budget(monkeypatch):
    """The library keeps some of each brgemm convolution with functions behind it; beyond a budget others are taken."""
    monkeypatch.setattr(binding, "_LEAKS", 8)
    monkeypatch.setattr(binding, "_KEPT", 8)
    selfcheck.set_self_check(False)
    implementations = set()

    def one(i: int) -> None:
        x = (1, 16, 4 + i % 10, 4 + i // 10)
        descs = [Desc.strided(x, torch.uint8, channels_last(x)) for _ in range(2)]
        found = binding.convolution(
            descs[0], Desc.any((16, 16, 3, 3), torch.int8), None, descs[1], [1, 1], [1, 1], [1, 1],
            Attributes({Arg.WEIGHTS: 1, Arg.DST: 0}, {}, [Eltwise(Alg.RELU)]),
        )  # fmt: skip
        implementations.add(found.implementation)

    for i in range(100):
        one(i)
    before = resident()
    for i in range(400):
        one(i % 100)
    assert resident() - before < 3 << 20
    assert len(binding._shared.alive) <= 9
    if any(name.startswith("brgconv") for name in implementations):
        assert len(implementations) > 1


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The handles that a function of the library destroys."""
    functions, seen = library()._functions, []
    destroy = functions[name]

    def recorded(handle: c_void_p) -> int:
        seen.append(handle.value)
        return destroy(handle)

    monkeypatch.setitem(functions, name, recorded)
    return seen


@pytest.mark.parametrize("when", ["primitive_create", "primitive_desc_query", "primitive_desc_query_md"])
def test_an_interruption_destroys_each_handle_once(when, monkeypatch):
    descs, primitives = (counted(monkeypatch, f"{n}_destroy") for n in ("primitive_desc", "primitive"))
    functions = library()._functions
    real = functions[when]

    def interrupted(*args: Any) -> int:
        real(*args)
        raise KeyboardInterrupt

    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    x = Desc.strided((4, 3), torch.float32)
    with monkeypatch.context() as patch:
        patch.setitem(functions, when, interrupted)
        with pytest.raises(KeyboardInterrupt):
            binding.eltwise(Alg.RELU, x, x, 0.0, 0.0, Attributes())
    gc.collect()
    assert len(descs) == len(set(descs)) == 1
    assert len(primitives) == len(set(primitives)) == (when != "primitive_desc_query")
    assert not complaints


def test_what_could_not_be_made_goes_silently(monkeypatch):
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    for fails in (
        lambda: Desc.strided((2, -3), torch.float32),
        lambda: Attributes({99: 0}),
        lambda: Attributes(post_ops=[Eltwise(Alg.ADD)]),
        lambda: binding.eltwise(
            Alg.RELU, Desc.strided((4, 3), torch.float32), Desc.strided((3, 4), torch.float32), 0, 0, Attributes()
        ),
    ):
        with pytest.raises(OneDNNError):
            fails()
    gc.collect()
    assert not complaints
