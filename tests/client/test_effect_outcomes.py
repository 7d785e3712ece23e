"""effects.test_outcomes on a client."""

from __future__ import annotations

import pytest

from tests.effects.test_outcomes import *  # noqa: F403

pytestmark = pytest.mark.slow
