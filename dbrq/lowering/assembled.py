"""Whether a model lowered in parts gives what the converted model gives: on the example, and on inputs like it.

Each part was compared with its own graph before. What remains is what parts do to each other and to the code between
them, so outcomes are compared as a whole, by how far the converted model itself strays when its inputs are nudged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.session import working_copy
from ..errors import ERRORS_OF_CODE, is_bug
from ..graph.difference import rms
from ..graph.trials import Outcome, outcome, owned, perturbed, random_state_kept_if_drawn, seeded
from ..hidden_state import state_of
from ..pytree import tree_map

#: Path of a module -> the parts of its calls, as ``AutoQuantizationState.parts`` has them.
Parts = Mapping[str, dict[int, list]]

#: How far outcomes may be apart, relative to their size, and how many times as far as nudged inputs change them.
_CLOSE, _FACTOR = 0.1, 4.0
#: What is no further off than this agrees where the outcome is all zeros.
_FLOOR = 1e-3


def disagreeing(quantized: nn.Module, parts: Parts, args: tuple, kwargs: dict) -> list[str]:
    """Paths of the parts with which a converted model gives something else."""
    trials = []
    for inputs in ((args, kwargs), perturbed((args, kwargs), False)):
        try:
            expected = _outcome(quantized, {}, inputs)
            noise = _distance(expected, _outcome(quantized, {}, _nudged(inputs)))
        except ERRORS_OF_CODE as error:
            if is_bug(error):
                raise
            continue  # such inputs are none for this model
        trials.append((inputs, expected, max(_CLOSE, _FACTOR * noise)))  # infinite where rounding decides on shapes

    def agree(paths: Iterable[str]) -> bool:
        some = {path: parts[path] for path in paths}
        return all(_distance(expected, _outcome(quantized, some, inputs)) <= most for inputs, expected, most in trials)

    if agree(parts):
        return []
    wrong = [path for path in parts if not agree([path])]
    return wrong if agree(path for path in parts if path not in wrong) else list(parts)


def _outcome(quantized: nn.Module, parts: Parts, inputs: Any) -> Outcome:
    model = working_copy(quantized, ())
    states = state_of(model).token.states
    for path, its in parts.items():
        states[path].parts = its
    args, kwargs = owned(inputs)
    with random_state_kept_if_drawn(), seeded(0), torch.inference_mode(False), torch.no_grad():
        return outcome(model(*args, **kwargs), (args, kwargs))


def _nudged(inputs: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def nudge(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout is not torch.strided:
            return leaf
        return leaf * (1 + 0.01 * (torch.rand(leaf.shape, generator=generator) - 0.5)).to(leaf.dtype)

    return tree_map(nudge, owned(inputs))


def _distance(expected: Outcome, got: Outcome) -> float:
    """How far two outcomes are apart, relative to their size; infinite where they are of different kinds."""
    if expected.keys() != got.keys():
        return float("inf")
    return max((_leaf_distance(expected[path], got[path]) for path in expected), default=0.0)


def _leaf_distance(expected: Any, got: Any) -> float:
    if isinstance(expected, float) and isinstance(got, float):
        expected, got = torch.tensor([expected]), torch.tensor([got])
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return 0.0 if type(expected) is type(got) else float("inf")
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return float("inf")
    if not expected.is_floating_point() or not expected.numel() or expected.layout is not torch.strided:
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    size, error = rms(torch.where(finite, expected, 0.0)), rms(torch.where(finite, got - expected, 0.0))
    return error / size if size > 1e-6 else 0.0 if error <= _FLOOR else float("inf")
