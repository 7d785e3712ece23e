"""The design document for pauses at peer calls, section by section: what it wants holds here.

Where it has an instance A and an instance B, two stores are open on one database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.errors import AskNotFound, InvalidArgument
from holdfast.mesh import Mesh, Service
from tests.peers.test_races import race

AGENT = "caller"


@pytest.fixture
def clock() -> holdfast.VirtualClock:
    return holdfast.VirtualClock()


@pytest.fixture
def a(place: dict[str, Any], clock: holdfast.VirtualClock) -> Iterator[holdfast.Store]:
    """Instance A, which dispatches."""
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        yield store


@pytest.fixture
def b(
    place: dict[str, Any], clock: holdfast.VirtualClock, a: holdfast.Store
) -> Iterator[holdfast.Store]:
    """Instance B, which has nothing in memory."""
    with holdfast.open(**place, clock=clock, durability="normal") as store:
        yield store


def task(store: holdfast.Store, id: str = "task", **given: Any) -> holdfast.Session:
    return store.session(id, agent=AGENT, user="ann", **given)


def checkpointed(
    store: holdfast.Store, *agents: str, context: Any = None, **given: Any
) -> tuple[holdfast.Session, list[str]]:
    """Return a task that waits for peers, and the ids of its sub-tasks."""
    session = task(store)
    ids = [session.ask(agent, {"n": n}, **given).id for n, agent in enumerate(agents)]
    session.pause(context)
    return session, ids


def retriggered(store: holdfast.Store) -> list[tuple[Any, holdfast.Resumption[Any]]]:
    """Claim what is to be retriggered, as an instance does."""
    items = store.work.claim("instance", queues=f"agent:{AGENT}", limit=10)
    return [(item, item.resume()) for item in items]


def answers(resumption: holdfast.Resumption[Any]) -> list[tuple[str, Any]]:
    return [(each.status, each.result) for each in resumption.answers]


def outlive(clock: holdfast.VirtualClock, store: holdfast.Store) -> None:
    """Wait until a dead instance's lease has expired, and its item is to be tried again."""
    for _ in range(2):
        clock.advance(3_600)
        store.recover()


# 1 Problem statement


def test_1_any_instance_receives_the_responses(a: holdfast.Store, b: holdfast.Store) -> None:
    _, [first, second] = checkpointed(a, "one", "two")
    assert b.answer(first, "1") == "counted"
    assert a.answer(second, "2") == "counted"
    [(_, resumption)] = retriggered(b)
    assert answers(resumption) == [("ok", "1"), ("ok", "2")]


def test_1_the_peers_work_is_not_lost_with_the_caller(place: dict[str, Any]) -> None:
    with holdfast.open(**place, durability="normal") as dead:
        _, [call] = checkpointed(dead, "peer")
    with holdfast.open(**place, durability="normal") as peer:
        peer.answer(call, "done meanwhile")
    with holdfast.open(**place, durability="normal") as other:
        [(_, resumption)] = retriggered(other)
        assert answers(resumption) == [("ok", "done meanwhile")]


# 3 Design principles


def test_3_a_task_that_calls_no_peers_writes_nothing_here(a: holdfast.Store) -> None:
    session = task(a)
    session.append("transcript", ["hello"])
    session.end()
    assert (session.asks(), session.pauses()) == ([], [])


def test_3_and_4_1_a_response_before_the_checkpoint_is_kept_for_it(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    session = task(a)
    first, second = session.ask("one"), session.ask("two")
    b.answer(first.id, "early")
    parked = session.pause()
    assert isinstance(parked, holdfast.Parked)
    assert a.get_pause(parked.pause_id).open_asks == 1
    b.answer(second.id, "late")
    [(_, resumption)] = retriggered(b)
    assert answers(resumption) == [("ok", "early"), ("ok", "late")]


def test_3_the_request_is_acknowledged_with_the_checkpoint_and_not_before(
    a: holdfast.Store,
) -> None:
    a.request(AGENT, request_id="r")
    [item] = a.work.claim("instance", queues=f"agent:{AGENT}")
    request = item.receive()
    request.session.ask("peer")
    assert a.work.get(item.id).status == "in_progress"
    request.session.pause()
    assert a.work.get(item.id).status == "completed"


def test_3_a_request_whose_instance_dies_before_the_checkpoint_is_delivered_again(
    a: holdfast.Store, b: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    a.request(AGENT, request_id="r")
    [item] = a.work.claim("instance A", queues=f"agent:{AGENT}", lease_seconds=10)
    item.receive().session.ask("peer", 1)
    outlive(clock, b)
    [again] = b.work.claim("instance B", queues=f"agent:{AGENT}")
    session = again.receive().session
    session.ask("peer", 1)
    session.pause()
    # The second attempt asks as the first did, and so asks nobody twice.
    assert len(session.asks()) == 1
    with pytest.raises(holdfast.LeaseLost):
        item.complete("from a zombie")


# 4.2 Lifecycle of a peer call


def test_4_2_the_whole_sequence_with_three_instances(place: dict[str, Any]) -> None:
    def plan(request: holdfast.PeerRequest[Any]) -> Any:
        for number in range(request.input):
            request.session.ask("peer", number)
        request.session.save(buffer="so far")
        return request.session.pause({"turn": 1})

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        loaded = resumption.session.latest()
        return [loaded["buffer"], resumption.context, *(each.result for each in resumption.answers)]

    caller = Service(AGENT, plan, go_on)
    peer = Service("peer", lambda request: request.input * 2)
    with holdfast.open(**place, durability="normal") as store:
        Mesh(store).request(AGENT, 3, request_id="r", wait_seconds=0)
    for service in (caller, peer, caller):
        with holdfast.open(**place, durability="normal") as instance:
            service.worker(instance, poll_seconds=0.05).run(until_empty=True)
    with holdfast.open(**place, durability="normal") as user:
        answer = Mesh(user).wait("r").answer
        assert answer is not None
        assert answer.result == ["so far", {"turn": 1}, 0, 2, 4]
        assert user.find_session("r").pauses()[0].state == "closed"


def test_4_2_fewer_responses_than_expected_wait_for_more(a: holdfast.Store) -> None:
    session, [first, second] = checkpointed(a, "one", "two")
    a.answer(first, 1)
    assert retriggered(a) == []
    assert session.info().status == "waiting"
    a.answer(second, 2)
    assert len(retriggered(a)) == 1


# 4.3 Key invariants


def test_4_3_1_each_response_is_processed_exactly_once(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    _, [call] = checkpointed(a, "peer")
    receipts = race(lambda: a.answer(call, "same"), lambda: b.answer(call, "same"))
    assert sorted(receipts) == ["counted", "duplicate"]
    assert len(retriggered(a) + retriggered(b)) == 1


def test_4_3_2_only_the_last_of_racing_responses_triggers_the_restore(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    _, [first, second] = checkpointed(a, "one", "two")
    assert race(lambda: a.answer(first, 1), lambda: b.answer(second, 2)) == ["counted"] * 2
    [(_, resumption)] = retriggered(a) + retriggered(b)
    assert answers(resumption) == [("ok", 1), ("ok", 2)]


def test_4_3_3_no_state_is_left_orphaned(a: holdfast.Store, clock: holdfast.VirtualClock) -> None:
    session, [call] = checkpointed(a, "peer")
    a.answer(call, 1)
    [(item, _)] = retriggered(a)
    item.complete()
    assert [each.state for each in session.pauses()] == ["closed"]
    clock.advance(8 * 86_400)
    a.prune()
    assert (session.asks(), session.pauses()) == ([], [])


def test_4_3_4_if_the_checkpoint_cannot_be_written_the_task_goes_on_in_memory(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    session = task(a)
    call = session.ask("peer")
    with pytest.raises(InvalidArgument):
        session.pause({"not data": object()})
    assert (session.info().status, session.pauses()) == ("active", [])
    b.answer(call.id, "in memory")
    outcome = session.answers(grace_seconds=60)
    assert isinstance(outcome, holdfast.Answered)
    assert [each.result for each in outcome.answers] == ["in memory"]


# 5 Database schema: every column is somewhere


def test_5_1_everything_of_a_paused_task_is_restored(a: holdfast.Store, b: holdfast.Store) -> None:
    session = task(a, metadata={"gateway": "web"})
    session.add_artifact("draft", data={"text": "first"})
    session.add_artifact("notes", data=[1], returned=False)
    session.save(buffer="So far: ", flags={"deep_research_sent": True})
    session.spend("model-1", source="agent", input_tokens=10, output_tokens=5, usd="0.02")
    call = session.ask("peer", correlation={"function_call_id": "c_1", "peer_tool_name": "p"})
    session.pause({"invocation": "i_1"})
    b.answer(call.id, "done")
    [(_, resumption)] = retriggered(b)
    info, loaded = resumption.session.info(), resumption.session.latest()
    assert (info.id, info.agent, info.user, info.metadata) == (
        "task", AGENT, "ann", {"gateway": "web"}
    )  # fmt: skip
    assert resumption.context == {"invocation": "i_1"}
    assert loaded.channels == {"buffer": "So far: ", "flags": {"deep_research_sent": True}}
    assert [(each.name, each.returned) for each in resumption.artifacts] == [
        ("draft", True), ("notes", False)
    ]  # fmt: skip
    [spent] = resumption.session.spent().by
    assert (spent.model, spent.source, spent.input_tokens, spent.output_tokens) == (
        "model-1", "agent", 10, 5
    )  # fmt: skip
    assert resumption.answers[0].correlation["function_call_id"] == "c_1"


def test_5_2_a_sub_task_has_its_parent_its_correlation_and_an_absolute_deadline(
    a: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    session = task(a)
    call = session.ask("peer", timeout_seconds=60, correlation={"function_call_id": "c_1"})
    assert (call.session_id, call.agent) == ("task", "peer")
    assert call.correlation == {"function_call_id": "c_1"}
    assert call.deadline_at == call.created_at + 60_000 == clock.now_ms() + 60_000


def test_5_3_completion_is_counted_for_every_invocation_by_itself(a: holdfast.Store) -> None:
    session, [first, second] = checkpointed(a, "one", "two")
    a.answer(first, 1)
    [pause] = session.pauses()
    assert (pause.generation, pause.open_asks, pause.ok_asks) == (1, 1, 1)
    a.answer(second, 2)
    [(_, resumption)] = retriggered(a)
    resumption.session.ask("three")
    resumption.session.pause()
    assert [(each.generation, each.open_asks) for each in session.pauses()] == [(1, 0), (2, 1)]


# 6 Serialization


def test_6_1_what_is_changed_after_the_pause_does_not_reach_the_checkpoint(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    context = {"artifacts": [{"name": "draft"}]}
    _, [call] = checkpointed(a, "peer", context=context)
    context["artifacts"][0]["name"] = "changed"
    b.answer(call, 1)
    [(_, resumption)] = retriggered(b)
    assert resumption.context == {"artifacts": [{"name": "draft"}]}


@pytest.mark.parametrize("transient", [threading.Lock(), threading.Event(), {1, 2}])
def test_6_1_what_is_transient_cannot_be_stored_by_accident(
    transient: Any, a: holdfast.Store
) -> None:
    session = task(a)
    session.ask("peer")
    with pytest.raises(InvalidArgument):
        session.pause({"lock": transient})
    assert session.pauses() == []


def test_6_2_a_restored_task_has_no_open_calls_of_its_own(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    _, [call] = checkpointed(a, "peer")
    b.answer(call, 1)
    [(_, resumption)] = retriggered(b)
    resumption.session.save(turn=2)
    outcome = resumption.session.pause()
    # Nothing was asked since, so there is nothing to wait for.
    assert isinstance(outcome, holdfast.Answered)
    assert outcome.answers == ()


# 7.1 Configuration


def test_7_1_stateless_checkpointing_needs_an_agent_that_can_go_on(a: holdfast.Store) -> None:
    with pytest.raises(InvalidArgument, match="has no agent"):
        a.session("nobody").pause()


def test_7_1_stateless_checkpointing_off_waits_in_memory(place: dict[str, Any]) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("peer")
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        return resumption.answers[0].result

    with holdfast.open(**place, durability="normal") as store:
        store.request(AGENT, request_id="r")
        caller = Service(AGENT, ask, go_on, stateless=False)
        peer = Service("peer", lambda request: "quick")
        workers: list[Any] = [each.worker(store, poll_seconds=0.05) for each in (caller, peer)]
        threads = [threading.Thread(target=each.run) for each in workers]
        for thread in threads:
            thread.start()
        try:
            answer = Mesh(store).wait("r", wait_seconds=120).answer
        finally:
            for worker in workers:
                worker.stop()
            for thread in threads:
                thread.join()
        assert answer is not None
        assert answer.result == "quick"
        # It never let go: no resumption was needed.
        assert store.work.list(type="resume") == []


def test_7_1_without_a_database_nothing_starts() -> None:
    for url in ("sqlite:////nowhere/at/all/store.db", "memory://"):
        with pytest.raises(InvalidArgument):
            holdfast.open(url)


def test_7_1_tables_are_created_when_the_store_is_opened_again_and_again(
    place: dict[str, Any],
) -> None:
    for _ in range(2):
        with holdfast.open(**place) as store:
            assert store.asks() == []


# 7.2 The write path


def test_7_2_after_the_checkpoint_nothing_is_held(a: holdfast.Store) -> None:
    session = task(a)
    driven = session.drive()
    driven.ask("peer")
    driven.pause()
    info = session.info()
    assert (info.status, info.is_driven, info.holder) == ("waiting", False, None)
    with pytest.raises(holdfast.LeaseLost):
        driven.save(x=1)


# 7.3 Three methods that read


def test_7_3_claim_peer_sub_task_completion(a: holdfast.Store, b: holdfast.Store) -> None:
    _, [call] = checkpointed(a, "peer")
    assert b.answer(call, 1) == "counted"
    assert a.answer(call, 1) == "duplicate"
    with pytest.raises(AskNotFound):
        b.answer("no such sub-task", 1)


def test_7_3_get_correlation_data_for_sub_task_changes_nothing(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    _, [call] = checkpointed(a, "peer", correlation={"function_call_id": "c_1"})
    for _ in range(2):
        assert b.peer_call(call).correlation == {"function_call_id": "c_1"}
    assert b.peer_call(call).state == "open"


def test_7_3_reset_peer_timeout(
    a: holdfast.Store, b: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    _, [call] = checkpointed(a, "peer", timeout_seconds=10)
    clock.advance(9)
    assert b.progress(call, "still there")
    clock.advance(9)
    a.recover()
    assert a.peer_call(call).state == "open"
    clock.advance(2)
    a.recover()
    assert a.peer_call(call).state == "timeout"
    assert not b.progress(call, "too late")


# 7.4 Final peer responses


def test_7_4_on_the_in_memory_path_nothing_is_parked(a: holdfast.Store) -> None:
    session = task(a)
    a.answer(session.ask("peer").id, "quick")
    outcome = session.pause()
    assert isinstance(outcome, holdfast.Answered)
    assert (outcome.answers[0].result, session.info().status) == ("quick", "active")


def test_7_4_artifacts_of_all_peers_are_registered_before_the_retrigger(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    _, [first, second] = checkpointed(a, "one", "two")
    a.answer(second, 2, artifacts=[holdfast.Artifact(name="two", uri="s3://2")])
    b.answer(first, 1, artifacts=[holdfast.Artifact(name="one", data=1)])
    [(_, resumption)] = retriggered(b)
    assert [each.name for each in resumption.artifacts] == ["one", "two"]


# 7.5 Timeouts


def test_7_5_a_timeout_before_the_checkpoint_is_an_answer_of_it(
    a: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    session = task(a)
    session.ask("peer", timeout_seconds=1)
    clock.advance(2)
    outcome = session.pause()
    assert isinstance(outcome, holdfast.Answered)
    assert [each.status for each in outcome.answers] == ["timeout"]


def test_7_5_the_sweeper_records_a_timeout_cancels_the_peer_and_completes(
    a: holdfast.Store, b: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    _, [silent, quick] = checkpointed(a, "one", "two", timeout_seconds=10)
    a.answer(quick, "here")
    clock.advance(11)
    b.recover()
    assert b.find_session(silent).info().status == "cancelled"
    [(_, resumption)] = retriggered(b)
    assert [each.status for each in resumption.answers] == ["timeout", "ok"]
    assert b.answer(silent, "after all") == "late"


def test_7_5_several_sweepers_and_a_response_count_once(
    a: holdfast.Store, b: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    _, [call] = checkpointed(a, "peer", timeout_seconds=10)
    clock.advance(11)
    race(a._sweep, b._sweep, lambda: a.answer(call, "in time?"))
    [(_, resumption)] = retriggered(a) + retriggered(b)
    assert len(resumption.answers) == 1


def test_7_5_and_10_3_the_deadline_counts_from_the_dispatch(
    a: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    session = task(a)
    call = session.ask("peer", timeout_seconds=10)
    clock.advance(8)
    session.pause()
    clock.advance(3)
    a.recover()
    assert a.peer_call(call.id).state == "timeout"


# 7.6 Cancellation


def test_7_6_cancelling_from_another_instance_reaches_every_peer(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    a.request(AGENT, request_id="r")
    [item] = a.work.claim("instance", queues=f"agent:{AGENT}")
    session = item.receive().session
    calls = [session.ask(agent).id for agent in ("one", "two")]
    session.pause()
    b.find_session("r").cancel()
    assert [b.peer_call(call).state for call in calls] == ["cancelled"] * 2
    assert [b.find_session(call).info().status for call in calls] == ["cancelled"] * 2
    final = Mesh(b).wait("r").answer
    assert final is not None
    assert final.status == "cancelled"
    assert b.answer(calls[0], "late") == "late"
    assert retriggered(b) == []


# 7.7 Restoration


def test_7_7_a_crash_after_the_restore_loses_nothing(
    a: holdfast.Store, b: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    _, [call] = checkpointed(a, "peer", context={"step": 1})
    a.answer(call, "once")
    [(_, first)] = retriggered(a)
    outlive(clock, b)
    [(item, second)] = retriggered(b)
    assert (second.context, answers(second)) == (first.context, answers(first))
    assert not second.is_consumed
    with pytest.raises(holdfast.LeaseLost):
        first.session.save(zombie=True)
    second.session.save(turn=2)
    item.complete()


# 8 Concurrency


def test_8_1_sqlite_is_no_exception(place: dict[str, Any]) -> None:
    """The document's row locks are ignored there; here several writers are right on both."""
    opened = [holdfast.open(**place, durability="normal") for _ in range(4)]
    try:
        session = task(opened[0])
        calls = [session.ask("peer", number).id for number in range(4)]
        session.pause()
        found = race(*(lambda s=s, c=c: s.answer(c, "x") for s in opened for c in calls))
        assert sorted(found) == ["counted"] * 4 + ["duplicate"] * 12
        resumed = [each for store in opened for each in retriggered(store)]
        assert len(resumed) == 1
    finally:
        for store in opened:
            store.close()


def test_8_3_a_response_racing_the_checkpoint_is_never_lost(
    a: holdfast.Store, b: holdfast.Store
) -> None:
    for number in range(10):
        session = a.session(f"racing {number}", agent=f"agent {number}")
        call = session.ask("peer")
        paused, receipt = race(session.pause, lambda: b.answer(call.id, "now"))  # noqa: B023
        assert receipt == "counted"
        items = b.work.claim("instance", queues=f"agent:agent {number}")
        if isinstance(paused, holdfast.Answered):
            assert ([each.result for each in paused.answers], items) == (["now"], [])
        else:
            assert answers(items[0].resume()) == [("ok", "now")]


def test_8_4_what_looks_like_a_token_is_not_stored_with_a_note(a: holdfast.Store) -> None:
    _, [call] = checkpointed(a, "peer")
    a.progress(call, {"auth_token": "sk-canary-1234567890abcdef1234567890"})
    assert "canary" not in str(a.peer_call(call).progress)


# 10 Limitations of the document that do not hold here


def test_10_1_a_crash_during_active_work_loses_no_task(
    a: holdfast.Store, b: holdfast.Store, clock: holdfast.VirtualClock
) -> None:
    a.request(AGENT, {"n": 1}, request_id="r")
    [item] = a.work.claim("instance A", queues=f"agent:{AGENT}", lease_seconds=10)
    item.receive().session.append("transcript", ["thinking"], key="t1")
    outlive(clock, b)
    [again] = b.work.claim("instance B", queues=f"agent:{AGENT}")
    request = again.receive()
    loaded = request.session.latest()
    assert (request.input, loaded["transcript"]) == ({"n": 1}, ["thinking"])


def test_10_4_sweep_interval_seconds_does_not_delay_deadlines(place: dict[str, Any]) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("silent", timeout_seconds=0.1)
        return request.session.pause()

    caller = Service(AGENT, ask, lambda resumption: resumption.answers[0].status)
    with holdfast.open(**place, durability="normal") as store:
        worker: Any = caller.worker(store, poll_seconds=0.05, sweep_interval_seconds=3_600)
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            answer = Mesh(store).request(AGENT, wait_seconds=120).answer
        finally:
            worker.stop()
            running.join()
        assert answer is not None
        assert answer.result == "timeout"


def test_10_5_three_of_five_responses_survive_a_crash(
    place: dict[str, Any], clock: holdfast.VirtualClock
) -> None:
    given = {**place, "clock": clock, "durability": "normal"}
    with holdfast.open(**given) as dead:
        _, calls = checkpointed(dead, *["peer"] * 5, timeout_seconds=60)
        for number in (0, 2, 4):
            dead.answer(calls[number], number)
    with holdfast.open(**given) as other:
        other.answer(calls[3], 3)
        clock.advance(61)
        other.recover()
        [(_, resumption)] = retriggered(other)
        assert [each.status for each in resumption.answers] == ["ok", "timeout", *["ok"] * 3]
