"""What computes in one run: int8 kernels and ops on floats, counted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

INT8_KERNELS = {"qconv_pointwise": "qconv", "qconv2d_pointwise": "qconv_sum", "qlinear_pointwise": "qlinear",
                "_int_mm": "int_mm", "max_pool2d": "max_pool"}  # fmt: skip
NAMES = {**INT8_KERNELS, "mul_": "dequantize", "hardtanh": "clamp"}
MOVING = {
    "empty", "set_", "_to_copy", "clone", "copy_", "view", "_unsafe_view", "as_strided", "permute", "transpose", "t",
    "slice", "select", "expand", "squeeze", "unsqueeze", "split", "split_with_sizes", "cat", "stack", "repeat", "flip",
    "roll", "narrow", "detach", "index_select", "unbind", "fill_", "zeros", "arange", "constant_pad_nd", "full",
    "index", "alias",
}  # fmt: skip
#: Parts of quantizing, dequantizing and int8 products. The graph's own ops in place are not spelled like that.
PARTS = {"clamp_", "sub_", "add_"}


class Computing(TorchDispatchMode):
    """Counts what computes: int8 kernels, and ops on floats."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        name = name if name in NAMES or name in MOVING | PARTS else name.rstrip("_")
        tensors = [t for t in (*args, result) if isinstance(t, Tensor)]
        if name == "add" and tensors[0].dim() == 0:  # zero point + x / scale
            self.found["quantize"] += 1
        elif name in PARTS or (isinstance(result, Tensor) and not result.numel()):
            pass
        elif name in NAMES or (name not in MOVING and any(t.is_floating_point() for t in tensors)):
            self.found[NAMES.get(name, name)] += 1
        return result


def calls(model: Callable, inputs: Any) -> Counter:
    """What computes in one run."""
    inputs = copy.deepcopy(inputs if isinstance(inputs, tuple) else (inputs,))
    with torch.no_grad(), Computing() as seen:
        model(*inputs)
    return seen.found


def counted(text: str) -> Counter:
    """``"quantize int_mm*4"`` -> {"quantize": 1, "int_mm": 4}."""
    parts = (item.partition("*") for item in text.split())
    return sum((Counter({name: int(times or 1)}) for name, _, times in parts), Counter())
