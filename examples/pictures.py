"""Where the notebooks put their pictures, and how these look."""

import argparse
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FLOAT, INT8, DARK, BLUES = "#8a8f98", "#1f77b4", "#222222", ("#9ecae1", "#4a98c9", "#08519c")
plt.rcParams.update({
    "figure.dpi": 110, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e8eb", "legend.frameon": False,
    "figure.constrained_layout.use": True,
})  # fmt: skip


def options(**numbers: int) -> argparse.Namespace:
    """What the command line says: the folder ``out``, which is made if it is not there, and numbers by name.

    Without ``--out`` the folder is a new one among the temporary ones. A notebook's kernel has arguments of its own,
    which are passed over.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="a folder for pictures and files")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    found, _ = parser.parse_known_args()
    found.out = found.out or Path(tempfile.mkdtemp(prefix="dbrq-"))
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def bars(ax: Axes, values: Mapping[str, float], label: str, form: str = "%.1f") -> None:
    """A bar for each value, from top to bottom, float in grey and the others in blues, the number behind it."""
    drawn = ax.barh(list(values), list(values.values()), color=[colours(values)[name] for name in values])
    ax.bar_label(drawn, fmt=form, padding=3)
    ax.set_xlabel(label)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)


def colours(names: Iterable[str]) -> dict[str, str]:
    """The first is float, in grey; the further, the darker a blue."""
    return dict(zip(names, (FLOAT, *BLUES), strict=False))


def save(figure: Figure, path: Path) -> None:
    """Write the figure, and say where."""
    figure.savefig(path)
    print(f"picture: {path}")
