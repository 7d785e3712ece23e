"""Tokens: made once with their secret, found by it, limited, revoked and removed."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.access import Token
from holdfast.clock import VirtualClock
from holdfast.errors import Forbidden, InvalidArgument, NotFound, Refused, SessionNotFound
from holdfast.kernel.operation import rows
from holdfast.testing.subject import Subject, done, raises
from holdfast.trees import Tree
from tests.conftest import InColour

DAY_SECONDS = 24 * 3600


def stored(store: holdfast.Store, table: str = "hf_tokens") -> list[dict[str, Any]]:
    def read(tx: holdfast.Transaction) -> holdfast.Op[list[dict[str, Any]]]:
        return (yield from rows(f"SELECT * FROM {table} ORDER BY number"))

    return store.run(read)


def test_a_token_is_found_by_its_secret_until_it_is_revoked(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open()
        made = await done(store.tokens.create("ci", permission="write"))
        found = await done(store.tokens.find(made.secret))
        assert type(found) is Token
        assert (found.id, found.name, found.permission) == (made.id, "ci", "write")
        assert (found.root_id, found.created_by, found.expires_at) == (None, None, None)
        assert await done(store.tokens.list()) == [found]
        for wrong in ("", made.secret[:-1], made.id, "ci", "\udcff", "x" * 10_000):
            assert await done(store.tokens.find(wrong)) is None
        revoked = await done(store.tokens.revoke("ci"))
        assert revoked.revoked_at is not None
        assert await done(store.tokens.find(made.secret)) is None
        assert await done(store.tokens.revoke(made.id)) == revoked
        actions = [each.action for each in await done(store.audit.list())]
        assert actions == ["token_created", "token_revoked"]
        await raises(NotFound, lambda: store.tokens.revoke("ci"))

    in_colour(case)


def test_a_token_that_several_revoke_is_revoked_once(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        stores = [await subject.open() for _ in range(4)]
        for number in range(5):
            made = await done(stores[0].tokens.create(f"t{number}"))
            calls: list[Any] = [partial(store.tokens.revoke, made.id) for store in stores]
            revoked = await subject.together(calls)
            assert len(set(revoked)) == 1
            assert revoked[0].revoked_at is not None
        actions = [each.action for each in await done(stores[0].audit.list())]
        assert actions == ["token_created", "token_revoked"] * 5

    in_colour(case)


def test_the_secret_is_stored_nowhere(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        made, other = store.tokens.create("one"), store.tokens.create("two")
        assert made.secret.startswith("hf_")
        assert len(made.secret) == len("hf_") + 43
        assert made.secret != other.secret
        assert made.secret not in repr(made)
        [row, _] = stored(store)
        assert row["digest"] == hashlib.sha256(made.secret.encode()).hexdigest()
        everything = repr([stored(store), stored(store, "hf_audit"), store.tokens.list()])
        assert made.secret[3:] not in everything


def test_a_secret_in_the_arguments_of_a_tool_is_redacted(place: dict[str, Any]) -> None:
    @holdfast.tool
    def send(key: str) -> None:
        pass

    with holdfast.open(**place) as store:
        secret = store.tokens.create("one").secret
        store.session("s").call(send, key=secret)
        [effect] = store.effects()
        assert secret not in repr(effect)


def test_an_expired_token_is_refused(place: dict[str, Any]) -> None:
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        secret = store.tokens.create("short", expires_in_seconds=60).secret
        clock.advance(59.999)
        assert store.tokens.find(secret) is not None
        clock.advance(0.001)
        assert store.tokens.find(secret) is None


def test_a_name_is_free_again_once_its_token_is_revoked(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        old = store.tokens.create("ci")
        with pytest.raises(Refused, match="revoke it first"):
            store.tokens.create("ci")
        store.tokens.revoke("ci")
        new = store.tokens.create("ci")
        assert store.tokens.find(old.secret) is None
        assert store.tokens.revoke(new.id[:30]).id == new.id
        assert len(store.audit.list()) == 4


def test_a_token_of_a_tree_goes_with_it(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        root = store.session("root")
        child = store.session("child", parent=root)
        made = store.tokens.create("tree", session=child)
        free = store.tokens.create("free")
        assert made.root_id == "root"
        child.delete()
        assert store.tokens.find(made.secret) is not None
        root.delete()
        assert store.tokens.find(made.secret) is None
        store.session("root")
        assert store.tokens.find(made.secret) is None
        assert [token.name for token in store.tokens.list()] == ["free"]
        assert store.tokens.find(free.secret) is not None
        with pytest.raises(SessionNotFound):
            store.tokens.create("lost", session="child")


def test_a_tree_that_is_being_deleted_gets_no_token(place: dict[str, Any]) -> None:
    def close(tx: holdfast.Transaction, session: Any) -> holdfast.Op[bool]:
        tree = Tree.of(tx.within(session))
        return (yield from Tree.close(tree, [tree.top], True))

    with holdfast.open(**place) as store:
        session = store.session("s")
        store.run(close, session)
        for given in (session, "s"):
            with pytest.raises(SessionNotFound):
                store.tokens.create("late", session=given)
        assert store.tokens.list() == []


def test_a_token_makes_none_that_can_do_more(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open(clock=VirtualClock())
        for id in ("one", "two"):
            await done(store.session(id))
        create = store.tokens.create
        admin = await done(create("admin", permission="admin"))
        limits = {"permission": "write", "session": "one", "expires_in_seconds": 100}
        limited = await done(create("limited", **limits, by=admin))
        assert limited.created_by == admin.id
        child = await done(create("child", **limits, by=limited))
        assert child.created_by == limited.id
        *_, last = await done(store.audit.list())
        assert (last.actor, last.token_id, last.subject) == ("limited", limited.id, child.id)
        broader: list[dict[str, Any]] = [
            {"permission": "admin"},
            {"session": None},
            {"session": "two"},
            {"expires_in_seconds": None},
            {"expires_in_seconds": 101},
        ]
        for wrong in broader:
            given = {**limits, **wrong}
            await raises(Forbidden, partial(create, "broader", **given, by=limited))
            acting = store.on_behalf_of(limited).tokens
            await raises(Forbidden, partial(acting.create, "broader", **given))
        await done(store.tokens.revoke("limited"))
        await raises(Forbidden, lambda: create("late", **limits, by=limited))
        # What it made stays.
        assert await done(store.tokens.find(child.secret)) is not None
        assert len(await done(store.tokens.list())) == 3

    in_colour(case)


BAD: list[dict[str, Any]] = [
    {"name": ""},
    {"name": "x" * 257},
    {"name": "a\nb"},
    {"name": None},
    {"permission": "root"},
    {"permission": None},
    {"session": 7},
    {"session": "one", "permission": "approve"},
    {"session": ""},
    {"expires_in_seconds": 0},
    {"expires_in_seconds": -1},
    {"expires_in_seconds": float("nan")},
    {"expires_in_seconds": 1e12},
    {"expires_in_seconds": "60"},
    {"by": "ci"},
]


def test_bad_arguments_are_refused_and_nothing_is_written(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        for bad in BAD:
            with pytest.raises(InvalidArgument):
                store.tokens.create(**{"name": "ci", **bad})
        secrets: list[Any] = [None, 7, b"hf_"]
        for secret in secrets:
            with pytest.raises(InvalidArgument) as caught:
                store.tokens.find(secret)
            assert "hf_" not in str(caught.value)
        names: list[Any] = ["", None, 7]
        for name in names:
            with pytest.raises(InvalidArgument):
                store.tokens.revoke(name)
        for page in ({"after": -1}, {"limit": 0}, {"limit": 1_001}):
            with pytest.raises(InvalidArgument):
                store.tokens.list(**page)
        assert [*store.tokens.list(), *store.audit.list()] == []


def test_tokens_are_listed_in_pages(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        made = [store.tokens.create(f"t{number}").id for number in range(5)]
        first = store.tokens.list(limit=3)
        rest = store.tokens.list(after=first[-1].number)
        assert [token.id for token in first + rest] == made


def test_dead_tokens_are_forgotten_after_a_month(place: dict[str, Any]) -> None:
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        store.tokens.create("expired", expires_in_seconds=1)
        store.tokens.create("revoked")
        store.tokens.create("kept")
        store.tokens.revoke("revoked")
        clock.advance(30 * DAY_SECONDS)
        assert store.prune(session=store.session("s")).others == {}
        assert store.prune().others == {"dead token": 1}
        clock.advance(1)
        assert store.prune().others == {"dead token": 1}
        assert [token.name for token in store.tokens.list()] == ["kept"]


def test_tokens_and_audit_are_not_exported(place: dict[str, Any], tmp_path: Any) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        store.tokens.create("tree", session=session)
        assert store.export(tmp_path / "file").others == {}
    with holdfast.open(f"sqlite:///{tmp_path}/other.db") as store:
        store.import_sessions(tmp_path / "file")
        assert [*store.tokens.list(), *store.audit.list()] == []


def test_doctor_counts_tokens_and_finds_those_without_a_tree(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.tokens.create("tree", session=store.session("s"))
        assert doctor(place) == ("ok", "1 token can be used.")

        def damage(tx: holdfast.Transaction) -> holdfast.Op[None]:
            yield from rows("UPDATE hf_tokens SET root_id = 'gone'")

        store.run(damage)
    level, message = doctor(place)
    assert level == "problem"
    assert "tree" in message
    with holdfast.open(**place) as store:
        store.tokens.revoke("tree")
    assert doctor(place) == ("ok", "0 tokens can be used.")


def doctor(place: dict[str, Any], check: str = "tokens") -> tuple[str, str]:
    found = holdfast.store.check(place["url"], namespace=place.get("namespace"))
    [finding] = [each for each in found if each.check == check]
    return finding.level, finding.message
