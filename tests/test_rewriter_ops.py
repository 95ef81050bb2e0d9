"""``rewrite`` and ``lower``, op by op: every row of the op table in every spelling, generated from the op table.

Each model is an op between two layers: converted, rewritten, scripted and lowered agree within one step of the output.
"""

import copy
import inspect
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, float_qparams_weight_only_qconfig

import dbrq
from dbrq.mappings import DROPOUTS, FUNCTIONS, TABLE, Role
from dbrq.pytree import tree_leaves
from tests.helpers.judging import agreement, sqnr, step_of
from tests.helpers.models import Between
from tests.helpers.op_examples import ARGUMENTS, BY_NAME, DEFAULT, FLAT, MODULES, NEVER_ARRIVES, arguments, readable
from tests.helpers.running import convert, run

#: As in EVERYTHING of helpers/op_examples.py, tables too.
MAPPING = QConfigMapping().set_global(DEFAULT)
for _cls in (nn.Embedding, nn.EmbeddingBag, F.embedding, F.embedding_bag, torch.embedding):
    MAPPING.set_object_type(_cls, float_qparams_weight_only_qconfig)


def tensors(output) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def assert_all_agree(module: nn.Module, example, *others) -> None:
    """Converted == rewritten == scripted == lowered, on the example and on other inputs."""
    q = convert(module, example, MAPPING).quantized
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")  # nothing falls back to float, no size is frozen
        g = dbrq.rewrite(q, copy.deepcopy(example))
        lowered = dbrq.lower(q, copy.deepcopy(example))
    s = torch.jit.script(g)
    for inputs in (example, *others):
        expected, plain = tensors(run(q, inputs)), tensors(run(g, inputs))
        for a, b in zip(tensors(run(s, inputs)), plain, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text: f"scripted: {text}")
        for what, got in (("rewritten", plain), ("lowered", tensors(run(lowered, inputs)))):
            for a, b in zip(got, expected, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), what
                if not b.is_floating_point():
                    assert torch.equal(a, b), what
                    continue
                share = agreement(a, b, step_of(b))
                assert share >= 0.98, f"{what}: {share:.2%} within a step of the converted model, {sqnr(b, a):.1f} dB"


class Spelled(nn.Module):
    """A spelling applied to what a layer made, or layers where it takes several values of that kind.

    Args:
        fn: the spelling.
        args: its arguments; ``activations`` are the places among them of values that layers make, and of lists of such.
        keywords: names to pass the arguments by, after the first.
    """

    def __init__(self, fn, args: list, activations: list[int], keywords: list[str] | None = None) -> None:
        super().__init__()
        self.fn, self.places, self.keywords = fn, activations, keywords
        self.layers, self.inputs, self.args = nn.ModuleList(), [], list(args)
        for place in activations:
            for x in args[place] if isinstance(args[place], list) else [args[place]]:
                self.layers.append(layer_for(x))
                self.inputs.append(x)
        for place, value in enumerate(args):
            if isinstance(value, Tensor) and place not in activations:
                self.register_parameter(f"arg{place}", nn.Parameter(value, requires_grad=False))

    def forward(self, *inputs):
        made = iter([layer(x) for layer, x in zip(self.layers, inputs, strict=True)])
        args = [getattr(self, f"arg{i}", value) for i, value in enumerate(self.args)]
        for place in self.places:
            value = self.args[place]
            args[place] = [next(made) for _ in value] if isinstance(value, list) else next(made)
        if self.keywords is not None:
            return self.fn(args[0], **dict(zip(self.keywords, args[1:], strict=True)))
        result = self.fn(*args)
        return args[0] if result is None else result


def layer_for(x: Tensor) -> nn.Module:
    """A layer that makes a value like ``x`` of one like it."""
    if not x.is_floating_point():
        return nn.Identity()
    if x.dim() > 3:
        conv = nn.Conv2d if x.dim() == 4 else nn.Conv3d
        return conv(x.size(1), x.size(1), 1)
    return nn.Linear(x.size(-1), x.size(-1))


def places(name: str, names: tuple[str, ...], args: list) -> list[int]:
    """Which arguments are activations: the input, and ``other`` of what takes two."""
    wanted = {"input", "other"} if BY_NAME[name].role in (Role.ELEMENTWISE, Role.COMPUTE) else {"input"}
    found = [i for i, n in enumerate(names[: len(args)]) if n in wanted]
    return [i for i in found if isinstance(args[i], Tensor | list)]


def spelled(func, by_keyword: bool = False) -> Spelled:
    spelling = FUNCTIONS[func]
    name, args = spelling.row.name, arguments(func, spelling)
    if name in DROPOUTS:
        args = [*args, 0.5, False]
    keywords = list(spelling.names[1 : len(args)]) if by_keyword else None
    fn = func
    if func.__name__ == "__get__":  # what is behind it cannot be copied
        attribute = func.__self__.__name__
        fn = lambda x: getattr(x, attribute)  # noqa: E731
    if name in ("sqrt", "rsqrt"):  # layers before it may give negative values
        fn = lambda x: func(x.abs() + 0.5)  # noqa: E731
    return Spelled(fn, args, places(name, spelling.names, args), keywords)


def with_batch(func, module: Spelled, size: int) -> list | None:
    """Other inputs, where the arguments do not fix the shape of the input."""
    name = FUNCTIONS[func].row.name
    fixed = {"view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "broadcast_to", "flip", "unbind",
             "fliplr", "flipud", "vsplit", "__getitem__", *FLAT, *PRODUCTS}  # fmt: skip
    if name in fixed or any(not x.is_floating_point() for x in module.inputs):
        return None
    return [torch.rand(size, *x.shape[1:]) + 0.5 for x in module.inputs]


#: Products whose other operand fixes the sizes.
PRODUCTS = {row.name for row in TABLE if row.macs is not None and row.role is Role.FLOAT and not row.ndim} - {
    "scaled_dot_product_attention"
}
SPELLINGS = [f for f in FUNCTIONS if f not in NEVER_ARRIVES]


@pytest.mark.parametrize("func", SPELLINGS, ids=readable)
def test_every_spelling(func):
    module = spelled(func)
    other = with_batch(func, module, 3)
    assert_all_agree(module, module.inputs, *([] if other is None else [other]))


@pytest.mark.parametrize(
    "func", [f for f in SPELLINGS if inspect.isfunction(f) and FUNCTIONS[f].row.params != "input"
             and not f.__name__.startswith("__") and f is not torch.einsum  # which takes operands one by one
             and len(arguments(f, FUNCTIONS[f])) > 1], ids=readable,
)  # fmt: skip
def test_every_function_by_keyword(func):
    module = spelled(func, by_keyword=True)
    assert_all_agree(module, module.inputs)


@pytest.mark.parametrize("func", [f for f in SPELLINGS if "inplace" in FUNCTIONS[f].names and inspect.isfunction(f)],
                         ids=readable)  # fmt: skip
def test_inplace_true(func):
    args = arguments(func, FUNCTIONS[func])
    module = Spelled(lambda x: func(x, *args[1:], inplace=True, **({} if "dropout" not in func.__name__ else
                     {"training": False})), args[:1], [0])  # fmt: skip
    assert_all_agree(module, module.inputs)


@pytest.mark.parametrize("func", [f for f in SPELLINGS if FUNCTIONS[f].inplace], ids=readable)
def test_inplace_spellings_without_rebinding(func):
    args = arguments(func, FUNCTIONS[func])

    def written(*given):
        func(*given)

    module = Spelled(written, args, places(FUNCTIONS[func].row.name, FUNCTIONS[func].names, args))
    assert_all_agree(module, module.inputs)


OPERATORS = [(row.name, op) for row in TABLE for op in row.operators]


@pytest.mark.parametrize("name, op", OPERATORS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("other", ["tensor", "number on the right", "number on the left"])
def test_operators(name, op, other):
    if other != "tensor" and name == "matmul":
        return  # numbers have no matmul
    x, y = torch.rand(3, 4, 4) + 0.5, torch.rand(3, 4, 4) + 0.5
    if op in (abs, operator.neg):
        module = Spelled(op, [x], [0])
    elif other == "tensor":
        module = Spelled(op, [x, y], [0, 1])
    elif other == "number on the right":
        module = Spelled(lambda a: op(a, 2.0), [x], [0])
    else:
        if op.__name__.startswith("i"):
            return  # a number is not written to
        module = Spelled(lambda a: op(2.0, a.abs() + 1.0), [x], [0])
    assert_all_agree(module, module.inputs, [torch.rand(2, 4, 4) for _ in module.inputs])


LEAF_CLASSES = [cls for row in TABLE for cls in row.modules]


@pytest.mark.parametrize("cls", LEAF_CLASSES, ids=lambda cls: cls.__name__)
def test_every_leaf_module(cls):
    make, example = MODULES.get(cls, (cls, lambda: torch.rand(2, 4, 6, 6) + 0.5))
    assert_all_agree(nn.Sequential(make().eval()), example())


@pytest.mark.parametrize("cls", LEAF_CLASSES, ids=lambda cls: cls.__name__)
def test_every_leaf_module_after_a_layer(cls):
    make, example = MODULES.get(cls, (cls, lambda: torch.rand(2, 4, 6, 6) + 0.5))
    x = example()
    if x.is_floating_point():
        assert_all_agree(nn.Sequential(layer_for(x), make().eval()), x, torch.rand_like(x))


#: Row -> (inputs, op) between convolutions, so that all around it is int8.
WITH_ARGUMENTS = {
    "conv, all arguments": lambda x: F.conv2d(x, torch.ones(8, 4, 3, 3) / 9, torch.ones(8), (2, 1), 1, 1, 2),
    "add, alpha": lambda x: torch.add(x, x.relu(), alpha=2),
    "sub, alpha": lambda x: x.sub(x.relu(), alpha=0.5),
    "rsub": lambda x: 1.0 - x,
    "add a scalar tensor": lambda x: x + torch.tensor(0.5),
    "add broadcasting": lambda x: x + x[:, :1],
    "add itself": lambda x: x + x,
    "mul broadcasting": lambda x: x * x.mean((2, 3), keepdim=True),
    "cat of one twice": lambda x: torch.cat([x, x], 1),
    "cat of a tuple by keyword": lambda x: torch.cat((x, x * 0.5), dim=1),
    "stack": lambda x: torch.stack([x, x * 0.5], 1).flatten(1, 2),
    "max pool, all arguments": lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 2), True),
    "avg pool, defaults": lambda x: F.avg_pool2d(x, 2),
    "avg pool, all arguments": lambda x: F.avg_pool2d(x, 3, 2, 1, True, False, 5),
    "adaptive pool, None": lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
    "mean of all": lambda x: x + x.mean(),
    "mean, keyword": lambda x: x.mean(dim=-1, keepdim=True),
    "interpolate, size": lambda x: F.interpolate(x, (5, 7)),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp, tensors": lambda x: torch.clamp(x, x.mean() - 1, x.mean() + 1),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "leaky relu": lambda x: F.leaky_relu(x, 0.3),
    "elu": lambda x: F.elu(x, 0.5),
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": lambda x: x * torch.sigmoid(x),
    "div, rounding": lambda x: torch.div(x, 0.5, rounding_mode="floor"),
    "pad, value": lambda x: F.pad(x, (1, 2, 0, 1), value=0.7),
    "pad, reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "index, list after dots": lambda x: x[..., [1, -1], :][:, ..., torch.tensor([0, 2])],
    "index": lambda x: x[:, torch.tensor([0, 2, 4]), 1:, ::2],
    "to": lambda x: x.to(torch.float32).float().type_as(x),
    "float64 and back": lambda x: x.double().float(),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x)[..., None],
    "float ops": lambda x: torch.where(x > 0, x.exp(), x.abs().sqrt()).log1p().softmax(1) * x.std(),
    "sort": lambda x: x.sort(1).values + x.topk(8, 1)[0],
    "argmax": lambda x: x + x.argmax(1, keepdim=True),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True).clamp_min(1e-3),
    "cumsum": lambda x: x.cumsum(2).flip(3),
    "split by sizes": lambda x: torch.cat(torch.split(x, [3, 5], dim=1)[::-1], 1),
    "sizes that are tensors": lambda x: x.new_ones(x.argmax() * 0 + 2, torch.tensor(3)).sum() + x,
    "pad by tensors": lambda x: F.pad(x, (torch.tensor(1), x.argmax() * 0)),
    "empty lists": lambda x: torch.cat([torch.tensor([]), x.flatten(), torch.tensor([[], []]).sum(0)]).view_as(x),
    "two results": lambda x: x.max(1, keepdim=True).values + x,
}


@pytest.mark.parametrize("op", WITH_ARGUMENTS.values(), ids=WITH_ARGUMENTS)
def test_arguments_and_other_ops(op):
    module = Between(op, size=6)
    assert_all_agree(module, module.example, torch.randn(3, 4, 6, 6))


def test_every_row_is_here():
    reached = {FUNCTIONS[f].row.name for f in SPELLINGS} | {row.name for row in TABLE if row.modules}
    assert reached == {row.name for row in TABLE}
    assert set(ARGUMENTS) <= reached
