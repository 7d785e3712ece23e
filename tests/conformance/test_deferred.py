"""A statement whose rows nobody reads is part of its transaction, whatever comes after it."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.kernel.operation import Op, defer, rows

RENAME = "UPDATE hf_sessions SET name = :name WHERE id = 's'"


def test_what_is_sent_later_is_committed_and_seen(place: dict[str, Any]) -> None:

    def rename(_: Any, name: str, *, reads: bool) -> Op[Any]:
        yield from defer(RENAME, name=name)
        if reads:
            return (yield from rows("SELECT name FROM hf_sessions WHERE id = 's'"))
        return None

    with holdfast.open(**place) as store:
        store.session("s")
        assert store.run(rename, "read", reads=True) == [{"name": "read"}]
        assert store.find_session("s").info().name == "read"
        store.run(rename, "unread", reads=False)
        assert store.find_session("s").info().name == "unread"
