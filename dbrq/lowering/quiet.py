"""torch.jit without its announcements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.jit import _recursive
from torch.jit._script import wrap_cpp_module


def quietly(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """torch announces the end of torch.jit at every call of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        return function(*args, **kwargs)


# What stands behind torch.jit.script, save and load. Filters of warnings are the process's: setting one, even for a
# moment, takes warnings from other threads, so these go around what warns instead.


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    """``torch.jit.script(module)``."""
    kind = _recursive.get_module_concrete_type(module)
    return _recursive.create_script_module_impl(module, kind, _recursive.infer_methods_to_compile)


def as_bytes(module: torch.jit.ScriptModule) -> bytes:
    """A file of ``torch.jit.save``."""
    return module.save_to_buffer()


def from_bytes(file: bytes) -> torch.jit.ScriptModule:
    """``torch.jit.load`` of a file, onto the CPU."""
    read: Any = torch._C.import_ir_module_from_buffer  # which torch's stubs declare otherwise
    return wrap_cpp_module(read(torch._C.CompilationUnit(), file, torch.device("cpu"), {}, False))
