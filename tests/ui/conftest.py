"""Browsers and databases that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.server.conftest import database
from tests.ui.browsers import started

__all__ = ["database"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; it is closed before other modules start event loops in this thread."""
    with started() as browser:
        yield browser
