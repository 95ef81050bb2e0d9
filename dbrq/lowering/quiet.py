"""torch.jit without its announcements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def quietly(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """torch announces the end of torch.jit at every call of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        return function(*args, **kwargs)
