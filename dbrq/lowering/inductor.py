"""The inductor backend: the Q/DQ graph through TorchInductor, whose x86 passes turn its int8 patterns into oneDNN calls
and generate C++ for the rest.

The graph goes to Inductor by way of ``torch.export`` rather than TorchDynamo: no code of the user's is left to capture,
and neither a guard nor a setting of the process is needed when the model is called.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.export import Dim
from torch.fx.graph import CodeGen

from ..errors import CompilerError
from ..exporting import CHECKS, plain_containers, program_of
from ..graph import ONE_PATH, remove_dead
from ..graph_io import check_absent, check_input
from .cleanup import written_attributes
from .data import from_data
from .engine import Lowering
from .model import LoweredModel, without_code

log = logging.getLogger("dbrq.lowering")

#: Compiled forms that a model keeps; the one that was not used for longest goes first.
MAX_FORMS = 16


@dataclass(frozen=True)
class Form:
    """The graph, compiled for one set of shapes, or for sizes that stay free.

    Attributes:
        key: what it was compiled for.
        free: which sizes may be others: (number of the tensor among the inputs, dimension).
        fits: whether it takes such inputs as these, if only free sizes are others.
        run: takes the tensors and numbers of the inputs, gives those of the outputs.
        used: which of the inputs it takes.
        output: how the outputs are nested.
        code: what Inductor generated.
        checks: what it raises where the graph does not hold -> the message that says so.
    """

    key: tuple
    free: frozenset[tuple[int, int]]
    fits: Callable[[Sequence[Any]], bool]
    run: Callable[..., Any]
    used: tuple[int, ...]
    output: pytree.TreeSpec
    code: str
    checks: dict[str, str]


class InductorModel(LoweredModel):
    """A model compiled by Inductor. The first shapes get a form of their own; when others come, the sizes that differ
    become free, and what only they differ in is not compiled again.

    Attributes:
        max_forms: compiled forms kept.
        cpp_wrapper: whether what calls the kernels is C++ too, and not Python.
    """

    def _begin(self, cpp_wrapper: bool = False, max_forms: int = MAX_FORMS) -> None:  # type: ignore[override]
        self.cpp_wrapper, self.max_forms = cpp_wrapper, max_forms
        self._forms: list[Form] = []
        self._by_key: OrderedDict[tuple, Form] = OrderedDict()
        graph = from_data(self._data)
        self._written = written_attributes(graph)
        self._checks = [n for n in graph.nodes if n.target in (check_input, check_absent)]

    def _options(self) -> dict[str, Any]:
        return {"cpp_wrapper": self.cpp_wrapper, "max_forms": self.max_forms}

    # Calling

    def plain(self, args: Sequence[Any]) -> Any:
        flat = [_dense(leaf) for leaf in pytree.tree_leaves(tuple(map(plain_containers, args)))]
        key = (torch.get_num_threads(), *map(_key, flat))
        form = self._by_key.get(key)
        if form is None:
            form = self._form(key, args, flat)
        try:
            with torch.no_grad():
                results = form.run(*[flat[i] for i in form.used])
        except (RuntimeError, AssertionError) as error:
            raise _said(error, form.checks) from None
        for result in results:
            if isinstance(result, Tensor) and result.__dict__:  # torch's notes on sizes of its own
                result.__dict__.clear()
        return pytree.tree_unflatten(results, form.output)

    def warm(self, args: Sequence[Any]) -> None:
        tensors = {path: without_code(self).get_buffer(path) for path in self._written}
        kept = {path: tensor.clone() for path, tensor in tensors.items()}
        self.plain(args)
        for path, tensor in tensors.items():
            tensor.copy_(kept[path])

    def _form(self, key: tuple, args: Sequence[Any], flat: Sequence[Any]) -> Form:
        """The form for inputs such as have not come before."""
        self._check(args)
        with self._lock:
            form = self._by_key.get(key) or next((f for f in self._forms if _fits(f, key, flat)), None)
            if form is None:
                form = self._compiled(key, args, flat)
                self._forms.append(form)
                while len(self._forms) > max(self.max_forms, 1):
                    gone = self._forms.pop(0)
                    for known in [k for k, f in self._by_key.items() if f is gone]:
                        del self._by_key[known]
            self._by_key[key] = form
            while len(self._by_key) > 64 * max(self.max_forms, 1):
                self._by_key.popitem(last=False)
        return form

    def _check(self, args: Sequence[Any]) -> None:
        """Raise if inputs are not of the ranks and dtypes that the graph was made for."""
        env: dict[fx.Node, Any] = {}
        values = dict(zip(self._signature.parameters, args, strict=True))

        def value(node: fx.Node) -> Any:
            if node.op == "placeholder":
                return values[str(node.target)]
            if node not in env:
                env[node] = node.target(*fx.map_arg(node.args, value), **node.kwargs)  # type: ignore[operator]
            return env[node]

        for node in self._checks:
            value(node)

    # Compiling

    def _compiled(self, key: tuple, args: Sequence[Any], flat: Sequence[Any]) -> Form:
        check_compiler()
        free = self._free(key, flat)
        graph = fx.GraphModule(without_code(self), from_data(self._data))
        program = program_of(graph, tuple(map(plain_containers, copy.deepcopy(tuple(args)))), None,
                             _dynamic_shapes(graph.graph, args, free))  # fmt: skip
        module: Any = program.module(check_guards=False)
        module.graph.set_codegen(CodeGen())
        placeholders = module.graph.find_nodes(op="placeholder")
        used = tuple(i for i, node in enumerate(placeholders) if node.users)
        for node in placeholders:
            if not node.users:
                module.graph.erase_node(node)
        module.recompile()
        examples = [placeholders[i].meta["val"] for i in used]
        with _settings(self.cpp_wrapper), self._narrowing(), _generated() as codes:
            from torch._inductor.compile_fx import compile_fx

            run = compile_fx(module, examples)
        output = program.call_spec.out_spec
        assert output is not None
        checks = program.graph_module.meta[CHECKS]
        return Form(key, free, _guards(examples, used), run, used, output, "\n".join(codes), checks)

    def _narrowing(self) -> contextlib.AbstractContextManager:
        """Where the float parts become bfloat16, Inductor's passes expect autocast's casts."""
        return torch.autocast("cpu", self.dtype, enabled=self.dtype is not torch.float32)

    def _free(self, key: tuple, flat: Sequence[Any]) -> frozenset[tuple[int, int]]:
        """Sizes in which these inputs differ from what came before, if that is all in which they do."""
        found: set[tuple[int, int]] = set()
        for form in self._forms:
            if _like(key) == _like(form.key):
                found |= form.free
                for i, (now, before) in enumerate(zip(key[1:], form.key[1:], strict=True)):
                    if isinstance(flat[i], Tensor):
                        found |= {(i, d) for d, (a, b) in enumerate(zip(now[0], before[0], strict=True)) if a != b}
                    elif now != before:
                        found.add((i, -1))
        return frozenset(found)

    # Looking inside

    @property
    def code(self) -> str:
        """What Inductor generated for the form compiled last."""
        return self._forms[-1].code if self._forms else ""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms kept, in the order in which they were compiled."""
        return tuple(self._forms)

    def calls(self) -> Counter[str]:
        """How often the newest form's code calls each kernel that it does not generate: ``onednn.qconv_pointwise``."""
        return calls_of(self.code)

    def extra_repr(self) -> str:
        kernels = sum(self.calls().values())
        return f"{len(self._forms)} forms, {kernels} kernels of torch in the newest"


def calls_of(code: str) -> Counter[str]:
    """Calls of kernels in code that Inductor generated, by name without overload."""
    called = re.findall(r"torch\.ops\.((?:onednn|mkldnn|quantized|aten|mkl)\.\w+)\.\w+\(", code)
    called += [f"extern.{name}" for name in re.findall(r"extern_kernels\.(\w+)\(", code)]
    return Counter(called)


def check_compiler() -> None:
    """Raise if there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        raise CompilerError(
            "the inductor backend needs a C++ compiler, and there is none", expected="g++ or clang++, or CXX set",
            got=str(error).strip().splitlines()[0],
            hint='backend="onednn" and backend="torchscript" need none',
        ) from error  # fmt: skip


@contextlib.contextmanager
def _settings(cpp_wrapper: bool) -> Iterator[None]:
    """Inductor's, while it compiles: weights are constants, which its int8 passes ask for."""
    from torch._inductor import config

    with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=cpp_wrapper):
        yield


@contextlib.contextmanager
def _generated() -> Iterator[list[str]]:
    """The code that Inductor generates meanwhile."""
    from unittest import mock

    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", staticmethod(codes.append)):
        yield codes


def _said(error: Exception, checks: Mapping[str, str]) -> Exception:
    """An error as the graph's checks put it. Compiled code says it in symbols, ``Ne(u0, 0)``, numbered anew, and knows
    the sizes that were checked.
    """
    if isinstance(error, AssertionError):
        return RuntimeError(f"{ONE_PATH}: {error}") if checks else error
    symbols = re.sub(r"^Expected (.*) but received .*$", r"\1", str(error))  # C++ adds a value
    said = [checks[symbols]] if symbols in checks else [
        message for known, message in checks.items() if _unnumbered(known) == _unnumbered(symbols)
    ]  # fmt: skip
    return RuntimeError(" or ".join(dict.fromkeys(said))) if said else error


def _unnumbered(symbols: str) -> str:
    return re.sub(r"\b([us])\d+\b", r"\1", symbols)


def _dense(leaf: Any) -> Any:
    """Compiled code counts on the strides it was compiled for: those of contiguous tensors, or of channels_last."""
    if not isinstance(leaf, Tensor) or leaf.is_contiguous() or leaf.is_contiguous(memory_format=_last(leaf)):
        return leaf
    return leaf.contiguous()


def _last(tensor: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(tensor.dim(), torch.contiguous_format)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.is_contiguous()
    return type(leaf), leaf


def _like(key: tuple) -> tuple:
    """A key without sizes and integers."""
    return tuple((len(k[0]), *k[1:]) if isinstance(k, tuple) and isinstance(k[0], tuple)
                 else k[0] if isinstance(k, tuple) and k[0] is int else k for k in key)  # fmt: skip


def _fits(form: Form, key: tuple, flat: Sequence[Any]) -> bool:
    if not form.free or _like(key) != _like(form.key):
        return False
    for i, (now, before) in enumerate(zip(key[1:], form.key[1:], strict=True)):
        if isinstance(flat[i], Tensor):
            if any(a != b and (i, d) not in form.free for d, (a, b) in enumerate(zip(now[0], before[0], strict=True))):
                return False
        elif now != before and (i, -1) not in form.free:
            return False
    return form.fits(flat)


def _guards(examples: Sequence[Any], used: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """What compiling assumed of sizes, as a function of the inputs."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(examples)
    shapes = None if mode is None else mode.shape_env
    code = None if shapes is None else shapes.produce_guards_expression(examples)
    if code is None or shapes is None:
        return lambda flat: True
    return lambda flat: bool(shapes.evaluate_guards_expression(code, [flat[i] for i in used]))


def _dynamic_shapes(graph: fx.Graph, args: Sequence[Any], free: frozenset[tuple[int, int]]) -> dict[str, Any]:
    """``torch.export``'s way to say which sizes are free."""
    leaves, spec = pytree.tree_flatten(tuple(map(plain_containers, args)))
    shapes = [
        {d: Dim.AUTO for d in range(leaf.dim()) if (i, d) in free} if isinstance(leaf, Tensor)
        else Dim.AUTO if (i, -1) in free else None
        for i, leaf in enumerate(leaves)
    ]  # fmt: skip
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return dict(zip(names, pytree.tree_unflatten(shapes, spec), strict=True))


def prepare(lowering: Lowering) -> None:
    """Rewrite a Q/DQ graph for Inductor."""
    remove_dead(lowering.graph)
