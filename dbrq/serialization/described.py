"""A converted model as tensors and JSON: what its forward code and the structure of its modules do not say.

Such a description, put into a float model of the same structure, makes it the converted one: no data, no calibration,
no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import init_flat_weights, unsaved_buffers
from ..calibration.session import QuantizedModelToken
from ..eager.recurrent import recurrent_weights
from ..eager.weights import check_entry, check_weights, hold, stand_in, stand_in_recurrent
from ..errors import LoadError, QuantizationError
from ..hidden_state import STATE, state_of
from ..mappings import Role
from ..record.record import Record
from ..tensors import WEIGHT_PARTS
from .plain import Reader, Writer

VERSION = 1


def describe(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A converted model as JSON and as tensors by name, which share no memory.

    Raises:
        QuantizationError: it holds what only code could make again: hooks, functions, modules of TorchScript.
    """
    token: QuantizedModelToken = state_of(model).token
    writer = Writer()
    tensors: dict[str, Tensor] = {}
    modules = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path.rpartition(".")[2] == STATE or f".{STATE}." in f".{path}.":
            continue
        _check_plain(path, module, token)
        modules.append([path, _class_name(module)])
    content = {
        "version": VERSION,
        "torch": torch.__version__,
        "strict": token.strict,
        "modules": modules,
        "record": writer.write(token.record),
        "axes": [[*key, axis] for key, axis in token.weight_axes.items()],
        "kept": sorted(map(list, token.kept_weights)),
        "states": {path: {"opaque": state.opaque, "slots": list(state.slots)} for path, state in token.states.items()},
        "held": _held(model, tensors),
        "objects": writer.objects,
    }
    return content, tensors


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def same_class(name: str, cls: type) -> bool:
    """Whether ``name`` is that of ``cls``; what a script calls ``__main__`` has another name where it is imported."""
    main = "__main__" in (name.partition(".")[0], cls.__module__)
    return name == f"{cls.__module__}.{cls.__qualname__}" or (main and name.rpartition(".")[2] == cls.__qualname__)


def _check_plain(path: str, module: nn.Module, token: QuantizedModelToken) -> None:
    """Raise for what a description has no words for."""
    intercepted = module.__dict__.get("forward")
    state = state_of(module)
    problem = ""
    if isinstance(module, torch.jit.ScriptModule):
        problem = "it holds a module of TorchScript"
    elif module._forward_hooks or module._forward_pre_hooks:
        problem = "it has hooks, which are code"
    elif getattr(intercepted, "previous", None) is not None:
        problem = "a module has a forward of its own, beside its class's, which is code"
    elif state is not None and (state.parts or state.whole is not None):
        problem = "it was lowered" if state.whole is not None else "parts of it were lowered"
    if problem:
        raise QuantizationError(
            f"the model cannot be written without pickle: {problem}", path=path, got=type(module).__name__,
            hint="dbrq.save(model, path) in the default format holds it; remove the hooks, or describe the model "
            "before lowering it",
        )  # fmt: skip


def _held(model: nn.Module, tensors: dict[str, Tensor]) -> list[list]:
    """All tensors of the module tree, as [path, name, kind, name of the tensor]; those of ``tensors`` are filled in."""
    names: dict[int, str] = {}
    held = []
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, registered in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in registered.items():
                full = f"{path}.{name}".lstrip(".")
                kind_ = "state" if kind == "buffer" and name in unsaved_buffers(module) else kind
                if tensor is not None and id(tensor) not in names:
                    if tensor.is_sparse or tensor.is_quantized or tensor.is_meta:
                        raise QuantizationError("a tensor cannot be written without pickle", path=path, got=name)
                    names[id(tensor)] = full
                    tensors[full] = tensor.detach().clone(memory_format=torch.contiguous_format)
                held.append([path, name, kind_, None if tensor is None else names[id(tensor)]])
    return held


class Described:
    """What ``describe`` gave, read again.

    Attributes:
        record, strict: as the converted model has them.
        opaque: paths of the modules that are not looked into.
    """

    def __init__(self, content: Any, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(content, dict) or content.get("version") != VERSION:
            version = content.get("version") if isinstance(content, dict) else None
            raise LoadError("the description of the model is of another version", expected=VERSION, got=version,
                            hint="save it again with this version of dbrq")  # fmt: skip
        self._content, self._tensors = content, tensors
        self.record: Record = Reader(content["objects"]).read(content["record"])
        if not isinstance(self.record, Record):
            raise LoadError("the description of the model is damaged: it has no record")
        self.strict = bool(content["strict"])
        self.opaque = [path for path, state in content["states"].items() if state["opaque"]]

    def check_structure(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise unless ``modules`` are of the classes that the converted model's were."""
        expected = dict(self._content["modules"])
        for path in {*expected, *modules}:
            got = _class_name(modules[path]) if path in modules else "no such module"
            if path not in modules or not same_class(expected.get(path, "no such module"), type(modules[path])):
                raise LoadError(
                    "the model is not of the structure that was saved", path=path,
                    expected=expected.get(path, "no such module"), got=got,
                    hint="load with the versions of the packages that it was saved with, and of the same class",
                )  # fmt: skip

    def put_into(self, model: nn.Module, token: QuantizedModelToken) -> None:
        """Give the modules their tensors and int8 weights, and the states their qparams."""
        content = self._content
        token.weight_axes = {(path, name): axis for path, name, axis in content["axes"]}
        token.kept_weights = {(path, name) for path, name in content["kept"]}
        if content["states"].keys() != token.states.keys():
            raise LoadError("the description of the model is damaged: it has other states than the model")
        for path, state in token.states.items():
            state.slots = {key: slot for slot, key in enumerate(content["states"][path]["slots"])}
        self._put_weights(token)
        self._put_tensors(dict(model.named_modules(remove_duplicate=False)))
        for module in token.modules.values():
            if isinstance(module, nn.RNNBase):
                init_flat_weights(module)  # of the tensors that it has now
        for path, state in token.states.items():
            n = len(state.slots)
            for name in ("scale", "zero_point", "quant_min", "quant_max"):
                if getattr(state, name).shape != (n,):
                    raise LoadError("the description of the model is damaged: qparams are missing", path=path)
            state.checked({})
            state.refresh()
        for path, module in token.modules.items():
            check_weights(module, path, {name: t for name, t in module._buffers.items() if t is not None})

    def _put_weights(self, token: QuantizedModelToken) -> None:
        modules, record = token.modules, token.record
        computed = {op.weight.key for op in record.ops if op.weight is not None and op.weight.computed}
        for key, axis in token.weight_axes.items():
            self._hold(modules[key[0]], *key)
            if key not in token.kept_weights and key not in computed:
                stand_in(record, key, axis, modules)
        for path in {op.module for op in record.hooked()
                     if op.row.role is Role.RECURRENT and op.decision.precision == "int8"}:  # fmt: skip
            assert path is not None
            names = [name for name, _ in recurrent_weights(modules[path])]
            for name in names:
                self._hold(modules[path], path, name)
            stand_in_recurrent(modules[path], names)

    def _hold(self, module: nn.Module, path: str, name: str) -> None:
        """Register what an int8 weight consists of, of the shape of the parameter that it stands for."""
        stem = f"{path}.{name}".lstrip(".")
        values = {s: self._tensors[f"{stem}_{s}"] for s in WEIGHT_PARTS if f"{stem}_{s}" in self._tensors}
        parameter = module._parameters.get(name)
        shape = values["int8"].shape if parameter is None else parameter.shape
        check_entry(values["int8"], torch.empty(shape, dtype=torch.int8), path, f"{name}_int8")
        hold(module, name, values)

    def _put_tensors(self, modules: Mapping[str, nn.Module]) -> None:
        made: dict[str, Tensor] = {}
        given: dict[str, set[str]] = {}
        for path, name, kind, source in self._content["held"]:
            module = modules[path]
            given.setdefault(path, set()).add(name)
            tensor = None if source is None else made.get(source)
            if source is not None and tensor is None:
                tensor = self._tensors[source]
                tensor = made[source] = nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
            registered: Any = module._parameters if kind == "parameter" else module._buffers
            before = registered.get(name)
            recorded = STATE in path or name.endswith(tuple(f"_{part}" for part in WEIGHT_PARTS))
            if before is not None and tensor is not None and not recorded:
                check_entry(tensor, before, path, name)
            if name not in registered:
                module.__dict__.pop(name, None)
                module._parameters.pop(name, None)
                module._buffers.pop(name, None)
            registered[name] = tensor
            if kind == "state":
                unsaved_buffers(module).add(name)
        for path, names in _surplus(modules, given):
            for name in names:
                modules[path]._parameters.pop(name, None)
                modules[path]._buffers.pop(name, None)


def _surplus(modules: Mapping[str, nn.Module], given: Mapping[str, set[str]]) -> Iterator[tuple[str, list[str]]]:
    """Names of parameters and buffers that a model has and its description does not."""
    for path, module in modules.items():
        yield path, [n for n in (*module._parameters, *module._buffers) if n not in given.get(path, set())]
