"""Calibrations in files: what observers have seen, to be gone on with, or to be converted under another preset."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy.kept import KeptBatches
from ..calibration.session import QuantizedModelToken, token_of
from ..calibration.surgery import uncompiled
from ..errors import LoadError
from ..pytree import tree_leaves
from .files import replacing

_VERSION = 1
_PLAIN = (Tensor, int, float, bool, str, type(None))


def save_calibration(prepared: nn.Module, path: str | os.PathLike) -> None:
    """Write what the observers of a prepared model have seen so far, and the sample of the data that it keeps.

    Args:
        prepared: what ``prepare`` returned; it may be calibrated further afterwards.
        path: of the file; one that is there is replaced, once the new one is whole.

    Raises:
        ConfigurationError: ``prepared`` is no prepared model.

    >>> import dbrq, tempfile
    >>> model, path = nn.Linear(4, 3), os.path.join(tempfile.mkdtemp(), "calibration.pt")
    >>> save_calibration(dbrq.calibrate(dbrq.prepare(model, torch.zeros(1, 4)), [torch.randn(8, 4)]), path)
    >>> again = load_calibration(dbrq.prepare(model, torch.zeros(1, 4)), path)
    >>> dbrq.convert(again)(torch.randn(2, 4)).shape
    torch.Size([2, 3])
    """
    token = token_of(uncompiled(prepared), "observe", "save the calibration of")
    with token.lock:
        content = {
            "dbrq calibration": _VERSION,
            "ops": _ops(token),
            "runs": token.runs,
            "observers": {key: observer.state_dict() for key, observer in token.observers.items()},
            "ranges": dict(token.ranges),
            "kept": None if token.kept is None else _batches(token.kept),
        }
        with replacing(path) as unfinished:
            torch.save(content, unfinished)


def load_calibration(prepared: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Put a saved calibration into a freshly prepared copy of the same model, in place of what it has seen.

    It can be calibrated further, or converted, under whichever preset: methods that need a sample of the data find the
    one that was saved.

    Args:
        prepared: what ``prepare`` returned, for the model and with the qconfigs of the one that was saved. Where
            calibration took paths that the example did not, prepare on an example for each of them first.
        path: what ``save_calibration`` wrote. No code of it is run.

    Returns:
        ``prepared``.

    Raises:
        LoadError: the file is damaged, or of another model. ``prepared`` is unchanged.

    >>> import dbrq
    >>> load_calibration(dbrq.prepare(nn.Linear(4, 3), torch.zeros(1, 4)), os.devnull)
    Traceback (most recent call last):
        ...
    dbrq.errors.LoadError: the file holds no calibration...
    """
    token = token_of(uncompiled(prepared), "observe", "load a calibration into")
    content = _read(path)
    ops = _ops(token)
    if content["ops"] != ops or set(content["observers"]) != set(token.observers):
        theirs, ours = {tuple(op) for op in content["ops"]}, {tuple(op) for op in ops}
        raise LoadError(
            "the calibration is of another model, or of paths that the example did not take",
            expected=", ".join(sorted(op[0] for op in ours - theirs)[:5]) or "the same values in int8",
            got=", ".join(sorted(op[0] for op in theirs - ours)[:5]) or "others",
            hint="prepare the same model with the same qconfigs, and run it on an example for each path",
        )  # fmt: skip
    with token.lock, torch.inference_mode(False):
        before = {key: observer.state_dict() for key, observer in token.observers.items()}
        before = {key: {name: value.clone() for name, value in state.items()} for key, state in before.items()}
        try:
            for key, observer in token.observers.items():
                observer.load_state_dict(content["observers"][key])
        except (RuntimeError, KeyError) as error:
            for key, observer in token.observers.items():
                observer.load_state_dict(before[key])
            raise LoadError(
                f"the calibration is of other observers: {error}", got=str(path),
                hint="prepare with the qconfigs that the saved model had",
            ) from error  # fmt: skip
        token.runs, token.ranges = content["runs"], dict(content["ranges"])
        if content["kept"] is not None:
            token.kept = KeptBatches()
            token.kept.batches, token.kept.seen = content["kept"]["batches"], content["kept"]["seen"]
    return prepared


def _ops(token: QuantizedModelToken) -> list[tuple[str, str]]:
    return [(op.path, op.op) for op in token.record.hooked()]


def _batches(kept: KeptBatches) -> dict[str, Any]:
    """Those batches that are made of tensors and plain values, which a file without code can hold."""
    plain = [
        (args, dict(kwargs)) for args, kwargs in kept.batches
        if all(isinstance(leaf, _PLAIN) and type(leaf) is not nn.Parameter for leaf in tree_leaves((args, kwargs)))
    ]  # fmt: skip
    return {"batches": plain, "seen": kept.seen}


def _read(path: str | os.PathLike) -> dict[str, Any]:
    try:
        content = torch.load(path, weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise LoadError(f"the file holds no calibration: {type(error).__name__}", got=str(path),
                        expected="what dbrq.save_calibration wrote") from error  # fmt: skip
    names = ("ops", "runs", "observers", "ranges", "kept")
    if not isinstance(content, dict) or content.get("dbrq calibration") != _VERSION or not set(names) <= set(content):
        raise LoadError("the file holds no calibration", got=str(path), expected="what dbrq.save_calibration wrote")
    return content
