"""LSTM, GRU, RNN and their cells in int8, in dynamic mode: every activation gets its qparams from its own values.

The input projections of all time steps are one int8 linear call per layer and direction. The recurrent projection is
one call per step, on the hidden state quantized afresh, as ``torch.ao.nn.quantized.dynamic`` does it. Gates stay in
float32.

Inside, every input has the form of a ``PackedSequence``: the steps of all sequences in one matrix ``[rows, features]``
and the number of sequences that are still running at each step. A plain batch is the case where no sequence ends early.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import kernels
from ..errors import KernelInputError
from ..kernels import PackedLinear, QParams
from ..kernels.qparams import ROUND
from ..mappings import leaf_row

State = tuple[Tensor, ...]
"""``(h,)`` or, for LSTM, ``(h, c)``."""
Step = Callable[[Tensor, State], State]
"""Input projection ``[batch, gates]``, which it may overwrite, and state ``[batch, size]`` -> the next state."""


def recurrent_weights(module: nn.Module) -> list[tuple[str, str | None]]:
    """``(weight name, bias name or None)`` of each weight matrix of ``module``, in the order the layers run.

    >>> recurrent_weights(nn.GRUCell(3, 4))
    [('weight_ih', 'bias_ih'), ('weight_hh', 'bias_hh')]
    """
    names: list[tuple[str, str | None]] = []
    for suffix in _suffixes(module):
        for part in ("ih", "hh"):
            names.append((f"weight_{part}{suffix}", f"bias_{part}{suffix}" if module.bias else None))
        if getattr(module, "proj_size", 0):
            names.append((f"weight_hr{suffix}", None))
    return names


@torch.no_grad()
def run_recurrent(
    module: nn.Module, packed: Mapping[str, PackedLinear], args: tuple, kwargs: Mapping[str, Any], reduce_range: bool
) -> Any:
    """What ``module(*args, **kwargs)`` returns in eval mode, computed with the int8 weights in ``packed``.

    Args:
        module: an ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` or one of their cells; only its settings are read.
        packed: each weight name of :func:`recurrent_weights` -> int8 ``[out, in]``, packed with its bias.
        args, kwargs: as for ``module.forward``: a float32 tensor or ``PackedSequence``, and perhaps the initial state.
        reduce_range: quantize activations to 7 bits, for CPUs whose int8 products saturate.

    Returns:
        float32, never with a gradient, in the containers that ``module.forward`` uses.

    Raises:
        KernelInputError: the input or the initial state has a rank, size or dtype that ``module`` does not take.
    """
    x, hx = _bind(*args, **kwargs)
    if isinstance(module, nn.RNNCellBase):
        return _run_cell(module, packed, x, hx, reduce_range)
    assert isinstance(module, nn.RNNBase)
    if isinstance(x, PackedSequence):
        return _run_packed_sequence(module, packed, x, hx, reduce_range)
    return _run_batch(module, packed, x, hx, reduce_range)


def _bind(input: Any, hx: Any = None) -> tuple[Any, Any]:
    """The signature that all six classes share."""
    return input, hx


def _run_cell(
    module: nn.RNNCellBase, packed: Mapping[str, PackedLinear], x: Tensor, hx: Any, reduce_range: bool
) -> Tensor | State:
    """One step, of ``[batch, features]`` or ``[features]``."""
    _check_input(module, x, ranks=(1, 2))
    state = _initial_state(module, x.shape[:-1], hx)
    batched = x.dim() == 2
    if not batched:
        x, state = x.unsqueeze(0), tuple(s.unsqueeze(0) for s in state)
    if len(x):
        gates = packed["weight_ih"](*_quantize(x, reduce_range))
        state = _make_step(module, packed, "", reduce_range)(gates, state)
    return _as_returned(state if batched else tuple(s.squeeze(0) for s in state))


def _run_batch(
    module: nn.RNNBase, packed: Mapping[str, PackedLinear], x: Tensor, hx: Any, reduce_range: bool
) -> tuple[Tensor, Tensor | State]:
    """A tensor ``[steps, batch, features]``, ``[batch, steps, features]`` if batch_first, or ``[steps, features]``."""
    _check_input(module, x, ranks=(2, 3))
    batched = x.dim() == 3
    if not batched:
        x = x.unsqueeze(1)
    elif module.batch_first:
        x = x.transpose(0, 1)
    steps, batch, features = x.shape
    if not steps:
        raise KernelInputError("an empty sequence has no result", op=_op(module), expected="at least one step", got=0)
    depth = len(_suffixes(module))
    state = _initial_state(module, (depth, batch) if batched else (depth,), hx)
    if not batched:
        state = tuple(s.unsqueeze(1) for s in state)
    rows, final = _run_layers(module, packed, x.reshape(-1, features), state, [batch] * steps, reduce_range)
    if not batched:
        return rows, _as_returned(tuple(s.squeeze(1) for s in final))
    output = rows.view(steps, batch, rows.shape[1])
    return output.transpose(0, 1) if module.batch_first else output, _as_returned(final)


def _run_packed_sequence(
    module: nn.RNNBase, packed: Mapping[str, PackedLinear], x: PackedSequence, hx: Any, reduce_range: bool
) -> tuple[PackedSequence, Tensor | State]:
    """Rows are sorted by length, longest first; the states that come and go are in the caller's order."""
    rows, batch_sizes, sort, unsort = x
    _check_input(module, rows, ranks=(2,))
    sizes = batch_sizes.tolist()
    state = _initial_state(module, (len(_suffixes(module)), sizes[0]), hx)
    if sort is not None:
        state = tuple(s.index_select(1, sort) for s in state)
    output, final = _run_layers(module, packed, rows, state, sizes, reduce_range)
    if unsort is not None:
        final = tuple(s.index_select(1, unsort) for s in final)
    return PackedSequence(output, batch_sizes, sort, unsort), _as_returned(final)


def _run_layers(
    module: nn.RNNBase,
    packed: Mapping[str, PackedLinear],
    rows: Tensor,
    state: State,
    sizes: list[int],
    reduce_range: bool,
) -> tuple[Tensor, State]:
    """``[rows, features]`` -> ``[rows, directions * size]``; states, old and new, ``[depth, batch, size]``."""
    directions, suffixes = _directions(module), _suffixes(module)
    if not len(rows):  # a batch of none, which the kernels do not take
        return rows.new_zeros(0, directions * state[0].shape[2]), tuple(s.clone() for s in state)
    finals: list[State] = []
    for first in range(0, len(suffixes), directions):
        q, qparams = _quantize(rows, reduce_range)  # both directions read the same integers
        outputs = []
        for suffix in suffixes[first : first + directions]:
            step = _make_step(module, packed, suffix, reduce_range)
            gates = packed[f"weight_ih{suffix}"](q, qparams)
            initial = tuple(s[len(finals)] for s in state)
            output, final = _run_direction(step, gates, initial, sizes, reverse=suffix.endswith("_reverse"))
            outputs.append(output)
            finals.append(final)
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return rows, tuple(torch.stack(s) for s in zip(*finals, strict=True))


def _run_direction(
    step: Step, gates: Tensor, initial: State, sizes: Sequence[int], reverse: bool
) -> tuple[Tensor, State]:
    """Runs all steps of one layer in one direction.

    Forward, sequences leave as they end; backward, they join, shorter ones later, each with its initial state.
    """
    per_step = list(zip(sizes, gates.split(list(sizes)), strict=True))
    if reverse:
        per_step.reverse()
    running = per_step[0][0]
    state = tuple(s[:running] for s in initial)
    outputs: list[Tensor] = []
    ended: list[State] = []
    for size, projected in per_step:
        if size < running:
            ended.append(tuple(s[size:] for s in state))
            state = tuple(s[:size] for s in state)
        elif size > running:
            state = tuple(torch.cat((s, first[running:size])) for s, first in zip(state, initial, strict=True))
        running = size
        state = step(projected, state)
        outputs.append(state[0])
    if reverse:
        outputs.reverse()
    final = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs), final


def _make_step(
    module: nn.RNNBase | nn.RNNCellBase, packed: Mapping[str, PackedLinear], suffix: str, reduce_range: bool
) -> Step:
    """The recurrence of one layer and direction, for steps that hold at least one sequence."""
    hidden = packed[f"weight_hh{suffix}"]
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return _lstm_step(hidden, packed.get(f"weight_hr{suffix}"), reduce_range)
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return _gru_step(hidden, reduce_range)
    return _rnn_step(hidden, module.nonlinearity == "relu", reduce_range)


def _lstm_step(hidden: PackedLinear, projection: PackedLinear | None, reduce_range: bool) -> Step:
    def step(gates: Tensor, state: State) -> State:
        h, c = state
        hidden.add_(*_quantize(h, reduce_range), gates, relu=False)
        i, f, g, o = gates.chunk(4, 1)
        g = g.tanh()
        gates.sigmoid_()  # g's share is wasted; it costs less than two more calls
        c = torch.mul(f, c).addcmul_(i, g)
        h = torch.tanh(c).mul_(o)
        if projection is not None:
            h = projection(*_quantize(h, reduce_range))
        return h, c

    return step


def _gru_step(hidden: PackedLinear, reduce_range: bool) -> Step:
    def step(gates: Tensor, state: State) -> State:
        (h,) = state
        size = h.shape[1]
        # The reset gate multiplies the hidden projection alone, so the two projections may not be summed beforehand.
        from_hidden = hidden(*_quantize(h, reduce_range))
        reset_update, new_hidden = from_hidden.split([2 * size, size], 1)
        first, new = gates.split([2 * size, size], 1)
        reset, update = reset_update.add_(first).sigmoid_().chunk(2, 1)
        new = torch.addcmul(new, reset, new_hidden).tanh_()
        return (torch.lerp(new, h, update),)

    return step


def _rnn_step(hidden: PackedLinear, relu: bool, reduce_range: bool) -> Step:
    def step(gates: Tensor, state: State) -> State:
        summed = hidden.add_(*_quantize(state[0], reduce_range), gates, relu)
        return (summed if relu else summed.tanh_(),)

    return step


def _quantize(x: Tensor, reduce_range: bool) -> tuple[Tensor, QParams]:
    """float32 -> uint8 and qparams from its own range: the integers that ``kernels.quantize`` gives.

    Those qparams serve once, so the constants that ``kernels.quantize`` keeps with them would cost more than they save;
    ``torch.rsub`` takes plain numbers.
    """
    qparams = kernels.dynamic_qparams(x, reduce_range)
    shifted = torch.rsub(x, ROUND + qparams.zero_point, alpha=-1.0 / qparams.scale)
    shifted.clamp_(ROUND + qparams.quant_min, ROUND + qparams.quant_max)
    return shifted.view(torch.int32).to(torch.uint8), qparams


def _op(module: nn.Module) -> str:
    """The op's name in the op table."""
    known = leaf_row(module)
    return known[0].name if known else type(module).__name__


def _directions(module: nn.RNNBase) -> int:
    return 2 if module.bidirectional else 1


def _suffixes(module: nn.Module) -> list[str]:
    """What follows ``weight_ih`` in the parameter names, for each layer and direction in the order of the states."""
    if not isinstance(module, nn.RNNBase):
        return [""]  # a cell
    directions = ("", "_reverse")[: _directions(module)]
    return [f"_l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


def _as_returned(state: State) -> Tensor | State:
    """Only LSTM has two states, and only it returns a tuple."""
    return state[0] if len(state) == 1 else state


def _check_input(module: nn.RNNBase | nn.RNNCellBase, x: Any, ranks: tuple[int, ...]) -> None:
    expected = f"float32 of rank {' or '.join(map(str, ranks))}, last size {module.input_size}"
    if not isinstance(x, Tensor):
        raise KernelInputError("the input is no tensor", op=_op(module), expected=expected, got=type(x).__name__)
    if x.dim() not in ranks or x.shape[-1] != module.input_size or x.dtype is not torch.float32:
        raise KernelInputError("cannot take this input", op=_op(module), expected=expected, got=_describe(x))


def _initial_state(module: nn.RNNBase | nn.RNNCellBase, leading: Sequence[int], hx: Any) -> State:
    """The caller's initial state, checked, or zeros: float32 ``[*leading, size]``, one or (LSTM) two of them."""
    shapes = [(*leading, getattr(module, "proj_size", 0) or module.hidden_size)]
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        shapes.append((*leading, module.hidden_size))
    if hx is None:
        return tuple(torch.zeros(shape) for shape in shapes)
    state = (hx,) if len(shapes) == 1 else hx
    fits = isinstance(state, (tuple, list)) and len(state) == len(shapes)
    for s, shape in zip(state, shapes, strict=True) if fits else ():
        fits = fits and isinstance(s, Tensor) and s.shape == shape and s.dtype is torch.float32
    if not fits:
        raise KernelInputError(
            "cannot take this initial state",
            op=_op(module),
            expected=" and ".join(f"float32 {shape}" for shape in shapes),
            got=" and ".join(map(_describe, hx)) if isinstance(hx, (tuple, list)) else _describe(hx),
        )
    return tuple(state)


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
