"""peers.test_pauses on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import INTERNAL, OPENS, leave_out
from tests.peers.test_pauses import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_session_that_asks_nobody_writes_no_row_here=OPENS,
    a_call_that_was_made_before_counts_once_with_those_that_its_pause_makes=OPENS,
    a_repeated_attempt_pauses_in_a_process_that_has_not_read_the_session=OPENS,
    a_repeated_attempt_that_waits_in_memory_makes_no_ask_twice=OPENS,
    a_session_that_serves_nobody_is_free_when_its_resumption_is_completed=OPENS,
    the_newest_calls_and_pauses_are_read_in_parts=OPENS,
    a_person_decides_once_and_the_session_goes_on=INTERNAL,
)
