"""QConfigMapping in full: who gets which qconfig, what each kind does, and classes that are not looked into."""

import copy
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import Call, assert_matches, assert_precision, convert, fx_quantize, rows, run, sqnr
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
    get_default_qconfig,
    get_default_qconfig_mapping,
    per_channel_dynamic_qconfig,
)

import dbrq
from dbrq.hidden_state import state_of

DEFAULT = get_default_qconfig("onednn")
WEIGHT = default_per_channel_weight_observer


def everything() -> QConfigMapping:
    return QConfigMapping().set_global(DEFAULT)


class Leaf(nn.Module):
    def __init__(self, activation=F.relu):
        super().__init__()
        self.a, self.b, self.activation = nn.Linear(8, 8), nn.Linear(8, 8), activation

    def forward(self, x):
        return self.b(self.activation(self.a(x)))


class Middle(nn.Module):
    def __init__(self, activation=F.relu):
        super().__init__()
        self.leaf, self.conv, self.other = Leaf(activation), nn.Linear(8, 8), Leaf(activation)

    def forward(self, x):
        return self.other(self.conv(self.leaf(x)))


class Tree(nn.Module):
    """Linear layers at three depths."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), Middle(activation), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x)) + 1.0))


LAYERS = {
    "first",
    "last",
    "middle.conv",
    "middle.leaf.a",
    "middle.leaf.b",
    "middle.other.a",
    "middle.other.b",
}


def in_float(model: nn.Module, mapping: QConfigMapping, x=None) -> set[str]:
    """Paths of the linear layers that stay float; the model must be right, and each must say why."""
    converted = assert_matches(model, torch.randn(16, 8) if x is None else x, mapping, fx=False)
    found = [row for row in dbrq.report(converted).rows if row.op in ("linear", "conv2d") and row.precision == "float"]
    assert all(row.reason == "its qconfig is None" for row in found)
    return {row.path for row in found}


def in_float_by_fx(model: nn.Module, mapping: QConfigMapping, x=None) -> set[str]:
    x = torch.randn(16, 8) if x is None else x
    graph = fx_quantize(copy.deepcopy(model), x, mapping).graph_module
    return {
        path
        for path, module in graph.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        and ".quantized" not in type(module).__module__
        and "_packed_params" not in path
    }


# Who gets which


MAPPINGS = {
    "global None": (lambda m: m.set_global(None), LAYERS),
    "module class": (lambda m: m.set_object_type(nn.Linear, None), LAYERS),
    "class of a parent": (lambda m: m.set_object_type(Leaf, None), set()),
    "name at depth one": (lambda m: m.set_module_name("first", None), {"first"}),
    "name at depth two": (lambda m: m.set_module_name("middle.conv", None), {"middle.conv"}),
    "name at depth three": (lambda m: m.set_module_name("middle.leaf.a", None), {"middle.leaf.a"}),
    "name of a parent": (lambda m: m.set_module_name("middle.leaf", None), {"middle.leaf.a", "middle.leaf.b"}),
    "name of a grandparent": (lambda m: m.set_module_name("middle", None), LAYERS - {"first", "last"}),
    "child differs from its parent": (
        lambda m: m.set_module_name("middle", None).set_module_name("middle.leaf.b", DEFAULT),
        LAYERS - {"first", "last", "middle.leaf.b"},
    ),
    "regex": (lambda m: m.set_module_name_regex(r"middle\..*\.a", None), {"middle.leaf.a", "middle.other.a"}),
    "the first regex that matches": (
        lambda m: m.set_module_name_regex(r".*\.a", DEFAULT).set_module_name_regex(r"middle.*", None),
        {"middle.conv", "middle.leaf.b", "middle.other.b"},
    ),
    "name before regex": (
        lambda m: m.set_module_name_regex(".*", None).set_module_name("middle.leaf.a", DEFAULT),
        LAYERS - {"middle.leaf.a"},
    ),
    "regex before type": (
        lambda m: m.set_object_type(nn.Linear, None).set_module_name_regex(r"first", DEFAULT),
        LAYERS - {"first"},
    ),
    "type before global": (lambda m: m.set_global(None).set_object_type(nn.Linear, DEFAULT), set()),
    "order": (lambda m: m.set_module_name_object_type_order("middle.leaf", nn.Linear, 1, None), {"middle.leaf.b"}),
    "order in the root": (lambda m: m.set_module_name_object_type_order("", nn.Linear, 1, None), {"last"}),
    "order counts per parent": (
        lambda m: m.set_module_name_object_type_order("middle", nn.Linear, 0, None),
        {"middle.conv"},
    ),
    "order before name": (
        lambda m: m.set_module_name("middle", None).set_module_name_object_type_order(
            "middle.other", nn.Linear, 0, DEFAULT
        ),
        LAYERS - {"first", "last", "middle.other.a"},
    ),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_which_layers_stay_float(name):
    change, expected = MAPPINGS[name]
    assert in_float(Tree(), change(everything())) == expected


@pytest.mark.parametrize("name", MAPPINGS)
def test_precedence_is_that_of_fx(name):
    change, _ = MAPPINGS[name]
    model = Tree(F.softplus).eval()  # relu would fuse, and FX wants its qconfig to be the same then
    assert in_float(model, change(everything())) == in_float_by_fx(model, change(everything()))


def functional() -> nn.Module:
    def forward(m, x):
        y = F.linear(x, m.w1)
        z = torch.conv1d(y.unsqueeze(0), m.w2).squeeze(0)
        return F.linear(z.add(y) + y, m.w1)

    return Call(forward, w1=torch.randn(8, 8), w2=torch.randn(16, 16, 1))


def precisions(model: nn.Module, mapping: QConfigMapping) -> dict[str, str]:
    converted = assert_matches(model, torch.randn(16, 8), mapping, fx=False)
    return {row.path: row.precision for row in dbrq.report(converted).rows}


FUNCTIONS = {
    "function": (lambda m: m.set_object_type(F.linear, None), {"linear.0", "linear.1"}),
    "function, by order": (lambda m: m.set_module_name_object_type_order("", F.linear, 1, None), {"linear.1"}),
    "another function": (lambda m: m.set_object_type(F.conv1d, None), {"conv1d.0"}),
    "function as torch names it": (lambda m: m.set_object_type(torch.conv1d, None), {"conv1d.0"}),
    "method, by its name": (lambda m: m.set_object_type("add", None), {"add.0"}),
    "global None": (lambda m: m.set_global(None), {"linear.0", "linear.1", "conv1d.0", "add.0", "add.1"}),
    "only functions": (lambda m: m.set_global(None).set_object_type(F.linear, DEFAULT), {"conv1d.0", "add.0", "add.1"}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_ops(name):
    change, expected = FUNCTIONS[name]
    found = {path for path, precision in precisions(functional(), change(everything())).items() if precision == "float"}
    assert expected <= found, found
    assert {path for path in found if "add" not in path} == {path for path in expected if "add" not in path}


@pytest.mark.parametrize("key", [operator.add, torch.add, "add"])
def test_any_spelling_of_an_operator_names_it(key):
    model = Call(lambda m, x: m.b(m.a(x) + m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    converted = assert_matches(model, torch.randn(16, 8), everything().set_object_type(key, None), fx=False)
    assert_precision(converted, "add", "float", 1)
    assert rows(converted, "add")[0].reason == "its qconfig is None"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.set_module_name("child", None),
        lambda m: m.set_module_name_regex("chi.*", None),
        lambda m: m.set_object_type(Call(lambda m, x: x).__class__, None),
    ],
)
def test_functional_ops_follow_the_module_they_are_in(change):
    child = Call(lambda m, x: F.linear(x, m.w), w=torch.randn(8, 8))
    model = nn.Sequential()
    model.add_module("first", nn.Linear(8, 8))
    model.add_module("child", child)
    converted = assert_matches(model, torch.randn(16, 8), change(everything()), fx=False)
    assert {row.path: row.precision for row in dbrq.report(converted).rows} == {
        "first": "int8",
        "child.linear.0": "float",
    }


def test_the_mapping_is_not_changed():
    mapping = get_default_qconfig_mapping("onednn").set_module_name("first", None).set_module_name_regex("f.*", DEFAULT)
    mapping.set_module_name_object_type_order("middle", nn.Linear, 0, None)
    before, ids = copy.deepcopy(mapping.to_dict()), {k: id(v) for k, v in vars(mapping).items()}
    convert(Tree(), torch.randn(4, 8), mapping)
    assert repr(mapping.to_dict()) == repr(before) and {k: id(v) for k, v in vars(mapping).items()} == ids


@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
@pytest.mark.parametrize(
    "mapping",
    [
        DEFAULT,
        everything(),
        get_default_qconfig_mapping("onednn"),
        get_default_qconfig_mapping("x86"),
        get_default_qconfig_mapping("fbgemm"),
        None,
    ],
)
def test_mappings_of_torch_ao(mapping):
    converted = assert_matches(Tree(), torch.randn(64, 8), mapping)
    assert dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("mapping", ["int8", {"": DEFAULT}, 8, [DEFAULT]])
def test_what_is_no_mapping_is_told(mapping):
    with pytest.raises(dbrq.ConfigurationError, match="QConfigMapping"):
        dbrq.prepare(Tree(), torch.randn(2, 8), mapping)


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


# Classes that are not looked into


class Opaque(nn.Module):
    """With control flow that no recording could hold."""

    def __init__(self):
        super().__init__()
        self.linear, self.child = nn.Linear(8, 8), Leaf()

    def forward(self, x):
        for _ in range(int(x.shape[0] % 3)):
            x = self.linear(x)
        return self.child(x) if x.sum() > 0 else x


def with_opaque_in_the_middle() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Opaque(), nn.Linear(8, 8)), nn.Linear(8, 8))


def assert_right(converted: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqnr(run(model, x), run(converted, x)) > 25


@pytest.mark.parametrize("rows_", [3, 4, 5, 6])
def test_a_class_in_the_middle_of_the_tree(rows_):
    model, x = with_opaque_in_the_middle(), torch.randn(6, 8)
    converted = convert(model, x, non_traceable_module_classes=[Opaque]).quantized
    assert_right(converted, model, x)
    report = dbrq.report(converted)
    assert {row.path for row in report.rows if row.precision == "int8"} == {"0", "1.0", "1.2", "2"}
    below = [row for row in report.rows if row.path.startswith("1.1")]
    assert below and all(row.precision == "float" and row.reason for row in below)
    assert isinstance(converted[1][1].linear.weight, nn.Parameter)
    x = torch.randn(rows_, 8)
    assert run(converted, x).shape == (rows_, 8), "its own control flow is its own business"


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_a_class_as_the_root(phase):
    model, x = Opaque(), torch.randn(5, 8)
    both = convert(model, x, non_traceable_module_classes=(Opaque,))
    torch.testing.assert_close(run(getattr(both, phase), x), run(model, x))
    assert all(row.precision == "float" for row in dbrq.report(both.quantized).rows)
    assert dbrq.report(both.quantized).coverage == 0.0


@pytest.mark.parametrize("cls", [nn.Linear, nn.Conv2d])
def test_a_leaf_class(cls):
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(128, 4))
    x = torch.randn(2, 4, 4, 4)
    converted = convert(model, x, non_traceable_module_classes=(cls,)).quantized
    assert_right(converted, model, x)
    for row in dbrq.report(converted).rows:
        if row.path in ("0", "2", "4"):
            assert (row.precision == "float") == isinstance(model[int(row.path)], cls)


def test_subclasses_are_not_looked_into_either():
    class Special(Opaque):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Special())
    converted = convert(model, torch.randn(6, 8), non_traceable_module_classes=(Opaque,)).quantized
    assert isinstance(converted[1].linear.weight, nn.Parameter)


@pytest.mark.parametrize("classes", [["Opaque"], [Opaque()], [None]])
def test_what_is_no_class_is_told(classes):
    with pytest.raises(dbrq.ConfigurationError, match="classes"):
        dbrq.prepare(Tree(), torch.randn(2, 8), non_traceable_module_classes=classes)
