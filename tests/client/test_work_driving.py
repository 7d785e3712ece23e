"""work.test_driving on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import COMPOSES, KILLS, OPENS, leave_out
from tests.work.test_driving import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    an_item_drives_within_a_transaction=COMPOSES,
    an_agent_in_a_handler_drives_under_the_item=OPENS,
    an_agent_in_a_killed_worker_goes_on_in_the_next=KILLS,
    an_agent_in_a_killed_worker_goes_on_in_the_next_with_default_settings=KILLS,
)
