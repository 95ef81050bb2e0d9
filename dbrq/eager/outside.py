"""Calls whose schema does not tell what they do: Python functions, views, operators of extensions, numpy.

They may write to their arguments, return them or hold on to their memory. Each is looked at before and after: an int8
value that was written to, or whose memory somebody else has now, is a float value from then on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..mappings import function_name
from ..op_facts import is_pure, memory_of, mutates, reads_values
from ..pytree import tree_leaves, tree_map
from ..tensors import Int8Tensor, Int8Weight, Lazy, Provenance, Versions, plain

#: What gives the memory of a tensor to code that torch does not see.
HANDS_OUT = frozenset({"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage"})


def _questions() -> Iterator[Callable]:
    for name in dir(torch.Tensor):
        found = inspect.getattr_static(torch.Tensor, name)
        if isinstance(found, types.GetSetDescriptorType):
            found = found.__get__
        elif not isinstance(found, types.MethodDescriptorType):
            continue
        if name not in HANDS_OUT and not reads_values(found):
            yield found


#: Methods and attributes of tensors that tell shape, dtype and the like: nothing is to be done about them.
QUESTIONS = frozenset(_questions())
#: Functions of torch's Python that write to nothing and return nothing that they were given.
_PURE_IN_PYTHON = frozenset({F.layer_norm, F.group_norm, F.softmax, F.log_softmax, Tensor.__contains__})


@functools.lru_cache(maxsize=4096)
def only_computes(func: Callable) -> bool:
    """Whether all that ``func`` does, where it is given no ``out``, is to make new tensors of what it is given.

    >>> only_computes(torch.add), only_computes(torch.nn.functional.layer_norm), only_computes(torch.Tensor.add_)
    (True, True, False)
    """
    return func in _PURE_IN_PYTHON or (is_pure(func) and reads_values(func) and not mutates(func))


def call(func: Callable, args: tuple, kwargs: dict, provenance: Provenance) -> Any:
    """``func`` on plain tensors."""
    leaves = tree_leaves((args, kwargs))
    given = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    held = [plain(leaf) for leaf in given]
    stand_ins = {id(leaf): tensor for leaf, tensor in zip(given, held, strict=True)}
    versions = Versions(held)
    args, kwargs = tree_map(lambda leaf: stand_ins.get(id(leaf), leaf), (args, kwargs))
    output = func(*args, **kwargs)
    name = function_name(func)
    shared = {memory_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
    changed = set(map(id, versions.written()))
    for leaf, tensor in zip(given, held, strict=True):
        written = id(tensor) in changed
        if written and isinstance(leaf, Int8Weight):
            leaf.refuse_write(name)
        if isinstance(leaf, Int8Tensor):
            if written:
                leaf.become(tensor)
                leaf.tag_ = name
            elif name in HANDS_OUT or memory_of(tensor) in shared:
                leaf.give_away()
        elif type(leaf) is Tensor and (written or tensor.is_inference()):  # of those, nobody counts writes
            provenance.written(leaf)
            if written:
                provenance.set_tag_of_any(leaf, name)
    return output


def shown(leaf: Any) -> Any:
    """A value for the user to keep: plain, without what runs note on it, and no reader of a fusion under way."""
    if isinstance(leaf, Int8Tensor) and leaf.deferred_ is not None:
        leaf = leaf.deferred_.value(leaf.stage_)
    elif isinstance(leaf, Lazy):
        leaf = leaf.float_value()
    return leaf.detach() if type(leaf) is Tensor else leaf


def look(hook: Callable, module: nn.Module, path: str, args: tuple) -> None:
    """Call a hook that the record does not know; its ops are none of the record's."""
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    versions = Versions(given)
    result = hook(module, *args)
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not versions.written() and all(any(m is g for g in given) for m in made):
        return
    raise ConfigurationError(
        "a hook that was registered after prepare changes values", path=path,
        expected="a hook that only looks", got=getattr(hook, "__qualname__", type(hook).__name__),
        hint="register it on the float model, before prepare, so that ranges are those of the changed values",
    )  # fmt: skip
