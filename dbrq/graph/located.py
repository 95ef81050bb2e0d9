"""Which op of a graph is at work, so that what torch or Python raises there becomes an error that says so."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

from torch import fx

from ..errors import ERRORS_OF_CODE, QuantizationError, RewriteError

_at_work: ContextVar[fx.Node | None] = ContextVar("dbrq_at_work", default=None)
#: How TorchScript's errors show the line of the graph's code that they mean.
_MARKED = re.compile(r"^\s*(\w+) = [^\n]*\n\s*~+ <--- HERE", re.MULTILINE)


def at(node: fx.Node) -> None:
    """From now on, ``node`` is worked at."""
    _at_work.set(node)


@contextlib.contextmanager
def naming_ops(what: str, graph: fx.Graph) -> Iterator[None]:
    """Turn what is raised inside into a ``RewriteError`` that names the op at work, its module and its line.

    Args:
        what: what is done inside, for the message.
        graph: where an op is looked for that TorchScript names.
    """
    token = _at_work.set(None)
    try:
        yield
    except QuantizationError:
        raise
    except ERRORS_OF_CODE as error:
        raise located(what, error, _at_work.get() or marked(graph, error)) from error
    finally:
        _at_work.reset(token)


def located(what: str, error: Exception, node: fx.Node | None) -> RewriteError:
    """``what`` failed with ``error`` at ``node``."""
    meta = {} if node is None else node.meta
    return RewriteError(
        f"{what} failed: {error}", path=meta.get("path", ""), op=None if node is None else op_of(node),
        got=f"{type(error).__name__} at {meta.get('site') or 'an unknown line'}",
        hint="keep using the converted model, leave this op's part out of what is lowered, or spell it otherwise",
    )  # fmt: skip


def op_of(node: fx.Node) -> str:
    """What a node computes, as one would call it."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return str(node.meta.get("op") or target)


def marked(graph: fx.Graph, error: Exception) -> fx.Node | None:
    """The node that an error of TorchScript shows."""
    found = _MARKED.search(str(error))
    return None if found is None else next((node for node in graph.nodes if node.name == found[1]), None)
