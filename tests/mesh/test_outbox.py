"""The outbox and deliveries, step by step on both databases, without a transport in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import trees
from holdfast.kernel.driver import Hooks
from holdfast.kernel.operation import Call, rows
from holdfast.mesh import Memory
from holdfast.mesh.courier import routed
from holdfast.peers.delivery import (
    Incoming,
    take_answer,
    take_cancel,
    take_progress,
    take_request,
)
from holdfast.peers.noun import check
from holdfast.peers.outbox import cancel_token
from holdfast.peers.sending import confirm, next_due, postpone, refuse, take_due
from holdfast.work.claims import Claim
from tests.crash.steps import Step, kill_at_every_statement
from tests.mesh.meshes import outbox

LEASE_MS = 10_000
CLAIM = Claim("an instance", 1, ["agent:weather"], 30_000)
ROUTE = "memory/planner"


@pytest.fixture
def clock() -> holdfast.VirtualClock:
    return holdfast.VirtualClock()


@pytest.fixture
def store(place: dict[str, Any], clock: holdfast.VirtualClock) -> Iterator[holdfast.Store]:
    """A store whose sessions ask through a transport."""
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        yield routed(store, Memory())


@pytest.fixture
def planner(store: holdfast.Store) -> holdfast.Session:
    return store.session("plan", agent="planner", user="ann")


def run(store: holdfast.Store, asked: Any, *arguments: Any) -> Any:
    return store.runtime.driver.run(Call(asked, store.runtime, arguments))


def take(store: holdfast.Store, limit: int = 10, route: str = ROUTE) -> list[Any]:
    found: list[Any] = run(store, take_due, route, limit, LEASE_MS)
    return found


def incoming(
    number: int = 1, store_id: str = "far", ask: str = "a1", token: str = "digest", **body: Any
) -> Incoming:
    named = {"store_id": store_id, "ask_id": ask, "token": token}
    return Incoming(transport="memory", number=number, body=body, **named)


def served(store: holdfast.Store, **given: Any) -> Any:
    return run(store, take_request, incoming(**given), "weather", CLAIM)


def stored(store: holdfast.Store, call: holdfast.PeerCall) -> Any:
    return store.peer_call(call.id)


def addresses(store: holdfast.Store) -> list[str]:
    found = store.run(lambda tx: rows("SELECT * FROM hf_outbox ORDER BY number"))
    return [row["address"] for row in found]


def test_an_ask_writes_its_message_and_neither_session_nor_item(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    call = planner.ask("weather", {"city": "Oslo"})
    assert outbox(store) == [("request", call.id, 0)]
    assert [each.id for each in store.sessions()] == ["plan"]
    assert store.work.list() == []
    assert planner.ask("weather", {"city": "Oslo"}, id=call.id) == call
    assert len(outbox(store)) == 1
    with pytest.raises(holdfast.InvalidArgument, match="already"):
        planner.ask("weather", id="plan")
    [taken] = take(store)
    told = (taken.kind, taken.agent, taken.user, taken.session_id, taken.address)
    assert told == ("request", "weather", "ann", "plan", "agent:weather")
    assert store.runtime.codec.decode(taken.body) == {"city": "Oslo"}


def test_a_session_that_asks_nobody_writes_nothing_of_peers(place: dict[str, Any]) -> None:
    texts: list[str] = []
    hooks = Hooks(probe=lambda point: texts.append(point.sql))
    with holdfast.open(**place, durability="normal", hooks=hooks) as opened:
        store = routed(opened, Memory())
        session = store.session("alone", agent="planner")
        session.save(step=1)
        session.end()
        store.work.submit("mail", session=store.session("other", agent="planner"))
        assert texts
        written = [text for text in texts if "INSERT INTO" in text or "UPDATE" in text]
        assert written
        assert [text for text in written if "hf_asks" in text or "hf_outbox" in text] == []


def test_messages_are_taken_oldest_first_and_by_one_sender(
    store: holdfast.Store, planner: holdfast.Session, clock: holdfast.VirtualClock
) -> None:
    ids = []
    for number in range(5):
        ids.append(planner.ask("weather", number).id)
        clock.advance(1)
    first, second = take(store, 2), take(store)
    assert [each.ask_id for each in (*first, *second)] == ids
    assert take(store) == []
    assert run(store, next_due, ROUTE) == LEASE_MS / 1000
    # Nobody else sends for the planner.
    assert take(store, route="memory/other") == take(store, route="nats/planner") == []
    # The first sender has died; the second is told when to send again.
    for each in second:
        run(store, postpone, each.number, each.attempts, 60_000)
    clock.advance(LEASE_MS / 1000)
    again = take(store)
    assert [each.ask_id for each in again] == ids[:2]
    # What the dead one still says changes nothing.
    run(store, postpone, first[0].number, first[0].attempts, 0)
    assert take(store) == []


def test_a_message_stays_until_the_other_end_confirms_it(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    call = planner.ask("weather", timeout_seconds=60)
    [taken] = take(store)
    run(store, confirm, taken.number + 1, call.id, "far")
    run(store, confirm, taken.number, "another", "far")
    assert outbox(store) == [("request", call.id, 1)]
    run(store, confirm, taken.number, call.id, "far")
    assert outbox(store) == []
    # From now it is known where the peer is.
    assert store.cancel_ask(call.id)
    assert outbox(store) == [("cancel", call.id, 0)]
    assert addresses(store) == ["store:far"]


def test_a_request_that_was_never_sent_is_withdrawn_and_one_that_was_is_cancelled(
    store: holdfast.Store, planner: holdfast.Session, clock: holdfast.VirtualClock
) -> None:
    unsent = planner.ask("weather", 1)
    assert store.cancel_ask(unsent.id)
    assert outbox(store) == []
    sent = planner.ask("weather", 2, timeout_seconds=5)
    answered = planner.ask("weather", 3)
    take(store)
    run(store, take_answer, incoming(ask=answered.id, status="ok", result=3))
    clock.advance(6)
    store.recover()
    assert store.peer_call(sent.id).state == "timeout"
    assert outbox(store) == [("cancel", sent.id, 0)]
    assert addresses(store) == ["agent:weather"]


def test_cancelling_or_deleting_a_session_leaves_only_cancels(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    ids = [planner.ask("weather", number).id for number in range(3)]
    take(store, 2)
    planner.cancel()
    assert outbox(store) == [("cancel", id, 0) for id in ids[:2]]
    planner.delete()
    assert [each.kind for each in take(store)] == ["cancel", "cancel"]


@pytest.mark.parametrize("sessions_at_once", [50, 0])
def test_deleting_a_session_that_waits_cancels_its_calls_elsewhere(
    store: holdfast.Store,
    planner: holdfast.Session,
    sessions_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trees, "SESSIONS_AT_ONCE", sessions_at_once)
    ids = [planner.ask("weather", number).id for number in range(3)]
    requests = take(store, 2)
    planner.delete()
    assert outbox(store) == [("cancel", id, 0) for id in ids[:2]]
    cancels = take(store)
    assert [cancel_token(each.token) for each in cancels] == [each.token for each in requests]
    told = [(each.agent, each.user, each.session_id, each.root_id) for each in cancels]
    assert told == [("weather", "ann", "plan", "plan")] * 2
    assert [store.runtime.codec.decode(each.body) for each in cancels] == [None, None]


def test_a_request_whose_call_is_gone_is_not_sent(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    planner.ask("weather")
    store.run(lambda tx: rows("DELETE FROM hf_asks"))
    assert take(store) == []
    assert outbox(store) == []


def test_a_request_of_this_store_becomes_a_child_once(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    call, own = planner.ask("weather", {"city": "Oslo"}), store.store_id()
    [taken] = take(store)
    row = served(store, number=taken.number, store_id=own, ask=call.id)
    assert (row["holder"], row["state"], row["session_id"]) == (
        "an instance",
        "in_progress",
        call.id,
    )
    assert outbox(store) == []
    assert served(store, number=taken.number, store_id=own, ask=call.id) is None
    item = store.work.get(row["id"], fence=row["fence"])
    request = item.receive()
    assert (request.input, request.user) == ({"city": "Oslo"}, "ann")
    info = request.session.info()
    assert (info.parent_id, info.root_id, info.metadata) == ("plan", "plan", {})
    item.complete("sun")
    assert stored(store, call).answer.result == "sun"
    # An answer in the database needs no message.
    assert outbox(store) == []


def test_a_request_that_is_over_is_not_served(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    own, call = store.store_id(), planner.ask("weather")
    take(store)
    store.cancel_ask(call.id)
    assert served(store, store_id=own, ask=call.id) is None
    assert served(store, store_id=own, ask="unknown") is None
    assert [each.id for each in store.sessions()] == ["plan"]


def test_a_request_of_another_store_becomes_a_root_once_and_its_answer_goes_back(
    store: holdfast.Store,
) -> None:
    row = served(store, input={"city": "Oslo"}, user="bob")
    assert served(store, number=9, input={"city": "Oslo"}, user="bob") is None
    # The same id of a third store is another call.
    assert served(store, store_id="third", input=1) is not None
    item = store.work.get(row["id"], fence=row["fence"])
    request = item.receive()
    assert (request.input, request.user) == ({"city": "Oslo"}, "bob")
    info = request.session.info()
    assert (info.parent_id, info.root_id) == (None, info.id)
    assert info.metadata == {"asked_by": {"store": "far", "ask": "a1"}}
    assert store.progress(request.ask_id, "half")
    request.session.add_artifact("map", data=[1])
    item.complete("sun")
    assert outbox(store) == [("progress", "a1", 0), ("answer", "a1", 0)]
    progress, answer = take(store, route="memory/weather")
    assert (progress.address, answer.address) == ("store:far", "store:far")
    body = store.runtime.codec.decode(answer.body)
    assert (body["status"], body["result"]) == ("ok", "sun")
    assert [each["data"] for each in body["artifacts"]] == [[1]]


def test_a_cancel_stops_the_peer_and_needs_no_answer(store: holdfast.Store) -> None:
    row = served(store)
    run(store, take_cancel, incoming(number=2), "weather")
    run(store, take_cancel, incoming(number=2), None)
    assert outbox(store) == []
    [session] = store.sessions()
    assert session.status == "cancelled"
    with pytest.raises(holdfast.HoldfastError):
        store.work.get(row["id"], fence=row["fence"]).complete("late")


def test_a_cancel_that_overtakes_its_request_is_remembered(store: holdfast.Store) -> None:
    run(store, take_cancel, incoming(number=2), "weather")
    assert served(store, input={"city": "Oslo"}, user="bob") is None
    assert store.work.list(status=["pending", "in_progress"]) == []
    assert outbox(store) == []
    # At a store's own address the request cannot come afterwards.
    run(store, take_cancel, incoming(ask="a2"), None)
    assert len(store.asks()) == 1


def test_a_cancel_without_the_key_of_its_asker_changes_nothing(store: holdfast.Store) -> None:
    # One that comes before the request does not keep it from being served.
    run(store, take_cancel, incoming(number=2, token="forged"), "weather")
    row = served(store, input={"city": "Oslo"})
    assert row is not None
    for agent in ("weather", None):
        run(store, take_cancel, incoming(number=3, token="forged too"), agent)
    item = store.work.get(row["id"], fence=row["fence"])
    assert item.receive().session.info().status == "active"
    item.complete("sun")
    assert [each.state for each in store.asks(state="ok")] == ["ok"]
    run(store, take_cancel, incoming(number=4), "weather")
    assert [kind for kind, _, _ in outbox(store)] == ["answer"]


def test_only_its_cancel_tells_the_key_of_a_call(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    calls = [planner.ask("weather", number) for number in range(2)]
    requests = take(store)
    assert all(each.token for each in requests)
    assert requests[0].token != requests[1].token
    store.cancel_ask(calls[0].id)
    [cancel] = take(store)
    assert cancel.kind == "cancel"
    assert cancel_token(cancel.token) == requests[0].token
    assert cancel.token not in {each.token for each in requests}


def test_answers_count_once_and_only_for_calls_that_were_sent(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    call = planner.ask("weather")
    artifact = {"name": "map", "version": 2, "media_type": "text/plain", "data": "m", "uri": None}
    answer = incoming(ask=call.id, status="ok", result=1, artifacts=[artifact])
    for _ in range(2):
        run(store, take_answer, answer)
    run(store, take_answer, incoming(ask=call.id, status="error", result=2))
    run(store, take_answer, incoming(ask="unknown", status="ok", result=1))
    found = stored(store, call)
    assert (found.state, found.answer.result, found.late) == ("ok", 1, None)
    assert [(each.name, each.version, each.data) for each in found.answer.artifacts] == [
        ("map", 2, "m")
    ]
    assert outbox(store) == []


@pytest.mark.parametrize(
    "body",
    [
        {"status": "timeout", "result": 1},
        {"status": "ok", "result": 1, "artifacts": [{"no": "artifact"}]},
        {"result": 1},
    ],
)
def test_an_answer_that_cannot_be_is_refused(
    store: holdfast.Store, planner: holdfast.Session, body: dict[str, Any]
) -> None:
    call = planner.ask("weather")
    with pytest.raises(holdfast.InvalidArgument):
        run(store, take_answer, incoming(ask=call.id, **body))
    assert stored(store, call).state == "open"


def test_a_transport_answers_no_call_of_the_database(
    place: dict[str, Any], clock: holdfast.VirtualClock
) -> None:
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        call = store.session("plan", agent="planner").ask("weather")
        run(store, take_answer, incoming(ask=call.id, status="ok", result=1))
        run(store, take_progress, incoming(ask=call.id, note=1))
        found = stored(store, call)
        assert (found.state, found.progress) == ("open", None)


def test_progress_starts_the_timeout_anew_and_never_goes_back(
    store: holdfast.Store, planner: holdfast.Session, clock: holdfast.VirtualClock
) -> None:
    call = planner.ask("weather", timeout_seconds=60)
    clock.advance(30)
    for number, note in ((5, "half"), (5, "half"), (4, "a quarter")):
        run(store, take_progress, incoming(number=number, ask=call.id, note=note))
    found = stored(store, call)
    assert found.progress == "half"
    assert (found.deadline_at, call.deadline_at) == (found.deadline_at, found.deadline_at - 30_000)
    told = [event for event in store.events("plan") if event.kind == "peer_progressed"]
    assert len(told) == 1


def test_the_progress_of_a_peers_peer_is_told_and_moves_no_deadline(
    store: holdfast.Store, planner: holdfast.Session, clock: holdfast.VirtualClock
) -> None:
    call = planner.ask("weather", timeout_seconds=60)
    clock.advance(30)
    note = {"note": "looking", "agent": "satellite"}
    for number in (5, 5, 4):
        run(store, take_progress, incoming(number=number, ask=call.id, **note))
    found = stored(store, call)
    assert (found.progress, found.deadline_at) == (None, call.deadline_at)
    assert progress_told(store, "plan") == [{**note, "ask": call.id}]
    for wrong in ("", 5, "x" * 201):
        with pytest.raises(holdfast.InvalidArgument):
            run(store, take_progress, incoming(number=6, ask=call.id, agent=wrong, note=1))
    store.answer(call.id, "sun")
    run(store, take_progress, incoming(number=7, ask=call.id, **note))
    assert len(progress_told(store, "plan")) == 1


def progress_told(store: holdfast.Store, root_id: str) -> list[Any]:
    return [event.data for event in store.events(root_id) if event.kind == "peer_progressed"]


def test_progress_below_a_call_of_another_store_is_passed_on_to_that_store(
    store: holdfast.Store,
) -> None:
    row = served(store, input=1)
    session = store.work.get(row["id"], fence=row["fence"]).receive().session
    top = session.ask("satellite", 1)
    below = store.session(parent=session, agent="satellite").ask("camera", 1)
    assert store.progress(session.id, "own")
    assert store.progress(top.id, {"token": "sk-canary-1234567890abcdef1234567890"})
    assert store.progress(below.id, "deep")
    told = [each for each in take(store, route="memory/weather") if each.kind == "progress"]
    decode = store.runtime.codec.decode
    assert [(each.ask_id, each.address) for each in told] == [("a1", "store:far")] * 3
    bodies = [decode(each.body) for each in told]
    assert "canary" not in str(bodies)
    agents = [None, "satellite", "camera"]
    assert [each.get("agent") for each in bodies] == agents
    assert [bodies[0]["note"], bodies[2]["note"]] == ["own", "deep"]
    # What another store reports of its peers goes on from here.
    given = incoming(number=1, ask=top.id, note="from afar", agent="lens")
    run(store, take_progress, given)
    [passed] = take(store, route="memory/weather")
    assert decode(passed.body) == {"note": "from afar", "agent": "lens"}
    # Nobody waits for it any more.
    store.answer(session.id, "done")
    assert store.progress(below.id, "too late")
    left = [each.kind for each in take(store, route="memory/weather")]
    assert left == ["answer"]


def test_what_no_transport_can_carry_is_an_error_answer(
    store: holdfast.Store, planner: holdfast.Session
) -> None:
    call = planner.ask("weather")
    [taken] = take(store)
    run(store, refuse, taken, "it is too large")
    answer = stored(store, call).answer
    assert (answer.status, answer.result) == ("error", "it is too large")
    assert outbox(store) == []
    row = served(store)
    store.work.get(row["id"], fence=row["fence"]).complete("much")
    [taken] = take(store, route="memory/weather")
    run(store, refuse, taken, "it is too large")
    [instead] = take(store, route="memory/weather")
    body = store.runtime.codec.decode(instead.body)
    assert (body["status"], body["result"]) == ("error", "it is too large")
    run(store, refuse, taken, "again")
    assert len(outbox(store)) == 1


def test_old_messages_are_pruned_and_unsent_ones_are_reported(
    store: holdfast.Store, planner: holdfast.Session, clock: holdfast.VirtualClock
) -> None:
    kept = planner.ask("weather", 1, timeout_seconds="never")
    sent = planner.ask("weather", 2, timeout_seconds="never")
    take(store)
    store.cancel_ask(sent.id)
    clock.advance(120)
    [finding] = store.run(lambda tx: check())
    assert "no process sends them" in finding.message
    clock.advance(8 * 24 * 3600)
    assert store.prune().others["messages"] == 1
    assert outbox(store) == [("request", kept.id, 1)]


def test_imported_calls_are_not_sent(
    store: holdfast.Store, planner: holdfast.Session, other: dict[str, Any], tmp_path: Path
) -> None:
    call = planner.ask("weather", {"city": "Oslo"})
    store.export(tmp_path / "plan.jsonl", sessions=["plan"])
    with holdfast.open(**other, durability="normal") as elsewhere:
        elsewhere.import_sessions(tmp_path / "plan.jsonl")
        assert elsewhere.peer_call(call.id).state == "open"
        assert outbox(elsewhere) == []
        assert elsewhere.answer(call.id, "by hand") == "counted"


def ask(session: holdfast.Session, store: holdfast.Store) -> None:
    asker = routed(store, Memory()).find_session(session.id)
    asker.ask(f"peer {session.id}", {"n": 1}, id=f"{session.id} first")


def taken(session: holdfast.Session, store: holdfast.Store) -> None:
    assert len(take(store, route=f"memory/agent {session.id}")) == 1


def fail_to_send(session: holdfast.Session, store: holdfast.Store) -> None:
    run(store, postpone, *message_of(session, store), 1, 0)


def taken_again(session: holdfast.Session, store: holdfast.Store) -> None:
    [again] = take(store, route=f"memory/agent {session.id}")
    assert again.attempts == 2


def confirm_sent(session: holdfast.Session, store: holdfast.Store) -> None:
    run(store, confirm, *message_of(session, store), f"{session.id} first", store.store_id())


def message_of(session: holdfast.Session, store: holdfast.Store) -> list[int]:
    """The number of the message of a session's first call."""
    found = store.run(lambda tx: rows("SELECT * FROM hf_outbox ORDER BY number"))
    return [row["number"] for row in found if row["ask_id"] == f"{session.id} first"]


def deliver(session: holdfast.Session, store: holdfast.Store) -> None:
    given = incoming(number=0, store_id=store.store_id(), ask=f"{session.id} first")
    assert run(store, take_request, given, f"peer {session.id}", CLAIM) is not None


def deliver_foreign(session: holdfast.Session, store: holdfast.Store) -> None:
    given = incoming(ask=session.id, input=1)
    assert run(store, take_request, given, f"peer {session.id}", CLAIM) is not None


def answer_foreign(session: holdfast.Session, store: holdfast.Store) -> None:
    item = next(each for each in store.work.list(queue=f"agent:peer {session.id}"))
    store.work.get(item.id, fence=item.fence).complete("sun")


def cancel_first(session: holdfast.Session, store: holdfast.Store) -> None:
    run(store, take_cancel, incoming(ask=f"early {session.id}"), f"peer {session.id}")


def cancel_own(session: holdfast.Session, store: holdfast.Store) -> None:
    store.cancel_ask(f"{session.id} first")


STEPS: dict[str, Step] = {
    "ask": ask,
    "take its message": taken,
    "it cannot be sent": fail_to_send,
    "take it again": taken_again,
    "deliver it": deliver,
    "it is confirmed": confirm_sent,
    "deliver one of another store": deliver_foreign,
    "answer that": answer_foreign,
    "a cancel before its request": cancel_first,
    "cancel the call": cancel_own,
}


def shape(store: holdfast.Store, id: str) -> Any:
    """What the steps leave, without ids that are made from the session's, and without times."""
    agents = [f"agent {id}", f"peer {id}"]
    asks = [(each.state, each.agent) for name in agents for each in store.asks(agent=name)]
    sessions = [(each.status, each.agent) for name in agents for each in store.sessions(agent=name)]
    items = [
        (each.type, each.status, each.fence) for each in store.work.list(queue=f"agent:peer {id}")
    ]
    sent = [(kind, attempts) for kind, ask_id, attempts in outbox(store) if ask_id.split()[0] == id]
    return asks, sessions, items, sent


def test_killed_at_every_statement_all_or_nothing(place: dict[str, Any]) -> None:
    def prepare(session: holdfast.Session) -> None:
        holdfast.Store(session.runtime).session(session.id, agent=f"agent {session.id}")

    assert len(kill_at_every_statement(place, STEPS, shape, prepare)) > 40
