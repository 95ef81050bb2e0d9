"""What a graph takes and returns: placeholders for the example, and the user's containers from plain ones."""

from __future__ import annotations

import copy
import inspect
import operator
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from .._torch import unwrap_optional
from ..auto_trace import InterceptedForward, RunCall
from ..errors import RewriteError
from ..pytree import copied_inputs, named_leaves, tree_leaves, tree_map
from ..record.record import Tag
from .recorder import GraphRecorder
from .structure import ASSERTS, check_same, contents, words_of
from .symbols import Traced, traced


class ObjectError(RewriteError):
    """A model takes, gives or changes an object, which plain graphs do not hold."""


# Inputs


def check_input(x: Tensor, name: str, rank: int, dtype: torch.dtype) -> None:
    """Raises unless an input has the rank and dtype the graph was made for."""
    if x.dim() != rank:
        raise RuntimeError(
            f"dbrq: input {name} must have {rank} dimensions, as in the graph's example, and has {x.dim()}"
        )
    if x.dtype != dtype:
        raise RuntimeError(f"dbrq: input {name} has another dtype than in the graph's example")


def check_absent(x: torch.Tensor | None, name: str) -> None:
    """Raises if an input is given that the graph's example did not have."""
    if x is not None:
        raise RuntimeError(f"dbrq: this graph was made without input {name}")


@dataclass(frozen=True)
class Inside:
    """The outermost module of a run stands for one call of it inside of a model.

    Attributes:
        call: which.
        tags: argument -> who made its tensors.
    """

    call: int
    tags: dict[str, tuple[Tag, ...]]

    def tags_of(self, name: str, tensors: Sequence[Tensor]) -> list[Tag]:
        """Who made the tensors of an argument."""
        made = self.tags.get(name, ())
        return [made[i] if i < len(made) else None for i in range(len(tensors))]

    def counts(self, state: Any) -> dict[int, int]:
        """How often the module with ``state``, and those inside of it, were called before, as a run counts them."""
        before = state.calls[self.call].before
        counts = {id(state.token.states[path]): count for path, count in before.items() if path in state.token.states}
        return counts | {id(state): self.call}


class InsideRun(RunCall):
    """A run of a module of a converted model by itself, as if inside of the model."""

    def __init__(self, intercepted: InterceptedForward, inside: Inside) -> None:
        super().__init__(intercepted.token)
        self.inside = inside
        self.counts = inside.counts(intercepted.state)

    def _tag_inputs(self, intercepted: InterceptedForward, args: tuple, kwargs: dict) -> None:
        for name, tensors in intercepted.tensors_by_name(args, kwargs).items():
            for tensor, tag in zip(tensors, self.inside.tags_of(name, tensors), strict=True):
                self.provenance.set_tag_of_any(tensor, tag)


class Inputs:
    """The graph's placeholders, and the call's arguments as the run gets them."""

    def __init__(
        self,
        recorder: GraphRecorder,
        intercepted: InterceptedForward,
        args: tuple,
        kwargs: dict,
        inside: Inside | None = None,
    ) -> None:
        self.recorder, self.inside = recorder, inside
        self.tags: dict[str, list[Tag]] = {}
        assert intercepted.state is not None
        self.state = intercepted.state
        signature = intercepted.__signature__
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RewriteError(f"the example does not fit forward: {error}", path="", got=str(signature)) from error
        self.placeholders = placeholders_of(signature, bound)
        self.example = copied_inputs(tuple(p[1] for p in self.placeholders))  # forward may change them
        values = {}
        optional = False
        nodes = []
        for name, value, default, _, _ in self.placeholders:
            optional = optional or default is not inspect.Parameter.empty
            nodes.append(self._placeholder(name, value, default, optional))
        for (name, value, default, given, key), (node, wrapped) in zip(self.placeholders, nodes, strict=True):
            place = node
            if wrapped:
                node = recorder.graph.create_node("call_function", unwrap_optional, (node,), name=f"{name}_given")
            if _is_default(value, default):  # callers may leave it out, and the placeholder has no such default
                structure = self._settled(place, value, name, True)
            elif not given and value is inspect.Parameter.empty:
                value, structure = None, None
            else:
                value, structure = self._value(node, value, name, key)
            values[name] = value
            if structure is not None:
                place.meta["structure"] = structure
        self._values, self._contents = values, contents(values)
        self.args, self.kwargs = self._call(signature, bound, values)

    def check_contents(self) -> None:
        """Raise if the run changed a container that it was given: graphs take what is in containers, not these."""
        for name, value in self._values.items():
            if contents(value) != self._contents[name]:
                raise ObjectError(
                    "forward changes a container that it is given, which a graph does not", path="",
                    expected="a container that is only read", got=f"argument {name}, of class {type(value).__name__}",
                    hint="return what forward puts into it for the caller to keep, or keep using the converted model",
                )  # fmt: skip

    def tags_of(self, name: str, tensors: Sequence[Tensor]) -> list[Tag]:
        """Who made the tensors of an argument."""
        return (self.state.input_tags if self.inside is None else self.inside.tags_of)(name, tensors)

    def _placeholder(self, name: str, value: Any, default: Any, optional: bool) -> tuple[fx.Node, bool]:
        kind = _annotation(value)
        if not optional:
            return self.recorder.graph.placeholder(name, kind), False
        if _is_constant(default) and default is not None and type(default) is type(value):
            return self.recorder.graph.placeholder(name, kind, default), False
        if value is None:
            return self.recorder.graph.placeholder(name, torch.Tensor | None, None), False
        return self.recorder.graph.placeholder(name, kind | None if kind is not Any else kind, None), True

    def _value(self, node: fx.Node, value: Any, name: str, key: str) -> tuple[Any, Any]:
        """The value as the run gets it, and its structure: tensors known by their nodes, ints traced, anything else
        asserted.
        """
        named = [(where, leaf) for where, leaf in named_leaves(value, key) if isinstance(leaf, Tensor)]
        tags = iter([tag for where, leaf in named for tag in self.tags_of(where, [leaf])])
        return self._walk(node, value, name, tags)

    def _walk(self, node: fx.Node, value: Any, name: str, tags: Any) -> tuple[Any, Any]:
        recorder = self.recorder
        if isinstance(value, Tensor):
            tag = next(tags, None)
            if recorder.known(value) is not None:  # given twice in the example, and perhaps not elsewhere
                value = value.clone()
            recorder.graph.call_function(check_input, (node, name, value.dim(), value.dtype))
            recorder.bind(value, node, tag=tag, is_input=True)
            if not recorder.symbolic:
                for dim, size in enumerate(value.shape):
                    recorder.check(recorder.graph.call_method("size", (node, dim)), size, f"size {dim} of {name}")
            return value, None
        if isinstance(value, (list, tuple)):
            self._assert_length(node, value, name)
            found = [
                self._walk(self._item(node, i, f"{name}_{i}"), item, f"{name}[{i}]", tags)
                for i, item in enumerate(value)
            ]
            items = [item for item, _ in found]
            own = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            return own, ("items", [structure for _, structure in found])
        if isinstance(value, Mapping):
            self._assert_length(node, value, name)
            if len(value) > 1 and all(isinstance(key, str) for key in value):
                self._assert_order(node, value, name)
            changed = {
                k: self._walk(self._item(node, k, f"{name}_{k}"), v, f"{name}[{k!r}]", tags) for k, v in value.items()
            }
            out: Any = copy.copy(value)
            for k, (v, _) in changed.items():
                out[k] = v
            return out, ("keys", len(changed) > 1, [(k, structure) for k, (_, structure) in changed.items()])
        if type(value) in (bool, float, str):
            recorder.check(node, value, f"argument {name}")
            return value, None
        if type(value) is int:
            if recorder.symbolic:
                return traced(value, node, recorder), None
            recorder.check(node, value, f"argument {name}")
            return value, None
        if value is None:
            recorder.graph.call_function(check_absent, (node, name))
            return None, None
        if _holds_tensors(value, 4):
            raise ObjectError(
                "an input is an object that a graph cannot take apart", path="",
                expected="tensors, numbers and containers (lists, tuples, mappings)",
                got=f"{name}: an object of class {type(value).__name__} that holds tensors",
                hint="have forward take its tensors as arguments of their own, or leave it out; models lowered with "
                'backend="onednn" take objects',
            )  # fmt: skip
        return value, self._settled(node, value, name, False)

    def _settled(self, node: fx.Node, value: Any, name: str, or_none: bool) -> Any:
        """The structure of a value that the code was recorded for, which the graph asserts."""
        opaque: list[Any] = []
        words = words_of(value, opaque)
        if opaque:
            kinds = ", ".join(sorted({type(part).__name__ for part in opaque}))
            warnings.warn(
                f"dbrq: the graph holds for the example's argument {name} only, and cannot tell whether it is given "
                f"another one: it is, or holds, an object that has no value to compare ({kinds})",
                stacklevel=2,
            )
        self.recorder.graph.call_function(check_same, (node, name, words, or_none)).meta[ASSERTS] = "structure"
        return "value", words, or_none

    def _assert_length(self, node: fx.Node, value: Any, name: str) -> None:
        made = len(self.recorder.graph.nodes)
        length = self.recorder.graph.call_function(len, (node,))
        self.recorder.check(length, len(value), f"the length of {name}")
        self._say_asserts("structure", made)

    def _assert_order(self, node: fx.Node, value: Mapping, name: str) -> None:
        graph = self.recorder.graph
        made = len(graph.nodes)
        keys = graph.call_function(list, (graph.call_method("keys", (node,)),))
        same = graph.call_function(operator.eq, (keys, list(value)))
        self.recorder.check(same, True, f"whether the keys of {name} come in the order {list(value)}")
        self._say_asserts("order", made)

    def _say_asserts(self, kind: str, made: int) -> None:
        """Say of the nodes that were made last that they assert a structure."""
        for node in list(self.recorder.graph.nodes)[made:]:
            node.meta[ASSERTS] = kind

    def _item(self, node: fx.Node, key: Any, name: str) -> fx.Node:
        return self.recorder.graph.create_node(
            "call_function", operator.getitem, (node, key), name=re.sub(r"\W", "_", name)
        )

    def _call(self, signature: inspect.Signature, bound: inspect.BoundArguments, values: dict) -> tuple[tuple, dict]:
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                if name in bound.arguments:
                    bound.arguments[name] = tuple(values[f"{name}_{i}"] for i in range(len(bound.arguments[name])))
            elif parameter.kind is parameter.VAR_KEYWORD:
                if name in bound.arguments:
                    bound.arguments[name] = {key: values[key] for key in bound.arguments[name]}
            elif name in bound.arguments:
                bound.arguments[name] = values[name]
        return bound.args, bound.kwargs


def _holds_tensors(value: Any, depth: int) -> bool:
    """Whether a tensor is found in an object's attributes, or in what they hold."""
    if isinstance(value, Tensor):
        return True
    if not depth or isinstance(value, (type, nn.Module)):
        return False
    parts: Iterable[Any] = getattr(value, "__dict__", {}).values()
    if isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, Mapping):
        parts = [*value.values(), *parts]
    return any(_holds_tensors(part, depth - 1) for part in parts)


def _is_constant(default: Any) -> bool:
    """Whether a placeholder can have a default."""
    return default is None or type(default) in (bool, int, float, str)


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value without tensors is a parameter's default, one that a placeholder cannot have."""
    if default is inspect.Parameter.empty or _is_constant(default) or _holds_tensors(value, 4):
        return False
    return words_of(value) == words_of(default)


def placeholders_of(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> list[tuple[str, Any, Any, bool, str]]:
    """The graph's inputs for a call: name, value, default, whether it is given, and its name in the record."""
    found: list[tuple[str, Any, Any, bool, str]] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            for i, value in enumerate(bound.arguments.get(name, ())):
                found.append((f"{name}_{i}", value, inspect.Parameter.empty, True, f"*{i}"))
        elif parameter.kind is parameter.VAR_KEYWORD:
            for key, value in bound.arguments.get(name, {}).items():
                found.append((key, value, inspect.Parameter.empty, True, key))
        else:
            value = bound.arguments.get(name, parameter.default)
            found.append((name, value, parameter.default, name in bound.arguments, name))
    while found and not found[-1][3]:  # nothing given after them
        found.pop()
    return found


def _annotation(value: Any) -> Any:
    """The type of an input, as TorchScript wants it written."""
    if isinstance(value, Tensor):
        return torch.Tensor
    if type(value) in (bool, int, float, str):
        return type(value)
    if isinstance(value, list) and value:
        return GenericAlias(list, (_annotation(value[0]),))
    if isinstance(value, tuple):
        return GenericAlias(tuple, tuple(_annotation(v) for v in value))
    if isinstance(value, Mapping) and value:
        key, first = next(iter(value.items()))
        return GenericAlias(dict, (type(key), _annotation(first)))
    return Any


# Outputs


class Returned:
    """What the graph returns: ``plain``, in containers that TorchScript has, and how the user's own are made of it.

    Attributes:
        plain: nested tuples, lists and dicts of nodes and constants.
        template: the user's output with ``_Slot`` in place of tensors and numbers.
        is_plain: whether the two are alike.
    """

    plain: Any
    template: Any
    is_plain: bool

    @classmethod
    def of(cls, output: Any, recorder: GraphRecorder) -> Returned:
        self = cls()
        nodes: list[fx.Node] = []

        def slot(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                nodes.append(recorder.node_of(leaf))
            elif isinstance(leaf, Traced):
                nodes.append(leaf.fx_node)
            elif leaf is None or isinstance(leaf, (bool, int, float, str)):
                return leaf
            else:
                raise ObjectError(
                    "the model returns an object that a graph cannot build", path="",
                    expected="tensors, numbers, and containers of them", got=type(leaf).__name__,
                    hint="switch it off (use_cache=False, for one), or return its tensors; models lowered with "
                    'backend="onednn" return objects',
                )  # fmt: skip
            return _Slot(len(nodes) - 1, isinstance(leaf, Tensor))

        output = _exchanged(output, torch.Size, _Sizes)
        self.template = tree_map(slot, output)
        if self.template is output and any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            raise RewriteError("the output cannot be taken apart", path="", got=type(output).__name__)
        self.is_plain = _is_plain(self.template)
        self.plain = tree_map(
            lambda leaf: nodes[leaf.index] if isinstance(leaf, _Slot) else leaf, _as_plain(self.template)
        )
        return self

    def __call__(self, plain: Any) -> Any:
        """The user's containers, from the plain ones."""
        values: dict[int, Any] = {}

        def collect(shape: Any, value: Any) -> None:
            if isinstance(shape, _Slot):
                values[shape.index] = value
            elif isinstance(shape, Mapping):
                for key, part in shape.items():
                    collect(part, value[key])
            elif isinstance(shape, (list, tuple)):
                for part, item in zip(shape, value, strict=True):
                    collect(part, item)

        collect(_as_plain(self.template), plain)
        output = tree_map(lambda leaf: values[leaf.index] if isinstance(leaf, _Slot) else leaf, self.template)
        return _exchanged(output, _Sizes, torch.Size)

    def __getstate__(self) -> dict:
        return {"template": self.template, "is_plain": self.is_plain}


class _Sizes(tuple):
    """Stands for a ``torch.Size``, which holds numbers only, and no places for them."""


def _exchanged(tree: Any, old: type, new: type) -> Any:
    """``tree`` with instances of ``old``, a class of tuples, as ones of ``new``."""
    if isinstance(tree, old):
        return new(tree)
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([_exchanged(item, old, new) for item in tree])
    if type(tree) is dict:
        return {key: _exchanged(value, old, new) for key, value in tree.items()}
    return tree


class _Slot:
    """A place for the output's tensor or number of this index. (No dataclass: ``tree_map`` would walk into it.)"""

    def __init__(self, index: int, is_tensor: bool) -> None:
        self.index, self.is_tensor = index, is_tensor


def _is_plain(tree: Any) -> bool:
    if isinstance(tree, (list, tuple, dict)):
        parts = tree.values() if isinstance(tree, dict) else tree
        scriptable = type(tree) is tuple or _all_tensors(parts)
        return type(tree) in (list, tuple, dict) and scriptable and all(map(_is_plain, parts))
    return tree is None or isinstance(tree, (_Slot, bool, int, float, str))


def _all_tensors(parts: Iterable[Any]) -> bool:
    return all(isinstance(part, _Slot) and part.is_tensor for part in parts)


def _as_plain(tree: Any) -> Any:
    """Containers of TorchScript: a dict where all values are tensors, else a tuple; of the user's own classes, what is
    not None.
    """
    if isinstance(tree, Mapping):
        items = {k: _as_plain(v) for k, v in tree.items() if v is not None or type(tree) is dict}
        if _all_tensors(v for v in items.values() if v is not None):
            return items
        return tuple(items.values())
    if isinstance(tree, list) and _all_tensors(tree):
        return list(tree)
    if isinstance(tree, (list, tuple)):
        return tuple(_as_plain(v) for v in tree)
    if hasattr(tree, "__dataclass_fields__"):
        fields = {name: getattr(tree, name) for name in tree.__dataclass_fields__}
        return _as_plain({name: value for name, value in fields.items() if value is not None})
    return tree


class RestoringCodeGen(CodeGen):
    """Code that returns the user's own containers in Python, and plain ones in TorchScript."""

    def __init__(self, returned: Returned) -> None:
        super().__init__()
        self.returned = returned

    def generate_output(self, output_args: Any, **kwargs: Any) -> str:
        plain = super().generate_output(output_args, **kwargs).removeprefix("return ")
        return f"if not torch.jit.is_scripting():\n    return restore_output({plain})\nreturn {plain}"

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [("restore_output", self.returned)]
