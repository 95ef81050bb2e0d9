"""What MkDocs does to a page beside its plugins: mermaid diagrams become the pictures of ``docs/make_diagrams.py``."""

from __future__ import annotations

import logging
import re
import runpy
from pathlib import Path
from typing import Any

_DRAWING = runpy.run_path(str(Path(__file__).with_name("make_diagrams.py")))
_log = logging.getLogger("mkdocs.hooks.dbrq")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text. A diagram that was not drawn is a warning, which fails a strict build."""

    def picture(fence: re.Match[str]) -> str:
        diagram = _DRAWING["Diagram"](fence[1])
        if not diagram.is_drawn:
            _log.warning("%s: %r is not drawn: python docs/make_diagrams.py", page.file.src_path, diagram.title)
        return f"![{diagram.title}](diagrams/{diagram.name})"

    return _DRAWING["FENCE"].sub(picture, markdown)
