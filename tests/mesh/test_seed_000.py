"""The design document for pauses at peer calls, where a broker carries messages or tasks race.

What needs only a database is in tests/peers/test_seed_000.py. Here instances of callers and peers
have threads or processes of their own, on both databases, with sync and with async stores.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidArgument, StoreBusy
from holdfast.mesh import Memory, Mesh, Service, TransportError
from holdfast.testing.subject import Colour, Subject, done
from tests.checkpoints.colours import both_colours
from tests.crash.children import Child
from tests.mesh.meshes import QUICK, WEATHER, is_idle, running, until
from tests.mesh.test_couriers import CANARY, Recording, in_every_table

AGENT = "caller"


@contextmanager
def both(place: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The store of the caller and that of its peers."""
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**other, durability="normal") as peers,
    ):
        yield store, peers


def answered(resumption: holdfast.Resumption[Any]) -> Any:
    return [[each.status, each.result] for each in resumption.answers]


# 3 and 7.2: the message is acknowledged when the checkpoint is written, and not before


def test_3_and_7_2_the_message_is_acknowledged_after_the_checkpoint(
    place: dict[str, Any],
) -> None:
    paused, may_return = threading.Event(), threading.Event()

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("nobody")
        assert transport.acknowledged == []
        outcome = request.session.pause()
        paused.set()
        assert may_return.wait(120)
        return outcome

    transport = Recording()
    with (
        holdfast.open(**place, durability="normal") as store,
        Mesh(store, transport) as mesh,
        running(Service(AGENT, ask, answered).worker(store, transport, **QUICK)),
    ):
        mesh.request(AGENT, request_id="r", wait_seconds=0)
        assert paused.wait(120)
        [item] = store.work.list(type="request")
        assert (item.status, store.find_session("r").info().status) == ("completed", "waiting")
        may_return.set()
        until(lambda: "request" in transport.acknowledged, "it is not acknowledged")


def test_4_3_4_a_checkpoint_that_cannot_be_written_leaves_the_message_unacknowledged(
    place: dict[str, Any],
) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        call = request.session.ask("weather", {"city": "Oslo"})
        with pytest.raises(InvalidArgument):
            request.session.pause({"not data": object()})
        until(lambda: request.store.peer_call(call.id).state == "ok", "no answer")
        # Those of the caller and of its peer: the peer's is acknowledged with its answer.
        assert Counter(transport.acknowledged)["request"] == 1
        assert request.session.info().status == "active"
        return request.session.answers(grace_seconds=60)

    transport = Recording()
    with holdfast.open(**place, durability="normal") as store, Mesh(store, transport) as mesh:
        workers = [
            each.worker(store, transport, **QUICK)
            for each in (Service(AGENT, ask, answered), WEATHER)
        ]
        with running(*workers):
            call = mesh.request(AGENT, user="ann")
            until(lambda: Counter(transport.acknowledged)["request"] == 2, "one is left")
        assert call.answer is not None
        assert call.answer.result == [["ok", "Oslo: sun for ann"]]
        assert store.work.list(type="resume") == []


class Deaf(Memory):
    """Cannot be told of requests that were delivered, whether they are acknowledged or not."""

    def __init__(self) -> None:
        super().__init__(ack_seconds=3600)
        self.refused: Counter[str] = Counter()

    def _set(self, delivery: Any, ready_in_seconds: float | None) -> None:
        if delivery.message.kind == "request":
            self.refused["ack" if ready_in_seconds is None else "extend"] += 1
            raise TransportError("the broker went away")
        super()._set(delivery, ready_in_seconds)


@both_colours
async def test_7_2_an_acknowledgement_that_fails_is_only_logged(subject: Subject) -> None:
    """Neither does it stop the worker, nor the heartbeat of what else runs."""
    transport, may_end = Deaf(), threading.Event()

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        assert may_end.wait(120)
        return request.session.item.attempts

    async def serve_async(request: holdfast.PeerRequest[Any]) -> Any:
        assert await asyncio.to_thread(may_end.wait, 120)
        return request.session.item.attempts

    store: Any = await subject.open(durability="normal")
    service = Service(AGENT, serve if subject.colour == "sync" else serve_async)
    worker: Any = service.worker(store, transport, **QUICK, lease_seconds=6)
    if subject.colour == "sync":
        task = asyncio.ensure_future(asyncio.to_thread(worker.run))
    else:
        task = asyncio.ensure_future(worker.run())
    mesh: Any = Mesh(store, transport)
    ids = ["r1", "r2", "r3"]
    for id in ids:
        await done(mesh.request(AGENT, request_id=id, wait_seconds=0))
    # So often that every lease would have ended if the first failure had stopped their renewal.
    await asyncio.to_thread(until, lambda: transport.refused["extend"] > 12, "no heartbeat")
    may_end.set()
    for id in ids:
        call = await done(mesh.wait(id))
        assert (call.state, call.answer.result) == ("ok", 1)
    await asyncio.to_thread(until, lambda: transport.refused["ack"] >= 3, "not acknowledged")
    await done(mesh.close())
    assert not task.done()
    worker.stop()
    await task


# 5.1 and 8.4: the security context


def test_5_1_and_8_4_the_security_context_is_made_again_and_stored_nowhere(
    place: dict[str, Any], other: dict[str, Any]
) -> None:
    made: list[str] = []

    def hook(call: Any) -> dict[str, str]:
        made.append(call.kind)
        return {"auth_token": f"{CANARY}-{len(made)}"}

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        assert request.headers["auth_token"].startswith(CANARY)
        request.session.ask("peer")
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        assert resumption.headers["auth_token"].startswith(CANARY)
        return resumption.answers[0].result

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        return request.headers["auth_token"].startswith(CANARY)

    transport = Memory(resend_seconds=600)
    with both(place, other) as (store, peers):
        workers = [
            Service(AGENT, ask, go_on).worker(store, transport, credentials=hook, **QUICK),
            Service("peer", serve).worker(peers, transport, **QUICK),
        ]
        with Mesh(store, transport, credentials=hook) as mesh, running(*workers):
            call = mesh.request(AGENT, user="ann")
            until(lambda: is_idle(store) and is_idle(peers), "something is left")
        assert call.answer is not None
        assert call.answer.result is True
        assert Counter(made) == {"request": 2, "resume": 1}
        assert CANARY not in in_every_table(store, place)
        assert CANARY not in in_every_table(peers, other)


# 7.1 Configuration


def test_7_1_stateless_checkpointing_is_on_by_default(place: dict[str, Any]) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("nobody")
        return request.session.pause()

    with holdfast.open(**place, durability="normal") as store:
        store.request(AGENT, request_id="r")
        Service(AGENT, ask, answered).worker(store).run(until_empty=True)
        info = store.find_session("r").info()
        assert (info.status, info.holder) == ("waiting", None)


def test_7_1_off_a_process_that_dies_while_it_waits_in_memory_loses_nothing(
    place: dict[str, Any],
) -> None:
    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        for number in range(2):
            request.session.ask("peer", number, timeout_seconds="never")
        return request.session.pause({"step": 1})

    service = Service(AGENT, ask, answered, stateless=False)

    def serve(say: Any) -> None:
        with holdfast.open(**place, durability="normal") as store:
            service.worker(store, lease_seconds=3, **QUICK).run()

    with holdfast.open(**place, durability="normal") as store:
        store.request(AGENT, request_id="r")
    dying = Child(serve)
    try:
        with holdfast.open(**place, durability="normal") as store:
            until(lambda: len(store.asks(agent="peer")) == 2, "the caller does not ask")
            [first, second] = store.asks(agent="peer")
            store.answer(first.id, "in time")
            dying.kill()
            store.answer(second.id, "while nobody waited")
            with running(service.worker(store, lease_seconds=3, **QUICK)):
                answer = Mesh(store).wait("r", wait_seconds=120).answer
            assert answer is not None
            assert answer.result == [["ok", "in time"], ["ok", "while nobody waited"]]
            assert len(store.asks(agent="peer")) == 2
            assert store.work.list(type="resume") == []
    finally:
        dying.kill()
        dying.wait()


# 7.6 Cancellation


def test_7_6_a_cancel_from_another_instance_reaches_peers_at_another_store(
    place: dict[str, Any], other: dict[str, Any]
) -> None:
    begun = threading.Semaphore(0)
    stopped = threading.Semaphore(0)

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        for number in range(2):
            request.session.ask("peer", number)
        return request.session.pause()

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        begun.release()
        until(lambda: request.session.item.is_cancelled or request.session.item.is_lost, "no stop")
        stopped.release()
        return "too late"

    transport = Memory(resend_seconds=0.5)
    with both(place, other) as (store, peers), holdfast.open(**place) as elsewhere:
        workers = [
            Service(AGENT, ask, answered).worker(store, transport, **QUICK),
            Service("peer", serve).worker(peers, transport, lease_seconds=3, **QUICK),
        ]
        with Mesh(store, transport) as mesh, running(*workers):
            mesh.request(AGENT, request_id="r", wait_seconds=0)
            for _ in range(2):
                assert begun.acquire(timeout=120)
            elsewhere.find_session("r").cancel()
            answer = mesh.wait("r").answer
            assert answer is not None
            assert answer.status == "cancelled"
            for _ in range(2):
                assert stopped.acquire(timeout=120)
            until(lambda: is_idle(store) and is_idle(peers), "something is left")
        assert {each.status for each in peers.sessions(agent="peer")} == {"cancelled"}
        assert [(each.state, each.late) for each in store.asks(agent="peer")] == [
            ("cancelled", None)
        ] * 2
        assert store.pauses(state="waiting") == []


# 8.2 Event loop serialization


def test_8_2_a_checkpoint_does_not_block_the_event_loop(
    place: dict[str, Any], tmp_path: Path
) -> None:
    """The document lets the write block the loop, to keep answers out; here the lock does that."""
    held, may_go = threading.Event(), threading.Event()

    def hold(tx: Any) -> Any:
        yield from tx.session("task")
        held.set()
        assert may_go.wait(60)

    async def run() -> None:
        store = await holdfast.aopen(**place, durability="normal")
        with holdfast.open(**place, durability="normal") as other:
            session = await store.session("task", agent=AGENT)
            call = await session.ask("peer")
            holding = asyncio.ensure_future(asyncio.to_thread(other.run, hold))
            assert await asyncio.to_thread(held.wait, 60)
            pausing = asyncio.ensure_future(session.pause())
            answering = asyncio.ensure_future(store.answer(call.id, "while it is written"))
            # The loop goes on, and reads are answered.
            for _ in range(5):
                assert (await store.peer_call(call.id)).state == "open"
            assert not pausing.done()
            assert not answering.done()
            may_go.set()
            await holding
            assert await answering == "counted"
            outcome: Any = await pausing
            if isinstance(outcome, holdfast.Parked):
                [item] = await store.work.claim("instance", queues=f"agent:{AGENT}")
                outcome = await item.resume()
            assert [each.result for each in outcome.answers] == ["while it is written"]
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_8_2_and_8_3_tasks_of_one_instance_race_and_lose_nothing(
    place: dict[str, Any], colour: Colour, tmp_path: Path
) -> None:
    async def case(subject: Subject) -> None:
        store: Any = await subject.open(durability="normal")
        for number in range(10):
            session = await done(store.session(f"s{number}", agent=f"agent {number}"))
            calls = [await done(session.ask("peer", each)) for each in range(3)]
            steps: list[Callable[[], Awaitable[Any]]] = [session.pause, store.recover]
            for each in calls:
                # Every response comes twice.
                steps += [lambda id=each.id: store.answer(id, "here")] * 2  # type: ignore[misc]
            outcome, _, *receipts = await subject.together(steps)
            assert Counter(receipts) == {"counted": 3, "duplicate": 3}
            items = await done(store.work.claim("w", queues=f"agent:agent {number}", limit=10))
            if isinstance(outcome, holdfast.Parked):
                [item] = items
                outcome = await done(item.resume())
            else:
                assert items == []
            assert [each.result for each in outcome.answers] == ["here"] * 3

    async def run() -> None:
        subject = Subject(place, colour, tmp_path)
        try:
            await case(subject)
        finally:
            await subject.close()

    asyncio.run(run())


# 10 Limitations of the document that do not hold here


def test_10_2_several_processes_on_one_database_answer_and_resume_once(
    place: dict[str, Any],
) -> None:
    """Also on SQLite, which the document keeps to one process."""
    tasks, peers = 6, 4
    ids = [[f"{task} {peer}" for peer in range(peers)] for task in range(tasks)]

    def instance(say: Callable[[str], None]) -> None:
        with holdfast.open(**place, durability="normal") as store:
            say("open")
            for calls in ids:
                for id in calls:
                    receipt = until_free(lambda id=id: store.answer(id, "x"))  # type: ignore[misc]
                    say(f"{receipt} {id}")
            for item in until_free(lambda: store.work.claim("w", queues=f"agent:{AGENT}", limit=9)):
                resumption = until_free(item.resume)
                say(f"resumed {resumption.session.id} {len(resumption.answers)}")

    with holdfast.open(**place, durability="normal") as store:
        for task, calls in enumerate(ids):
            session = store.session(f"task {task}", agent=AGENT)
            for id in calls:
                session.ask("peer", id=id, timeout_seconds="never")
            session.pause()
    children = [Child(instance) for _ in range(3)]
    ended = [child.wait() for child in children]
    assert [code for code, _ in ended] == [0] * 3
    said = Counter(line for _, lines in ended for line in lines)
    for task, calls in enumerate(ids):
        for id in calls:
            assert (said[f"counted {id}"], said[f"duplicate {id}"]) == (1, 2)
        assert said[f"resumed task {task} {peers}"] == 1


def until_free(call: Callable[[], Any]) -> Any:
    """Make a call, again while others write for long."""
    while True:
        try:
            return call()
        except StoreBusy:
            continue


@both_colours
async def test_10_4_the_sweep_interval_can_be_configured(subject: Subject) -> None:
    """What was asked elsewhere is timed out by then, though nothing else wakes the worker."""
    store: Any = await subject.open(durability="normal")

    async def idle(request: holdfast.PeerRequest[Any]) -> None:
        raise AssertionError("nobody asks it")

    def idle_plainly(request: holdfast.PeerRequest[Any]) -> None:
        raise AssertionError("nobody asks it")

    service = Service("bystander", idle_plainly if subject.colour == "sync" else idle)
    worker: Any = service.worker(store, poll_seconds=60, sweep_interval_seconds=0.2)
    if subject.colour == "sync":
        task = asyncio.ensure_future(asyncio.to_thread(worker.run))
    else:
        task = asyncio.ensure_future(worker.run())
    session = await done(store.session("task", agent=AGENT))
    call = await done(session.ask("silent", timeout_seconds=0.1))
    await done(session.pause())
    for _ in range(3_000):
        if (await done(store.peer_call(call.id))).state != "open":
            break
        await asyncio.sleep(0.02)
    assert (await done(store.peer_call(call.id))).state == "timeout"
    worker.stop()
    await task
