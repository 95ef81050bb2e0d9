"""What torch.onnx makes anew for each file, made once."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.onnx._internal.exporter import _registration


@pytest.fixture(scope="package", autouse=True)
def translations_made_once() -> Iterator[None]:
    """``torch.onnx.export`` parses the source of every translation that it knows, a quarter of what an export takes.
    Each export gets a table of its own still, to which it adds those of dbrq.
    """
    made = functools.cache(_registration.ONNXRegistry.from_torchlib)

    def from_torchlib(*args: Any, **kwargs: Any) -> _registration.ONNXRegistry:
        own = copy.copy(made(*args, **kwargs))
        own.functions = {target: list(found) for target, found in own.functions.items()}
        return own

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_registration.ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield
