"""Reading pickled models without running what a file wishes for: ``pickle`` for ``torch.load``, with a list of what
its names may stand for and of what may be called.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

from torch import nn

from .._torch import FUNCTIONS
from ..auto_trace import InterceptedForward
from ..lowering.lowered_model import LoweredModel
from ..lowering.submodules import Lowered
from .allowed import Allow, Refused, name_of
from .scripts import check_script, is_script
from .tensor_functions import copied, problem_of


class Absent(nn.Module):
    """Stands for a class that is not known here, in a model whose graph runs without it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def pickle_for(allow: Allow, without_classes: bool = False) -> Any:
    """What ``torch.load`` takes for ``pickle``: goes by ``allow``.

    Args:
        without_classes: ``Absent`` stands for what may not be named.
    """
    reader = type("Unpickler", (_Unpickler,), {"allowed": allow, "without_classes": without_classes})
    return SimpleNamespace(
        __name__=__name__,
        Unpickler=reader,
        UnpicklingError=pickle.UnpicklingError,
        load=lambda file, **given: reader(file, **given).load(),
    )


def names_in(path: str) -> list[str]:
    """Qualified names of the classes and functions that a pickled file names."""
    with zipfile.ZipFile(path) as archive:
        if is_script(archive.namelist()):
            return []
        pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if pickled is None:
            return []
        operations = list(pickletools.genops(archive.read(pickled)))
    return sorted({_as_now(str(given).replace(" ", ".")) for opcode, given, _ in operations if opcode.name == "GLOBAL"})


def _as_now(name: str) -> str:
    """A qualified name, which the protocol of torch's files spells as Python 2 did."""
    return (
        name.replace("_operator.", "operator.")
        .replace("__builtin__.xrange", "builtins.range")
        .replace("__builtin__.long", "builtins.int")
        .replace("__builtin__.", "builtins.")
    )


#: Stands for ``getattr``, by which files name a class inside of another one.
_INNER: Any = object()
#: The one of C has no place to look at what is called. (Typeshed does not know all of its methods.)
_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):
    allowed: ClassVar[Allow]
    without_classes: ClassVar[bool]
    dispatch: ClassVar[dict[int, Callable]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        full = _as_now(f"{module}.{name}")
        if full == "builtins.getattr":
            return _INNER
        try:
            return self.allowed.find(full)
        except Refused:
            if self.without_classes:
                return Absent
            raise

    def get_extension(self, code: int) -> Any:
        raise Refused("the file names an entry of copyreg's registry")

    def _instantiate(self, cls: Any, args: Any) -> None:
        self._check_call(cls, tuple(args))
        super()._instantiate(cls, args)

    def _check_call(self, maker: Any, args: tuple) -> None:
        if maker is not Absent and not self.allowed.may_call(maker, args):
            raise Refused(f"the file calls {name_of(maker)}")

    def _load_reduce(self) -> None:
        maker, args = self.stack[-2:]
        if maker is _INNER:
            self.stack[-2:] = [self._inner(*args)]
            return
        self._check_call(maker, args)
        super().load_reduce()

    def _inner(self, outer: Any, name: str) -> Any:
        """What is named by where it is: a function of torch, a class inside of another one, a method of a module that
        its class itself has, such as a hook.
        """
        own = vars(type(outer)).get(name)
        if isinstance(outer, nn.Module) and isinstance(own, FunctionType) and not name.startswith("_"):
            return MethodType(own, outer)
        return self.allowed.find(f"torch.{name}" if outer is FUNCTIONS else f"{name_of(outer)}.{name}")

    def _load_newobj(self) -> None:
        self._check_made(self.stack[-2])
        super().load_newobj()

    def _load_newobj_ex(self) -> None:
        self._check_made(self.stack[-3])
        super().load_newobj_ex()

    def _check_made(self, cls: Any) -> None:
        if not self.allowed.may_be_made(cls):
            raise Refused(f"the file makes an object of {name_of(cls)}")

    def _load_build(self) -> None:
        made, state = self.stack[-2:]
        if isinstance(made, (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)) or made is _INNER:
            raise Refused(f"the file changes {name_of(made)}")
        if not self.allowed.all:
            self.stack[-1] = _checked_state(made, state, self.allowed)
        super().load_build()

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = _load_newobj_ex
    dispatch[pickle.BUILD[0]] = _load_build


_FILLS = ("append", "extend", "add", "update", "__setitem__")
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_KNOWN_FILLS = [getattr(cls, name, None) for cls in _CONTAINERS for name in _FILLS]


def _fills_itself_plainly(container: Any) -> bool:
    """Whether no code of a user's runs when a container is filled."""
    if type(container).__module__.startswith("transformers."):  # the outputs of its models
        return True
    own = [getattr(type(container), name, None) for name in _FILLS]
    return isinstance(container, _CONTAINERS) and all(fill in _KNOWN_FILLS for fill in own)


def _checked(opcode: bytes, fill: Callable, container: Callable) -> None:
    """Let an opcode that fills a container fill none that has its own way to."""

    def checked(self: Any) -> None:
        filled = container(self)
        if not (self.allowed.all or _fills_itself_plainly(filled)):
            raise Refused(f"the file fills an object of {name_of(type(filled))}")
        fill(self)

    _Unpickler.dispatch[opcode[0]] = checked


_checked(pickle.APPEND, _InPython.load_append, lambda reader: reader.stack[-2])
_checked(pickle.SETITEM, _InPython.load_setitem, lambda reader: reader.stack[-3])
_checked(pickle.APPENDS, _InPython.load_appends, lambda reader: reader.metastack[-1][-1])
_checked(pickle.SETITEMS, _InPython.load_setitems, lambda reader: reader.metastack[-1][-1])
_checked(pickle.ADDITEMS, _InPython.load_additems, lambda reader: reader.metastack[-1][-1])


#: Attributes by which pickle and Python go, also where an object has them.
_MEANT = frozenset({"__class__", "__dict__", "__setstate__"})


def _checked_state(made: Any, state: Any, allow: Allow) -> Any:
    """The state of an object, if to set it runs nothing.

    Raises:
        Refused: a graph calls more than tensor functions, a script opens files, a function is bound that may do more,
            or an attribute takes the place of a method of the object.
    """
    if isinstance(made, functools.partial):
        if not (isinstance(state, tuple) and len(state) == 4 and allow.may_be_called_later(state[0]) and not state[3]):
            raise Refused("the file binds values to a function")
        return state
    if isinstance(made, (LoweredModel, Lowered)) and type(state) is not dict:
        raise Refused(f"the file has a state of another kind for {type(made).__name__}")
    if isinstance(made, LoweredModel):
        state = {**state, "data": copied(state["data"])}  # of the file's lists, which later opcodes might fill
        if problem := problem_of(state["data"], allow.trusts):
            raise Refused(f"the file's graph {problem}")
    if isinstance(made, Lowered) and isinstance(state["model"], bytes):
        with zipfile.ZipFile(io.BytesIO(state["model"])) as archive:
            check_script(archive)
    slots = {name for cls in type(made).__mro__ for name in getattr(cls, "__slots__", ())}
    attributes, in_slots = state if isinstance(state, tuple) and len(state) == 2 else (state, {})
    for given in (attributes, in_slots):
        if type(given) is dict and not _MEANT.isdisjoint(given):
            raise Refused(f"the file sets {sorted(_MEANT & set(given))} of an object")
    if isinstance(in_slots, dict) and not set(in_slots) <= slots:
        raise Refused(f"the file sets {sorted(map(str, in_slots))} of {type(made).__name__}")
    if isinstance(made, nn.Module) and type(attributes) is dict:
        own = attributes.get("forward")
        if own is not None and not isinstance(own, (InterceptedForward, functools.partial)):
            raise Refused("the file gives a module another forward")
    return state
