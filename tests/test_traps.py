"""CONFORMANCE.md, section 5: traps that others met. Each is a value check; the comment says what used to go wrong."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers import Between, Call, assert_matches, assert_precision, convert, fake_quantized, rows, run, sqnr


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 4, 8, 8))


def qparams(model: nn.Module) -> dict:
    token = state_of(model).token
    return {key: state.qparams(key) for state in token.states.values() for key in state.slots}


def recorded(model: nn.Module, name: str) -> list:
    return [op for op in state_of(model).token.record.ops if op.op == name]


# A sum whose operand is scaled


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: x + m.conv(x) * 10,
        lambda m, x: m.conv(x) * 10 + x,
        lambda m, x: torch.add(x, m.conv(x), alpha=10),
        lambda m, x: F.relu(x + m.conv(x) * 10),
        lambda m, x: m.last(x + m.conv(x) * 10),
    ],
)
def test_sum_with_a_scaled_convolution(fn):
    # A pattern matcher that skips the multiplication fuses conv + x.
    model = Call(fn, conv=nn.Conv2d(4, 4, 3, padding=1), last=nn.Conv2d(4, 3, 1))
    x = images()
    converted = assert_matches(model, x, fx=False)
    assert not any("fused into conv" in row.kernel for row in rows(converted, "add"))
    assert sqnr(run(model, x), run(converted, x)) > 25


@pytest.mark.parametrize("alpha", [2, 0.5, -1, 0])
def test_alpha_is_never_lost(alpha):
    model = Call(
        lambda m, x: m.last(torch.add(m.conv(x), m.other(x), alpha=alpha)),
        conv=nn.Conv2d(4, 4, 1),
        other=nn.Conv2d(4, 4, 1),
        last=nn.Conv2d(4, 3, 1),
    )
    assert_matches(model, images(), fx=False)


def test_sum_with_an_operand_that_broadcasts_is_not_fused():
    model = Call(
        lambda m, x: m.last(m.conv(x) + m.gate(x).mean((2, 3), keepdim=True)),
        conv=nn.Conv2d(4, 4, 1),
        gate=nn.Conv2d(4, 4, 1),
        last=nn.Conv2d(4, 3, 1),
    )
    converted = assert_matches(model, images(), fx=False)
    assert not any("fused" in row.kernel for row in rows(converted, "add"))


# Aliases


def read_after_add(m, x):
    a = m.first(x)
    b = m.second(x)
    s = a + b  # the kernel accumulates into one operand, which lives on
    return m.last(s), m.last(b), a


@pytest.mark.parametrize(
    "fn",
    [
        read_after_add,
        lambda m, x: (m.last(x + m.first(x)), x),
        lambda m, x: (m.second(x).add_(m.first(x)), x),
        lambda m, x: (F.relu_(m.first(x)), m.second(x)),
        lambda m, x: [m.last(y.add_(m.first(x))) for y in [m.second(x)]] + [x],
    ],
)
def test_a_value_that_is_still_alive_is_not_overwritten(fn):
    model = Call(fn, first=nn.Conv2d(4, 4, 1), second=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 3, 1))
    x = images()
    before = x.clone()
    converted = assert_matches(model, x, fx=False)
    with torch.no_grad():
        converted(x)
    assert torch.equal(x, before)


def test_a_residual_stream_kept_in_a_list():
    def forward(m, x):
        kept = [x]
        for conv in (m.first, m.second, m.last):
            kept.append(kept[-1] + conv(kept[-1]))
        return sum(kept)

    model = Call(forward, first=nn.Conv2d(4, 4, 1), second=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 4, 1))
    assert_matches(model, images(), fx=False)


def test_in_place_through_a_view_is_seen_by_the_base():
    def forward(m, x):
        y = m.first(x)
        y[:, :2].mul_(2.0)
        return m.last(y)

    model = Call(forward, first=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 3, 1))
    assert_matches(model, images(), fx=False)


# Shapes


def test_reshape_by_the_batch_leaves_the_batch_free():
    model = Call(
        lambda m, x: m.last(m.conv(x).reshape(x.size(0), -1)), conv=nn.Conv2d(4, 4, 1), last=nn.Linear(256, 30)
    )
    converted = assert_matches(model, images(32, 4, 8, 8))
    for batch in (1, 5):
        x = images(batch, 4, 8, 8)
        assert sqnr(run(model, x), run(converted, x)) > 25


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(-1, 256),
        lambda x: x.view(2, 4, 64).view(2, 256),
        lambda x: F.relu(x).view(x.shape[0], -1),
        lambda x: x.view(x.size(0), -1).view(x.size(0), 256),
    ],
)
@pytest.mark.parametrize("fuse", [True, False])
def test_view_after_a_convolution(move, fuse):
    # oneDNN returns channels_last, of which no such view exists; FX graph mode fails here.
    model = Call(lambda m, x: m.last(move(m.conv(x))), conv=nn.Conv2d(4, 4, 3, padding=1), last=nn.Linear(256, 3))
    assert_matches(model, images(), fx=False, fuse=fuse)


@pytest.mark.parametrize(
    "cls, shape",
    [
        (nn.Conv1d, (2, 4, 1)),
        (nn.Conv2d, (2, 4, 1, 1)),
        (nn.Conv3d, (2, 4, 1, 1, 1)),
        (nn.Conv2d, (1, 4, 1, 7)),
        (nn.Conv2d, (1, 4, 7, 1)),
    ],
)
@pytest.mark.parametrize("kernel, padding", [(1, 0), (3, 1)])
def test_one_by_one_inputs(cls, shape, kernel, padding):
    model = nn.Sequential(cls(4, 6, kernel, padding=padding), nn.ReLU(), cls(6, 5, kernel, padding=padding))
    converted = assert_matches(model, torch.randn(shape), fx=False)
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_of_one_output_channel(cls, per_channel):
    # One scale is per-tensor or per-channel; some kernels tell by the count.
    n = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[cls]
    from torch.ao.quantization import (
        QConfig,
        default_observer,
        default_per_channel_weight_observer,
        default_weight_observer,
    )

    weight = default_per_channel_weight_observer if per_channel else default_weight_observer
    qconfig = QConfig(default_observer, weight)
    model = nn.Sequential(cls(4, 1, 3), nn.ReLU(), cls(1, 4, 1), cls(4, 1, 1))
    converted = assert_matches(model, torch.randn(2, 4, *[6] * n), qconfig, fx=False)
    assert dbrq.report(converted).coverage == 1.0


def test_linear_of_one_output_and_of_one_input():
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    converted = assert_matches(model, torch.randn(5, 8))
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize(
    "model, shape",
    [
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)), (4, 8, 8)),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 3, 1)), (4, 8, 8)),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)), (4, 8, 8)),
        (nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)), (8,)),
        (nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 6, 1)), (4, 8)),
        (nn.Sequential(nn.Conv3d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 6, 1)), (4, 4, 4, 4)),
        (
            Call(
                lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1) + 1),
                a=nn.Conv2d(4, 4, 1),
                b=nn.Conv2d(4, 4, 1),
                c=nn.Conv2d(8, 2, 1),
            ),
            (4, 8, 8),
        ),
        (
            Call(
                lambda m, x: m.c(F.relu(m.a(x) + m.b(x))),
                a=nn.Conv2d(4, 4, 1),
                b=nn.Conv2d(4, 4, 1),
                c=nn.Conv2d(4, 2, 1),
            ),
            (4, 8, 8),
        ),
    ],
)
def test_batch_of_none(model, shape):
    converted = convert(model, torch.randn(32, *shape)).quantized
    empty = torch.randn(0, *shape)
    got, expected = run(converted, empty), run(model, empty)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    full = torch.randn(3, *shape)
    assert sqnr(run(model, full), run(converted, full)) > 20, "the next call is as good as ever"


def test_a_batch_of_none_as_the_example():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)).eval()
    prepared = dbrq.prepare(model, torch.randn(0, 4, 8, 8))
    x = images()
    dbrq.calibrate(prepared, [x])
    assert sqnr(run(model, x), run(dbrq.convert(prepared), x)) > 25


# Ranges


@pytest.mark.parametrize("cls, shape", [(nn.Conv2d, (4, 8, 8)), (nn.Linear, (8,))])
@pytest.mark.parametrize("channels", [[0], [0, 3], list(range(6))])
def test_channels_of_zeros_in_a_weight(cls, shape, channels):
    first = cls(4, 6, 3) if cls is nn.Conv2d else cls(8, 6)
    with torch.no_grad():
        first.weight[channels] = 0.0
    last = nn.Conv2d(6, 3, 1) if cls is nn.Conv2d else nn.Linear(6, 3)
    model = nn.Sequential(first, nn.ReLU(), last)
    converted = assert_matches(model, torch.randn(2, *shape), fx=False)
    assert (converted[0].weight_scale > 0).all() and torch.isfinite(converted[0].weight_scale).all()
    assert (converted[0].weight_int8[channels] == 0).all()


def test_tiny_and_huge_channels_side_by_side():
    conv = nn.Conv2d(4, 6, 3)
    with torch.no_grad():
        conv.weight[0] *= 1e-30
        conv.weight[1] *= 1e20
        conv.bias.zero_()
    x = images()
    converted = convert(nn.Sequential(conv), x).quantized
    a, b = run(nn.Sequential(conv), x), run(converted, x)
    assert torch.isfinite(b).all()
    for channel in (1, 2):
        assert sqnr(a[:, channel], b[:, channel]) > 25


@pytest.mark.parametrize("variance", [0.0, 1e-12, 1e12])
@pytest.mark.parametrize("gamma", [0.0, 1.0, -1.0])
def test_batch_norm_with_dead_channels(variance, gamma):
    norm = nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.running_var[1] = variance
        norm.weight[1] = gamma
    model = nn.Sequential(nn.Conv2d(4, 6, 3), norm, nn.ReLU())
    x = images()
    converted = convert(model, x).quantized
    got, expected = run(converted, x), run(model, x)
    assert torch.isfinite(got).all()
    for channel in range(6):
        a, b = expected[:, channel], got[:, channel]
        assert torch.allclose(a, b, atol=0.05 * (a.abs().max().item() + 1e-3))


@pytest.mark.parametrize("value", [0.0, 1.0, -4.0, 1e-20, 1e20])
def test_constant_input(value):
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    x = torch.full((2, 4, 8, 8), value)
    converted = convert(model, x).quantized
    assert all(q.scale > 0 for q in qparams(converted).values())
    got = run(converted, x)
    assert torch.isfinite(got).all()
    assert torch.allclose(got, run(model, x), atol=0.05 * (1 + abs(value)), rtol=0.05)


def test_calibration_on_one_sample():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    x = images(1, 4, 8, 8)
    converted = assert_matches(model, x)
    other = images(8, 4, 8, 8)
    assert sqnr(run(model, other), run(converted, other)) > 15


def test_calibration_on_one_number():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    converted = convert(model, torch.tensor([[0.5]])).quantized
    assert torch.allclose(run(converted, torch.tensor([[0.5]])), run(model, torch.tensor([[0.5]])), atol=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_in_calibration_names_the_op(value):
    model = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)).eval()
    prepared = dbrq.prepare(model, images())
    bad = images()
    bad[0, 0, 0, 0] = value
    with pytest.raises(dbrq.CalibrationError) as error:
        dbrq.calibrate(prepared, [bad])
    assert error.value.op == "0"
    x = images()
    dbrq.calibrate(prepared, [x])
    assert sqnr(run(model, x), run(dbrq.convert(prepared), x)) > 25, "the observers were not spoiled"


def test_a_module_never_reached():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.rarely = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, rare=False):
            return self.rarely(x) if rare else self.often(x)

    model = Rare().eval()
    converted = convert(model, torch.randn(2, 4)).quantized
    row = next(r for r in dbrq.report(converted).rows if r.path == "rarely")
    assert row.precision == "float" and "never reached" in row.reason
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match="dbrq: rarely runs in float"):
        assert torch.equal(run(converted, (x, True)), run(model, (x, True)))


# Sharing


NINE = [
    lambda x: F.max_pool2d(x, 2, 1),
    lambda x: x.transpose(2, 3),
    lambda x: torch.cat([x, x], 1),
    lambda x: x.flatten(2),
    lambda x: x.unflatten(2, (7, 7)),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: x[:, ::2],
    lambda x: x.permute(0, 1, 3, 2),
    lambda x: F.max_pool2d(x, 2),
]


def test_nine_ops_in_a_row_share_their_qparams():
    def nine(x):
        for op in NINE:
            x = op(x)
        return x

    model = Between(nine, size=8)
    converted = assert_matches(model, model.example, fx=False)
    first, last = recorded(converted, "conv2d")
    assert first.decision.writes is not None
    assert last.decision.reads[0].value == first.decision.writes
    assert len(qparams(converted)) == 2, "the model's input, and the one they share"
    for name in ("max_pool2d", "cat", "interpolate", "transpose", "permute"):
        assert {op.decision.precision for op in recorded(converted, name)} == {"int8"}


def test_nine_pools_in_a_row():
    model = Between(lambda x: [x := F.max_pool2d(x, 2, 1) for _ in range(9)][-1], size=12)
    converted = assert_matches(model, model.example)
    assert_precision(converted, "max_pool2d", "int8", 9)
    assert len(qparams(converted)) == 2


def test_cats_of_cats_share_one_observer():
    def forward(m, x):
        a, b, c = m.a(x), m.b(x), m.c(x)
        ab = torch.cat([a, b], 1)
        return m.last(torch.cat([ab, torch.cat([c, a], 1)], 1))

    model = Call(forward, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(4, 4, 1), last=nn.Conv2d(16, 3, 1))
    converted = assert_matches(model, images())
    assert len({op.decision.writes for op in recorded(converted, "conv2d")[:3]}) == 1


def test_a_value_read_by_several_layers_is_quantized_once():
    model = Call(
        lambda m, x: m.a(x) @ m.b(x).mT + m.c(x) @ m.a(x).mT, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)
    )
    converted = assert_matches(model, torch.randn(2, 5, 8), fx=False)
    reads = {read.value for op in recorded(converted, "linear") for read in op.decision.reads}
    assert len(reads) == 1


# What the float model does, the quantized one does


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_at_run_time_is_no_crash(value):
    model = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    converted = convert(model, images()).quantized
    bad = images()
    bad[0] = value
    assert run(converted, bad).shape == run(model, bad).shape


def test_nothing_warns_on_the_recorded_path():
    model = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)).eval()
    x = images()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = dbrq.quantize(model, [x])
        run(converted, x)
        assert fake_quantized(converted, model, x) is not None


# Values that no op made, and moves that leave the range


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.last(x) + m.first(m.positions),
        lambda m, x: m.last(x) + m.first(m.positions.expand(x.size(0), -1, -1)),
        lambda m, x: m.last(x) + F.linear(m.positions, m.first.weight, m.first.bias * 2),
    ],
    ids=["parameter", "expanded", "with a computed bias"],
)
def test_linear_layer_on_a_parameter_is_int8_in_its_own_range(fn):
    # No one calibrates a parameter, nor knows whether another comes later.
    positions = nn.Parameter(torch.randn(7, 16) * 3)
    model = Call(fn, positions=positions, first=nn.Linear(16, 8), last=nn.Linear(16, 8)).eval()
    x = torch.randn(3, 7, 16)
    converted = convert(model, x).quantized
    assert_precision(converted, "linear", "int8", 2)
    assert sqnr(run(model, x), run(converted, x)) > 35
    for graph in (dbrq.rewrite(converted, x), dbrq.lower(converted, x)):
        assert sqnr(run(converted, x), run(graph, x)) > 60
    with torch.no_grad():
        for held in (model, converted):
            held.positions.mul_(100)
    assert sqnr(run(model, x), run(converted, x)) > 35


@pytest.mark.parametrize("qconfig", [torch.ao.quantization.default_dynamic_qconfig,
                                     torch.ao.quantization.float16_dynamic_qconfig])  # fmt: skip
def test_dynamic_linear_layer_adds_a_computed_bias(qconfig):
    model = Call(lambda m, x: F.linear(x, m.weight, m.bias * 2), weight=torch.randn(8, 16), bias=torch.randn(8) * 9)
    x = torch.randn(3, 16)
    converted = convert(model, x, qconfig).quantized
    assert sqnr(run(model, x), run(converted, x)) > 30
    assert sqnr(run(converted, x), run(dbrq.rewrite(converted, x), x)) > 60


def test_padding_with_infinity_before_a_pool():
    # The pool took the padded value for int8, and infinity reached an observer.
    model = Call(
        lambda m, x: m.last(F.max_pool2d(F.pad(m.conv(x), (0, 1, 0, 1), value=-float("inf")), 3)),
        conv=nn.Conv2d(4, 8, 3), last=nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    converted = assert_matches(model, images(), fx=False)
    assert_precision(converted, "conv2d", "int8", 2)
    assert_precision(converted, "max_pool2d", "float", 1)


def test_buffers_that_each_run_writes_to():
    """What a run knows of a tensor that outlives it is forgotten: the next one would take it for another value."""

    class Follows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x):
            y = torch.relu(self.first(x))
            self.seen.mul_(0.9).add_(y.mean(0) * 0.1)
            return self.last(y - self.seen)

    torch.manual_seed(0)
    x = torch.randn(16, 8)
    quantized = dbrq.quantize(Follows().eval(), [x, x])
    graph = dbrq.rewrite(quantized, x)
    for _ in range(3):
        assert torch.allclose(quantized(x), graph(x), atol=1e-5)  # which has int8 in every run
        assert not quantized.seen.__dict__
