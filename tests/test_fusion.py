"""Which ops fuse, and that fusing changes speed and never numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers import Call, assert_matches, convert, rows, run, sqnr, step_of


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
