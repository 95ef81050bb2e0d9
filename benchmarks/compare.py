"""dbrq beside its peers: ``python benchmarks/compare.py [model[:batch[:threads]] ...]``.

Each family of variants runs in a process of its own (peers/), all of them take turns in slices of one run, and a slice
in which other processes used the CPU is measured again. Prints a table of medians and of ratios to the best peer,
writes JSON with medians, minima, maxima and SQNR against float, and draws the table. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tabulate import tabulate

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16", "bert-base", "minilm")
NEEDS = {"torch": "torch", "inductor": "torchao", "onnxruntime": "onnxruntime", "openvino": "nncf"}
OURS = ("dbrq eager", "dbrq torchscript", "dbrq onednn", "dbrq onednn, float", "dbrq inductor",
        "dbrq inductor, C++ wrapper")  # fmt: skip
#: Variants that do not quantize, and so are no peers of those that do.
FLOATS = ("float eager", "float Inductor", "dbrq onednn, float")
HERE = Path(__file__).parent


@dataclass
class Measured:
    """A variant's milliseconds for each slice, and how near to float it is (dB)."""

    sqnr: float = float("nan")
    error: str = ""
    slices: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.slices)


@dataclass
class Row:
    """One model, batch and number of threads."""

    model: str
    batch: int
    threads: int
    macs: int
    peak: float
    variants: dict[str, Measured] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.model} b{self.batch}, {self.threads} thread{'s' * (self.threads > 1)}"

    @property
    def floor(self) -> float:
        """Milliseconds of the multiply-accumulates at the machine's peak."""
        return 2e3 * self.macs * self.batch / (self.peak * 1e9)

    def timed(self) -> dict[str, Measured]:
        return {name: m for name, m in self.variants.items() if m.slices}

    def best_peer(self) -> str | None:
        peers = {n: m.median for n, m in self.timed().items() if n not in OURS and n not in FLOATS}
        return min(peers, key=peers.__getitem__) if peers else None

    def ratio(self, name: str, to: str) -> tuple[float, float, float]:
        """Median, minimum and maximum of the ratio, slice by slice."""
        pairs = zip(self.variants[name].slices, self.variants[to].slices, strict=True)
        ratios = [a / b for a, b in pairs]
        return statistics.median(ratios), min(ratios), max(ratios)


class Process:
    """A family's process, which runs ``module``."""

    def __init__(self, family: str, model: str, python: str, module: str = "peers.worker") -> None:
        self.family = family
        paths = [str(HERE), str(HERE.parent / "examples"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_FREEZING": "1"}
        self.process = subprocess.Popen(
            [python, "-m", module, family, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("DBRQ_VERBOSE") else None, text=True, env=env, cwd=HERE,
        )  # fmt: skip

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the process of {self.family} ended; DBRQ_VERBOSE=1 shows what it printed")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def processes(families: dict[str, str], model: str) -> Iterator[list[Process]]:
    started = [Process(family, model, python) for family, python in families.items()]
    try:
        yield started
    finally:
        for process in started:
            process.end()


def busy() -> float:
    """Seconds of CPU that all processes have used."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, softirq, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def undisturbed(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a slice answers; asked again where other processes used the CPU beside it. It says how much it used."""
    for _ in range(4):
        time.sleep(0.05)  # others' threads may still spin
        before, start = busy(), time.perf_counter()
        got = ask()
        others = busy() - before - got["cpu"]
        if others < 0.1 * (time.perf_counter() - start) + 0.03:
            break
    return got


def measure(row: Row, running: list[Process], slices: int, seconds: float) -> None:
    owners: dict[str, Process] = {}
    for process in running:
        try:
            found = process.ask("setup", batch=row.batch, threads=row.threads)["variants"]
        except RuntimeError as error:
            found = {process.family: {"error": str(error)}}
        for name, facts in found.items():
            row.variants[name] = Measured(facts.get("sqnr", float("nan")), facts.get("error", ""))
            if "error" not in facts:
                owners[name] = process
    calls = {}
    for name, process in owners.items():
        process.ask("time", variant=name, calls=3)
        calls[name] = max(1, int(seconds * 1e3 / process.ask("time", variant=name, calls=2)["ms"]))
    for _ in range(slices):
        for name, process in owners.items():
            got = undisturbed(functools.partial(process.ask, "time", variant=name, calls=calls[name]))
            row.variants[name].slices.append(got["ms"])


def table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.timed()))
    judged = [name for name in ("dbrq onednn", "dbrq inductor", "dbrq inductor, C++ wrapper") if name in names]
    head = ["", *names, "best peer", *(f"{name} / best peer (min-max)" for name in judged), "floor"]
    lines = []
    for row in rows:
        timed, best = row.timed(), row.best_peer()
        cells = [f"{timed[n].median:.2f} ({timed[n].sqnr:.1f} dB)" if n in timed else "-" for n in names]
        ratios = [
            "{:.2f} ({:.2f}-{:.2f})".format(*row.ratio(name, best)) if best is not None and name in timed else "-"
            for name in judged
        ]
        lines.append([row.label, *cells, best or "-", *ratios, f"{row.floor:.1f}"])
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def as_json(rows: list[Row]) -> str:
    def facts(measured: Measured) -> dict[str, Any]:
        if not measured.slices:
            return {"error": measured.error}
        return {"median": measured.median, "minimum": min(measured.slices), "maximum": max(measured.slices),
                "sqnr": measured.sqnr, "slices": measured.slices}  # fmt: skip

    return json.dumps(
        {
            "date": time.strftime("%Y-%m-%d"), "cpu": cpu(),
            "rows": [
                {**{k: v for k, v in asdict(row).items() if k != "variants"}, "floor": row.floor,
                 "variants": {name: facts(m) for name, m in row.variants.items()}}
                for row in rows
            ],
        }, indent=1,
    )  # fmt: skip


def picture(rows: list[Row], path: Path) -> None:
    """Milliseconds relative to the best peer, a group of bars for each row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n in dict.fromkeys(n for row in rows for n in row.timed()) if n not in FLOATS]
    figure, axes = plt.subplots(figsize=(1.6 * len(rows) + 3, 4.5))
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        found = [(j, row) for j, row in enumerate(rows) if name in row.timed() and row.best_peer()]
        heights = [row.ratio(name, row.best_peer())[0] for _, row in found]  # type: ignore[arg-type]
        axes.bar([j + (i - len(names) / 2) * width for j, _ in found], heights, width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(0, 3)
    axes.set_ylabel("time relative to the best peer (lower is faster)")
    axes.set_xticks(range(len(rows)), [row.label for row in rows], rotation=25, ha="right")
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def cpu() -> str:
    with open("/proc/cpuinfo") as info:
        names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def chosen(specs: list[str]) -> list[tuple[str, int, int]]:
    """model[:batch[:threads]]; all models, batches and threads by default."""
    if specs:
        parts = [(spec.split(":") + ["1", str(os.cpu_count())][len(spec.split(":")) - 1 :])[:3] for spec in specs]
        return [(model, int(batch), int(threads)) for model, batch, threads in parts]
    return [
        (model, batch, threads)
        for model in MODELS
        for batch in (1, 16 if model.startswith(("res", "mob")) else 8)
        for threads in (os.cpu_count() or 1, 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help="model[:batch[:threads]]; all of them by default")
    parser.add_argument("--families", nargs="*", default=list(NEEDS), help="of " + ", ".join([*NEEDS, "ipex"]))
    parser.add_argument("--ipex-python", help="python of an environment with Intel's extension")
    parser.add_argument("--slices", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a slice")
    parser.add_argument("--json", type=Path, help="where to write JSON")
    parser.add_argument("--picture", type=Path, help="where to draw the table (needs matplotlib)")
    options = parser.parse_args()
    families = {f: sys.executable for f in options.families if f in NEEDS and find_spec(NEEDS[f])}
    if options.ipex_python:
        families["ipex"] = options.ipex_python
    sys.path.insert(0, str(HERE))
    from machine import macs_of, peak

    wanted = chosen(options.rows)
    rows: list[Row] = []
    for model in dict.fromkeys(m for m, _, _ in wanted):
        macs = macs_of(model)
        with processes(families, model) as running:
            for _, batch, threads in (w for w in wanted if w[0] == model):
                row = Row(model, batch, threads, macs, peak(threads))
                measure(row, running, options.slices, options.seconds)
                rows.append(row)
                print(table([row]), flush=True)
                for name, measured in row.variants.items():
                    if measured.error:
                        print(f"  {name}: {measured.error}", flush=True)
                if options.json:
                    options.json.write_text(as_json(rows))
    print(f"\n{cpu()}, {time.strftime('%Y-%m-%d')}; milliseconds (SQNR against float); floor: multiply-accumulates at "
          f"the measured int8 peak\n\n{table(rows)}")  # fmt: skip
    if options.picture:
        picture(rows, options.picture)


if __name__ == "__main__":
    main()
