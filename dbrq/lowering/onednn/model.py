"""The lowered model: a graph of partitions, a plan for each set of input shapes, and an ``nn.Module`` around them."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..._torch import assert_
from ...calibration.surgery import random_state_kept
from ...errors import ERRORS_OF_CODE, DeviationError, OneDNNError, is_bug
from ...graph.located import at
from ...graph.nodes import leaves, remove_dead, walk
from ...op_facts import BY_MEMORY, Memory, called, facts_of
from ...pytree import copied_inputs
from ...selfcheck import Failure
from ..engine import Lowering, is_dequantize, is_quantize, qparams_of
from ..graph_data import from_data
from ..lowered_model import LoweredModel, number_key, sharing, without_code, write_back, written_inputs
from ..passes import fold_constants, reduce_mutation, sizes_of_integers, written_as_laid_out, written_attributes
from ..patterns import add_masks_once, free_of_strides
from ..smoothing import fold_factors
from . import mapping
from .binding import replacements
from .builder import Builder, DynamicShapes, PackedWeights, Unsupported
from .emitters import emit, emit_conversion
from .execution import Runner
from .free_sizes import all_plainly, depending, loop, sizes_seen
from .library import library
from .moves import quantize_before_moves
from .op import scriptable
from .partitions import Partition
from .segments import Segment, dynamic_nodes, known_dynamic, segments_of
from .values import Value

log = logging.getLogger("dbrq.lowering")

#: Plans that a model keeps; the one that was not used for longest goes first.
MAX_PLANS = 16
#: Calls of other sizes that are compared with the first, before sizes are taken for what plans are made for.
_MOST_SIZES = 8


class OneDNNModel(LoweredModel):
    """A model on oneDNN's own kernels. A plan is made when a shape is seen for the first time, and for each number of
    threads.

    Attributes:
        max_plans: plans kept, one for each set of input shapes (execution.py).
        lowering: the log of what became of the graph.
    """

    def _begin(self, dynamic: frozenset[str] = frozenset(), max_plans: int = MAX_PLANS) -> None:
        library()
        self.max_plans = max_plans
        self._packed = PackedWeights()
        self._plans: OrderedDict[tuple, Runner] = OrderedDict()
        self._unfit: dict[str, str] = {}
        self._replaced: dict[str, tuple[Failure, ...]] = {}
        self._sizes: dict[fx.Node, Any] | None = None
        self._sizes_met: set[tuple] = set()
        self.lowering = Lowering(fx.GraphModule(without_code(self), from_data(self._data)), self.dtype)
        mapped(self.lowering)
        self._tensors: dict[str, Any] = {
            str(n.target): self.lowering.tensor(n) for n in _all_nodes(self.lowering) if n.op == "get_attr"
        }
        self.placeholders = [n for n in self.lowering.graph.nodes if n.op == "placeholder"]
        self._output = next(n for n in self.lowering.graph.nodes if n.op == "output")
        memory = Memory(self.lowering.graph)
        self.mutable, self._writes_to = bool(memory.writes), written_inputs(self.lowering.graph)
        self._apart = frozenset(n for n in self.lowering.graph.nodes if memory.is_written(n))
        self._written = written_attributes(self.lowering.graph)
        # ``as_strided`` takes an offset from where its input's storage begins.
        self._counts_from_start = any(called(n) in BY_MEMORY for n in _all_nodes(self.lowering))
        self._cut(dynamic | known_dynamic(self.lowering.graph))

    def _options(self) -> dict[str, Any]:
        return {"dynamic": self._dynamic, "max_plans": self.max_plans}

    def _cut(self, dynamic: frozenset[str]) -> None:
        self._dynamic = dynamic
        self._parts = segments_of(self.lowering.graph, dynamic)
        self._whole = _alone(self._parts, self.placeholders, self._output)
        self._segments = sum(isinstance(part, Segment) for part in self._parts)
        self._loop: Callable | None = None
        self._plans.clear()

    def keep_in_torch(self, names: Collection[str]) -> None:
        """Have torch run these nodes of the recorded graph from now on, and whatever was fused with them."""
        found = set()
        for node in self.lowering.graph.nodes:
            module = self.lowering.modules.get(node.target) if node.op == "call_module" else None
            inside = module.reference.nodes if isinstance(module, Partition) else ()
            if node.op.startswith("call_") and any(n.name in names for n in (node, *inside)):
                found.add(node.name)
        self._cut(self._dynamic | found)

    # Calling

    def plain(self, args: Sequence[Any]) -> Any:
        with torch.no_grad():
            for value in args:
                if type(value) is not Tensor or value.is_conj() or value.is_neg():
                    return self._on_plain_memory(args)
            return self._planned(args)

    def free_sizes(self, args: Sequence[Any]) -> None:
        """From now on leave what depends on sizes that differ between calls to torch, if no layer with a weight does.

        Args:
            args: inputs of a first call, to which others are compared.
        """
        if (seen := self._sizes_of(args)) is not None:
            self._sizes, self._sizes_met = seen, {_sizes_key(args)}

    def meets(self, args: Sequence[Any]) -> None:
        """A call with these inputs comes, or will come."""
        key = _sizes_key(args)
        if self._sizes is None or key in self._sizes_met:
            return
        with self._lock:
            self._sizes_met.add(key)
            other = self._sizes_of(args)
            found = None if other is None else depending(self._sizes, other, self.lowering.modules)
            if found is not None:
                self._cut(self._dynamic | found)
                self._sizes = None
            elif len(self._sizes_met) > _MOST_SIZES:
                self._sizes = None

    def _sizes_of(self, args: Sequence[Any]) -> dict[fx.Node, Any] | None:
        """What plans for a call would be made for; None if the call cannot be looked at."""
        try:
            with self._on_copies(args) as inputs:
                return sizes_seen(self.lowering.graph, self._one, inputs)
        except ERRORS_OF_CODE as error:
            if is_bug(error):
                raise
            return None  # whoever calls it will see why

    @contextlib.contextmanager
    def _on_copies(self, args: Sequence[Any]) -> Iterator[dict[fx.Node, Any]]:
        """Inputs for a run node by node, after which state and random state are what they were."""
        kept = self._written_tensors()
        try:
            with random_state_kept(), torch.no_grad():
                yield dict(zip(self.placeholders, copied_inputs(list(args)), strict=True))
        finally:
            self._restore(kept)

    def _planned(self, args: Sequence[Any]) -> Any:
        if self._sizes is not None:
            self.meets(args)
        try:
            return self._run(args)
        except DynamicShapes:
            self._find_dynamic(args)
            return self._run(args)

    def _on_plain_memory(self, args: Sequence[Any]) -> Any:
        """Run on copies of inputs whose memory does not hold their numbers, and write back what is written to them."""
        inputs = self._plainly(args)
        if inputs is args:
            return self._planned(args)
        result = self._planned(inputs)
        write_back(args, leaves(list(inputs)), self._writes_to)
        return result

    def _plainly(self, args: Sequence[Any]) -> Sequence[Any]:
        """Inputs whose memory holds their numbers, which is all that plans know."""
        flat = leaves(list(args))
        if not any(isinstance(leaf, Tensor) and (leaf.is_conj() or leaf.is_neg()) for leaf in flat):
            return args
        if self.mutable and sharing(flat):
            raise DeviationError(
                "the graph writes to tensors, and inputs of this call share memory, one as the conjugate or negative",
                expected="inputs that do not", got="inputs that do", hint="pass x.resolve_conj().resolve_neg()",
            )  # fmt: skip
        return list(map(all_plainly, args))

    def scriptable(self, *example_inputs: Any) -> fx.GraphModule:
        """A module for ``torch.jit.script`` or inside scripted modules, which calls this model as ``dbrq::run``.

        It works in this process, as long as this model is kept. Inputs and outputs must be tensors.

        Args:
            example_inputs: one call's inputs, to see what comes back.
        """
        return scriptable(self, self.warm(example_inputs))

    def _run(self, args: Sequence[Any]) -> Any:
        if self._whole is not None:
            (result,) = self._segment(self._whole, args)
            return result
        if self._loop is None:
            self._loop = loop(
                self._parts, self.placeholders, self._output,
                lambda segment: lambda *values: self._segment(segment, values), self._tensors, self._module,
            )  # fmt: skip
        return self._loop(*args)

    def _segment(self, segment: Segment, values: Sequence[Any]) -> Sequence[Any]:
        flat = _flat(values)
        key = self._key_of(segment, values, flat)
        runner = self._plans.get(key)
        if runner is None:
            return self._compiled(segment, key, values)
        if len(self._plans) > 1:
            with self._lock:
                if key in self._plans:
                    self._plans.move_to_end(key)
        return runner(flat)

    def _key_of(self, segment: Segment, values: Sequence[Any], flat: Sequence[Any]) -> tuple:
        key = (id(segment), torch.get_num_threads(), *sharing(flat), *map(_key, values))
        if self._counts_from_start:
            key += tuple(v.storage_offset() for v in flat if isinstance(v, Tensor))
        return key

    def _compiled(self, segment: Segment, key: tuple, values: Sequence[Any]) -> Sequence[Any]:
        with self._lock:
            runner = self._plans.get(key)
            if runner is None:
                runner, results = self._traced(segment, values)
                self._plans[key] = runner
                while len(self._plans) > max(self.max_plans, 1) * self._segments:
                    self._plans.popitem(last=False)
                return results
        return runner(_flat(values))

    def _one(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        """Execute a node by torch alone."""
        at(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        target: Any = node.target
        if node.op == "get_attr":
            return self._tensors[target]
        if node.op == "call_module":
            module = self._module(target)
            if isinstance(module, Partition):
                inner = dict(zip((n for n in module.reference.nodes if n.op == "placeholder"), args, strict=True))
                for step in module.reference.nodes:
                    if step.op == "output":
                        return inner[step.args[0]]
                    if step.op != "placeholder":
                        inner[step] = self._one(step, inner)
            return module(*args, **kwargs)
        return _callable(node, args)(*args, **kwargs)

    def _module(self, path: str) -> Any:
        """A partition, or a module that the graph calls."""
        found = self.lowering.modules.get(path)
        return self.get_submodule(path) if found is None else found

    def _find_dynamic(self, args: Sequence[Any]) -> None:
        """See which nodes depend on values, and keep them out of plans."""
        with self._lock, self._on_copies(args) as inputs:
            found = dynamic_nodes(self.lowering.graph, self._one, inputs)
            if found <= self._dynamic:
                raise OneDNNError("an op's result depends on values in a way that no plan can follow")
            self._cut(found | self._dynamic)

    # Making plans

    def _traced(self, segment: Segment, values: Sequence[Any]) -> tuple[Runner, Sequence[Any]]:
        """The plan of a segment, and what it gives for these values."""
        b = Builder(self._tensors.__getitem__, self._packed, self.dtype, self.mutable, self._written)
        inputs = [walk(b.input, v) for v in values]
        env: dict[fx.Node, Any] = dict(zip(segment.inputs, inputs, strict=True))
        last = _last_readers(segment.nodes, (*segment.inputs, *segment.nodes), segment.outputs)
        for value in inputs:
            b.count(value)
        self._trace(b, segment.nodes, env, last)
        plan, results = b.finish(_flat(inputs), tuple(self._as_recorded(b, n, env[n]) for n in segment.outputs))
        return Runner(plan), results

    def _as_recorded(self, b: Builder, node: fx.Node, value: Any) -> Any:
        """What the model returns has the dtype that it had before."""
        narrow = isinstance(value, Value) and value.dtype is not torch.float32 and value.dtype is self.dtype
        if narrow and node.meta.get("dtype") is torch.float32 and self._output in node.users:
            try:
                return b.reordered(value, torch.float32)
            except Unsupported:  # a value of no dimensions
                return b.call(torch.Tensor.to, (value, torch.float32), {})
        return value

    def _trace(self, b: Builder, nodes: Sequence[fx.Node], env: dict[fx.Node, Any],
               last: Mapping[fx.Node, list[fx.Node]], apart: bool = False) -> None:  # fmt: skip
        for node in nodes:
            at(node)
            ending = last.get(node, [])
            b.about_to_end([env[n] for n in ending if n in env])
            b.op = node.meta.get("op") or node.name
            b.apart = apart or node in self._apart
            with replacements() as failures:
                env[node] = self._traced_node(b, node, env)
            if failures:
                self._replaced[b.op] = tuple(dict.fromkeys((*self._replaced.get(b.op, ()), *failures)))
            b.count(env[node])
            for n in ending:
                b.end(env.pop(n, None))

    def _traced_node(self, b: Builder, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = walk(
            lambda leaf: env[leaf] if isinstance(leaf, fx.Node) else leaf, (node.args, dict(node.kwargs))
        )
        target: Any = node.target
        if node.op == "get_attr":
            held = self._tensors[target]
            return b.attribute(target) if isinstance(held, Tensor) else held
        if node.op == "call_module":
            module = self._module(target)
            if not isinstance(module, Partition):
                return b.call(module, args, kwargs)
            b.words = module.words
            try:
                return emit(b, module, args)
            except Unsupported as reason:
                self._note_unfit(module, str(reason))
            return self._referred(b, module, args)
        if (is_quantize(node) or is_dequantize(node)) and isinstance(args[0], Value):
            with contextlib.suppress(Unsupported):
                return emit_conversion(b, args[0], qparams_of(node), is_quantize(node))
        if not any(isinstance(leaf, Value) for leaf in leaves((args, kwargs))) and _is_arithmetic(node):
            return target(*args, **kwargs)
        return b.call(
            _callable(node, args), tuple(args), kwargs, facts=facts_of(node) if "facts" in node.meta else None
        )

    def _referred(self, b: Builder, partition: Partition, args: Sequence[Any]) -> Any:
        """A partition's own nodes, by torch."""
        nodes = list(partition.reference.nodes)
        places = [n for n in nodes if n.op == "placeholder"]
        env: dict[fx.Node, Any] = dict(zip(places, args, strict=True))
        inner = [n for n in nodes if n.op not in ("placeholder", "output")]
        op, dying = b.op, b._dying
        self._trace(b, inner, env, {}, b.apart)
        b.op, b._dying = op, dying
        result = env[nodes[-1].args[0]]
        for n in inner:
            if env[n] is not result:
                b.uncount(env[n])
        b.uncount(result)
        return result

    def _note_unfit(self, partition: Partition, reason: str) -> None:
        if partition.name not in self._unfit:
            self._unfit[partition.name] = reason
            log.info("%s runs in torch: %s", partition.name, reason)

    # Looking inside

    @property
    def plans(self) -> tuple[Runner, ...]:
        """The plans kept, the one used last at the end."""
        return tuple(self._plans.values())

    @property
    def in_torch(self) -> dict[str, str]:
        """Partitions that no primitive computed for some shape that came -> why."""
        return dict(self._unfit)

    @property
    def replaced(self) -> dict[str, tuple[Failure, ...]]:
        """Ops for which kernels were wrong on this CPU -> these kernels, and what computes in their place."""
        return dict(self._replaced)

    def stages(self) -> dict[str, str]:
        """The graph after each stage, as text: what was recorded, partitions, and the steps of the newest plan."""
        steps = self.plans[-1].plan.steps if self._plans else ()
        return {
            "graph": str(from_data(self._data)),
            "partitions": str(self.lowering.graph),
            "segments": "\n".join(f"{len(p.nodes)} nodes" if isinstance(p, Segment) else p.name for p in self._parts),
            "plan": "\n".join(map(str, steps)),
        }

    def timed(self, args: tuple, kwargs: dict[str, Any], repeats: int) -> list[tuple]:
        """For ``profile``: (op, kernel, what it computes, shape, microseconds, multiply-accumulates) of each step."""
        kept = self._written_tensors()
        self(*args, **kwargs)
        env: dict[fx.Node, Any] = dict(zip(self.placeholders, self._plainly(self.bound(args, kwargs)), strict=True))
        rows: list[tuple] = []
        for part in self._parts:
            if not isinstance(part, Segment):
                start = time.perf_counter()
                env[part] = self._one(part, env)
                rows.append((part.meta.get("op") or part.name, str(part.target), str(part.target), (),
                             (time.perf_counter() - start) * 1e6, 0))  # fmt: skip
                continue
            values = [env[n] for n in part.inputs]
            env.update(zip(part.outputs, self._segment(part, values), strict=True))
            flat = _flat(values)
            runner = self._plans[self._key_of(part, values, flat)]
            instance = runner.take()
            times = instance.timed(flat, repeats)
            rows += [(*step.described(), us, step.macs) for step, us in zip(runner.plan.steps, times, strict=True)]
        self._restore(kept)
        return rows

    def extra_repr(self) -> str:
        partitions = sum(isinstance(m, Partition) for m in self.lowering.modules.values())
        return f"{partitions} partitions, {len(self._plans)} plans, oneDNN {'.'.join(map(str, library().version))}"


def _sizes_key(args: Sequence[Any]) -> tuple:
    return tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves(list(args)))


def mapped(lowering: Lowering) -> None:
    """All stages that do not depend on shapes; at the end partitions stand for what they compute."""
    reduce_mutation(lowering)
    lowering.kept |= written_as_laid_out(lowering.graph)
    fold_constants(lowering)
    sizes_of_integers(lowering)
    fold_factors(lowering)
    quantize_before_moves(lowering)
    lowering.apply(mapping.REWRITES)
    mapping.read_channels_last(lowering)
    add_masks_once(lowering)
    free_of_strides(lowering)
    remove_dead(lowering.graph)


def _alone(parts: Sequence[Any], placeholders: list[fx.Node], output: fx.Node) -> Segment | None:
    """The one segment that takes the inputs and gives the one output, if that is all there is."""
    if len(parts) != 1 or not isinstance(parts[0], Segment):
        return None
    segment = parts[0]
    fits = segment.inputs == tuple(placeholders) and segment.outputs == (output.args[0],)
    return segment if fits else None


def _all_nodes(lowering: Lowering) -> list[fx.Node]:
    """The graph's nodes, and those inside partitions."""
    found = list(lowering.graph.nodes)
    for module in lowering.modules.values():
        if isinstance(module, Partition):
            found += module.reference.nodes
    return found


def _last_readers(nodes: Sequence[fx.Node], held: Sequence[fx.Node], kept: Sequence[fx.Node]) -> dict[fx.Node, list]:
    """Node -> the nodes whose values nothing reads after it."""
    last: dict[fx.Node, fx.Node] = {n: n for n in held}
    for node in nodes:
        for read in node.all_input_nodes:
            last[read] = node
    result: dict[fx.Node, list] = {}
    for n, reader in last.items():
        if n not in kept:
            result.setdefault(reader, []).append(n)
    return result


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    """A plan's inputs one by one; a node may give several tensors."""
    return leaves(list(values)) if any(isinstance(v, (list, tuple, dict)) for v in values) else values


def _key(value: Any) -> Any:
    """What of an argument a plan depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple, dict)):
        return tuple(map(_key, leaves(value)))
    return number_key(value)


def _is_arithmetic(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        getattr(node.target, "__module__", "") in ("_operator", "operator", "math", "builtins")
        or node.target in (assert_, len, int, float, bool, operator.getitem)
    )


def _callable(node: fx.Node, args: Sequence[Any]) -> Callable:
    if node.op == "call_function":
        target: Any = node.target
        return target
    owner = torch.Tensor if isinstance(args[0], (Value, Tensor)) else type(args[0])
    return getattr(owner, str(node.target))
