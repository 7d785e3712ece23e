"""peers.test_deadlines on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import OPENS, leave_out
from tests.peers.test_deadlines import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_sweep_that_comes_after_the_answer_changes_nothing=OPENS,
    the_oldest_deadlines_are_swept_first_until_none_is_due=OPENS,
)
