"""Whether two forms of one model compute the same: the converted model, its Q/DQ graph, and what is lowered from that.

The Q/DQ graph run in float is the reference. Another form of it may round a value to the other side of a step, and a
deep network may amplify that; how far is measured on the reference itself, whose values are nudged as rounding would.
A form is judged on the example and on perturbed inputs, so that what was frozen of the example shows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..op_facts import writes
from ..pytree import tree_map
from .recorder import DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE
from .signature import RestoringCodeGen

#: A form that strays no further than this from the reference, relative to its values, agrees at once: root mean square
#: of a whole leaf, of a slice of one, and the largest of a slice.
_CLOSE = (0.01, 0.03, 0.05)
#: What is no further off agrees however small values are: sums that cancel to 0 in one form need not in another.
_FLOOR = 1e-6
#: How many times as far as the nudged reference a form may stray.
_FACTOR = 3.0
#: Elements below which a slice is not looked at by itself: too few to know what rounding does there.
_SLICE = 64
#: Runs of the nudged reference.
_SAMPLES = 6
#: Outcomes of a reference that strays further than this, relative to its values, say little about single ops.
INFORMATIVE = 0.1
#: Float weights of a reference that are kept between its runs, in bytes.
_KEPT = 1 << 29


# Random numbers


class Drawing(TorchDispatchMode):
    """Sees whether this thread draws from torch's generator.

    Attributes:
        drew: it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def random_state_kept_if_drawn() -> Iterator[Drawing]:
    """The random state is what it was, if what runs inside changes it.

    torch's generator is the process's: it is put back only if this thread drew from it, so that threads that draw
    meanwhile lose nothing to a model that does not. Python's and numpy's are put back if they changed.
    """
    python, numpy, state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with Drawing() as drawing:
        try:
            yield drawing
        finally:
            if drawing.drew:
                torch.set_rng_state(state)
            if random.getstate() != python:
                random.setstate(python)
            if not _equal_states(np.random.get_state(), numpy):
                np.random.set_state(numpy)


def _equal_states(a: Any, b: Any) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2:] == b[2:]


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Random numbers begin at ``seed`` inside, and outside go on as if nothing had been; None: nobody draws any."""
    if seed is None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# Inputs


def owned(inputs: Any) -> Any:
    """A copy of inputs that may be changed, made of ordinary tensors."""
    with torch.inference_mode(False):
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
            copy.deepcopy(inputs),
        )


def perturbed(inputs: Any, integers: bool) -> Any:
    """Other inputs of the same range: elements change places, so that what is valid, sorted orders aside, stays valid.

    A leaf's result depends on nothing but the leaf. Flags and masks (two values, or values that are not finite) stay.

    Args:
        integers: tensors of integers are shuffled too.
    """
    known: dict[int, Tensor] = {}  # what is given twice is given twice

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _perturbed(leaf, integers)
        return known[id(leaf)]

    return tree_map(other, owned(inputs))


def _perturbed(leaf: Tensor, integers: bool) -> Tensor:
    if leaf.layout is not torch.strided or not leaf.is_cpu or not leaf.numel() or leaf.is_quantized:
        return leaf
    generator = torch.Generator().manual_seed(leaf.numel())
    values = leaf.detach().flatten()
    if leaf.is_floating_point():
        if not bool(values.isfinite().all()):
            return leaf
        if bool((values == values[0]).all()):  # zeros, ones, or a single number
            noise = torch.rand(values.shape, generator=generator)
            changed = values + (noise - 0.5) if not values[0] else values * (0.5 + 0.5 * noise)
        elif values.unique().numel() <= 2:
            return leaf
        else:
            changed = values[torch.randperm(len(values), generator=generator)]
    elif integers and not leaf.is_complex() and leaf.dtype is not torch.bool and values.unique().numel() > 2:
        changed = values[torch.randperm(len(values), generator=generator)]
    else:
        return leaf
    return torch.empty_like(leaf).copy_(changed.reshape(leaf.shape))


@dataclass(frozen=True)
class Trial:
    """A call that the forms of a model are compared on.

    Attributes:
        words: which inputs these are.
        inputs: values for the graph's placeholders, or args and kwargs of the model; nothing changes them.
        seed: what random numbers begin at; None if the model draws none.
    """

    words: str
    inputs: Any
    seed: int | None


# Outcomes

#: How an outcome calls what a call left in the model.
STATE = "the buffer "
#: What a call gave: where in the output, among the inputs or the buffers -> a tensor, a number, or a container's class.
Outcome = Mapping[str, Any]


def outcome(output: Any, inputs: Any = None, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """All that a call left behind, leaf by leaf.

    Args:
        inputs: what it was given, as it is after the call.
        buffers: tensors of the model that it writes to.
    """
    found: dict[str, Any] = {}
    _collect(output, "the output", found)
    if inputs is not None:
        changed: dict[str, Any] = {}
        _collect(inputs, "the inputs afterwards", changed)
        found.update((path, leaf) for path, leaf in changed.items() if isinstance(leaf, Tensor))
    for name, tensor in (buffers or {}).items():
        found[f"{STATE}{name} afterwards"] = tensor.clone()
    return found


def _collect(tree: Any, path: str, found: dict[str, Any]) -> None:
    if isinstance(tree, Mapping):
        found[path] = type(tree), *map(str, tree)
        for key, value in tree.items():
            _collect(value, f"{path}[{key!r}]", found)
    elif isinstance(tree, (list, tuple)):
        found[path] = type(tree), len(tree)
        for number, value in enumerate(tree):
            _collect(value, f"{path}[{number}]", found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        found[path] = (type(tree),)
        for each in dataclasses.fields(tree):
            _collect(getattr(tree, each.name, None), f"{path}.{each.name}", found)
    else:
        found[path] = tree.detach().clone() if isinstance(tree, Tensor) else tree  # it may be a buffer


@dataclass(frozen=True)
class Difference:
    """Where a form does not agree with the reference: which leaf, and in words what was expected and what came."""

    where: str
    expected: str
    got: str


@dataclass(frozen=True)
class WrongOp:
    """An op that is wrong: the module that ran it, its name in reports, what was expected and what came, in words."""

    path: str
    op: str
    expected: str
    got: str


def difference(expected: Outcome, got: Outcome, samples: Callable[[], Sequence[Outcome]]) -> Difference | None:
    """The first leaf of ``got`` that strays from ``expected`` further than rounding accounts for; None if none does.

    Args:
        samples: outcomes of the reference when it is nudged.
    """
    for path in expected:
        if path not in got:
            return Difference(path, "a value", "none")
        found = _leaf_difference(path, expected[path], got[path], lambda path=path: [s[path] for s in samples()])  # type: ignore[misc]
        if found is not None:
            return found
    extra = next((path for path in got if path not in expected), None)
    return None if extra is None else Difference(extra, "no value", "one")


def _noises(expected: Outcome, samples: Sequence[Outcome]) -> Iterator[float]:
    """For each float leaf: how far samples stray, relative to its size."""
    for path, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            e = _numbers(value)
            size = _rms(torch.where(e.isfinite(), e, 0.0))
            strays = max(_rms(torch.where(e.isfinite(), _numbers(s[path]) - e, 0.0)) for s in samples)
            yield strays / size if size else 0.0


def _leaf_difference(path: str, expected: Any, got: Any, samples: Callable[[], Sequence[Any]]) -> Difference | None:
    if isinstance(expected, (int, float)) and type(expected) is type(got):
        if expected == got or (expected != expected and got != got):
            return None
        return _leaf_difference(
            path, torch.tensor([expected]), torch.tensor([got]), lambda: [torch.tensor([s]) for s in samples()]
        )
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        alike = type(expected) is type(got) and (isinstance(expected, Tensor) or bool(expected == got))
        return None if alike else Difference(path, _words(expected), _words(got))
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return Difference(path, f"{expected.dtype} {tuple(expected.shape)}", f"{got.dtype} {tuple(got.shape)}")
    if not expected.numel() or expected.layout is not torch.strided or got.layout is not torch.strided:
        return None
    if expected.dtype is torch.uint8 and _within_a_step(expected, got):
        return None
    if not expected.is_floating_point() and not expected.is_complex() and expected.dtype is not torch.uint8:
        return _other_integers(path, expected, got, samples)
    return _other_numbers(path, _numbers(expected), _numbers(got), lambda: [_numbers(s) for s in samples()])


def _words(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return " ".join([value[0].__name__, *map(str, value[1:])])
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)


def _numbers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.to(torch.float64)


def _within_a_step(expected: Tensor, got: Tensor) -> bool:
    return bool(((expected.int() - got.int()).abs() <= 1).all())


def _other_integers(path: str, expected: Tensor, got: Tensor, samples: Callable[[], Sequence[Tensor]]) -> Any:
    """Integers and flags come of comparisons, whose outcome rounding may turn."""
    wrong = (expected != got).float().mean().item()
    if not wrong or wrong <= _FACTOR * max((expected != s).float().mean().item() for s in samples()):
        return None
    first = int((expected != got).flatten().nonzero()[0])
    return Difference(
        path, f"{expected.flatten()[first].item()} at element {first}",
        f"{got.flatten()[first].item()}; {wrong:.1%} of all elements differ",
    )  # fmt: skip


def _other_numbers(path: str, e: Tensor, g: Tensor, samples: Callable[[], Sequence[Tensor]]) -> Difference | None:
    finite = e.isfinite()
    if not torch.equal(torch.where(finite, 0.0, e).nan_to_num(7.0), torch.where(g.isfinite(), 0.0, g).nan_to_num(7.0)):
        kinds = [f"{int(t.isnan().sum())} NaN, {int(t.isinf().sum())} infinite" for t in (e, g)]
        if all(torch.equal(s.isfinite(), finite) for s in samples()):
            return Difference(path, *kinds)
        finite = finite & g.isfinite()
    e, error = torch.where(finite, e, 0.0), torch.where(finite, g - e, 0.0)
    noise: list[Tensor] | None = None
    for number, (rms, largest, size, most) in enumerate(zip(
        map(_rms_of, _slices(error)), map(_largest_of, _slices(error)), map(_rms_of, _slices(e)),
        map(_largest_of, _slices(e)), strict=True,
    )):  # fmt: skip
        limit, high = size * (_CLOSE[1] if number else _CLOSE[0]) + _FLOOR, most * _CLOSE[2] + _FLOOR
        if bool((rms <= limit).all()) and bool((largest <= high).all()):
            continue
        if noise is None:
            noise = [torch.where(finite & s.isfinite(), s - e, 0.0) for s in samples()]
        cut = [list(_slices(n))[number] for n in noise]
        limit = limit + _FACTOR * torch.stack([_rms_of(n) for n in cut]).amax(0)
        high = high + _FACTOR * torch.stack([_largest_of(n) for n in cut]).amax(0)
        worst = torch.maximum(rms / limit.clamp(min=1e-300), largest / high.clamp(min=1e-300))
        if bool((worst > 1).any()):
            at = int(worst.argmax())
            of = "" if not number else f" in slice {at} of dimension {_cut_dims(e)[number - 1]}"
            return Difference(
                path, f"an error below {limit.flatten()[at]:.3g} (root mean square), {high.flatten()[at]:.3g} at most",
                f"{rms.flatten()[at]:.3g}, {largest.flatten()[at]:.3g} at most{of}, of values up to "
                f"{most.flatten()[at]:.3g}",
            )  # fmt: skip
    return None


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """The whole as ``[1, elements]``, then for each dimension ``[slices, elements of each]``."""
    yield tensor.reshape(1, -1)
    for dim in _cut_dims(tensor):
        yield tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _cut_dims(tensor: Tensor) -> list[int]:
    return [d for d, size in enumerate(tensor.shape) if size > 1 and tensor.numel() >= _SLICE * size]


def _rms_of(slices: Tensor) -> Tensor:
    return slices.square().mean(1).sqrt()


def _largest_of(slices: Tensor) -> Tensor:
    return slices.abs().amax(1)


def _rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


# The reference


class Reference(fx.Interpreter):
    """A Q/DQ graph run in float. The graph stays as it is, and so do the tensors that it writes to.

    Args:
        graph: the graph; this keeps a copy of it, and its tensors.
        dtype: what the forms that are compared with it compute in, where they compute in float.
    """

    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype = torch.float32) -> None:
        nodes = copy.deepcopy(graph.graph)
        codegen = nodes._codegen
        self.returned = codegen.returned if isinstance(codegen, RestoringCodeGen) else None
        super().__init__(fx.GraphModule(graph, nodes))
        self.extra_traceback = False
        self.dtype = dtype
        self.writes = any(map(writes, nodes.nodes))
        self._weights: dict[fx.Node, Tensor] = {}
        self._room = _KEPT
        self._held: dict[str, tuple[Tensor, Tensor]] = {}  # path -> a copy for one call, and what it is a copy of
        self.changed: set[str] = set()  # paths of the tensors that calls wrote to
        self._nudge: torch.Generator | None = None
        self._forced: Callable[[fx.Node, Any], Any] | None = None
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._undefined: set[fx.Node] = set()  # of this call: what comes of quantizing NaN, which gives any number
        self._vague: set[str] = set()  # trials in which there were such

    def expected(self, trial: Trial) -> dict[str, Any]:
        """What a call gives."""
        if trial.words not in self._outcomes:
            self._outcomes[trial.words] = self._outcome(trial)
            if self._undefined:
                self._vague.add(trial.words)
        return self._outcomes[trial.words]

    def samples(self, trial: Trial) -> list[dict[str, Any]]:
        """What it gives when its values are nudged as rounding would."""
        if trial.words not in self._samples:
            self._samples[trial.words] = [self._outcome(trial, seed) for seed in range(_SAMPLES)]
        return self._samples[trial.words]

    def difference(self, trial: Trial, got: Outcome) -> Difference | None:
        """Where what another form gave strays further than rounding accounts for; None if nowhere, or if NaN was
        quantized, for which there is no right number.
        """
        expected = self.expected(trial)
        return None if trial.words in self._vague else difference(expected, got, lambda: self.samples(trial))

    def noise(self, trial: Trial) -> float:
        """How far rounding alone was seen to change an outcome, relative to its size; 0 where all agreed so closely
        that nobody had to look.
        """
        if trial.words not in self._samples:
            return 0.0
        return max([0.0, *_noises(self.expected(trial), self.samples(trial))])

    def wrong_op(self, trial: Trial, values: Mapping[fx.Node, Tensor]) -> WrongOp | None:
        """The first op whose value in another form is wrong, given the values that form has for its inputs.

        Args:
            values: node -> what the other form has for it.
        """
        found: list[WrongOp] = []

        def forced(node: fx.Node, value: Any) -> Any:
            other = values.get(node)
            if other is None or not isinstance(value, Tensor):
                return value
            if (other.shape, other.dtype) != (value.shape, value.dtype):
                return value
            if node.target is DEQUANTIZE and isinstance(node.args[1], float):  # an op may leave rounding to its reader
                qparams: Any = node.args[1:5]
                other = torch.fake_quantize_per_tensor_affine(other, *qparams)
            problem = None if node in self._undefined else _local_difference(node, value, other)
            self._undefined.discard(node)
            if problem is not None:
                found.append(WrongOp(node.meta.get("path") or "", node.meta.get("op") or node.name, *problem))
            return value.copy_(other) if self.writes else other  # what is written to may have other names

        self.call(trial, forced)
        return found[0] if found else None

    def _outcome(self, trial: Trial, nudge: int | None = None) -> dict[str, Any]:
        self._nudge = None if nudge is None else torch.Generator().manual_seed(nudge)
        try:
            return self.call(trial)
        finally:
            self._nudge = None

    def call(self, trial: Trial, forced: Callable[[fx.Node, Any], Any] | None = None) -> dict[str, Any]:
        """The outcome of a call.

        Args:
            forced: given a node and its value, returns the value to go on with.
        """
        inputs = owned(trial.inputs)
        self._held, self._forced = {}, forced
        self._undefined = set()
        try:
            with torch.inference_mode(False), torch.no_grad(), seeded(trial.seed):
                plain = self.run(*inputs)
        finally:
            self._forced = None
        output = _mutable(plain) if self.returned is None else self.returned(plain)
        changed = {
            name: held for name, (held, before) in self._held.items() if held._version or not torch.equal(held, before)
        }
        self.changed |= set(changed)
        self._held = {}
        return outcome(output, inputs if self.writes else None, changed)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if not self.writes or not isinstance(value, Tensor) or value.dtype is torch.int8:
            return value
        if target not in self._held:
            self._held[target] = value.clone(), value  # some of torch's ops write without counting a version
        return self._held[target][0]

    def run_node(self, node: fx.Node) -> Any:
        if node in self._weights:
            return self._weights[node]
        value = super().run_node(node)
        given = [n for n in node.all_input_nodes if n in self.env]
        nan = node.target is QUANTIZE and bool(given) and bool(self.env[given[0]].isnan().any())
        if nan or any(n in self._undefined for n in given):
            self._undefined.add(node)
        if node.target is DEQUANTIZE_PER_CHANNEL and all(n.op == "get_attr" for n in node.all_input_nodes):
            size = value.numel() * value.element_size()
            if size <= self._room:
                self._room -= size
                self._weights[node] = value
        elif self._nudge is not None and node.op in ("call_function", "call_method", "call_module"):
            value = self._nudged(node, value)
        return value if self._forced is None else self._forced(node, value)

    def _nudged(self, node: fx.Node, value: Any) -> Any:
        """A float value with an error such as sums in another order have, and such that of those that are quantized
        next a few go to the other side of a step.
        """
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16) or not value.numel():
            return value
        if node.target is DEQUANTIZE or writes(node) or self._is_view(node, value):
            return value
        reader = next((user for user in node.users if user.target is QUANTIZE), None)
        finite = value.isfinite()
        error = _rms(torch.where(finite, value, 0.0)) * (2.0**-8 if self.dtype is torch.bfloat16 else 1e-5)
        if reader is not None and isinstance(reader.args[1], float):
            rows = max(value.shape[0] if value.dim() else 1, 1)
            error = max(error, min(0.5, max(0.02, 16 * rows / value.numel())) * reader.args[1])
        noise = torch.rand(value.shape, generator=self._nudge).sub_(0.5).mul_(2 * error)
        return value.copy_(torch.where(finite, value + noise, value))  # what is a view of it comes later

    def _is_view(self, node: fx.Node, value: Tensor) -> bool:
        """Whether a value shares memory with what it was made of, or with itself."""
        if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)):
            return True
        storage = value.untyped_storage()._cdata
        given = (self.env.get(n) for n in node.all_input_nodes)
        return any(isinstance(g, Tensor) and g.untyped_storage()._cdata == storage for g in given)


def _local_difference(node: fx.Node, expected: Tensor, got: Tensor) -> tuple[str, str] | None:
    """What is wrong with the value of one op, given its inputs: for a quantized one more than the step that rounding
    leaves open, for a float one more than the steps of what it quantized itself come to.
    """
    e, g = _numbers(expected), _numbers(got)
    finite = e.isfinite()
    if not torch.equal(finite, g.isfinite()):
        return "finite values where the graph has them", f"{int((finite != g.isfinite()).sum())} others"
    error = torch.where(finite, g - e, 0.0).abs()
    if not error.numel():
        return None
    largest = error.max().item()
    if node.target is DEQUANTIZE and isinstance(node.args[1], float):
        step = node.args[1]
        if largest <= 2.01 * step and _rms(error) <= 0.7 * step:
            return None
        return "values within a step of the graph's", f"{largest / step:.1f} steps off, {_share(error > 2.01 * step)}"
    size, most = _rms(torch.where(finite, e, 0.0)), torch.where(finite, e, 0.0).abs().max().item()
    if _rms(error) <= 0.03 * size + 1e-6 and largest <= 0.1 * most + 1e-5:
        return None
    return f"the graph's values, up to {most:.3g}", f"values that are off by {largest:.3g}"


def _share(wrong: Tensor) -> str:
    return f"{wrong.double().mean().item():.1%} of them more than that"


def _mutable(value: Any) -> Any:
    """fx has immutable containers of its own."""
    if isinstance(value, dict):
        return {key: _mutable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mutable(item) for item in value]
    return tuple(map(_mutable, value)) if type(value) is tuple else value
