"""Recording an FX graph from a run on real tensors: nodes, which tensor each one made, and the tensors the graph holds.

``GraphRecorder`` executes every call it records, so it always has real values; sizes and other numbers read from
tensors come back as traced numbers (symbols.py). A TorchDispatchMode below it sees whatever else touches a traced
tensor: a value made behind the recorder's back would be frozen into the graph, so using one is an error.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from .._torch import without_function_modes
from ..errors import ERRORS_OF_CODE, RewriteError
from ..kernels import QParams
from ..op_facts import AS_LAID_OUT, Facts, Watching, called, memory_of, seen, sources
from ..pytree import tree_leaves, tree_map
from ..record.callsite import user_line
from ..tensors import WEIGHT_PARTS, Int8Weight, Versions, plain
from .layouts import Laid
from .located import located, op_of
from .nodes import DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE, base_name, identifier, is_impure, leaves, walk
from .symbols import Traced, traced, untraced
from .torchscript_form import TAKE_SIZES, spelled
from .writer import GraphWriter

#: Functions whose number of results depends on sizes: the code that follows was seen for one number.
_COUNTED = frozenset({"unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unsafe_chunk",
                      "unsafe_split", "nonzero", "nonzero_numpy", "where"})  # fmt: skip


class GraphRecorder(GraphWriter):
    """Builds one graph: calls of ops, written as TorchScript takes them, and executed on the way."""

    # What is known

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
        self.describe(node)
        return node

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
            assert scale is not None
            parts = (weight.owner._buffers.get(f"{weight.parameter}_{part}") for part in WEIGHT_PARTS[2:])
            if weight.axis != 0 or any(part is not None for part in parts):
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
        self.describe(node)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, Int8Weight)]
        nodes = [self.node_of(t) for t in tensors]
        versions = Versions(tensors)
        with Watching() as watched:
            result = self._as_written(function, (args, kwargs), node, (given, options))
        changed = versions.written()
        self._varying -= {memory_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)} - set(
            map(memory_of, tensors)
        )
        node.meta["facts"] = seen(node, watched, list(zip(tensors, nodes, strict=True)), result, changed)
        static = static and not watched.random
        self._note_writes({*watched.written, *map(memory_of, changed)}, tensors, static)
        if called(node) in AS_LAID_OUT and isinstance(result, Tensor) and tensors and result.dtype is tensors[0].dtype:
            with without_function_modes():
                self._laid[node] = Laid.seen(tensors[0], result)
        return self._bind_result(result, node, static, list(tree_leaves((args, kwargs))), base_name(target))

    def _constant(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor that each call makes anew, and always the same: the graph copies one that it holds."""
        self._kept.append(tensor)
        self._varying.discard(memory_of(tensor))
        node = self.graph.call_method("clone", (self.attribute(self._fresh("constant"), tensor),))
        self.describe(node)
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
        with without_function_modes():  # it is not the user's code that looks
            at_start = np.array_equal(torch.get_rng_state().numpy(), self._seeded_state)
        self._drawn_since = self._drawn_since or not at_start
        return torch.initial_seed() != self._seed or (at_start and self._drawn_since)

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
            with without_function_modes():
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
        self.describe(node)
        return self._bind_result(self.execute(module, args, {}), node, False, list(args), "module")

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
                self.describe(not_a_number)
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
                self.describe(part)
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

    def number(self, tensor: Tensor, method: str, *args: Any) -> Any:
        """``tensor.method(*args)``, a number that is read from the tensor or its shape."""
        value = self.execute(getattr(torch.Tensor, method), (tensor, *args), {})
        if not self.depends(tensor):
            self.reads_constants = self.reads_constants or method == "item"
            return value
        node = self.graph.create_node(
            "call_method", method, (self.node_of(tensor), *args), name=self._node_name(method)
        )
        self.describe(node)
        if method == "item":  # a number of no type to TorchScript
            node = self.graph.call_function(type(value), (node,))
            self.describe(node)
            node.meta["reads"] = True
            node.meta["place"] = self.place()
        return traced(value, node, self)

    # Quantized values

    def quantized(self, tensor: Tensor, qparams: QParams) -> Tensor:
        """Quantize and dequantize; the result is known to be int8."""
        base = self.node_of(tensor).name
        constants = (qparams.scale, qparams.zero_point, qparams.quant_min, qparams.quant_max, torch.uint8)
        q = self.call(QUANTIZE, (tensor, *constants), {}, name=f"{base}_q")
        result = self.call(DEQUANTIZE, (q, *constants), {}, name=f"{base}_dq")
        self.surely_known(result).qparams = qparams
        return self._as_strided(result, tensor)

    def _as_strided(self, result: Tensor, tensor: Tensor) -> Tensor:
        """``result`` with the very strides of ``tensor``, which torch's element-wise ops drop for expanded axes and for
        those of one element: by these it chooses the layout of what a convolution returns.
        """
        with without_function_modes():  # a run on its way would take these for the user's questions
            if result.stride() == tensor.stride() or not tensor.numel():
                return result
            stored = result[tuple(slice(None) if step else slice(1) for step in tensor.stride())]
            laid_out = torch.empty_strided(stored.shape, tensor.stride()).copy_(stored).expand(tensor.shape)
        return self.alias(laid_out, result)


def _is_borrowed(tensor: Tensor) -> bool:
    """Whether memory was made outside of torch, as by numpy."""
    return tensor.layout is torch.strided and not tensor.untyped_storage().resizable()
