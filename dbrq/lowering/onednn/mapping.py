"""From the Q/DQ graph to partitions: which nodes one primitive computes.

``REWRITES`` is the whole of it. A head (``_HEADS``) takes along what follows it as long as that is read by nobody else:
a batch norm, functions, operations with other tensors, and the quantization of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import DEQUANTIZE_ROWS, is_impure
from ...kernels import QParams, script
from ...mappings import DROPOUTS, TABLE, OpRow, Role
from ..engine import (
    Lowering,
    Rewrite,
    bind,
    bind_known,
    first_input,
    is_call,
    is_dequantize,
    is_dynamic_input,
    is_quantize,
    is_smoothing,
    is_weight,
    only_user,
    qparams_of,
)
from ..passes import written_attributes
from ..patterns import DYNAMIC_LINEAR, MOVES, SILU, WEIGHT_ONLY_LINEAR, fine
from .binding import Alg
from .partitions import BatchNorm, Function, Operand, Partition, Step, Weight, With

_ROWS = {row.name: row for row in TABLE}
_ELEMENTWISE = OpRow("elementwise", Role.ELEMENTWISE)
_QUANTIZE, _DEQUANTIZE = OpRow("quantize", Role.PASS), OpRow("dequantize", Role.PASS)
#: A linear layer of floats, each row of which is quantized by its own range, to so many levels.
_LINEAR_BY_ROW = OpRow("linear_by_row", Role.COMPUTE, "input weight bias levels")


def _clamp(args: Sequence[Any]) -> Function | None:
    low, high = args[1:3]
    if any(not (v is None or isinstance(v, (int, float))) for v in (low, high)):
        return None
    if low == 0 and high is None:
        return Function(Alg.RELU)
    return Function(Alg.CLIP, -math.inf if low is None else low, math.inf if high is None else high)


_POWERS: dict[float, Function] = {2: Function(Alg.SQUARE), 0.5: Function(Alg.SQRT), -1: Function(Alg.POW, 1.0, -1.0),
           -0.5: Function(Alg.POW, 1.0, -0.5)}  # fmt: skip
#: Row -> its function, from bound arguments; None where oneDNN has none.
_FUNCTIONS: dict[str, Callable[[Sequence[Any]], Function | None]] = {
    "relu": lambda args: Function(Alg.RELU),
    "relu6": lambda args: Function(Alg.CLIP, 0.0, 6.0),
    "hardtanh": _clamp,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "hardswish": lambda args: Function(Alg.HARDSWISH, 1 / 6, 0.5),
    "silu": lambda args: Function(Alg.SWISH, 1.0),
    "gelu": lambda args: Function(Alg.GELU_TANH if args[1] == "tanh" else Alg.GELU_ERF),
    "leaky_relu": lambda args: Function(Alg.RELU, float(args[1])),
    "tanh": lambda args: Function(Alg.TANH),
    "sigmoid": lambda args: Function(Alg.LOGISTIC),
    "elu": lambda args: Function(Alg.ELU, float(args[1])),
    "mish": lambda args: Function(Alg.MISH),
    "hardsigmoid": lambda args: Function(Alg.HARDSIGMOID, 1 / 6, 0.5),
    "abs": lambda args: Function(Alg.ABS),
    "square": lambda args: Function(Alg.SQUARE),
    "exp": lambda args: Function(Alg.EXP),
    "sqrt": lambda args: Function(Alg.SQRT),
    "round": lambda args: None if args[1] else Function(Alg.ROUND),
    "neg": lambda args: Function(Alg.LINEAR, -1.0, 0.0),
    "reciprocal": lambda args: Function(Alg.POW, 1.0, -1.0),
    "rsqrt": lambda args: Function(Alg.POW, 1.0, -0.5),
    "pow": lambda args: _POWERS.get(args[1]) if _is_number(args[1]) else None,
}
_OPERATIONS = {"add": Alg.ADD, "sub": Alg.SUB, "mul": Alg.MUL, "div": Alg.DIV}


def _scalar(name: str, number: float, reversed_: bool) -> Function | None:
    """An operation with a number."""
    if not math.isfinite(number):
        return None
    if name == "add":
        return Function(Alg.LINEAR, 1.0, number)
    if name == "sub":
        return Function(Alg.LINEAR, -1.0, number) if reversed_ else Function(Alg.LINEAR, 1.0, -number)
    if name == "mul":
        return Function(Alg.LINEAR, number, 0.0)
    if reversed_:
        return Function(Alg.POW, number, -1.0)
    return Function(Alg.LINEAR, 1 / number, 0.0) if number else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_float(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.meta.get("dtype") is torch.float32


@dataclass(frozen=True)
class _Next:
    """What a node does to the value before it: nothing, a function, or something with another tensor."""

    step: Step | None = None
    other: fx.Node | None = None


def _next(lowering: Lowering, before: fx.Node, node: fx.Node, shape: Sequence[int]) -> _Next | None:
    """What ``node`` adds to a chain that ends in ``before``; None if it cannot be part of it."""
    found = bind(node)
    if found is None or not _is_float(node) or tuple(node.meta.get("shape", ())) != tuple(shape):
        return None
    row, bound = found
    if row.name in DROPOUTS:
        return None if bound[2] and bound[1] else _Next()
    if row.name in _FUNCTIONS:
        alone = bound[0] is before and not any(isinstance(setting, fx.Node) for setting in bound[1:])
        function = _FUNCTIONS[row.name](bound) if alone else None
        return None if function is None else _Next(function)
    if row.name not in _OPERATIONS or bound[2:] not in ([], [None], [1]):
        return None
    one, two = bound[:2]
    if one is two or before not in (one, two):
        return None
    other = two if one is before else one
    number = _number(lowering, other)
    if number is not None:
        function = _scalar(row.name, number, reversed_=two is before)
        return None if function is None else _Next(function)
    if not isinstance(other, fx.Node) or not (_is_float(other) or is_dequantize(other)):
        return None
    if row.name == "div" and two is before:
        return None
    alg = _OPERATIONS[row.name]
    if row.name == "sub" and two is before:
        return None
    return _Next(With(alg, -1), other)


def _number(lowering: Lowering, value: Any) -> float | None:
    """A number, or a tensor of the model with one element."""
    if _is_number(value):
        return float(value)
    if isinstance(value, fx.Node) and value.op == "get_attr" and _is_float(value):
        tensor = lowering.tensor(value)
        if tensor.numel() == 1 and value.target not in written_attributes(lowering.graph):
            return float(tensor)
    return None


# Heads


def _takes(row: OpRow) -> bool:
    """Whether other tensors may join behind a head."""
    return (
        row.role is Role.COMPUTE or row.name.startswith("conv_transpose") or row.name in ("elementwise", "batch_norm")
    )


def _fits(other: fx.Node, shape: Sequence[int], row: OpRow) -> bool:
    """Whether a primitive takes the other tensor: of the result's shape, or along channels only."""
    sizes = tuple(other.meta.get("shape", ()))
    if sizes == tuple(shape):
        return True
    if row.name in ("elementwise", "matmul", "batch_norm"):
        return len(sizes) <= len(shape)
    if len(sizes) > len(shape):
        return False
    axis = len(shape) - 1 if row.name.startswith("linear") else 1
    padded = (1,) * (len(shape) - len(sizes)) + sizes
    return all(n == 1 or (i == axis and n == m) for i, (n, m) in enumerate(zip(padded, shape, strict=True)))


def _is_head(node: fx.Node) -> bool:
    return _head(node) is not None


def _head(node: fx.Node) -> tuple[OpRow, list[Any]] | None:
    """The row and arguments of a node that a partition can start with."""
    if is_quantize(node):
        return _QUANTIZE, [node.args[0]]
    if is_dequantize(node):
        return _DEQUANTIZE, [node.args[0]]
    if is_call(node, script.max_pool):
        kernel: Any = node.args[1]
        return _ROWS[f"max_pool{len(kernel)}d"], [node.args[0], *node.args[1:], False]
    found = bind(node)
    if found is None:
        return None
    row, bound = found
    if row.name in _OPERATIONS or row.name in _FUNCTIONS:
        return (_ELEMENTWISE, []) if _is_float(node) else None
    if row.name not in _HEADS:
        return None
    if row.name == "cat":
        return (row, bound) if node.meta.get("dtype") in (torch.float32, torch.uint8) else None
    if not _is_float(node) and row.role not in (Role.SHARE,):
        return None
    source = bound[0]
    if not isinstance(source, fx.Node) or source.op == "get_attr":
        return None
    if row.role is Role.COMPUTE and row.name != "matmul":
        weight, bias = bound[1:3]
        if not (is_weight(weight) or _is_held(weight)) or not (bias is None or _is_held(bias)):
            return None
        if is_call(source, DEQUANTIZE_ROWS) and is_weight(weight):
            q = first_input(source)
            return _LINEAR_BY_ROW, [q.args[0], weight, bias, q.args[4]]
        if is_weight(weight) and not is_dequantize(source):
            return None
        if is_dynamic_input(source):
            return None
    return row, bound


def _is_held(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


_HEADS = frozenset(
    [*(f"{name}{n}d" for name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool")
       for n in (1, 2, 3)),
     "batch_norm", "linear", "matmul", "scaled_dot_product_attention", "layer_norm", "softmax", "log_softmax", "mean",
     "cat"]
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """A head and what joins it.

    Attributes:
        nodes: of the graph, in order.
        others: for each step, the tensor that joins, if one does.
    """

    row: OpRow
    bound: list[Any]
    nodes: list[fx.Node]
    steps: list[Step]
    others: list[fx.Node | None]
    norm: BatchNorm | None
    out: QParams | None


def chain_of(lowering: Lowering, head: fx.Node) -> Chain | None:
    """The longest chain from ``head``."""
    found = _head(head)
    if found is None:
        return None
    row, bound = found
    nodes, steps, others = [head], [], []
    norm, out = None, None
    shape = head.meta.get("shape", ())
    if row is _ELEMENTWISE:
        first = _first(lowering, head, shape)
        if first is None:
            return None
        source, step, other = first
        bound = [source]
        if step is not None:
            steps, others = [step], [other]
    if row is _QUANTIZE:
        return Chain(row, bound, nodes, steps, others, norm, qparams_of(head))
    if row is _DEQUANTIZE:
        return Chain(row, bound, nodes, steps, others, norm, None)
    float_weight = row.name.startswith("conv") and _is_held(bound[1])
    while (behind := only_user(nodes[-1])) is not None and not is_impure(nodes[-1]):
        if is_quantize(behind):
            if behind.args[0] is nodes[-1]:
                out = qparams_of(behind)
                nodes.append(behind)
            break
        if float_weight and len(nodes) == 1 and not row.name.startswith("conv_transpose"):
            norm = _norm(nodes[-1], behind)
            if norm is not None:
                nodes.append(behind)
                continue
        step_or_none = _next(lowering, nodes[-1], behind, shape) if _has_steps(row) else None
        if step_or_none is None:
            break
        other = step_or_none.other
        if other is not None and not (_takes(row) and _fits(other, shape, row)):
            break
        if step_or_none.step is not None:
            steps.append(step_or_none.step)
            others.append(other)
        nodes.append(behind)
    return Chain(row, bound, nodes, steps, others, norm, out)


def _has_steps(row: OpRow) -> bool:
    return _takes(row) or row.role is Role.POOL


def _first(
    lowering: Lowering, head: fx.Node, shape: Sequence[int]
) -> tuple[fx.Node, Step | None, fx.Node | None] | None:
    """The operand that an element-wise head starts from, and its first step."""
    _, bound = bind_known(head)
    candidates = [a for a in bound[:2] if isinstance(a, fx.Node) and (_is_float(a) or is_dequantize(a))]
    candidates.sort(key=lambda n: n.meta.get("shape") != shape)
    for source in candidates:
        if source.op == "get_attr" or tuple(source.meta.get("shape", ())) != tuple(shape):
            continue
        found = _next(lowering, source, head, shape)
        if found is not None and (found.other is None or len(found.other.meta.get("shape", ())) <= len(shape)):
            return source, found.step, found.other
    return None


def _norm(conv: fx.Node, node: fx.Node) -> BatchNorm | None:
    """The batch norm behind a float convolution, if it computes with its running statistics."""
    found = bind(node)
    if found is None or found[0].name != "batch_norm":
        return None
    x, mean, variance, weight, bias, training, _, epsilon = found[1][:8]
    held = [mean, variance, *(p for p in (weight, bias) if p is not None)]
    if x is not conv or training or not all(map(_is_held, held)):
        return None
    return BatchNorm(mean.target, variance.target, weight and weight.target, bias and bias.target, float(epsilon))


class _Partitioning(Rewrite):
    """Chains of any length."""

    def match(self, head: fx.Node) -> Sequence[fx.Node] | None:
        return [head] if self.pattern[0](head) else None


def _reason(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    chain = chain_of(lowering, nodes[0])
    if chain is None:
        return "no primitive for it"
    return lowering.disturbed(chain.nodes)


def _partition(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    chain = chain_of(lowering, nodes[0])
    assert chain is not None
    inputs: list[fx.Node] = []
    operands: list[Operand] = []

    def operand(node: fx.Node, qparams: QParams | None) -> Operand:
        for known, source in zip(operands, inputs, strict=True):
            if source is node and known.qparams == qparams:
                return known
        inputs.append(node)
        operands.append(Operand(len(operands), qparams))
        return operands[-1]

    def argument(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(argument(v) for v in value)
        if not isinstance(value, fx.Node):
            return value
        if is_dequantize(value):
            return operand(first_input(value), qparams_of(value))
        if is_weight(value):
            int8, scale = (a for a in value.args[:2] if isinstance(a, fx.Node))
            return Weight(str(int8.target), str(scale.target))
        held = _is_held(value) and value.target not in written
        return Weight(str(value.target)) if held else operand(value, None)

    written = written_attributes(lowering.graph)
    bound = chain.bound
    # An operand's qparams are of uint8 that it dequantizes itself; where the head is a dequantize, that is the head.
    arguments = (
        (operand(bound[0], qparams_of(chain.nodes[0])),) if chain.row is _DEQUANTIZE else tuple(map(argument, bound))
    )
    steps: list[Step] = []
    for step, other in zip(chain.steps, chain.others, strict=True):
        if isinstance(step, With):
            assert other is not None
            found = argument(other)
            index = found.index if isinstance(found, Operand) else operand(other, None).index
            step = With(step.alg, index)
        steps.append(step)
    head, last = chain.nodes[0], chain.nodes[-1]
    partition = Partition(
        lowering.hold(head.meta.get("op") or head.name, None), head.meta.get("op"), chain.row, arguments,
        tuple(operands), tuple(steps), chain.out, _reference(chain, inputs, operands), chain.norm,
    )  # fmt: skip
    lowering.modules[partition.name] = partition
    int8_result = chain.out is not None or last.meta.get("dtype") is torch.uint8
    dtype = torch.uint8 if int8_result else torch.float32
    new = lowering.call(last, partition.name, tuple(inputs), last, dtype=dtype,
                        qparams=chain.out or last.meta.get("qparams"), op=head.meta.get("op"))  # fmt: skip
    lowering.replace(last, new)
    for node in chain.nodes[1:]:
        if is_quantize(node) or is_smoothing(node):  # of whoever reads it
            continue
        if (op := node.meta.get("op")) is not None and op != head.meta.get("op"):
            lowering.kernels.setdefault(op, f"fused into {head.meta.get('op') or head.name}")
    return f"onednn: {partition.words}"


def _reference(chain: Chain, inputs: Sequence[fx.Node], operands: Sequence[Operand]) -> fx.Graph:
    """The chain's own nodes, and what they dequantize, as a graph of the partition's inputs."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        known[node] = graph.placeholder(f"input_{i}")

    def copied(node: fx.Node) -> fx.Node:
        if node not in known:
            known[node] = graph.node_copy(node, copied)
        return known[node]

    for node in chain.nodes:
        copied(node)
    graph.output(known[chain.nodes[-1]])
    return graph


def read_channels_last(lowering: Lowering) -> None:
    """Quantize to the layout that the reader wants."""
    for node in lowering.graph.nodes:
        partition = lowering.modules.get(node.target) if node.op == "call_module" else None
        if isinstance(partition, Partition) and partition.row is _QUANTIZE and any(
            isinstance(reader := lowering.modules.get(user.target), Partition) and reader.row.ndim
            for user in node.users if user.op == "call_module"
        ):  # fmt: skip
            lowering.modules[node.target] = dataclasses.replace(partition, channels_last=True)


def _is_by_row(node: fx.Node) -> bool:
    found = _head(node)
    return found is not None and found[0] is _LINEAR_BY_ROW


def _reason_by_row(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    return _reason(lowering, nodes) if lowering.dtype is torch.float32 else "rows are quantized in float32"


def _is_between(node: fx.Node) -> bool:
    """Whether a node only brings a value into the form in which ops take it: what computes goes first."""
    return is_dequantize(node) or is_quantize(node) or is_smoothing(node)


REWRITES: list[Rewrite] = [
    SILU,
    MOVES,
    _Partitioning("linear_by_row", [_is_by_row], _reason_by_row, _partition),
    DYNAMIC_LINEAR,
    WEIGHT_ONLY_LINEAR,
    _Partitioning("partition", [lambda n: _is_head(n) and not _is_between(n)], _reason, _partition),
    _Partitioning("smooth", [is_smoothing], _reason, _partition),
    _Partitioning("quantize", [is_quantize], fine, _partition),
    _Partitioning("dequantize", [is_dequantize], fine, _partition),
]
