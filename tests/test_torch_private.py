"""No other file of dbrq than ``_torch.py`` leans on torch's private parts, and each that this has has a test."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbrq import _torch
from tests import ROOT

#: What ``nn.Module`` keeps and calls; tested in test_torch.py.
OF_MODULES = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks",
              "_load_state_dict_pre_hooks", "_apply", "_load_from_state_dict"}  # fmt: skip
#: What TorchScript compiles, where it is.
IN_SCRIPTS = {"kernels/script/functions.py": {"_int_mm"}}
#: Python's own.
OF_PYTHON = {"_getframe", "_fields", "_Unpickler"}
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
FILES = sorted((ROOT / "dbrq").rglob("*.py"))
TESTS = sorted(Path(__file__).parent.glob("test_torch*.py"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def _own() -> set[str]:
    """Private attributes that dbrq's own classes have."""
    found: set[str] = set()
    for node in (node for file in FILES for node in ast.walk(_tree(file))):
        if isinstance(node, ast.ClassDef):
            found |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            found |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
            found.add(node.attr)
    return set(filter(_is_private, found))


def _private_parts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names of torch in a file: (line, name)."""
    of_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            of_torch |= {alias.asname or alias.name for alias in node.names}
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if _is_private(part))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    of_torch.add((alias.asname or alias.name).split(".")[0])
                    yield from ((node.lineno, part) for part in alias.name.split(".") if _is_private(part))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _root(node) in of_torch or node.attr not in _own():
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for given in node.args if name in _BY_NAME else ():
                if isinstance(given, ast.Constant) and isinstance(given.value, str) and _is_private(given.value):
                    yield node.lineno, given.value


def test_no_other_file_has_private_parts_of_torch() -> None:
    found = []
    for file in FILES:
        path = file.relative_to(ROOT / "dbrq").as_posix()
        allowed = OF_MODULES | OF_PYTHON | IN_SCRIPTS.get(path, set())
        parts = () if path == "_torch.py" else _private_parts(_tree(file))
        found += [f"{path}:{line}: {name}" for line, name in parts if name not in allowed]
    assert not found, "move it to dbrq/_torch.py, with a test here"


@pytest.mark.parametrize("code", [
    "import torch\ntorch._C._len()", "import torch.utils._pytree as p", "from torch.overrides import _pop",
    "from torch._ops import OpOverload", "from torch import nn\nnn.modules.module._global_hooks", "tensor._version",
    "f().untyped_storage()._cdata", "from operator import attrgetter\nattrgetter('_erased')",
])  # fmt: skip
def test_private_parts_are_found(code: str) -> None:
    assert list(_private_parts(ast.parse(code)))


def test_each_name_has_a_test() -> None:
    names = {node.target.id for node in _tree(ROOT / "dbrq/_torch.py").body if isinstance(node, ast.AnnAssign)}
    for node in _tree(ROOT / "dbrq/_torch.py").body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    names |= set(_torch.__all__)
    nodes = (node for file in TESTS for node in ast.walk(_tree(file)))
    tested = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _root(node) == "_torch"}
    assert {name for name in names if not name.startswith("_")} <= tested
