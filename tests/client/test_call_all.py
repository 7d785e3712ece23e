"""effects.test_call_all on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import INTERNAL, OPENS, leave_out
from tests.effects.test_call_all import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    all_intents_are_durable_before_the_first_tool_runs=OPENS,
    a_call_that_is_not_allowed_any_more_when_its_time_comes_is_not_made=OPENS,
    a_tool_that_ends_the_session_is_the_last_of_its_turn=INTERNAL,
    an_interrupt_records_what_has_returned_and_closes_what_has_not_begun=OPENS,
    a_cancelled_task_records_what_has_returned_and_closes_what_has_not_begun=OPENS,
    an_async_tool_in_a_sync_store_is_refused_before_anything_is_written=OPENS,
)
