"""The machine's int8 peak and its memory's bandwidth, and how much a model computes: what a lower bound of its time is
made of.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from dbrq.lowering.onednn import binding
from dbrq.lowering.onednn.binding import Arg, Attributes, Desc, Memory

#: Rows, depth and width: from what fits caches to what does not.
_GEMMS = ((512, 1024, 1024), (1024, 2048, 1024), (784, 512, 512), (256, 3072, 768))


@functools.cache
def peak(threads: int) -> float:
    """Billions of operations a second (two for each multiply-accumulate) of the best of some int8 GEMMs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(
            _gops(*shape) for shape in ((512, 1024, 1024), (1024, 2048, 1024), (784, 512, 512), (256, 3072, 768))
        )
    finally:
        torch.set_num_threads(before)


def _gops(rows: int, depth: int, width: int) -> float:
    src, dst = Desc.strided((rows, depth), torch.uint8), Desc.strided((rows, width), torch.uint8)
    attributes = Attributes(scales={Arg.DST: 0})
    primitive = binding.matmul(src, Desc.any((depth, width), torch.int8), None, dst, attributes)
    layout = primitive.layout(Arg.WEIGHTS, (depth, width), torch.int8)
    x, y = torch.randint(0, 255, (rows, depth), dtype=torch.uint8), torch.zeros(rows, width, dtype=torch.uint8)
    weight, scale = torch.zeros(layout.size, dtype=torch.int8), torch.tensor([100.0])
    memories = {
        Arg.SRC: Memory(src, x.data_ptr()), Arg.WEIGHTS: Memory(layout, weight.data_ptr()),
        Arg.DST: Memory(dst, y.data_ptr()),
        Arg.SCALES | Arg.DST: Memory(Desc.strided((1,), torch.float32), scale.data_ptr()),
    }  # fmt: skip
    binding.execute(primitive, memories)
    best, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(5):
            binding.execute(primitive, memories)
        best = min(best, (time.perf_counter() - start) / 5)
    return 2e-9 * rows * depth * width / best


@functools.cache
def bandwidth(threads: int, size: int = 256 << 20) -> float:
    """Billions of bytes that are read from memory in a second: the best of some passes over what no cache holds.

    Not by sums of int8, which torch makes one by one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        floats, integers = torch.ones(size // 4), torch.ones(size, dtype=torch.int8)
        passes = (floats.sum, floats.amax, integers.amax, functools.partial(torch.dot, floats, floats))
        return max(size / _seconds(read) for read in passes for _ in range(5)) / 1e9
    finally:
        torch.set_num_threads(before)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@functools.cache
def macs_of(model: str) -> int:
    """Multiply-accumulates of one example, matmuls and attention included."""
    from models import compared

    import dbrq

    bench = compared(model)
    return sum(row.macs for row in dbrq.report(dbrq.prepare(bench.model, bench.test[0])).rows)
