"""Ranges belong to occurrences and edges of paths, and weights to the path that chose them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbrq
from tests.helpers.control_flow.cases import trips
from tests.helpers.control_flow.runs import D, Named, Off, Run, data
from tests.helpers.paths import (
    GOOD,
    assert_int8,
    assert_warned,
    calibrated,
    call,
    float_model,
    fresh,
    heard,
    matches,
    worst,
)

# Ranges belong to occurrences and edges


class Growing(nn.Module):
    """Each trip multiplies the range by about five: one range for all would drown the first trips."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, D, bias=False)
        with torch.no_grad():
            self.body.weight.mul_(5 * 1.7)

    def forward(self, x, trips):
        outputs = []
        for _ in range(trips):
            x = self.body(x)
            outputs.append(x)
        return outputs


def test_each_occurrence_has_its_own_range():
    model = Growing().eval()
    for counts in ((6,), (6, 3), (3, 6), (1, 6, 3)):
        quantized = dbrq.convert(calibrated(model, trips(*counts)))
        for run in trips(*counts):
            assert_int8(model, quantized, run)


def test_a_layer_called_at_two_lines_has_a_range_for_each():
    class Lines(Named):
        def forward(self, x, loud):
            if loud:
                h = self.a(x * 100.0)
                h = h / 100.0
            else:
                h = self.a(x)
            return self.out(h)

    model = Lines().eval()
    with torch.no_grad():
        model.a.bias.zero_()
    quantized = dbrq.convert(calibrated(model, trips(False, True)))
    for run in trips(False, True):
        assert_int8(model, quantized, run)


def test_what_only_one_path_makes_keeps_the_range_of_that_path():

    class Loud(Named):
        def forward(self, x, loud):
            if loud:
                return self.b(self.a(x) * 1000.0)
            return self.out(self.c(x))

    model = Loud().eval()
    quantized = dbrq.convert(calibrated(model, trips(False, True)))
    for run in trips(False, True):
        assert_int8(model, quantized, run)


def test_a_value_read_in_the_loop_from_before_it_and_from_inside():
    class Carried(Named):
        def forward(self, x, trips):
            h = self.a(x)
            memory = torch.softmax(x, -1)
            for _ in range(trips):
                h = torch.relu(self.b(memory)) + h
                memory = torch.softmax(h, -1)
            return self.out(h)

    model = Carried().eval()
    quantized = dbrq.convert(calibrated(model, trips(1, 3)))
    for run in (*trips(1, 3), *trips(2, 5, seed=7)):
        assert_int8(model, quantized, run)


def test_a_range_is_not_used_for_a_value_of_another_origin():
    """Recorded after softmax (0 to 1), and met with values a thousand times as large."""

    class Fed(Named):
        def forward(self, x, by):
            h = torch.softmax(x, -1) if by == "softmax" else torch.exp(x.clamp(-1, 6)) * 10.0
            return self.out(h)

    model = Fed().eval()
    quantized = dbrq.convert(calibrated(model, trips("softmax")))
    run = trips("exp", seed=3)[0]
    got, messages = heard(quantized, run)
    assert worst(call(model, run), got) >= GOOD
    assert sum(matches(message, "out", "") for message in messages) == 1
    assert len(messages) <= 3  # the clamp and the product are new as well


# Weights chosen at run time


@pytest.mark.parametrize("name", ["experts as one parameter", "one of several parameters"])
def test_a_choice_of_weights_is_never_anothers(name):
    model, quantized = float_model(name), fresh(name)
    for index in range(3):
        for run in trips(index, index, seed=10 + index):
            assert worst(call(model, run), heard(quantized, run)[0]) >= GOOD


def test_choices_inside_one_run():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, D, D) * 0.2)
            self.out = nn.Linear(D, D)

        def forward(self, x, chosen):
            h = x
            for index in chosen:
                h = torch.relu(F.linear(h, self.weight[index]))
            return self.out(h)

    model = Several().eval()
    runs = trips((0, 1), (1, 0), (2, 2))
    recorded = [Run((r.args[0], tuple(r.args[1:]))) for r in runs]
    quantized = dbrq.convert(calibrated(model, recorded))
    for run in recorded:
        assert_int8(model, quantized, run)
    other = Run((data(seed=8), (3, 1)))
    got, messages = heard(quantized, other)
    assert worst(call(model, other), got) >= GOOD
    assert messages and all("linear" in message or "out" in message or "relu" in message for message in messages)


def test_what_a_fusion_leaves_out_has_no_range():
    """linear-relu fuses; another call of the layer reads what is before the relu, which was never seen alone."""

    class Again(Named):
        def forward(self, x, again):
            h = self.a(x)
            h = self.b(h)
            h = self.b(h) if again else torch.relu(h)
            return h * 1.0

    model = Again().eval()
    quantized = dbrq.convert(calibrated(model, trips(False)))
    got, messages = heard(quantized, run := trips(True)[0])
    assert worst(call(model, run), got) >= GOOD
    assert_warned(messages, Off(run, None))
