"""How docstrings come to the site: the examples at the end of one, which have no heading there, get one here."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_FIRST_EXAMPLE = re.compile(r"\n\n(?=>>> )")
_DOCTEST_OPTION = re.compile(r"\s*# doctest: \+\w+")


class Examples(Extension):
    """Griffe takes ``>>>`` for examples below a heading only, and for quotations elsewhere."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        docstring = obj.docstring
        if docstring is None or "Example" in docstring.value:
            return
        before, *after = _FIRST_EXAMPLE.split(docstring.value, maxsplit=1)
        if after:
            examples = "".join(f"    {line}\n" if line else "\n" for line in after[0].splitlines())
            docstring.value = f"{before}\n\nExamples:\n{_DOCTEST_OPTION.sub('', examples)}"
