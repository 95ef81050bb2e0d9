"""``save`` and ``load``: a model and its int8 weights in one file."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .attachment import state_of
from .copies import uncompiled
from .errors import LoadError, QuantizationError
from .lowering.model import LoweredModel
from .quiet import quietly
from .report import LOWERED_REPORT

_FORMAT = "dbrq"
_VERSION = 1
#: In a lowered model's file, beside what TorchScript puts there.
_LABEL = "dbrq.json"


def save(model: nn.Module, path: str | os.PathLike) -> None:
    """Write a converted or lowered model to ``path``.

    A converted model is saved with its class by reference. A model lowered to torchscript is saved as
    ``torch.jit.save`` does it, so ``torch.jit.load`` reads the file too, in processes without dbrq. One lowered to
    onednn keeps graph and weights; plans are made again for the shapes that come.

    Raises:
        QuantizationError: the model is neither.
    """
    model = uncompiled(model)
    writer = _writer(model)
    unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"  # a failed save leaves the file that was there
    try:
        writer(unfinished)
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


def _writer(model: Any) -> Callable[[str], None]:
    """What writes ``model`` to a path."""
    label = {"format": _FORMAT, "version": _VERSION, "torch": torch.__version__}
    if isinstance(model, torch.jit.ScriptModule) and hasattr(model, LOWERED_REPORT):
        return lambda path: quietly(torch.jit.save, model, path, _extra_files={_LABEL: json.dumps(label)})
    state = state_of(model) if isinstance(model, nn.Module) else None
    if isinstance(model, LoweredModel):
        return lambda path: torch.save({**label, "model": model}, path)
    if state is None or state.token.phase != "int8":
        raise QuantizationError(
            "save takes converted and lowered models", got=type(model).__name__, hint="call dbrq.convert first"
        )
    return lambda path: torch.save({**label, "model": model}, path)


def load(path: str | os.PathLike) -> Any:
    """Read what ``save`` wrote. Like ``torch.load`` of whole models it runs code of the file: load only what you trust.

    Raises:
        LoadError: the file is damaged, or not from ``save``, or of another version.
        FileNotFoundError: there is no such file.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    try:
        model, label = _read(os.fspath(path))
    except Exception as error:
        raise LoadError(
            f"the file cannot be read: {error}", got=str(path), hint="save it again with dbrq.save"
        ) from error
    if not isinstance(label, dict) or label.get("format") != _FORMAT:
        raise LoadError("the file was not written by dbrq.save", got=str(path))
    if label.get("version") != _VERSION:
        raise LoadError("the file is of another version", expected=_VERSION, got=label.get("version"),
                        hint="save it again with this version of dbrq")  # fmt: skip
    return model


def _read(path: str) -> tuple[Any, Any]:
    """The model and its label; a label of another version comes without a model, which might not be readable."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if any("/code/" in name for name in names):
                held = next((name for name in names if name.endswith(f"/extra/{_LABEL}")), None)
                label = None if held is None else json.loads(archive.read(held))
                current = isinstance(label, dict) and label.get("version") == _VERSION
                return (quietly(torch.jit.load, path, map_location="cpu") if current else None), label
    content = torch.load(path, weights_only=False, map_location="cpu")
    return (content.get("model") if isinstance(content, dict) else None), content
