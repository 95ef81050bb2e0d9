"""How many multiply-accumulates a call takes: a column of the op table."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Multiplied:
    """A call of an op that multiplies and accumulates.

    Attributes:
        bound: its arguments in the row's order.
        shapes: of all tensors among them.
        result: shape of the first result.
        module: the leaf module that the op is, if it is one.
    """

    bound: Sequence[Any]
    shapes: Sequence[tuple[int, ...]]
    result: tuple[int, ...]
    module: nn.Module | None = None


def with_weight(slot: int) -> Callable[[Multiplied], int]:
    """Each element of the result meets all weights of its output channel."""
    return lambda call: math.prod(call.result) * math.prod(call.bound[slot].shape[1:])


def transposed(call: Multiplied) -> int:
    """Each element of the input meets all weights of its channel."""
    weight: Any = call.bound[1] if call.module is None else call.module.weight
    return math.prod(call.shapes[0]) * math.prod(weight.shape[1:])


def product(slot: int) -> Callable[[Multiplied], int]:
    """Each element of the result is a sum over the last dimension of one argument."""
    return lambda call: math.prod(call.result) * (call.bound[slot].shape[-1] if call.bound[slot].dim() else 1)


def all_of(*slots: int) -> Callable[[Multiplied], int]:
    """All elements of the first argument meet the last dimension of the second; of vectors, those of the first."""
    return lambda call: math.prod(call.bound[slots[0]].shape) * (call.bound[slots[1]].shape[-1] if slots[1:] else 1)


def tensordot(call: Multiplied) -> int:
    """Sizes that are kept, times those that are summed over: each is in two of the three shapes."""
    return math.isqrt(math.prod(math.prod(shape) for shape in (*call.shapes[:2], call.result)))


def grouped(call: Multiplied) -> int:
    """Rows, or what is summed over, are dealt out to the groups where an operand has no dimension for them."""
    (a, b), last = call.shapes[:2], call.shapes[1][-1]
    return math.prod(a[-2:] if len(b) == 2 else a) * last


def chain(call: Multiplied) -> int:
    """In the order that takes least, which is torch's."""
    sizes = [shape[0] if len(shape) > 1 or i else 1 for i, shape in enumerate(call.shapes)]
    sizes.append(call.shapes[-1][-1] if len(call.shapes[-1]) > 1 else 1)

    @functools.cache
    def least(first: int, last: int) -> int:
        cuts = range(first + 1, last)
        return min((least(first, cut) + least(cut, last) + sizes[first] * sizes[cut] * sizes[last] for cut in cuts),
                   default=0)  # fmt: skip

    return least(0, len(sizes) - 1)


def einsum(call: Multiplied) -> int:
    """Two by two from the left, as torch computes it without a path; what nothing reads later is summed away."""
    equation = call.bound[0]
    if not isinstance(equation, str):  # lists of labels between the operands; rare
        return 0
    given, _, wanted = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    terms: list[str] = []
    for term, shape in zip(given.split(","), call.shapes, strict=True):
        dots = len(shape) - len(term.replace("...", ""))
        terms.append(term.replace("...", "".join(map(chr, range(0x100 + 64 - dots, 0x100 + 64)))))  # from the right
        for label, size in zip(terms[-1], shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    if "->" not in equation:
        wanted = "..." + "".join(label for label in sizes if "".join(terms).count(label) == 1)
    kept = {label for label in sizes if label in wanted or (label >= "\u0100" and "..." in wanted)}
    total, made = 0, set(terms[0])
    for i, term in enumerate(terms[1:], start=1):
        made |= set(term)
        total += math.prod(sizes[label] for label in made)
        made &= kept.union(*terms[i + 1 :])
    return total


def attention(call: Multiplied) -> int:
    """Scores, and the sums that they weigh."""
    query, key, value = call.shapes[:3]
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def recurrent(call: Multiplied) -> int:
    """Each step meets all matrices once."""
    assert call.module is not None
    steps = 1 if len(call.shapes[0]) == 1 else math.prod(call.shapes[0][:-1])  # or of a PackedSequence's data
    return steps * sum(p.numel() for p in call.module.parameters() if p.dim() == 2)
