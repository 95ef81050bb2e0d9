"""Around ``compile_fx``: the compiler, Inductor's settings, what it is given, and what it assumed of that."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import Dim

from ... import _torch
from ..._torch import ASSERT_METADATA, pytree
from ...errors import CompilerError
from ...quiet import quiet
from .forms import Used


def check_compiler() -> None:
    """Raise if there is no C++ compiler."""
    try:
        _torch.cpp_compiler()
    except (_torch.no_cpp_compiler(), OSError) as error:
        raise CompilerError(
            "the inductor backend needs a C++ compiler, and there is none", expected="g++ or clang++, or CXX set",
            got=str(error).strip().splitlines()[0],
            hint='backend="onednn" and backend="torchscript" need none',
        ) from error  # fmt: skip


@contextlib.contextmanager
def compiling_alone() -> Iterator[None]:
    """One compilation at a time, the user's own with ``torch.compile`` included: the lock is torch's."""
    with _torch.compile_lock():
        yield


@contextlib.contextmanager
def inductor_settings(cpp_wrapper: bool) -> Iterator[None]:
    """Inductor's, while it compiles, on this thread alone, as all of its settings are: weights are constants, which its
    int8 passes ask for.
    """
    passes = (*_torch.inductor_late_passes(), _double)
    settings = {
        "freezing": True, "cpp_wrapper": cpp_wrapper, "fallback_random": True, "joint_custom_post_pass": passes,
    }  # fmt: skip
    with torch.no_grad(), quiet(), _torch.inductor_settings(settings):
        yield


def _double(graph: fx.Graph) -> None:
    """``x + x`` as ``2 * x``, which is the same number: torch 2.13 asserts that what is added to the result of an int8
    layer is something else.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        a, b = node.args
        value = node.meta.get("val")
        if node.kwargs or not isinstance(b, fx.Node) or not isinstance(value, Tensor) or not _is_same(a, b):
            continue
        if value.is_floating_point():
            node.target, node.args = torch.ops.aten.mul.Tensor, (a, 2)


def _is_same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two nodes compute the same, which Inductor merges behind its passes."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and a == b
    if a is b or depth == 0 or a.op != "call_function" or a.is_impure():
        return a is b
    if (a.target, a.kwargs) != (b.target, b.kwargs) or len(a.args) != len(b.args):
        return False
    return all(_is_same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def dynamic_shapes(
    graph: fx.Graph, flat: Sequence[Any], nested: pytree.TreeSpec, free: frozenset[tuple[int, int]]
) -> dict[str, Any]:
    """``torch.export``'s way to say which sizes are free."""
    shapes = [
        {d: Dim.AUTO for d in range(leaf.dim()) if (i, d) in free} if isinstance(leaf, Tensor)
        else Dim.AUTO if (i, -1) in free else None
        for i, leaf in enumerate(flat)
    ]  # fmt: skip
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return dict(zip(names, pytree.tree_unflatten(shapes, nested), strict=True))


def narrow(graph: fx.Graph) -> None:
    """Let dtypes be others than in the program, but for those of outputs."""
    for node in graph.find_nodes(op="call_function", target=ASSERT_METADATA):
        graph.erase_node(node)
    output = graph.output_node()
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            with graph.inserting_before(output):
                output.replace_input_with(node, graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32)))


def take_used(graph: fx.Graph) -> tuple[Used, list[Any]]:
    """Drop the inputs that a graph does not read and add its free sizes; what it takes then, and examples of that."""
    placeholders = graph.find_nodes(op="placeholder")
    inputs = tuple(i for i, node in enumerate(placeholders) if node.users)
    sizes: dict[Any, tuple[int, int, Any]] = {}
    for i, node in enumerate(placeholders):
        if not node.users:
            graph.erase_node(node)
        elif isinstance(value := node.meta["val"], Tensor):
            shape: Iterable[Any] = value.shape
            for d, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    sizes.setdefault(size.node.expr, (i, d, size))
    with graph.inserting_before(next(iter(graph.nodes))):
        for i, d, _ in sizes.values():
            graph.placeholder(f"size_{i}_{d}")
    # Taken away, since for C++ wrappers Inductor trusts these rather than its arguments, and in them tensors only.
    examples = [*(size for _, _, size in sizes.values()), *(placeholders[i].meta.pop("val") for i in inputs)]
    return Used(tuple((i, d) for i, d, _ in sizes.values()), inputs), examples


def guards_of(examples: Sequence[Any], used: Used) -> Callable[[Sequence[Any]], bool]:
    """What compiling assumed of sizes, as a function of the inputs."""
    mode = _torch.detect_fake_mode(examples)
    shapes = None if mode is None else mode.shape_env
    code = None if shapes is None else shapes.produce_guards_expression(examples)
    if code is None or shapes is None:
        return lambda flat: True
    return lambda flat: bool(shapes.evaluate_guards_expression(code, used.of(flat)))


def numbers_of(used: Used, examples: Sequence[Any]) -> Callable[[Sequence[Any]], dict[sympy.Symbol, int]]:
    """What free sizes and integers are, as a function of the inputs."""
    symbols = [example.node.expr if isinstance(example, torch.SymInt) else None for example in examples]

    def numbers(flat: Sequence[Any]) -> dict[sympy.Symbol, int]:
        return {symbol: n for symbol, n in zip(symbols, used.of(flat), strict=True) if symbol is not None}

    return numbers


def calls_of(code: str) -> Counter[str]:
    """Calls of kernels in code that Inductor generated, Python or C++, by name without overload."""
    called = re.findall(r"torch\.ops\.((?:onednn|mkldnn|quantized|aten|mkl)\.\w+)\.\w+\(", code)
    called += [f"extern.{name}" for name in re.findall(r"extern_kernels\.(\w+)\(", code)]
    in_cpp = re.findall(r"aoti_torch_cpu__(q\w+?_pointwise)(?:_binary)?_tensor\(", code)
    return Counter([*called, *(f"onednn.{name}" for name in in_cpp)])
