"""Files of safetensors: tensors, and JSON in their header. They hold no code, and reading them runs none."""

from __future__ import annotations

import importlib
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError, QuantizationError
from .files import replacing

_HEADER = "dbrq"
_CHECKSUM = "dbrq.crc32"


def write(path: str | os.PathLike, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``content``, which is JSON, and ``tensors``.

    Raises:
        QuantizationError: safetensors is not installed, or does not take a tensor.
        OSError: the file cannot be written.
    """
    text = json.dumps({**content, "crc32": {name: _crc32(tensor) for name, tensor in tensors.items()}})
    metadata = {_HEADER: text, _CHECKSUM: str(zlib.crc32(text.encode())), "format": "pt"}
    save_file = _safetensors("torch").save_file
    with replacing(path) as unfinished:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
        except (KeyError, ValueError, _safetensors().SafetensorError) as error:
            raise QuantizationError(f"safetensors does not take the model's tensors: {error}") from error


def read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What ``write`` wrote; its checksums are compared.

    Raises:
        LoadError: the file is damaged, or not one of dbrq's.
        QuantizationError: safetensors is not installed.
    """
    name = os.fspath(path)
    again = "save it again with dbrq.save"
    package = _safetensors()
    try:
        with package.safe_open(name, "pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get(_HEADER)
            if text is None:
                raise LoadError("the file was not written by dbrq", got=name, hint=again)
            if str(zlib.crc32(text.encode())) != metadata.get(_CHECKSUM):
                raise LoadError("the file is damaged: the checksum of its header is another", got=name, hint=again)
            content = json.loads(text)
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (it is no dict)
    except (package.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise LoadError(f"the file cannot be read: {error}", got=name, hint=again) from error
    sums = content.pop("crc32", {})
    damaged = next(
        (key for key in {*sums, *tensors} if key not in tensors or sums.get(key) != _crc32(tensors[key])), None
    )
    if damaged is not None:
        raise LoadError(f"the file is damaged: the checksum of {damaged} is another", got=name, hint=again)
    return content, tensors


def is_one(path: str | os.PathLike) -> bool:
    """Whether a file looks like one of safetensors: the length of a header, and JSON."""
    with open(path, "rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= os.path.getsize(path)


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def _safetensors(part: str = "") -> Any:
    try:
        importlib.import_module("safetensors")
        return importlib.import_module(f"safetensors.{part}".rstrip("."))
    except ImportError as error:
        raise QuantizationError(
            "safetensors is not installed", expected="the package safetensors", hint="pip install dbrq[safetensors]"
        ) from error
