"""work.test_worker on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import OPENS, leave_out
from tests.work.test_worker import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    workers_remove_finished_items_that_are_old=OPENS,
)
