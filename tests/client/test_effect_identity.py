"""effects.test_identity on a client."""

from __future__ import annotations

import pytest

from tests.client.suites import KEYS, leave_out
from tests.effects.test_identity import *  # noqa: F403

pytestmark = pytest.mark.slow
leave_out(
    globals(),
    a_key_beside_the_database_takes_the_place_of_its_salt=KEYS,
)
