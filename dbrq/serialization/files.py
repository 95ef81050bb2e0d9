"""Writing files so that they are there whole or not at all, whoever else writes to the same path."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """A path to write to, which takes the place of ``path`` when the block ends, and is gone if the block fails.

    It has the same name, in a new folder beside ``path``: so two writers never share one, a file system that can hold
    the one can hold the other, and permissions are those of any file that is made there.

    Raises:
        OSError: there is no such folder, or it cannot be written to.
    """
    target = os.path.realpath(path)  # a link stays one, and what it leads to is replaced
    with tempfile.TemporaryDirectory(
        prefix=".dbrq-", dir=os.path.dirname(target), ignore_cleanup_errors=True
    ) as folder:
        unfinished = os.path.join(folder, os.path.basename(target))
        yield unfinished
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())  # else a crash of the machine may leave the new name with nothing behind it
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
