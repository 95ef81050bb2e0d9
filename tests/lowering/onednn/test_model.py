"""How lowered models of the onednn backend behave as modules: shapes, layouts, memory, threads, copies, errors."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import math
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

import dbrq
from tests import test_lowering as stock
from tests.helpers import Call, convert, floats, run
from tests.test_lowering import NETWORKS, by_network, conv
from tests.test_onednn import assert_agrees, lower


@functools.cache
def network(name: str) -> tuple[Any, Any, Tensor]:
    """A lowered model, its graph and its example. Tests leave them as they were."""
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, x = stock.settled(make()), torch.randn(shape)
        quantized = convert(model, x).quantized
        return lower(quantized, x), dbrq.rewrite(quantized, x), x


def name_for(shape: tuple[int, ...]) -> str:
    return "convnet" if len(shape) == 4 else "transformer"


# Shapes and layouts


@pytest.mark.parametrize("shape", stock.SHAPES, ids=str)
def test_a_new_shape_runs_right_the_first_time_and_repeats(shape):
    lowered, graph, example = network(name_for(shape))
    x = torch.randn(shape)
    first, second = run(lowered, x), run(lowered, x)
    stock.assert_close(first, run(graph, x))
    assert torch.equal(first, second)
    run(lowered, example)
    assert torch.equal(run(lowered, x), first)


def sliced(x: Tensor) -> Tensor:
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "every other": lambda x: torch.stack([x, x], -1)[..., 1],
    "sliced": sliced,
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "reversed axes": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "a parameter": lambda x: nn.Parameter(x.clone()),
    "of numpy": lambda x: torch.from_numpy(x.numpy()),
}


@by_network
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(make, shape, layout):
    lowered, graph, x = network(name_for(shape))
    with torch.no_grad():
        expected = lowered(x)
        for _ in range(2):
            stock.assert_close(lowered(LAYOUTS[layout](x)), expected, 0.004)
    stock.assert_close(run(lowered, LAYOUTS[layout](x + 0.5)), run(graph, x + 0.5))


@by_network
def test_expanded_inputs(make, shape):
    lowered, graph, x = network(name_for(shape))
    for given in (x[:1].expand(shape), x[..., :1].expand(shape)):
        for _ in range(2):
            stock.assert_close(run(lowered, given), run(graph, given.contiguous()))


@by_network
def test_gradients_are_an_error_where_they_are_wanted(make, shape):
    lowered, _, x = network(name_for(shape))
    expected = run(lowered, x)
    got = lowered(x.clone().requires_grad_())
    assert torch.equal(got, expected)
    with pytest.raises(dbrq.QuantizationError, match="no gradient"):
        got.sum().backward()
    with torch.enable_grad():
        again = lowered(x)
    assert torch.equal(again, expected) and not again.requires_grad


@by_network
def test_inference_mode(make, shape):
    lowered, _, x = network(name_for(shape))
    expected = run(lowered, x)
    with torch.inference_mode():
        assert torch.equal(lowered(x.clone()), expected)
        new = torch.randn(1, *shape[1:])
        inside = lowered(new)
    with torch.no_grad():
        assert torch.equal(lowered(new.clone()), inside)
        assert torch.equal(lowered(new), inside)


@by_network
def test_number_of_threads(make, shape):
    lowered, _, x = network(name_for(shape))
    expected, threads = run(lowered, x), torch.get_num_threads()
    try:
        for count in (1, threads, 1):
            torch.set_num_threads(count)
            stock.assert_close(run(lowered, x), expected, 0.004)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(run(lowered, x), expected)


# Calling


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, y=None, scale: float = 1.0, *, flip: bool = False):
        z = self.a(x) * scale
        z = z if y is None else z + self.b(y)
        return z.flip(0) if flip else z


def test_keyword_arguments():
    model, x, y = Options().eval(), torch.randn(3, 16), torch.randn(3, 16)
    quantized = convert(model, (x, y)).quantized
    lowered = dbrq.lower(quantized, x, example_kwargs={"y": y}, backend="onednn")
    expected = run(quantized, (x, y))
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"x": x, "y": y}), ((), {"y": y, "x": x})):
        assert_agrees(lowered(*args, **kwargs), expected, "the converted model", exact=1e-3)


class Output(collections.OrderedDict):
    """A dict whose values can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OutputWithAttributes(collections.OrderedDict):
    """A dict whose values are attributes beside."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__.update(values)


Pair = collections.namedtuple("Pair", ["hidden", "pooled"])
CONTAINERS: dict[str, Callable] = {
    "tuple": lambda m, x: (m.a(x), m.b(x)),
    "list": lambda m, x: [m.a(x), m.b(x)],
    "namedtuple": lambda m, x: Pair(m.a(x), m.b(x)),
    "dict": lambda m, x: {"a": m.a(x), "b": [m.b(x), None]},
    "output": lambda m, x: Output(a=m.a(x), b=m.b(x)),
    "output with attributes": lambda m, x: OutputWithAttributes(a=m.a(x), b=m.b(x)),
    "nested": lambda m, x: ({"a": (m.a(x),)}, [m.b(x), (x,)]),
    "with numbers": lambda m, x: (m.a(x), 3, "text", None, x.shape[1]),
    "one in a tuple": lambda m, x: (m.a(x),),
    "nothing": lambda m, x: None,
    "empty": lambda m, x: (),
    "the same twice": lambda m, x: (m.a(x),) * 2,
}


def two_layers(fn: Callable) -> nn.Module:
    return Call(fn, inputs=1, a=nn.Linear(16, 16), b=nn.Linear(16, 16), w=torch.randn(16)).eval()


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_outputs(name):
    model, x = two_layers(CONTAINERS[name]), torch.randn(3, 16)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x)
    expected = run(quantized, x)
    for _ in range(2):
        got = run(lowered, x)
        assert type(got) is type(expected)
        torch.testing.assert_close(floats(got), floats(expected), atol=1e-5, rtol=1e-4)
    if "output" in name:
        assert got.a is got["a"] and list(got) == ["a", "b"]
    if name == "with numbers":
        assert got[1:] == expected[1:]


def test_dicts_and_lists_as_inputs():
    model = Call(lambda m, x: m.a(x["one"]) + m.b(x["two"][0]), a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval()
    given = {"one": torch.randn(3, 16), "two": [torch.randn(3, 16)]}
    prepared = dbrq.prepare(model, (given,))
    run(prepared, (given,))
    quantized = dbrq.convert(prepared)
    lowered = lower(quantized, (given,))
    for _ in range(3):
        assert_agrees(run(lowered, (given,)), run(quantized, (given,)), "the converted model", exact=2e-3)
        given = {"one": torch.randn(3, 16), "two": [torch.randn(3, 16)]}


# Outputs own their memory

OUTPUTS: dict[str, Callable] = {
    "a layer's": lambda m, x: m.a(x),
    "two": lambda m, x: (m.a(x), m.b(x)),
    "a view": lambda m, x: m.a(x)[:, :4],
    "a value and its view": lambda m, x: stock.let(m.a(x), lambda y: (y, y.t(), y[0])),
    "the same twice": lambda m, x: stock.let(m.a(x), lambda y: (y, y)),
    "the input": lambda m, x: (m.a(x), x),
    "a view of the input": lambda m, x: (m.a(x), x[1:]),
    "a parameter": lambda m, x: (m.a(x), m.w),
    "a constant": lambda m, x: (m.a(x), torch.arange(5.0) * 2),
    "a view of a parameter": lambda m, x: (m.a(x), m.w[:3]),
    "an expanded parameter": lambda m, x: (m.a(x), m.w.expand(3, 16)),
    "half of it": lambda m, x: m.a(x).chunk(2, 1),
    "read again": lambda m, x: stock.let(m.a(x), lambda y: (y, m.b(y))),
    "by torch": lambda m, x: F.softplus(m.a(x)),
    "a sum": lambda m, x: stock.let(m.a(x), lambda y: (y + m.b(x), y)),
    "integers": lambda m, x: (m.a(x) > 0, x.long()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_own_their_memory(name):
    model, x = two_layers(OUTPUTS[name]), torch.randn(3, 16)
    quantized = convert(model, x).quantized
    lowered = lower(quantized, x)
    kept = copy.deepcopy(lowered.state_dict())
    expected = copy.deepcopy(run(quantized, x))
    outputs = []
    for _ in range(3):
        with torch.no_grad():
            outputs.append(lowered(x.clone()))
    for a in outputs:
        torch.testing.assert_close(a, expected, atol=1e-5, rtol=1e-4)
    for leaf in dbrq.pytree.tree_leaves(outputs[0]):
        leaf.copy_(torch.full_like(leaf, 7)) if 0 not in leaf.stride() else None
    for later in (outputs[1], run(lowered, x)):
        torch.testing.assert_close(later, expected, atol=1e-5, rtol=1e-4)
    for key, tensor in lowered.state_dict().items():
        assert torch.equal(tensor, kept[key]), f"a caller that writes to its output changes {key}"


@by_network
def test_outputs_outlive_the_model(make, shape):
    lowered, _, x = network(name_for(shape))
    expected, other = run(lowered, x), copy.deepcopy(lowered)
    got = run(other, x)
    del other
    gc.collect()
    torch.randn(1 << 20)
    assert torch.equal(got, expected)


def test_an_input_is_not_changed():
    for name in NETWORKS:
        lowered, _, x = network(name)
        kept = x.clone()
        with torch.no_grad():
            lowered(x)
        assert torch.equal(x, kept)


# Plans


def plan_count_model() -> tuple[Any, Any]:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(2, 16)
    quantized = convert(model, x).quantized
    return lower(quantized, x), dbrq.rewrite(quantized, x)


def test_plans_are_bounded_and_the_one_not_used_for_longest_goes():
    lowered, graph = plan_count_model()
    lowered.max_plans = 3
    xs = {n: torch.randn(n, 16) for n in range(1, 8)}
    for x in xs.values():
        stock.assert_close(run(lowered, x), run(graph, x))
        assert len(lowered.plans) <= 3
    first, *_ = kept = lowered.plans
    run(lowered, xs[5])  # the oldest of the three: now the newest
    assert lowered.plans[-1] is first and set(lowered.plans) == set(kept)
    run(lowered, xs[1])
    assert first in lowered.plans and kept[1] not in lowered.plans and len(lowered.plans) == 3


def test_one_plan_for_each_shape():
    lowered, _ = plan_count_model()
    for n in (1, 2, 3, 1, 2, 3):
        run(lowered, torch.randn(n, 16))
    assert len(lowered.plans) == 3


def test_weights_are_packed_once_for_all_shapes():
    lowered, _ = plan_count_model()
    run(lowered, torch.randn(3, 16))
    before = lowered._packed.nbytes
    for n in range(4, 12):
        run(lowered, torch.randn(n, 16))
    assert lowered._packed.nbytes <= 2 * before


def test_steps_between_buffers_that_live_at_once_do_not_overlap():
    from dbrq.lowering.onednn.execution import place_buffers
    from dbrq.lowering.onednn.values import Buffer, Kind

    generator = torch.Generator().manual_seed(0)
    buffers = []
    for _ in range(60):
        size, first, life = (
            int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((1, 5000), (0, 40), (0, 9))
        )
        buffer = Buffer(Kind.ARENA, size, None, first)
        buffer.last = first + life
        buffers.append(buffer)
    total = place_buffers([], buffers)
    assert all(b.offset % 64 == 0 and b.offset + b.size <= total for b in buffers)
    for a in buffers:
        for b in buffers:
            if a is not b and a.first <= b.last and b.first <= a.last:
                assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
    assert total < sum(b.size for b in buffers)


# Threads


@by_network
def test_eight_threads_with_mixed_shapes(make, shape):
    lowered, _, _ = network(name_for(shape))
    model = copy.deepcopy(lowered)
    model.max_plans = 3  # fewer than shapes: plans come and go meanwhile
    sizes = [(n, 3, 20 + 4 * n, 24) if len(shape) == 4 else (n, 3 + n, 16) for n in (1, 2, 3, 4)]
    inputs = [torch.randn(size) for size in sizes]
    expected, wrong = [run(lowered, x) for x in inputs], []

    def work(offset: int) -> None:
        try:
            for i in range(offset, offset + 40):
                if not torch.equal(run(model, inputs[i % 4]), expected[i % 4]):
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Copies and files


@by_network
def test_copies(make, shape):
    lowered, _, x = network(name_for(shape))
    expected = run(lowered, x)
    for other in (copy.deepcopy(lowered), copy.deepcopy(copy.deepcopy(lowered)), pickle.loads(pickle.dumps(lowered))):
        assert torch.equal(run(other, x), expected) and not other.training
        assert dbrq.report(other) == dbrq.report(lowered)
        assert other.state_dict().keys() == lowered.state_dict().keys()
        assert all(map(torch.equal, other.state_dict().values(), lowered.state_dict().values()))
        assert other.in_torch == lowered.in_torch and other.max_plans == lowered.max_plans
    mine = {t.data_ptr() for t in lowered.state_dict().values() if t.numel()}
    assert not mine & {t.data_ptr() for t in copy.deepcopy(lowered).state_dict().values() if t.numel()}


def test_a_file_is_read_in_another_process(tmp_path):
    lowered, _, x = network("transformer")
    dbrq.save(lowered, tmp_path / "model.pt")
    assert torch.equal(run(dbrq.load(tmp_path / "model.pt"), x), run(lowered, x))
    torch.save((x, run(lowered, x)), tmp_path / "run.pt")
    code = """if True:
        import torch, dbrq
        model, (x, expected) = dbrq.load("model.pt"), torch.load("run.pt")
        torch.set_num_threads(2)
        assert torch.equal(model(x), expected) and not model.in_torch
        print(dbrq.report(model).coverage)"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == dbrq.report(lowered).coverage


def test_a_file_is_as_small_as_its_int8_weights(tmp_path):
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval(), torch.randn(4, 512)
    lowered = lower(dbrq.quantize(model, [x]), x)
    run(lowered, torch.randn(7, 512))
    dbrq.save(lowered, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1.1 * 4 * 512 * 512


def test_containers_of_outputs_survive_copies():
    model, x = two_layers(CONTAINERS["dict"]), torch.randn(3, 16)
    lowered = lower(convert(model, x).quantized, x)
    for other in (copy.deepcopy(lowered), pickle.loads(pickle.dumps(lowered))):
        torch.testing.assert_close(run(other, x), run(lowered, x))


class Counts(nn.Module):
    """Writes to a buffer in each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) + self.calls


def test_copies_of_models_that_write_are_independent():
    x = torch.randn(3, 16)
    lowered = lower(convert(Counts().eval(), x).quantized, x)
    start = lowered.state_dict()["calls"].item()
    run(lowered, x)
    other = copy.deepcopy(lowered)
    first, second = run(other, x), run(lowered, x)
    assert torch.equal(first, second) and lowered.state_dict()["calls"].item() == start + 2
    run(other, x)
    assert lowered.state_dict()["calls"].item() == start + 2 and other.state_dict()["calls"].item() == start + 3
    stock.assert_close(run(lowered, x), first + 1, 1e-4)


@by_network
def test_state_dict(make, shape):
    """int8 weights under the names of the module tree, and what was written into it counts."""
    lowered, _, x = network(name_for(shape))
    state = lowered.state_dict()
    assert any(t.dtype is torch.int8 for t in state.values()) and all(isinstance(t, Tensor) for t in state.values())
    other = copy.deepcopy(lowered)
    other.load_state_dict(state)
    assert torch.equal(run(other, x), run(lowered, x))


def test_modules_are_in_eval_mode_and_stay_usable_as_parts():
    lowered, _, x = network("transformer")
    outer = nn.Sequential(lowered, nn.Softmax(-1)).eval()
    assert torch.equal(run(outer, x), run(lowered, x).softmax(-1)) and not lowered.training
    assert "oneDNN" in repr(lowered) and "partitions" in repr(lowered)


def test_hooks_run():
    lowered, _, x = network("transformer")
    seen = []
    handle = lowered.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    out = run(lowered, x)
    handle.remove()
    run(lowered, x)
    assert seen == [out.shape]


# Memory


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_calls_do_not_grow_memory():
    model, x = two_layers(lambda m, x: (m.a(x) + F.softplus(m.b(x)), m.a(x).t())), torch.randn(64, 16)
    lowered = lower(convert(model, x).quantized, x)
    with torch.no_grad():
        for _ in range(300):
            lowered(x)
        before = resident()
        for _ in range(3000):
            lowered(x)
    assert resident() - before < 2 << 20


def test_new_shapes_do_not_grow_memory():
    lowered, _ = plan_count_model()
    lowered.max_plans = 2
    for n in range(1, 60):
        run(lowered, torch.randn(n, 16))
    before = resident()
    for n in range(1, 240):
        run(lowered, torch.randn(1 + n % 59, 16))
    assert resident() - before < 4 << 20


def test_models_are_released():
    lowered, _, x = network("transformer")
    data = pickle.dumps(lowered)

    def once() -> None:
        model = pickle.loads(data)
        run(model, x)

    for _ in range(3):
        once()
    before = resident()
    for _ in range(12):
        once()
    assert resident() - before < 6 << 20


# report and profile


@by_network
def test_report(make, shape):
    lowered, _, _ = network(name_for(shape))
    rows = {row.path: row for row in dbrq.report(lowered).rows}
    assert dbrq.report(lowered).coverage == 1.0
    layers = [row for row in rows.values() if row.op in ("conv2d", "linear")]
    assert layers and all(row.kernel.startswith(("onednn: conv2d", "onednn: linear")) for row in layers), dbrq.report(
        lowered
    )


@by_network
def test_profile(make, shape):
    lowered, _, x = network(name_for(shape))
    found = dbrq.profile(lowered, x, repeats=3)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert all(row.microseconds > 0 for row in found.rows)
    layers = [row for row in found.rows if row.computes.startswith(("conv2d", "linear"))]
    assert layers and all(row.gops and "torch" not in row.kernel for row in layers)
    for word in ("op", "computes", "kernel", "us", "share", layers[0].kernel, layers[0].op):
        assert word in str(found)
    assert torch.equal(run(lowered, x), run(lowered, x))


def test_profile_of_what_is_not_lowered():
    with pytest.raises(dbrq.errors.ConfigurationError, match="lower"):
        dbrq.profile(nn.Linear(2, 2), torch.randn(1, 2))


def test_profile_of_models_that_write_leaves_their_state():
    x = torch.randn(3, 16)
    lowered = lower(convert(Counts().eval(), x).quantized, x)
    before = lowered.state_dict()["calls"].clone()
    dbrq.profile(lowered, x, repeats=5)
    assert torch.equal(lowered.state_dict()["calls"], before)


def test_stages_can_be_looked_at():
    lowered, _, x = network("convnet")
    run(lowered, x)
    stages = lowered.stages()
    assert list(stages) == ["graph", "partitions", "segments", "plan"] and all(stages.values())
    assert "decomposed.quantize_per_tensor" in stages["graph"]
    assert "decomposed.quantize_per_tensor" not in stages["partitions"] and "conv2d" in stages["plan"]


def test_what_is_fused_can_be_printed(capsys):
    model, x = nn.Sequential(conv(), nn.GELU(), conv(2, 8)).eval(), torch.randn(stock.SIZES[2])
    lower(convert(model, x).quantized, x, verbose=True)
    said = capsys.readouterr()
    assert not said.out and "conv2d + gelu + quantize" in said.err


# What must raise, and what must go on afterwards


@functools.cache
def bad_input_model(name: str) -> tuple[Any, Any, Tensor]:
    make, shape = stock.MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model, x = stock.settled(make()), torch.randn(shape)
        quantized = convert(model, x, stock.ASKED if name == "matmul" else None).quantized
        return lower(quantized, x), dbrq.rewrite(quantized, x), x


@pytest.mark.parametrize("bad", stock.BAD)
@pytest.mark.parametrize("name", stock.MODELS)
def test_inputs_that_no_kernel_takes_raise(name, bad):
    lowered, graph, example = bad_input_model(name)
    before = run(lowered, example)
    x = stock.BAD[bad](example)
    if x.shape == example.shape and x.dtype is example.dtype:
        pytest.skip("it is the example")
    try:
        expected = run(graph, x)
    except Exception:
        with pytest.raises((RuntimeError, ValueError, TypeError, AssertionError)):
            run(lowered, x)
    else:  # the graph takes it: so does the backend, or it says why not
        try:
            got = run(lowered, x)
        except (RuntimeError, AssertionError) as error:
            assert "dbrq" in str(error) or "size" in str(error) or "shape" in str(error)
        else:
            assert_agrees(got, expected, "the graph", exact=1e-2, most=0.05)
    assert torch.equal(run(lowered, example), before)


CALLS: dict[str, tuple[Callable, type | tuple]] = {
    "nothing": (lambda m, x: m(), TypeError),
    "too many": (lambda m, x: m(x, x), TypeError),
    "an unknown keyword": (lambda m, x: m(x, mask=x), TypeError),
    "twice": (lambda m, x: m(x, input=x), TypeError),
    "None": (lambda m, x: m(None), (TypeError, RuntimeError, AttributeError)),
    "a number": (lambda m, x: m(3.0), (TypeError, RuntimeError, AttributeError)),
    "an array": (lambda m, x: m(x.numpy()), (TypeError, RuntimeError)),
    "a list": (lambda m, x: m([x]), (TypeError, RuntimeError, AttributeError)),
    "sparse": (lambda m, x: m(x[0].to_sparse()), (RuntimeError, NotImplementedError)),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name):
    lowered, _, x = network("convnet")
    before = run(lowered, x)
    call, error = CALLS[name]
    with pytest.raises(error):
        call(lowered, x)
    assert torch.equal(run(lowered, x), before)


def test_tensors_without_memory_raise():
    lowered, _, x = network("convnet")
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        lowered(x.to("meta"))


def test_an_error_in_the_middle_of_a_plan_leaves_the_model_usable():
    """An assertion of the graph that fails in some calls."""
    model = Call(
        lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.a(m.b(x)), inputs=1, a=nn.Linear(16, 16), b=nn.Linear(16, 16)
    )
    x = torch.rand(3, 16)
    quantized = convert(model.eval(), x).quantized
    lowered, graph = lower(quantized, x), dbrq.rewrite(quantized, x)
    expected = run(lowered, x)
    for bad in (-x, -x[:2]):
        with pytest.raises((RuntimeError, AssertionError), match="dbrq"):
            run(graph, bad)
        for _ in range(2):
            with pytest.raises((RuntimeError, AssertionError), match="dbrq"):
                run(lowered, bad)
    assert torch.equal(run(lowered, x), expected)
    stock.assert_close(run(lowered, x[:2]), run(graph, x[:2]))


def test_a_backend_that_is_not_there():
    with pytest.raises(dbrq.errors.ConfigurationError, match="onednn"):
        dbrq.lower(nn.Linear(2, 2), torch.randn(1, 2), backend="openvino")


EMPTY: dict[str, tuple[Callable, tuple]] = {
    "in float": (lambda: Call(lambda m, x: F.relu(x) * 2), (3, 4)),
    "softmax": (lambda: Call(lambda m, x: x.softmax(-1)), (3, 4)),
    "cat": (lambda: Call(lambda m, x: torch.cat([x, x])), (3, 4)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_of_what_torch_takes(name):
    make, shape = EMPTY[name]
    model, x = make().eval(), torch.randn(shape)
    lowered = lower(convert(model, x, QConfigMapping()).quantized, x)
    assert torch.equal(run(lowered, x[:0]), run(model, x[:0]))
    torch.testing.assert_close(run(lowered, x), run(model, x))


# What is not finite

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PARTS: dict[str, tuple[Callable[[], nn.Module], tuple, Any]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 6)), (4, 16), None),
    "conv": (lambda: nn.Sequential(conv(padding=1)), stock.SIZES[2], None),
    "float linear": (lambda: nn.Sequential(nn.Linear(16, 6)), (4, 16), QConfigMapping()),
    "layer_norm": (lambda: nn.Sequential(nn.LayerNorm(16)), (4, 16), QConfigMapping()),
    "softmax": (lambda: nn.Sequential(nn.Softmax(-1)), (4, 16), QConfigMapping()),
    "gelu": (lambda: nn.Sequential(nn.GELU()), (4, 16), QConfigMapping()),
    "relu": (lambda: nn.Sequential(nn.ReLU()), (4, 16), QConfigMapping()),
    "clamp": (lambda: Call(lambda m, x: x.clamp(-1, 1)), (4, 16), QConfigMapping()),
    "relu(2 * x)": (lambda: Call(lambda m, x: F.relu(x * 2)), (4, 16), QConfigMapping()),
    "exp": (lambda: Call(lambda m, x: x.exp()), (4, 16), QConfigMapping()),
    "max pool": (lambda: nn.Sequential(nn.MaxPool2d(2)), stock.SIZES[2], QConfigMapping()),
    "mean": (lambda: Call(lambda m, x: x.mean((2, 3))), stock.SIZES[2], QConfigMapping()),
}


#: B14: oneDNN's functions hide what is no number.
HIDDEN = "oneDNN hides what is not finite (docs/onednn.md)"
HIDING = {
    ("softmax", "nan"),
    ("softmax", "inf"),
    ("relu", "nan"),
    ("clamp", "nan"),
    ("relu(2 * x)", "nan"),
    ("exp", "nan"),
    ("max pool", "nan"),
}


@pytest.mark.parametrize(
    "name, bad",
    [
        pytest.param(
            n,
            b,
            marks=[pytest.mark.xfail(strict=True, reason="oneDNN hides what is not finite (docs/onednn.md)")]
            if (n, b) in HIDING
            else [],
        )
        for n in PARTS
        for b in NOT_FINITE
    ],
)
def test_not_finite(name, bad):
    """As the torchscript backend has it. (torch leaves it open what the level of such a value is.)"""
    make, shape, mapping = PARTS[name]
    model, x = make().eval(), torch.randn(shape)
    quantized = convert(model, x, mapping).quantized
    x.view(-1)[0] = NOT_FINITE[bad]
    lowered, scripted = (dbrq.lower(quantized, torch.randn(shape), backend=b) for b in ("onednn", "torchscript"))
    got, expected = run(lowered, x), run(scripted, x)
    if mapping is not None:
        torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-5, rtol=1e-4)
        return
    torch.testing.assert_close(got[1:], expected[1:], atol=1e-4, rtol=1e-3)


# As an op in scripted graphs


@by_network
def test_scripted_graphs_call_it(make, shape):
    lowered, _, x = network(name_for(shape))
    part = lowered.scriptable(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(part, nn.Softmax(-1)))
    for given in (x, torch.randn(1, *shape[1:])):
        assert torch.equal(run(scripted, given), run(lowered, given).softmax(-1))
        assert torch.equal(run(part, given), run(lowered, given))


def test_scripted_graphs_take_several_outputs():
    model, x = two_layers(CONTAINERS["tuple"]), torch.randn(3, 16)
    lowered = lower(convert(model, x).quantized, x)
    part = lowered.scriptable(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(part)
    for got, expected in zip(run(scripted, x), run(lowered, x), strict=True):
        assert torch.equal(got, expected)


def test_a_scripted_graph_whose_model_is_gone_says_so():
    model, x = two_layers(OUTPUTS["a layer's"]), torch.randn(3, 16)
    lowered = lower(convert(model, x).quantized, x)
    part = lowered.scriptable(x)
    del lowered
    gc.collect()
    with pytest.raises(RuntimeError, match="dbrq::run: the model is gone"):
        run(part, x)


def test_what_bfloat16_narrows_lives_as_long_as_it_is_read():
    """The call that makes a plan runs on memory of its own; later ones in the arena, where lifetimes matter."""

    def forward(m, x):
        y = m.a(x)
        for _ in range(3):
            y = m.b(torch.logaddexp(y, x)) + torch.hypot(x, y)
        return y

    model, x = Call(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval(), torch.randn(4, 16)
    lowered = dbrq.lower(convert(model, x).quantized, x, backend="onednn", dtype=torch.bfloat16)
    other = torch.randn(9, 16)
    first = lowered(other)
    assert all(torch.equal(lowered(other), first) for _ in range(3))
