"""Which ops fuse, and that fusing changes speed and never numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from dbrq.hidden_state import state_of
from tests.helpers.cases import by_name
from tests.helpers.images import images, kernels_of, small_images, trained
from tests.helpers.judging import assert_matches, assert_precision, rows, sqnr, step_of
from tests.helpers.models import Call
from tests.helpers.running import convert, run


def settled(model: nn.Module) -> nn.Module:
    """With batch-norm statistics and affine parameters that are not those of a new model."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


class Block(nn.Module):
    """Residual, with a shortcut that has a batch norm of its own."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.down(x))


MODELS = {
    "conv bn relu": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        (2, 3, 8, 8),
        [["0", "1", "2"]],
    ),
    "conv bn": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (2, 3, 8, 8), [["0", "1"]]),
    "conv relu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 8, 8), [["0", "1"]]),
    "conv1d bn relu": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU()),
        (2, 3, 8),
        [["0", "1", "2"]],
    ),
    "conv3d bn": (lambda: nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)), (2, 3, 5, 5, 5), [["0", "1"]]),
    "linear relu": (lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (3, 8), [["0", "1"]]),
    "linear bn": (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), (3, 8), [["0", "1"]]),
    "conv bn leaky": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU()),
        (2, 3, 8, 8),
        [["0", "1"]],
    ),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.ReLU()),
        (2, 3, 8, 8),
        [["0.0", "0.1", "1"]],
    ),
    "residual block": (Block, (2, 4, 8, 8), [["conv1", "bn1", "relu"], ["conv2", "bn2"], ["down.0", "down.1"]]),
    "nothing": (lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.ReLU()), (2, 3, 8, 8), []),
    "a function between": (
        lambda: Call(lambda m, x: m.relu(m.conv(x) * 2), conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU()),
        (2, 3, 8, 8),
        [],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_find_fusions_gives_what_fuse_modules_takes(name):
    make, shape, expected = MODELS[name]
    model, x = settled(make()), torch.randn(shape)
    found = dbrq.find_fusions(model, x)
    assert sorted(found) == sorted(expected)
    fused = torch.ao.quantization.fuse_modules(model, found) if found else model
    torch.testing.assert_close(run(fused, x), run(model, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_find_fusions_leaves_the_model_alone(training):
    model = settled(Block()).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dbrq.find_fusions(model, torch.randn(2, 4, 8, 8))
    assert model.training is training and not any("forward" in m.__dict__ for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_find_fusions_of_a_module_called_twice_gives_nothing_that_breaks_it():
    model = settled(Call(lambda m, x: m.bn(m.conv(x)) + m.conv(x), conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)))
    x = torch.randn(2, 3, 4, 4)
    found = dbrq.find_fusions(model, x)
    fused = torch.ao.quantization.fuse_modules(model, found) if found else model
    torch.testing.assert_close(run(fused, x), run(model, x), atol=1e-4, rtol=1e-4)


def test_find_fusions_of_a_batch_norm_behind_two_convolutions_gives_nothing_that_breaks_it():
    model = settled(
        Call(lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))
    )
    x = torch.randn(2, 3, 4, 4)
    found = dbrq.find_fusions(model, x)
    fused = torch.ao.quantization.fuse_modules(model, found) if found else model
    torch.testing.assert_close(run(fused, x), run(model, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_quantizes_as_its_unfused_original(name):
    make, shape, _ = MODELS[name]
    model, x = settled(make()), torch.randn(shape)
    found = dbrq.find_fusions(model, x)
    if not found:
        return
    fused = torch.ao.quantization.fuse_modules(model, found)
    a, b = run(convert(model, x).quantized, x), run(convert(fused, x).quantized, x)
    assert ((a - b).abs() <= 2 * step_of(a)).float().mean() > 0.99


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fuse", [True, False])
def test_fused_or_not_each_is_right(name, fuse):
    make, shape, _ = MODELS[name]
    model, x = settled(make()), torch.randn(shape)
    converted = assert_matches(model, x, fx=False, fuse=fuse)
    assert any("fused" in row.kernel for row in dbrq.report(converted).rows) <= fuse
    assert sqnr(run(model, x), run(converted, x)) > 25


# The chain


def pair(op) -> nn.Module:
    return Call(
        lambda m, x: m.last(op(m, m.a(x), x)), a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 3, 1)
    )


@pytest.mark.parametrize(
    "op",
    [
        lambda m, y, x: F.relu(y + m.b(x)),
        lambda m, y, x: F.relu(m.b(x) + y),
        lambda m, y, x: torch.add(y, m.b(x)).relu(),
        lambda m, y, x: F.relu(torch.add(input=y, other=m.b(x))),
        lambda m, y, x: m.b(x).add_(y).relu_(),
        lambda m, y, x: F.relu(y + x),
        lambda m, y, x: F.relu(x + y),
    ],
)
def test_add_and_relu_fuse_into_one_kernel(op):
    model = pair(op)
    converted = assert_matches(model, torch.randn(2, 4, 8, 8), fx=False)
    for name in ("add", "relu"):
        assert all("fused into" in row.kernel for row in rows(converted, name)), dbrq.report(converted)


READERS = {
    "is returned": lambda m, s: (m.last(F.relu(s)), s),
    "is read by an int8 op": lambda m, s: m.last(F.relu(s)) + m.last(s),
    "is read by a float op": lambda m, s: m.last(F.relu(s)) + m.last(F.softplus(s)),
    "is averaged": lambda m, s: m.last(F.relu(s)) * s.std(),
    "is viewed": lambda m, s: m.last(F.relu(s)) + s[:, :1],
    "goes to numpy": lambda m, s: (m.last(F.relu(s)), float(s.detach().numpy().sum())),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_sum_that_something_else_reads_is_not_fused_with_relu(reader):
    model = Call(
        lambda m, x: READERS[reader](m, m.a(x) + m.b(x)),
        a=nn.Conv2d(4, 3, 1),
        b=nn.Conv2d(4, 3, 1),
        last=nn.Conv2d(3, 3, 1),
    )
    converted = assert_matches(model, torch.randn(2, 4, 8, 8), fx=False)
    assert not any("fused into" in row.kernel for row in rows(converted, "relu"))


@pytest.mark.parametrize("reader", READERS)
def test_a_convolution_that_something_else_reads_is_not_fused_with_relu(reader):
    model = Call(lambda m, x: READERS[reader](m, m.a(x)), a=nn.Conv2d(4, 3, 1), last=nn.Conv2d(3, 3, 1))
    converted = assert_matches(model, torch.randn(2, 4, 8, 8), fx=False)
    assert not any("fused into" in row.kernel for row in rows(converted, "relu"))


def test_only_one_of_two_convolutions_gets_the_sum():
    model = pair(lambda m, y, x: y + m.b(x))
    converted = assert_matches(model, torch.randn(2, 4, 8, 8), fx=False)
    assert [row.kernel for row in rows(converted, "add")] == ["fused into b"]


def test_a_chain_of_sums():
    def forward(m, x):
        y = x
        for layer in m.layers:
            y = F.relu(layer(y) + y)
        return m.last(y)

    layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
    model = Call(forward, layers=layers, last=nn.Conv2d(4, 3, 1))
    converted = assert_matches(model, torch.randn(2, 4, 8, 8), fx=False)
    assert all("fused into" in row.kernel for row in rows(converted, "add") + rows(converted, "relu"))


def test_dropout_and_identity_between_do_not_hinder():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Identity(), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    converted = assert_matches(model, torch.randn(300, 4))
    assert rows(converted, "relu")[0].kernel == "fused into 0"


def test_a_fused_value_is_never_rounded_in_between():
    torch.manual_seed(1)
    model = settled(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    x = torch.randint(0, 255, (2, 4, 8, 8)) / 255.0  # exact in uint8
    fused = convert(model, x).quantized
    weight = fused[0].weight.dequantize()
    expected = F.relu(model[1](F.conv2d(x, weight, model[0].bias))).detach()
    torch.testing.assert_close(run(fused, x), expected, atol=2e-3, rtol=1e-3)


# What fuses, and what does not


class Root(nn.Module):
    """The modules by themselves in a forward of its own, not in a Sequential."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            setattr(self, f"m{number}", module)
        self.count = len(modules)

    def forward(self, x):
        for number in range(self.count):
            x = getattr(self, f"m{number}")(x)
        return x


FUSIONS = {
    "conv1d relu": (lambda: [nn.Conv1d(3, 8, 3), nn.ReLU()], (2, 3, 20)),
    "conv2d relu": (lambda: [nn.Conv2d(3, 8, 3), nn.ReLU()], (2, 3, 12, 12)),
    "conv2d relu in place": (lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)], (2, 3, 12, 12)),
    "conv2d bn": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)], (2, 3, 12, 12)),
    "conv2d bn no bias": (lambda: [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)], (2, 3, 12, 12)),
    "conv2d bn not affine": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)], (2, 3, 12, 12)),
    "conv2d bn relu": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()], (2, 3, 12, 12)),
    "conv2d bn relu6": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6()], (2, 3, 12, 12)),
    "conv2d bn silu": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()], (2, 3, 12, 12)),
    "conv1d bn relu": (lambda: [nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU()], (2, 3, 20)),
    "conv3d bn": (lambda: [nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)], (2, 3, 6, 6, 6)),
    "linear relu": (lambda: [nn.Linear(16, 32), nn.ReLU()], (64, 16)),
    "linear gelu": (lambda: [nn.Linear(16, 32), nn.GELU()], (64, 16)),
    "linear bn": (lambda: [nn.Linear(16, 32), nn.BatchNorm1d(32)], (64, 16)),
    "linear bn relu": (lambda: [nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()], (64, 16)),
    "depthwise bn": (lambda: [nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.ReLU6()], (2, 3, 12, 12)),
}  # fmt: skip


@pytest.mark.parametrize("container", [nn.Sequential, Root], ids=["Sequential", "root"])
@by_name(FUSIONS, "make, shape")
def test_modules_that_fuse(make, shape, container):
    model, x = container(*make()), torch.randn(shape)
    converted = assert_matches(trained(model, x), x, fx=True)
    first, *others = dbrq.report(converted).rows
    assert first.kernel.count("+") == len(others), dbrq.report(converted)
    assert all(row.kernel == f"fused into {first.path}" for row in others)


def test_batch_norm_into_conv_with_dead_channels():
    """Channels whose batch norm has weight zero: no scale becomes zero, and the channel is its bias."""
    model, x = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), images()), images()
    with torch.no_grad():
        model[1].weight[:3] = 0.0
        model[1].weight[3] = -1.0
        model[0].weight[4] = 0.0
    assert_matches(model, x)


def test_of_conv_bn_leaky_relu_two_of_three_fuse():
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 4, 1)), images())
    converted = assert_matches(model, images())
    report = {row.path: row for row in dbrq.report(converted).rows}
    assert report["0"].kernel.endswith("+ batch_norm")
    assert report["1"].kernel == "fused into 0"
    assert report["2"].precision == "float" and report["2"].reason


def test_conv3d_relu():
    assert_matches(nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 1)), images(2, 3, 6, 6, 6))


def test_linear_bn_over_another_axis_does_not_fold():
    """On [N, C, L] the batch norm is over C, and the linear layer's outputs are L."""
    model = trained(nn.Sequential(nn.Linear(16, 10), nn.BatchNorm1d(7)), torch.randn(8, 7, 16))
    converted = assert_matches(model, torch.randn(8, 7, 16))
    assert rows(converted, "batch_norm")[0].precision == "float"


class Sum(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.read = read

    def forward(self, x):
        return self.read(self, self.a(x) + self.b(x))


def test_add_relu_functions_fuse_to_one_op():
    converted = assert_matches(Sum(lambda m, s: m.last(torch.relu(s))), images())
    assert [row.kernel for row in rows(converted, "add") + rows(converted, "relu")] == ["fused into b"] * 2


@by_name(
    {
        "an op that int8 has": lambda m, s: m.last(F.relu(s)) + s,
        "an op that int8 lacks": lambda m, s: m.last(F.relu(s)) + torch.sin(s),
        "the output": lambda m, s: (m.last(F.relu(s)), s),
        "a reduction": lambda m, s: m.last(F.relu(s)) * s.std(),
        "a view": lambda m, s: m.last(F.relu(s)) + s.flatten(1)[:, :1, None, None],
        "a method": lambda m, s: m.last(s.relu()).sum() + s.max(),
    },
    "read",
)
def test_add_relu_is_not_fused_when_anything_else_reads_the_sum(read):
    # FX graph mode fuses the sum that broadcasts into the convolution, and crashes.
    broadcasts = read.__code__.co_names.count("flatten") > 0
    converted = assert_matches(Sum(read), images(), fx=False if broadcasts else None)
    assert not rows(converted, "relu")[0].kernel.startswith("fused")


@by_name(
    {
        "an op that int8 has": lambda m, s: m.last(F.relu(s)) + s,
        "an op that int8 lacks": lambda m, s: m.last(F.relu(s)) + torch.sin(s),
        "the output": lambda m, s: (m.last(F.relu(s)), s),
    },
    "read",
)
def test_conv_relu_is_not_fused_when_anything_else_reads_the_convolution(read):
    model = Call(lambda m, x: read(m, m.conv(x)), conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 8, 1))
    converted = assert_matches(model, images())
    assert not rows(converted, "relu")[0].kernel.startswith("fused")


def test_fused_pair_called_in_a_loop():
    def forward(m, x):
        for _ in range(2):
            x = m.relu(m.conv(x))
        return m.last(x)

    model = Call(forward, conv=nn.Conv2d(3, 3, 3), relu=nn.ReLU(), last=nn.Conv2d(3, 4, 1))
    converted = assert_matches(model, images())
    assert {row.precision for row in dbrq.report(converted).rows} == {"int8"}
    assert sum("+ relu" in kernel for kernel in kernels_of(converted)) == 2


def test_one_batch_norm_behind_two_convolutions():
    def forward(m, x):
        return m.bn(m.a(x)) + m.bn(m.b(x))

    model = Call(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8))
    assert_matches(trained(model, images()), images(), fx=False)


def test_one_convolution_before_two_batch_norms():
    def forward(m, x):
        return m.first(m.conv(x)) + m.second(m.conv(x))

    model = Call(forward, conv=nn.Conv2d(3, 8, 3), first=nn.BatchNorm2d(8), second=nn.BatchNorm2d(8))
    assert_matches(trained(model, images()), images(), fx=False)


class Norm(nn.BatchNorm2d):
    """A subclass that is a batch norm all the same."""


class Doubled(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2.0


@pytest.mark.parametrize("norm", [Norm, Doubled])
def test_subclass_of_batch_norm_between_convolutions(norm):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 4, 3))
    converted = assert_matches(trained(model, images()), images())
    assert_precision(converted, "conv2d", "int8", 2)


class Half(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 0.5


class Same(nn.Conv2d):
    pass


@pytest.mark.parametrize("cls", [Half, Same])
def test_subclass_of_a_leaf(cls):
    model = nn.Sequential(cls(3, 8, 3), nn.ReLU(), cls(8, 4, 3))
    converted = assert_matches(model, images(), fx=False)
    assert_precision(converted, "conv2d", "int8", 2)


def test_find_fusions_takes_the_form_of_fuse_modules():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), nn.Conv2d(8, 8, 1), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(800, 8), nn.ReLU(),
    ).eval()  # fmt: skip
    found = dbrq.find_fusions(model, images())
    assert sorted(found) == [["0.0", "0.1", "0.2"], ["4", "5"]]
    fused = torch.ao.quantization.fuse_modules(model, found)
    x = images()
    torch.testing.assert_close(run(fused, x), run(model, x), atol=1e-4, rtol=1e-4)


def test_fuse_false_runs_the_same_ops_one_by_one():
    model, x = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), images()), images()
    converted = convert(model, x, fuse=False).quantized
    assert not any("fused" in kernel for kernel in kernels_of(converted))
    assert sqnr(run(model, x), run(converted, x)) > 30


def qparams(model: nn.Module) -> dict:
    token = state_of(model).token
    return {key: state.qparams(key) for state in token.states.values() for key in state.slots}


# A sum whose operand is scaled


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: x + m.conv(x) * 10,
        lambda m, x: m.conv(x) * 10 + x,
        lambda m, x: torch.add(x, m.conv(x), alpha=10),
        lambda m, x: F.relu(x + m.conv(x) * 10),
        lambda m, x: m.last(x + m.conv(x) * 10),
    ],
)
def test_sum_with_a_scaled_convolution(fn):
    # A pattern matcher that skips the multiplication fuses conv + x.
    model = Call(fn, conv=nn.Conv2d(4, 4, 3, padding=1), last=nn.Conv2d(4, 3, 1))
    x = small_images()
    converted = assert_matches(model, x, fx=False)
    assert not any("fused into conv" in row.kernel for row in rows(converted, "add"))
    assert sqnr(run(model, x), run(converted, x)) > 25


@pytest.mark.parametrize("alpha", [2, 0.5, -1, 0])
def test_alpha_is_never_lost(alpha):
    model = Call(
        lambda m, x: m.last(torch.add(m.conv(x), m.other(x), alpha=alpha)),
        conv=nn.Conv2d(4, 4, 1),
        other=nn.Conv2d(4, 4, 1),
        last=nn.Conv2d(4, 3, 1),
    )
    assert_matches(model, small_images(), fx=False)


def test_sum_with_an_operand_that_broadcasts_is_not_fused():
    model = Call(
        lambda m, x: m.last(m.conv(x) + m.gate(x).mean((2, 3), keepdim=True)),
        conv=nn.Conv2d(4, 4, 1),
        gate=nn.Conv2d(4, 4, 1),
        last=nn.Conv2d(4, 3, 1),
    )
    converted = assert_matches(model, small_images(), fx=False)
    assert not any("fused" in row.kernel for row in rows(converted, "add"))
