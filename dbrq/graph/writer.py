"""A graph while it is built: nodes, the tensors that made them, the model's own tensors, and what is asserted."""

from __future__ import annotations

import contextlib
import enum
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from .._torch import TorchDispatchMode, assert_, schema_of, without_function_modes
from ..errors import SeveralPathsError
from ..kernels import QParams
from ..op_facts import memory_of
from ..pytree import tree_leaves
from ..record.callsite import user_line
from ..record.parameters import ParameterRef
from ..record.record import Tag
from ..tensors import layout_of
from .layouts import Laid, hold_behind, settle
from .nodes import ancestors, evaluated, identifier
from .symbols import Traced, traced, untraced

T = TypeVar("T")

#: How the message of each of the graph's assertions begins.
ONE_PATH = "dbrq: this graph holds for one path through the model"


@dataclass(slots=True)
class Known:
    """A tensor of the run and what is known of it.

    Attributes:
        tensor: the tensor, weakly.
        node: the node that computes it.
        static: it depends on no input.
        qparams: what it was dequantized with, if it was.
        tag: who made it, as in the record.
        value: its id in the record, inside a fusion.
        is_input: it is the caller's.
    """

    tensor: weakref.ref
    node: fx.Node
    static: bool = False
    qparams: QParams | None = None
    tag: Tag = None
    value: int | None = None
    is_input: bool = False


class Sizes(enum.Enum):
    """What becomes of the sizes that the code reads."""

    FREE = "numbers that stay free, and so do comparisons of them"
    COMPARED = "numbers that stay free; comparisons of them are plain bools, which some functions insist on"
    FIXED = "those of the example"


class GraphWriter:
    """Holds one graph while it is built: its nodes, which tensor each made, its state, and what it asserts.

    Args:
        model: the model that runs; the graph takes its parameters and buffers.
        sizes: what becomes of sizes.
        numbers: source line and how often it ran before -> the numbers that it read out of tensors in calibration.
        state: paths of the model's tensors that runs are known to change.

    Attributes:
        symbolic: whether sizes are free.
        graph: the graph so far.
        root: a tree of modules that holds the graph's tensors under the paths they had in the model.
        path: path of the module that runs.
        modules: submodules that the graph calls, by path.
        decisions: what the graph asserts, in words; ``value_decisions`` of them read elements of tensors.
        reads_constants: elements of tensors that seem constant became plain numbers.
    """

    def __init__(
        self, model: nn.Module, sizes: Sizes, numbers: Mapping[tuple[str, int], set], state: Collection[str] = ()
    ) -> None:
        self.model, self.sizes, self.numbers = model, sizes, numbers
        self.symbolic = sizes is not Sizes.FIXED
        self.graph, self.root = fx.Graph(), nn.Module()
        self.path = ""
        self.op: str | None = None
        self._known: dict[int, Known] = {}
        self._kept: list[Any] = []  # tensors whose identity must not be reused
        self._seed = torch.initial_seed()  # setting another is noticed, and so is setting this one again
        self._seeded_state = torch.Generator().manual_seed(self._seed).get_state().numpy()
        self._drawn_since = False
        self._strangers: dict[int, tuple[weakref.ref, str]] = {}
        self._state: set[int] = set()  # memory of the model's own tensors
        self._inputs: set[int | None] = set()  # memory of the caller's tensors
        self._written: Counter[int | None] = Counter()  # memory that was written to, and how often
        self._varying: set[int | None] = set()  # memory that holds something else in each call, since it was written to
        self._executing = 0
        self.value_decisions = 0
        self.decisions: list[str] = []
        self._scalars: dict[tuple, Any] = {}
        self._decided: set[tuple] = set()
        self._read: Counter[str] = Counter()
        self._parts: dict[tuple, Any] = {}
        self._attributes: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self._names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._names.setdefault(id(value), f"{path}.{name}".lstrip("."))
        self.reads_constants = False
        self._laid_out: set[fx.Node] = set()  # inputs whose layout is asserted
        self._laid: dict[fx.Node, Laid] = {}  # what copies or gives a view, as layouts have it
        self._originals = [
            (module, name, value)
            for module in model.modules()
            for name, value in (*module._buffers.items(), *vars(module).items())
            if isinstance(value, Tensor)
        ]
        self._bases = _shared_memory(value for _, _, value in self._originals)
        for _, _, value in self._originals:
            if self._names[id(value)] in state and (memory := memory_of(value)) is not None:
                self._state.add(memory)
                self._varying.add(memory)

    # Tensors and their nodes

    def known(self, tensor: Any) -> Known | None:
        found = self._known.get(id(tensor))
        return found if found is not None and found.tensor() is tensor else None

    def surely_known(self, tensor: Tensor) -> Known:
        """What is known of a tensor that the graph computes."""
        known = self.known(tensor)
        assert known is not None
        return known

    def bind(self, tensor: Tensor, node: fx.Node, **facts: Any) -> Known:
        """From now on ``tensor`` is what ``node`` computes."""
        known = self._known[id(tensor)] = Known(weakref.ref(tensor), node, **facts)
        self._strangers.pop(id(tensor), None)
        if known.is_input:
            self._inputs.add(memory_of(tensor))
        with without_function_modes():  # the run may be on its way, which would trace the sizes
            node.meta.setdefault("dtype", tensor.dtype)
            node.meta.setdefault("shape", tuple(tensor.shape))
            strided = tensor.layout is torch.strided
            node.meta.setdefault("contiguous", strided and tensor.is_contiguous())
            node.meta.setdefault("layout", layout_of(tensor))
        return known

    def alias(self, tensor: Tensor, source: Tensor) -> Tensor:
        """``tensor`` is the same value as ``source``; returns it."""
        known = self.known(source)
        if known is not None and tensor is not source:
            self._known[id(tensor)] = Known(
                weakref.ref(tensor), known.node, known.static, known.qparams, known.tag, known.value
            )
        return tensor

    def name(self, tensor: Tensor, name: str) -> None:
        """What to call a tensor that the graph will hold."""
        self._names.setdefault(id(tensor), name)
        self._kept.append(tensor)

    def attribute(self, name: str, tensor: Tensor) -> fx.Node:
        """A ``get_attr`` node for ``tensor``, registered as ``name`` or, if that is taken, a name like it."""
        held = self._attributes.get(name)
        if held is not None and held is not tensor:
            name = self._fresh(name)
        if name not in self._attributes:
            module, last = self._owner(name)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(last, nn.Parameter(tensor.detach(), requires_grad=False))
            else:
                module.register_buffer(last, tensor.detach().clone())  # as it is before the run writes to it
            self._attributes[name] = tensor
            self._kept.append(tensor)
        node = self.graph.create_node("get_attr", name, name=identifier(name))
        node.meta.update(dtype=tensor.dtype, shape=tuple(tensor.shape))
        return node

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds what is called ``name``, made if it is not there, and the last part of the name."""
        *path, last = name.split(".")
        module = self.root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            inner = module._modules[part]
            assert inner is not None
            module = inner
        return module, last

    def _fresh(self, name: str) -> str:
        number = 0
        while f"{name}_{number}" in self._attributes:
            number += 1
        return f"{name}_{number}"

    def part(self, key: tuple, make: Callable[[], T]) -> T:
        """What is made once per ``key`` and held by the graph's run: a tensor, several, or a module."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def parameter_part(self, ref: ParameterRef, tensor: Tensor) -> Tensor:
        """A parameter, or a part of one as a tensor of its own."""
        if ref.whole:
            return tensor

        def make() -> Tensor:
            value = tensor.detach().clone()
            self._names[id(value)] = self._fresh(str(ref))
            self._kept.append(value)
            return value

        return self.part(("part", *ref.key, ref.geometry), make)

    # What is written to

    def changed_state(self) -> set[str]:
        """Paths of the model's tensors that hold something else after a run."""
        return {name for name, tensor in self._attributes.items() if memory_of(tensor) in self._varying & self._state}

    def _note_writes(self, written: set[int | None], given: Sequence[Tensor], static: bool) -> None:
        for memory in written & {memory_of(t) for t in given} - {None}:
            self._written[memory] += 1
            if not static or memory in self._state:
                self._varying.add(memory)

    def writes_to(self, tensor: Tensor) -> int:
        """How often the memory of ``tensor`` was written to, here or perhaps in another call: there, inputs may share
        memory with each other and with the model's own tensors.
        """
        if not self._written:
            return 0
        memory = memory_of(tensor)
        same = {memory}
        if memory in self._inputs:
            same |= self._inputs | self._state
        elif memory in self._state:
            same |= self._inputs
        return sum(count for written, count in self._written.items() if written in same)

    def depends(self, tensor: Tensor) -> bool:
        """Whether the elements of ``tensor`` depend on an input."""
        known = self.known(tensor)
        stranger = self._strangers.get(id(tensor))
        if (memory := memory_of(tensor)) in self._varying and (known is not None or memory in self._state):
            return True
        return (known is not None and not known.static) or (stranger is not None and stranger[0]() is tensor)

    # Nodes

    def describe(self, node: fx.Node) -> None:
        line = user_line()
        node.meta.update(path=self.path, site=line, op=self.op)
        file, _, number = line.partition(":")
        node.stack_trace = f'  File "{file}", line {number or 0}, in {self.path or "forward"}\n'

    def _node_name(self, base: str) -> str:
        return identifier(self.path if self.op == self.path else f"{self.path}.{base}")

    def place(self) -> tuple[str, int]:
        """The line that reads a number now, and how often it did before."""
        line = user_line()
        self._read[line] += 1
        return line, self._read[line] - 1

    # Numbers, and what is decided on them

    def scalar(self, function: Callable, args: tuple) -> Any:
        """Record arithmetic on numbers."""
        nodes = tuple(a.fx_node if isinstance(a, Traced) else a for a in args)
        function = pow if function is operator.pow else function  # printed as **, which binds closer than a minus
        result = function(*map(untraced, args))
        if len(nodes) == 2 and nodes[0] is nodes[1] and isinstance(result, bool):
            if type(untraced(args[0])) is not float or function in (operator.lt, operator.gt):
                return result
            is_nan = self.scalar(math.isnan, args[:1])  # TorchScript folds v != v
            return is_nan if function is operator.ne else self.scalar(operator.eq, (is_nan, False))
        key = (function, *((type(n), n) for n in nodes))
        if key not in self._scalars:
            node = self.graph.call_function(function, nodes)
            self.describe(node)
            self._scalars[key] = traced(result, node, self)
        found = self._scalars[key]
        return found.decided() if self.sizes is Sizes.COMPARED and isinstance(result, bool) else found

    def size(self, tensor: Tensor, dim: int) -> Any:
        """One size of a tensor, free unless it depends on no input."""
        known = self.known(tensor)
        if not self.symbolic or known is None or known.static:  # written to or not, its size stays
            return tensor.shape[dim]
        key = ("size", known.node, dim % tensor.dim())
        if key not in self._scalars:
            base = f"{known.node.name}_size_{dim % tensor.dim()}"
            node = self.graph.create_node("call_method", "size", (known.node, dim % tensor.dim()), name=base)
            self.describe(node)
            self._scalars[key] = traced(tensor.shape[dim], node, self)
        return self._scalars[key]

    def decide(self, traced: Traced) -> None:
        if self._reads_values(traced.fx_node):
            self.value_decisions += 1
            self._require_one_outcome(traced)
        self.check(traced.fx_node, traced.value, "a number that the code decides on")

    def _require_one_outcome(self, traced: Traced) -> None:
        """Raise if the numbers that calibration read would have decided otherwise."""
        reads = [n for n in ancestors(traced.fx_node) if n.meta.get("reads")]
        if len(reads) != 1:
            return
        seen = self.numbers.get(reads[0].meta["place"], ())
        outcomes = {evaluated(traced.fx_node, reads[0], number) for number in seen} - {None}
        if len(outcomes | {traced.value}) > 1:
            raise SeveralPathsError(
                "one graph cannot stand for a model whose code decides on values",
                path=self.path, expected="one outcome in calibration", got=f"{len(outcomes)} outcomes at {user_line()}",
                hint="dbrq.lower lowers the parts of such a model and leaves the code that decides as it is",
            )  # fmt: skip

    def _reads_values(self, node: fx.Node) -> bool:
        """Whether a number depends on elements of a tensor, not on shapes only."""
        if node.op == "placeholder" or node.target in ("size", "numel", "stride", len):
            return False
        return any("dtype" in n.meta or self._reads_values(n) for n in node.all_input_nodes)

    def check(self, node: fx.Node, value: Any, what: str, where: fx.Node | None = None) -> None:
        """Have the graph assert that ``node`` is ``value``, which ``where`` needs; the present line by default."""
        if (node, value) in self._decided:
            return
        self._decided.add((node, value))
        condition = node
        if value is not True:
            condition = self.graph.call_function(operator.eq, (node, value))
            self.describe(condition)
        if type(value) is float and value == 0:  # 0.0 == -0.0, and ops tell one from the other
            sign = self.graph.call_function(math.copysign, (1.0, node))
            self.describe(sign)
            self.check(sign, math.copysign(1.0, value), f"the sign of {what}", where)
        path, line = (self.path, user_line()) if where is None else (where.meta["path"], where.meta["site"])
        place = f"module {path or '<root>'}, {line}"
        self.decisions.append(f"{what} was {value} ({place})")
        message = f"{ONE_PATH}: {what} was {value} in the run it was made from ({place})"
        self.describe(self.graph.call_function(assert_, (condition, message)))

    def hold_layouts_behind(self, node: fx.Node) -> None:
        """Have the graph assert the layouts of all inputs that ``node`` was computed from."""
        hold_behind(self, node, self._laid_out)

    def settle_layouts(self) -> None:
        """Have the graph, which has its output, copy where this run did, whatever layouts kernels choose."""
        settle(self, self._laid)

    # Values made out of sight

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See ops that nobody recorded."""
        with _OutOfSight(self):
            yield

    def out_of_sight(self, func: Any, given: Any, result: Any) -> None:
        if self._executing:
            return
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        if any(self.depends(t) for t in tensors):
            made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            if schema_of(func).is_mutable:
                made += tensors[:1]
            for tensor in made:
                self._known.pop(id(tensor), None)
                place = f"{user_line()} in module {self.path or '<root>'} by {func}"
                self._strangers[id(tensor)] = weakref.ref(tensor), place


class _OutOfSight(TorchDispatchMode):
    def __init__(self, recorder: GraphWriter) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with without_function_modes():  # it is no call of the user's code
            result = func(*args, **(kwargs or {}))
        self.recorder.out_of_sight(func, (args, kwargs), result)
        return result


def _shared_memory(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """For tensors that are parts of another one of them: that other one, by their ids."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if (memory := memory_of(tensor)) is not None and tensor.numel():
            found.setdefault((memory, tensor.dtype), []).append(tensor)
    bases: dict[int, Tensor] = {}
    for group in found.values():
        base = max(group, key=torch.Tensor.numel)
        start = base.storage_offset()
        for tensor in group:
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            inside = start <= tensor.storage_offset() and tensor.storage_offset() + last < start + base.numel()
            if tensor is not base and base.is_contiguous() and inside:
                bases[id(tensor)] = base
    return bases
