"""work.test_submissions on a client."""

from __future__ import annotations

import pytest

from tests.work.test_submissions import *  # noqa: F403

pytestmark = pytest.mark.slow
