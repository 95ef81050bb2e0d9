"""What dbrq relies on of the private parts of torch.fx, TorchScript and torch.compile; as in test_torch.py."""

from __future__ import annotations

import logging
import operator
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dbrq import _torch
from dbrq.quiet import quiet, quietly

aten = torch.ops.aten


# Graphs


def test_erased_nodes_say_so() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    assert not _torch.is_erased(y)
    graph.erase_node(y)
    assert _torch.is_erased(y) and not _torch.is_erased(x)


def test_the_codegen_of_a_graph() -> None:
    codegen, graph = fx.graph.CodeGen(), fx.Graph()
    graph.set_codegen(codegen)
    assert _torch.codegen_of(graph) is codegen


def test_qualified_names_lead_back_to_functions() -> None:
    names = {
        torch.relu: "torch.relu", F.relu: "torch.nn.functional.relu", operator.getitem: "_operator.getitem",
        aten.add.Tensor: "torch.ops.aten.add.Tensor", _torch.assert_: "torch._assert", len: "len",
    }  # fmt: skip
    assert {function: _torch.qualified_name(function) for function in names} == names


def test_settings_of_sizes_hold_for_a_while() -> None:
    import torch.fx.experimental._config as config

    before = config.backed_size_oblivious
    with _torch.shape_settings(backed_size_oblivious=not before):
        assert config.backed_size_oblivious is not before
    assert config.backed_size_oblivious is before


def test_pytree() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    flat, spec = _torch.pytree.tree_flatten(tree)
    assert _torch.pytree.tree_leaves(tree)[1:] == [2, 3] == flat[1:] and isinstance(spec, _torch.pytree.TreeSpec)
    assert _torch.pytree.tree_unflatten(flat, spec)["b"] == (3,)
    assert _torch.pytree.tree_map(str, {"a": [1]}) == {"a": ["1"]}
    assert _torch.pytree.tree_map_only(int, lambda i: i + 1, [1, "x"]) == [2, "x"]
    paths = _torch.pytree.tree_flatten_with_path({"a": [1]})[0]
    assert len(paths) == 1 and paths[0][1] == 1 and [str(key) for key in paths[0][0]] == ["['a']", "[0]"]


# TorchScript


def test_schemas_by_name() -> None:
    schemas = _torch.schemas_of("aten::add")
    tensor = next(s for s in schemas if s.overload_name == "Tensor")
    assert [a.name for a in tensor.arguments] == ["self", "other", "alpha"] and tensor.arguments[2].kwarg_only
    assert all(
        s.arguments[0].alias_info.is_write for s in _torch.schemas_of("aten::add_") if s.overload_name == "Tensor"
    )
    assert any("out" in s.overload_name for s in schemas) and not _torch.schemas_of("aten::no_such_op")


@torch.jit._overload
def _overloaded(x: int) -> int: ...


@torch.jit._overload
def _overloaded(x: str) -> str: ...


def _overloaded(x):
    return x


def test_what_torchscript_takes_functions_for() -> None:
    assert _torch.find_builtin(torch.relu) == "aten::relu"
    assert _torch.find_builtin(test_pytree) is None
    assert _torch.script_name(F.relu) == "__torch__.torch.nn.functional.relu"
    assert F.max_pool2d in _torch.boolean_dispatched and F.relu not in _torch.boolean_dispatched
    assert _torch.script_overloads(_torch.script_name(_overloaded))  # torch forgets those that it has compiled
    assert not _torch.script_overloads(_torch.script_name(F.relu))
    torch.jit.frontend.get_jit_def(F.relu, "relu")


def test_optional_values_that_are_given() -> None:
    assert _torch.unwrap_optional(3) == 3 and _torch.unwrap_optional.__name__ == "_unwrap_optional"
    with pytest.raises(AssertionError):
        _torch.unwrap_optional(None)


def test_plans_of_methods_are_freed() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    scripted = quietly(torch.jit.script, Two())
    scripted(torch.ones(1))
    _torch.flush_plans(scripted.forward)
    assert scripted(torch.ones(1)).item() == 2


# torch.compile and torch.export


def test_the_flag_of_compiling() -> None:
    before = _torch.is_compiling_flag()
    assert before is False and not torch.compiler.is_compiling()
    _torch.set_is_compiling_flag(True)
    try:
        assert torch.compiler.is_compiling()
    finally:
        _torch.set_is_compiling_flag(before)
    assert not torch.compiler.is_compiling()


def test_a_skipped_function_is_not_compiled() -> None:
    def seen(x: Tensor) -> Tensor:
        return x + (2 if torch.compiler.is_compiling() else 1)

    def skipped(x: Tensor) -> Tensor:
        return inner(x) + (2 if torch.compiler.is_compiling() else 1)

    def inner(x: Tensor) -> Tensor:
        return x + (20 if torch.compiler.is_compiling() else 10)

    _torch.skip_when_compiling(skipped, "because")
    for function, expected in ((seen, 2), (skipped, 11)):
        assert torch.compile(lambda x, function=function: function(x), backend="eager")(torch.zeros(1)) == expected
    torch._dynamo.reset()


def test_importing_dbrq_does_not_import_the_compiler() -> None:
    code = "import sys, dbrq; print([m for m in sys.modules if m.startswith(('torch._dynamo', 'torch._inductor'))])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip().splitlines()[-1] == "[]"


def test_the_compiler_is_loaded_on_many_threads() -> None:
    threads = [threading.Thread(target=_torch.load_compiler) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "torch._dynamo" in sys.modules


def test_errors_and_loggers_of_export() -> None:
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(3)

    with pytest.raises(RuntimeError) as caught:  # so ERRORS_OF_CODE has it
        torch.export.export(Fixed(), (torch.ones(3),), dynamic_shapes=({0: torch.export.Dim("n")},), strict=False)
    assert type(caught.value).__module__ == "torch._dynamo.exc"
    assert all(name in logging.root.manager.loggerDict for name in _torch.EXPORT_LOGGERS)


def test_the_lock_of_compiling_is_held() -> None:
    free: list[bool] = []

    def attempt() -> None:
        free.append(_torch.compile_lock().acquire(blocking=False))

    with _torch.compile_lock(), _torch.compile_lock():  # as often as one thread wants
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert free == [False]


def test_what_keeps_dynamo_out_comes_off() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    assert _torch.innermost_function(torch.compiler.disable(function)) is function
    assert _torch.innermost_function(function) is function


def test_the_cpp_compiler() -> None:
    assert issubclass(_torch.no_cpp_compiler(), RuntimeError)
    if any(map(shutil.which, ("g++", "clang++"))):
        assert _torch.cpp_compiler()


def test_settings_of_inductor() -> None:
    from torch._inductor import config

    settings = {"freezing": True, "cpp_wrapper": True, "fallback_random": True, "joint_custom_post_pass": (print,)}
    assert _torch.inductor_late_passes() == ()
    with _torch.inductor_settings(settings):
        assert {name: getattr(config, name) for name in settings} == settings
        assert _torch.inductor_late_passes() == (print,)
        on_another: list[bool] = []
        thread = threading.Thread(target=lambda: on_another.append(config.freezing))
        thread.start()
        thread.join()
        assert on_another == [False]  # settings are a thread's own
    assert config.freezing is False


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")
def test_a_compiled_graph_and_its_code() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mul.Tensor, (x, 3)),))
    results: list[Any] = []
    with torch.no_grad(), quiet():
        run = _torch.compile_graph(fx.GraphModule(nn.Module(), graph), [torch.ones(4)], results.append)
        (y,) = run(torch.ones(4))
    assert torch.equal(y, torch.full((4,), 3.0)) and len(results) == 1 and "cpp" in results[0].source_code
