"""The receiver that counts effects, one process for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import holdfast.kernel.postgres  # noqa: F401 - imported once, not in each child
from tests.effects.server import Receiver, receiving


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """A process that outlives every agent."""
    with receiving() as found:
        yield found
