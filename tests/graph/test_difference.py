"""What counts as a difference between two outcomes, and which inputs are tried."""

import torch

from dbrq.graph.difference import difference
from dbrq.graph.trials import perturbed, smaller


def outcomes(expected, got, noise=0.0):
    generator = torch.Generator().manual_seed(1)
    samples = [{"y": expected + noise * torch.randn(expected.shape, generator=generator)} for _ in range(6)]
    return difference({"y": expected}, {"y": got}, lambda: samples)


def test_what_the_measure_takes_for_a_difference():
    y = torch.randn(1000, 16)
    near = y + 0.004 * torch.randn_like(y)
    assert outcomes(y, near) is None
    assert outcomes(y, y + 0.1 * torch.randn_like(y)) is not None
    assert outcomes(y, y + 0.1 * torch.randn_like(y), noise=0.1) is None
    for change in (lambda t: t[500].neg_(), lambda t: t[:, 3].mul_(0.5), lambda t: t[7, 7].fill_(float("inf")),
                   lambda t: t[7, 7].add_(5)):  # fmt: skip
        wrong = near.clone()
        change(wrong)
        assert outcomes(y, wrong, noise=0.004) is not None
    assert outcomes(y, y.double()) is not None and outcomes(y, y[:999]) is not None
    boxes = torch.cat([500 * torch.rand(1000, 4), torch.rand(1000, 8)], 1)  # scores beside coordinates
    wrong = boxes.clone()
    wrong[:, 4:] = torch.rand(1000, 8)
    assert outcomes(boxes, wrong) is not None
    assert difference({"a": y, "b": 1}, {"a": y}, list) is not None
    assert difference({"a": "x"}, {"a": "y"}, list) is not None and difference({"a": None}, {"a": None}, list) is None


def test_perturbed_inputs_have_the_same_range_and_structure():
    x = torch.randn(4, 6)[:, ::2]
    ids, mask = torch.randint(0, 100, (2, 9)), torch.zeros(2, 9).masked_fill(torch.eye(2, 9) > 0, float("-inf"))
    other = perturbed({"x": x, "y": [x, ids], "mask": mask, "n": 3, "zeros": torch.zeros(5)}, integers=True)
    assert not torch.equal(other["x"], x) and torch.equal(other["x"].flatten().sort()[0], x.flatten().sort()[0])
    assert other["x"] is other["y"][0] and other["n"] == 3 and torch.equal(other["mask"], mask)
    assert torch.equal(other["y"][1].flatten().sort()[0], ids.flatten().sort()[0]) and other["zeros"].any()
    assert torch.equal(perturbed(ids, integers=False), ids)


def test_perturbed_inputs_lie_in_memory_as_the_inputs_do():
    """Code may go by the layout, and the converted model ran in float where the graph ran in int8: seed 9100965."""
    memory = torch.arange(200.0)
    volume = memory[:24].view(2, 3, 4)
    expanded = memory[:6].view(1, 2, 3).expand(5, 2, 3)
    assert smaller(volume[:0, :, 1:]).shape == (0, 3, 3)
    for x in (volume, volume[..., 1:], volume.permute(2, 0, 1), expanded, memory.unfold(0, 8, 3), memory[3]):
        other = perturbed(x, integers=False)
        assert other.stride() == x.stride() and other.shape == x.shape and not torch.equal(other, x)
        assert set(other.flatten().tolist()) == set(x.flatten().tolist()) or x.numel() == 1
        assert smaller(x).stride() == x.stride() and torch.equal(smaller(x), x * 0.5)
