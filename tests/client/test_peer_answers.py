"""peers.test_answers on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import OPENS, leave_out
from tests.peers.test_answers import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_pause_is_ready_as_soon_as_its_need_is_met_or_cannot_be=OPENS,
    an_artifact_that_cannot_be_stored_is_refused_before_anything_is_written=OPENS,
    the_need_is_met_by_enough_that_are_ok_or_when_too_few_can_come=OPENS,
)
