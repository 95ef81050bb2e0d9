"""Coverage: multiply-accumulates of every op that has weights, and the share of them that is int8."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig
from torch.utils.flop_counter import FlopCounterMode

import dbrq
from tests.helpers.models import Call
from tests.helpers.running import convert, quantized_on

Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def row(model: nn.Module, path: str):
    return next(r for r in dbrq.report(model).rows if r.path == path)


def without(*names: str) -> QConfigMapping:
    mapping = dbrq.default_qconfig_mapping()
    for name in names:
        mapping.set_module_name(name, None)
    return mapping


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


def test_attention_counts_in_the_coverage_of_everything():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            return F.scaled_dot_product_attention(*self.qkv(x)[None].chunk(3, -1))

    report = dbrq.report(quantized_on(Attention(), Z))
    linear, attention = 8 * 16 * 48, 2 * 8 * 8 * 16
    assert report.coverage == 1.0
    assert report.coverage_all == pytest.approx(linear / (linear + attention))
