"""One family of variants in a process of its own: ``python -m peers.worker FAMILY MODEL`` in benchmarks/.

Commands come as JSON lines and are answered by JSON lines: ``setup`` makes the variants for a batch and a number of
threads and tells how near to float each is, ``time`` runs one for a number of calls and tells the milliseconds of each.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: Gives (name, callable without arguments that returns the main output) for a model, items and a number of threads.
Family = Callable[[str, nn.Module, list[Any], Any, int], Iterator[tuple[str, Callable[[], Any]]]]

FAMILIES = {
    "torch": "peers.of_torch", "inductor": "peers.of_inductor", "onnxruntime": "peers.of_onnxruntime",
    "openvino": "peers.of_openvino", "ipex": "peers.of_ipex",
}  # fmt: skip


def batched(item: Any, batch: int) -> Any:
    """An item of one example as a batch of it."""
    if isinstance(item, Tensor):
        return item.repeat(batch, *[1] * (item.dim() - 1))
    return {name: tensor.repeat(batch, *[1] * (tensor.dim() - 1)) for name, tensor in item.items()}


def call(model: Callable, item: Any) -> Any:
    if isinstance(item, Tensor):
        return model(item)
    return model(*item) if isinstance(item, tuple) else model(**item)


def first(output: Any) -> Tensor:
    """The main output, in whatever container it comes."""
    if isinstance(output, (dict, tuple, list)):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output if isinstance(output, Tensor) else torch.as_tensor(output)


def sqnr(reference: Tensor, other: Tensor) -> float:
    noise = torch.linalg.vector_norm((reference - other).double()).item()
    return 20 * float(torch.log10(torch.linalg.vector_norm(reference.double()) / noise)) if noise else float("inf")


class Worker:
    def __init__(self, family: str, model: str, answers: Any) -> None:
        from models import compared

        self.family, self.name, self.answers = family, model, answers
        self.bench = compared(model)
        self.runs: dict[str, Callable[[], Any]] = {}

    @torch.no_grad()
    def setup(self, batch: int, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.runs.clear()
        item = batched(self.bench.test[0], batch)
        calibration = [batched(c, batch) for c in self.bench.calibration]
        expected = first(call(self.bench.model, item))
        found: dict[str, Any] = {}
        variants = importlib.import_module(FAMILIES[self.family]).variants(
            self.name, self.bench.model, calibration, item, threads
        )
        while True:
            try:
                made = next(variants, None)
                if made is None:
                    return {"variants": found}
                name, run = made
                if isinstance(run, Exception):
                    raise run
                found[name] = {"sqnr": sqnr(expected, first(run()).float().reshape(expected.shape))}
                self.runs[name] = run
            except Exception as error:
                lines = str(error).splitlines() or [""]
                found[name if made is not None else self.family] = {
                    "error": f"{type(error).__name__}: {lines[0][:160]}"
                }
                if made is None or not isinstance(made[1], Exception):
                    return {"variants": found}

    @torch.no_grad()
    def time(self, variant: str, calls: int) -> dict[str, float]:
        run = self.runs[variant]
        run()
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(calls):
            run()
        return {"ms": (time.perf_counter() - start) / calls * 1e3, "cpu": time.process_time() - cpu}

    def serve(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(self, request.pop("command"))(**request)
            print(json.dumps(answer), file=self.answers, flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes elsewhere
    Worker(sys.argv[1], sys.argv[2], answers).serve()


if __name__ == "__main__":
    main()
