"""What the executors of a converted model know of the rest: the run they are called in, modules, states, the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..kernels import QParams
from ..mappings import OpRow, Spelling
from ..record.callsite import Spot
from ..record.record import Key, Read, Record, SeenOp, Tag
from ..tensors import Provenance


class Leaf(Protocol):
    """A leaf module whose forward is intercepted.

    Attributes:
        attributes: names of the module's settings, in the order of its row's arguments.
    """

    module: nn.Module
    path: str
    attributes: tuple[str, ...]

    def original(self, *args: Any, **kwargs: Any) -> Any: ...


class Run(Protocol):
    """One call of the model.

    Attributes:
        unsure: the op that runs read a value of unknown range.
        strays: some op of this run did.
    """

    provenance: Provenance
    unsure: bool
    strays: bool

    def tag_of(self, value: Tensor) -> Tag: ...

    def follows(self, value: Tensor) -> bool: ...

    def unrecorded_leaf(self, leaf: Any, args: tuple, kwargs: dict) -> Any: ...

    def run_float(self, func: Callable, args: tuple, kwargs: dict, inplace: bool) -> Any: ...


class Model(Protocol):
    """What all modules of a converted model share.

    Attributes:
        modules: path -> module, for every name that a module has.
        weight_axes: canonical place of each int8 weight -> axis of its scales.
        kept_weights: those of them that stay as float parameters too, for ops in float.
        strict: leaving the recorded paths raises.
    """

    record: Record
    modules: dict[str, nn.Module]
    weight_axes: dict[tuple[str, str], int | None]
    kept_weights: set[tuple[str, str]]
    strict: bool

    @property
    def states(self) -> Mapping[str, State]: ...

    def warn_once(self, what: str, message: str) -> None: ...

    def place_of(self, tag: Tag) -> tuple | None: ...

    def maker(self, tag: Tag) -> str: ...

    def qparams_of(self, tag: Tag) -> QParams | None: ...

    def packed_for(self, op: SeenOp) -> dict: ...


class State(Protocol):
    """The quantization state of the module that calls an op."""

    path: str

    @property
    def token(self) -> Model: ...

    def qparams(self, key: Key) -> QParams: ...

    def unrecorded(self, op: str, leaf: str | None) -> None: ...


class Part(Protocol):
    """What runs in place of one call of a module; returns ``NOT_RUN`` if it does not take the arguments."""

    def __call__(self, call: Run, args: tuple, kwargs: dict) -> Any: ...


class Hook(Protocol):
    """What happens at one op. ``module`` serves leaf modules (``leaf``: with one argument), ``function`` everything
    else.

    Attributes:
        spots: where in the code the op was met in this process.
        deep: whether that takes the whole chain of calls to tell.
        sited: for a leaf module, whether it is called on several lines.
        any_time: whether it stands for an op at times when it was never seen.
        products: functions that are products with a weight -> how they came to this op (``decompositions.Product``).
    """

    op: SeenOp
    row: OpRow
    module_path: str | None
    reads: Sequence[Read]
    read_qparams: list[QParams]
    spots: set[Spot]
    deep: bool
    sited: bool
    any_time: bool
    products: dict[Callable, Any]

    def leaf(self, call: Run, leaf: Leaf, x: Any) -> Any: ...

    def module(self, call: Run, leaf: Leaf, args: tuple, kwargs: dict) -> Any: ...

    def function(self, call: Run, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any: ...

    def fits(self, bound: Sequence[Any]) -> bool: ...
