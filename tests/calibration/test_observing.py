"""What observers see: writes between two readers, parts of values, inputs in containers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dbrq
from tests.helpers.judging import assert_precision
from tests.helpers.written import Layers, batches, judged

# Writes between two readers


def first_row(h: Tensor) -> None:
    h[:, :1].mul_(20)


def view(h: Tensor) -> None:
    v = h.unsqueeze(1)
    v += 60


def flat(h: Tensor) -> None:
    h.view(-1)[:640] = 50


def one_by_one(h: Tensor) -> None:
    for row in h:
        row.mul_(20)


def detached(h: Tensor) -> None:
    h.detach().mul_(20)


def out_of_a_view(h: Tensor) -> None:
    torch.mul(h, 20, out=h[:])


def together(h: Tensor) -> None:
    torch._foreach_mul_([h, h.clone()], 20.0)


@torch.library.custom_op("dbrq_tests::scale_both", mutates_args=("x", "y"))
def scale_both(x: Tensor, y: Tensor) -> None:
    x.mul_(2)
    y.mul_(20)


def second_argument(h: Tensor) -> None:
    scale_both(torch.ones(3), h)


WRITES = [first_row, view, flat, one_by_one, detached, out_of_a_view, together, second_argument]


@pytest.mark.parametrize("write", WRITES)
def test_what_reads_a_value_after_a_write_has_a_range_of_its_own(write: Callable) -> None:
    def code(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
        h = m.a(x)
        before = m.b(h)
        write(h)
        return before, m.c(h)

    assert_precision(judged(code), "linear", "int8", 3)


def test_a_value_that_grows_in_a_loop() -> None:
    def code(m: Layers, x: Tensor) -> list[Tensor]:
        h, made = m.a(x), []
        for _ in range(3):
            h[:, :].mul_(5)
            made.append(m.b(h))
        return made

    judged(code)


# Parts


@pytest.mark.parametrize(
    "part",
    [
        lambda h: h[:, :1].expand(-1, 12, -1),
        lambda h: h[:, :1].repeat(1, 12, 1),
        lambda h: h[:, [0] * 12],
        lambda h: h.index_select(1, torch.zeros(12, dtype=torch.long)),
        lambda h: torch.narrow(h, 1, 0, 1).tile(1, 12, 1),
    ],
)
def test_a_part_that_is_repeated_says_nothing_of_the_whole(part: Callable) -> None:
    def code(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
        h = m.a(x)
        m.b(part(h))
        return (m.c(h),)

    data = batches()
    for item in data:
        item[:, 0] *= 0.05
    judged(code, data)


def test_a_sum_with_a_repeated_part() -> None:
    def code(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
        h = m.a(x)
        return (m.b(h[:, :1].expand(-1, 12, -1) + h),)

    data = batches()
    for item in data:
        item[:, 0] *= 0.05
    judged(code, data)


def test_the_whole_in_another_order_is_observed_once() -> None:
    class Counting(torch.ao.quantization.MinMaxObserver):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.seen += 1
            return super().forward(x)

    qconfig = torch.ao.quantization.QConfig(
        Counting.with_args(dtype=torch.quint8), torch.ao.quantization.default_weight_observer
    )
    model = Layers(lambda m, x: m.b((h := m.a(x)).flip(1).reshape(-1, 16)).sum() + m.c(h).sum()).eval()
    prepared = dbrq.prepare(model, batches()[0], qconfig)
    prepared(batches()[0])
    assert Counting.seen == 2  # of the input, and of h


# Dropout that drops


def test_what_dropout_leaves_is_larger() -> None:
    def code(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
        h = F.relu(m.a(x))
        return m.b(h), m.c(F.dropout(h, 0.8, True))

    judged(code)


# Tensors inside of one argument


def test_inputs_in_a_dict_are_told_apart_by_their_keys() -> None:
    def code(m: Layers, d: dict[str, Tensor]) -> list[Tensor]:
        return [layer(d[key]) for key, layer in (("small", m.a), ("large", m.b)) if key in d]

    small, large = batches()[0] * 0.01, batches()[1] * 10
    judged(code, [({"small": small, "large": large},), ({"large": large},), ({"large": large, "small": small},)], 35)


def test_inputs_in_a_list_are_told_apart_by_their_places() -> None:
    def code(m: Layers, xs: list[Tensor | None]) -> list[Tensor]:
        return [layer(x) for x, layer in zip(xs, (m.a, m.b), strict=True) if x is not None]

    small, large = batches()[0] * 0.01, batches()[1] * 10
    judged(code, [([small, large],), ([None, large],), ([small, None],)], 35)
