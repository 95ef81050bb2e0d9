"""``from_pretrained``: converted models of transformers from their folders, without data and without calibration."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from .._torch import ATTENTION
from ..errors import ERRORS_OF_CODE, LoadError, QuantizationError, nearest
from ..workflow import restored
from .described import Described
from .pretrained_files import FORMAT, METHOD, WEIGHTS
from .tensor_files import read


def from_pretrained(folder: str | os.PathLike, *, allow: Sequence[type[nn.Module]] = ()) -> Any:
    """A converted model from the folder that its ``save_pretrained`` wrote: config.json and int8.safetensors.

    transformers makes the model that the configuration describes, and its int8 weights, ranges and decisions are put
    into it. Nothing of the folder is run: classes are those of transformers, or the caller's.

    Args:
        folder: a path.
        allow: classes that config.json may name beside those of transformers.

    Returns:
        The converted model, in eval mode.

    Raises:
        LoadError: the folder is not one of a converted model, or damaged, or was written with other versions.
        FileNotFoundError: there is no such folder, or a file is missing in it.

    >>> quantized.save_pretrained("folder")  # doctest: +SKIP
    >>> quantized = from_pretrained("folder")  # doctest: +SKIP
    >>> from_pretrained("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'nowhere/config.json'
    """
    name = os.fspath(folder)
    settings = _settings(name)
    content, tensors = read(_present(name, WEIGHTS))
    if content.get("format") != FORMAT or not isinstance(content.get("model"), dict):
        raise LoadError("the weights are not those of a converted model", got=os.path.join(name, WEIGHTS),
                        hint="dbrq.load reads the files of dbrq.save")  # fmt: skip
    cls = _class(settings, allow)
    _warn_of_versions(content)
    try:
        return restored(_made(cls, name, content), Described(content["model"], tensors))
    except ERRORS_OF_CODE as error:
        if isinstance(error, QuantizationError):
            raise
        raise LoadError(f"the description of the model is damaged: {error!r}", got=name) from error


def _present(folder: str, file: str) -> str:
    path = os.path.join(folder, file)
    if not os.path.exists(path):
        raise FileNotFoundError(2, os.strerror(2), path)
    return path


def _settings(folder: str) -> dict[str, Any]:
    """What config.json says, if it is that of a converted model."""
    path = _present(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"the configuration cannot be read: {error}", got=path) from error
    if not isinstance(settings, dict) or (settings.get("quantization_config") or {}).get("quant_method") != METHOD:
        raise LoadError(
            "the folder does not hold a model that dbrq converted", got=path,
            hint="from_pretrained of transformers reads float models; quantize one with dbrq.quantize",
        )  # fmt: skip
    return settings


def _class(settings: dict[str, Any], allow: Sequence[type[nn.Module]]) -> Any:
    """The class that config.json names: one of ``allow``, or of transformers."""
    import transformers

    names = settings.get("architectures")
    wanted = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    for cls in allow:
        if cls.__name__ == wanted:
            return cls
    found = getattr(transformers, wanted, None) if wanted is not None and wanted.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        known = [each for each in dir(transformers) if isinstance(each, str)] if wanted else []
        raise LoadError(
            "config.json names a class that transformers does not have", got=repr(wanted or names),
            expected="a model of transformers, or one of allow",
            hint=f"if you trust the class: allow=({wanted},). Else: {nearest(str(wanted), known)}",
        )  # fmt: skip
    return found


def _made(cls: Any, folder: str, content: dict[str, Any]) -> nn.Module:
    """The float model that the configuration describes. Its weights are never used."""
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights

    config = cls.config_class.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if content.get("attention") in ("eager", "sdpa"):
        setattr(config, ATTENTION, content["attention"])
    try:
        with no_init_weights():
            model = cls(config).float()
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise LoadError(f"the model cannot be made from its configuration: {error}", got=folder) from error
    if content.get("generates"):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _warn_of_versions(content: dict[str, Any]) -> None:
    import transformers

    saved, here = content.get("transformers"), transformers.__version__
    if saved != here:
        warnings.warn(
            f"dbrq: the model was saved with transformers {saved}, and here is {here}; where its code is another, ops "
            "run in float, each with a warning",
            stacklevel=3,
        )
