"""Making a plan: a partition's ops are compiled for the shapes at hand and executed as they are, so that everything
behind them has real values, and the first call of a shape is answered by the way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch import storage_id
from ...errors import KernelInputError, OneDNNError
from ...graph.nodes import leaves, walk
from ...kernels import QParams
from ...op_facts import Facts, Watching
from ...pytree import tree_leaves, tree_map
from .binding import (  # fmt: skip
    DTYPES,
    Alg,
    Arg,
    Attributes,
    Desc,
    Eltwise,
    Memory,
    Primitive,
    binary,
    execute,
    reorder,
    row_major,
)
from .execution import Plan, place_buffers
from .layouts import in_order, is_dense, same_layout
from .segments import has_strides
from .values import FIXED, Buffer, Kind, Place, PrimitiveStep, Step, TorchStep, Value, plainly


class Unsupported(Exception):
    """No primitive computes this partition for these shapes; the text says why."""


class DynamicShapes(Exception):
    """An op's result depends on more than its inputs' shapes, so that no plan can hold it."""


class PackedWeights:
    """Weights in the layouts that primitives chose: one copy for each layout, however many plans use it."""

    def __init__(self) -> None:
        self._packed: dict[str, list[Place]] = {}

    def known(self, key: str) -> list[Place]:
        return self._packed.get(key, [])

    def pack(self, key: str, make: Callable[[], Tensor], wanted: Desc) -> Place:
        """What ``make`` gives, in the layout ``wanted``."""
        for place in self.known(key):
            if place.desc == wanted:
                return place
        tensor = plainly(make()).contiguous()  # the layout from which trials of the kernels that read it bring theirs
        packed = torch.zeros(max(wanted.size, 1), dtype=torch.uint8)
        source = Desc.strided(tensor.shape, tensor.dtype, tensor.stride())
        execute(
            reorder(source, wanted, Attributes()),
            {Arg.SRC: Memory(source, tensor.data_ptr()), Arg.DST: Memory(wanted, packed.data_ptr())},
        )
        place = Place(Buffer(Kind.CONSTANT, wanted.size, packed, 0), 0, wanted)
        self._packed.setdefault(key, []).append(place)
        return place

    @property
    def nbytes(self) -> int:
        return sum(place.buffer.size for places in self._packed.values() for place in places)


class Builder:
    """Compiles and executes one graph for given inputs, and keeps the steps.

    Emitters (emitters/) use ``new``, ``constant``, ``run`` and what builds on them.

    Attributes:
        apart: the present node's memory is written to, so that each call needs its own, constant or not.

    Args:
        tensor: path -> tensor that the model holds.
        packed: the model's packed weights.
        dtype: of float results inside.
        mutable: the graph writes to memory, so that no intermediate value may be kept or written over.
        written: paths of the tensors that it writes to.
    """

    def __init__(
        self,
        tensor: Callable[[str], Tensor],
        packed: PackedWeights,
        dtype: torch.dtype,
        mutable: bool = False,
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.held, self.packed, self.dtype, self.mutable = tensor, packed, dtype, mutable
        self.written = written
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.op, self.words = "", ""
        self.apart = False
        self.scratchpad = 0
        self._attributes: dict[str, Value] = {}
        self._constants: dict[Any, Value] = {}
        self._derived: dict[tuple, Any] = {}
        self._passing: list[Buffer] = []  # of this call only
        self._dying: Counter[Buffer] = Counter()
        self._alive: Counter[Buffer] = Counter()

    # Values

    def new(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Value:
        """A new value in the arena, row-major by default."""
        strides = row_major(shape) if strides is None else tuple(strides)
        assert is_dense(shape, strides), "a layout with gaps is larger than its elements"
        size = max(math.prod(shape), 1) * torch.empty((), dtype=dtype).element_size()
        buffer = Buffer(Kind.ARENA, size, torch.empty(size, dtype=torch.uint8), len(self.steps))
        self.buffers.append(buffer)
        return Value(buffer, tuple(shape), dtype, strides)

    def constant(self, key: Any, make: Callable[[], Tensor]) -> Value:
        """A tensor made once for this plan, by ``key``."""
        if key not in self._constants:
            self._constants[key] = self._wrapped(make(), Kind.CONSTANT)
        return self._constants[key]

    def attribute(self, path: str) -> Value:
        """A tensor that the model holds."""
        if path not in self._attributes:
            kind = Kind.STATE if path in self.written else Kind.CONSTANT
            self._attributes[path] = self._wrapped(self.held(path).detach(), kind)
        return self._attributes[path]

    def numbers(self, *values: float, dtype: torch.dtype = torch.float32) -> Value:
        """A small constant vector: scales and zero points."""
        return self.constant((dtype, values), lambda: torch.tensor(values, dtype=dtype))

    def _wrapped(self, tensor: Tensor, kind: Kind) -> Value:
        """A value for a tensor with memory of its own."""
        if not has_strides(tensor):
            raise DynamicShapes(f"a tensor is {tensor.layout} on {tensor.device}")
        tensor = plainly(tensor)
        buffer = Buffer(kind, tensor.untyped_storage().nbytes(), tensor, len(self.steps))
        if kind in (Kind.INPUT, Kind.FRESH):
            self._passing.append(buffer)
        return Value(buffer, tuple(tensor.shape), tensor.dtype, tensor.stride())

    def tensor(self, value: Value) -> Tensor:
        """The tensor of a value, while the plan is made."""
        assert value.buffer.tensor is not None, "its memory was given back"
        return value.in_tensor(value.buffer.tensor)

    def dies(self, value: Value) -> bool:
        """Whether nothing reads the value's memory after the present node, and it may be written over."""
        buffer = value.buffer
        return buffer.kind is Kind.ARENA and not self.mutable and self._alive[buffer] == self._dying[buffer]

    # Primitives

    def run(
        self, primitive: Primitive, places: Mapping[int, Value | Place], macs: int = 0, words: str | None = None
    ) -> None:
        """Execute a primitive now and in every call."""
        found = {int(arg): v.place if isinstance(v, Value) else v for arg, v in places.items()}
        step = PrimitiveStep(primitive, found, self.op, self.words if words is None else words, macs)
        self._use(place.buffer for place in found.values())
        self.steps.append(step)
        memories = {}
        for arg, place in found.items():
            assert place.buffer.tensor is not None
            memories[arg] = Memory(place.desc, place.buffer.tensor.data_ptr() + place.offset)
        self.scratchpad = max(self.scratchpad, primitive.scratchpad)
        execute(primitive, memories)

    def _use(self, buffers: Any) -> None:
        for buffer in buffers:
            buffer.last = len(self.steps)

    def derived(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Values computed from another, once for all that ask for them; ``key`` starts with the other's buffer."""
        if self.mutable:
            return make()
        key = (key[0].version, *key)
        found = self._derived.get(key)
        if found is None or any(isinstance(v, Value) and v.buffer.tensor is None for v in leaves(found)):
            self._derived[key] = make()
        return self._derived[key]

    def reordered(self, value: Value, dtype: torch.dtype, strides: Sequence[int] | None = None,
                  qparams: QParams | None = None) -> Value:  # fmt: skip
        """The value in another dtype or layout, dequantized by ``qparams``; without gaps, in its own order by
        default.
        """
        strides = _order(value) if strides is None else tuple(strides)
        if value.dtype is dtype and qparams is None and same_layout(value.shape, value.strides, strides):
            return value.like(value.shape, strides)
        key = (value.buffer, value.offset, value.shape, value.strides, dtype, strides, qparams)

        def make() -> Value:
            result = self.new(value.shape, dtype, strides)
            self.convert(value, result, qparams)
            return result

        return self.derived(key, make)

    def convert(self, value: Value, result: Value, qparams: QParams | None = None) -> None:
        """Write ``value`` to ``result``, dequantized by ``qparams``; dtype and layout may change too."""
        if value.dtype not in DTYPES or not value.numel:
            raise Unsupported(f"oneDNN has no {value.dtype}" if value.numel else "it is empty")
        scales: dict[int, int] = {}
        zero_points: dict[int, int] = {}
        places: dict[int, Value | Place] = {Arg.SRC: value, Arg.DST: result}
        if qparams is not None:
            scales[int(Arg.SRC)] = 0
            places[Arg.SCALES | Arg.SRC] = self.numbers(qparams.scale)
            if qparams.zero_point:
                zero_points[int(Arg.SRC)] = 0
                places[Arg.ZERO_POINTS | Arg.SRC] = self.numbers(qparams.zero_point, dtype=torch.int32)
        try:
            primitive = reorder(value.desc, result.desc, Attributes(scales, zero_points))
        except OneDNNError as error:
            raise Unsupported(str(error)) from error
        self.run(primitive, places, words="reorder")

    def quantized(
        self, value: Value, new: QParams, old: QParams | None = None, strides: Sequence[int] | None = None
    ) -> Value:
        """A float value, or a uint8 one that means ``old``, as uint8.

        A binary primitive does it, several times as fast as a reorder; that follows where the layout changes.
        """
        key = (value.buffer, value.offset, value.shape, value.strides, new, old)
        result = self.derived(key, lambda: self._levels(value, new, old))
        return result if strides is None else self.reordered(result, torch.uint8, strides)

    def _levels(self, value: Value, new: QParams, old: QParams | None) -> Value:
        value = self.reordered(value, value.dtype)
        ratio = (1.0 if old is None else old.scale) / new.scale
        shift = new.zero_point - (0 if old is None else old.zero_point * ratio)
        post_ops = [Eltwise(Alg.LINEAR, ratio, shift)]
        if (new.quant_min, new.quant_max) != (0, 255):
            post_ops.append(Eltwise(Alg.CLIP, new.quant_min, new.quant_max))
        result = self.new(value.shape, torch.uint8, value.strides)
        flat = (1, value.numel)
        source, target = (v.like(flat, (value.numel, 1)) for v in (value, result))
        zero = self.numbers(0.0).like((1, 1), (1, 1))
        try:
            primitive = binary(Alg.ADD, source.desc, zero.desc, target.desc, Attributes(post_ops=post_ops))
        except OneDNNError as error:
            raise Unsupported(str(error)) from error
        self.run(primitive, {Arg.SRC: source, Arg.SRC_1: zero, Arg.DST: target}, words="quantize")
        return result

    def as_float(self, value: Value, qparams: QParams | None) -> Value:
        """An operand in float."""
        if qparams is None:
            return value
        return self.reordered(value, self.dtype, None, qparams)

    # torch

    def call(self, function: Callable, args: tuple, kwargs: dict, writes: bool = False, watch: bool = True,
             facts: Facts | None = None) -> Any:  # fmt: skip
        """Call torch now and, unless the result is known already or is a view, in every call.

        Args:
            writes: the function does more than compute its result.
            watch: refuse functions whose result depends on more than shapes.
            facts: what the function is known to do; without them it is watched, under which a few functions of torch
                choose other layouts.
        """
        try:
            return self._called(function, args, kwargs, writes, watch, facts)
        except (
            RuntimeError
        ):  # torch's Python may take views that torch's own layouts have, and those of kernels have not
            if writes or (facts is not None and facts.writes) or not any(map(_lies_otherwise, leaves((args, kwargs)))):
                raise
            args, kwargs = walk(self._in_rows, (args, kwargs))
            return self._called(function, args, kwargs, writes, watch, facts)

    def _in_rows(self, leaf: Any) -> Any:
        return self.reordered(leaf, leaf.dtype, row_major(leaf.shape)) if _lies_otherwise(leaf) else leaf

    def _called(
        self, function: Callable, args: tuple, kwargs: dict, writes: bool, watch: bool, facts: Facts | None
    ) -> Any:
        values = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Value)]
        if self.dtype is torch.bfloat16 and any(v.dtype is torch.bfloat16 for v in values):
            written = facts.written_among((args, kwargs)) if facts is not None else ()
            dtype = next((v.dtype for v in written if isinstance(v, Value)), self.dtype)
            args, kwargs = walk(lambda leaf: self._cast(leaf, dtype), (args, kwargs))
            values = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Value)]
        given, options = walk(lambda leaf: self.tensor(leaf) if isinstance(leaf, Value) else leaf, (args, kwargs))
        result = None
        if facts is None:
            with Watching() as watched:
                result = function(*given, **options)
            varying = [self.tensor(v) for v in values if v.buffer.kind is not Kind.CONSTANT]
            name = getattr(function, "__name__", "a function")
            decided = watched.decided_by(name, varying, result) and name
            random, dynamic = watched.random, watched.dynamic or decided
        else:
            random, dynamic, writes = facts.random, facts.dynamic and facts.call, writes or bool(facts.writes)
            if not dynamic:
                result = function(*given, **options)
        if watch and dynamic:
            raise DynamicShapes(dynamic)
        fixed = all(v.buffer.kind is Kind.CONSTANT for v in values) and not (writes or random or self.apart)
        fresh: list[tuple[int, Value]] = []
        numbers = iter(range(10**9))

        def value(leaf: Any) -> Any:
            number = next(numbers)
            if not isinstance(leaf, Tensor):
                return leaf
            if has_strides(leaf):
                leaf = plainly(leaf)
            seen = self._seen(leaf, values) if has_strides(leaf) else None
            if seen is not None:
                return seen
            made = self._wrapped(leaf, Kind.CONSTANT if fixed else Kind.FRESH)
            if not fixed:
                made.buffer.first = len(self.steps)
                fresh.append((number, made))
            return made

        wrapped = tree_map(value, result)
        if writes or fresh:
            self._use(v.buffer for v in values)
            self.steps.append(TorchStep(function, args, kwargs, tuple(fresh), self.op))
        return wrapped

    def _cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        floats = (torch.float32, torch.bfloat16)
        fits = not (isinstance(leaf, Value) and leaf.shape and leaf.dtype in floats and dtype in floats)
        return leaf if fits or leaf.dtype is dtype else self.reordered(leaf, dtype)

    def _seen(self, tensor: Tensor, values: Sequence[Value]) -> Value | None:
        """The value that a tensor is a view of, seen as the tensor; None for new memory."""
        storage = tensor.untyped_storage()
        for value in values:
            held = value.buffer.tensor
            if held is not None and storage_id(held.untyped_storage()) == storage_id(storage):
                if value.dtype is not tensor.dtype and value.buffer.kind not in FIXED:
                    return None
                offset = tensor.data_ptr() - held.data_ptr() if tensor.numel() else 0
                return Value(value.buffer, tuple(tensor.shape), tensor.dtype, tensor.stride(), offset)
        return None

    # Nodes

    def count(self, values: Any) -> None:
        """A node holds these values from now on."""
        for leaf in leaves(values):
            if isinstance(leaf, Value):
                self._alive[leaf.buffer] += 1

    def about_to_end(self, values: Sequence[Any]) -> None:
        """The present node is the last to read what these nodes hold."""
        self._dying = Counter(leaf.buffer for leaf in leaves(list(values)) if isinstance(leaf, Value))

    def uncount(self, values: Any) -> None:
        """A node of a partition's inside holds these no longer; whoever reads the partition's result may."""
        for leaf in leaves(values):
            if isinstance(leaf, Value):
                self._alive[leaf.buffer] -= 1

    def end(self, values: Any) -> None:
        """Nothing reads these any more."""
        for leaf in leaves(values):
            if isinstance(leaf, Value):
                buffer = leaf.buffer
                self._alive[buffer] -= 1
                if not self._alive[buffer] and buffer.kind in (Kind.ARENA, Kind.FRESH):
                    buffer.tensor = None

    def input(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if not has_strides(tensor):
            raise KernelInputError(
                "the onednn backend takes dense tensors on the CPU", got=f"{tensor.layout} on {tensor.device}",
                hint="move the input with .cpu() or .to_dense()",
            )  # fmt: skip
        return self._wrapped(tensor, Kind.INPUT)

    # The end

    def finish(self, inputs: Sequence[Any], outputs: Any) -> tuple[Plan, Any]:
        """The plan, and this call's outputs."""
        taken: set[Buffer] = set()
        self.apart = False
        count = Counter(leaf.buffer for leaf in tree_leaves(outputs) if isinstance(leaf, Value))
        shared: dict[Buffer, Value | None] = {
            buffer: None for buffer, n in count.items() if n > 1 and self.mutable and buffer.kind is Kind.ARENA
        }

        def give(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            leaf = self._together(leaf, shared)
            if leaf.buffer.kind is Kind.ARENA and _is_whole(leaf) and leaf.buffer not in taken:
                leaf.buffer.kind = Kind.OUTPUT
            elif leaf.buffer.kind in (Kind.ARENA, Kind.CONSTANT) or (leaf.buffer in taken and not self.mutable):
                leaf = self.call(_own, (leaf,), {}, writes=True)
            taken.add(leaf.buffer)
            return leaf

        outputs = tree_map(give, outputs)
        results = tree_map(lambda leaf: self.tensor(leaf) if isinstance(leaf, Value) else leaf, outputs)
        arena = [b for b in self.buffers if b.kind is Kind.ARENA]
        for buffer in self.buffers:
            if buffer.kind is not Kind.CONSTANT:
                buffer.tensor = None
        scratchpad = place_buffers(self.steps, arena)
        steps = self._with_scratchpads(scratchpad)
        for buffer in self._passing:
            buffer.tensor = None
        buffers = tuple(v.buffer if isinstance(v, Value) else None for v in inputs)
        return Plan(buffers, steps, outputs, scratchpad + self.scratchpad, scratchpad), results

    def _together(self, value: Value, shared: dict[Buffer, Value | None]) -> Value:
        """An output that shares memory with others, which may be written to: in one copy of all that memory."""
        if value.buffer not in shared:
            return value
        copy = shared[value.buffer]
        if copy is None:
            count = value.buffer.size // torch.empty((), dtype=value.dtype).element_size()
            copy = self.call(_own, (Value(value.buffer, (count,), value.dtype, (1,)),), {}, writes=True)
            shared[value.buffer] = copy
        return Value(copy.buffer, value.shape, value.dtype, value.strides, value.offset)

    def _with_scratchpads(self, offset: int) -> tuple[Step, ...]:
        pad = Buffer(Kind.ARENA, self.scratchpad, None, 0)
        pad.offset = offset
        descs: dict[int, Desc] = {}
        steps: list[Step] = []
        for step in self.steps:
            if isinstance(step, PrimitiveStep) and (size := step.primitive.scratchpad):
                if size not in descs:
                    descs[size] = Desc.strided((size,), torch.uint8)
                places = {**step.places, int(Arg.SCRATCHPAD): Place(pad, 0, descs[size])}
                step = PrimitiveStep(step.primitive, places, step.op, step.words, step.macs)
            steps.append(step)
        return tuple(steps)


def _own(x: Tensor) -> Tensor:
    """A copy that is the caller's."""
    return x.clone(memory_format=torch.preserve_format)


def _is_whole(value: Value) -> bool:
    """Whether the value is all of its buffer, each element once: a tensor made for the one holds the other."""
    size = max(value.numel, 1) * torch.empty((), dtype=value.dtype).element_size()
    return value.offset == 0 and value.buffer.size == size and is_dense(value.shape, value.strides)


def _order(value: Value) -> tuple[int, ...]:
    """Strides of the value without gaps, in the order of its axes in memory."""
    return row_major(value.shape) if 0 in value.strides else in_order(value.shape, value.strides)


def _lies_otherwise(leaf: Any) -> bool:
    """Whether a value is not contiguous, and can be made so by the library."""
    known = isinstance(leaf, Value) and leaf.dtype in DTYPES and leaf.numel > 0
    return known and not same_layout(leaf.shape, leaf.strides, row_major(leaf.shape))
