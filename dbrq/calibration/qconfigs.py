"""What a ``QConfigMapping`` says about one op, with the rules of ``torch.ao.quantization``."""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping
from torch.nn.utils.parametrize import type_before_parametrizations

from ..errors import ConfigurationError, nearest
from ..kernels.ranges import by_row
from ..mappings import FUNCTIONS, OpRow
from ..record.record import Record, SeenOp
from .exclusion import Exclusion
from .observers import default_qconfig_mapping

_INT8 = (torch.quint8, torch.qint8, torch.uint8, torch.int8)


def as_mapping(qconfig_mapping: Any) -> QConfigMapping:
    """None, a ``QConfig`` or a ``QConfigMapping`` as a mapping; the user's object is returned as it is, never written
    to.
    """
    if qconfig_mapping is None:
        return default_qconfig_mapping()
    if isinstance(qconfig_mapping, QConfigMapping):
        return qconfig_mapping
    if isinstance(qconfig_mapping, QConfig):
        return QConfigMapping().set_global(qconfig_mapping)
    raise ConfigurationError(
        "qconfig_mapping is of a type that says nothing about ops",
        expected="None, torch.ao.quantization.QConfig or QConfigMapping",
        got=type(qconfig_mapping).__name__,
    )


def kind(qconfig: QConfig | None) -> tuple[str, str]:
    """("static" | "dynamic" | "weight_only", "") for a qconfig, or ("", why it cannot be used)."""
    if qconfig is None:
        return "", "its qconfig is None"
    activation, weight = qconfig.activation(), qconfig.weight()
    if getattr(weight, "dtype", None) not in (*_INT8, torch.quint4x2):
        return "", f"its qconfig asks for {getattr(weight, 'dtype', None)} weights, and kernels take int8"
    dtype = getattr(activation, "dtype", None)
    activation_scheme = getattr(activation, "qscheme", torch.per_tensor_affine)
    dynamic = getattr(activation, "is_dynamic", False)
    if activation_scheme not in (torch.per_tensor_affine, torch.per_tensor_symmetric) and not (
        dynamic and by_row(activation)
    ):
        return "", f"kernels take one scale per activation, and its qconfig asks for {activation_scheme}"
    if dynamic:
        return ("dynamic", "") if dtype in _INT8 else ("", f"no kernel takes dynamic {dtype} activations")
    if dtype in _INT8 or (dtype is None and hasattr(activation, "calculate_qparams")):
        return "static", ""
    if dtype in (torch.float32, torch.float, torch.float16, None):
        return "weight_only", ""
    return "", f"no kernel takes {dtype} activations"


def symmetric_weight(qconfig: QConfig) -> bool:
    """Whether weights get no zero point, which the compute kernels would ignore."""
    weight = qconfig.weight()
    return weight.dtype in (torch.qint8, torch.int8) and getattr(weight, "qscheme", None) in (
        torch.per_tensor_symmetric, torch.per_channel_symmetric,
    )  # fmt: skip


class QConfigResolver:
    """Looks up the qconfig of each op of a record, in order: object order, name, regex, type, global; last as FX has
    it. Also says which ops stay float whatever their qconfig.

    Names, regexes, and numbers of ops that match nothing are mistakes of who wrote them, and raise. Object types need
    not be in the model: they are kinds of ops, and one mapping, such as torch's own defaults, serves many models.
    """

    def __init__(self, mapping: QConfigMapping, modules: dict[str, nn.Module], exclude: Any = ()) -> None:
        _check_names(mapping, modules)
        self.mapping, self.modules, self.exclusion = mapping, modules, Exclusion(exclude, modules)
        self._paths: dict[int, list[str]] = defaultdict(list)  # a module may have several
        for path, module in modules.items():
            self._paths[id(module)].append(path)
        self._counts: dict[tuple[str, Any], int] = defaultdict(int)
        self._met: Counter[tuple[str, Any]] = Counter()  # the same, under every spelling of the op

    def assign(self, record: Record) -> None:
        """Give each op of the watched run its qconfig.

        Raises:
            ConfigurationError: an entry by order is about an op that did not run.
        """
        for op in record.ops:
            self.assign_to(op)
            if not op.hooked:
                self._count(op)
        for name, kind_, number in self.mapping.module_name_object_type_order_qconfigs:
            count = self._met[name, kind_]
            if not 0 <= number < count:
                spelled = getattr(kind_, "__name__", str(kind_))
                raise ConfigurationError(
                    f"the qconfig mapping has {spelled} number {number}, and the module ran {count} of them",
                    path=name, op=spelled, got=number,
                    expected=f"a number from 0 to {count - 1}" if count else "an op that ran there",
                    hint="module_name_object_type_order counts the ops of one type that a module itself "
                    "runs in the example, from 0",
                )  # fmt: skip
        self._met.clear()  # copies of a model take none of it

    def assign_to(self, op: SeenOp) -> None:
        op.excluded = self.exclusion.reason(op)
        if op.hooked:
            op.qconfig = self.resolve(op)

    def resolve(self, op: SeenOp) -> QConfig | None:
        scope = op.module if op.module is not None else op.owner
        module = self.modules[scope]
        counted_in, keys = self._counted(op)
        base = self.mapping.global_qconfig
        if op.module is None:
            base = self._by_type(keys, base)
        base = self._by_type((type_before_parametrizations(module),), base)
        for path in self._paths[id(module)]:
            base = self._by_regex(path, base)
        for path in self._paths[id(module)]:
            base = self._by_name(path, base)
        return self._by_order(counted_in, keys, base)

    def _counted(self, op: SeenOp) -> tuple[str, tuple[Any, ...]]:
        """The path of the module that counts an op by order, and the kinds that it is counted as."""
        if op.module is None:
            return op.owner, _spellings(op.row, op.spelling)
        return op.module.rpartition(".")[0], (type_before_parametrizations(self.modules[op.module]),)

    def _count(self, op: SeenOp) -> None:
        """Note an op that is float whatever its qconfig, which entries by order may name."""
        path, keys = self._counted(op)
        names = {*keys, getattr(F, op.op, op.op), getattr(torch, op.op, op.op)}
        self._met.update((path, key) for key in names)

    def _by_type(self, keys: tuple, fallback: QConfig | None) -> QConfig | None:
        known = self.mapping.object_type_qconfigs
        return next((known[key] for key in keys if key in known), fallback)

    def _by_regex(self, path: str, fallback: QConfig | None) -> QConfig | None:
        rules = self.mapping.module_name_regex_qconfigs.items()
        return next((qconfig for pattern, qconfig in rules if re.match(pattern, path)), fallback)

    def _by_name(self, path: str, fallback: QConfig | None) -> QConfig | None:
        known = self.mapping.module_name_qconfigs
        while path:
            if path in known:
                return known[path]
            path = path.rpartition(".")[0]
        return fallback

    def _by_order(self, path: str, keys: tuple, fallback: QConfig | None) -> QConfig | None:
        index = self._counts[path, keys[-1]]
        self._counts[path, keys[-1]] += 1
        self._met.update((path, key) for key in set(keys))
        for (name, kind_, number), qconfig in self.mapping.module_name_object_type_order_qconfigs.items():
            if name == path and number == index and kind_ in keys:
                return qconfig
        return fallback


def _check_names(mapping: QConfigMapping, modules: Mapping[str, nn.Module]) -> None:
    """Raise for a name or regex that matches no module, and for text that is no method."""
    for name in mapping.module_name_qconfigs:
        if not name or name not in modules:
            raise _no_module("module name", name, modules)
    for name, _, _ in mapping.module_name_object_type_order_qconfigs:
        if name not in modules:
            raise _no_module("module name", name, modules)
    for pattern in mapping.module_name_regex_qconfigs:
        try:
            matches = any(re.match(pattern, path) for path in modules)
        except re.error as error:
            raise ConfigurationError(
                f"the qconfig mapping has a regex that is none: {error}", expected="what re.match takes", got=pattern,
            ) from error  # fmt: skip
        if not matches:
            raise _no_module("regex", pattern, modules)
    for name in (each for each in mapping.object_type_qconfigs if isinstance(each, str)):
        spelled = (name, name.removesuffix("_"))
        if name not in _ROW_NAMES and not any(hasattr(each, n) for each in _METHODS for n in spelled):
            raise ConfigurationError(
                f"the qconfig mapping has the object type {name!r}, which is no method of tensors", got=name,
                expected="a class, a function, or the name of a method",
                hint=nearest(name, (*_ROW_NAMES, *dir(torch.Tensor))),
            )  # fmt: skip


#: Where names of object types are from: torch's defaults name functions too, and what might be a method.
_METHODS = (torch.Tensor, torch, F, operator)
_ROW_NAMES = frozenset(spelling.row.name for spelling in FUNCTIONS.values())


def _no_module(what: str, name: str, modules: Mapping[str, nn.Module]) -> ConfigurationError:
    hint = nearest(name, modules) if name else "set_global is for the whole model"
    if what == "regex":
        hint += " (re.match: it must match from the start of the path)"
    return ConfigurationError(
        f"the qconfig mapping has the {what} {name!r}, which matches no module of the model",
        expected="a path as model.named_modules() has them", got=repr(name), hint=hint,
    )  # fmt: skip


def _spellings(row: OpRow, spelling: str) -> tuple[Any, ...]:
    """All the ways a mapping may name a functional op; the one that was written first.

    Operators arrive as methods, so ``x + y`` and ``x.add(y)`` are one to us: any spelling of the row matches.
    """
    spelled: list[Callable | str] = [*row.functions, *row.methods, *row.operators, *row.inplace, *row.variants]
    methods = [getattr(torch.Tensor, s) for s in spelled if isinstance(s, str) and hasattr(torch.Tensor, s)]
    every = [*spelled, *methods, row.name]
    last = spelling.rpartition(".")[2]
    written = [s for s in every if last in (s, getattr(s, "__name__", None))]
    return (*written, *(s for s in every if s not in written))
