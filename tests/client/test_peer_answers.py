"""peers.test_answers on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import OPENS, leave_out
from tests.peers.test_answers import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_pause_is_ready_as_soon_as_its_need_is_met_or_cannot_be=OPENS,
    answers_come_in_dispatch_order_wherever_their_rows_are=OPENS,
    an_artifact_that_cannot_be_stored_is_refused_before_anything_is_written=OPENS,
    of_items_that_end_together_one_whose_lease_was_lost_answers_nothing=OPENS,
    the_need_is_met_by_enough_that_are_ok_or_when_too_few_can_come=OPENS,
    two_answers_that_come_together_and_are_each_enough_make_ready_once=OPENS,
    two_items_of_a_session_that_end_together_answer_once=OPENS,
)
