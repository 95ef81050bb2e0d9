"""The fusion patterns, row by row, with the stock kernels that each is.

Each case runs twice: as it is ("float out"), and in front of a layer that reads int8 ("int8 out") and multiplies by
one, so that what it returns shows the integers. A case says what computes in one run, and nothing else may, unless it
says "..."; moves do not count; "dequantize" is ``aten::mul_``, which scales.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_per_channel_weight_observer,
    default_qconfig,
    float_qparams_weight_only_qconfig,
)

import dbrq
from tests.helpers.cases import Case, let
from tests.helpers.models import Call

# Convolutions

SIZES = {1: (2, 4, 12), 2: (2, 4, 12, 11), 3: (2, 4, 7, 6, 8)}
IMAGE, BIG = (2, 8, 9, 10), (2, 64, 56, 56)


def conv(n: int = 2, inner: int = 4, **options: Any) -> nn.Module:
    return getattr(nn, f"Conv{n}d")(inner, **{"out_channels": 8, "kernel_size": 3, **options})


def without(value: int | None, *zero: str, **options: Any) -> nn.Module:
    """A convolution of which a part is zero."""
    made = conv(**options)
    with torch.no_grad():
        for name in zero:
            getattr(made, name)[slice(None) if value is None else value].zero_()
    return made


same = functools.partial(conv, 2, 8, padding=1)  # the shape of its input
pointwise = functools.partial(conv, 2, 64, out_channels=64, kernel_size=1)  # large enough to run as a linear layer
stack_of = functools.partial(lambda make, count: nn.ModuleList(make() for _ in range(count)), count=4)
OPTIONS = {
    "plain": {}, "no bias": {"bias": False}, "stride": {"stride": 2}, "padding": {"padding": 1},
    "dilation": {"dilation": 2}, "groups": {"groups": 2}, "depthwise": {"groups": 4},
    "depthwise, strided": {"groups": 4, "stride": 2, "padding": 1},
    "all": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}, "1x1": {"kernel_size": 1},
    "one channel": {"out_channels": 1}, "5x5": {"kernel_size": 5, "padding": 2}, "padding='same'": {"padding": "same"},
    "padding='valid'": {"padding": "valid"}, "same, asymmetric": {"kernel_size": 2, "padding": "same"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "same, asymmetric, dilated": {"kernel_size": 4, "dilation": 3, "padding": "same"},
    "reflect": {"padding": 1, "padding_mode": "reflect"}, "replicate": {"padding": 2, "padding_mode": "replicate"},
    "circular, same": {"padding": "same", "padding_mode": "circular"},
    "circular, same, asymmetric": {"kernel_size": 4, "padding": "same", "padding_mode": "circular"},
}  # fmt: skip
FUNCTIONS = {
    "F.conv2d, all arguments": lambda m, x: F.conv2d(x, m.w, m.b, 2, 1, 1, 2),
    "F.conv2d, none": lambda m, x: F.conv2d(x, m.w, groups=2),
    "F.conv2d, keywords": lambda m, x: F.conv2d(input=x, weight=m.w, bias=m.b, stride=(1, 2), padding=(2, 0), groups=2),
    "torch.conv2d, padding='same'": lambda m, x: torch.conv2d(x, m.w, m.b, padding="same", groups=2),
}
NORMS = {
    "conv1d bn": (lambda: nn.Sequential(conv(1), nn.BatchNorm1d(8)), SIZES[1], "qconv"),
    "conv2d bn": (lambda: nn.Sequential(conv(2, bias=False), nn.BatchNorm2d(8)), SIZES[2], "qconv"),
    "conv3d bn": (lambda: nn.Sequential(conv(3), nn.BatchNorm3d(8)), SIZES[3], "qconv"),
    "conv bn relu": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU()), SIZES[2], "qconv"),
    "conv bn hardswish": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(8), nn.Hardswish()), SIZES[2], "qconv"),
    "circular bn": (lambda: nn.Sequential(conv(padding_mode="circular"), nn.BatchNorm2d(8)), SIZES[2], "qconv"),
    "linear bn relu": (lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), (5, 16), "qlinear"),
}
CONVS = {
    f"conv{n}d {name}": Case(functools.partial(conv, n, **options), SIZES[n], "quantize qconv")
    for n in (1, 2, 3)
    for name, options in OPTIONS.items()
    if n == 2 or name in ("plain", "stride", "dilation", "groups", "all", "reflect") or "same," in name
}
CONVS |= {
    name: Case(lambda fn=fn: Call(fn, w=torch.randn(8, 2, 3, 3), b=torch.randn(8)), SIZES[2], "quantize qconv")
    for name, fn in FUNCTIONS.items()
}
CONVS |= {name: Case(*made, f"quantize {kernel}", behind=kernel) for name, (*made, kernel) in NORMS.items()}
CONVS |= {
    "padded by the kernel": Case(lambda: conv(padding=1, out_channels=2), (1, 4, 330, 330), "quantize qconv"),
    "1x1 input": Case(lambda: conv(padding=1), (2, 4, 1, 1), "quantize qconv"),
    "as linear": Case(pointwise, BIG, "quantize qlinear"),
    "an image of three channels": Case(lambda: conv(2, 3), (2, 3, 12, 11), "quantize add qconv"),
    "an image, strided and padded": Case(lambda: conv(2, 3, kernel_size=7, stride=2, padding=3), (1, 3, 21, 30),
        "quantize add qconv"),
    "without a batch": Case(conv, (4, 12, 11), "quantize qconv", "quantize*2 qconv*2"),
    "channels_last": Case(lambda: conv(padding=1), lambda: torch.randn(SIZES[2]).to(memory_format=torch.channels_last),
        "quantize qconv"),
    "a strided view": Case(conv, lambda: torch.randn(2, 4, 24, 11)[:, :, ::2], "quantize qconv"),
    "an output channel of zeros": Case(lambda: without(3, "weight", "bias"), SIZES[2], "quantize qconv"),
    "all zeros": Case(lambda: without(None, "weight"), SIZES[2], "quantize qconv"),
    "a constant input": Case(lambda: conv(padding=1), lambda: torch.full(SIZES[2], -3.0), "quantize qconv"),
    "an input of zeros": Case(conv, lambda: torch.zeros(SIZES[2]), "quantize qconv"),
    "transposed": Case(lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3)), SIZES[2], "convolution",
        "convolution quantize qconv"),
}  # fmt: skip


# Activations

#: What the stock kernels take, as measured.
TAKEN = {"conv1d": {"relu"}, "conv2d": {"relu", "clamp", "hardswish", "silu"}, "conv3d": set(),
         "linear": {"relu", "clamp", "hardswish", "silu", "leaky_relu", "tanh", "gelu"}}  # fmt: skip
MODULES = [
    ("relu", nn.ReLU()), ("clamp", nn.ReLU6()), ("clamp", nn.Hardtanh(-1.5, 0.5)), ("hardswish", nn.Hardswish()),
    ("silu", nn.SiLU()), ("leaky_relu", nn.LeakyReLU(0.2)), ("gelu", nn.GELU()), ("gelu", nn.GELU("tanh")),
    ("sigmoid", nn.Sigmoid()), ("tanh", nn.Tanh()), ("elu", nn.ELU(0.7)), ("mish", nn.Mish()),
    ("hardsigmoid", nn.Hardsigmoid()),
]  # fmt: skip
SPELLINGS = {
    "F.relu": ("relu", F.relu), "F.relu(inplace)": ("relu", lambda x: F.relu(x, inplace=True)),
    "x.relu_": ("relu", lambda x: x.relu_()), "x.relu": ("relu", lambda x: x.relu()),
    "torch.relu_": ("relu", torch.relu_), "nn.ReLU(inplace)": ("relu", nn.ReLU(True)), "F.relu6": ("clamp", F.relu6),
    "nn.ReLU6(inplace)": ("clamp", nn.ReLU6(True)), "F.hardtanh": ("clamp", F.hardtanh),
    "F.hardtanh_": ("clamp", lambda x: F.hardtanh_(x, -0.5, 1.0)),
    "torch.clamp": ("clamp", lambda x: torch.clamp(x, 0, 6)), "x.clamp(-1, 1)": ("clamp", lambda x: x.clamp(-1, 1)),
    "x.clamp_": ("clamp", lambda x: x.clamp_(min=-0.5, max=0.5)),
    "torch.clip": ("clamp", lambda x: torch.clip(x, -0.1, 0.7)), "x.clamp(min=0)": ("relu", lambda x: x.clamp(min=0)),
    "x.clamp_min(0)": ("relu", lambda x: x.clamp_min(0)), "F.hardswish": ("hardswish", F.hardswish),
    "nn.Hardswish(inplace)": ("hardswish", nn.Hardswish(True)), "F.silu": ("silu", F.silu),
    "F.silu(inplace)": ("silu", lambda x: F.silu(x, inplace=True)),
    "x * sigmoid(x)": ("silu", lambda x: x * torch.sigmoid(x)), "sigmoid(x) * x": ("silu", lambda x: x.sigmoid() * x),
    "torch.mul, keywords": ("silu", lambda x: torch.mul(input=x, other=x.sigmoid())),
    "sigmoid(x) * sigmoid(sigmoid(x))": ("sigmoid silu", lambda x: let(x.sigmoid(), lambda y: y * y.sigmoid())),
    "x.mul(sigmoid(x))": ("silu", lambda x: x.mul(F.sigmoid(x))), "F.gelu": ("gelu", F.gelu),
    "F.gelu(tanh)": ("gelu", lambda x: F.gelu(x, approximate="tanh")), "torch.tanh_": ("tanh", torch.tanh_),
    "x.tanh": ("tanh", lambda x: x.tanh()), "F.leaky_relu": ("leaky_relu", F.leaky_relu),
    "x.sigmoid_": ("sigmoid", lambda x: x.sigmoid_()), "F.leaky_relu_": ("leaky_relu", lambda x: F.leaky_relu_(x, 0.3)),
    "x.abs": ("abs", lambda x: x.abs()), "torch.square": ("pow", torch.square), "x.exp": ("exp", lambda x: x.exp()),
    "sqrt of abs": ("abs sqrt", lambda x: x.abs().sqrt()), "torch.round": ("round", torch.round),
    "x.clamp(max=1)": ("clamp max", lambda x: x.clamp(max=1.0)),
}  # fmt: skip
LAYERS = {"conv1d": (lambda: conv(1), SIZES[1]), "conv2d": (conv, SIZES[2]), "conv3d": (lambda: conv(3), SIZES[3]),
          "linear": (lambda: nn.Linear(16, 12), (3, 7, 16))}  # fmt: skip


def behind_layer(make: Callable, act: Callable) -> Callable[[], nn.Module]:
    if isinstance(act, nn.Module):
        return lambda: nn.Sequential(make(), copy.deepcopy(act))
    return lambda: Call(lambda m, x: act(m.a(x)), a=make())


def activation_case(layer: str, name: str, act: Callable) -> Case:
    kernel = "qlinear" if layer == "linear" else "qconv"
    left = "" if name in TAKEN[layer] else name.removesuffix(" max")
    make, shape = LAYERS[layer]
    after = f"quantize {kernel} {left} {'quantize' * bool(left)} {kernel}"
    return Case(behind_layer(make, act), shape, f"quantize {kernel} {left}", after, kernel)


ACTIVATIONS = {
    f"{layer} {act}": activation_case(layer, name, act)
    for layer in LAYERS
    for name, act in MODULES
    if layer in ("conv2d", "linear") or name in ("relu", "clamp", "silu", "gelu")
}
ACTIVATIONS |= {
    f"{layer} {text}": activation_case(layer, name, act)
    for layer in ("conv2d", "linear")
    for text, (name, act) in SPELLINGS.items()
    if layer == "conv2d" or name in ("gelu", "tanh", "leaky_relu", "sigmoid") or text in ("F.relu", "x * sigmoid(x)")
}


# Sums: ``y`` is the other operand, ``b`` the layer that takes it

SPELLED_SUMS = {
    "y + b(x)": lambda m, y, x: y + m.b(x), "b(x) + y": lambda m, y, x: m.b(x) + y,
    "in place": lambda m, y, x: m.b(x).add_(y), "+ relu": lambda m, y, x: F.relu(y + m.b(x)),
    "torch.add": lambda m, y, x: torch.add(m.b(x), y),
    "keywords": lambda m, y, x: torch.add(input=y, other=m.b(x), alpha=1), "x.add": lambda m, y, x: y.add(m.b(x)),
    "+ nn.ReLU": lambda m, y, x: m.relu(m.b(x) + y), "in place + relu_": lambda m, y, x: m.b(x).add_(y).relu_(),
    "dropout between": lambda m, y, x: (y + m.drop(m.b(x))).relu(),
    "y += b(x)": lambda m, y, x: operator.iadd(y, m.b(x)), "y.add_(b(x))": lambda m, y, x: y.add_(m.b(x)).relu_(),
}  # fmt: skip
#: How the other operand comes, and what runs before the sum, with float and int8 out.
OTHERS = {
    "int8": (lambda m, x, add: add(m, m.a(x), x), "quantize K dequantize S", "quantize K S K"),
    "float": (lambda m, x, add: add(m, F.softplus(m.a(x)), x), "quantize K softplus S", "quantize K softplus S Q K"),
    "alive": (lambda m, x, add: let(m.a(x), lambda y: (add(m, y, x), y)), "quantize K S", "quantize K S Q K"),
    "the input": (lambda m, x, add: add(m, x, x), "quantize S", "quantize S Q K"),
}
#: A float operand does not keep a linear layer from writing uint8.
SUM_KERNELS = {"conv": {"K": "qconv", "S": "qconv_sum", "Q": "quantize"},
               "linear": {"K": "qlinear", "S": "qlinear", "Q": ""}}  # fmt: skip


def sum_case(kind: str, add: Callable, other: str) -> Case:
    layer = same if kind == "conv" else functools.partial(nn.Linear, 16, 16)
    fn, *runs = OTHERS[other]
    runs = [" ".join(SUM_KERNELS[kind].get(part, part) for part in text.split()) for text in runs]

    def make() -> nn.Module:
        return Call(lambda m, x: fn(m, x, add), a=layer(), b=layer(), relu=nn.ReLU(True), drop=nn.Dropout(0.3))

    return Case(make, IMAGE if kind == "conv" else (3, 7, 16), *runs, SUM_KERNELS[kind]["K"])


def chain(m, x):
    y = m.layers[0](x)
    for layer in m.layers[1:]:
        y = F.relu(layer(y) + y)
    return y


def sum_of(fn: Callable, layer: Callable = same) -> Callable[[], nn.Module]:
    return lambda: Call(lambda m, x: fn(m, x), a=layer(), b=layer(), w=torch.randn(8, 1, 1), v=torch.randn(IMAGE))


def two(layer: Callable, other: Callable | None = None) -> Callable[[], nn.Module]:
    return lambda: Call(lambda m, x: F.relu(m.a(x) + m.b(x)), a=layer(), b=(other or layer)())


SUMS = {
    f"{kind} {text}, {other}": sum_case(kind, add, other)
    for kind in SUM_KERNELS
    for other in OTHERS
    for text, add in SPELLED_SUMS.items()
    if other == "int8" or text in ("b(x) + y", "in place", "+ relu")
}
ADD_FLOAT = dbrq.default_qconfig_mapping().set_object_type(torch.add, None)
MORE_SUMS = {
    "chain of convs": Case(lambda: Call(chain, layers=stack_of(same)), IMAGE, "quantize qconv dequantize qconv_sum*3",
        "quantize qconv*2 qconv_sum*3"),
    "chain of linears": Case(lambda: Call(chain, layers=stack_of(lambda: nn.Linear(8, 8))), (5, 8),
        "quantize qlinear*4 dequantize", "quantize qlinear*5", "qlinear"),
    "conv bn + conv bn": Case(two(lambda: nn.Sequential(same(), nn.BatchNorm2d(8))), IMAGE,
        "quantize qconv dequantize qconv_sum", "quantize qconv qconv_sum qconv"),
    "strided": Case(two(lambda: same(stride=2), lambda: same(stride=2, padding=3, dilation=3, groups=4)),
        (2, 8, 11, 11), "quantize qconv dequantize qconv_sum", "quantize qconv qconv_sum qconv"),
    "pointwise": Case(two(pointwise), BIG, "quantize qlinear dequantize qlinear", "quantize qlinear*2 qconv"),
    "pointwise, other alive": Case(lambda: Call(lambda m, x: m.a(x) + x, a=pointwise()), BIG, "quantize qlinear"),
    "two inputs": Case(lambda: Call(lambda m, x, y: m.a(x) + y, a=same()),
        lambda: (torch.randn(IMAGE), torch.randn(IMAGE)), "quantize qconv_sum", "quantize*2 qconv_sum qconv"),
    "another activation": Case(sum_of(lambda m, x: F.silu(x + m.a(x))), IMAGE, "quantize qconv_sum silu",
        "quantize*2 qconv_sum silu qconv"),
    "read twice": Case(sum_of(lambda m, x: let(x + m.a(x), lambda y: F.relu(y) * y)), IMAGE,
        "quantize qconv_sum relu mul", "quantize*2 qconv_sum qconv relu mul", onednn=("layer relu*2", "layer*2 relu")),
    "an add that stays float, keywords": Case(sum_of(lambda m, x: torch.add(input=m.a(x), other=x)), IMAGE,
        "...", mapping=ADD_FLOAT, onednn=("layer", "layer*2")),
    "one operand again": Case(sum_of(lambda m, x: let(m.a(x), lambda y: y + m.b(x) + y)), IMAGE,
        "qconv qconv_sum add ...", "qconv*2 qconv_sum add ...", onednn=("layer*2 add", "layer*3 add")),
}  # fmt: skip
UNFUSED = {  # what the stock kernels with a sum do not take, and what oneDNN runs beside layers if it does not either
    "conv1d": (sum_of(lambda m, x: m.a(x) + m.b(x), lambda: conv(1, 8)), (2, 8, 9), "qconv*2 add", "add"),
    "conv3d": (sum_of(lambda m, x: m.a(x) + m.b(x), lambda: conv(3, 8)), (2, 8, 4, 5, 3), "qconv*2 add", "add"),
    "other broadcasts": (sum_of(lambda m, x: m.a(x) + m.b(x).mean((2, 3), True)), IMAGE, "qconv*2 mean add",
        "mean add"),
    "layer broadcasts": (sum_of(lambda m, x: x + m.a(x[:, :, :1, :1])), IMAGE, "qconv add", "add"),
    "other is a parameter": (sum_of(lambda m, x: m.a(x) + m.w), IMAGE, "qconv add", None),
    "other is a parameter of its shape": (sum_of(lambda m, x: m.a(x) + m.v), IMAGE, "qconv add", None),
    "other is a number": (sum_of(lambda m, x: m.a(x) + 1.0), IMAGE, "qconv add", "scale"),
    "other is of integers": (sum_of(lambda m, x: m.a(x) + (x > 0).long()), IMAGE, "qconv gt add",
        "torch:gt torch:long torch:add"),
    "alpha": (sum_of(lambda m, x: torch.add(m.a(x), x, alpha=2)), IMAGE, "qconv add", "torch:add"),
    "x + conv(x) * 10": (sum_of(lambda m, x: x + m.a(x) * 10), IMAGE, "qconv mul add", None),
    "with itself": (sum_of(lambda m, x: let(m.a(x), lambda y: y + y)), IMAGE, "qconv add", "torch:add"),
}  # fmt: skip
for name, (make, shape, runs, beside) in UNFUSED.items():
    layers = 1 + runs.count("qconv*2")
    primitives = None if beside is None else (f"layer*{layers} {beside}", f"layer*{layers + 1} {beside}")
    MORE_SUMS[name] = Case(make, shape, f"{runs} ...", f"{runs} qconv ...", onednn=primitives)


# Linear layers and matmuls


def linear(fn: Callable = lambda m, x: m.a(x), **options: Any) -> Callable[[], nn.Module]:
    return lambda: Call(fn, a=nn.Linear(16, 12, **options))


W = functools.partial(torch.randn, 12, 16)
LINEARS = {
    **{f"{len(shape)}-d": (linear(), shape) for shape in ((16,), (5, 16), (3, 7, 16), (2, 3, 4, 16), (2, 1, 3, 2, 16))},
    "no bias": (linear(bias=False), (3, 7, 16)), "one output": (lambda: nn.Linear(16, 1), (5, 16)),
    "1x1": (lambda: nn.Linear(1, 3), (1, 1)), "transposed": (linear(lambda m, x: m.a(x.transpose(1, 2))), (3, 16, 7)),
    "strided": (linear(lambda m, x: m.a(x[:, ::2])), (3, 7, 16)),
    "expanded": (linear(lambda m, x: m.a(x.expand(4, 7, 16))), (1, 7, 16)),
    "not contiguous": (linear(), lambda: torch.randn(16, 7).t()),
    "F.linear": (lambda: Call(lambda m, x: F.linear(x, m.w, m.b), w=W(), b=torch.randn(12)), (5, 16)),
    "F.linear, keywords": (lambda: Call(lambda m, x: F.linear(input=x, weight=m.w), w=W()), (2, 5, 16)),
    "F.linear of w.t()": (lambda: Call(lambda m, x: F.linear(x, m.w.t()), w=torch.randn(16, 12)), (5, 16)),
}  # fmt: skip
LINEAR_CASES = {f"linear, {n}": Case(*made, "quantize qlinear", behind="qlinear") for n, made in LINEARS.items()}
PLUS_ROW = sum_of(lambda m, x: m.a(x) + x[:1], lambda: nn.Linear(8, 8))
LINEAR_CASES["linear, other broadcasts"] = Case(
    PLUS_ROW, (5, 8), "quantize qlinear add", "qlinear*2 add ...", "qlinear"
)
ASKED = QConfigMapping().set_global(dbrq.default_qconfig_mapping().global_qconfig)
MATMULS = {  # of q and k [2, 3, 8, 16]: how many products, and what else runs
    "@": (lambda q, k: q @ k.mT, 6, ""), "torch.matmul": (lambda q, k: torch.matmul(q, k.transpose(-1, -2)), 6, ""),
    "bmm": (lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)), 6, ""),
    "/ number, int8": (lambda q, k: q @ k.transpose(2, 3) / 4.0, 6, "..."),
    "* number": (lambda q, k: q @ k.mT * 0.25, 6, "..."),
    "/ number": (lambda q, k: F.softplus(q @ k.transpose(2, 3) / 4.0), 6, "softplus"),
    "torch.div": (lambda q, k: F.softplus(torch.div(q @ k.transpose(2, 3), 4)), 6, "softplus"),
    "/ 1-element tensor": (lambda q, k: q @ k.mT / torch.tensor(4.0), 6, "..."),
    "/ number + mask": (lambda q, k: q @ k.transpose(2, 3) / 4.0 + torch.ones(8, 8).triu(1).mul(-5.0), 6, "add"),
    "broadcast batch": (lambda q, k: q.narrow(1, 0, 1) @ k.transpose(2, 3), 6, ""),
    "2-d": (lambda q, k: q.select(0, 0).select(0, 0) @ k.select(0, 1).select(0, 0).t(), 1, ""),
    "broadcast rank": (lambda q, k: q @ k.select(0, 0).transpose(1, 2), 6, ""),
    "number / product": (lambda q, k: 1.0 / (q @ k.mT + 30.0), 6, "..."),
    "strided": (lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1), 16, ""),
    "strided slices": (lambda q, k: q[:, :, ::2] @ k.mT[..., 1::2], 6, ""),
}  # fmt: skip
MATMUL_CASES = {
    f"matmul, {name}": Case(lambda op=op: Call(lambda m, x: op(m.q(x), m.k(x)), q=nn.Linear(16, 16),
        k=nn.Linear(16, 16)), (2, 3, 8, 16), f"quantize qlinear*2 int_mm*{count} dequantize {left}",
        f"quantize*2 qlinear*3 int_mm*{count} dequantize {left}", "qlinear", ASKED) for name,
        (op, count, left) in MATMULS.items()
}  # fmt: skip


# On integers

MAX = "quantize qconv max_pool"
POOLS = {
    "nn.MaxPool2d": (nn.MaxPool2d(2), 2, MAX), "stride": (nn.MaxPool2d(3, stride=1), 2, MAX),
    "padding": (nn.MaxPool2d(3, 2, 1), 2, MAX), "dilation": (nn.MaxPool2d(2, dilation=3), 2, MAX),
    "ceil_mode": (nn.MaxPool2d(3, 2, ceil_mode=True), 2, MAX),
    "rectangle": (nn.MaxPool2d((3, 2), (1, 2), (1, 0), (2, 1)), 2, MAX),
    "F.max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, 1, True), 2, MAX),
    "torch.max_pool2d": (lambda x: torch.max_pool2d(x, 2), 2, MAX),
    "keywords": (lambda x: F.max_pool2d(x, kernel_size=3, padding=1), 2, MAX),
    "pool of pools": (lambda x: F.max_pool2d(F.max_pool2d(x, 2), 2), 2, MAX + "*2"),
    "nn.MaxPool1d": (nn.MaxPool1d(3, 2, 1), 1, MAX),
    "F.max_pool1d": (lambda x: F.max_pool1d(x, 2, dilation=2, ceil_mode=True), 1, MAX),
    "nn.MaxPool3d": (nn.MaxPool3d(2, padding=1), 3, "quantize qconv max_pool3d_with_indices"),
}  # fmt: skip
AVERAGES = {  # "" where the padding is no zero, or the window moves: float
    "nn.AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), 2, "mean"),
    "3x5": (nn.AdaptiveAvgPool2d((3, 5)), 2, "_adaptive_avg_pool2d"),
    "F.adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (None, 4)), 2, "_adaptive_avg_pool2d"),
    "nn.AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(3), 1, "_adaptive_avg_pool2d"),
    "nn.AdaptiveAvgPool3d": (nn.AdaptiveAvgPool3d(2), 3, "_adaptive_avg_pool3d"),
    "mean": (lambda x: x.mean((2, 3), keepdim=True), 2, "mean"),
    "torch.mean": (lambda x: torch.mean(x, -1, True), 2, "mean"), "nn.AvgPool2d": (nn.AvgPool2d(2), 2, ""),
    "padded": (nn.AvgPool2d(3, 2, 1), 2, ""), "nn.AvgPool1d": (nn.AvgPool1d(3, 2, 1), 1, ""),
    "no padding counted": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), 2, ""),
    "nn.AvgPool3d": (nn.AvgPool3d(2), 3, ""), "ceil_mode": (nn.AvgPool2d(3, 2, ceil_mode=True), 2, ""),
    "divisor": (lambda x: F.avg_pool2d(x, 3, divisor_override=5), 2, ""),
    "relu before": (nn.Sequential(nn.ReLU(), nn.AvgPool2d(3, 2, 1)), 2, ""),
}  # fmt: skip
POOLS |= {
    f"average, {name}": (op, n, f"quantize*2 qconv sub {runs}" if runs else "qconv ...")
    for name, (op, n, runs) in AVERAGES.items()
}
NEAREST = {  # on floats that hold the integers
    "F.interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "by a float": lambda x: F.interpolate(x, scale_factor=2.0),
    "by two": lambda x: F.interpolate(x, scale_factor=(2.0, 1.5)),
    "to a size": lambda x: F.interpolate(x, size=(7, 25)), "to a square": lambda x: F.interpolate(x, size=14),
    "nn.Upsample": nn.Upsample(scale_factor=2),
    "exact": lambda x: F.interpolate(x, size=(20, 17), mode="nearest-exact"),
}  # fmt: skip
MOVES = {  # of a convolution's result [2, 8, 12, 11]
    "flatten": lambda x: x.flatten(1), "torch.flatten": lambda x: torch.flatten(x, 2), "nn.Flatten": nn.Flatten(),
    "view of the batch": lambda x: x.view(x.size(0), -1), "reshape": lambda x: x.reshape(2, 4, 2, -1),
    "view": lambda x: x.view(2, 8, -1), "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, 3), "swapaxes": lambda x: torch.swapaxes(x, 1, 2), "mT": lambda x: x.mT,
    "T": lambda x: x.select(0, 1).select(0, 3).T, "movedim": lambda x: x.movedim(1, -1), "index": lambda x: x[:, 0],
    "contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous(), "slice": lambda x: x[:, 2:6],
    "slice, step": lambda x: x[..., ::2, 1::3], "narrow": lambda x: x.narrow(1, 2, 4),
    "select": lambda x: x.select(1, 3), "chunk": lambda x: x.chunk(2, 1)[0], "split": lambda x: torch.split(x, 3, 1)[2],
    "unbind": lambda x: x.unbind(1)[1], "cat": lambda x: torch.cat([x, x], 1),
    "split and cat": lambda x: torch.cat(x.split([2, 6], 1)[::-1], 1),
    "chunk and shuffle": lambda x: torch.cat(torch.chunk(x, 4, dim=1)[::2], dim=1),
    "cat of pools": lambda x: torch.cat((F.max_pool2d(x, 3, 1, 1), x), dim=1),
    "stack": lambda x: torch.stack([x, x], 1), "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x.narrow(1, 0, 1).expand(2, 4, 12, 11), "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "flip": lambda x: x.flip(3), "roll": lambda x: torch.roll(x, 2, 2),
    "F.pixel_shuffle": lambda x: F.pixel_shuffle(x, 2), "nn.PixelShuffle": nn.PixelShuffle(2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4), "dropout": nn.Dropout(0.5), "identity": nn.Identity(),
    "clone": lambda x: x.clone(), "zero padding": lambda x: F.pad(x, (1, 2, 0, 1)), "nn.ZeroPad2d": nn.ZeroPad2d(1),
    "unfold": lambda x: x.unfold(2, 3, 3), "reflect padding": lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"),
    "nn.Unflatten": nn.Unflatten(1, (2, 4)),
}  # fmt: skip


def int8_case(make: Callable, shape: Any, runs: str, behind: str = "qconv") -> Case:
    return Case(make, shape, "", f"{runs} {behind}", behind)


INTEGERS = {
    **{name: int8_case(behind_layer(functools.partial(conv, n, padding=1), op), SIZES[n], runs) for name,
        (op, n, runs) in POOLS.items()},
    **{f"nearest, {name}": int8_case(behind_layer(conv, op), SIZES[2], f"quantize qconv {kernel}") for name,
        op in NEAREST.items() for kernel in ["_upsample_nearest_exact2d" if name == "exact" else "upsample_nearest2d"]},
    **{name: int8_case(behind_layer(functools.partial(conv, padding=1), op), SIZES[2],
        MAX if "pools" in name else "quantize qconv", "qlinear") for name, op in MOVES.items()},
    "cat of two": int8_case(lambda: Call(lambda m, x: torch.cat((m.a(x), m.b(x)), 1), a=conv(), b=conv()), SIZES[2],
        "quantize qconv*2"),
    "max pool of many": int8_case(behind_layer(conv, nn.MaxPool2d(3, 2, 1)), (1, 4, 112, 112), MAX),
}  # fmt: skip


# Float in, int8 out; inputs that are shared; other kinds of quantization


def attention(m, x):
    y = m.norm(x)
    return F.scaled_dot_product_attention(m.q(y), m.k(y), m.v(y))


def three(**widths: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(16, width) for name, width in (widths or {"q": 12, "k": 12, "v": 12}).items()}


EMBEDDED = dbrq.default_qconfig_mapping()
for embedding in (nn.Embedding, nn.EmbeddingBag):
    EMBEDDED.set_object_type(embedding, float_qparams_weight_only_qconfig)
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
WEIGHT_ONLY = QConfigMapping().set_global(QConfig(PlaceholderObserver, default_per_channel_weight_observer))
INDEX = functools.partial(torch.randint, 0, 40, (5, 7))
TO_INT8 = {
    "layer_norm": int8_case(lambda: nn.Sequential(nn.LayerNorm(16)), (3, 7, 16), "native_layer_norm quantize",
        "qlinear"),
    "softmax": int8_case(lambda: Call(lambda m, x: torch.softmax(x, -1)), (3, 7, 16), "_softmax quantize", "qlinear"),
    "gelu": int8_case(lambda: Call(lambda m, x: F.gelu(x)), (3, 7, 16), "gelu quantize", "qlinear"),
    "gelu, strided": int8_case(lambda: Call(lambda m, x: F.gelu(x.transpose(0, 1))), (3, 7, 16), "gelu quantize",
        "qlinear"),
    "three linears": int8_case(lambda: Call(lambda m, x: torch.cat([m.q(x).tanh(), m.k(x).relu(), m.v(x)], -1),
        **three()), (3, 7, 16), "quantize qlinear*3", "qlinear"),
}  # fmt: skip
SHARED = {
    "query, key and value": Case(lambda: Call(attention, norm=nn.LayerNorm(16), **three()), (2, 3, 7, 16),
        "native_layer_norm quantize qlinear ...", behind="qlinear"),
    "several widths": Case(lambda: Call(lambda m, x: (m.a(x), m.b(x), m.c(x)), **three(a=3, b=5, c=1)), (5, 16),
        "quantize qlinear", "quantize qlinear*4", "qlinear"),
    "dynamic": Case(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU()), (5, 16), "qlinear relu ...",
        "qlinear*2 relu ...", "qlinear", DYNAMIC),
    "weight-only": Case(lambda: nn.Sequential(nn.Linear(16, 8)), (5, 16), "mm mul ...", "mm*2 mul*2 ...", "qlinear",
        WEIGHT_ONLY),
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(40, 16, padding_idx=2)), INDEX, "...", "quantize qlinear ...",
        "qlinear", EMBEDDED),
    **{f"embedding_bag, {mode}": Case(lambda mode=mode: nn.Sequential(nn.EmbeddingBag(40, 16, mode=mode)), INDEX, "...",
        "quantize qlinear ...", "qlinear", EMBEDDED) for mode in ("mean", "sum", "max")},
}  # fmt: skip
REDUCED = dbrq.default_qconfig_mapping(reduce_range=True)
QCONFIGS = {"reduce_range": REDUCED, "per tensor": QConfigMapping().set_global(default_qconfig)}
SAMPLE = [
    "conv2d padding", "an image of three channels", "as linear", "conv + relu, int8", "linear + relu, int8",
    "pointwise", "linear + relu, alive", "average, mean", "average, padded", "nn.MaxPool2d", "zero padding",
    "cat of two",
]  # fmt: skip
LAYER_AND_SHAPE = {
    "conv": (same, IMAGE),
    "linear": (lambda: nn.Linear(16, 16), (3, 7, 16)),
    "pointwise": (pointwise, BIG),
}


# What must not be written over

ALIVE = {
    "returned": lambda m, x, y: (m.b(x) + y, y), "mT returned": lambda m, x, y: let(y.mT, lambda v: (m.b(x) + y, v)),
    "data read later": lambda m, x, y: let(y.data, lambda v: (m.b(x) + y, v * 1.0, v)),
    "in place, read by a view": lambda m, x, y: let(y[:, :2], lambda v: (y.add_(m.b(x)), v + 1)[1]),
    "read by strides": lambda m, x, y: torch.as_strided(y, (2, 8, 9, 10), (720, 90, 10, 1)) + m.b(x),
    "a view returned": lambda m, x, y: let(y.view(2, -1), lambda v: (m.b(x) + y, v)),
    "a slice returned": lambda m, x, y: let(y[:, 1:3], lambda v: (m.b(x) + y, v)),
    "read later, int8": lambda m, x, y: let(m.b(x) + y, lambda z: m.c(z) + F.elu(m.b(y))),
    "read later, float": lambda m, x, y: let(m.b(x) + y, lambda z: (z, y.std())),
    "a view read later, int8": lambda m, x, y: let(y.flip(2).view(2, 8, 9, 10), lambda v: (m.c(m.b(x) + y), m.c(v))),
    "an alias read later, int8": lambda m, x, y: let(y.view(2, 8, 90).view(2, 8, 9, 10),
        lambda v: (m.c(m.b(x) + y), m.c(v))),
    "a view read later, float": lambda m, x, y: let(y.flatten(1), lambda v: (m.c(m.b(x) + y), v.exp())),
    "pooled, read later": lambda m, x, y: let(F.max_pool2d(y, 3, 1, 1), lambda z: (m.c(m.b(x) + z), m.c(z))),
    "a part read later": lambda m, x, y: let(y.narrow(1, 0, 4), lambda p: (m.c(m.b(x) + y), m.d(p))),
    "the layer's input": lambda m, x, y: m.c(m.b(y) + y),
    "the layer's input, float": lambda m, x, y: F.relu(m.b(y) + y),
    "sums of sums": lambda m, x, y: let(F.relu(m.b(y) + y), lambda z: m.c(z) + z + y),
    "added twice": lambda m, x, y: let(m.c(x) + y, lambda z: (m.b(z) + y, z)),
    "the model's input": lambda m, x, y: (m.b(x) + x, m.c(y) + x),
    "added three times": lambda m, x, y: torch.stack([y, m.b(x) + y, m.c(x) + y]),
    "a view of the input": lambda m, x, y: m.b(x) + x.view(2, 8, 9, 10),
    "in place": lambda m, x, y: let(y[:, :2], lambda v: (y.add_(m.b(x)), v)),
    "in place twice": lambda m, x, y: m.c(y.add_(m.b(x)).add_(m.c(x)).relu_()),
    "in place, a view of the result": lambda m, x, y: let(m.b(x), lambda z: let(z[:1], lambda v: (m.c(z.add_(y)), v))),
    "expanded": lambda m, x, y: m.b(x) + F.softplus(y[:1]).expand(2, 8, 9, 10),
    "a constant": lambda m, x, y: (m.b(x) + m.w.mul(2.0), m.w + y),
}  # fmt: skip
