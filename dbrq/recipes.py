"""Recipes: the decisions and qparams of a model as JSON that a person can read and edit."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from .attachment import state_of
from .errors import ConfigurationError, RecipeError
from .kernels import QParams
from .record import SeenOp
from .workflow import QuantizedModelToken, _all_qparams, place

_VERSION = 1


def save_recipe(model: nn.Module, path: str | os.PathLike) -> None:
    """Write the per-op decisions and qparams of a prepared and calibrated, or converted, model as JSON.

    Each op says which values it reads as int8; ``values`` says how each is quantized. To keep an op in float, set its
    ``precision`` to ``"float"``; to keep one of its inputs in float, that input's.

    Raises:
        NotCalibratedError: the model is prepared but has seen no data.
    """
    token = _token(model)
    qparams = _qparams(token)
    content = {
        "dbrq recipe": _VERSION,
        "values": {str(key): _as_json(q) for key, q in sorted(qparams.items())},
        "ops": [_op_as_json(op) for op in token.record.hooked()],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)


def load_recipe(prepared: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Put a recipe's decisions and qparams into a freshly prepared copy of the same model; it needs no calibration
    then.

    Returns:
        ``prepared``.

    Raises:
        RecipeError: the file is damaged, belongs to another model, or leaves a value without qparams. The model is
        unchanged.
    """
    token = _token(prepared)
    if token.phase != "observe":
        raise ConfigurationError("load_recipe takes a prepared model", got="a converted model")
    content = _read(path)
    entries, ops = content["ops"], token.record.hooked()
    if [(e.get("path"), e.get("op")) for e in entries] != [(op.path, op.op) for op in ops]:
        at = next(
            (
                i
                for i, (e, op) in enumerate(zip(entries, ops, strict=False))
                if (e.get("path"), e.get("op")) != (op.path, op.op)
            ),
            min(len(entries), len(ops)),
        )
        raise RecipeError(
            "the recipe belongs to another model",
            expected=f"{ops[at].path} ({ops[at].op})" if at < len(ops) else f"{len(ops)} ops",
            got=f"{entries[at].get('path')} ({entries[at].get('op')})" if at < len(entries) else f"{len(entries)} ops",
        )
    qparams = {int(key): _from_json(key, value) for key, value in content["values"].items()}
    default = place(token, {})
    pairs = list(zip(ops, entries, strict=True))
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
        place(token, {})
        raise RecipeError(
            "the recipe has no qparams for a value",
            path=op.owner,
            op=op.path,
            expected=f"value {missing[0]}",
            hint="calibrate the edited model instead",
        )
    token.fixed_qparams = {key: q for key, q in qparams.items() if key in {edited.key(vid) for vid in stored}}
    return prepared


def _token(model: Any) -> QuantizedModelToken:
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None:
        raise ConfigurationError("recipes are of prepared and converted models", got=type(model).__name__)
    return state.token


def _qparams(token: QuantizedModelToken) -> dict[int, QParams]:
    if token.phase == "observe":
        return _all_qparams(token)
    return {key: state.qparams(key) for state in token.states.values() for key in state.slots}


def _as_json(q: QParams) -> dict[str, Any]:
    return {"scale": q.scale, "zero_point": q.zero_point, "quant_min": q.quant_min, "quant_max": q.quant_max}


def _from_json(key: str, value: Any) -> QParams:
    try:
        q = QParams(float(value["scale"]), int(value["zero_point"]), int(value["quant_min"]), int(value["quant_max"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"value {key} of the recipe is damaged: {error}", got=value) from error
    if not (0 < q.scale < float("inf") and 0 <= q.quant_min <= q.zero_point <= q.quant_max <= 255):
        raise RecipeError(
            f"value {key} of the recipe makes no sense",
            expected="scale > 0 and 0 <= quant_min <= zero_point <= quant_max <= 255",
            got=value,
        )
    return q


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
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe cannot be read: {error}", got=str(path)) from error
    if not isinstance(content, dict) or content.get("dbrq recipe") != _VERSION:
        raise RecipeError("the file is no recipe of this version", expected=_VERSION, got=str(path))
    if not isinstance(content.get("ops"), list) or not isinstance(content.get("values"), dict):
        raise RecipeError("the recipe lacks ops or values", got=str(path))
    if not all(isinstance(key, str) and key.isdigit() for key in content["values"]):
        raise RecipeError("the values of a recipe are numbered", got=sorted(map(str, content["values"]))[:3])
    for entry in content["ops"]:
        inputs = entry.get("inputs", []) if isinstance(entry, dict) else None
        if not isinstance(inputs, list) or not all(isinstance(item, dict) for item in inputs):
            raise RecipeError("an op of the recipe is damaged", expected="an object with a list of inputs", got=entry)
    return content
