"""``doctor``: what this machine offers int8 models, what is wrong with it, and what would make a model faster."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from .. import selfcheck
from .._torch import cpp_compiler
from ..calibration.surgery import random_state_kept, uncompiled
from ..errors import ERRORS_OF_CODE, CompilerError, ConfigurationError, OneDNNError, is_bug
from ..hidden_state import lowered_of, state_of
from ..kernels import has_exact_int8_dot
from ..lowering.drop_in import lowered_form
from ..lowering.inductor import InductorModel, check_compiler
from ..lowering.onednn import OneDNNModel
from ..lowering.onednn.library import Place, library, search
from ..pytree import call_arguments, copied_inputs
from ..workflow import prepare
from .machine import cpu, read, torch_facts
from .report import Report, report
from .rows import lowered_report
from .summary import is_tiny


@dataclass(frozen=True)
class Advice:
    """Something to do: ``what`` it is about, and the advice ``to`` take."""

    what: str
    to: str


@dataclass(frozen=True)
class Diagnosis:
    """What ``doctor`` found. ``str()`` is text for a person, ``to_dict()`` plain data.

    Attributes:
        machine: section -> fact -> value: CPU, torch, libdnnl, the C++ compiler, self-checks, OpenMP.
        model: the same of the model; None without one.
        advice: what would help, what matters most first.
    """

    machine: dict[str, dict[str, Any]]
    model: dict[str, Any] | None
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings, numbers and None, which JSON takes."""
        return {**self.machine, "model": self.model, "advice": [dataclasses.asdict(advice) for advice in self.advice]}

    def __str__(self) -> str:
        sections = self.machine if self.model is None else {**self.machine, "model": self.model}
        rows = [
            [section if i == 0 else "", name.replace("_", " "), text]
            for section, facts in sections.items()
            for i, (name, text) in enumerate((name, _text(value)) for name, value in facts.items())
        ]
        advice = "\n".join(f"- {a.what}: {a.to}" for a in self.advice) or "nothing to do"
        return f"{tabulate(rows, tablefmt='plain', disable_numparse=True)}\n\nadvice\n{advice}"


def _text(value: Any) -> str:
    """A fact for a person: one line for each item of what holds several."""
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        if isinstance(value[0], Mapping):
            return "\n".join(", ".join(_text(item) for item in one.values() if item != "") for one in value)
        return ", ".join(map(str, value))
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def doctor(
    model: nn.Module | None = None, example_inputs: Any = (), *, example_kwargs: Mapping[str, Any] | None = None
) -> Diagnosis:
    """What this machine offers int8 models, and what would make ``model`` faster.

    Without a model: the CPU, its instruction sets and what restricts them, torch, libdnnl (or where it was looked for
    and what was wrong there), the C++ compiler, whether products saturate so that activations need 7 bits, kernels that
    failed their self-check so far, and threads. With one: where it stands between float and lowered, what runs in float
    and why, by its share of the multiply-accumulates, and which kernels are slow.

    Args:
        model: a float, prepared, converted or lowered model. It is not changed: a float one is watched as ``prepare``
            does, converted and lowered ones run as a copy, and a prepared one does not run.
        example_inputs: one call's arguments, as in ``prepare``.
        example_kwargs: keyword arguments beside them.

    Raises:
        ConfigurationError: ``model`` is no module, or there are inputs without a model. A model that does not run on
            its inputs is a finding like others.

    >>> import dbrq
    >>> found = dbrq.doctor(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    >>> found.model["stage"]
    'float'
    >>> [advice.to for advice in found.advice if advice.what == "stage"]
    ['quantize it: dbrq.quantize(model, data), then dbrq.lower']
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigurationError("doctor looks at modules", got=type(model).__name__, hint="pass the model itself")
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    if model is None and (args or kwargs):
        raise ConfigurationError("there are example inputs, and no model", hint="dbrq.doctor(model, example_inputs)")
    facts = None if model is None else _of_model(uncompiled(model), args, kwargs)
    machine = {  # behind the model, whose run may find kernels that fail
        "cpu": cpu(), "torch": torch_facts(), "libdnnl": _libdnnl(), "compiler": _compiler(), "kernels": _kernels(),
        "threads": _threads(),
    }  # fmt: skip
    advice = [] if facts is None else _faster(facts, machine)
    return Diagnosis(machine, facts, (*advice, *_of_machine(machine)))


# The machine


def _libdnnl() -> dict[str, Any]:
    looked_at: tuple[Place, ...]
    try:
        found = library()
    except OneDNNError:
        looked_at = search()[1]
        facts: dict[str, Any] = {"found": False, "path": None, "version": None, "instruction_set": None}
    else:
        looked_at, version = found.looked_at, ".".join(map(str, found.version))
        facts = {"found": True, "path": found.path, "version": version, "instruction_set": found.isa}
    return {**facts, "looked_at": [dataclasses.asdict(place) for place in looked_at]}


def _compiler() -> dict[str, Any]:
    try:
        check_compiler()
    except CompilerError as error:
        return {"found": False, "path": None, "problem": str(error.got)}
    return {"found": True, "path": shutil.which(cpp_compiler()) or cpp_compiler(), "problem": ""}


def _kernels() -> dict[str, Any]:
    exact = has_exact_int8_dot()
    return {
        "products_saturate": not exact,
        "bits_of_activations": 8 if exact else 7,
        "self_checks": selfcheck.enabled(),
        "failed_here": [dataclasses.asdict(failure) for failure in selfcheck.failures()],
    }


def _threads() -> dict[str, Any]:
    loaded = {line.split(maxsplit=5)[-1].strip() for line in read("/proc/self/maps").splitlines() if ".so" in line}
    runtimes = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    return {
        "of_torch": torch.get_num_threads(),
        "between_ops": torch.get_num_interop_threads(),
        "openmp_runtimes": runtimes,
    }


def _of_machine(machine: Mapping[str, Mapping[str, Any]]) -> list[Advice]:
    advice = []
    cpu, kernels, threads = machine["cpu"], machine["kernels"], machine["threads"]
    limited = [name for name in cpu["environment"] if name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
                                                               "ATEN_CPU_CAPABILITY")]  # fmt: skip
    if limited:
        advice.append(Advice("instruction sets", f"{' and '.join(limited)} may keep kernels from what the CPU has"))
    for failure in kernels["failed_here"]:
        instead = f"; {failure['stand_in']} stands in for it" if failure["stand_in"] else ""
        advice.append(Advice(failure["kernel"], f"it failed its check on {failure['geometry']}{instead}"))
    if not kernels["self_checks"]:
        advice.append(Advice("self-checks", "they are off; dbrq.set_self_check(True) turns them on"))
    if kernels["products_saturate"]:
        to = "int8 products saturate on this CPU, so activations have 7 bits; with VNNI or AMX they would have 8"
        advice.append(Advice("bits", to))
    if not machine["libdnnl"]["found"]:
        advice.append(Advice("libdnnl", "pip install dbrq[onednn], for the fastest backend"))
    if not machine["compiler"]["found"]:
        advice.append(Advice("compiler", 'install g++ or clang++, if backend="inductor" is wanted'))
    if threads["of_torch"] > min(cpu["cores"], cpu["usable_threads"]):
        most = min(cpu["cores"], cpu["usable_threads"])
        advice.append(Advice("threads", f"torch uses more than there are cores: try torch.set_num_threads({most})"))
    elif threads["of_torch"] < cpu["cores"] <= cpu["usable_threads"]:
        advice.append(Advice("threads", f"torch uses {threads['of_torch']} of {cpu['cores']} cores"))
    if len(threads["openmp_runtimes"]) > 1:
        to = "several OpenMP runtimes are loaded, whose threads compete: import torch first, and see what brings others"
        advice.append(Advice("threads", to))
    return advice


# A model


def _of_model(model: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    stage, backend = _stage(model)
    facts: dict[str, Any] = {
        "class": type(model).__name__, "stage": stage, "backend": backend, "problem": "", "bits": _bits(model),
        "in_torch": {}, "reference_kernels": [],
    }  # fmt: skip
    try:
        found = report(prepare(model, args, example_kwargs=kwargs) if stage == "float" else model)
        facts |= _of_rows(found)
        if stage in ("converted", "lowered"):
            tried = copy.deepcopy(model)
            with torch.no_grad(), random_state_kept():
                tried(*copied_inputs(args), **copied_inputs(kwargs))
                graph = lowered_form(tried)
                if isinstance(graph, OneDNNModel):
                    facts["in_torch"] = graph.in_torch
                    facts["reference_kernels"] = _references(graph, args, kwargs)
    except ERRORS_OF_CODE as error:  # of the user's code, and what says that it cannot be quantized
        if is_bug(error):
            raise
        facts["problem"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return facts


def _stage(model: nn.Module) -> tuple[str, str | None]:
    """Where a model stands: float, prepared, converted or lowered; and the backend of a lowered one."""
    if (whole := lowered_of(model)) is not None:
        return "lowered", whole.target.backend
    if lowered_report(model) is not None:
        kinds = {OneDNNModel: "onednn", InductorModel: "inductor"}
        return "lowered", next((name for kind, name in kinds.items() if isinstance(model, kind)), "torchscript")
    state = state_of(model)
    if state is None:
        return "float", None
    if state.token.phase == "observe":
        return "prepared", None
    if any(state.parts for state in state.token.states.values()):
        return "lowered", "in parts"
    return "converted", None


def _of_rows(found: Report) -> dict[str, Any]:
    """What a report says, by share of the multiply-accumulates."""
    total = sum(row.macs for row in found.rows) or 1
    in_float = [row for row in found.rows if row.precision == "float"]
    reasons: Counter[str] = Counter()
    for row in in_float:
        reasons[row.reason] += row.macs
    largest = sorted((row for row in in_float if row.macs), key=lambda row: -row.macs)[:10]
    return {
        "ops": len(found.rows),
        "coverage": found.coverage,
        "coverage_all": found.coverage_all,
        "float_by_share": [
            {"path": row.path, "op": row.op, "share": row.macs / total, "reason": row.reason}
            for row in largest
        ],
        "reasons": {reason: macs / total for reason, macs in reasons.most_common() if macs},
        "tiny": [row.path for row in found.rows if is_tiny(row)],
    }  # fmt: skip


def _bits(model: nn.Module) -> int | None:
    """Of the activations that a converted model was made with; None where they are not known."""
    state = state_of(model)
    states = [] if state is None or state.token.phase == "observe" else state.token.states.values()
    widths = [int(width) for state in states if state.slots for width in state.quant_max - state.quant_min]
    return max(widths).bit_length() if widths else None


def _references(lowered: OneDNNModel, args: tuple, kwargs: dict) -> list[str]:
    """What oneDNN's reference kernels compute, which are slow."""
    steps = lowered.timed(copied_inputs(args), copied_inputs(kwargs), 1)
    return [f"{op}: {computes} ({kernel})" for op, kernel, computes, *_ in steps if kernel.startswith("ref")
            or ":ref" in kernel]  # fmt: skip


def _faster(facts: Mapping[str, Any], machine: Mapping[str, Mapping[str, Any]]) -> list[Advice]:
    advice = []
    stage, backend, problem = facts["stage"], facts["backend"], facts["problem"]
    if problem:
        advice.append(Advice("the model", f"it does not run on this example: {problem}"))
    best = "onednn" if machine["libdnnl"]["found"] else "torchscript"
    if stage == "float":
        advice.append(Advice("stage", "quantize it: dbrq.quantize(model, data), then dbrq.lower"))
    elif stage == "prepared":
        advice.append(Advice("stage", "calibrate it with data like those to come, then dbrq.convert and dbrq.lower"))
    elif stage == "converted":
        advice.append(Advice("stage", f'lower it: dbrq.lower(model, example, backend="{best}")'))
    elif backend == "torchscript" and best == "onednn":
        advice.append(Advice("backend", 'backend="onednn" calls the same kernels with less between them'))
    if (facts["bits"] or 0) > 7 and machine["kernels"]["products_saturate"]:
        to = "it was made with 8 bits and computes with 7 on this CPU: quantize it here, or with reduce_range"
        advice.append(Advice("bits", to))
    for reason, share in list(facts.get("reasons", {}).items())[:5]:
        if share >= 0.01:
            advice.append(Advice(f"{share:.0%} of the multiply-accumulates in float", reason))
    if tiny := facts.get("tiny"):
        listed = ", ".join(tiny[:5]) + (f" and {len(tiny) - 5} more" if len(tiny) > 5 else "")
        advice.append(Advice("tiny layers", f"in int8, where float may be faster: {listed}"))
    for what, why in facts["in_torch"].items():
        advice.append(Advice(what, f"torch computes it, since oneDNN does not: {why}"))
    for what in facts["reference_kernels"]:
        advice.append(Advice("reference kernel", f"oneDNN has no fast kernel for {what}"))
    return advice
