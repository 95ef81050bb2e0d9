"""The commands that call one function of the library each."""

from __future__ import annotations

import os
from argparse import Namespace

from ..exporting.onnx import export_onnx
from ..inspection import comparing
from ..inspection import doctor as diagnosing
from ..inspection import report as reporting
from .models import UsageError, subject
from .result import Result


def _progress(options: Namespace) -> bool | None:
    return False if options.quiet else None


def doctor(options: Namespace) -> Result:
    """``dbrq doctor [MODEL]``"""
    if options.model is None and options.example is not None:
        raise UsageError("an example is of a model", expected="MODEL --example FILE", got="no MODEL")
    if options.model is None:
        found = diagnosing.doctor()
    else:
        of = subject(options.model, options.example, options.allow)
        args, kwargs = of.call
        found = diagnosing.doctor(of.model, args, example_kwargs=kwargs)
    return Result(str(found), found.to_dict())


def report(options: Namespace) -> Result:
    """``dbrq report MODEL``"""
    of = subject(options.model, options.example, options.allow)
    found = reporting.report(of.converted(_progress(options)) if of.stage == "float" else of.model)
    if options.html:
        found.save(options.html)
    data = {
        "model": found.facts.model, "stage": found.facts.stage, "coverage": found.coverage,
        "coverage_all": found.coverage_all, "bytes_before": found.facts.bytes_before,
        "bytes_after": found.facts.bytes_after, "rows": found.to_dicts(),
    }  # fmt: skip
    return Result(found.table() if options.all else str(found), data)


def export(options: Namespace) -> Result:
    """``dbrq export MODEL --onnx OUT``"""
    of = subject(options.model, options.example, options.allow)
    args, kwargs = of.call
    export_onnx(of.converted(_progress(options)), args, options.onnx, example_kwargs=kwargs)
    size = os.path.getsize(options.onnx)
    return Result(f"{options.onnx}: {size / 1e6:.1f} MB", {"path": options.onnx, "bytes": size})


def compare(options: Namespace) -> Result:
    """``dbrq compare A B``"""
    a, b = subject(options.a, options.example, options.allow), subject(options.b, options.example, options.allow)
    args, kwargs = (a if a.has_example or not b.has_example else b).call
    found = comparing.compare(a.model, b.model, args, example_kwargs=kwargs)
    worst = min((row.sqnr for row in found.rows), default=float("inf"))
    problems = []
    if not found.rows:
        problems.append("the models have no op in common: B is to be made from A")
    if options.at_least is not None and worst < options.at_least:
        problems.append(f"{found.rows[0].path} has {worst:.1f} dB, and {options.at_least:.1f} were asked for")
    return Result(str(found), {"worst": worst, "rows": found.to_dicts()}, tuple(problems))
