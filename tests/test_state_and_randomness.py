"""What a call leaves behind and what it draws: lowered models called again and again, beside the float model.

Each family of cases is one model, whose outputs bear the cases' names, so that it is converted and lowered once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq

BACKENDS = ("torchscript", "onednn")


class Cases(nn.Module):
    """Runs each case on the input and on what a linear layer of it gives.

    Args:
        cases: name -> function of (this module, input, float input) that returns tensors.
    """

    def __init__(self, cases: dict[str, Callable[[Cases, Tensor], Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cases = cases
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(3, 8))
        self.register_buffer("index", torch.tensor([0, 1, 1]))
        self.scale = nn.Parameter(torch.rand(3, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"linear": self.linear(x)} | {name: case(self, x) for name, case in self.cases.items()}


def calls(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 8, generator=generator) for _ in range(count)]


def results(model: nn.Module, inputs: list[Tensor]) -> list[dict[str, Tensor]]:
    """What calls return, on copies of the inputs, and as it was when they returned."""
    with torch.no_grad():
        return [{name: value.clone() for name, value in model(x.clone()).items()} for x in inputs]


def check(model: nn.Module, backend: str, tolerance: float = 1e-5, linear: float = 0.2) -> None:
    """Raise unless converted and lowered models give in each of three calls what the float model gives."""
    inputs = calls()
    expected = results(copy.deepcopy(model), inputs)
    quantized = dbrq.quantize(copy.deepcopy(model), inputs)
    lowered = dbrq.lower(quantized, inputs[0], backend=backend)
    wrong = []
    for kind, one in (("converted", copy.deepcopy(quantized)), (backend, lowered)):
        for number, (got, wanted) in enumerate(zip(results(one, inputs), expected, strict=True)):
            for name, value in wanted.items():
                bound = linear if name == "linear" else tolerance
                if got[name].shape != value.shape or not torch.allclose(got[name], value, atol=bound, rtol=1e-4):
                    wrong.append(f"{kind}, call {number}: {name}")
    assert not wrong


# Tensors made from shapes or constants, then written to

MADE: dict[str, Callable[[Cases, Tensor], Tensor]] = {
    "zeros": lambda m, x: torch.zeros(x.shape[0], 8),
    "zeros of constant size": lambda m, x: torch.zeros(3, 8),
    "new_zeros": lambda m, x: x.new_zeros(x.shape[0], 8),
    "zeros_like": lambda m, x: torch.zeros_like(x),
    "ones": lambda m, x: torch.ones(x.size(0), 8),
    "full": lambda m, x: torch.full((x.shape[0], 8), 2.0),
    "new_full": lambda m, x: x.new_full((x.shape[0], 8), 2.0),
    "empty and fill_": lambda m, x: torch.empty(x.shape[0], 8).fill_(1.0),
    "arange": lambda m, x: torch.arange(x.shape[0] * 8, dtype=torch.float32).view(-1, 8),
    "linspace": lambda m, x: torch.linspace(0, 1, x.shape[0] * 8).reshape(-1, 8),
    "tril_": lambda m, x: torch.ones(x.shape[0], 8).tril_(),
    "eye": lambda m, x: torch.eye(x.shape[0], 8),
    "tensor": lambda m, x: torch.tensor([[1.0] * 8] * 3),
    "numpy": lambda m, x: torch.from_numpy(np.zeros((3, 8), dtype=np.float32)),
    "clone of a buffer": lambda m, x: m.table.clone(),
    "sum with a buffer": lambda m, x: m.table + 1,
    "part of a buffer, copied": lambda m, x: m.table[m.index],
    "repeated buffer": lambda m, x: m.table[:1].repeat(3, 1),
    "clone of a parameter": lambda m, x: m.scale.clone(),
    "cat": lambda m, x: torch.cat([m.table[:1], torch.zeros(x.shape[0] - 1, 8)]),
    "buffer in another dtype and back": lambda m, x: m.table.to(torch.float64).to(torch.float32),
}


def _setitem(t: Tensor, m: Cases, x: Tensor) -> None:
    t[:, 1:3] = x[:, 1:3]


def _set_by_mask(t: Tensor, m: Cases, x: Tensor) -> None:
    t[x > 0] = 3.0


def _augmented(t: Tensor, m: Cases, x: Tensor) -> None:
    t += x


def _parts(t: Tensor, m: Cases, x: Tensor) -> None:
    for i, row in enumerate(t.unbind(0)):
        row.add_(i)


WRITTEN: dict[str, Callable[[Tensor, Cases, Tensor], object]] = {
    "scatter_add_": lambda t, m, x: t.scatter_add_(0, m.index[:, None].expand(-1, 8), x),
    "scatter_reduce_": lambda t, m, x: t.scatter_reduce_(0, m.index[:, None].expand(-1, 8), x, "sum"),
    "index_put_": lambda t, m, x: t.index_put_((m.index,), x, accumulate=True),
    "index_add_": lambda t, m, x: t.index_add_(0, m.index, x),
    "index_copy_": lambda t, m, x: t.index_copy_(0, torch.tensor([2, 1, 0]), x),
    "index_fill_": lambda t, m, x: t.index_fill_(0, m.index, 4.0),
    "masked_fill_": lambda t, m, x: t.masked_fill_(x > 0, 5.0),
    "copy_ to a slice": lambda t, m, x: t[:, 2:4].copy_(x[:, 2:4]),
    "setitem": _setitem,
    "setitem by a mask": _set_by_mask,
    "+=": _augmented,
    "out=": lambda t, m, x: torch.sin(x, out=t),
    "out= that reads it": lambda t, m, x: torch.add(t, x, out=t),
    "relu, inplace=True": lambda t, m, x: F.relu(t.sub_(x), inplace=True),
    "threshold, inplace": lambda t, m, x: F.threshold(t.sub_(x), 0.0, -1.0, True),
    "addcmul_": lambda t, m, x: t.addcmul_(x, x),
    "cumsum_": lambda t, m, x: t.add_(x).cumsum_(0),
    "gt_": lambda t, m, x: t.add_(x).gt_(0.1),
    "lerp_": lambda t, m, x: t.lerp_(x, 0.5),
    "two views at once": lambda t, m, x: (t[0].add_(x[1]), t.mul_(2.0), t[0].add_(1.0)),
}

VIEWS: dict[str, Callable[[Tensor, Cases, Tensor], object]] = {
    "view": lambda t, m, x: t.view(-1)[3:].add_(x.sum()),
    "view of views": lambda t, m, x: t.t().unsqueeze(0)[0].diagonal().mul_(2.0).add_(x[0, 0]),
    "reshape": lambda t, m, x: t.reshape(-1).add_(1.0),
    "flatten": lambda t, m, x: t.flatten().add_(1.0),
    "contiguous": lambda t, m, x: t.contiguous().add_(x),
    "to": lambda t, m, x: t.to(torch.float32).add_(x),
    "as_strided": lambda t, m, x: torch.as_strided(t, (2,), (9,)).add_(x.sum()),
    "split": lambda t, m, x: t.split(4, 1)[1].add_(x[:, :4]),
    "chunk": lambda t, m, x: t.chunk(2, 1)[0].sub_(x[:, 4:]),
    "unsafe_chunk": lambda t, m, x: torch.unsafe_chunk(t, 2, 1)[0].add_(1.0),
    "unsafe_split": lambda t, m, x: t.unsafe_split(4, 1)[0].add_(1.0),
    "hsplit": lambda t, m, x: torch.hsplit(t, 2)[1].add_(x[:, 4:]),
    "dsplit": lambda t, m, x: torch.dsplit(t.unsqueeze(0), 2)[0].add_(2.0),
    "tensor_split": lambda t, m, x: torch.tensor_split(t, 2, 1)[1].add_(x[:, 4:]),
    "unbind": _parts,
    "alias": lambda t, m, x: torch.ops.aten.alias(t).add_(x),
    "detach": lambda t, m, x: t.detach().add_(x),
    "data": lambda t, m, x: t.data.add_(x),
    "einsum": lambda t, m, x: torch.einsum("ab->ba", t).add_(x.t()),
    "movedim": lambda t, m, x: t.movedim(0, 1).add_(x.t()),
    "permute": lambda t, m, x: t.permute(1, 0).add_(x.t()),
    "T": lambda t, m, x: t.T.add_(x.t()),
    "select": lambda t, m, x: t.select(1, 2).add_(5.0),
    "narrow": lambda t, m, x: t.narrow(1, 2, 3).add_(5.0),
    "squeeze": lambda t, m, x: t.unsqueeze(0).squeeze().add_(5.0),
    "expand of one column": lambda t, m, x: t[:, :1].expand(3, 1).add_(5.0),
    "unfold": lambda t, m, x: t.unfold(1, 2, 2).add_(1.0),
    "unflatten": lambda t, m, x: t.unflatten(1, (4, 2))[:, 1].add_(1.0),
    "complex": lambda t, m, x: torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (4, 2)))).add_(1.0),
    "imag": lambda t, m, x: torch.view_as_complex(t.unflatten(-1, (4, 2))).imag.add_(1.0),
    "broadcast_tensors": lambda t, m, x: torch.broadcast_tensors(t, x)[0].add_(x),
}  # fmt: skip


def _case(made: Callable[[Cases, Tensor], Tensor], written: Callable[[Tensor, Cases, Tensor], object]) -> Callable:
    def case(m: Cases, x: Tensor) -> Tensor:
        t = made(m, x)
        written(t, m, x)
        return t + 0

    return case


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("written", ["+=", "setitem", "index_put_"])
def test_what_is_made_in_each_call_is_new_in_each_call(written, backend):
    check(Cases({name: _case(made, WRITTEN[written]) for name, made in MADE.items()}).eval(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("made", ["zeros", "clone of a buffer"])
def test_writes_do_not_last(made, backend):
    check(Cases({name: _case(MADE[made], written) for name, written in WRITTEN.items()}).eval(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("made", ["zeros", "clone of a buffer"])
def test_writes_through_views_do_not_last(made, backend):
    check(Cases({name: _case(MADE[made], written) for name, written in VIEWS.items()}).eval(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_through_views_of_values_are_seen_by_their_bases(backend):
    """Of what an op made of the input, and of what a quantized layer made."""
    check(Cases({name: _case(lambda m, x: torch.sin(x), written) for name, written in VIEWS.items()}).eval(), backend)
    layers = {name: _case(lambda m, x: m.linear(x), written) for name, written in VIEWS.items()}
    check(Cases(layers).eval(), backend, tolerance=0.2)
