"""The op table: every spelling is what torch passes on, and every leaf module is known."""

import inspect
import operator

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import dbrq
from dbrq.mappings import FUNCTIONS, LEAVES, TABLE, Role, function_name, leaf_row
from dbrq.op_facts import mutates, reads_values
from tests.helpers.op_examples import ARGUMENTS, BY_NAME, MODULES, NEVER_ARRIVES, arguments, image, readable
from tests.helpers.running import convert


class Recording(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("func", list(FUNCTIONS), ids=readable)
def test_a_spelling_is_what_torch_passes_to_a_mode(func):
    spelling = FUNCTIONS[func]
    args = arguments(func, spelling)
    with Recording() as recording:
        func(*args)
    if func in NEVER_ARRIVES:
        assert func not in recording.seen and FUNCTIONS[recording.seen[0]].row is spelling.row, NEVER_ARRIVES[func]
    else:
        assert recording.seen[0] == func  # == since property getters are made anew each time


@pytest.mark.parametrize("func", [f for f in FUNCTIONS if f not in NEVER_ARRIVES], ids=readable)
def test_binding_gives_the_arguments_in_the_rows_order(func):
    spelling = FUNCTIONS[func]
    name = spelling.row.name
    if spelling.row.params == "input":
        return  # of moves only the input is bound
    given = ARGUMENTS.get(name, lambda: {"input": image()})()
    args = arguments(func, spelling)
    bound = dict(
        zip([item.partition("=")[0] for item in spelling.row.params.split()], spelling.bind(args, {}), strict=True)
    )
    for parameter, value in zip(spelling.names, args, strict=False):
        assert bound[parameter] is value
    by_keyword = spelling.bind([], dict(zip(spelling.names, args, strict=False)))
    assert all(a is b for a, b in zip(by_keyword, bound.values(), strict=True))
    assert set(given) <= set(bound)


OPERATORS = [(row.name, op) for row in TABLE for op in row.operators]


@pytest.mark.parametrize("name, op", OPERATORS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("other", ["tensor", "number"])
def test_operators_arrive_as_a_spelling_of_their_row(name, op, other):
    x, y = torch.rand(3, 3), torch.rand(3, 3) if other == "tensor" else 2.0
    if op is operator.matmul and other == "number":
        return  # numbers have no matmul
    with Recording() as recording:
        if op in (abs, operator.neg):
            op(x)
            return
        op(x, y)
        if op not in (operator.matmul, operator.iadd, operator.isub, operator.imul, operator.itruediv):
            op(y, x)
    for func in recording.seen:
        assert FUNCTIONS[func].row.name == name
        assert FUNCTIONS[func].inplace == op.__name__.startswith("i")


@pytest.mark.parametrize("name", [row.name for row in TABLE if row.inplace])
def test_inplace_spellings_are_known_to_write(name):
    for func, spelling in FUNCTIONS.items():
        if spelling.row.name == name:
            assert spelling.inplace == mutates(func), readable(func)


def test_rows_have_distinct_names_and_spellings_one_row_each():
    assert len(BY_NAME) == len(TABLE)
    assert all(function_name(func) == spelling.row.name for func, spelling in FUNCTIONS.items())
    assert all(reads_values(func) for func in FUNCTIONS)


@pytest.mark.parametrize("row", [row for row in TABLE if row.methods], ids=lambda row: row.name)
def test_methods_exist(row):
    missing = [m for m in row.methods if not hasattr(torch.Tensor, m)]
    assert not missing


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.reason or row.role is Role.FLOAT], ids=lambda row: row.name
)
def test_rows_that_stay_float_say_why(row):
    assert row.reason


@pytest.mark.parametrize("func", [f for f in FUNCTIONS if inspect.isfunction(f)], ids=readable)
def test_defaults_of_the_table_are_those_of_torch(func):
    spelling = FUNCTIONS[func]
    for name, parameter in inspect.signature(func).parameters.items():
        if name in spelling.defaults and parameter.default is not inspect.Parameter.empty:
            assert spelling.defaults[name] == parameter.default, name


@pytest.mark.parametrize("cls", [cls for row in TABLE for cls in row.modules], ids=lambda cls: cls.__name__)
def test_a_leaf_modules_attributes_complete_the_rows_parameters(cls):
    make, example = MODULES.get(cls, (cls, image))
    module = make().eval()
    row, attributes = leaf_row(module)
    assert LEAVES[cls.forward][1] is not None
    parameters = [item.partition("=")[0] for item in row.params.split()]
    if attributes and row.role is not Role.RECURRENT:
        assert all(hasattr(module, name) for name in attributes)
        assert len(attributes) <= len(parameters) - 1
        renamed = {"training"}  # a module's own flag, which several functions take as a parameter
        assert [n for n in attributes if n not in renamed] == [
            n for n in parameters[1 : 1 + len(attributes)] if n not in renamed
        ]
    model = nn.Sequential(module)
    converted = convert(model, example()).quantized
    assert {r.op for r in dbrq.report(converted).rows} <= {row.name}
