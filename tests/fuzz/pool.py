"""Programs in processes of their own, which may crash or hang: each such end is put down to the program that ran."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .program import Program, Statement
from .runs import Finding

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What became of one program.

    Attributes:
        seed: the program's.
        findings: what it met.
        seconds: what each step took.
        before: how many programs had run in the same process, which some failures depend on.
    """

    seed: int
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    before: int = 0


def as_json(program: Program) -> dict[str, Any]:
    return asdict(program)


def from_json(data: dict[str, Any]) -> Program:
    statements = tuple(
        Statement(s["rule"], tuple(s["init"]), tuple(s["lines"]), tuple(s["made"])) for s in data["statements"]
    )
    calls = tuple(tuple(call) for call in data["calls"])
    return Program(**{**data, "statements": statements, "calls": calls, "parameters": tuple(data["parameters"])})


class Worker:
    """A process that runs one program after another.

    Args:
        backends: which backends each program goes through.
        timeout: seconds after which a program hangs.
        recycle: programs after which the process is replaced.
        without: rules that programs of seeds are made without.
    """

    def __init__(
        self, backends: Sequence[str], timeout: float = 120.0, recycle: int = 400, without: Sequence[str] = ()
    ) -> None:
        self.without = list(without)
        self.backends, self.timeout, self.recycle = list(backends), timeout, recycle
        self.process: subprocess.Popen | None = None
        self.ran = 0

    def run(self, program: Program | int, backends: Sequence[str] | None = None) -> Outcome:
        """Run a program, or the one of a seed."""
        seed = program if isinstance(program, int) else program.seed
        if self.process is None or self.ran >= self.recycle:
            self.close()
            self._start()
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        request: dict[str, Any] = {"backends": list(backends or self.backends), "without": self.without}
        request["program"] = program if isinstance(program, int) else as_json(program)
        self.ran += 1
        outcome = Outcome(seed, before=self.ran - 1)
        stage = "generate"
        try:
            self.process.stdin.write((json.dumps(request) + "\n").encode())
            self.process.stdin.flush()
            for message in self._messages():
                if "stage" in message:
                    stage = message["stage"]
                    continue
                outcome.findings = [Finding(**finding) for finding in message["findings"]]
                outcome.seconds = message["seconds"]
                return outcome
            code = self.process.wait()
            found = Finding(stage.split()[0], "crash", f"{stage}, exit {code}", self._errors()[-1500:])
        except BrokenPipeError:
            found = Finding(stage.split()[0], "crash", f"{stage}, exit {self.process.wait()}", self._errors()[-1500:])
        except TimeoutError:
            found = Finding(stage.split()[0], "hang", stage, f"more than {self.timeout} s")
        self.close()
        outcome.findings = [found]
        return outcome

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue
        self.process, self.ran = None, 0

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONFAULTHANDLER": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz", "--serve"], cwd=ROOT, env=environment, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._kept: list[bytes] = []
        pipe, kept = self.process.stderr, self._kept
        assert pipe is not None

        def drain() -> None:
            while chunk := pipe.read(65536):
                kept.append(chunk)
                del kept[:-20]

        threading.Thread(target=drain, daemon=True).start()

    def _errors(self) -> str:
        time.sleep(0.2)
        return b"".join(self._kept).decode(errors="replace")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Messages until the process ends; TimeoutError where none comes in time."""
        assert self.process is not None and self.process.stdout is not None
        pipe, rest = self.process.stdout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(self.timeout):
                    raise TimeoutError
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)


def serve() -> None:
    """The process's side: requests from stdin, answers to what was stdout; what libraries print goes to stderr."""
    import torch

    from .grammar import generate
    from .runs import Run

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for line in sys.stdin:
        request = json.loads(line)
        wanted = request["program"]
        program = generate(wanted, request["without"]) if isinstance(wanted, int) else from_json(wanted)
        run = Run(program, request["backends"], lambda stage: say({"stage": stage}))
        run.run()
        say({"findings": [asdict(finding) for finding in run.findings], "seconds": run.seconds})


def run_many(
    seeds: Sequence[int],
    backends: Callable[[int], Sequence[str]],
    workers: int,
    deadline: float | None,
    report: Callable[[Outcome], None],
    without: Sequence[str] = (),
) -> None:
    """Run the programs of ``seeds`` until they end or ``deadline`` (of ``time.monotonic``) has passed."""
    left, lock = iter(seeds), threading.Lock()

    def work() -> None:
        worker = Worker((), without=without)
        try:
            while deadline is None or time.monotonic() < deadline:
                with lock:
                    seed = next(left, None)
                if seed is None:
                    return
                outcome = worker.run(seed, backends(seed))
                with lock:
                    report(outcome)
        finally:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
