"""torch without its announcements, on the thread that asks for it and nowhere else.

``warnings.catch_warnings`` and levels of loggers are the process's: what one thread puts back, another has changed
meanwhile. So here one filter of warnings, and one for each logger concerned, are put in for good; they let everything
through but where the context they are asked in wants quiet.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

#: Categories of warnings that are not wanted here and now.
_categories: ContextVar[tuple[type[Warning], ...]] = ContextVar("categories", default=())
#: Loggers of which nothing less than errors is wanted here and now, with those below them.
_loggers: ContextVar[tuple[str, ...]] = ContextVar("loggers", default=())


class _IfUnwanted(type):
    """A filter of warnings asks whether what is given is a subclass of its category."""

    def __subclasscheck__(cls, category: type) -> bool:
        unwanted = _categories.get()
        return bool(unwanted) and issubclass(category, unwanted)


class _Unwanted(Warning, metaclass=_IfUnwanted):
    """Stands for the categories that are not wanted where the question is asked."""


@contextlib.contextmanager
def quiet(*categories: type[Warning], loggers: tuple[str, ...] = ()) -> Iterator[None]:
    """Neither warnings of these categories, nor log records of these loggers that are less than errors.

    Args:
        categories: of warnings; none means all.
        loggers: names; of loggers below them nothing is logged either.
    """
    if not warnings.filters or warnings.filters[0][2] is not _Unwanted:
        warnings.simplefilter("ignore", _Unwanted)  # before the user's, and once
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and _is_below(name, loggers):
            logger.addFilter(_wanted)
    before, before_of_loggers = _categories.set(categories or (Warning,)), _loggers.set(loggers)
    try:
        yield
    finally:
        _categories.reset(before)
        _loggers.reset(before_of_loggers)


def _wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not _is_below(record.name, _loggers.get())


def _is_below(name: str, names: tuple[str, ...]) -> bool:
    return any(name == n or name.startswith(f"{n}.") for n in names)


def quietly(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """torch announces the end of torch.jit at every call of it."""
    with quiet(DeprecationWarning):
        return function(*args, **kwargs)
