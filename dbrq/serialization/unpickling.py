"""Reading pickled models without running what a file wishes for: ``pickle`` for ``torch.load``, with a list of what
its names may stand for and of what may be called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

from .._torch import FUNCTIONS
from ..lowering.lowered_model import LoweredModel
from ..lowering.submodules import Lowered
from .allowed import Allow, Refused, name_of
from .scripts import check_script
from .tensor_functions import problem_of


def pickle_for(allow: Allow) -> Any:
    """What ``torch.load`` takes for ``pickle``: goes by ``allow``."""
    reader = type("Unpickler", (_Unpickler,), {"allowed": allow})
    return SimpleNamespace(
        __name__=__name__,
        Unpickler=reader,
        UnpicklingError=pickle.UnpicklingError,
        load=lambda file, **given: reader(file, **given).load(),
    )


def names_in(path: str) -> list[str]:
    """Qualified names of the classes and functions that a pickled file names."""
    with zipfile.ZipFile(path) as archive:
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if pickled is None:
            return []
        operations = list(pickletools.genops(archive.read(pickled)))
    return sorted({_as_now(str(given).replace(" ", ".")) for opcode, given, _ in operations if opcode.name == "GLOBAL"})


def _as_now(name: str) -> str:
    """A qualified name, which the protocol of torch's files spells as Python 2 did."""
    return name.replace("__builtin__.xrange", "builtins.range").replace("__builtin__.", "builtins.")


#: The one of C has no place to look at what is called. (Typeshed does not know all of its methods.)
_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):
    allowed: ClassVar[Allow]
    dispatch: ClassVar[dict[int, Callable]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return self.allowed.find(_as_now(f"{module}.{name}"))

    def get_extension(self, code: int) -> Any:
        raise Refused("the file names an entry of copyreg's registry")

    def _instantiate(self, cls: Any, args: Any) -> None:
        self._check_call(cls, tuple(args))
        super()._instantiate(cls, args)

    def _load_reduce(self) -> None:
        maker, args = self.stack[-2:]
        if maker is getattr:  # how a class inside of another one is named
            self.stack[-2:] = [self._inner(*args)]
            return
        self._check_call(maker, args)
        super().load_reduce()

    def _load_build(self) -> None:
        made, state = self.stack[-2:]
        if isinstance(made, (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)):
            raise Refused(f"the file changes {name_of(made)}")
        if not self.allowed.all:
            _check_state(made, state, self.allowed)
        super().load_build()

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.BUILD[0]] = _load_build

    def _check_call(self, maker: Any, args: tuple) -> None:
        if not self.allowed.may_call(maker, args):
            raise Refused(f"the file calls {name_of(maker)}")

    def _inner(self, outer: Any, name: str) -> Any:
        return self.allowed.find(f"torch.{name}" if outer is FUNCTIONS else f"{name_of(outer)}.{name}")


def _check_state(made: Any, state: Any, allow: Allow) -> None:
    """Raise for state of an object that would run code: a graph that calls more than tensor functions, a script that
    opens files.
    """
    if not isinstance(state, dict):
        return
    if isinstance(made, LoweredModel) and (problem := problem_of(state["data"], allow.trusts)):
        raise Refused(f"the file's graph {problem}")
    if isinstance(made, Lowered) and isinstance(state["model"], bytes):
        with zipfile.ZipFile(io.BytesIO(state["model"])) as archive:
            check_script(archive)
    if any(isinstance(key, str) and key.startswith("__") for key in state):
        raise Refused(f"the file sets {[key for key in state if str(key).startswith('__')]} of an object")
