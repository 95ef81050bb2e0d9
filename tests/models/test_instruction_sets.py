"""The same answer on older CPUs: instruction sets below this machine's own, each in a process of its own.

oneDNN reads ``ONEDNN_MAX_CPU_ISA`` and ATen ``ATEN_CPU_CAPABILITY`` once, when they start. This file is the test, and
as a script it is what runs in those processes: it prints one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from tests import ROOT

ONEDNN = ("SSE41", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "")
ATEN = ("default", "avx2", "avx512", "")
#: Every value of both variables at least once; DBRQ_FULL_MATRIX=1 runs the product.
PAIRS = [("SSE41", "default"), ("AVX2", "avx2"), ("AVX2_VNNI", ""), ("AVX512_CORE", "avx512"),
         ("AVX512_CORE_VNNI", "default"), ("", "avx2")]  # fmt: skip
if os.environ.get("DBRQ_FULL_MATRIX") == "1":
    PAIRS = list(itertools.product(ONEDNN, ATEN))
#: Instruction sets on which sums of two products of 8 bits saturate at 16.
SATURATING = ("SSE41", "AVX2", "AVX512_CORE")


def measure() -> dict[str, Any]:
    """Each model converted and lowered here: what is wrong beside fake quantization, and how far from float it is."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig

    import dbrq
    from dbrq import kernels
    from tests.fuzz.judge import Reference, problem, seeded
    from tests.helpers.judging import sqnr
    from tests.helpers.models import Call
    from tests.helpers.running import floats

    torch.manual_seed(0)
    torch.set_num_threads(1)

    def convs(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        x = F.relu(m.deep(x) + x)
        x = m.pool(m.sum(x) + x * 0.5)
        return m.last(torch.cat([F.avg_pool2d(x, 2), F.max_pool2d(x, 2, ceil_mode=False)], 1).mean((2, 3)))

    def volume(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.up(F.hardswish(m.line(x)) + m.side(x)).flatten(2).mean(-1)

    def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in m.qkv(m.norm(x)).chunk(3, -1))
        x = x + m.out(((q @ k.mT) * 0.35).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
        return x + m.down(F.gelu(m.up(x)))

    def block(ins: int, outs: int, kernel: int, **options: Any) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(ins, outs, kernel, **options), nn.BatchNorm2d(outs), nn.ReLU6())

    dynamic = QConfigMapping().set_global(default_dynamic_qconfig)
    models: dict[str, tuple[nn.Module, torch.Tensor, Any]] = {
        "convs": (
            Call(convs, first=block(3, 16, 3, stride=2, padding=1), deep=block(16, 16, 3, padding=1, groups=16),
                 sum=nn.Conv2d(16, 16, 1), pool=nn.MaxPool2d(3, 2, 1), last=nn.Linear(32, 10)),
            torch.randn(2, 3, 32, 32), None,
        ),
        "lines and transposed": (
            Call(volume, line=nn.Conv1d(5, 12, 3, padding=2, dilation=2), side=nn.Conv1d(5, 12, 1),
                 up=nn.ConvTranspose1d(12, 7, 4, stride=2)),
            torch.randn(3, 5, 20), None,
        ),
        "attention": (
            Call(attention, norm=nn.LayerNorm(32), qkv=nn.Linear(32, 96), out=nn.Linear(32, 32), up=nn.Linear(32, 64),
                 down=nn.Linear(64, 32)),
            torch.randn(2, 9, 32), None,
        ),
        "dynamic linear": (nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 10)), torch.randn(5, 48), dynamic),
        "lstm": (Call(lambda m, x: m.last(m.lstm(x)[0]), lstm=nn.LSTM(24, 16, batch_first=True), last=nn.Linear(16, 4)),
                 torch.randn(3, 7, 24), dynamic),
        # Weights and activations at the ends of their ranges, where products saturate without VNNI and 7 bits.
        "large products": (nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8)), torch.rand(4, 256), None),
    }  # fmt: skip
    with torch.no_grad():
        models["large products"][0][0].weight.uniform_(0.98, 1.0)  # type: ignore[index, union-attr]

    found: dict[str, Any] = {
        "exact": kernels.has_exact_int8_dot(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    for name, (model, x, mapping) in models.items():
        model.eval()
        converted = dbrq.quantize(model, [x, x * 0.9], mapping)
        plain = seeded(model, (x,), 0)
        runs = {"converted": converted, **{b: dbrq.lower(converted, x, backend=b) for b in ("torchscript", "onednn")}}
        recurrent = name == "lstm"  # the test suite's fake quantization has no such op
        reference = None if recurrent else Reference(model, converted)
        expected = plain if reference is None else seeded(reference, (x,), 0)
        for run, lowered in runs.items():
            result = seeded(lowered, (x,), 0)
            wrong = (
                ""
                if reference is None
                else problem(result, expected, plain, lambda r=reference, a=x: r.dithered((a,), 0))
            )
            decibels = min(sqnr(f, r) for f, r in zip(floats(plain), floats(result), strict=True))
            found[f"{name} {run}"] = {"wrong": wrong, "decibels": round(decibels, 1)}
    return found


@pytest.mark.parametrize(("onednn", "aten"), PAIRS, ids=[f"onednn-{a or 'own'}-aten-{b or 'own'}" for a, b in PAIRS])
def test_numbers_hold_on_older_cpus(onednn: str, aten: str) -> None:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    for name, value in (("ONEDNN_MAX_CPU_ISA", onednn), ("ATEN_CPU_CAPABILITY", aten)):
        environment.pop(name, None)
        if value:
            environment[name] = value
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    exact, capability = found.pop("exact"), found.pop("capability")
    assert not (exact and onednn in SATURATING), "the instruction set was not lowered"
    assert aten in ("", capability.lower())
    assert not {name: row["wrong"] for name, row in found.items() if row["wrong"]}
    least = 30.0 if exact else 25.0  # 7 bits cost 6 dB
    assert not {name: row["decibels"] for name, row in found.items() if row["decibels"] < least}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure()))
