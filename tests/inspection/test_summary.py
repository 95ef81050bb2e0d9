"""The forms in which findings are read: one screen, tables, dicts, notebooks, printed models; and what they say."""

import builtins
import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.inspection.rows import Facts, ReportRow, as_json, from_json
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))).cumsum(-1)


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.Sigmoid(),
        nn.Linear(16, 4),
    )  # fmt: skip
    return model.eval(), torch.randn(4, 3, 8, 8)


@pytest.fixture(scope="module")
def both():
    model, x = network()
    return model, convert(model, x), x


# One screen


@pytest.mark.parametrize("blocks", [1, 40])
def test_printing_a_report_fits_a_screen(blocks):
    names = {f"{'a_long_name_of_a_block_' * 3}{i}": Block(16) for i in range(blocks)}
    model = Call(lambda m, x: [x := getattr(m, name)(x) for name in names][-1], **names)
    report = dbrq.report(convert(model, torch.randn(2, 5, 16)).quantized)
    lines = str(report).splitlines()
    assert len(report.rows) >= 6 * blocks and len(lines) <= 42
    assert max(map(len, lines)) <= 160
    assert len(report.table().splitlines()) == len(report.rows) + 3


def test_the_screen_says_what_matters(both):
    _, models, _ = both
    text = str(dbrq.report(models.quantized))
    rows = dbrq.report(models.quantized).rows
    why = next(row.reason for row in rows if row.op == "sigmoid")[:40]
    for said in ("Sequential, converted", "100.0% of multiply-accumulates", "what to do next", "dbrq.lower", why,
                 "est. time", "runs in", "report.table()"):  # fmt: skip
        assert said in text, text
    assert "calibrate it" in str(dbrq.report(models.prepared))


def test_a_lowered_model_has_the_same_facts(both):
    _, models, x = both
    lowered = dbrq.report(dbrq.lower(models.quantized, x))
    converted = dbrq.report(models.quantized)
    assert lowered.facts.stage == "lowered" and "dbrq.lower(" not in str(lowered)
    assert (lowered.facts.bytes_before, lowered.facts.ranges) == (
        converted.facts.bytes_before, converted.facts.ranges
    )  # fmt: skip


def test_reports_of_files_from_before_are_read():
    """They held rows of seven fields, and nothing else."""
    rows, facts = from_json('[["0", "linear", "int8", "", "onednn.qlinear_pointwise", 12, true]]')
    assert rows == (ReportRow("0", "linear", "int8", "", "onednn.qlinear_pointwise", 12),) and not facts.bytes_before
    report = dbrq.inspection.report.Report(rows, facts=facts)
    assert "weights:" not in str(report) and report.coverage == 1.0


def test_facts_survive_json(both):
    _, models, _ = both
    for model in (models.prepared, models.quantized):
        report = dbrq.report(model)
        assert from_json(as_json(report.rows, report.facts)) == (report.rows, report.facts)


def test_reports_without_ops():
    text = str(dbrq.report(convert(nn.Identity(), torch.randn(2, 4)).quantized))
    assert "0.0%" in text
    assert str(dbrq.inspection.report.Report(()))


# Bytes


def state_bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_bytes_before_and_after(both):
    model, models, _ = both
    facts = dbrq.report(models.quantized).facts
    assert facts.bytes_before == state_bytes(model)
    weights = [model[i].weight for i in (0, 4, 6)]
    saved = sum(3 * w.numel() - 4 * w.shape[0] for w in weights)  # one float scale for each channel
    assert facts.bytes_after == facts.bytes_before - saved
    prepared = dbrq.report(models.prepared).facts
    assert (prepared.bytes_before, prepared.bytes_after) == (facts.bytes_before, facts.bytes_after)


def test_weights_that_two_layers_share_count_once():
    model = Call(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(8, 8, False), b=nn.Linear(8, 8, False))
    model.b.weight = model.a.weight
    models = convert(model, torch.randn(2, 8))
    for each in (models.prepared, models.quantized):
        facts = dbrq.report(each).facts
        assert (facts.bytes_before, facts.bytes_after) == (256, 64 + 32)


def test_recurrent_layers_count():
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig

    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    models = convert(nn.Sequential(nn.LSTM(8, 8)), torch.randn(3, 2, 8), mapping)
    before, after = (getattr(dbrq.report(models.quantized).facts, f"bytes_{name}") for name in ("before", "after"))
    assert before == state_bytes(nn.LSTM(8, 8)) and after < 0.6 * before
    assert dbrq.report(models.prepared).facts.bytes_after < 0.6 * before


# Rows in other forms


def test_dicts_have_the_attributes_of_rows(both):
    model, models, x = both
    for found in (dbrq.report(models.quantized), dbrq.compare(model, models.quantized, x),
                  dbrq.profile(models.quantized, x, repeats=1)):  # fmt: skip
        dicts = found.to_dicts()
        assert len(dicts) == len(found.rows) > 3
        for row, as_dict in zip(found.rows, dicts, strict=True):
            assert all(getattr(row, name) == value for name, value in as_dict.items())


def test_data_frames(both):
    pandas = pytest.importorskip("pandas")
    _, models, _ = both
    report = dbrq.report(models.quantized)
    frame = report.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and list(frame.path) == [row.path for row in report.rows]
    assert frame.groupby("precision").macs.sum()["int8"] == sum(row.macs for row in report.rows)


def test_without_pandas_it_says_what_to_install(both, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError("No module named 'pandas'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(dbrq.ConfigurationError, match="pip install pandas"):
        dbrq.report(both[1].quantized).to_dataframe()


def test_notebooks_get_every_row_as_html():
    model = Call(lambda m, x: m.a(x), **{"a": nn.Linear(4, 4), "b<i>": nn.Linear(4, 4)})
    report = dbrq.report(convert(model, torch.randn(2, 4)).quantized)
    text = report._repr_html_()
    assert text.count("<tr>") == len(report.rows) + 1
    assert "b&lt;i&gt;" in text and "<i>" not in text, "names are text"


# Local and accumulated error


def test_local_errors_are_those_of_the_op_on_float_inputs(both):
    model, models, x = both
    rows = {row.path: row for row in dbrq.compare(model, models.quantized, x).rows}
    with torch.no_grad():
        before = model[:6](x)  # what the last layer gets in the float model
        own = models.quantized[6](before)  # called by itself, it reads floats
    assert rows["6"].local == pytest.approx(sqnr(model(x), own), abs=0.01)
    assert rows["6"].sqnr == pytest.approx(sqnr(model(x), run(models.quantized, x)), abs=0.01)
    assert rows["5"].local > 80, "a sigmoid in float adds nothing"
    assert rows["5"].sqnr < 60


def test_the_first_layer_has_no_error_but_its_own(both):
    model, models, x = both
    first = next(row for row in dbrq.compare(model, models.quantized, x).rows if row.path == "2")
    assert first.local == first.sqnr


def test_local_errors_name_the_layer_that_was_spoiled():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).eval()
    x = torch.randn(32, 16)
    quantized = convert(model, x).quantized
    with torch.no_grad():
        quantized[2].weight_scale.mul_(1.3)
    rows = {row.path: row for row in dbrq.compare(model, quantized, x).rows}
    assert min(rows.values(), key=lambda row: row.local).path == "2"
    assert all(row.local > 25 for path, row in rows.items() if path != "2")
    assert all(rows[str(i)].sqnr < rows[str(i)].local - 15 for i in range(3, 6)), "all behind it suffer"


def test_local_errors_of_values_in_integers_and_in_place():
    def forward(m, x):
        y = m.a(x).relu_()
        z = F.max_pool2d(m.b(y), 2)
        return m.c(torch.cat([z, F.max_pool2d(y, 2).add_(z)], 1))

    model = Call(forward, a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    both = convert(model, x)
    before = run(both.quantized, x)
    rows = dbrq.compare(model, both.quantized, x).rows
    assert {row.path for row in rows} >= {"b", "c", "cat.0"} and all(row.local >= row.sqnr - 6 for row in rows)
    assert torch.equal(run(both.quantized, x), before)


def test_infinite_elements_that_both_have_are_no_noise():
    def forward(m, x):
        return m.a(x).masked_fill(torch.eye(4).bool(), -math.inf) + 1.0

    model, x = Call(forward, a=nn.Linear(4, 4)), torch.randn(4, 4)
    rows = dbrq.compare(model, convert(model, x).quantized, x).rows
    assert {row.path for row in rows} == {"a", "add.0"} and all(20 < row.sqnr < 80 for row in rows)


def test_comparing_in_inference_mode(both):
    model, models, x = both
    expected = [(row.path, pytest.approx(row.local)) for row in dbrq.compare(model, models.quantized, x).rows]
    with torch.inference_mode():
        assert [(row.path, row.local) for row in dbrq.compare(model, models.quantized, x).rows] == expected


def test_comparing_float_models_has_no_local_error(both):
    model, models, x = both
    for other in (model, models.prepared):
        assert all(row.local is None for row in dbrq.compare(model, other, x).rows)


def test_lowered_models_have_no_values_to_compare(both):
    model, models, x = both
    with pytest.raises(dbrq.ConfigurationError, match="lowered"):
        dbrq.compare(model, dbrq.lower(models.quantized, x), x)


def test_worst_first(both):
    model, models, x = both
    result = dbrq.compare(model, models.quantized, x)
    values = [row.sqnr for row in result.rows]
    assert values == sorted(values) and str(result).splitlines()[0].split() == ["path", "op", "SQNR", "(dB)", "local",
                                                                                "(dB)"]  # fmt: skip


# Printed models


def test_int8_layers_say_so_where_they_stand(both):
    model, models, _ = both
    text = repr(models.quantized)
    assert "(0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), bias=False, int8)" in text
    assert "(4): Linear(in_features=288, out_features=16, bias=True, int8)" in text
    assert "(2): ReLU(int8)" in text and "(5): Sigmoid()" in text
    assert len(text.splitlines()) == len(repr(model).splitlines()), "one line for each layer, as before"
    assert "int8" not in repr(models.prepared[0]) and "int8" not in repr(model)


def test_functions_in_int8_are_named():
    model = Call(lambda m, x: m.a(x) + m.b(x), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1))
    assert "int8: add" in repr(convert(model, torch.randn(1, 3, 4, 4)).quantized)


def test_layers_in_float_are_not_marked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mapping = dbrq.default_qconfig_mapping().set_module_name("1", None)
    quantized = convert(model, torch.randn(2, 4), mapping).quantized
    assert "int8" in repr(quantized[0]) and "int8" not in repr(quantized[1])


def test_other_kinds_of_int8():
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float_qparams_weight_only_qconfig

    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    assert repr(convert(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), mapping).quantized[0]).endswith(
        "int8 dynamic)"
    )
    mapping = QConfigMapping().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
    embedding = convert(nn.Sequential(nn.Embedding(5, 4)), torch.tensor([1]), mapping).quantized[0]
    assert repr(embedding) == "Embedding(5, 4, int8 weights)"


def test_marks_survive_copies_and_files(both, tmp_path):
    _, models, _ = both
    text = repr(models.quantized)
    dbrq.save(models.quantized, tmp_path / "model.pt")
    again = dbrq.load(tmp_path / "model.pt")
    for other in (copy.deepcopy(models.quantized), pickle.loads(pickle.dumps(models.quantized)), again):
        assert repr(other) == text
        other[0].padding = (1, 1)
        assert "padding=(1, 1)" in repr(other[0]), "it is its own"
    assert repr(models.quantized) == text


def test_a_root_that_is_a_layer():
    assert repr(convert(nn.Linear(4, 3), torch.randn(2, 4)).quantized) == (
        "Linear(in_features=4, out_features=3, bias=True, int8)"
    )


# Profiles of converted models


def test_profile_of_a_converted_model(both):
    _, models, x = both
    before = run(models.quantized, x)
    found = dbrq.profile(models.quantized, x, repeats=3)
    assert {row.op for row in found.rows} >= {"0", "4", "5", "6"}
    assert "1" not in {row.op for row in found.rows} and "2" not in {row.op for row in found.rows}, "they are fused"
    assert sum(found.spent.values()) == pytest.approx(found.whole)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert all(0 <= row.conversion <= row.microseconds for row in found.rows)
    conv = next(row for row in found.rows if row.op == "0")
    assert conv.conversion > 0 and conv.computes == "conv2d, int8" and conv.shape == (4, 8, 6, 6) and conv.gops
    assert "floats to integers and back" in str(found) and "what a call does" in str(found)
    assert torch.equal(run(models.quantized, x), before)


def test_a_small_model_is_slow_for_its_python():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    x = torch.randn(1, 4)
    found = dbrq.profile(convert(model, x).quantized, x)
    assert any("8 int8 layers with so little to do" in sentence and "dbrq.lower" in sentence for sentence in found.why)


def test_a_model_that_goes_to_and_fro_is_told():
    def forward(m, x):
        for layer in (m.a, m.b, m.c):
            x = layer(x).repeat(1, 1, 8, 8).sin()
        return x

    model = Call(forward, **{name: nn.Conv2d(4, 4, 1, stride=8) for name in "abc"})
    x = torch.randn(1, 4, 512, 512)
    found = dbrq.profile(convert(model, x).quantized, x, repeats=3)
    assert any("turns floats into integers" in sentence for sentence in found.why), found
    assert any("3 ops in float" in sentence or "6 ops in float" in sentence for sentence in found.why), found


def test_measured_shares_are_in_the_report(both):
    _, models, x = both
    report = dbrq.report(models.quantized, profile=dbrq.profile(models.quantized, x, repeats=2))
    assert "measured" in str(report) and "measured" not in str(dbrq.report(models.quantized))
    assert report == dbrq.report(models.quantized), "the rows are the same"


def test_a_profile_that_knows_other_names_is_left_out(both):
    _, models, x = both
    lowered = dbrq.lower(models.quantized, x)
    assert "measured" not in str(dbrq.report(lowered, profile=dbrq.profile(lowered, x, repeats=1)))


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), None, "model"])
def test_profile_takes_no_others(wrong):
    with pytest.raises(dbrq.ConfigurationError, match="converted and lowered"):
        dbrq.profile(wrong, torch.randn(2, 2))


def test_profile_takes_at_least_one_call(both):
    with pytest.raises(dbrq.ConfigurationError, match="repeats"):
        dbrq.profile(both[1].quantized, both[2], repeats=0)


def test_profile_of_a_model_with_several_calls_and_paths():
    def forward(m, x):
        x = m.a(torch.tanh(m.a(x)))
        return m.b(x) if x.sum() > 0 else x

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    prepared = dbrq.prepare(model, torch.randn(2, 4))
    for i in range(8):
        prepared(torch.randn(2, 4) + i - 4)
    quantized = dbrq.convert(prepared)
    found = dbrq.profile(quantized, torch.randn(2, 4), repeats=2)
    assert {"a", "a@1", "sum.0"} <= {row.op for row in found.rows}, "tanh is fused into a"
    assert dbrq.profile(dbrq.lower(quantized, torch.randn(2, 4)), torch.randn(2, 4), repeats=2).rows


# What a report knows beside the ops


def test_chosen_ranges(both):
    _, models, _ = both
    ranges = {r.op: r for r in dbrq.report(models.quantized).facts.ranges}
    assert set(ranges) >= {"0", "4", "6"}
    assert ranges["6"].low == 0 and 0.5 < ranges["6"].high < 1.1, "what a sigmoid gives"
    assert ranges["0"].low < -1 and ranges["0"].high > 1 and ranges["0"].levels in (128, 256)
    assert all(r.seen is None and not r.counts for r in ranges.values()), "a converted model has forgotten"


def test_a_prepared_model_knows_histograms(both):
    _, models, x = both
    found = {r.op: r for r in dbrq.report(models.prepared).facts.ranges}
    first = found["0"]
    assert first.seen == (pytest.approx(float(x.min())), pytest.approx(float(x.max())))
    assert sum(first.counts) == x.numel()
    middle = sum(first.counts[len(first.counts) // 3 : 2 * len(first.counts) // 3])
    assert middle > 0.5 * x.numel(), "of a normal distribution"
    chosen = {r.op: (r.low, r.high) for r in dbrq.report(models.quantized).facts.ranges}
    assert {op: (r.low, r.high) for op, r in found.items()} == chosen


def test_edges_pass_through_what_only_moves_elements(both):
    _, models, _ = both
    report = dbrq.report(models.quantized)
    names = [(report.rows[a].path, report.rows[b].path) for a, b in report.facts.edges]
    assert names == [("0", "1"), ("1", "2"), ("2", "4"), ("4", "5"), ("5", "6")]  # 3 flattens


def test_facts_take_no_part_in_equality():
    assert dbrq.inspection.report.Report((), facts=Facts("A")) == dbrq.inspection.report.Report((), facts=Facts("B"))
    assert math.isfinite(dbrq.report(convert(nn.Linear(2, 2), torch.randn(2, 2)).quantized).coverage)


def test_a_tied_embedding_that_is_float_is_not_marked():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)).eval()
    model[1].weight = model[0].weight
    quantized = dbrq.quantize(model, [torch.arange(50)[None]])
    assert "int8" not in repr(quantized[0]) and "int8" in repr(quantized[1])
