"""Ops without a kernel between int8 ones, in-place ops on int8 values, and detours through other code."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.cases import by_name
from tests.helpers.images import images
from tests.helpers.judging import assert_matches, assert_precision, rows
from tests.helpers.models import Call
from tests.helpers.running import convert, run


@by_name(
    {
        "tanhshrink": F.tanhshrink,
        "Tanhshrink": nn.Tanhshrink(),
        "SiLU in place": nn.SiLU(inplace=True),
        "std": lambda x: x - x.std(),
        "var": lambda x: x / x.var(1, keepdim=True).sqrt(),
        "softshrink": F.softshrink,
        "sort": lambda x: x.sort(1)[0],
        "cumsum": lambda x: x.cumsum(1),
        "where": lambda x: torch.where(x > 0, x, -x),
        "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
        "masked_fill_": lambda x: x.masked_fill_(x > 0.5, 0.0),
        "einsum": lambda x: torch.einsum("nchw,ndhw->nchw", x, x),
        "group_norm": nn.GroupNorm(2, 8),
        "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
        "keyword tensors": lambda x: torch.where(
            condition=x > 0, input=x, other=torch.lerp(input=x, end=x, weight=0.5)
        ),
        "list of tensors": lambda x: torch.broadcast_tensors(x, x)[0],
        "out=": lambda x: torch.sin(x, out=torch.empty_like(x)),
        "indexing": lambda x: x.gather(1, torch.zeros(2, 8, 10, 10, dtype=torch.int64)),
        "setitem": lambda x: _set(x),
        "the value itself": lambda x: torch.atleast_2d(x).cpu(),
        "the value itself, from a float op": lambda x: torch.atleast_2d(torch.sin(x)).cpu(),
        "type": lambda x: x.type(torch.float64).type(torch.float32),
        "comparison": lambda x: x * (x > 0) + (x == x.max()).float(),
        "reduction to a number": lambda x: x * float(x.mean()),
        "branch on a value": lambda x: x * 2 if x.sum() > -1e9 else x,
        "stack": lambda x: torch.stack([x, x]).sum(0),
        "topk": lambda x: x.topk(8, dim=1).values,
        "new tensor": lambda x: x + x.new_zeros(x.shape),
        "autocast": lambda x: _autocast(x),
    },
    "op",
)
def test_op_without_a_kernel_between_convolutions(op):
    model = Call(lambda m, x: m.after(op(m.before(x))), before=nn.Conv2d(3, 8, 3), after=nn.Conv2d(8, 4, 1))
    converted = assert_matches(model, images())
    assert_precision(converted, "conv2d", "int8", 2)


def test_detour_through_numpy():
    """No hook sees numpy compute, so what comes back is read in float."""
    model = Call(lambda m, x: m.after(torch.from_numpy(m.before(x).detach().numpy() * 2)),
                 before=nn.Conv2d(3, 8, 3), after=nn.Conv2d(8, 4, 1))  # fmt: skip
    converted = assert_matches(model, images(), fx=False)
    before, after = rows(converted, "conv2d")
    assert before.precision == "int8"
    assert after.precision == "int8" or after.reason


def _set(x):
    x[:, 0] = 0.5
    return x


def _autocast(x):
    with torch.autocast("cpu", enabled=False):
        return torch.sinh(x)


def test_reduction_right_after_a_quantized_add():
    model = Call(lambda m, x: (m.a(x) + m.b(x)).std(), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3))
    assert_matches(model, images())


@by_name(
    {
        "relu_": lambda h: torch.relu_(h),
        "relu in place": lambda h: F.relu(h, inplace=True),
        "add_": lambda h: h.add_(1.0),
        "mul_": lambda h: h.mul_(0.5),
        "clamp_": lambda h: h.clamp_(0.0, 0.5),
        "fill a slice": lambda h: h[:, :2].zero_(),
        "sin_": lambda h: h.sin_(),
        "through a view": lambda h: h.view(-1).mul_(2.0),
        "through a transposed view": lambda h: h.transpose(1, 2).add_(1.0),
        "out=": lambda h: torch.mul(h, 2.0, out=h),
        "out= of a float op": lambda h: torch.sin(torch.ones_like(h), out=h),
        "setitem": lambda h: h.__setitem__((slice(None), 0), 1.0),
        "copy_": lambda h: h.copy_(torch.ones_like(h)),
        "chunk": lambda h: h.chunk(2, 1)[0].zero_(),
        "detach": lambda h: h.detach().zero_(),
        "data": lambda h: h.data.mul_(3.0),
    },
    "change",
)
def test_in_place_op_on_a_quantized_value_without_rebinding(change):
    def forward(m, x):
        h = m.before(x)
        change(h)
        return m.after(h), h

    model = Call(forward, before=nn.Conv2d(3, 8, 3), after=nn.Conv2d(8, 4, 1))
    assert_matches(model, images(), fx=False)
    only_one = Call(lambda m, x: forward(m, x)[0], before=nn.Conv2d(3, 8, 3), after=nn.Conv2d(8, 4, 1))
    assert_matches(only_one, images(), fx=False)


def test_a_view_sees_what_its_base_becomes():
    def forward(m, x):
        h = m.before(x)
        view = h.flatten(1)
        h += 1.0
        return m.after(h).sum() + view.sum(), view

    model = Call(forward, before=nn.Conv2d(3, 8, 3), after=nn.Conv2d(8, 4, 1))
    assert_matches(model, images(), fx=False)


def test_values_kept_in_attributes_lists_and_closures():
    """What leaks out of forward turns into float by itself."""

    def forward(m, x):
        h = m.after(m.before(x))
        m.__dict__["last"] = h
        kept.append(m.before(x).relu())
        return h

    kept: list = []
    model = Call(forward, before=nn.Conv2d(3, 8, 3), after=nn.Conv2d(8, 4, 1))
    converted = convert(model, images()).quantized
    out = run(converted, images())
    assert torch.equal(converted.last + 0, out)
    assert (kept[-1] + 1).shape == (2, 8, 10, 10) and kept[-1].sum().item() > 0


def test_multi_input_ops_with_one_int8_value():
    def forward(m, x, y):
        h = m.before(x)
        return torch.cat([h, y], 1), h + y, torch.maximum(h, y), torch.stack([y, h])

    assert_matches(Call(forward, before=nn.Conv2d(3, 8, 3)), (images(), torch.randn(2, 8, 10, 10)), fx=False)
