"""agent.test_approvals and effects.test_approvals on a client."""

from __future__ import annotations

import pytest

from tests.agent.test_approvals import *  # noqa: F403
from tests.client.suites import MOVES, OPENS, leave_out
from tests.effects.test_approvals import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_service_goes_on_by_itself_after_each_decision=OPENS,
    an_approval_counts_neither_after_a_rewind_nor_in_a_fork=OPENS,
    what_was_approved_and_done_is_not_done_again_after_a_rewind_without_a_decision=OPENS,
    killed_anywhere_an_approved_call_is_made_once_and_nobody_is_asked_again=OPENS,
    an_approved_question_to_a_peer_with_another_input_is_asked_about_anew=OPENS,
    a_consumed_approval_stays_consumed_in_another_store=MOVES,
)
