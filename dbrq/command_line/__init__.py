"""The command ``dbrq``: what the library does, for a shell.

Exit codes: 0, it was done; 1, it failed, or what was asked for does not hold; 2, it was called in a wrong way; 130, it
was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ERRORS_OF_CODE, QuantizationError, is_bug
from ..lowering import BACKENDS
from ..version import __version__
from .bench import bench
from .commands import compare, doctor, export, report
from .models import MODEL, UsageError
from .result import Result

_EXAMPLE = (
    "one call's inputs, as torch.save writes them: a tensor, a tuple of arguments, or a dict of keyword arguments"
)

_ALLOW = "a package or module of yours that a file may name; it is imported (may be given several times)"


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    top = argparse.ArgumentParser(
        prog="dbrq", description="int8 quantization for eager PyTorch models on x86 CPUs.", epilog=MODEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"dbrq {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function: Any, words: str, *models: str, optional: bool = False) -> argparse.ArgumentParser:
        one = commands.add_parser(function.__name__, help=words, description=f"{words}.", epilog=MODEL,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        for name in models:
            one.add_argument(name, metavar=name.upper(), nargs="?" if optional else None, help="see below")
        if models:
            one.add_argument("--example", metavar="FILE", help=_EXAMPLE)
            one.add_argument("--allow", metavar="NAME", action="append", default=[], help=_ALLOW)
        one.add_argument("--json", action="store_true", help="write JSON to stdout; all else goes to stderr")
        one.add_argument("--quiet", action="store_true", help="no progress bars")
        one.add_argument("--traceback", action="store_true", help="of errors, show where they were raised")
        one.set_defaults(run=function)
        return one

    command(doctor, "what this machine offers int8 models, and what would make a model faster", "model", optional=True)
    one = command(bench, "speed and accuracy of a model in float, in int8, and lowered to each backend", "model")
    forms = ", ".join(("eager", *BACKENDS))
    one.add_argument("--backends", metavar="LIST", help=f"some of {forms}, with commas; eager is the converted model")
    one.add_argument("--seconds", type=positive_number, default=3.0, help="how long to time each (%(default)s)")
    one.add_argument("--batches", type=_count, default=8, metavar="N",
                     help="how many items of the data accuracy is measured on (%(default)s)")  # fmt: skip
    one.add_argument("--threads", type=_count, metavar="N", help="of torch")
    one = command(report, "what a model runs in int8 and what in float, and why", "model")
    one.add_argument("--all", action="store_true", help="every op, not what fits a screen")
    one.add_argument("--html", metavar="OUT", help="write a page, too (needs dbrq[report])")
    one = command(export, "write a model for other runtimes", "model")
    one.add_argument("--onnx", required=True, metavar="OUT", help="an ONNX file, in QDQ form")
    one = command(compare, "how far each op of B is from A, a float model", "a", "b")
    one.add_argument("--at-least", type=float, metavar="DB", help="exit with 1 if an op has a lower SQNR")
    return top


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        arguments: of the command, without its name; None means those of the process.

    >>> main(["report", "no_such_package:make"])
    2
    """
    options = parser().parse_args(arguments)
    if os.getcwd() not in sys.path:  # as with python -m: MODEL may be a file of this folder
        sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the model's code prints is no part of the result
            result: Result = options.run(options)
    except KeyboardInterrupt:
        return 130
    except (*ERRORS_OF_CODE, OSError, ImportError) as error:
        if options.traceback or is_bug(error):
            traceback.print_exc()
        else:
            name = "" if isinstance(error, QuantizationError) else f"{type(error).__name__}: "
            print(f"dbrq {options.command}: {name}{error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    try:
        print(json.dumps(_plain(result.data), indent=2) if options.json else result.text, flush=True)
    except BrokenPipeError:  # of ``dbrq report ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for problem in result.problems:
        print(f"dbrq {options.command}: {problem}", file=sys.stderr)
    return 1 if result.problems else 0


def _plain(value: Any) -> Any:
    """What JSON can hold; it has no infinity, and equal values have an infinite ratio of signal to noise."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["main", "parser"]
