"""Writes that reach a value or a copy of it, as layouts have it: what ``flatten``, ``reshape`` or ``contiguous`` gave.

Kernels that stand for a graph's ops may choose other layouts than torch's do, so a graph goes by the run it was made
from, and asserts what that depended on.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx

from ..op_facts import BY_MEMORY, called, family, memory_of, sources, written
from .nodes import tensors_behind


class Writer(Protocol):
    """The graph that is being built."""

    graph: fx.Graph

    def check(self, node: fx.Node, value: Any, what: str, where: fx.Node | None = None) -> None: ...

    def describe(self, node: fx.Node) -> None: ...

    def hold_layouts_behind(self, node: fx.Node) -> None: ...


class Outcome(enum.Enum):
    """What a call gave that copies or not, as layouts have it."""

    COPY = enum.auto()
    VIEW = enum.auto()
    #: The tensor that it was given; whoever reads that reads the call's node from then on.
    SAME = enum.auto()


@dataclass(frozen=True)
class Laid:
    """What such a call did in the run.

    Attributes:
        outcome: what it gave.
        axes: of what it was given, those of which one element or more decides about that.
    """

    outcome: Outcome
    axes: tuple[int, ...]

    @classmethod
    def seen(cls, given: Tensor, result: Tensor) -> Laid:
        shares = memory_of(given) == memory_of(result)
        outcome = Outcome.SAME if result is given else Outcome.VIEW if shares else Outcome.COPY
        return cls(outcome, deciding_axes(given.shape, given.stride()))


def deciding_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Axes such that a tensor that lies as this one does, but has one element where this has several along them, or the
    reverse, is contiguous, or channels_last, where this one is not.

    >>> deciding_axes((3, 1, 8), (16, 16, 1))  # every other channel of two
    (0,)
    >>> deciding_axes((1, 5, 6), (30, 6, 1))
    ()
    """
    orders = [tuple(range(len(shape)))]
    if len(shape) in (4, 5):  # channels_last
        orders.append((0, *range(2, len(shape)), 1))
    inwards = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    found: list[tuple[int, ...]] = []
    for count in range(1, len(shape) + 1):
        for changed in itertools.combinations([i for i, size in enumerate(shape) if size], count):
            if any(set(known) <= set(changed) for known in found):
                continue
            sizes = [(1 if size > 1 else 2) if axis in changed else size for axis, size in enumerate(shape)]
            steps, factor = list(map(float, strides)), 1.0
            for axis in reversed(inwards):
                steps[axis] *= factor
                factor *= sizes[axis] / shape[axis] if shape[axis] else 1.0
            if any(_is_dense(shape, strides, order) != _is_dense(sizes, steps, order) for order in orders):
                found.append(changed)
    return tuple(sorted({axis for changed in found for axis in changed}))


def _is_dense(shape: Sequence[int], strides: Sequence[float], order: Sequence[int]) -> bool:
    """Whether elements follow each other without a gap, axes in this order; an axis of one element counts for none."""
    expected = 1.0
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def settle(writer: Writer, outcomes: Mapping[fx.Node, Laid]) -> None:
    """Have a graph copy where its run did, and nowhere else, and assert the layouts that decided about it.

    Args:
        writer: of the graph, which has its output already.
        outcomes: what copies or gives a view, as layouts have it -> what it gave.
    """
    order = {node: i for i, node in enumerate(writer.graph.nodes)}
    for node in list(writer.graph.nodes):
        matters = node in outcomes and tells_apart(node, outcomes[node].outcome, order)
        if matters or called(node) in BY_MEMORY:
            with writer.graph.inserting_before(node):
                writer.hold_layouts_behind(node)
                if matters:
                    _hold_axes_of_one(writer, node, outcomes[node].axes)
        if matters:
            _settle(writer.graph, node, outcomes[node].outcome)


def tells_apart(node: fx.Node, outcome: Outcome, order: Mapping[fx.Node, int]) -> bool:
    """Whether a graph gives something else if ``node`` gives a view of its input and not a copy, or the reverse: one of
    them is written to, and the other read after that.
    """
    below = {node}
    pending = [node]
    while pending:
        one = pending.pop()
        found = [user for user in one.users if user not in below and one in sources(user)]
        below.update(found)
        pending += found
    beside = family(node.all_input_nodes[0]) - below
    writes_below, writes_beside = (
        [user for one in nodes for user in one.users if one in written(user)] for nodes in (below, beside)
    )
    if outcome is Outcome.SAME:
        return bool(writes_below or writes_beside)
    if writes_below and any(one.op in ("placeholder", "get_attr") for one in beside):
        return True  # others read it, after the graph

    def is_read(nodes: set[fx.Node], write: fx.Node) -> bool:
        return any(order[user] > order[write] for one in nodes for user in one.users if user in order)

    late = [write for write in writes_beside if order.get(write, -1) > order[node]]
    return any(is_read(beside, write) for write in writes_below) or any(is_read(below, write) for write in late)


def _settle(graph: fx.Graph, node: fx.Node, outcome: Outcome) -> None:
    source = node.all_input_nodes[0]
    if outcome is Outcome.COPY:
        with graph.inserting_before(node):
            copy = graph.call_method("clone", (source,))
        copy.meta.update({key: value for key, value in source.meta.items() if key not in ("facts", "op")})
        node.replace_input_with(source, copy)
    elif outcome is Outcome.SAME:
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    else:
        _lay_out(graph, source)


def _lay_out(graph: fx.Graph, value: fx.Node) -> None:
    """Have the memory behind a value lie row-major, if it did in the run: of other layouts there may be no view."""
    while above := sources(value):
        value = above[0]
    if value.op in ("placeholder", "get_attr") or not value.meta.get("contiguous"):
        return
    with graph.inserting_after(value):
        laid_out = graph.call_method("contiguous", (value,))
    laid_out.meta = {key: fact for key, fact in value.meta.items() if key not in ("facts", "op")}
    value.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not laid_out)


# What is asserted


def hold_behind(writer: Writer, node: fx.Node, held: set[fx.Node]) -> None:
    """Have the graph assert the layouts of all inputs that ``node`` was computed from.

    The value's own would not do: kernels that stand for the ops between may choose another.

    Args:
        held: inputs whose layouts are asserted already; takes these.
    """
    for source in tensors_behind(node):
        if source.op == "placeholder" and source not in held:
            held.add(source)
            _hold(writer, source, node)


def _hold(writer: Writer, source: fx.Node, where: fx.Node) -> None:
    """Have the graph assert that an input lies in memory as here: whether it is contiguous, and the order of axes.

    By that order, torch lays out the results of convolutions, of images of one channel too, which are contiguous and
    channels_last at once.
    """
    contiguous = _made(writer, "is_contiguous", source)
    writer.check(contiguous, source.meta["contiguous"], "whether an input is contiguous", where)
    if (layout := source.meta["layout"]) is None:
        return
    order, is_dense = layout
    what = f"whether the axes of an input lie in the order {order}"
    if is_dense and not source.meta["contiguous"]:
        permuted = _made(writer, "permute", source, list(order))
        writer.check(_made(writer, "is_contiguous", permuted), True, what, where)
    for outer, inner in itertools.pairwise(order):
        pair = _made(writer, "stride", source, outer), _made(writer, "stride", source, inner)
        writer.check(_compared(writer, operator.ge, *pair), True, what, where)


def _hold_axes_of_one(writer: Writer, node: fx.Node, axes: Sequence[int]) -> None:
    """Have the graph assert along which axes what ``node`` takes has one element, as these count for no layout."""
    source = node.all_input_nodes[0]
    for axis in axes:
        is_one = _compared(writer, operator.eq, _made(writer, "size", source, axis), 1)
        here = source.meta["shape"][axis] == 1
        writer.check(is_one, here, f"whether axis {axis} of a value that may be copied has one element", node)


def _made(writer: Writer, method: str, *args: Any) -> fx.Node:
    node = writer.graph.call_method(method, args)
    writer.describe(node)
    return node


def _compared(writer: Writer, how: Any, one: fx.Node, other: fx.Node | int) -> fx.Node:
    node = writer.graph.call_function(how, (one, other))
    writer.describe(node)
    return node
