"""effects.test_ledger on a client."""

from __future__ import annotations

from tests.effects.test_ledger import *  # noqa: F403
