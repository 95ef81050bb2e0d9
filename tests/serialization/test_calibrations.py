"""Calibrations in files: resumed they give what one calibration gives, and every preset finds its data."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dbrq

from ..accuracy.models import Outliers, batches

DATA = batches(4, 16, 64)


def test_a_resumed_calibration_is_one_calibration(tmp_path: Path) -> None:
    model = Outliers()
    first = dbrq.calibrate(dbrq.prepare(model, DATA[0]), DATA[:3])
    dbrq.save_calibration(first, tmp_path / "c.pt")
    resumed = dbrq.load_calibration(dbrq.prepare(model, DATA[0]), tmp_path / "c.pt")
    resumed = dbrq.convert(dbrq.calibrate(resumed, DATA[3:]))
    assert torch.equal(resumed(DATA[0]), dbrq.quantize(model, DATA)(DATA[0]))


def test_another_preset_needs_no_data_again(tmp_path: Path) -> None:
    model = Outliers()
    dbrq.save_calibration(dbrq.calibrate(dbrq.prepare(model, DATA[0], preset="transformer"), DATA), tmp_path / "c.pt")
    loaded = dbrq.load_calibration(dbrq.prepare(model, DATA[0]), tmp_path / "c.pt")
    for preset in ("fast", "transformer", "accurate"):
        expected = dbrq.quantize(model, DATA, preset=preset)(DATA[0])
        assert torch.equal(dbrq.convert(loaded, preset=preset)(DATA[0]), expected)


def test_the_file_of_another_model_is_refused(tmp_path: Path) -> None:
    dbrq.save_calibration(dbrq.calibrate(dbrq.prepare(Outliers(), DATA[0]), DATA), tmp_path / "c.pt")
    other = dbrq.prepare(nn.Linear(64, 2), DATA[0])
    with pytest.raises(dbrq.LoadError, match="another model"):
        dbrq.load_calibration(other, tmp_path / "c.pt")
    with pytest.raises(dbrq.NotCalibratedError):
        dbrq.convert(other)


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    prepared = dbrq.prepare(nn.Linear(64, 2), DATA[0])
    torch.save({"a": 1}, tmp_path / "dict.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("text")
    for name in ("dict.pt", "code.pt", "text.pt"):
        with pytest.raises(dbrq.LoadError, match="no calibration"):
            dbrq.load_calibration(prepared, tmp_path / name)
    with pytest.raises(dbrq.ConfigurationError):
        dbrq.save_calibration(nn.Linear(2, 2), tmp_path / "float.pt")
