"""Files: damage is found, and they are there whole or not at all."""

import io
import random
import stat
import threading
import zipfile

import pytest
import torch
from torch import nn

import dbrq
from tests.helpers.running import convert, run

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
