"""A plan: steps for one set of input shapes; and its instances, each with memory of its own, that execute it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import OneDNNError
from ...graph.nodes import leaves, walk
from ...pytree import tree_leaves
from .binding import Memory, arguments
from .layouts import same_layout
from .library import failure, library
from .values import FIXED, Buffer, Kind, Place, PrimitiveStep, Step, TorchStep, Value, plainly

_ALIGNMENT = 64


@dataclass(frozen=True)
class Plan:
    """What to run for inputs of given shapes.

    Attributes:
        inputs: their buffers, None for what is no tensor.
        steps: in order.
        outputs: nested containers of values and constants.
        arena: bytes that an instance needs, scratchpad included.
        scratchpad: where it starts in the arena.
    """

    inputs: tuple[Buffer | None, ...]
    steps: tuple[Step, ...]
    outputs: Any
    arena: int
    scratchpad: int


def place_buffers(steps: Sequence[Step], buffers: Sequence[Buffer]) -> int:
    """Give buffers offsets in one arena, such that those in use at the same time do not overlap; returns its size.

    Large ones first, each at the lowest offset that is free throughout its life.
    """
    placed: list[Buffer] = []
    total = 0
    for buffer in sorted(buffers, key=lambda b: -b.size):
        taken = sorted(
            (b.offset, b.offset + b.size) for b in placed if b.first <= buffer.last and buffer.first <= b.last
        )
        offset = 0
        for start, end in taken:
            if offset + buffer.size <= start:
                break
            offset = max(offset, _aligned(end))
        buffer.offset = offset
        placed.append(buffer)
        total = max(total, offset + buffer.size)
    return _aligned(total)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Instance:
    """Memory for one execution at a time of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        arena = torch.empty(plan.arena + _ALIGNMENT, dtype=torch.uint8)
        self.arena = arena[-arena.data_ptr() % _ALIGNMENT :]
        self._memories: dict[tuple[int, int, int], Memory] = {}
        self._moving: dict[Buffer, list[tuple[c_void_p, int]]] = {}
        self._slots: dict[Buffer, int] = {}
        self.tensors: list[Any] = []  # by slot: this call's tensors of buffers that move
        self.runs: list[Callable[[], None]] = []
        for buffer in plan.inputs:
            if buffer is not None:
                self._slot(buffer)
        group: list[tuple] = []
        for step in plan.steps:
            if isinstance(step, PrimitiveStep):
                group.append(self._prepared(step))
                continue
            if group:
                self.runs.append(_executes(group))
                group = []
            self.runs.append(self._calls(step))
        if group:
            self.runs.append(_executes(group))
        self._new = [
            (self._slot(value.buffer), value)
            for value in _unique(v for v in tree_leaves(plan.outputs) if isinstance(v, Value))
            if value.buffer.kind is Kind.OUTPUT
        ]
        self._inputs = [
            None if buffer is None else (self._slots[buffer], self._moving.get(buffer, ())) for buffer in plan.inputs
        ]
        self._outputs = [
            (slot, value.shape, value.strides, value.dtype, self._moving.get(value.buffer, ()))
            for slot, value in self._new
        ]
        self._results = [self._result(output) for output in plan.outputs]

    # Preparing

    def _slot(self, buffer: Buffer) -> int:
        if buffer not in self._slots:
            self._slots[buffer] = len(self.tensors)
            self.tensors.append(None)
        return self._slots[buffer]

    def _address(self, buffer: Buffer) -> int:
        if buffer.kind is Kind.ARENA:
            return self.arena.data_ptr() + buffer.offset
        assert buffer.tensor is not None
        return buffer.tensor.data_ptr()

    def _memory(self, place: Place) -> Memory:
        key = (id(place.buffer), place.offset, id(place.desc))
        if key not in self._memories:
            if place.buffer.kind in FIXED:
                memory = Memory(place.desc, self._address(place.buffer) + place.offset)
            else:
                memory = Memory(place.desc)
                self._slot(place.buffer)
                self._moving.setdefault(place.buffer, []).append((memory.handle, place.offset))
            self._memories[key] = memory
        return self._memories[key]

    def _prepared(self, step: PrimitiveStep) -> tuple:
        memories = {arg: self._memory(place) for arg, place in step.places.items()}
        args = arguments(memories)
        return step.primitive.handle, library().stream, ctypes.c_int(len(args)), ctypes.byref(args)

    def _tensor(self, value: Value) -> Tensor:
        """The tensor of a value that does not move."""
        if value.buffer.kind is Kind.ARENA:
            buffer = value.buffer
            return value.in_tensor(self.arena[buffer.offset : buffer.offset + max(buffer.size, 1)])
        assert value.buffer.tensor is not None
        return value.in_tensor(value.buffer.tensor)

    def _reader(self, value: Value) -> Callable[[], Tensor]:
        """What gives a value's tensor in a call."""
        tensors, slot = self.tensors, self._slot(value.buffer)
        shape, strides, dtype, start = value.shape, value.strides, value.dtype, value.offset
        offset = start // dtype.itemsize

        def read() -> Tensor:
            base = tensors[slot]
            if base.dtype is not dtype:  # seen as elements of another dtype
                start_now = (base.storage_offset() * base.element_size() + start) // dtype.itemsize
                return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), start_now, shape, strides)
            if offset == 0 and base.shape == shape and base.stride() == strides:
                return base
            return base.as_strided(shape, strides, base.storage_offset() + offset)

        return read

    def _resolved(self, tree: Any) -> Callable[[], Any]:
        """What gives arguments in a call."""
        values = [leaf for leaf in leaves(tree) if isinstance(leaf, Value)]
        if all(value.buffer.kind in FIXED for value in values):
            fixed = walk(lambda leaf: self._tensor(leaf) if isinstance(leaf, Value) else leaf, tree)
            return lambda: fixed
        prepared = walk(self._prepared_argument, tree)
        if isinstance(prepared, tuple) and not any(isinstance(a, (list, tuple, dict, slice)) for a in prepared):
            return lambda: [a() if type(a) is _Reads else a for a in prepared]
        return lambda: walk(lambda leaf: leaf() if type(leaf) is _Reads else leaf, prepared)

    def _prepared_argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        return self._tensor(leaf) if leaf.buffer.kind in FIXED else _Reads(self, leaf)

    def _calls(self, step: TorchStep) -> Callable[[], None]:
        function, args, kwargs = step.function, self._resolved(step.args), self._resolved(step.kwargs)
        results = [(i, self._slot(v.buffer), v.buffer, _as_planned(v, step.op)) for i, v in step.results]
        tensors, moving = self.tensors, self._moving
        set_handle = library().set_handle

        def call() -> None:
            result = function(*args(), **kwargs())
            if not results:
                return
            found = (result,) if isinstance(result, Tensor) else list(tree_leaves(result))
            for i, slot, buffer, planned in results:
                tensors[slot] = tensor = planned(found[i])
                if pairs := moving.get(buffer):
                    address = tensor.data_ptr()
                    for handle, offset in pairs:
                        set_handle(handle, address + offset)

        return call

    # Executing

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Execute; returns the outputs in new tensors."""
        self._start(inputs)
        for run in self.runs:
            run()
        results = [result() for result in self._results]
        tensors = self.tensors
        for slot in range(len(tensors)):
            tensors[slot] = None
        return results

    def _start(self, inputs: Sequence[Any]) -> None:
        set_handle, tensors = library().set_handle, self.tensors
        for tensor, taken in zip(inputs, self._inputs, strict=True):
            if taken is not None:
                slot, pointers = taken
                tensors[slot] = tensor
                if pointers:
                    address = tensor.data_ptr()
                    for handle, offset in pointers:
                        set_handle(handle, address + offset)
        for slot, shape, strides, dtype, pointers in self._outputs:
            tensors[slot] = tensor = torch.empty_strided(shape, strides, dtype=dtype)
            address = tensor.data_ptr()
            for handle, offset in pointers:
                set_handle(handle, address + offset)

    def _result(self, output: Any) -> Callable[[], Any]:
        """What gives an output at the end of a call."""
        if isinstance(output, Value):
            if output.buffer.kind in FIXED:
                fixed = self._tensor(output)
                return lambda: fixed
            return self._reader(output)
        if any(isinstance(leaf, Value) for leaf in leaves(output)):
            parts = walk(lambda leaf: self._result(leaf) if isinstance(leaf, Value) else leaf, output)
            return lambda: walk(lambda leaf: leaf() if callable(leaf) else leaf, parts)
        return lambda: output

    def timed(self, inputs: Sequence[Any], repeats: int) -> list[float]:
        """Microseconds of each step: the least of ``repeats`` executions of the whole."""
        best = [float("inf")] * len(self.plan.steps)
        singles: list[Callable[[], None]] = []
        for step in self.plan.steps:
            single = _executes([self._prepared(step)]) if isinstance(step, PrimitiveStep) else self._calls(step)
            singles.append(single)
        for _ in range(repeats):
            self._start(inputs)
            for i, single in enumerate(singles):
                start = time.perf_counter()
                single()
                best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
        return best


def _as_planned(value: Value, op: str) -> Callable[[Any], Tensor]:
    """What brings a result of torch's into the layout that the plan was made for.

    torch may choose another one than when it was traced: composite ops look whether a mode is active.
    """
    shape, strides, dtype = value.shape, value.strides, value.dtype

    def planned(tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype is not dtype:
            raise OneDNNError(
                "a call of torch gave something else than it gave before for inputs of the same shapes", op=op,
                expected=f"{shape} {dtype}", got=f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor)
                else type(tensor).__name__, hint="please report this",
            )  # fmt: skip
        tensor = plainly(tensor)
        if tensor.stride() == strides or same_layout(shape, tensor.stride(), strides):
            return tensor
        once = [1 if s == 0 else n for s, n in zip(strides, shape, strict=True)]  # what is repeated, is written once
        result = torch.empty_strided(shape, strides, dtype=dtype)
        result.as_strided(once, strides).copy_(tensor.as_strided(once, tensor.stride(), tensor.storage_offset()))
        return result

    return planned


class _Reads:
    """Stands for a tensor that is another one in each call."""

    def __init__(self, instance: Instance, value: Value) -> None:
        self.read = instance._reader(value)

    def __call__(self) -> Tensor:
        return self.read()


def _executes(group: list[tuple]) -> Callable[[], None]:
    """Executes primitives in a row: the hot loop."""
    execute = library().execute
    group = list(group)

    def run() -> None:
        for execution in group:
            status = execute(*execution)
            if status:
                raise failure("dnnl_primitive_execute", status)

    return run


def _unique(values: Any) -> list[Value]:
    return list({value.buffer: value for value in values}.values())


class Runner:
    """Executes a plan for any number of threads: each execution takes an instance, and gives it back."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._idle: list[Instance] = []
        self._lock = threading.Lock()

    def take(self) -> Instance:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Instance(self.plan)

    def give(self, instance: Instance) -> None:
        with self._lock:
            self._idle.append(instance)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        instance = self.take()
        result = instance.run(inputs)  # an instance whose execution failed is not used again
        self.give(instance)
        return result
