"""work.test_ends on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import AUDIT, COMPOSES, INTERNAL, leave_out
from tests.work.test_ends import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    output_checkpoint_effect_and_follow_ups_are_one_commit=COMPOSES,
    whoever_waits_is_woken_when_something_is_ready=INTERNAL,
    an_item_that_is_taken_away_is_in_the_audit_trail=AUDIT,
    damage_in_one_item_stops_no_other=INTERNAL,
)
