"""Signs of life on stderr for work that takes long: a line that changes, where tqdm and a terminal are there."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def on_terminal(progress: bool | None) -> bool:
    """What ``progress=None`` means: if stderr is a terminal."""
    return (sys.stderr is not None and sys.stderr.isatty()) if progress is None else progress


def counted(items: Iterable[T], what: str, progress: bool | None = None, unit: str = "op") -> Iterable[T]:
    """``items``, with a bar while they are gone through.

    >>> list(counted([1, 2], "counting", progress=False))
    [1, 2]
    """
    if not on_terminal(progress):
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, unit=unit, leave=False)


class Stages:
    """What long work is at. Use it as a context; ``at`` says what begins.

    Args:
        what: is done.
        progress: show it with tqdm, if that is installed; None means: if stderr is a terminal.
        verbose: print a line for each stage, with the seconds since the beginning.

    >>> with Stages("counting", progress=False) as stages:
    ...     stages.at("one")
    """

    def __init__(self, what: str, progress: bool | None = None, verbose: bool = False) -> None:
        self.what, self.verbose, self.start = what, verbose, time.perf_counter()
        self._bar: Any = None
        if on_terminal(progress) and not verbose:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(desc=what, bar_format="{desc} [{elapsed}]", leave=False)

    def at(self, stage: str) -> None:
        """``stage`` begins."""
        if self.verbose:
            print(f"dbrq: {time.perf_counter() - self.start:6.1f} s  {self.what}: {stage}", file=sys.stderr)
        if self._bar is not None:
            self._bar.set_description_str(f"{self.what}: {stage}")

    def say(self, message: str) -> None:
        """Print a line, if ``verbose``."""
        if self.verbose:
            print(message, file=sys.stderr)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
