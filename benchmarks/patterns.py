"""Which kernels each backend calls for the int8 patterns that TorchInductor's x86 passes know, beside PT2E with the
x86 quantizer of torchao: ``python benchmarks/patterns.py [pattern ...]`` writes ``docs/patterns.md``.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.export import Dim

import dbrq
from dbrq.inspection.comparing import sqnr

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.of_inductor import pt2e

from tests.helpers.cases import Case
from tests.helpers.int8_patterns import PATTERNS, fusions

PAGE = Path(__file__).parents[1] / "docs" / "patterns.md"
HEAD = """# Patterns

What each backend calls for the int8 patterns that TorchInductor's x86 passes know, and what PT2E with
`X86InductorQuantizer` (torchao) calls for the same model. Made by `python benchmarks/patterns.py` on {date},
torch {torch}; `tests/lowering/inductor/test_patterns.py` asserts the inductor column and the numbers.

- Each model has a layer behind the pattern that reads what it gives in int8; its call is in the lists, too.
- inductor and PT2E: external calls in the generated code, what is fused into them, and what they write. The rest is
  generated C++. torchscript and onednn: the kernels of the report, without those of layers in float.
- "=": PT2E makes the same calls. Where it makes others: its quantizer has no `conv1d`; it leaves the other operand of a
  linear layer's sum, and what a pool or `cat` reads, in float, where dbrq has it in int8 already.
- dB: SQNR to float of the inductor backend, and of PT2E.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("match", nargs="*", help="regular expressions; any of them")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    wanted = [re.compile(text) for text in options.match] or [re.compile("")]
    rows = []
    for name, pattern in PATTERNS.items():
        if any(w.search(name) for w in wanted):
            rows.append([name, *row(pattern)])
            print(rows[-1], flush=True)
    table = tabulate(rows, ["pattern", "torchscript", "onednn", "inductor", "PT2E", "dB", "PT2E dB"], tablefmt="github")
    if not options.match:
        head = HEAD.format(date=time.strftime("%Y-%m-%d"), torch=torch.__version__.partition("+")[0])
        PAGE.write_text(f"{head}\n{table}\n")


def row(pattern: Case) -> list[Any]:
    model, x = pattern.make(), pattern.example()
    calibration = [x, -x, 1.1 * x]
    quantized = dbrq.quantize(model, calibration)
    dtype = torch.bfloat16 if pattern.bfloat16 else torch.float32
    cells = []
    for backend in ("torchscript", "onednn"):
        rows = dbrq.report(dbrq.lower(quantized, x, backend=backend, dtype=dtype)).rows
        kernels = Counter(r.kernel for r in rows if r.precision == "int8" and not r.kernel.startswith("fused into"))
        cells.append(listed(kernels))
    lowered = dbrq.lower(quantized, x, backend="inductor", dtype=dtype)
    if pattern.free:
        lowered(larger(x, pattern.free))
    ours = fusions(lowered.code)  # type: ignore[arg-type]
    with torch.no_grad():
        expected, got = model(x), lowered(x)
    theirs, their_output = of_pt2e(pattern, model, x, calibration)
    return [*cells, listed(ours), "=" if theirs == ours else listed(theirs), round(sqnr(flat(expected), flat(got)), 1),
            round(sqnr(flat(expected), flat(their_output)), 1)]  # fmt: skip


def of_pt2e(pattern: Case, model: nn.Module, x: Tensor, calibration: list[Tensor]) -> tuple[Counter, Any]:
    import torch._inductor.config as config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    shapes = (dict.fromkeys(pattern.free, Dim.AUTO),) if pattern.free else None
    graph = pt2e("", model, calibration, shapes)
    narrow = torch.autocast("cpu", torch.bfloat16, enabled=pattern.bfloat16)
    with config.patch(freezing=True), torch.no_grad(), narrow:
        output, codes = run_and_get_code(torch.compile(graph, dynamic=bool(pattern.free)), x)
    return fusions("\n".join(codes)), output


def larger(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        x = torch.cat([x, x], dim)
    return x


def flat(output: Any) -> Tensor:
    leaves = output if isinstance(output, tuple) else (output,)
    return torch.cat([leaf.detach().float().flatten() for leaf in leaves])


def listed(kernels: Counter[str]) -> str:
    found = (f"{count} x {name}" if count > 1 else name for name, count in kernels.items())
    return "; ".join(found).replace("onednn.", "") or "none"


if __name__ == "__main__":
    main()
