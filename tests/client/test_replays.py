"""effects.test_replays on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import MOVES, leave_out
from tests.effects.test_replays import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_moved_session_brings_its_replays=MOVES,
)
