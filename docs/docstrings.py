"""How docstrings come to the site: the examples at the end of one, which have no heading there, get one here."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

_FIRST_EXAMPLE = re.compile(r"\n\n(?=>>> )")
_DOCTEST_OPTION = re.compile(r"\s*# doctest: \+\w+")


class Examples(Extension):
    """Griffe takes ``>>>`` for examples below a heading only, and for quotations elsewhere."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        before, *after = _FIRST_EXAMPLE.split(obj.docstring.value if obj.docstring else "", maxsplit=1)
        if after:
            examples = textwrap.indent(_DOCTEST_OPTION.sub("", after[0]), "    ")
            obj.docstring.value = f"{before}\n\nExamples:\n{examples}"
