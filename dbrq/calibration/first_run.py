"""The first run, on the example: on a throwaway copy that shares parameters with the model, in eval mode, under
``no_grad``, with random state put back, so that nothing of the user's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ERRORS_OF_CODE, ConfigurationError
from ..pytree import copied_inputs, tree_leaves
from ..record.record import Record
from .originals import Originals
from .recorder import Watch, intercept
from .surgery import as_forward_sees, bake, copied, random_state_kept, uncompile_children, uncompiled

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def watch(
    model: nn.Module, args: tuple, kwargs: dict, opaque: Sequence[type[nn.Module]] = (), on_op: Callable | None = None
) -> Record:
    """Run ``model`` once and return what was seen. ``model`` itself is neither run nor changed.

    Args:
        model: any module.
        args, kwargs: one call's arguments; they are copied, since forward may change them.
        opaque: module classes not to look into.
        on_op: called with (op, output) after every op, for logging values.
    """
    stand_in = bake(uncompile_children(copied(uncompiled(model), model.parameters())).eval())
    _check_copied((args, kwargs))
    try:
        args, kwargs = copied_inputs((args, kwargs))
    except ERRORS_OF_CODE as error:
        raise ConfigurationError(
            f"an input cannot be copied: {error}", expected="inputs that copy.deepcopy takes",
            hint="pass plain tensors (x.as_subclass(torch.Tensor)), or give the class a __deepcopy__",
        ) from error  # fmt: skip
    originals = Originals(model.parameters())
    with torch.no_grad(), random_state_kept():
        args, kwargs = as_forward_sees(stand_in, args, kwargs)
        run = Watch(dict(stand_in.named_modules(remove_duplicate=False)), originals=originals, on_op=on_op)
        for path, module in stand_in.named_modules():
            intercept(module, path, run, tuple(opaque))
        try:
            run.run(stand_in.__dict__["forward"], args, kwargs)
        finally:
            originals.restore()
    return run.record


def _check_copied(inputs: Any) -> None:
    """Raise for tensors that torch cannot copy with what they are part of."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.layout in _COMPRESSED:
            raise ConfigurationError(
                "an input is a sparse tensor of a compressed layout", got=str(leaf.layout),
                expected="strided tensors, or sparse ones in coordinates", hint="pass it .to_sparse(), or .to_dense()",
            )  # fmt: skip
