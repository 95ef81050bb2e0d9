"""What the report says of paths."""

from torch import nn

import dbrq
from tests.helpers.control_flow.cases import CASES, trips
from tests.helpers.control_flow.runs import data, linears
from tests.helpers.paths import (
    assert_equal,
    assert_int8,
    by_call,
    calibrated,
    call,
    float_model,
    quantized_model,
    table,
)


def test_a_model_of_one_path_has_no_second_table():
    quantized = dbrq.quantize(nn.Sequential(*linears(2)), [data()])
    text = str(dbrq.report(quantized))
    assert "paths" not in text
    rows = dbrq.report(quantized).paths
    assert rows and {row.number for row in rows} == {0}
    assert {row.shared for row in rows} == {0}


def test_the_rows_of_paths_say_what_they_took():
    runs = trips(True, False, True, True)
    model = float_model("branches that meet in add")
    quantized = dbrq.convert(calibrated(model, runs))
    rows = by_call(dbrq.report(quantized).paths)["", 0]
    assert [row.seen for row in rows] == [3, 1]
    with_relu = max(row.ops for row in rows)
    assert {row.ops for row in rows} == {with_relu, with_relu - 1}
    # a, add and out are on both
    assert all(row.shared >= 3 for row in rows) and len({row.shared for row in rows}) == 1
    text = str(dbrq.report(quantized))
    assert "paths" in text and text.index("paths") > text.index("out")


def test_calls_of_a_child_have_paths_of_their_own():
    rows = by_call(dbrq.report(quantized_model("two calls of a child")).paths)
    assert len(rows["child", 0]) == len(rows["child", 1]) == 2
    assert ("child", 2) not in rows
    assert sum(row.seen for row in rows["child", 0]) == 4


def test_a_path_of_prepare_alone_counts_as_not_seen():
    model = float_model("branches that meet in add")
    prepared = dbrq.prepare(model, trips(True)[0].args)
    assert [row.seen for row in dbrq.report(prepared).paths if row.module == ""] in ([], [0])
    call(prepared, trips(False)[0])
    seen = [row.seen for row in dbrq.report(prepared).paths if row.module == ""]
    assert sorted(seen) in ([1], [0, 1])


def test_calibrate_records_paths_as_calls_do():
    model, runs = float_model("branches that meet in cat"), CASES["branches that meet in cat"].recorded
    prepared = dbrq.calibrate(dbrq.prepare(model, runs[0].args), [run.args for run in runs])
    by_calls = quantized_model("branches that meet in cat")
    quantized = dbrq.convert(prepared)
    assert table(quantized) == table(by_calls)
    for run in runs:
        assert_equal(call(quantized, run), call(by_calls, run))


def test_quantize_records_the_paths_of_its_data():
    model, runs = float_model("branch on data"), CASES["branch on data"].recorded
    quantized = dbrq.quantize(model, [run.args for run in runs])
    for run in runs:
        assert_int8(model, quantized, run)
