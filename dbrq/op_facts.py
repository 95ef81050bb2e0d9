"""What calls do beside computing their results: draw random numbers, write to arguments, return views of them, or have
results whose shapes depend on values. All of dbrq asks here.

Two sources are joined. What a call *did* is seen below it, in the ops of torch that ran (``Watching``): nothing hides
there, neither in functions written in Python nor behind a name. What it *may* do for other strides and shapes is in the
schemas and tags of the ops of its name: ``reshape`` copies or gives a view. Names by themselves count only for
functions that torch has no schema for.
"""

import functools
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, schema_of, storage_id, without_function_modes
from .mappings import FUNCTIONS
from .pytree import tree_leaves

#: Ops that write to arguments although their schemas do not say so -> which, if their argument ``training`` is true.
_WRITES_UNSAID = {"aten::native_batch_norm": ("running_mean", "running_var")}
#: Random functions written in Python, of ops that have another name.
_RANDOM_NAMES = re.compile(
    r"rand|bernoulli|multinomial|normal_|dropout|poisson|exponential|uniform|rrelu|gumbel|sample_"
)
_DYNAMIC_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_INTEGERS = (torch.int64, torch.int32)
#: Of their second tensor, they read no values.
_READS_SHAPES = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
#: Ops of which the tags do not say it.
_DYNAMIC_UNSAID = ("aten::_pack_padded_sequence",)


@dataclass(frozen=True)
class Facts:
    """What a call does beside computing its result.

    Attributes:
        call: the name of what is called; the facts hold for no other, so that a node which takes over the ``meta`` of
            another does not take over what that did.
        writes: places of the arguments that it writes to, counted over all leaves of args and kwargs.
        aliases: places of the arguments whose memory its result may share.
        random: it draws random numbers.
        dynamic: shapes or numbers in its result depend on values.
    """

    call: str
    writes: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    random: bool = False
    dynamic: bool = False

    def written_among(self, arguments: Any) -> list[Any]:
        """Those that are written to, of the ``(args, kwargs)`` of such a call."""
        found = _leaves(arguments)
        return [found[i] for i in self.writes if i < len(found)]

    def as_data(self) -> tuple:
        """Plain data for files."""
        return self.call, self.writes, self.aliases, self.random, self.dynamic


# Schemas and tags


@functools.lru_cache(maxsize=4096)
def _overloads(function: Callable | str) -> tuple[OpOverload, ...]:
    """The ops of torch that a function or method may be; () where torch has none of its name."""
    if isinstance(function, OpOverload):
        return (function,)
    if not isinstance(function, OpOverloadPacket):
        name = function if isinstance(function, str) else getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        found = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
        if not isinstance(found, OpOverloadPacket):
            return ()
        function = found
    overloads = (getattr(function, name) for name in function.overloads())
    return tuple(op for op in overloads if not any(a.is_out for a in schema_of(op).arguments))


def _shares(one: Any, other: Any) -> bool:
    """Whether two alias sets of a schema have a name in common."""
    names, others = (set(info.before_set) | set(info.after_set) for info in (one, other))
    return bool(names & others) or "*" in names | others


@functools.lru_cache(maxsize=4096)
def may_alias(function: Callable | str) -> bool:
    """Whether some op of this name may return a view of an argument, going by schemas."""
    return any(
        a.alias_info is not None and r.alias_info is not None and _shares(a.alias_info, r.alias_info)
        for op in _overloads(function) for a in schema_of(op).arguments for r in schema_of(op).returns
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def may_be_random(function: Callable | str) -> bool:
    """Whether a call of ``function`` may draw random numbers; its arguments (``training=False``) may forbid it."""
    found = _overloads(function)
    if found:
        return any(torch.Tag.nondeterministic_seeded in op.tags for op in found)
    return bool(_RANDOM_NAMES.search(getattr(function, "__name__", "")))


@functools.lru_cache(maxsize=4096)
def mutates(function: Callable) -> bool:
    """Whether ``function`` writes to its first argument whenever it is called.

    >>> mutates(torch.Tensor.add_), mutates(torch.ops.aten.add_.Tensor), mutates(torch.add)
    (True, True, False)
    """
    name = getattr(function, "__name__", "")
    if name in ("__setitem__", "__set__", "set_", "__setstate__"):
        return True
    if name in ("requires_grad_", "retain_grad"):  # to torch they write
        return False
    if name.startswith("__") and name.startswith("__i"):  # in-place operators, as Python names them
        return name not in ("__index__", "__int__", "__invert__", "__init__")
    found = [schema_of(op).arguments for op in _overloads(function) if schema_of(op).arguments]
    if found:
        return all(args[0].alias_info is not None and args[0].alias_info.is_write for args in found)
    return name.endswith("_") and not name.startswith("__")


@functools.lru_cache(maxsize=4096)
def _written_positions(function: Callable) -> frozenset[int]:
    """Positions of the arguments that schemas say ``function`` may write to, ``out`` aside."""
    return frozenset(
        i for op in _overloads(function) for i, a in enumerate(schema_of(op).arguments)
        if a.name != "out" and a.alias_info is not None and a.alias_info.is_write
    )  # fmt: skip


def target_of(function: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """The one tensor that a call writes to; None if it is none, or if only a look at all of them shows which."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    if args and isinstance(args[0], Tensor) and mutates(function) and _written_positions(function) <= {0}:
        return args[0]
    return None


@functools.lru_cache(maxsize=4096)
def is_pure(function: Callable) -> bool:
    """Whether torch's schemas say that ``function`` writes to nothing and returns nothing that it was given.

    Functions in Python have none, and may take ``inplace=True``.

    >>> is_pure(torch.add), is_pure(torch.Tensor.view), is_pure(torch.nn.functional.threshold)
    (True, False, False)
    """
    if isinstance(function, types.FunctionType):
        return False
    arguments = [a for op in _overloads(function) for a in schema_of(op).arguments if a.name != "out"]
    return bool(arguments) and all(a.alias_info is None for a in arguments)


def may_write(function: Callable) -> bool:
    """Whether a call of ``function`` may write to what it is given. Functions in Python may.

    >>> may_write(torch.Tensor.add_), may_write(torch.add), may_write(torch.Tensor.view)
    (True, False, False)
    """
    return isinstance(function, types.FunctionType) or mutates(function) or bool(_written_positions(function))


# Watching what runs


class Watching(TorchDispatchMode):
    """Sees the ops that run below calls of torch's functions.

    Attributes:
        dynamic: an op whose shape or number depends on values, "" if there was none.
        random: an op drew random numbers.
        written: the memory that was written to.
        taken: the memory that ops were given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dynamic, self.random = "", False
        self.written: set[int] = set()
        self.taken: set[int | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_dynamic(func, args):
            self.dynamic = str(func)
        self.random = self.random or _draws(func, args, kwargs)
        self.taken.update(memory_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        result = func(*args, **kwargs)
        for leaf in tree_leaves(_written_arguments(func, args, kwargs)):
            if isinstance(leaf, Tensor) and (memory := memory_of(leaf)) is not None:
                self.written.add(memory)
        return result

    def decided_by(self, name: str, given: Iterable[Tensor], result: Any) -> bool:
        """Whether values that a call was given decide about the shape of its result, or which elements it has: an op
        says so, or integers came to no op and are no part of the result, so that C++ read them by itself.

        Args:
            name: of what was called.
        """
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if self.dynamic or not made or name in _READS_SHAPES:
            return bool(self.dynamic)
        known = self.taken.union(map(memory_of, made))
        return any(t.dtype in _INTEGERS and t.numel() and memory_of(t) not in known for t in given)


#: Arguments without which, or with 0, a random op draws nothing.
_PROBABILITIES = ("dropout_p", "dropout", "train", "training")


def _draws(func: OpOverload, args: Sequence[Any], kwargs: dict) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    defaults = {a.name: a.default_value for a in schema_of(func).arguments if a.name in _PROBABILITIES}
    given = defaults | {a.name: v for a, v in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    return not any(type(given[name]) in (bool, int, float) and not given[name] for name in defaults)


def _is_dynamic(func: OpOverload, args: Sequence[Any]) -> bool:
    if schema_of(func).name in _DYNAMIC_UNSAID:
        return True
    if not any(tag in func.tags for tag in _DYNAMIC_TAGS):
        return False
    by_place = func is torch.ops.aten.index.Tensor and not any(
        i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )
    return not by_place


def _written_arguments(func: OpOverload, args: Sequence[Any], kwargs: dict) -> list[Any]:
    schema = schema_of(func)
    unsaid = _WRITES_UNSAID.get(schema.name, ())
    if not schema.is_mutable and not unsaid:
        return []
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    if unsaid and not given.get("training"):
        unsaid = ()
    said = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given.get(name) for name in (*said, *unsaid)]


def memory_of(tensor: Tensor) -> int | None:
    """Stands for the memory of a tensor while that is alive; None for tensors that have none of their own."""
    if tensor.layout is not torch.strided:
        return None
    with without_function_modes():
        try:
            return storage_id(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a subclass that computes its elements, or inside of vmap
            return None


# Nodes


def leaves_of(node: fx.Node) -> list[Any]:
    """All leaves of a node's args and kwargs, in the order in which ``Facts`` counts them."""
    return _leaves((node.args, node.kwargs))


def _leaves(arguments: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(arguments, lambda leaf: found.append(leaf))
    return found


def seen(node: fx.Node, watched: Watching, given: Iterable[tuple[Tensor, fx.Node]], result: Any,
         written: Collection[Tensor] = ()) -> Facts:  # fmt: skip
    """What the call of a node did, and may do.

    Args:
        watched: the ops below the call.
        given: the tensors that it was given, and their nodes.
        result: what it returned.
        written: tensors known to be written to from elsewhere.
    """
    made = {memory_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)} - {None}
    held = [(memory_of(tensor), n, tensor) for tensor, n in given]
    writes = {n for memory, n, tensor in held if memory in watched.written or any(tensor is w for w in written)}
    shared = {n for memory, n, _ in held if memory in made}
    leaves = leaves_of(node)
    may = assumed(node)
    return Facts(
        called(node),
        tuple(i for i, leaf in enumerate(leaves) if leaf in writes) if writes else (),
        tuple(i for i, leaf in enumerate(leaves) if i in may.aliases or (isinstance(leaf, fx.Node) and leaf in shared)),
        watched.random,
        watched.decided_by(called(node), (tensor for _, _, tensor in held), result),
    )


def called(node: fx.Node) -> str:
    """The name of what a node calls."""
    return _name_of(node.target)


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def facts_of(node: fx.Node) -> Facts:
    """What a node does: as recorded, else as far as torch's schemas tell."""
    recorded = node.meta.get("facts")
    return recorded if recorded is not None and recorded.call == called(node) else assumed(node)


#: Functions without schemas that return their argument, or a part of it.
_PASS_ON = frozenset({"getitem", "getattr", "_unwrap_optional"})


def assumed(node: fx.Node) -> Facts:
    """What a node that nobody saw run may do. Kernels of dbrq's own return new memory."""
    if node.op not in ("call_function", "call_method"):
        return Facts(called(node))
    return _assumed_of(node.target, bool(node.args or node.kwargs))


@functools.lru_cache(maxsize=4096)
def _assumed_of(function: Any, has_arguments: bool) -> Facts:
    name = _name_of(function)
    first = (0,) if has_arguments else ()
    if getattr(function, "__module__", "").startswith("dbrq"):
        return Facts(name)
    if name in _PASS_ON:
        return Facts(name, (), first)
    found = _overloads(function)
    writes = first if found and mutates(function) else ()
    aliases = first if may_alias(function) or writes else ()
    dynamic = any(tag in op.tags for op in found for tag in _DYNAMIC_TAGS) and function is not operator.getitem
    return Facts(name, writes, aliases, bool(found) and may_be_random(function), dynamic)


def is_unsaid(node: fx.Node) -> bool:
    """Whether a node of a single op writes, or gives a view, and the op's schema does not say so: what goes by schemas
    alone, as TorchScript does, takes such a write for none.
    """
    facts, found = facts_of(node), _overloads(node.target)
    if not found or node.op not in ("call_function", "call_method"):
        return False
    if facts.writes and not ("out" in node.kwargs or node.kwargs.get("inplace")):
        said = [a for op in found for a in schema_of(op).arguments if a.alias_info is not None]
        return not any(isinstance(a.type, torch.TensorType) for a in said if a.alias_info.is_write)
    one = all(isinstance(r.type, torch.TensorType) for op in found for r in schema_of(op).returns)
    return bool(facts.aliases) and not facts.writes and one and not may_alias(node.target)


def written(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to."""
    return _at(node, facts_of(node).writes)


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory the result of ``node`` may share."""
    return _at(node, facts_of(node).aliases)


def _at(node: fx.Node, places: tuple[int, ...]) -> list[fx.Node]:
    if not places:
        return []
    leaves = leaves_of(node)
    return [leaves[i] for i in places if i < len(leaves) and isinstance(leaves[i], fx.Node)]


#: What gives a view or a copy, as the layout of what it is given has it.
AS_LAID_OUT = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"})
#: What tells the user's code how a value lies in memory.
LAYOUT_QUESTIONS = frozenset({"is_contiguous", "stride"})
#: What takes elements in the order in which they lie in memory.
BY_MEMORY = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})


def writes(node: fx.Node) -> bool:
    """Whether a node writes to memory."""
    return bool(written(node))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return facts_of(node).random


class Memory:
    """Which nodes of a graph may share memory, as the graph is now.

    Attributes:
        writes: the nodes that write to memory, in order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self.writes: list[fx.Node] = []
        held: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            facts = facts_of(node)
            if facts.writes:
                self.writes.append(node)
            for source in _at(node, facts.aliases):
                self._join(node, source)
            if node.op == "get_attr":
                self._join(node, held.setdefault(node.target, node))
        self._written = {self.root(n) for node in self.writes for n in written(node)}
        self._of_inputs = {self.root(n) for n in graph.nodes if n.op == "placeholder"}
        outputs = graph.find_nodes(op="output")
        self._returned = {self.root(n) for output in outputs for n in output.all_input_nodes}
        self._held = {self.root(n) for n in graph.nodes if n.op == "get_attr"}

    def root(self, node: fx.Node) -> fx.Node:
        """Stands for all nodes that may share memory with ``node``."""
        top = node
        while (above := self._parent.get(top, top)) is not top:
            top = above
        while (above := self._parent.get(node, node)) is not top:
            self._parent[node], node = top, above
        return top

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self.root(one), self.root(other)
        if one is not other:
            self._parent[one] = other

    def is_written(self, node: fx.Node) -> bool:
        """Whether the graph writes to memory of the node's result."""
        return self.root(node) in self._written

    def is_returned(self, node: fx.Node) -> bool:
        """Whether the caller gets memory of the node's result."""
        return self.root(node) in self._returned

    def is_held(self, node: fx.Node) -> bool:
        """Whether the node's result may be memory of the model's own tensors."""
        return self.root(node) in self._held

    def is_foreign(self, node: fx.Node) -> bool:
        """Whether the node's result may be memory of the caller's."""
        return self.root(node) in self._of_inputs

    def written_between(self, first: fx.Node, last: fx.Node, read: Iterable[fx.Node]) -> bool:
        """Whether what a chain of nodes reads is written to between its ends; inputs may be views of each other and of
        the model's own tensors.
        """
        between = [node for node in self.writes if first < node < last]
        if not between:
            return False
        roots = {self.root(n) for n in read}
        for root in (self.root(n) for node in between for n in written(node)):
            others = self._of_inputs | self._held if root in self._of_inputs else set()
            if root in roots or roots & (self._of_inputs if root in self._held else others):
                return True
        return False


def family(node: fx.Node) -> set[fx.Node]:
    """All nodes that may share memory with ``node``."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += sources(one)
            pending += [user for user in one.users if one in sources(user)]
    return found


def is_written(node: fx.Node) -> bool:
    """Whether the graph writes to memory of the node's result."""
    return any(one in written(user) for one in family(node) for user in one.users)


#: Tensor methods that read sizes and types, not values.
_METADATA = frozenset([
    "size", "dim", "stride", "numel", "nelement", "ndimension", "is_contiguous", "data_ptr", "element_size",
    "is_floating_point", "is_complex", "__len__", "get_device", "storage_offset", "__hash__", "requires_grad_",
    "is_signed", "is_shared", "is_pinned", "is_inference", "untyped_storage", "_is_view", "is_same_size", "is_conj",
    "is_neg",
])  # fmt: skip


@functools.lru_cache(maxsize=4096)
def reads_values(func: Callable) -> bool:
    """Whether ``func`` looks at the elements of its tensors, not only at shape, dtype and the like."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return func in FUNCTIONS or attribute in ("real", "imag", "grad", "T", "H")
    return name not in _METADATA
