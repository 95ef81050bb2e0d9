"""What tests of the onednn backend share."""

import pytest

from dbrq import selfcheck
from dbrq.lowering.onednn import binding


@pytest.fixture
def nothing_proved(monkeypatch: pytest.MonkeyPatch, ledger: selfcheck._Ledger) -> None:
    """Each test meets a process in which no primitive was made, and leaves none behind."""
    monkeypatch.setattr(binding, "_shared", binding._Shared())
