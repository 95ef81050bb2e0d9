"""What ``lower`` returns: a graph that Inductor compiled, for one set of shapes or several."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from ..._torch import compile_graph, innermost_function, pytree
from ...errors import ERRORS_OF_CODE, CompilerError, DeviationError, KernelInputError, QuantizationError, is_bug
from ...exporting.program import CHECKS, plain_containers, program_of
from ...graph.nodes import function_of
from ...graph.signature import check_absent, check_input
from ...graph.writer import ONE_PATH
from ...op_facts import writes
from ..graph_data import from_data
from ..lowered_model import LoweredModel, sharing, without_code, write_back, written_inputs
from ..passes import written_attributes
from .compiling import (
    calls_of,
    check_compiler,
    compiling_alone,
    dynamic_shapes,
    guards_of,
    inductor_settings,
    narrow,
    numbers_of,
    take_used,
)
from .convolutions import FixedSizes, convolutions_of
from .forms import Form, added_inputs, as_dense, differing_sizes, key_of

log = logging.getLogger("dbrq.lowering")

#: Compiled forms that a model keeps; the one that was compiled first goes first.
MAX_FORMS = 16


class InductorModel(LoweredModel):
    """A model compiled by Inductor. The first shapes get a form of their own; when others come, the sizes that differ
    become free, and what only they differ in is not compiled again.

    Attributes:
        max_forms: compiled forms kept.
        cpp_wrapper: whether what calls the kernels is C++ too, and not Python.
    """

    def _begin(self, cpp_wrapper: bool = False, max_forms: int = MAX_FORMS) -> None:
        self.cpp_wrapper, self.max_forms = cpp_wrapper, max_forms
        self._forms: list[Form] = []
        self._failed: set[frozenset[tuple[int, int]]] = set()  # free sizes with which torch failed
        self._by_key: OrderedDict[tuple, Form] = OrderedDict()
        graph = from_data(self._data)
        self._written = written_attributes(graph)
        self._writes = any(map(writes, graph.nodes))
        self._writes_to = written_inputs(graph)
        self._added = added_inputs(graph)
        self._checks = [n for n in graph.nodes if n.target in (check_input, check_absent)]

    def _options(self) -> dict[str, Any]:
        return {"cpp_wrapper": self.cpp_wrapper, "max_forms": self.max_forms}

    # Calling

    def plain(self, args: Sequence[Any]) -> Any:
        given = pytree.tree_leaves(tuple(map(plain_containers, args)))
        flat = [as_dense(leaf) for leaf in given]
        if any(self._added):
            flat = self._apart(args, flat)
        if self._writes and sharing(given):
            raise DeviationError(
                "the graph writes to tensors, and inputs of this call share memory",
                expected="inputs that do not: compiled code would not see the writes in both", got="inputs that do",
                hint='pass copies, or use backend="onednn" or "torchscript"',
            )  # fmt: skip
        key = (torch.get_num_threads(), *map(key_of, flat))
        form = self._by_key.get(key)
        if form is None:
            form = self._form(key, args, flat)
        try:
            with torch.no_grad():
                results = form.run(*form.used.of(flat))
        except (RuntimeError, AssertionError) as error:
            raise _said(error, form.checks) from None
        write_back(args, flat, self._writes_to)
        for result in results:
            if isinstance(result, Tensor) and result.__dict__:  # torch's notes on sizes of its own
                result.__dict__.clear()
        return pytree.tree_unflatten(results, form.output)

    def _apart(self, args: Sequence[Any], flat: list[Any]) -> list[Any]:
        """The leaves of the inputs, copied where a kernel may take them for its accumulator."""
        added = [a for arg, a in zip(args, self._added, strict=True) for _ in pytree.tree_leaves(plain_containers(arg))]
        return [
            leaf.clone() if apart and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf, apart in zip(flat, added, strict=True)
        ]

    def _form(self, key: tuple, args: Sequence[Any], flat: Sequence[Any]) -> Form:
        """The form for inputs such as have not come before."""
        self._check(args)
        with self._lock:
            form = self._by_key.get(key) or next((f for f in self._forms if f.takes(key, flat)), None)
            if form is None:
                with compiling_alone():
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
                env[node] = function_of(node)(*fx.map_arg(node.args, value), **node.kwargs)
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
            except FixedSizes as error:
                log.info("compiled for these sizes only: %s", error)
            except ERRORS_OF_CODE as error:
                if is_bug(error):
                    raise
                failure = error
        try:
            form = self._compiled(key, args, flat, frozenset())
        except ERRORS_OF_CODE as error:
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
        program = program_of(graph, example, None, dynamic_shapes(graph.graph, flat, nested, free))
        module: Any = program.module(check_guards=False)
        module.graph.set_codegen(CodeGen())
        if self.dtype is not torch.float32:
            narrow(module.graph)
        used, examples = take_used(module.graph)
        convolutions = convolutions_of(module.graph)
        numbers = numbers_of(used, examples)
        for convolution in convolutions:
            if fault := convolution.fault(numbers(flat)):
                if free:
                    raise FixedSizes(fault)
                convolution.in_float(module)
        module.recompile()
        run, code = self._through_inductor(module, examples)
        output = program.call_spec.out_spec
        assert output is not None
        checks = program.graph_module.meta[CHECKS]
        guards = guards_of(examples, used)

        def fits(flat: Sequence[Any]) -> bool:
            return guards(flat) and not any(convolution.fault(numbers(flat)) for convolution in convolutions)

        return Form(key, used.free(examples), fits, run, used, output, code, checks)

    def _through_inductor(self, module: fx.GraphModule, examples: list[Any]) -> tuple[Any, str]:
        """What calls the code that Inductor makes of a graph, and that code."""
        codes: list[str] = []
        with inductor_settings(self.cpp_wrapper), self._narrowing():
            run = compile_graph(module, examples, lambda result: codes.append(result.source_code))
        # Without what keeps TorchDynamo out: while another thread exports, it writes to a dict that both threads share.
        return innermost_function(run), "\n".join(codes)

    def _narrowing(self) -> contextlib.AbstractContextManager:
        """Where the float parts become bfloat16, Inductor's passes expect autocast's casts."""
        return torch.autocast("cpu", self.dtype, enabled=self.dtype is not torch.float32)

    def _free(self, key: tuple) -> frozenset[tuple[int, int]]:
        """Sizes in which these inputs differ from what came before, if that is all in which they do."""
        found: set[tuple[int, int]] = set()
        for form in self._forms:
            if (differing := differing_sizes(key, form.key)) is not None:
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
