"""effects.test_history on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import COMPOSES, leave_out
from tests.effects.test_history import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    an_outcome_and_a_checkpoint_are_one_commit=COMPOSES,
)
