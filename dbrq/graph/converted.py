"""The converted model, run beside its graph: what each op of it gave, and what a call left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import without_function_modes
from ..auto_trace import InterceptedForward, logging_values
from ..calibration.session import working_copy
from ..errors import ERRORS_OF_CODE, is_bug
from ..record.record import SeenOp
from ..tensors import plain
from .agreement import Reference
from .held import Held, differing, held
from .signature import Inside, InsideRun, placeholders_of
from .trials import Outcome, Trial, outcome, owned, perturbed, seeded, smaller


class Converted:
    """A converted model, called as often as one likes: what runs is a copy, replaced by another where a call left
    traces in it.

    Attributes:
        again: where the first call left traces that are no tensors: which attributes changed, and what the same call
            gives behind another.
    """

    def __init__(self, quantized: nn.Module, inside: Inside | None) -> None:
        self.quantized, self.inside = quantized, inside
        self.again: tuple[str, Outcome] | None = None
        self._copy: nn.Module | None = None

    def call(
        self, trial: Trial, reference: Reference, values: dict[str, list[Tensor]] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """What a call leaves behind, and what the model would warn of if it had not done so before.

        Args:
            reference: the model's graph, which has run already, so that it is known what calls write to.
            values: takes what ops give: path -> values.
        """
        written, changes = reference.changed, reference.writes
        if self._copy is None:
            tensors = (*self.quantized.named_buffers(), *self.quantized.named_parameters())
            self._copy = working_copy(self.quantized, [t for name, t in tensors if name not in written])
        model, self._copy = self._copy, None
        intercepted: InterceptedForward = model.__dict__["forward"]
        intercepted.token.warned = noted = _Noted()
        before = held(model)
        log = contextlib.nullcontext() if values is None else logging_values(functools.partial(_keep, values))
        with log:
            output, args, kwargs = self._output(model, trial)
        buffers = {name: tensor for name in written if isinstance(tensor := held_at(model, name), Tensor)}
        found = outcome(output, placed(intercepted, args, kwargs) if changes else None, buffers)
        after = held(model)
        if not changes and after == before:
            self._copy = model
        elif not changes and self.again is None:
            self.again = self._second(model, trial, before, after)
        return found, noted.noted

    def _second(self, model: nn.Module, trial: Trial, before: Held, after: Held) -> tuple[str, Outcome] | None:
        """What the same call gives behind one with other inputs, and what the first changed; None if the model's code
        takes no other call.
        """
        try:
            with contextlib.suppress(*ERRORS_OF_CODE):  # other inputs may be none for this model
                self._output(model, dataclasses.replace(trial, inputs=smaller(perturbed(trial.inputs, False))))
            return ", ".join(differing(before, after)), outcome(self._output(model, trial)[0])
        except ERRORS_OF_CODE as error:
            if is_bug(error):
                raise
            return None

    def _output(self, model: nn.Module, trial: Trial) -> tuple[Any, tuple, dict]:
        """What a copy gives, and its arguments as they are then."""
        args, kwargs = owned(trial.inputs)
        intercepted: InterceptedForward = model.__dict__["forward"]
        with torch.inference_mode(False), torch.no_grad(), seeded(trial.seed):
            if self.inside is None:
                return model(*args, **kwargs), args, kwargs
            return InsideRun(intercepted, self.inside).run(intercepted, args, kwargs), args, kwargs


def held_at(model: nn.Module, path: str) -> Any:
    """What a model has at a path; None where the graph holds a tensor that the model has in a container of its own."""
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _keep(values: dict[str, list[Tensor]], op: SeenOp, value: Any) -> None:
    """Put a copy of an op's value with those that it had in this run."""
    if op.hooked and isinstance(value, Tensor) and value.is_floating_point():
        with without_function_modes(), torch.inference_mode(False):
            values.setdefault(op.path, []).append(plain(value).detach().clone())


class _Noted(set):
    """What a model has warned of already, as far as it can tell: everything. What it warned its user of in earlier
    calls is noted too, since that it runs in float, say, counts in each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __contains__(self, what: object) -> bool:
        self.noted.append(str(what))
        return True


def placed(intercepted: InterceptedForward, args: tuple, kwargs: dict) -> list[Any]:
    """Arguments in the order of the graph's placeholders."""
    signature = intercepted.__signature__
    return [value for _, value, _, _, _ in placeholders_of(signature, signature.bind(*args, **kwargs))]
