"""SIGKILL before every statement and COMMIT of audited calls: all or nothing."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast import NotLanded
from tests.access.test_audit import doubtful
from tests.crash.steps import Step, kill_at_every_statement

CHECKPOINTS = 3

STEPS: dict[str, Step] = {
    "make": lambda session, store: store.tokens.create(session.id, session=session),
    "revoke": lambda session, store: store.tokens.revoke(session.id),
    "refuse": lambda session, store: store.audit.refused(session.id),
    "rewind": lambda session, store: session.rewind(1),
    "resolve": lambda session, store: resolve(store, session.id),
    "prune": lambda session, store: store.prune(keep=1, session=session),
    "delete": lambda session, store: session.delete(),
}


def prepare(session: holdfast.Session) -> None:
    """Leave an effect in doubt, and checkpoints to go back over."""
    doubtful(session)
    for number in range(CHECKPOINTS):
        session.save(plan=number)


def effects(store: holdfast.Store, id: str) -> list[holdfast.Effect]:
    """The effects of a session, none if it was deleted."""
    return store.effects(session=id) if is_there(store, id) else []


def resolve(store: holdfast.Store, id: str) -> None:
    [effect] = effects(store, id)
    store.resolve(effect.id, NotLanded(), by="jo")


def is_there(store: holdfast.Store, id: str) -> bool:
    return id in {info.id for info in store.sessions(limit=1_000)}


def shape(store: holdfast.Store, id: str) -> Any:
    """What is left of a session, its tokens and effects, beside what the audit tells of them."""
    tokens = [token for token in store.tokens.list(limit=1_000) if token.root_id == id]
    found = effects(store, id)
    subjects = {id, *(token.id for token in tokens), *(effect.id for effect in found)}
    records = [
        each.action
        for each in store.audit.list(limit=1_000)
        if each.subject in subjects or each.reason == id
    ]
    if not is_there(store, id):
        return records
    session = store.find_session(id)
    # A prune is written down before it removes anything, in passes.
    assert "store_pruned" in records or len(session.history()) >= CHECKPOINTS
    statuses = [effect.status for effect in found]
    return [token.revoked_at is None for token in tokens], statuses, session.info().version, records


def test_killed_at_every_statement_all_or_nothing(place: dict[str, Any]) -> None:
    kill_at_every_statement(place, STEPS, shape, prepare)
