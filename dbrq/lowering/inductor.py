"""The inductor backend: the Q/DQ graph through TorchInductor, whose x86 passes turn its int8 patterns into oneDNN calls
and generate C++ for the rest.

The graph goes to Inductor by way of ``torch.export`` rather than TorchDynamo: no code of the user's is left to capture,
and neither a guard nor a setting of the process is needed when the model is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.export import Dim
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CompilerError, DeviationError, KernelInputError, QuantizationError, is_bug
from ..exporting.program import CHECKS, ERRORS_OF_TRACING, plain_containers, program_of
from ..graph.nodes import DEQUANTIZE, remove_dead
from ..graph.signature import check_absent, check_input
from ..graph.writer import ONE_PATH
from ..kernels import ints
from ..kernels.known_faults import Geometry, fault_of, plain_dilation
from ..op_facts import writes
from ..quiet import quiet
from .engine import Lowering, Rewrite, bind, is_call, is_dequantize, is_quantize, is_weight, row_of
from .graph_data import from_data
from .lowered_model import LoweredModel, without_code
from .passes import written_attributes
from .patterns import computes, epilogues, fine, moves, on

log = logging.getLogger("dbrq.lowering")

#: Compiled forms that a model keeps; the one that was compiled first goes first.
MAX_FORMS = 16


@dataclass(frozen=True)
class Used:
    """What compiled code is given: free sizes, by (number of the tensor, dimension), then inputs, by number.

    The sizes come with the tensors too, but code that reads them off what was computed is code that Inductor's passes
    do not know.
    """

    sizes: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]

    def free(self, examples: Sequence[Any]) -> frozenset[tuple[int, int]]:
        """Sizes that stayed free, of ``examples`` of what is taken: not all that could have do, those of 1 never."""
        found: set[tuple[int, int]] = set()
        for i, example in zip(self.inputs, examples[len(self.sizes) :], strict=True):
            if isinstance(example, Tensor):
                sizes: Iterable[Any] = example.shape
                found |= {(i, d) for d, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
            elif isinstance(example, torch.SymInt):
                found.add((i, -1))
        return frozenset(found)

    def of(self, flat: Sequence[Any]) -> list[Any]:
        return [*(flat[i].shape[d] for i, d in self.sizes), *(flat[i] for i in self.inputs)]


@dataclass(frozen=True)
class Form:
    """The graph, compiled for one set of shapes, or for sizes that stay free.

    Attributes:
        key: what it was compiled for.
        free: which sizes may be others: (number of the tensor among the inputs, dimension).
        fits: whether it takes such inputs as these, if only free sizes are others.
        run: takes the tensors and numbers of the inputs, gives those of the outputs.
        used: which of the inputs it takes, and before them which sizes, as in ``free``.
        output: how the outputs are nested.
        code: what Inductor generated.
        checks: what it raises where the graph does not hold -> the message that says so.
    """

    key: tuple
    free: frozenset[tuple[int, int]]
    fits: Callable[[Sequence[Any]], bool]
    run: Callable[..., Any]
    used: Used
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
        self._failed: set[frozenset[tuple[int, int]]] = set()  # free sizes with which torch failed
        self._by_key: OrderedDict[tuple, Form] = OrderedDict()
        graph = from_data(self._data)
        self._written = written_attributes(graph)
        self._writes = any(map(writes, graph.nodes))
        self._checks = [n for n in graph.nodes if n.target in (check_input, check_absent)]

    def _options(self) -> dict[str, Any]:
        return {"cpp_wrapper": self.cpp_wrapper, "max_forms": self.max_forms}

    # Calling

    def plain(self, args: Sequence[Any]) -> Any:
        given = pytree.tree_leaves(tuple(map(plain_containers, args)))
        flat = [_dense(leaf) for leaf in given]
        key = (torch.get_num_threads(), *map(_key, flat))
        form = self._by_key.get(key)
        if form is None:
            form = self._form(key, args, flat)
        try:
            with torch.no_grad():
                results = form.run(*form.used.of(flat))
        except (RuntimeError, AssertionError) as error:
            raise _said(error, form.checks) from None
        if self._writes:
            for leaf, dense in zip(given, flat, strict=True):
                if dense is not leaf:  # what was written to is the copy
                    leaf.detach().copy_(dense)
        for result in results:
            if isinstance(result, Tensor) and result.__dict__:  # torch's notes on sizes of its own
                result.__dict__.clear()
        return pytree.tree_unflatten(results, form.output)

    def _form(self, key: tuple, args: Sequence[Any], flat: Sequence[Any]) -> Form:
        """The form for inputs such as have not come before."""
        self._check(args)
        with self._lock:
            form = self._by_key.get(key) or next((f for f in self._forms if _fits(f, key, flat)), None)
            if form is None:
                with _compiling():
                    form = self._compiled_freely(key, args, flat)
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
            if node.target is check_input and not isinstance(given := value(node.args[0]), Tensor):
                got = type(given).__name__
                raise KernelInputError(f"input {node.args[1]} must be a tensor, as in the graph's example", got=got)
            try:
                value(node)
            except RuntimeError as error:  # the checks are written for TorchScript, which has no other errors
                raise KernelInputError(str(error), hint="lower the model with an example of these inputs") from None

    # Compiling

    def _compiled_freely(self, key: tuple, args: Sequence[Any], flat: Sequence[Any]) -> Form:
        """A form in which sizes that differ are free; where torch fails with free sizes, one for these sizes."""
        check_compiler()
        free = self._free(key)
        failure: Exception | None = None
        if free and free not in self._failed:
            try:
                return self._compiled(key, args, flat, free)
            except _FixedSizes as error:
                log.info("compiled for these sizes only: %s", error)
            except ERRORS_OF_TRACING as error:
                if is_bug(error):
                    raise
                failure = error
        try:
            form = self._compiled(key, args, flat, frozenset())
        except ERRORS_OF_TRACING as error:
            if isinstance(error, QuantizationError) or is_bug(error):
                raise
            if ONE_PATH in str(error):
                raise DeviationError(str(error).split("\n\nWhile executing")[0]) from None
            raise CompilerError(
                "torch does not compile this graph", got=(str(error).strip().splitlines() or [""])[0],
                hint='backend="onednn" and backend="torchscript" may take it',
            ) from error  # fmt: skip
        if failure is not None:
            self._failed.add(free)
            log.info("compiled for these sizes only, since torch fails where they are free: %s", failure)
        return form

    def _compiled(self, key: tuple, args: Sequence[Any], flat: Sequence[Any], free: frozenset[tuple[int, int]]) -> Form:
        graph = fx.GraphModule(without_code(self), from_data(self._data))
        _, nested = pytree.tree_flatten(tuple(map(plain_containers, args)))
        example = pytree.tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in flat], nested)
        program = program_of(graph, example, None, _dynamic_shapes(graph.graph, flat, nested, free))
        module: Any = program.module(check_guards=False)
        module.graph.set_codegen(CodeGen())
        if self.dtype is not torch.float32:
            _narrow(module.graph)
        used, examples = _take(module.graph)
        convolutions = _convolutions(module.graph)
        numbers = _numbers(used, examples)
        for convolution in convolutions:
            if fault := convolution.fault(numbers(flat)):
                if free:
                    raise _FixedSizes(fault)
                convolution.in_float(module)
        module.recompile()
        run, code = self._through_inductor(module, examples)
        output = program.call_spec.out_spec
        assert output is not None
        checks = program.graph_module.meta[CHECKS]
        guards = _guards(examples, used)

        def fits(flat: Sequence[Any]) -> bool:
            return guards(flat) and not any(convolution.fault(numbers(flat)) for convolution in convolutions)

        return Form(key, used.free(examples), fits, run, used, output, code, checks)

    def _through_inductor(self, module: fx.GraphModule, examples: list[Any]) -> tuple[Any, str]:
        """What calls the code that Inductor makes of a graph, and that code."""
        from torch._dynamo.eval_frame import innermost_fn
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        codes: list[str] = []

        def compiled(*args: Any, **kwargs: Any) -> Any:
            result = compile_fx_inner(*args, **kwargs)
            codes.append(result.source_code)  # type: ignore[attr-defined]
            return result

        with _settings(self.cpp_wrapper), self._narrowing():
            run = compile_fx(module, examples, inner_compile=compiled)
        # Without what keeps TorchDynamo out: while another thread exports, it writes to a dict that both threads share.
        return innermost_fn(run), "\n".join(codes)

    def _narrowing(self) -> contextlib.AbstractContextManager:
        """Where the float parts become bfloat16, Inductor's passes expect autocast's casts."""
        return torch.autocast("cpu", self.dtype, enabled=self.dtype is not torch.float32)

    def _free(self, key: tuple) -> frozenset[tuple[int, int]]:
        """Sizes in which these inputs differ from what came before, if that is all in which they do."""
        found: set[tuple[int, int]] = set()
        for form in self._forms:
            if (differing := _differing(key, form.key)) is not None:
                found |= form.free | differing
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
    """Calls of kernels in code that Inductor generated, Python or C++, by name without overload."""
    called = re.findall(r"torch\.ops\.((?:onednn|mkldnn|quantized|aten|mkl)\.\w+)\.\w+\(", code)
    called += [f"extern.{name}" for name in re.findall(r"extern_kernels\.(\w+)\(", code)]
    in_cpp = re.findall(r"aoti_torch_cpu__(q\w+?_pointwise)(?:_binary)?_tensor\(", code)
    return Counter([*called, *(f"onednn.{name}" for name in in_cpp)])


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
def _compiling() -> Iterator[None]:
    """One compilation at a time, the user's own with ``torch.compile`` included: the lock is torch's."""
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        yield


@contextlib.contextmanager
def _settings(cpp_wrapper: bool) -> Iterator[None]:
    """Inductor's, while it compiles, on this thread alone, as all of its settings are: weights are constants, which its
    int8 passes ask for.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    passes = (*get_custom_graph_passes(config.joint_custom_post_pass), _double)
    settings = {
        "freezing": True, "cpp_wrapper": cpp_wrapper, "fallback_random": True, "joint_custom_post_pass": passes,
    }  # fmt: skip
    with torch.no_grad(), quiet(), config.patch(settings):
        yield


def _double(graph: fx.Graph) -> None:
    """``x + x`` as ``2 * x``, which is the same number: torch 2.13 asserts that what is added to the result of an int8
    layer is something else.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        a, b = node.args
        value = node.meta.get("val")
        if node.kwargs or not isinstance(b, fx.Node) or not isinstance(value, Tensor) or not _is_same(a, b):
            continue
        if value.is_floating_point():
            node.target, node.args = torch.ops.aten.mul.Tensor, (a, 2)


def _is_same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two nodes compute the same, which Inductor merges behind its passes."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and a == b
    if a is b or depth == 0 or a.op != "call_function" or a.is_impure():
        return a is b
    if (a.target, a.kwargs) != (b.target, b.kwargs) or len(a.args) != len(b.args):
        return False
    return all(_is_same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _said(error: Exception, checks: Mapping[str, str]) -> Exception:
    """An error as the graph's checks put it. Compiled code says it in symbols, ``Ne(u0, 0)``, numbered anew, and knows
    the sizes that were checked.
    """
    if isinstance(error, AssertionError):
        return DeviationError(f"{ONE_PATH}: {error}") if checks else KernelInputError(f"compiled code stopped: {error}")
    symbols = re.sub(r"^Expected (.*) but received .*$", r"\1", str(error))  # C++ adds a value
    said = [checks[symbols]] if symbols in checks else [
        message for known, message in checks.items() if _unnumbered(known) == _unnumbered(symbols)
    ]  # fmt: skip
    return DeviationError(" or ".join(dict.fromkeys(said))) if said else error


def _unnumbered(symbols: str) -> str:
    return re.sub(r"\b([us])\d+\b", r"\1", symbols)


def _dense(leaf: Any) -> Any:
    """Compiled code counts on the strides it was compiled for: those of contiguous tensors, or of channels_last."""
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) is not Tensor or not leaf.is_cpu or leaf.layout is not torch.strided:
        _check_memory(leaf)
    if leaf.is_neg() or leaf.is_conj():  # a sign that its reader applies, which compiled code does not know of
        leaf = leaf.resolve_neg().resolve_conj()
    if leaf.is_contiguous() or leaf.is_contiguous(memory_format=_last(leaf)):
        return leaf
    return leaf.contiguous()


def _check_memory(leaf: Tensor) -> None:
    """Raise if a tensor has no memory of its own on the CPU: compiled code reads its address unasked."""
    if not leaf.is_cpu or leaf.layout is not torch.strided:
        raise KernelInputError(
            "compiled code takes dense tensors on the CPU", got=f"{leaf.layout} on {leaf.device}",
            hint="pass to_dense(), on the CPU",
        )  # fmt: skip
    if isinstance(leaf, FakeTensor) or is_traceable_wrapper_subclass(leaf):
        raise KernelInputError("compiled code takes tensors that have memory", got=type(leaf).__name__)


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


def _differing(key: tuple, other: tuple) -> frozenset[tuple[int, int]] | None:
    """Sizes in which two keys differ, as in ``Form.free``; None if they differ in more."""
    if _like(key) != _like(other):
        return None
    found: set[tuple[int, int]] = set()
    for i, (now, before) in enumerate(zip(key[1:], other[1:], strict=True)):
        if isinstance(now[0], tuple):  # of a tensor
            found |= {(i, d) for d, (a, b) in enumerate(zip(now[0], before[0], strict=True)) if a != b}
        elif now != before:
            found.add((i, -1))
    return frozenset(found)


def _fits(form: Form, key: tuple, flat: Sequence[Any]) -> bool:
    differing = _differing(key, form.key)
    return differing is not None and differing <= form.free and form.fits(flat)


def _narrow(graph: fx.Graph) -> None:
    """Let dtypes be others than in the program, but for those of outputs."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    output = graph.output_node()
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            with graph.inserting_before(output):
                output.replace_input_with(node, graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32)))


def _take(graph: fx.Graph) -> tuple[Used, list[Any]]:
    """Drop the inputs that a graph does not read and add its free sizes; what it takes then, and examples of that."""
    placeholders = graph.find_nodes(op="placeholder")
    inputs = tuple(i for i, node in enumerate(placeholders) if node.users)
    sizes: dict[Any, tuple[int, int, Any]] = {}
    for i, node in enumerate(placeholders):
        if not node.users:
            graph.erase_node(node)
        elif isinstance(value := node.meta["val"], Tensor):
            shape: Iterable[Any] = value.shape
            for d, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    sizes.setdefault(size.node.expr, (i, d, size))
    with graph.inserting_before(next(iter(graph.nodes))):
        for i, d, _ in sizes.values():
            graph.placeholder(f"size_{i}_{d}")
    # Taken away, since for C++ wrappers Inductor trusts these rather than its arguments, and in them tensors only.
    examples = [*(size for _, _, size in sizes.values()), *(placeholders[i].meta.pop("val") for i in inputs)]
    return Used(tuple((i, d) for i, d, _ in sizes.values()), inputs), examples


def _guards(examples: Sequence[Any], used: Used) -> Callable[[Sequence[Any]], bool]:
    """What compiling assumed of sizes, as a function of the inputs."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(examples)
    shapes = None if mode is None else mode.shape_env
    code = None if shapes is None else shapes.produce_guards_expression(examples)
    if code is None or shapes is None:
        return lambda flat: True
    return lambda flat: bool(shapes.evaluate_guards_expression(code, used.of(flat)))


def _dynamic_shapes(
    graph: fx.Graph, flat: Sequence[Any], nested: pytree.TreeSpec, free: frozenset[tuple[int, int]]
) -> dict[str, Any]:
    """``torch.export``'s way to say which sizes are free."""
    shapes = [
        {d: Dim.AUTO for d in range(leaf.dim()) if (i, d) in free} if isinstance(leaf, Tensor)
        else Dim.AUTO if (i, -1) in free else None
        for i, leaf in enumerate(flat)
    ]  # fmt: skip
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return dict(zip(names, pytree.tree_unflatten(shapes, nested), strict=True))


# Int8 convolutions that go wrong


class _FixedSizes(Exception):
    """The sizes must stay as they are, since for these one of the graph's convolutions has no int8 kernel."""


def _words(geometry: Geometry) -> str:
    """Why the kernel that Inductor would call is not to be trusted with a convolution, or ""."""
    fault = fault_of(geometry)
    return "" if fault is None else f"torch's int8 kernel is wrong on some CPU for {fault.name}"


@dataclass(frozen=True)
class _Convolution:
    """An int8 convolution of the graph that Inductor is given.

    Attributes:
        node: it.
        shape: of its input: integers, and expressions where sizes are free.
        geometry: for sizes of some kind.
    """

    node: fx.Node
    shape: tuple[int | sympy.Expr, ...]
    geometry: Geometry

    def fault(self, numbers: Mapping[sympy.Symbol, int]) -> str:
        """What its int8 kernel does wrong, where free sizes are ``numbers``."""
        sizes = [s if isinstance(s, int) else s.subs(numbers) for s in self.shape]
        if not isinstance(sizes[0], int) and not sizes[0].is_Integer:
            sizes[0] = 2  # a batch whose size depends on values
        if not all(isinstance(size, int) or size.is_Integer for size in sizes):
            return "int8 kernels are wrong for some sizes, and those of an image depend on values"
        geometry = dataclasses.replace(self.geometry, shape=tuple(map(int, sizes)))
        image, free = geometry.shape[2:], any(not isinstance(size, int) for size in self.shape)
        if free and (geometry.shape[1] == 1 or (max(image) == 1 and max(geometry.result) > 1)):
            return "torch 2.13 is wrong about the layout of its result where sizes are free"
        return _words(geometry)

    def in_float(self, module: fx.GraphModule) -> None:
        """Have it read its weight as a constant in float, which leaves it to a float kernel."""
        weight: Any = self.node.args[1]
        tensors = (operator.attrgetter(str(a.target))(module) if isinstance(a, fx.Node) else a for a in weight.args)
        name = f"{self.node.name}_in_float"
        module.register_buffer(name, weight.target(*tensors))
        with module.graph.inserting_before(self.node):
            constant = module.graph.get_attr(name)
        constant.meta = dict(weight.meta)
        self.node.replace_input_with(weight, constant)


def _convolutions(graph: fx.Graph) -> list[_Convolution]:
    """Those that Inductor makes int8 kernels of."""
    found = []
    x: Any
    weight: Any
    rest: Any
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default):
        x, weight, *rest = node.args
        if not _is_made_by(x, _DEQUANTIZE) or not _is_made_by(weight, _DEQUANTIZE_PER_CHANNEL):
            continue
        _, stride, padding, dilation, groups = (*rest, *_CONVOLUTION_DEFAULTS[len(rest) :])
        sizes = (s.node.expr if isinstance(s, torch.SymInt) else s for s in x.meta["val"].shape)
        outputs, _, *kernel = weight.meta["val"].shape
        stride, padding, dilation = (tuple(ints(value, 2)) for value in (stride, padding, dilation))
        geometry = Geometry((), outputs, tuple(kernel), stride, padding, dilation, groups)
        found.append(_Convolution(node, tuple(sizes), geometry))
    return found


_CONVOLUTION_DEFAULTS: tuple[Any, ...] = (None, [1, 1], [0, 0], [1, 1], 1)
_DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
_DEQUANTIZE_PER_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default


def _is_made_by(node: Any, function: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is function


def _numbers(used: Used, examples: Sequence[Any]) -> Callable[[Sequence[Any]], dict[sympy.Symbol, int]]:
    """What free sizes and integers are, as a function of the inputs."""
    symbols = [example.node.expr if isinstance(example, torch.SymInt) else None for example in examples]

    def numbers(flat: Sequence[Any]) -> dict[sympy.Symbol, int]:
        return {symbol: n for symbol, n in zip(symbols, used.of(flat), strict=True) if symbol is not None}

    return numbers


# Rewriting the graph for what Inductor knows


def _widened(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """A convolution over lengths, and what follows it, as one over images of one row: Inductor has more of those."""
    graph, head, last = lowering.graph, nodes[0], nodes[-1]
    _, bound = bind(head)  # type: ignore[misc]
    name = f"{bound[1].args[0].target}_wide"
    if not hasattr(lowering.module, name.replace(".", "_")):
        lowering.module.register_buffer(name.replace(".", "_"), lowering.tensor(bound[1].args[0]).unsqueeze(2))
    with graph.inserting_before(last):
        x = _with_a_row(graph, bound[0])
        weight = graph.call_function(
            bound[1].target, (graph.get_attr(name.replace(".", "_")), *bound[1].args[1:]), bound[1].kwargs
        )
        out, inner, length = bound[1].meta["shape"]
        weight.meta = {**bound[1].meta, "shape": (out, inner, 1, length)}
        sizes = ((low, ints(value, 1)[0]) for low, value in zip((1, 0, 1), bound[3:6], strict=True))
        new = {head: graph.call_function(F.conv2d, (x, weight, bound[2], *sizes, bound[6]))}
        for node in nodes[1:]:
            others = {n: _with_a_row(graph, n) for n in node.all_input_nodes if n not in new}
            new[node] = graph.node_copy(node, (others | new).__getitem__)
        flat = graph.call_function(torch.squeeze, (new[last], 2))
    for node, wide in {**new, bound[1]: weight}.items():
        wide.meta = {**node.meta, "shape": (*node.meta["shape"][:2], 1, *node.meta["shape"][2:])}
    flat.meta = dict(last.meta)
    lowering.replace(last, flat)
    steps = "".join(f" + {row.name}" for n in nodes[1:] if (row := row_of(n)) is not None)
    return f"onednn.qconv2d_pointwise{steps}" + " + quantize" * is_quantize(last)


def _with_a_row(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``[N, C, L]`` as ``[N, C, 1, L]``, on the integers if there are any."""
    if is_dequantize(node):
        wide = graph.call_function(DEQUANTIZE, (_with_a_row(graph, node.args[0]), *node.args[1:]))  # type: ignore[arg-type]
    elif is_call(node, torch.squeeze) and node.args[1:] == (2,) and len(node.args[0].meta["shape"]) == 4:  # type: ignore[union-attr]
        return node.args[0]  # type: ignore[return-value]
    else:
        wide = graph.call_function(torch.unsqueeze, (node, 2))
    wide.meta = {**node.meta, "shape": (*node.meta["shape"][:2], 1, *node.meta["shape"][2:])}
    return wide


def _dilates_nothing(node: fx.Node) -> bool:
    """A convolution whose kernel has one element along a dimension that it dilates, where dilation means nothing."""
    return computes(1, 2)(node) and _dilation(node) != ints(bind(node)[1][5], bind(node)[0].ndim)  # type: ignore[index]


def _dilation(node: fx.Node) -> list[int]:
    row, bound = bind(node)  # type: ignore[misc]
    return plain_dilation(list(bound[1].meta["shape"][2:]), ints(bound[5], row.ndim))


def _undilated(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """oneDNN 3.12 reads out of bounds there, with padding."""
    (node,) = nodes
    _, bound = bind(node)  # type: ignore[misc]
    bound[5] = _dilation(node)
    node.args, node.kwargs = tuple(bound), {}
    return "dilation of what has one element"


def _has_one_channel(node: fx.Node) -> bool:
    return computes(2)(node) and bind(node)[1][1].meta["shape"][1] == 1 and bind(node)[1][6] == 1  # type: ignore[index]


def _with_a_channel(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Beside its one channel another, which weighs nothing: of one channel torch 2.13 takes what int8 convolutions
    return for contiguous where sizes are free, as it is of float ones; it is channels_last.
    """
    (node,) = nodes
    _, (source, weight, *_) = bind(node)  # type: ignore[misc]
    graph, int8 = lowering.graph, weight.args[0]
    name = f"{int8.target}_padded".replace(".", "_")
    if not hasattr(lowering.module, name):
        lowering.module.register_buffer(name, F.pad(lowering.tensor(int8), (0, 0, 0, 0, 0, 1)))
    with graph.inserting_before(node):
        q = graph.call_function(F.pad, (source.args[0], (0, 0, 0, 0, 0, 1)))
        wide = graph.call_function(source.target, (q, *source.args[1:]), source.kwargs)
        padded = graph.call_function(weight.target, (graph.get_attr(name), *weight.args[1:]), weight.kwargs)
    batch, _, *image = source.meta["shape"]
    q.meta, wide.meta = ({**n.meta, "shape": (batch, 2, *image)} for n in (source.args[0], source))
    padded.meta = {**weight.meta, "shape": (weight.meta["shape"][0], 2, *weight.meta["shape"][2:])}
    for old, new in ((source, wide), (weight, padded)):
        node.replace_input_with(old, new)
        lowering.erase(old)
    return "a channel of zeros beside the one"


def _adds_alike(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    head, add = nodes[:2]
    others = [n for n in add.all_input_nodes if n is not head]
    alike = len(others) == 1 and others[0].op != "get_attr" and others[0].meta.get("shape") == head.meta["shape"]
    return "" if alike else "the other operand is no other tensor of this shape"


def _pools_wrongly(node: fx.Node) -> bool:
    """A max pool that Inductor takes for ``quantized.max_pool2d``, which torch 2.13 then calls with other options."""
    found = bind(node)
    if found is None or not found[0].name.startswith("max_pool") or not moves(node):
        return False
    return found[0].ndim != 2 or bool(found[1][5])


def _pools_levels(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """The largest integer, in generated code."""
    (node,) = nodes
    graph, source = lowering.graph, node.args[0]
    with graph.inserting_before(node):
        levels = graph.call_method("to", (source.args[0], torch.float32))  # type: ignore[union-attr]
    levels.meta = dict(source.meta)  # type: ignore[union-attr]
    with graph.inserting_after(node):
        integers = graph.call_method("to", (node, torch.uint8))
    integers.meta = {**node.meta, "dtype": torch.uint8}
    for reader in list(node.users):
        if reader is not integers:
            lowering.replace(reader, integers)
    node.replace_input_with(source, levels)  # type: ignore[arg-type]
    lowering.erase(source)  # type: ignore[arg-type]
    return "max pool of integers, generated"


def _reads_strides(node: fx.Node) -> bool:
    """A linear layer whose input is not contiguous, which Inductor would take for a batch of products."""
    found = bind(node)
    return (
        found is not None and found[0].name == "linear" and is_dequantize(found[1][0]) and is_weight(found[1][1])
        and len(found[1][0].meta["shape"]) > 2 and not found[1][0].meta.get("contiguous", True)
    )  # fmt: skip


def _contiguous(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    (node,) = nodes
    source = bind(node)[1][0]  # type: ignore[index]
    with lowering.graph.inserting_before(source):
        q = lowering.graph.call_method("contiguous", (source.args[0],))
        dense = lowering.graph.call_function(DEQUANTIZE, (q, *source.args[1:]))
    q.meta = {**source.args[0].meta, "contiguous": True}
    dense.meta = {**source.meta, "contiguous": True}
    node.replace_input_with(source, dense)
    lowering.erase(source)
    return "contiguous"


def _in_float(node: fx.Node) -> bool:
    """A weight that is read by what has no int8 kernel here."""
    readers = [row_of(user) for user in node.users]
    return is_weight(node) and not any(row is not None and row.name in _INT8 for row in readers)


def _as_constant(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """Inductor keeps what dequantizes a weight, for its own passes, and would run it in each call."""
    (node,) = nodes
    value = node.target(*fx.map_arg(node.args, lowering.tensor), **node.kwargs)  # type: ignore[operator]
    name = f"{node.name}_float"
    lowering.module.register_buffer(name, value)
    with lowering.graph.inserting_before(node):
        constant = lowering.graph.get_attr(name)
    constant.meta = dict(node.meta)
    for user in node.users:
        if user.meta.get("op") is not None:
            lowering.reasons[user.meta["op"]] = _NO_KERNEL
    lowering.replace(node, constant)
    return "a constant in float"


#: Ops for which Inductor calls int8 kernels.
_INT8 = frozenset({"conv1d", "conv2d", "linear"})
_NO_KERNEL = "Inductor calls no int8 kernel for this op; values and weights are rounded as before"


def _fault(node: fx.Node) -> str:
    """What the int8 kernel of a convolution does wrong for the example's sizes."""
    if not computes(2)(node) or isinstance(bind(node)[1][4], str):  # type: ignore[index]
        return ""
    _, (x, weight, _, *sizes, groups) = bind(node)  # type: ignore[misc]
    outputs, _, *kernel = weight.meta["shape"]
    stride, padding, dilation = (tuple(ints(value, 2)) for value in sizes)
    return _words(Geometry(tuple(x.meta["shape"]), outputs, tuple(kernel), stride, padding, dilation, groups))


def _is_faulty(node: fx.Node) -> bool:
    return bool(_fault(node))


def _in_float_by_fault(lowering: Lowering, nodes: Sequence[fx.Node]) -> str:
    """A weight of its own in float, so that other readers keep theirs."""
    (node,) = nodes
    reason, weight = _fault(node), bind(node)[1][1]  # type: ignore[index]
    with lowering.graph.inserting_before(node):
        own = lowering.graph.node_copy(weight)
    own.meta = dict(weight.meta)
    node.replace_input_with(weight, own)
    _as_constant(lowering, [own])
    lowering.erase(weight)
    if (op := node.meta.get("op")) is not None:
        lowering.reasons[op] = f"{reason}; values and weights are rounded as before"
    return f"float: {reason}"


def _conv1d(node: fx.Node) -> bool:
    return computes(1)(node) and len(node.meta["shape"]) == 3


REWRITES: list[Rewrite] = [
    on("dilation", _dilates_nothing, _undilated),
    *(
        Rewrite(f"conv1d{suffix}", [_conv1d, *steps], guard, _widened)
        for suffix, steps, guard in epilogues(_adds_alike, fine)
    ),
    on("one_channel", _has_one_channel, _with_a_channel),
    on("max_pool", _pools_wrongly, _pools_levels),
    on("linear_contiguous", _reads_strides, _contiguous),
    on("known_fault", _is_faulty, _in_float_by_fault),
    on("weight_in_float", _in_float, _as_constant),
]


def prepare(lowering: Lowering) -> None:
    """Rewrite a Q/DQ graph, which Inductor takes as it is, into one of which it makes more."""
    lowering.apply(REWRITES)
    remove_dead(lowering.graph)
    lowering.graph.lint()
