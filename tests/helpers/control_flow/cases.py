"""Small models whose forward decides what it runs, and the runs that record their paths: a table for the tests.

What decides is always exact (arguments, attributes, sizes, raw inputs), never a quantized value, so that the quantized
model takes the path of the float model. And what an unrecorded run meets has about the range that was recorded, so that
no right implementation clips it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tests.helpers.control_flow.branches import (
    ArgumentBranch,
    AttributeBranch,
    Caught,
    Containers,
    ConvReluOrResidual,
    DataBranch,
    Dispatch,
    FloatBranch,
    InPlace,
    InputItself,
    InputKinds,
    IntegersOnly,
    Join,
    NestedBranch,
    OptionalArgument,
    Rank,
    SizeBranch,
    Slope,
    Stride,
    SumOrNot,
    Ways,
)
from tests.helpers.control_flow.choices import OneOfSeveral, Stacked, StateMachine, Top1, TopK
from tests.helpers.control_flow.loops import (
    CalledTimes,
    Comprehension,
    Depth,
    EarlyExit,
    ForElse,
    FunctionalBody,
    Generator,
    GrowingCache,
    Halting,
    LayerDrop,
    LeftGenerator,
    ModuleBody,
    NestedLoops,
    Pyramid,
    RandomLayers,
    Recurrence,
    Reduce,
    ThroughChild,
    Tree,
    VaryingCat,
    WhileTensor,
)
from tests.helpers.control_flow.runs import Case, D, Off, Run, data, run


def _marked(mark: float, seed: int = 0) -> Tensor:
    """Data whose first element says where to go."""
    x = data(seed=seed)
    x[0, 0] = mark
    return x


def _images(size: int = 10, seed: int = 0) -> Tensor:
    return data(2, 3, size, size, seed=seed)


def _experts(*chosen: int, seed: int = 0, rows: int = 12) -> Tensor:
    """Rows whose first four features are largest at the experts named, in turn."""
    x = data(rows, D, seed=seed)
    x[:, :4] = x[:, :4].clamp(-1, 1)
    for row in range(rows):
        x[row, chosen[(row + 1) % len(chosen)]] = 2.0
        x[row, chosen[row % len(chosen)]] = 2.5
    return x


def _tree(shape: Any, seed: int = 0) -> Any:
    """Nested pairs of zeros as nested pairs of tensors."""
    if shape == 0:
        return data(4, D, seed=seed)
    return _tree(shape[0], 2 * seed + 1), _tree(shape[1], 2 * seed + 2)


def trips(*counts: Any, seed: int = 0) -> list[Run]:
    """One run for each count (or tuple of arguments), each with data of its own."""
    return [run(data(seed=seed + n), *(c if isinstance(c, tuple) else (c,))) for n, c in enumerate(counts)]


def _left(*counts: int) -> list[Run]:
    return [run(data(seed=n), torch.tensor(count)) for n, count in enumerate(counts)]


def _steps(*steps: int) -> Run:
    return run(data(len(steps), D), torch.tensor(steps))


OUT = ("out", "")
CASES: dict[str, Case] = {
    # Branches
    "branch on data": Case(
        DataBranch,
        [run(_marked(1.0)), run(_marked(0.0, seed=1))],
        off=[Off(run(_marked(-1.0, seed=2)), (("", "mul"), OUT))],
        paths=2,
    ),
    "branch on data, one side recorded": Case(
        DataBranch,
        [run(_marked(1.0)), run(_marked(1.0, seed=1))],
        off=[Off(run(_marked(0.0, seed=2)), (("c", ""), OUT), may=(("", "relu"),))],
        paths=1,
    ),
    "nested branch": Case(
        NestedBranch,
        trips((True, True), (True, False), (False, False)),
        off=[Off(run(data(seed=5), False, True), (("", "mul"), OUT))],
        paths=3,
    ),
    "branch on an argument": Case(
        ArgumentBranch,
        [run(data()), run(data(seed=1), "c")],
        off=[Off(run(data(seed=2), "neither"), (("", "add"), OUT))],
        paths=2,
    ),
    "branch on an attribute": Case(
        AttributeBranch, [run(data(), way="short"), run(data(seed=1), way="long")], paths=2
    ),
    "branch on an attribute, short side recorded": Case(
        AttributeBranch,
        [run(data(), way="short")],
        off=[Off(run(data(seed=1), way="long"), (("b", ""), ("c", ""), OUT), may=(("", "relu"),))],
        paths=1,
    ),
    "branch on size": Case(SizeBranch, [run(data(8, D)), run(data(2, D))], paths=2),
    "branch on size, one side recorded": Case(
        SizeBranch, [run(data(8, D)), run(data(5, D))], off=[Off(run(data(2, D)), (("", "add"), OUT))], paths=1
    ),
    "optional argument": Case(OptionalArgument, [run(data()), run(data(seed=1), data(seed=2))], paths=2),
    "kind of input": Case(
        InputKinds,
        [run(data()), run([data(4, D), data(3, D, seed=1)]), run({"left": data(seed=3), "right": data(seed=4)})],
        paths=3,
    ),
    "branches of float ops": Case(
        FloatBranch, trips("softmax", "sigmoid"), off=[Off(run(data(seed=2), "sin"), (OUT,))]
    ),
    "one branch of float ops": Case(
        FloatBranch,
        trips("softmax", "softmax"),
        off=[Off(run(data(seed=2), "sigmoid"), (OUT,), may=(("", "sigmoid"),)), Off(run(data(seed=2), "sin"), (OUT,))],
    ),
    **{f"branches that meet in {kind}": Case(functools.partial(Join, kind), trips(True, False), paths=2)
       for kind in ("add", "cat", "linear")},
    "a new producer for an add": Case(
        functools.partial(Join, "add"), trips(True, True),
        off=[Off(run(data(seed=2), False), (("c", ""), ("", "add")), may=(("", "relu"),))],
    ),
    "a new producer for a linear": Case(
        functools.partial(Join, "linear"), trips(True, True),
        off=[Off(run(data(seed=2), False), (("c", ""), OUT), may=(("", "relu"),))],
    ),
    "fusion valid on one path": Case(
        ConvReluOrResidual, [run(_images(), False), run(_images(seed=1), True)], paths=2
    ),
    "fusion valid on one path, the other first": Case(
        ConvReluOrResidual, [run(_images(), True), run(_images(seed=1), False)], paths=2
    ),
    "fusion recorded, the residual not": Case(
        ConvReluOrResidual, [run(_images(), False)],
        off=[Off(run(_images(seed=1), True), (("", "add"), OUT))],
    ),
    "residual recorded, the fusion not": Case(
        ConvReluOrResidual, [run(_images(), True)],
        off=[Off(run(_images(seed=1), False), (), may=(("", "relu"), OUT))],
    ),
    "sum fused on one path": Case(SumOrNot, [run(_images(), False), run(_images(seed=1), True)], paths=2),
    "stride": Case(
        Stride, [run(_images(), 1), run(_images(seed=1), 2), run(_images(seed=2), 1, 1)],
        off=[Off(run(_images(seed=3), 3), None)],
    ),
    "slope": Case(Slope, trips(0.3, 0.1), off=[Off(run(data(seed=3), 0.2), None)]),
    "containers": Case(Containers, trips("tensor", "tuple", "dict", "none")),
    "in place on one path": Case(InPlace, trips("not", "relu", "add", "item")),
    "the input itself": Case(InputItself, trips(False, True), paths=2),
    "the input itself, first in the example": Case(InputItself, trips(True, False), paths=2),
    "dispatch": Case(
        Dispatch, trips("partial", "lambda"), off=[Off(run(data(seed=2), "method"), (("", "mul"), OUT))], paths=2
    ),
    "integers only": Case(IntegersOnly, [run(data()), run(torch.arange(8))]),
    "integers only, first in the example": Case(IntegersOnly, [run(torch.arange(8)), run(data())]),
    "rank of the input": Case(Rank, [run(data()), run(data(4, 3, D, seed=1))], paths=2),
    "exception caught": Case(Caught, trips(False, True)),
    "exception caught, first in the example": Case(Caught, trips(True, False)),
    "two calls of a child": Case(Ways, trips((True, False), (False, True), (False, False), (True, True))),
    # Loops
    "while on a tensor": Case(WhileTensor, _left(2, 4), served=_left(1, 3, 6)),
    "module body": Case(ModuleBody, trips(2, 4), served=trips(1, 3, 7, seed=5), paths=2),
    "module body, once": Case(ModuleBody, trips(1), served=trips(2, 5, seed=5), paths=1),
    "functional body": Case(FunctionalBody, trips(2, 4), served=trips(1, 3, 7, seed=5), paths=2),
    "functional body, none and some": Case(FunctionalBody, trips(0, 3), served=trips(1, 2, 5, seed=5)),
    "no trip": Case(ModuleBody, trips(0, 2), served=trips(1, 3, seed=5)),
    "no trip after some": Case(ModuleBody, trips(2, 3), off=[Off(run(data(seed=9), 0), (), may=(OUT,))]),
    "some trips after none": Case(
        ModuleBody, trips(0), off=[Off(run(data(seed=9), 2), (("block.0", ""), OUT), may=(("block.1", ""),))]
    ),
    "nested loops": Case(NestedLoops, trips((1, 2), (3, 1), (2, 3)), served=trips((2, 2), (4, 2), (3, 4), seed=5)),
    "layers skipped": Case(LayerDrop, trips(((1, 1, 1),), ((1, 0, 1),), ((0, 1, 0),))),
    "layers skipped that were not": Case(
        LayerDrop, [run(data(), (1, 1, 1))], off=[Off(run(data(seed=9), keep), None) for keep in ((1, 0, 1), (0, 1, 1))]
    ),
    "early exit": Case(
        EarlyExit, trips(0, 2, 9),
        off=[Off(run(data(seed=9), 1), (("exits.1", ""),)), Off(run(data(seed=9), 3), (("exits.3", ""),))], paths=3,
    ),
    "for and else": Case(ForElse, trips(9, 1, 2), off=[Off(run(data(seed=9), 0), (), may=(OUT,))]),
    "generator left early": Case(LeftGenerator, trips(1, 3), served=trips(2, 4, seed=5)),
    "generator": Case(Generator, trips(1, 3), served=trips(2, 5, seed=5)),
    "comprehension": Case(Comprehension, trips(2, 4), served=trips(1, 3, seed=5)),
    "reduce": Case(Reduce, trips(1, 3), off=[Off(run(data(seed=9), 2), (), may=(OUT,))]),
    "child called 0 to n times": Case(CalledTimes, trips(0, 2, 3), served=trips(1, 5, seed=5)),
    "cat of varying number": Case(VaryingCat, trips(1, 3), off=[Off(run(data(seed=9), 2), None)]),
    "random layers": Case(RandomLayers, trips(0, 1, 2, 3), off=[Off(run(data(seed=9), 7), None)]),
    "halting": Case(Halting, [_steps(0, 2, 3), _steps(3, 2, 0)], served=[_steps(4, 1, 5), _steps(1, 1)]),
    "growing cache": Case(GrowingCache, trips(2, 4), served=trips(1, 3, 6, seed=5)),
    "recurrence": Case(
        Recurrence, [run(data(6, n, D, seed=n)) for n in (3, 5)], served=[run(data(6, n, D, seed=n)) for n in (2, 4, 8)]
    ),
    "pyramid": Case(
        Pyramid, [run(_images(8)), run(_images(16))], served=[run(_images(32)), run(_images(64))]
    ),
    # Recursion
    "depth": Case(Depth, trips(0, 1, 2, 3), off=[Off(run(data(seed=9), 6), None)]),
    "tree": Case(
        Tree, [run(_tree(0)), run(_tree((0, 0))), run(_tree(((0, 0), 0), 3)), run(_tree((0, (0, (0, 0))), 5))],
        off=[Off(run(_tree(((0, 0), (0, (0, 0))), 9)), None)],
    ),
    "through a child": Case(ThroughChild, trips(0, 1, 3), off=[Off(run(data(seed=9), 2), None)]),
    # Choices
    "router, top 1": Case(
        Top1, [run(_experts(0, 1)), run(_experts(0, 1, 2, seed=1)), run(_experts(2, seed=2))],
        off=[Off(run(_experts(0, 3, seed=3)), (("experts.3.0", ""), ("experts.3.2", "")),
                 may=(("experts.3.1", ""), OUT))],
    ),
    "router, top k": Case(
        TopK, [run(_experts(0, 1)), run(_experts(0, 1, 2, seed=1)), run(_experts(1, 2, seed=2))],
        off=[Off(run(_experts(0, 3, seed=3)), None)],
    ),
    "experts as one parameter": Case(
        Stacked, trips(0, 1), off=[Off(run(data(seed=2), 2), (("", "linear"),), may=(("", "relu"), OUT))]
    ),
    "experts as one parameter, all recorded": Case(Stacked, trips(0, 1, 2, 0)),
    "one of several parameters": Case(
        OneOfSeveral, trips(2, 1), off=[Off(run(data(seed=2), 0), (("", "linear"),), may=(("", "relu"), OUT))]
    ),
    "one of several parameters, all recorded": Case(OneOfSeveral, trips(0, 1, 2)),
    "state machine": Case(
        StateMachine, trips("start middle", "start middle middle", "middle start"),
        off=[Off(run(data(seed=9), "start other"), (("states.other", ""),), may=(("", "relu"), ("states.end", "")))],
    ),
}  # fmt: skip
