"""The torchscript backend: int8 patterns of the Q/DQ graph become calls of stock torch kernels, one each where there
is one.

``REWRITES`` is the whole of it, most specific first. What no rewrite takes is computed in float between ``Quantize``
and ``dequantize``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from .._torch import assert_
from ..errors import RewriteError
from ..kernels import NO_POST_OP, SUPPORTED_POST_OPS, PostOp, QParams, choice, ints, script
from ..kernels.script.recurrent import Recurrent, RecurrentCell
from ..mappings import Role
from ..op_facts import called, family, is_random, is_unsaid, is_written, writes
from .engine import (
    Lowering,
    Rewrite,
    bind,
    bind_known,
    first_input,
    is_call,
    is_dequantize,
    is_quantize,
    is_smoothing,
    qparams_of,
    row_of,
)
from .patterns import (
    DEQUANTIZE_WEIGHT,
    DYNAMIC_LINEAR,
    MOVES,
    SILU,
    WEIGHT_ONLY_LINEAR,
    computes,
    epilogues,
    fine,
    inputs_of,
    is_activation,
    named,
    on,
)


def _post_op(node: fx.Node) -> PostOp | None:
    row, bound = bind_known(node)
    return None if row.post_op is None else row.post_op(bound)


_ADD = named("add")
_CONV, _LINEAR = computes(1, 2, 3), computes(0)

# Convolutions and linear layers


def _takes_post_op(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    post_op, row = _post_op(nodes[1]), row_of(nodes[0])
    assert row is not None
    if post_op is None or post_op.name not in SUPPORTED_POST_OPS[row.ndim]:
        return f"the stock {row.name} kernel takes no {nodes[1].name}"
    return ""


def _takes_sum(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Whether an add behind a convolution or linear layer can be part of it."""
    head, add = nodes[:2]
    _, bound = bind_known(add)
    head_row = row_of(head)
    assert head_row is not None
    if head_row.ndim not in (0, 2):
        return f"the stock {head_row.name} kernel takes no sum"
    if bound[2] not in (None, 1):
        return "the sum is scaled"
    other = _other(head, add)
    if other is head or not isinstance(other, fx.Node):
        return "the other operand is no other tensor"
    if other.op == "get_attr" or other.meta.get("shape") != head.meta.get("shape"):
        return "the other operand broadcasts"
    if other.meta.get("dtype") is not torch.float32:
        return f"the other operand is {other.meta.get('dtype')}"
    if is_quantize(nodes[-1]) and head_row.ndim and not is_dequantize(other) and not _is_pointwise(head):
        return "the stock kernel writes uint8 over uint8 only, and the other operand is float"
    return ""


#: Multiply-accumulates from which on the linear kernel is the faster one for a 1x1 convolution (benchmarks/lowered.py).
_POINTWISE_FROM = 25_000_000


def _is_pointwise(node: fx.Node) -> bool:
    """A conv2d that is best run as the linear layer over channels that it is."""
    row, bound = bind_known(node)
    if row.ndim != 2 or bound[6] != 1 or bound[1].meta["shape"][2:] != (1, 1):
        return False
    plain = ints(bound[3], 2) == [1, 1] and ints(bound[4], 2) == [0, 0]
    return plain and math.prod(node.meta["shape"]) * bound[1].meta["shape"][1] >= _POINTWISE_FROM


def _other(head: fx.Node, add: fx.Node) -> Any:
    _, bound = bind_known(add)
    return bound[1] if bound[0] is head else bound[0]


def _fuse(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """One kernel for a convolution or linear layer and what follows it."""
    head, last = nodes[0], nodes[-1]
    row, bound = bind_known(head)
    source = bound[0]
    out = qparams_of(last) if is_quantize(last) else None
    add = next((n for n in nodes[1:] if _ADD(n)), None)
    behind = next((n for n in nodes[1:] if is_activation(n)), None)
    post_op = NO_POST_OP if behind is None else _post_op(behind)
    weight: dict[str, Any] = {
        "weight": lowering.tensor(bound[1].args[0]), "scale": lowering.tensor(bound[1].args[1]),
        "bias": None if bound[2] is None else lowering.tensor(bound[2]), "input": qparams_of(source), "out": out,
        "post_op": post_op, "dtype": lowering.dtype,
    }  # fmt: skip
    pointwise = row.ndim == 2 and _is_pointwise(head)
    if row.ndim and not pointwise:
        n = row.ndim
        weight.update(
            stride=ints(bound[3], n), padding=ints(bound[4], n), dilation=ints(bound[5], n), groups=bound[6],
            shape=source.meta["shape"],
        )  # fmt: skip
    inputs: list[fx.Node] = [source.args[0]]
    kernel: nn.Module
    if add is not None:
        other = _other(head, add)
        qparams = None
        if is_dequantize(other) and out is not None:
            qparams, other = qparams_of(other), other.args[0]
        adding = script.PointwiseConvAdd if pointwise else script.ConvSum if row.ndim else script.LinearAdd
        kernel = adding(**weight, other=qparams, owned=False)
        inputs.append(other)
    else:
        kernel = (script.PointwiseConv if pointwise else script.Conv if row.ndim else script.Linear)(**weight)
    path = lowering.hold(head.meta.get("op") or head.name, kernel)
    dtype = lowering.dtype if out is None else torch.uint8
    new = lowering.call(last, path, tuple(inputs), last if out is None else head, dtype=dtype, qparams=out,
                        shape=last.meta["shape"], op=head.meta.get("op"))  # fmt: skip
    lowering.replace(last, new)
    name = "onednn.qlinear_pointwise" if pointwise or not row.ndim else f"onednn.qconv{row.ndim}d_pointwise"
    steps = "".join(f" + {found.name}" for n in nodes[1:] if (found := row_of(n)) is not None)
    return name + steps + ("" if out is None else " + quantize")


def _compute_rewrites() -> list[Rewrite]:
    return [
        Rewrite(name + suffix, [head, *steps], guard, _fuse)
        for suffix, steps, guard in epilogues(_takes_sum, _takes_post_op)
        for name, head in (("conv", _CONV), ("linear", _LINEAR))
    ]


# Matmuls


def _is_int8_matmul(node: fx.Node) -> bool:
    found = bind(node)
    return found is not None and found[0].name == "matmul" and all(map(is_dequantize, found[1][:2]))


def _int8_matmul(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """The product, and a division of it, in one scale."""
    head, last = nodes[0], nodes[-1]
    _, (a, b) = bind_known(head)
    qa, qb = qparams_of(a), qparams_of(b)
    scale = qa.scale * qb.scale
    if last is not head:
        scale /= float(bind_known(last)[1][1])
    args = (a.args[0], b.args[0], scale, qa.zero_point, qb.zero_point)
    lowering.replace(
        last, lowering.call(last, script.int8_matmul, args, last, op=head.meta.get("op"), dtype=torch.float32)
    )
    return "aten._int_mm" + (" + div" if last is not head else "")


def _divides_by_number(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    _, bound = bind_known(nodes[-1])
    fine = isinstance(bound[1], (int, float)) and bound[1] != 0 and bound[2] is None and bound[0] is nodes[0]
    return "" if fine else "the divisor is no number"


# On integers


def _averages(node: fx.Node) -> bool:
    row = row_of(node)
    if row is None or row.role is not Role.POOL or not is_dequantize(inputs_of(node)[0]):
        return False
    # Padding counts as real zeros, which shifting afterwards would not give.
    return row.name.startswith(("adaptive", "mean")) or not qparams_of(inputs_of(node)[0]).zero_point


def _average_to_int8(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    node, last = nodes
    source = inputs_of(node)[0]
    old, new = qparams_of(source), qparams_of(last)
    levels = lowering.call(node, script.levels, (source.args[0],), source, dtype=torch.float32)
    node.replace_input_with(source, levels)
    path = lowering.hold(node.meta.get("op") or node.name, script.AverageToInt8(old, new))
    lowering.replace(last, lowering.call(last, path, (node,), last, qparams=new, dtype=torch.uint8))
    lowering.erase(source)
    return "average of integers + quantize"


def _average_integers(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Averaging is linear: shift and scale the few results rather than the many inputs."""
    (node,) = nodes
    source = inputs_of(node)[0]
    qparams = qparams_of(source)
    levels = lowering.call(node, script.levels, (source.args[0],), source, dtype=torch.float32)
    node.replace_input_with(source, levels)
    node.meta["dtype"] = torch.float32
    with lowering.graph.inserting_after(node):
        scaled = lowering.graph.create_node(
            "call_function", script.scale_levels, (node, qparams.scale, qparams.zero_point), name=node.name
        )
    scaled.meta = dict(node.meta)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    lowering.erase(source)
    return "average of integers"


# Between float and int8


def _requantizes(node: fx.Node) -> bool:
    return is_quantize(node) and is_dequantize(node.args[0])


def _requantize(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    source = first_input(node)
    old, new = qparams_of(source), qparams_of(node)
    if old == new:
        lowering.replace(node, first_input(source))
        return "nothing"
    path = lowering.hold(f"{node.name}", script.Requantize(old, new))
    lowering.replace(node, lowering.call(node, path, (source.args[0],), node, qparams=new))
    return "requantize"


def _feeds_conv2d(lowering: Lowering, node: fx.Node) -> bool:
    return any(
        u.op == "call_module" and isinstance(k := lowering.kernel_of(u), script.Conv) and k.ndim == 2
        for u in node.users
    )


def _image_conv(lowering: Lowering, node: fx.Node) -> script.Conv | None:
    """The one convolution that reads a quantized image of three channels."""
    shape = first_input(node).meta.get("shape", ())
    users = list(node.users)
    if len(shape) != 4 or shape[1] != 3 or len(users) != 1 or users[0].op != "call_module":
        return None
    kernel = lowering.kernel_of(users[0])
    plain = type(kernel) is script.Conv and kernel.groups == 1 and kernel.ndim == 2
    alone = len(lowering.graph.find_nodes(op="call_module", target=users[0].target)) == 1
    return kernel if plain and alone else None


def _quantize(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    qparams = qparams_of(node)
    if (conv := _image_conv(lowering, node)) is not None:
        path = lowering.hold(node.name, script.QuantizeImage(qparams, conv.hand_padding))
        conv.takes_image()
        lowering.replace(node, lowering.call(node, path, (node.args[0],), node, qparams=qparams))
        return "quantize image"
    path = lowering.hold(node.name, script.Quantize(qparams, channels_last=_feeds_conv2d(lowering, node)))
    lowering.replace(node, lowering.call(node, path, (node.args[0],), node, qparams=qparams))
    return "quantize"


def _quantize_smoothed(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    product, node = nodes
    kernel = script.QuantizeSmoothed(qparams_of(node), lowering.tensor(product.args[1]))
    path = lowering.hold(node.name, kernel)
    lowering.replace(node, lowering.call(node, path, (product.args[0],), node, qparams=qparams_of(node)))
    return "multiply + quantize"


def _dequantize(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    qparams = qparams_of(node)
    args = (node.args[0], qparams.scale, qparams.zero_point, lowering.dtype)
    lowering.replace(node, lowering.call(node, script.dequantize, args, node, dtype=lowering.dtype))
    return "dequantize"


#: In order: spellings, integers, matmuls, convolutions and linear layers, and what is left between float and int8.
REWRITES: list[Rewrite] = [
    SILU,
    MOVES,
    Rewrite("matmul_div", [_is_int8_matmul, named("div")], _divides_by_number, _int8_matmul),
    on("matmul", _is_int8_matmul, _int8_matmul),
    *_compute_rewrites(),
    DYNAMIC_LINEAR,
    WEIGHT_ONLY_LINEAR,
    Rewrite("average_quantize", [_averages, is_quantize], fine, _average_to_int8),
    on("average", _averages, _average_integers),
    on("requantize", _requantizes, _requantize),
    Rewrite("quantize_smoothed", [is_smoothing, is_quantize], fine, _quantize_smoothed),
    on("quantize", is_quantize, _quantize),
    on("dequantize", is_dequantize, _dequantize),
    DEQUANTIZE_WEIGHT,
]


def check_said(lowering: Lowering) -> None:
    """Raise where TorchScript would drop a write, since schemas do not say that it is one or where it goes."""
    for node in lowering.graph.nodes:
        if is_unsaid(node) and (not node.users if writes(node) else is_written(node)):
            raise RewriteError(
                "TorchScript does not see that this op writes, or that what it gives is written to as a view",
                path=node.meta.get("path"), op=called(node), got=node.meta.get("site"),
                hint='write it with other ops, or use backend="onednn"',
            )  # fmt: skip


def keep_draws(lowering: Lowering) -> None:
    """Have random numbers drawn that no result needs, which TorchScript would leave out: later draws depend on them."""
    for node in list(lowering.graph.nodes):
        if is_random(node) and "dtype" in node.meta:
            with lowering.graph.inserting_after(node):
                count = lowering.graph.call_method("numel", (node,))
            with lowering.graph.inserting_after(count):
                drawn = lowering.graph.call_function(operator.ge, (count, 0))
            with lowering.graph.inserting_after(drawn):
                check = lowering.graph.call_function(assert_, (drawn, "dbrq: random numbers were drawn"))
            for new in (count, drawn, check):
                new.meta.update({key: node.meta[key] for key in ("path", "op", "site") if key in node.meta})


def own_accumulators(lowering: Lowering) -> None:
    """Fused adds may write over their other operand where nothing reads its memory afterwards."""
    order = {node: i for i, node in enumerate(lowering.graph.nodes)}
    for node in lowering.graph.nodes:
        kernel = lowering.modules.get(node.target) if node.op == "call_module" else None
        if not isinstance(kernel, (script.ConvSum, script.LinearAdd)):
            continue
        source, other = node.args[:2]
        fresh = other.op == "call_module" or is_call(other, script.dequantize) or is_call(other, script.max_pool)
        aliases = family(other)
        last = all(order[user] < order[node] for n in aliases for user in n.users if user is not node)
        uses = lowering.graph.find_nodes(op="call_module", target=node.target)
        if fresh and last and source not in aliases and len(uses) == 1:
            kernel.owned = True
        if isinstance(kernel, script.LinearAdd):
            kernel.settle()


def merge_linears(lowering: Lowering) -> None:
    """Linear layers of one input, all float out and alone, as one layer whose result is split: query, key and value."""
    graph = lowering.graph
    if lowering.writes:
        return
    for source in list(graph.nodes):
        group = [
            u for u in source.users if u.op == "call_module" and type(lowering.modules.get(u.target)) is script.Linear
        ]
        group = [u for u in group if len(graph.find_nodes(op="call_module", target=u.target)) == 1]
        kernels = [lowering.modules[u.target] for u in group]
        if len(group) < 2 or any(k.kind == 0 or k.post_op != "none" for k in kernels):
            continue
        group.sort()
        first = group[0]
        merged = script.Linear(
            torch.cat([k.weight for k in kernels]), torch.cat([k.scale for k in kernels]),
            torch.cat([k.bias for k in kernels]), QParams(kernels[0].input_scale, kernels[0].input_zero_point), None,
            dtype=lowering.dtype,
        )  # fmt: skip
        sizes = [k.weight.shape[0] for k in kernels]
        path = lowering.hold("_and_".join([first.target, *(u.target.rpartition(".")[2] for u in group[1:])]), merged)
        shape = (*first.meta["shape"][:-1], sum(sizes))
        whole = lowering.call(first, path, (source,), first, shape=shape, name=path.replace(".", "_"))
        parts = []
        for i, (node, size) in enumerate(zip(group, sizes, strict=True)):
            with graph.inserting_before(first):
                part = graph.call_method("narrow", (whole, -1, sum(sizes[:i]), size))
            part.meta = {**node.meta, "name": node.name}
            parts.append(part)
        for node, part in zip(group, parts, strict=True):
            lowering.replace(node, part)
        lowering.note("merge_linears", whole, "one kernel for " + ", ".join(u.target for u in group))


def prove_kernels(lowering: Lowering) -> None:
    """Try each kernel as the example calls it; put something else in the place of what is wrong here, or elsewhere."""
    for node in lowering.graph.nodes:
        words = ""
        if node.op == "call_module":
            words = _proven_module(lowering, node)
        elif is_call(node, script.max_pool) and not _pools_right(node):
            node.target, words = script.max_pool_of_levels, "float32 max pool of levels"
        elif is_call(node, script.int8_matmul):
            (m, k), n = node.args[0].meta["shape"][-2:], node.args[1].meta["shape"][-1]
            if not choice.is_matmul_right(m, k, n):
                node.target, words = script.matmul_of_levels, "float32 product of levels"
        if words:
            lowering.note("prove_kernels", node, words)
            op = node.meta.get("op")
            if op in lowering.kernels:
                _, plus, steps = lowering.kernels[op].partition(" + ")
                lowering.kernels[op] = words + plus + steps


def _proven_module(lowering: Lowering, node: fx.Node) -> str:
    """In words what now stands in for the kernel that a node calls, "" if nothing does."""
    kernel = lowering.kernel_of(node)
    if isinstance(kernel, (Recurrent, RecurrentCell)):
        return _proven_steps(kernel, first_input(node).meta["shape"])
    if not isinstance(kernel, (script.Conv, script.Linear)):
        return ""
    source = first_input(node)
    if isinstance(kernel, script.DynamicLinear):
        top = kernel.levels
    else:
        made = source.meta.get("qparams")
        top = 255 if made is None else made.quant_max
    new, words = choice.proven(kernel, source.meta["shape"], top)
    lowering.modules[str(node.target)] = new
    return words


def _proven_steps(recurrent: nn.Module, shape: Sequence[int]) -> str:
    """The same for the products of a recurrent layer, which takes whole sequences and single steps."""
    batch = 1 if len(shape) < 3 else shape[0] if getattr(recurrent, "batch_first", True) else shape[1]
    found = ""
    for module in list(recurrent.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, script.DynamicLinear):
                rows = math.prod(shape[:-1]) if name == "input" else batch
                new, words = choice.proven(child, (rows, child.weight.shape[1]), child.levels)
                setattr(module, name, new)
                found = found or words
    return found


def _pools_right(node: fx.Node) -> bool:
    """Whether a max pool is, as far as its settings are numbers; three dimensions need no kernel."""
    shape, settings = first_input(node).meta["shape"], list(node.args[1:])
    lists: list[Any] = settings[:4]
    ndim = len(lists[0])
    if ndim > 2 or not all(isinstance(n, int) for values in lists for n in values):
        return True
    if ndim == 1:
        shape = (*shape[:2], 1, shape[2])
        lists = [[fill, *values] for fill, values in zip((1, 1, 0, 1), lists, strict=True)]
    _, c, h, w = shape
    kernel, stride, padding, dilation = lists
    return all(
        choice.is_max_pool_right(shape, strides, kernel, stride, padding, dilation, bool(settings[4]))
        for strides in ((c * h * w, 1, w * c, c), (c * h * w, h * w, w, 1))
    )


def problem(lowering: Lowering, node: fx.Node) -> str:
    """What is wrong with a call of this backend's kernels; "" for what is right and for other nodes."""
    if node.op == "call_function":
        return ""
    kernel = lowering.kernel_of(node)
    wanted = torch.uint8 if isinstance(kernel, (script.Conv, script.Linear, script.Requantize)) else None
    if isinstance(kernel, script.DynamicLinear):
        wanted = None
    source = first_input(node)
    if wanted is not None and source.meta.get("dtype") is not wanted:
        return f"its input is {source.meta.get('dtype')}"
    qparams = source.meta.get("qparams")
    if isinstance(kernel, (script.Conv, script.Linear)) and wanted is not None and qparams is not None:
        folded = kernel.input_zero_point == 0 or kernel.input_zero_point == qparams.zero_point
        if not math.isclose(kernel.input_scale, qparams.scale) or not folded:
            return f"it reads its input with scale {kernel.input_scale}, and that was made with {qparams}"
    if isinstance(kernel, (script.ConvSum, script.LinearAdd)):
        other = node.args[1]
        assert isinstance(other, fx.Node)
        expected = torch.uint8 if kernel.kind == 0 and isinstance(kernel, script.ConvSum) else other.meta.get("dtype")
        if other.meta.get("dtype") is not expected or (kernel.owned and other is source):
            return "its accumulator has the wrong dtype, or is its input"
        made = other.meta.get("qparams")
        if made is not None and (made.scale, made.zero_point) != (kernel.other_scale, kernel.other_zero_point):
            return "it reads its accumulator with other qparams than that was made with"
        if kernel.owned and any(u is not node and not u < node for u in other.users):
            return "it writes over a value that is read later"
    return ""
