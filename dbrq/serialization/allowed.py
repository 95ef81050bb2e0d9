"""Which names of a file may stand for classes and functions, so that reading it runs none of its author's code.

A file names what it is made of. Without the caller's leave, a name stands for data of Python, torch and dbrq, for a
function of torch that computes, and for a class that holds data or is a module of a model. Such a class is looked up
among the modules that the program has imported itself, and in libraries of models; nobody calls its constructor.
"""

from __future__ import annotations

import enum
import functools
import importlib
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import nn

from .._torch import weights_only_globals
from ..errors import ConfigurationError, LoadError
from .tensor_functions import is_tensor_function

#: What a caller may allow: classes and functions, packages by name, or True for everything.
Allowed = Iterable[Any] | str | Literal[True]

#: Imported where a file names a class of theirs.
_LIBRARIES = frozenset({"diffusers", "sentence_transformers", "timm", "tokenizers", "torchaudio", "torchvision",
                        "transformers"})  # fmt: skip

_OURS = __name__.partition(".")[0]

#: What is called with values of the file.
_MAKERS = frozenset({
    "builtins.bool", "builtins.bytearray", "builtins.complex", "builtins.dict", "builtins.float", "builtins.frozenset",
    "builtins.int", "builtins.list", "builtins.range", "builtins.set", "builtins.slice", "builtins.str",
    "builtins.tuple", "collections.Counter", "collections.OrderedDict", "collections.defaultdict", "collections.deque",
    "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "decimal.Decimal",
    "fractions.Fraction", "functools.partial", "numpy.dtype", "pathlib.PosixPath", "pathlib.PurePosixPath",
    "types.SimpleNamespace", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", f"{_OURS}.mappings.row_named",
    f"{_OURS}.tensors.Int8Weight",
})  # fmt: skip
#: What holds values and is not called.
_HOLDERS = frozenset({
    "builtins.Ellipsis", "builtins.NotImplemented", "numpy.ndarray", "types.SimpleNamespace",
    "torch._C._VariableFunctionsClass",
    "torch.ao.quantization.observer._PartialWrapper", "torch.ao.quantization.qconfig.QConfig",
    "torch.nn.modules.module._WrappedHook", "torch.nn.parameter.Buffer", "torch.torch_version.TorchVersion",
})  # fmt: skip
#: Functions that are hooks and methods of converted models.
_HOOKS = frozenset(f"{_OURS}.{name}" for name in (
    "calibration.surgery._forward_plainly", "calibration.surgery._register", "eager.weights._check_load",
    "guards._apply", "guards._requires_grad_", "guards._train", "hidden_state._apply",
    "hidden_state._apply_to_tensors", "hidden_state._extra_repr", "hidden_state._load", "hidden_state._marked",
    "hidden_state._named_modules", "hidden_state._save", "hidden_state._train",
    "serialization.pretrained_files._save_pretrained",
))  # fmt: skip


#: What bears another name in files that were written before.
_FORMER = frozenset({f"{_OURS}.lowering.graph_data._Ref"})


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
        """Whether a file may have ``maker(*args)`` called to make a value.

        Only real classes and functions: an object may say of itself that it has the name of one.
        """
        if not isinstance(maker, (type, FunctionType, BuiltinFunctionType)):
            return self.all
        name = name_of(maker)
        if self.trusts(name):
            return True
        if name == "torch._tensor._rebuild_from_type_v2":  # it calls its first argument
            return isinstance(args[1], type) and issubclass(args[1], torch.Tensor) and self.may_call(args[0], args[2])
        if maker is functools.partial:
            return self.may_be_called_later(args[0])
        if name in _MAKERS or any(maker is each for each in weights_only_globals().values()):
            return True
        if not isinstance(maker, type):
            return False
        if name.startswith("tokenizers."):  # of models of sentence-transformers
            return True
        if issubclass(maker, enum.Enum):
            return len(args) == 1 and bool(maker.__members__)
        return issubclass(maker, dict) and is_dataclass(maker)  # outputs of transformers

    def may_be_called_later(self, function: Any) -> bool:
        """Whether a file may bind values of its own to a function: of tensors, a hook of ours, an observer."""
        if not isinstance(function, (type, FunctionType, BuiltinFunctionType)):
            return self.all
        name = name_of(function)
        if self.trusts(name) or name in _HOOKS:
            return True
        if isinstance(function, type):
            return issubclass(function, nn.Module) and name.startswith(("torch.ao.", f"{_OURS}.calibration.observers."))
        return is_tensor_function(name, function)

    def may_be_made(self, cls: Any) -> bool:
        """Whether a file may have an object of a class made without its constructor."""
        if not isinstance(cls, type) or self.trusts(name_of(cls)) or name_of(cls) in _HOLDERS:
            return isinstance(cls, type)
        own: Any = cls.__new__
        plain = any(own is base.__new__ for base in (object, tuple, int, str, float, dict, list, set, torch.Tensor))
        return (
            plain
            or name_of(cls).startswith((f"{_OURS}.", "tokenizers."))
            or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
        )

    def _in_a_script(self, name: str) -> Any:
        """An allowed object by the name of what a script called ``__main__``, or the reverse."""
        for full, each in self._objects.items():
            is_main = "__main__" in (name.partition(".")[0], full.partition(".")[0])
            if is_main and name.rpartition(".")[2] == full.rpartition(".")[2]:
                return each
        return None

    def _looked_up(self, name: str) -> Any:
        """The class or function of that name, in a module that is imported, or may be for it; None if there is none."""
        parts = name.split(".")
        if any(part.startswith("__") and part != "__main__" for part in parts):
            return None
        for i in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:i])
            if module not in sys.modules and (self.trusts(name) or _may_import(module)):
                try:
                    importlib.import_module(module)
                except ImportError:
                    continue
            if module in sys.modules:
                found: Any = sys.modules[module]
                for part in parts[i:]:
                    found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
                other = isinstance(found, type) and name_of(found) != name and name not in _FORMER
                return None if other else found
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


def _may_import(module: str) -> bool:
    """Whether a module is imported where a file names it: of a library of models, or of torch's and our own classes."""
    top, *rest = module.split(".")
    public = not any(part.startswith("_") for part in rest)
    return (top in _LIBRARIES and public) or top == _OURS or module.startswith(("torch.nn.", "torch.ao."))


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
    top = name_of(found).partition(".")[0]
    if top == _OURS:
        return not issubclass(found, BaseException)
    if issubclass(found, torch.jit.ScriptModule):
        return False
    if top in sys.stdlib_module_names or top in ("torch", "numpy"):
        return issubclass(found, (enum.Enum, torch.Tensor, nn.Module))
    return top in _LIBRARIES or not _acts(found)


#: What runs when an object is made of a file, is put into another, or goes.
_ACTS = frozenset({
    "__del__", "__eq__", "__hash__", "__new__", "__reduce__", "__reduce_ex__", "__setattr__", "__setitem__",
    "__setstate__", "add", "append", "extend", "update",
})  # fmt: skip


def _acts(cls: type) -> bool:
    """Whether the user's code of a class, or of a class it is made from, runs while a file is read."""
    if issubclass(cls, (enum.Enum, tuple)):
        return False
    for base in cls.__mro__:
        top = base.__module__.partition(".")[0]
        if top in sys.stdlib_module_names or top in {"torch", "numpy", _OURS, *_LIBRARIES}:
            continue
        own = _ACTS & set(vars(base))
        if is_dataclass(base):
            own -= {"__eq__", "__hash__", "__setattr__"}  # dataclasses writes them
        if issubclass(base, nn.Module):
            own -= {"__eq__", "__hash__", "__setattr__", "__setitem__", "add", "append", "extend", "update"}
        if own:
            return True
    return False
