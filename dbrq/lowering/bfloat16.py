"""Running what stays float in bfloat16: int8 kernels read and write it as they do float32, so only casts are needed.

Where casts belong is found by running the graph on the example: any op that meets float32 beside bfloat16 gets
bfloat16.
"""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..calibration.surgery import random_state_kept
from ..kernels import script
from ..op_facts import is_written, writes, written
from .passes import written_attributes

_READS_FLOAT32 = (script.Quantize, script.QuantizeSmoothed, script.QuantizeImage)
_FLOATS = (torch.float32, torch.bfloat16)
_SCALES = (script.dequantize_weight, script.weight_only_linear)


def in_bfloat16(module: fx.GraphModule, args: tuple) -> None:
    """Change ``module`` so that its float ops run in bfloat16; inputs and outputs keep their dtypes.

    Args:
        module: a lowered graph, whose kernels give bfloat16 already.
        args: the example's values for the placeholders, in order.
    """
    _narrow_attributes(module)
    _narrow_inputs(module)
    state = [attrgetter(path)(module) for path in written_attributes(module.graph)]
    kept = [tensor.clone() for tensor in state]
    with torch.no_grad(), random_state_kept():
        _Narrowing(module).run(*copy.deepcopy(args))
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
    output = next(node for node in module.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        if node.meta.get("narrow"):
            with module.graph.inserting_before(output):
                wide = module.graph.call_method("to", (node, torch.float32))
            output.replace_input_with(node, wide)
    module.graph.lint()
    module.recompile()


def _narrow_attributes(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op != "get_attr" or any(user.target in _SCALES for user in node.users):
            continue
        if is_written(node):  # what adds up over calls wants all its digits
            continue
        path, _, name = node.target.rpartition(".")
        owner = module.get_submodule(path)
        tensor = getattr(owner, name)
        if tensor.dtype is torch.float32:
            narrow: Tensor = tensor.detach().to(torch.bfloat16)
            if isinstance(tensor, nn.Parameter):
                narrow = nn.Parameter(narrow, requires_grad=False)
            setattr(owner, name, narrow)


def _narrow_inputs(module: fx.GraphModule) -> None:
    """Float inputs are cast once, for those that do not quantize them."""
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "call_function") or node.meta.get("dtype") is not torch.float32:
            continue
        checks = [user for user in node.users if getattr(user.target, "__name__", "") == "check_input"]
        if not checks:
            continue
        readers = [
            user for user in node.users if user not in checks and not _quantizes(module, user) and _reads_elements(user)
        ]
        if readers and not is_written(node):
            with module.graph.inserting_after(checks[-1]):
                narrow = module.graph.call_method("to", (node, torch.bfloat16))
            for reader in readers:
                reader.replace_input_with(node, narrow)


def _quantizes(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), _READS_FLOAT32)


def _reads_elements(node: fx.Node) -> bool:
    return not (node.op == "call_method" and node.target in ("size", "numel", "stride")) and not writes(node)


class _Narrowing(fx.Interpreter):
    """Runs the graph, and casts where float32 meets bfloat16."""

    module: fx.GraphModule

    def run_node(self, n: fx.Node) -> Any:
        into = [self.env[i].dtype for i in written(n) if isinstance(self.env.get(i), Tensor)]
        dtype = into[0] if into and into[0] in _FLOATS else torch.bfloat16  # what is written to stays as it is
        mixed = any(_is(self.env.get(i), dtype) for i in n.all_input_nodes)
        if n.op == "call_module" and len(n.args) == 2:  # an add that is fused: its other operand must match
            mixed = True
        if mixed and n.op != "output":
            for i in n.all_input_nodes:
                if not any(_is(self.env.get(i), other) for other in _FLOATS if other is not dtype):
                    continue
                with self.module.graph.inserting_before(n):
                    cast = self.module.graph.call_method("to", (i, dtype))
                n.replace_input_with(i, cast)
                self.env[cast] = self.env[i].to(dtype)
        result = super().run_node(n)
        n.meta["narrow"] = isinstance(result, Tensor) and result.dtype is torch.bfloat16
        return result


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype is dtype and value.dim() > 0
