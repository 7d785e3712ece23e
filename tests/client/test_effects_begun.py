"""effects.test_begin on a client."""

from __future__ import annotations

import pytest

from tests.effects.test_begin import *  # noqa: F403

pytestmark = pytest.mark.slow
