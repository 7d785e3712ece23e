"""work.test_rules on a client."""

from __future__ import annotations

from tests.client.suites import COMPOSES, leave_out
from tests.work.test_rules import *  # noqa: F403

leave_out(
    globals(),
    a_zombie_writes_nothing_in_any_way=COMPOSES,
)
