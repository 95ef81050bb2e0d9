"""TorchScript of files: a language of its own without processes or Python, but with operators that open files."""

from __future__ import annotations

import re
import zipfile

from .allowed import Refused

_OPENS_FILES = re.compile(rb"\b(?:torch|aten)\s*\.\s*(?:save|load|from_file)\s*\(")


def check_script(archive: zipfile.ZipFile) -> None:
    """Raise for TorchScript that calls operators which open files: it may run as soon as it is loaded.

    Raises:
        Refused: it does.
    """
    for name in archive.namelist():
        found = _OPENS_FILES.search(archive.read(name)) if "/code/" in name and name.endswith(".py") else None
        if found is not None:
            raise Refused(f"the file's TorchScript calls {found[0].decode().rstrip('( ')}, which opens files")
