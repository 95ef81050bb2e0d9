"""Files of strangers: reading one runs no code of its author, and what is refused is named."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq.lowering.graph_data import Ref
from dbrq.serialization.allowed import Allow, Refused
from dbrq.serialization.tensor_functions import problem_of
from dbrq.serialization.unpickling import pickle_for
from tests import ROOT


class Reduced:
    """Is pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


class Finalized:
    """Does something when it goes."""

    def __del__(self) -> None:
        Path(self.__dict__.get("path", os.devnull)).touch()


class Downloads(nn.Module):
    """Its constructor would do something."""

    def __init__(self, path: str = os.devnull) -> None:
        super().__init__()
        Path(path).touch()


class Outer:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)


def file_of(value: Any, path: Path) -> Path:
    """A file such as ``dbrq.save`` writes, with ``value`` for a model."""
    torch.save({"format": "dbrq", "version": 2, "torch": torch.__version__, "model": value}, path)
    return path


def finalized(path: Path) -> Finalized:
    made = Finalized.__new__(Finalized)
    made.path = str(path)
    return made


ATTACKS: dict[str, Callable[[Path], Any]] = {
    "a command": lambda path: Reduced(os.system, (f"touch {path}",)),
    "eval": lambda path: Reduced(eval, (f"open({str(path)!r}, 'w')",)),
    "a method of a class": lambda path: Reduced(getattr, (Downloads, "__init__")),
    "a partial call": lambda path: __import__("functools").partial(os.system, f"touch {path}"),
    "a constructor": lambda path: Reduced(Downloads, (str(path),)),
    "a process": lambda path: Reduced(subprocess.Popen, (["touch", str(path)],)),
    "torch's own loader": lambda path: Reduced(torch.load, (str(path),)),
    "our own loader": lambda path: Reduced(dbrq.load, (str(path), True)),
    "a file of torch": lambda path: Reduced(torch.from_file, (str(path), True, 4)),
    "what rebuilds tensors": lambda path: Reduced(
        torch._tensor._rebuild_from_type_v2, (os.system, torch.Tensor, (f"touch {path}",), {})
    ),
    "a class that is changed": lambda path: Reduced(
        type, ("X", (), {}), {"forward": os.system}
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_of_a_file_does_not_run(attack, tmp_path):
    touched = tmp_path / "touched"
    file = file_of(ATTACKS[attack](touched), tmp_path / "file.pt")
    with pytest.raises(dbrq.LoadError, match=r"allow=") as caught:
        dbrq.load(file)
    assert not touched.exists() and str(file) in str(caught.value)


def test_a_finalizer_of_a_file_does_not_run(tmp_path):
    touched = tmp_path / "touched"
    made = finalized(touched)
    file = file_of(made, tmp_path / "file.pt")
    made.path = os.devnull
    with pytest.raises(dbrq.LoadError, match="Finalized"):
        dbrq.load(file)
    assert not touched.exists()


def test_a_class_stays_as_it_is():
    """``BUILD`` would set attributes of a class."""
    with pytest.raises(Refused, match=r"changes torch\.nn\.modules\.linear\.Linear"):
        pickle_for(Allow()).load(io.BytesIO(b"\x80\x02ctorch.nn.modules.linear\nLinear\n}b."))


def test_allow_true_reads_what_the_file_names(tmp_path):
    touched = tmp_path / "touched"
    file = file_of(Reduced(os.system, (f"touch {touched}",)), tmp_path / "file.pt")
    with pytest.raises(dbrq.LoadError, match="holds no model"):
        dbrq.load(file, allow=True)
    assert touched.exists()


def quantized(model: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    return dbrq.quantize(model.eval(), [x]), x


def test_a_class_inside_of_another_is_read(tmp_path):
    model, x = quantized(Outer.Inner())
    dbrq.save(model, tmp_path / "file.pt")
    assert torch.equal(dbrq.load(tmp_path / "file.pt")(x), model(x))


OWN = """
    import torch
    from torch import nn

    def double(x):
        return 2 * x

    class Net(nn.Module):
        def __init__(self, function=torch.relu):
            super().__init__()
            self.layer, self.function = nn.Linear(4, 4), function

        def forward(self, x):
            return self.function(self.layer(x))
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's, which this process has imported."""
    (tmp_path / "own_models.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_models

    yield own_models
    sys.modules.pop("own_models", None)


def in_a_new_process(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=folder, env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.stdout + done.stderr


def test_a_class_is_found_where_the_program_imported_it(own_module, tmp_path):
    model, x = quantized(own_module.Net())
    dbrq.save(model, tmp_path / "file.pt")
    assert torch.equal(dbrq.load(tmp_path / "file.pt")(x), model(x))
    said = in_a_new_process(
        """
        import dbrq, torch
        try:
            dbrq.load("file.pt")
        except dbrq.LoadError as error:
            assert "own_models.Net" in str(error) and "import own_models first" in str(error), error
        import sys
        assert "own_models" not in sys.modules
        one = dbrq.load("file.pt", allow="own_models")(torch.ones(1, 4))
        assert torch.equal(dbrq.load("file.pt")(torch.ones(1, 4)), one)
        print("right")
        """,
        tmp_path,
    )
    assert said.endswith("right\n"), said


def test_a_function_of_the_users_wants_to_be_allowed(own_module, tmp_path):
    model, x = quantized(own_module.Net(own_module.double))
    dbrq.save(model, tmp_path / "file.pt")
    with pytest.raises(dbrq.LoadError, match=r"own_models\.double"):
        dbrq.load(tmp_path / "file.pt")
    for allow in (own_module.double, [own_module.double], "own_models", True):
        assert torch.equal(dbrq.load(tmp_path / "file.pt", allow=allow)(x), model(x))


@pytest.mark.parametrize("wrong", [3, [4], None])
def test_what_allow_takes(wrong):
    with pytest.raises(dbrq.ConfigurationError, match="names of packages"):
        Allow(wrong)


GRAPHS = {
    "a function": ("call_function", "n", ("os.system",), ("true",), {}, {}),
    "a builtin": ("call_function", "n", ("eval",), ("1",), {}, {}),
    "a file": ("call_function", "n", ("torch.from_file",), ("x",), {}, {}),
    "an operator on files": ("call_function", "n", ("torch.ops.aten.from_file.default",), ("x",), {}, {}),
    "another library's operator": ("call_function", "n", ("torch.ops.mine.run.default",), (), {}, {}),
    "what makes functions": ("call_function", "n", ("operator.methodcaller",), ("x",), {}, {}),
    "a hidden attribute": ("call_function", "n", ("getattr",), (Ref("x"), "__class__"), {}, {}),
    "a hidden method": ("call_method", "n", "__reduce_ex__", (Ref("x"), 2), {}, {}),
    "code for a method": ("call_method", "n", "relu(); import os; x.relu", (Ref("x"),), {}, {}),
    "code for a tensor": ("get_attr", "n", "a;import os", (), {}, {}),
    "code for an argument": ("call_function", "n", ("torch.relu",), (Ref("x"),), {"a=1);print(": 2}, {}),
    "an object": ("call_function", "n", ("torch.relu",), (Reduced(),), {}, {}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_files_call_tensor_functions_only(name):
    assert problem_of([GRAPHS[name]], Allow().trusts)


def test_a_lowered_file_whose_graph_was_changed(tmp_path):
    model, x = quantized(nn.Sequential(nn.Linear(4, 4)))
    lowered = dbrq.lower(model, x, backend="onednn")
    lowered._data = [(op, name, ("os.system",) if op == "call_function" else target, args, kwargs, meta)
                     for op, name, target, args, kwargs, meta in lowered._data]  # fmt: skip
    file = file_of(lowered, tmp_path / "file.pt")
    with pytest.raises(dbrq.LoadError, match=r"graph calls os\.system"):
        dbrq.load(file)


def test_a_script_that_opens_files(tmp_path):
    class Saves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_file("x", False, 4) + x

    script = torch.jit.script(Saves())
    file = tmp_path / "file.pt"
    torch.jit.save(script, str(file), _extra_files={"dbrq.json": '{"format": "dbrq", "version": 2}'})
    with pytest.raises(dbrq.LoadError, match="opens files"):
        dbrq.load(file)
