"""Telling the user's code that it is being captured.

Libraries ask ``torch.compiler.is_compiling()`` before they look at values to save work (an attention mask that masks
nothing, for one).
The flag behind it is process-wide; here it is true for one thread only, so other models in the process do not notice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .._torch import is_compiling_flag, set_is_compiling_flag


class _ThreadFlag:
    """Stands in for torch's flag: true on the threads that capture, and elsewhere what the flag was."""

    def __init__(self) -> None:
        self.captures = threading.local()
        self.lock = threading.Lock()
        self.users = 0
        self.original: bool = False

    def __bool__(self) -> bool:
        return getattr(self.captures, "depth", 0) > 0 or bool(self.original)

    def __or__(self, other: bool) -> bool:
        return bool(self) or other

    def __and__(self, other: bool) -> bool:
        return bool(self) and other

    __ror__, __rand__ = __or__, __and__


_flag = _ThreadFlag()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true on this thread."""
    with _flag.lock:
        if not _flag.users:
            _flag.original = is_compiling_flag()
            set_is_compiling_flag(_flag)
        _flag.users += 1
    _flag.captures.depth = getattr(_flag.captures, "depth", 0) + 1
    try:
        yield
    finally:
        _flag.captures.depth -= 1
        with _flag.lock:
            _flag.users -= 1
            if not _flag.users:
                set_is_compiling_flag(_flag.original)
