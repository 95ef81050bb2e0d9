"""TorchScript of files: a language of its own without processes or Python, but with operators that open files."""

from __future__ import annotations

import re
import zipfile

from .allowed import Refused

#: Names of operators on files wherever they stand, since TorchScript takes names in strings too; escapes in strings.
_ON_FILES = re.compile(rb"\b(?:from_file|load|load_from_file|read_file|save|write_file)\b|\\(?:[0-7xuUN]|\r?\n)")


def is_script(names: list[str]) -> bool:
    """Whether an archive of these records is read as TorchScript, by torch too."""
    return any("/code/" in name.lower() or name.lower().endswith("/constants.pkl") for name in names)


def check_script(archive: zipfile.ZipFile) -> None:
    """Raise for TorchScript that names operators which open files: it may run as soon as it is loaded.

    Raises:
        Refused: it does, or two records of the archive have one name to torch, which does not look at case.
    """
    names = archive.namelist()
    if len({name.lower() for name in names}) < len(names):
        raise Refused("two records of the file have the same name")
    for name in names:
        found = _ON_FILES.search(archive.read(name)) if name.lower().endswith(".py") else None
        if found is not None:
            raise Refused(f"the file's TorchScript has {found[0].decode()!r}, which may open files")
