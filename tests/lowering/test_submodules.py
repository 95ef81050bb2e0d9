"""Models whose code decides, lowered in parts: each straight-line module runs lowered, the rest as it was converted."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbrq
from dbrq.errors import SeveralPathsError
from dbrq.hidden_state import state_of
from tests.helpers.graphs import X, Y, assert_alike
from tests.helpers.judging import sqnr
from tests.helpers.running import run

BACKENDS = ("torchscript", "onednn")


def stage(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU())


class Early(nn.Module):
    """Leaves on data."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = stage(3, 8), stage(8, 8)
        self.early, self.head = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if x.mean() > 100:
            return self.early(x.mean((2, 3)))
        return self.head(self.body(x).mean((2, 3)))


class Meeting(nn.Module):
    """Two branches that one stage follows: its input has two makers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.body = stage(3, 8), stage(3, 8), stage(8, 8)

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return self.body(self.left(x) if left else self.right(x) * 2.0)


class Loop(nn.Module):
    """A stage called as often as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = stage(3, 8), stage(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.stem(x)
        for _ in range(times):
            x = self.body(x) + x
        return self.head(x)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.more = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor, *, scale: float = 1.0, also: Tensor | None = None) -> dict[str, Tensor]:
        h = F.relu(self.conv(x)) * scale
        return {"h": h if also is None else h + also, "more": self.more(h)}


class Containers(nn.Module):
    """Children with dicts, keywords and optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.child = stage(3, 8), Child()

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        out = self.child(self.stem(x), scale=0.5)
        if again:
            out = self.child(out["more"], scale=0.5, also=out["h"])
        return out["h"] + out["more"]


class Nested(nn.Module):
    """What decides is inside of a child; its own children are straight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = stage(3, 8), Meeting()
        self.inner.left, self.inner.right = stage(8, 8), stage(8, 8)

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return self.inner(self.stem(x), left)


IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
CASES = {
    "early exit": (Early, [(IMAGES,), (IMAGES * 2000,)], {"stem", "body"}),
    "meeting branches": (Meeting, [(IMAGES, True), (IMAGES, False)], {"left", "right", "body"}),
    "loop": (Loop, [(IMAGES, 2), (IMAGES, 3)], {"stem", "body"}),
    "containers": (Containers, [(IMAGES, False), (IMAGES, True)], {"stem", "child"}),
    "nested": (Nested, [(IMAGES, True), (IMAGES, False)], {"stem", "inner.left", "inner.right", "inner.body"}),
}


def quantized(name: str) -> tuple[nn.Module, nn.Module, list]:
    make, runs, _ = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    prepared = dbrq.prepare(model, runs[0])
    for inputs in runs:
        run(prepared, inputs)
    return model, dbrq.convert(prepared), runs


def parts_of(model: nn.Module) -> set[str]:
    return {path for path, state in state_of(model).token.states.items() if state.parts}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_each_straight_line_module_is_lowered_once_and_as_a_whole(name, backend):
    model, converted, runs = quantized(name)
    lowered = dbrq.lower(converted, runs[0], backend=backend)
    assert type(lowered) is type(model) and parts_of(lowered) == CASES[name][2]
    assert parts_of(converted) == set(), "the converted model is as it was"
    for inputs in runs:
        expected, got = run(converted, inputs), run(lowered, inputs)
        reference = run(model, inputs)
        assert sqnr(expected, got) >= sqnr(reference, expected) + 8, "lowered and converted agree"
        assert sqnr(reference, got) >= sqnr(reference, expected) - 1
    assert dbrq.report(lowered).coverage == dbrq.report(converted).coverage == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_the_parts_run(name, backend, monkeypatch):
    """On every recorded path, with uint8 between them where the converted model has it."""
    _, converted, runs = quantized(name)
    lowered = dbrq.lower(converted, runs[0], backend=backend)
    token = state_of(lowered).token
    ran: list[str] = []
    for path in parts_of(lowered):
        for lists in token.states[path].parts.values():
            for part in lists:
                monkeypatch.setattr(part, "model", Noting(part.model, path, ran))
    for inputs in runs:
        ran.clear()
        run(lowered, inputs)
        called = {path for path in parts_of(lowered) if path in reached(converted, inputs)}
        assert set(ran) == called


class Noting(nn.Module):
    def __init__(self, model: nn.Module, path: str, ran: list) -> None:
        super().__init__()
        self.model, self.path, self.ran = model, path, ran

    def forward(self, *args, **kwargs):
        self.ran.append(self.path)
        return self.model(*args, **kwargs)


def reached(model: nn.Module, inputs) -> set[str]:
    seen = set()
    copied = copy.deepcopy(model)
    for path, module in copied.named_modules():
        module.register_forward_hook(lambda *_, path=path: seen.add(path))
    run(copied, inputs)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_trip_counts_and_shapes(backend):
    model, converted, runs = quantized("loop")
    lowered = dbrq.lower(converted, runs[0], backend=backend)
    for inputs in ((IMAGES, 1), (IMAGES, 5), (torch.randn(1, 3, 20, 16), 2)):
        assert sqnr(run(converted, inputs), run(lowered, inputs)) > 30
        assert sqnr(run(model, inputs), run(lowered, inputs)) > 15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_and_files(how, backend, tmp_path):
    _, converted, runs = quantized("meeting branches")
    lowered = dbrq.lower(converted, runs[0], backend=backend)
    if how == "deepcopy":
        again = copy.deepcopy(lowered)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(lowered))
    else:
        dbrq.save(lowered, tmp_path / "m.dbrq")
        again = dbrq.load(tmp_path / "m.dbrq")
    assert parts_of(again) == parts_of(lowered)
    for inputs in runs:
        assert torch.equal(run(again, inputs), run(lowered, inputs))


def test_inputs_that_no_part_takes_run_as_converted():
    _, converted, runs = quantized("containers")
    lowered = dbrq.lower(converted, runs[0])
    one = torch.randn(3, 12, 12)
    with pytest.warns(UserWarning, match="dbrq: .* runs as it was converted"):
        assert torch.equal(run(lowered, (one,)), run(converted, (one,)))


def test_new_weights_are_never_ignored():
    _, converted, runs = quantized("early exit")
    lowered = dbrq.lower(converted, runs[0])
    with torch.no_grad():
        model = CASES["early exit"][0]().eval()
        prepared = dbrq.prepare(model, runs[0])
        for inputs in runs:
            prepared(*inputs)
    other = dbrq.convert(prepared)
    lowered.load_state_dict(other.state_dict())
    for inputs in runs:
        assert torch.equal(run(lowered, inputs), run(other, inputs))


def test_moves_that_change_nothing_keep_the_parts():
    """``pipeline`` and ``Trainer`` say ``.to(device)`` to any model."""
    _, converted, runs = quantized("early exit")
    lowered = dbrq.lower(converted, runs[0])
    before, results = parts_of(lowered), [run(lowered, inputs) for inputs in runs]
    lowered.to("cpu").float().eval()
    assert before and parts_of(lowered) == before
    assert all(torch.equal(run(lowered, inputs), result) for inputs, result in zip(runs, results, strict=True))
    lowered._apply(torch.Tensor.clone)
    assert not parts_of(lowered)
    assert all(torch.equal(run(lowered, inputs), run(converted, inputs)) for inputs in runs)


@pytest.mark.parametrize("name", CASES)
def test_one_graph_of_the_root_says_where_it_decides(name):
    _, converted, runs = quantized(name)
    with pytest.raises(SeveralPathsError) as caught:
        dbrq.rewrite(converted, runs[0])
    assert "test_submodules.py:" in str(caught.value.got) and "dbrq.lower" in str(caught.value.hint)


@pytest.mark.parametrize("name", CASES)
def test_each_part_can_be_rewritten_by_itself(name):
    _, converted, _ = quantized(name)
    graph = dbrq.rewrite(converted.stem if hasattr(converted, "stem") else converted.left, IMAGES)
    assert sum(n.target is torch.conv2d for n in graph.graph.nodes) == 2


def test_it_says_what_it_did(capsys):
    _, converted, runs = quantized("nested")
    dbrq.lower(converted, runs[0], verbose=True)
    said = capsys.readouterr().err
    assert "stem: lowered" in said and "inner: not lowered as one part: 2 paths" in said


# Parts and the code around them


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.l, self.m, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.gain, self.ctx = 1.0, torch.zeros(8)
        if kind == "hook":
            self.l.register_forward_hook(keep)

    def forward(self, h, out=None):
        h = torch.relu(self.l(h))
        if self.kind == "aux":
            self.aux = h
        if out is not None:
            out["h"] = h
        y = self.m(h)
        return y * self.gain if self.kind == "gain" else y + self.ctx if self.kind == "ctx" else y


def keep(module, args, output):
    module.kept = output


class InParts(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.block, self.x, self.o, self.kind = Block(kind), nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x, flag):
        if self.kind == "gain":
            self.block.gain = 3.0 if flag else 1.0
        if self.kind == "ctx":
            self.block.ctx = x.mean(0) * 5
        if self.kind == "outparam":
            out = {"h": x * 0}
            y = self.block(x, out) + 3 * out["h"]
        else:
            y = self.block(x)
        if self.kind == "aux":
            y = y + 3 * self.block.aux
        if self.kind == "hook":
            y = y + 3 * self.block.l.kept
        if flag:
            y = torch.relu(self.x(y))
        return self.o(y)


@pytest.mark.parametrize("backend", ["torchscript", "onednn"])
@pytest.mark.parametrize("kind", ["aux", "hook", "outparam", "gain", "ctx", "none"])
def test_parts_and_the_code_around_them_see_each_other(kind, backend):
    torch.manual_seed(0)
    prepared = dbrq.prepare(InParts(kind).eval(), (X, True))
    with torch.no_grad():
        prepared(X, True)
        prepared(Y, False)
        q = dbrq.convert(prepared)
        low = dbrq.lower(q, (X, True), backend=backend)
        for call in ((X, True), (Y, True), (Y, False)):
            assert_alike(low(*call), q(*call))
    states = low.__dict__["forward"].token.states
    assert bool(states["block"].parts) == (kind == "none")


def test_a_part_that_changes_the_whole_is_dropped(monkeypatch):
    from dbrq.lowering import submodules

    monkeypatch.setattr(submodules, "_traces", lambda *args: None)
    torch.manual_seed(0)
    prepared = dbrq.prepare(InParts("aux").eval(), (X, True))
    with torch.no_grad():
        prepared(X, True)
        prepared(Y, False)
        q = dbrq.convert(prepared)
        with pytest.warns(UserWarning, match="block stays as it was converted"):
            low = dbrq.lower(q, (X, True))
        assert_alike(low(Y, True), q(Y, True))


def test_a_part_may_store_what_nobody_can_change():
    """A new tuple that is equal to the old one is no change."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            self.hw, self.shape = (x.shape[0], x.shape[1]), x.shape
            return self.f(x)

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, flag):
            h = self.block(x)
            return h * 2 if flag else torch.relu(h - 1)

    model = Branching().eval()
    prepared = dbrq.prepare(model, (X, True))
    prepared(X, True)
    prepared(X, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low = dbrq.lower(dbrq.convert(prepared), (X, True), backend="onednn")
    assert low.__dict__["forward"].token.states["block"].parts
