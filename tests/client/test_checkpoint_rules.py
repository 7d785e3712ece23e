"""checkpoints.test_rules on a client."""

from __future__ import annotations

from tests.checkpoints.test_rules import *  # noqa: F403
from tests.client.suites import COMPOSES, INTERNAL, KEYS, OPENS, leave_out

leave_out(
    globals(),
    the_environment_names_the_session_and_its_root_as_they_are_stored=KEYS,
    a_composition_that_fails_leaves_neither_rows_nor_memories=COMPOSES,
    hundreds_of_remembered_sessions_are_forgotten_without_harm=INTERNAL,
    a_child_process_finds_the_session_that_started_it=OPENS,
    a_process_is_who_the_store_says_it_is=OPENS,
    listings_read_no_channel_and_cost_one_statement=INTERNAL,
)
