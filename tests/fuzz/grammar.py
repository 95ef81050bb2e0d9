"""What programs are made of: a rule for each kind of statement, and the generator that applies them."""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .program import Draft, Inapplicable, Program, Rules, Unusable

rule = Rules()
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 17, 24, 32)
WIDTHS = (1, 3, 4, 6, 8, 8, 12, 16, 16, 32)


# Layers


def _conv_arguments(d: Draft, ndim: int, channels: int) -> tuple[int, str]:
    """Output channels, and geometry as text: odd ones often."""
    rng = d.rng

    def each(*options: int) -> Any:
        if d.chance(0.6):
            return rng.choice(options)
        return tuple(rng.choice(options) for _ in range(ndim))

    groups = 1
    out = rng.choice(CHANNELS)
    if d.chance(0.35):
        divisors = [g for g in range(1, channels + 1) if channels % g == 0]
        groups = channels if d.chance(0.5) else rng.choice(divisors)
        out = groups * d.choose(1, 1, 2, 3)
    parts = [str(each(1, 1, 2, 3, 3, 3, 4, 5, 7) if ndim < 3 else each(1, 1, 2, 3, 3))]
    if d.chance(0.4):
        parts.append(f"stride={each(1, 2, 2, 3, 4)}")
    padding = each(0, 0, 1, 1, 2, 3)
    if d.chance(0.1) and not any(p.startswith("stride") for p in parts):
        padding = repr(d.choose("same", "valid"))
    if padding != 0:
        parts.append(f"padding={padding}")
    if d.chance(0.25):
        parts.append(f"dilation={each(1, 2, 2, 3)}")
    if groups > 1:
        parts.append(f"groups={groups}")
    if d.chance(0.25):
        parts.append("bias=False")
    if d.chance(0.1):
        parts.append(f"padding_mode={d.choose('circular', 'reflect', 'replicate')!r}")
    return out, ", ".join(parts)


def _conv(d: Draft, ndim: int) -> str:
    x = d.pick(ndim + 2)
    channels = d.shape(x)[1]
    out, text = _conv_arguments(d, ndim, channels)
    layer = d.module(f"Conv{ndim}d({channels}, {out}, {text})")
    return d.let(f"{layer}({x})")


@rule(8)
def conv2d(d: Draft) -> None:
    _conv(d, 2)


@rule(5)
def conv1d(d: Draft) -> None:
    _conv(d, 1)


@rule(4)
def conv3d(d: Draft) -> None:
    _conv(d, 3)


@rule(3)
def conv_like_its_input(d: Draft) -> None:
    """Keeps the shape, so that sums, residuals and loops find something to work with."""
    x = d.pick(where=lambda v: v.dim() in (3, 4, 5))
    ndim, c = d.value(x).dim() - 2, d.shape(x)[1]
    kernel = d.choose(1, 3, 5)
    groups = d.choose(1, 1, c)
    text = f"{c}, {c}, {kernel}, padding={kernel // 2}, groups={groups}, bias={d.chance(0.7)}"
    d.let(f"{d.module(f'Conv{ndim}d({text})')}({x})")


@rule(3)
def conv_transposed(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4, 5))
    ndim, c = d.value(x).dim() - 2, d.shape(x)[1]
    groups = d.choose(1, 1, 1, c)
    out = groups * d.choose(1, 2, 4) if groups > 1 else d.rng.choice(CHANNELS)
    parts = [str(c), str(out), str(d.choose(1, 2, 3, 4))]
    for name, options in (("stride", (1, 2, 3)), ("padding", (0, 1)), ("output_padding", (0, 0, 1)),
                          ("dilation", (1, 1, 2))):  # fmt: skip
        if d.chance(0.5):
            parts.append(f"{name}={d.rng.choice(options)}")
    d.let(f"{d.module(f'ConvTranspose{ndim}d({chr(44).join(parts)}, groups={groups})')}({x})")


@rule(3)
def conv_function(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4, 5))
    ndim, c = d.value(x).dim() - 2, d.shape(x)[1]
    depthwise = d.chance(0.3)
    out, kernel = (c if depthwise else d.rng.choice(CHANNELS)), d.choose(1, 2, 3)
    w = d.parameter(f"torch.randn({out}, {1 if depthwise else c}, {', '.join([str(kernel)] * ndim)}) * 0.3")
    bias = d.parameter(f"torch.randn({out})") if d.chance(0.6) else "None"
    groups = f", groups={c}" if depthwise else ""
    d.let(f"F.conv{ndim}d({x}, {w}, {bias}, stride={d.choose(1, 1, 2)}, padding={d.choose(0, 1)}{groups})")


@rule(4)
def conv_norm_act(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4, 5))
    ndim, c = d.value(x).dim() - 2, d.shape(x)[1]
    out, text = _conv_arguments(d, ndim, c)
    act = d.choose("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.ReLU6()", "nn.SiLU()", "nn.Hardswish()",
                   "nn.LeakyReLU(0.1)",
                   "nn.Identity()", "nn.GELU()")  # fmt: skip
    layer = f"Sequential(nn.Conv{ndim}d({c}, {out}, {text}), nn.BatchNorm{ndim}d({out}), {act})"
    d.let(f"{d.module(layer)}({x})")


@rule(7)
def linear(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 1)
    width = d.shape(x)[-1]
    layer = d.module(f"Linear({width}, {d.rng.choice(WIDTHS)}{', bias=False' if d.chance(0.3) else ''})")
    d.let(f"{layer}({x})")


@rule(2)
def linear_function(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 1)
    width, out = d.shape(x)[-1], d.rng.choice(WIDTHS)
    w = d.parameter(f"torch.randn({out}, {width}) * 0.3")
    bias = d.parameter(f"torch.randn({out})") if d.chance(0.5) else "None"
    d.let(d.choose(f"F.linear({x}, {w}, {bias})", f"{x} @ {w}.t()", f"torch.matmul({x}, {w}.t()) * 0.5"))


@rule(1)
def bilinear(d: Draft) -> None:
    x = d.pick(2)
    y = d.pick(2)
    d.let(f"{d.module(f'Bilinear({d.shape(x)[1]}, {d.shape(y)[1]}, 5)')}({x}, {y})")


@rule(3)
def norm(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    shape = d.shape(x)
    c, dim = shape[1], len(shape)
    options = [f"LayerNorm({shape[-1]})", f"LayerNorm({shape[-1]}, elementwise_affine=False)", f"RMSNorm({shape[-1]})",
               f"LocalResponseNorm({d.choose(1, 2, 3)})"]  # fmt: skip
    if dim in (2, 3):
        options += [f"BatchNorm1d({c})"] * 3
    if dim in (4, 5):
        options += [f"BatchNorm{dim - 2}d({c})"] * 3
    if dim in (3, 4, 5):
        options += [f"InstanceNorm{dim - 2}d({c}, affine={d.chance(0.5)})"]
        options += [f"GroupNorm({d.rng.choice([g for g in range(1, c + 1) if c % g == 0])}, {c})"] * 2
    d.let(f"{d.module(d.rng.choice(options))}({x})")


@rule(2)
def thin_norm(d: Draft) -> None:
    """Batch norm on (N, C, 1) and its kin."""
    x = d.pick(2)
    c = d.shape(x)[1]
    ones = d.choose(1, 2, 3)
    thin = d.let(f"{x}{'[..., None]' * ones}" if d.chance(0.5) else f"{x}.reshape(-1, {c}{', 1' * ones})")
    y = d.let(f"{d.module(f'BatchNorm{ones}d({c})')}({thin})")
    if d.chance(0.5):
        d.let(f"{y}.flatten(1)")


@rule(1)
def norm_function(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    c, last = d.shape(x)[1], d.shape(x)[-1]
    mean, var = d.buffer(f"torch.randn({c})"), d.buffer(f"torch.rand({c}) + 0.5")
    d.let(d.choose(
        f"F.batch_norm({x}, {mean}, {var})", f"F.layer_norm({x}, ({last},))",
        f"F.normalize({x}, dim={d.choose(1, -1)})",
        f"F.group_norm({x}, 1)",
    ))  # fmt: skip


@rule(5)
def pool(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4, 5))
    n = d.value(x).dim() - 2
    kernel, stride, ceil = d.choose(1, 2, 2, 3, 4), d.choose(None, 1, 2, 3), d.chance(0.3)
    common = f"{kernel}, stride={stride}, padding={d.choose(0, 0, 1)}, ceil_mode={ceil}"
    options = [f"nn.MaxPool{n}d({common}, dilation={d.choose(1, 1, 2)})"] * 3
    options += [f"nn.AvgPool{n}d({common}, count_include_pad={d.chance(0.5)})"] * 2
    size = d.choose("1", "1", "2", "3", str((1,) * (n - 1) + (2,)), str((2,) * n))
    options += [f"nn.AdaptiveAvgPool{n}d({size})", f"nn.AdaptiveAvgPool{n}d({size})", f"nn.AdaptiveMaxPool{n}d({size})"]
    if n < 3:
        options.append(f"nn.LPPool{n}d(2, {kernel})")
    layer = d.rng.choice(options)
    if d.chance(0.3):
        name, _, arguments = layer[3:].partition("(")
        function = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower().replace("l_p_pool", "lp_pool")
        d.let(f"F.{function}({x}, {arguments}")
    else:
        d.let(f"{d.attribute(layer, 'm')}({x})")


@rule(1)
def pool_with_indices(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4))
    n = d.value(x).dim() - 2
    values, indices = d.lets(f"F.max_pool{n}d({x}, 2, return_indices=True)", 2)
    if d.chance(0.5):
        d.let(f"F.max_unpool{n}d({values}, {indices}, 2, output_size={x}.shape)")


@rule(3)
def resize(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4, 5))
    n = d.value(x).dim() - 2
    smooth = {1: "linear", 2: d.choose("bilinear", "bicubic"), 3: "trilinear"}[n]
    padding = ", ".join(str(d.choose(0, 1, 2)) for _ in range(2 * n))
    options = [
        f"F.interpolate({x}, scale_factor={d.choose(2, 0.5, 1.5)}, mode='nearest')",
        f"F.interpolate({x}, scale_factor=2, mode={smooth!r}, align_corners={d.chance(0.5)})",
        f"F.interpolate({x}, size={(3,) * n}, mode='nearest')",
        f"F.pad({x}, ({padding}))",
        f"F.pad({x}, ({padding}), value={d.choose(-1.0, 0.5)})",
        f"F.pad({x}, ({padding}), mode={d.choose('reflect', 'replicate', 'circular')!r})",
    ]
    if n == 2:
        options += [f"F.pixel_shuffle({x}, 2)", f"F.pixel_unshuffle({x}, 2)", f"F.unfold({x}, 2)",
                    f"F.channel_shuffle({x}, 2)"]  # fmt: skip
    d.let(d.rng.choice(options))


@rule(3)
def recurrent(d: Draft) -> None:
    x = d.pick(3)
    kind, hidden = d.choose("LSTM", "GRU", "RNN"), d.choose(3, 8)
    layer = d.module(
        f"{kind}({d.shape(x)[-1]}, {hidden}, num_layers={d.choose(1, 1, 2)}, batch_first={d.chance(0.7)}, "
        f"bidirectional={d.chance(0.3)})"
    )
    d.let(f"{layer}({x})[0]")


@rule(1)
def cell(d: Draft) -> None:
    x = d.pick(2)
    kind = d.choose("LSTMCell", "GRUCell")
    layer = d.module(f"{kind}({d.shape(x)[-1]}, 6)")
    d.let(f"{layer}({x}){'[0]' if kind == 'LSTMCell' else ''}")


@rule(3)
def block(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (3, 4))
    if d.value(x).dim() == 4:
        c = d.shape(x)[1]
        made = d.choose(f"Residual({c}, {d.chance(0.5)})", f"SqueezeExcite({c}, {d.choose(1, 4)})")
    else:
        width = d.shape(x)[-1]
        heads = d.choose(*[h for h in (1, 2, 4) if width % h == 0])
        made = d.choose(f"Attention({width}, {heads})", f"FusedAttention({width}, {heads}, {d.chance(0.4)})",
                        f"FeedForward({width}, {2 * width})")  # fmt: skip
    d.let(f"{d.module(made)}({x})")


@rule(1)
def multihead(d: Draft) -> None:
    x = d.pick(3)
    width = d.shape(x)[-1]
    heads = d.choose(*[h for h in (1, 2, 4) if width % h == 0])
    layer = d.module(f"MultiheadAttention({width}, {heads}, batch_first={d.chance(0.7)})")
    d.let(f"{layer}({x}, {x}, {x}, need_weights={d.chance(0.3)})[0]")


@rule(1)
def encoder_layer(d: Draft) -> None:
    x = d.pick(3)
    width = d.shape(x)[-1]
    heads = d.choose(*[h for h in (1, 2, 4) if width % h == 0])
    layer = f"TransformerEncoderLayer({width}, {heads}, {2 * width}, batch_first=True, norm_first={d.chance(0.5)})"
    d.let(f"{d.module(layer)}({x})")


@rule(1)
def named_child(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    layer = d.module(f"Named(nn.Linear({d.shape(x)[-1]}, 6))")
    items = d.let(f'{layer}({{"x": {x}}})')
    d.let(f'{items}["y"]')


@rule(1)
def embedding(d: Draft) -> None:
    ids = d.pick(dtype="int64", where=lambda v: v.numel() > 0 and int(v.min()) >= 0 and int(v.max()) < 50)
    layer = d.module(f"Embedding(50, {d.choose(4, 8)}{', padding_idx=0' if d.chance(0.3) else ''})")
    d.let(f"{layer}({ids})")


@rule(1)
def embedding_bag(d: Draft) -> None:
    ids = d.pick(2, dtype="int64", where=lambda v: v.numel() > 0 and int(v.min()) >= 0 and int(v.max()) < 50)
    layer = d.module(f"EmbeddingBag(50, 8, mode={d.choose('sum', 'mean')!r})")
    d.let(f"{layer}({ids})")


# Activations and arithmetic

_MODULES = ("ReLU()", "ReLU(inplace=True)", "ReLU6()", "ReLU6(inplace=True)", "Hardtanh(-1, 2)", "LeakyReLU(0.2)",
            "LeakyReLU(0.1, inplace=True)", "Sigmoid()", "Tanh()", "Hardsigmoid()", "Hardswish()",
            "Hardswish(inplace=True)",
            "SiLU()", "SiLU(inplace=True)", "GELU()", "GELU('tanh')", "ELU(0.7)", "ELU(inplace=True)", "PReLU()",
            "Mish()",
            "Softplus()", "Softsign()", "Hardshrink()", "Softshrink()", "CELU()", "SELU()", "LogSigmoid()",
            "Threshold(0.1, 0.0)",
            "Tanhshrink()", "Softmax(-1)", "LogSoftmax(1)", "Dropout(0.5)", "Identity()", "GLU(-1)", "Softmin(-1)",
            "RReLU()", "Dropout2d(0.2)", "AlphaDropout(0.2)", "Flatten()", "Flatten(0)")  # fmt: skip
_CALLS = ("F.relu({})", "F.relu({}, inplace=True)", "torch.relu({})", "{}.relu()", "{}.relu_()", "F.relu6({})",
          "F.hardtanh({}, -1.0, 1.0)", "{}.clamp(min=0)", "{}.clamp(0, 6)", "torch.clamp({}, -1, 1)",
          "{}.clamp_(min=-0.5)",
          "{}.clamp_min(0)", "torch.sigmoid({})", "{}.sigmoid()", "{}.sigmoid_()", "F.sigmoid({})", "{}.tanh()",
          "torch.tanh({})",
          "F.gelu({})", "F.gelu({}, approximate='tanh')", "F.silu({})", "F.silu({}, inplace=True)", "F.hardswish({})",
          "F.leaky_relu({}, 0.1)", "F.elu({})", "F.elu({}, inplace=True)", "F.mish({})", "{} * torch.sigmoid({})",
          "F.softmax({}, dim=-1)", "{}.softmax(1)", "F.log_softmax({}, -1)", "{}.abs()", "-{}", "{} ** 2",
          "{}.pow(2)", "{}.square()",
          "{}.exp().log1p()", "torch.sqrt({}.abs() + 1)", "{}.sin()", "torch.erf({})", "F.threshold({}, 0.1, 0.0)",
          "{}.neg()",
          "torch.special.expit({})", "{}.reciprocal().clamp(-2, 2)", "torch.maximum({}, {} * 0.5)", "{}.abs_()",
          "{}.floor()",
          "{}.round()", "{}.sign()", "torch.rsqrt({}.abs() + 0.5)", "F.softplus({})", "{}.masked_fill({} < 0, 0.0)",
          "F.logsigmoid({})",
          "F.glu({}, 1)", "F.dropout({}, 0.5, training=False)",
          "F.dropout({}, 0.5, training=self.training)")  # fmt: skip


@rule(9)
def activation(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 1)
    if d.chance(0.4):
        d.let(f"{d.module(d.rng.choice(_MODULES))}({x})")
    else:
        d.let(d.rng.choice(_CALLS).replace("{}", x))


@rule(7)
def arithmetic(d: Draft) -> None:
    x = d.pick()
    y = d.like(x)
    d.let(d.choose(
        f"{x} + {y}", f"{x} + {y}", f"torch.add({x}, {y})", f"{x}.add({y})",
        f"torch.add({x}, {y}, alpha={d.choose(2, -1, 0.5)})",
        f"{x}.add_({y})", f"{x} * {y}", f"torch.mul({x}, {y})", f"{x}.mul_({y})", f"{x} - {y}",
        f"torch.sub({x}, {y})",
        f"{x} / ({y}.abs() + 1)", f"torch.maximum({x}, {y})", f"torch.minimum({x}, {y})",
        f"torch.lerp({x}, {y}, 0.3)",
        f"torch.addcmul({x}, {x}, {y}, value=0.5)", f"sum([{x}, {y}, {x}])", f"torch.stack([{x}, {y}]).mean(0)",
        f"torch.where({x} > 0.1, {x}, {y})", f"torch.hypot({x}, {y})", f"torch.atan2({x}, {y})",
    ))  # fmt: skip


@rule(6)
def fused_sum(d: Draft) -> None:
    """A layer's result, a sum and an activation in any order: what backends fuse."""
    x = d.pick(where=lambda v: v.dim() in (2, 3, 4, 5))
    y = d.like(x)
    shape = d.shape(x)
    if len(shape) == 2 or d.chance(0.2):
        layer = d.module(f"Linear({shape[-1]}, {shape[-1]})")
    else:
        layer = d.module(f"Conv{len(shape) - 2}d({shape[1]}, {shape[1]}, 3, padding=1)")
    act = d.choose(
        "{}",
        "F.relu({})",
        "({}).relu_()",
        "F.silu({})",
        "F.hardswish({})",
        "F.gelu({})",
        "({}).clamp(0, 6)",
        "({}).sigmoid()",
    )
    inner = d.choose("{}", "{}", "F.relu({})", "{} * 0.5", "F.gelu({})")
    a = inner.format(f"{layer}({x})")
    form = d.choose("{a} + {y}", "{y} + {a}", "torch.add({a}, {y})", "{a}.add_({y})", "torch.add({y}, {a}, alpha=0.5)",
                    "{a} * {y}",
                    "{y} - {a}", "{a} + {y} + {x}", "{y} + {y} + {a}")  # fmt: skip
    d.let(act.format(form.format(a=a, y=y, x=x)))


@rule(4)
def expanded_sum(d: Draft) -> None:
    """A layer's result with an operand that is broadcast or expanded."""
    x = d.pick(where=lambda v: v.dim() in (2, 3, 4))
    shape = d.shape(x)
    c = shape[1]
    layer = d.module(f"Conv{len(shape) - 2}d({c}, {c}, 1)" if len(shape) > 2 else f"Linear({c}, {c})")
    ones = ", 1" * (len(shape) - 2)
    bias = d.parameter(f"torch.randn({c}{ones})")
    scalar = d.choose("0.5", "2", "-1.0")
    d.let(d.choose(
        f"{layer}({x}[:1]) + {x}", f"{layer}({x}[:1]) + {x}[:1].expand(5, {', '.join(['-1'] * (len(shape) - 1))})",
        f"{x} + {layer}({x}[:1]).expand_as({x})", f"{layer}({x}) + {bias}", f"{layer}({x}) * {bias}",
        f"{layer}({x}) + {scalar}",
        f"{layer}({x}) * {scalar}", f"{scalar} - {layer}({x})", f"{layer}({x}) + {x}.mean((0,), keepdim=True)",
        f"F.relu({layer}({x}) + {x}[:, :1])", f"{layer}({x}[..., :1] * torch.ones_like({x})) + {x}",
        f"{layer}({x}) * {x}.mean({tuple(range(2, len(shape))) or 1}, keepdim=True).sigmoid()",
        f"{layer}({x}) + {x}.max(-1, keepdim=True)[0]", f"{layer}({x}) + torch.arange({shape[-1]})",
        f"{layer}({x}[:1].expand(3, {', '.join(['-1'] * (len(shape) - 1))}))",
    ))  # fmt: skip


@rule(3)
def scalar_arithmetic(d: Draft) -> None:
    x = d.pick()
    d.let(d.choose(
        f"{x} + 0.5", f"2 * {x}", f"1 - {x}", f"{x} / 3", f"{x} * {x}.shape[0]", f"{x} / {x}.shape[-1] ** 0.5",
        f"{x}.add(1, alpha=2)",
        f"{x} // 0.5", f"{x} % 1.5", f"torch.rsub({x}, 1)", f"{x}.mul(True)", f"{x} + torch.tensor(0.5)",
        f"{x} * torch.tensor([2.0])",
        f"torch.true_divide({x}, 2)", f"torch.div({x}, 0.3, rounding_mode='floor')",
    ))  # fmt: skip
    if ".shape" in d.lines[-1]:  # a number that calibration saw one of
        d.varying = True


@rule(3)
def products(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (2, 3, 4))
    y = d.like(x)
    dims = d.value(x).dim()
    options = [f"{x} @ {y}.transpose(-1, -2)", f"torch.matmul({x}.transpose(-1, -2), {y})",
               f"torch.einsum('...ij,...kj->...ik', {x}, {y})", f"({x} @ {y}.mT).softmax(-1) @ {y}"]  # fmt: skip
    if dims == 3:
        options += [
            f"torch.bmm({x}, {y}.transpose(1, 2))",
            f"torch.baddbmm(torch.zeros(1), {x}, {y}.mT)",
            f"torch.tensordot({x}, {y}, dims=([0, 1], [0, 1]))",
        ]
    if dims == 2:
        options += [
            f"torch.mm({x}, {y}.t())",
            f"torch.addmm(torch.ones(1), {x}, {y}.t(), beta=0.5)",
            f"torch.cdist({x}, {y})",
        ]
    if dims == 4:
        options += [f"F.scaled_dot_product_attention({x}, {y}, {y})"]
    d.let(d.rng.choice(options))


@rule(4)
def reduction(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    dim, keep = d.choose(0, 1, -1, -1), d.chance(0.4)
    rest = tuple(range(2, d.value(x).dim())) or (1,)
    d.let(d.choose(
        f"{x}.mean({dim}, keepdim={keep})", f"{x}.mean({rest}, keepdim={keep})", f"{x}.sum({dim}, keepdim={keep})",
        f"{x}.amax({dim}, keepdim={keep})",
        f"torch.max({x}, {dim}, keepdim={keep})[0]", f"{x}.min({dim}).values",
        f"{x}.std({dim}, keepdim={keep}, unbiased=False)", f"{x}.norm(dim={dim})",
        f"{x}.logsumexp({dim})", f"{x}.cumsum({dim})", f"{x}.mean()", f"{x}.prod({dim}).tanh()",
        f"{x}.topk(1, {dim})[0]", f"{x}.sort({dim})[0]",
        # Of an expanded tensor, torch's median reads memory that it never wrote.
        f"{x}.clone(memory_format=torch.contiguous_format).median({dim})[0]",
        f"{x}.var({rest}, keepdim=True)", f"{x}.cummax({dim})[0]", f"{x}.amin({rest})",
    ))  # fmt: skip


# Moving values


@rule(5)
def shaping(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 1)
    shape = d.shape(x)
    dims = list(range(len(shape)))
    order = d.rng.sample(dims, len(dims))
    a, b = d.rng.choice(dims), d.rng.choice(dims)
    options = [
        f"{x}.permute({', '.join(map(str, order))})", f"{x}.permute({order})", f"torch.permute({x}, {tuple(order)})",
        f"{x}.transpose({a}, {b})", f"{x}.flatten({d.choose(0, 1)})", f"torch.flatten({x}, 1)",
        f"{x}.reshape({x}.shape[0], -1)",
        f"{x}.reshape(-1)", f"{x}.view({x}.size(0), -1)", f"{x}.reshape({shape[0]}, -1)", f"{x}.unsqueeze({a})",
        f"{x}[None]", f"{x}[..., None]",
        f"{x}.squeeze()", f"{x}.squeeze({a})", f"{x}.flip({a})", f"{x}.roll(1, {a})", f"{x}.contiguous()",
        f"{x}.clone()", f"{x}.detach()",
        f"{x}.reshape(-1, {shape[-1]})", f"{x}.movedim({a}, {b})", f"{x}.mT",
        f"{x}.repeat({', '.join(['1'] * (len(dims) - 1) + ['2'])})", f"{x}.repeat_interleave(2, {a})",
        f"{x}.unflatten({a}, (1, -1))", f"torch.tile({x}, (2,))", f"{x}.expand(2, {', '.join(['-1'] * len(dims))})",
        f"{x}.rot90(1, ({a}, {b}))", f"torch.einsum('...ij->...ji', {x})",
        f"{x}.ravel()", f"{x}.swapaxes({a}, {b})", f"{x}.tril()",
        f"torch.broadcast_to({x}, (2, {', '.join(map(str, shape))}))", f"{x}.view_as({x})",
        f"{x}.resolve_conj()", f"torch.atleast_3d({x})", f"{x}.diagonal(dim1={a}, dim2={b})",
    ]  # fmt: skip
    if len(shape) == 4:
        options += [f"{x}.contiguous(memory_format=torch.channels_last)", f"{x}.to(memory_format=torch.channels_last)",
                    f"{x}.flatten(2).transpose(1, 2)"]  # fmt: skip
    if len(shape) == 3:
        options += [f"{x}.transpose(1, 2)", f"{x}.permute(0, 2, 1)", f"{x}.transpose(1, 2).contiguous()"] * 2
    if len(shape) == 2:
        options += [f"{x}.t()", f"{x}[:, :, None, None]", f"{x}.unsqueeze(1)", f"{x}.view(-1, {shape[1]}, 1)"]
    if len(shape) > 1:
        options += [
            f"{x}.view({x}.shape[0], {shape[1]}, -1)",
            f"{x}.view(-1, 2, {shape[1] // 2}{''.join(f', {s}' for s in shape[2:])})",
        ]
    d.let(d.rng.choice(options))


@rule(4)
def slicing(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    size = d.shape(x)[1]
    half = max(size // 2, 1)
    d.let(d.choose(
        f"{x}[:, :{half}]", f"{x}[:, ::2]", f"{x}[:, -1]", f"{x}[..., 1:]", f"{x}[..., ::2]", f"{x}[0]", f"{x}[:1]",
        f"{x}[-1:]", f"{x}[..., -1]",
        f"{x}.narrow(1, 0, {half})", f"{x}.select(1, 0)", f"{x}[:, [0, -1]]",
        f"{x}[:, torch.tensor([0, {size - 1}])]", f"{x}.index_select(1, torch.tensor([0]))",
        f"{x}[..., :-1]", f"{x}[:, :, 1:-1]", f"{x}.unfold(-1, 2, 1).clone()",
        f"torch.take_along_dim({x}, torch.zeros_like({x}, dtype=torch.long), 1)", f"{x}[{x}.shape[0] - 1]",
        f"{x}.gather(1, torch.zeros_like({x}, dtype=torch.long))", f"{x}[:, 1:] - {x}[:, :-1]",
        f"{x}[:, torch.arange({size}) % 2 == 0]",
    ))  # fmt: skip


@rule(4)
def joining(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    y = d.like(x)
    axis = d.choose(0, 1, 1, -1)
    d.let(d.choose(
        f"torch.cat([{x}, {y}], {axis})", f"torch.cat([{x}, {y}], {axis})", f"torch.cat(({x}, {x} * 2, {y}), dim=1)",
        f"torch.stack([{x}, {y}], {axis})",
        f"torch.cat([{x}, torch.zeros_like({y})], 1)", f"torch.hstack([{x}, {y}])",
        f"torch.cat([{x}, {y}[:, :1]], 1)",
        f"torch.cat([{x}, torch.ones({', '.join(map(str, (d.shape(x)[0], 1, *d.shape(x)[2:])))})], 1)",
        f"torch.concat([{x}, F.relu({y})], axis={axis})", f"torch.vstack([{x}, {y}])",
    ))  # fmt: skip


@rule(4)
def splitting(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2 and v.shape[1] > 1)
    size = d.shape(x)[1]
    first = d.rng.randint(1, size - 1)
    text = d.choose(f"{x}.chunk(2, 1)", f"torch.chunk({x}, 2, dim=1)", f"{x}.split([{first}, {size - first}], 1)",
                    f"torch.split({x}, {(size + 1) // 2}, 1)",
                    f"torch.tensor_split({x}, 2, dim=1)", f"{x}.view({x}.shape[0], 2, -1).unbind(1)")  # fmt: skip
    a, b = d.lets(text, 2)
    d.let(
        d.choose(
            f"torch.cat([{b}, {a}], 1)",
            f"torch.cat([{a}, {b}.relu()], 1)",
            f"{a} * {b}",
            f"{a} + {b}",
            f"{a} * torch.sigmoid({b})",
            f"{b}",
        )
    )


# Memory


@rule(6)
def fresh_write(d: Draft) -> None:
    """A tensor made here and written in place."""
    x = d.pick(where=lambda v: v.dim() >= 2)
    shape = d.shape(x)
    fresh = d.let(d.choose(
        f"torch.zeros_like({x})", f"{x}.new_zeros({x}.shape)", f"torch.zeros({x}.shape)",
        f"torch.zeros({', '.join(map(str, shape))})", f"torch.ones_like({x})",
        f"torch.full({x}.shape, 0.5)", f"torch.full_like({x}, -1.0)", f"{x}.new_ones({shape})",
        f"{x}.new_full({x}.shape, 2.0)", f"torch.empty_like({x}).zero_()",
        f"torch.zeros({x}.shape[0], {', '.join(map(str, shape[1:]))})",
        f"torch.ones({', '.join(map(str, shape))}, dtype=torch.float32)",
    ))  # fmt: skip
    half = max(shape[1] // 2, 1)
    writes = (
        f"{fresh}.copy_({x})", f"{fresh}.add_({x})", f"{fresh} += {x}", f"{fresh}[...] = {x}",
        f"{fresh}[:, :{half}] = {x}[:, :{half}]", f"{fresh}[:, {half}:] += {x}[:, {half}:]",
        f"{fresh}[:, 0] = {x}[:, -1]", f"{fresh}[0] = {x}[0]",
        f"{fresh}.index_put_((torch.tensor([0]),), {x}[:1], accumulate=True)", f"{fresh}[..., 1:] = {x}[..., :-1]",
        f"{fresh}.scatter_add_(1, torch.zeros_like({x}, dtype=torch.long), {x})",
        f"{fresh}.scatter_(1, torch.zeros({shape[0]}, 1{', 1' * (len(shape) - 2)}, dtype=torch.long), 3.0)",
        f"{fresh}.index_add_(1, torch.tensor([0]), {x}[:, :1])",
        f"{fresh}.scatter_reduce_(1, torch.zeros_like({x}, dtype=torch.long), {x}, 'amax')",
        f"{fresh}.masked_fill_({x} > 0, 2.0)",
        f"torch.add({x}, 1.0, out={fresh})", f"torch.mul({x}, 0.5, out={fresh})", f"{fresh}.view(-1)[0] = 5.0",
        f"{fresh}.transpose(0, 1).add_({x}.transpose(0, 1))", f"{fresh}.diagonal().fill_(4.0)",
        f"{fresh}.tril_()", f"{fresh}.mul_({x}).add_(1)", f"{fresh}.index_copy_(1, torch.tensor([0]), {x}[:, :1])",
        f"{fresh}[:, :1].copy_({x}[:, :1])", f"{fresh}.fill_(0.25)", f"{fresh}.lerp_({x}, 0.5)",
        f"{fresh}.addcmul_({x}, {x})", f"{fresh}.masked_scatter_({x} > 0, {x})",
        f"{fresh}.put_(torch.tensor([0, 1]), {x}.reshape(-1)[:2], accumulate=True)",
        f"{fresh}.select(1, 0).add_({x}.select(1, 0))",
        f"{fresh}.narrow(1, 0, 1).copy_({x}.narrow(1, 0, 1))", f"{fresh}.unsqueeze(0)[0].add_({x})",
        f"{fresh}.sub_({x}).relu_()",
    )  # fmt: skip
    for line in d.rng.sample(writes, d.choose(1, 1, 2)):
        d.do(line)
    if d.chance(0.6):
        d.let(d.choose(f"{x} + {fresh}", f"{fresh} * {x}", f"torch.cat([{x}, {fresh}], 1)"))


@rule(5)
def view_write(d: Draft) -> None:
    """A write through a view; the base, or another view, is read afterwards."""
    x = d.pick(where=lambda v: v.dim() >= 2)
    if d.chance(0.5):
        x = d.let(d.choose(f"{x}.clone()", f"{x} * 1.5", f"F.relu({x})"))
    shape = d.shape(x)
    dims = len(shape)
    half = max(shape[1] // 2, 1)
    view = d.let(d.choose(
        f"{x}.view({x}.shape[0], -1)", f"{x}.view(-1)", f"{x}[:, ::2]", f"{x}[:, :{half}]", f"{x}.transpose(0, 1)",
        f"{x}.permute({', '.join(map(str, reversed(range(dims))))})",
        f"{x}.unsqueeze(0)", f"{x}.squeeze()", f"{x}.chunk(2, 1)[0]", f"{x}.split(1, 1)[0]", f"{x}.unbind(1)[0]",
        f"{x}.select(1, 0)", f"{x}.narrow(1, 0, {half})", f"{x}.diagonal()",
        f"{x}.as_strided(({shape[0]},), (1,))", f"torch.einsum('{'abcde'[:dims]}->{'abcde'[:dims][::-1]}', {x})",
        f"{x}.detach()", f"{x}.view_as({x})", f"{x}[0]", f"{x}[..., 0]", f"{x}.reshape(-1)",
        f"{x}.flatten(1)", f"{x}.contiguous()", f"{x}.movedim(0, -1)", f"{x}.mT", f"torch.dsplit({x}, [1])[0]",
        f"torch.hsplit({x}, [1])[0]", f"{x}.unfold(1, 1, 1)", f"{x}.expand_as({x})", f"{x}.swapaxes(0, 1)",
        f"{x}.unflatten(1, (1, -1))",
        f"torch.view_as_real(torch.view_as_complex({x}.unsqueeze(-1).expand(*{x}.shape, 2).contiguous()))",
        f"{x}.to(torch.float32)", f"{x}.float()", f"{x}",
        f"{x}.data", f"torch.ravel({x})", f"{x}.T" if dims == 2 else f"{x}.mH", f"torch.tensor_split({x}, 2, 1)[0]",
    ))  # fmt: skip
    d.do(d.choose(
        f"{view}.mul_(2)", f"{view}.zero_()", f"{view}.add_(1)", f"{view}.relu_()", f"{view}.clamp_(-0.5, 0.5)",
        f"{view}.fill_(0.5)", f"{view}.neg_()", f"{view} *= 0.5", f"{view}.sigmoid_()",
        f"{view}[...] = 1.0", f"{view}[0] = 0.25", f"F.relu({view}, inplace=True)", f"{view}.copy_({view} * 2)",
        f"{view}.sub_({view}.mean())", f"{view}.masked_fill_({view} > 0, 0.1)", f"{view}.exp_()",
        f"torch.relu_({view})", f"F.leaky_relu_({view}, 0.1)", f"F.hardtanh_({view}, -0.5, 0.5)", f"{view} += 1",
        f"F.threshold({view}, 0.1, 0.0, inplace=True)", f"F.celu({view}, inplace=True)",
        f"nn.init.constant_({view}, 0.3)",
        f"F.selu({view}, inplace=True)", f"torch.mul({view}, 2, out={view})",
        f"F.rrelu({view}, 0.2, 0.2, inplace=True)",
        f"torch.max({view} * 1, 0, out=({view}[0], torch.zeros_like({view}[0], dtype=torch.long)))",
        f"F.dropout({view}, 1.0, True, True)", f"torch.nan_to_num({view} * 2, out={view})",
    ))  # fmt: skip
    if d.chance(0.7):
        d.let(d.choose(f"{x} * 1.0", f"F.relu({x})", f"{x} + {x}", f"{x}.clone()", f"{x}"))


@rule(3)
def copy_write(d: Draft) -> None:
    """A write to what is a copy of a layer's value, or the value itself, as its layout and the settings have it."""
    x = d.pick(where=lambda v: v.dim() in (3, 4))
    c, n = d.shape(x)[1], d.value(x).dim() - 2
    y = d.let(f"{d.module(f'Conv{n}d({c}, {c}, 1)')}({x})")
    options = [
        f"{y}.contiguous()", f"{y}[:, ::2].contiguous()", f"{y}.transpose(1, 2).contiguous()",
        f"{y}.transpose(1, 2).reshape({y}.shape[0], -1)", f"{y}.to(torch.float32, copy=True)", f"{y}.flatten(1)",
        f"{y}[:, :1].expand_as({y}).contiguous()", f"{y}.flip(1).contiguous()", f"{y}.data.contiguous()",
        f"F.dropout({y}, training=False)", f"{y}.mT.float()", f"{y}.reshape({y}.shape)", f"{y}.mT.ravel()",
    ]  # fmt: skip
    if n == 2:
        options += [f"{y}.contiguous(memory_format=torch.channels_last)", f"{y}.to(memory_format=torch.channels_last)",
                    f"{y}.contiguous(memory_format=torch.channels_last).contiguous()"]  # fmt: skip
    z = d.let(d.choose(*options))
    d.do(d.choose(f"{z}.mul_(0.5)", f"{z}.add_(1)", f"F.relu_({z})", f"{z}[:1] = 0.5", f"{z} *= 2"))
    d.let(f"{d.module(f'Conv{n}d({c}, {c}, 1)')}({y})")


@rule(1)
def layer_then_view_write(d: Draft) -> None:
    """A write through a view of what a layer reads, before or after it reads it."""
    x = d.pick(where=lambda v: v.dim() in (3, 4))
    c, n = d.shape(x)[1], d.value(x).dim() - 2
    layer = d.module(f"Conv{n}d({c}, {c}, 1)")
    view = d.let(d.choose(f"{x}[:, :1]", f"{x}.transpose(1, 2)", f"{x}.flatten(1)", f"{x}[0]"))
    if d.chance(0.5):
        y = d.let(f"{layer}({x})")
        d.do(f"{view}.mul_(0.5)")
    else:
        d.do(f"{view}.mul_(0.5)")
        y = d.let(f"{layer}({x})")
    d.let(f"{y} + {x}")


@rule(3)
def setting_of_the_call(d: Draft) -> None:
    """A layer whose weight, bias, statistics or settings the batch size decides: other calls compute something else."""
    x = d.pick(where=lambda v: v.dim() in (2, 3, 4, 5))
    shape = d.shape(x)
    c, w, n = shape[1], shape[-1], len(shape) - 2
    odd = f"{d.parameters[0]}.shape[0] % 2"

    def either(*options: str) -> str:
        return f"({', '.join(options)})[{odd}]"

    kind = d.choose("weight", "bias", "norm", "layer", "module", "function", "function")
    if kind == "weight":
        weights = [d.parameter(f"torch.randn(6, {w}) * 0.3") for _ in range(2)]
        d.let(f"F.linear({x}, {either(*weights)})")
    elif kind == "bias":
        biases = [d.parameter(f"torch.randn({c}) * 2"), d.choose("None", d.parameter(f"torch.randn({c}) * 2"))]
        d.rng.shuffle(biases)
        if n:
            weight = d.parameter(f"torch.randn({c}, {c}{', 1' * n}) * 0.3")
            d.let(f"F.conv{n}d({x}, {weight}, {either(*biases)})")
        else:
            d.let(f"F.linear({x}, {d.parameter(f'torch.randn({c}, {c}) * 0.3')}, {either(*biases)})")
    elif kind == "norm":
        means, var = [d.buffer(f"torch.randn({c})") for _ in range(2)], d.buffer(f"torch.rand({c}) + 0.5")
        d.let(f"F.batch_norm({x}, {either(*means)}, {var}, eps={either('1e-5', '2.0')})")
    elif kind == "layer":
        layers = [d.module(f"Linear({w}, 6)"), d.module(f"Linear({w}, 6, bias=False)")]
        d.let(f"{either(*layers)}({x})")
    elif kind == "module":
        made, name, options = d.rng.choice([
            (f"LayerNorm({w})", "eps", ("1e-5", "2.0")), ("LeakyReLU(0.1)", "negative_slope", ("0.1", "0.9")),
            ("Hardtanh()", "max_val", ("1.0", "0.25")), ("ELU()", "alpha", ("1.0", "0.1")),
            ("Softmax(1)", "dim", ("1", "-1")),
            (f"GroupNorm(1, {c})", "eps", ("1e-5", "2.0")),
            (f"Linear({w}, {w})", "bias", ("None", d.parameter(f"torch.randn({w})"))),
        ] + [
            (f"Conv{n}d({c}, 4, 3, padding=1)", "padding", (str((1,) * n), str((2,) * n))),
            (f"Conv{n}d({c}, 4, 1)", "stride", (str((1,) * n), str((2,) * n))),
            (f"MaxPool{n}d(2)", "stride", ("2", "1")), (f"BatchNorm{n}d({c})", "eps", ("1e-5", "2.0")),
        ] * (n > 0))  # fmt: skip
        layer = d.module(made)
        d.do(f"{layer}.{name} = {either(*options)}")
        d.let(f"{layer}({x})")
    else:
        y = d.like(x)
        d.let(d.choose(
            f"F.leaky_relu({x}, {either('0.1', '0.9')})", f"F.hardtanh({x}, -1.0, {either('1.0', '0.25')})",
            f"F.softmax({x}, dim={either('1', '-1')})", f"{x}.clamp(max={either('0.2', '5.0')})",
            f"torch.add({x}, {y}, alpha={either('1', '-2')})", f"{x} + {either('0.5', '3.0')}",
            f"{x} * {either('0.5', '-3.0')}", f"F.elu({x}, {either('1.0', '0.1')})",
            f"F.layer_norm({x}, ({w},), eps={either('1e-5', '2.0')})", f"{x}.mean({either('1', '-1')}, keepdim=True)",
            f"F.gelu({x}, approximate={either(repr('none'), repr('tanh'))})", f"F.pad({x}, (1, {either('0', '2')}))",
            f"torch.cat({either(f'[{x}, {y}]', f'[{y}, {x} * 3]')}, 1)", f"{either(x, y)} * 1.5",
        ))  # fmt: skip
    d.varying = True


@rule(3)
def state(d: Draft) -> None:
    """Buffers that forward writes."""
    x = d.pick(where=lambda v: v.dim() >= 2)
    c = d.shape(x)[1]
    kind = d.choose("counter", "running", "assigned", "sums", "slot")
    if kind == "counter":
        b = d.buffer(d.choose("torch.zeros(())", "torch.zeros(1)", "torch.zeros((), dtype=torch.long)"))
        d.do(d.choose(f"{b}.add_(1)", f"{b} += 1"))
        d.let(f"{x} + {b} * 0.25")
    elif kind == "running":
        b = d.buffer("torch.zeros(())")
        d.do(f"{b}.mul_(0.9).add_(0.1 * {x}.mean())")
        d.let(f"{x} - {b}")
    elif kind == "assigned":
        b = d.buffer("torch.ones(())")
        d.do(f"{b} = {b} * 0.5")
        d.let(f"{x} * {b}")
    elif kind == "sums":
        b = d.buffer(f"torch.zeros({c})")
        dims = (0, *range(2, d.value(x).dim()))
        d.do(
            d.choose(
                f"{b} += {x}.detach().mean({dims})", f"{b}.copy_({x}.mean({dims}))", f"{b}.lerp_({x}.mean({dims}), 0.1)"
            )
        )
        d.let(f"{x} + {b}.view(1, -1{', 1' * (d.value(x).dim() - 2)})")
    else:
        b = d.buffer("torch.zeros(4)")
        d.do(
            d.choose(
                f"{b}[0] += 1", f"{b}[1:3] = {x}.mean()", f"{b}.index_add_(0, torch.tensor([1]), {x}.mean().reshape(1))"
            )
        )
        d.let(f"{x} * ({b}.sum() + 1)")
    d.stateful = True


@rule(3)
def chance(d: Draft) -> None:
    """Random numbers, in eval mode too."""
    x = d.pick(where=lambda v: v.dim() >= 1)
    d.let(d.choose(
        f"F.dropout({x}, 0.3, training=True)", f"{x} + 0.1 * torch.rand_like({x})",
        f"{x} + 0.1 * torch.randn_like({x})", f"{x} * torch.bernoulli(torch.full_like({x}, 0.7))",
        f"{x} + torch.randn({x}.shape) * 0.1", f"torch.normal({x}, 0.1)",
        f"{x} * torch.empty_like({x}).bernoulli_(0.5)", f"{x}[torch.randperm({x}.shape[0])]",
        f"{x} + torch.empty({x}.shape).uniform_(-0.1, 0.1)", f"{x} * (torch.rand({x}.shape) < 0.8)",
        f"F.rrelu({x}, training=True)", f"{x} + torch.randint_like({x}, 0, 2)",
        f"{x} + torch.zeros_like({x}).normal_(0, 0.1)",
        f"F.alpha_dropout({x}, 0.2, training=True)", f"{x} * torch.bernoulli({x}.sigmoid())",
        f"{x} + torch.poisson(torch.ones_like({x}))", f"{x} + torch.multinomial(torch.ones(4), 1)",
        f"F.gumbel_softmax({x}, dim=-1)",
        f"F.dropout(torch.ones_like({x}), 0.5, training=True) * {x}",
        f"F.feature_dropout({x}, 0.5, training=True)" if d.chance(0.1) else f"F.dropout1d({x}, 0.5, training=True)",
        f"{x} + torch.rand(1)",
        f"{x} + torch.randint(0, 3, (1,))", f"{x} + torch.bernoulli(torch.full((1,), 0.5))",
    ))  # fmt: skip
    d.random = True


@rule(1)
def chance_of_buffer(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 1)
    b = d.buffer(f"torch.rand({d.shape(x)[-1]})")
    d.let(
        d.choose(
            f"{x} * F.dropout({b}, 0.5, training=True)",
            f"{x} * torch.bernoulli({b})",
            f"{x} + torch.randn_like({b})",
            f"{x} + torch.normal({b}, 0.1)",
            f"{x} + {b} * torch.rand(())",
        )
    )
    d.random = True


# Dtypes


@rule(4)
def dtypes(d: Draft) -> None:
    x = d.pick()
    d.let(d.choose(
        f"{x}.half().float()", f"{x}.double().float()", f"({x}.double() * 2).to(torch.float32)",
        f"{x}.to(torch.bfloat16).float()", f"{x}.type(torch.float64).float()", f"{x}.int().float()",
        f"({x} * 4).long().to({x}.dtype)",
        f"({x} > 0).float()", f"({x} > 0.2).to({x}) * {x}", f"{x} * ({x} > 0)",
        f"torch.where({x} > 0, {x}, torch.zeros_like({x}))", f"{x}.masked_fill({x} > 1, 0.5)", f"{x}.bool().float()",
        f"({x} * 3).to(torch.int32) + {x}",
        f"{x}.half().to({x}.dtype)", f"torch.where({x} < 0, 0.1, {x})", f"{x}.type_as({x})", f"{x}.to({x})",
        f"torch.sum({x}, -1, dtype=torch.float64).float()", f"{x}.argmax(-1).float()", f"({x} != 0).any(-1).float()",
        f"F.one_hot({x}.argmax(-1), {max(d.shape(x)[-1:] or (1,))}).float()",
        f"{x}.clamp(0, 20).to(torch.uint8).float()", f"{x}.nan_to_num()", f"{x}.isnan().logical_not().float() * {x}",
        f"{x}.type(torch.FloatTensor)",
    ))  # fmt: skip


@rule(2)
def bits(d: Draft) -> None:
    """Tensors with the negative or the conjugate bit, and complex ones."""
    x = d.pick()
    y = d.like(x)
    d.let(d.choose(
        f"torch.complex({x}, {y}).conj().imag", f"torch.complex({x}, {y}).conj().imag * 1.0",
        f"torch.complex({x}, {y}).abs()", f"torch.fft.rfft({x}).abs()", f"torch.fft.fft({x}).conj().imag",
        f"torch.view_as_real(torch.complex({x}, {y}).conj_physical()).sum(-1)",
        f"torch.complex({x}, {y}).conj().imag.contiguous()",
        f"torch.fft.irfft(torch.fft.rfft({x}), n={(d.shape(x) or (1,))[-1]})",
        f"(torch.complex({x}, {y}) * torch.complex({y}, {x})).real", f"torch.polar({x}, {y}).imag",
        f"torch._neg_view({x})",
        f"torch.resolve_neg(torch.complex({x}, {y}).conj().imag)",
    ))  # fmt: skip


# Control flow


@rule(4)
def loop(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() in (2, 3, 4))
    shape = d.shape(x)
    layer = d.module(
        f"Linear({shape[-1]}, {shape[-1]})"
        if len(shape) == 2 or d.chance(0.3)
        else f"Conv{len(shape) - 2}d({shape[1]}, {shape[1]}, {d.choose('1', '3, padding=1')})"
    )
    name = d.let(d.choose(x, f"{x} * 0.5"))
    body = d.choose(
        f"{name} = {layer}({name})",
        f"{name} = {name} + {layer}({name})",
        f"{name} = F.relu({layer}({name}))",
        f"{name} = torch.tanh({layer}({name})) + {x}",
    )
    d.do(f"for i in range({d.choose('2', '3', '2', f'{name}.shape[0]')}):\n    {body}")


@rule(2)
def module_list(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    w = d.shape(x)[-1]
    layers = d.module(f"ModuleList([nn.Linear({w}, {w}), nn.ReLU(), nn.Linear({w}, {w})])")
    name = d.let(x)
    d.do(f"for layer in {layers}:\n    {name} = layer({name})")


@rule(3)
def branch(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 2)
    w = d.shape(x)[-1]
    layer = d.module(f"Linear({w}, {w})")
    condition = d.choose(
        f"{x}.shape[0] > 1",
        f"{x}.shape[0] % 2 == 0",
        f"{x}.shape[-1] > 4",
        f"{x}.dim() == {d.value(x).dim()}",
        f"{x}.sum() > 0",
        "self.training",
        f"{x}.is_contiguous()",
        f"{x}.numel() > 64",
    )
    name = d.let(x)
    otherwise = d.choose(f"{name} * 0.5", f"F.relu({layer}({name}))")
    d.do(f"if {condition}:\n    {name} = {layer}({name})\nelse:\n    {name} = {otherwise}")


@rule(4)
def shared(d: Draft) -> None:
    """A module that ran before runs again."""
    found = [name for name, module in d.model.named_children()]
    if not found:
        raise Inapplicable
    x = d.pick()
    d.let(f"self.{d.rng.choice(found)}({x})")


@rule(1)
def closure(d: Draft) -> None:
    x = d.pick(where=lambda v: v.dim() >= 1)
    d.let(
        d.choose(
            f"(lambda t: t.relu() + 1)({x})",
            f"[t * 2 for t in [{x}]][0]",
            f"{{'a': {x}}}['a'].abs()",
            f"max([{x}], key=lambda t: t.shape[0]) * 1.0",
        )
    )


# Programs

_KINDS = {
    "image": ("N", "C", "H", "W"), "image2": ("N", "C", "H", "W"), "signal": ("N", "C", "L"),
    "volume": ("N", "C", "D", "H", "W"), "tokens": ("N", "T", "E"), "vector": ("N", "E"), "ids": ("N", "T"),
}  # fmt: skip


def _sizes(rng: random.Random) -> dict[str, int]:
    side = (1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 12)
    return {
        "N": rng.choice((1, 1, 2, 2, 3, 4, 5, 8)), "C": rng.choice(CHANNELS), "H": rng.choice(side),
        "W": rng.choice(side), "D": rng.choice((1, 2, 3, 4)),
        "L": rng.choice((1, 2, 3, 5, 8, 12, 16, 24)), "T": rng.choice((1, 2, 3, 5, 7)), "E": rng.choice(WIDTHS),
    }  # fmt: skip


def _tensor(dims: tuple[str, ...], sizes: dict[str, int], rng: random.Random, plain: bool) -> str:
    """An input as an expression: odd layouts often, unless ``plain``."""
    shape = [sizes[name] for name in dims]
    listed = ", ".join(map(str, shape))
    if dims == ("N", "T"):
        return f"torch.randint(0, 50, ({listed}))"
    draw = rng.random()
    if plain or draw < 0.7:
        return f"torch.randn({listed})"
    if draw < 0.78 and len(shape) in (4, 5):
        form = "channels_last" if len(shape) == 4 else "channels_last_3d"
        return f"torch.randn({listed}).to(memory_format=torch.{form})"
    if draw < 0.84:
        turned, order = reversed(shape), reversed(range(len(shape)))
        return f"torch.randn({', '.join(map(str, turned))}).permute({', '.join(map(str, order))})"
    if draw < 0.88:
        return f"torch.randn(1, {', '.join(map(str, shape[1:]))}).expand({listed})"
    if draw < 0.92:
        return f"torch.randn({2 * shape[0]}, {', '.join(map(str, shape[1:]))})[::2]"
    return f"torch.randn({', '.join(map(str, shape[:-1]))}, {shape[-1] + 1})[..., 1:]"


def _calls(d: Draft, kinds: list[str]) -> list[tuple[str, ...]]:
    rng = d.rng
    sizes = _sizes(rng)
    other = {**sizes, "N": rng.choice((1, 2, 3, 4, 6))}
    third = {**other, "N": rng.choice((1, 2, 5))}
    for name in "HWLDT":
        if d.chance(0.5):
            third[name] = max(sizes[name] + rng.choice((-1, 1, 3)), 1)
    if d.chance(0.06):
        other["N"] = 0
    calls = [
        tuple(_tensor(_KINDS[kind], s, rng, plain=number == 0 and d.chance(0.6)) for kind in kinds)
        for number, s in enumerate((sizes, other, third))
    ]
    if d.chance(0.04):
        calls[2] = tuple(f"({text}).{d.choose('double', 'half')}()" for text in calls[2])
    return calls


def _result(d: Draft) -> str:
    last = d.names[-1]
    made = [name for name in d.names if isinstance(d.value(name), Tensor)]
    other = d.rng.choice(made)
    draw = d.rng.random()
    if draw < 0.7:
        return last
    return d.choose(
        f"{last}, {other}", f"({last}, {other})", f'{{"out": {last}, "other": {other}}}', f"[{last}, {other}]",
        f"({last}, None)", f'{{"out": {last}, "none": None}}', f"({last}, ({other}, [{last}]))", f"({last}, {last})",
        f"({last}, {last}.shape[0])", f"({last}, {last} > 0)", f"({last}, {last}.argmax(-1))",
        f"{last}.view({last}.shape)", f"({last}, {last}[:1])",
    )  # fmt: skip


def generate(seed: int, without: Collection[str] = ()) -> Program:
    """The program of a seed: always the same, for the same rules left out."""
    rng = random.Random(seed)
    while True:
        try:
            return _attempt(seed, rng, without)
        except (Unusable, RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue


def _attempt(seed: int, rng: random.Random, without: Collection[str]) -> Program:
    torch.manual_seed(seed)
    d = Draft(seed, rng)
    kind = rng.choices(("image", "signal", "volume", "tokens", "vector", "ids"), (9, 4, 3, 5, 3, 1))[0]
    kinds = [kind, kind] if d.chance(0.2) else [kind]
    calls = _calls(d, kinds)
    for number, text in enumerate(calls[0]):
        name = f"x{number}"
        d.space[name] = eval(text, d.space)
        d.parameters.append(name)
        d.names.append(name)
    if kind == "ids":
        d.apply(embedding)
    wanted = rng.randint(2, 6)
    firsts = {"image": conv2d, "signal": conv1d, "volume": conv3d}
    if d.chance(0.8):
        d.apply(firsts.get(kind, linear))
    for _ in range(60):
        if len(d.statements) >= wanted:
            break
        d.apply(rule.draw(rng, without))
    if d.chance(0.5):
        d.apply(rng.choice((linear, conv2d, conv1d, conv_like_its_input)))
    if not d.statements:
        raise Unusable
    config = rng.choices(("static", "dynamic", "float"), (85, 9, 6))[0]
    if config == "static" and any("linear" in statement.rule for statement in d.statements) and d.chance(0.3):
        config = "smoothed"
    program = Program(
        seed,
        tuple(d.parameters),
        tuple(d.statements),
        _result(d),
        tuple(calls),
        config,
        d.random,
        d.stateful,
        d.varying,
    )
    with torch.no_grad():
        program.build()(*program.inputs(0))
    return program
