"""Plans: bounded, one for each shape, packed once, from many threads, without growing memory."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.judging import assert_close, sqnr
from tests.helpers.memory import resident
from tests.helpers.networks import by_network, name_for, network, two_layers
from tests.helpers.onednn import lower
from tests.helpers.running import convert, run

# Plans


def plan_count_model() -> tuple[Any, Any]:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(2, 16)
    quantized = convert(model, x).quantized
    return lower(quantized, x), dbrq.rewrite(quantized, x)


def test_plans_are_bounded_and_the_one_not_used_for_longest_goes():
    lowered, graph = plan_count_model()
    dbrq.lowered_form(lowered).max_plans = 3
    xs = {n: torch.randn(n, 16) for n in range(1, 8)}
    for x in xs.values():
        assert_close(run(lowered, x), run(graph, x))
        assert len(dbrq.lowered_form(lowered).plans) <= 3
    first, *_ = kept = dbrq.lowered_form(lowered).plans
    run(lowered, xs[5])  # the oldest of the three: now the newest
    assert dbrq.lowered_form(lowered).plans[-1] is first and set(dbrq.lowered_form(lowered).plans) == set(kept)
    run(lowered, xs[1])
    assert (
        first in dbrq.lowered_form(lowered).plans
        and kept[1] not in dbrq.lowered_form(lowered).plans
        and len(dbrq.lowered_form(lowered).plans) == 3
    )


def test_one_plan_for_each_shape():
    lowered, _ = plan_count_model()
    for n in (1, 2, 3, 1, 2, 3):
        run(lowered, torch.randn(n, 16))
    assert len(dbrq.lowered_form(lowered).plans) == 3


def test_weights_are_packed_once_for_all_shapes():
    lowered, _ = plan_count_model()
    run(lowered, torch.randn(3, 16))
    before = dbrq.lowered_form(lowered)._packed.nbytes
    for n in range(4, 12):
        run(lowered, torch.randn(n, 16))
    assert dbrq.lowered_form(lowered)._packed.nbytes <= 2 * before


def test_steps_between_buffers_that_live_at_once_do_not_overlap():
    from dbrq.lowering.onednn.execution import place_buffers
    from dbrq.lowering.onednn.values import Buffer, Kind

    generator = torch.Generator().manual_seed(0)
    buffers = []
    for _ in range(60):
        size, first, life = (
            int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((1, 5000), (0, 40), (0, 9))
        )
        buffer = Buffer(Kind.ARENA, size, None, first)
        buffer.last = first + life
        buffers.append(buffer)
    total = place_buffers([], buffers)
    assert all(b.offset % 64 == 0 and b.offset + b.size <= total for b in buffers)
    for a in buffers:
        for b in buffers:
            if a is not b and a.first <= b.last and b.first <= a.last:
                assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
    assert total < sum(b.size for b in buffers)


# Threads


@by_network
def test_eight_threads_with_mixed_shapes(make, shape):
    lowered, _, _ = network(name_for(shape))
    model = copy.deepcopy(lowered)
    dbrq.lowered_form(model).max_plans = 3  # fewer than shapes: plans come and go meanwhile
    sizes = [(n, 3, 20 + 4 * n, 24) if len(shape) == 4 else (n, 3 + n, 16) for n in (1, 2, 3, 4)]
    inputs = [torch.randn(size) for size in sizes]
    expected, wrong = [run(lowered, x) for x in inputs], []

    def work(offset: int) -> None:
        try:
            for i in range(offset, offset + 40):
                if not torch.equal(run(model, inputs[i % 4]), expected[i % 4]):
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_do_not_grow_memory():
    model, x = two_layers(lambda m, x: (m.a(x) + F.softplus(m.b(x)), m.a(x).t())), torch.randn(64, 16)
    lowered = lower(convert(model, x).quantized, x)
    with torch.no_grad():
        for _ in range(300):
            lowered(x)
        before = resident()
        for _ in range(3000):
            lowered(x)
    assert resident() - before < 2 << 20


def test_new_shapes_do_not_grow_memory():
    lowered, _ = plan_count_model()
    dbrq.lowered_form(lowered).max_plans = 2
    for n in range(1, 60):
        run(lowered, torch.randn(n, 16))
    before = resident()
    for n in range(1, 240):
        run(lowered, torch.randn(1 + n % 59, 16))
    assert resident() - before < 4 << 20


def test_models_are_released():
    lowered, _, x = network("transformer")
    data = pickle.dumps(lowered)

    def once() -> None:
        model = pickle.loads(data)
        run(model, x)

    for _ in range(3):
        once()
    before = resident()
    for _ in range(12):
        once()
    assert resident() - before < 6 << 20


def test_what_torch_writes_with_views_gets_values_in_rows():
    """A linear layer follows the layout of its input here, and ``local_response_norm`` takes a view of its result."""
    model = nn.Sequential(nn.Linear(1, 6), nn.LocalResponseNorm(3)).eval()
    example = torch.randn(4, 16, 1, 6, 1)
    quantized = dbrq.quantize(model, [example])
    lowered = dbrq.lower(quantized, example, backend="onednn")
    other = torch.randn(2, 16, 2, 7, 1).to(memory_format=torch.channels_last_3d)
    for x in (example, other):
        assert sqnr(run(quantized, x), run(lowered, x)) > 40
