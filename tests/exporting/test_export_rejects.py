"""Models that ``torch.export`` rejects run through Inductor, and export, by way of dbrq's graph."""

import contextlib
import copy
import logging
import warnings

import pytest
import torch

import dbrq
from dbrq.graph.writer import ONE_PATH
from dbrq.lowering.inductor import InductorModel
from tests.helpers.export_rejects import CASES
from tests.helpers.judging import assert_same_containers, sqnr
from tests.helpers.running import floats, has_compiler, run

#: These are compiled for other sizes too; the others' are left to the exported program, which takes no compiler.
COMPILED_AGAIN = ("ReturnsDataclass",)
cases = pytest.mark.parametrize("name", CASES)


@contextlib.contextmanager
def silent():
    """torch.export says at length why it fails."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def quantized(name):
    case = CASES[name]
    model, example = case.make().eval(), case.example()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")
        return model, example, dbrq.quantize(model, [example] * 2)


def assert_agree(got, expected, decibels):
    """Tensors in order, whatever holds them."""
    got, expected = floats(got), floats(expected)
    assert [t.shape for t in got] == [t.shape for t in expected]
    for a, b in zip(got, expected, strict=True):
        assert sqnr(b, a) >= decibels, f"{sqnr(b, a):.1f} dB"


@cases
def test_torch_export_rejects_it(name):
    """Both ways, or the model has no place in this list."""
    case = CASES[name]
    for strict in (True, False):
        torch._dynamo.reset()
        with silent(), pytest.raises(Exception):  # noqa: B017
            torch.export.export(copy.deepcopy(case.make().eval()), case.example(), strict=strict)


@cases
def test_dbrq_exports_it(name):
    case = CASES[name]
    model, example, q = quantized(name)
    assert dbrq.report(q).coverage == 1
    program = dbrq.export(q, example)
    assert any("quantized_decomposed" in str(node.target) for node in program.graph.nodes)
    module = program.module()
    assert_agree(run(module, example), run(q, example), 30)
    assert_agree(run(module, example), run(model, example), 15)
    if case.other is not None:
        other = case.other()
        assert_agree(run(module, other), run(q, other), 30)
    if case.off is not None:
        with pytest.raises(RuntimeError, match=ONE_PATH):
            run(module, case.off())


#: C++ of these takes as long to compile as that of all others together.
SLOW = {"ByKind", "Lengths", "Experts", "Settles"}


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_inductor_runs_it(name):
    case = CASES[name]
    model, example, q = quantized(name)
    lowered = dbrq.lower(q, example, backend="inductor")
    assert isinstance(dbrq.lowered_form(lowered), InductorModel), "not as one graph"
    assert dbrq.report(lowered).coverage == 1
    layers = sum(row.op in ("conv2d", "linear") for row in dbrq.report(lowered).rows)
    kernels = sum(n for kernel, n in dbrq.lowered_form(lowered).calls().items() if kernel.startswith("onednn.q"))
    assert kernels >= layers > 0, dbrq.lowered_form(lowered).calls()
    got = run(lowered, example)
    assert_same_containers(got, run(model, example))
    assert_agree(got, run(q, example), 30)
    assert_agree(got, run(model, example), 15)
    if case.off is not None:
        with pytest.raises(RuntimeError, match=ONE_PATH):
            run(lowered, case.off())
    if name in COMPILED_AGAIN:
        other = case.other()
        assert_agree(run(lowered, other), run(q, other), 30)
