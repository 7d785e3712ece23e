"""A moved session finds its effects in the other store, whatever secrets they were called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import rows
from tests.ready import Schemas

CARD, OTHER_CARD = "4111 1111 1111 1111", "4012 8888 8888 1881"
calls: list[Any] = []
Move = Callable[..., None]


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


@pytest.fixture
def others(
    place: dict[str, str], other: dict[str, str], tmp_path: Path, ready_schemas: Schemas
) -> Iterator[list[dict[str, str]]]:
    """Two more places, the first on the other database than `place`."""
    if "namespace" not in place:
        yield [other, {"url": f"sqlite:///{tmp_path}/third.db"}]
        return
    with ready_schemas.lent() as name:
        yield [other, {**place, "namespace": name}]


@pytest.fixture
def stores(place: Any, others: list[Any]) -> Iterator[list[holdfast.Store]]:
    opened = [open_at(each) for each in (place, *others)]
    yield opened
    for store in opened:
        store.close()


@pytest.fixture
def move(tmp_path: Path) -> Move:
    def move(source: holdfast.Store, target: holdfast.Store, *ids: str) -> None:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.export"
        source.export(file, ids or None)
        assert CARD.encode() not in file.read_bytes()
        assert target.import_sessions(file, store_keys=True).notes == ()

    return move


def open_at(place: dict[str, Any], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)


def act(card: str, cents: int = 0, *, idempotency_key: str = "") -> int:
    calls.append(idempotency_key)
    return len(calls)


def fail(card: str, cents: int = 0, *, idempotency_key: str = "") -> int:
    calls.append(idempotency_key)
    raise ConnectionError


pay = holdfast.tool(effect="mutate", name="pay")(act)
book = holdfast.tool(effect="write", name="book")(act)
look = holdfast.tool(effect="read", name="look")(act)
everywhere = holdfast.tool(effect="mutate", name="everywhere", dedupe="global")(act)
lose = holdfast.tool(effect="mutate", name="lose", verify=lambda args, key: holdfast.Unknown())(
    fail
)
checked = holdfast.tool(
    effect="mutate", name="lose", verify=lambda args, key: holdfast.NotLanded()
)(fail)


def do_all(store: holdfast.Store, id: str = "trip", card: str = CARD) -> list[bool]:
    """Make a call of each kind, and say which were replayed."""
    session = store.session(id)
    return [
        session.call(pay, card=card).replayed,
        session.call(pay, card=card, cents=1, call_id="c1").replayed,
        session.call(look, card=card, call_id="c2").replayed,
        session.call(pay, card=card, cents=7, item="item 1").replayed,
        session.call(everywhere, card=card).replayed,
        store.once(f"key of {card[-4:]}", pay, request={"card": card}, session=session).replayed,
    ]


def test_a_moved_session_recognises_calls_with_secrets(
    stores: list[holdfast.Store], move: Move
) -> None:
    store, target, _ = stores
    assert not any(do_all(store))
    store.session("trip").call(book, card=CARD)
    move(store, target)
    made = len(calls)
    assert all(do_all(target))
    assert target.session("trip").call(book, card=CARD).replayed
    assert len(calls) == made
    session = target.session("trip")
    with pytest.raises(holdfast.RequestMismatch):
        session.call(pay, card=OTHER_CARD, cents=1, call_id="c1")
    with pytest.raises(holdfast.RequestMismatch):
        session.call(look, card=OTHER_CARD, call_id="c2")
    with pytest.raises(holdfast.RequestMismatch):
        target.once("key of 1111", pay, request={"card": OTHER_CARD})
    assert len(calls) == made
    assert not session.call(pay, card=OTHER_CARD).replayed


def test_it_does_so_in_a_process_that_was_open_before_it_came(
    stores: list[holdfast.Store], move: Move, others: list[Any]
) -> None:
    store, target, _ = stores
    do_all(store)
    do_all(target, "a session of its own", OTHER_CARD)
    made = len(calls)
    with open_at(others[0]) as importing:
        move(store, importing)
    # What counts in the whole store is known to sessions that were there before, too.
    assert target.session("a session of its own").call(everywhere, card=CARD).replayed
    assert target.once("key of 1111", pay, request={"card": CARD}).replayed
    assert all(do_all(target))
    assert all(do_all(target, "a session of its own", OTHER_CARD))
    assert len(calls) == made


@pytest.mark.parametrize("first", range(4))
def test_whichever_call_comes_first(
    stores: list[holdfast.Store], move: Move, others: list[Any], first: int
) -> None:
    store, target, _ = stores
    session = store.session("trip")
    tries: list[Callable[[Any], Any]] = [
        lambda session: session.call(pay, card=CARD),
        lambda session: session.call(look, card=CARD, call_id="c2"),
        lambda session: session.call(everywhere, card=CARD),
        lambda session: session.call(pay, card=CARD, cents=1, call_id="c1"),
    ]
    for each in tries:
        each(session)
    move(store, target)
    with open_at(others[0]) as fresh:
        assert tries[first](fresh.session("trip")).replayed
        # A read of which nothing is found is written down under the right key at once.
        assert not fresh.session("trip").call(look, card=CARD, call_id="c3").replayed
        assert fresh.session("trip").call(look, card=CARD, call_id="c3").replayed


def test_a_new_call_gets_the_same_idempotency_key_in_both_stores(
    stores: list[holdfast.Store], move: Move
) -> None:
    store, target, _ = stores
    store.session("trip").call(pay, card=CARD, cents=1)
    move(store, target)
    calls.clear()
    for each in (store, target):
        assert not each.session("trip").call(pay, card=CARD, cents=2).replayed
        each.session("native").call(pay, card=CARD, cents=2)
    # The receiver tells that it is one call; calls of sessions that share nothing differ.
    assert calls[0] == calls[2]
    assert len(set(calls)) == 3


def test_it_is_so_however_often_it_moves(stores: list[holdfast.Store], move: Move) -> None:
    first, second, third = stores
    do_all(first)
    move(first, second)
    session = second.session("trip")
    session.call(everywhere, card=OTHER_CARD)
    session.call(pay, card=OTHER_CARD)
    move(second, third)
    made = len(calls)
    for store in (third, second):
        assert all(do_all(store))
        assert store.session("trip").call(pay, card=OTHER_CARD).replayed
        assert store.session("trip").call(everywhere, card=OTHER_CARD).replayed
    first.session("trip").delete(force=True)
    move(third, first)
    assert all(do_all(first))
    assert first.session("trip").call(everywhere, card=OTHER_CARD).replayed
    assert len(calls) == made
    assert first.run(salts_of_sessions) == []
    assert third.run(salts_of_sessions) == first.run(own_salt)


def salts_of_sessions(tx: holdfast.Transaction) -> holdfast.Op[list[str]]:
    found = yield from rows(
        "SELECT t.salt FROM hf_sessions s"
        " JOIN hf_effect_sessions e ON e.session_number = s.number"
        " JOIN hf_effect_salts t ON t.number = e.salt_number WHERE s.id = 'trip'"
    )
    return [row["salt"] for row in found]


def own_salt(tx: holdfast.Transaction) -> holdfast.Op[list[str]]:
    found = yield from rows("SELECT salt FROM hf_effect_salts WHERE kind = 'own'")
    return [row["salt"] for row in found]


def test_forks_made_before_and_after_the_move_know_it(
    stores: list[holdfast.Store], move: Move
) -> None:
    store, target, third = stores
    session = store.session("trip")
    session.save(a=1)
    session.call(pay, card=CARD)
    session.save(a=2)
    session.fork(2, id="before")
    move(store, target, "before")
    target.session("trip").fork(2, id="after")
    target.session("trip").delete()
    move(target, third)
    for each, id in ((target, "before"), (target, "after"), (third, "before"), (third, "after")):
        assert each.session(id).call(pay, card=CARD).replayed
        each.session(id).rewind(2)
        assert each.session(id).call(pay, card=CARD).replayed
    assert len(calls) == 1


def test_a_late_retry_finds_it_when_the_moved_session_was_deleted(
    stores: list[holdfast.Store], move: Move
) -> None:
    store, target, _ = stores
    do_all(store)
    move(store, target)
    target.session("trip").delete()
    made = len(calls)
    assert all(do_all(target))
    assert len(calls) == made


@pytest.mark.parametrize(("card", "status"), [("a reference", "failed"), (CARD, "unknown")])
def test_a_hook_is_believed_only_with_whole_arguments(
    stores: list[holdfast.Store], move: Move, card: str, status: str
) -> None:
    store, target, _ = stores
    with pytest.raises(holdfast.Unresolved) as doubt:
        store.session("trip").call(lose, card=card)
    move(store, target)
    for each in (store, target):
        assert each.verify(doubt.value.effect_id, tools=[checked]).status == status


def test_a_key_beside_the_databases_is_the_same_in_both(
    place: Any, others: list[Any], move: Move
) -> None:
    redaction = holdfast.Redactor(key=b"a key beside the database")
    with open_at(place, redaction=redaction) as store:
        do_all(store)
        with open_at(others[0], redaction=redaction) as target:
            move(store, target)
            made = len(calls)
            assert all(do_all(target))
            assert len(calls) == made


KEY, OTHER_KEY = b"a key beside the database", b"a key kept elsewhere"


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        (KEY, None, "identified with a key.*the same redaction"),
        (None, KEY, "identified without a key.*opened with no key"),
        (KEY, OTHER_KEY, "identified with another key.*the same redaction"),
    ],
)
def test_effects_do_not_come_beside_those_of_another_key(
    place: Any, others: list[Any], tmp_path: Path, there: Any, here: Any, says: str
) -> None:
    file = tmp_path / "moved.export"
    with open_at(place, redaction=holdfast.Redactor(key=there)) as store:
        do_all(store)
        store.export(file)
    with (
        open_at(others[0], redaction=holdfast.Redactor(key=here)) as target,
        open_at(others[0]) as importing,
    ):
        do_all(target, "a session of its own", OTHER_CARD)
        # It is the store that counts, not how who imports has opened it.
        for each in (target, importing):
            with pytest.raises(holdfast.InvalidArgument, match=says):
                each.import_sessions(file, store_keys=True)
        assert [session.id for session in target.sessions()] == ["a session of its own"]
        assert all(do_all(target, "a session of its own", OTHER_CARD))


def test_a_store_without_effects_takes_on_the_key_that_they_come_with(
    place: Any, others: list[Any], tmp_path: Path, move: Move
) -> None:
    redaction = holdfast.Redactor(key=KEY)
    with open_at(place, redaction=redaction) as store:
        do_all(store)
        made = len(calls)
        with open_at(others[0], redaction=holdfast.Redactor(key=OTHER_KEY)) as other:
            other.session("a session of its own")
            store.export(tmp_path / "refused.export")
            with pytest.raises(holdfast.InvalidArgument, match="identified with another key"):
                other.import_sessions(tmp_path / "refused.export", store_keys=True)
        # A command line that moves sessions has no key.
        with open_at(others[0]) as plain:
            move(store, plain)
            with pytest.raises(holdfast.InvalidArgument, match="identified with a key"):
                plain.session("trip").call(pay, card=CARD)
            with open_at(others[0], redaction=redaction) as target:
                assert all(do_all(target))
                with open_at(others[1], redaction=redaction) as third:
                    move(target, third)
                    assert all(do_all(third))
    assert len(calls) == made


def test_what_counts_in_the_whole_store_has_one_key_there_whoever_asks(
    stores: list[holdfast.Store], move: Move
) -> None:
    """Two sessions that ask at once are told apart by nothing but the key."""
    store, target, _ = stores
    store.session("trip")
    move(store, target)
    seen = set()
    for id in ("trip", "native"):
        target.session(id).call(everywhere, card=CARD)
        target.once("key", pay, request={"card": CARD}, session=target.session(id))
        seen |= {(effect.tool, effect.key) for effect in target.effects()}
        target.run(forget)
    assert len(seen) == 2


def forget(tx: holdfast.Transaction) -> holdfast.Op[None]:
    yield from rows("DELETE FROM hf_effects")


def test_a_fork_knows_what_was_done_after_a_failure_elsewhere(
    stores: list[holdfast.Store], move: Move
) -> None:
    store, target, _ = stores
    fails = ["no answer"]

    @holdfast.tool(effect="mutate")
    def try_it(card: str) -> None:
        calls.append(card)
        if fails:
            raise holdfast.NotDone(fails.pop())

    with pytest.raises(holdfast.NotDone):
        store.session("trip").call(try_it, card=CARD)
    move(store, target)
    target.session("trip").delete()
    session = target.session("trip")
    session.save(a=1)
    assert not session.call(try_it, card=CARD).replayed
    session.save(a=2)
    assert session.fork(2, id="fork").call(try_it, card=CARD).replayed
    assert len(calls) == 2
