"""What each kind of qconfig does: observers, dynamic, weight only, half precision."""

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_observer,
    default_per_channel_weight_observer,
    default_weight_observer,
    float16_dynamic_qconfig,
    float16_static_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
    per_channel_dynamic_qconfig,
)

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers.judging import assert_matches, assert_precision, rows, sqnr
from tests.helpers.running import convert, run
from tests.helpers.trees import LAYERS, WEIGHT, Tree, everything

# What each qconfig does


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.Linear(96, 40)
    )


def qparams(model: nn.Module) -> list:
    token = state_of(model).token
    return [q for state in token.states.values() for q in map(state.qparams, state.slots)]


ACTIVATIONS = {
    "quint8": MinMaxObserver.with_args(dtype=torch.quint8),
    "qint8": MinMaxObserver.with_args(dtype=torch.qint8),
    "uint8": MinMaxObserver.with_args(dtype=torch.uint8, quant_min=0, quant_max=255),
    "int8": MinMaxObserver.with_args(dtype=torch.int8, quant_min=-128, quant_max=127),
    "quint8 symmetric": MinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_tensor_symmetric),
    "qint8 symmetric": MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    "qint8 symmetric, -127": MinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_tensor_symmetric, quant_min=-127, quant_max=127, eps=2**-12
    ),
    "moving average": MovingAverageMinMaxObserver,
    "histogram of torch.ao": HistogramObserver,
    "histogram of torch.ao, reduced": HistogramObserver.with_args(reduce_range=True),
    "reduced": MinMaxObserver.with_args(reduce_range=True),
    "reduced, signed": MinMaxObserver.with_args(dtype=torch.qint8, reduce_range=True),
    "four bits": MinMaxObserver.with_args(quant_min=0, quant_max=15),
    "histogram of dbrq": dbrq.HistogramObserver,
    "histogram of dbrq, signed": dbrq.HistogramObserver.with_args(dtype=torch.qint8),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore:.*reduce_range.*", "ignore:Please use quant_min")
def test_activation_observers(name):
    qconfig = QConfig(ACTIVATIONS[name], WEIGHT)
    x = torch.randn(8, 4, 8, 8)
    converted = assert_matches(small(), x, qconfig, fx=False)
    assert dbrq.report(converted).coverage == 1.0
    assert_precision(converted, "max_pool2d", "int8")
    for q in qparams(converted):
        assert 0 <= q.quant_min <= q.zero_point <= q.quant_max <= 255
        bits = q.quant_max - q.quant_min
        assert bits == {"reduced": 127, "four bits": 15}.get(
            name, 254 if "-127" in name else 127 if "reduced" in name else 255
        )


@pytest.mark.parametrize("name", ["quint8", "qint8", "moving average", "reduced", "four bits", "quint8 symmetric"])
@pytest.mark.filterwarnings("ignore:.*reduce_range.*", "ignore:Please use quant_min")
def test_qparams_are_what_the_observer_says(name):
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(64, 8)
    converted = convert(model, x, QConfig(ACTIVATIONS[name], WEIGHT)).quantized
    observer = ACTIVATIONS[name]()
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    (q,) = qparams(converted)
    assert q.scale == pytest.approx(scale.item())
    assert q.zero_point - q.quant_min == zero_point.item() - observer.quant_min


WEIGHTS = {
    "per channel": default_per_channel_weight_observer,
    "per tensor": default_weight_observer,
    "per channel, 7 bits": PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-64, quant_max=63
    ),
    "histogram of torch.ao": HistogramObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    "int8": PerChannelMinMaxObserver.with_args(
        dtype=torch.int8, qscheme=torch.per_channel_symmetric, quant_min=-128, quant_max=127
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_observers(name):
    model, x = small().eval(), torch.randn(8, 4, 8, 8)
    converted = assert_matches(model, x, QConfig(default_observer, WEIGHTS[name]), fx=False)
    assert dbrq.report(converted).coverage == 1.0
    weight = converted[0].weight_int8
    assert weight.min() >= -128 and weight.max() <= (63 if "7 bits" in name else 127)
    assert converted[0].weight_scale.numel() == (8 if "channel" in name or name == "int8" else 1)


@pytest.mark.parametrize(
    "observer",
    [
        MinMaxObserver.with_args(dtype=torch.qint8),
        MinMaxObserver,
        PerChannelMinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_channel_affine),
    ],
)
def test_affine_weights_stay_float_and_say_so(observer):
    converted = assert_matches(
        nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), QConfig(default_observer, observer), fx=False
    )
    assert "affine" in rows(converted, "linear")[0].reason


def test_activations_per_channel_stay_float_and_say_so():
    qconfig = QConfig(PerChannelMinMaxObserver, WEIGHT)
    converted = assert_matches(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), qconfig, fx=False)
    assert "one scale per activation" in rows(converted, "linear")[0].reason


class Own(ObserverBase):
    """Ranges of its own making."""

    def __init__(self, dtype=torch.quint8):
        super().__init__(dtype)
        self.top = 0.0

    def forward(self, x):
        self.top = max(self.top, x.abs().max().item())
        return x

    def calculate_qparams(self):
        return torch.tensor([2 * self.top / 255]), torch.tensor([128])


class Bare(nn.Module):
    """Nothing but what is asked for."""

    def __init__(self):
        super().__init__()
        self.top = 0.0

    def forward(self, x):
        self.top = max(self.top, x.abs().max().item())
        return x

    def calculate_qparams(self):
        return 2 * self.top / 255, 128


class BareTensors(Bare):
    def calculate_qparams(self):
        return torch.tensor(2 * self.top / 255), torch.tensor(128)


@pytest.mark.parametrize("observer", [Own, Bare, BareTensors])
def test_an_observer_of_ones_own(observer):
    x = torch.randn(64, 8)
    converted = assert_matches(Tree(), x, QConfig(observer, WEIGHT), fx=False)
    assert dbrq.report(converted).coverage == 1.0
    assert {q.zero_point for q in qparams(converted)} == {128}


class Broken(Own):
    def calculate_qparams(self):
        return torch.tensor([self.value]), torch.tensor([0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_observer_that_gives_no_scale_is_told(value):
    cls = type("Broken", (Broken,), {"value": value})
    prepared = dbrq.prepare(nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(2, 8), QConfig(cls, WEIGHT))
    run(prepared, torch.randn(2, 8))
    with pytest.raises(dbrq.QuantizationError) as error:
        dbrq.convert(prepared)
    assert error.value.op == "0"


# Dynamic, weight only, half


@pytest.mark.parametrize("qconfig", [default_dynamic_qconfig, per_channel_dynamic_qconfig])
def test_dynamic_linear(qconfig):
    converted = assert_matches(Tree(), torch.randn(64, 8), QConfigMapping().set_object_type(nn.Linear, qconfig))
    assert_precision(converted, "linear", "int8", 7)
    assert all("dynamic" in row.kernel for row in rows(converted, "linear"))
    large = torch.randn(64, 8) * 50
    assert sqnr(run(Tree().eval(), large), run(converted, large)) < 1000  # runs; ranges follow the input


def test_dynamic_needs_no_calibration():
    model = Tree().eval()
    prepared = dbrq.prepare(
        model, torch.randn(2, 8), QConfigMapping().set_object_type(nn.Linear, default_dynamic_qconfig)
    )
    x = torch.randn(64, 8)
    assert sqnr(run(model, x), run(dbrq.convert(prepared), x)) > 20


def test_dynamic_convolutions_stay_float_and_say_so():
    converted = assert_matches(
        nn.Sequential(nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 6, 6), default_dynamic_qconfig, fx=False
    )
    assert "dynamic" in rows(converted, "conv2d")[0].reason


def test_static_and_dynamic_side_by_side():
    mapping = everything().set_module_name("middle", default_dynamic_qconfig)
    converted = assert_matches(Tree(), torch.randn(64, 8), mapping)
    dynamic = {row.path for row in rows(converted, "linear") if "dynamic" in row.kernel}
    assert dynamic == LAYERS - {"first", "last"}
    assert dbrq.report(converted).coverage == 1.0


TABLES = {
    "embedding": (lambda: nn.Embedding(50, 16), torch.int64),
    "padding": (lambda: nn.Embedding(50, 16, padding_idx=3), torch.int64),
    "bag": (lambda: nn.EmbeddingBag(50, 16), torch.int64),
    "bag, sum": (lambda: nn.EmbeddingBag(50, 16, mode="sum"), torch.int64),
    "bag, int32": (lambda: nn.EmbeddingBag(50, 16), torch.int32),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_embeddings(name, bits):
    make, dtype = TABLES[name]
    qconfig = float_qparams_weight_only_qconfig if bits == 8 else float_qparams_weight_only_qconfig_4bit
    model, x = nn.Sequential(make()).eval(), torch.randint(0, 50, (4, 7), dtype=dtype)
    converted = assert_matches(model, x, QConfigMapping().set_object_type(type(model[0]), qconfig), fx=False)
    assert_precision(converted, "embedding_bag" if "bag" in name else "embedding", "int8", 1)
    stored = converted[0].weight_int8
    assert stored.dtype is torch.int8 and len(stored.unique()) <= 2**bits
    assert sqnr(run(model, x), run(converted, x)) > (35 if bits == 8 else 12)


@pytest.mark.parametrize("qconfig", [float16_dynamic_qconfig, float16_static_qconfig])
@pytest.mark.parametrize(
    "model, shape",
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (4, 8)),
        (nn.Sequential(nn.Conv2d(8, 8, 1)), (2, 8, 4, 4)),
        (nn.LSTM(8, 8), (5, 2, 8)),
    ],
)
def test_half_precision_stays_float_and_says_why(qconfig, model, shape):
    x = torch.randn(shape)
    model = model if isinstance(model, nn.Sequential) else nn.Sequential(model)
    converted = convert(model, x, qconfig).quantized
    torch.testing.assert_close(run(converted, x), run(model, x))
    assert dbrq.report(converted).rows and all(
        row.precision == "float" and row.reason for row in dbrq.report(converted).rows
    )
    assert any("float16" in row.reason for row in dbrq.report(converted).rows)
