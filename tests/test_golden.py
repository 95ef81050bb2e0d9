"""Graphs of small models as text: a change of how models are recorded shows as a change of these files.

``DBRQ_GOLDEN=write pytest tests/test_golden.py`` writes them anew; look at the difference before it is committed.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping, default_dynamic_qconfig
from torch.ao.quantization.observer import default_per_channel_weight_observer

import dbrq
from tests.helpers.models import Call

FOLDER = Path(__file__).parent / "golden"
#: The same on every CPU: 7 bits, and ranges that no search decides on.
STATIC = QConfigMapping().set_global(
    QConfig(MinMaxObserver.with_args(quant_min=0, quant_max=127), default_per_channel_weight_observer)
)
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
IMAGE, ROWS = (2, 8, 6, 6), (4, 8)


def attention(m, x):
    q, k, v = m.layer(x).reshape(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def conv(groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1, groups=groups)


#: name -> model, shape of its input, settings
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], QConfigMapping]] = {
    "linear_relu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), ROWS, STATIC),
    "conv_norm_relu": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv()), IMAGE, STATIC),
    "residual": (lambda: Call(lambda m, x: F.relu(m.b(m.a(x)) + x), a=conv(), b=conv()), IMAGE, STATIC),
    "depthwise_hardswish": (lambda: nn.Sequential(conv(8), nn.Hardswish(), conv()), IMAGE, STATIC),
    "pool_cat": (
        lambda: Call(lambda m, x: m.b(torch.cat([F.max_pool2d(m.a(x), 2), F.avg_pool2d(x, 2)], 1)),
                     a=conv(), b=nn.Conv2d(16, 8, 1)), IMAGE, STATIC),
    "flatten_head": (
        lambda: Call(lambda m, x: m.head(F.adaptive_avg_pool2d(m.a(x), 1).flatten(1)),
                     a=conv(), head=nn.Linear(8, 4)), IMAGE, STATIC),
    "attention": (lambda: Call(attention, layer=nn.Linear(16, 48), out=nn.Linear(16, 16)), (2, 5, 16), STATIC),
    "layer_norm_gelu": (
        lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), ROWS, STATIC),
    "dynamic_linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), ROWS, DYNAMIC),
    "dynamic_linear_by_row": (lambda: nn.Sequential(nn.Linear(8, 4)), ROWS, dbrq.dynamic_qconfig_mapping()),
    "slices_in_place": (
        lambda: Call(lambda m, x: m.b(m.a(x)[:, ::2].contiguous().mul_(0.5)),
                     a=nn.Linear(8, 8), b=nn.Linear(4, 4)), ROWS, STATIC),
}  # fmt: skip


def text_of(graph: torch.fx.GraphModule) -> str:
    """The code of a graph, without what machines and edits of this file change: digits of scales, lines."""
    code = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda m: f"{float(m[0]):.3g}", graph.code.strip())
    return re.sub(r"[\w]+\.py:\d+", "<line>", code) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_graphs_are_what_they_were(name: str) -> None:
    make, shape, mapping = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    prepared = dbrq.prepare(model, x, mapping)
    prepared(x)
    text, file = text_of(dbrq.rewrite(dbrq.convert(prepared), x)), FOLDER / f"{name}.txt"
    if os.environ.get("DBRQ_GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_no_file_is_left_over() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(CASES)
