"""The machine that a report was made on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

#: Flags of a CPU that int8 kernels depend on, as Linux names them.
_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16",
)  # fmt: skip
_VARIABLES = re.compile(r"ONEDNN_|DNNL_|ATEN_CPU_CAPABILITY|DBRQ_|OMP_|GOMP_|KMP_|MKL_NUM_THREADS|LD_PRELOAD$")


def cpu() -> dict[str, Any]:
    """Its name, cores, instruction sets, and variables that restrict them."""
    described = read("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", described, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", described, re.MULTILINE)
    cores = set(re.findall(r"^physical id\s*: (\d+)$.*?^core id\s*: (\d+)$", described, re.MULTILINE | re.DOTALL))
    known = set(flags[1].split()) if flags else set()
    return {
        "name": name[1] if name else platform.processor() or platform.machine(),
        "cores": len(cores) or os.cpu_count(),
        "usable_threads": _usable(),
        "instruction_sets": [flag for flag in _FLAGS if flag in known],
        "environment": {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.match(name)},
    }


def _usable() -> int:
    """Threads of the CPU that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: str) -> str:
    """A file of Linux about itself; "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system than Linux, or no such file there
        return ""


def torch_facts() -> dict[str, Any]:
    """torch's version, and what it computes with."""
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return {
        "version": str(torch.__version__),
        "onednn": onednn[1] if onednn else None,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
