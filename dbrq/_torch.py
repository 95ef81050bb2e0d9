"""Everything private of torch that dbrq relies on: what begins with an underscore, or is in a module that does.

Nothing else in dbrq spells such names, but for what ``nn.Module`` keeps (``_parameters`` and the like), and what
TorchScript compiles in ``kernels/script/``. tests/test_torch*.py say what each has to do, so that a new torch
fails there first. What functions import here would import torch's compiler.
"""

from __future__ import annotations

import functools
import importlib
import operator
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the ops of quantized_decomposed
import torch.fx.experimental._config as _shapes
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._weights_only_unpickler import _get_allowed_globals
from torch.autograd import forward_ad
from torch.fx.node import _get_qualified_name
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor", "FakeTensorMode", "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "detect_fake_mode",
    "is_traceable_wrapper_subclass", "pytree",
]  # fmt: skip

# Files

#: The class whose methods functions like ``torch.relu`` are, to pickle.
FUNCTIONS: Any = torch._C._VariableFunctionsClass  # type: ignore[attr-defined]  # not in its stub


@functools.cache
def weights_only_globals() -> dict[str, Any]:
    """Qualified names -> the classes and functions that torch itself takes from files of strangers."""
    return {**_get_allowed_globals()}


# Modes: what sees the functions and the ops that run

#: A context in which neither function modes nor ``__torch_function__`` of subclasses see what is called.
without_function_modes = torch._C.DisableTorchFunction
#: The ``__torch_function__`` of a subclass that has none of its own, and whose results are plain.
no_torch_function: Any = torch._C._disabled_torch_function_impl  # torch's stub of it is wrong
#: Calls a function of torch's Python so that the mode sees what it is made of, but not itself.
skip_one_hop: Callable[..., Any] = torch._C._skip_one_hop_torch_function
#: The number of TorchFunctionModes that are on.
count_function_modes = torch._C._len_torch_function_stack
#: The innermost TorchFunctionMode, or None.
current_function_mode = _get_current_function_mode
#: A context without the innermost TorchFunctionMode.
without_current_function_mode: Callable[[], AbstractContextManager[Any]] = _pop_mode_temporarily
#: The number of TorchDispatchModes that are on.
count_dispatch_modes = torch._C._len_torch_dispatch_stack
#: A context without any TorchDispatchMode.
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def dispatch_modes() -> list[Any]:
    """The TorchDispatchModes that are on."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(count_dispatch_modes())]


# Tensors

#: Counts the writes to a tensor and to its views.
version: Callable[[Tensor], int] = operator.attrgetter("_version")
#: What a tensor is a view of, as autograd has it; None for one that is no view.
base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
#: A number that stands for a storage while it is alive.
storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
#: A tensor without elements of a class that has ``__torch_dispatch__``.
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

# Derivatives

#: Whether a tensor stands for others inside vmap, or is followed by torch.func's grad, jvp and the like.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: How many of torch.func's transforms are on; None for none.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def dual_level() -> int:
    """The level of forward-mode AD that is on, -1 for none."""
    return forward_ad._current_level


# Ops

#: The product of two int8 matrices in int32.
int_mm: Callable[..., Tensor] = torch._int_mm
#: Products of groups of rows, in float.
grouped_mm: Callable[..., Tensor] = torch._grouped_mm
#: What graphs check conditions with when they run.
assert_: Callable[..., None] = torch._assert
#: What checks a condition while torch.export traces.
check_traced: Callable[..., None] = torch._check
#: What programs check numbers with that were read from tensors; the message is the second argument.
ASSERT_SCALAR: OpOverload = torch.ops.aten._assert_scalar.default
#: What programs check dtypes with.
ASSERT_METADATA: OpOverload = torch.ops.aten._assert_tensor_metadata.default
#: The ops that quantized graphs are made of.
quantized_decomposed: Any = torch.ops.quantized_decomposed
#: The schema of an overload: arguments, what they alias and whether they are written to, results.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")


def packed_layout(packed: Tensor) -> bytes:
    """How oneDNN laid out a packed weight; equal for weights that can share one tensor."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


# Modules

#: What a padded convolution gives ``F.pad``.
reversed_padding: Callable[[nn.Module], list[int]] = operator.attrgetter("_reversed_padding_repeated_twice")
#: Has an RNN make its list of weights anew.
init_flat_weights: Callable[[nn.RNNBase], None] = operator.methodcaller("_init_flat_weights")
#: Where ``prune`` keeps the name of the tensor that it prunes.
PRUNED = "_tensor_name"
#: The child under which ``torch.compile(module)`` keeps the module.
COMPILED = "_orig_mod"
#: Names of the buffers of a module that a state dict leaves out; a buffer that is added to it is one of them.
unsaved_buffers: Callable[[nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")
#: Where a configuration of transformers has which attention its model takes.
ATTENTION = "_attn_implementation"
#: The pre-hooks of every module.
global_forward_pre_hooks: Any = nn.modules.module._global_forward_pre_hooks

# Graphs

#: Whether a node was taken out of its graph.
is_erased: Callable[[fx.Node], bool] = operator.attrgetter("_erased")
#: What writes a graph's code; ``Graph.set_codegen`` sets it.
codegen_of: Callable[[fx.Graph], Any] = operator.attrgetter("_codegen")
#: The name under which generated code finds a function.
qualified_name: Callable[[Callable], str] = _get_qualified_name
#: torch.export's settings of sizes, for a while.
shape_settings: Callable[..., AbstractContextManager[Any]] = _shapes.patch  # type: ignore[attr-defined]  # torch puts it there when it is imported

# TorchScript

#: The schemas of an operator's overloads, by its name.
schemas_of: Callable[[str], list[Any]] = torch._C._jit_get_schemas_for_operator
#: The operator that TorchScript takes a function for; None for others.
find_builtin: Callable[[Callable], str | None] = torch.jit._builtins._find_builtin
#: The name that TorchScript knows a function by.
script_name: Callable[[Callable], str] = torch._jit_internal._qualified_name
#: Functions of which TorchScript has two forms, chosen by an argument.
boolean_dispatched: Any = torch._jit_internal.boolean_dispatched
#: The overloads of a function of torch's Python, by its name; None if it has none.
script_overloads: Callable[[str], Any] = torch._jit_internal._get_fn_overloads
#: What tells TorchScript that an optional value is given; else it returns its argument.
unwrap_optional: Callable[[Any], Any] = torch.jit._unwrap_optional
#: Frees what TorchScript keeps of a method's past runs.
flush_plans: Callable[[Any], None] = operator.methodcaller("_debug_flush_compilation_cache")

# torch.compile and torch.export

#: What logs the sizes that torch.export cannot keep free.
EXPORT_LOGGERS = ("torch._export", "torch.fx.experimental.symbolic_shapes")
_loading = threading.Lock()


def load_compiler() -> None:
    """Import torch's compiler: on one thread at a time, since its imports go in circles in which two could meet, and
    before its loggers are asked for quiet.
    """
    with _loading:
        importlib.import_module("torch._dynamo")


def is_compiling_flag() -> Any:
    """What ``torch.compiler.is_compiling`` returns, where TorchDynamo does not run."""
    return torch.compiler._is_compiling_flag


def set_is_compiling_flag(flag: Any) -> None:
    """``is_compiling_flag`` from now on, on all threads."""
    torch.compiler._is_compiling_flag = flag


def skip_when_compiling(function: Callable, reason: str) -> None:
    """Keep torch.compile out of ``function`` and of all that it calls."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function.__dict__["_torchdynamo_disable"] = True
    function.__dict__["_torchdynamo_disable_msg"] = reason


def compile_lock() -> AbstractContextManager[Any]:
    """The lock that ``torch.compile`` holds while it compiles."""
    load_compiler()
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def innermost_function(function: Any) -> Any:
    """A compiled function without what keeps TorchDynamo out of it."""
    load_compiler()
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(function)


def cpp_compiler() -> str:
    """The C++ compiler that Inductor calls; raises ``no_cpp_compiler()`` or OSError if there is none."""
    load_compiler()
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def no_cpp_compiler() -> type[Exception]:
    """What Inductor raises where there is no C++ compiler."""
    load_compiler()
    from torch._inductor.exc import InvalidCxxCompiler

    return InvalidCxxCompiler


def inductor_settings(settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Inductor's settings, for a while and on this thread."""
    load_compiler()
    from torch._inductor import config

    return config.patch(settings)


def inductor_late_passes() -> tuple[Any, ...]:
    """The passes that Inductor runs on joint graphs, after its own."""
    load_compiler()
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    return tuple(get_custom_graph_passes(config.joint_custom_post_pass))


def compile_graph(module: fx.GraphModule, examples: list[Any], compiled: Callable[[Any], None]) -> Any:
    """What calls the code that Inductor makes of a graph; ``compiled`` is given each result, which has that code."""
    load_compiler()
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(*args: Any, **kwargs: Any) -> Any:
        result: Any = compile_fx_inner(*args, **kwargs)
        compiled(result)
        return result

    return compile_fx(module, examples, inner_compile=inner)
