"""LSTM, GRU, RNN and their cells with dynamic int8 products, as in ``eager.recurrent``.

They take plain batches, no ``PackedSequence``.
"""

# ruff: noqa: RUF012, SIM113, UP006, UP035, UP045 (TorchScript reads this code)

from collections.abc import Mapping
from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from ..qparams import QParams
from .linear import DynamicLinear

_LSTM, _GRU, _TANH, _RELU = range(4)


def linear_of(module: nn.Module, name: str, bias_name: Optional[str], levels: int) -> DynamicLinear:
    """One weight matrix of a converted recurrent module, with its bias."""
    bias = None if bias_name is None else module._parameters[bias_name]
    int8, scale = module._buffers[f"{name}_int8"], module._buffers[f"{name}_scale"]
    assert int8 is not None and scale is not None
    return DynamicLinear(int8, scale, bias, QParams(1.0, 0), None, levels=levels)


def recurrent(module: nn.Module, names: Mapping[str, Optional[str]], levels: int) -> nn.Module:
    """The scriptable form of a converted recurrent module or cell.

    Args:
        module: the converted module.
        names: its weight matrices and their biases.
        levels: 255, or 127 for 7 bits.
    """
    linears = {name: linear_of(module, name, bias, levels) for name, bias in names.items()}
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        kind = _LSTM
    elif isinstance(module, (nn.GRU, nn.GRUCell)):
        kind = _GRU
    else:
        kind = _RELU if module.nonlinearity == "relu" else _TANH
    if isinstance(module, nn.RNNCellBase):
        return RecurrentCell(_Step(kind, linears["weight_hh"], None), linears["weight_ih"], module.hidden_size)
    assert isinstance(module, nn.RNNBase)
    suffixes = [name.removeprefix("weight_ih") for name in names if name.startswith("weight_ih")]
    directions = [
        _Direction(_Step(kind, linears[f"weight_hh{s}"], linears.get(f"weight_hr{s}")), linears[f"weight_ih{s}"],
                   s.endswith("_reverse"))
        for s in suffixes
    ]  # fmt: skip
    return Recurrent(directions, module)


class _Step(nn.Module):
    """One step of one layer in one direction."""

    __constants__ = ["kind", "projects"]

    def __init__(self, kind: int, hidden: DynamicLinear, projection: Optional[DynamicLinear]) -> None:
        super().__init__()
        self.kind, self.hidden, self.projects = kind, hidden, projection is not None
        self.projection = nn.Identity() if projection is None else projection

    def forward(self, gates: Tensor, h: Tensor, c: Tensor) -> Tuple[Tensor, Tensor]:
        hidden = self.hidden(h)
        if self.kind == 0:
            i, f, g, o = (gates + hidden).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if self.projects:
                h = self.projection(h)
            return h, c
        if self.kind == 1:
            reset, update, new = gates.chunk(3, 1)
            hidden_reset, hidden_update, hidden_new = hidden.chunk(3, 1)
            new = torch.tanh(new + (reset + hidden_reset).sigmoid() * hidden_new)
            return torch.lerp(new, h, (update + hidden_update).sigmoid()), c
        summed = gates + hidden
        return (summed.tanh() if self.kind == 2 else summed.relu()), c


class _Direction(nn.Module):
    """All steps of one layer in one direction."""

    __constants__ = ["reverse"]

    def __init__(self, step: _Step, input: DynamicLinear, reverse: bool) -> None:
        super().__init__()
        self.step, self.input, self.reverse = step, input, reverse

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """``[steps, batch, features]`` -> ``[steps, batch, size]`` and the last state."""
        gates = self.input(x)
        outputs = []
        steps = x.size(0)
        for t in range(steps):
            at = steps - 1 - t if self.reverse else t
            h, c = self.step(gates[at], h, c)
            outputs.append(h)
        if self.reverse:
            outputs.reverse()
        return torch.stack(outputs), h, c


class Recurrent(nn.Module):
    """An LSTM, GRU or RNN: the output, and the last states (the second is empty but for LSTM)."""

    __constants__ = ["batch_first", "directions", "depth", "state_size", "cell_size", "features"]

    def __init__(self, directions: list, module: nn.RNNBase) -> None:
        super().__init__()
        self.layers = nn.ModuleList(directions)
        self.batch_first, self.directions = module.batch_first, 2 if module.bidirectional else 1
        self.depth, self.features = len(directions), module.input_size
        self.state_size, self.cell_size = module.proj_size or module.hidden_size, module.hidden_size

    def forward(self, x: Tensor, h0: Optional[Tensor], c0: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
        batched = x.dim() == 3
        assert batched or x.dim() == 2, "dbrq: a recurrent layer takes 2 or 3 dimensions"
        assert x.size(-1) == self.features and x.numel() > 0, "dbrq: a recurrent layer got no values, or other features"
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        batch = x.size(1)
        h = torch.zeros([self.depth, batch, self.state_size]) if h0 is None else (h0 if batched else h0.unsqueeze(1))
        c = torch.zeros([self.depth, batch, self.cell_size]) if c0 is None else (c0 if batched else c0.unsqueeze(1))
        assert list(h.size()) == [self.depth, batch, self.state_size], "dbrq: an initial state of another shape"
        assert list(c.size()) == [self.depth, batch, self.cell_size], "dbrq: an initial state of another shape"
        states, cells, outputs = [x][1:], [x][1:], [x][1:]
        number = 0
        for layer in self.layers:
            output, last, cell = layer(x, h[number], c[number])
            states.append(last)
            cells.append(cell)
            outputs.append(output)
            number += 1
            if number % self.directions == 0:
                x = torch.cat(outputs, 2)
                outputs = [x][1:]
        h, c = torch.stack(states), torch.stack(cells)
        if not batched:
            return x.squeeze(1), h.squeeze(1), c.squeeze(1)
        return (x.transpose(0, 1) if self.batch_first else x), h, c


class RecurrentCell(nn.Module):
    """An LSTMCell, GRUCell or RNNCell: the next states (the second means nothing but for LSTM)."""

    __constants__ = ["size"]

    def __init__(self, step: _Step, input: DynamicLinear, size: int) -> None:
        super().__init__()
        self.step, self.input, self.size = step, input, size

    def forward(self, x: Tensor, h0: Optional[Tensor], c0: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        assert x.dim() == 1 or x.dim() == 2, "dbrq: a recurrent cell takes 1 or 2 dimensions"
        rows = x if x.dim() == 2 else x.unsqueeze(0)
        h = torch.zeros([rows.size(0), self.size]) if h0 is None else h0.reshape([-1, self.size])
        c = torch.zeros([rows.size(0), self.size]) if c0 is None else c0.reshape([-1, self.size])
        assert h.size(0) == rows.size(0) and c.size(0) == rows.size(0), "dbrq: an initial state of another shape"
        h, c = self.step(self.input(rows), h, c)
        return (h, c) if x.dim() == 2 else (h.squeeze(0), c.squeeze(0))
