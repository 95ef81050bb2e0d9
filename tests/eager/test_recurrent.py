"""Recurrent layers in int8 against the float module, and against the same recurrence with fake-quantized values."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, per_channel_dynamic_qconfig
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import dbrq
from dbrq import kernels
from dbrq.eager import recurrent
from dbrq.eager.recurrent import recurrent_weights, run_recurrent
from dbrq.errors import KernelInputError
from dbrq.kernels import PackedLinear
from tests.helpers.cases import by_name
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run

INPUT, HIDDEN, STEPS, BATCH = 11, 16, 7, 3
LENGTHS = [2, 7, 4]
SEQUENCES = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS = {"lstm_cell": nn.LSTMCell, "gru_cell": nn.GRUCell, "rnn_cell": nn.RNNCell}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[False, True], ids=["8bit", "7bit"])
def reduce_range(request: pytest.FixtureRequest) -> bool:
    return request.param or not kernels.has_exact_int8_dot()


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax(1) / 127.5).clamp_min(torch.finfo(torch.float32).eps)
    return kernels.quantize_weight(weight, scale, 0, -128, 127), scale


def pack(module: nn.Module) -> dict[str, PackedLinear]:
    """Packs the weights of ``module``, then spoils them: nothing may read the float weights afterwards."""
    packed = {}
    for name, bias in recurrent_weights(module):
        weight, scale = int8_weight(getattr(module, name).detach())
        packed[name] = PackedLinear(weight, scale, None if bias is None else getattr(module, bias).detach().clone())
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))
    return packed


# The reference: the textbook recurrence in float, one sequence element at a time, over fake-quantized operands.


def fake_quantize(x: Tensor, reduce_range: bool) -> Tensor:
    qparams = kernels.dynamic_qparams(x, reduce_range)
    return kernels.dequantize(kernels.quantize(x, qparams), qparams)


class Reference:
    """``module`` over quantize-dequantized weights and activations; made before ``pack`` spoils the float weights."""

    def __init__(self, module: nn.Module, reduce_range: bool) -> None:
        self.module, self.reduce_range = module, reduce_range
        self.weights: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, bias in recurrent_weights(module):
            weight, scale = int8_weight(getattr(module, name).detach())
            b = None if bias is None else getattr(module, bias).detach().clone()
            self.weights[name] = (weight * scale[:, None], b)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[name]
        return F.linear(fake_quantize(x, self.reduce_range), weight, bias)

    def step(self, x: Tensor, state: list[Tensor], suffix: str) -> list[Tensor]:
        """``x`` is the input projection ``[batch, gates]``."""
        h = state[0]
        y = self.linear(f"weight_hh{suffix}", h)
        if isinstance(self.module, (nn.LSTM, nn.LSTMCell)):
            i, f, g, o = (x + y).chunk(4, 1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            return [self.linear(f"weight_hr{suffix}", h) if f"weight_hr{suffix}" in self.weights else h, c]
        if isinstance(self.module, (nn.GRU, nn.GRUCell)):
            (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), y.chunk(3, 1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            return [(1 - z) * torch.tanh(xn + r * hn) + z * h]
        return [torch.relu(x + y) if self.module.nonlinearity == "relu" else torch.tanh(x + y)]

    def sequence(self, rows: Tensor, state: list[Tensor], sizes: list[int]) -> tuple[Tensor, list[Tensor]]:
        """``rows`` as in a PackedSequence; ``state`` ``[layers * directions, batch, size]``, updated."""
        state = [s.clone() for s in state]
        starts = [0, *itertools.accumulate(sizes)]
        directions = ["", "_reverse"] if self.module.bidirectional else [""]
        for layer in range(self.module.num_layers):
            outputs = []
            for d, direction in enumerate(directions):
                suffix, index = f"_l{layer}{direction}", layer * len(directions) + d
                projected = self.linear(f"weight_ih{suffix}", rows)
                output = torch.empty(len(rows), state[0].shape[2])
                for t in range(len(sizes))[:: -1 if direction else 1]:
                    old = [s[index, : sizes[t]] for s in state]
                    new = self.step(projected[starts[t] : starts[t + 1]], old, suffix)
                    for s, value in zip(state, new, strict=True):
                        s[index, : sizes[t]] = value
                    output[starts[t] : starts[t + 1]] = new[0]
                outputs.append(output)
            rows = torch.cat(outputs, 1)
        return rows, state


def make(op: str, **settings) -> nn.Module:
    return {**SEQUENCES, **CELLS}[op](INPUT, HIDDEN, **settings).eval()


def random_state(module: nn.Module, leading: tuple[int, ...]) -> list[Tensor]:
    sizes = [getattr(module, "proj_size", 0) or HIDDEN]
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        sizes.append(HIDDEN)
    return [torch.rand(*leading, size) * 2 - 1 for size in sizes]


def as_hx(state: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return state[0] if len(state) == 1 else tuple(state)


def as_list(hx: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [hx] if isinstance(hx, Tensor) else list(hx)


def depth(module: nn.RNNBase) -> int:
    return module.num_layers * (2 if module.bidirectional else 1)


def assert_sqnr(got: Tensor, want: Tensor, at_least: float) -> None:
    sqnr = 10 * torch.log10(want.square().sum() / (got - want).square().sum())
    assert sqnr >= at_least, f"{sqnr:.1f} dB"


def assert_same_form(got, want) -> None:
    """Same containers, shapes and dtypes, and no gradient."""
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        assert got.shape == want.shape and got.dtype is torch.float32 and not got.requires_grad
    elif isinstance(want, tuple):
        for g, w in zip(got, want, strict=True):
            if w is not None and not (isinstance(want, PackedSequence) and w.dtype is torch.int64):
                assert_same_form(g, w)


SETTINGS = [
    {},
    {"bias": False},
    {"num_layers": 2},
    {"bidirectional": True},
    {"batch_first": True},
    {"num_layers": 3, "bidirectional": True, "batch_first": True, "dropout": 0.5},
    {"num_layers": 2, "bidirectional": True, "bias": False},
]
CASES = [(op, s) for op in SEQUENCES for s in SETTINGS]
CASES += [("lstm", {**s, "proj_size": 6}) for s in SETTINGS]
CASES += [("rnn", {**s, "nonlinearity": "relu"}) for s in SETTINGS]
all_cases = pytest.mark.parametrize(
    ("op", "settings"), CASES, ids=[f"{op}-" + "-".join(f"{k}={v}" for k, v in s.items()) for op, s in CASES]
)
with_or_without_state = pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])


@all_cases
@with_or_without_state
def test_batch(op: str, settings: dict, given: bool, reduce_range: bool) -> None:
    module = make(op, **settings)
    shape = (BATCH, STEPS, INPUT) if module.batch_first else (STEPS, BATCH, INPUT)
    x, state = torch.randn(shape), random_state(module, (depth(module), BATCH))
    if not given:
        state = [torch.zeros_like(s) for s in state]
    args = (x, as_hx(state)) if given else (x,)
    want, reference = module(*args), Reference(module, reduce_range)
    before = [v.clone() for v in (x, *state)]

    got = run_recurrent(module, pack(module), args, {}, reduce_range)

    assert_same_form(got, want)
    steps_first = x.transpose(0, 1) if module.batch_first else x
    rows, final = reference.sequence(steps_first.reshape(-1, INPUT), state, [BATCH] * STEPS)
    output = rows.view(STEPS, BATCH, -1)
    torch.testing.assert_close(got[0], output.transpose(0, 1) if module.batch_first else output, atol=1e-3, rtol=0)
    torch.testing.assert_close(as_list(got[1]), final, atol=1e-3, rtol=0)
    assert_sqnr(got[0], want[0], 20 if reduce_range else 25)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, *state), strict=True)), "the caller's tensors were changed"


@all_cases
def test_unbatched_input_is_a_batch_of_one(op: str, settings: dict) -> None:
    module = make(op, **settings)
    x, state = torch.randn(STEPS, INPUT), random_state(module, (depth(module),))
    want = module(x, as_hx(state))
    packed = pack(module)
    got = run_recurrent(module, packed, (x, as_hx(state)), {}, False)
    assert_same_form(got, want)
    batch_dim = 0 if module.batch_first else 1
    batch = (x.unsqueeze(batch_dim), as_hx([s.unsqueeze(1) for s in state]))
    output, final = run_recurrent(module, packed, batch, {}, False)
    assert torch.equal(got[0], output.squeeze(batch_dim))
    assert all(torch.equal(a, b.squeeze(1)) for a, b in zip(as_list(got[1]), as_list(final), strict=True))


@all_cases
@with_or_without_state
@pytest.mark.parametrize("sorted_", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequence(op: str, settings: dict, given: bool, sorted_: bool, reduce_range: bool) -> None:
    module = make(op, **settings)
    lengths = sorted(LENGTHS, reverse=True) if sorted_ else LENGTHS
    x = pack_padded_sequence(torch.randn(STEPS, BATCH, INPUT), torch.tensor(lengths), enforce_sorted=sorted_)
    state = random_state(module, (depth(module), BATCH))
    if not given:
        state = [torch.zeros_like(s) for s in state]
    args = (x, as_hx(state)) if given else (x,)
    want, reference = module(*args), Reference(module, reduce_range)

    got = run_recurrent(module, pack(module), args, {}, reduce_range)

    assert_same_form(got, want)
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert getattr(got[0], name) is getattr(x, name)
    order = torch.arange(BATCH) if x.sorted_indices is None else x.sorted_indices
    rows, final = reference.sequence(x.data, [s[:, order] for s in state], x.batch_sizes.tolist())
    torch.testing.assert_close(got[0].data, rows, atol=1e-3, rtol=0)
    torch.testing.assert_close([s[:, order] for s in as_list(got[1])], final, atol=1e-3, rtol=0)
    assert_sqnr(got[0].data, want[0].data, 20 if reduce_range else 25)
    for g, w in zip(as_list(got[1]), as_list(want[1]), strict=True):  # in the caller's order
        assert_sqnr(g, w, 20 if reduce_range else 25)


def test_packed_sequence_of_equal_lengths_equals_the_batch() -> None:
    module = make("lstm", bidirectional=True, num_layers=2)
    packed, x = pack(module), torch.randn(STEPS, BATCH, INPUT)
    output, final = run_recurrent(module, packed, (x,), {}, False)
    sequence, final2 = run_recurrent(module, packed, (pack_padded_sequence(x, [STEPS] * BATCH),), {}, False)
    assert torch.equal(pad_packed_sequence(sequence)[0], output)
    assert all(torch.equal(a, b) for a, b in zip(final, final2, strict=True))


CELL_CASES = [(op, {"bias": bias}) for op in CELLS for bias in (True, False)] + [("rnn_cell", {"nonlinearity": "relu"})]


@pytest.mark.parametrize(("op", "settings"), CELL_CASES, ids=str)
@with_or_without_state
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "single"])
def test_cell(op: str, settings: dict, given: bool, batched: bool, reduce_range: bool) -> None:
    module = make(op, **settings)
    leading = (BATCH,) if batched else ()
    x, state = torch.randn(*leading, INPUT), random_state(module, leading)
    if not given:
        state = [torch.zeros_like(s) for s in state]
    args = (x, as_hx(state)) if given else (x,)
    want, reference = module(*args), Reference(module, reduce_range)
    before = [v.clone() for v in (x, *state)]

    got = run_recurrent(module, pack(module), args, {}, reduce_range)

    assert_same_form(got, want)
    projected = reference.linear("weight_ih", x.view(-1, INPUT))
    new = reference.step(projected, [s.view(-1, HIDDEN) for s in state], "")
    for g, n, w in zip(as_list(got), new, as_list(want), strict=True):
        torch.testing.assert_close(g, n.view(*leading, -1), atol=1e-3, rtol=0)
        assert_sqnr(g, w, 20 if reduce_range else 25)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, *state), strict=True)), "the caller's tensors were changed"


@pytest.mark.parametrize("op", [*SEQUENCES, *CELLS])
def test_weights_are_those_of_the_module(op: str) -> None:
    settings = {} if op in CELLS else {"num_layers": 2, "bidirectional": True}
    for bias in (True, False):
        module = make(op, bias=bias, **settings)
        names = {name for pair in recurrent_weights(module) for name in pair if name is not None}
        assert names == dict(module.named_parameters()).keys()
    module = nn.LSTM(2, 4, proj_size=3)
    assert recurrent_weights(module) == [
        ("weight_ih_l0", "bias_ih_l0"), ("weight_hh_l0", "bias_hh_l0"), ("weight_hr_l0", None),
    ]  # fmt: skip


def test_arguments_by_name() -> None:
    module = make("gru")
    packed, x, h = pack(module), torch.randn(STEPS, BATCH, INPUT), torch.rand(1, BATCH, HIDDEN)
    want = run_recurrent(module, packed, (x, h), {}, False)
    got = run_recurrent(module, packed, (), {"hx": h, "input": x}, False)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("op", [*SEQUENCES, *CELLS])
def test_empty_batch(op: str) -> None:
    module = make(op)
    x = torch.zeros(0, INPUT) if op in CELLS else torch.zeros(STEPS, 0, INPUT)
    want = module(x)
    assert_same_form(run_recurrent(module, pack(module), (x,), {}, False), want)


def test_no_gradient_and_no_alias_even_where_the_caller_wants_gradients() -> None:
    module = make("lstm")
    x, h, c = (torch.rand(s, requires_grad=True) for s in ((1, BATCH, INPUT), (1, BATCH, HIDDEN), (1, BATCH, HIDDEN)))
    with torch.enable_grad():
        output, (h1, c1) = run_recurrent(module, pack(module), (x, (h, c)), {}, False)
        assert torch.is_grad_enabled()
    assert not any(v.requires_grad for v in (output, h1, c1))
    h1.fill_(9.0)
    assert (output != 9.0).all()


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_integers_are_those_of_the_kernels(layout: str, reduce_range: bool) -> None:
    x = torch.cat([torch.randn(4, 50), (torch.arange(50.0) - 20).view(1, -1) / 10])
    x = x if layout == "rows" else x.t()
    q, qparams = recurrent._quantize(x, reduce_range)
    assert qparams == kernels.dynamic_qparams(x, reduce_range)
    assert q.dtype is torch.uint8 and torch.equal(q, kernels.quantize(x, qparams))


X = torch.zeros(STEPS, BATCH, INPUT)
H = torch.zeros(1, BATCH, HIDDEN)
BAD = {
    "no tensor": ("gru", ("text",)),
    "rank": ("gru", (torch.zeros(INPUT),)),
    "features": ("lstm", (torch.zeros(STEPS, BATCH, INPUT + 1),)),
    "dtype": ("lstm", (X.double(),)),
    "no steps": ("rnn", (torch.zeros(0, BATCH, INPUT),)),
    "state of another batch": ("gru", (X, torch.zeros(1, BATCH + 1, HIDDEN))),
    "state of another depth": ("gru", (X, torch.zeros(2, BATCH, HIDDEN))),
    "state without batch": ("gru", (X, H[:, 0])),
    "state with batch": ("gru", (X[:, 0], H)),
    "state dtype": ("gru", (X, H.double())),
    "one state for lstm": ("lstm", (X, H)),
    "three states for lstm": ("lstm", (X, (H, H, H))),
    "two states for gru": ("gru", (X, (H, H))),
    "wrong cell state": ("lstm", (X, (H, H[..., 1:]))),
    "packed features": ("lstm", (pack_padded_sequence(X[..., 1:], [STEPS] * BATCH),)),
    "packed state": ("lstm", (pack_padded_sequence(X, [STEPS] * BATCH), (H[:, 1:], H[:, 1:]))),
    "cell rank": ("gru_cell", (X,)),
    "cell features": ("lstm_cell", (X[0, :, 1:],)),
    "cell state": ("rnn_cell", (X[0], H)),
}


@pytest.mark.parametrize(("op", "args"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_what_was_expected(op: str, args: tuple) -> None:
    module = make(op)
    with pytest.raises(KernelInputError) as error:
        run_recurrent(module, pack(module), args, {}, False)
    assert error.value.op == op and error.value.expected is not None and error.value.got is not None


# Modules in dynamic mode


@by_name(
    {
        "lstm": lambda: nn.LSTM(12, 16, num_layers=2, batch_first=True),
        "bidirectional": lambda: nn.LSTM(12, 16, bidirectional=True, batch_first=True),
        "gru": lambda: nn.GRU(12, 16, batch_first=True),
        "rnn": lambda: nn.RNN(12, 16, batch_first=True),
    },
    "make",
)
def test_recurrent_in_dynamic_mode(make):
    model, x = nn.Sequential(make()), torch.randn(4, 6, 12)
    mapping = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    converted = convert(model, x, mapping).quantized
    (expected, _), (got, _) = run(model, x), run(converted, x)
    assert dbrq.report(converted).rows[0].precision == "int8"
    assert sqnr(expected, got) > 30


def test_lstm_keeps_its_interface():
    def forward(m, x, h, c):
        out, (hn, cn) = m.lstm(input=x, hx=(h, c))
        return {"out": out, "state": (hn, cn)}

    model = Call(forward, lstm=nn.LSTM(12, 16))
    inputs = (torch.randn(6, 4, 12), torch.randn(1, 4, 16), torch.randn(1, 4, 16))
    converted = convert(model, inputs, QConfigMapping().set_global(default_dynamic_qconfig)).quantized
    got, expected = run(converted, inputs), run(model, inputs)
    assert sqnr(expected["out"], got["out"]) > 25
    assert sqnr(expected["state"][1], got["state"][1]) > 25
