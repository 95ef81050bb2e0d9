"""What ``lower`` returns for backends that run from Python: the model itself, with the objects it takes and gives."""

import copy
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dbrq
from dbrq.hidden_state import lowered_of
from tests.helpers.judging import sqnr

BACKENDS = ("onednn", "inductor")
by_backend = pytest.mark.parametrize("backend", BACKENDS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("h", torch.zeros(1))
        self.name = "net"

    def forward(self, x):
        self.h += 1
        return self.last(self.layer(x).relu()) + self.h

    def predict(self, x):
        return self(x).argmax(-1)

    @property
    def device(self):
        return next(self.parameters()).device


class Memory:
    """Holds what came before; grows."""

    def __init__(self):
        self.states, self.calls, self.full, self.log = [], 0, False, {}

    def keep(self, x):
        self.states = [torch.cat([self.states[0], x], 1)] if self.states else [x]
        self.calls += x.shape[1]
        self.log["last"], self.dtype = x[:, -1], x.dtype
        return self.states[0]


class Recalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x, memory=None):
        memory = Memory() if memory is None else memory
        seen = memory.keep(self.value(x))
        weights = (self.query(x) @ seen.mT).softmax(-1)
        return {"y": self.out(weights @ seen) + memory.calls, "memory": memory}


@dataclass
class Found:
    y: torch.Tensor
    batch: object


class Batch:
    def __init__(self, x, index):
        self.x, self.index = x, index


class Pools(nn.Module):
    """As the networks of graphs do: takes a batch, and gives it with other features."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, batch):
        y = self.layer(batch.x).relu()
        return Found(torch.zeros(2, 8).index_add(0, batch.index, y), Batch(y, batch.index))


class Writes(nn.Module):
    """As the modules of sentence-transformers do: what it finds goes into the dict that it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, features):
        features["embedding"] = self.layer(features["x"]).tanh()
        return features


def lowered_of_net(backend="onednn"):
    torch.manual_seed(0)
    x = torch.randn(6, 16)
    quantized = dbrq.quantize(Net().eval(), [x])
    return dbrq.lower(quantized, x, backend=backend), quantized, x


@by_backend
def test_it_is_the_model_itself(backend):
    lowered, quantized, x = lowered_of_net(backend)
    assert type(lowered) is Net and lowered.name == "net" and lowered.device.type == "cpu"
    assert [n for n, _ in lowered.named_parameters()] == [n for n, _ in quantized.named_parameters()]
    assert lowered.state_dict().keys() == quantized.state_dict().keys()
    assert torch.equal(lowered.predict(x), copy.deepcopy(quantized).predict(x))
    seen = []
    handle = lowered.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    lowered(x)
    handle.remove()
    assert seen == [(6, 4)]
    assert "lowered" in repr(lowered)
    assert dbrq.report(lowered).facts.stage == "lowered"


@by_backend
def test_state_is_the_models(backend):
    lowered, quantized, x = lowered_of_net(backend)
    before = lowered.h.item()
    torch.testing.assert_close(lowered(x), copy.deepcopy(quantized)(x))
    lowered(x)
    assert lowered.h.item() == before + 2 and quantized.h.item() == before
    lowered.h = torch.full((1,), 7.0)
    first = lowered(x)
    assert lowered.h.item() == 8
    other = copy.deepcopy(lowered)
    torch.testing.assert_close(other(x), first + 1)
    assert lowered.h.item() == 8 and other.h.item() == 9


def test_other_weights_are_noticed():
    lowered, quantized, x = lowered_of_net()
    same = copy.deepcopy(lowered)
    same.load_state_dict(lowered.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(x)
    assert dbrq.lowered_form(same) is not None
    with torch.no_grad():
        lowered.last.bias += 1
        expected = copy.deepcopy(quantized)
        expected.last.bias += 1
        with pytest.warns(UserWarning, match="other weights than when it was lowered"):
            torch.testing.assert_close(lowered(x), expected(x))
    assert dbrq.lowered_form(lowered) is None


def test_files_without_the_class_hold_the_graph(tmp_path, monkeypatch):
    lowered, _, x = lowered_of_net()
    dbrq.save(lowered, tmp_path / "net.dbrq")
    again = dbrq.load(tmp_path / "net.dbrq")
    assert type(again) is Net
    first = again(x)
    monkeypatch.delitem(globals(), "Net")
    with pytest.warns(UserWarning, match="without the class of its model"):
        graph = dbrq.load(tmp_path / "net.dbrq")
    torch.testing.assert_close(graph(x), first)


# Objects


def recalls(backend="onednn"):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    prepared = dbrq.prepare(Recalls().eval(), (x,))
    memory = prepared(x)["memory"]
    for _ in range(3):
        prepared(torch.randn(2, 1, 16), memory)
    quantized = dbrq.convert(prepared)
    return dbrq.lower(quantized, (x,), backend=backend), quantized, x


@by_backend
def test_what_forward_keeps_in_objects(backend):
    lowered, quantized, x = recalls(backend)
    got, expected = lowered(x), quantized(x)
    assert type(got) is dict and type(got["memory"]) is Memory
    a, b = got["memory"], expected["memory"]
    for step in range(6):
        x = torch.randn(2, 1 if step != 3 else 3, 16)
        got, expected = lowered(x, a), quantized(x, memory=b)
        assert got["memory"] is a and sqnr(expected["y"], got["y"]) > 30
        assert a.calls == b.calls and type(a.calls) is int and a.states[0].shape == b.states[0].shape
        assert sqnr(b.states[0], a.states[0]) > 30 and torch.equal(a.log["last"], a.states[0][:, -1])


def test_sizes_that_grow_make_no_plans():
    lowered, _, x = recalls()
    memory = lowered(x)["memory"]
    for _ in range(2):
        lowered(torch.randn(2, 1, 16), memory)
    graphs = lowered_of(lowered).models
    plans = sum(len(graph.plans) for graph in graphs)
    for _ in range(20):
        lowered(torch.randn(2, 1, 16), memory)
    assert lowered_of(lowered).models == graphs and sum(len(graph.plans) for graph in graphs) == plans
    assert memory.calls == 27 == memory.states[0].shape[1]


@by_backend
def test_batches_and_dataclasses(backend):
    torch.manual_seed(0)
    batch = Batch(torch.randn(5, 16), torch.tensor([0, 1, 0, 1, 1]))
    quantized = dbrq.quantize(Pools().eval(), [(batch,)])
    lowered = dbrq.lower(quantized, (batch,), backend=backend)
    other = Batch(torch.randn(5, 16), torch.tensor([1, 1, 0, 0, 0]))
    got, expected = lowered(other), quantized(other)
    assert type(got) is Found and type(got.batch) is Batch and got.batch.index is other.index
    assert sqnr(expected.y, got.y) > 30 and sqnr(expected.batch.x, got.batch.x) > 30
    assert dbrq.report(lowered).coverage == dbrq.report(quantized).coverage


@by_backend
def test_what_forward_writes_into_a_dict(backend):
    torch.manual_seed(0)
    quantized = dbrq.quantize(Writes().eval(), [({"x": torch.randn(4, 16)},)])
    lowered = dbrq.lower(quantized, ({"x": torch.randn(4, 16)},), backend=backend)
    features = {"x": torch.randn(3, 16)}
    expected = quantized(dict(features))["embedding"]
    assert lowered(features) is features and sqnr(expected, features["embedding"]) > 30
    assert list(features) == ["x", "embedding"]


def test_a_call_that_no_graph_can_stand_for_runs_as_converted():
    lowered, quantized, x = recalls()
    memory, other = Memory(), Memory()
    memory.strange = other.strange = {1, 2}
    with pytest.warns(UserWarning, match="runs as the model was converted, not lowered.*set"):
        got = lowered(x, memory)
    torch.testing.assert_close(got["y"], quantized(x, other)["y"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(x, memory)  # it has been said


def test_torchscript_names_what_it_cannot_hold():
    batch = Batch(torch.randn(5, 16), torch.tensor([0, 1, 0, 1, 1]))
    quantized = dbrq.quantize(Pools().eval(), [(batch,)])
    with pytest.raises(dbrq.RewriteError, match="batch: an object of class Batch") as error:
        dbrq.lower(quantized, (batch,))
    assert 'backend="onednn"' in str(error.value)


def test_threads_and_copies_and_files(tmp_path):
    lowered, quantized, x = recalls()
    dbrq.save(lowered, tmp_path / "recalls.dbrq")
    models = [lowered, copy.deepcopy(lowered), dbrq.load(tmp_path / "recalls.dbrq")]
    steps = [torch.randn(2, 1, 16) for _ in range(4)]

    def run(model):
        memory = model(x)["memory"]
        return [model(step, memory)["y"] for step in steps]

    expected, results = run(quantized), {}
    threads = [
        threading.Thread(target=lambda i=i: results.__setitem__(i, run(models[i % len(models)]))) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert all(sqnr(a, b) > 30 for a, b in zip(expected, results[number], strict=True))
        assert all(map(torch.equal, results[number], results[0]))
