"""Finding libdnnl and calling it: the C API's functions with their types, statuses as exceptions.

The library is any build of oneDNN 3.2 or newer for CPUs with OpenMP, such as PyPI's ``onednn-cpu-gomp``. Enumerations
and structures are those of oneDNN's headers (dnnl_types.h, dnnl_common_types.h), whose C ABI is stable in version 3.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...errors import OneDNNError

#: Where to find the library, if not in the usual places.
PATH_VARIABLE = "DBRQ_LIBDNNL"
_NAMES = ("libdnnl.so.3", "libdnnl.so")
_OLDEST = (3, 2)

_STATUSES = {
    1: "dnnl_out_of_memory",
    2: "dnnl_invalid_arguments",
    3: "dnnl_unimplemented",
    4: "dnnl_last_impl_reached",
    5: "dnnl_runtime_error",
    6: "dnnl_not_required",
    7: "dnnl_invalid_graph",
    8: "dnnl_invalid_graph_op",
    9: "dnnl_invalid_shape",
    10: "dnnl_invalid_data_type",
}
_ISAS = {
    0x0: "default", 0x1: "sse41", 0x3: "avx", 0x7: "avx2", 0xF: "avx2_vnni", 0x1F: "avx2_vnni_2", 0x27: "avx512_core",
    0x67: "avx512_core_vnni", 0xE7: "avx512_core_bf16", 0x1EF: "avx512_core_fp16", 0xFEF: "avx512_core_amx",
    0x1FEF: "avx512_core_amx_fp16",
}  # fmt: skip


class Unimplemented(OneDNNError):
    """This build of oneDNN has no such primitive for this CPU, these types and these layouts."""


class ExecArg(ctypes.Structure):
    """``dnnl_exec_arg_t``: an argument's number and its memory object."""

    _fields_ = [("arg", c_int), ("memory", c_void_p)]


_DIMS = POINTER(c_int64)
_HANDLE, _OUT = c_void_p, POINTER(c_void_p)
_ATTRIBUTES, _ENGINE = _HANDLE, _HANDLE

#: Function -> argument types. All return a status, but for those in ``_RETURNS``.
_SIGNATURES: dict[str, list[Any]] = {
    "engine_create": [_OUT, c_int, c_size_t],
    "engine_destroy": [_ENGINE],
    "stream_create": [_OUT, _ENGINE, c_uint],
    "stream_wait": [_HANDLE],
    "stream_destroy": [_HANDLE],
    "memory_desc_create_with_strides": [_OUT, c_int, _DIMS, c_int, _DIMS],
    "memory_desc_create_with_tag": [_OUT, c_int, _DIMS, c_int, c_int],
    "memory_desc_create_submemory": [_OUT, _HANDLE, _DIMS, _DIMS],
    "memory_desc_clone": [_OUT, _HANDLE],
    "memory_desc_destroy": [_HANDLE],
    "memory_desc_equal": [_HANDLE, _HANDLE],
    "memory_desc_get_size": [_HANDLE],
    "memory_create": [_OUT, _HANDLE, _ENGINE, c_void_p],
    "memory_set_data_handle": [_HANDLE, c_void_p],
    "memory_destroy": [_HANDLE],
    "primitive_attr_create": [_OUT],
    "primitive_attr_destroy": [_ATTRIBUTES],
    "primitive_attr_set_scratchpad_mode": [_ATTRIBUTES, c_int],
    "primitive_attr_set_scales_mask": [_ATTRIBUTES, c_int, c_int],
    "primitive_attr_set_zero_points_mask": [_ATTRIBUTES, c_int, c_int],
    "primitive_attr_set_post_ops": [_ATTRIBUTES, _HANDLE],
    "post_ops_create": [_OUT],
    "post_ops_destroy": [_HANDLE],
    "post_ops_append_sum": [_HANDLE, c_float, c_int32, c_int],
    "post_ops_append_eltwise": [_HANDLE, c_int, c_float, c_float],
    "post_ops_append_binary": [_HANDLE, c_int, _HANDLE],
    "primitive_desc_query": [_HANDLE, c_int, c_int, c_void_p],
    "primitive_desc_query_md": [_HANDLE, c_int, c_int],
    "primitive_desc_next_impl": [_HANDLE],
    "primitive_desc_destroy": [_HANDLE],
    "primitive_create": [_OUT, _HANDLE],
    "primitive_destroy": [_HANDLE],
    "primitive_execute": [_HANDLE, _HANDLE, c_int, POINTER(ExecArg)],
    "reorder_primitive_desc_create": [_OUT, _HANDLE, _ENGINE, _HANDLE, _ENGINE, _ATTRIBUTES],
    "concat_primitive_desc_create": [_OUT, _ENGINE, _HANDLE, c_int, c_int, POINTER(c_void_p), _ATTRIBUTES],
    "binary_primitive_desc_create": [_OUT, _ENGINE, c_int, _HANDLE, _HANDLE, _HANDLE, _ATTRIBUTES],
    "convolution_forward_primitive_desc_create":
        [_OUT, _ENGINE, c_int, c_int, *[_HANDLE] * 4, *[_DIMS] * 4, _ATTRIBUTES],
    "deconvolution_forward_primitive_desc_create":
        [_OUT, _ENGINE, c_int, c_int, *[_HANDLE] * 4, *[_DIMS] * 4, _ATTRIBUTES],
    "eltwise_forward_primitive_desc_create":
        [_OUT, _ENGINE, c_int, c_int, _HANDLE, _HANDLE, c_float, c_float, _ATTRIBUTES],
    "softmax_forward_primitive_desc_create": [_OUT, _ENGINE, c_int, c_int, _HANDLE, _HANDLE, c_int, _ATTRIBUTES],
    "pooling_forward_primitive_desc_create":
        [_OUT, _ENGINE, c_int, c_int, _HANDLE, _HANDLE, *[_DIMS] * 5, _ATTRIBUTES],
    "layer_normalization_forward_primitive_desc_create":
        [_OUT, _ENGINE, c_int, _HANDLE, _HANDLE, _HANDLE, c_float, c_uint, _ATTRIBUTES],
    "matmul_primitive_desc_create": [_OUT, _ENGINE, *[_HANDLE] * 4, _ATTRIBUTES],
    "resampling_forward_primitive_desc_create":
        [_OUT, _ENGINE, c_int, c_int, POINTER(c_float), _HANDLE, _HANDLE, _ATTRIBUTES],
    "get_effective_cpu_isa": [],
    "set_primitive_cache_capacity": [c_int],
}  # fmt: skip
_RETURNS = {"memory_desc_get_size": c_size_t, "primitive_desc_query_md": c_void_p}
_PLAIN = frozenset({"memory_desc_equal", "memory_desc_get_size", "primitive_desc_query_md", "get_effective_cpu_isa"})


class _Version(ctypes.Structure):
    _fields_ = [
        ("major", c_int), ("minor", c_int), ("patch", c_int), ("hash", c_char_p), ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    ]  # fmt: skip


class Library:
    """libdnnl, with an engine for the CPU and a stream on it.

    Functions are called by their names without ``dnnl_``; a status other than success raises ``OneDNNError`` with
    oneDNN's name for it. Engine and stream serve all threads: the CPU stream has no state of its own.

    Attributes:
        looked_at: the places where it was looked for, itself the last.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.looked_at: tuple[Place, ...] = ()
        self.dll = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        for name, types in _SIGNATURES.items():
            function = getattr(self.dll, f"dnnl_{name}")
            function.argtypes, function.restype = types, _RETURNS.get(name, c_int)
            self._functions[name] = function
        self.dll.dnnl_version.restype = POINTER(_Version)
        found = self.dll.dnnl_version().contents
        self.version: tuple[int, int, int] = (found.major, found.minor, found.patch)
        if self.version[:2] < _OLDEST or found.major != _OLDEST[0]:
            raise OneDNNError(
                f"it is oneDNN {'.'.join(map(str, self.version))}", expected=_EXPECTED, got=path, hint=_HINT
            )
        if found.cpu_runtime != _OPENMP:
            raise OneDNNError(
                "it was not built with OpenMP, so it would not share torch's threads", got=path, hint=_HINT
            )
        #: Untyped, for arguments that are ctypes objects already: half a microsecond less each.
        self.execute = self.dll["dnnl_primitive_execute"]
        self.set_handle = self._functions["memory_set_data_handle"]
        # Its own cache takes layouts that differ in strides of axes of size 1 for equal, and hands out the kernel made
        # for the other one. binding.py keeps primitives instead.
        self.call("set_primitive_cache_capacity", 0)
        self.engine = self.make("engine_create", _CPU, 0)
        self.stream = self.make("stream_create", self.engine, 1)

    @property
    def isa(self) -> str:
        """The instruction set that kernels are made for."""
        found = self.call("get_effective_cpu_isa")
        return _ISAS.get(found, hex(found))

    def call(self, name: str, *args: Any) -> Any:
        result = self._functions[name](*args)
        if name in _PLAIN:
            return result
        if result:
            raise failure(f"dnnl_{name}", result)
        return None

    def make(self, name: str, *args: Any) -> c_void_p:
        """Call a function that creates something; returns its handle."""
        handle = c_void_p()
        self.call(name, byref(handle), *args)
        return handle


_CPU, _OPENMP = 1, 2
_EXPECTED = f"oneDNN of version {_OLDEST[0]}, from {'.'.join(map(str, _OLDEST))} on, built for CPUs with OpenMP"
_HINT = f"pip install dbrq[onednn], or let the environment variable {PATH_VARIABLE} hold the path of libdnnl.so.3"


def failure(function: str, status: int) -> OneDNNError:
    """The exception for a status."""
    name = _STATUSES.get(status, f"status {status}")
    return (Unimplemented if status == 3 else OneDNNError)(f"{function} failed: {name}")


@dataclass(frozen=True)
class Place:
    """Where libdnnl was looked for.

    Attributes:
        origin: why there, in words.
        path: a file, or a name that the loader was asked for.
        problem: why it does not serve; "" for the one that does.
    """

    origin: str
    path: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.origin}): {self.problem or 'serves'}"


def _folders() -> Iterator[tuple[str, Path]]:
    """Folders that may hold the library, and why."""
    yield "sys.prefix", Path(sys.prefix) / "lib"
    yield "site-packages of this Python", Path(sysconfig.get_path("platlib")).parents[1]
    yield "sys.base_prefix", Path(sys.base_prefix) / "lib"
    for entry in map(Path, sys.path):  # of layered environments, and of the user
        if entry.name in ("site-packages", "dist-packages") and len(entry.parents) > 1:
            yield "beside a site-packages on sys.path", entry.parents[1]


def _packaged() -> Iterator[tuple[str, Path]]:
    """Files of installed distributions that are the library by name: PyPI's ``onednn-cpu-gomp``, and others."""
    for distribution in metadata.distributions():
        record = distribution.read_text("RECORD") or distribution.read_text("installed-files.txt") or ""
        if "libdnnl.so" not in record:  # most are long
            continue
        origin = f"package {distribution.metadata['Name']}"
        files = [file for file in distribution.files or () if file.name in _NAMES]
        for file in sorted(files, key=lambda file: _NAMES.index(file.name)):
            recorded = Path(str(distribution.locate_file(file)))
            # pip install --target moves lib, and the record does not say so.
            moved = Path(str(distribution.locate_file("lib"))) / file.name
            yield origin, moved if moved.exists() and not recorded.exists() else recorded


def _places() -> Iterator[Place]:
    """Where to look, in order; with a problem where nothing is."""
    given = os.environ.get(PATH_VARIABLE)
    if given:
        path = Path(given)
        if not path.is_dir():
            yield Place(PATH_VARIABLE, given)
        else:
            yield from _in_folder(PATH_VARIABLE, path)
        return
    seen: set[Path] = set()
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    named = (("LD_LIBRARY_PATH", Path(folder)) for folder in searched if folder)
    for origin, folder in _folders():
        if folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield from _in_folder(origin, folder)
    for origin, file in _packaged():
        if file.parent.resolve() not in seen:
            yield Place(origin, str(file), "" if file.exists() else "the file is not there")
    for origin, folder in named:
        if folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield from _in_folder(origin, folder)
    for name in _NAMES:
        yield Place("the dynamic loader", name)


def _in_folder(origin: str, folder: Path) -> Iterator[Place]:
    found = [folder / name for name in _NAMES if (folder / name).exists()]
    if not found:
        problem = f"no such file, and no {_NAMES[1]} there" if folder.is_dir() else "there is no such folder"
        yield Place(origin, str(folder / _NAMES[0]), problem)
    for file in found:
        yield Place(origin, str(file))


def search() -> tuple[Library | None, tuple[Place, ...]]:
    """The first library that serves, and all places looked at until then, with what is wrong with the others.

    torch is imported first, so that both use the OpenMP runtime that torch brings.
    """
    assert torch.__version__
    looked_at = []
    for place in _places():
        found, problem = (None, place.problem) if place.problem else _loaded(place.path)
        looked_at.append(dataclasses.replace(place, problem=problem))
        if found is not None:
            return found, tuple(looked_at)
    return None, tuple(looked_at)


def _loaded(path: str) -> tuple[Library | None, str]:
    """The library at ``path``, or why it does not serve."""
    try:
        return Library(path), ""
    except OSError as error:
        return None, str(error)
    except AttributeError as error:
        return None, f"it is no oneDNN of version 3: {error}"
    except OneDNNError as error:
        return None, error.message


@functools.cache
def library() -> Library:
    """libdnnl, loaded once.

    Raises:
        OneDNNError: it is not there, or not one that serves; says where it was looked for.
    """
    found, looked_at = search()
    if found is None:
        raise OneDNNError(
            "the onednn backend needs libdnnl, which was not found", expected=_EXPECTED,
            got="".join(f"\n    {place}" for place in looked_at), hint=_HINT,
        )  # fmt: skip
    found.looked_at = looked_at
    return found
