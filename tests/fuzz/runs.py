"""One program through all backends, and what came of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import re
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig

import dbrq
from dbrq import Preset
from dbrq.accuracy import refining, smoothing
from dbrq.accuracy.layers import Layers
from dbrq.pytree import tree_map

from .judge import (
    FloatReference,
    Reference,
    costs_too_much,
    crude,
    draws_alike,
    leaves,
    problem,
    seeded,
    sqnr,
    structure,
)
from .program import Program

BACKENDS = ("rewrite", "torchscript", "onednn")
#: How much further from float than a crude quantization may be, and what is good enough in any case, in dB: on the
#: example, and on what calibration did not see.
SEEN, UNSEEN = (15.0, 20.0), (30.0, 3.0)
#: Text of what turns a rounding into any difference: the cost of 8 bits is no measure there.
JUMPS = re.compile(
    r"int|long|bool|floor|round|sign|shrink|[<>%]|//|arg|sort|topk|median|polar|atan2|reciprocal|indices| / "
)
#: How near, in dB, a result is to the reference or the float model where layers have settings that are not recorded.
NEAR = 15.0
#: Part of the range by which a result may differ from the float model and be right whatever the reference says.
NEAR_FLOAT = 0.03
RECURRENT = re.compile(r"LSTM|GRU|RNN")
#: Runs by which a model that draws random numbers is judged.
DRAWS = 24
#: What torch raises when a model does not take its inputs.
REJECTED = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    ZeroDivisionError,
    AttributeError,
    KeyError,
    UnboundLocalError,
    AssertionError,
)


def _smooth_at_random(seed: int, layers: Layers, corrected: bool) -> None:
    """Factors for all layers that can have any, whether they help or not."""
    generator = torch.Generator().manual_seed(seed)
    for group in smoothing._groups(layers):
        inputs = [layers.inputs[key] for key in group.keys]
        factors = torch.randn(len(inputs[0].ends()[0]), generator=generator).exp()
        for op in group.ops:
            assert op.weight is not None
            layers.smoothing[op.weight.key] = factors
        for key, its in zip(group.keys, inputs, strict=True):
            layers.qparams[key] = smoothing._range(its, factors, (1.0, 1.0), layers.qparams[key])


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that a program met.

    Attributes:
        backend: "prepare", "converted", "rewrite", "torchscript", "onednn", "inductor".
        kind: "refused" (an error of dbrq's), "mismatch" (dbrq disagrees with itself), "error" (any other), "value",
            "shape", "cost", "repeat", "input", "random", "held", "crash" or "hang"; "refused" alone is no failure.
        where: the line of dbrq that raised, or which call.
        detail: the message.
    """

    backend: str
    kind: str
    where: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind != "refused" and self.backend != "float"  # torch's own float kernels crash too

    @property
    def signature(self) -> str:
        if self.kind in ("error", "refused"):
            return f"{self.backend}/{self.kind}/{self.where}"
        return f"{self.backend}/{self.kind}"


class Stop(Exception):
    """This backend can go no further."""


class Run:
    """A program being tried.

    Args:
        program: the program.
        backends: which of "rewrite", "torchscript", "onednn" and "inductor".
        stage: told what runs next, so that a crash can be attributed.
    """

    def __init__(
        self, program: Program, backends: Sequence[str], stage: Callable[[str], None] = lambda name: None
    ) -> None:
        self.program, self.backends, self.stage = program, backends, stage
        self.findings: list[Finding] = []
        self.seconds: dict[str, float] = {}

    def run(self) -> list[Finding]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._float()
                converted = self._converted()
            except Stop:
                return self.findings
            for backend in self.backends:
                started = time.perf_counter()
                self._backend(backend, converted)
                self.seconds[backend] = time.perf_counter() - started
        return self.findings

    # Steps

    def _float(self) -> None:
        """What the float model does on each call; a call that it rejects is left out."""
        self.model = self.program.build()
        self.args = [self.program.inputs(number) for number in range(len(self.program.calls))]
        try:
            seeded(copy.deepcopy(self.model), copy.deepcopy(self.args[0]), 0)
        except REJECTED:
            raise Stop from None

    def _expected(self, converted: nn.Module) -> None:
        started = time.perf_counter()
        self.stage("float model")
        model = copy.deepcopy(self.model)
        buffers = dict(converted.named_buffers())
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        self.states: dict[int, nn.Module] = {}  # of the reference, before each call
        self.float: list[Any] = []
        self.after: list[Any] = []
        for number, args in enumerate(self.args):
            used = copy.deepcopy(args)
            if self.program.stateful:
                self.states[number] = copy.deepcopy(model)
            try:
                result = seeded(model, used, number)
            except REJECTED:
                if self.program.stateful:  # how far a call that fails has come with the state, nobody promises
                    self.args = self.args[:number]
                    break
                self.float.append(None)
                self.after.append(None)
                continue
            self.float.append(copy.deepcopy(result))
            self.after.append(used)
        self.by_layout = {n for n, args in enumerate(self.args) if self.float[n] is not None and self._by_layout(n)}
        self.reference: FloatReference | None = None
        self.expected: list[Any] = [None] * len(self.args)
        self.spreads: dict[int, list[Any]] = {}
        if self.program.config == "float":
            self.expected, self.reference = list(self.float), FloatReference(self.model)
            return
        if self.program.config == "dynamic" and RECURRENT.search(self.program.source()):
            return  # the test suite's fake quantization has no recurrent op: only the cost is judged
        reference = Reference(self.model, converted)
        before = copy.deepcopy(reference.stand_in)
        for number, args in enumerate(self.args):
            if self.float[number] is None:
                continue
            if self.program.stateful:
                self.states[number] = copy.deepcopy(reference.stand_in)
            try:
                self.expected[number] = seeded(reference, copy.deepcopy(args), number)
            except (AssertionError, StopIteration, RuntimeError, KeyError, TypeError, ValueError, IndexError):
                self.expected[number] = None  # another path than the recorded one: only the cost is judged
                if self.program.stateful:
                    break
        self.reference = reference
        if not self.program.stateful:
            reference.stand_in = before
        self.seconds["reference"] = time.perf_counter() - started

    def _by_layout(self, number: int) -> bool:
        """Whether the float model gives something else for contiguous copies of a call's inputs."""
        args = tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, self.args[number])
        if (
            self.program.stateful
            or self.program.random
            or all(map(operator.is_, leaves(args), leaves(self.args[number])))
        ):
            return False
        try:
            result = seeded(copy.deepcopy(self.model), copy.deepcopy(args), number)
        except REJECTED:
            return True
        return bool(problem(result, self.float[number], self.float[number], None))

    def _spread(self, number: int) -> list[Any]:
        if number not in self.spreads:
            if self.reference is None:
                return []
            kept = self.reference.stand_in
            self.reference.stand_in = self.states.get(number, kept)
            self.spreads[number] = self.reference.dithered(self.args[number], number)
            self.reference.stand_in = kept
        return self.spreads[number]

    def _converted(self) -> nn.Module:
        program = self.program
        started = time.perf_counter()
        self.stage("prepare")
        state = torch.get_rng_state()
        try:
            if program.config == "float":
                self._expected(self.model)
                return self.model
            mapping = None
            if program.config == "dynamic":
                mapping = QConfigMapping().set_global(default_dynamic_qconfig)
            model = copy.deepcopy(self.model)
            preset = Preset(smoothing=True) if program.config == "smoothed" else None
            prepared = dbrq.prepare(model, program.inputs(0), mapping, preset=preset)
            if not torch.equal(state, torch.get_rng_state()):
                self._add("prepare", "random", "", "prepare changed the random state")
            with torch.no_grad():
                for variant, factor in enumerate((1, 1, 1, 1.1)):  # no less than what is judged
                    prepared(*(scaled(value, factor) for value in program.inputs(0, variant)))
                for number, args in enumerate(self.args[1:], 1):
                    if structure(args) == structure(self.args[0]):
                        with contextlib.suppress(*REJECTED):  # as the float model does
                            prepared(*program.inputs(number))
            self.stage("convert")
            with patch.object(refining, "smooth", functools.partial(_smooth_at_random, program.seed)):
                converted = dbrq.convert(prepared)
        except Exception as error:
            self._raised("prepare", error)
            raise Stop from None
        self.seconds["convert"] = time.perf_counter() - started
        self._expected(converted)
        self.stage("converted")
        started = time.perf_counter()
        used = copy.deepcopy(converted) if program.stateful else converted
        self._judge("converted", used)
        self.seconds["converted"] = time.perf_counter() - started
        return converted

    def _backend(self, backend: str, converted: nn.Module) -> None:
        self.stage(backend)
        if self.program.config == "float" and backend == "rewrite":
            return
        example = self.program.inputs(0)
        source = copy.deepcopy(converted) if self.program.stateful else converted
        state = torch.get_rng_state()
        try:
            lowered = (
                dbrq.rewrite(source, example) if backend == "rewrite" else dbrq.lower(source, example, backend=backend)
            )
        except Exception as error:
            self._raised(backend, error)
            return
        if backend != "inductor" and not torch.equal(state, torch.get_rng_state()):
            self._add(backend, "random", "", "lowering changed the random state")
        self.stage(f"{backend} runs")
        self._judge(backend, lowered)

    def _judge(self, backend: str, model: nn.Module) -> None:
        held: list[tuple[Any, Any]] = []
        order = [*range(len(self.args)), 0]
        for position, number in enumerate(order):
            if self.float[number] is None or (position == len(order) - 1 and self.program.stateful):
                continue
            if backend == "converted" and number in self.by_layout:
                continue  # values that are int8 are contiguous to the model's code, whatever the inputs' layout
            result = self._call(backend, model, number)
            if result is None and self.program.stateful:
                return  # it may have written some of its state and not the rest
            if result is None:
                continue
            first = position < len(self.args)
            found = self._problem(backend, number, result[0])
            if found.startswith(("value", "output")) and self.program.random:
                found = self._distribution(backend, model, number)
            if found:
                kind, _, detail = found.partition(": ")
                if kind.startswith("output"):
                    kind, _, detail = detail.partition(": ")
                self._add(backend, kind, f"call {number}{'' if first else ' again'}", detail)
                return
            if not first and held and not _same(result[0], held[0][1]) and not self._random_inductor(backend):
                self._add(backend, "repeat", "call 0 again", "not what the first call returned, bit by bit")
                return
            held.append((result[0], copy.deepcopy(result[0])))
        for number, (kept, copied) in enumerate(held):
            if not _same(kept, copied):
                self._add(backend, "held", f"call {number}", "a result changed after later calls")
                return

    def _random_inductor(self, backend: str) -> bool:
        return backend == "inductor" and self.program.random

    def _call(self, backend: str, model: nn.Module, number: int) -> tuple[Any] | None:
        used = copy.deepcopy(self.args[number])
        try:
            result = seeded(model, used, number)
        except Exception as error:
            self._raised(backend, error, f"call {number}: ")
            return None
        if self._random_inductor(backend):
            return (result,)
        before = [*leaves(self.args[number])]
        for was, now, should in zip(before, leaves(used), leaves(self.after[number]), strict=True):
            if isinstance(was, Tensor) and torch.equal(was, should) != torch.equal(was, now):
                text = "was changed" if torch.equal(was, should) else "was not changed as the model does"
                self._add(backend, "input", f"call {number}", f"an input {text}")
        return (result,)

    def _problem(self, backend: str, number: int, result: Any) -> str:
        containers = backend != "torchscript"
        if self._random_inductor(backend):
            return ""
        if self.expected[number] is not None:
            dithered = (lambda: self._spread(number)) if self.reference is not None else None
            exact = self.program.config == "float"
            found = problem(result, self.expected[number], self.float[number], dithered, containers, exact)
            if found and not found.startswith("shape") and not self._near(result, number):
                return found
        elif found := problem(result, result, self.float[number], None, containers):
            return found
        if self.program.config in ("float", "smoothed") or (
            backend != "converted" and self.expected[number] is not None
        ):
            return ""
        if (
            self.program.random
            or self.program.stateful
            or JUMPS.search(self.program.source())
            or (number and self.expected[number] is not None)
        ):
            return ""  # what calibration did not see may saturate
        rough = crude(self.model, self.args[number], number)
        return costs_too_much(result, self.float[number], rough, *(UNSEEN if number else SEEN))

    def _near(self, result: Any, number: int) -> bool:
        """Whether a result is right however far it is from the reference.

        It is where it is about as near to the float model as 8 bits are, or no farther from it than the reference:
        where code goes by the layout of what layers return, the reference may go another way. A layer with other
        settings is float where the reference rounds.
        """
        trees = leaves(result), leaves(self.expected[number]), leaves(self.float[number])
        for got, rounded, exact in zip(*trees, strict=True):
            if not isinstance(exact, Tensor) or not exact.is_floating_point() or not exact.numel():
                continue
            a, b, f = got.double(), rounded.double(), exact.double()
            if (a - f).abs().max() <= NEAR_FLOAT * f.abs().max() or sqnr(f, a) >= max(NEAR, sqnr(f, b)):
                continue
            if not (number and self.program.varying):
                return False
            if not JUMPS.search(self.program.source()) and max(sqnr(b, a), sqnr(f, a)) < NEAR:
                return False
        return True

    def _distribution(self, backend: str, model: nn.Module, number: int) -> str:
        """Judge a model that draws random numbers by many draws. Its state changes."""
        reference = self.reference if self.expected[number] is not None and self.reference is not None else self.model

        def draws(fn: Callable[..., Any]) -> list[Any]:
            return [seeded(fn, copy.deepcopy(self.args[number]), seed) for seed in range(DRAWS)]

        return draws_alike(draws(copy.deepcopy(model)), draws(copy.deepcopy(reference)))

    # Findings

    def _raised(self, backend: str, error: Exception, prefix: str = "") -> None:
        said = re.findall(r"dbrq: [^\n]*", str(error))  # assertions that graphs and scripts carry
        detail = f"{prefix}{type(error).__name__}: {error}"
        detail = detail if len(detail) < 900 else f"{detail[:300]} ... {detail[-600:]}"
        if isinstance(error, dbrq.MismatchError) or "does not give what the model gives" in str(error):
            self._add(backend, "mismatch", _words(error), detail)  # dbrq disagrees with itself
        elif isinstance(error, dbrq.QuantizationError):
            self._add(backend, "refused", f"{_where(error)} {_words(error)}", detail)
        elif said:
            self._add(backend, "refused", _words(said[-1]), detail)
        elif backend == "rewrite" and "aminmax over an empty dimension" in str(error):  # torch's own
            self._add(backend, "refused", "no range for an empty batch", detail)
        else:
            self._add(backend, "error", _where(error), detail)

    def _add(self, backend: str, kind: str, where: str, detail: str) -> None:
        self.findings.append(Finding(backend, kind, where.strip(), detail))


def scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, Tensor) and value.is_floating_point() and factor != 1 else value


def _words(error: object) -> str:
    """The first line of a message, without its numbers and names."""
    text = str(error).partition("\n")[0]
    return (
        re.sub(r"\d+|(?<=: ).*$|'[^']*'", "_", text)[:70]
        if not text.startswith("dbrq:")
        else re.sub(r"\d+", "_", text)[:60]
    )


def _where(error: BaseException) -> str:
    """The innermost line of dbrq on the way to an error."""
    cause: BaseException | None = error
    while cause is not None:
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if "/dbrq/" in f.filename]
        if frames:
            file = frames[-1].filename.rpartition("/dbrq/")[2]
            return f"{file}:{frames[-1].name}:{type(error).__name__}"
        cause = cause.__cause__
    return type(error).__name__


def _same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) or (x.shape == y.shape and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)))
        if isinstance(x, Tensor)
        else x == y
        for x, y in zip(leaves(a), leaves(b), strict=True)
    )


def run(
    program: Program, backends: Sequence[str] = BACKENDS, stage: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Everything that a program met."""
    return Run(program, backends, stage).run()
