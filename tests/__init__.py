"""Tests, in folders like those of the package; what several of them use is in ``helpers``.

They are one package, so that a file of the same name may be in several folders: ``from tests.helpers import ...``.
"""

from pathlib import Path

#: The checkout, wherever in it a test lies.
ROOT = Path(__file__).parents[1]
