"""``save`` and ``load``: one file, read in another process, with int8 weights and nothing else."""

import io
import os
import random
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers import convert, run


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


# Damage


@pytest.fixture(scope="module")
def small():
    """A small model in all its forms, what it takes, and what each form gives."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4)
    converted = convert(model, x).quantized
    forms = {"converted": converted, "torchscript": dbrq.lower(converted, x)}
    try:
        forms["onednn"] = dbrq.lower(converted, x, backend="onednn")
    except dbrq.OneDNNError:
        forms["onednn"] = converted
    return forms, x


@pytest.mark.parametrize("form", ["converted", "torchscript", "onednn"])
def test_a_flipped_bit_is_told_or_does_no_harm(small, form, tmp_path):
    """torch compares no checksums: one file in thirteen loaded with other numbers."""
    model, x = small[0][form], small[1]
    expected = run(model, x)
    dbrq.save(model, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    told = 0
    for place in random.Random(0).sample(range(8 * len(content)), 120):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        (tmp_path / "damaged.pt").write_bytes(damaged)
        try:
            loaded = dbrq.load(tmp_path / "damaged.pt")
        except dbrq.LoadError as error:
            told += "damaged.pt" in str(error)
        else:
            assert torch.equal(run(loaded, x), expected), f"bit {place}"
    assert told > 80


@pytest.mark.parametrize("form", ["converted", "torchscript", "onednn"])
def test_a_number_of_a_weight_that_was_changed_is_told(small, form, tmp_path):
    dbrq.save(small[0][form], tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename or "/constants/" in info.filename]
        record = max(records, key=lambda info: info.file_size)
        at = (tmp_path / "whole.pt").read_bytes().index(archive.read(record))
    content = bytearray((tmp_path / "whole.pt").read_bytes())
    content[at] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    with pytest.raises(dbrq.LoadError, match="checksum"):
        dbrq.load(tmp_path / "damaged.pt")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("form", ["converted", "torchscript", "onednn"])
def test_part_of_a_file_is_told(small, form, share, tmp_path):
    dbrq.save(small[0][form], tmp_path / "model.pt")
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[: int(share * len(content))])
    with pytest.raises(dbrq.LoadError, match=r"model\.pt") as error:
        dbrq.load(tmp_path / "model.pt")
    assert error.value.hint


def test_other_files_are_told(small, tmp_path):
    converted, path = small[0]["converted"], tmp_path / "other.pt"
    with pytest.raises(dbrq.LoadError, match="folder"):
        dbrq.load(tmp_path)
    for content in (b"{}", b"\x08\x07", bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(dbrq.LoadError):
            dbrq.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(dbrq.LoadError):
        dbrq.load(path)
    torch.save(converted.state_dict(), path)
    with pytest.raises(dbrq.LoadError, match="load_state_dict"):
        dbrq.load(path)
    torch.save(nn.Linear(2, 2), path)
    with pytest.raises(dbrq.LoadError, match="convert it"):
        dbrq.load(path)
    dbrq.save_recipe(converted, path)
    with pytest.raises(dbrq.LoadError):
        dbrq.load(path)


def test_files_without_checksums_are_not_written(small, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(dbrq.QuantizationError, match="checksums"):
            dbrq.save(small[0]["converted"], tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert not list(tmp_path.iterdir())


# Writing


@pytest.mark.parametrize("form", ["converted", "torchscript"])
def test_many_threads_save_to_one_path(small, form, tmp_path):
    """They shared a file to write to, named after the process: one in four failed."""
    model, x = small[0][form], small[1]
    failed: list[Exception] = []

    def save() -> None:
        try:
            for _ in range(8):
                dbrq.save(model, tmp_path / "model.pt")
                dbrq.load(tmp_path / "model.pt")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torch.equal(run(dbrq.load(tmp_path / "model.pt"), x), run(model, x))
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("form", ["converted", "torchscript"])
def test_a_file_has_the_permissions_of_any_other(small, form, tmp_path):
    dbrq.save(small[0][form], tmp_path / "model.pt")
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("model.pt", "plain")]
    assert modes[0] == modes[1]
    (tmp_path / "model.pt").chmod(0o640)
    dbrq.save(small[0][form], tmp_path / "model.pt")
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o640


def test_a_link_stays_one(small, tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    dbrq.save(small[0]["converted"], tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink() and (tmp_path / "real.pt").is_file()
    dbrq.load(str(tmp_path / "link.pt"))


def test_nothing_is_left_of_a_failed_save(small, tmp_path):
    class Local(nn.Sequential):
        pass

    with pytest.raises(dbrq.QuantizationError, match="Local"):
        dbrq.save(convert(Local(nn.Linear(4, 4)), torch.randn(2, 4)).quantized, tmp_path / "model.pt")
    for wrong in (tmp_path / "no folder" / "model.pt", tmp_path, io.BytesIO()):
        with pytest.raises(dbrq.QuantizationError, match="cannot be saved"):
            dbrq.save(small[0]["converted"], wrong)
    assert not list(tmp_path.iterdir())


def test_a_long_name(small, tmp_path):
    path = tmp_path / ("n" * 252 + ".pt")
    dbrq.save(small[0]["converted"], path)
    dbrq.load(path)
