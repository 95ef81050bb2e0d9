"""Code that goes by how values lie in memory: writes to what ``flatten`` or ``contiguous`` gave, strides.

Int8 values lie as their kernels have it, so inputs in another layout than calibration's run in float, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import assert_precision, sqnr

ROWS = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
PIXELS = ROWS.to(memory_format=torch.channels_last)


class Convs(nn.Module):
    def __init__(self, code: Callable[[Convs, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.a, self.b, self.c = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def flattened(m: Convs, x: Tensor) -> Tensor:
    y = F.silu(m.b(m.a(x)))
    y.reshape(-1).add_(1)
    return y


def made_contiguous(m: Convs, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    z = y.contiguous()
    z.sin_()
    return m.c(y)


def asked(m: Convs, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    return m.c(y * 3 if y.is_contiguous() else y)


def strides(m: Convs, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    return m.c(y) * y.transpose(1, 2).stride(1)


def by_memory(m: Convs, x: Tensor) -> Tensor:
    return torch.as_strided(m.b(m.a(x)), (16,), (1,)) * 2


CODE = [flattened, made_contiguous, asked, strides, by_memory]


def converted(code: Callable, example: Tensor) -> tuple[nn.Module, nn.Module]:
    model = Convs(code).eval()
    prepared = dbrq.prepare(model, example)
    prepared(example)
    return model, dbrq.convert(prepared)


@pytest.mark.parametrize("layout", [ROWS, PIXELS], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("code", CODE)
def test_inputs_in_another_layout_run_in_float(code: Callable, layout: Tensor) -> None:
    model, quantized = converted(code, layout)
    other = PIXELS if layout is ROWS else ROWS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(model(layout), quantized(layout)) > 20
        quantized(layout[:1].clone(memory_format=torch.preserve_format))
    with pytest.warns(UserWarning, match="lies in memory in another way"):
        result = quantized(other)
    assert sqnr(model(other), result) > 35  # only weights are int8
    assert sqnr(model(layout), quantized(layout)) > 20  # and in int8 again


def test_strict_models_refuse_another_layout() -> None:
    model = Convs(flattened).eval()
    prepared = dbrq.prepare(model, ROWS)
    prepared(ROWS)
    quantized = dbrq.convert(prepared, strict=True)
    with pytest.raises(dbrq.DeviationError, match=r"strides \(144, 1, 24, 4\)"):
        quantized(PIXELS)


def test_code_that_does_not_go_by_layouts_takes_any() -> None:
    def usual(m: Convs, x: Tensor) -> Tensor:
        x = torch.flatten(F.relu(m.b(m.a(x))).contiguous(), 1)
        return F.relu_(x).reshape(2, 4, 6, 6)

    model, quantized = converted(usual, ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(model(PIXELS), quantized(PIXELS)) > 25
    assert_precision(quantized, "conv2d", "int8", 2)


#: Each gives the value or a copy of it, as the value lies in memory.
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda v: v.to(memory_format=torch.channels_last),
    "contiguous_last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda v: v.contiguous(),
    "permuted": lambda v: v.permute(0, 2, 3, 1).reshape(-1, 4),
}


@pytest.mark.parametrize("backend", [None, "torchscript", "onednn"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("pixels", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_the_value_or_to_a_copy(
    way: str, pixels: int, layout: torch.memory_format, backend: str | None
) -> None:
    """Kernels choose layouts of their own; of one pixel, every layout looks like each other."""

    def code(m: Convs, x: Tensor) -> Tensor:
        v = m.b(m.c(x))
        WAYS[way](v).mul_(2)
        return m.c(v)

    model = Convs(code).eval()
    example = torch.randn(3, 4, pixels, pixels, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=layout
    )
    quantized = dbrq.quantize(model, [example])
    ran = quantized if backend is None else dbrq.lower(quantized, example, backend=backend)
    for x in (example, example[:2].clone(memory_format=torch.preserve_format) * 0.5):
        assert sqnr(model(x), ran(x)) > 25
