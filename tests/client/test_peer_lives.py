"""peers.test_lives on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import INTERNAL, MOVES, OPENS, leave_out
from tests.peers.test_lives import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    cancelling_a_session_with_very_many_peers_takes_several_passes=OPENS,
    a_turn_closes_a_pause_that_was_resumed_before_the_export=MOVES,
    an_exported_tree_keeps_its_calls_and_nothing_goes_on_by_itself=OPENS,
    deleting_a_peer_answers_its_call_and_deleting_the_asker_removes_everything=INTERNAL,
)
