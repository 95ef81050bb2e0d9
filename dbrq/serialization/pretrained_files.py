"""``save_pretrained`` of converted models: the folders that ``from_pretrained`` reads, without pickle."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from .._torch import ATTENTION
from ..errors import QuantizationError
from ..hidden_state import extend, state_of
from .described import describe
from .tensor_files import write

METHOD = "dbrq"  # in config.json
FORMAT = "dbrq.pretrained"
#: A name that transformers does not look for: it would make random weights where it does not know those of a file.
WEIGHTS = "int8.safetensors"
#: Arguments that change nothing here: there is one file, and it is safetensors.
_OF_NO_MATTER = ("is_main_process", "safe_serialization", "max_shard_size")


def offer_save_pretrained(model: nn.Module) -> None:
    """Put ours before each ``save_pretrained`` in ``model``: the class's own writes int8 names that nothing reads."""
    for path, module in list(model.named_modules()):
        if callable(getattr(module, "save_pretrained", None)):
            extend(module, _EXTENSIONS, path)


def _save_pretrained(
    module: nn.Module,
    previous: Callable | None,
    path: str,
    save_directory: str | os.PathLike,
    *args: Any,
    **options: Any,
) -> None:
    """Write config.json and int8.safetensors to a folder; ``dbrq.from_pretrained`` makes the model of them."""
    config: Any = getattr(module, "config", None)
    if path or state_of(module) is None or not callable(getattr(config, "save_pretrained", None)):
        raise QuantizationError(
            "save_pretrained writes a whole converted model of transformers", path=path, got=type(module).__name__,
            hint="dbrq.save(model, path) and dbrq.load keep any converted or lowered model",
        )  # fmt: skip
    asked = [name for name, value in options.items() if name not in _OF_NO_MATTER and value]
    if args or asked:
        raise QuantizationError(
            "save_pretrained of a converted model takes a folder, and no more", got=", ".join(asked) or repr(args),
            hint="save to a folder, and copy or upload that; the weights are those of the model",
        )  # fmt: skip
    if not options.get("is_main_process", True):
        return
    content, tensors = describe(module)
    folder = os.fspath(save_directory)
    os.makedirs(folder, exist_ok=True)
    label = {"format": FORMAT, "attention": getattr(config, ATTENTION, None), "transformers": _version(),
             "generates": _can_generate(module)}  # fmt: skip
    write(os.path.join(folder, WEIGHTS), {**label, "model": content}, tensors)
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    config.quantization_config = {"quant_method": METHOD}
    config.save_pretrained(folder)
    if label["generates"]:
        module.generation_config.save_pretrained(folder)  # type: ignore[operator, union-attr]


_EXTENSIONS = {"save_pretrained": _save_pretrained}


def _can_generate(module: Any) -> bool:
    return getattr(module, "generation_config", None) is not None and bool(module.can_generate())


def _version() -> str:
    import transformers

    return str(transformers.__version__)
