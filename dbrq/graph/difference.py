"""How far two outcomes of a model are apart, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .trials import Outcome

#: A form that strays no further than this from the reference, relative to its values, agrees at once: root mean square
#: of a whole leaf, of a slice of one, and the largest of a slice.
_CLOSE = (0.01, 0.03, 0.05)

#: What is no further off agrees however small values are: sums that cancel to 0 in one form need not in another.
_FLOOR = 1e-6

#: How many times as far as the nudged reference a form may stray.
_FACTOR = 3.0

#: Elements below which a slice is not looked at by itself: too few to know what rounding does there.
_SLICE = 64


@dataclass(frozen=True)
class Difference:
    """Where a form does not agree with the reference: which leaf, and in words what was expected and what came."""

    where: str
    expected: str
    got: str


def difference(expected: Outcome, got: Outcome, samples: Callable[[], Sequence[Outcome]]) -> Difference | None:
    """The first leaf of ``got`` that strays from ``expected`` further than rounding accounts for; None if none does.

    Args:
        samples: outcomes of the reference when it is nudged.
    """
    for path in expected:
        if path not in got:
            return Difference(path, "a value", "none")

        def there(path: str = path) -> list[Any]:
            return [s[path] for s in samples()]

        found = _leaf_difference(path, expected[path], got[path], there)
        if found is not None:
            return found
    extra = next((path for path in got if path not in expected), None)
    return None if extra is None else Difference(extra, "no value", "one")


def noises(expected: Outcome, samples: Sequence[Outcome]) -> Iterator[float]:
    """For each float leaf: how far samples stray, relative to its size."""
    for path, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            e = numbers(value)
            size = rms(torch.where(e.isfinite(), e, 0.0))
            strays = max(rms(torch.where(e.isfinite(), numbers(s[path]) - e, 0.0)) for s in samples)
            yield strays / size if size else 0.0


def _leaf_difference(path: str, expected: Any, got: Any, samples: Callable[[], Sequence[Any]]) -> Difference | None:
    if isinstance(expected, (int, float)) and type(expected) is type(got):
        if expected == got or (expected != expected and got != got):
            return None
        return _leaf_difference(
            path, torch.tensor([expected]), torch.tensor([got]), lambda: [torch.tensor([s]) for s in samples()]
        )
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        alike = type(expected) is type(got) and (isinstance(expected, Tensor) or bool(expected == got))
        return None if alike else Difference(path, _words(expected), _words(got))
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return Difference(path, f"{expected.dtype} {tuple(expected.shape)}", f"{got.dtype} {tuple(got.shape)}")
    if not expected.numel() or expected.layout is not torch.strided or got.layout is not torch.strided:
        return None
    if expected.dtype is torch.uint8 and _within_a_step(expected, got):
        return None
    if not expected.is_floating_point() and not expected.is_complex() and expected.dtype is not torch.uint8:
        return _other_integers(path, expected, got, samples)
    return _other_numbers(path, numbers(expected), numbers(got), lambda: [numbers(s) for s in samples()])


def _words(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return " ".join([value[0].__name__, *map(str, value[1:])])
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)


def numbers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.to(torch.float64)


def _within_a_step(expected: Tensor, got: Tensor) -> bool:
    return bool(((expected.int() - got.int()).abs() <= 1).all())


def _other_integers(path: str, expected: Tensor, got: Tensor, samples: Callable[[], Sequence[Tensor]]) -> Any:
    """Integers and flags come of comparisons, whose outcome rounding may turn."""
    wrong = (expected != got).float().mean().item()
    if not wrong or wrong <= _FACTOR * max((expected != s).float().mean().item() for s in samples()):
        return None
    first = int((expected != got).flatten().nonzero()[0])
    return Difference(
        path, f"{expected.flatten()[first].item()} at element {first}",
        f"{got.flatten()[first].item()}; {wrong:.1%} of all elements differ",
    )  # fmt: skip


def _other_numbers(path: str, e: Tensor, g: Tensor, samples: Callable[[], Sequence[Tensor]]) -> Difference | None:
    finite = e.isfinite()
    if not torch.equal(torch.where(finite, 0.0, e).nan_to_num(7.0), torch.where(g.isfinite(), 0.0, g).nan_to_num(7.0)):
        kinds = [f"{int(t.isnan().sum())} NaN, {int(t.isinf().sum())} infinite" for t in (e, g)]
        if all(torch.equal(s.isfinite(), finite) for s in samples()):
            return Difference(path, *kinds)
        finite = finite & g.isfinite()
    e, error = torch.where(finite, e, 0.0), torch.where(finite, g - e, 0.0)
    noise: list[Tensor] | None = None
    for number, (rms, largest, size, most) in enumerate(zip(
        map(_rms_of, _slices(error)), map(_largest_of, _slices(error)), map(_rms_of, _slices(e)),
        map(_largest_of, _slices(e)), strict=True,
    )):  # fmt: skip
        limit, high = size * (_CLOSE[1] if number else _CLOSE[0]) + _FLOOR, most * _CLOSE[2] + _FLOOR
        if bool((rms <= limit).all()) and bool((largest <= high).all()):
            continue
        if noise is None:
            noise = [torch.where(finite & s.isfinite(), s - e, 0.0) for s in samples()]
        cut = [list(_slices(n))[number] for n in noise]
        limit = limit + _FACTOR * torch.stack([_rms_of(n) for n in cut]).amax(0)
        high = high + _FACTOR * torch.stack([_largest_of(n) for n in cut]).amax(0)
        worst = torch.maximum(rms / limit.clamp(min=1e-300), largest / high.clamp(min=1e-300))
        if bool((worst > 1).any()):
            at = int(worst.argmax())
            of = "" if not number else f" in slice {at} of dimension {_cut_dims(e)[number - 1]}"
            return Difference(
                path, f"an error below {limit.flatten()[at]:.3g} (root mean square), {high.flatten()[at]:.3g} at most",
                f"{rms.flatten()[at]:.3g}, {largest.flatten()[at]:.3g} at most{of}, of values up to "
                f"{most.flatten()[at]:.3g}",
            )  # fmt: skip
    return None


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """The whole as ``[1, elements]``, then for each dimension ``[slices, elements of each]``."""
    yield tensor.reshape(1, -1)
    for dim in _cut_dims(tensor):
        yield tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _cut_dims(tensor: Tensor) -> list[int]:
    return [d for d, size in enumerate(tensor.shape) if size > 1 and tensor.numel() >= _SLICE * size]


def _rms_of(slices: Tensor) -> Tensor:
    return slices.square().mean(1).sqrt()


def _largest_of(slices: Tensor) -> Tensor:
    return slices.abs().amax(1)


def rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
