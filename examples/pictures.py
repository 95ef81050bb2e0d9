"""Where the notebooks put their pictures, and how these look."""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

FLOAT, INT8, DARK, SOFT = "#8a8f98", "#1f77b4", "#222222", "#d9dce1"
plt.rcParams.update({
    "figure.dpi": 110, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e8eb", "legend.frameon": False,
    "figure.constrained_layout.use": True,
})  # fmt: skip


def folder() -> Path:
    """The folder after ``--out``, made if it is not there; else a new one among the temporary ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="a folder for pictures and files")
    options, _ = parser.parse_known_args()  # a notebook's own arguments are its kernel's
    out = options.out or Path(tempfile.mkdtemp(prefix="dbrq-"))
    out.mkdir(parents=True, exist_ok=True)
    return out


def save(figure: Figure, path: Path) -> None:
    """Write the figure, and say where."""
    figure.savefig(path)
    print(f"picture: {path}")
