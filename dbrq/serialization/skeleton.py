"""The modules of a converted model as JSON: classes by name, attributes as plain data.

What the names may stand for, ``allowed.py`` says. No constructor runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..auto_trace import InterceptedForward
from ..errors import OWN_FOLDER, LoadError, QuantizationError
from ..hidden_state import STATE
from ..quantization_state import AutoQuantizationState
from ..tensors import Int8Weight
from .allowed import Allow, Refused, name_of
from .plain import Reader, Writer

#: What ``nn.Module`` itself keeps.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
#: What recurrent layers make of their parameters.
_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})
_HOOKS = tuple(name for name in _OWN if name.endswith("_hooks"))


def write_skeleton(model: nn.Module) -> list[list]:
    """[path, class, attributes, names of children that are None, path of the same module met before] of each module.

    Raises:
        QuantizationError: an attribute is no plain data, or a class has a way of its own to be pickled.
    """
    first: dict[int, str] = {}
    seen: dict[int, list[str]] = {}
    written = []
    for path, module in model.named_modules(remove_duplicate=False):
        if f".{STATE}." in f".{path}.":
            continue
        if (before := first.setdefault(id(module), path)) != path:
            written.append([path, "", {}, [], before])
            continue
        _check_class(path, module)
        attributes = {}
        for name, value in module.__dict__.items():
            if name in _OWN or name in _DERIVED or _is_ours(value):
                continue
            attributes[name] = _attribute(path, name, value, seen)
        empty = [name for name, child in module._modules.items() if child is None]
        written.append([path, name_of(type(module)), attributes, empty, None])
    return written


def _attribute(path: str, name: str, value: Any, seen: dict[int, list[str]]) -> Any:
    """An attribute as JSON. A list or dict that another attribute is too is written as where that is."""
    if isinstance(value, type) and issubclass(value, nn.Module) and is_named(value):
        return {"class": name_of(value)}
    before = seen.setdefault(id(value), [path, name]) if isinstance(value, (list, dict, set)) else [path, name]
    if before != [path, name]:
        return {"same": before}
    writer = Writer()
    try:
        written = writer.write(value)
    except QuantizationError as error:
        raise QuantizationError(
            f"an attribute cannot be written without pickle: {error.message}", path=path,
            got=f"{name}: {error.got}",
            hint="models of transformers have save_pretrained and dbrq.from_pretrained; in others, keep plain values "
            "in attributes, or take the default format, which pickles, and dbrq.load(path, allow=True)",
        ) from error  # fmt: skip
    if writer.objects:
        raise QuantizationError("an attribute is part of what dbrq records", path=path, got=name)
    return written


def _check_class(path: str, module: nn.Module) -> None:
    cls = type(module)
    hooks = [h for name in _HOOKS for h in getattr(module, name).values() if not _is_ours(h)]
    apart = [name for name in ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
             if getattr(cls, name, None) is not getattr(nn.Module, name, None)]  # fmt: skip
    if not is_named(cls):
        raise QuantizationError(
            "the class of a module cannot be referred to by name", path=path,
            got=name_of(cls), hint="define it at the top level of a module",
        )  # fmt: skip
    if hooks or (apart and not _is_torch_nn(cls)) or isinstance(module, torch.jit.ScriptModule):
        raise QuantizationError(
            "the model cannot be written without pickle: it has hooks, or a class with a way of its own to be pickled",
            path=path, got=cls.__name__, hint="dbrq.save(model, path) in the default format",
        )  # fmt: skip


def _is_ours(value: Any) -> bool:
    """Whether dbrq put an attribute or a hook there, and does so again."""
    value = getattr(value, "hook", value)
    while isinstance(value, functools.partial):
        value = value.func
    code = getattr(value, "__code__", None)
    ours = isinstance(value, (InterceptedForward, Int8Weight, AutoQuantizationState))
    return ours or (code is not None and code.co_filename.startswith(OWN_FOLDER))


def read_skeleton(written: list[list], allow: Allow, name: str) -> nn.Module:
    """The modules, with attributes and without tensors.

    Raises:
        LoadError: a class is not allowed, or the description is damaged.
    """
    try:
        return _read(written, allow)
    except Refused as error:
        raise allow.refusal(error.message, {entry[1] for entry in written if entry[4] is None}, name) from error


def _read(written: list[list], allow: Allow) -> nn.Module:
    found = {each: _class(each, allow) for each in sorted({entry[1] for entry in written if entry[4] is None})}
    modules: dict[str, nn.Module] = {}
    for path, cls_name, attributes, empty, before in written:
        if before is None:
            module = _made(found[cls_name], attributes, modules, allow)
            for child in empty:
                module._modules[child] = None
        else:
            module = modules[before]
        modules[path] = module
        parent, _, child = path.rpartition(".")
        if path:
            modules[parent]._modules[child] = module
    return modules[""]


def _made(cls: Any, attributes: Mapping[str, Any], modules: Mapping[str, nn.Module], allow: Allow) -> nn.Module:
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    reader = Reader([])
    for name, value in attributes.items():
        if name in _OWN:
            raise LoadError("the description of the model is damaged: it has an attribute of nn.Module", got=name)
        kind = next(iter(value), "") if isinstance(value, dict) else ""
        if kind == "class":
            module.__dict__[name] = _class(value["class"], allow)
        elif kind == "same":
            path, other = value["same"]
            module.__dict__[name] = modules.get(path, module).__dict__[other]
        else:
            module.__dict__[name] = reader.read(value)
    return module


def _class(name: str, allow: Allow) -> type[nn.Module]:
    found = allow.find(name)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise Refused(f"the file names {name} for a class of modules")
    return found


def is_named(cls: type) -> bool:
    """Whether the qualified name of a class leads to it."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def _is_torch_nn(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.modules.") and issubclass(cls, nn.Module)
