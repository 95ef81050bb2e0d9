"""What the report says of each op, on models small enough to compute by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.judging import sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run


def row(model: nn.Module, path: str):
    return next(r for r in dbrq.report(model).rows if r.path == path)


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


def test_a_model_that_holds_a_scripted_one():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))).eval()
    report = dbrq.report(convert(model, torch.randn(4, 8)).quantized)
    assert report.rows[0].path == "0" and report.rows[0].precision == "int8"
