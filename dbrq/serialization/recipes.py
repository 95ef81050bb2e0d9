"""Recipes: the decisions and qparams of a model as JSON that a person can read and edit."""

from __future__ import annotations

import base64
import json
import os
import re
import reprlib
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.session import QuantizedModelToken, all_qparams, place, undone_on_failure
from ..errors import ConfigurationError, RecipeError, nearest
from ..hidden_state import state_of
from ..kernels import QParams
from ..kernels.ranges import WANTED, are_scales, makes_sense
from ..record.record import SeenOp
from ..tensors import WEIGHT_PARTS
from .files import replacing

_VERSION = 1


def save_recipe(model: nn.Module, path: str | os.PathLike) -> None:
    """Write the per-op decisions and qparams of a prepared and calibrated, or converted, model as JSON.

    Each op says which values it reads as int8; ``values`` says how each is quantized. To keep an op in float, set its
    ``precision`` to ``"float"``; to keep one of its inputs in float, that input's.

    Args:
        model: a prepared or converted model.
        path: of the file; one that is there is replaced, once the new one is whole.

    Raises:
        NotCalibratedError: the model is prepared but has seen no data.

    >>> import dbrq, tempfile, torch
    >>> quantized = dbrq.quantize(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [torch.randn(8, 4)])
    >>> path = os.path.join(tempfile.mkdtemp(), "recipe.json")
    >>> dbrq.save_recipe(quantized, path)
    >>> with open(path) as file:
    ...     [(op["path"], op["op"], op["precision"]) for op in json.load(file)["ops"]]
    [('0', 'linear', 'int8'), ('1', 'relu', 'int8')]
    """
    token = _token(model)
    qparams = _qparams(token)
    content = {
        "dbrq recipe": _VERSION,
        "values": {str(key): _as_json(q) for key, q in sorted(qparams.items())},
        "ops": [_op_as_json(op) for op in token.record.hooked()],
    }
    if token.refined:
        content["tensors"] = {f"{path}.{name}".lstrip("."): _tensors_as_json(token, path, name)
                              for path, name in token.refined}  # fmt: skip
    with replacing(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)


def load_recipe(prepared: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Put a recipe's decisions and qparams into a freshly prepared copy of the same model; it needs no calibration
    then.

    Returns:
        ``prepared``.

    Raises:
        RecipeError: the file is damaged, belongs to another model, or leaves a value without qparams. The model is
            unchanged.

    >>> import dbrq, tempfile, torch
    >>> model, x = nn.Linear(4, 3), torch.randn(8, 4)
    >>> quantized = dbrq.quantize(model, [x])
    >>> path = os.path.join(tempfile.mkdtemp(), "recipe.json")
    >>> dbrq.save_recipe(quantized, path)
    >>> again = dbrq.convert(dbrq.load_recipe(dbrq.prepare(model, x), path))
    >>> torch.equal(again(x), quantized(x))
    True
    """
    token = _token(prepared)
    if token.phase != "observe":
        raise ConfigurationError("load_recipe takes a prepared model", got="a converted model")
    content = _read(path)
    entries, ops = content["ops"], token.record.hooked()
    _check_same_model(entries, ops)
    _check_matched(content, ops, token)
    qparams = {int(key): _from_json(key, value) for key, value in content["values"].items()}
    recipe = _tensors_from_json(content.get("tensors", {}), token)
    pairs = list(zip(ops, entries, strict=True))
    with token.lock, undone_on_failure(token):
        default = place(token, {})
        forced = {id(op): _forced(op, entry) for op, entry in pairs}
        stored = {vid: qparams.get(default.key(vid)) for vid in token.record.values}
        edited = place(token, {key: reason for key, reason in forced.items() if reason})
        for op in ops:  # an edit may end the sharing of qparams; a value then keeps those it shared
            for _, vid in op.activations:
                if (key := edited.key(vid)) not in qparams and (known := stored[vid]) is not None:
                    qparams[key] = known
        missing = sorted(set(token.observers) - set(qparams))
        if missing:
            op = next(op for (op, _), o in token.observing.items() if o.key in missing)
            raise RecipeError(
                "the recipe has no qparams for a value",
                path=op.owner,
                op=op.path,
                expected=f"value {missing[0]}",
                hint="calibrate the edited model instead",
            )
        kept = set(edited.keys.values())
        token.fixed_qparams = {key: q for key, q in qparams.items() if key in kept}
        token.recipe = recipe
    return prepared


def _check_same_model(entries: list[dict[str, Any]], ops: list[SeenOp]) -> None:
    """Raise unless the recipe is of the ops that the prepared model has."""
    theirs, ours = [(e["path"], e["op"]) for e in entries], [(op.path, op.op) for op in ops]
    if theirs == ours:
        return
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    unknown = next((path for path, _ in theirs if path not in {path for path, _ in ours}), None)
    raise RecipeError(
        "the recipe belongs to another model",
        expected="{} ({})".format(*ours[at]) if at < len(ours) else f"{len(ours)} ops",
        got="{} ({})".format(*theirs[at]) if at < len(theirs) else f"{len(theirs)} ops",
        hint=None if unknown is None else f"no op of the model is {unknown!r}: "
        + nearest(unknown, (path for path, _ in ours if path not in {path for path, _ in theirs})),
    )  # fmt: skip


def _check_matched(content: dict[str, Any], ops: list[SeenOp], token: QuantizedModelToken) -> None:
    """Raise for a value that the model does not have, and for an input that its op does not have."""
    for key in content["values"]:
        if int(key) not in token.record.values:
            raise RecipeError(
                f"the recipe has value {key}, and the model has no such value", got=key,
                hint=nearest(key, map(str, token.record.values)),
            )  # fmt: skip
    for op, entry in zip(ops, content["ops"], strict=True):
        for read in entry.get("inputs", []):
            if "slot" in read and read["slot"] not in op.slots():
                raise RecipeError(
                    "the recipe has an input that the op does not have", path=op.owner, op=op.path,
                    expected=f"a slot among {sorted(op.slots())}", got=f"slot {read['slot']!r}",
                )  # fmt: skip


def _token(model: Any) -> QuantizedModelToken:
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None:
        raise ConfigurationError("recipes are of prepared and converted models", got=type(model).__name__)
    return state.token


def _qparams(token: QuantizedModelToken) -> dict[int, QParams]:
    if token.phase == "observe":
        return all_qparams(token)
    return {key: state.stored(key) for state in token.states.values() for key in state.slots}


def _as_json(q: QParams) -> dict[str, Any]:
    return {"scale": q.scale, "zero_point": q.zero_point, "quant_min": q.quant_min, "quant_max": q.quant_max}


def _from_json(key: str, value: Any) -> QParams:
    names = ("zero_point", "quant_min", "quant_max")
    if not isinstance(value, dict) or not {"scale", *names} <= value.keys():
        raise _bad(f"value {key}", "an object with scale, zero_point, quant_min and quant_max", value)
    if type(value["scale"]) not in (int, float):
        raise _bad(f"the scale of value {key}", "a number", value["scale"])
    for name in names:
        if type(value[name]) is not int:  # and no bool, which Python takes for one
            raise _bad(f"the {name} of value {key}", "an integer", value[name])
    try:
        scale = float(value["scale"])
    except OverflowError:
        raise _bad(f"the scale of value {key}", WANTED, value["scale"]) from None
    q = QParams(scale, *(value[name] for name in names))
    if not makes_sense(q):
        raise _bad(f"value {key}", WANTED, value)
    return q


def _bad(entry: str, expected: str, got: Any) -> RecipeError:
    return RecipeError(
        f"{entry} of the recipe makes no sense",
        expected=expected,
        got=reprlib.repr(got),
        hint="correct or save it again",
    )


def _tensors_as_json(token: QuantizedModelToken, path: str, name: str) -> dict[str, Any]:
    """What a preset's methods have chosen of a parameter or of an int8 weight."""
    module = token.modules[path]
    found: dict[str, Any] = {}
    if (parameter := module._parameters.get(name)) is not None:
        found["values"] = parameter.detach().flatten().tolist()
    for part in WEIGHT_PARTS:
        tensor = module._buffers.get(f"{name}_{part}")
        if tensor is not None and part == "int8":
            found[part] = base64.b64encode(zlib.compress(tensor.contiguous().numpy().tobytes())).decode()
        elif tensor is not None:
            found[part] = tensor.tolist()
    return found


def _tensors_from_json(content: Any, token: QuantizedModelToken) -> dict[tuple[str, str], dict[str, Tensor]] | None:
    """place -> part -> tensor; None where a recipe says nothing of tensors."""
    if not isinstance(content, dict):
        raise _bad("tensors", "an object", content)
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for full, entry in content.items():
        path, _, name = full.rpartition(".")
        module = token.modules.get(path)
        held = None if module is None else module._parameters.get(name, module._buffers.get(name))
        if module is None or not isinstance(entry, dict) or (held is None and set(entry) != {"values"}):
            raise _bad(f"the tensor {full}", "a parameter of the model, with values or int8, scale, smoothing", entry)
        try:
            found[path, name] = {part: _tensor_from_json(part, value, held) for part, value in entry.items()}
        except (ValueError, TypeError, RuntimeError, zlib.error) as error:
            raise _bad(f"the tensor {full}", "numbers of the shape that the model has", error) from error
    return found or None


def _tensor_from_json(part: str, value: Any, held: Tensor | None) -> Tensor:
    if part == "int8":
        assert held is not None
        raw = bytearray(zlib.decompress(base64.b64decode(value, validate=True)))
        return torch.frombuffer(raw, dtype=torch.int8).reshape(held.shape).clone()
    tensor = torch.tensor(value, dtype=torch.float32)
    fits = part in ("values", "scale", "smoothing", "zero_point") and tensor.dim() == 1
    length = tensor.numel() if held is None else {
        "values": held.numel(), "smoothing": held.shape[-1] if held.dim() else 1,
    }.get(part, tensor.numel())  # fmt: skip
    positive = part not in ("scale", "smoothing") or are_scales(tensor)
    if not fits or tensor.numel() != length or not positive or not bool(tensor.isfinite().all()):
        raise ValueError(f"{part} of {tuple(tensor.shape)}")
    return tensor


def _op_as_json(op: SeenOp) -> dict[str, Any]:
    decision = op.decision
    entry: dict[str, Any] = {
        "path": op.path,
        "op": op.op,
        "call": op.call,
        "site": op.site,
        "precision": decision.precision,
    }
    if decision.reason:
        entry["reason"] = decision.reason
    entry["inputs"] = [
        {"slot": read.slot, "precision": "int8", "value": key} for read in decision.reads for _, key in read.edges
    ]
    entry["output"] = (
        {"precision": "float"} if decision.writes is None else {"precision": "int8", "value": decision.writes}
    )
    return entry


def _forced(op: SeenOp, entry: dict[str, Any]) -> str:
    """Why the recipe keeps an op in float that placement would quantize, or has in float for another reason; "" if
    not.
    """
    kept = entry.get("precision") == "float"
    if not kept and not any(i.get("precision") == "float" for i in entry.get("inputs", [])):
        return ""
    reason = entry.get("reason") if kept else None
    if op.decision.precision == "float" and reason in (None, op.decision.reason):
        return ""
    return reason or "a recipe keeps it in float"


def _read(path: str | os.PathLike) -> dict[str, Any]:
    """What the file holds, of the types it should be of."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_once, parse_int=_integer)
    except (ValueError, RecursionError, IsADirectoryError) as error:  # ValueError: no JSON, or no text
        raise RecipeError(f"the recipe cannot be read: {error}", got=str(path)) from error
    if not isinstance(content, dict) or type(content.get("dbrq recipe")) is not int:
        raise RecipeError("the file is no recipe", expected="what save_recipe writes", got=str(path))
    if content["dbrq recipe"] != _VERSION:
        raise RecipeError("the recipe is of another version", expected=_VERSION, got=content["dbrq recipe"],
                          hint="save it again with this version of dbrq")  # fmt: skip
    if not isinstance(content.get("ops"), list) or not isinstance(content.get("values"), dict):
        raise RecipeError("the recipe lacks ops or values", got=str(path))
    for key in content["values"]:
        if not re.fullmatch("0|[1-9][0-9]{0,17}", key):
            raise _bad(f"the name of value {key}", "a number", key)
    for number, entry in enumerate(content["ops"]):
        _check_op(number, entry)
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no name may come twice: which of the two counts is anybody's guess."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"{twice!r} is there twice in one object")
    return content


def _integer(text: str) -> int | str:
    """An integer; one of more digits than Python converts stays text, so that it is told where it is."""
    return int(text) if len(text) < 1000 else text


def _check_op(number: int, entry: Any) -> None:
    """Raise unless an op of a recipe has what is read of it, of the right types."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("path", "op")):
        raise _bad(f"op {number}", "an object with path and op", entry)
    name = f"op {number} ({entry['path']})"
    if entry.get("precision") not in ("int8", "float"):
        raise _bad(f"the precision of {name}", '"int8" or "float"', entry.get("precision"))
    if not isinstance(entry.get("reason", ""), str):
        raise _bad(f"the reason of {name}", "text", entry["reason"])
    inputs = entry.get("inputs", [])
    if not isinstance(inputs, list):
        raise _bad(f"the inputs of {name}", "a list", inputs)
    for i, read in enumerate(inputs):
        if not isinstance(read, dict) or read.get("precision") not in ("int8", "float"):
            raise _bad(f"input {i} of {name}", 'an object with a precision, "int8" or "float"', read)
