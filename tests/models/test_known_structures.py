"""Blocks of known networks, against FX graph mode where it runs."""

import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.cases import by_name
from tests.helpers.judging import assert_matches, assert_precision, sqnr
from tests.helpers.models import Call
from tests.helpers.running import convert, run


class ConvReluAdd(nn.Module):
    """conv, relu, add, with a branch that is computed and not used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        unused = self.c(h)  # noqa: F841
        return h + self.b(x)


STRUCTURES = {
    "conv flatten linear": (
        lambda: Call(lambda m, x: m.fc(m.conv(x).flatten(1)), conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(400, 8)),
        (2, 3, 12, 12),
    ),
    "conv view linear": (
        lambda: Call(lambda m, x: m.fc(m.conv(x).view(x.size(0), -1)), conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(400, 8)),
        (2, 3, 12, 12),
    ),
    "conv add": (lambda: Call(lambda m, x: m.conv(x) + x, conv=nn.Conv2d(3, 3, 3, padding=1)), (2, 3, 12, 12)),
    "conv relu add unused": (ConvReluAdd, (2, 3, 12, 12)),
    "linear dropout linear": (lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 8)), (64, 16)),
    "linear relu in branches": (
        lambda: Call(
            lambda m, x: torch.relu(m.a(x)) + torch.relu(m.b(torch.relu(m.a(x)))),
            a=nn.Linear(16, 16),
            b=nn.Linear(16, 16),
        ),
        (64, 16),
    ),
    "gelu linear": (lambda: nn.Sequential(nn.GELU(), nn.Linear(16, 8)), (64, 16)),
    "linear gelu linear": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), (64, 16)),
    "layer norm linear": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Softmax(-1)), (64, 16)),
    "squeeze excite": (
        lambda: Call(
            lambda m, x: m.last((h := m.conv(x)) * torch.sigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(h, 1)))))),
            conv=nn.Conv2d(3, 8, 3),
            down=nn.Conv2d(8, 2, 1),
            up=nn.Conv2d(2, 8, 1),
            last=nn.Conv2d(8, 4, 1),
        ),
        (2, 3, 12, 12),
    ),
    "residual": (
        lambda: Call(
            lambda m, x: m.last(F.relu((h := F.relu(m.a(x))) + m.b(h))),
            a=nn.Conv2d(3, 8, 3),
            b=nn.Conv2d(8, 8, 1),
            last=nn.Conv2d(8, 4, 1),
        ),
        (2, 3, 12, 12),
    ),
    "residual in place": (
        lambda: Call(
            lambda m, x: m.last(F.relu_(_iadd(m.b(h := F.relu(m.a(x))), h))),
            a=nn.Conv2d(3, 8, 3),
            b=nn.Conv2d(8, 8, 1),
            last=nn.Conv2d(8, 4, 1),
        ),
        (2, 3, 12, 12),
    ),
    "shared input": (
        lambda: Call(
            lambda m, x: m.q(x) * m.k(x) + m.v(x), q=nn.Linear(16, 16), k=nn.Linear(16, 16), v=nn.Linear(16, 16)
        ),
        (64, 16),
    ),
    "three-way add": (
        lambda: Call(
            lambda m, x: m.last(m.a(x) + m.b(x) + m.c(x)),
            a=nn.Conv2d(3, 8, 3),
            b=nn.Conv2d(3, 8, 3),
            c=nn.Conv2d(3, 8, 3),
            last=nn.Conv2d(8, 4, 1),
        ),
        (2, 3, 12, 12),
    ),
    "dense block": (
        lambda: Call(
            lambda m, x: m.last(torch.cat([h := F.relu(m.a(x)), g := F.relu(m.b(h)), m.c(torch.cat([h, g], 1))], 1)),
            a=nn.Conv2d(3, 4, 3),
            b=nn.Conv2d(4, 4, 1),
            c=nn.Conv2d(8, 4, 1),
            last=nn.Conv2d(12, 4, 1),
        ),
        (2, 3, 12, 12),
    ),
    "channel shuffle": (
        lambda: Call(
            lambda m, x: m.last(
                F.channel_shuffle(torch.cat([(h := m.a(x)).chunk(2, 1)[0], m.b(h.chunk(2, 1)[1])], 1), 2)
            ),
            a=nn.Conv2d(3, 8, 3),
            b=nn.Conv2d(4, 4, 1),
            last=nn.Conv2d(8, 4, 1),
        ),
        (2, 3, 12, 12),
    ),
}


def _iadd(x, y):
    x += y
    return x


@by_name(STRUCTURES, "make, shape")
def test_structure(make, shape):
    converted = assert_matches(make(), torch.randn(shape))
    assert dbrq.report(converted).coverage == 1.0


@by_name(STRUCTURES, "make, shape")
def test_structure_with_another_batch_size(make, shape):
    model = make().eval()
    converted = convert(model, torch.randn(shape)).quantized
    for batch in (1, 5):
        x = torch.randn(batch, *shape[1:])
        assert sqnr(run(model, x), run(converted, x)) > 15


def test_lstm_then_linear():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.linear = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 8)

        def forward(self, x):
            out, (h, _) = self.lstm(x)
            return self.linear(out), self.linear(h[-1])

    model, x = Model().eval(), torch.randn(8, 6, 12)
    converted = convert(model, x).quantized
    for a, b in zip(run(model, x), run(converted, x), strict=True):
        assert sqnr(a, b) > 25
    assert_precision(converted, "linear", "int8", 2)


def test_two_embeddings_added_in_place_then_layer_norm():
    def forward(m, words, positions):
        h = m.words(words)
        h += m.positions(positions)
        return m.linear(m.norm(h))

    model = Call(
        forward,
        words=nn.Embedding(50, 16),
        positions=nn.Embedding(9, 16),
        norm=nn.LayerNorm(16),
        linear=nn.Linear(16, 8),
    )
    assert_matches(model, (torch.randint(0, 50, (8, 9)), torch.arange(9).expand(8, 9)), fx=False)
