"""peers.test_pauses on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import INTERNAL, OPENS, leave_out
from tests.peers.test_pauses import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_session_that_asks_nobody_writes_no_row_here=OPENS,
    a_person_decides_once_and_the_session_goes_on=INTERNAL,
)
