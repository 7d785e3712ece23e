"""What holds for every test of checkpoints."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a second is no error of a test that reads whole tables."""
    monkeypatch.setattr("holdfast.store.COMPOSED_SECONDS_MAX", 60.0)
