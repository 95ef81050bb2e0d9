"""``export``: the Q/DQ graph as an ``ExportedProgram``, which torch's own tools read."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.fx.experimental._config as shape_config
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.graph import CodeGen

from .containers import call_arguments
from .errors import RewriteError
from .graph_io import RestoringCodeGen
from .guards import without_autocast
from .rewriter import Recording, record


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
        example_inputs, example_kwargs: one call's arguments, as in ``prepare``. The program is called like this.
        dynamic_shapes: as in ``torch.export.export``, for the inputs given. None: every size of every tensor, and every
            integer, that the graph does not depend on stays free, a batch of one included.

    Returns:
        The program. Its outputs are in plain dicts, lists and tuples, nested as the model's own.

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
    _return_plain(graph.graph)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    given = dict(zip(names, map(plain_containers, recording.inputs), strict=True))
    positional = tuple(given.pop(name) for name in names[: len(args)])
    named = {name: value for name, value in given.items() if name in recording.given}
    _fix_defaults(graph.graph, given.keys() - named.keys())
    try:
        return program_of(graph, positional, named, dynamic_shapes), recording
    except Exception as error:
        raise RewriteError(
            f"torch.export does not take the graph: {type(error).__name__}: {error}", path="",
            hint="dbrq.rewrite gives the graph itself; a graph that decides on values of tensors may not export",
        ) from error  # fmt: skip


def _fix_defaults(graph: fx.Graph, names: Set[str]) -> None:
    """Put defaults in the place of inputs that the example does not give.

    ``torch.export`` runs graphs with their inputs in a row, and would take what comes after such an input for it.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.target in names:
            (default,) = node.args or (None,)

            def fixed(arg: fx.Node, node: fx.Node = node, default: Any = default) -> Any:
                return default if arg is node else arg

            for user in list(node.users):
                user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), fixed)
            graph.erase_node(node)


def program_of(
    graph: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> ExportedProgram:
    """The program of a Q/DQ graph, which is used up.

    Args:
        args, kwargs: the example's values for its placeholders, in plain containers.
        dynamic_shapes: as in ``torch.export.export``; None for as free as can be.
    """
    _make_symbolic(graph.graph)
    graph.recompile()
    args, kwargs = tuple(args), dict(kwargs or {})
    if dynamic_shapes is not None:
        return _exported(graph, args, kwargs, dynamic_shapes)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    free = pytree.tree_map(_free, {**dict(zip(names, args, strict=False)), **kwargs})
    for oblivious in (True, False):  # a size of 1 in the example stays free; or else is 1
        with contextlib.suppress(Exception), shape_config.patch(backed_size_oblivious=oblivious):
            program = _exported(graph, args, kwargs, free)
            program.module()(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            return program
    return _exported(graph, args, kwargs, None)


def _exported(graph: fx.GraphModule, args: tuple, kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    with torch.no_grad(), warnings.catch_warnings(), _silent():
        warnings.simplefilter("ignore")
        return torch.export.export(graph, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """torch.export logs each size that it cannot keep free."""
    loggers = [logging.getLogger(name) for name in ("torch._export", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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


def _return_plain(graph: fx.Graph) -> None:
    """Return dicts, lists and tuples, nested as in the user's output; code that restores its classes is not traced."""
    codegen = graph._codegen
    if isinstance(codegen, RestoringCodeGen):
        returned = copy.copy(codegen.returned)
        returned.template = _plain_output(returned.template)
        output = graph.output_node()
        output.args = (returned(output.args[0]),)
        graph.set_codegen(CodeGen())


def _plain_output(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_output(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain_output(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain_output(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _check(condition: Any, message: str) -> None:
    torch._check(bool(condition) if isinstance(condition, Tensor) else condition, lambda: message)


def _int(x: Any) -> Any:
    return torch.sym_int(x.item() if isinstance(x, Tensor) else x)


def _float(x: Any) -> Any:
    return torch.sym_float(x.item() if isinstance(x, Tensor) else x)


def _bool(x: Any) -> Any:
    if isinstance(x, Tensor):
        x = x.item()
    return x if isinstance(x, torch.SymBool) else x != 0


def _eq(x: Any, y: Any) -> Any:
    """sympy does not compare truth values that are not known yet."""
    if isinstance(x, torch.SymBool) and isinstance(y, bool):
        return x if y else torch.sym_not(x)
    return x == y


#: Python functions that want plain numbers -> their likes for numbers that are not known yet.
_SYMBOLIC: dict[Any, Callable] = {bool: _bool, int: _int, float: _float, operator.eq: _eq, torch._assert: _check}


def _make_symbolic(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SYMBOLIC:
            node.target = _SYMBOLIC[node.target]
