"""``dynamic_qconfig_mapping``: each token by its own range, tables that are tied, and what is stored and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import default_dynamic_qconfig

import dbrq
from tests.helpers.judging import rows, sqnr
from tests.helpers.reference import fake_quantized
from tests.helpers.running import convert

WIDTH, WORDS = 32, 50
#: Tokens that differ in size, as those of the residual stream do.
X = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 7)[None, :, None]
LAYERS = {
    "bias": lambda: nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, 16)),
    "no bias": lambda: nn.Sequential(nn.Linear(WIDTH, 48, bias=False), nn.ReLU(), nn.Linear(48, 16, bias=False)),
}
layers = pytest.mark.parametrize("layer", list(LAYERS))


@pytest.mark.parametrize("reduce_range", [False, True], ids=["8 bits", "7 bits"])
@pytest.mark.parametrize("bias", [True, False])
def test_each_token_has_a_range_of_its_own(bias, reduce_range):
    models = convert(nn.Linear(WIDTH, 24, bias), X, dbrq.dynamic_qconfig_mapping(reduce_range=reduce_range))
    expected = fake_quantized(models.quantized, models.model, X)
    assert sqnr(expected, models.quantized(X)) > 100


@layers
def test_small_tokens_keep_their_precision(layer):
    model = LAYERS[layer]().eval()
    for options in ({}, {"reduce_range": True}):
        ours = convert(model, X, dbrq.dynamic_qconfig_mapping(**options)).quantized
        assert min(sqnr(a, b) for a, b in zip(model(X).unbind(1), ours(X).unbind(1), strict=True)) > 27
    whole = convert(model, X, default_dynamic_qconfig).quantized
    assert sqnr((model(X) - model(0 * X))[:, 0], (whole(X) - model(0 * X))[:, 0]) < 5


@layers
def test_a_token_alone_is_as_among_others(layer):
    quantized = convert(LAYERS[layer](), X, dbrq.dynamic_qconfig_mapping()).quantized
    among = quantized(X)
    for token in range(X.shape[1]):
        assert sqnr(among[0, token], quantized(X[:1, token])[0]) > 60
        assert sqnr(among[0, token], quantized(X[0, token])) > 60
    assert quantized(X[:0]).shape == (0, 7, 16)


@layers
@pytest.mark.parametrize("form", ["graph", "export", "torchscript", "onednn"])
def test_other_forms_compute_the_same(layer, form):
    models = convert(LAYERS[layer](), X, dbrq.dynamic_qconfig_mapping())
    if form == "graph":
        other: Any = torch.jit.script(dbrq.rewrite(models.quantized, X))
    elif form == "export":
        other = dbrq.export(models.quantized, X).module()
    else:
        other = dbrq.lower(models.quantized, X, backend=form)
        kernels = {row.kernel.partition(" + ")[0] for row in dbrq.report(other).rows if row.op == "linear"}
        expected = {"torchscript": "onednn.qlinear_pointwise (dynamic, by row)", "onednn": "onednn: linear_by_row"}
        assert kernels == {expected[form]}
    for x in (X, X[:1], X[:1, 3:4], X.flip(0).flip(1)):
        if form != "export" or x.shape[1] > 1:
            assert sqnr(models.quantized(x), other(x)) > 60


def test_lowered_files_compute_the_same(tmp_path):
    lowered = dbrq.lower(convert(LAYERS["bias"](), X, dbrq.dynamic_qconfig_mapping()).quantized, X)
    dbrq.save(lowered, tmp_path / "lowered.pt")
    assert torch.equal(torch.jit.load(tmp_path / "lowered.pt")(X), lowered(X))


def test_converted_files_compute_the_same(tmp_path):
    quantized = convert(LAYERS["bias"](), X, dbrq.dynamic_qconfig_mapping()).quantized
    for name in ("model.pt", "model.safetensors"):
        dbrq.save(quantized, tmp_path / name)
        assert torch.equal(dbrq.load(tmp_path / name)(X), quantized(X))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_not_finite_numbers_are_refused(number):
    quantized = convert(nn.Linear(WIDTH, 4), X, dbrq.dynamic_qconfig_mapping()).quantized
    x = X.clone()
    x[1, 2, 3] = number
    with pytest.raises(dbrq.KernelInputError, match="NaN or infinity"):
        quantized(x)


def test_static_activations_by_row_are_refused_in_words():
    from torch.ao.quantization import PerChannelMinMaxObserver, QConfig, default_per_channel_weight_observer

    observer = PerChannelMinMaxObserver.with_args(qscheme=torch.per_channel_affine)
    models = convert(nn.Linear(WIDTH, 4), X, QConfig(observer, default_per_channel_weight_observer))
    (row,) = rows(models.quantized, "linear")
    assert row.reason == "kernels take one scale per activation, and its qconfig asks for torch.per_channel_affine"


# Tables


class Text(nn.Module):
    """An embedding and a head, which may share one weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm, self.body = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.table(ids))))


IDS = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
INT8_TABLE, FLOAT_TABLE = WORDS * WIDTH + 4 * WORDS, 4 * WORDS * WIDTH
AFFINE_TABLE = INT8_TABLE + 4 * WORDS
BODY = WIDTH * WIDTH + 4 * WIDTH + 4 * WIDTH
NORM = 2 * 4 * WIDTH
UNUSED = 4 * (WIDTH * WIDTH + WIDTH)
#: (tied, embeddings=) -> what table and head are stored in, and the embedding's precision.
TABLES = {
    (True, None): (INT8_TABLE, "int8"),
    (True, True): (INT8_TABLE, "int8"),
    (True, False): (INT8_TABLE + FLOAT_TABLE, "float"),
    (False, None): (INT8_TABLE + FLOAT_TABLE, "float"),
    (False, True): (INT8_TABLE + AFFINE_TABLE, "int8"),
    (False, False): (INT8_TABLE + FLOAT_TABLE, "float"),
}


@pytest.mark.parametrize("weight_only", [False, True], ids=["dynamic", "weight only"])
@pytest.mark.parametrize(("tied", "embeddings"), list(TABLES))
def test_what_is_stored_and_read(tied, embeddings, weight_only):
    model = Text(tied).eval()
    models = convert(model, IDS, dbrq.dynamic_qconfig_mapping(weight_only=weight_only, embeddings=embeddings))
    stored, precision = TABLES[tied, embeddings]
    (row,) = rows(models.quantized, "embedding")
    assert row.precision == precision
    tensors = {t.data_ptr(): t.nbytes for t in models.quantized.state_dict().values()}
    assert sum(tensors.values()) == stored + BODY + NORM + UNUSED
    facts = dbrq.report(models.quantized).facts
    assert facts.bytes_after == stored + BODY + NORM + UNUSED
    assert facts.bytes_per_token == INT8_TABLE + BODY + NORM == dbrq.report(models.prepared).facts.bytes_per_token
    assert sqnr(model(IDS), models.quantized(IDS)) > 30
    lowered = dbrq.lower(models.quantized, IDS)
    assert dbrq.report(lowered).facts.bytes_per_token == facts.bytes_per_token
    assert sqnr(models.quantized(IDS), lowered(IDS)) > 60
    assert "a token that is decoded alone reads 3.3 kB of weights" in str(dbrq.report(lowered))


def test_a_head_in_float_leaves_its_table_in_float():
    models = convert(Text(True), IDS, dbrq.dynamic_qconfig_mapping(), exclude=["head"])
    (row,) = rows(models.quantized, "embedding")
    assert row.precision == "float"
    assert "table.weight_int8" not in models.quantized.state_dict()


def test_tables_of_the_default_recipe_stay_in_float():
    models = convert(Text(True), IDS)
    (row,) = rows(models.quantized, "embedding")
    assert row.precision == "float"


def test_models_without_text_are_not_told_about_tokens():
    assert "token" not in str(dbrq.report(convert(nn.Linear(4, 4), torch.randn(2, 4)).quantized))


def test_inductor_computes_the_same():
    quantized = convert(LAYERS["bias"](), X, dbrq.dynamic_qconfig_mapping()).quantized
    lowered = dbrq.lower(quantized, X, backend="inductor")
    for x in (X, X[:1], X.flip(0).flip(1)):
        assert sqnr(quantized(x), lowered(x)) > 60
