"""A request of a caller that is no session exists once or not at all, also one in one round trip.

SIGKILL before every statement and COMMIT, and a COMMIT that gets no answer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.proxy import Moment, PostgresProxy
from holdfast.testing.subject import Subject, done
from tests.crash.steps import Step, kill_at_every_statement

INPUT = {"trip": "Oslo"}


def agent_of(id: str) -> str:
    return f"planner of {id}"


def request(session: holdfast.Session, store: holdfast.Store) -> None:
    """Ask in one round trip: under a new id, without a deadline."""
    store.request(agent_of(session.id), INPUT, user="ann")


def request_named(session: holdfast.Session, store: holdfast.Store) -> None:
    store.request(agent_of(session.id), INPUT, user="ann", request_id=f"{session.id} named")


def request_again(session: holdfast.Session, store: holdfast.Store) -> None:
    """Ask again under the id that the first request was given."""
    first = requests(store, session.id)[0]
    again = store.request(agent_of(session.id), INPUT, user="ann", request_id=first.id)
    assert again == first


STEPS: dict[str, Step] = {
    "request": request,
    "request under an id": request_named,
    "the same again": request_named,
    "the first again": request_again,
}


def requests(store: holdfast.Store, id: str) -> list[holdfast.PeerCall]:
    """The requests of one life, oldest first: each has a session and one item, and no other."""
    items = store.work.list(queue=f"agent:{agent_of(id)}")
    sessions = store.sessions(agent=agent_of(id))
    assert sorted(item.session_id or "" for item in items) == sorted(each.id for each in sessions)
    assert all(each.root_id == each.id for each in sessions)
    return [store.peer_call(item.session_id or "") for item in reversed(items)]


def shape(store: holdfast.Store, id: str) -> Any:
    """Everything that a request leaves, without its own id and times."""
    found = []
    for call in requests(store, id):
        item = store.work.list(session=call.id)[0]
        events = [(event.position, event.kind) for event in store.events(call.id)]
        session = store.find_session(call.id).info()
        asked = (call.state, call.agent, session.user, call.input)
        found.append((asked, item.type, item.status, session.status, events))
    return found


EXPECTED = (
    ("open", agent_of("reference"), "ann", INPUT),
    "request",
    "pending",
    "active",
    [(1, "session_created"), (2, "work_submitted"), (3, "peer_asked")],
)


def test_killed_at_every_statement_a_request_is_there_once_or_not_at_all(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    places = kill_at_every_statement(place, STEPS, shape)
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: killed at {len(places)} points of requests")


@pytest.mark.parametrize("moment", ["before", "after", "before-late"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_request_whose_commit_was_cut_is_there_once(
    moment: Moment,
    colour: Any,
    proxy: PostgresProxy,
    postgres_dsn: str,
    ready_namespace: str,
    tmp_path: Path,
) -> None:
    direct: dict[str, Any] = {"url": postgres_dsn, "namespace": ready_namespace}
    through = {**direct, "url": f"{proxy.dsn(postgres_dsn)}&listen=off"}
    agent = agent_of("reference")

    async def run() -> holdfast.PeerCall:
        subject = Subject(through, colour, tmp_path)
        try:
            store = await subject.open()
            cut = proxy.cut_next_commit(moment)
            call: holdfast.PeerCall = await done(store.request(agent, INPUT, user="ann"))
            await asyncio.to_thread(cut.wait)
            again = store.request(agent, INPUT, user="ann", request_id=call.id)
            assert await done(again) == call
            return call
        finally:
            await subject.close()

    call = asyncio.run(run())
    with holdfast.open(**direct) as store:
        assert requests(store, "reference") == [call]
        [found] = shape(store, "reference")
        assert found == EXPECTED
