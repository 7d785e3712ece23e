"""checkpoints.test_keys on a client."""

from __future__ import annotations

import pytest

from tests.checkpoints.test_keys import *  # noqa: F403
from tests.client.suites import COMPOSES, INTERNAL, MOVES, OPENS, leave_out

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    keys_count_inside_a_composed_transaction=COMPOSES,
    processes_at_once_write_each_key_once=OPENS,
    keys_move_with_their_session=MOVES,
    a_handle_of_the_process_that_drives_is_told_which_handle_to_use=INTERNAL,
)
