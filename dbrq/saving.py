"""``save`` and ``load``: a model and its int8 weights in one file."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from torch import nn

from .attachment import state_of
from .errors import LoadError, QuantizationError

_FORMAT = "dbrq"
_VERSION = 1


def save(model: nn.Module, path: str | os.PathLike) -> None:
    """Write a converted model to ``path``: its class by reference, its weights as int8.

    Raises:
        QuantizationError: the model is not a converted one.
    """
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None or state.token.phase != "int8":
        raise QuantizationError("save takes converted models", got=type(model).__name__, hint="call dbrq.convert first")
    content = {"format": _FORMAT, "version": _VERSION, "torch": torch.__version__, "model": model}
    unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"  # a failed save leaves the file that was there
    try:
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    except (pickle.PicklingError, AttributeError, TypeError, OSError, RuntimeError) as error:
        raise QuantizationError(
            f"the model cannot be saved: {error}",
            got=type(model).__name__,
            hint="the folder must exist; classes are saved by reference, so define them at the top level of a module",
        ) from error
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def load(path: str | os.PathLike) -> Any:
    """Read what ``save`` wrote. Like ``torch.load`` of whole models it runs code of the file: load only what you trust.

    Raises:
        LoadError: the file is damaged, or not from ``save``, or of another version.
        FileNotFoundError: there is no such file.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    try:
        content = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:
        raise LoadError(
            f"the file cannot be read: {error}", got=str(path), hint="save it again with dbrq.save"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise LoadError("the file was not written by dbrq.save", got=str(path))
    if content.get("version") != _VERSION:
        raise LoadError("the file is of another version", expected=_VERSION, got=content.get("version"),
                        hint="save it again with this version of dbrq")  # fmt: skip
    return content["model"]
