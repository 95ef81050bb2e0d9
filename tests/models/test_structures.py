"""Containers, modules called several times, tied weights, inputs and outputs of all kinds."""

import collections
import dataclasses
from typing import Any

import torch
from torch import nn

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.images import images
from tests.helpers.judging import assert_matches, assert_precision, assert_same_containers, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run


def test_nested_sequentials():
    inner = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 1))))
    assert_matches(nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3)), inner, nn.ReLU()), images(), fx=True)


class Gathering(nn.Sequential):
    """In the manner of VoVNet: what each child gives goes to the next, and all of it to a concatenation."""

    def forward(self, x):
        outputs = [x]
        for module in self:
            outputs.append(module(outputs[-1]))
        return torch.cat(outputs, dim=1)


def test_sequential_that_iterates_itself_and_cats():
    block = Gathering(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)])
    model = nn.Sequential(nn.Conv2d(3, 8, 3), block, nn.Conv2d(32, 4, 1))
    converted = assert_matches(model, images(), fx=True)
    assert_precision(converted, "cat", "int8", 1)


@by_name(
    {
        "ModuleList iterated": (
            {"layers": lambda: nn.ModuleList([nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1)])},
            lambda m, x: [x := layer(x) for layer in m.layers][-1],
        ),
        "ModuleList indexed": (
            {"layers": lambda: nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 1)])},
            lambda m, x: m.layers[-1](m.layers[0](x)),
        ),
        "ModuleList sliced": (
            {"layers": lambda: nn.ModuleList([nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)])},
            lambda m, x: [x := layer(x) for layer in m.layers[1:]][-1] if len(m.layers) == 3 else None,
        ),
        "ModuleDict iterated": (
            {"layers": lambda: nn.ModuleDict({"a": nn.Conv2d(3, 3, 3), "b": nn.ReLU()})},
            lambda m, x: [x := layer(x) for _, layer in m.layers.items()][-1],
        ),
        "ModuleDict indexed": (
            {"layers": lambda: nn.ModuleDict({"a": nn.Conv2d(3, 8, 3), "b": nn.Linear(10, 4)})},
            lambda m, x: m.layers["b"](m.layers["a"](x)) if "b" in m.layers else None,
        ),
        "self.seq[0](x)": (
            {"seq": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))},
            lambda m, x: m.seq[2](m.seq[1](m.seq[0](x))),
        ),
        "slice of a Sequential": (
            {"seq": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))},
            lambda m, x: m.seq[1:](m.seq[:1](x)),
        ),
        "children": (
            {"seq": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))},
            lambda m, x: [x := child(x) for child in m.seq.children()][-1],
        ),
        "zipped": (
            {"a": lambda: nn.ModuleList([nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1)]),
             "b": lambda: nn.ModuleList([nn.ReLU(), nn.Tanh()])},
            lambda m, x: [x := b(a(x)) for a, b in zip(m.a, m.b, strict=True)][-1],
        ),
        "getattr": (
            {"conv0": lambda: nn.Conv2d(3, 3, 3), "conv1": lambda: nn.Conv2d(3, 3, 3)},
            lambda m, x: [x := getattr(m, f"conv{i}")(x) for i in range(2)][-1],
        ),
    },
    "parts, fn",
)  # fmt: skip
def test_containers_of_modules(parts, fn):
    converted = assert_matches(Call(fn, **{name: make() for name, make in parts.items()}), images())
    assert_precision(converted, "conv2d", "int8")


def test_one_module_called_several_times_has_qparams_for_each_call():
    def forward(m, x):
        return m.linear(x) + m.linear(torch.relu(x) * 100.0)

    model, x = Call(forward, linear=nn.Linear(16, 16)), torch.randn(64, 16)
    converted = assert_matches(model, x, fx=False)
    ops = [op for op in converted._auto_quant_state.ops() if op.op == "linear"]
    assert len(ops) == 2 and [op.path for op in ops] == ["linear", "linear@1"]
    one, other = (converted._auto_quant_state.qparams(op.decision.reads[0].value).scale for op in ops)
    assert other > 10 * one


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x)) + x


def test_block_called_several_times():
    def forward(m, x):
        for _ in range(3):
            x = m.block(x)
        return m.last(x)

    converted = assert_matches(Call(forward, block=Block(), last=nn.Conv2d(3, 4, 1)), images(), fx=True)
    assert_precision(converted, "conv2d", "int8", 4)


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


Point = collections.namedtuple("Point", ["x", "y"])


class ModelOutput(collections.OrderedDict):
    """Keys are attributes too, and None is left out, in the manner of transformers."""

    def __init__(self, **entries: Any) -> None:
        super().__init__((k, v) for k, v in entries.items() if v is not None)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ListOf(list):
    pass


OUTPUTS = {
    "tuple": lambda h: (h, h.sum()),
    "list": lambda h: [h, h],
    "subclass of list": lambda h: ListOf([h, h.relu()]),
    "nested": lambda h: {"a": [h, (h, {"b": h.mean()})]},
    "dict": lambda h: {"h": h, "n": h.shape[0]},
    "OrderedDict": lambda h: collections.OrderedDict(h=h, none=None),
    "defaultdict": lambda h: collections.defaultdict(list, h=h),
    "namedtuple": lambda h: Point(h, h.max()),
    "ModelOutput": lambda h: ModelOutput(logits=h, missing=None, hidden=(h, h)),
    "dataclass": lambda h: Pair(h, [h]),
    "frozen dataclass": lambda h: Frozen(h),
    "return type of torch": lambda h: torch.max(h, 1),
    "topk": lambda h: h.topk(2, 1),
    "numbers": lambda h: (h, 3, "text", None, h.dim(), h.shape, True),
    "integers": lambda h: (h.argmax(1), h > 0),
    "set of names": lambda h: (h, frozenset(["a"])),
    "empty": lambda h: ((), [], {}, h),
}


@by_name(OUTPUTS, "wrap")
def test_outputs_keep_their_containers(wrap):
    model = Call(lambda m, x: wrap(m.conv(x)), conv=nn.Conv2d(3, 8, 3))
    converted = assert_matches(model, images(), fx=False)
    before, after = run(model, images()), run(converted, images())
    assert_same_containers(after, before)
    assert getattr(after, "__dict__", {}).keys() == getattr(before, "__dict__", {}).keys()


def test_a_child_that_returns_any_container():
    class Child(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.conv, self.wrap = nn.Conv2d(3, 3, 3, padding=1), wrap

        def forward(self, x):
            return self.wrap(self.conv(x))

    class Nothing(nn.Module):
        def forward(self, x):
            self.seen = x.shape

    def forward(m, x):
        assert m.nothing(x) is None
        a, b = m.tuple(x)
        p = m.named(a)
        d = m.dict(p.x + b)
        o = m.output(d["h"])
        return m.last(o.logits)

    model = Call(
        forward, nothing=Nothing(), tuple=Child(lambda h: (h, h)), named=Child(lambda h: Point(h, None)),
        dict=Child(lambda h: {"h": h, "x": 1}), output=Child(lambda h: ModelOutput(logits=h, none=None)),
        last=nn.Conv2d(3, 2, 1),
    )  # fmt: skip
    converted = assert_matches(model, images(), fx=False)
    assert_precision(converted, "conv2d", "int8", 5)


def test_output_is_float_by_default():
    converted = convert(nn.Sequential(nn.Conv2d(3, 8, 3)), images()).quantized
    out = run(converted, images())
    assert type(out) is torch.Tensor and out.dtype is torch.float32 and not out.__dict__


def test_module_created_inside_forward():
    def forward(m, x):
        fresh = nn.Conv2d(8, 8, 1)
        with torch.no_grad():
            fresh.weight.fill_(0.1)
            fresh.bias.zero_()
        return m.conv2(fresh(m.conv1(x)))

    model = Call(forward, conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(8, 4, 1))
    converted = assert_matches(model, images(), fx=False)
    assert {r.path: r.precision for r in dbrq.report(converted).rows if r.path in ("conv1", "conv2")} == {
        "conv1": "int8", "conv2": "int8",
    }  # fmt: skip


def test_unused_submodule_is_reported():
    model = Call(lambda m, x: m.used(x), used=nn.Conv2d(3, 8, 3), unused=nn.Conv2d(3, 8, 3))
    converted = assert_matches(model, images())
    row = next(row for row in dbrq.report(converted).rows if row.path == "unused")
    assert row.precision == "float" and "never reached" in row.reason


def test_two_names_for_one_module():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = Call(lambda m, x: m.b(torch.relu(m.a(x))), a=conv, b=conv)
    converted = assert_matches(model, images(), fx=False)
    assert converted.a is converted.b
    assert_precision(converted, "conv2d", "int8", 2)


def test_tied_weights():
    model = Call(
        lambda m, i: m.head(m.middle(m.embed(i))), embed=nn.Embedding(40, 16), middle=nn.Linear(16, 16),
        head=nn.Linear(16, 40, bias=False),
    )  # fmt: skip
    model.head.weight = model.embed.weight
    index = torch.randint(0, 40, (8, 9))
    converted = assert_matches(model, index, fx=False)
    assert_precision(converted, "linear", "int8", 2)


def test_tied_linear_layers_hold_one_weight():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    converted = assert_matches(model, torch.randn(64, 16), fx=False)
    assert_precision(converted, "linear", "int8", 2)
    assert sum(name.endswith("weight_int8") for name in converted.state_dict()) == 1


def test_lists_and_dicts_as_inputs_which_forward_may_change():
    def forward(m, batch, extra):
        x = batch.pop("x")
        extra.append(x)
        extra[0].mul_(2.0)
        return m.conv(x) + m.conv(extra[0])

    model = Call(forward, conv=nn.Conv2d(3, 8, 3))
    example = ({"x": images(), "label": 1}, [images()])
    converted = assert_matches(model, example, fx=False)
    assert list(example[0]) == ["x", "label"] and len(example[1]) == 1
    extra = [images()]
    converted({"x": images()}, extra)
    assert len(extra) == 2 and type(extra[1]) is torch.Tensor, "forward changes the caller's list as it did"


def test_keyword_arguments_of_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x, scale=1.0, *, mask=None):
            out = self.conv(x) * scale
            return out if mask is None else out * mask

    x, mask = images(), torch.ones(1, 8, 1, 1)
    model = Model().eval()
    for inputs, kwargs in (({"x": x, "mask": mask}, {}), ((x, 2.0), {"mask": mask}), (x, None)):
        prepared = dbrq.prepare(model, inputs, example_kwargs=kwargs)
        run(prepared, inputs, kwargs)
        converted = dbrq.convert(prepared)
        assert sqnr(run(model, inputs, kwargs), run(converted, inputs, kwargs)) > 30


def test_forward_that_takes_nothing():
    model = Call(lambda m, x: m.linear(m.query), 1, linear=nn.Linear(16, 8), query=torch.randn(4, 16))
    converted = convert(model, torch.zeros(1)).quantized
    assert sqnr(run(model, torch.zeros(1)), run(converted, torch.zeros(1))) > 30


def test_a_root_that_stays_float():
    model, x = nn.ConvTranspose2d(4, 8, 3).eval(), torch.randn(1, 4, 5, 5)
    quantized_on = dbrq.quantize(model, [x])
    torch.testing.assert_close(quantized_on(x), model(x))
    torch.testing.assert_close(dbrq.lower(quantized_on, x)(x), model(x))
