"""A slice of the fuzzer's programs, always the same; hours of it: ``DBRQ_FUZZ_MINUTES=60 pytest tests/fuzz``.

``python -m tests.fuzz --seed N`` shows the program of a seed that failed here, and makes it smaller.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.models import Call

from .grammar import generate, rule
from .judge import FloatReference, problem
from .pool import Worker
from .program import smaller

#: Minutes to go on for with further seeds, 0 for the fixed slice alone.
MINUTES = float(os.environ.get("DBRQ_FUZZ_MINUTES", "0"))
#: The fixed slice: this many programs from this seed on, a few at a time so that failures stay apart.
FIRST, GROUPS, EACH = 500_000, 8, 12


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(("rewrite", "torchscript", "onednn"), timeout=180)
    yield worker
    worker.close()


def failures(worker: Worker, seed: int) -> list[str]:
    return [f"seed {seed}: {f.signature} {f.where}: {f.detail}" for f in worker.run(seed).findings if f.failed]


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_programs_give_right_numbers(worker: Worker, group: int) -> None:
    first = FIRST + group * EACH
    found = [text for seed in range(first, first + EACH) for text in failures(worker, seed)]
    assert not found, "\n".join(found)


@pytest.mark.skipif(not MINUTES, reason="DBRQ_FUZZ_MINUTES is not set")
def test_random_programs_for_as_long_as_wanted(worker: Worker) -> None:
    seed, found = int(time.time()), list[str]()  # other programs each time, named by their seeds
    deadline = time.monotonic() + 60 * MINUTES
    while time.monotonic() < deadline:
        found += failures(worker, seed)
        seed += 1
    assert not found, "\n".join(found)


def test_programs_are_the_same_each_time() -> None:
    for seed in range(20):
        assert generate(seed) == generate(seed)


def test_every_rule_can_be_applied() -> None:
    names = {r.__name__ for r in rule.rules}
    for name in names:
        others = names - {name, "shaping", "linear"}
        assert any(name in generate(seed, others).rules for seed in range(400)), name


def test_smaller_programs_are_smaller() -> None:
    program = generate(3)
    for candidate in smaller(program):
        assert len(candidate.script()) <= len(program.script()) + 40


def test_a_process_that_dies_is_put_down_to_its_program(worker: Worker) -> None:
    program = generate(0)
    lethal = program.statements[0].__class__("lethal", (), ("import os; os.kill(os.getpid(), 11)",), ())
    statements = (*program.statements, lethal)
    outcome = worker.run(type(program)(**{**vars(program), "statements": statements}))
    assert [finding.kind for finding in outcome.findings] == ["crash"]
    assert not [f for f in worker.run(0).findings if f.failed]  # and the next one runs


def test_which_of_equal_numbers_is_the_largest_is_no_wrong_number() -> None:
    """The result of torch's own softplus for equal inputs depends on where in memory they are: seed 9102222."""
    model = Call(lambda m, x: F.softplus(m.norm(x)).argmax(-1).float(), norm=nn.GroupNorm(48, 48)).eval()
    x = (torch.arange(48 * 49).view(1, 48, 7, 7) % 5 > 1).float()
    reference = FloatReference(model)
    first, last = model(x), 6 - model(x.flip(-1))
    assert (first != last).any() and not problem(last, first, first, lambda: reference.dithered((x,), 0), exact=True)


def test_dither_of_a_float_model_hides_no_wrong_number() -> None:
    """What selects, moves or draws numbers has no rounding error, so that ``long`` behind it gives one result."""
    model = Call(lambda m, x: (m.norm(x), x.abs().round().sort(-1)[0].long().float(), torch.ones(3)))
    model.norm = nn.GroupNorm(2, 4)
    x = torch.randn(2, 4, 7) * 5
    reference = FloatReference(model.eval())
    with torch.no_grad():
        expected = model(x)
    for index in range(3):
        wrong = [leaf.clone() for leaf in expected]
        wrong[index].view(-1)[2] += 1e-2
        found = problem(tuple(wrong), expected, expected, lambda: reference.dithered((x,), 0), exact=True)
        assert found.startswith(f"output {index}: value")
