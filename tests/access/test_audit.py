"""The audit trail: what is written to it, and that a change of it shows."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import Landed, NotLanded
from holdfast.access import AuditRecord
from holdfast.errors import InvalidArgument, NotDone, SessionBusy
from holdfast.kernel.append_only import through_door
from holdfast.kernel.operation import Query, rows
from holdfast.store import sync_twin
from holdfast.testing.subject import Subject, done
from tests.access.test_tokens import doctor
from tests.conftest import InColour


def told(records: list[AuditRecord]) -> list[tuple[Any, ...]]:
    return [(each.actor, each.action, each.subject, each.reason, each.count) for each in records]


def doubtful(session: Any) -> str:
    """Leave an effect in doubt and return its id."""
    begun = session.begin("pay", {"amount": session.state.increment("n").value})
    begun.fail("the line went dead")
    effect_id: str = begun.effect_id
    return effect_id


def test_what_is_decided_is_audited_with_who_decided(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        token = store.tokens.create("ops", permission="admin")
        behalf = store.on_behalf_of(token)
        session = store.session("s")
        for number in range(3):
            session.append("log", [number])
        first, second = doubtful(session), doubtful(session)
        store.resolve(first, Landed("secret result"), by="jo", note="secret note")
        behalf.resolve(second, NotLanded(), by="jo")
        behalf.find_session("s").rewind(1)
        behalf.audit.refused("wrong token", count=12)
        store.prune(keep=5)
        behalf.find_session("s").delete()
        child = behalf.tokens.create("child", permission="read")
        store.tokens.revoke("ops")
        records = store.audit.list()
        assert told(records) == [
            ("local", "token_created", token.id, "admin", 1),
            ("local", "effect_resolved", first, "resolved", 1),
            ("ops", "effect_resolved", second, "not_landed", 1),
            ("ops", "session_rewound", "s", "to version 1", 1),
            ("ops", "refused", None, "wrong token", 12),
            ("local", "store_pruned", None, records[5].reason, 1),
            ("ops", "session_deleted", "s", None, 1),
            ("ops", "token_created", child.id, "read", 1),
            ("local", "token_revoked", token.id, None, 1),
        ]
        assert "keep=5" in str(records[5].reason)
        assert [each.token_id for each in records[:3]] == [None, None, token.id]
        assert [each.number for each in records] == list(range(1, 10))
        assert "secret" not in repr(records)
        assert store.audit.verify().problems == ()


def test_a_prune_of_one_session_names_it(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.prune(session=store.session("s"), keep=2)
        [record] = store.audit.list()
        assert (record.action, record.subject) == ("store_pruned", "s")


def test_the_twin_of_a_store_acts_in_the_same_name(place: dict[str, Any]) -> None:
    async def case() -> Any:
        async with await holdfast.aopen(**place) as store:
            token = await store.tokens.create("ops", permission="admin")
            twin = await asyncio.to_thread(sync_twin, store.on_behalf_of(token))
            await asyncio.to_thread(twin.audit.refused, "wrong token")
            return await store.audit.list()

    assert [each.actor for each in asyncio.run(case())] == ["local", "ops"]


def test_who_joins_a_transaction_acts_in_the_same_name(
    postgres_dsn: str, ready_namespace: str
) -> None:
    with holdfast.open(postgres_dsn, namespace=ready_namespace) as store:
        token = store.tokens.create("ops", permission="admin")
        with psycopg.connect(postgres_dsn) as connection:
            store.on_behalf_of(token).within(connection).audit.refused("wrong token")
        assert [each.actor for each in store.audit.list()] == ["local", "ops"]


def time_of_day() -> str:
    return "noon"


def test_what_is_ordinary_is_not_audited(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.append("log", [1])
        session.state.set("k", 1)
        session.call_with(holdfast.tool(time_of_day), {})
        store.work.submit("t", session=session)
        [item] = store.work.claim("w")
        item.complete()
        store.recover()
        assert store.audit.list() == []
        assert store.audit.head() == "0:"
        assert store.audit.verify("0:").problems == ()


def test_what_failed_is_not_audited(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.append("log", [1])
        with pytest.raises(holdfast.CheckpointNotFound):
            session.rewind(9)
        with session.drive("other"), pytest.raises(SessionBusy):
            store.find_session("s").delete()
        assert store.audit.list() == []


def test_a_large_tree_is_one_deletion(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trees.SESSIONS_AT_ONCE", 2)
    monkeypatch.setattr("holdfast.trees.SESSIONS_PER_PASS", 2)
    monkeypatch.setattr("holdfast.trees.SESSIONS_CLOSED_PER_PASS", 2)
    with holdfast.open(**place) as store:
        root = store.session("root")
        for number in range(5):
            store.session(f"c{number}", parent=root)
        root.delete(force=True)
        assert told(store.audit.list()) == [("local", "session_deleted", "root", "forced", 1)]


def test_a_deletion_in_several_passes_is_one_deletion(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trees.ROWS_PER_PASS", 5)
    with holdfast.open(**place) as store:
        session = store.session("s")
        for number in range(12):
            session.append("log", [number])
        session.delete()
        assert told(store.audit.list()) == [("local", "session_deleted", "s", None, 1)]


def test_the_trail_is_the_same_in_every_colour(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        stores = [await subject.open() for _ in range(2)]
        calls = [
            lambda store=store, n=n: store.audit.refused("wrong token", count=n)
            for n in range(1, 5)
            for store in stores
        ]
        await subject.together(calls)  # type: ignore[arg-type]
        first = await done(stores[0].audit.list(limit=3))
        rest = await done(stores[1].audit.list(after=3))
        assert [each.number for each in first + rest] == list(range(1, 9))
        assert sorted(each.count for each in first + rest) == [1, 1, 2, 2, 3, 3, 4, 4]
        check = await done(stores[0].audit.verify())
        assert (check.records, check.problems) == (8, ())
        assert check.head == await done(stores[1].audit.head()) == f"8:{rest[-1].digest}"

    in_colour(case)


SWAP = """
UPDATE hf_audit SET number = CASE number WHEN -2 THEN 3 ELSE 2 END WHERE number IN (-2, -3)
"""
CHANGES: dict[str, list[str]] = {
    "edited": ["UPDATE hf_audit SET reason = 'nothing' WHERE number = 3"],
    "in whose name": ["UPDATE hf_audit SET actor = 'eve' WHERE number = 1"],
    "its token": ["UPDATE hf_audit SET token_id = 'eve' WHERE number = 2"],
    "its action": ["UPDATE hf_audit SET action = 'store_pruned' WHERE number = 2"],
    "its subject": ["UPDATE hf_audit SET subject = 's' WHERE number = 4"],
    "its count": ["UPDATE hf_audit SET count = 2 WHERE number = 5"],
    "its time": ["UPDATE hf_audit SET created_at = created_at + 1 WHERE number = 5"],
    "deleted": ["DELETE FROM hf_audit WHERE number = 3"],
    "the first": ["DELETE FROM hf_audit WHERE number = 1"],
    "truncated": ["DELETE FROM hf_audit WHERE number = 5"],
    "emptied": ["DELETE FROM hf_audit"],
    "reordered": ["UPDATE hf_audit SET number = -number WHERE number IN (2, 3)", SWAP],
    "added": [
        "INSERT INTO hf_audit SELECT 6, actor, token_id, action, subject, reason, count, "
        "created_at, digest FROM hf_audit WHERE number = 5"
    ],
    "its head": ["UPDATE hf_audit_head SET digest = ''"],
    "without its head": ["DELETE FROM hf_audit_head"],
}


def test_every_change_by_hand_is_found(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.access.audit.RECORDS_PER_PAGE", 2)
    with holdfast.open(**place) as store:
        for number in range(1, 6):
            store.audit.refused(f"reason {number}", count=1)
        assert doctor(place, "audit") == ("ok", "5 records, chained without a break.")

        class Undone(Exception):
            pass

        def look(tx: holdfast.Transaction, changes: list[str]) -> holdfast.Op[None]:
            # Whoever changes the database by hand removes the triggers first.
            if "namespace" in place:
                yield from rows("ALTER TABLE hf_audit DISABLE TRIGGER ALL")
            else:
                for name in ("delete", "update", "replace"):
                    yield from rows(f"DROP TRIGGER hf_audit_no_{name}")
            for change in changes:
                yield from rows(change)
            found = yield from tx.audit.verify()
            raise Undone(*found.problems)

        for name, changes in CHANGES.items():
            with pytest.raises(Undone) as caught:
                store.run(look, changes)
            assert caught.value.args, name
        assert store.audit.verify().problems == ()


def test_a_noted_head_finds_a_chain_that_was_computed_anew(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.audit.refused("first")
        noted = store.audit.head()
        store.audit.refused("second")
        assert store.audit.verify(noted).problems == ()
        number, _, digest = noted.partition(":")
        for wrong in (f"{number}:{digest[::-1]}", f"9:{digest}", f"2:{digest}"):
            assert store.audit.verify(wrong).problems, wrong
        for bad in ("", "1", "x:y", f"01:{digest}", 7):
            with pytest.raises(InvalidArgument, match="head must be"):
                store.audit.verify(bad)  # type: ignore[arg-type]


def test_the_database_refuses_to_change_the_trail(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.audit.refused("first")

        def change(tx: holdfast.Transaction, sql: str) -> holdfast.Op[None]:
            yield from rows(sql)

        for sql in ("UPDATE hf_audit SET count = 2", "DELETE FROM hf_audit"):
            with pytest.raises(holdfast.Refused, match="append-only"):
                store.run(change, sql)

        def open_door(tx: holdfast.Transaction) -> holdfast.Op[None]:
            yield from through_door("test", Query("UPDATE hf_audit SET count = 2", {}))

        with pytest.raises(holdfast.Refused, match="append-only"):
            store.run(open_door)


BAD: list[dict[str, Any]] = [
    {"reason": ""},
    {"reason": "a\x1b[31mb"},
    {"reason": None},
    {"reason": "x" * 257},
    {"count": 0},
    {"count": True},
    {"subject": ""},
]


def test_bad_arguments_are_refused(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        for bad in BAD:
            with pytest.raises(InvalidArgument):
                store.audit.refused(**{"reason": "wrong token", **bad})
        for page in ({"after": -1}, {"limit": 0}, {"limit": 1_001}):
            with pytest.raises(InvalidArgument):
                store.audit.list(**page)
        with pytest.raises(InvalidArgument):
            store.on_behalf_of("ops")  # type: ignore[arg-type]
        assert store.audit.list() == []


def test_a_tool_that_says_not_done_is_no_decision(place: dict[str, Any]) -> None:
    def refuse() -> None:
        raise NotDone("nothing happened")

    with holdfast.open(**place) as store:
        with pytest.raises(NotDone):
            store.session("s").call_with(holdfast.tool(refuse), {})
        assert store.audit.list() == []
