"""libdnnl: found or not, and what is said of what is no library."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from dbrq.lowering.onednn import library as library_module
from dbrq.lowering.onednn.library import PATH_VARIABLE, OneDNNError, library
from tests import ROOT


def in_a_process(code: str, **variables: str) -> str:
    """What a new interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout


def test_the_library_is_found():
    lib = library()
    assert lib is library() and Path(lib.path).name.startswith("libdnnl")
    assert lib.version[0] == 3 and lib.version >= (3, 2)
    assert lib.isa.startswith(("avx", "sse"))


RUNTIMES = """
import torch
from pathlib import Path
from dbrq.lowering.onednn.library import library
library()
with open("/proc/self/maps") as maps:
    paths = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
print(*(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))), sep="\\n")
"""


def test_one_openmp_pool():
    """torch's; two would fight for the cores. In a process of its own: other packages of the tests bring theirs."""
    assert len(in_a_process(RUNTIMES).splitlines()) == 1


LOOKING = """
import torch, dbrq
from torch import nn
model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(8, 4)
quantized = dbrq.quantize(model, [x])
try:
    dbrq.lower(quantized, x, backend="onednn")
except dbrq.errors.QuantizationError as error:
    print(type(error).__name__, error)
assert quantized(x).shape == (8, 3)
"""


def test_a_missing_library_says_what_to_install():
    said = in_a_process(LOOKING, **{PATH_VARIABLE: "/nowhere/libdnnl.so.3"})
    assert said.startswith("OneDNNError") and "pip install dbrq[onednn]" in said and "/nowhere/libdnnl.so.3" in said


@pytest.mark.parametrize("place", ["no file", "a folder", "a text", "another library"])
def test_what_is_no_library_is_named(place, tmp_path, monkeypatch):
    path = tmp_path / "libdnnl.so.3"
    if place == "a text":
        path.write_text("no library")
    elif place == "another library":
        path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so*"))
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path if place == "a folder" else path))
    with pytest.raises(OneDNNError) as raised:
        library.__wrapped__()
    assert "pip install dbrq[onednn]" in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_variable_says_where_it_is(kind, monkeypatch):
    path = Path(library().path)
    monkeypatch.setenv(PATH_VARIABLE, str(path if kind == "file" else path.parent))
    assert library.__wrapped__().version == library().version


def elsewhere(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    """An environment with nothing in it, but for what ``site`` brings."""
    site.mkdir(parents=True, exist_ok=True)
    empty = site.parents[2] / "empty"
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    for prefix in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, prefix, str(empty))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(empty / "lib" / "python" / "site-packages"))
    monkeypatch.setattr(sys, "path", [str(site)])


def a_distribution(site: Path, recorded: str) -> None:
    info = site / "some_onednn-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-onednn\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{recorded},,\n")


@pytest.mark.parametrize("layout", ["beside site-packages", "in a package", "pip --target"])
def test_layered_environments(layout, tmp_path, monkeypatch):
    """The library is in another prefix than the interpreter's; only sys.path leads there."""
    real = Path(library().path).resolve()
    site = tmp_path / "lib" / "python" / ("target" if layout == "pip --target" else "site-packages")
    elsewhere(monkeypatch, site)
    if layout == "beside site-packages":
        place = tmp_path / "lib"
    elif layout == "in a package":
        place = site / "some_onednn" / "libs"
        a_distribution(site, "some_onednn/libs/libdnnl.so.3")
    else:
        place = site / "lib"
        a_distribution(site, "../../libdnnl.so.3")
    place.mkdir(parents=True, exist_ok=True)
    (place / "libdnnl.so.3").symlink_to(real)
    assert Path(library.__wrapped__().path) == place / "libdnnl.so.3"


def test_all_places_looked_at_are_listed_with_what_is_wrong(tmp_path, monkeypatch):
    site = tmp_path / "lib" / "python" / "site-packages"
    elsewhere(monkeypatch, site)
    a_distribution(site, "some_onednn/libdnnl.so.3")
    (tmp_path / "lib" / "libdnnl.so").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "gone"))
    loaded = library_module._loaded  # the loader gives by name what this process has loaded already
    monkeypatch.setattr(library_module, "_loaded", lambda p: loaded(p) if "/" in p else (None, "the loader knows none"))
    _, looked_at = library_module.search()
    problems = {place.path: place.problem for place in looked_at}
    assert "no such folder" in problems[str(tmp_path / "empty" / "lib" / "libdnnl.so.3")]
    assert "no such folder" in problems[str(tmp_path / "gone" / "libdnnl.so.3")]
    assert "not there" in problems[str(site / "some_onednn" / "libdnnl.so.3")]
    assert "file too short" in problems[str(tmp_path / "lib" / "libdnnl.so")]
    assert problems.keys() >= {"libdnnl.so.3", "libdnnl.so"}  # the loader was asked as well
    with pytest.raises(OneDNNError) as raised:
        library.__wrapped__()
    assert all(str(place) in str(raised.value) for place in looked_at)


def test_a_library_that_does_not_serve_hides_none_that_does(tmp_path, monkeypatch):
    real = Path(library().path).resolve()
    site = tmp_path / "lib" / "python" / "site-packages"
    elsewhere(monkeypatch, site)
    other = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so*"))
    for folder, file in ((tmp_path / "lib", other), (tmp_path / "more", real)):
        folder.mkdir(exist_ok=True)
        (folder / "libdnnl.so.3").symlink_to(file)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "more"))
    lib = library.__wrapped__()
    assert Path(lib.path) == tmp_path / "more" / "libdnnl.so.3"
    assert any("no oneDNN of version 3" in place.problem for place in lib.looked_at)


def test_importing_dbrq_does_not_load_it():
    code = "import dbrq; print('libdnnl' in open('/proc/self/maps').read())"
    assert in_a_process(code).strip() == "False"
