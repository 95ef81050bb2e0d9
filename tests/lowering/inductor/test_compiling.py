"""Compiling changes nothing of the process, and nothing of the user's own compiles."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.inductor import assert_same, lowered
from tests.helpers.int8_patterns import Chain, linear
from tests.helpers.running import has_compiler

if not has_compiler():
    pytest.skip("no C++ compiler", allow_module_level=True)


def test_warnings_and_log_records_of_others_arrive_while_this_thread_is_quiet(caplog):
    from dbrq.quiet import quiet

    logger = logging.getLogger("dbrq_test_quiet.inner")
    level = logger.level

    def speak() -> list[str]:
        caplog.clear()
        logger.warning("logged")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with quiet() if inside else contextlib.nullcontext():
                warnings.warn("said", UserWarning, stacklevel=1)
        return [*(record.message for record in caplog.records), *(str(w.message) for w in caught)]

    inside, heard = True, []
    with quiet(loggers=("dbrq_test_quiet",)):
        assert speak() == [] and logger.level == level
        inside = False
        other = threading.Thread(target=lambda: heard.extend(speak()))
        other.start()
        other.join()
    assert heard == ["logged", "said"] and speak() == ["logged", "said"]


def test_a_compile_of_the_users_meanwhile_is_the_users_own(monkeypatch):
    """Another thread compiles, with torch.compile, between the settings of ours and their end."""
    from torch._inductor import compile_fx, config, mkldnn_ir
    from torch._inductor.graph import GraphLowering

    torch.manual_seed(0)
    quantized = dbrq.quantize(Chain(linear(), F.relu, linear()), [torch.randn(4, 16)])
    names = [(GraphLowering, "save_output_code"), (mkldnn_ir, "_prepare_convolution_fusion_create")]
    before = [getattr(owner, name) for owner, name in names]
    layer, x = nn.Linear(16, 8), torch.randn(4, 16)
    found: dict[str, Any] = {}
    inner = compile_fx.compile_fx_inner

    def meanwhile() -> None:
        found["freezing"] = config.freezing, config.joint_custom_post_pass
        found["patched"] = [getattr(owner, name) for owner, name in names] != before
        with torch.no_grad(), warnings.catch_warnings(record=True) as found["warned"]:
            warnings.simplefilter("always")
            warnings.warn("the user's own", UserWarning, stacklevel=1)
        found["levels"] = logging.getLogger("torch._export").level

    def slowly(*args: Any, **kwargs: Any) -> Any:
        assert config.freezing
        other = threading.Thread(target=meanwhile)
        other.start()
        other.join()
        return inner(*args, **kwargs)

    level = logging.getLogger("torch._export").level
    monkeypatch.setattr(compile_fx, "compile_fx_inner", slowly)
    users = threading.Thread(target=lambda: found.update(output=torch.compile(layer)(x)))
    users.start()  # which waits for us, or we for it
    model = lowered(quantized, x)
    users.join()
    assert found["freezing"] == (False, None) and not found["patched"] and found["levels"] == level
    assert [str(w.message) for w in found["warned"]] == ["the user's own"]
    torch.testing.assert_close(found["output"], layer(x))
    assert found["output"].requires_grad
    assert_same(model, quantized, x)
