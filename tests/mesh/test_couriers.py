"""Couriers: identities that nobody stores, acknowledgements, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import Query, batch
from holdfast.maintenance import read_archive
from holdfast.mesh import Memory, Mesh, Message, Service, TransportError, Undeliverable
from tests.mesh.meshes import PLANNER, QUICK, WEATHER, is_idle, outbox, running, until
from tests.work.working import unhurried

CANARY = "canary-7d1f"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(f"sqlite:///{tmp_path}/a.db", durability="normal") as store:
        yield store


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(f"sqlite:///{tmp_path}/b.db", durability="normal") as store:
        yield store


class Recording(Memory):
    """Remembers what was sent, and how deliveries were told of."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.messages: list[tuple[str, Message]] = []
        self.extended: list[str] = []
        self.acknowledged: list[str] = []

    def send(self, address: str, message: Message) -> None:
        self.messages.append((address, message))
        super().send(address, message)

    def _set(self, delivery: Any, ready_in_seconds: float | None) -> None:
        if ready_in_seconds is None:
            self.acknowledged.append(delivery.message.kind)
        elif ready_in_seconds:
            self.extended.append(delivery.message.kind)
        super()._set(delivery, ready_in_seconds)


def everything(store: holdfast.Store) -> bytes:
    """Every value in every table, as bytes."""
    path = store.url.removeprefix("sqlite:///").partition("?")[0]
    database = sqlite3.connect(path)
    try:
        return "\n".join(database.iterdump()).encode()
    finally:
        database.close()


def sent(transport: Recording) -> list[tuple[str, str]]:
    return [(each.kind, each.ask_id) for _, each in transport.messages]


def hex_of(text: str) -> bytes:
    return text.encode().hex().upper().encode()


def test_identities_are_made_at_every_send_and_at_resume_and_stored_nowhere(
    store: holdfast.Store, peers: holdfast.Store
) -> None:
    asked: list[Any] = []
    heard: list[Any] = []

    def hook(call: Any) -> dict[str, str]:
        asked.append(call)
        return {"Authorization": f"Bearer {CANARY}-{len(asked)}"}

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        heard.append(dict(request.headers))
        request.session.ask("weather", "findable")
        return request.session.pause()

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        heard.append(dict(resumption.headers))
        return [each.result for each in resumption.answers]

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        heard.append(dict(request.headers))
        return "answer"

    # What is lost is sent again with an identity of its own.
    transport = Recording(lose_every=3, resend_seconds=0.2)
    planner = Service("planner", ask, go_on)
    weather = Service("weather", serve)
    workers = (
        planner.worker(store, transport, credentials=hook, **QUICK),
        weather.worker(peers, transport, credentials=hook, **QUICK),
    )
    with Mesh(store, transport, credentials=hook) as mesh, running(*workers):
        call = mesh.request("planner", user="ann")
        until(lambda: is_idle(store) and is_idle(peers), "something is left")
    assert call.answer is not None
    assert call.answer.result == ["answer"]
    sent = [each.headers for _, each in transport.messages if each.kind != "receipt"]
    assert all(CANARY in each["Authorization"] for each in sent)
    assert len({each["Authorization"] for each in sent}) == len(sent)
    assert [CANARY in each["Authorization"] for each in heard] == [True] * 3
    told = {(each.kind, each.agent, each.user) for each in asked}
    assert {("request", "planner", "ann"), ("request", "weather", "ann")} < told
    assert ("resume", "planner", "ann") in told
    assert {kind for kind, _, _ in told} == {"request", "answer", "resume"}
    for each in (store, peers):
        dumped = everything(each)
        assert CANARY.encode() not in dumped
        assert hex_of(CANARY) not in dumped
        assert hex_of("findable") in dumped or b"findable" in dumped


def in_every_table(store: holdfast.Store, place: dict[str, Any]) -> str:
    """Every value in every table of a store on either database."""
    find = Query("SELECT name FROM sqlite_schema WHERE type = 'table'", {})
    if "namespace" in place:
        schema = {"schema": place["namespace"]}
        find = Query("SELECT tablename AS name FROM pg_tables WHERE schemaname = :schema", schema)
    [tables] = store.run(lambda tx: batch(find))
    names = [row["name"] for row in tables]
    assert {"hf_asks", "hf_attempts", "hf_outbox", "hf_checkpoints"} < set(names)
    reads = [Query(f"SELECT * FROM {name}", {}) for name in names]
    return repr(store.run(lambda tx: batch(*reads)))


def test_an_identity_is_found_nowhere_after_answers_errors_timeouts_and_resumes(
    place: dict[str, Any],
    other: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    failures = {"request": 1, "resume": 1, "answer": 1}
    names = ["weather", "broken", "silent"]

    def hook(call: Any) -> dict[str, str]:
        token = f"{CANARY}-{len(seen)}"
        seen.append(call.kind)
        if failures.get(call.kind, 0):
            failures[call.kind] -= 1
            raise RuntimeError(f"cannot renew {token}")
        return {"Authorization": token}

    def ask(request: holdfast.PeerRequest[Any]) -> Any:
        for name in names:
            seconds: Any = 0.5 if name == "silent" else "never"
            request.session.ask(name, "findable", timeout_seconds=seconds)
        return request.session.pause([])

    def go_on(resumption: holdfast.Resumption[Any]) -> Any:
        assert CANARY in resumption.headers["Authorization"]
        found = [*resumption.context, [each.status for each in resumption.answers]]
        if len(found) == 1:
            resumption.session.save(found=found)
            resumption.session.ask("weather", "findable")
            return resumption.session.pause(found)
        return found

    def fail(request: holdfast.PeerRequest[Any]) -> Any:
        assert CANARY in request.headers["Authorization"]
        raise holdfast.WorkFailed("no", retry=False)

    transport = Recording(resend_seconds=0.2)
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**other, durability="normal") as peers,
    ):
        given: dict[str, Any] = {"credentials": hook, **QUICK}
        workers = [
            Service("planner", ask, go_on).worker(store, transport, **given),
            Service("weather", lambda asked: asked.input).worker(peers, transport, **given),
            Service("broken", fail).worker(peers, transport, **given),
        ]
        with Mesh(store, transport, credentials=hook) as mesh, running(*workers):
            call = mesh.request("planner", user="ann")
            until(lambda: store.asks(state="open", limit=1) == [], "an ask is open")
        assert call.answer is not None
        assert call.answer.result == [["ok", "error", "timeout"], ["ok"]]
        assert failures == dict.fromkeys(failures, 0)
        assert seen.count("resume") == 3
        kept = [in_every_table(store, place), in_every_table(peers, other)]
        for number, each in enumerate((store, peers)):
            fed = [event.data for root in each.sessions() for event in each.events(root.root_id)]
            archive = tmp_path / f"{number}.archive"
            each.prune(keep=1, history_days=0, archive=archive)
            records = [*read_archive(archive), *read_archive(archive, record="event")]
            kept += [repr(fed), repr(records)]
            assert records or each is peers
    assert all("findable" in text for text in kept[:2])
    assert [CANARY in text for text in [*kept, caplog.text]] == [False] * 7
    assert "the credentials hook raised RuntimeError" in kept[0]


def test_a_hook_that_fails_delays_its_messages_and_its_secret_is_not_logged(
    store: holdfast.Store, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def hook(call: Any) -> Any:
        calls.append(call)
        if len(calls) == 1:
            raise RuntimeError(f"cannot renew {CANARY}")
        return {"a": 1} if len(calls) == 2 else {"a": "b"}

    transport = Recording()
    worker = WEATHER.worker(store, transport, **QUICK)
    with Mesh(store, transport, credentials=hook) as mesh, running(worker):
        call = mesh.request("weather", {"city": "Oslo"})
    assert call.state == "ok"
    assert [dict(each.headers) for _, each in transport.messages] == [{"a": "b"}]
    assert CANARY not in caplog.text


def test_what_a_hook_raises_on_resumption_is_neither_stored_nor_logged(
    store: holdfast.Store, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(call: Any) -> dict[str, str]:
        if call.kind == "resume":
            raise RuntimeError(f"cannot renew {CANARY}")
        return {}

    caplog.set_level(logging.DEBUG, "holdfast")
    transport = Memory()
    given: dict[str, Any] = {"credentials": hook, **QUICK}
    workers = [each.worker(store, transport, **given) for each in (PLANNER, WEATHER)]
    with Mesh(store, transport) as mesh, running(*workers):
        mesh.request("planner", ["Oslo"], wait_seconds=0)
        until(lambda: "RuntimeError" in caplog.text, "the hook is not called")
        [item] = store.work.list(type="resume")
        until(lambda: store.work.errors(item.id), "no error is stored")
    assert CANARY not in caplog.text
    assert CANARY.encode() not in everything(store)
    assert hex_of(CANARY) not in everything(store)


@pytest.mark.parametrize("ending", ["answer", "pause"])
def test_a_request_is_acknowledged_when_its_answer_or_pause_is_durable(
    store: holdfast.Store, ending: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        begun.set()
        until(lambda: "request" in transport.extended, "the heartbeat extends nothing")
        assert may_end.wait(120)
        assert transport.acknowledged == []
        if ending == "answer":
            return "done"
        return request.session.wait_for_approval("may I?")

    transport = Recording()
    service = Service("slow", serve, lambda resumption: "went on")
    worker = service.worker(store, transport, **QUICK, lease_seconds=1)
    with unhurried(), Mesh(store, transport) as mesh, running(worker):
        mesh.request("slow", request_id="r1", wait_seconds=0)
        assert begun.wait(120)
        may_end.set()
        until(lambda: transport.acknowledged == ["request"], "it is not acknowledged")
        [item] = store.work.list(type="request")
        assert item.status == "completed"
        if ending == "pause":
            assert store.find_session("r1").info().status == "waiting"


def test_an_item_is_retried_by_the_store_and_its_request_runs_no_second_time(
    store: holdfast.Store,
) -> None:
    attempts: list[int] = []

    def serve(request: holdfast.PeerRequest[Any]) -> Any:
        attempts.append(request.session.item.attempts)
        if len(attempts) == 1:
            raise RuntimeError("try again")
        return "done"

    # Every message comes twice, and is delivered again at once if it is not acknowledged.
    transport = Recording(repeat_every=1, ack_seconds=0.05)
    worker = Service("shaky", serve).worker(store, transport, **QUICK)
    with Mesh(store, transport) as mesh, running(worker):
        call = mesh.request("shaky")
        until(lambda: is_idle(store), "something is left")
    assert call.state == "ok"
    assert attempts == [1, 2]
    assert len(store.work.list(type="request")) == 1


def test_what_cannot_be_read_is_dropped_and_the_rest_goes_on(
    store: holdfast.Store, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Recording()
    given: dict[str, Any] = {"id": "m", "store_id": "far", "number": 1}
    wrong = [("request", "", b"\xc0"), ("request", "a\nb", b"\x80"), ("answer", "none", b"\x80")]
    for kind, ask_id, body in [*wrong, ("request", "a1", b"\xc1 broken")]:
        message = Message(
            kind=kind,  # type: ignore[arg-type]
            ask_id=ask_id,
            body=body,
            **given,
        )
        transport.send("agent:weather", message)
    worker = WEATHER.worker(store, transport, **QUICK)
    with Mesh(store, transport) as mesh, running(worker):
        assert mesh.request("weather", {"city": "Oslo"}).state == "ok"
        until(lambda: len(transport.acknowledged) == 5, "not all are acknowledged")
        until(lambda: ("answer", "a1") in sent(transport), "the asker is not told")
    assert "is dropped" in caplog.text
    assert len(store.work.list()) == 1


def test_a_message_that_no_database_could_store_is_dropped(
    place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    transport = Recording()
    kinds: list[Any] = ["request", "answer", "progress", "cancel", "receipt"]
    with holdfast.open(**place) as store:
        wrong = [(store.store_id(), "a\0b", 1), ("f\0r", "a", 1), ("far", "a", 2**63)]
        for kind, (store_id, ask_id, number) in itertools.product(kinds, wrong):
            given: dict[str, Any] = {"store_id": store_id, "ask_id": ask_id, "number": number}
            transport.send("agent:weather", Message(kind=kind, id="m", body=b"\x80", **given))
        with running(WEATHER.worker(store, transport, **QUICK)):
            until(lambda: len(transport.acknowledged) == 15, "not all are acknowledged")
        assert store.work.list() == []
    assert caplog.text.count("cannot be processed") >= 15
    assert "\0" not in caplog.text


def test_a_message_that_fails_does_not_hold_up_those_behind_it(store: holdfast.Store) -> None:
    transport = Memory(ack_seconds=3600)
    given: dict[str, Any] = {"kind": "request", "store_id": "far", "number": 1}
    transport.send("agent:weather", Message(id="m1", ask_id="a1", body=5, **given))  # type: ignore[arg-type]
    body = store.runtime.codec.encode({"city": "Oslo"})
    transport.send("agent:weather", Message(id="m2", ask_id="a2", body=body, **given))
    with running(WEATHER.worker(store, transport, **QUICK)):
        until(lambda: store.work.list(status="completed"), "the second is not served")


def test_forged_messages_are_delivered_once_and_hold_up_nothing(
    place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    # Redelivered at once unless acknowledged.
    transport = Recording(ack_seconds=0.01)
    with holdfast.open(**place) as store, Mesh(store, transport) as mesh:
        encode, address = store.runtime.codec.encode, f"store:{store.store_id()}"
        given: dict[str, Any] = {"kind": "answer", "store_id": "far", "ask_id": "r1", "number": 1}
        mesh.request("nobody", request_id="r1", wait_seconds=0)
        ok = {"status": "ok", "result": CANARY}
        bodies: list[Any] = [{**ok, "artifacts": each} for each in (5, None, [CANARY], [{"a": 1}])]
        bodies += [{"status": CANARY}, {"status": [1]}, [CANARY], CANARY]
        forged = [Message(id="m", body=encode(each), **given) for each in bodies]
        given |= {"body": encode(ok)}
        forged += [Message(id=id, **given) for id in ("", "a\nb: c", "x" * 100_000)]
        forged += [Message(id="m", **{**given, "body": 5, "token": CANARY})]
        for each in forged:
            transport.send(address, each)
        until(lambda: transport.acknowledged == ["answer"] * len(forged), "some come again")
        with running(WEATHER.worker(store, transport, **QUICK)):
            assert mesh.request("weather", {"city": "Oslo"}).state == "ok"
        told = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert 0 < len(told) <= len(forged)
        assert all("cannot be processed and is dropped" in each.getMessage() for each in told)
        assert not any(each.exc_info for each in told)
        assert CANARY not in caplog.text
        answer = mesh.wait("r1").answer
        assert answer is not None
        assert answer.status == "error"
        # Only what a store can have sent is confirmed.
        confirmed = [each.id for to, each in transport.messages if to == "store:far"]
        assert set(confirmed) == {f"m {store.store_id()}"}


def test_an_answer_that_the_asker_cannot_take_is_an_error(
    peers: holdfast.Store, tmp_path: Path
) -> None:
    transport = Memory()
    service = Service("weather", lambda request: "x" * 50_000)
    limits = holdfast.Limits(value_bytes=10_000)
    with (
        holdfast.open(f"sqlite:///{tmp_path}/small.db", limits=limits) as store,
        Mesh(store, transport) as mesh,
        running(service.worker(peers, transport, **QUICK)),
    ):
        answer = mesh.request("weather", "x" * 9_990).answer
    assert answer is not None
    assert answer.status == "error"
    assert "cannot be processed" in answer.result


class Refusing(Memory):
    """Cannot be reached at first, and never takes what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 3

    def send(self, address: str, message: Message) -> None:
        if self.failures:
            self.failures -= 1
            raise TransportError("it cannot be reached")
        if len(message.body) > 10_000:
            raise Undeliverable("it is too large")
        super().send(address, message)


def test_a_transport_that_is_away_delays_and_one_that_refuses_ends_a_call(
    store: holdfast.Store,
) -> None:
    transport = Refusing()
    worker = WEATHER.worker(store, transport, **QUICK)
    with Mesh(store, transport) as mesh, running(worker):
        assert mesh.request("weather", {"city": "Oslo"}).state == "ok"
        assert transport.failures == 0
        large = mesh.request("weather", {"city": "x" * 20_000})
    assert large.answer is not None
    assert (large.state, large.answer.result) == ("error", "it is too large")


def test_what_a_closed_mesh_has_not_sent_another_sends(store: holdfast.Store) -> None:
    transport = Refusing()
    transport.failures = 1_000_000
    mesh = Mesh(store, transport)
    mesh.request("weather", {"city": "Oslo"}, request_id="r1", wait_seconds=0)
    mesh.close()
    assert [kind for kind, _, _ in outbox(store)] == ["request"]
    transport.failures = 0
    with Mesh(store, transport) as other, running(WEATHER.worker(store, transport, **QUICK)):
        assert other.wait("r1").state == "ok"


async def ask_async(request: holdfast.PeerRequest[Any]) -> Any:
    await request.session.ask("weather", {"city": "Oslo"})
    return await request.session.pause()


async def go_on_async(resumption: holdfast.Resumption[Any]) -> Any:
    return go_on_plainly(resumption)


def ask_plainly(request: holdfast.PeerRequest[Any]) -> Any:
    request.session.ask("weather", {"city": "Oslo"})
    return request.session.pause()


def go_on_plainly(resumption: holdfast.Resumption[Any]) -> Any:
    return [[each.result for each in resumption.answers], dict(resumption.headers)]


FUNCTIONS = {"async": (ask_async, go_on_async), "plain": (ask_plainly, go_on_plainly)}


class Silent(Memory):
    """Accepts calls, and does not answer them until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def receive(self, address: str, limit: int, wait_seconds: float) -> Any:
        self.asked.set()
        self.answers.wait()
        return super().receive(address, limit, 0)


def test_a_mesh_is_closed_and_opened_again_while_its_transport_does_not_answer(
    store: holdfast.Store, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Silent()
    mesh = Mesh(store, transport)
    try:
        mesh.request("nobody", request_id="r1", wait_seconds=0)
        assert transport.asked.wait(120)
        mesh.close()
        assert "closed while memory does not respond" in caplog.text
        assert "another mesh of the store sends those in the outbox" in caplog.text
        assert mesh.wait("r1", wait_seconds=0).state == "open"
    finally:
        transport.answers.set()
        mesh.close()
    until(lambda: not couriers(), "a thread of the first time goes on")


def couriers() -> list[str]:
    """Return the names of threads that send and receive."""
    names = ("holdfast-sender", "holdfast-replies", "holdfast-requests")
    return [each.name for each in threading.enumerate() if each.name in names]


@pytest.mark.parametrize("stateless", [True, False])
@pytest.mark.parametrize("functions", FUNCTIONS)
def test_services_and_callers_of_an_async_store_use_a_transport_too(
    functions: str, stateless: bool, tmp_path: Path
) -> None:
    async def serve(request: holdfast.PeerRequest[Any]) -> Any:
        return dict(request.headers)

    async def case() -> None:
        transport = Memory()
        hook = lambda call: {"as": call.kind}  # noqa: E731
        store = await holdfast.aopen(f"sqlite:///{tmp_path}/a.db", durability="normal")
        planner = Service("planner", *FUNCTIONS[functions], stateless=stateless)
        workers = (
            planner.worker(store, transport, credentials=hook, **QUICK),
            Service("weather", serve).worker(store, transport, **QUICK),
        )
        tasks = [asyncio.ensure_future(each.run()) for each in workers]
        async with Mesh(store, transport, credentials=hook) as mesh:
            call = await mesh.request("planner")
        for worker in workers:
            worker.stop()
        await asyncio.gather(*tasks)
        assert call.answer is not None
        assert call.answer.result == [[{"as": "request"}], {"as": "resume"}]
        await store.close()

    asyncio.run(case())


def test_what_is_no_transport_or_hook_is_refused(store: holdfast.Store) -> None:
    async def hook(call: Any) -> dict[str, str]:
        return {}

    with pytest.raises(holdfast.InvalidArgument):
        Mesh(store, "nats://somewhere")  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgument):
        PLANNER.worker(store, object())  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgument):
        Mesh(store, Memory(), credentials=hook)  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidArgument):
        PLANNER.worker(store, Memory()).run(until_empty=True)
    with pytest.raises(holdfast.InvalidArgument):
        PLANNER.worker(store, inbox=None)
