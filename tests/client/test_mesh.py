"""peers.test_mesh on a client: those of its tests that do not open the database themselves."""

from __future__ import annotations

import pytest

from tests.peers.test_mesh import (
    test_a_caller_gets_progress_and_the_answer_and_again_when_it_reconnects,
    test_a_request_that_is_cancelled_has_a_final_answer,
)

__all__ = [
    "test_a_caller_gets_progress_and_the_answer_and_again_when_it_reconnects",
    "test_a_request_that_is_cancelled_has_a_final_answer",
]
pytestmark = pytest.mark.slow
