"""``compare`` and ``log_values``: where accuracy goes, op by op."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import without_function_modes
from ..auto_trace import logging_values
from ..calibration.first_run import watch
from ..calibration.surgery import copied, random_state_kept, uncompiled
from ..errors import ConfigurationError
from ..hidden_state import state_of
from ..kernels import quantize
from ..pytree import call_arguments, copied_inputs, tree_leaves
from ..record.record import SeenOp
from ..tensors import Int8Tensor, plain
from .rows import lowered_report
from .tables import Table


@dataclass(frozen=True)
class ComparisonRow:
    """One op's output in the float and in the quantized model.

    Attributes:
        path: as in reports.
        op: name in the op table.
        sqnr: signal to quantization noise ratio in dB of the op as it runs, the errors of all before it included.
        local: the same, where the op (with what is fused before it) gets what the float model gives it, so that the
            error is its own: of its int8 inputs, weights and output. None where the second model is not converted.
    """

    path: str
    op: str
    sqnr: float
    local: float | None = None


@dataclass(frozen=True)
class Comparison(Table):
    """Ops sorted by ``sqnr``, worst first. ``str()`` is a table."""

    rows: tuple[ComparisonRow, ...]

    def head(self) -> list[str]:
        return ["path", "op", "SQNR (dB)", "local (dB)"]

    def cells(self, row: ComparisonRow) -> list[str]:
        return [row.path, row.op, f"{row.sqnr:.1f}", "" if row.local is None else f"{row.local:.1f}"]

    def title(self) -> str:
        return "Signal to quantization noise, worst first: of each op as it runs, and (local) on float inputs"

    def __str__(self) -> str:
        return self.table()


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise ratio in dB: ``20 log10(|reference| / |reference - other|)``; inf where equal.
    Infinite elements that are so in both (masks) count as equal, and for no signal.

    >>> round(sqnr(torch.tensor([1.0, 1.0]), torch.tensor([1.1, 0.9])))
    20
    """
    same = reference.isinf() & (reference == other)
    if bool(same.any()):
        reference, other = reference.masked_fill(same, 0), other.masked_fill(same, 0)
    noise = torch.linalg.vector_norm((reference - other).double()).item()
    signal = torch.linalg.vector_norm(reference.double()).item()
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def log_values(
    model: nn.Module, example_inputs: Any = (), *, example_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Output of every op of one run: op path (as in ``report``) -> float tensor.

    Args:
        model: a float, prepared or converted model. A copy of it is run, a float one's in eval mode.
        example_inputs: one call's arguments, as in ``prepare``.
        example_kwargs: keyword arguments beside them.

    Inside a fusion of a converted model only its last op has a value.

    >>> list(log_values(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4)))
    ['0', '1']
    """
    return {path: values[0] for path, (_, values) in _logged(model, example_inputs, example_kwargs).items()}


def _weights(model: nn.Module) -> list[Tensor]:
    """The int8 weights of a converted model, which its calls do not write to."""
    return [tensor for name, tensor in model.named_buffers() if name.endswith("_int8")]


def _logged(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    expected: Mapping[str, tuple[str, list[Tensor]]] | None = None,
) -> dict[str, tuple[str, list[Tensor]]]:
    """Op path -> (op, its float outputs).

    Args:
        expected: the float model's. Then each op of a converted model, once its output is noted, is taken to have
            given that, so that those after it read it.
    """
    model = uncompiled(model)
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    values: dict[str, tuple[str, list[Tensor]]] = {}

    def keep(op: SeenOp, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if op.hooked and tensors and tensors[0].is_floating_point():
            tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
            with without_function_modes():
                values[op.path] = (op.op, [plain(tensor).detach().clone() for tensor in tensors])
                if expected is not None and op.path in expected:
                    for tensor, by in zip(tensors, expected[op.path][1], strict=False):
                        _replace(tensor, by)

    with torch.no_grad():
        if state_of(model) is None:
            watch(model, args, kwargs, on_op=keep)
        else:
            tried = copied(model, (*model.parameters(), *_weights(model)))
            args, kwargs = copied_inputs((args, kwargs))
            with random_state_kept(), logging_values(keep):
                tried(*args, **kwargs)
    return values


def _replace(value: Tensor, by: Tensor) -> None:
    """Give a value that an op of a converted model just made other elements, in whatever form it has them."""
    if value.shape != by.shape or any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)):
        return
    if not isinstance(value, Int8Tensor):
        value.copy_(by)
    elif value.data_u8 is not None:
        value.become(Int8Tensor(value.size_, quantize(by, value.qparams), value.qparams, value.tag_))
    elif value.deferred_ is None:
        value.float_value().copy_(by)


def compare(
    float_model: nn.Module,
    quantized: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run both models on one input and compare them op by op.

    An op's error is its own (``local``: it reads what the float model computed) or what came of all errors so far
    (``sqnr``: it runs where it is). A low ``local`` names the layer to look at: leave it in float, or give it another
    qconfig. A low ``sqnr`` with a high ``local`` has its cause further up.

    Args:
        float_model: the model before ``prepare``, or a prepared one.
        quantized: the converted model.
        example_inputs: one call's arguments, as in ``prepare``.
        example_kwargs: keyword arguments beside them.

    Raises:
        ConfigurationError: a model is lowered: what it computes inside has no values of its own.

    >>> from dbrq import quantize
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
    >>> result = compare(model, quantize(model, [x]), x)
    >>> sorted(row.path for row in result.rows)
    ['1', '2']
    >>> all(row.local > 20 for row in result.rows)
    True
    """
    for name, model in (("float_model", float_model), ("quantized", quantized)):
        if lowered_report(model) is not None:
            raise ConfigurationError(
                "compare looks at the values inside of models, and a lowered one has none to show",
                expected=f"{name}: a float, prepared or converted model", got=type(model).__name__,
                hint="compare the converted model that it was lowered from; lowered models were compared with theirs",
            )  # fmt: skip
    before, after = (_logged(m, example_inputs, example_kwargs) for m in (float_model, quantized))
    state = state_of(uncompiled(quantized))
    alone = None
    if state is not None and state.token.phase == "int8":
        alone = _logged(quantized, example_inputs, example_kwargs, before)

    def row(path: str, op: str, value: Tensor) -> ComparisonRow:
        expected = before[path][1][0]
        own = None if alone is None or path not in alone else alone[path][1][0]
        local = None if own is None or own.shape != expected.shape else sqnr(expected, own)
        return ComparisonRow(path, op, sqnr(expected, value), local)

    rows = [
        row(path, op, values[0])
        for path, (op, values) in after.items()
        if path in before and before[path][1][0].shape == values[0].shape
    ]
    return Comparison(tuple(sorted(rows, key=lambda row: row.sqnr)))
