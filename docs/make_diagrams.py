"""Draws the mermaid diagrams of README.md and docs/: ``python docs/make_diagrams.py MERMAID``.

GitHub draws mermaid by itself. A site would have to fetch megabytes of script for it at view time, so it shows the
pictures in docs/diagrams/, which this writes with Chromium. ``MERMAID`` is an ES module that exports ``mermaid``, such
as nicegui/elements/mermaid/dist/index.js in the package nicegui. A diagram's ``accTitle`` names its picture, and a
picture says of which text it is, so that the site does not build with one that is out of date (``docs/hooks.py``).
"""

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "diagrams"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)

_PAGE = """<!doctype html><meta charset="utf-8"><pre id="source">{source}</pre><div id="out"></div>
<script type="module">
import {{ mermaid }} from "/{module}";
mermaid.initialize({{ startOnLoad: false, theme: "neutral", themeVariables: {{ edgeLabelBackground: "#fff" }},
                     fontFamily: "sans-serif", htmlLabels: false, flowchart: {{ wrappingWidth: 400 }} }});
const {{ svg }} = await mermaid.render("diagram", document.getElementById("source").textContent);
const out = document.getElementById("out");
out.innerHTML = svg;
out.textContent = new XMLSerializer().serializeToString(out.firstElementChild);
</script>"""


@dataclass(frozen=True)
class Diagram:
    """One fence of a page."""

    source: str

    @property
    def title(self) -> str:
        """What a reader who does not see the picture is told."""
        found = re.search(r"^\s*accTitle: (.+)$", self.source, re.MULTILINE)
        if found is None:
            raise ValueError(f"a mermaid diagram has no accTitle:\n{self.source}")
        return found[1]

    @property
    def name(self) -> str:
        """Of its picture's file."""
        return re.sub(r"\W+", "-", self.title.lower()) + ".svg"

    @property
    def mark(self) -> str:
        """In its picture: of which text that is."""
        return f"<!-- {hashlib.sha256(self.source.encode()).hexdigest()} -->"

    @property
    def is_drawn(self) -> bool:
        path = PICTURES / self.name
        return path.exists() and self.mark in path.read_text(encoding="utf-8")


def diagrams() -> Iterator[Diagram]:
    """All that there are."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        for source in FENCE.findall(page.read_text(encoding="utf-8")):
            yield Diagram(source)


@contextmanager
def served(page: str, folder: Path) -> Iterator[str]:
    """The address of ``page``, beside the files of ``folder``: modules do not load from files."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                return super().do_GET()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


def drawn(diagram: Diagram, mermaid: Path) -> str:
    """The picture, as SVG on a light panel."""
    page = _PAGE.format(source=html.escape(diagram.source), module=mermaid.name)
    with served(page, mermaid.parent) as address:
        done = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--virtual-time-budget=20000", "--dump-dom", address],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = re.search(r'<div id="out">(&lt;svg.*?)</div>', done.stdout, re.DOTALL)
    if found is None:
        raise RuntimeError(f"Chromium drew nothing of {diagram.title!r}")
    svg = re.sub(r'style="[^"]*"', 'style="background: #fff"', html.unescape(found[1]), count=1)
    width = re.search(r'viewBox="\S+ \S+ (\S+) ', svg)
    assert width is not None
    return diagram.mark + "\n" + svg.replace('width="100%"', f'width="{width[1]}"', 1) + "\n"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for diagram in diagrams():
        if not diagram.is_drawn:
            (PICTURES / diagram.name).write_text(drawn(diagram, Path(sys.argv[1])), encoding="utf-8")
            print(diagram.name)


if __name__ == "__main__":
    main()
