"""What the report, the comparison and the log of values say, on models small enough to compute by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Call, convert, run, sqnr
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig
from torch.utils.flop_counter import FlopCounterMode

import dbrq


def row(model: nn.Module, path: str):
    return next(r for r in dbrq.report(model).rows if r.path == path)


def without(*names: str) -> QConfigMapping:
    mapping = dbrq.default_qconfig_mapping()
    for name in names:
        mapping.set_module_name(name, None)
    return mapping


# Coverage


@pytest.mark.parametrize(
    "module, shape, macs",
    [
        (nn.Linear(8, 5), (3, 8), 3 * 8 * 5),
        (nn.Linear(8, 5), (2, 3, 8), 2 * 3 * 8 * 5),
        (nn.Conv2d(4, 6, 3), (2, 4, 8, 8), 2 * 6 * 6 * 6 * 4 * 9),
        (nn.Conv2d(4, 6, 3, padding=1, stride=2), (1, 4, 8, 8), 6 * 4 * 4 * 4 * 9),
        (nn.Conv2d(4, 8, 3, groups=4), (1, 4, 8, 8), 8 * 36 * 1 * 9),
        (nn.Conv1d(4, 6, 3), (2, 4, 8), 2 * 6 * 6 * 4 * 3),
        (nn.Conv3d(4, 6, 1), (1, 4, 2, 3, 4), 6 * 24 * 4),
    ],
)
def test_macs(module, shape, macs):
    converted = convert(nn.Sequential(module), torch.randn(shape)).quantized
    assert row(converted, "0").macs == macs


@pytest.mark.parametrize(
    "floats, expected",
    [
        ([], 1.0),
        (["0"], 80 / 240),
        (["1"], 160 / 240),
        (["0", "1"], 0.0),
    ],
)
def test_coverage_is_the_share_of_multiply_accumulates(floats, expected):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))  # 5 rows: 160 and 80
    converted = convert(model, torch.randn(5, 4), without(*floats)).quantized
    assert dbrq.report(converted).coverage == pytest.approx(expected)


def attention(m, x):
    return m.a(x) @ m.b(x).mT


def test_coverage_all_counts_matmuls_too():
    model, x = Call(attention, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(2, 6, 8)
    linear, matmul = 2 * (12 * 64), 2 * 6 * 6 * 8
    report = dbrq.report(convert(model, x).quantized)
    assert report.coverage == 1.0
    assert report.coverage_all == pytest.approx(linear / (linear + matmul))
    everything = dbrq.report(convert(model, x, get_default_qconfig("onednn")).quantized)
    assert everything.coverage_all == 1.0


def test_coverage_without_anything_to_count():
    report = dbrq.report(convert(nn.ReLU(), torch.randn(2, 4)).quantized)
    assert report.coverage == report.coverage_all == 0.0
    assert 0 <= report.coverage <= 1


def test_transposed_convolutions_count_as_convolutions_in_float():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2, stride=2))
    report = dbrq.report(convert(model, torch.randn(1, 4, 4, 4)).quantized)
    # Each input element meets out * kernel weights: 64 * 16 and 64 * 4.
    assert report.coverage == pytest.approx(256 / (256 + 1024))


def test_lstms_count_where_they_can_be_counted():
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8))
    report = dbrq.report(convert(model, torch.randn(3, 2, 8)).quantized)
    assert report.coverage == pytest.approx(64 / (64 + 2 * 4 * 64))  # float in the default recipe
    assert row_of(report, "1").precision in ("int8", "float")
    assert row_of(report, "0").precision == "int8"


@pytest.mark.parametrize(
    "layer, shape, macs",
    [
        (nn.LSTM(4, 6, num_layers=2, bidirectional=True), (5, 3, 4), 15 * 2 * 4 * 6 * ((4 + 6) + (2 * 6 + 6))),
        (nn.LSTM(4, 6, proj_size=2), (5, 3, 4), 15 * (4 * 6 * (4 + 2) + 2 * 6)),
        (nn.GRU(4, 6), (5, 3, 4), 15 * 3 * 6 * 10),
        (nn.RNN(4, 6), (5, 4), 5 * 6 * 10),
        (nn.LSTMCell(4, 6), (3, 4), 3 * 4 * 6 * 10),
        (nn.GRUCell(4, 6), (4,), 3 * 6 * 10),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_macs_of_recurrent_layers(layer, shape, macs):
    (found,) = (r for r in dbrq.report(dbrq.prepare(nn.Sequential(layer), torch.randn(shape))).rows if r.macs)
    assert (found.macs, found.weighs) == (macs, True)


def test_macs_of_a_packed_sequence():
    lengths = torch.tensor([5, 3, 1])
    model = Call(lambda m, x: m.gru(nn.utils.rnn.pack_padded_sequence(x, lengths))[1], gru=nn.GRU(4, 6))
    (found,) = (r for r in dbrq.report(dbrq.prepare(model, torch.randn(5, 3, 4))).rows if r.macs)
    assert found.macs == 9 * 3 * 6 * 10


class Applied(nn.Module):
    """A function of the inputs, and of a parameter behind them."""

    def __init__(self, function, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, *args):
        return self.function(*args) if self.weight is None else self.function(*args, self.weight)


def _random(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


def _einsum(equation: str):
    return lambda *operands: torch.einsum(equation, *operands)


#: Function, shapes, multiply-accumulates where torch's counter knows none.
PRODUCTS = {
    "matmul": (torch.matmul, [(2, 3, 4), (4, 5)], None),
    "mm": (torch.mm, [(3, 4), (4, 5)], None),
    "mv": (torch.mv, [(3, 4), (4,)], 12),
    "dot": (torch.dot, [(4,), (4,)], 4),
    "inner": (torch.inner, [(3, 4), (2, 5, 4)], None),
    "linalg.matmul": (torch.linalg.matmul, [(2, 3, 4), (2, 4, 5)], None),
    "addmm": (lambda b, x, w: torch.addmm(b, x, mat2=w), [(5,), (3, 4), (4, 5)], None),
    "addmv": (torch.addmv, [(3,), (3, 4), (4,)], 12),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], None),
    "addbmm": (torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)], 120),
    "addmm, in place": (lambda y, x, w: y.clone().addmm_(x, w), [(3, 5), (3, 4), (4, 5)], 60),
    "bilinear": (F.bilinear, [(2, 3), (2, 4), (5, 3, 4)], 120),
    "einsum": (_einsum("bij,bjk->bik"), [(2, 3, 4), (2, 4, 5)], None),
    "einsum with dots": (_einsum("...ij, kj -> ...ik"), [(2, 7, 3, 4), (5, 4)], None),
    "einsum of three": (_einsum("ij,jk,kl"), [(2, 3), (3, 4), (4, 5)], None),
    "einsum of one": (_einsum("ii->i"), [(3, 3)], 0),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])), [(2, 3, 4), (3, 4, 5)], None),
    "chain_matmul": (torch.chain_matmul, [(2, 30), (30, 4), (4, 50)], None),
    "multi_dot": (lambda *tensors: torch.linalg.multi_dot(tensors), [(30,), (30, 4), (4, 50)], None),
    "attention": (F.scaled_dot_product_attention, [(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)], 8 * 5 * 7 * 14),
}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul")
@pytest.mark.parametrize("name", PRODUCTS)
def test_macs_of_products(name):
    function, shapes, macs = PRODUCTS[name]
    given = _random(*shapes)
    if macs is None:
        with FlopCounterMode(display=False) as counter:
            function(*given)
        macs = counter.get_total_flops() // 2
        assert macs
    report = dbrq.report(dbrq.prepare(Applied(function), given))
    assert sum(r.macs for r in report.rows) == macs
    assert report.coverage == report.coverage_all == 0 and not any(r.weighs for r in report.rows if r.macs)
    if macs:
        report = dbrq.report(dbrq.prepare(Applied(function, given[-1]), given[:-1]))
        (found,) = (r for r in report.rows if r.macs)
        assert (found.macs, found.weighs) == (macs, True)
        assert found.precision == ("int8" if found.op == "linear" else "float")  # x @ w is a linear layer


def test_what_is_added_is_no_weight():
    model = Call(lambda m, x, y: torch.addmm(m.bias, x, y))
    model.bias = nn.Parameter(torch.randn(3, 5))
    (found,) = (r for r in dbrq.report(dbrq.prepare(model, _random((3, 4), (4, 5)))).rows if r.macs)
    assert not found.weighs


def test_parts_and_choices_of_parameters_are_weights():
    model = Call(lambda m, x, i: x @ m.table[i].mT + x @ (2 * m.table[0].to(torch.float32)))
    model.table = nn.Parameter(torch.randn(3, 4, 4))
    report = dbrq.report(dbrq.prepare(model, (torch.randn(2, 5, 4), torch.tensor([2, 0]))))
    assert [r.weighs for r in report.rows if r.op == "matmul"] == [True, True] and report.coverage == 0


def _mixtral(experts: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, attn_implementation="eager", experts_implementation=experts,
        use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def _qwen(experts: str) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        attn_implementation="eager", experts_implementation=experts, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize("make", [_mixtral, _qwen])
def test_experts_are_counted(make):
    pytest.importorskip("transformers")
    ids, models = torch.randint(0, 32, (2, 6)), {}
    for experts in ("eager", "grouped_mm", "batched_mm"):
        models[experts] = make(experts)
        models[experts].load_state_dict(models["eager"].state_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        models["eager"](ids)  # torch's counter does not know grouped products
    for experts, model in models.items():
        report = dbrq.report(dbrq.prepare(model, ids))
        assert sum(r.macs for r in report.rows) == counter.get_total_flops() // 2
        inside = [r for r in report.rows if ".experts." in r.path and r.macs]
        weights = sum(r.macs for r in report.rows if r.weighs)
        if experts == "eager":
            assert report.coverage == 1.0 and all(r.precision == "int8" for r in inside)
        else:
            assert len(inside) == 2 and all(r.precision == "float" and r.weighs and r.reason for r in inside)
            assert report.coverage == pytest.approx(1 - sum(r.macs for r in inside) / weights) and report.coverage < 0.7


def row_of(report, path: str):
    return next(r for r in report.rows if r.path == path)


# Rows


class Everything(nn.Module):
    """One of many kinds."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.up, self.prelu = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.PReLU()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)
        self.table, self.lstm = nn.Embedding(10, 8), nn.LSTM(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x, index):
        x = self.prelu(self.up(self.act(self.bn(self.conv(x)))))
        x = torch.softmax(F.avg_pool2d(x, 2).std((2, 3)), -1)
        y, _ = self.lstm(self.table(index))
        z = self.norm(self.fc(x) + y.mean(0)).sin_()
        return z.cumsum(0), torch.sort(z).values, self.fc.weight.sum()


def test_every_float_row_has_a_reason_and_every_int8_row_a_kernel():
    inputs = (torch.randn(2, 3, 8, 8), torch.randint(0, 10, (4, 2)))
    both = convert(Everything(), inputs)
    for model in (both.prepared, both.quantized):
        report = dbrq.report(model)
        assert len(report.rows) >= 15
        for r in report.rows:
            assert r.precision in ("int8", "float")
            assert (r.precision == "float") == bool(r.reason), r
            assert (r.kernel == "float") == (r.precision == "float") and r.kernel, r


def test_paths_are_unique_and_say_where():
    def forward(m, x):
        x = F.relu(m.fc(F.relu(m.fc(x))))
        return m.inner(x) + x

    model = Call(forward, fc=nn.Linear(4, 4), inner=Call(lambda m, x: F.relu(x) * 2))
    report = dbrq.report(convert(model, torch.randn(2, 4)).quantized)
    paths = [r.path for r in report.rows]
    assert paths == ["fc", "relu.0", "fc@1", "relu.1", "inner.relu.0", "inner.mul.0", "add.0"]


def test_the_float_model_has_no_report():
    for wrong in (nn.Linear(2, 2), None, "model"):
        with pytest.raises(dbrq.ConfigurationError):
            dbrq.report(wrong)


def test_a_prepared_model_reports_what_conversion_will_do():
    both = convert(Everything(), (torch.randn(2, 3, 8, 8), torch.randint(0, 10, (4, 2))))
    assert dbrq.report(both.prepared) == dbrq.report(both.quantized)


def test_modules_that_were_never_reached():
    model = Call(
        lambda m, x: m.a(x),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        c=nn.Sequential(nn.Conv2d(1, 1, 1)),
        d=nn.LSTM(4, 4),
        e=nn.Embedding(3, 3),
        f=nn.ConvTranspose1d(1, 1, 1),
    )
    converted = convert(model, torch.randn(2, 4)).quantized
    for path in ("b", "c.0", "d", "e", "f"):
        assert row(converted, path).precision == "float" and "never reached" in row(converted, path).reason
    assert dbrq.report(converted).coverage == 1.0


def test_cells_and_norms_that_were_never_reached_are_not_lost():
    model = Call(lambda m, x: m.a(x), a=nn.Linear(4, 4), b=nn.LSTMCell(4, 4), c=nn.MultiheadAttention(4, 2))
    paths = {r.path for r in dbrq.report(convert(model, torch.randn(2, 4)).quantized).rows}
    assert {"b", "c.out_proj"} <= paths


def test_tied_weights():
    model = Call(
        lambda m, x: m.head(torch.tanh(m.fc(m.table(x)))),
        table=nn.Embedding(20, 8),
        fc=nn.Linear(8, 8),
        head=nn.Linear(8, 20, False),
    )
    model.head.weight = model.table.weight
    x = torch.randint(0, 20, (3, 5))
    converted = convert(model, x).quantized
    assert row(converted, "fc").precision == row(converted, "head").precision == "int8"
    for r in dbrq.report(converted).rows:
        assert (r.precision == "float") == bool(r.reason)
    assert sqnr(run(model, x), run(converted, x)) > 20


def test_one_module_under_two_names():
    layer = nn.Linear(4, 4)
    model = Call(lambda m, x: m.b(torch.tanh(m.a(x))), a=layer, b=layer)
    report = dbrq.report(convert(model, torch.randn(2, 4)).quantized)
    assert [r.precision for r in report.rows if r.op == "linear"] == ["int8", "int8"]
    assert not any("never reached" in r.reason for r in report.rows)


def test_rows_are_the_same_after_load(tmp_path):
    converted = convert(Everything(), (torch.randn(2, 3, 8, 8), torch.randint(0, 10, (4, 2)))).quantized
    dbrq.save(converted, tmp_path / "model.pt")
    again = dbrq.report(dbrq.load(tmp_path / "model.pt"))
    assert again.rows == dbrq.report(converted).rows and str(again) == str(dbrq.report(converted))


def test_the_table():
    converted = convert(nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1)), torch.randn(2, 4)).quantized
    text = dbrq.report(converted).table()
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["path", "op", "precision"]
    assert len(lines) == 2 + 2 + 1 and "100.0%" in lines[-1]
    assert "onednn.qlinear_pointwise" in text and dbrq.report(converted).rows[1].reason in text


# Compare


def network() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.Sigmoid(), nn.Linear(16, 4)
    ).eval(), torch.randn(4, 3, 8, 8)


def test_compare_gives_each_op_worst_first():
    model, x = network()
    converted = convert(model, x).quantized
    result = dbrq.compare(model, converted, x)
    assert [r.path for r in sorted(result.rows, key=lambda r: r.path)] == ["1", "3", "4", "5"]
    values = [r.sqnr for r in result.rows]
    assert values == sorted(values) and all(15 < v < 80 for v in values)
    assert {r.path: r.op for r in result.rows} == {"1": "relu", "3": "linear", "4": "sigmoid", "5": "linear"}


def test_the_sqnr_of_the_last_op_is_that_of_the_output():
    model, x = network()
    converted = convert(model, x).quantized
    last = next(r for r in dbrq.compare(model, converted, x).rows if r.path == "5")
    assert last.sqnr == pytest.approx(sqnr(run(model, x), run(converted, x)), abs=1e-3)


def test_compare_finds_the_layer_that_was_spoiled():
    model, x = network()
    with torch.no_grad():
        model[3].weight[0] *= 3000  # one scale serves all inputs of the sigmoid's layer
    converted = convert(model, x, get_default_qconfig("onednn")).quantized
    with torch.no_grad():
        converted[3].weight_scale.mul_(1.5)
    assert dbrq.compare(model, converted, x).rows[0].path in ("3", "4")


def test_comparing_a_model_with_itself_gives_infinity():
    model, x = network()
    assert all(r.sqnr == math.inf for r in dbrq.compare(model, model, x).rows)
    prepared = convert(model, x).prepared
    result = dbrq.compare(model, prepared, x)
    assert len(result.rows) == 5 and all(r.sqnr > 100 for r in result.rows)


def test_compare_takes_a_prepared_model_for_the_float_one():
    model, x = network()
    both = convert(model, x)
    a, b = dbrq.compare(both.prepared, both.quantized, x), dbrq.compare(model, both.quantized, x)
    assert [(r.path, pytest.approx(r.sqnr, abs=0.01)) for r in a.rows] == [(r.path, r.sqnr) for r in b.rows]


def test_the_table_of_a_comparison():
    model, x = network()
    result = dbrq.compare(model, convert(model, x).quantized, x)
    lines = str(result).splitlines()
    assert lines[0].split()[:2] == ["path", "op"] and len(lines) == 2 + len(result.rows)
    assert lines[2].split()[0] == result.rows[0].path


def test_compare_takes_keyword_arguments():
    model = Call(lambda m, x, y: m.fc(x) + y, fc=nn.Linear(4, 4))
    inputs = {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    converted = convert(model, inputs).quantized
    for result in (dbrq.compare(model, converted, inputs), dbrq.compare(model, converted, example_kwargs=inputs)):
        assert {r.path for r in result.rows} <= {"fc", "add.0"} and result.rows


def test_compare_changes_neither_model():
    model, x = network()
    model.train()
    converted = convert(network()[0], x).quantized
    model.load_state_dict(network()[0].state_dict())
    before = run(converted, x)
    dbrq.compare(model, converted, x)
    assert model.training and not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(run(converted, x), before)


# Values


def test_values_of_a_float_model_are_those_of_its_ops():
    model, x = network()
    values = dbrq.log_values(model, x)
    with torch.no_grad():
        expected = {"0": model[0](x), "1": model[:2](x), "3": model[:4](x), "4": model[:5](x), "5": model(x)}
    assert list(values) == list(expected)
    for path, value in values.items():
        torch.testing.assert_close(value, expected[path])


@pytest.mark.parametrize("phase", ["prepared", "quantized"])
def test_values_are_plain_float_tensors(phase):
    model, x = network()
    values = dbrq.log_values(getattr(convert(model, x), phase), x)
    assert values and all(
        type(v) is torch.Tensor and v.dtype is torch.float32 and not v.__dict__ for v in values.values()
    )
    torch.testing.assert_close(values["5"], run(getattr(convert(model, x), phase), x))


def test_values_are_kept_as_they_were_when_made():
    def forward(m, x):
        y = m.a(x)
        z = m.b(y)
        y.mul_(0.0)
        return z + y

    model, x = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4)
    values = dbrq.log_values(model, x)
    torch.testing.assert_close(values["a"], model.a(x))
    assert (dbrq.log_values(convert(model, x).quantized, x)["a"] != 0).any()


def test_values_of_a_module_called_twice():
    model, x = Call(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(4, 4)), torch.randn(2, 4)
    assert list(dbrq.log_values(model, x)) == ["a", "tanh.0", "a@1"]
    assert list(dbrq.log_values(convert(model, x).quantized, x))[-1] == "a@1"


def test_logging_does_not_disturb_another_call():
    model, x = network()
    converted = convert(model, x).quantized
    before = run(converted, x)
    dbrq.log_values(converted, x)
    assert torch.equal(run(converted, x), before)
