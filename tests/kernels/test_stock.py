"""What dbrq relies on in torch's kernels, and what it keeps away from them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.patterns import IMAGE

WEIGHT = (torch.arange(8 * 8 * 9) % 19 - 9).to(torch.int8).reshape(8, 8, 3, 3)
conv_sum, qlinear = torch.ops.onednn.qconv2d_pointwise, torch.ops.onednn.qlinear_pointwise


def image(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8).to(memory_format=torch.channels_last)


def conv_arguments(q: Tensor, packed_for: tuple = IMAGE) -> tuple[tuple, tuple, Tensor]:
    """Arguments of onednn's conv2d before and after the accumulator, and the exact result."""
    packed = torch.ops.onednn.qconv_prepack(WEIGHT, torch.ones(8), 1.0, 0, [1, 1], [1, 1], [1, 1], 1, packed_for)
    before = (q, 0.01, 7, packed, torch.ones(8), torch.zeros(8, dtype=torch.int64))
    return before, (None, [1, 1], [1, 1], [1, 1], 1), F.conv2d((q.float() - 7) * 0.01, WEIGHT.float(), padding=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_conv_sum_writes_over_its_accumulator(dtype):
    before, after, product = conv_arguments(image(*IMAGE))
    other = torch.randint(0, 100, IMAGE).to(dtype).to(memory_format=torch.channels_last)
    expected = (product + other).relu()
    result = conv_sum(*before, other, *after, 1.0, 0, dtype, 1.0, 0, "sum", 1.0, "relu", [], "")
    assert torch.equal(result, other)
    expected, tolerance = (expected.round().clamp(0, 255), 1) if dtype is torch.uint8 else (expected, 1e-3)
    assert (result - expected).abs().max() <= tolerance


def test_convolutions_write_channels_last_and_one_packed_weight_serves_all_shapes_and_qparams():
    for q in (image(*IMAGE), image(3, 8, 20, 7)):
        before, after, product = conv_arguments(q)
        result = torch.ops.onednn.qconv_pointwise(*before, *after, 1.0, 0, torch.float32, "none", [], "")
        torch.testing.assert_close(result, product, atol=1e-3, rtol=1e-4)
        assert result.is_contiguous(memory_format=torch.channels_last) and not result.is_contiguous()


def test_set_reads_the_same_bits_as_another_type():
    x = torch.randn(3, 5)
    assert torch.equal(torch.empty([0], dtype=torch.int32).set_(x, 0, x.size(), x.stride()), x.view(torch.int32))
    words = torch.randint(-(2**31), 2**31, (2, 3), dtype=torch.int64).to(torch.int32)
    as_bytes = torch.empty([0], dtype=torch.uint8).set_(words, 0, [2, 3, 4], [12, 4, 1])
    assert torch.equal(as_bytes, words.view(torch.uint8).reshape(2, 3, 4))
    assert (words & 255 == as_bytes[..., 0]).all()  # the lowest byte is the first


def linear_arguments() -> tuple[tuple, Tensor, Tensor]:
    weight, q = torch.randint(-9, 9, (6, 16), dtype=torch.int8), torch.randint(0, 255, (4, 16), dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    arguments = (q, 0.01, 0, packed, torch.ones(6), torch.zeros(6, dtype=torch.int64))
    return arguments, torch.randint(0, 200, (4, 6), dtype=torch.uint8), q.float().mul(0.01) @ weight.float().t()


def test_linear_add_reads_a_uint8_operand_as_raw_integers():
    arguments, other, product = linear_arguments()
    kept = other.clone()
    added = qlinear(*arguments, other, None, 1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "none", [], "")
    torch.testing.assert_close(added, product + kept.float(), atol=1e-3, rtol=1e-4)
    assert torch.equal(other, kept)


def test_linear_sum_writes_over_its_accumulator_and_honours_its_qparams():
    arguments, other, product = linear_arguments()
    expected = (product + (other.float() - 9) * 0.5).div(2.0).round().add(30).clamp(0, 255)
    result = qlinear(*arguments, other, None, 2.0, 30, torch.uint8, 0.5, 9, "sum", 1.0, "none", [], "")
    assert result.data_ptr() == other.data_ptr() and (result.float() - expected).abs().max() <= 1


def test_max_pool_of_plain_uint8_ignores_its_padding():
    q = image(1, 8, 40, 40)
    pooled = torch.ops.quantized.max_pool2d(q, [3, 3], [2, 2], [1, 1], [1, 1], False)
    assert pooled.dtype is torch.uint8 and torch.equal(pooled.float(), F.max_pool2d(q.float(), 3, 2, 1))
