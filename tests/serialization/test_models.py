"""``save`` and ``load``: one file, read in another process, with int8 weights and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.running import convert, run


def network() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 256),
        nn.GELU(),
        nn.Linear(256, 10),
    ).eval()
    return model, torch.randn(2, 3, 16, 16)


@pytest.fixture
def saved(tmp_path):
    model, x = network()
    converted = convert(model, x).quantized
    dbrq.save(converted, tmp_path / "model.pt")
    return converted, x, tmp_path / "model.pt"


def test_a_loaded_model_is_equal(saved):
    converted, x, path = saved
    loaded = dbrq.load(path)
    assert type(loaded) is nn.Sequential and not loaded.training
    assert torch.equal(run(loaded, x), run(converted, x))
    other = torch.randn(5, 3, 20, 20)
    assert torch.equal(run(loaded, other), run(converted, other))
    assert dbrq.report(loaded) == dbrq.report(converted)
    for (name, a), (same, b) in zip(loaded.state_dict().items(), converted.state_dict().items(), strict=True):
        assert name == same and torch.equal(a, b) and a.dtype is b.dtype


def test_a_model_saved_after_it_ran_is_no_larger(saved):
    converted, x, path = saved
    run(converted, x)
    run(converted, torch.randn(7, 3, 18, 18))
    dbrq.save(converted, path.with_name("again.pt"))
    assert abs(path.with_name("again.pt").stat().st_size - path.stat().st_size) < 4096, (
        "packed weights are not in the file"
    )


def test_the_file_holds_int8_weights_only(saved):
    converted, _, path = saved
    weights = sum(t.nbytes for name, t in converted.state_dict().items() if name.endswith("weight_int8"))
    float_weights = 4 * weights
    assert weights > 250_000
    assert path.stat().st_size < weights + 80_000 < 0.4 * float_weights


def test_a_fresh_process(saved, tmp_path):
    converted, x, path = saved
    torch.save({"x": x, "y": run(converted, x)}, tmp_path / "values.pt")
    code = (
        "import sys, torch, dbrq\n"
        "torch.set_num_threads(2)\n"
        f"model, values = dbrq.load({str(path)!r}), torch.load({str(tmp_path / 'values.pt')!r})\n"
        "with torch.no_grad():\n"
        "    print(torch.equal(model(values['x']), values['y']), dbrq.report(model).coverage)\n"
    )
    root = str(Path(dbrq.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "1.0"]


def test_the_state_dict_loads_with_weights_only(saved, tmp_path):
    converted, x, _ = saved
    torch.save(converted.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = convert(network()[0], torch.randn(2, 3, 16, 16)).quantized
    again.load_state_dict(state)
    assert torch.equal(run(again, x), run(converted, x))


def test_saved_twice_and_loaded_twice(saved, tmp_path):
    converted, x, path = saved
    dbrq.save(dbrq.load(path), tmp_path / "second.pt")
    assert torch.equal(run(dbrq.load(tmp_path / "second.pt"), x), run(converted, x))


def test_tied_weights_are_stored_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    Tied.__module__, Tied.__qualname__ = __name__, "Tied"
    globals()["Tied"] = Tied
    x = torch.randn(2, 256)
    converted = convert(Tied(), x).quantized
    dbrq.save(converted, tmp_path / "tied.pt")
    assert (tmp_path / "tied.pt").stat().st_size < 65536 + 40_000
    assert torch.equal(run(dbrq.load(tmp_path / "tied.pt"), x), run(converted, x))


@pytest.mark.parametrize("size", [0, 10, 1000, 50_000])
def test_half_a_file_is_told(saved, size):
    _, _, path = saved
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(dbrq.LoadError) as error:
        dbrq.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_a_flipped_byte_is_told_or_does_no_harm(saved, place):
    converted, x, path = saved
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0xFF
    path.write_bytes(bytes(content))
    try:
        loaded = dbrq.load(path)
    except dbrq.LoadError:
        return
    assert run(loaded, x).shape == run(converted, x).shape


@pytest.mark.parametrize(
    "content",
    [
        {"format": "other"},
        {},
        [1, 2],
        torch.zeros(3),
        "text",
        {"format": "dbrq", "version": 99, "model": None},
        {"format": "dbrq"},
    ],
)
def test_files_of_others_and_of_other_versions_are_told(content, tmp_path):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(dbrq.LoadError):
        dbrq.load(tmp_path / "file.pt")


def test_a_file_of_another_version_says_both(saved):
    _, _, path = saved
    content = torch.load(path, weights_only=False)
    torch.save({**content, "version": 99}, path)
    with pytest.raises(dbrq.LoadError, match="version") as error:
        dbrq.load(path)
    assert "99" in str(error.value) and error.value.hint


def test_a_class_that_is_gone_is_told(tmp_path):
    global Gone
    Gone = type("Gone", (nn.Sequential,), {"__module__": __name__, "__qualname__": "Gone"})
    converted = convert(Gone(nn.Linear(4, 4)), torch.randn(2, 4)).quantized
    dbrq.save(converted, tmp_path / "gone.pt")
    del Gone
    with pytest.raises(dbrq.LoadError, match="Gone"):
        dbrq.load(tmp_path / "gone.pt")


def test_a_class_that_cannot_be_referred_to_is_told(tmp_path):
    class Local(nn.Sequential):
        pass

    converted = convert(Local(nn.Linear(4, 4)), torch.randn(2, 4)).quantized
    with pytest.raises(dbrq.QuantizationError, match="Local"):
        dbrq.save(converted, tmp_path / "local.pt")


def test_a_failed_save_leaves_the_old_file(saved):
    converted, x, path = saved

    class Local(nn.Sequential):
        pass

    local = convert(Local(nn.Linear(4, 4)), torch.randn(2, 4)).quantized
    with pytest.raises(Exception, match="Local"):
        dbrq.save(local, path)
    assert torch.equal(run(dbrq.load(path), x), run(converted, x))


def test_only_converted_models_are_saved(tmp_path):
    model, x = network()
    for wrong in (model, convert(model, x).prepared, "model", None):
        with pytest.raises(dbrq.QuantizationError, match="convert"):
            dbrq.save(wrong, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        dbrq.load(tmp_path / "none.pt")
