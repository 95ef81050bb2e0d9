"""Writes docs/ops.md from the op table: ``python docs/make_ops.py``. A test keeps the file up to date."""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from dbrq.kernels import SUPPORTED_POST_OPS
from dbrq.mappings import TABLE, OpRow, Role

_INTRO = """# What dbrq does with each op

Made from `dbrq/mappings.py` by `docs/make_ops.py`; do not edit. An op that is not listed runs in float, on plain
tensors.
"""


def spellings(row: OpRow) -> str:
    functions = [getattr(f, "__name__", str(f)) for f in row.functions if getattr(f, "__name__", "") != "__get__"]
    methods = [f".{m}" for m in row.methods]
    inplace = [f".{f}" if isinstance(f, str) else f.__name__ for f in row.inplace]
    modules = [f"nn.{cls.__name__}" for cls in row.modules]
    return ", ".join(dict.fromkeys((*modules, *functions, *methods, *inplace))) or f".{row.name}"


def text() -> str:
    parts = [_INTRO]
    for role in Role:
        rows = [[row.name, spellings(row), row.reason] for row in TABLE if row.role is role]
        if rows:
            head = ["op", "spellings", "note"]
            table = tabulate(rows, head, tablefmt="github", disable_numparse=True)
            parts.append(f"## {role.name.lower()}: {role.value}\n\n{table}\n")
    dims = {0: "linear", 1: "conv1d", 2: "conv2d", 3: "conv3d"}
    fused = [[dims[n], ", ".join(sorted(names - {"none"})) or "-"] for n, names in SUPPORTED_POST_OPS.items()]
    parts.append(
        "## What fuses behind a convolution or linear layer\n\n" + tabulate(fused, ["op", "post-ops"], "github") + "\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("ops.md").write_text(text(), encoding="utf-8")
