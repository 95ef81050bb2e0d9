"""Every architecture of torchvision, one of each family of timm, and small configurations of transformers: what works,
how much runs in int8, how near to float: ``python benchmarks/zoo.py``.

Each model is built with random weights in a process of its own, calibrated on two shapes, converted, run at a third
shape, and lowered with both backends. Results are lines of JSON in ``--results``; a run that was interrupted goes on
where it stopped. ``--peers`` does the same with FX graph mode and PT2E (accuracy only), ``--table`` writes
``docs/zoo.md`` from the results.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import multiprocessing
import os
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from architectures import Architecture, every
from peers.worker import call
from tabulate import tabulate
from torch import Tensor, nn

import dbrq
from dbrq.inspection.comparing import sqnr

#: Called with what is known so far, since the process may die at any time.
Tell = Callable[..., None]

STAGES = ("build", "prepare", "calibrate", "convert", "run", "third shape", "torchscript", "onednn")
TABLE = Path(__file__).parents[1] / "docs" / "zoo.md"

# Comparing outputs


def leaves(output: Any) -> Iterator[Tensor]:
    """The floating point tensors of an output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from leaves(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from leaves(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from leaves(getattr(output, field.name))


def structure(output: Any) -> Any:
    """The classes of an output all the way down."""
    name = f"{type(output).__module__}.{type(output).__qualname__}"
    if isinstance(output, Tensor):
        return [name, str(output.dtype), output.dim()]
    if isinstance(output, Mapping):
        return [name, [[str(key), structure(value)] for key, value in output.items()]]
    if isinstance(output, (list, tuple)):
        return [name, [structure(value) for value in output]]
    return name


def decibels(expected: Any, got: Any) -> float | None:
    """SQNR of all floating point leaves together; None where they cannot be compared."""
    a, b = list(leaves(expected)), list(leaves(got))
    if not a or [x.shape for x in a] != [x.shape for x in b]:
        return None
    a, b = (torch.cat([leaf.double().flatten() for leaf in given]) for given in (a, b))
    known = torch.isfinite(a)
    return min(sqnr(a[known], b[known]), 999.0) if known.any() else None


# What is measured

#: So many items of the calibration data have one shape. Peers get these: a model exported by PT2E takes no other shape.
ONE_SHAPE = 3


def items(architecture: Architecture) -> tuple[list[Any], Any, Any]:
    """Calibration data of two shapes, a held-out item of the first of them, and one of a third shape."""
    torch.manual_seed(1)
    calibration = [architecture.item(number) for number in (0, 0, 0, 1, 1)]
    return calibration, architecture.item(0), architecture.item(2)


def arguments(item: Any) -> Any:
    """A fresh copy, since forward may change what it is given."""
    return copy.deepcopy(item)


@torch.no_grad()
def of_dbrq(architecture: Architecture, tell: Tell) -> None:
    """All stages; tells the name of each before it begins."""
    tell(stage="build")
    model = architecture.build()
    calibration, held_out, third = items(architecture)
    expected = call(model, arguments(held_out))
    tell(sensitivity=_sensitivity(model, held_out, expected), stage="prepare")
    prepared = dbrq.prepare(model, arguments(calibration[0]))
    tell(stage="calibrate")
    for item in calibration[:ONE_SHAPE]:
        call(prepared, arguments(item))
    tell(peer_sqnr=decibels(expected, call(dbrq.convert(prepared), arguments(held_out))))
    for item in calibration[ONE_SHAPE:]:
        call(prepared, arguments(item))
    tell(stage="convert")
    quantized = dbrq.convert(prepared)
    report = dbrq.report(quantized)
    in_float = [row for row in report.rows if row.macs and row.precision == "float"]
    tell(coverage=report.coverage, coverage_all=report.coverage_all, ops=len(report.rows),
         in_float=[f"{row.path} {row.op}: {row.reason}" for row in in_float[:5]], stage="run")  # fmt: skip
    del prepared
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = call(quantized, arguments(held_out))
        tell(sqnr=decibels(expected, got), containers=structure(expected) == structure(got), stage="third shape")
        try:
            tell(third_sqnr=decibels(call(model, arguments(third)), call(quantized, arguments(third))))
        except Exception as error:  # what is lowered is the example's path, so that comes next whatever happened
            tell(**{"third shape": reason(error)})
    tell(warned=[str(w.message).splitlines()[0][:200] for w in warned if "dbrq" in str(w.message)][:3])
    for backend in ("torchscript", "onednn"):
        tell(stage=backend)
        try:
            lowered = dbrq.lower(quantized, arguments(held_out), backend=backend)
            tell(**{f"{backend}_sqnr": decibels(expected, call(lowered, arguments(held_out)))})
        except Exception as error:
            tell(**{backend: reason(error)})
            continue
        try:  # a graph of one path may say no to a third shape, but may not be wrong
            result = decibels(call(model, arguments(third)), call(lowered, arguments(third)))
            tell(**{f"{backend}_third_sqnr": result})
        except Exception as error:
            tell(**{f"{backend}_third": reason(error)})
        del lowered
    tell(stage="")


def _sensitivity(model: nn.Module, item: Any, expected: Any) -> float | None:
    """SQNR of the float model with 1 % (40 dB) of noise on its weights: what no quantization of this model can much
    exceed."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    for parameter in noisy.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(noise * (0.01 * parameter.norm() / noise.norm().clamp(min=1e-12)))
    return decibels(expected, call(noisy, arguments(item)))


@torch.no_grad()
def of_fx(architecture: Architecture, tell: Tell) -> None:
    """FX graph mode, engine onednn, its default qconfigs."""
    from peers.of_torch import fx_quantized

    _peer(architecture, tell, lambda model, calibration: fx_quantized(model, calibration))


@torch.no_grad()
def of_pt2e(architecture: Architecture, tell: Tell) -> None:
    """PT2E with the x86 quantizer, not compiled."""
    from peers.of_inductor import pt2e

    _peer(architecture, tell, lambda model, calibration: pt2e(architecture.name, model, calibration))


def _peer(architecture: Architecture, tell: Tell, make: Callable[[nn.Module, list[Any]], nn.Module]) -> None:
    tell(stage="build")
    model = architecture.build()
    calibration, held_out, _ = items(architecture)
    expected = call(model, arguments(held_out))
    tell(stage="convert")
    quantized = make(model, [arguments(item) for item in calibration[:ONE_SHAPE]])
    tell(stage="run")
    tell(sqnr=decibels(expected, call(quantized, arguments(held_out))), stage="")


RUNNERS: dict[str, Callable[[Architecture, Tell], None]] = {"dbrq": of_dbrq, "FX": of_fx, "PT2E": of_pt2e}

# Processes


def reason(error: BaseException) -> str:
    """The type, the first lines, and the innermost place in dbrq."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    message = text[0][:200]
    if isinstance(error, dbrq.QuantizationError):
        message = "; ".join(text)[:400]
    elif len(text) > 1 and isinstance(error, RuntimeError):  # TorchScript puts the cause last
        message = f"{message} ... {text[-1][:160]}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/dbrq/" in f.filename]
    where = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def _child(architecture: Architecture, runner: str, answers: Connection) -> None:
    known: dict[str, Any] = {}

    def tell(**what: Any) -> None:
        known.update(what)
        answers.send(what)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # whatever libraries print
        os.dup2(nowhere, stream)
    try:
        RUNNERS[runner](architecture, tell)
    except BaseException as error:
        answers.send({"error": reason(error), "trace": traceback.format_exc()[-3000:]})


@dataclasses.dataclass
class Job:
    """One model with one runner in a process of its own."""

    architecture: Architecture
    runner: str
    limit: float

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")  # libraries are imported once
        self.answers, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(self.architecture, self.runner, theirs), daemon=True)
        self.started = time.monotonic()
        self.process.start()
        theirs.close()
        self.row: dict[str, Any] = {
            "library": self.architecture.library, "name": self.architecture.name, "runner": self.runner,
            "date": datetime.date.today().isoformat(), "stage": "build",
        }  # fmt: skip

    def done(self) -> bool:
        """Takes what the process has told; whether it has ended, which it must within the limit."""
        try:
            while self.answers.poll():
                self.row.update(self.answers.recv())
        except EOFError:
            self.process.join()
            if code := self.process.exitcode:
                self.row["error"] = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        else:
            if time.monotonic() - self.started < self.limit:
                return False
            self.process.kill()
            self.process.join()
            self.row["error"] = f"not done after {self.limit:.0f} s"
        self.answers.close()
        self.row["seconds"] = round(time.monotonic() - self.started, 1)
        return True


def run(architectures: list[Architecture], runners: list[str], results: Path, workers: int, limit: float) -> None:
    """All that ``results`` does not hold yet, ``workers`` at a time."""
    known = {(row["library"], row["name"], row["runner"]) for row in read(results)}
    waiting = [(a, r) for a in architectures for r in runners if (a.library, a.name, r) not in known]
    total = len(waiting)
    running: list[Job] = []
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(Job(*waiting.pop(0), limit))
            wait([job.answers for job in running], timeout=1)
            for job in [job for job in running if job.done()]:
                running.remove(job)
                print(json.dumps(job.row), file=file, flush=True)
                number = total - len(waiting) - len(running)
                print(
                    f"{number}/{total} {job.runner} {job.architecture.library}/{job.architecture.name}:",
                    outcome(job.row),
                )


def read(results: Path) -> list[dict[str, Any]]:
    """The rows; of several of one model and runner the last."""
    if not results.exists():
        return []
    rows = [json.loads(line) for line in results.read_text().splitlines() if line.strip()]
    return list({(row["library"], row["name"], row["runner"]): row for row in rows}.values())


# Reading results


def failures(row: dict[str, Any]) -> dict[str, str]:
    """Stage -> why it failed."""
    found = {stage: row[stage] for stage in STAGES if stage in row}
    if "error" in row:
        found[row["stage"] or "end"] = row["error"]
    return found


def outcome(row: dict[str, Any]) -> str:
    """One line for whoever watches."""
    known = [f"{key} {row[key]:.3g}" for key in ("sqnr", "third_sqnr", "torchscript_sqnr", "onednn_sqnr", "coverage",
                                                "sensitivity") if row.get(key) is not None]  # fmt: skip
    failed = [f"{stage}: {why[:150]}" for stage, why in failures(row).items()]
    return ", ".join([*known, *failed, f"{row.get('seconds', 0):.0f} s"])


@dataclasses.dataclass
class Verdict:
    """One model's rows, judged."""

    ours: dict[str, Any]
    peers: dict[str, dict[str, Any]]

    @property
    def works(self) -> bool:
        return not failures(self.ours) and not self.ours.get("warned") and bool(self.ours.get("containers"))

    @property
    def covered(self) -> bool:
        """At least 99 % of the multiply-accumulates of convolutions and linear layers, if it has any."""
        return self.ours.get("coverage", 0) >= 0.99

    @property
    def best_peer(self) -> float | None:
        known = [row["sqnr"] for row in self.peers.values() if row.get("sqnr") is not None]
        return max(known, default=None)

    @property
    def accurate(self) -> bool:
        """No worse by 1 dB than the better peer, or at least 10 dB where no peer runs."""
        ours = self.ours.get("sqnr" if self.best_peer is None else "peer_sqnr")
        if ours is None:
            return False
        return ours >= 10 if self.best_peer is None else ours >= self.best_peer - 1


def verdicts(rows: list[dict[str, Any]]) -> dict[str, dict[str, Verdict]]:
    """Library -> name -> verdict."""
    found: dict[str, dict[str, Verdict]] = {}
    for row in rows:
        if row["runner"] == "dbrq":
            found.setdefault(row["library"], {})[row["name"]] = Verdict(row, {})
    for row in rows:
        if row["runner"] != "dbrq" and row["name"] in found.get(row["library"], {}):
            found[row["library"]][row["name"]].peers[row["runner"]] = row
    return found


def document(rows: list[dict[str, Any]]) -> str:
    """``docs/zoo.md``."""
    judged = verdicts(rows)
    summary, details = [], []
    for library, models in judged.items():
        count = len(models)
        shares = [sum(getattr(v, what) for v in models.values()) for what in ("works", "covered", "accurate")]
        compared = sum(v.best_peer is not None for v in models.values())
        summary.append([library, count, *(f"{share} ({share / count:.0%})" for share in shares), compared])
        head = [
            "model",
            "works",
            "int8",
            "dbrq",
            "third shape",
            "torchscript",
            "onednn",
            "one shape",
            "FX",
            "PT2E",
            "1 % noise",
        ]
        details += [f"\n## {library}\n", _markdown([_line(name, v) for name, v in models.items()], head)]
        failed = {name: _why(v) for name, v in models.items()}
        details += ["\nWhat fails, and why:\n", *(f"- {name}: {why}" for name, why in failed.items() if why)]
    dates = sorted({row["date"] for row in rows})
    head = ["library", "models", "work", ">= 99 % int8", "accurate", "of these beside a peer"]
    return "\n".join([
        "# The zoo", "",
        f"Made by `python benchmarks/zoo.py --table` from runs of {' to '.join(sorted({dates[0], dates[-1]}))}, "
        f"torch {torch.__version__.partition('+')[0]}. Weights are random, so these numbers say how well the "
        "arithmetic is kept, not what a task would lose.", "",
        "*Works*: prepared, calibrated on two shapes, converted, run at a third shape without leaving int8, lowered "
        "with both backends and run; output containers as in float. *int8*: share of the multiply-accumulates of "
        "convolutions and linear layers. *Accurate*: SQNR to float on data not calibrated on no worse by 1 dB than the "
        "better of FX graph mode and PT2E, all calibrated on the same data of *one shape*, or 10 dB where neither "
        "runs. The columns in between are SQNR in dB; *1 % noise* is that of the float model with so much noise on its "
        "weights: where it is small, the model amplifies "
        "any rounding.", "",
        "*torchvision* is classification and segmentation, *torchvision-other* detection, video and optical flow. "
        "A decibel is about the scatter of such numbers: mobilenet_v3_large has 16.1 dB calibrated on three batches "
        "and 17.3 on five.", "",
        _markdown(summary, head), *details, "",
    ])  # fmt: skip


def _markdown(rows: list[list[Any]], head: list[str]) -> str:
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def _line(name: str, v: Verdict) -> list[str]:
    def number(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.1f}" if row.get(key) is not None else "-"

    keys = ("sqnr", "third_sqnr", "torchscript_sqnr", "onednn_sqnr", "peer_sqnr")
    coverage = f"{v.ours['coverage']:.1%}" if "coverage" in v.ours else "-"
    peers = [number(v.peers.get(peer, {}), "sqnr") for peer in ("FX", "PT2E")]
    return [name, "yes" if v.works else "no", coverage, *(number(v.ours, key) for key in keys), *peers,
            number(v.ours, "sensitivity")]  # fmt: skip


def _why(v: Verdict) -> str:
    found = [f"{stage}: `{why[:200]}`" for stage, why in failures(v.ours).items()]
    found += [f"warned: `{text}`" for text in v.ours.get("warned", [])[:1]]
    if v.ours.get("containers") is False:
        found.append("other output containers")
    if "coverage" in v.ours and not v.covered:
        found.append(f"coverage {v.ours['coverage']:.1%}, first in float: {(v.ours.get('in_float') or ['nothing'])[0]}")
    if "sqnr" in v.ours and not v.accurate:
        peer = "" if v.best_peer is None else f", the better peer has {v.best_peer:.1f}"
        ours = v.ours.get("sqnr" if v.best_peer is None else "peer_sqnr")
        found.append(f"SQNR {'unknown' if ours is None else f'{ours:.1f}'} dB{peer}")
    return "; ".join(found).replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("match", nargs="*", help="regular expressions for library/name; any of them")
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"), help="lines of JSON, appended to")
    parser.add_argument("--peers", action="store_true", help="also FX graph mode and PT2E (slow)")
    parser.add_argument("--workers", type=int, default=2, choices=(1, 2))
    parser.add_argument("--limit", type=float, default=180, help="seconds for each model and library")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--table", action="store_true", help=f"write docs/{TABLE.name} from the results, run nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.table:
        TABLE.write_text(document(read(options.results)))
        return
    wanted = [re.compile(text) for text in options.match] or [re.compile("")]
    chosen = [a for a in every() if any(w.search(f"{a.library}/{a.name}") for w in wanted)]
    if options.list:
        print("\n".join(f"{a.library}/{a.name}" for a in chosen))
        return
    torch.set_num_threads(1)  # before the first fork: a pool of threads would not survive it
    run(chosen, list(RUNNERS) if options.peers else ["dbrq"], options.results, options.workers, options.limit)


if __name__ == "__main__":
    main()
