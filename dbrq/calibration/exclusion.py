"""What the caller keeps in float: modules by the pattern of their path, or by class, and all that is inside them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import ConfigurationError, nearest
from ..record.record import SeenOp


class Exclusion:
    """Which modules stay float, and the words that say so in the report.

    Args:
        exclude: patterns of module paths, as ``fnmatch`` has them, and classes; one alone need not be in a list.
            ``"*.lm_head"`` matches a ``lm_head`` of the root too. ``*`` stands for dots as well.
        modules: path -> module, for every name that a module has.

    Raises:
        ConfigurationError: one of them matches no module, or is neither a pattern nor a class of modules.

    >>> Exclusion("*.fc", {"": nn.Identity(), "fc": nn.Linear(1, 1)}).reasons
    {'fc': "excluded: '*.fc'"}
    """

    def __init__(self, exclude: Any, modules: Mapping[str, nn.Module]) -> None:
        self.reasons: dict[str, str] = {}
        for entry in _entries(exclude):
            found = {id(module) for path, module in modules.items() if _matches(entry, path, module)}
            if not found:
                raise _no_match(entry, modules)
            reason = f"excluded: {entry!r}" if isinstance(entry, str) else f"excluded: {entry.__qualname__}"
            for path, module in modules.items():
                if id(module) in found:  # by whichever of its names it is run
                    self.reasons.setdefault(path, reason)

    def reason(self, op: SeenOp) -> str:
        """Why ``op`` stays float, "" if nothing here says so."""
        path = op.module if op.module is not None else op.owner
        while self.reasons:
            if path in self.reasons:
                return self.reasons[path]
            if not path:
                break
            path = path.rpartition(".")[0]
        return ""


def _entries(exclude: Any) -> Iterable[str | type[nn.Module]]:
    entries = (exclude,) if isinstance(exclude, (str, type)) else exclude
    if not isinstance(entries, Iterable):
        raise _wrong(exclude)
    entries = tuple(entries)
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise _wrong(entry)
    return entries


def _wrong(entry: Any) -> ConfigurationError:
    return ConfigurationError(
        "exclude takes patterns of module paths, and classes of modules", got=repr(entry),
        expected='such as ["*.lm_head", nn.Embedding]',
        hint="functions and methods stay float by qconfig_mapping.set_object_type(F.linear, None)",
    )  # fmt: skip


def _matches(entry: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    return fnmatch.fnmatchcase(path, entry) or (entry.startswith("*.") and fnmatch.fnmatchcase(f".{path}", entry))


def _no_match(entry: str | type[nn.Module], modules: Mapping[str, nn.Module]) -> ConfigurationError:
    if isinstance(entry, str):
        return ConfigurationError(
            f"exclude has the pattern {entry!r}, which matches no module of the model",
            expected="a pattern of paths as model.named_modules() has them", got=entry, hint=nearest(entry, modules),
        )  # fmt: skip
    names = {type(module).__qualname__ for module in modules.values()}
    return ConfigurationError(
        f"exclude has the class {entry.__qualname__}, and the model has no module of it",
        expected="a class of one of the model's modules", got=f"{entry.__module__}.{entry.__qualname__}",
        hint=nearest(entry.__qualname__, names),
    )  # fmt: skip
