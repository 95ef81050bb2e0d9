"""What someone who had not seen the code broke, and must not break again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers import run, sqnr

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Z = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def quantized(model, x):
    return dbrq.quantize(model.eval(), [x])


@pytest.mark.parametrize(
    "options", [{"kernel_size": 2}, {"kernel_size": 4}, {"kernel_size": (2, 3), "dilation": (3, 1)}]
)
def test_same_padding_that_is_uneven(options):
    model = nn.Sequential(nn.Conv2d(3, 4, padding="same", **options), nn.Conv2d(4, 4, 1))
    got = run(quantized(model, X), X)
    assert got.shape == run(model, X).shape
    assert sqnr(run(model, X), got) > 30


BETWEEN = [
    nn.Upsample(scale_factor=2),
    nn.UpsamplingNearest2d(scale_factor=2),
    nn.UpsamplingBilinear2d(scale_factor=2),
    nn.SyncBatchNorm(8),
]


@pytest.mark.parametrize("between", BETWEEN, ids=str)
def test_modules_of_torch_that_have_no_row_but_call_functions_that_do(between):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), between, nn.Conv2d(8, 4, 1)).eval()
    assert sqnr(run(model, X), run(quantized(model, X), X)) > 30


class Products(nn.Module):
    """Linear layers as GPT-2 spells them, and as others do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.w, self.b = how, nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24))
        self.last = nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.how(self, x))


@pytest.mark.parametrize(
    "how",
    [
        lambda m, x: torch.addmm(m.b, x, m.w),
        lambda m, x: m.b.addmm(x, m.w),
        lambda m, x: x @ m.w + m.b,
        lambda m, x: torch.matmul(x, m.w),
        lambda m, x: torch.mm(x, m.w),
    ],
)
def test_a_product_with_a_parameter_is_a_linear_layer(how):
    model = Products(how)
    report = dbrq.report(quantized(model, Z))
    assert report.coverage == 1.0 and [r.op for r in report.rows if r.macs] == ["linear", "linear"]
    assert sqnr(run(model, Z), run(quantized(model, Z), Z)) > 25


def test_a_replaced_weight_is_told():
    model = quantized(nn.Sequential(nn.Linear(16, 16)), Z)
    model[0].weight = nn.Parameter(torch.zeros(16, 16))
    with pytest.raises(dbrq.QuantizationError, match="replaced"):
        model(Z)


def test_a_bias_that_is_taken_away_is_told():
    float_ = nn.Sequential(nn.Linear(16, 16))
    model = quantized(float_, Z)
    float_[0].bias = model[0].bias = None
    with pytest.warns(UserWarning, match="0 runs in float"):
        result = model(Z)
    assert sqnr(run(float_, Z), result) > 35


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return torch.tanh(x) * 2 + self.norm(self.linear(x))


def test_no_gradient_rather_than_a_wrong_one():
    x = Z.clone().requires_grad_()
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        quantized(Mixed(), Z)(x).sum().backward()
    assert x.grad is None
    assert torch.is_grad_enabled()


def test_next_parameter_of_a_module_without_biases():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return self.linear(x.to(next(self.parameters()).dtype))

    model = nn.Sequential(Plain(), Plain())
    assert sqnr(run(model.eval(), Z), run(quantized(model, Z), Z)) > 25


def test_a_scripted_submodule_stays_float():
    script = torch.jit.script(nn.Tanh())
    model = nn.Sequential(nn.Linear(16, 16), script, nn.Linear(16, 4))
    assert sqnr(run(model.eval(), Z), run(quantized(model, Z), Z)) > 25


def test_vmap_in_forward():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(x) * torch.vmap(lambda i: i * 2)(torch.arange(8.0))[:, None]

    model = Masked()
    assert sqnr(run(model.eval(), Z), run(quantized(model, Z), Z)) > 25


def test_a_bias_computed_in_forward_is_added_in_float():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.q, self.v = nn.Linear(16, 16, bias=False), nn.Parameter(Z[0, :8]), nn.Parameter(Z[1, :8])

        def forward(self, x):
            return F.linear(x, self.linear.weight, torch.cat((self.q, self.v))).relu()

    model = nn.Sequential(Joined(), nn.Linear(16, 4))
    converted = quantized(model, Z)
    assert dbrq.report(converted).coverage == 1.0
    assert sqnr(run(model.eval(), Z), run(converted, Z)) > 25


def test_clear_errors():
    with pytest.raises(dbrq.QuantizationError, match="lazy"):
        dbrq.prepare(nn.Sequential(nn.LazyLinear(4)), Z)
    with pytest.raises(dbrq.QuantizationError, match="takes a tensor"):
        quantized(nn.Sequential(nn.Linear(16, 4)), Z)(None)
    with pytest.raises(dbrq.QuantizationError):
        dbrq.save(quantized(nn.Sequential(nn.Linear(16, 4)), Z), "no/such/folder/model.pt")


def test_attention_counts_in_the_coverage_of_everything():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            return F.scaled_dot_product_attention(*self.qkv(x)[None].chunk(3, -1))

    report = dbrq.report(quantized(Attention(), Z))
    linear, attention = 8 * 16 * 48, 2 * 8 * 8 * 16
    assert report.coverage == 1.0
    assert report.coverage_all == pytest.approx(linear / (linear + attention))


def test_inputs_are_known_by_name_however_the_call_is_spelled():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x, mask=None, y=None):
            out = self.a(x) + self.b(y)
            return out if mask is None else out * mask

    model = Two().eval()
    x, y = Z, 100 * Z.flip(0)
    prepared = dbrq.prepare(model, {"x": x, "y": y})
    run(prepared, {"y": y, "x": x})
    converted = dbrq.convert(prepared, strict=True)
    expected = run(model, {"x": x, "y": y})
    for spelled in ({"y": y, "x": x}, (x, None, y)):
        assert sqnr(expected, run(converted, spelled)) > 30
    with torch.no_grad():
        assert torch.equal(converted(x, y=y), converted(y=y, x=x))


def test_a_leaf_whose_bias_is_parametrized():
    class Doubled(nn.Module):
        def forward(self, bias):
            return 2 * bias

    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.utils.parametrize.register_parametrization(model[0], "bias", Doubled())
    assert sqnr(run(model.eval(), Z), run(quantized(model, Z), Z)) > 25


def test_a_root_that_stays_float():
    model, x = nn.ConvTranspose2d(4, 8, 3).eval(), torch.randn(1, 4, 5, 5)
    quantized = dbrq.quantize(model, [x])
    torch.testing.assert_close(quantized(x), model(x))
    torch.testing.assert_close(dbrq.lower(quantized, x)(x), model(x))


def _moved(x):
    return x + 1


def test_code_that_has_no_hash():
    """TorchDynamo makes code with slices among its constants, which torchvision's compiled functions run."""
    code = _moved.__code__.replace(co_consts=(*_moved.__code__.co_consts, slice(0, 3)))
    moved = type(_moved)(code, globals())

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(moved(self.layer(x)))

    quantized = dbrq.quantize(Calls().eval(), [torch.randn(2, 4)])
    assert dbrq.report(quantized).coverage == 1
    assert quantized(torch.randn(3, 4)).shape == (3, 4)
