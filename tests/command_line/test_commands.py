"""The command ``dbrq``: what it prints, what it writes, and its exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dbrq
from dbrq.command_line import main
from tests import ROOT
from tests.helpers.running import convert

#: A file of a user's, named as MODEL names it.
USER_CODE = """
import torch
from torch import nn
import dbrq

def alone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

def with_example():
    print("a message of the user's code")
    return alone(), torch.ones(2, 8)

def with_data():
    torch.manual_seed(1)
    return alone(), torch.randn(2, 8), (torch.randn(2, 8) for _ in range(4))

def quantized():
    model, example, data = with_data()
    return dbrq.quantize(model, data), example

def prepared():
    return dbrq.prepare(*with_example()), torch.ones(2, 8)

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, *, x, scale=1.0):
        return {"y": self.a(x) * scale}

def by_name():
    return Named(), {"x": torch.randn(3, 8)}

def wrong():
    return 42

def data_alone():
    return alone(), None, [torch.ones(3, 8)]

def nothing():
    return alone(), None

def fails():
    raise ValueError("the weights are not here")

def asserts():
    assert False, "says the user"

class Branches(nn.Module):
    def forward(self, x):
        raise RuntimeError("forward fails")

def does_not_run():
    return Branches(), torch.ones(1)

not_a_function = alone()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(USER_CODE)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("user_models", None)


@pytest.fixture
def files(folder):
    """A converted and a lowered model, and an example, as files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(2, 8)
    quantized = convert(model, x).quantized
    dbrq.save(quantized, "int8.pt")
    dbrq.save(dbrq.lower(quantized, x), "lowered.pt")
    torch.save(x, "x.pt")
    return folder


def called(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys, *arguments: str) -> tuple[int, dict]:
    code, out, _ = called(capsys, *arguments, "--json")
    return code, json.loads(out, parse_constant=pytest.fail)  # no NaN, no Infinity


# Each command


def test_doctor(capsys, folder):
    code, out, err = called(capsys, "doctor")
    assert code == 0 and out.startswith("cpu") and "advice" in out and not err
    code, found = as_json(capsys, "doctor", "user_models:with_example")
    assert code == 0 and found["model"]["stage"] == "float" and "instruction_sets" in found["cpu"]


def test_report_of_files_and_functions(capsys, files):
    for name, stage in (("int8.pt", "converted"), ("lowered.pt", "lowered"), ("user_models:with_data", "converted"),
                        ("user_models:prepared", "prepared"), ("user_models:quantized", "converted")):  # fmt: skip
        code, found = as_json(capsys, "report", name)
        assert (code, found["stage"], found["coverage"]) == (0, stage, 1.0)
        assert [row["path"] for row in found["rows"]] == ["0", "1", "2"]
    assert called(capsys, "doctor", "user_models:data_alone")[0] == 0, "the first of the data is an example"
    code, out, _ = called(capsys, "report", "int8.pt")
    assert code == 0 and "what to do next" in out
    code, out, _ = called(capsys, "report", "int8.pt", "--all")
    assert out.splitlines()[0].startswith("path") and "what to do next" not in out


def test_report_as_a_page(capsys, files):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    code, _, _ = called(capsys, "report", "int8.pt", "--html", "report.html")
    assert code == 0 and (files / "report.html").read_text().startswith("<!DOCTYPE html>")
    code, _, err = called(capsys, "report", "int8.pt", "--html", "no_folder/report.html")
    assert code == 1 and "cannot be written" in err


def test_compare(capsys, files):
    code, out, _ = called(capsys, "compare", "user_models:with_example", "user_models:quantized")
    assert code == 0 and "local (dB)" in out
    code, found = as_json(capsys, "compare", "user_models:alone", "user_models:quantized", "--at-least", "10")
    assert code == 0 and found["worst"] == min(row["sqnr"] for row in found["rows"])
    code, _, err = called(capsys, "compare", "user_models:alone", "user_models:quantized", "--at-least", "500")
    assert code == 1 and "500.0 were asked for" in err
    code, found = as_json(capsys, "compare", "user_models:with_example", "user_models:with_example")
    assert code == 0 and found["worst"] is None, "JSON has no infinity"


def test_export(capsys, files):
    pytest.importorskip("onnxscript")
    code, found = as_json(capsys, "export", "int8.pt", "--example", "x.pt", "--onnx", "model.onnx")
    assert code == 0 and found["bytes"] == os.path.getsize("model.onnx") > 500
    code, out, err = called(capsys, "export", "user_models:by_name", "--onnx", "named.onnx")
    assert code == 0 and out.startswith("named.onnx: ") and "quantized on its example alone" in err


def test_bench(capsys, folder):
    code, found = as_json(
        capsys,
        "bench",
        "user_models:with_data",
        "--backends",
        "eager,torchscript",
        "--seconds",
        "0.2",
        "--threads",
        "1",
    )
    rows = {row["form"]: row for row in found["rows"]}
    assert code == 0 and list(rows) == ["float", "eager", "torchscript"] and found["threads"] == 1
    assert rows["float"]["speedup"] == 1 and rows["float"]["sqnr"] is None
    assert all(20 < rows[name]["sqnr"] < 80 and 0 <= rows[name]["same_top"] <= 1 for name in ("eager", "torchscript"))
    assert all(0 < row["fastest"] <= row["milliseconds"] for row in rows.values())
    assert rows["eager"]["megabytes"] < rows["float"]["megabytes"]
    code, out, _ = called(capsys, "bench", "user_models:by_name", "--backends", "eager", "--seconds", "0.1")
    assert code == 0 and out.split()[:2] == ["ms", "fastest"] and "accuracy on its example" in out


def test_bench_of_files(capsys, files):
    code, found = as_json(capsys, "bench", "lowered.pt", "--example", "x.pt", "--seconds", "0.1")
    assert code == 0 and [row["form"] for row in found["rows"]] == ["lowered"]
    code, found = as_json(
        capsys, "bench", "int8.pt", "--example", "x.pt", "--seconds", "0.1", "--backends", "torchscript,eager"
    )
    assert code == 0 and [row["form"] for row in found["rows"]] == ["eager", "torchscript"]


def test_a_backend_that_is_not_here(capsys, folder, monkeypatch):
    """It is no failure unless it was asked for."""

    def missing(*_, backend, **__):
        raise dbrq.OneDNNError(f"no library for {backend}")

    monkeypatch.setattr(sys.modules["dbrq.command_line.bench"], "lower", missing)
    code, out, _ = called(capsys, "bench", "user_models:with_data", "--seconds", "0.1")
    assert code == 0 and "not here: OneDNNError: no library for onednn" in out
    code, _, err = called(capsys, "bench", "user_models:with_data", "--seconds", "0.1", "--backends", "eager,onednn")
    assert code == 1 and "onednn does not run" in err


def test_what_the_users_code_prints_is_no_part_of_the_result(capsys, folder):
    code, out, err = called(capsys, "report", "user_models:with_example", "--json")
    assert code == 0 and "a message of the user's code" in err and json.loads(out)


# Wrong use


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["report", "no_such_file.pt"], "no such MODEL"),
        (["report", "no_such_package:make"], "no such module"),
        (["report", "user_models.deeper:make"], "no such module"),
        (["report", ":make"], "no such MODEL"),
        (["report", "user_models:no_such"], "no such function"),
        (["report", "user_models.py:with_data"], "without .py, and with dots for folders: user_models:with_data"),
        (["report", "user_models:nothing"], "--example"),
        (["report", "user_models:not_a_function"], "no function"),
        (["report", "user_models:wrong"], "(int)"),
        (["report", "user_models:alone"], "--example"),
        (["report", "user_models:alone", "--example", "none.pt"], "no such file of inputs"),
        (["report", "user_models:alone", "--example", "user_models.py"], "cannot be read"),
        (["bench", "user_models:alone", "--backends", "gpu"], "torchscript"),
        (["bench", "user_models:prepared", "--backends", "eager"], "is prepared"),
        (["export", "int8.pt", "--onnx", "a.onnx"], "without an example"),
    ],
)
def test_wrong_use_exits_with_2(capsys, files, arguments, said):
    code, out, err = called(capsys, *arguments)
    assert code == 2 and not out and said in err and "Traceback" not in err, err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["bench"], ["bench", "a:b", "--seconds", "-1"],
                                       ["bench", "a:b", "--batches", "0"], ["export", "a:b"]])  # fmt: skip
def test_wrong_arguments_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2 and "usage: dbrq" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, said",
    [
        ("user_models:fails", "ValueError: the weights are not here"),
        ("user_models:asserts", "AssertionError: says the user"),
        ("user_models:does_not_run", "forward fails"),
        ("needs_more:make", "a_package_that_is_not_there"),
        ("user_models.py", "cannot be read"),
    ],
)
def test_failures_exit_with_1(capsys, folder, model, said):
    code, out, err = called(capsys, "report", model)
    assert code == 1 and not out and said in err and "Traceback" not in err, err
    code, _, err = called(capsys, "report", model, "--traceback")
    assert code == 1 and "Traceback" in err and said in err


def test_help_tells_what_a_model_is(capsys):
    for arguments in (["--help"], ["bench", "--help"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0 and "package.module:function" in capsys.readouterr().out


# As a process


def test_as_a_module_and_in_a_pipe(folder):
    """In a folder with the user's file, which Python does not look through for installed commands."""
    root = os.path.dirname(os.path.dirname(dbrq.__file__))
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dbrq", "report", "user_models:with_example"], capture_output=True, text=True,
        env=environment, cwd=folder, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "what to do next" in done.stdout, done.stderr
    done = subprocess.run(
        f"'{sys.executable}' -m dbrq report user_models:with_example | head -n 1", shell=True, capture_output=True,
        text=True, env=environment, cwd=folder, timeout=300, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_files_name_the_users_classes_where_that_is_allowed(capsys, folder):
    import user_models

    dbrq.save(dbrq.quantize(user_models.Named(), [{"x": torch.randn(3, 8)}]), "named.pt")
    del sys.modules["user_models"]
    code, _, said = called(capsys, "report", "named.pt")
    assert code == 1 and "user_models.Named" in said
    code, shown, _ = called(capsys, "report", "named.pt", "--allow", "user_models")
    assert code == 0 and "what to do next" in shown


def test_the_command_is_declared():
    import configparser

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "dbrq" and getattr(sys.modules[module], function) is main


# Progress


class Terminal:
    """A stderr that is one."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_lowering_shows_what_it_is_at(monkeypatch):
    pytest.importorskip("tqdm")
    x = torch.randn(2, 8)
    quantized = convert(nn.Linear(8, 4), x).quantized
    for progress, shown in ((None, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        dbrq.lower(quantized, x, progress=progress)
        for stage in ("recording the graph", "compiling TorchScript", "comparing with the converted model"):
            assert (stage in terminal.text) is shown


def test_lowering_is_silent_elsewhere(capsys):
    x = torch.randn(2, 8)
    dbrq.lower(convert(nn.Linear(8, 4), x).quantized, x)
    said = capsys.readouterr()
    assert not said.out and not said.err


def test_verbose_lowering_names_its_stages(capsys):
    x = torch.randn(2, 8)
    dbrq.lower(convert(nn.Linear(8, 4), x).quantized, x, verbose=True)
    said = capsys.readouterr().err
    assert "lowering to torchscript: compiling TorchScript" in said and "onednn.qlinear_pointwise" in said
