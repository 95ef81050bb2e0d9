"""Eight threads get the numbers that one gets, bit by bit, while others train and compile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # optimizers and torch.compile import it when they are first used, and not two threads at once can
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.models import Call
from tests.helpers.networks import writing
from tests.helpers.running import has_compiler

THREADS, CALLS = 8, 12
BACKENDS = ("converted", "rewrite", "torchscript", "onednn", "inductor")


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    model = Call(writing, first=nn.Conv2d(3, 8, 3, padding=1), second=nn.Conv2d(8, 8, 1), last=nn.Linear(16, 5)).eval()
    return dbrq.quantize(model, [torch.randn(2, 3, 12, 12)])


def runner(converted: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    if backend == "converted":
        return converted
    if backend == "rewrite":
        return dbrq.rewrite(converted, torch.randn(2, 3, 12, 12))
    return dbrq.lower(converted, torch.randn(2, 3, 12, 12), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_get_what_one_gets(converted: nn.Module, backend: str) -> None:
    """Each thread asks for several inputs; one more thread trains meanwhile and one compiles."""
    if backend == "inductor" and not has_compiler():
        pytest.skip("no compiler")
    run = runner(converted, backend)
    shapes = [(2, 12)] * 2 if backend == "inductor" else [(1, 12), (2, 12), (3, 9), (2, 15)]  # which compiles each
    inputs = [torch.randn(n, 3, size, size) for n, size in shapes]
    with torch.no_grad():
        expected = [run(x).clone() for x in inputs]
    wrong: list[str] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        for call in range(CALLS):
            which = (number + call) % len(inputs)
            with torch.no_grad():
                result = run(inputs[which])
            if not torch.equal(result, expected[which]):
                wrong.append(f"thread {number}, call {call}: off by {(result - expected[which]).abs().max().item()}")

    def train() -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 2)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        before = [p.detach().clone() for p in model.parameters()]
        while not stop.is_set():
            optimizer.zero_grad()
            model(torch.randn(4, 3, 12, 12)).square().mean().backward()
            optimizer.step()
        if any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)):
            wrong.append("another thread's model did not train")

    def compile_() -> None:
        def fn(x: Tensor) -> Tensor:
            return F.relu(x * 2) + x.sin()

        x = torch.randn(7)
        result = torch.compile(fn, backend="aot_eager", fullgraph=True)(x)
        if not torch.allclose(result, fn(x)):
            wrong.append("another thread's compiled function is wrong")

    failed: list[BaseException] = []

    def guarded(fn: Callable[..., None], *args: int) -> threading.Thread:
        def body() -> None:
            try:
                fn(*args)
            except BaseException as error:
                failed.append(error)

        return threading.Thread(target=body)

    trainer, compiler = guarded(train), guarded(compile_)
    askers = [guarded(ask, number) for number in range(THREADS)]
    for thread in (trainer, compiler, *askers):
        thread.start()
    for thread in askers:
        thread.join()
    stop.set()
    trainer.join()
    compiler.join()
    assert not failed, failed
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("backend", ("torchscript", "onednn"))
def test_lowering_in_threads(converted: nn.Module, backend: str) -> None:
    """Threads that lower one model at once, each for a shape of its own, get right models."""
    inputs = [torch.randn(n, 3, 12, 12) for n in (1, 2, 3, 4)]
    with torch.no_grad():
        expected = [dbrq.lower(converted, x, backend=backend)(x) for x in inputs]
    results: dict[int, Tensor] = {}

    def lower(number: int) -> None:
        with torch.no_grad():
            results[number] = dbrq.lower(converted, inputs[number], backend=backend)(inputs[number])

    threads = [threading.Thread(target=lower, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(len(inputs)))
    assert all(torch.equal(results[number], value) for number, value in enumerate(expected))
