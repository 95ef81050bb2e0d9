"""Recording an FX graph from a run on real tensors: nodes, which tensor each one made, and the tensors the graph holds.

``GraphRecorder`` executes every call it records, so it always has real values; sizes and other numbers read from
tensors come back as traced numbers (symbols.py). A TorchDispatchMode below it sees whatever else touches a traced
tensor: a value made behind the recorder's back would be frozen into the graph, so using one is an error.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the quantized_decomposed ops
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ERRORS_OF_CODE, RewriteError, SeveralPathsError
from ..kernels import QParams
from ..op_facts import (
    AS_LAID_OUT,
    BY_MEMORY,
    Facts,
    Memory,
    Watching,
    called,
    memory_of,
    seen,
    sources,
)
from ..pytree import tree_leaves, tree_map
from ..record.callsite import user_line
from ..record.parameters import ParameterRef
from ..record.record import Tag
from ..tensors import Int8Weight, plain
from .located import located, op_of
from .nodes import (
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    ancestors,
    base_name,
    evaluated,
    identifier,
    is_impure,
    leaves,
    tensors_behind,
    walk,
)
from .symbols import Traced, traced, untraced
from .torchscript_form import TAKE_SIZES, spelled

#: Functions whose number of results depends on sizes: the code that follows was seen for one number.
_COUNTED = frozenset({"unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unsafe_chunk",
                      "unsafe_split", "nonzero", "nonzero_numpy", "where"})  # fmt: skip
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


class GraphRecorder:
    """Builds one graph.

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
        self._written: Counter[int] = Counter()  # memory that was written to, and how often
        self._varying: set[int | None] = set()  # memory that holds something else in each call, since it was written to
        self._executing = 0
        self.value_decisions = 0
        self.decisions: list[str] = []
        self._scalars: dict[tuple, Any] = {}
        self._decided: set[tuple] = set()
        self._read: Counter[str] = Counter()
        self._parts: dict[tuple, Tensor] = {}
        self._attributes: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self._names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._names.setdefault(id(value), f"{path}.{name}".lstrip("."))
        self.reads_constants = False
        self._laid_out: set[fx.Node] = set()  # inputs whose layout is asserted
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

    # What is known

    def known(self, tensor: Any) -> Known | None:
        found = self._known.get(id(tensor))
        return found if found is not None and found.tensor() is tensor else None

    def bind(self, tensor: Tensor, node: fx.Node, **facts: Any) -> Known:
        """From now on ``tensor`` is what ``node`` computes."""
        known = self._known[id(tensor)] = Known(weakref.ref(tensor), node, **facts)
        self._strangers.pop(id(tensor), None)
        with torch._C.DisableTorchFunction():  # the run may be on its way, which would trace the sizes
            node.meta.setdefault("dtype", tensor.dtype)
            node.meta.setdefault("shape", tuple(tensor.shape))
            strided = tensor.layout is torch.strided
            node.meta.setdefault("contiguous", strided and tensor.is_contiguous())
            if strided and tensor.dim() == 4:
                node.meta.setdefault("channels_last", tensor.is_contiguous(memory_format=torch.channels_last))
        return known

    def alias(self, tensor: Tensor, source: Tensor) -> Tensor:
        """``tensor`` is the same value as ``source``; returns it."""
        known = self.known(source)
        if known is not None and tensor is not source:
            self._known[id(tensor)] = Known(
                weakref.ref(tensor), known.node, known.static, known.qparams, known.tag, known.value
            )
        return tensor

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node for any tensor that an op is given."""
        if isinstance(tensor, Int8Weight):
            tensor = self.dequantized_weight(tensor)
        known = self.known(tensor)
        if known is not None:
            return known.node
        stranger = self._strangers.get(id(tensor))
        if stranger is not None and stranger[0]() is tensor:
            raise RewriteError(
                "a value was computed where the graph cannot follow, such as a ScriptModule or an extension's own code",
                path=self.path,
                expected="ops of torch, called from Python",
                got=f"a tensor {tuple(tensor.shape)} made at {stranger[1]}",
                hint="write this part in Python, or lower the modules around it one by one",
            )
        self._kept.append(tensor)
        if id(tensor) not in self._names and _is_borrowed(tensor):
            return self._constant(tensor)
        base = self._bases.get(id(tensor))
        if base is not None:
            return self.bind(tensor, self._part_of(base, tensor), static=True).node
        name = self._names.get(id(tensor)) or self._fresh("constant")
        if (memory := memory_of(tensor)) is not None and memory not in self._state:
            self._state.add(memory)
            self._varying.discard(memory)  # of what had this memory before
        return self.bind(tensor, self.attribute(name, tensor), static=True).node

    # Tensors the graph holds

    def _part_of(self, base: Tensor, part: Tensor) -> fx.Node:
        """One of the model's tensors as a view of another."""
        offset = part.storage_offset() - base.storage_offset()
        args = (self.node_of(base), list(part.shape), list(part.stride()), offset)
        node = self.graph.call_function(torch.as_strided, args)
        self._describe(node)
        return node

    def changed_state(self) -> set[str]:
        """Paths of the model's tensors that hold something else after a run."""
        return {name for name, tensor in self._attributes.items() if memory_of(tensor) in self._varying & self._state}

    def write_back(self, output: Any) -> Any:
        """Have the graph write what the code assigned to buffers and attributes, if it reads what they were, to the
        tensors that it holds for them; returns the output, which must not see that.

        Raises:
            RewriteError: they have another shape or dtype now.
        """
        held = {id(tensor) for tensor in self._attributes.values()}
        assigned = []
        for module, name, before in self._originals:
            now = module._buffers.get(name, vars(module).get(name))
            if now is before or not isinstance(now, Tensor) or id(before) not in held:
                continue
            if now.shape != before.shape or now.dtype is not before.dtype:
                raise RewriteError(
                    "a call replaces a tensor of the model by one of another shape or dtype, which the next call reads",
                    path=self._names[id(before)].rpartition(".")[0], op=name,
                    expected=f"{tuple(before.shape)}, {before.dtype}", got=f"{tuple(now.shape)}, {now.dtype}",
                    hint="write to a part of a tensor that is large enough, or take the tensor as an input",
                )  # fmt: skip
            assigned.append((before, now))
        old = {memory_of(before) for before, _ in assigned}

        def apart(leaf: Any) -> Any:
            shared = isinstance(leaf, Tensor) and memory_of(leaf) in old
            return self.call(torch.clone, (leaf,), {}) if shared else leaf

        with torch.no_grad():
            values = [apart(now) for _, now in assigned]
            output = tree_map(apart, output) if assigned else output
            for (before, _), value in zip(assigned, values, strict=True):
                self.call(torch.Tensor.copy_, (before, value), {})
        return output

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
            module = module._modules[part]  # type: ignore[assignment]
        return module, last

    def _fresh(self, name: str) -> str:
        number = 0
        while f"{name}_{number}" in self._attributes:
            number += 1
        return f"{name}_{number}"

    def part(self, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made once per ``key`` and held by the graph's run."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def weight(self, name: str, int8: Tensor, scale: Tensor) -> Tensor:
        """Dequantizes int8 ``[out, ...]`` held as ``{name}_int8`` by float32 ``[out]`` held as ``{name}_scale``."""
        held = {
            f"{name}_int8": int8.contiguous(),
            f"{name}_scale": scale,
            f"{name}_zero_point": torch.zeros(scale.numel(), dtype=torch.int64),
        }
        for full, tensor in held.items():
            self._kept.append(tensor)
            self.bind(tensor, self.attribute(full, tensor), static=True)
        int8, scale, zero_point = held.values()
        return self.call(DEQUANTIZE_PER_CHANNEL, (int8, scale, zero_point, 0, -128, 127, torch.int8), {}, name)

    def dequantized_weight(self, weight: Int8Weight) -> Tensor:
        """The float elements of an int8 weight that an op reads in float."""
        key = ("float", id(weight.owner), weight.parameter, weight.geometry)

        def make() -> Tensor:
            name = self._names.get(id(weight.owner._buffers[f"{weight.parameter}_int8"]), weight.parameter)
            whole = Int8Weight.whole(weight.owner, weight.parameter, weight.axis)
            scale = weight.owner._buffers[f"{weight.parameter}_scale"]
            if weight.axis != 0 or weight.owner._buffers.get(f"{weight.parameter}_zero_point") is not None:
                value = whole.float_value()
                self._kept.append(value)
                self.bind(value, self.attribute(f"{name.removesuffix('_int8')}", value), static=True)
            else:
                value = self.weight(name.removesuffix("_int8"), whole.int8(), scale)
            if not weight.is_whole:
                value = self.call(torch.as_strided, (value, *weight.geometry), {})
            self._kept.append(value)
            return value

        return self.part(key, make)

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

    # Calls

    def call(self, function: Callable, args: Sequence[Any], kwargs: dict, name: str | None = None) -> Any:
        """Record ``function(*args, **kwargs)``, run it, and return its result."""
        if getattr(function, "__name__", "").startswith("adaptive_") and len(args) > 1:
            args = (args[0], self._adaptive(args[0], args[1]), *args[2:])
        if (first := TAKE_SIZES.get(getattr(function, "__name__", ""))) is not None:
            args, kwargs = (*args[:first], *walk(self._size, tuple(args[first:]))), walk(self._size, kwargs)
        kind, target, given, options = spelled(function, args, kwargs)
        static = self._is_static((*given, *options.values()))
        if static and any(isinstance(leaf, np.ndarray) for leaf in leaves((given, options))):
            return self.execute(function, args, kwargs)
        name = self._node_name(base_name(target)) if name is None else identifier(name)
        node = self.graph.create_node(kind, target, self._argument(tuple(given)), self._argument(options), name=name)
        self._describe(node)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, Int8Weight)]
        nodes = [self.node_of(t) for t in tensors]
        versions = [_version(t) for t in tensors]
        with Watching() as watched:
            result = self._as_written(function, (args, kwargs), node, (given, options))
        changed = [t for t, before in zip(tensors, versions, strict=True) if _version(t) != before]
        self._varying -= {memory_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)} - set(
            map(memory_of, tensors)
        )
        node.meta["facts"] = seen(node, watched, list(zip(tensors, nodes, strict=True)), result, changed)
        static = static and not watched.random
        self._note_writes({*watched.written, *map(memory_of, changed)}, tensors, static)
        return self._bind_result(result, node, static, list(tree_leaves((args, kwargs))), base_name(target))

    def _note_writes(self, written: set[int | None], given: Sequence[Tensor], static: bool) -> None:
        for memory in written & {memory_of(t) for t in given} - {None}:
            self._written[memory] += 1  # type: ignore[index]
            if not static or memory in self._state:
                self._varying.add(memory)

    def writes_to(self, tensor: Tensor) -> int:
        """How often the memory of ``tensor`` was written to."""
        return self._written[memory_of(tensor)]  # type: ignore[index]

    def _constant(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor that each call makes anew, and always the same: the graph copies one that it holds."""
        self._kept.append(tensor)
        self._varying.discard(memory_of(tensor))
        node = self.graph.call_method("clone", (self.attribute(self._fresh("constant"), tensor),))
        self._describe(node)
        return self.bind(tensor, node, static=True).node

    def _as_written(self, function: Callable, call: tuple, node: fx.Node, written: tuple) -> Any:
        """Run a call as the graph has it, so that a wrong spelling shows here."""
        target = node.target if callable(node.target) else getattr(torch.Tensor, node.target)
        state = torch.get_rng_state() if self._was_seeded() else None
        try:
            result = self.execute(target, *written)
        except ERRORS_OF_CODE as error:
            self.execute(function, *call)  # a mistake of the user's is raised as torch has it
            raise located("writing a call for a graph", error, node) from error
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            raise RewriteError(
                "forward sets the seed of random numbers, which a graph does not", path=self.path, op=op_of(node),
                got=user_line(), hint="set it before the model is called",
            )  # fmt: skip
        return result

    def _was_seeded(self) -> bool:
        """Whether the code has set the seed of random numbers."""
        with torch._C.DisableTorchFunction():  # it is not the user's code that looks
            at_start = np.array_equal(torch.get_rng_state().numpy(), self._seeded_state)
        self._drawn_since = self._drawn_since or not at_start
        return torch.initial_seed() != self._seed or (at_start and self._drawn_since)

    def name(self, tensor: Tensor, name: str) -> None:
        """What to call a tensor that the graph will hold."""
        self._names.setdefault(id(tensor), name)
        self._kept.append(tensor)

    def _adaptive(self, x: Tensor, sizes: Any) -> Any:
        """Output sizes of an adaptive pool; None stands for the input's."""
        if not isinstance(sizes, (list, tuple)):
            return sizes
        return [self.size(x, i - len(sizes)) if size is None else size for i, size in enumerate(sizes)]

    def _size(self, value: Any) -> Any:
        """A number where a tensor of one integer stands for it, which TorchScript does not take."""
        is_integer = isinstance(value, Tensor) and not value.dim() and value.dtype in (torch.int64, torch.int32)
        return self.number(value, "item") if is_integer else value

    def execute(self, function: Callable, args: Sequence[Any], kwargs: dict) -> Any:
        """Run ``function`` on the plain values, without recording."""
        args, kwargs = walk(lambda leaf: plain(untraced(leaf)), (tuple(args), dict(kwargs)))
        self._executing += 1
        try:
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)
        finally:
            self._executing -= 1

    def call_module(self, path: str, module: nn.Module, args: tuple) -> Any:
        """Record a call of a submodule that the graph holds at ``path``, and run it."""
        if path not in self.modules:
            self.modules[path] = module
            owner, last = self._owner(path)
            owner.add_module(last, module)
        node = self.graph.create_node("call_module", path, self._argument(args), name=identifier(path))
        self._describe(node)
        return self._bind_result(self.execute(module, args, {}), node, False, list(args), "module")

    def _describe(self, node: fx.Node) -> None:
        line = user_line()
        node.meta.update(path=self.path, site=line, op=self.op)
        file, _, number = line.partition(":")
        node.stack_trace = f'  File "{file}", line {number or 0}, in {self.path or "forward"}\n'

    def _node_name(self, base: str) -> str:
        return identifier(self.path if self.op == self.path else f"{self.path}.{base}")

    def _is_static(self, arguments: Sequence[Any]) -> bool:
        for leaf in leaves(arguments):
            if isinstance(leaf, Traced):
                return False
            if isinstance(leaf, Tensor) and not isinstance(leaf, Int8Weight) and self.depends(leaf):
                return False
        return True

    def _argument(self, value: Any) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.node_of(leaf)
            if isinstance(leaf, Traced):
                return leaf.fx_node
            if isinstance(leaf, torch.device):
                return str(leaf)
            if isinstance(leaf, float) and leaf != leaf:  # which TorchScript has no literal for
                not_a_number = self.graph.call_function(float, ("nan",))
                self._describe(not_a_number)
                return not_a_number
            if isinstance(leaf, np.ndarray) and leaf.ndim:  # whoever made it of an input had its elements asserted
                return self.node_of(torch.as_tensor(leaf))
            if hasattr(leaf, "dtype") and hasattr(leaf, "item"):  # numpy scalars
                return leaf.item()
            return leaf

        return walk(one, value)

    def _bind_result(self, result: Any, node: fx.Node, static: bool, given: list, name: str) -> Any:
        if isinstance(result, Tensor):
            if any(result is g for g in given) and not is_impure(node) and name != "contiguous":
                self.graph.erase_node(node)
                return result
            old = self.known(result)
            is_input = old is not None and old.is_input
            self.bind(result, node, static=static and not is_impure(node), is_input=is_input)
            return result
        if isinstance(result, (tuple, list)):
            if name in _COUNTED and not static:
                count = self.graph.call_function(len, (node,))
                self.check(count, len(result), "a number of parts")
            shared = self._shared(node, result, given)
            for i, item in enumerate(result):
                part = self.graph.create_node("call_function", operator.getitem, (node, i), name=f"{node.name}_{i}")
                self._describe(part)
                if isinstance(item, Tensor):
                    part.meta["facts"] = Facts(called(part), (), (0,) if memory_of(item) in shared else ())
                self._bind_result(item, part, static, given, "getitem")
            return result
        if type(result) in (bool, int, float):
            node.meta.update(reads=True, place=self.place())
            self.reads_constants = self.reads_constants or static
        return result if static else traced(result, node, self)

    @staticmethod
    def _shared(node: fx.Node, result: Sequence[Any], given: Sequence[Any]) -> set[int | None]:
        """The memory that results share with each other, or, perhaps for other shapes only, with what was given."""
        made = Counter(memory_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if sources(node):
            return set(made)
        return {memory for memory, count in made.items() if count > 1} | {
            memory_of(leaf) for leaf in given if isinstance(leaf, Tensor) and not isinstance(leaf, Int8Weight)
        }

    # Numbers

    def scalar(self, function: Callable, args: tuple) -> Any:
        """Record arithmetic on numbers."""
        nodes = tuple(a.fx_node if isinstance(a, Traced) else a for a in args)
        function = pow if function is operator.pow else function  # printed as **, which binds closer than a minus
        result = function(*map(untraced, args))
        if len(nodes) == 2 and nodes[0] is nodes[1] and isinstance(result, bool):
            return result
        key = (function, *((type(n), n) for n in nodes))
        if key not in self._scalars:
            node = self.graph.call_function(function, nodes)
            self._describe(node)
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
            self._describe(node)
            self._scalars[key] = traced(tensor.shape[dim], node, self)
        return self._scalars[key]

    def number(self, tensor: Tensor, method: str, *args: Any) -> Any:
        """``tensor.method(*args)``, a number that is read from the tensor or its shape."""
        value = self.execute(getattr(torch.Tensor, method), (tensor, *args), {})
        if not self.depends(tensor):
            self.reads_constants = self.reads_constants or method == "item"
            return value
        node = self.graph.create_node(
            "call_method", method, (self.node_of(tensor), *args), name=self._node_name(method)
        )
        self._describe(node)
        if method == "item":  # a number of no type to TorchScript
            node = self.graph.call_function(type(value), (node,))
            self._describe(node)
            node.meta["reads"] = True
            node.meta["place"] = self.place()
        return traced(value, node, self)

    def decide(self, traced: Traced) -> None:
        if self._reads_values(traced.fx_node):
            self.value_decisions += 1
            self._require_one_outcome(traced)
        self.check(traced.fx_node, traced.value, "a number that the code decides on")

    def place(self) -> tuple[str, int]:
        """The line that reads a number now, and how often it did before."""
        line = user_line()
        self._read[line] += 1
        return line, self._read[line] - 1

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
            self._describe(condition)
        path, line = (self.path, user_line()) if where is None else (where.meta["path"], where.meta["site"])
        place = f"module {path or '<root>'}, {line}"
        self.decisions.append(f"{what} was {value} ({place})")
        message = f"{ONE_PATH}: {what} was {value} in the run it was made from ({place})"
        self._describe(self.graph.call_function(torch._assert, (condition, message)))

    def hold_layouts(self) -> None:
        """Have the graph assert the layout of inputs that decides which elements are read, or whether a write reaches a
        value or a copy of it.
        """
        memory = Memory(self.graph)
        for node in list(self.graph.nodes):
            if called(node) in BY_MEMORY or (called(node) in AS_LAID_OUT and memory.is_written(node)):
                with self.graph.inserting_before(node):
                    self.hold_layouts_behind(node)

    def hold_layouts_behind(self, node: fx.Node) -> None:
        """Have the graph assert the layouts of all inputs that ``node`` was computed from.

        The value's own would not do: kernels that stand for the ops between may choose another.
        """
        for source in tensors_behind(node):
            if source.op == "placeholder" and source not in self._laid_out:
                self._laid_out.add(source)
                flag = self.graph.call_method("is_contiguous", (source,))
                self._describe(flag)
                self.check(flag, source.meta["contiguous"], "whether an input is contiguous", node)
                if not source.meta["contiguous"] and "channels_last" in source.meta:
                    flag = self.graph.call_method("is_contiguous", (source,), {"memory_format": torch.channels_last})
                    self._describe(flag)
                    self.check(flag, source.meta["channels_last"], "whether an input is channels_last", node)

    # Quantized values

    def quantized(self, tensor: Tensor, qparams: QParams) -> Tensor:
        """Quantize and dequantize; the result is known to be int8."""
        base = self.node_of(tensor).name
        constants = (qparams.scale, qparams.zero_point, qparams.quant_min, qparams.quant_max, torch.uint8)
        q = self.call(QUANTIZE, (tensor, *constants), {}, name=f"{base}_q")
        result = self.call(DEQUANTIZE, (q, *constants), {}, name=f"{base}_dq")
        known = self.known(result)
        assert known is not None
        known.qparams = qparams
        return result

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
            if func._schema.is_mutable:
                made += tensors[:1]
            for tensor in made:
                self._known.pop(id(tensor), None)
                place = f"{user_line()} in module {self.path or '<root>'} by {func}"
                self._strangers[id(tensor)] = weakref.ref(tensor), place

    def depends(self, tensor: Tensor) -> bool:
        """Whether the elements of ``tensor`` depend on an input."""
        known = self.known(tensor)
        stranger = self._strangers.get(id(tensor))
        if (memory := memory_of(tensor)) in self._varying and (known is not None or memory in self._state):
            return True
        return (known is not None and not known.static) or (stranger is not None and stranger[0]() is tensor)


class _OutOfSight(TorchDispatchMode):
    def __init__(self, recorder: GraphRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # it is no call of the user's code
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


def _is_borrowed(tensor: Tensor) -> bool:
    """Whether memory was made outside of torch, as by numpy."""
    return tensor.layout is torch.strided and not tensor.untyped_storage().resizable()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
