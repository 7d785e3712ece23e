"""state.test_rules on a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.client.suites import COMPOSES, OPENS, leave_out
from tests.state.test_rules import *  # noqa: F403


@pytest.fixture  # type: ignore[no-redef]
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place["serve"]()) as store:
        yield store


leave_out(
    globals(),
    state_and_checkpoints_change_in_one_transaction=COMPOSES,
    limits_are_told_and_nothing_is_written=OPENS,
    the_same_in_an_event_loop=OPENS,
    ten_thousand_keys_are_written_at_once=OPENS,
    a_key_is_as_old_as_its_last_creation=OPENS,
)
