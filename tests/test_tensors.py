"""Tensors of a converted model: who made them, what the user's code sees of them, and no more."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dbrq
from dbrq.tensors import Provenance
from tests.helpers.judging import sqnr
from tests.helpers.models import ROWS, Rows
from tests.helpers.phases import X, in_phase, net, phases
from tests.helpers.running import convert, quantized, quietly, run


class Shared(nn.Module):
    """Reads buffers with int8 ops, writes to one of them, and returns views of another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8, 16))
        self.register_buffer("scratch", torch.zeros(8, 16))
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch.copy_(self.table)  # the same in every run, so that threads do not disagree about values
        h = torch.sin(x)
        h = self.a(h) + self.b(h) * torch.sigmoid(self.a(self.table))
        return self.c(torch.relu(h)) + self.b(self.scratch)[:, :4]


@pytest.fixture(scope="module")
def shared():
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    return convert(Shared(), x).quantized, x


def marks(module: nn.Module) -> set[str]:
    tensors = (*module.parameters(), *module.buffers())
    return {name for tensor in tensors for name in tensor.__dict__ if name.startswith("_dbrq")}


def test_nothing_is_noted_on_what_the_model_keeps(shared):
    """Buffers kept who had written to them last, and the call that had quantized them, which cannot be pickled."""
    quantized, x = shared
    run(quantized, x)
    y = quantized(x)
    assert not marks(quantized)
    assert not [name for tensor in (x, y) for name in tensor.__dict__ if name.startswith("_dbrq")]


def test_a_model_whose_buffers_int8_ops_read_is_saved_after_it_ran(shared, tmp_path):
    quantized, x = shared
    expected = run(quantized, x)
    dbrq.save(quantized, tmp_path / "model.pt")
    assert torch.equal(run(dbrq.load(tmp_path / "model.pt"), x), expected)


def test_eight_threads_run_one_model_while_another_trains(shared):
    quantized, x = shared
    expected = run(quantized, x)
    wrong: list[object] = []
    done = threading.Event()

    def serve() -> None:
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.filterwarnings("error", "dbrq:")
                for _ in range(10):
                    if not torch.equal(quantized(x), expected):
                        wrong.append("other numbers")
        except Exception as error:
            wrong.append(error)

    def train() -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        while not done.is_set():
            optimizer.zero_grad()
            model(torch.ones(4, 16)).mean().backward()
            optimizer.step()

    trainer = threading.Thread(target=train)
    trainer.start()
    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    trainer.join()
    assert not wrong


def test_a_buffer_that_another_run_wrote_to_keeps_its_meaning():
    """The end of one run took away what another knew of a buffer that both had written to."""
    gates = threading.Barrier(2, timeout=20)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4, 16))
            self.layer = nn.Linear(16, 16)
            self.waits = False

        def forward(self, x, first):
            self.state.copy_(x)
            self.state.mul_(0.5)
            if self.waits and first:
                gates.wait()  # both have written
                gates.wait()  # the other run is over
            elif self.waits:
                gates.wait()
            return self.layer(self.state)

    x = torch.randn(4, 16)
    quantized = convert(Writes(), (x, True)).quantized
    expected = run(quantized, (x, True))
    quantized.waits = True
    results: dict[bool, object] = {}

    def serve(first: bool) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "dbrq:")
                results[first] = run(quantized, (x, first))
        except Exception as error:
            results[first] = error
        if not first:
            gates.wait()

    threads = [threading.Thread(target=serve, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(r, torch.Tensor) and torch.equal(r, expected) for r in results.values()), results


def test_a_new_tensor_is_not_taken_for_an_input_that_is_gone():
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, batch):
            h = self.first(batch.pop("x"))
            del batch
            values = [torch.from_numpy(np.full((4, 16), 0.5, dtype=np.float32)) for _ in range(20)]
            return self.last(h + sum(values))

    model, x = Drops(), torch.randn(4, 16)
    quantized = dbrq.quantize(model.eval(), [({"x": x.clone()},)])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", "dbrq:")
        results = [quantized({"x": x.clone()}) for _ in range(5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_tensors_are_held_weakly_and_compared():
    provenance, x = Provenance(), torch.randn(3)
    provenance.set_tag_of_any(x, 7)
    provenance.keep_int8(x, None, torch.zeros(3))
    known, number = dict(provenance._foreign), id(x)
    del x
    gc.collect()
    assert not provenance._int8
    other = torch.randn(3)
    provenance._foreign[id(other)] = known[number]  # as if it had got the same id
    assert provenance.tag(other) is None
    provenance.set_tag(other, 8)
    assert provenance.tag(other) == 8 and Provenance().tag(other) is None


def test_an_in_place_module_in_float_changes_what_int8_ops_read():
    """The elements that one layer had rounded were given to the next, though a module had written to them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Linear(16, 16), nn.Linear(16, 16), nn.SELU(inplace=True)

        def forward(self, x):
            h = torch.sin(x)
            y = self.a(h)
            self.act(h)
            return y + self.b(h)

    model, x = Net().eval(), torch.randn(8, 16)
    quantized = convert(model, x).quantized
    torch.testing.assert_close(run(quantized, x), run(model, x), atol=0.1, rtol=0.1)


def test_a_model_inside_another_takes_plain_values():
    inner = convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(8, 16)).quantized

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.last(torch.relu(self.held[0](self.first(x))))

    Outer.held = [inner]
    model, x = Outer().eval(), torch.randn(8, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "dbrq:")
        quantized = convert(model, x).quantized
        first, second = run(quantized, x), run(quantized, x)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, run(model, x), atol=0.1, rtol=0.1)


# Tensors that no kernel can read


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 3)

    def forward(self, x, y):
        return self.c(F.relu(self.a(x) + self.b(y)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, y):
        return torch.sigmoid(torch.relu(self.a(x) + y))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        return self.b(torch.relu(self.a(x))) + self.a(y)


ODD = {
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "complex": lambda t: t.to(torch.complex64),
    "integers": lambda t: t.int(),
    "numpy": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "nothing": lambda t: None,
}
MODELS = {"convs": Two, "residual": Residual, "linear": Linear}


@pytest.fixture(scope="module", params=MODELS)
def odd(request):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    return convert(MODELS[request.param](), (x, x)).quantized, x


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_tensors_without_float32_elements_are_told(odd, name, first):
    """A meta tensor was read as memory: the process was gone."""
    quantized, x = odd
    if name == "numpy" and not first:
        pytest.skip("torch adds arrays of numpy to tensors")
    wrong = ODD[name](x)
    expected = run(quantized, (x, x))
    with pytest.raises((dbrq.QuantizationError, TypeError)) as error, torch.no_grad():
        quantized(*((wrong, x) if first else (x, wrong)))
    if isinstance(error.value, dbrq.QuantizationError):
        assert error.value.path is not None or error.value.op is not None
    if name in ("meta", "sparse", "double", "half", "complex", "integers"):
        assert error.value.hint
    assert torch.equal(run(quantized, (x, x)), expected)


def test_fake_tensors_are_told(odd):
    quantized, x = odd
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        with pytest.raises(dbrq.KernelInputError, match="FakeTensorMode"):
            quantized(fake, fake)
    with pytest.raises(dbrq.KernelInputError) as error:
        quantized(fake, x)
    assert error.value.hint


class Mine(torch.Tensor):
    pass


def test_tensors_that_have_elements_are_taken(odd):
    quantized, x = odd
    expected = run(quantized, (x, x))
    with torch.no_grad():
        for same in (x.as_subclass(Mine), nn.Parameter(x), x.to(memory_format=torch.channels_last)):
            assert torch.equal(torch.as_tensor(quantized(same, x)).as_subclass(torch.Tensor), expected)
    wanting = x.clone().requires_grad_()
    assert torch.equal(quantized(wanting, x).detach(), expected)


# Values, as the user's code has them

RESHAPES: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "squeeze_": lambda h: h.squeeze_(),
    "t_": lambda h: h.t_(),
    "transpose_": lambda h: h.transpose_(0, 1),
    "swapaxes_": lambda h: h.swapaxes_(0, 1),
    "resize_": lambda h: h.resize_(4, 16),
    "resize_as_": lambda h: h.resize_as_(torch.zeros(2, 2)),
    "as_strided_": lambda h: h.as_strided_((2, 2), (1, 1)),
    "set_": lambda h: h.set_(torch.zeros(3)),
    "data": lambda h: setattr(h, "data", torch.zeros(3)),
}


@pytest.mark.parametrize("name", RESHAPES)
@pytest.mark.parametrize("fused", [False, True])
def test_an_in_place_op_that_changes_the_shape(name: str, fused: bool) -> None:
    def forward(m: Rows, x: Tensor, flag: bool) -> Tensor:
        h = F.relu(m.a(x)) if fused else m.a(x)
        if not flag:
            return m.b(h)
        RESHAPES[name](h)
        m.seen = tuple(h.shape)
        return h + 1.0

    model, rows = Rows(forward), [x[:1] if name == "squeeze_" else x for x in ROWS]
    never = quantized(model, [(x, False) for x in rows])
    with torch.no_grad():
        expected = model(rows[0], True)
        try:
            result = quietly(never, rows[0], True)
        except dbrq.QuantizationError:
            assert sqnr(model(rows[0], False), never(rows[0], False)) > 30
        else:
            assert result.shape == expected.shape and sqnr(expected, result) > 30
            assert never.seen == model.seen


# What forward asks of values and weights


def test_tied_weights_are_one_object() -> None:
    class Tied(Rows):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.b(F.relu(m.a(x))) * (3.0 if m.a.weight is m.b.weight else 1.0))
            self.b.weight = self.a.weight

    model = Tied()
    converted = quantized(model, ROWS)
    with torch.no_grad():
        for run in (converted, copy.deepcopy(converted)):
            assert sqnr(model(ROWS[0]), run(ROWS[0])) > 30


NOTES = ("stage", "tag", "alias", "deferred")


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("follower", [F.gelu, torch.sin, lambda h: h.view(8, 16)[:4]])
def test_attributes_that_forward_sets_on_values(name: str, follower: Callable) -> None:
    def forward(m: Rows, x: Tensor) -> Tensor:
        h = m.a(x)
        unset = not any(hasattr(h, note) for note in NOTES)
        setattr(h, name, "a note")
        h = m.b(follower(h))
        setattr(h, name, 1)
        return m.c(h) * (2.0 if unset and getattr(h, name) == 1 else 1.0)

    model = Rows(forward)
    with torch.no_grad():
        assert sqnr(model(ROWS[0]), quantized(model, ROWS, strict=True)(ROWS[0])) > 30


@phases
def test_outputs_carry_nothing_of_ours(phase):
    model = in_phase(phase, net, X)
    x = X.clone()
    out = model(x)
    assert type(out) is torch.Tensor and not out.__dict__ and not x.__dict__
    model = in_phase(phase, lambda: nn.Sequential(nn.Identity(), nn.Flatten()), X)
    out = model(x)
    assert torch.equal(out, x.flatten(1)) and not out.__dict__ and not x.__dict__
    with pytest.raises(AttributeError):
        out.data_u8  # noqa: B018
