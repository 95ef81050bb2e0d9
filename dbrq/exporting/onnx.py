"""``export_onnx``: the Q/DQ graph as an ONNX file, through torch's own exporter."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from .._torch import pytree
from ..errors import ERRORS_OF_CODE, ConfigurationError, ExportError, is_bug
from ..quiet import quiet
from .program import exported

#: The opset of what torch translates ops to; ONNX Runtime and OpenVINO have taken it for years.
OPSET = 20


def export_onnx(
    quantized: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int = OPSET,
) -> None:
    """Write a converted model to ``path`` as an ONNX model in QDQ form, which ONNX Runtime and OpenVINO take.

    Weights are stored as int8, per channel, before DequantizeLinear; activations are uint8 between QuantizeLinear and
    DequantizeLinear, with the scales and zero points of the converted model. What it computes in float stays float.
    Inputs are named after the arguments of ``forward``, outputs after the keys of the output, or ``output``, or
    ``output_0`` and so on. Needs ``pip install dbrq[onnx]``.

    Args:
        quantized: what ``convert`` returned. It is not changed.
        example_inputs: one call's arguments, as in ``prepare``. The inputs given become the file's.
        example_kwargs: keyword arguments beside them.
        path: the file. Weights of more than 1.5 GB go into a second one beside it, ``path`` and ``.data``.
        dynamic_shapes: as in ``torch.export.export``. None: every size that the graph does not depend on stays free.
        opset_version: of ONNX; 18 or newer.

    Raises:
        RewriteError: one graph cannot stand for the model, for the reason and the line that it names.
        ExportError: onnx or onnxscript is not installed, the path cannot be written, or ONNX lacks what the graph does.
            What was at ``path`` is left as it was.

    An ONNX file cannot assert. What the graph of ``rewrite`` asserts of sizes (``if n > 3``) goes unchecked there; for
    what the code decided on values of tensors there is a warning.

    >>> import dbrq, os, tempfile
    >>> quantized = dbrq.quantize(nn.Linear(4, 3), [torch.randn(8, 4)])
    >>> path = os.path.join(tempfile.mkdtemp(), "linear.onnx")
    >>> dbrq.export_onnx(quantized, torch.randn(8, 4), path)
    >>> import onnx
    >>> [node.op_type for node in onnx.load(path).graph.node]
    ['DequantizeLinear', 'QuantizeLinear', 'DequantizeLinear', 'Gemm']
    """
    translations = _translations()
    if not isinstance(opset_version, int) or opset_version < 18:
        raise ConfigurationError("opset_version is too old", expected="18 or newer", got=opset_version,
                                 hint=f"leave it out for {OPSET}")  # fmt: skip
    path = Path(path)
    with _writing(path):
        # In the same folder, so that the file can be moved to its place.
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=".dbrq-onnx-")
    with folder:
        program, recording = exported(quantized, example_inputs, example_kwargs, dynamic_shapes)
        onnx_program = _translated(program, translations, opset_version)
        with _writing(path):
            onnx_program.save(Path(folder.name) / path.name)  # a file with external data holds that file's name
            for part in sorted(Path(folder.name).iterdir(), reverse=True):  # the data before the model that needs it
                os.replace(part, path.parent / part.name)
    if recording.decisions:
        made = recording.graph.meta["decisions"]
        warnings.warn(
            "dbrq: the model's code decided on values of tensors, which the ONNX file does not check: "
            + "; ".join(made[:3]) + (f"; and {len(made) - 3} more" if len(made) > 3 else ""),
            stacklevel=2,
        )  # fmt: skip


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"the file cannot be written: {error}", got=str(path),
                          hint="the folder must exist, and you must be allowed to write there") from error  # fmt: skip


def _translations() -> dict:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401

        from .onnx_ops import TRANSLATIONS
    except ImportError as error:
        raise ExportError(
            f"export_onnx needs the packages onnx and onnxscript: {error}", hint="pip install dbrq[onnx]"
        ) from error
    return TRANSLATIONS


def _translated(program: ExportedProgram, translations: dict, opset_version: int) -> torch.onnx.ONNXProgram:
    try:
        with torch.no_grad(), quiet(loggers=("torch.onnx", "onnxscript", "onnx_ir")):
            onnx_program = torch.onnx.export(program, dynamo=True, custom_translation_table=translations,
                                             opset_version=opset_version, verbose=False)  # fmt: skip
    except ERRORS_OF_CODE as error:
        if is_bug(error):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch wraps what happened in advice to its developers
            cause = cause.__cause__
        raise ExportError(
            f"torch.onnx does not take the graph: {type(cause).__name__}: {cause}",
            hint="dbrq.rewrite shows the graph; an op that ONNX lacks must be written with others in the model",
        ) from error
    assert onnx_program is not None
    model = onnx_program.model
    _forget_source(model)
    _transpose_weights(model)
    _name_ends(model, program)
    _name_sizes(onnx_program)
    return onnx_program


def _forget_source(model: Any) -> None:
    """Drop the source lines, with paths of this machine, that torch's exporter attaches to everything."""
    graph = model.graph
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


def _transpose_weights(model: Any) -> None:
    """Store int8 weights as MatMul reads them: with a Transpose between, runtimes need not see that they are int8."""
    import onnx_ir as ir

    graph = model.graph
    for node in list(graph):
        source = node.inputs[0].producer() if node.op_type == "Transpose" else None
        if source is None or source.op_type != "DequantizeLinear":
            continue
        weight, result = source.inputs[0], source.outputs[0]
        alone = len(weight.uses()) == len(result.uses()) == 1 and not result.is_graph_output()
        if weight.const_value is None or not alone or node.outputs[0].is_graph_output():
            continue
        order = node.attributes["perm"].as_ints()
        array = weight.const_value.numpy().transpose(order)
        weight.const_value = ir.tensor(array.copy(order="C"), name=weight.name)
        weight.shape = result.shape = ir.Shape(array.shape)
        source.attributes["axis"] = ir.AttrInt64("axis", order.index(source.attributes["axis"].as_int()))
        ir.convenience.replace_all_uses_with(node.outputs[0], result)
        graph.remove(node, safe=True)


def _name_ends(model: Any, program: ExportedProgram) -> None:
    """Inputs get the names of arguments; outputs those they have in the model's own output, and values of their own."""
    import onnx_ir as ir

    graph, signature = model.graph, program.graph_signature
    values = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    values |= {value.name: value for node in graph.all_nodes() for value in node.outputs}

    def rename(value: Any, name: str) -> None:
        other = values.pop(name, None)
        if other is not None and other is not value:
            other.name = f"{name}_value"
        value.name = name

    inputs = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    arguments = [arg for arg in inputs if not isinstance(arg, ConstantArgument)]
    for value, argument in zip(graph.inputs, arguments, strict=True):
        rename(value, argument.name)  # torch renames inputs that the graph returns
    taken = {value.name for value in graph.inputs}
    outputs = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    nested = pytree.tree_unflatten(outputs, program.call_spec.out_spec)
    paths = [path for path, arg in pytree.tree_flatten_with_path(nested)[0] if not isinstance(arg, ConstantArgument)]
    for i, path in enumerate(paths):
        value = graph.outputs[i]
        if value.producer() is None or value in graph.outputs[:i]:
            copied = ir.node("Identity", [value])
            copied.outputs[0].shape, copied.outputs[0].type = value.shape, value.type
            graph.append(copied)
            value = graph.outputs[i] = copied.outputs[0]
        name = _name(path)
        rename(value, f"{name}_out" if name in taken else name)


def _name_sizes(onnx_program: torch.onnx.ONNXProgram) -> None:
    """Sizes that stay free are named after the first input that has them."""
    import onnx_ir as ir

    graph = onnx_program.model.graph
    for value in (*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)):
        if value.shape is not None:  # torch writes some sizes that it has learned as names: "8"
            sizes = [size if isinstance(size, int) else size.value for size in value.shape]
            value.shape = ir.Shape(int(s) if isinstance(s, str) and s.isdigit() else s for s in sizes)
    names: dict[str | ir.SymbolicDim, str] = {}
    for given in graph.inputs:
        for i, size in enumerate(given.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                names.setdefault(size.value, f"{given.name}_dim{i}")
    onnx_program.rename_axes(names)


def _name(key: tuple) -> str:
    names = [str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in key]
    if not names or names[0].isdigit():
        names.insert(0, "output")
    return "_".join(names)
