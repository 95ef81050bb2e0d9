"""Random small models through every backend: ``python -m tests.fuzz --help``.

``program``: models as text, made from a seed; ``grammar``: what they are made of; ``judge``: what is right; ``runs``:
one program through all backends; ``pool``: many of them, in processes that may crash; ``shrink``: less of one.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1])
if _TESTS not in sys.path:  # for helpers.py, where pytest has not put it there
    sys.path.append(_TESTS)
