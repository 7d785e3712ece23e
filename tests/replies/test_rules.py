"""A request that is sent twice runs once, under a key and in a lane."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.ciphers import AesGcm
from holdfast.clock import VirtualClock
from holdfast.errors import IdempotencyKeyReused, NotFound, RequestOutOfOrder, VersionConflict
from holdfast.kernel.operation import rows
from holdfast.replies import Reply, remembered
from holdfast.replies.noun import REMOVED_PER_PASS
from holdfast.testing.subject import Subject, done, raises
from tests.conftest import InColour
from tests.replies.requests import count, keyed, numbered

DAY_SECONDS = 24 * 3600


def test_a_repeated_key_is_answered_and_not_run_again(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open()
        session = await done(store.session("s"))
        assert await done(store.run(keyed, session, "k", 2)) == Reply({"count": 2}, False)
        assert await done(store.run(keyed, session, "k", 2)) == Reply({"count": 2}, True)
        other = await done(store.run(keyed, session, "k", 2, scope="bob PUT"))
        assert other == Reply({"count": 4}, False)
        reused = await raises(IdempotencyKeyReused, lambda: store.run(keyed, session, "k", 3))
        assert reused.http_status == 422
        assert await count(session) == 4

    in_colour(case)


def test_requests_at_the_same_time_run_once(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        stores = [await subject.open() for _ in range(3)]
        sessions = [await done(store.session("s")) for store in stores]
        pairs = list(zip(stores, sessions, strict=True))
        calls: list[Any] = [partial(store.run, keyed, session, "k") for store, session in pairs * 2]
        replies = await subject.together(calls)
        assert sorted(reply.is_replayed for reply in replies) == [False] + [True] * 5
        assert all(reply.outcome == {"count": 1} for reply in replies)
        assert await count(sessions[0]) == 1

    in_colour(case)


def test_an_outcome_that_is_empty_is_an_outcome(place: dict[str, Any]) -> None:
    empty: list[Any] = [None, False, 0, "", [], {}]
    with holdfast.open(**place) as store:
        session = store.session("s")
        for number, outcome in enumerate(empty, 1):
            for is_replayed in (False, True):
                reply = store.run(keyed, session, f"k{number}", outcome=outcome)
                assert (repr(reply.outcome), reply.is_replayed) == (repr(outcome), is_replayed)
                reply = store.run(numbered, session, number, outcome=outcome)
                assert (repr(reply.outcome), reply.is_replayed) == (repr(outcome), is_replayed)
        assert session.state.get("count") == 2 * len(empty)


def failing(tx: holdfast.Transaction, session: Any, key: str) -> holdfast.Op[Reply]:
    op = tx.within(session).state.set("count", 9, if_version=99)
    return (yield from remembered(tx.runtime.codec, "alice PUT", key, "1", op))


def test_what_failed_is_not_remembered(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open()
        session = await done(store.session("s"))
        await raises(VersionConflict, lambda: store.run(failing, session, "k"))
        assert await done(store.run(keyed, session, "k")) == Reply({"count": 1}, False)

        def caught(tx: holdfast.Transaction) -> holdfast.Op[None]:
            with suppress(VersionConflict):
                yield from failing(tx, session, "k2")

        await done(store.run(caught))
        assert await done(store.run(keyed, session, "k2")) == Reply({"count": 2}, False)

    in_colour(case)


def test_an_outcome_that_cannot_be_stored_undoes_the_request(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        for outcome in ({"at": object()}, (1, 2), float("nan")):
            with pytest.raises(holdfast.InvalidValue, match="outcome"):
                store.run(keyed, session, "k", outcome=outcome)
        assert session.state.get("count") is None
        many = ["x" * 1_000_000] * 3
        assert store.run(keyed, session, "k", outcome=many).outcome == many
        assert store.run(keyed, session, "k", outcome=many) == Reply(many, True)


def test_a_lane_answers_its_last_request_and_runs_its_next(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open()
        session = await done(store.session("s"))
        for number in (1, 2, 3):
            for is_replayed in (False, True):
                reply = await done(store.run(numbered, session, number))
                assert reply == Reply({"count": number}, is_replayed)
        await raises(IdempotencyKeyReused, lambda: store.run(numbered, session, 3, 5))
        stale = await raises(RequestOutOfOrder, lambda: store.run(numbered, session, 2))
        assert (stale.number, stale.last) == (2, 3)
        jump = await raises(RequestOutOfOrder, lambda: store.run(numbered, session, 5))
        assert (jump.number, jump.last) == (5, 3)
        first = await raises(
            RequestOutOfOrder, lambda: store.run(numbered, session, 2, lane="lane 2")
        )
        assert first.last == 0
        assert (await done(store.run(numbered, session, 1, lane="lane 2"))).outcome == {"count": 4}
        assert await count(session) == 4

    in_colour(case)


def test_a_number_is_used_up_by_success_only(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        store.run(numbered, session, 1)
        with pytest.raises(holdfast.InvalidValue):
            store.run(numbered, session, 2, 7, outcome=object())
        assert store.run(numbered, session, 2).outcome == {"count": 2}


def test_a_lane_keeps_one_record(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        for number in range(1, 6):
            store.run(numbered, session, number)
        assert len(kept(store)) == 1


def kept(store: holdfast.Store) -> list[dict[str, Any]]:
    def read(tx: holdfast.Transaction) -> holdfast.Op[list[dict[str, Any]]]:
        return (yield from rows("SELECT * FROM hf_replies ORDER BY scope, key"))

    return store.run(read)


BAD_NAMES: list[Any] = ["", "x" * 257, "a\nb", 1, None, b"k"]


def test_bad_names_are_refused(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        for name in BAD_NAMES:
            for wrong in ({"scope": name}, {"digest": name or ""}, {"key": name}):
                with pytest.raises(holdfast.InvalidArgument):
                    store.run(keyed, session, **{"key": "k", **wrong})
            with pytest.raises(holdfast.InvalidArgument):
                store.run(numbered, session, 1, lane=name)
        for number in (0, -1, True, 1.0, "1", 2**63):
            with pytest.raises(holdfast.InvalidArgument):
                store.run(numbered, session, number)
        assert kept(store) == []


def test_the_longest_names_are_taken(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        for is_replayed in (False, True):
            reply = store.run(keyed, session, "\U0001f511" * 255, scope="\U0001f5dd" * 256)
            assert reply == Reply({"count": 1}, is_replayed)


def test_replies_go_after_a_day(place: dict[str, Any]) -> None:
    clock = VirtualClock(1_700_000_000_000)
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        store.run(keyed, session, "old")
        store.run(numbered, session, 1)
        clock.advance(DAY_SECONDS - 1)
        store.run(numbered, session, 2)
        store.recover()
        assert len(kept(store)) == 2
        clock.advance(1)
        store.recover()
        assert [row["key"] for row in kept(store)] == [""]
        assert store.run(keyed, session, "old") == Reply({"count": 4}, False)
        clock.advance(DAY_SECONDS)
        assert store.prune(session=session).others == {}
        assert store.prune().others == {"remembered outcome": 2}
        assert kept(store) == []
        with pytest.raises(RequestOutOfOrder, match="begins with 1"):
            store.run(numbered, session, 3)


def many(tx: holdfast.Transaction, count: int) -> holdfast.Op[None]:
    def nothing() -> holdfast.Op[None]:
        yield from ()

    for number in range(count):
        yield from remembered(tx.runtime.codec, "many", str(number), "d", nothing())


def test_many_old_replies_go_in_small_passes(place: dict[str, Any]) -> None:
    clock = VirtualClock(1_700_000_000_000)
    with holdfast.open(**place, clock=clock) as store:
        store.run(many, REMOVED_PER_PASS + 101)
        clock.advance(DAY_SECONDS)
        assert store.recover().swept.has_more
        assert len(kept(store)) == REMOVED_PER_PASS + 1
        assert store.prune().others == {"remembered outcome": REMOVED_PER_PASS + 1}
        assert not store.recover().swept.has_more


def test_a_deleted_session_takes_its_replies_along(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        root = store.session("root")
        child, other = (store.session(id, parent=root) for id in ("child", "other"))
        for session in (root, child, other):
            store.run(keyed, session, session.id, outcome=f"outcome of {session.id}")
            store.run(numbered, session, 1, lane=session.id)
        child.delete()
        assert [row["key"] for row in kept(store)] == ["other", "root", "", "", ""]
        with pytest.raises(NotFound, match="deleted with its session"):
            store.run(numbered, root, 1, lane="child")
        # The lane goes on.
        assert store.run(numbered, root, 2, lane="child") == Reply({"count": 7}, False)
        root.delete(force=True)
        assert {row["key"] for row in kept(store)} == {""}
        assert all(row["outcome"] is None for row in kept(store))
        assert doctor(place) == ("ok", "3 outcomes kept for repeated requests.")


def test_the_reply_of_a_deletion_is_kept(place: dict[str, Any]) -> None:
    """The session is gone when its own record is written."""

    def delete(tx: holdfast.Transaction, session: Any, key: str) -> holdfast.Op[Reply]:
        from holdfast.trees import Tree
        from tests.replies.requests import ref

        op = Tree.delete_at_once(Tree.of(tx.within(session)), True)
        return (yield from remembered(tx.runtime.codec, "s", key, "d", op, session=ref(session)))

    with holdfast.open(**place) as store:
        session = store.session("s")
        assert store.run(delete, session, "k") == Reply(["s"], False)
        assert store.run(delete, session, "k") == Reply(["s"], True)


def test_many_replies_of_a_session_are_deleted(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trees.ROWS_PER_PASS", 5)
    with holdfast.open(**place) as store:
        session = store.session("s")
        for number in range(12):
            store.run(keyed, session, f"k{number}")
        session.delete()
        assert kept(store) == []


def doctor(place: dict[str, Any]) -> tuple[str, str]:
    found = holdfast.store.check(place["url"], namespace=place.get("namespace"))
    [finding] = [each for each in found if each.check == "replies"]
    return finding.level, finding.message


def test_doctor_notices_that_nothing_sweeps(place: dict[str, Any]) -> None:
    # Behind that of the machine, with which a doctor looks.
    with holdfast.open(**place, clock=VirtualClock(1_700_000_000_000)) as store:
        store.run(many, 2)
    assert doctor(place) == (
        "warning",
        "2 outcomes kept for repeated requests, 2 for too long.",
    )


def test_outcomes_are_encrypted_and_not_exported(place: dict[str, Any], tmp_path: Any) -> None:
    cipher = AesGcm({"k1": bytes(range(32))}, current="k1")
    with holdfast.open(**place, cipher=cipher) as store:
        session = store.session("s")
        store.run(keyed, session, "k", outcome="canary of the outcome")
        [row] = kept(store)
        assert b"canary" not in row["outcome"]
        assert store.run(keyed, session, "k", outcome="").outcome == "canary of the outcome"
        exported = store.export(tmp_path / "file", [session])
        assert exported.others == {}
    with holdfast.open(f"sqlite:///{tmp_path}/other.db", cipher=cipher) as store:
        store.import_sessions(tmp_path / "file")
        assert kept(store) == []


def test_the_outcome_of_another_request_is_not_taken_for_this_ones(place: dict[str, Any]) -> None:
    def move(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from rows("UPDATE hf_replies SET number = number + 1 WHERE key = ''")

    with holdfast.open(**place) as store:
        session = store.session("s")
        store.run(numbered, session, 1)
        store.run(move)
        with pytest.raises(holdfast.CorruptRecord, match="moved here"):
            store.run(numbered, session, 2)


def test_a_cipher_is_refused_where_outcomes_are_not_encrypted(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.run(many, 1)
    cipher = AesGcm({"k1": bytes(range(32))}, current="k1")
    with pytest.raises(holdfast.StoreError, match="not encrypted"):
        holdfast.open(**place, cipher=cipher)
