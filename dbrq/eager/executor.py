"""What all op hooks of a converted model have in common: reading int8 values, writing them, running in float.

A plan is derived from the op's ``Decision`` and the qparams and weights of the model; it holds no truth of its own.
Plans are read-only while they run, so threads share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import without_function_modes
from ..errors import DeviationError, KernelInputError
from ..kernels import QParams, dynamic_qparams, quantize, together
from ..mappings import Role, Spelling, asks_inplace
from ..pytree import tree_leaves, tree_map
from ..record.callsite import Spot
from ..record.record import Read, Record, SeenOp, Tag, is_number
from ..tensors import UNSURE, Int8Tensor, plain, set_tag
from .arguments import bind_leaf, constant, settings
from .decompositions import Product
from .float_reference import run_float
from .interfaces import Leaf, Run, State

Quantized = tuple[Tensor, QParams]


_no_dispatch = Tensor.__torch_dispatch__


def _has_elements(x: Tensor) -> bool:
    """Whether a tensor is one, and not a stand-in (``FakeTensor``, ``DTensor``) that computes in Python."""
    return type(x) is Tensor or type(x).__torch_dispatch__ is _no_dispatch


#: What of a batch norm converted models do not ask for: they stay as they were at conversion (docs/training.md).
_NOT_SETTINGS = ("training",)
#: Is no attribute of any module.
_NEVER = object()


def is_shared(read: Read, record: Record) -> bool:
    """Whether others may read the same value as int8, so that its integers are worth keeping."""
    if isinstance(read.value, tuple):
        return True
    readers = record.values[read.value].readers
    return sum(r.value == read.value for op in readers for r in op.decision.reads) != 1


class Plan:
    """An op that runs in float, and what all plans have in common. Subclasses override ``run``."""

    @property
    def smoothing(self) -> Tensor | None:
        """What each channel of the input is multiplied by before it is quantized; None for ones."""
        return None

    def __init__(self, state: State, op: SeenOp) -> None:
        self.state, self.op, self.row, self.module_path = state, op, op.row, op.leaf
        self.reads: Sequence[Read] = op.decision.reads
        self.tag = op.result.tag
        self.out = None if op.decision.writes is None else state.qparams(op.decision.writes)
        self.read_qparams = [state.qparams(read.value) for read in self.reads]
        self._shared = [is_shared(read, state.token.record) for read in self.reads]
        self.spots: set[Spot] = set()
        self.deep = self.sited = self.any_time = False
        self.products: dict[Callable, Product] = {}
        self._held: list[tuple[dict, str, Any]] | None = None  # what a leaf module has and was recorded with
        self._recorded = [(i, op.constants[i]) for i in op.row.settings if i < len(op.constants)]
        self._in_float = op.decision.precision == "float"
        self._takes_tensors = op.row.role is not Role.ACTIVATION  # of whose bounds a tensor is a setting of its own
        self._accepted: dict[int, Any] = {}  # position -> a setting that was found to be right
        self._usual_call: tuple | None = None  # arguments known to be right in float, ``Tensor`` for tensors
        self._edges: dict[tuple[int, Tag], QParams | None] = {}
        values = state.token.record.values
        self._slots = sorted(op.slots())
        self._makers: dict[Tag, bool] = {values[vid].info.tag: True for _, vid in op.activations}

    def fits(self, bound: Sequence[Any]) -> bool:
        """Whether a function that takes a weight got the one that this op was recorded with, and the same settings."""
        return True

    def prove(self) -> None:
        """Try the kernel that the recorded run leads to (``selfcheck``), so that the first call need not."""

    def keeps_settings(self, leaf: Leaf) -> bool:
        """Whether a leaf module has the settings, weight and bias that it was recorded with."""
        if self._held is None:
            return self._has_settings(leaf)
        for held, name, value in self._held:
            if held.get(name) is not value:
                return self._has_settings(leaf)
        return True

    def _has_settings(self, leaf: Leaf) -> bool:
        """The same, looked up: what is found to be right is known again by identity."""
        module, row = leaf.module, self.row
        places = {name: i for i, name in enumerate(leaf.attributes, 1) if row.takes_weight or i in row.settings}
        names = [name for name in places if name in module.__dict__ and name not in _NOT_SETTINGS]
        pads = self.op.pad[1] if self.op.pad is not None else "zeros"
        if any(not self._was_seen(places[name], constant(getattr(module, name))) for name in names):
            return False
        if self.row.ndim and getattr(module, "padding_mode", pads) != pads:
            return False
        if "padding_mode" in module.__dict__:
            names.append("padding_mode")
        held = [(module.__dict__, name, module.__dict__[name]) for name in names]
        for name, is_stored in self.stored():
            if not is_stored(getattr(module, name)):
                return False
            registered = (module.__dict__, module._parameters, module._buffers)
            place = next((place for place in registered if name in place), None)
            if place is None or hasattr(type(module), name):  # code chooses it, each time
                held.append((module.__dict__, name, _NEVER))
            else:
                held.append((place, name, place[name]))
        self._held = held
        return True

    def stored(self) -> list[tuple[str, Callable[[Any], bool]]]:
        """The weight and the bias of a leaf module, each with what tells whether it is the one that was stored."""
        return []

    def has_settings(self, bound: Sequence[Any]) -> bool:
        """Whether a function got settings that it was recorded with, so that its results are within their ranges."""
        for i, recorded in self._recorded:
            value = bound[i]
            if value is recorded:
                continue
            cls = type(value)
            if (cls is int or cls is float) and value == recorded:
                continue
            if recorded is None and self._takes_tensors and isinstance(value, Tensor):
                continue
            if cls is tuple and value is self._accepted.get(i):
                continue
            given = settings(self.row, bound)
            if not all(self._was_seen(i, given[i]) for i, _ in self._recorded):
                return self._has_no_range()
            self._accepted = {i: bound[i] for i, _ in self._recorded if given[i] is not None}
            return True
        return True

    def _has_no_range(self) -> bool:
        """Whether nobody quantizes what a float computation of this op gives: then any settings will do."""
        return not self.op.is_baked and self.state.token.qparams_of(self.tag) is None

    def _differ_in_numbers(self, bound: Sequence[Any]) -> bool:
        """Whether the settings that were not recorded are numbers where the record has numbers: sizes, for one."""
        given = settings(self.row, bound)
        unseen = [(given[i], recorded) for i, recorded in self._recorded if not self._was_seen(i, given[i])]
        return bool(unseen) and all(is_number(value) and is_number(recorded) for value, recorded in unseen)

    def _is_in_range(self, output: Any) -> bool:
        """Whether a result is, but for a tenth, within the range that was calibrated for it."""
        qparams = self.state.token.qparams_of(self.tag)
        if qparams is None or not isinstance(output, Tensor) or not output.numel():
            return True
        low, high = torch.aminmax(plain(output).detach())
        room = 0.1 * (qparams.quant_max - qparams.quant_min)
        least, most = (level - qparams.zero_point for level in (qparams.quant_min - room, qparams.quant_max + room))
        return bool(least * qparams.scale <= low and high <= most * qparams.scale)

    def _was_seen(self, position: int, value: Any) -> bool:
        """Whether a setting was recorded, or is a number between those that were: of it comes nothing beyond them."""
        known = [self.op.constants] if self.op.is_baked else self.op.all_constants()
        if value in [constants[position] for constants in known]:
            return True
        span = self.op.number_range(position) if is_number(value) else None
        return span is not None and span[0] <= value <= span[1]

    def _other_settings(self, call: Run, bound: Sequence[Any]) -> None:
        """The op is called with settings that it was not recorded with: what comes of it has an unknown range."""
        op, token = self.op, self.state.token
        given = settings(self.row, bound)
        got, expected = [given[i] for i, _ in self._recorded], [recorded for _, recorded in self._recorded]
        if token.strict:
            raise DeviationError(
                "an op has other settings than were recorded",
                path=op.owner,
                op=op.path,
                expected=expected,
                got=got,
                hint="calibrate with inputs that take these settings",
            )
        token.warn_once(
            f"settings {op.path}",
            f"dbrq: {op.path} runs in float: it has the settings {got} and was recorded with {expected}",
        )
        call.unsure = call.strays = True

    # Where values come from

    def edge(self, number: int, tag: Tag) -> QParams | None:
        """qparams with which read ``number`` takes a float value that ``tag`` made; None if it was never seen to.

        Values made at the same place at another time will do, as loops go on; and where the op itself runs more often
        than it was ever seen to, any value whose range is known.
        """
        if tag == self.reads[number].tag:
            return self.read_qparams[number]
        key = (number, tag)
        if key not in self._edges:
            self._edges[key] = self._find_edge(number, tag)
        return self._edges[key]

    def _find_edge(self, number: int, tag: Tag) -> QParams | None:
        reads = self.reads if self.row.role is Role.SHARE else (self.reads[number],)
        edges = [edge for read in reads for edge in read.edges]
        for known, key in edges:
            if known == tag:
                return self.state.qparams(key)
        token = self.state.token
        place = token.place_of(tag)
        same = [] if place is None else [key for known, key in edges if token.place_of(known) == place]
        own = token.qparams_of(tag) if same or self.any_time else None
        if own is not None:
            return own
        return together([self.state.qparams(key) for key in same]) if same else None

    def expects(self, tag: Tag) -> bool:
        """Whether the op was ever seen to read what ``tag`` made, now or at another time."""
        known = self._makers.get(tag)
        if known is None:
            token = self.state.token
            place = token.place_of(tag)
            places = {token.place_of(maker) for maker, expected in self._makers.items() if expected}
            known = self._makers[tag] = tag != UNSURE and (self.any_time or (place is not None and place in places))
        return known

    def _note_origins(self, call: Run, bound: Sequence[Any]) -> None:
        """What a float op makes of a value of unknown range has none either."""
        values = bound[0] if self.row.takes_list else bound
        for slot in self._slots:
            x = values[slot] if slot < len(values) else None
            if not isinstance(x, Tensor):
                continue
            tag = call.tag_of(x)
            if self._makers.get(tag) and not self.any_time:
                continue
            if x.is_floating_point() and (self.any_time or not self.expects(tag)):
                call.unsure = call.strays = True

    # The two ways an op is spelled

    def leaf(self, call: Run, leaf: Leaf, x: Any) -> Any:
        """The op as a leaf module with one argument; the hot path, runs under the function mode."""
        return self.module(call, leaf, (x,), {})

    def module(self, call: Run, leaf: Leaf, args: tuple, kwargs: dict) -> Any:
        """The op as a leaf module."""
        if not self.keeps_settings(leaf):
            return call.unrecorded_leaf(leaf, args, kwargs)
        with without_function_modes():
            if self._in_float:
                self._note_origins(call, args[:1])
                if self.op.inplace and args:
                    call.provenance.written(args[0])
                return self.float_result(call, leaf.original(*tree_map(plain, args), **tree_map(plain, kwargs)))
            bound = bind_leaf(leaf, args, kwargs)
            return self._finish(call, bound[0], self.run(call, bound), self.op.inplace)

    def function(self, call: Run, func: Callable, spelling: Spelling, args: tuple, kwargs: dict) -> Any:
        """The op as a function, method or operator."""
        if self._usual_call is not None and not kwargs and self._is_usual(call, args):
            return self.float_result(call, func(*args))
        bound = spelling.bind(args, kwargs)
        other = not self.has_settings(bound) and not self.any_time  # of those, no range is known anyway
        numbers = other and self._differ_in_numbers(bound)
        if other and not numbers:
            self._other_settings(call, bound)
        if other or self._in_float or kwargs.get("out") is not None:
            self._note_origins(call, bound)
            inplace = spelling.inplace or asks_inplace(spelling.row, bound)
            output = call.run_float(func, args, kwargs, inplace)
            if numbers and not self._is_in_range(output):
                self._other_settings(call, bound)
            elif not (other or inplace or kwargs or self.any_time):
                self._keep_usual(args)
            return self.float_result(call, output)
        inplace = spelling.inplace or (self.op.inplace and asks_inplace(spelling.row, bound))
        return self._finish(call, bound[0], self.run(call, bound), inplace)

    def _keep_usual(self, args: tuple) -> None:
        """Know a call of a float op again that has these numbers: its settings were found to be right."""
        tensors = [i for i, value in enumerate(args) if type(value) is Tensor]
        if self.row.takes_list or not set(tensors) <= set(self._slots):
            return
        if all(value is None or type(value) in (bool, int, float, str) for value in args if type(value) is not Tensor):
            self._usual_call = tuple(Tensor if i in tensors else value for i, value in enumerate(args))

    def _is_usual(self, call: Run, args: tuple) -> bool:
        """Whether a float op has such numbers, and reads tensors of makers that it was recorded with."""
        usual = self._usual_call
        if usual is None or len(args) != len(usual):
            return False
        tag, makers = call.provenance.tag, self._makers
        for value, known in zip(args, usual, strict=True):
            if known is Tensor:
                if type(value) is not Tensor or not makers.get(tag(value)):
                    return False
            elif value is not known and (type(value) is not type(known) or value != known):
                return False
        return True

    def run(self, call: Run, bound: list[Any]) -> Any:
        """The op on arguments in the row's order; int8 or float, never in place."""
        raise AssertionError("subclasses say how")

    # Reading and writing values

    def read_int8(self, call: Run, x: Tensor, number: int) -> Quantized | None:
        """``x`` as integers; None if it is a float value of another origin than any that was recorded, with which the
        op runs in float. What is made of such a value has a range that nobody knows, here and further on: that is
        quantized by its own range.
        """
        if not isinstance(x, Tensor):
            raise KernelInputError(
                "an int8 op takes a tensor",
                path=self.op.owner,
                op=self.op.path,
                expected="torch.Tensor",
                got=type(x).__name__,
            )
        if type(x) is Int8Tensor and x.data_u8 is not None and self.smoothing is None:
            if self.any_time or self.edge(number, x.tag_) is None:
                call.unsure = call.strays = True
            return x.data_u8, x.qparams
        tag = call.tag_of(x)
        x = plain(x)
        if self.is_followed(call, x):
            return None
        qparams = self.edge(number, tag)
        if qparams is None or self.any_time or not self.expects(tag):
            call.unsure = call.strays = True
        if qparams is None:
            if tag != UNSURE:
                self.unrecorded(tag, number)
                return None
            self.require_float32(x)
            if not x.numel():
                return None
            qparams = dynamic_qparams(self._smoothed(x.detach()), self.read_qparams[number].quant_max < 255)
        smoothing = self.smoothing
        meaning = qparams if smoothing is None else (qparams, id(smoothing))
        q = call.provenance.int8(x, meaning) if self._shared[number] else None
        if q is None:
            self.require_float32(x)
            q = quantize(self._smoothed(x.detach() if x.requires_grad else x), qparams)
            if self._shared[number]:
                call.provenance.keep_int8(x, meaning, q)
        return q, qparams

    def _smoothed(self, x: Tensor) -> Tensor:
        smoothing = self.smoothing
        return x if smoothing is None else x * smoothing

    def is_followed(self, call: Run, x: Tensor) -> bool:
        """Whether forward wants a derivative of what the op makes of a float value, or computes it under vmap: no int8
        op has one, or can be. So the op runs in float: raise in strict models, else warn once.
        """
        if not call.follows(x):
            return False
        what = "forward takes a derivative of it, or calls it under a transform of torch.func"
        if self.state.token.strict:
            raise DeviationError(
                "an int8 op has no derivative", path=self.op.owner, op=self.op.path, got=what,
                hint="keep the layers that forward differentiates in float (qconfig None)",
            )  # fmt: skip
        self.state.token.warn_once(f"derivative {self.op.path}", f"dbrq: {self.op.path} runs in float: {what}")
        call.unsure = call.strays = True
        return True

    def require_float32(self, x: Tensor) -> None:
        """Raise unless ``x`` has float32 elements in memory: kernels would read where there are none."""
        if x.dtype is torch.float32 and x.layout is torch.strided and x.is_cpu and _has_elements(x):
            return
        got = type(x).__name__ if x.is_cpu and x.dtype is torch.float32 else f"{x.dtype} on {x.device}"
        got = got if x.layout is torch.strided else f"{x.dtype}, {x.layout}"
        raise KernelInputError(
            "an int8 op got another dtype, device or layout, or a tensor without elements",
            path=self.op.owner,
            op=self.op.path,
            expected="torch.float32, dense, on cpu",
            got=got,
            hint="pass float32 tensors that are in memory, as in the watching run",
        )

    def unrecorded(self, tag: Tag, number: int | None = None) -> None:
        """The op reads a value that it was not recorded with: raise in strict models, else warn once."""
        token = self.state.token
        made = token.maker
        recorded = [t for t, expected in self._makers.items() if expected]
        if number is not None:
            recorded = [t for t, _ in self.reads[number].edges]
        got, expected = made(tag), " or ".join(dict.fromkeys(map(made, recorded)))
        if token.strict:
            raise DeviationError(
                "an op reads another value than was recorded",
                path=self.op.owner,
                op=self.op.path,
                expected=expected,
                got=got,
                hint="calibrate with inputs that take this path",
            )
        token.warn_once(
            f"edge {self.op.path}",
            f"dbrq: {self.op.path} runs in float: it reads {got} and was recorded with {expected}",
        )

    def write(self, call: Run, value: Tensor) -> Tensor:
        """A float result as the record wants it: quantized, or tagged."""
        if self.out is None or call.unsure or self.is_followed(call, value):
            return self.float_result(call, value)
        return Int8Tensor(value.shape, quantize(value, self.out), self.out, self.tag)

    def float_result(self, call: Run, output: Any) -> Any:
        """A result that stays float, tagged."""
        if not call.unsure:
            if type(output) is Tensor:
                call.provenance.set_tag(output, self.tag)
                return output
            return self._tagged(output)
        call.unsure = False
        for leaf in tree_leaves(output):
            if isinstance(leaf, Int8Tensor) and leaf.data_u8 is None:  # written to, and float now
                leaf.tag_ = UNSURE
            elif type(leaf) is Tensor:
                call.provenance.set_tag(leaf, UNSURE)
        return output

    def _tagged(self, output: Any) -> Any:
        if type(output) is Tensor:
            set_tag(output, self.tag)
        elif isinstance(output, Int8Tensor):
            if output.data_u8 is None:  # written to, and float now
                output.tag_ = self.tag
        elif isinstance(output, (tuple, list)):
            tags = iter(self.op.outputs)
            for leaf in tree_leaves(output):
                info = next(tags, None) if isinstance(leaf, Tensor) else None
                if info is not None and type(leaf) is Tensor:
                    set_tag(leaf, info.tag)
        return output

    def _finish(self, call: Run, target: Any, output: Any, inplace: bool) -> Any:
        if not inplace or not isinstance(target, Tensor):
            return output
        if isinstance(target, Int8Tensor):
            target.become(output)
        else:
            tag = call.tag_of(output)
            target.copy_(plain(output))
            call.provenance.written(target)
            call.provenance.set_tag_of_any(target, self.tag if tag is None else tag)
        return target

    def run_plain(self, bound: list[Any]) -> Any:
        """The op in float."""
        return run_float(self.row, tree_map(plain, bound), self.op.pad)
