"""Rewrites of a graph: patterns, guards and replacements in a list, and what every backend needs to apply such lists.

A rewrite names a chain of nodes, from its head on, each the only reader of the one before. Rewrites are tried in order,
most specific first, each on the whole graph. After each the graph may be verified; everything is logged.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx

from .._torch import is_erased
from ..errors import RewriteError
from ..graph.located import at
from ..graph.nodes import (
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    DEQUANTIZE_ROWS,
    QUANTIZE,
    QUANTIZE_ROWS,
    is_impure,
    remove_dead,
)
from ..kernels import QParams
from ..mappings import FUNCTIONS, TABLE, OpRow
from ..op_facts import Memory, is_written, writes

log = logging.getLogger("dbrq.lowering")
#: Verify the graph after every rewrite.
DEBUG = bool(os.environ.get("DBRQ_DEBUG"))

_OPERATORS = {function: row for row in TABLE for function in row.operators}
Predicate = Callable[[fx.Node], bool]


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def is_quantize(node: Any) -> bool:
    return is_call(node, QUANTIZE) and not is_dynamic(node)


def is_dequantize(node: Any) -> bool:
    return is_call(node, DEQUANTIZE) and not is_dynamic(node)


def is_dynamic(node: fx.Node) -> bool:
    """Whether a quantize or dequantize node has qparams that are computed at run time."""
    return isinstance(node.args[1], fx.Node)


def is_dynamic_input(node: Any) -> bool:
    """Whether a value is one that was quantized by its own range, as a whole or each row."""
    return is_call(node, DEQUANTIZE_ROWS) or (is_call(node, DEQUANTIZE) and is_dynamic(node))


def is_weight(node: Any) -> bool:
    return is_call(node, DEQUANTIZE_PER_CHANNEL)


def is_smoothing(node: Any) -> bool:
    """Whether a node multiplies what a linear layer reads by the factors of its channels: as a part of that layer, like
    the quantization behind it.
    """
    return is_call(node, torch.mul) and bool(node.meta.get("smooths"))


def _converts(node: fx.Node) -> bool:
    """Whether a node only quantizes or dequantizes."""
    return node.target in (QUANTIZE, DEQUANTIZE, QUANTIZE_ROWS, DEQUANTIZE_ROWS, DEQUANTIZE_PER_CHANNEL)


def qparams_of(node: fx.Node) -> QParams:
    """qparams of a quantize or dequantize node."""
    constants: Any = node.args[1:5]
    scale, zero_point, low, high = constants
    return QParams(scale, zero_point, low, high)


def row_of(node: Any) -> OpRow | None:
    """The op table's row of a node."""
    found = bind(node)
    return None if found is None else found[0]


def bind(node: Any) -> tuple[OpRow, list[Any]] | None:
    """The row of a node and its arguments in the row's order."""
    found = _looked_up(node) if isinstance(node, fx.Node) else None
    return None if found is None or is_impure(node) else found  # one that is impure does more than its row says


def _looked_up(node: fx.Node) -> tuple[OpRow, list[Any]] | None:
    target: Any = node.target
    if node.op == "call_method":
        method: Any = getattr(torch.Tensor, target, None)
        spelling = FUNCTIONS.get(method)
    elif node.op == "call_function":
        if (row := _OPERATORS.get(target)) is not None:
            return row, [*node.args, *(None for _ in row.names[len(node.args) :])]
        if target is getattr:
            spelling = FUNCTIONS.get(getattr(torch.Tensor, node.args[1]).__get__)
            return None if spelling is None else (spelling.row, [node.args[0]])
        if target is operator.getitem:
            return FUNCTIONS[torch.Tensor.__getitem__].row, list(node.args)
        spelling = FUNCTIONS.get(target)
    else:
        return None
    return None if spelling is None else (spelling.row, spelling.bind(node.args, node.kwargs))


def bind_known(node: fx.Node) -> tuple[OpRow, list[Any]]:
    """The same for a node that has a row, as one that a pattern found."""
    found = bind(node)
    assert found is not None
    return found


def first_input(node: fx.Node) -> fx.Node:
    """The node that is the first argument of another."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


@dataclass(frozen=True)
class Rewrite:
    """One rewrite.

    Attributes:
        name: for the log.
        pattern: what the head must be, and each node behind it.
        guard: why the nodes found cannot be replaced, "" if they can.
        replace: makes the replacement; returns what now runs, in words.
    """

    name: str
    pattern: Sequence[Predicate]
    guard: Callable[[Lowering, Sequence[fx.Node]], str]
    replace: Callable[[Lowering, Sequence[fx.Node]], str]

    def match(self, head: fx.Node) -> Sequence[fx.Node] | None:
        """The chain from ``head`` that fits the pattern."""
        nodes = [head]
        if not self.pattern[0](head):
            return None
        for predicate in self.pattern[1:]:
            behind = only_user(nodes[-1])
            if behind is None or is_impure(nodes[-1]) or not predicate(behind):
                return None
            nodes.append(behind)
        return nodes


@dataclass
class Entry:
    """A line of the log."""

    rewrite: str
    node: str
    op: str
    outcome: str


@dataclass
class Lowering:
    """A graph on its way down, with the log of what happened to it.

    Attributes:
        module: the graph and the tensors it holds.
        dtype: of what stays float.
        modules: what the graph calls, by path: submodules, or a backend's partitions.
        kernels: op path (as in reports) -> what runs it now.
        reasons: op path -> why it runs in float now, for those that were int8.
        kept: names of nodes that stay as they are, quantize and dequantize aside.
        undisturbed: nothing writes to memory, as far as was seen before rewrites began.
    """

    module: fx.GraphModule
    dtype: torch.dtype = torch.float32
    modules: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    undisturbed: bool = False

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def writes(self) -> bool:
        """Whether the graph writes to memory."""
        return any(map(writes, self.graph.nodes))

    def apply(self, rewrites: Iterable[Rewrite], verify: Callable[[Lowering], None] | None = None) -> None:
        """Apply each rewrite to the whole graph, in order. What they put there writes to no memory that others see."""
        self.undisturbed = not self.writes
        for rewrite in rewrites:
            for node in list(self.graph.nodes):
                at(node)
                if is_erased(node) or (nodes := rewrite.match(node)) is None:
                    continue
                head = nodes[0]
                reason = rewrite.guard(self, nodes) or self.disturbed(nodes)
                if reason:
                    self.note(rewrite.name, head, f"no: {reason}")
                    continue
                if any(n.name in self.kept and not _converts(n) for n in nodes):
                    self.note(rewrite.name, head, "no: a kernel gave wrong numbers, or might choose another layout")
                    continue
                op, *ops = (None if is_smoothing(n) else n.meta.get("op") for n in nodes)
                kernel = rewrite.replace(self, nodes)
                self.note(rewrite.name, head, kernel)
                for behind in ops:
                    if behind is not None and behind != op and behind not in self.kernels:
                        self.kernels[behind] = f"fused into {op}"
                if op is not None:
                    self.kernels.setdefault(op, kernel)
            remove_dead(self.graph)
            if verify is not None:
                verify(self)

    def note(self, rewrite: str, node: fx.Node, outcome: str) -> None:
        self.entries.append(Entry(rewrite, node.name, node.meta.get("op") or "", outcome))
        log.info("%s: %s -> %s", rewrite, node.name, outcome)

    def kernel_of(self, node: fx.Node) -> Any:
        """The submodule or partition that a node calls; None if it calls none of them."""
        return self.modules.get(str(node.target))

    def tensor(self, node: Any) -> Tensor:
        """The tensor of a ``get_attr`` node."""
        value: Any = self.module
        for part in node.target.split("."):
            value = getattr(value, part)
        return value

    def disturbed(self, nodes: Sequence[fx.Node]) -> str:
        """Why nodes cannot become one at the place of the last, "" if they can: no memory that they read may be
        written to in between, and what they read as dequantized must still be that.
        """
        if self.undisturbed or not self.writes:
            return ""
        inside = set(nodes)
        read = {before for node in nodes for before in node.all_input_nodes if before not in inside}
        if any(is_call(n, DEQUANTIZE) and is_written(n) for n in read):
            return "what it reads is written to since it was dequantized"
        found = Memory(self.graph).written_between(nodes[0], nodes[-1], read)
        return "memory that it reads is written to in between" if found else ""

    # Changing the graph

    def call(self, at: fx.Node, target: Any, args: tuple, like: fx.Node, **meta: Any) -> fx.Node:
        """A new node before ``at`` that calls a function, or the submodule at the path ``target``."""
        with self.graph.inserting_before(at):
            kind = "call_module" if isinstance(target, str) else "call_function"
            node = self.graph.create_node(kind, target, args, name=like.name)
        node.meta = {**like.meta, "name": like.name, **meta}
        return node

    def hold(self, path: str, module: Any) -> str:
        """Keep a submodule or partition to call at ``path`` or a path like it; returns which."""
        free, number = path, 0
        while free in self.modules:
            number += 1
            free = f"{path}_{number}"
        self.modules[free] = module
        return free

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Have all readers of ``old`` read ``new``, and erase ``old`` and what only it read."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        if node.users or is_erased(node) or node.op in ("placeholder", "output"):
            return
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for before in inputs:
            if not is_impure(before):
                self.erase(before)

    def __str__(self) -> str:
        return tabulate([[e.rewrite, e.node, e.outcome] for e in self.entries], ["rewrite", "node", "outcome"])


def verify(lowering: Lowering, kernels: Callable[[Lowering, fx.Node], str]) -> None:
    """Check dtypes, qparams and the order of nodes; raise at the first that is wrong.

    Args:
        kernels: for each node of a backend's own: what is wrong with it, or "".
    """
    owner, lowering.graph.owning_module = lowering.graph.owning_module, None  # submodules come in at the end
    lowering.graph.lint()
    lowering.graph.owning_module = owner
    for node in lowering.graph.nodes:
        problem = ""
        if is_quantize(node):
            problem = _wrong_dtype(node.args[0], (torch.float32, torch.bfloat16))
        elif is_dequantize(node):
            problem = _wrong_dtype(node.args[0], (torch.uint8,))
            source = node.args[0]
            if not problem and is_quantize(source) and qparams_of(source) != qparams_of(node):
                problem = "it dequantizes with other qparams than its input was quantized with"
            made = source.meta.get("qparams") if isinstance(source, fx.Node) else None
            if not problem and made is not None and made != qparams_of(node):
                problem = f"it dequantizes with {qparams_of(node)} what was made with {made}"
        elif node.op in ("call_module", "call_function"):
            problem = kernels(lowering, node)
        if problem:
            raise RewriteError(f"lowering made a wrong graph at {node.name}: {problem}", path=node.meta.get("path"),
                               op=node.meta.get("op"), hint="please report this")  # fmt: skip


def _wrong_dtype(node: Any, expected: tuple[torch.dtype, ...]) -> str:
    dtype = node.meta.get("dtype") if isinstance(node, fx.Node) else None
    return "" if dtype in (None, *expected) else f"it reads {dtype}"
