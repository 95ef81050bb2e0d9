"""Code objects that are odd: without a hash, or made by ``exec``."""

import torch
from torch import nn

import dbrq
from tests.helpers.control_flow.cases import trips
from tests.helpers.paths import assert_int8, calibrated


def test_classes_made_by_exec():
    source = (
        "class Made(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)\n"
        "    def forward(self, x, long):\n"
        "        h = torch.relu(self.a(x))\n"
        "        return self.b(torch.relu(h + x)) if long else self.b(h)\n"
    )
    scope: dict = {"nn": nn, "torch": torch, "__builtins__": __builtins__}  # and no __name__
    exec(compile(source, "<ipython-input-3-abc>", "exec"), scope)
    model = scope["Made"]().eval()
    quantized = dbrq.convert(calibrated(model, trips(False, True)))
    for run in trips(False, True):
        assert_int8(model, quantized, run)


def _moved(x):
    return x + 1


def test_code_that_has_no_hash():
    """TorchDynamo makes code with slices among its constants, which torchvision's compiled functions run."""
    code = _moved.__code__.replace(co_consts=(*_moved.__code__.co_consts, slice(0, 3)))
    moved = type(_moved)(code, globals())

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(moved(self.layer(x)))

    quantized_on = dbrq.quantize(Calls().eval(), [torch.randn(2, 4)])
    assert dbrq.report(quantized_on).coverage == 1
    assert quantized_on(torch.randn(3, 4)).shape == (3, 4)
