"""Files of strangers: reading one runs no code of its author, and what is refused is named."""

from __future__ import annotations

import enum
import io
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dbrq
from dbrq.lowering.graph_data import Ref
from dbrq.serialization.allowed import Allow, Refused
from dbrq.serialization.scripts import check_script, is_script
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


# Pickles written by hand: what objects of Python do not come to


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def dict_of(**items: bytes) -> bytes:
    return b"}" + b"".join(text(key) + value + b"s" for key, value in items.items())


def call(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + b"R"


def made(cls: bytes, *args: bytes) -> bytes:
    return cls + tuple_of(*args) + b"\x81"


GETATTR, PARTIAL = named("builtins", "getattr"), named("functools", "partial")
APPLY = named("dbrq.hidden_state", "_apply")
HOLDER = made(named("dbrq.serialization.plain", "Writer"))


def other_name(function: bytes) -> bytes:
    """A partial that says it is a class that may be called."""
    state = tuple_of(
        function, tuple_of(), b"}", dict_of(__module__=text("collections"), __qualname__=text("OrderedDict"))
    )
    return call(PARTIAL, function) + state + b"b"


BY_HAND: dict[str, Callable[[str], bytes]] = {
    "the class of a function": lambda p: named("dbrq", "save.__class__"),
    "the globals of a function": lambda p: named("dbrq.hidden_state", "_apply.__globals__"),
    "a module inside of a module": lambda p: made(named("dbrq.serialization.files", "os.system"), text(p)),
    "a class by the name of another": lambda p: made(named("dbrq.serialization.models", "zipfile.ZipFile"), text(p)),
    "the name of another": lambda p: call(other_name(APPLY), text(p)),
    "getattr with a name": lambda p: call(other_name(GETATTR), APPLY, text("__globals__")),
    "getattr of a hidden name": lambda p: call(GETATTR, named("torch.nn.modules.linear", "Linear"), text("__init__")),
    "a bound constructor": lambda p: call(PARTIAL, named(__name__, "Downloads"), text(p)),
    "append": lambda p: HOLDER + dict_of(append=PARTIAL) + b"b" + text(p) + b"a",
    "a hidden attribute": lambda p: HOLDER + dict_of(__setstate__=PARTIAL) + b"b" + text(p) + b"b",
    "a hidden slot": lambda p: HOLDER + tuple_of(b"N", dict_of(__setstate__=PARTIAL)) + b"b",
    "what evaluates": lambda p: made(named("sympy.functions.elementary.trigonometric", "sin"), text(p)),
    "a program of numpy's": lambda p: call(named("numpy.f2py.__main__", "main")),
    "a forward": lambda p: made(named("torch.nn.modules.linear", "Linear"))
    + dict_of(forward=named(__name__, "Downloads")) + b"b",
    "a state of another kind": lambda p: made(named("dbrq.lowering.onednn.model", "OneDNNModel"))
    + made(named("torch.nn.modules.container", "ModuleDict")) + b"b",
    "copyreg": lambda p: b"\x82\x01",
}  # fmt: skip


@pytest.mark.parametrize("attack", BY_HAND)
def test_pickles_by_hand_are_refused(attack, tmp_path):
    import sympy

    assert sympy  # torch imports it in time
    touched = tmp_path / "touched"
    code = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    pickled = b"\x80\x02" + BY_HAND[attack](code) + b"."
    with pytest.raises(Refused):
        pickle_for(Allow()).load(io.BytesIO(pickled))
    assert not touched.exists()


class Base:
    def __setstate__(self, state: dict) -> None:
        Path(state["path"]).touch()


class Derived(Base):
    pass


def test_what_a_class_does_by_its_parents_counts():
    with pytest.raises(Refused, match="Derived"):
        Allow().find(f"{__name__}.Derived")


def test_bytes_before_the_archive(tmp_path):
    model, _ = quantized(nn.Sequential(nn.Linear(4, 4)))
    dbrq.save(model, tmp_path / "file.pt")
    (tmp_path / "other.pt").write_bytes(b"XXXX" + (tmp_path / "file.pt").read_bytes())
    with pytest.raises(dbrq.LoadError, match="another kind"):
        dbrq.load(tmp_path / "other.pt")


@pytest.mark.parametrize("line", [
    'return getattr(torch, "save")(x, "y")', "t = torch\n  return t.save(x, 1)", "return (torch.save)(x)",
    "return torch.\\\nsave(x)", 'return getattr(torch, "sa\\x76e")(x)', "return ops.image.write_file(x)",
])  # fmt: skip
@pytest.mark.parametrize("folder", ["x/code", "x/CODE"])
def test_scripts_that_name_operators_on_files(line, folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr(f"{folder}/__torch__.py", f"def forward(self, x):\n  {line}\n")
        assert is_script(archive.namelist())
    with zipfile.ZipFile(tmp_path / "file") as archive, pytest.raises(Refused):
        check_script(archive)


def test_two_records_of_one_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("x/code/a.py", "")
        archive.writestr("x/CODE/a.py", "")
    with zipfile.ZipFile(tmp_path / "file") as archive, pytest.raises(Refused, match="same name"):
        check_script(archive)


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


class Colour(enum.IntEnum):
    RED = 1


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
    "a member of an enum": ("call_function", "n", ("torch.add",), (Ref("x"), Colour.RED), {}, {}),
    "an object as a key": ("call_function", "n", ("torch.add",), ({Colour.RED: 1},), {}, {}),
    "an object": ("call_function", "n", ("torch.relu",), (Reduced(),), {}, {}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_files_call_tensor_functions_only(name):
    assert problem_of([GRAPHS[name]], Allow().trusts)


def test_a_lowered_file_whose_graph_was_changed(tmp_path):
    model, x = quantized(nn.Sequential(nn.Linear(4, 4)))
    lowered = dbrq.lower(model, x, backend="onednn")
    graph = dbrq.lowered_form(lowered)
    graph._data = [(op, name, ("os.system",) if op == "call_function" else target, args, kwargs, meta)
                     for op, name, target, args, kwargs, meta in graph._data]  # fmt: skip
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
    with pytest.raises(dbrq.LoadError, match="may open files"):
        dbrq.load(file)
