"""``export``: the Q/DQ graph as an ``ExportedProgram``, which torch's own tools read."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .._torch import (
    ASSERT_SCALAR,
    EXPORT_LOGGERS,
    assert_,
    check_traced,
    codegen_of,
    load_compiler,
    pytree,
    shape_settings,
)
from ..calibration.surgery import random_state_kept
from ..errors import ERRORS_OF_CODE, RewriteError, is_bug
from ..graph.nodes import DEQUANTIZE_PER_CHANNEL
from ..graph.signature import RestoringCodeGen
from ..guards import without_autocast
from ..pytree import call_arguments
from ..quiet import quiet
from ..rewriter import Recording, record

log = logging.getLogger("dbrq.lowering")

#: Where a program's ``graph_module.meta`` has what it checks, as torch's symbols say it -> as its message says it.
CHECKS = "dbrq_checks"


def export(
    quantized: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """A converted model as a ``torch.export.ExportedProgram``: aten ops in float between ``quantized_decomposed`` ops.

    The model itself need not survive ``torch.export``: what is exported is the graph of ``rewrite``. The program saves
    and loads with ``torch.export.save`` and ``load``, and runs through ``torch._inductor.aoti_compile_and_package``.

    Args:
        quantized: what ``convert`` returned. It is not changed.
        example_inputs: one call's arguments, as in ``prepare``. The program is called like this.
        example_kwargs: keyword arguments beside them.
        dynamic_shapes: as in ``torch.export.export``, for the inputs given. None: every size of every tensor, and every
            integer, that the graph does not depend on stays free, a batch of one included.

    Returns:
        The program. Output containers that ``torch.utils._pytree`` does not know become plain tuples and dicts.

    Raises:
        RewriteError: one graph cannot stand for the model, for the reason and the line that it names; or the graph
            does what ``torch.export`` cannot express.

    >>> import dbrq
    >>> quantized = dbrq.quantize(nn.Linear(4, 3), [torch.randn(8, 4)])
    >>> program = dbrq.export(quantized, torch.randn(8, 4))
    >>> program.module()(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """
    return exported(quantized, example_inputs, example_kwargs, dynamic_shapes)[0]


@without_autocast()
def exported(
    quantized: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> tuple[ExportedProgram, Recording]:
    """What ``export`` returns, and the recording that it was made from; its graph is used up."""
    args, _ = call_arguments(example_inputs, example_kwargs)
    recording = record(quantized, example_inputs, example_kwargs)
    graph = recording.graph
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    given = dict(zip(names, map(plain_containers, recording.inputs), strict=True))
    positional = tuple(given.pop(name) for name in names[: len(args)])
    named = {name: value for name, value in given.items() if name in recording.given}
    try:
        with random_state_kept():
            return program_of(graph, positional, named, dynamic_shapes), recording
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        raise RewriteError(
            f"torch.export does not take the graph: {type(error).__name__}: {error}", path="",
            hint="dbrq.rewrite gives the graph itself; a graph that decides on values of tensors may not export",
        ) from error  # fmt: skip


def program_of(
    graph: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> ExportedProgram:
    """The program of a Q/DQ graph, which is used up.

    Args:
        args, kwargs: the example's values for its placeholders, in plain containers.
        dynamic_shapes: as in ``torch.export.export``; None for as free as can be.
    """
    load_compiler()
    _make_symbolic(graph.graph)
    _dequantize_for_each(graph)
    graph.recompile()
    args, kwargs = tuple(args), dict(kwargs or {})
    if dynamic_shapes is not None:
        return _exported(graph, args, kwargs, dynamic_shapes)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    free = pytree.tree_map(_free, {**dict(zip(names, args, strict=False)), **kwargs})
    for oblivious in (True, False):  # a size of 1 in the example stays free; or else is 1
        try:
            # Copying a program, torch warns of its own classes.
            with shape_settings(backed_size_oblivious=oblivious), quiet(FutureWarning):
                program = _exported(graph, args, kwargs, free)
                tried = copy.deepcopy(program.module())  # which may write to its buffers
                tried(*copy.deepcopy(args), **copy.deepcopy(kwargs))
                return program
        except ERRORS_OF_CODE as error:  # torch's, of sizes that it cannot keep free
            if is_bug(error):
                raise
            log.info("exported with fewer free sizes, since torch fails where they are free: %s", error)
    return _exported(graph, args, kwargs, None)


class _Exportable(nn.Module):
    """A graph as a module that returns real dicts and lists, and such of the user's own containers as pytree knows."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self._modules.update(graph._modules)
        self._parameters.update(graph._parameters)
        self._buffers.update(graph._buffers)
        self._graph, codegen = graph.graph, codegen_of(graph.graph)
        self._returned: Callable[[Any], Any] = _plain
        if isinstance(codegen, RestoringCodeGen):
            self._returned = returned = copy.copy(codegen.returned)
            if not _is_known(returned.template):
                returned.template = _plain_output(returned.template)
        signature = inspect.signature(type(graph).forward)
        self._signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.__dict__["forward"] = forward = functools.partial(_Exportable._run, self)
        forward.__dict__["__signature__"] = self._signature

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with fx.traceback.preserve_node_meta():
            return self._returned(_plain(fx.Interpreter(self, graph=self._graph).run(*bound.args)))


def _plain(value: Any) -> Any:
    """fx has immutable containers of its own."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


def _exported(graph: fx.GraphModule, args: tuple, kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    # torch.export logs each size that it cannot keep free.
    with torch.no_grad(), quiet(loggers=EXPORT_LOGGERS):
        before = _checks.set({})
        try:
            program = torch.export.export(_Exportable(graph), args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            _say_where(program, _checks.get())
        finally:
            _checks.reset(before)
    return program


def _free(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return dict.fromkeys(range(leaf.dim()), Dim.AUTO)
    return Dim.AUTO if type(leaf) is int else None


def plain_containers(value: Any) -> Any:
    """Mappings as dicts: ``torch.utils._pytree`` takes others for leaves."""
    if isinstance(value, Mapping):
        return {key: plain_containers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(plain_containers(item) for item in value)
    return value


def _is_known(template: Any) -> bool:
    """Whether pytree can take an output apart."""
    return not any(isinstance(leaf, Mapping) or hasattr(leaf, "__dataclass_fields__") or isinstance(leaf, (list, tuple))
                   for leaf in pytree.tree_leaves(template))  # fmt: skip


def _plain_output(value: Any) -> Any:
    """dicts, lists and tuples, nested as the user's containers are."""
    if isinstance(value, Mapping):
        return {key: _plain_output(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain_output(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain_output(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


#: What the graph that is being exported checks, as torch's symbols say it -> as its message says it.
_checks: ContextVar[dict[str, str]] = ContextVar("checks")


def _check(condition: Any, message: str) -> None:
    if isinstance(condition, Tensor):
        condition = _bool(condition)
    if isinstance(condition, torch.SymBool):
        _checks.get().update(dict.fromkeys(_spellings(condition.node.expr), message))
    check_traced(condition, lambda: message)


def _spellings(expr: sympy.Basic) -> list[str]:
    """How torch may come to say what is checked: an equal number is one in a range."""
    if isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs.is_Integer:
        return [str(e) for e in (expr, expr.lhs <= expr.rhs, expr.lhs >= expr.rhs)]
    return [str(expr)]


def _say_where(program: ExportedProgram, checks: Mapping[str, str]) -> None:
    """Checks of numbers that were read from tensors are torch's own in a program, in symbols."""
    for node in program.graph.find_nodes(op="call_function", target=ASSERT_SCALAR):
        expression = re.search("expression (.*) on node", node.args[1])
        if expression is not None and expression[1] in checks:
            node.args = (node.args[0], checks[expression[1]])
    program.graph_module.recompile()
    program.graph_module.meta[CHECKS] = dict(checks)


def _as_tensor(x: Any, kinds: Any = torch.SymFloat) -> Any:
    """A number that was read from tensors, as one again; any other as it is.

    torch 2.13 checks nothing of such floats when a program runs, and of sizes that depend on values it takes an upper
    bound of 0 or 1 for 2.
    """
    if not isinstance(x, kinds) or not free_unbacked_symbols(x):
        return x
    return torch.scalar_tensor(x, dtype=torch.float64 if isinstance(x, torch.SymFloat) else torch.int64)


def _comparing(function: Callable) -> Callable:
    equality = function in (operator.eq, operator.ne)  # of integers: torch makes use of it for sizes
    kinds = torch.SymFloat if equality else (torch.SymFloat, torch.SymInt)

    def compare(a: Any, b: Any) -> Any:
        if isinstance(b, bool) and isinstance(a, torch.SymBool):  # which no arithmetic takes
            return a if function(True, b) else torch.sym_not(a)
        a, b = _as_tensor(a, kinds), _as_tensor(b, kinds)
        if isinstance(b, bool) and isinstance(a, Tensor):  # Inductor's ranges have no bools
            return a if function(True, b) else a.logical_not()
        return function(a, b)

    return compare


def _bool(x: Any) -> Any:
    """(Bools themselves are symbols that Inductor of torch 2.13 trips over.)"""
    x = _as_tensor(x)
    if isinstance(x, Tensor):
        return (x if x.dtype is torch.bool else x != 0).to(torch.int64).item() != 0
    return x if isinstance(x, (bool, torch.SymBool)) else x != 0


def _item(x: Tensor) -> Any:
    return _bool(x) if x.dtype is torch.bool else x.item()


def _int(x: Any) -> Any:
    x = _as_tensor(x)
    return x.to(torch.int64).item() if isinstance(x, Tensor) else torch.sym_int(x)


def _float(x: Any) -> Any:
    return torch.sym_float(x.item() if isinstance(x, Tensor) else x)


def _all_equal(a: Tensor, b: Tensor) -> Any:
    return a.shape == b.shape and _bool((a == b).all())


def _all_close(*args: Any, **kwargs: Any) -> Any:
    return _bool(torch.isclose(*args, **kwargs).all())


def _unbind(x: Tensor, dim: int = 0, *, parts: int, message: str) -> Any:
    _check(x.shape[dim] == parts, message)
    return torch.unbind(x, dim)


#: What gives plain numbers, or wants them -> the like for numbers that are not known yet.
_SYMBOLIC: dict[Any, Callable] = {
    int: _int, float: _float, bool: _bool, assert_: _check,
    torch.equal: _all_equal, torch.allclose: _all_close, torch.is_nonzero: _bool,
    **{f: _comparing(f) for f in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)},
}  # fmt: skip


def _make_symbolic(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SYMBOLIC:
            node.target = _SYMBOLIC[node.target]
        elif node.op == "call_method" and node.target == "item":
            node.op, node.target = "call_function", _item
        elif node.target in (torch.unbind, "unbind") and (asserted := _parts(node)) is not None:
            node.op, node.target, node.kwargs = "call_function", _unbind, {**node.kwargs, **asserted}


def _parts(node: fx.Node) -> dict[str, Any] | None:
    """The number of results that the graph asserts; torch.export wants to know it before there are any."""
    for count in node.users:
        for equal in count.users if count.target is len else ():
            for check in equal.users:
                if check.target in (assert_, _check):
                    return {"parts": equal.args[1], "message": check.args[1]}
    return None


def _dequantize_for_each(graph: fx.GraphModule) -> None:
    """A weight that several ops read is dequantized for each of them: Inductor's int8 patterns want one reader. Only
    scales of its own keep the copies apart, which are equal otherwise.
    """
    for node in graph.graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL):
        int8, scale, *rest = node.args
        for number, user in enumerate(list(node.users)[1:]):
            name = f"{scale.target.replace('.', '_')}_again_{number}"
            graph.register_buffer(name, operator.attrgetter(scale.target)(graph).clone())
            with graph.graph.inserting_before(user):
                again = graph.graph.call_function(node.target, (int8, graph.graph.get_attr(name), *rest))
            user.replace_input_with(node, again)
