"""Looks for int8 convolutions that are computed wrong on this CPU: ``python benchmarks/kernel_scan.py --count 2000``.

Random geometries (thin images, odd channels, groups, strides, paddings, dilations, one frame) and the families that
went wrong somewhere, each against integers computed exactly. ``--through torch`` (the default) calls torch's kernels as
they are: what is wrong there and is no row of ``dbrq/kernels/known_faults.py`` should become one. ``--through dbrq``
calls what the library makes of them, with self-checks off: nothing may be wrong. ``--isa AVX2`` and the like (the words
of ``ONEDNN_MAX_CPU_ISA``) stand in for older CPUs. Geometries run in child processes, so that a crash is a line of the
output too.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dbrq import kernels, selfcheck
from dbrq.kernels import PackedConv, QParams
from dbrq.kernels.known_faults import Geometry, fault_of

CHUNK = 100


def geometries(seed: int) -> Iterator[Geometry]:
    """Random geometries without end, small enough to be checked in full."""
    rng = random.Random(seed)
    while True:
        n = rng.choice((1, 2, 2, 2, 3))
        family = rng.choice(("any", "any", "thin", "patches", "wide kernel", "one frame"))
        groups = rng.choice((1, 1, 1, 2, 3, 4, 8, 16, 32))
        inner = rng.choice((1, 1, 2, 3, 4, 8, 12, 16, 17, 24, 32, 48, 64, 96))
        outer = rng.choice((1, 2, 3, 4, 8, 16, 17, 24, 32, 64))
        if groups > 4:
            inner, outer = rng.choice((1, 1, 1, 2, 4, 6)), rng.choice((1, 1, 2, 3))
        kernel = [rng.choice((1, 1, 2, 3, 3, 4, 5, 7)) for _ in range(n)]
        if family in ("patches", "wide kernel"):
            kernel[-1] = rng.choice((4, 6, 7, 8, 14, 16, 32))
        stride = [rng.choice((1, 1, 2, 3)) for _ in range(n)]
        padding = [rng.choice((0, 0, 1, 2, 3)) for _ in range(n)]
        dilation = [rng.choice((1, 1, 1, 2, 3)) if k > 1 else 1 for k in kernel]
        if family == "patches":
            stride, padding, dilation = list(kernel), [0] * n, [1] * n
        sizes = [rng.choice((1, 2, 3, 5, 8, 12, 20)) for _ in range(n)]
        extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        sizes = [max(s, e - 2 * p) for s, e, p in zip(sizes, extent, padding, strict=True)]
        if family == "thin":  # one column
            sizes[-1] = max(1, extent[-1] - 2 * padding[-1] + rng.randrange(stride[-1]))
        if family == "one frame" and n == 3:
            padding[0] = rng.choice((1, 2)) if kernel[0] > 1 else padding[0]
            sizes[0] = max(1, extent[0] - 2 * padding[0])
        geometry = Geometry(
            (rng.choice((1, 1, 2, 3)), inner * groups, *sizes), outer * groups, tuple(kernel), tuple(stride),
            tuple(padding), tuple(dilation), groups,
        )  # fmt: skip
        if geometry.macs < 60_000_000:
            yield geometry


def compare(geometry: Geometry, zero_point: int, through: str, top: int) -> str:
    """What is wrong with a convolution of random integers, "" if nothing is."""
    q = selfcheck.integers(geometry.shape, 0, top, torch.uint8, seed=1)
    shape = (geometry.outputs, geometry.shape[1] // geometry.groups, *geometry.kernel)
    weight = selfcheck.integers(shape, -127, 127, torch.int8, seed=2)
    scale = torch.ones(geometry.outputs)
    n = len(geometry.kernel)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    options = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    levels = q.to(torch.float64) - zero_point
    expected = convolution(levels, weight.to(torch.float64), None, *options)
    got = _run(geometry, q, weight, scale, zero_point, through)
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}"
    wrong = (got.to(torch.float64) - expected).abs() > 1e-6 * expected.abs().max() + 1.0
    return f"{int(wrong.sum())} of {wrong.numel()} wrong" if bool(wrong.any()) else ""


def _run(geometry: Geometry, q: Tensor, weight: Tensor, scale: Tensor, zero_point: int, through: str) -> Tensor:
    lists = [list(v) for v in (geometry.stride, geometry.padding, geometry.dilation)]
    if through == "dbrq":
        return PackedConv(weight, scale, None, *lists, geometry.groups)(q, QParams(1.0, zero_point))
    if len(geometry.kernel) == 2:
        q = q.contiguous(memory_format=torch.channels_last)
    packed = torch.ops.onednn.qconv_prepack(weight, scale, 1.0, 0, *lists, geometry.groups, list(geometry.shape))
    zeros = torch.zeros(geometry.outputs, dtype=torch.int64)
    return torch.ops.onednn.qconv_pointwise(
        q, 1.0, zero_point, packed, scale, zeros, None, *lists, geometry.groups, 1.0, 0, torch.float32, "none", [], ""
    )


def child(seed: int, start: int, through: str) -> None:
    """Try geometries ``start`` to ``start + CHUNK``, each told before it runs."""
    torch.set_num_threads(2)
    selfcheck.set_self_check(False)
    top = 255 if kernels.has_exact_int8_dot() else 127
    stream = geometries(seed)
    for index, geometry in zip(range(start + CHUNK), stream, strict=False):
        if index < start:
            continue
        for zero_point in (0, 37):
            known = fault_of(geometry)
            print(f"try {index} {geometry}, zero point {zero_point}", flush=True)
            found = compare(geometry, zero_point, through, top)
            if found:
                row = "no row of the table" if known is None else f"known: {known.name}"
                print(f"wrong {geometry}, zero point {zero_point}: {found} ({row})", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many geometries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through", choices=("torch", "dbrq"), default="torch")
    parser.add_argument("--isa", default="", help="as ONEDNN_MAX_CPU_ISA")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(options.seed, options.child, options.through)
        return 0
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": options.isa} if options.isa else {})}
    lines: list[str] = []
    tried, start = 0, 0
    while start < options.count:
        command = [sys.executable, __file__, "--seed", str(options.seed), "--through", options.through]
        run = subprocess.run([*command, "--child", str(start)], env=environment, capture_output=True, text=True)
        told = run.stdout.splitlines()
        trials = [line for line in told if line.startswith("try ")]
        lines += [line for line in told if line.startswith("wrong ")]
        tried += len(trials)
        if run.returncode:
            if not trials:
                print(run.stderr, file=sys.stderr)
                return 2
            _, index, geometry = trials[-1].split(" ", 2)
            lines.append(f"crash ({run.returncode}) {geometry}")
            start = int(index) + 1
        else:
            start += CHUNK
    print("\n".join(lines))
    print(f"{tried} convolutions, {len(lines)} wrong")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
