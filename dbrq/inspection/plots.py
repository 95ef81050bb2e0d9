"""The plots of a report's page, as SVG that takes its colours from the page, so that it serves light and dark.

matplotlib draws with colours that stand for those of the page, and they are replaced in its text.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .comparing import ComparisonRow
from .rows import ChosenRange

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What matplotlib draws in -> what the page means by it.
_COLOURS = {
    "#010101": "currentColor", "#010102": "var(--int8)", "#010103": "var(--float)", "#010104": "var(--line)",
    "#010105": "var(--accent)", "#010106": "var(--soft)",
}  # fmt: skip
_TEXT, _INT8, _FLOAT, _LINE, _ACCENT, _SOFT = _COLOURS
PRECISION = {"int8": _INT8, "float": _FLOAT, "neither": _SOFT}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False,
    "font.size": 9, "axes.edgecolor": _LINE, "axes.labelcolor": _TEXT, "text.color": _TEXT,
    "xtick.color": _LINE, "ytick.color": _LINE, "xtick.labelcolor": _TEXT, "ytick.labelcolor": _TEXT,
    "axes.facecolor": "none", "figure.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": _LINE, "legend.frameon": False, "font.family": "sans-serif",
}  # fmt: skip
#: Histograms on a page; each is some ten kilobytes.
MOST_HISTOGRAMS = 24
_WIDE = 6.6


def errors(rows: Sequence[ComparisonRow]) -> str:
    """SQNR of each op in the order in which they ran: as it runs, and on float inputs."""

    def draw(axes: Axes) -> None:
        for name, colour, mark, values in (
            ("local: the op on float inputs", _ACCENT, "^", [row.local for row in rows]),
            ("accumulated: as it runs", _INT8, "o", [row.sqnr for row in rows]),
        ):
            points = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v) and v < 150]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=3, linewidth=1, label=name)
        axes.set_xlabel("ops with a value, in the order in which they ran")
        axes.set_ylabel("SQNR (dB), higher is better")
        axes.grid(axis="y", linewidth=0.5)
        if axes.lines:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)

    return _drawn(draw, 2.8)


def bars(names: Sequence[str], values: Sequence[float], colours: Sequence[str], label: str) -> str:
    """Horizontal bars, the first on top, each with its value as a share."""

    def draw(axes: Axes) -> None:
        places = range(len(names))
        axes.barh(places, values, color=colours, height=0.7)
        axes.set_yticks(places, labels=[_end(name) for name in names], fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g}%")
        axes.tick_params(axis="y", length=0)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.1%}", (value, place), (3, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, max([*values, 1e-9]) * 1.12)

    return _drawn(draw, 0.7 + 0.24 * len(names))


def histograms(ranges: Sequence[ChosenRange]) -> str:
    """Of each range the values of calibration, and where it begins and ends."""
    columns = 3

    def draw(figure: Figure) -> None:
        for number, one in enumerate(ranges):
            axes = figure.add_subplot(-(-len(ranges) // columns), columns, number + 1)
            assert one.seen is not None
            low, high = one.seen
            step = (high - low) / len(one.counts)
            edges = [low + step * i for i in range(len(one.counts) + 1)]
            axes.stairs([math.log10(1 + count) for count in one.counts], edges, fill=True, color=_LINE)
            for end in (one.low, one.high):
                axes.axvline(end, color=_ACCENT, linewidth=1.2)
            axes.set_title(_end(one.op, 26), fontsize=8)
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.locator_params(axis="x", nbins=4)
            axes.tick_params(axis="x", labelsize=7)

    return _drawn_on(draw, 0.3 + 1.15 * -(-len(ranges) // columns))


def spans(ranges: Sequence[ChosenRange]) -> str:
    """Each range from end to end; where one is much wider than most, on a logarithmic scale beyond 1."""

    def draw(axes: Axes) -> None:
        for place, one in enumerate(ranges):
            axes.plot([one.low, one.high], [place, place], color=_INT8, linewidth=3, solid_capstyle="butt")
        axes.set_yticks(range(len(ranges)), labels=[_end(one.op) for one in ranges], fontsize=8)
        axes.set_ylim(len(ranges) - 0.5, -0.5)
        axes.axvline(0, color=_LINE, linewidth=0.8)
        widths = [one.high - one.low for one in ranges]
        if max(widths) > 50 * sorted(widths)[len(widths) // 2]:
            axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="x", linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("values that the integers stand for")

    return _drawn(draw, 0.7 + 0.17 * len(ranges))


def _end(text: str, most: int = 54) -> str:
    return text if len(text) <= most else f"\u2026{text[1 - most :]}"


def _drawn(draw: Callable[[Axes], None], height: float) -> str:
    return _drawn_on(lambda figure: draw(figure.add_subplot()), height)


def _drawn_on(draw: Callable[[Any], None], height: float) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():  # and no pyplot, which would change the user's process
        matplotlib.rcdefaults()  # nor the user's style: a page looks the same wherever it is made
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDE, height), layout="constrained")
        draw(figure)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return _inline(text.getvalue())


def _inline(svg: str) -> str:
    """matplotlib's file as an element of a page: no addresses, no names that nothing refers to, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    wanted = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in wanted else "", svg)
    salt = f"s{zlib.crc32(svg.encode()):x}-"  # pages have several figures, whose names are alike
    svg = re.sub(r'((?:url\(#|href="#| id="))', rf"\g<1>{salt}", svg)
    for drawn, meant in _COLOURS.items():
        svg = svg.replace(drawn, meant)
    return svg
