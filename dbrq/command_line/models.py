"""MODEL: what a command works on."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..calibration.data import Calls
from ..calibration.surgery import uncompiled
from ..errors import ERRORS_OF_CODE, ConfigurationError
from ..hidden_state import state_of
from ..inspection.rows import lowered_report
from ..pytree import call_arguments
from ..serialization.models import load
from ..workflow import quantize

MODEL = """\
MODEL is a file that dbrq.save wrote, or package.module:function. The function is called without arguments and returns
the model, (model, example) or (model, example, data): the example is one call's inputs (a tensor, a tuple of arguments,
or a dict of keyword arguments), data an iterable of such. A float model is quantized on its data, or on its example.
Functions are run, and files too: name only those that you trust.
"""


class UsageError(ConfigurationError):
    """The command was called in a wrong way."""


@dataclass
class Subject:
    """A model and what it is called with.

    Attributes:
        name: as it was given.
        model: in whatever stage.
        given: one call's inputs; None: the first of the data, if there are any.
        data: items like it, or None.
    """

    name: str
    model: Any
    given: Any = None
    data: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, Iterator):  # which would be used up
            self.data = list(self.data)

    @property
    def has_example(self) -> bool:
        return self.given is not None or self.data is not None

    @property
    def call(self) -> tuple[tuple, dict]:
        """One call's arguments, by position and by name.

        Raises:
            UsageError: none are known.
        """
        if self.given is not None:
            return call_arguments(self.given)
        found = self.calls(1) if self.data is not None else []
        if not found:
            raise UsageError(
                f"{self.name} comes without an example of its inputs", expected="one call's inputs",
                hint="--example FILE, or package.module:function that returns (model, example)",
            )  # fmt: skip
        return found[0]

    @property
    def stage(self) -> str:
        """ "float", "prepared", "converted" or "lowered"."""
        if lowered_report(self.model) is not None:
            return "lowered"
        state = state_of(uncompiled(self.model))
        return "float" if state is None else "prepared" if state.token.phase == "observe" else "converted"

    def calls(self, most: int) -> list[tuple[tuple, dict]]:
        """The first of the data, as calibration takes them, or the example."""
        return [self.call] if self.data is None else list(Calls(self.model, self.data, max_batches=most))

    def converted(self, progress: bool | None) -> nn.Module:
        """The model in int8: a float one is quantized on its data, or its example.

        Raises:
            UsageError: it is prepared or lowered, or there is nothing to quantize it on.
        """
        if self.stage == "converted":
            return self.model
        if self.stage != "float":
            raise UsageError(f"{self.name} is {self.stage}", expected="a float or converted model")
        if self.data is not None:
            return quantize(self.model, self.data, progress=progress)
        print(f"dbrq: {self.name} comes without data, and is quantized on its example alone", file=sys.stderr)
        return quantize(self.model, [self.given if self.given is not None else self.call], progress=progress)


def subject(spec: str, example: str | None, allow: Sequence[str] = ()) -> Subject:
    """The model that ``spec`` means, with the inputs of file ``example`` in place of its own.

    Raises:
        UsageError: there is no such file or function, or it returns something else.
        LoadError: the file is damaged, or names classes of packages that are neither imported nor among ``allow``.
    """
    if os.path.exists(spec):
        found = Subject(spec, load(spec, allow))
    elif ":" in spec:
        found = _called(spec)
    else:
        raise UsageError("there is no such MODEL", expected="a file, or package.module:function", got=spec)
    if example is not None:
        found.given = _example(example)
    return found


def _called(spec: str) -> Subject:
    module_name, _, path = spec.rpartition(":")
    try:
        function: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a package that the module itself imports
        hint = "it is looked for in this folder and where Python looks"
        if module_name.endswith(".py"):
            hint = f"without .py, and with dots for folders: {module_name[:-3].replace('/', '.')}:{path}"
        raise UsageError("there is no such module", expected="package.module:function", got=spec, hint=hint) from error
    except ValueError as error:  # ":make"
        raise UsageError("there is no such MODEL", expected="package.module:function", got=spec) from error
    try:
        for name in path.split("."):
            function = getattr(function, name)
    except AttributeError as error:
        raise UsageError("the module has no such function", expected="package.module:function", got=spec) from error
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(
            "MODEL names something that is no function", got=f"{spec}, of class {type(function).__name__}",
            hint="write a function that returns (model, example)",
        )  # fmt: skip
    made = function()
    parts = made if isinstance(made, (tuple, list)) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise UsageError(
            f"{spec} returns something else than was expected", expected="model, (model, example) or (model, example, "
            "data)", got=f"({', '.join(type(part).__name__ for part in parts)})",
        )  # fmt: skip
    return Subject(spec, *parts)


def _example(path: str) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise UsageError("there is no such file of inputs", got=path) from error
    except (pickle.PickleError, EOFError, OSError, *ERRORS_OF_CODE) as error:
        first = (str(error).strip().splitlines() or [""])[0]  # of torch's message, which is a page
        raise UsageError(
            "the inputs cannot be read", expected="tensors, numbers and strings in tuples, lists and dicts",
            got=f"{path}: {first}", hint="torch.save(inputs, path); of what a tokenizer returns, dict(...)",
        ) from error  # fmt: skip
