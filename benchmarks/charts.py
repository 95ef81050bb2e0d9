"""The charts of the documentation: ``python benchmarks/charts.py`` reads the tables of ``docs/benchmarks.md`` and
``docs/zoo.md``, which hold what the benchmarks measured, and writes ``docs/charts/``. A test compares the two.

Charts have a light panel, so that they can be read on a dark page too, and say when and where was measured. Their text
is text, and nothing in them depends on when they are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent.parent / "docs"
#: Of dbrq, of others, and of what is fainter than both: whiskers, lines, small print.
OURS, OTHERS, FAINT = "#00796b", "#9aa7b0", "#546e7a"
STYLE = {
    "figure.facecolor": "#ffffff", "axes.facecolor": "#ffffff", "text.color": "#263238", "axes.labelcolor": "#263238",
    "xtick.color": "#263238", "ytick.color": "#263238", "axes.edgecolor": "#b0bec5", "axes.spines.top": False,
    "axes.spines.right": False, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "dbrq",
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page of the documentation, as the numbers in it."""

    text: str

    @property
    def where(self) -> str:
        """When and on which machine its numbers were measured, as it says."""
        found = re.search(r"(?:Measured on|from runs of) (\S+), (?:(.+?, \d+ cores), .*?)?(torch [\d.]+\d)", self.text)
        if found is None:
            raise ValueError("the page does not say when its numbers were measured")
        return ", ".join(filter(None, found.groups()))

    def table(self, *columns: str) -> list[dict[str, str]]:
        """The rows of the one table that has these columns: column -> cell, without emphasis."""
        found = [rows for rows in self._tables() if set(columns) <= set(rows[0])]
        if len(found) != 1:
            raise ValueError(f"{len(found)} tables have the columns {columns}")
        return found[0]

    def _tables(self) -> list[list[dict[str, str]]]:
        tables = []
        for lines in re.findall(r"(?:^\|.*\n)+", self.text, re.MULTILINE):
            head, _, *rows = [[cell.strip(" *") for cell in line.strip("|\n").split("|")] for line in lines.split("\n")
                              if line]  # fmt: skip
            tables.append([dict(zip(head, row, strict=True)) for row in rows])
        return [table for table in tables if table]


def numbers(cell: str) -> list[float]:
    """All of a cell, in order: 0.92, 0.66 and 1.09 of "0.92 (0.66 to 1.09), Intel ext."."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", cell)]


def bars(axes: Axes, names: Sequence[str], cells: Sequence[str], colors: Sequence[str]) -> None:
    """Horizontal bars from the top down, as long as the first number of their cell, which stands beside it."""
    values = [number for number, *_ in (numbers(cell) or [0.0] for cell in cells)]
    drawn = axes.barh(range(len(names)), values, color=list(colors), height=0.72)
    axes.bar_label(drawn, [cell.split(" ")[0] for cell in cells], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(values))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def whiskers(axes: Axes, names: Sequence[str], cells: Sequence[str]) -> None:
    """For each name, from the top down, what its cell says: a median with its minimum and maximum."""
    for i, cell in enumerate(cells):
        median, low, high, *_ = numbers(cell)
        axes.plot([low, high], [i, i], color=FAINT, linewidth=2, solid_capstyle="round")
        axes.plot([median], [i], "o", color=OURS, markersize=6)
        axes.annotate(cell, (1.02, i), xycoords=("axes fraction", "data"), va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#eceff1")
    axes.set_axisbelow(True)


def finish(figure: Figure, title: str, small_print: str) -> Figure:
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 0.01, small_print, fontsize=7.5, color=FAINT)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


VARIANTS = ("dbrq eager", "dbrq torchscript", "dbrq onednn", "torch", "ONNX Runtime", "OpenVINO", "Intel ext.")
COMPARED = "model, batch, threads"


def speed(page: Page) -> Figure:
    """Milliseconds of a call, of all variants, for some models at batch 1."""
    shown = ("ResNet-50, 1, 2", "MobileNetV2, 1, 2", "ViT-B/16, 1, 2", "MiniLM, trained, 128 tokens, 1, 2")
    rows = {row[COMPARED]: row for row in page.table(COMPARED, *VARIANTS)}
    figure = Figure(figsize=(9.5, 3))
    for axes, model in zip(figure.subplots(1, len(shown)), shown, strict=True):
        colors = [OURS if name.startswith("dbrq") else OTHERS for name in VARIANTS]
        bars(axes, VARIANTS, [rows[model][name] for name in VARIANTS], colors)
        if model != shown[0]:
            axes.set_yticks([])
        axes.set_title(model.removesuffix(", 1, 2"), fontsize=9)
    return finish(figure, "int8: milliseconds of a call, batch 1, 2 threads (lower is faster)", page.where)


def peers(page: Page) -> Figure:
    """The onednn backend's time as a ratio to the best peer's."""
    rows = page.table(COMPARED, *VARIANTS)
    figure = Figure(figsize=(9.5, 3.6))
    axes = figure.subplots()
    whiskers(axes, [row[COMPARED] for row in rows], [row["onednn / best peer"] for row in rows])
    axes.axvline(1, color="#263238", linewidth=0.8)
    axes.set_xlabel("time relative to the fastest other library: median (least to most); left of 1 is faster")
    return finish(figure, "dbrq on onednn beside the fastest other library (model, batch, threads)", page.where)


def over_float(page: Page) -> Figure:
    """How many times as fast as the float model lowered models are."""
    column = "lowered: times float eager"
    rows = page.table("model, batch", column)
    ranges = [(min(found), max(found)) for found in (numbers(row[column]) for row in rows)]
    figure = Figure(figsize=(9.5, 2.8))
    axes = figure.subplots()
    names = [row["model, batch"] for row in rows]
    axes.barh(range(len(names)), [low for low, _ in ranges], color=OURS, height=0.6)
    axes.barh(range(len(names)), [high - low for low, high in ranges], left=[low for low, _ in ranges], color=OURS,
              alpha=0.45, height=0.6)  # fmt: skip
    for i, (row, (_, high)) in enumerate(zip(rows, ranges, strict=True)):
        axes.annotate(row[column], (high + 0.08, i), va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="#263238", linewidth=0.8)
    axes.set_xlim(0, 1.15 * max(high for _, high in ranges))
    return finish(figure, "Lowered to torchscript: how many times as fast as float eager (model, batch)", page.where)


def accuracy(page: Page) -> Figure:
    """Signal to quantization noise, of dbrq and of torch's own ways."""
    others = ("FX (onednn)", "PT2E")
    rows = page.table("dbrq", *others)
    figure = Figure(figsize=(9.5, 3))
    axes = figure.subplots()
    width = 0.27
    for i, (name, color) in enumerate(zip(("dbrq", *others), (OURS, OTHERS, "#ffb74d"), strict=True)):
        found = [(at, numbers(row[name])) for at, row in enumerate(rows)]
        known = [(at + (i - 1) * width, cell[0]) for at, cell in found if cell]
        drawn = axes.bar([at for at, _ in known], [value for _, value in known], width, color=color, label=name)
        axes.bar_label(drawn, [f"{value:g}" for _, value in known], padding=2, fontsize=8)
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axes.set_ylabel("dB")
    axes.legend(frameon=False, ncols=3, loc="upper right", bbox_to_anchor=(1, 1.17))
    return finish(figure, "SQNR against float (higher is nearer); without a bar: it does not trace", page.where)


def zoo(page: Page) -> Figure:
    """Of how many architectures what holds."""
    columns = {"works": "work", "99 % of the MACs in int8": ">= 99 % int8", "accurate": "accurate"}
    rows = page.table("library", "models", *columns.values())
    figure = Figure(figsize=(9.5, 2))
    for axes, (title, column) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        counts = [(numbers(row[column])[0], numbers(row["models"])[0]) for row in rows]
        axes.barh(range(len(rows)), [100] * len(rows), color="#eceff1", height=0.7)
        axes.barh(range(len(rows)), [100 * some / every for some, every in counts], color=OURS, height=0.7)
        for i, (some, every) in enumerate(counts):
            axes.annotate(f"{some:g} of {every:g}", (3, i), va="center", color="#ffffff")
        axes.set_yticks(range(len(rows)), [row["library"] for row in rows] if column == "work" else [""] * len(rows))
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.set_title(title, fontsize=9)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return finish(figure, "Architectures, with random weights", page.where)


CHARTS: dict[str, tuple[str, Callable[[Page], Figure]]] = {
    "speed": ("benchmarks.md", speed), "peers": ("benchmarks.md", peers), "float": ("benchmarks.md", over_float),
    "accuracy": ("benchmarks.md", accuracy), "zoo": ("zoo.md", zoo),
}  # fmt: skip


def draw(folder: Path) -> None:
    """Write all charts to ``folder``."""
    folder.mkdir(exist_ok=True)
    nothing: dict[str, Any] = {"Date": None, "Creator": None}
    with matplotlib.rc_context(STYLE):
        for name, (page, chart) in CHARTS.items():
            figure = chart(Page((DOCS / page).read_text(encoding="utf-8")))
            figure.savefig(folder / f"{name}.svg", metadata=nothing)


if __name__ == "__main__":
    draw(DOCS / "charts")
