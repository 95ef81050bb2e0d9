"""Where in the user's code an op is written: what tells the ops of one module apart, however its code branches.

A *site* is the chain of the user's functions from the op up to the forward of the module that runs it, by name and
line within the function, so that it survives an edit elsewhere in the file. A *spot* is the same for one process only,
and quick: it is compared at every functional op of a converted model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import torch

from ..errors import OWN_FOLDER

# Stands in for torch's own Python, which the user calls.
_DECOMPOSITIONS = os.path.join(OWN_FOLDER, "eager", "decompositions.py")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED, _USER, _BORDER = range(3)
#: id of a code object -> that and its kind. (The hash of a code object is slow, and some of TorchDynamo's have none.)
_kinds: dict[int, tuple[CodeType, int]] = {}

Site = tuple[str, ...]
Spot = tuple


def border(function: Callable) -> Callable:
    """Mark ``function`` as what calls the forward of a module, where the chain of a site ends."""
    _kinds[id(function.__code__)] = function.__code__, _BORDER
    return function


def _kind(code: CodeType) -> int:
    known = _kinds.get(id(code))
    if known is None:
        file = code.co_filename
        ours = file.startswith((OWN_FOLDER, _TORCH)) and file != _DECOMPOSITIONS
        known = _kinds[id(code)] = code, _SKIPPED if ours else _USER
    return known[1]


def _user_frames() -> list[FrameType]:
    """The user's frames inside the forward that runs, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind == _BORDER:
            break
        if kind == _USER:
            found.append(frame)
        frame = frame.f_back
    return found


def site() -> Site:
    """The site of the op that runs now; a function that calls itself counts once."""
    return tuple(dict.fromkeys(map(_described, _user_frames())))


def _described(frame: FrameType) -> str:
    code = frame.f_code
    file = code.co_filename
    name = "<made>" if file.startswith("<") else os.path.basename(file)
    return f"{name}:{code.co_name}:{frame.f_lineno - code.co_firstlineno}"


def spot() -> Spot:
    """The innermost instruction of the user's code that runs now; () if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        known = _kinds.get(id(code))
        kind = known[1] if known is not None else _kind(code)
        if kind == _USER:
            return (id(code), frame.f_lasti)  # the code is kept with its kind
        if kind == _BORDER:
            break
        frame = frame.f_back
    return ()


def chain_of_spots() -> Spot:
    """All instructions of the user's code that run now, for sites that share the innermost one."""
    return tuple((id(frame.f_code), frame.f_lasti) for frame in _user_frames())


def user_line() -> str:
    """The nearest line of the user's code, for messages."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((OWN_FOLDER, _TORCH)):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
