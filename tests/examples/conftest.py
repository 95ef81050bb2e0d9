"""What running an example leaves behind is put back: its style, its quiet, and how long it measures."""

import copy

import pytest

digits = pytest.importorskip("digits", reason="dbrq[examples] is not installed")
quickstart = pytest.importorskip("quickstart", reason="dbrq[examples] is not installed")


@pytest.fixture(scope="package")
def trained_digits():
    return digits.load_model()


@pytest.fixture(autouse=True)
def quick_and_tidy(monkeypatch, trained_digits):
    """The digits are trained once; times are not looked at, so they need not be good."""
    matplotlib = pytest.importorskip("matplotlib", reason="dbrq[report] is not installed")
    transformers = pytest.importorskip("transformers", reason="dbrq[examples] is not installed")
    monkeypatch.setattr(quickstart, "SLICE_SECONDS", 0.001)
    monkeypatch.setattr(digits, "load_model", lambda: copy.deepcopy(trained_digits))
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    with matplotlib.rc_context():
        matplotlib.use("agg")
        yield
    import matplotlib.pyplot as plt

    plt.close("all")
    logging.set_verbosity(verbosity)
