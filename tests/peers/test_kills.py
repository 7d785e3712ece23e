"""SIGKILL before every statement and COMMIT of a session's life with peers: all or nothing.

The steps are lives: asks, answers, pauses, a resumption, a timeout and an error; a decision and a
sleep; calls made with a pause, which a service takes up and ends together; sweeps of a deadline, of
a peer and of a resumption whose holders have died; a cancellation while a peer works, and its late
answer. Each step is whole or has left nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import Call
from holdfast.peers.answers import expire, find_due
from holdfast.work.noun import find_expired, finish_expired
from tests.crash.steps import Step, kill_at_every_statement
from tests.peers.uptakes import taken_up

HOUR_MS = 3_600_000
# Whoever is killed still drives its session when the test looks at what is left.
LEASE_SECONDS = 3_600


def prepare(session: holdfast.Session) -> None:
    holdfast.Store(session.runtime).session(session.id, agent=f"agent {session.id}")


def ask(name: str, **given: Any) -> Step:
    def step(session: holdfast.Session, store: holdfast.Store) -> None:
        session.ask(f"peer {session.id}", {"n": name}, id=f"{session.id} {name}", **given)

    return step


def held(store: holdfast.Store, queue: str) -> holdfast.WorkItem:
    """The item of a queue that runs; this process has claimed it, nobody else does."""
    [item] = store.work.list(queue=queue, status="in_progress")
    return store.work.get(item.id, fence=item.fence)


def claim(kind: str) -> Step:
    def step(session: holdfast.Session, store: holdfast.Store) -> None:
        queue = f"agent:{kind} {session.id}"
        assert len(store.work.claim("w", queues=queue, lease_seconds=LEASE_SECONDS)) == 1

    return step


def receive(session: holdfast.Session, store: holdfast.Store) -> None:
    held(store, f"agent:peer {session.id}").receive()


def add_artifact(session: holdfast.Session, store: holdfast.Store) -> None:
    driven(store, f"agent:peer {session.id}").add_artifact("map", data=[1])


def complete_peer(session: holdfast.Session, store: holdfast.Store) -> None:
    held(store, f"agent:peer {session.id}").complete({"ok": True})


def fail_peer(session: holdfast.Session, store: holdfast.Store) -> None:
    held(store, f"agent:peer {session.id}").fail("no", retry=False)


def resume(session: holdfast.Session, store: holdfast.Store) -> None:
    held(store, f"agent:agent {session.id}").resume()


def driven(store: holdfast.Store, queue: str) -> holdfast.Session:
    """The session as the item that drives it writes to it."""
    found = held(store, queue).session
    assert found is not None
    return found


def ask_driven(name: str, **given: Any) -> Step:
    """Ask from the item that resumed the session."""

    def step(session: holdfast.Session, store: holdfast.Store) -> None:
        resumed = driven(store, f"agent:agent {session.id}")
        resumed.ask(f"peer {session.id}", {"n": name}, id=f"{session.id} {name}", **given)

    return step


def record_driven(session: holdfast.Session, store: holdfast.Store) -> None:
    driven(store, f"agent:agent {session.id}").record("manual_checkpoint", {"note": "evidence"})


def save_driven(session: holdfast.Session, store: holdfast.Store) -> None:
    driven(store, f"agent:agent {session.id}").save(turn=1)


def pause_driven(session: holdfast.Session, store: holdfast.Store) -> None:
    driven(store, f"agent:agent {session.id}").pause({"again": 1}, need=1)


def approve(session: holdfast.Session, store: holdfast.Store) -> None:
    [waiting] = store.pauses(agent=f"agent {session.id}", state="waiting")
    store.approve(waiting.id, by="ann", note="yes")


def sleep(session: holdfast.Session, store: holdfast.Store) -> None:
    driven(store, f"agent:agent {session.id}").sleep(store.now_ms() + HOUR_MS)


ANSWERED: dict[str, Step] = {
    "ask": ask("first", correlation={"c": 1}),
    "ask another": ask("second"),
    "an answer before the pause": lambda session, store: store.answer(f"{session.id} first", "one"),
    "pause": lambda session, store: session.pause({"step": 1}),
    "claim the request": claim("peer"),
    "receive": receive,
    "add an artifact": add_artifact,
    "progress": lambda session, store: store.progress(f"{session.id} second", "half"),
    "the last answer": complete_peer,
    "claim the resumption": claim("agent"),
    "resume": resume,
    "ask from the resumed session": ask_driven("third", timeout_seconds=0),
    "ask once more": ask_driven("fourth"),
    "pause again, one has timed out": pause_driven,
    "claim the next request": claim("peer"),
    "the peer fails for good": fail_peer,
}
DECIDED: dict[str, Step] = {
    "wait for approval": lambda session, store: session.wait_for_approval("may I?"),
    "approve": approve,
    "claim after the decision": claim("agent"),
    "resume after the decision": resume,
    "ask": ask_driven("first"),
    "sleep": sleep,
    "cancel": lambda session, store: session.cancel(),
    "a late answer": lambda session, store: store.answer(f"{session.id} first", "late"),
}


def pause_asking(session: holdfast.Session, store: holdfast.Store) -> None:
    asks = [holdfast.Ask(f"peer {session.id}", n, id=f"{session.id} {n}") for n in ("a", "b")]
    session.pause({"step": 1}, asks=asks)


def take_up(kind: str, count: int) -> Step:
    """Claim the items of an agent and take up their sessions, as its service does."""

    def step(session: holdfast.Session, store: holdfast.Store) -> None:
        found = taken_up(store, f"{kind} {session.id}", lease_seconds=LEASE_SECONDS)
        assert len(found) == count
        assert None not in found.values()

    return step


def complete_peers(session: holdfast.Session, store: holdfast.Store) -> None:
    running = store.work.list(queue=f"agent:peer {session.id}", status="in_progress")
    items = [store.work.get(item.id, fence=item.fence) for item in running]
    assert store.work.complete_many([(item, item.id) for item in items]) == [True, True]


def complete_resumed(session: holdfast.Session, store: holdfast.Store) -> None:
    held(store, f"agent:agent {session.id}").complete("done")


TAKEN_UP: dict[str, Step] = {
    "pause with asks": pause_asking,
    "take up the requests": take_up("peer", 2),
    "both answers": complete_peers,
    "take up the resumption": take_up("agent", 1),
    "a record, which closes nothing": record_driven,
    "a turn, which closes the pause": save_driven,
    "complete": complete_resumed,
}


CLOCK = holdfast.VirtualClock()
ROWS_MAX = 1_000


def of_tree(store: holdfast.Store, found: list[Any], session: holdfast.Session) -> list[Any]:
    """Some rows of a sweep: the lives that were killed before have left others."""
    mine = [row for row in found if row["root_id"] == session.root_id]
    assert mine
    return mine


def sweep_deadlines(session: holdfast.Session, store: holdfast.Store) -> None:
    CLOCK.advance(61)
    found, _ = store.runtime.run(Call(find_due, store.runtime, (ROWS_MAX,)))
    mine = of_tree(store, found, session)
    assert store.runtime.run(Call(expire, store.runtime, (mine,))) == len(mine)


def sweep_leases(session: holdfast.Session, store: holdfast.Store) -> None:
    CLOCK.advance(LEASE_SECONDS + 1)
    found = store.runtime.run(Call(find_expired, store.runtime, (ROWS_MAX,)))
    mine = of_tree(store, found, session)
    states = store.runtime.run(Call(finish_expired, store.runtime, (mine, True)))
    assert states == ["scheduled"]


SWEPT: dict[str, Step] = {
    "ask": ask("first", timeout_seconds=60),
    "ask another": ask("second", timeout_seconds="never"),
    "pause": lambda session, store: session.pause({"step": 1}),
    "sweep the deadline": sweep_deadlines,
    "claim the request": claim("peer"),
    "receive": receive,
    "sweep the dead peer": sweep_leases,
    "the last answer": lambda session, store: store.answer(f"{session.id} second", "two"),
    "claim the resumption": claim("agent"),
    "resume": resume,
    "sweep the dead resumer": sweep_leases,
}
CANCELLED: dict[str, Step] = {
    "ask": ask("first"),
    "ask another": ask("second"),
    "pause": lambda session, store: session.pause({"step": 1}),
    "claim the request": claim("peer"),
    "receive": receive,
    "cancel": lambda session, store: session.cancel(),
    "a late answer": lambda session, store: store.answer(f"{session.id} first", "late"),
}


def shape(store: holdfast.Store, id: str) -> Any:
    """Everything that can be read of a session's peers, without ids and times."""
    session = store.find_session(id)
    calls = []
    for call in session.asks():
        answer = call.answer and (call.answer.result, call.answer.artifacts)
        calls.append((call.id, call.state, call.progress, answer, call.late is not None))
    pauses = [
        (each.generation, each.reason, each.state, each.open_asks, each.ok_asks, each.context)
        for each in store.pauses(agent=f"agent {id}")
    ]
    queues = [f"agent:{kind} {id}" for kind in ("agent", "peer")]
    items = [
        (item.type, item.status, item.waits_for, item.fence)
        for queue in queues
        for item in reversed(store.work.list(queue=queue))
    ]
    sessions = [(each.id, each.status, each.is_driven) for each in session.tree()]
    history = [record.kind for record in session.history()]
    return calls, pauses, items, sessions, history, [event.kind for event in store.events(id)]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(ANSWERED, id="answered"),
        pytest.param(DECIDED, id="decided", marks=pytest.mark.slow),
        pytest.param(TAKEN_UP, id="taken up"),
        pytest.param(SWEPT, id="swept"),
        pytest.param(CANCELLED, id="cancelled"),
    ],
)
def test_killed_at_every_statement_all_or_nothing(
    steps: dict[str, Step], place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if steps is SWEPT:
        # Every process that is forked begins at this time, and advances its own copy.
        place = {**place, "clock": CLOCK}
    places = kill_at_every_statement(place, steps, shape, prepare)
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: killed at {len(places)} points of peers")
