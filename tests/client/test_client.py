"""What is special to a client: its server, its token, its lanes and what travels."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock
from urllib.parse import urlsplit

import httpx
import pytest

import holdfast
from holdfast import (
    CommitUnknown,
    Forbidden,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    SessionNotFound,
    StoreReadOnly,
    StoreUnavailable,
)
from holdfast.access import Token
from holdfast.effects.calls import prepare
from holdfast.effects.ledger import Ledger
from holdfast.effects.requests import once_rules
from holdfast.effects.statements import EffectOutcome
from holdfast.effects.tools import named_tool
from holdfast.kernel.operation import Call
from holdfast.kernel.remote.exchange import Response, exchange
from holdfast.leases import Guard, Keeper
from holdfast.maintenance.recovery import RecoveryOps
from holdfast.server.calls import LARGE_BYTES, PARTS_MAX, Calls, Sent, operations
from holdfast.session import Session
from holdfast.sessions import IdentityOps
from holdfast.sessions.access import Place
from holdfast.store_sessions import StoreSessions
from holdfast.wire import LANE, MEDIA_TYPE, NUMBER, Wire
from tests.client.served import embedded, serving


@pytest.fixture
def served(place: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = place["serve"](busy_timeout_seconds=5)
    return found


@pytest.fixture
def store(served: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**served) as store:
        yield store


class LossyWire:
    """A wire to a server that swallows answers while it is asked to."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.swallows = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        address = (self._server.hostname, self._server.port)
        with client, socket.create_connection(address) as server:
            there = threading.Thread(target=self._copy, args=(client, server), daemon=True)
            there.start()
            while answer := server.recv(65536):
                if self.swallows > 0:
                    # The request was served; nobody hears of it.
                    self.swallows -= 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(answer)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._listening.close()


@contextmanager
def through(served: dict[str, Any]) -> Iterator[tuple[LossyWire, holdfast.Store]]:
    wire = LossyWire(served["url"])
    try:
        with holdfast.open(wire.url, token=served["token"], busy_timeout_seconds=3) as store:
            yield wire, store
    finally:
        wire.close()


def test_a_wrong_token_is_told_at_once(served: dict[str, Any]) -> None:
    with pytest.raises(Forbidden, match="does not accept this token"):
        holdfast.open(served["url"], token="x" * 64)


def test_a_server_that_is_not_there_is_told_within_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        holdfast.open(f"http://127.0.0.1:{port}", token="t" * 64, busy_timeout_seconds=0.1)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.org", "in the clear"),
        ("http://user:secret@localhost", "not the address"),
        ("http://localhost/?x=1", "not the address"),
        ("https://", "not the address"),
    ],
)
def test_addresses_that_are_refused_before_anything_is_sent(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        holdfast.open(url, token="t")
    assert "secret" not in str(caught.value)


def test_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    with pytest.raises(InvalidArgument, match="needs a token"):
        holdfast.open("http://localhost:1")


def test_a_token_may_be_given_as_its_file_has_it(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.connect(served["url"], token=f"{served['token']}\n") as store:
        assert store.sessions() == []
    monkeypatch.setenv("HOLDFAST_TOKEN", f"{served['token']}\n")
    with holdfast.connect(served["url"]) as store:
        assert store.sessions() == []
    with pytest.raises(InvalidArgument, match="needs a token"):
        holdfast.connect(served["url"], token="\n")
    with pytest.raises(InvalidArgument, match="token must be the text"):
        holdfast.connect(served["url"], token="hf_a\nhf_b")


def test_a_write_whose_answer_is_lost_is_made_once(served: dict[str, Any]) -> None:
    with through(served) as (wire, store):
        session = store.session("s")
        for number in range(5):
            wire.swallows = 1 + number % 2
            session.append("log", [number])
            assert wire.swallows == 0
        assert session.at(5)["log"] == [0, 1, 2, 3, 4]
        assert session.info().version == 5


def test_an_increment_whose_answer_is_lost_counts_once(served: dict[str, Any]) -> None:
    with through(served) as (wire, store):
        state = store.session("s").state
        for _ in range(5):
            wire.swallows = 1
            state.increment("n")
        assert state.get("n") == 5


def test_a_write_that_nobody_answers_can_be_settled(served: dict[str, Any]) -> None:
    with through(served) as (wire, store):
        session = store.session("s")
        wire.swallows = 1_000_000
        with pytest.raises(CommitUnknown) as caught:
            session.append("log", [1])
        wire.swallows = 0
        assert store.settle(caught.value.id) is True
        lane, number = caught.value.id.rsplit(":", 1)
        assert store.settle(f"{lane}:{int(number) + 1}") is False
        assert store.settle(f"{lane}:{int(number) + 1}") is False
        assert session.at(1)["log"] == [1]


def test_a_lane_that_the_server_forgot_is_replaced(store: holdfast.Store) -> None:
    session = store.session("s")
    session.append("log", [1])

    def forget(tx: holdfast.Transaction) -> holdfast.Op[None]:
        from holdfast.kernel.operation import rows

        yield from rows("DELETE FROM hf_replies")

    embedded(store).run(forget)
    session.append("log", [2])
    assert session.at(2)["log"] == [1, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "log[0] is of type tuple, which is not plain JSON data; use list() of it."),
        ({1}, "log[0] is of type set, which is not plain JSON data; use a sorted list."),
        (object(), "log[0] is of type object, which is not plain JSON data."),
        (float("nan"), "log[0] is nan: JSON has only finite numbers"),
    ],
)
def test_what_cannot_be_stored_is_refused_as_by_an_embedded_store(
    store: holdfast.Store, value: Any, message: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        store.session("s").append("log", [value])
    assert str(caught.value).startswith(message)


def test_text_that_is_not_unicode_is_refused_by_name_and_takes_no_lane(
    store: holdfast.Store,
) -> None:
    session = store.session("s")
    with pytest.raises(InvalidValue, match=r"^x\.a\[0\] has a lone surrogate"):
        session.save(x={"a": ["\ud800"]})
    with pytest.raises(InvalidArgument, match=r"^ask_id has a lone surrogate"):
        store.answer("\ud800", 1)
    with pytest.raises(InvalidArgument, match="not Unicode"):
        store.session(metadata={"who": holdfast.Ask("a", "\ud800")})
    driver: Any = store.runtime.driver
    assert len(driver.client.lanes._free) == 1
    assert session.latest() is None


def test_every_number_arrives_as_it_was(store: holdfast.Store) -> None:
    numbers = [0, -1, 2**63, -(2**63), 2**64, 10**400, 1.0, -0.0, 5e-324, True, None]
    store.session("s").append("log", numbers)
    assert list(map(repr, store.session("s").at(1)["log"])) == list(map(repr, numbers))


def test_what_needs_the_database_is_refused(store: holdfast.Store, tmp_path: Any) -> None:
    def compose(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from tx.session("s")

    with pytest.raises(InvalidArgument, match="needs the database itself"):
        store.run(compose)
    with pytest.raises(InvalidArgument, match="needs the database itself"):
        store.backup(tmp_path / "copy.db")


def test_a_client_that_reads_writes_nothing(served: dict[str, Any]) -> None:
    with holdfast.open(**served, mode="read") as store:
        assert store.sessions() == []
        with pytest.raises(StoreReadOnly):
            store.session("s")


# What a forged call reaches


def send(served: dict[str, Any], name: str, body: bytes, number: int = 1) -> httpx.Response:
    headers = {
        "Authorization": f"Bearer {served['token']}",
        "Content-Type": MEDIA_TYPE,
        LANE: "forged",
        NUMBER: str(number),
    }
    return httpx.post(f"{served['url']}/call/{name}", content=body, headers=headers, timeout=60)


def test_a_forged_place_is_refused_and_nothing_is_written(
    store: holdfast.Store, served: dict[str, Any]
) -> None:
    mine, other = store.session("mine"), store.session("other")
    mine.save(n=1)
    other.save(n=1)
    before = [store.events(each) for each in ("mine", "other")]
    wire = Wire(store.runtime)
    forged = Session(store.runtime, "mine", other.number, "other")
    for instance in (forged, Session(store.runtime, "mine", mine.number, "other")):
        body = wire.encode([instance, ["log", [1]], {}, []])
        answer = wire.decode(send(served, "CheckpointOps.append", body).content)
        assert isinstance(answer, SessionNotFound)
    guard = Guard("session", "mine", other.number, 1)
    leased = Session(store.runtime, "mine", mine.number, "mine", guard=guard)
    body = wire.encode([leased, ["log", [1]], {}, []])
    answer = wire.decode(send(served, "CheckpointOps.append", body).content)
    assert isinstance(answer, LeaseLost)
    assert [store.events(each) for each in ("mine", "other")] == before


def test_damaged_calls_are_refused_cleanly(store: holdfast.Store, served: dict[str, Any]) -> None:
    session = store.session("s")
    chance = random.Random(7)
    wire = Wire(store.runtime)
    place = Place("s", session.number, "s", None)
    bodies = [
        wire.encode([session, ["log", [{"a": [1, 2.5, None, "x"]}]], {"kind": "turn"}, []]),
        wire.encode([store, ["t"], {}, []]),
        wire.encode([place, [Guard("session", "s", 1, 1)], {}, ["0" * 36]]),
    ]
    names = sorted(operations())
    with httpx.Client(timeout=60) as client:
        for number in range(300):
            body = bytearray(chance.choice(bodies))
            for _ in range(chance.randint(1, 4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            name = chance.choice([*names, "CheckpointOps.append", "nothing", "os.system"])
            answer = client.post(
                f"{served['url']}/call/{name}",
                content=bytes(body),
                headers={
                    "Authorization": f"Bearer {served['token']}",
                    "Content-Type": MEDIA_TYPE,
                    LANE: f"damaged{number}",
                    NUMBER: "1",
                },
            )
            assert answer.status_code != 500, (name, bytes(body), answer.content)
    assert session.info().id == "s"


def test_no_operation_of_a_closed_module_can_be_called() -> None:
    names = set(operations())
    assert "CheckpointOps.append" in names
    assert "turn" in names
    for name in ("_Compose.run", "SchemaOps.migrate", "PortableOps._leave", "MarkOps.forget"):
        assert name not in names


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_call_is_decoded_beside_the_event_loop(tmp_path: Path, is_large: bool) -> None:
    decoded_by = []
    decode = Wire.decode

    def noted(wire: Wire, data: bytes) -> Any:
        decoded_by.append(threading.get_ident())
        return decode(wire, data)

    async def run() -> None:
        async with holdfast.aopen(f"sqlite:///{tmp_path}/store.db") as store:
            session = await store.session("s")
            token = await store.tokens.create("t", permission="write")
            text = (LARGE_BYTES if is_large else 1) * "x"
            body = Wire(store.runtime).encode([session, ["log", [text]], {}, []])
            with mock.patch.object(Wire, "decode", noted):
                sent = Sent("CheckpointOps.append", body, "lane", 1)
                status, _ = await Calls(store).answer(token, sent)
            assert status == 200
            assert (decoded_by == [threading.get_ident()]) is not is_large

    asyncio.run(run())


def test_a_call_of_too_many_parts_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with holdfast.aopen(f"sqlite:///{tmp_path}/store.db") as store:
            session = await store.session("s")
            body = Wire(store.runtime).encode([session, ["log", (PARTS_MAX + 1) * [()]], {}, []])
            sent = Sent("CheckpointOps.append", body, "lane", 1)
            token = await store.tokens.create("t", permission="write")
            status, answer = await Calls(store).answer(token, sent)
            assert status == InvalidArgument.http_status
            assert "too many parts" in str(Wire(store.runtime).decode(answer))
            assert await session.latest() is None

    asyncio.run(run())


# A token of one tree


async def as_token(place: dict[str, Any], calls: list[Call[Any]], token: Token) -> list[Any]:
    async with holdfast.aopen(**place) as store:
        wire, server = Wire(store.runtime), Calls(store)
        answers = []
        for call in calls:
            given = [call.instance, list(call.arguments), dict(call.keywords), []]
            sent = Sent(call.name, wire.encode(given), f"{uuid.uuid4()}", 1)
            answers.append(wire.decode((await server.answer(token, sent))[1]))
        return answers


def test_the_feed_of_another_tree_tells_of_no_outcome_that_names_it(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        mine, other = store.session("mine"), store.session("other")
        calls: list[Call[Any]] = []
        for n, number in enumerate((mine.number, other.number, 99)):
            begun = mine.begin("pay", {"n": n})
            assert isinstance(begun, holdfast.Issued)
            ticket = replace(begun.ticket, place=replace(other._place, number=number))
            calls.append(Call(Ledger.finish, store.ledger, (ticket, EffectOutcome("completed"))))
        token = store.tokens.create("tree", permission="admin", session="mine")
        answers = asyncio.run(as_token(place, calls, token))
        assert [recorded for recorded, _ in answers] == [True] * len(calls)
        assert [event.kind for event in store.events("other")] == ["session_created"]
        told = [e.session_id for e in store.events("mine") if e.kind == "effect_completed"]
        assert told == ["mine"]
        assert [each.status for each in store.effects()] == ["completed"] * len(calls)


def test_a_token_of_one_tree_reaches_nothing_else(tmp_path: Any) -> None:
    from holdfast.items import Work
    from holdfast.store import StoreHandle

    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        mine, other = store.session("mine"), store.session("other")
        item = store.work.submit("t", session=other)
        begun = other.begin("pay", {"n": 1}, "c1")
        assert isinstance(begun, holdfast.Issued)
        # The effect of another tree, claimed for this one.
        stolen = replace(begun.ticket, place=mine._place)
        foreign = Guard("effect", stolen.id, stolen.number, stolen.fence)
        tool = named_tool("pay", "mutate")
        everywhere = prepare(store.ledger, tool, {}, **once_rules("key", None, None)).request
        allowed: list[Call[Any]] = [
            Call(Ledger.standing, store.ledger, (mine._place, 1)),
            Call(Session.append, mine, ("log", [1])),
            Call(Session.latest, mine),
            Call(StoreHandle.session, store, ("child",), {"parent": "mine"}),
            Call(StoreHandle.events, store, ("mine",)),
            Call(StoreHandle.effects, store, (), {"session": mine}),
            Call(StoreHandle.effects, store, (), {"session": "mine"}),
            Call(StoreHandle.effects, store),
            Call(StoreHandle.pauses, store),
            Call(StoreHandle.asks, store, (), {"root": mine}),
            Call(StoreHandle.spending, store),
            Call(Work.submit, store.work, ("t",), {"session": mine}),
        ]
        refused: list[Call[Any]] = [
            Call(StoreHandle.session, store, ("new root",)),
            Call(StoreHandle.session, store, ("other",)),
            Call(StoreHandle.events, store, ("other",)),
            Call(StoreHandle.sessions, store, (), {"root": "other"}),
            Call(StoreHandle.sessions, store, (), {"root": other}),
            Call(StoreHandle.effects, store, (), {"root": other}),
            Call(StoreHandle.effects, store, (), {"item": item}),
            Call(StoreHandle.pauses, store, (), {"root": "other"}),
            Call(StoreHandle.asks, store, (), {"root": other}),
            Call(StoreHandle.spending, store, ("model",), {"root": "other"}),
            Call(Work.claim, store.work, ("w",)),
            Call(Work.list, store.work, (), {"root": "other"}),
            Call(Work.submit, store.work, ("t",)),
            Call(type(item).cancel, item),
            Call(Ledger.take, store.ledger, (), {"request": everywhere}),
        ]
        lost: list[Call[Any]] = [
            Call(Ledger.finish, store.ledger, (stolen, EffectOutcome("failed", "not_landed"))),
            Call(Keeper.renew, store.ledger.keeper, ([(foreign, 60.0)],)),
        ]
        allowed += [Call(Ledger.withdraw, store.ledger, (mine._place, None, [stolen.id]))]
        allowed += [
            Call(StoreHandle.peer_call, store, ("asked",)),
            Call(StoreHandle.progress, store, ("asked", "half")),
            Call(StoreHandle.answer, store, ("asked", 1)),
            Call(StoreHandle.cancel_ask, store, ("asked",)),
        ]
        store.session("asking", parent=mine, agent="a").ask("peer", id="asked")
        foreign_session = store.session("asking elsewhere", parent=other, agent="a")
        foreign_session.ask("peer", id="theirs")
        waiting = store.session("waiting", parent=mine, agent="a").wait_for_approval("pay?")
        refused += [
            Call(StoreHandle.find_pause, store, (waiting.pause_id,)),
            Call(StoreHandle.find_ask, store, ("asked",)),
            Call(StoreHandle.request, store, ("peer",)),
            Call(StoreHandle.approve, store, (waiting.pause_id,), {"by": "me"}),
            Call(StoreHandle.reject, store, (waiting.pause_id,), {"by": "me"}),
        ]
        unknown = [Call(StoreHandle.peer_call, store, (id,)) for id in ("theirs", "never was")] + [
            Call(StoreHandle.answer, store, ("theirs", 1)),
            Call(StoreHandle.cancel_ask, store, ("theirs",)),
            Call(StoreHandle.progress, store, (), {"ask_id": "theirs", "note": 1}),
        ]
        token = store.tokens.create("tree", permission="admin", session="mine")
        answers = asyncio.run(as_token(place, allowed, token))
        assert [type(each) for each in answers] == [list] * len(allowed)
        answers = asyncio.run(as_token(place, refused, token))
        assert [type(each) for each in answers] == [Forbidden] * len(refused)
        answers = asyncio.run(as_token(place, lost, token))
        assert [type(each) for each in answers] == [holdfast.LeaseLost] * len(lost)
        answers = asyncio.run(as_token(place, unknown, token))
        assert [type(each) for each in answers] == [holdfast.AskNotFound] * len(unknown)
        assert store.peer_call("theirs").state == "open"
        assert store.get_pause(waiting.pause_id).state == "waiting"
        assert store.session("other").info().version == 0
        assert store.effect(stolen.id).status == "issued"
        made = ["asking", "asked", "asking elsewhere", "theirs", "waiting"]
        assert [each.id for each in store.sessions()] == ["mine", "other", *made, "child"]


def test_what_is_in_another_tree_is_as_unknown_as_what_never_was(tmp_path: Any) -> None:
    from holdfast.access import Tokens
    from holdfast.items import Work
    from holdfast.store import StoreHandle
    from holdfast.work.items import Submission

    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        mine, other = store.session("mine"), store.session("other-tree-0001")
        begun = other.begin("pay", {"n": 1}, "c1")
        assert isinstance(begun, holdfast.Issued)
        ended = store.session("ended", parent=other)
        ended.end()
        store.work.submit("t", session=mine)
        [held] = store.work.claim("w")
        gone = Session(store.runtime, "never-was-00001", 99, "never-was-00001", None)
        number = str(other.number)
        # Each is asked of a session elsewhere, and of one that is not.
        pairs: list[tuple[Call[Any], Call[Any]]] = [
            (call(other, other.id), call(gone, gone.id))
            for call in (
                lambda handle, id: Call(Session.append, handle, ("log", [1])),
                lambda handle, id: Call(Session.latest, handle),
                lambda handle, id: Call(StoreHandle.find_session, store, (id,)),
                lambda handle, id: Call(StoreHandle.find_session, store, (id[:10],)),
                lambda handle, id: Call(StoreHandle.session, store, (id,)),
                lambda handle, id: Call(StoreHandle.session, store, ("new",), {"parent": id}),
                lambda handle, id: Call(StoreHandle.session, store, ("mine",), {"parent": id}),
                lambda handle, id: Call(StoreHandle.session, store, ("n",), {"parent": handle}),
                lambda handle, id: Call(StoreHandle.effects, store, (), {"session": id}),
                lambda handle, id: Call(StoreHandle.effects, store, (), {"session": handle}),
                lambda handle, id: Call(Work.list, store.work, (), {"session": id}),
                lambda handle, id: Call(Work.list, store.work, (), {"session": handle}),
                lambda handle, id: Call(Work.submit, store.work, ("t",), {"session": id}),
                lambda handle, id: Call(Work.submit, store.work, ("t",), {"session": handle}),
                lambda handle, id: Call(
                    Work.submit_many, store.work, ([Submission(type="t", session=id)],)
                ),
                lambda handle, id: Call(
                    type(held).complete, held, (1,), {"then": [Submission(type="t", session=id)]}
                ),
                lambda handle, id: Call(IdentityOps.find, IdentityOps(), (id, None, "u")),
                lambda handle, id: Call(Tokens.create, store.tokens, ("n",), {"session": id}),
            )
        ]
        pairs += [
            (
                Call(StoreHandle.session, store, ("ended",)),
                Call(StoreHandle.session, store, ("x",)),
            ),
            (
                Call(StoreHandle.find_session, store, (number,)),
                Call(StoreHandle.find_session, store, ("77",)),
            ),
        ]
        token = store.tokens.create("tree", permission="admin", session="mine")
        before = [each.id for each in store.sessions()]
        calls = [call for pair in pairs for call in pair]
        answers = iter(asyncio.run(as_token(place, calls, token)))
        for (there, _), elsewhere, nowhere in zip(pairs, answers, answers, strict=True):
            told = [
                (
                    type(each),
                    re.sub("other-tree-0001|never-was-00001|ended|\\bx\\b", "", repr(each)),
                )
                for each in (elsewhere, nowhere)
            ]
            assert told[0] == told[1], (there.name, there.arguments, there.keywords)
            assert getattr(elsewhere, "fields", {}).keys() == getattr(nowhere, "fields", {}).keys()
        assert [each.id for each in store.sessions()] == before
        assert store.work.list(session=other) == []
        assert len(store.work.list()) == 1


def test_a_token_of_one_tree_lists_what_is_in_it(store: holdfast.Store) -> None:
    mine, other = store.session("listing"), store.session("elsewhere")
    child = store.session("listing child", parent=mine)
    items = [store.work.submit("t", session=each).id for each in (mine, other, child)]
    token = store.tokens.create("listing tree", permission="read", session=mine)
    assert store.url is not None
    with holdfast.connect(store.url, token=token.secret) as limited:
        assert [each.id for each in limited.sessions()] == ["listing", "listing child"]
        assert [each.id for each in limited.sessions(root="listing", after=mine.number)] == [
            "listing child"
        ]
        assert [each.id for each in limited.work.list()] == [items[2], items[0]]
        assert [each.id for each in limited.work.list(session="listing child")] == [items[2]]
        assert limited.work.list(session="elsewhere") == []
        for each in (mine, other, child):
            each.spend("model", input_tokens=1)
            each.ask("peer", id=f"call of {each.id}")
            each.begin("pay", {}, "a call")
            waiting = store.session(f"{each.id} waits", parent=each, agent="planner")
            waiting.wait_for_approval("go on?")
        calls = ["call of listing", "call of listing child"]
        assert [each.id for each in limited.asks()] == calls
        assert [each.id for each in limited.asks(agent="peer", state="open")] == calls
        waits = ["listing waits", "listing child waits"]
        assert [each.session_id for each in limited.pauses(root=mine)] == waits
        assert [each.session_id for each in limited.pauses(reason="approval", limit=1)] == waits[:1]
        assert {each.session_id for each in limited.effects()} == {"listing", "listing child"}
        assert {each.name for each in limited.spending("session")} == {"listing", "listing child"}
        listings: list[Any] = [limited.sessions, limited.work.list, limited.asks, limited.pauses]
        for listing in (*listings, limited.effects, limited.spending):
            with pytest.raises(Forbidden):
                listing(root="elsewhere")


def test_deleting_needs_a_token_for_administration(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        calls = [Call(cast("Any", Session.delete), store.session("s"))]
        for permission, expected in (("write", Forbidden), ("admin", list)):
            token = store.tokens.create(permission, permission=cast("Any", permission))
            [answer] = asyncio.run(as_token(place, calls, token))
            assert isinstance(answer, expected)
        assert store.sessions() == []


def test_a_decision_needs_a_token_that_may_approve(tmp_path: Any) -> None:
    import asyncio

    from holdfast.store import StoreHandle

    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        pause_id = store.session("s", agent="a").wait_for_approval("pay?").pause_id
        forged = {"data": {"block_id": "b", "decision": "allow"}}
        session = store.session("s")
        calls: list[Call[Any]] = [
            Call(StoreHandle.approve, store, (pause_id,), {"by": "ann"}),
            Call(Session.record, session, ("approval_point",), forged),
            Call(Session.save, session, (), {"kind": "approval_point", **forged}),
        ]
        for permission, expected in (("write", Forbidden), ("approve", list)):
            token = store.tokens.create(permission, permission=cast("Any", permission))
            answers = asyncio.run(as_token(place, calls, token))
            assert [type(each) for each in answers] == [expected] * len(calls)
        limited = store.tokens.create("tree", permission="admin", session="s")
        answers = asyncio.run(as_token(place, calls, limited))
        assert [type(each) for each in answers] == [Forbidden] * len(calls)
        assert store.get_pause(pause_id).decision is not None


def test_agents_are_served_and_asked_through_a_server(store: holdfast.Store) -> None:
    from holdfast.mesh import Mesh, Service

    def plan(request: holdfast.PeerRequest[Any]) -> Any:
        request.session.ask("weather", request.input)
        return request.session.pause({"city": request.input})

    def planned(resumption: holdfast.Resumption[Any]) -> Any:
        return [resumption.context, resumption.answers[0].result]

    def weather(request: holdfast.PeerRequest[Any]) -> Any:
        holdfast.Store(request.session.runtime).progress(request.ask_id, "looking")
        request.session.add_artifact("picture", uri="s3://sky")
        return "sun"

    mesh, notes = Mesh(store), list[Any]()
    services = [Service("planner", plan, planned), Service("weather", weather)]
    assert mesh.request("planner", "Oslo", request_id="r1", wait_seconds=0).state == "open"
    for service in (*services, services[0]):
        service.worker(store, poll_seconds=0.05).run(until_empty=True)
    found = mesh.wait("r1", on_progress=notes.append)
    assert found.answer is not None
    assert (found.answer.result, notes) == ([{"city": "Oslo"}, "sun"], ["looking"])
    assert [each.uri for each in found.answer.artifacts] == ["s3://sky"]
    assert mesh.request("planner", "Oslo", request_id="r1").answer == found.answer
    waiting = store.session("payer", agent="payer").wait_for_approval("pay?")
    store.approve(waiting.pause_id, by="ann")
    assert store.get_pause(waiting.pause_id).state == "ready"


def test_no_operation_of_a_deletion_can_be_called_by_itself() -> None:
    assert not [name for name in operations() if name.startswith("Tree.")]


@pytest.mark.parametrize("status", [500, 502])
def test_an_answer_of_a_proxy_leaves_a_write_unknown(status: int) -> None:
    """It may have been passed on before the proxy gave up: nobody may say that it was not made."""
    answers: list[Any] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        answers.append(scope["path"])
        if scope["path"].endswith("store_id"):
            body, headers = (
                Wire(None).encode(["id", None]),
                [(b"content-type", MEDIA_TYPE.encode())],
            )
            code = 200
        else:
            body, headers, code = b"<html>", [(b"content-type", b"text/html")], status
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with (
        serving(proxy) as url,
        holdfast.open(url, token="t" * 40, busy_timeout_seconds=0.1) as store,
    ):
        with pytest.raises(CommitUnknown) as caught:
            store.session("s")
        assert caught.value.id.startswith("lane-")
        with pytest.raises(StoreUnavailable):
            store.sessions()
    assert answers


def test_a_lane_is_not_used_after_a_commit_that_is_unknown(store: holdfast.Store) -> None:
    """The server's own COMMIT may have been made, and the lane's number with it."""
    session = store.session("s")
    client = store.runtime.driver.client  # type: ignore[attr-defined]
    [used] = client.lanes._free
    unknown = CommitUnknown("the connection was lost during COMMIT", id="w:1")
    steps = exchange(client, Call(Session.append, session, ("log", [1])))
    next(steps)
    assert client.lanes._free == []
    body = Wire(store.runtime).encode(unknown)
    with pytest.raises(CommitUnknown):
        steps.send(Response(503, MEDIA_TYPE, body))
    assert used not in client.lanes._free


def test_a_token_for_reading_writes_nothing(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save(n=1)
        calls = [Call(Session.append, session, ("log", [1])), Call(Session.latest, session)]
        token = store.tokens.create("reader", permission="read")
        refused, read = asyncio.run(as_token(place, calls, token))
        assert isinstance(refused, Forbidden)
        assert read[0]["n"] == 1


def test_a_child_is_given_a_token_for_its_tree_alone(store: holdfast.Store) -> None:
    session = store.session("mine")
    store.session("other")
    environment = session.environment()
    found = holdfast.current_session(environment)
    assert found is not None
    assert (found.id, found.url) == ("mine", store.url)
    child = holdfast.connect(environment["HOLDFAST_URL"], token=environment["HOLDFAST_TOKEN"])
    with child:
        child.session("mine").append("log", [1])
        with pytest.raises(Forbidden):
            child.session("other")
        assert [each.id for each in child.sessions()] == ["mine"]
    assert session.info().version == 1


def test_what_is_made_of_a_store_alone_travels(store: holdfast.Store) -> None:
    """Flows make handles of a store's parts where they have no store: agents recover with one."""
    wire = Wire(store.runtime)
    for part in (StoreSessions, RecoveryOps):
        travelled = wire.decode(wire.encode(part(store.runtime)))
        assert isinstance(travelled, part)
        assert travelled.runtime is store.runtime
