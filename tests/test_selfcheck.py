"""The ledger of trials, and guarded memory."""

import subprocess
import sys
import threading

import pytest
import torch

import dbrq
from dbrq import selfcheck
from dbrq.selfcheck import Failure, Guarded

pytestmark = pytest.mark.usefixtures("ledger")


def test_a_trial_runs_once_for_each_key_also_from_several_threads(ledger):
    ran = []

    def trial() -> str:
        ran.append(1)
        return "bad"

    threads = [threading.Thread(target=selfcheck.problem_of, args=("key", trial)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert selfcheck.problem_of("key", trial) == "bad" and len(ran) == 1
    assert selfcheck.problem_of("other", lambda: "") == ""


def test_switched_off_nothing_is_tried():
    dbrq.set_self_check(False)
    assert selfcheck.problem_of("key", lambda: pytest.fail("it was tried")) == "" and not selfcheck.enabled()


def test_the_switch_of_the_environment():
    code = "import os; os.environ['DBRQ_SELF_CHECK'] = '0'; from dbrq import selfcheck; print(selfcheck.enabled())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_failure_is_kept_once_with_what_stands_in_for_it():
    selfcheck.note_failure(Failure("kernel", "geometry", "wrong"))
    selfcheck.note_failure(Failure("kernel", "geometry", "wrong", "another"))
    assert selfcheck.failures() == (Failure("kernel", "geometry", "wrong", "another"),)


@pytest.mark.parametrize("offset", [-1, 0])
def test_guarded_memory_shows_what_is_written_beside_it(offset):
    tensor = torch.arange(24, dtype=torch.float32).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    zone = Guarded(96)
    held = zone.holding(tensor)
    assert torch.equal(held, tensor) and held.stride() == tensor.stride() and held.data_ptr() % 64 == 0 and zone.intact
    zone._whole[zone._start + (offset if offset < 0 else 96)] = 0
    assert not zone.intact


def test_integers_are_the_same_each_time_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    numbers = selfcheck.integers((300, 300), -3, 5, torch.int8)
    assert torch.equal(numbers, selfcheck.integers((300, 300), -3, 5, torch.int8))
    assert numbers.min() == -3 and numbers.max() == 5 and not torch.equal(numbers[0], numbers[1])
    assert torch.equal(torch.get_rng_state(), state)
