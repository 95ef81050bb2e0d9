"""What a converted model refuses, and says so before anything changes: other devices and dtypes, training, gradients.

The refusals are extensions of the module instances (hidden_state.py), on leaves too, so that ``model.half()``,
``model.layer.half()`` and ``Sequential(model).half()`` meet them alike.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad

from ._torch import FakeTensorMode, dispatch_modes, dual_level, is_wrapped, skip_when_compiling
from .errors import ERRORS_OF_CODE, ConfigurationError, KernelInputError, QuantizationError
from .hidden_state import extend, map_tensors, original
from .mappings import Role
from .pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from .record.record import SeenOp


def freeze(model: nn.Module) -> None:
    """Make every module of a converted model keep its dtype, its device and its mode."""
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.jit.ScriptModule):
            extend(module, _FROZEN, path)


def check_move(fn: Callable, path: str, what: str, hint: str) -> None:
    """Raise if ``fn``, which ``nn.Module._apply`` is about to map over all tensors, changes dtype or device.

    ``fn`` is tried on an empty tensor: whether it fails (no such device) or not, the model is still what it was.
    """
    try:
        moved = fn(torch.empty(0))
    except ERRORS_OF_CODE as error:
        raise ConfigurationError(
            f"{what} cannot be moved: {error}", path=path, expected="cpu and torch.float32", hint=hint
        ) from error
    if moved.device.type != "cpu" or moved.dtype is not torch.float32:
        raise ConfigurationError(
            f"{what} keeps its dtypes and its device", path=path, expected="cpu and torch.float32",
            got=f"{moved.device} and {moved.dtype}", hint=hint,
        )  # fmt: skip


def _apply(module: nn.Module, previous: Callable | None, path: str, fn: Callable, recurse: bool = True) -> nn.Module:
    check_move(
        fn, path, "a converted model",
        "convert or cast the float model instead; lower(..., dtype=torch.bfloat16) narrows what stays float",
    )  # fmt: skip
    return map_tensors(module, previous, fn, recurse)


def _train(module: nn.Module, previous: Callable | None, path: str, mode: bool = True) -> nn.Module:
    """A converted model inside one that trains stays what it is: an int8 model in eval mode."""
    return original(module, previous, "train")(False)


def _requires_grad_(module: nn.Module, previous: Callable | None, path: str, requires_grad: bool = True) -> nn.Module:
    if requires_grad:
        raise _no_gradient(path)
    return original(module, previous, "requires_grad_")(False)


_FROZEN: dict[str, Callable] = {"_apply": _apply, "train": _train, "requires_grad_": _requires_grad_}


def _no_gradient(path: str) -> QuantizationError:
    return QuantizationError(
        "a converted or lowered model has no gradient", path=path, expected="a model in training: float, or prepared",
        got="a gradient is asked for",
        hint="train the prepared model (with a qconfig of fake quantize) and convert it then; for inference, call the "
        "model under torch.no_grad()",
    )  # fmt: skip


def check_ready(ops: Iterable[SeenOp], modules: Mapping[str, nn.Module]) -> None:
    """Raise unless what int8 ops use is still on the CPU and in float32, as when it was recorded."""
    for op in ops:
        if op.decision.precision != "int8":
            continue
        tensors = {(ref.path, ref.name): getattr(modules[ref.path], ref.name, None)
                   for ref in (op.weight, op.bias, *op.norm, *op.sources) if ref is not None}  # fmt: skip
        if op.row.role is Role.RECURRENT and op.module is not None:
            tensors |= {(op.module, name): p for name, p in modules[op.module].named_parameters(recurse=False)}
        for (path, name), tensor in tensors.items():
            if tensor is not None and (tensor.dtype is not torch.float32 or tensor.device.type != "cpu"):
                raise ConfigurationError(
                    f"the {name} of an int8 op was cast or moved after prepare", path=path, op=op.path,
                    expected="cpu and torch.float32", got=f"{tensor.device} and {tensor.dtype}",
                    hint="prepared.float().cpu() before you convert",
                )  # fmt: skip


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """What runs inside is not narrowed by an autocast that is on outside: which dtypes ops take is recorded once."""
    if not torch.is_autocast_enabled("cpu"):
        yield
        return
    with torch.autocast("cpu", enabled=False):
        yield


# Gradients

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


class _NoGradient(torch.autograd.Function):
    """The output of a converted model, whose gradient is an error and not silently zero."""

    @staticmethod
    def forward(path: str, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.path = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise _no_gradient(ctx.path)


def without_gradient(path: str, output: Any, inputs: Iterable[Any]) -> Any:
    """``output`` as it is or, where one of a call's inputs requires a gradient, with tensors whose backward raises.

    What requires a gradient already, since it is one of the inputs, keeps it.
    """
    wanting = [leaf for value in inputs for leaf in ((value,) if isinstance(value, Tensor) else tree_leaves(value))
               if isinstance(leaf, Tensor) and leaf.requires_grad]  # fmt: skip
    if not wanting:
        return output

    def guarded(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.requires_grad or not leaf.dtype.is_floating_point:
            return leaf
        return _NoGradient.apply(path, leaf, *wanting)

    return tree_map(guarded, output)


def explain_missing(error: KeyError, path: str, weights: Iterable[tuple[str, str]]) -> None:
    """Raise what a failed look-up means, if it is for the parameter that an int8 weight was."""
    name = str(error.args[0]) if error.args else ""
    for owner, weight in weights:
        if name in (weight, f"{owner}.{weight}"):
            raise QuantizationError(
                f"forward looks for a parameter {name!r} that is an int8 weight now", path=path,
                expected="the attribute of the module, as in layer.weight", got="a look-up by name: KeyError",
                hint="read the attribute, or keep the layer in float (qconfig None)",
            ) from error  # fmt: skip


def refuse_tangents(path: str, inputs: Any) -> None:
    """Raise where forward-mode AD follows an input: int8 ops would say that all derivatives are 0."""
    if dual_level() < 0:
        return
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and (is_wrapped(leaf) or forward_ad.unpack_dual(leaf).tangent is not None):
            raise _no_gradient(path)


def refuse_fake_mode(path: str) -> None:
    """Raise where all tensors that are made are stand-ins without elements: kernels need those."""
    if any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes()):
        raise KernelInputError(
            "a converted model was called under FakeTensorMode", path=path, expected="tensors with elements",
            hint="trace the float model, or the graph that dbrq.rewrite gives",
        )  # fmt: skip


def refuse_checkpoint(op: SeenOp, run: CodeType) -> None:
    """Raise where a rounded op of a training run is inside ``torch.utils.checkpoint``, and that inside of ``run``.

    That runs its part of forward anew in backward, outside of the run: without rounding, so with other gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            raise QuantizationError(
                "gradient checkpointing would compute the gradients of a model that does not round", path=op.owner,
                op=op.path, expected="forward without torch.utils.checkpoint, where fake quantize rounds",
                got="torch.utils.checkpoint",
                hint="switch checkpointing off in quantization aware training (gradient_checkpointing_disable())",
            )  # fmt: skip
        frame = frame.f_back


# torch.compile


def not_compiled(function: Callable) -> Callable:
    """Keep torch.compile out of ``function`` and of all that it calls, at no cost when nothing is compiled.

    ``torch.compiler.disable`` wraps each call, and imports the compiler.
    """
    skip_when_compiling(function, "dbrq watches eager code, and its kernels need no compiler")
    return function
