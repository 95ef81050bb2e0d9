"""``AutoQuantizationState``: what was seen in one module, its observers, and after conversion its qparams.

Hooks of a run come from here: ``hooks(n)`` are the op hooks of the module's n-th call, in recorded order. Nothing in a
state changes during a run, except what observers collect.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .auto_trace import InterceptedForward, ModelToken, RunCall, active, unexpected_module_call
from .errors import CalibrationError, DeviationError
from .guards import refuse_checkpoint
from .kernels import QParams
from .mappings import OpRow, Role, Spelling
from .observers import HistogramObserver
from .record import Read, SeenCall, SeenOp, Tag
from .reference import run_float
from .watch import activations, bind_leaf
from .weights import norm_scale

if TYPE_CHECKING:
    from collections.abc import Callable

_disabled = torch._C.DisableTorchFunction


class Hook(Protocol):
    """What happens at one op. ``module`` serves leaf modules (``leaf``: with one argument), ``function`` everything
    else.
    """

    op: SeenOp
    row: OpRow
    module_path: str | None
    reads: Sequence[Read]

    def leaf(self, call: RunCall, leaf: InterceptedForward, x: Any) -> Any: ...

    def module(self, call: RunCall, leaf: InterceptedForward, args: tuple, kwargs: dict) -> Any: ...

    def function(self, call: RunCall, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any: ...


class AutoQuantizationState(nn.Module):
    """The quantization state of one non-leaf module, under its ``_auto_quant_state``.

    Attributes:
        path: the module's path in the model.
        calls: what was seen, call by call; each call holds the paths taken through it.
        observers: value key -> observer or fake quantize, for values first read here as int8.
        weight_fake_quants: op path -> fake quantize of its weight, in quantization aware training.
        scale, zero_point: after conversion, the qparams of the values in ``slots``: float32 ``[n]`` and int64 ``[n]``.
        anchor: an empty parameter where conversion left the module none, for code that asks
            ``next(self.parameters())``.
        modules_by_path: path -> module, for the leaves and parameters that the ops here use.
    """

    def __init__(self, path: str, token: ModelToken, calls: list[SeenCall], modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.path, self.token, self.calls = path, token, calls
        self.__dict__["modules_by_path"] = modules  # not children: they belong to the model
        self.opaque = False
        self.observers = nn.ModuleDict()
        self.weight_fake_quants = nn.ModuleDict()
        self.slots: dict[int, int] = {}
        self.ranges: dict[int, tuple[int, int]] = {}
        self.register_buffer("scale", torch.empty(0))
        self.register_buffer("zero_point", torch.empty(0, dtype=torch.int64))
        self._hooks: dict[int, list[Hook]] = {}

    # What was seen

    def ops(self) -> list[SeenOp]:
        return [op for call in self.calls for path in call.paths for op in path]

    def input_tags(self) -> dict[str, tuple[Tag, ...]]:
        return self.calls[0].input_tags if self.calls else {}

    def deviation(self, hooks: list[Hook], index: int, got: str) -> DeviationError:
        expected = "the end of forward"
        if index < len(hooks):
            hook = hooks[index]
            expected = f"{hook.row.name} ({hook.module_path})" if hook.module_path is not None else hook.row.name
        return DeviationError(
            "the run left the path that was recorded",
            path=self.path,
            op=got,
            expected=f"{expected}, as op {index} of this module's forward",
            got=got,
            hint="call the model as prepare saw it, or prepare it with example_inputs that take this path",
        )

    # qparams

    def keep_qparams(self, qparams: dict[int, QParams]) -> None:
        """Hold the qparams of the values that ops here read or write."""
        self.refresh()
        self.slots = {key: slot for slot, key in enumerate(qparams)}
        self.ranges = {key: (q.quant_min, q.quant_max) for key, q in qparams.items()}
        self.scale = torch.tensor([q.scale for q in qparams.values()], dtype=torch.float32)
        self.zero_point = torch.tensor([q.zero_point for q in qparams.values()], dtype=torch.int64)

    def qparams(self, key: int) -> QParams:
        slot = self.slots[key]
        return QParams(float(self.scale[slot]), int(self.zero_point[slot]), *self.ranges[key])

    # Hooks

    def hooks(self, count: int) -> list[Hook] | None:
        """The op hooks of the module's call number ``count`` in a run; None if it is not looked into."""
        if self.opaque:
            return None
        hooks = self._hooks.get(count)
        if hooks is None:
            if count >= len(self.calls):
                raise unexpected_module_call(self.path, len(self.calls))
            with _disabled():
                hooks = self._hooks[count] = [self._hook(op) for op in self.calls[count].paths[0]]
        return hooks

    def refresh(self) -> None:
        """Forget what was derived from the qparams, since they may have changed."""
        self._hooks = {}

    def _hook(self, op: SeenOp) -> Hook:
        if self.token.phase == "observe":
            return ObserveHook(self, op)
        from .plans import plan

        return plan(self, op)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_hooks": {}}

    def __deepcopy__(self, memo: dict) -> AutoQuantizationState:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new

    # Printing

    def extra_repr(self) -> str:
        lines = []
        for number, call in enumerate(self.calls):
            lines.append(f"(call {number}): {{")
            for path in call.paths:
                lines += [f"  {i}: {self._describe(op)}" for i, op in enumerate(path)]
            lines.append("}")
        return "\n".join(lines)

    def _describe(self, op: SeenOp) -> str:
        decision = op.decision
        text = f"{op}\n     {decision.precision}"
        text += f" ({decision.reason})" if decision.reason else f", {decision.kernel}"
        for name, keys in (("reads", [r.value for r in decision.reads]), ("writes", [decision.writes])):
            keys = [k for k in keys if k is not None]
            if keys:
                text += f"; {name} " + ", ".join(
                    f"{k} ({self.qparams(k)})" if k in self.slots else str(k) for k in keys
                )
        return text


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class ObserveHook:
    """Op hook of a prepared model: observes what the op reads as int8, or fake-quantizes it, and runs the op."""

    def __init__(self, state: AutoQuantizationState, op: SeenOp) -> None:
        self.row, self.module_path, self.reads, self.op = op.row, op.leaf, op.decision.reads, op
        shared = state.token.observers  # type: ignore[attr-defined]
        self.observers: list[tuple[int, nn.Module]] = []
        for read in self.reads:
            observer = shared.get(read.value)
            vid = dict(op.activations)[read.slot]
            if observer is not None and (_is_fake_quantize(observer) or (op.path, vid) in state.token.observing):  # type: ignore[attr-defined]
                self.observers.append((read.slot, observer))
        held = state.weight_fake_quants
        self.weight_fake_quant = held[op.module_key] if op.module_key in held else None  # noqa: SIM401 (no .get)
        self.state = state
        self.fakes = self.weight_fake_quant is not None or any(_is_fake_quantize(o) for _, o in self.observers)

    def leaf(self, call: RunCall, leaf: InterceptedForward, x: Any) -> Any:
        if self.fakes or not isinstance(x, Tensor):
            return self.module(call, leaf, (x,), {})
        with _disabled():
            if self.observers and x.numel():
                self._seen(self.observers[0][1], x)
            return leaf.original(x)

    def module(self, call: RunCall, leaf: InterceptedForward, args: tuple, kwargs: dict) -> Any:
        with _disabled():
            if not self.observers and not self.fakes:
                return leaf.original(*args, **kwargs)
            bound = bind_leaf(leaf, args, kwargs)
            if not self._observe(bound):
                return leaf.original(*args, **kwargs)
            return run_float(self.row, bound, self.op.pad)

    def function(self, call: RunCall, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        if not self.observers and not self.fakes:
            return func(*args, **kwargs)
        bound = spelling.bind(args, kwargs)
        changed = self._observe(bound)
        if not changed or spelling.inplace:
            return func(*args, **kwargs)
        return run_float(self.row, bound, self.op.pad)

    def _observe(self, bound: list[Any]) -> bool:
        """Observe the activations; in training with fake quantize, put quantized ones in their place."""
        if self.fakes and active.call.gradient:
            refuse_checkpoint(self.op, RunCall.run.__code__)
        found = dict(activations(self.row, bound))
        changed = False
        for slot, observer in self.observers:
            x = found.get(slot)
            if x is None or not x.numel():
                continue
            seen = self._seen(observer, x)
            if _is_fake_quantize(observer):
                _place(bound, self.row, slot, seen)
                changed = True
        if self.weight_fake_quant is not None:
            bound[1] = self._fake_weight(bound[1])
            changed = True
        return changed

    def _seen(self, observer: nn.Module, x: Tensor) -> Tensor:
        try:
            if _is_fake_quantize(observer):
                return self._fake_quantized(observer, x)
            return observer(_observable(observer, x.detach()))
        except CalibrationError as error:
            raise CalibrationError(
                "a value seen in calibration cannot be quantized",
                path=self.op.owner,
                op=self.op.path,
                expected="finite values",
                got=error.got or error.message,
                hint="check the calibration data, or set this op's qconfig to None",
            ) from error

    def _fake_quantized(self, fake_quantize: nn.Module, x: Tensor) -> Tensor:
        """Several ops may read one value: it is observed and rounded once in a run.

        Kept by the run, not by ``x``: that may be the user's, and the result holds the graph of this run's gradients.
        """
        held = active.call.quantized_inputs
        known = held.get(id(x))
        if known is not None and known[0] is x and known[1] is fake_quantize and known[2] == _version(x):
            return known[3]
        result = fake_quantize(_checked(x).to(torch.float32)).to(x.dtype)  # torch's takes float32 only
        held[id(x)] = (x, fake_quantize, _version(x), result)
        return result

    def _fake_weight(self, weight: Tensor) -> Tensor:
        """The weight as conversion will round it: scaled by the batch norm that folds into it, and back."""
        assert self.weight_fake_quant is not None
        chain = self.op.decision.chain
        if not chain or chain[0].op.role is not Role.NORM:
            return self.weight_fake_quant(weight.to(torch.float32)).to(weight.dtype)
        scale = norm_scale(chain[0], self.state.modules_by_path).reshape(-1, *[1] * (weight.dim() - 1)).detach()
        scale = torch.where(scale.abs() < 1e-12, torch.ones_like(scale), scale)
        return self.weight_fake_quant((weight * scale).to(torch.float32)).to(weight.dtype) / scale


def _is_fake_quantize(observer: Any) -> bool:
    return hasattr(observer, "fake_quant_enabled")


def _observable(observer: nn.Module, x: Tensor) -> Tensor:
    return x if isinstance(observer, HistogramObserver) else _checked(x)  # that one checks by itself


def _checked(x: Tensor) -> Tensor:
    """``x``, unless it has NaN or infinity, which would spoil an observer for good."""
    low, high = torch.aminmax(x.detach())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CalibrationError("NaN or infinity", got=f"minimum {low.item()}, maximum {high.item()}")
    return x


def _place(bound: list[Any], row: OpRow, slot: int, value: Tensor) -> None:
    if row.name in ("cat", "stack"):
        bound[0] = [*bound[0][:slot], value, *bound[0][slot + 1 :]]
    else:
        bound[slot] = value
