"""Calls whose schema does not tell what they do: Python functions, views, operators of extensions, numpy.

They may write to their arguments, return them or hold on to their memory. Each is looked at before and after: an int8
value that was written to, or whose memory somebody else has now, is a float value from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..mappings import function_name
from ..op_facts import memory_of
from ..pytree import tree_leaves, tree_map
from ..tensors import Int8Tensor, Lazy, Provenance, plain, version_of

#: What gives the memory of a tensor to code that torch does not see.
HANDS_OUT = frozenset({"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage"})


def call(func: Callable, args: tuple, kwargs: dict, provenance: Provenance) -> Any:
    """``func`` on plain tensors."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    held = [leaf.float_value() if isinstance(leaf, Lazy) else leaf for leaf in given]
    before = [version_of(tensor) for tensor in held]
    output = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    name = function_name(func)
    shared = {memory_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
    for leaf, tensor, version in zip(given, held, before, strict=True):
        written = version_of(tensor) != version
        if isinstance(leaf, Int8Tensor):
            if written:
                leaf.become(tensor)
                leaf.tag = name
            elif name in HANDS_OUT or memory_of(tensor) in shared:
                leaf.give_away()
        elif type(leaf) is Tensor and (written or tensor.is_inference()):  # of those, nobody counts writes
            provenance.written(leaf)
            if written:
                provenance.set_tag_of_any(leaf, name)
    return output
