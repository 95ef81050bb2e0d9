"""The one way to walk nested containers: what models take and return.

``torch.utils._pytree`` takes subclasses of dict for leaves, and rebuilding loses attributes; here a
container that held nothing to replace is returned as the same object, and others keep their class.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: The classes of most leaves. Every call of an int8 model walks what ops take and return, so these are told by a look
#: at their class, before the dearer questions (a Mapping? a dataclass?) are asked.
_LEAVES = frozenset(
    {Tensor, nn.Parameter, int, float, bool, complex, str, type(None), slice, type(...), torch.dtype,
     torch.device, torch.layout, torch.memory_format}
)  # fmt: skip


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with every leaf replaced by ``fn(leaf)``; containers keep their class.

    Lists, tuples, named tuples, mappings (also subclasses, such as ``ModelOutput``) and dataclass instances are
    walked. A container in which no leaf changed is returned itself, not copied.

    >>> tree_map(lambda leaf: leaf + 1, {"a": [1, (2, 3)]})
    {'a': [2, (3, 4)]}
    """
    if type(tree) in _LEAVES:
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        items = [fn(item) if type(item) in _LEAVES else tree_map(fn, item) for item in tree]
        if all(map(operator.is_, items, tree)):
            return tree
        if isinstance(tree, list):
            return _replaced(tree, lambda out: out.__setitem__(slice(None), items))
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return tuple(items) if type(tree) is tuple else type(tree)(items)
    if isinstance(tree, Mapping):
        values = {key: fn(value) if type(value) in _LEAVES else tree_map(fn, value) for key, value in tree.items()}
        changed = {key: new for key, new in values.items() if new is not tree[key]}
        if not changed:
            return tree
        if not hasattr(tree, "__setitem__"):
            cls: Any = type(tree)
            return cls(values)

        def change(out: Any) -> None:
            for key, new in changed.items():
                out[key] = new
                for name, held in list(vars(out).items() if hasattr(out, "__dict__") else ()):
                    if held is tree[key]:  # some classes have items as attributes too
                        out.__dict__[name] = new

        return _replaced(tree, change)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name, None) for f in dataclasses.fields(tree)}
        changed = {name: new for name, old in fields.items() if (new := tree_map(fn, old)) is not old}
        if not changed:
            return tree

        def change_fields(out: Any) -> None:
            for name, new in changed.items():
                object.__setattr__(out, name, new)

        return _replaced(tree, change_fields)
    return fn(tree)


def _replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    out = copy.copy(tree)
    change(out)
    return out


def tree_leaves(tree: Any) -> Iterator[Any]:
    """The leaves of ``tree``, in order.

    >>> list(tree_leaves([1, {"a": (2, 3)}]))
    [1, 2, 3]
    """
    leaves: list[Any] = []
    _collect(tree, leaves)
    return iter(leaves)


def _collect(tree: Any, leaves: list[Any]) -> None:
    if type(tree) in _LEAVES:
        leaves.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, leaves)
    elif isinstance(tree, Mapping):
        for _, value in tree.items():
            _collect(value, leaves)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            _collect(getattr(tree, field.name, None), leaves)
    else:
        leaves.append(tree)


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of ``tree``, in order, each with where it is: by keys and fields, and in lists and tuples, however
    nested, by how many come before it.

    >>> list(named_leaves({"a": (1, None), "b": [2, (3, 4)]}, "x"))
    [("x['a'][0]", 1), ("x['a'][1]", None), ("x['b'][0]", 2), ("x['b'][1]", 3), ("x['b'][2]", 4)]
    """
    if isinstance(tree, (list, tuple)):
        for number, item in enumerate(_flat(tree)):
            yield from named_leaves(item, f"{name}[{number}]")
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from named_leaves(item, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from named_leaves(getattr(tree, field.name, None), f"{name}.{field.name}")
    else:
        yield name, tree


def _flat(items: list | tuple) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


def call_arguments(example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None) -> tuple[tuple, dict]:
    """What ``example_inputs`` means as a call: ``(args, kwargs)``.

    A Mapping is keyword arguments (what a tokenizer returns), a tuple or list positional ones, anything else one
    positional argument. A model that takes one dict or list positionally gets ``({...},)``.

    >>> call_arguments([1, 2])
    ((1, 2), {})
    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    """
    extra = dict(example_kwargs or {})
    if example_inputs is None and extra:
        return (), extra
    if isinstance(example_inputs, Mapping):
        return (), {**example_inputs, **extra}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), extra
    return (example_inputs,), extra


def copied_inputs(tree: Any) -> Any:
    """A deep copy of a call's inputs. Tensors that autograd computed, which deepcopy refuses, become leaves: nothing
    flows back from a copy.
    """
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.is_leaf and id(leaf) not in memo:
            memo[id(leaf)] = copy.deepcopy(leaf.detach(), memo).requires_grad_(leaf.requires_grad)
    return copy.deepcopy(tree, memo)
