"""The reference of the REST interface is what the table of routes says."""

from __future__ import annotations

from tests.docs.server_api import PAGE, text


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == text(), "run python -m tests.docs.server_api"
