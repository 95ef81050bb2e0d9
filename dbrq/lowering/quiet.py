"""torch.jit without the announcements of its end, which it gives at every call."""

from __future__ import annotations

import torch
from torch import nn
from torch.jit import _recursive
from torch.jit._script import wrap_cpp_module

# What stands behind torch.jit.script, save and load. Filters of warnings are the process's: setting one, even for a
# moment, takes warnings from other threads, so these go around what warns instead. (quiet.py has one that is not.)


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    """``torch.jit.script(module)``."""
    kind = _recursive.get_module_concrete_type(module)
    return _recursive.create_script_module_impl(module, kind, _recursive.infer_methods_to_compile)


def as_bytes(module: torch.jit.ScriptModule) -> bytes:
    """A file of ``torch.jit.save``."""
    return module.save_to_buffer()


def from_bytes(file: bytes) -> torch.jit.ScriptModule:
    """``torch.jit.load`` of a file, onto the CPU."""
    unit = torch._C.CompilationUnit()
    return wrap_cpp_module(torch._C.import_ir_module_from_buffer(unit, file, torch.device("cpu"), {}, False))
