"""What a command found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a command prints.

    Attributes:
        text: for a person.
        data: for a machine: dicts, lists, strings, numbers and None.
        problems: what was asked for and does not hold, a sentence each.
    """

    text: str
    data: Any
    problems: tuple[str, ...] = ()
