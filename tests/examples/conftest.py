"""What running an example leaves behind is put back: its style, its quiet, and how long it measures."""

import copy

import matplotlib
import matplotlib.pyplot as plt
import pytest
from transformers.utils import logging

import digits
import quickstart


@pytest.fixture(scope="package")
def trained_digits():
    return digits.load_model()


@pytest.fixture(autouse=True)
def quick_and_tidy(monkeypatch, trained_digits):
    """The digits are trained once; times are not looked at, so they need not be good."""
    monkeypatch.setattr(quickstart, "SLICE_SECONDS", 0.001)
    monkeypatch.setattr(digits, "load_model", lambda: copy.deepcopy(trained_digits))
    verbosity = logging.get_verbosity()
    with matplotlib.rc_context():
        matplotlib.use("agg")
        yield
    plt.close("all")
    logging.set_verbosity(verbosity)
