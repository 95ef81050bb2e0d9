"""What is right: fake quantization by the test suite's own mode, and how far from it a backend may be.

A rounding that falls the other way is no fault, and a model may magnify it. So where a backend is not simply close to
the reference, the reference itself is run again with its roundings dithered: what a backend differs by beyond what that
dither moves is a wrong number.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dbrq.kernels import QParams
from dbrq.mappings import FUNCTIONS, Role
from dbrq.pytree import tree_leaves
from tests.helpers import reference as rounding
from tests.helpers.judging import sqnr

#: Dithered runs of the reference, and how far each moves a value before it is rounded, in steps.
RUNS, DITHER = 6, 0.06
#: A backend may differ this many times as much as the dither moves the reference.
SLACK = 3.0
#: Part of the range of values that no difference below counts: float arithmetic in another order.
NOISE = 2e-4
#: Elements of which a sum may cancel: what 8 bits cost is a matter of luck then.
FEW = 4
#: The same beside a reference that rounds: half a step of 8 bits (of both signs), where the dither happens to move
#: nothing.
HALF_A_STEP = 1 / 255


def leaves(tree: Any) -> list[Any]:
    """What a model returned, without its containers."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def structure(tree: Any) -> Any:
    """The containers, with shapes and dtypes for tensors."""
    if isinstance(tree, dict):
        return {key: structure(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(structure(value) for value in tree)
    return (tuple(tree.shape), tree.dtype) if isinstance(tree, Tensor) else tree


def seeded(fn: Callable[..., Any], args: tuple, seed: int) -> Any:
    """One call with random numbers that every backend is given alike."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return fn(*args)


def shaken(func: Callable, result: Any, args: Any, generator: torch.Generator) -> Any:
    """What an op gave, with errors such as float arithmetic in another order has.

    A zero may be a little less, which ``floor`` sees, and equal numbers may differ, which ``argmax`` sees. Of ops that
    are not in the op table, integers and what is among their arguments come out of any order alike.
    """
    if not isinstance(result, Tensor) or result.dtype is not torch.float32 or not result.numel():
        return result
    if not result.is_contiguous():
        return result
    error = (torch.rand(result.shape, generator=generator) * 2 - 1) * (1e-6 * max(result.abs().max().item(), 1.0))
    spelling = FUNCTIONS.get(func)
    if spelling is None or spelling.row.role in (Role.PASS, Role.FLOAT):
        given = [
            leaf.reshape(-1) for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dtype is result.dtype
        ]
        if not given:
            return result  # made or drawn, not computed
        exact = (result == result.round()) | torch.isin(result.abs(), torch.cat(given).abs())
        error = torch.where(exact, 0.0, error)
    return result.add_(error)


class ShakenFloat(TorchFunctionMode):
    """Float arithmetic in another order."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        return shaken(func, func(*args, **kwargs), (args, kwargs), self.generator)


class Shaken(rounding.FakeQuantizeMode):
    """Fake quantization, and float arithmetic in another order."""

    def __init__(self, converted: nn.Module, generator: torch.Generator) -> None:
        super().__init__(converted)
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return shaken(func, result, (args, kwargs), self.generator)


class FloatReference:
    """The float model, for what is lowered without being quantized.

    Attributes:
        stand_in: a copy of the model, with the state that calls left behind.
        generator: draws the dither; None: the result itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stand_in = copy.deepcopy(model).eval()
        self.generator: torch.Generator | None = None

    def __call__(self, *args: Any) -> Any:
        with contextlib.nullcontext() if self.generator is None else ShakenFloat(self.generator):
            return self.stand_in(*args)

    def dithered(self, args: tuple, seed: int) -> list[Any]:
        """What several runs give whose roundings are dithered; the state stays as it is."""
        stand_in, results = self.stand_in, []
        try:
            for run in range(RUNS):
                self.generator = torch.Generator().manual_seed(run)
                self.stand_in = copy.deepcopy(stand_in)
                with contextlib.suppress(RuntimeError):  # dither may be more than an op takes
                    results.append(seeded(self, copy.deepcopy(args), seed))
        finally:
            self.stand_in, self.generator = stand_in, None
        return results


class Reference(FloatReference):
    """A fake-quantized model made of the float one: nothing that runs in dbrq takes part, only what it decided."""

    def __init__(self, model: nn.Module, converted: nn.Module) -> None:
        super().__init__(model)
        self.converted = converted
        quantized = dict(converted.named_modules())
        with torch.no_grad():
            for path, module in self.stand_in.named_modules():
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    if tensor is None:
                        continue
                    if f"{name}_int8" in quantized[path]._buffers:
                        tensor.copy_(getattr(quantized[path], name).dequantize())
                    elif name in quantized[path]._buffers:  # state that calibration changed
                        module._buffers[name] = quantized[path]._buffers[name].clone()

    def __call__(self, *args: Any) -> Any:
        generator = self.generator
        if generator is None:
            return self._run(rounding.FakeQuantizeMode(self.converted), args)

        def fake_quantize(x: Tensor, q: QParams) -> Tensor:
            moved = x / q.scale + (torch.rand(x.shape, generator=generator) * 2 - 1) * DITHER
            levels = torch.clamp(torch.round(moved) + q.zero_point, q.quant_min, q.quant_max)
            return (levels - q.zero_point) * q.scale

        with patch.object(rounding, "fake_quantize", fake_quantize):
            return self._run(Shaken(self.converted, generator), args)

    def _run(self, mode: rounding.FakeQuantizeMode, args: tuple) -> Any:
        with mode:
            result = self.stand_in(*args)
        assert next(mode.ops, None) is None, "this call took another path than the recorded one"
        return result


_ROUNDED = ("conv", "linear", "add", "mul", "sub", "cat", "stack", "matmul", "bmm", "mm", "norm", "pool", "einsum",
            "hardswish", "sigmoid", "tanh", "gelu", "silu", "relu", "elu", "mean", "softmax", "lstm", "gru", "rnn",
            "interpolate", "bilinear", "div", "attention", "prelu", "mish", "rsub")  # fmt: skip


class Crude(TorchFunctionMode):
    """Every operand of what could be int8, rounded to 8 bits of its own range: how much int8 may cost this model.

    Written with nothing of dbrq's, neither its kernels nor its decisions nor its ranges.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__")) or "out" in (kwargs or {})
        if not writes and any(part in name for part in _ROUNDED):
            args = tuple(self._rounded(a) for a in args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._rounded(item) for item in value)
        if not isinstance(value, Tensor) or value.dtype is not torch.float32 or value.numel() < 2:
            return value
        low, high = min(value.min().item(), 0.0), max(value.max().item(), 0.0)
        step = max(high - low, 1e-8) / 255
        if not math.isfinite(step):
            return value
        zero = round(-low / step)
        return (torch.clamp(torch.round(value / step) + zero, 0, 255) - zero) * step


def crude(model: nn.Module, args: tuple, seed: int) -> Any:
    model = copy.deepcopy(model)
    with Crude():
        return seeded(model, copy.deepcopy(args), seed)


def problem(
    got: Any,
    expected: Any,
    float_: Any,
    dithered: Callable[[], list[Any]] | None,
    containers: bool = True,
    exact: bool = False,
) -> str:
    """What is wrong with a backend's result beside the reference's; "" if nothing.

    Args:
        got: what the backend returned.
        expected: the reference's.
        float_: the float model's.
        dithered: the reference's results with dither, made when they are needed.
        containers: whether the classes of containers must be the same.
        exact: nothing is rounded to 8 bits.
    """
    if containers and structure(got) != structure(expected):
        return f"shape: {structure(got)} where the model gives {structure(expected)}"[:300]
    ours, theirs, floats = leaves(got), leaves(expected), leaves(float_)
    if [structure(leaf) for leaf in ours] != [structure(leaf) for leaf in theirs]:
        return f"shape: {structure(got)} where the model gives {structure(expected)}"[:300]
    for index, (a, b, f) in enumerate(zip(ours, theirs, floats, strict=True)):
        if not isinstance(a, Tensor) or not a.numel():
            continue
        if a.is_complex():
            a, b, f = (torch.view_as_real(t.resolve_conj()) for t in (a, b, f))

        def moved(index: int = index) -> list[Tensor]:
            results = [leaves(result)[index] for result in dithered()] if dithered is not None else []
            return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in results]

        if found := _leaf_problem(a.double(), b.double(), f.double(), moved, exact or dithered is None):
            return f"output {index}: {found}" if len(ours) > 1 else found
    return ""


def _leaf_problem(a: Tensor, b: Tensor, f: Tensor, moved: Callable[[], list[Tensor]], exact: bool) -> str:
    if not torch.equal(a.isfinite(), b.isfinite()):
        if b.isfinite().all():
            return f"value: {(~a.isfinite()).sum()} of {a.numel()} are not finite"
        a = torch.where(b.isfinite(), a, b)  # NaN may become finite (docs/limits.md)
    finite = b.isfinite() & f.isfinite()
    a, b, f = (torch.where(finite, t, torch.zeros_like(t)) for t in (a, b, f))
    difference = (a - b).abs()
    scale = max(b.abs().max().item(), f.abs().max().item(), 0.05)
    if difference.max().item() <= (NOISE if exact else HALF_A_STEP) * scale:
        return ""
    spread = torch.stack([torch.where(finite, (m.double() - b).abs(), 0) for m in moved() or [b]])
    most, energy = spread.max().item(), spread.pow(2).mean(tuple(range(1, spread.dim()))).max().sqrt().item()
    ours = difference.pow(2).mean().sqrt().item()
    if difference.max().item() <= SLACK * most + NOISE * scale and ours <= SLACK * energy + NOISE * scale:
        return ""
    worst = difference.reshape(-1).argmax().item()
    return (
        f"value: {sqnr(b, a):.1f} dB from the reference ({sqnr(f, b):.1f} dB from float); largest difference "
        f"{difference.max().item():.3g} of {scale:.3g} at {worst} of {a.numel()}, dither moves {most:.3g}; "
        f"{(difference > SLACK * most + NOISE * scale).float().mean().item():.1%} are off"
    )


def draws_alike(ours: list[Any], theirs: list[Any]) -> str:
    """Whether two models that draw random numbers give the same distribution, from results with equal seeds each.

    Kernels may fill a tensor in the order of its layout, so that equal seeds give equal numbers in other places.
    """
    for index, leaf in enumerate(leaves(ours[0])):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        a, b = (torch.stack([leaves(result)[index].double() for result in group]) for group in (ours, theirs))
        if not (a.isfinite().all() and b.isfinite().all()):
            continue
        variance = (a.var(0) + b.var(0)) / len(ours)
        noise = (0.02 * b.abs().max()).pow(2) + 1e-12
        off = (a.mean(0) - b.mean(0)).pow(2) / (variance + noise)
        if off.mean() > 2.5:
            return f"value: means over {len(ours)} seeds are {off.mean().sqrt():.1f} standard errors apart"
        if b.var(0).mean() > 4 * noise and not 0.4 < (a.var(0).mean() / b.var(0).mean()).item() < 2.5:
            return f"random: variance {a.var(0).mean():.3g} where it should be {b.var(0).mean():.3g}"
    return ""


def costs_too_much(got: Any, float_: Any, crude_: Any, margin: float, enough: float) -> str:
    """Whether a result is further from float than 8 bits explain."""
    for a, f, c in zip(leaves(got), leaves(float_), leaves(crude_), strict=True):
        if not isinstance(f, Tensor) or not f.is_floating_point() or not f.isfinite().all():
            continue
        if f.numel() < FEW:
            continue
        if a.shape != f.shape or not a.isfinite().all():
            return "shape or values not finite"
        if (a - f).abs().max().item() <= NOISE * max(f.abs().max().item(), 0.05):
            continue
        mine, theirs = sqnr(f.double(), a.double()), sqnr(f.double(), c.double())
        if mine < min(theirs - margin, enough):
            return f"cost: {mine:.1f} dB from float, where 8 bits cost about {theirs:.1f}"
    return ""
