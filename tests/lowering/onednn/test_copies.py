"""Models lowered to oneDNN, copied and saved."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import torch
from torch import Tensor, nn

import dbrq
from tests.helpers.judging import assert_close
from tests.helpers.networks import CONTAINERS, Counts, by_network, name_for, network, two_layers
from tests.helpers.onednn import lower
from tests.helpers.running import convert, run


@by_network
def test_copies(make, shape):
    lowered, _, x = network(name_for(shape))
    expected = run(lowered, x)
    pickled = pickle.loads(pickle.dumps(dbrq.lowered_form(lowered)))  # the class of the model is none of a module's
    for other in (copy.deepcopy(lowered), copy.deepcopy(copy.deepcopy(lowered)), pickled):
        assert torch.equal(run(other, x), expected) and not other.training
        assert dbrq.report(other) == dbrq.report(lowered)
        same = lowered if type(other) is type(lowered) else dbrq.lowered_form(lowered)
        assert other.state_dict().keys() == same.state_dict().keys()
        assert all(map(torch.equal, other.state_dict().values(), same.state_dict().values()))
        assert (
            dbrq.lowered_form(other).in_torch == dbrq.lowered_form(lowered).in_torch
            and dbrq.lowered_form(other).max_plans == dbrq.lowered_form(lowered).max_plans
        )
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
        assert torch.equal(model(x), expected) and not dbrq.lowered_form(model).in_torch
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
    for other in (copy.deepcopy(lowered), pickle.loads(pickle.dumps(dbrq.lowered_form(lowered)))):
        torch.testing.assert_close(run(other, x), run(lowered, x))


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
    assert_close(run(lowered, x), first + 1, 1e-4)


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
