"""Less of a program that fails: whatever can go while the failure stays."""

from __future__ import annotations

from .pool import Worker
from .program import Program, smaller
from .runs import Finding


def shrink(program: Program, finding: Finding, worker: Worker, attempts: int = 150) -> tuple[Program, Finding] | None:
    """The smallest program found that still fails alike, and how it does; None if this one does not fail alone."""
    backends = [finding.backend] if finding.backend in ("rewrite", "torchscript", "onednn", "inductor") else []

    def fails(candidate: Program) -> Finding | None:
        found = worker.run(candidate, backends).findings
        alike = [f for f in found if f.backend == finding.backend and f.kind == finding.kind]
        if finding.kind in ("error", "refused"):
            alike = [f for f in alike if f.where == finding.where]
        return alike[0] if alike else None

    now = fails(program)
    if now is None:
        return None
    tried = 0
    progress = True
    while progress and tried < attempts:
        progress = False
        for candidate in smaller(program):
            tried += 1
            if tried >= attempts:
                break
            if found := fails(candidate):
                program, now, progress = candidate, found, True
                break
    return program, now
