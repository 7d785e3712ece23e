"""agent.test_resume on a client, and killed workers with agents: their server stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.agent.test_resume import *  # noqa: F403
from tests.client.suites import COMPOSES, leave_out
from tests.server.processes import KilledServer
from tests.work.test_driving import (  # noqa: F401
    test_an_agent_in_a_killed_worker_goes_on_in_the_next,
    test_an_agent_in_a_killed_worker_goes_on_in_the_next_with_default_settings,
)

pytestmark = pytest.mark.slow
leave_out(globals(), exercise_3_corruption_audit=COMPOSES)


@pytest.fixture
def place(new_place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A store behind a server process of its own."""
    with ExitStack() as stack:
        yield KilledServer(new_place, stack).place
