"""prepare, calibrate, convert: from the user's model to the same model with int8 inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import selfcheck
from ._torch import without_function_modes
from .accuracy.kept import KeptBatches
from .accuracy.presets import Preset, of_conversion, resolved
from .accuracy.refining import Ready, ready
from .auto_trace import InterceptedForward, active
from .calibration.data import Calls, Rest, classes_of
from .calibration.first_run import watch
from .calibration.observers import observed
from .calibration.qconfigs import QConfigResolver, as_mapping
from .calibration.recorder import intercept
from .calibration.session import QuantizedModelToken, mark_int8, place, token_of
from .calibration.surgery import (
    bake,
    copied,
    run_later_hooks_plainly,
    run_parametrizations_plainly,
    uncompile_children,
    uncompiled,
)
from .eager.recurrent import recurrent_weights
from .eager.weights import convert_recurrent, convert_weights
from .errors import ConfigurationError, NotCalibratedError
from .fusion import find_chains
from .guards import check_ready, freeze, without_autocast
from .hidden_state import attach, state_of
from .mappings import Role
from .progress import counted
from .pytree import call_arguments
from .quantization_state import AutoQuantizationState
from .record.record import SeenOp
from .serialization.described import Described
from .serialization.pretrained_files import offer_save_pretrained


@without_autocast()
def prepare(
    model: nn.Module,
    example_inputs: Any = (),
    qconfig_mapping: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    inplace: bool = False,
    fuse: bool = True,
    non_traceable_module_classes: Sequence[type[nn.Module]] = (),
    exclude: Iterable[str | type[nn.Module]] | str | type[nn.Module] = (),
    preset: str | Preset | None = None,
) -> nn.Module:
    """Watch one run of ``model`` and return a copy that observes what its int8 ops will read.

    Args:
        model: any float module on the CPU. It is not changed unless ``inplace``.
        example_inputs: a tensor, a tuple or list of positional arguments, or a Mapping of keyword arguments. They are
            copied, run once in eval mode under ``no_grad``, and not observed.
        qconfig_mapping: None for the default recipe, else ``QConfig`` or ``QConfigMapping`` of
            ``torch.ao.quantization``.
        example_kwargs: keyword arguments beside ``example_inputs``.
        inplace: prepare the model itself, not a copy.
        fuse: whether batch norms, activations and adds fuse into the convolution or linear layer before them.
        non_traceable_module_classes: classes not to look into; their modules stay float.
        exclude: patterns of module paths (``"*.lm_head"``, ``"decoder.*"``, as ``fnmatch`` has them) and classes, which
            stay float with all that is inside them.
        preset: what ``convert`` does for accuracy: a ``dbrq.Preset``, or the name of one: "fast" (nothing beyond
            ranges), "default", "accurate", "transformer", "dynamic" (``dynamic_qconfig_mapping``), "qat" (fake
            quantize, to train). None: "default" without ``qconfig_mapping``, "fast" with one.

    Returns:
        A model of the same type. Run data through it (or use ``calibrate``), then ``convert`` it.

    Raises:
        ConfigurationError: the model, the mapping or the inputs cannot be used, or a name, a regex or an exclusion
            matches nothing in the model.

    >>> prepared = prepare(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(1, 4))
    >>> type(prepared) is nn.Sequential
    True
    """
    model = uncompiled(model)
    _check_model(model)
    preset, qconfig_mapping = resolved(preset, qconfig_mapping)
    mapping = as_mapping(qconfig_mapping)
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    opaque = tuple(non_traceable_module_classes)
    if not all(isinstance(c, type) for c in opaque):
        raise ConfigurationError("non_traceable_module_classes takes classes", got=opaque)
    record = watch(model, args, kwargs, opaque)
    record.default_recipe = qconfig_mapping is None
    target = uncompile_children(model if inplace else copied(model))
    modules = dict(target.named_modules(remove_duplicate=False))
    resolver = QConfigResolver(mapping, modules, exclude)
    resolver.assign(record)
    token = QuantizedModelToken(record, modules, resolver)
    token.fuse, token.given, token.preset = fuse, classes_of(model, args, kwargs), preset
    token.kept = KeptBatches() if preset.needs_data else None
    with torch.inference_mode(False):  # observers are written to wherever the model runs
        _attach(target, token, opaque)
        place(token, {})
    run_later_hooks_plainly(target, token)
    return target


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError("prepare takes a module", expected="torch.nn.Module", got=type(model).__name__)
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigurationError(
            "a ScriptModule has no Python forward to watch", hint="pass the module it was made from"
        )
    for path, module in model.named_modules():
        if state_of(module) is not None:
            raise ConfigurationError(
                "the model is already prepared or converted", path=path, hint="prepare the float model"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(
                "a lazy module has no weights yet", path=name, hint="run the model once before you prepare it"
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise ConfigurationError(
                "dbrq runs on the CPU", path=name, expected="cpu", got=tensor.device, hint="model.cpu()"
            )


def _attach(target: nn.Module, token: QuantizedModelToken, opaque: tuple) -> None:
    """States and intercepted forwards on every module that is seen by itself."""
    hidden = run_parametrizations_plainly(target, token)
    for path, module in list(target.named_modules()):
        if any(f"{path}.".startswith(f"{h}.") for h in hidden):
            continue
        intercepted = intercept(module, path, token, opaque)
        if intercepted is None or intercepted.opaque:
            hidden.append(path)
        if intercepted is None:
            continue
        row = intercepted.row
        leaf = intercepted.is_torch_leaf if row is None else row.role is Role.FLOAT
        intercepted.only_watched = leaf and module is not target and not intercepted.opaque
        if module is target or not (intercepted.opaque or leaf or row is not None):
            _add_state(token, intercepted)
            token.states[path].opaque = intercepted.opaque
        if type(module).forward is nn.Module.forward and intercepted.previous is None:
            del module.__dict__["forward"]  # a container: there is nothing to come between


def _add_state(token: QuantizedModelToken, intercepted: InterceptedForward) -> None:
    calls = token.record.calls.setdefault(intercepted.path, [])
    state = AutoQuantizationState(intercepted.path, token, calls)
    intercepted.state = state
    token.states[intercepted.path] = state
    attach(intercepted.module, state)


def calibrate(
    prepared: nn.Module,
    data: Iterable[Any],
    *,
    max_batches: int | None = None,
    progress: bool | None = None,
    unpack: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Run ``data`` through a prepared model, under ``no_grad``.

    Args:
        prepared: what ``prepare`` returned.
        data: a ``DataLoader``, a dataset, a generator, a list: items as ``example_inputs`` are given to ``prepare``.
            What forward does not take of an item, by its signature and by what the example ran with, is dropped
            with a note: labels behind the inputs, texts and ids beside them. Lists of numbers and arrays in a mapping
            become tensors, those of one dimension batches of one. A tensor or a mapping alone is one batch.
        max_batches: stop after that many.
        progress: show a bar (needs tqdm); None means: if stderr is a terminal.
        unpack: maps an item first, say to drop labels; what it returns is passed as it is.

    Each item may take a path of its own; what it shows joins what is known.

    Returns:
        ``prepared``.

    Raises:
        CalibrationError: NaN or infinity in a value to quantize.
        NotCalibratedError: ``data`` is a generator that gives no items, as one that was used before.
        ConfigurationError: it is not clear which parts of an item are arguments; ``unpack`` can say.

    >>> prepared = prepare(nn.Linear(4, 3), torch.zeros(1, 4))
    >>> loader = torch.utils.data.DataLoader([(torch.randn(4), 0), (torch.randn(4), 1)], batch_size=2)
    >>> quantized = convert(calibrate(prepared, loader))  # labels are dropped
    """
    token = token_of(uncompiled(prepared), "observe", "calibrate")
    return _calibrate(prepared, Calls(uncompiled(prepared), data, unpack, max_batches, token.given), progress)


def _calibrate(prepared: nn.Module, calls: Iterable[tuple[tuple, dict]], progress: bool | None) -> nn.Module:
    with torch.no_grad():
        for args, kwargs in counted(calls, "calibrating", progress, "batch"):
            prepared(*args, **kwargs)
    return prepared


@without_autocast()
def convert(
    prepared: nn.Module, *, inplace: bool = False, strict: bool = False, preset: str | Preset | None = None
) -> nn.Module:
    """Put int8 weights and kernels in place of what was observed.

    Args:
        prepared: a prepared and calibrated (or trained) model. It is not changed unless ``inplace``.
        inplace: convert the model itself, not a copy.
        strict: leaving the recorded paths raises, instead of running on in float with a warning for each module and op.
        preset: another one than the model was prepared with, on the same calibration. Methods that need a sample of
            the data need a preset of ``prepare`` that keeps one.

    Returns:
        A model of the same type, whose Python is the user's and whose kernels are int8. What could not be quantized
        says why in ``report``.

    Raises:
        NotCalibratedError: a value to quantize was never observed.
        ConfigurationError: ``prepared`` is not a prepared model, or was cast to another dtype or moved since.

    >>> prepared = prepare(nn.Linear(4, 3), torch.zeros(1, 4))
    >>> _ = prepared(torch.randn(8, 4))
    >>> quantized = convert(prepared)
    >>> type(quantized) is nn.Linear, quantized.weight_int8.dtype
    (True, torch.int8)
    """
    prepared = uncompiled(prepared)
    check_ready(
        token_of(prepared, "observe", "convert").record.hooked(), dict(prepared.named_modules(remove_duplicate=False))
    )
    return finished(ready(prepared, inplace=inplace, preset=of_conversion(preset)), strict)


def finished(prepared: Ready, strict: bool = False) -> nn.Module:
    """What ``convert`` returns, of a prepared model whose calibration is over; it is used up."""
    target, token, refined = prepared.model, prepared.token, prepared.refined
    token.refined = tuple(sorted(refined.changed | set(refined.weights)))
    modules = token.modules
    with torch.inference_mode(False), torch.no_grad():
        had_parameters = {path for path in token.states if next(modules[path].parameters(), None) is not None}
        _convert_weights(token, modules, refined.weights)
        for path in had_parameters:
            if next(modules[path].parameters(), None) is None:
                token.states[path].register_parameter("anchor", nn.Parameter(torch.empty(0), requires_grad=False))
        for state in token.states.values():
            keys = {key for op in state.ops() for key in _keys(op)}
            state.keep_qparams({key: refined.qparams[key] for key in sorted(keys)})
            state.observers, state.weight_fake_quants = nn.ModuleDict(), nn.ModuleDict()
    _seal(target, token, strict)
    return target


def _seal(target: nn.Module, token: QuantizedModelToken, strict: bool) -> None:
    """From now on ``target`` is a converted model."""
    token.forget_calibration()
    token.phase, token.strict = "int8", strict
    mark_int8(token)
    for module in token.modules.values():
        intercepted = module.__dict__.get("forward")
        if isinstance(intercepted, InterceptedForward) and intercepted.only_watched:
            intercepted.remove()
    for parameter in target.parameters():
        if parameter.is_leaf:  # those of a copied ScriptModule are not
            parameter.requires_grad_(False)
        parameter.grad = None
    freeze(target.eval())
    offer_save_pretrained(target)
    token.warn_of_saturation()
    if selfcheck.enabled():
        _prove(token)


def restored(model: nn.Module, described: Described) -> nn.Module:
    """``model``, of the class and structure of a converted model that was described, as that converted model.

    Args:
        model: a float model; it becomes the converted one, whatever its weights are.
        described: what ``describe`` says of the converted one, and its tensors.

    Raises:
        LoadError: ``model`` is not of that structure, or the description is damaged.
    """
    model = bake(uncompile_children(model.eval()))
    modules = dict(model.named_modules(remove_duplicate=False))
    described.check_structure(modules)
    token = QuantizedModelToken(described.record, modules, None)
    with torch.inference_mode(False), torch.no_grad():
        _attach(model, token, tuple({type(modules[path]) for path in described.opaque}))
        run_later_hooks_plainly(model, token)
        described.put_into(model, token)
    _seal(model, token, described.strict)
    return model


def _prove(token: QuantizedModelToken) -> None:
    """Try the kernels for the recorded shapes now; the first call tries those for others."""
    with without_function_modes(), torch.inference_mode(False), torch.no_grad():
        for state in token.states.values():
            for op in state.ops():
                plan: Any = state.plan(op)
                plan.prove()


def _convert_weights(
    token: QuantizedModelToken, modules: dict[str, nn.Module], refined: dict[tuple[str, str], dict[str, Tensor]]
) -> None:
    def fake_quant(op: SeenOp) -> nn.Module | None:
        trained = token.weight_fake_quant(op)
        return trained if trained is not None and observed(trained) else None

    token.weight_axes, token.kept_weights = convert_weights(
        token.record.hooked(), token.record, modules, fake_quant, refined
    )
    for path in {
        op.module for op in token.record.hooked()
        if op.module is not None and op.row.role is Role.RECURRENT and op.decision.precision == "int8"
    }:  # fmt: skip
        op = next(o for o in token.record.hooked() if o.module == path)
        convert_recurrent(modules[path], [name for name, _ in recurrent_weights(modules[path])], op.qconfig)


def _keys(op: SeenOp) -> list[int]:
    decision = op.decision
    keys = [key for read in decision.reads for _, key in read.edges]
    if decision.writes is not None:
        keys.append(decision.writes)
    assert all(isinstance(key, int) for key in keys)  # of several values only for times that were not seen
    return [key for key in keys if isinstance(key, int)]


def quantize(
    model: nn.Module,
    data: Iterable[Any],
    qconfig_mapping: Any = None,
    *,
    unpack: Callable[[Any], Any] | None = None,
    max_batches: int | None = None,
    progress: bool | None = None,
    inplace: bool = False,
    exclude: Iterable[str | type[nn.Module]] | str | type[nn.Module] = (),
    preset: str | Preset | None = None,
) -> nn.Module:
    """``prepare`` on the first item of ``data``, ``calibrate`` on all of them (the first too), ``convert``.

    Arguments as in those; raises what they raise, and NotCalibratedError where ``data`` is empty. There is no example
    beside the data here, so where forward could take the whole of a loader's items, or less, ``unpack`` must say what
    is passed.

    >>> quantized = quantize(nn.Linear(4, 3), [torch.randn(2, 4)])
    >>> quantized(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """
    prepared = prepared_on(
        model, data, qconfig_mapping, unpack=unpack, max_batches=max_batches, progress=progress, inplace=inplace,
        exclude=exclude, preset=preset,
    )  # fmt: skip
    return convert(prepared, inplace=True)


def prepared_on(
    model: nn.Module,
    data: Iterable[Any],
    qconfig_mapping: Any = None,
    *,
    unpack: Callable[[Any], Any] | None = None,
    max_batches: int | None = None,
    progress: bool | None = None,
    inplace: bool = False,
    exclude: Iterable[str | type[nn.Module]] | str | type[nn.Module] = (),
    preset: str | Preset | None = None,
    keep_data: bool = False,
) -> nn.Module:
    """``prepare`` on the first item of ``data`` and ``calibrate`` on all of them, as ``quantize`` does.

    Args:
        keep_data: keep a sample of the data also for a preset that needs none.
    """
    model = uncompiled(model)
    _check_model(model)
    calls = Calls(model, data, unpack, max_batches)
    iterator = iter(calls)
    first = next(iterator, None)
    if first is None:
        raise NotCalibratedError(
            "there is no calibration data", expected="at least one item, and max_batches of 1 or more",
            got="no item", hint="check what the data is made of",
        )  # fmt: skip
    args, kwargs = first
    prepared = prepare(
        model, args, qconfig_mapping, example_kwargs=kwargs, inplace=inplace, exclude=exclude, preset=preset
    )
    if keep_data:
        token = token_of(prepared, "observe", "calibrate")
        token.kept = token.kept or KeptBatches()
    return _calibrate(prepared, Rest(first, iterator, calls), progress)


__all__ = ["active", "calibrate", "convert", "prepare", "quantize"]


def find_fusions(model: nn.Module, example_inputs: Any = (), *, example_kwargs: Any = None) -> list[list[str]]:
    """Paths of the modules that fuse, in the form that ``torch.ao.quantization.fuse_modules`` takes.

    Args:
        model: a float model. A copy of it runs; it is not changed.
        example_inputs: one call's arguments, as in ``prepare``.
        example_kwargs: keyword arguments beside them.

    >>> find_fusions(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()), torch.zeros(1, 1, 4, 4))
    [['0', '1', '2']]
    """
    args, kwargs = call_arguments(example_inputs, example_kwargs)
    record = watch(model, args, kwargs)
    any_qconfig: Any = object()
    heads = [op for op in record.hooked() if op.row.role is Role.COMPUTE and op.row.name != "matmul"]
    for op in record.hooked():
        op.qconfig = op.qconfig or any_qconfig
    calls = Counter(op.module for op in record.ops)
    found = []
    for number, chain in sorted(find_chains(record, heads).items()):
        group = [heads[number]]
        for op in chain:
            if op.module is None or op.row.name not in ("batch_norm", "relu"):
                break
            group.append(op)
        if len(group) > 1 and heads[number].module is not None and all(calls[op.module] == 1 for op in group):
            found.append([op.module for op in group if op.module is not None])
    return found
