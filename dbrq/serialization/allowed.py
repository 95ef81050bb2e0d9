"""Which names of a file may stand for classes and functions, so that reading it runs none of its author's code.

A file names what it is made of. Without the caller's leave, a name stands for data of Python, torch and dbrq, for a
function of torch that computes, and for a class that holds data or is a module of a model. Such a class is looked up
among the modules that the program has imported itself, and in libraries of models; nobody calls its constructor.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, Literal

import torch
from torch import nn

from .._torch import weights_only_globals
from ..errors import ConfigurationError, LoadError
from .tensor_functions import is_tensor_function

#: What a caller may allow: classes and functions, packages by name, or True for everything.
Allowed = Iterable[Any] | str | Literal[True]

#: Imported where a file names a class of theirs.
_LIBRARIES = frozenset({"diffusers", "sentence_transformers", "timm", "torchaudio", "torchvision", "transformers"})

_OURS = __name__.partition(".")[0]

#: What is called with values of the file.
_MAKERS = frozenset({
    "builtins.bool", "builtins.bytearray", "builtins.complex", "builtins.dict", "builtins.float", "builtins.frozenset",
    "builtins.int", "builtins.list", "builtins.range", "builtins.set", "builtins.slice", "builtins.str",
    "builtins.tuple", "collections.Counter", "collections.OrderedDict", "collections.defaultdict", "collections.deque",
    "functools.partial", "numpy.dtype", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", f"{_OURS}.mappings.row_named",
    f"{_OURS}.tensors.Int8Weight",
})  # fmt: skip
#: What holds values and is not called; ``getattr`` names classes inside of others.
_HOLDERS = frozenset({
    "builtins.Ellipsis", "builtins.NotImplemented", "builtins.getattr", "numpy.ndarray", "types.SimpleNamespace",
    "torch._C._VariableFunctionsClass",
    "torch.ao.quantization.observer._PartialWrapper", "torch.ao.quantization.qconfig.QConfig",
    "torch.nn.modules.module._WrappedHook", "torch.nn.parameter.Buffer", "torch.torch_version.TorchVersion",
})  # fmt: skip
#: Functions that are hooks and methods of converted models.
_HOOKS = frozenset(f"{_OURS}.{name}" for name in (
    "calibration.surgery._register", "eager.weights._check_load", "guards._apply", "guards._requires_grad_",
    "guards._train", "hidden_state._apply", "hidden_state._apply_to_tensors", "hidden_state._extra_repr",
    "hidden_state._load", "hidden_state._marked", "hidden_state._named_modules", "hidden_state._save",
    "hidden_state._train", "serialization.pretrained_files._save_pretrained",
))  # fmt: skip


class Refused(LoadError):
    """A file names something that stands for nothing, or that nobody allowed."""


class Allow:
    """What the names of a file may stand for.

    Args:
        allow: classes and functions that a file may name; packages and modules by name (``"my_models"``), which are
            imported for it, and all of which it may name; True for whatever it names.

    Raises:
        ConfigurationError: it is something else.
    """

    def __init__(self, allow: Allowed = ()) -> None:
        self.all = allow is True
        entries: Any = () if self.all else (allow,) if isinstance(allow, str) or callable(allow) else allow
        entries = list(entries) if isinstance(entries, Iterable) else [None]
        if not all(isinstance(entry, str) or callable(entry) for entry in entries):
            raise ConfigurationError(
                "allow takes classes, functions, names of packages, or True", got=repr(allow),
                expected='such as dbrq.load(path, allow=(MyModel, "my_package"))',
            )  # fmt: skip
        self._objects = {name_of(entry): entry for entry in entries if not isinstance(entry, str)}
        self._packages = tuple(entry for entry in entries if isinstance(entry, str))

    def find(self, name: str) -> Any:
        """What a qualified name stands for.

        Raises:
            Refused: it may not stand for anything.
        """
        found = self._objects.get(name) or self._in_a_script(name) or weights_only_globals().get(name)
        if found is not None:
            return found
        found = self._looked_up(name)
        if found is None or not (self.trusts(name) or _is_harmless(name, found)):
            raise Refused(f"the file names {name}")
        return found

    def trusts(self, name: str) -> bool:
        """Whether the caller allowed what has this qualified name, or the package it is in."""
        return self.all or name in self._objects or any(name.startswith(f"{package}.") for package in self._packages)

    def may_call(self, maker: Any, args: tuple) -> bool:
        """Whether a file may have ``maker(*args)`` called to make a value."""
        name = name_of(maker)
        if self.trusts(name):
            return True
        if name == "torch._tensor._rebuild_from_type_v2":  # it calls its first argument
            return isinstance(args[1], type) and issubclass(args[1], torch.Tensor) and self.may_call(args[0], args[2])
        if name in _MAKERS or any(maker is each for each in weights_only_globals().values()):
            return True
        return isinstance(maker, type) and (
            issubclass(maker, enum.Enum) or (issubclass(maker, dict) and is_dataclass(maker))  # outputs of transformers
        )

    def _in_a_script(self, name: str) -> Any:
        """An allowed object by the name of what a script called ``__main__``, or the reverse."""
        for full, each in self._objects.items():
            is_main = "__main__" in (name.partition(".")[0], full.partition(".")[0])
            if is_main and name.rpartition(".")[2] == full.rpartition(".")[2]:
                return each
        return None

    def _looked_up(self, name: str) -> Any:
        """What a qualified name leads to from a module that is imported, or may be for it; None if nothing."""
        parts = name.split(".")
        may_import = self.trusts(name) or parts[0] in {*_LIBRARIES, _OURS, "torch", "numpy"}
        for i in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:i])
            if module not in sys.modules and may_import:
                try:
                    importlib.import_module(module)
                except ImportError:
                    continue
            if module in sys.modules:
                found: Any = sys.modules[module]
                for part in parts[i:]:
                    found = getattr(found, part, None)
                return found
        return None

    def refusal(self, message: str, names: Iterable[str], path: str) -> LoadError:
        """What to say of a file that was refused with ``message``, and has all of ``names``."""
        refused = []
        for name in names:
            try:
                self.find(name)
            except Refused:
                refused.append(name)
        modules = sorted({name.rpartition(".")[0] for name in refused})
        missing = [module for module in modules if module not in sys.modules]
        allow = f"allow={tuple(modules)}, or allow=True" if modules else "allow=True"
        return LoadError(
            f"{message}, and to read it might run code", got=path if not refused else f"{path}: {_listed(refused)}",
            expected="data, tensor functions of torch, and classes of modules that this program has imported",
            hint=(f"if they are of your program, import {', '.join(missing)} first. " if missing else "")
            + f"If you trust who wrote the file: dbrq.load(path, {allow})",
        )  # fmt: skip


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")


def name_of(value: Any) -> str:
    """The qualified name of a class or function."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__)
    return f"{getattr(value, '__module__', None)}.{name}"


def _is_harmless(name: str, found: Any) -> bool:
    """Whether what a name stands for can do no more than hold data, or compute."""
    if name in _MAKERS or name in _HOLDERS or name in _HOOKS:
        return True
    if not isinstance(found, type):
        return is_tensor_function(name, found)
    top = name.partition(".")[0]
    if issubclass(found, nn.Module):
        return not issubclass(found, torch.jit.ScriptModule)
    if top == _OURS:
        return not issubclass(found, BaseException)
    if top in sys.stdlib_module_names or top in ("torch", "numpy"):
        return issubclass(found, (enum.Enum, torch.Tensor))
    # A finalizer would run, and so would what a class says of how it is made again.
    return not hasattr(found, "__del__") and not {"__setstate__", "__reduce__", "__reduce_ex__"} & set(vars(found))
