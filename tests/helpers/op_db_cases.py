"""Models made of torch's own op database: each op between two int8 layers, with what its samples give it."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import dbrq
from dbrq.hidden_state import state_of
from dbrq.record.record import SeenOp
from tests.helpers.reference import fake_quantize

#: Each value that the layers give is moved by up to this share of itself from one call to the next.
_NUDGE = 0.05
_CALLS, _SEED = 3, 3


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS: dict[str, OpInfo] = {}
for _op in op_db:
    OPS.setdefault(full_name(_op), _op)


def spellings_of(op: OpInfo) -> dict[str, Callable]:
    """How an op may be called: its function, and its method and operator, in place too."""
    found = {
        "function": op.op, "method": op.method_variant, "in place": op.inplace_variant,
        "operator": op.operator_variant, "operator in place": op.inplace_operator_variant,
    }  # fmt: skip
    return {name: function for name, function in found.items() if function is not None}


def samples_of(op: OpInfo, most: int | None = None) -> list[SampleInput]:
    """An op's samples, the first ``most`` of them: in float32 if it takes that."""
    wanted = (torch.float32, torch.int64, torch.bool, torch.complex64)
    dtype = next((dtype for dtype in wanted if op.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        return []
    # It looks for the ``TestCase`` that runs it, on the whole stack, and finds none.
    with (
        warnings.catch_warnings(),
        patch.object(common_utils, "extract_test_fn", lambda: None),
        patch.object(core, "extract_test_fn", lambda: None),
    ):
        warnings.simplefilter("ignore")
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), most))


def mapping() -> QConfigMapping:
    """The default recipe, but that ranges are those seen: the layers' own rounding is the same in all calls."""
    qconfig = QConfig(
        MinMaxObserver.with_args(dtype=torch.quint8),
        PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
    )
    return dbrq.default_qconfig_mapping().set_object_type(nn.Linear, qconfig)


# Models


class _Piece:
    """A part of what the first layer gives, in the shape of a sample's tensor."""

    def __init__(self, start: int, like: Tensor) -> None:
        self.start, self.stop, self.shape = start, start + like.numel(), tuple(like.shape)


class _Given:
    """A tensor that the model is given beside: this argument of forward."""

    def __init__(self, index: int) -> None:
        self.index = index


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.float32 and leaf.layout is torch.strided


class Between(nn.Module):
    """``Linear``, an op on parts of what it gives, and a ``Linear`` of the op's first float result.

    The first layer multiplies by one, so that a sample's values stay in the op's domain. It gives what the op read
    too, so that the op alone can be run again on the very same values.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict, width: int) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight.data = torch.eye(width)
        self.tail: nn.Linear | None = None

    def forward(self, x, *given):
        h = self.head(x).flatten()
        read = h.clone()
        results = self.results(h, given)
        last = None
        if self.tail is not None:
            last = self.tail(next(leaf for leaf in results if is_float(leaf)).reshape(-1))
        return read, h, results, last

    def results(self, h: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the op gives for what the first layer gave."""

        def placed(leaf):
            if isinstance(leaf, _Piece):
                return h[leaf.start : leaf.stop].reshape(leaf.shape)
            return given[leaf.index] if isinstance(leaf, _Given) else leaf

        args = tree_map(placed, self.args)
        output = self.function(*args, **tree_map(placed, self.kwargs))
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return found or [leaf for leaf in args[:1] if isinstance(leaf, Tensor)]  # what gives nothing writes, perhaps


class Many(nn.Module):
    """Several of them side by side: making one graph costs little more than making one of the smallest."""

    def __init__(self, members: Sequence[Between], inputs: Sequence[int]) -> None:
        super().__init__()
        self.members, self.inputs = nn.ModuleList(members), list(inputs)

    def forward(self, *given):
        outputs, start = [], 0
        for member, count in zip(self.members, self.inputs, strict=True):
            outputs.append(member(*given[start : start + count]))
            start += count
        return outputs


@dataclass
class Case:
    """A sample of an op in one spelling: the model, and three calls' arguments."""

    name: str
    model: Between
    inputs: list[tuple]


def case_of(name: str, sample: SampleInput, function: Callable) -> Case:
    flat: list[Tensor] = []
    given: list[Tensor] = []

    def from_layer(leaf: Any) -> Any:
        if not is_float(leaf):
            return beside(leaf)
        flat.append(leaf)
        return _Piece(sum(t.numel() for t in flat[:-1]), leaf)

    def beside(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        given.append(leaf.detach())
        return _Given(len(given) - 1)

    first = tree_map(from_layer, sample.input)
    args, kwargs = tree_map(beside, tuple(sample.args)), tree_map(beside, dict(sample.kwargs))
    values = torch.cat([t.flatten() for t in flat]) if flat else torch.ones(4)
    width = 4 if values.numel() > 4 else 2
    x = torch.ones(max(1, -(-values.numel() // width)) * width)
    x[: values.numel()] = values
    x = x.reshape(-1, width)
    generator = torch.Generator().manual_seed(7)
    nudges = [2 * torch.rand(x.shape, generator=generator) - 1 for _ in range(_CALLS - 1)]
    inputs = [(x, *given), *((x * (1 + _NUDGE * nudge), *given) for nudge in nudges)]
    case = Case(name, Between(function, (first, *args), kwargs, width).eval(), inputs)
    _add_tail(case)
    return case


def _add_tail(case: Case) -> None:
    """Add a layer that reads the op's first float result, if that is of finite values and always of one size."""
    sizes = set()
    for inputs in case.inputs:
        first = next((leaf for leaf in called(case.model, inputs)[2] if is_float(leaf)), None)
        if first is None or not first.numel() or not torch.isfinite(first).all():
            return
        sizes.add(first.numel())
    if len(sizes) == 1:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            case.model.tail = nn.Linear(sizes.pop(), 2).eval()


def called(model: Callable, inputs: Sequence[Any]) -> Any:
    """One call, from the random state that all calls start from."""
    torch.manual_seed(_SEED)
    with torch.no_grad():
        return model(*map(_copied, inputs))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.layout is not torch.strided else copy.deepcopy(leaf)


# Judging


class Quantized:
    """Cases in one converted model.

    Args:
        cases: members of one model.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self.model = Many([case.model for case in cases], [len(case.inputs[0]) for case in cases]).eval()
        self.calls = [tuple(itertools.chain(*inputs)) for inputs in zip(*(c.inputs for c in cases), strict=True)]
        prepared = dbrq.prepare(self.model, self.calls[0], mapping())
        for inputs in self.calls:
            called(prepared, inputs)
        self.converted = dbrq.convert(prepared)
        token = state_of(self.converted).token  # type: ignore[union-attr]
        self.ops: dict[str, SeenOp] = {op.path: op for op in token.record.hooked()}
        self.qparams = {key: state.qparams(key) for state in token.states.values() for key in state.slots}

    def lowered(self, backend: str) -> nn.Module:
        torch.manual_seed(_SEED)
        return dbrq.lower(self.converted, self.calls[0], backend=backend)

    def problems(self, run: Callable) -> Iterator[tuple[str, str]]:
        """For each case what is wrong with the results of ``run``, a converted or lowered model, if anything is."""
        found: dict[str, str] = {}
        for number, inputs in enumerate(self.calls):
            outputs = called(run, inputs)
            torch.manual_seed(_SEED)
            for i, (case, output) in enumerate(zip(self.cases, outputs, strict=True)):
                problem = self._problem(i, case, case.inputs[number][1:], output)
                if problem:
                    found.setdefault(case.name, f"call {number}: {problem}")
        yield from found.items()

    def _problem(self, i: int, case: Case, given: Sequence[Tensor], output: Any) -> str:
        read, h, results, last = output
        again = read.clone()
        with torch.no_grad():
            expected = case.model.results(again, [_copied(t) for t in given])
        got = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if len(got) != len(expected):
            return f"{len(got)} results where there are {len(expected)}"
        for a, b in zip((h, *got), (again, *expected), strict=True):
            if problem := _difference(a, b):
                return problem
        return "" if last is None else self._wrong_tail(i, case, next(leaf for leaf in got if is_float(leaf)), last)

    def _wrong_tail(self, i: int, case: Case, read: Tensor, last: Tensor) -> str:
        """Whether the layer behind gives what fake quantization says, a value or two rounded otherwise."""
        if not torch.isfinite(read).all():
            return ""
        op = self.ops[f"members.{i}.tail"]
        tail = self.converted.members[i].tail  # type: ignore[union-attr, index]
        weight, read = tail.weight.dequantize(), read.reshape(-1)
        bound = torch.tensor(1e-3)
        if op.decision.reads:
            qparams = self.qparams[op.decision.reads[0].value]
            ties = ((read / qparams.scale).frac().abs() - 0.5).abs() < 1e-3  # may be rounded either way
            bound = bound + qparams.scale * (weight.abs() @ ties.float() + weight.abs().max())
            read = fake_quantize(read, qparams)
        expected = read @ weight.T + tail.bias
        bound = bound + 1e-4 * expected.abs()
        off = (last - expected).abs()
        if (off <= bound).all():
            return ""
        return f"the layer behind is off by {off.max():.3g}, and {bound.max():.3g} is fine"


def _difference(a: Tensor, b: Tensor) -> str:
    if (a.dtype, a.layout, a.shape) != (b.dtype, b.layout, b.shape):
        return f"{a.dtype} {a.layout} {tuple(a.shape)} where it is {b.dtype} {b.layout} {tuple(b.shape)}"
    a, b = (t.to_dense() if t.layout is not torch.strided else t for t in (a, b))
    if torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True):
        return ""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return f"off by {(a.to(wide) - b.to(wide)).abs().nan_to_num().max():.4g}"


def refusal(error: dbrq.QuantizationError, name: str) -> str:
    """Why a refusal is none: it does not say which op it is about. "" if it does."""
    words = name.replace(".", "_").split("_")
    return "" if error.op or any(len(word) > 2 and word in str(error) for word in words) else f"names no op: {error}"
