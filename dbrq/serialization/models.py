"""``save`` and ``load``: a model and its int8 weights in one file."""

from __future__ import annotations

import errno
import json
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import selfcheck
from ..calibration.surgery import uncompiled
from ..errors import ConfigurationError, LoadError, QuantizationError, nearest
from ..hidden_state import lowered_of, state_of
from ..inspection.rows import LOWERED_REPORT, lowered_report
from ..kernels.ranges import SAFE, saturates
from ..lowering.drop_in import lowered_form
from ..lowering.graph_data import from_data
from ..lowering.lowered_model import LoweredModel
from ..lowering.self_test import WIDEST, widest_level
from ..quiet import quietly
from ..workflow import restored
from . import tensor_files
from .allowed import Allow, Allowed, Refused
from .described import Described, describe
from .files import replacing
from .pretrained_files import FORMAT as PRETRAINED
from .scripts import check_script, is_script
from .skeleton import read_skeleton, write_skeleton
from .unpickling import names_in, pickle_for

_FORMAT = "dbrq"
_VERSION = 2
#: In a lowered model's file, beside what TorchScript puts there.
_LABEL = "dbrq.json"


def save(model: nn.Module, path: str | os.PathLike, format: str | None = None) -> None:
    """Write a converted or lowered model to ``path``.

    A converted model is saved with its classes by name. A model lowered to torchscript is saved as
    ``torch.jit.save`` does it, so ``torch.jit.load`` reads the file too, in processes without dbrq. One lowered to
    onednn keeps graph and weights; plans are made again for the shapes that come.

    Args:
        model: what ``convert`` or ``lower`` returned.
        path: of the file; one that is there is replaced, once the new one is whole.
        format: ``"safetensors"`` for a file of safetensors, which holds tensors and JSON and no pickle, and is for
            converted models (needs ``dbrq[safetensors]``); ``"torch"`` for an archive of torch. None: by the suffix of
            the path, else ``"torch"``.

    Raises:
        QuantizationError: the model is neither, or cannot be written there, or not in that format; the error says what
            of it.

    >>> import dbrq, tempfile
    >>> quantized = dbrq.quantize(nn.Linear(4, 3), [torch.randn(8, 4)])
    >>> path = os.path.join(tempfile.mkdtemp(), "linear.pt")
    >>> dbrq.save(quantized, path)
    >>> x = torch.randn(2, 4)
    >>> torch.equal(dbrq.load(path)(x), quantized(x))
    True
    """
    model = uncompiled(model)
    if format is None:
        format = "safetensors" if str(path).endswith(".safetensors") else "torch"
    if format not in ("torch", "safetensors"):
        raise ConfigurationError("save knows no such format", expected="'torch' or 'safetensors'", got=repr(format),
                                 hint=nearest(str(format), ("torch", "safetensors")))  # fmt: skip
    writer = _writer(model) if format == "torch" else _tensor_writer(model)
    try:
        with replacing(path) as unfinished:  # a failed save leaves the file that was there
            writer(unfinished)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise QuantizationError(
            f"the model cannot be saved: {error}",
            got=type(model).__name__,
            hint="save takes a path in a folder that exists; classes are saved by reference, so define them at the top "
            "level of a module",
        ) from error


def _writer(model: Any) -> Callable[[str], None]:
    """What writes ``model`` to a path."""
    label = _label()
    if not torch.serialization.get_crc32_options():
        raise QuantizationError(
            "torch is set to write no checksums, without which load cannot tell damaged files",
            hint="torch.serialization.set_crc32_options(True)",
        )
    if isinstance(model, torch.jit.ScriptModule) and hasattr(model, LOWERED_REPORT):
        return lambda path: quietly(torch.jit.save, model, path, _extra_files={_LABEL: json.dumps(label)})
    state = state_of(model) if isinstance(model, nn.Module) else None
    if isinstance(model, LoweredModel):
        return lambda path: torch.save({**label, "model": model}, path)
    if state is not None and (graph := lowered_form(model)) is not None:
        return lambda path: _save_lowered(model, graph, label, path)
    if state is None or state.token.phase != "int8":
        raise _neither(model)
    return lambda path: torch.save({**label, "model": model}, path)


def _save_lowered(model: nn.Module, graph: nn.Module, label: dict[str, Any], path: str) -> None:
    """A lowered model; its graph alone, if its class cannot be pickled."""
    try:
        torch.save({**label, "model": model}, path)
    except (pickle.PicklingError, AttributeError, TypeError):
        torch.save({**label, "model": graph}, path)


def _label() -> dict[str, Any]:
    return {"format": _FORMAT, "version": _VERSION, "torch": str(torch.__version__)}


def _neither(model: Any) -> QuantizationError:
    return QuantizationError(
        "save takes converted and lowered models", got=type(model).__name__, hint="call dbrq.convert first"
    )


def _tensor_writer(model: Any) -> Callable[[str], None]:
    """What writes ``model`` to a file of safetensors."""
    state = state_of(model) if isinstance(model, nn.Module) else None
    if lowered_report(model) is not None:
        raise QuantizationError(
            "safetensors holds converted models, and a lowered one is a program", got=type(model).__name__,
            expected="a converted model", hint="dbrq.save(lowered, path) in the default format; or save the converted "
            "model, and lower it where it is loaded",
        )  # fmt: skip
    if state is None or state.token.phase != "int8":
        raise _neither(model)
    content, tensors = describe(model)
    label = {**_label(), "described": {**content, "skeleton": write_skeleton(model)}}
    return lambda path: tensor_files.write(path, label, tensors)


def load(path: str | os.PathLike, allow: Allowed = ()) -> Any:
    """Read what ``save`` wrote. No code of the file runs, whoever wrote it, unless you allow it.

    The file names classes: those of torch, of dbrq, of libraries of models, and of modules that the program has
    imported by now are taken if they are modules of models or hold data; the model's forward runs their code, not the
    file's. Graphs of lowered models may call tensor functions of torch. For anything else the error says what to allow.

    The checksums of the file are compared first, so one that was damaged is never run. A converted model that was made
    with 8 bits is computed with 7 on a CPU whose int8 products saturate, with a warning; it still has 8 where it is
    loaded on another CPU.

    Args:
        path: of the file.
        allow: classes and functions that the file may name; packages and modules, by name (``"my_models"``), which are
            imported for it, and all of which it may name; True where you trust the file as you trust a program.

    Raises:
        LoadError: the file is damaged, or not from ``save``, or of another version, or lowered for another CPU, or it
            names what is neither known nor allowed.
        FileNotFoundError: there is no such file.

    >>> import dbrq, tempfile
    >>> lowered = dbrq.lower(dbrq.quantize(nn.Linear(4, 3), [torch.randn(8, 4)]), torch.randn(8, 4))
    >>> path = os.path.join(tempfile.mkdtemp(), "lowered.pt")
    >>> dbrq.save(lowered, path)
    >>> dbrq.load(path).self_test()
    True
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    allowed = Allow(allow)
    try:
        if os.path.isfile(name) and tensor_files.is_one(name):
            model, label = _read_tensor_file(name, allowed)
        else:
            _check_archive(name)
            model, label = _read(name, allowed)
    except Refused as error:
        raise allowed.refusal(error.message, names_in(name), name) from error
    except _UNREADABLE as error:
        if isinstance(error, QuantizationError) and error.hint is not None:
            raise
        raise LoadError(f"the file cannot be read: {error}", got=name, hint=_SAVE_AGAIN) from error
    if not isinstance(label, dict) or label.get("format") != _FORMAT:
        raise LoadError("the file was not written by dbrq.save", got=name, hint=_hint(label))
    if label.get("version") != _VERSION:
        raise LoadError("the file is of another version", expected=_VERSION, got=label.get("version"),
                        hint="save it again with this version of dbrq")  # fmt: skip
    if not isinstance(model, nn.Module):
        raise LoadError("the file holds no model", got=name, hint=_SAVE_AGAIN)
    _fit_cpu(model, name)
    return model


_SAVE_AGAIN = "save it again with dbrq.save"
#: What damaged files raise, and files whose classes are gone or changed. Anything a class of the user's raises while it
# is unpickled is the class's own.
_UNREADABLE = (
    pickle.PickleError, zipfile.BadZipFile, zlib.error, AttributeError, ImportError, EOFError, LookupError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def _check_archive(path: str) -> None:
    """Raise unless ``path`` is an archive whose records are what was written: torch itself compares no checksums."""
    if os.path.isdir(path):
        raise LoadError("it is a folder")
    if not os.path.getsize(path):
        raise LoadError("it is empty")
    with open(path, "rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"  # else torch takes it for one of its older formats
    if not is_archive or not zipfile.is_zipfile(path):
        raise LoadError("it is cut short, or of another kind than dbrq.save writes")
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise LoadError(f"it is damaged: the checksum of its record {damaged} is another")


def _read(path: str, allow: Allow) -> tuple[Any, Any]:
    """The model and its label; a label of another version comes without a model, which might not be readable."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if is_script(names):
            held = next((name for name in names if name.endswith(f"/extra/{_LABEL}")), None)
            label = None if held is None else json.loads(archive.read(held))
            current = isinstance(label, dict) and label.get("version") == _VERSION
            if not allow.all:
                check_script(archive)
            return (quietly(torch.jit.load, path, map_location="cpu") if current else None), label

    def read(**how: Any) -> Any:
        return torch.load(path, weights_only=False, map_location="cpu", pickle_module=pickle_for(allow, **how))

    try:
        content = read()
    except Refused as refused:
        content = _graph_alone(lambda: read(without_classes=True), refused)
    return (content.get("model") if isinstance(content, dict) else None), content


def _graph_alone(read: Callable[[], Any], refused: Refused) -> dict[str, Any]:
    """A lowered model whose class may not be named here: its graph, which runs without.

    Raises:
        Refused: it is no lowered model, or it names more than its class.
    """
    try:
        content = read()
        graph = lowered_form(content["model"])
    except (Refused, *_UNREADABLE):
        raise refused from None
    if graph is None:
        raise refused
    warnings.warn(
        f"dbrq: {refused.message}, which is not known here: the lowered graph is loaded without the class of its "
        "model, and has none of its methods. Import the class first, or allow it (dbrq.load(path, allow=...))",
        stacklevel=4,
    )
    return {**content, "model": graph}


def _read_tensor_file(path: str, allow: Allow) -> tuple[Any, Any]:
    content, tensors = tensor_files.read(path)
    if content.get("format") == PRETRAINED:
        raise LoadError("the file is the weights of a folder", got=path, hint="dbrq.from_pretrained(folder) reads it")
    described = content.get("described")
    if content.get("version") != _VERSION or described is None:
        return None, content
    try:
        return restored(read_skeleton(described["skeleton"], allow, path), Described(described, tensors)), content
    except (*_UNREADABLE, AssertionError) as error:
        if isinstance(error, QuantizationError):
            raise
        raise LoadError(f"the description of the model is damaged: {error!r}", got=path, hint=_SAVE_AGAIN) from error


def _hint(content: Any) -> str:
    """What to do with a file of torch's that holds ``content``."""
    if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        return "it is a state dict: make the model as before, and call its load_state_dict"
    if isinstance(content, nn.Module):
        return "it is a whole model, as torch.save writes it: convert it, then call dbrq.save"
    return "load takes the files of dbrq.save; recipes are for dbrq.load_recipe"


def _fit_cpu(model: nn.Module, path: str) -> None:
    """Say so, or refuse, where a model comes to a CPU that does not compute it as it was."""
    if saturates() and _widest(model) > SAFE:
        raise LoadError(
            "the model was lowered with 8-bit activations, and int8 products of this CPU saturate unless they have 7",
            expected="a CPU with VNNI or AMX, or a model that was lowered on this one", got=path,
            hint="load the converted model here and lower it again, or quantize for such CPUs: "
            "default_qconfig_mapping(reduce_range=True)",
        )  # fmt: skip
    if isinstance(model, torch.jit.ScriptModule) and hasattr(model, "self_test") and selfcheck.enabled():
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            right = model.self_test()
        if not right:
            raise LoadError(
                "the file's example does not give here what it should", got=path,
                expected=f"{model.self_test_least:.0f} dB or more (model.self_test_sqnr() has the number)",
                hint="this CPU computes some of the file's kernels wrong, or its int8 products saturate: load the "
                "converted model here and lower it again",
            )  # fmt: skip
    state = state_of(model)
    if state is not None:
        state.token.warn_of_saturation()
        states = state.token.states.values()
        if saturates() and any(s.is_wide for s in states):
            for s in states:  # they were lowered where 8 bits serve, as far as one can tell: the modules themselves run
                s.parts = {}


def _widest(model: nn.Module) -> int:
    """The largest integer that a lowered graph quantizes an activation to; 0 for other models."""
    whole = lowered_of(model)
    graphs = [model] if isinstance(model, LoweredModel) else [] if whole is None else whole.models
    return max([int(getattr(model, WIDEST, 0)), *(widest_level(from_data(graph._data), graph) for graph in graphs)])
