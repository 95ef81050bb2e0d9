"""What a run was seen to do: ops, the values between them, and what was decided about each. Plain data, no torch
hooks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.ao.quantization import QConfig

from ..mappings import OpRow
from .callsite import Site, user_line
from .parameters import Computed, ParameterRef

#: Who made a value: the value's id for ops of the table and for inputs, a function's name for other ops, None for
# constants.
Tag = int | str | None


@dataclass(frozen=True)
class TensorInfo:
    """One value that was seen: its id, unique in the watching run, and what it looked like."""

    id: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool
    tag: Tag
    constant: bool = False

    def __str__(self) -> str:
        return f"{self.id}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


#: Why a computed weight stays float that is not computed with the same numbers each time.
VARYING_NUMBERS = "its weight is computed in forward, from numbers that are not always the same"

#: Why a layer stays float whose parameters are others at times.
REPLACED = "forward replaces its parameters"

#: So many settings of an op are kept beside the first.
MOST_SETTINGS = 8


def is_number(value: Any) -> bool:
    """Whether a setting is an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: One value whose qparams are meant, or several whose ranges together are.
Key = int | tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """How an op reads one activation: as int8 with the qparams of value ``value``, which ``tag`` made.

    Where paths join, other values come to the same slot: ``others`` are their tags and values.
    """

    slot: int
    value: Key
    tag: Tag
    others: tuple[tuple[Tag, Key], ...] = ()

    @property
    def edges(self) -> tuple[tuple[Tag, Key], ...]:
        """All (tag, value) that come to the slot."""
        return ((self.tag, self.value), *self.others)


@dataclass(frozen=True)
class Place:
    """What tells an op from the others of its module, on whatever path it is met.

    Attributes:
        op: name in the op table, or the function's.
        site: where it is written in the user's code.
        module: path of the leaf module that the op is, or of the one that is not looked into.
        weight: which parameter a functional op reads as its weight, which part of it, its stride, padding, dilation
            and groups, for which that is packed, and its bias.
    """

    op: str
    site: Site
    module: str | None = None
    weight: tuple | None = None


@dataclass(frozen=True)
class Step:
    """One op of a fusion, after its head."""

    op: OpRow
    constants: tuple[Any, ...]
    value: int
    norm: tuple[ParameterRef | None, ...] = ()
    eps: float = 0.0
    other: Read | None = None
    other_slot: int | None = None


@dataclass
class Decision:
    """What becomes of an op: decided once, from the record, and obeyed by eager and by every backend.

    Attributes:
        precision: "int8" or "float".
        reason: why float; "" otherwise.
        mode: "static", "dynamic" or "weight_only", for ops with weights.
        reads: the activations read as int8.
        writes: the value whose qparams it is written with as uint8, None where the result is float.
        chain: ops fused behind this one.
        member_of: for an op inside a fusion, the id of the value it expects under way.
        kernel: what runs, in words.
    """

    precision: str = "float"
    reason: str = ""
    mode: str = "static"
    reads: tuple[Read, ...] = ()
    writes: Key | None = None
    chain: tuple[Step, ...] = ()
    member_of: int | None = None
    kernel: str = "float"


@dataclass(eq=False)
class SeenOp:
    """One op, seen at one place of one call of one module, on any number of paths.

    Attributes:
        op: its name in the op table, or the function's own name.
        row: its row, ``OTHER`` for ops the table does not know.
        owner: path of the module whose forward ran it.
        call: which call of the owner in the run.
        place: where in the owner's code.
        nth: how often the same place came before in that call, with a hook or without.
        hooked: whether it has an op hook.
        module: path of the leaf module, None for functions.
        occurrence: its number among the ops of that leaf module, or of that name in the owner.
        site: source line of the user's code.
        spelling: the function as it was written.
        inputs, outputs: all tensors, in order.
        activations: (slot, value id): the inputs that are data, by position in the bound arguments; several for a
            slot where paths join.
        constants: bound arguments that are no tensors.
        other_constants: what they were on other runs.
        weight, bias: where they are registered; None with ``weight_problem`` if they cannot be.
        sources: what a computed weight comes from, of type float32.
        bias_computed: its bias is no parameter, so it is added in float.
        is_module: whether the op is the leaf module itself, and not a function that the module calls.
        norm: running mean, running variance, weight and bias of a batch norm, and eps.
        pad: padding to apply before a convolution, and its mode.
        transformed: whether a transform of torch.func ran it, whose values nobody sees.
        macs: multiply-accumulates for the example's shapes.
        weighs: whether they are with weights: parameters, and what comes from parameters.
        qconfig: what the user's mapping says for it.
        excluded: why the caller keeps it in float whatever its qconfig is; "" otherwise.
    """

    op: str
    row: OpRow
    owner: str
    call: int
    place: Place
    nth: int
    hooked: bool
    module: str | None
    occurrence: int
    site: str
    spelling: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    activations: tuple[tuple[int, int], ...] = ()
    constants: tuple[Any, ...] = ()
    other_constants: tuple[tuple[Any, ...], ...] = ()
    weight: ParameterRef | None = None
    bias: ParameterRef | None = None
    weight_problem: str = ""
    sources: tuple[ParameterRef, ...] = ()
    norm: tuple[ParameterRef | None, ...] = ()
    pad: tuple[tuple[int, ...], str] | None = None
    bias_computed: bool = False
    is_module: bool = False
    inplace: bool = False
    transformed: bool = False
    macs: int = 0
    weighs: bool = False
    qconfig: QConfig | None = None
    excluded: str = ""
    decision: Decision = field(default_factory=Decision)

    @property
    def path(self) -> str:
        """Its name in reports: the leaf module's path, or the owner's and the op with its occurrence."""
        if self.module is not None:
            return self.module if self.occurrence == 0 else f"{self.module}@{self.occurrence}"
        return f"{self.owner}.{self.op}.{self.occurrence}".lstrip(".")

    @property
    def leaf(self) -> str | None:
        """Path of the leaf module that the op is."""
        return self.module if self.is_module else None

    @property
    def module_key(self) -> str:
        """The path as a key of a ModuleDict, which takes no dots."""
        return self.path.replace(".", "/")

    @property
    def result(self) -> TensorInfo:
        """The first output."""
        return self.outputs[0]

    def all_constants(self) -> list[tuple[Any, ...]]:
        """The settings of all runs, as far as they were kept."""
        return [self.constants, *self.other_constants]

    @property
    def is_baked(self) -> bool:
        """Whether its settings are part of a packed weight or of the kernel that runs it."""
        return self.row.takes_weight or self.decision.member_of is not None

    def number_range(self, position: int) -> tuple[float, float] | None:
        """Numbers at ``position`` of which comes nothing beyond what was seen: those between the recorded ones, and
        factors that make values smaller, since ranges have zero. None if only the recorded ones will do.
        """
        seen = [constants[position] for constants in self.all_constants()]
        numbers = [value for value in seen if is_number(value)]
        if not numbers or len(numbers) < len(seen) or self.is_baked:
            return None
        if len(self.other_constants) >= MOST_SETTINGS:
            return -math.inf, math.inf
        low, high = min(numbers), max(numbers)
        if self.row.name == "div" and position == 1:
            return (low, math.inf) if low > 0 else (-math.inf, high) if high < 0 else None
        return (min(low, 0), max(high, 0)) if self.row.name in ("mul", "div") else (low, high)

    def slots(self) -> dict[int, list[int]]:
        """slot -> ids of the values that come to it."""
        found: dict[int, list[int]] = {}
        for slot, vid in self.activations:
            found.setdefault(slot, []).append(vid)
        return found

    def __str__(self) -> str:
        what = f"{self.path}: {self.op}({', '.join(map(str, self.inputs))}) -> ({', '.join(map(str, self.outputs))})"
        return f"{what}  [{self.site}]"


@dataclass(eq=False)
class Value:
    """A value that was seen, with everything that read it."""

    info: TensorInfo
    producer: SeenOp | None = None
    readers: list[SeenOp] = field(default_factory=list)
    is_input: bool = False
    is_output: bool = False
    aliased_mutation: bool = False
    layout_asked: bool = False  # forward asks how it lies in memory, so it must lie as in the float model
    origin: int | None = None  # for what only moves elements: the value they come from
    parameter: tuple[str, str] | None = None  # where it is registered, for parameters, buffers and views of them

    @property
    def is_exposed(self) -> bool:
        """Whether forward would notice if something else stood for it."""
        return self.aliased_mutation or self.layout_asked


@dataclass(eq=False)
class SeenPath:
    """One path through one call of a module.

    Attributes:
        steps: its hooked ops, and the modules it called, in order.
        seen: how often calibration took it.
    """

    steps: list[SeenOp | ModuleStep] = field(default_factory=list)
    seen: int = 0

    @property
    def ops(self) -> list[SeenOp]:
        """Its hooked ops."""
        return [step for step in self.steps if isinstance(step, SeenOp)]


class TensorSpec:
    """A tensor that a module was called with: its shape and dtype. No dataclass, which would count as a container."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


@dataclass(frozen=True)
class ModuleStep:
    """A call of another module: its path, and (in errors only) the line of the user's code."""

    module: str
    line: str = field(compare=False)


@dataclass(eq=False)
class SeenCall:
    """One call of one module.

    Attributes:
        paths: those taken through it.
        input_tags: argument -> who made its tensors, the first time, and ...
        other_input_tags: ... at other times.
        arguments: (args, kwargs) of the first time, tensors as specs; None if there was anything but plain values.
        before: path -> how often the modules inside had been called in that run.
    """

    paths: list[SeenPath] = field(default_factory=lambda: [SeenPath()])
    input_tags: dict[str, tuple[Tag, ...]] = field(default_factory=dict)
    other_input_tags: list[dict[str, tuple[Tag, ...]]] = field(default_factory=list)
    arguments: tuple[tuple, dict] | None = None
    before: dict[str, int] = field(default_factory=dict)

    def all_input_tags(self) -> list[dict[str, tuple[Tag, ...]]]:
        return [self.input_tags, *self.other_input_tags]


@dataclass(eq=False)
class Record:
    """What was seen in one run, or in all runs together (merge.py).

    Attributes:
        ops: every op that read values, in order of appearance.
        values: value id -> value.
        named: values that no op made: (path of the outermost module, argument, number, dtype) of what was given, or
            (module, name, geometry) of a parameter or of a view of one -> value id.
        constants: (op that reads it, position) -> id of a value that no op made.
        calls: module path -> its calls, in order.
        numbers: source line and how often it ran before -> the numbers that it read out of tensors, while watching
            and calibrating.
        computed: (path, name) of each computed weight -> how the latest run computed it.
        varying: those of them that are not the same in every run -> why.
        default_recipe: whether the user left the choice of qconfigs to dbrq.
        layouts: (path of the outermost module, argument, number) of what was given -> how it lay in memory, the first
            time (``layout_of``).
        by_layout: a line of the user's code that may do something else for inputs that lie in memory in another way;
            "" if there is none.
        parameter_names: canonical (path, name) of each parameter -> all the places it is registered.
    """

    ops: list[SeenOp] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    named: dict[tuple, int] = field(default_factory=dict)
    constants: dict[tuple[SeenOp, int], int] = field(default_factory=dict)
    calls: dict[str, list[SeenCall]] = field(default_factory=dict)
    parameter_names: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)
    computed: dict[tuple[str, str], Computed] = field(default_factory=dict)
    varying: dict[tuple[str, str], str] = field(default_factory=dict)
    default_recipe: bool = False
    numbers: dict[tuple[str, int], set[Any]] = field(default_factory=dict)
    layouts: dict[tuple[str, str, int], tuple | None] = field(default_factory=dict)
    by_layout: str = ""

    def goes_by_layout(self) -> None:
        """The user's code did what depends on how values lie in memory."""
        self.by_layout = self.by_layout or user_line()

    def read(self, counts: Counter[str], number: Any) -> None:
        """The user's code read a number out of a tensor. ``counts``: how often each line did in this run."""
        line = user_line()
        seen = self.numbers.setdefault((line, counts[line]), set())
        counts[line] += 1
        if len(seen) < 256:
            seen.add(number)

    def hooked(self) -> list[SeenOp]:
        return [op for op in self.ops if op.hooked]
