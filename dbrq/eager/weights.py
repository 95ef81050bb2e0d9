"""int8 weights: made at conversion, kept as buffers of the module that had the parameter, packed when first used.

A parameter ``weight`` becomes the buffers ``weight_int8`` and ``weight_scale`` (and ``weight_zero_point`` for
embeddings with affine qconfigs) and the attribute ``weight``, an ``Int8Weight`` that gives float on demand. Packed
forms are derived, never saved, and rebuilt when what they came from changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._torch import init_flat_weights, storage_id, version
from ..errors import LoadError
from ..kernels import along, quantize_weight
from ..kernels.ranges import are_scales
from ..mappings import Role
from ..record.parameters import ParameterRef, tensor_of
from ..record.record import Record, SeenOp, Step
from ..tensors import WEIGHT_PARTS, Int8Weight, geometry_of


class RangeObserver(Protocol):
    """What a qconfig makes to look at weights; some have ``ch_axis`` too."""

    quant_min: int
    quant_max: int

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def calculate_qparams(self) -> tuple[Tensor, Tensor]: ...


def is_weight(tensor: Any, ref: ParameterRef, modules: dict[str, nn.Module]) -> bool:
    """Whether ``tensor`` is what ``ref`` means: the int8 weight itself or the same part of it, or its float form."""
    module = modules[ref.path]
    if isinstance(tensor, Int8Weight):
        if tensor.owner is not module or tensor.parameter != ref.name:
            return False
        return tensor.geometry == ref.geometry or (ref.whole and tensor.is_whole)
    registered = module._parameters.get(ref.name, module._buffers.get(ref.name))
    if registered is tensor and ref.whole and registered is not None:
        return not registered.is_meta
    if registered is None or not isinstance(tensor, Tensor) or tensor.is_meta:
        return False
    same_memory = storage_id(tensor.untyped_storage()) == storage_id(registered.untyped_storage())
    return same_memory and geometry_of(tensor) == (geometry_of(registered) if ref.whole else ref.geometry)


def rounds_to(tensor: Any, int8: Tensor, scale: Tensor, low: int, high: int) -> bool:
    """Whether a computed weight is the one that ``int8`` was made of: it rounds to that, give or take the last bits,
    which depend on the order of sums.
    """
    if not isinstance(tensor, Tensor) or tensor.shape != int8.shape or tensor.dtype is not torch.float32:
        return False
    levels = torch.clamp(tensor.detach() / along(scale, 0, tensor.dim()), low, high)
    return bool((levels - int8).abs().max() <= 0.51) if int8.numel() else True


def levels_of(qconfig: Any) -> tuple[int, int]:
    """The least and the greatest integer that a weight is rounded to."""
    observer = _observer(qconfig, None)
    return max(observer.quant_min, -128), min(observer.quant_max, 127)


def norm_scale(step: Step, modules: dict[str, nn.Module]) -> Tensor:
    """What a batch norm multiplies each channel by, float32 ``[channels]``."""
    _, variance, weight, _ = step.norm
    assert variance is not None
    scale = torch.rsqrt(tensor_of(variance, modules) + step.eps)
    return scale if weight is None else scale * tensor_of(weight, modules)


def norm_shift(step: Step, modules: dict[str, nn.Module], scale: Tensor, bias: Tensor | None) -> Tensor:
    """The bias of convolution and batch norm together, float32 ``[channels]``."""
    mean, _, _, beta = step.norm
    assert mean is not None
    shift = ((0.0 if bias is None else bias) - tensor_of(mean, modules)) * scale
    return shift if beta is None else shift + tensor_of(beta, modules)


@dataclass(frozen=True)
class StoredWeight:
    """Where an op finds its int8 weight: the canonical place of the parameter, its scales' axis, and the op's view of
    it.
    """

    ref: ParameterRef
    axis: int | None

    def int8(self, modules: dict[str, nn.Module]) -> Tensor:
        whole = modules[self.ref.path]._buffers[f"{self.ref.name}_int8"]
        assert whole is not None
        return whole if self.ref.whole else whole.contiguous().as_strided(*self.ref.geometry)

    def scale(self, modules: dict[str, nn.Module]) -> Tensor:
        """float32 ``[out]``: one scale per row of the op's view."""
        buffers = modules[self.ref.path]._buffers
        scale, whole = buffers[f"{self.ref.name}_scale"], buffers[f"{self.ref.name}_int8"]
        assert scale is not None and whole is not None
        rows = self.ref.shape[0]
        if self.axis is None:
            return scale.reshape(1).expand(rows).contiguous()
        if self.ref.whole and self.axis == 0:
            return scale
        return scale[_index(whole.shape, self.axis, self.ref).reshape(rows, -1)[:, 0]]

    def smoothing(self, modules: dict[str, nn.Module]) -> Tensor | None:
        """float32 ``[in]``: what each channel of the input is multiplied by before it is quantized; None for ones."""
        return modules[self.ref.path]._buffers.get(f"{self.ref.name}_smoothing") if self.ref.whole else None

    def sources(self, modules: dict[str, nn.Module]) -> list[tuple[dict, str]]:
        buffers = modules[self.ref.path]._buffers
        return [(buffers, f"{self.ref.name}_int8"), (buffers, f"{self.ref.name}_scale")]


def _index(shape: Sequence[int], axis: int, ref: ParameterRef) -> Tensor:
    """For each element of an op's view of a weight, its index along ``axis`` of the whole."""
    index = along(torch.arange(shape[axis]), axis, len(shape)).expand(*shape).contiguous()
    return index if ref.whole else index.as_strided(*ref.geometry)


def channel_axis(shape: Sequence[int], ref: ParameterRef, whole_axis: int) -> int | None:
    """The axis of a parameter that runs along the rows of an op's view of it; None if none does."""
    if ref.whole:
        return whole_axis
    for axis in range(len(shape)):
        rows = _index(shape, axis, ref).reshape(ref.shape[0], -1)
        if bool((rows == rows[:, :1]).all()):
            return axis
    return None


class Watched:
    """Tells whether tensors that something was derived from are still the same, by identity and version."""

    def __init__(self, sources: Sequence[tuple[dict, str]]) -> None:
        self._places = [(d, name, d[name]) for d, name in sources if d.get(name) is not None]
        self._tensors = [tensor for _, _, tensor in self._places if not tensor.is_inference()]
        self._versions = sum(map(version, self._tensors))

    def unchanged(self) -> bool:
        for registered, name, tensor in self._places:
            if registered.get(name) is not tensor:
                return False
        return sum(map(version, self._tensors)) == self._versions

    def moved(self, places: Mapping[int, dict]) -> Watched | None:
        """The same for a copy of the model that shares these tensors; None if it has others.

        Args:
            places: id of a dict that registers tensors -> that of the copy.
        """
        if any(id(registered) not in places for registered, _, _ in self._places):
            return None
        found = copy.copy(self)
        found._places = [(places[id(registered)], name, tensor) for registered, name, tensor in self._places]
        return found if found.unchanged() else None


def check_entry(given: Any, held: Tensor, path: str, name: str) -> None:
    """Raise unless a tensor of a state dict can take the place of one that an int8 model holds.

    Torch would cast and broadcast it, and say so or not after half of the model has changed.
    """
    if not isinstance(given, Tensor) or given.layout is not torch.strided or given.is_meta:
        got = type(given).__name__ if not isinstance(given, Tensor) else f"{given.layout} on {given.device}"
    elif given.shape != held.shape or given.dtype is not held.dtype:
        got = f"{given.dtype} {list(given.shape)}"
    else:
        return
    raise LoadError(
        f"{name} in the state dict is not what the int8 model holds", path=path,
        expected=f"{held.dtype} {list(held.shape)}", got=got,
        hint="load the state dict of a converted copy of this model; of a float one, convert the model it is for",
    )  # fmt: skip


def check_weights(module: nn.Module, path: str, values: dict[str, Any]) -> None:
    """Raise unless ``values``, by name, can take the place of what the module's int8 weights consist of."""
    for integers in [name for name in module._buffers if name.endswith("_int8")]:
        stem = integers.removesuffix("_int8")
        for name in (f"{stem}_{part}" for part in WEIGHT_PARTS):
            held = module._buffers.get(name)
            if held is None or name not in values:
                continue
            check_entry(values[name], held, path, name)
            positive = name.endswith(("_scale", "_smoothing"))
            fine = are_scales(values[name]) if positive else bool(values[name].isfinite().all())
            if not fine:
                raise LoadError(
                    f"{name} in the state dict is not finite, or not positive", path=path,
                    expected="positive scales that float32 holds to full precision, finite zero points",
                    got=f"from {values[name].min().item()} to {values[name].max().item()}",
                    hint="load the state dict of a converted copy of this model",
                )  # fmt: skip


def _check_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """What ``load_state_dict`` of one layer calls before anything of it changes."""
    values = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    check_weights(module, prefix.rstrip("."), values)


def hold(module: nn.Module, name: str, values: dict[str, Tensor]) -> None:
    """Register what an int8 weight consists of."""
    if not any(held.endswith("_int8") for held in module._buffers):
        module.register_load_state_dict_pre_hook(_check_load)
    for suffix, tensor in values.items():
        module.register_buffer(f"{name}_{suffix}", tensor)


def convert_weights(
    record_ops: Sequence[SeenOp],
    record: Record,
    modules: dict[str, nn.Module],
    fake_quant: Callable[[SeenOp], nn.Module | None],
    refined: Mapping[tuple[str, str], dict[str, Tensor]],
) -> tuple[dict[tuple[str, str], int | None], set[tuple[str, str]]]:
    """Put int8 buffers in place of the parameters that int8 ops read.

    Args:
        refined: canonical place of a weight -> what it consists of, where that is known already.

    Returns:
        The axis of each one's scales, and those that stay, beside their int8 form, because an op in float reads them
        too.
    """
    readers: dict[tuple[str, str], list[SeenOp]] = {}
    for op in record_ops:
        if op.weight is not None and op.decision.precision == "int8":
            readers.setdefault(op.weight.key, []).append(op)
    needed = read_in_float(record)
    axes: dict[tuple[str, str], int | None] = {}
    for key, ops in readers.items():
        op = next((o for o in ops if o.row.role is Role.COMPUTE), ops[0])
        owner = modules[key[0]]
        if key in record.computed:
            parameter: Tensor | None = record.computed[key].value(modules)
        else:
            parameter = owner._parameters.get(key[1])
            parameter = owner._buffers[key[1]] if parameter is None else parameter
        assert parameter is not None and op.qconfig is not None
        found = {channel_axis(parameter.shape, o.weight, o.row.weight_axis) for o in ops if o.weight}
        axis = found.pop() if len(found) == 1 else None
        values = refined.get(key) or quantized_weight(parameter.detach(), op, axis, fake_quant(op), modules)
        axes[key] = axis if values["scale"].numel() > 1 else None
        hold(owner, key[1], values)
        if key not in needed and key not in record.computed:
            stand_in(record, key, axes[key], modules)
    return axes, needed & set(axes)


def stand_in(record: Record, key: tuple[str, str], axis: int | None, modules: Mapping[str, nn.Module]) -> None:
    """Put an ``Int8Weight`` in place of a parameter: one object wherever it is registered, as the parameter was."""
    weight = Int8Weight.whole(modules[key[0]], key[1], axis)
    for path, name in record.parameter_names.get(key, [key]):
        _forget(modules[path], name)
        modules[path].__dict__[name] = weight


def convert_recurrent(module: nn.Module, names: Sequence[str], qconfig: Any) -> None:
    """int8 buffers in place of the weight matrices of an LSTM, GRU or cell."""
    for name in names:
        parameter = getattr(module, name)
        observer = _observer(qconfig, 0)
        observer(parameter.detach())
        scale, _ = observer.calculate_qparams()
        scale = scale.to(torch.float32).expand(parameter.shape[0]).contiguous()
        hold(module, name, {"int8": _symmetric(parameter.detach(), scale, 0, observer), "scale": scale})
    stand_in_recurrent(module, names)


def stand_in_recurrent(module: nn.Module, names: Sequence[str]) -> None:
    """The same, for the weight matrices of a recurrent layer."""
    for name in names:
        _forget(module, name)
        module.__dict__[name] = Int8Weight.whole(module, name, 0)
    if isinstance(module, nn.RNNBase):
        init_flat_weights(module)  # its list of weights would keep the float ones alive


def _forget(module: nn.Module, name: str) -> None:
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)


def read_in_float(record: Record) -> set[tuple[str, str]]:
    """Parameters that ops outside the int8 kernels read."""
    needed: set[tuple[str, str]] = set()
    for value in record.values.values():
        if value.parameter is None:
            continue
        for op in value.readers:
            moves = op.row.role is Role.PASS
            own = op.weight is not None and op.weight.key == value.parameter and op.decision.precision == "int8"
            if not moves and not own:
                needed.add(value.parameter)
        if value.is_output:
            needed.add(value.parameter)
    for op in record.ops:
        if op.weight is not None and op.decision.precision != "int8":
            needed.add(op.weight.key)
    return needed


def trained_qparams(observer: Any) -> tuple[Any, Any]:
    """qparams of an observer or fake quantize; the latter's are those it rounded with in training.

    torch's fused one computes its symmetric scale otherwise than its ``calculate_qparams`` does.
    """
    if hasattr(observer, "fake_quant_enabled") and getattr(observer, "scale", None) is not None:
        return observer.scale, observer.zero_point
    return observer.calculate_qparams()


def _observer(qconfig: Any, axis: int | None) -> RangeObserver:
    observer = qconfig.weight()
    observer = getattr(observer, "activation_post_process", observer)
    if hasattr(observer, "ch_axis") and axis is not None:
        observer.ch_axis = axis
    return observer


def quantized_weight(
    weight: Tensor, op: SeenOp, axis: int | None, fake_quantize: nn.Module | None, modules: dict[str, nn.Module]
) -> dict[str, Tensor]:
    """``int8``, ``scale`` and, for affine qconfigs, ``zero_point`` of one weight."""
    observer = _observer(op.qconfig, axis)
    if axis is None and hasattr(observer, "ch_axis"):
        from torch.ao.quantization import default_weight_observer

        observer = default_weight_observer()
    chain = op.decision.chain
    folded = bool(chain) and chain[0].op.role is Role.NORM
    if fake_quantize is not None:
        # Trained ranges are those of the weight times its batch norm's scale.
        scale, zero_point = trained_qparams(fake_quantize)
        if folded:
            scale = scale / norm_scale(chain[0], modules).abs().clamp_min(1e-12)
    else:
        observer(weight)
        scale, zero_point = observer.calculate_qparams()
    scale = torch.clamp_min(scale.detach().to(torch.float32).reshape(-1), torch.finfo(torch.float32).tiny)
    if op.row.role is Role.EMBEDDING and bool((zero_point != 0).any()):
        shift = 128 if observer.quant_min == 0 and observer.quant_max > 127 else 0
        zero_point = zero_point.detach().to(torch.float32).reshape(-1)
        at = axis if scale.numel() > 1 else None
        levels = torch.round(weight / along(scale, at, weight.dim()) + along(zero_point, at, weight.dim()))
        stored = torch.clamp(levels, observer.quant_min, observer.quant_max) - shift
        return {"int8": stored.to(torch.int8), "scale": scale, "zero_point": zero_point - shift}
    return {"int8": _symmetric(weight, scale, axis if scale.numel() > 1 else None, observer), "scale": scale}


def _symmetric(weight: Tensor, scale: Tensor, axis: int | None, observer: RangeObserver) -> Tensor:
    low, high = max(observer.quant_min, -128), min(observer.quant_max, 127)
    return quantize_weight(weight.to(torch.float32), scale, axis, low, high)
