"""SIGKILL before every statement and COMMIT of remembered requests: all or nothing."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.kernel.operation import rows
from tests.crash.steps import Step, kill_at_every_statement
from tests.replies.requests import keyed, numbered

STEPS: dict[str, Step] = {
    "a key": lambda session, store: store.run(keyed, session, "k", scope=session.id),
    "a lane": lambda session, store: store.run(numbered, session, 1, lane=session.id),
    "its next": lambda session, store: store.run(numbered, session, 2, lane=session.id),
}


def shape(store: holdfast.Store, id: str) -> Any:
    """The records of a session's requests beside what these did, which is the same in each."""

    def read(tx: holdfast.Transaction) -> holdfast.Op[list[Any]]:
        listed = "SELECT key, number, outcome FROM hf_replies WHERE scope = :id ORDER BY key"
        return (yield from rows(listed, id=id))

    found = [(row["key"], row["number"], row["outcome"] is None) for row in store.run(read)]
    return found, store.find_session(id).state.get("count")


def test_killed_at_every_statement_all_or_nothing(place: dict[str, Any]) -> None:
    kill_at_every_statement(place, STEPS, shape)
