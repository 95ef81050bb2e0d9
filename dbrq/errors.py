"""Errors that tell the reader where, what was expected, what came, and what to do."""

import difflib
import os
from collections.abc import Iterable
from typing import Any

import torch

#: What Python and torch raise where code meets values of another kind than it was written for: traced numbers for ints,
#: perturbed inputs, graphs that a compiler does not take. All of ``dbrq``'s own errors are among them.
ERRORS_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
                  torch.jit.Error)  # fmt: skip
OWN_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def is_bug(error: BaseException) -> bool:
    """Whether an error that the user's code or torch might raise is a mistake in dbrq itself: an assertion, a missing
    attribute or key in a line of dbrq.
    """
    if not isinstance(error, (AssertionError, AttributeError, LookupError)) or error.__traceback__ is None:
        return False
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(OWN_FOLDER)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that matches nothing: those of ``known`` that are spelt most like it.

    One whose last part is the same is like it, however much longer it is.

    >>> nearest("encodr", ["encoder", "norm", "fc"])
    "did you mean 'encoder'?"
    """
    known = sorted({each for each in known if each})
    plain = name.replace("\\", "").strip("*.^$")
    last = plain.rpartition(".")[2]
    close = [each for each in known if last and each.rpartition(".")[2] == last][:1]
    close += [each for each in difflib.get_close_matches(plain, known, n=3, cutoff=0.65) if each not in close]
    if not close:  # the nearest of all, by their last part
        by_last = {each.rpartition(".")[2]: each for each in reversed(known)}
        close = [by_last[each] for each in difflib.get_close_matches(last, by_last, n=1, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(map(repr, close[:3]))}?"
    return f"there is {', '.join(map(repr, known[:8]))}{' ...' if len(known) > 8 else ''}" if known else "there is none"


class QuantizationError(RuntimeError):
    """Base class of every error dbrq raises on purpose.

    Args:
        message: what went wrong, in one sentence.
        path: module path in the user's model, "" for the root.
        op: name of the op as in the op table, such as ``"conv2d"``.
        expected: what the library needed.
        got: what it met instead.
        hint: what the user can do about it.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        op: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.message, self.path, self.op = message, path, op
        self.expected, self.got, self.hint = expected, got, hint
        lines = [message]
        if path is not None:
            lines.append(f"  module: {path or '<root>'}")
        if op is not None:
            lines.append(f"  op: {op}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if got is not None:
            lines.append(f"  got: {got}")
        if hint is not None:
            lines.append(f"  what to do: {hint}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.path, self.op, self.expected, self.got, self.hint)


def _rebuild(
    cls: type[QuantizationError], message: str, path: str | None, op: str | None, expected: object, got: object,
    hint: str | None,
) -> QuantizationError:  # fmt: skip
    return cls(message, path=path, op=op, expected=expected, got=got, hint=hint)


class ConfigurationError(QuantizationError):
    """The arguments or the qconfig mapping cannot be used."""


class CalibrationError(QuantizationError):
    """Calibration data is missing, or contains NaN or infinity."""


class NotCalibratedError(CalibrationError):
    """``convert`` was called on a model that has observed nothing."""


class DeviationError(QuantizationError):
    """A run of a strict model left the paths that were recorded."""


class KernelInputError(QuantizationError):
    """Input whose rank, shape or dtype no kernel takes."""


class RewriteError(QuantizationError):
    """The model cannot be written as one graph, or the graph cannot be lowered."""


class ExportError(QuantizationError):
    """A file format cannot hold the model, the file cannot be written, or a package that writes it is missing."""


class OneDNNError(QuantizationError):
    """libdnnl is missing, or a call of it failed."""


class MismatchError(QuantizationError):
    """A lowered model does not compute what the converted model computes."""


class CompilerError(QuantizationError):
    """A backend that generates code finds no compiler."""


class SeveralPathsError(RewriteError):
    """The model's code decides on values, and calibration saw more than one outcome."""


class RecipeError(QuantizationError):
    """A recipe file is damaged or belongs to another model."""


class LoadError(QuantizationError):
    """A saved model is damaged, or of a version that cannot be read."""
