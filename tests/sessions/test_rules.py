"""The rules of sessions and checkpoints, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.checkpoints.lines import SHIFT
from holdfast.kernel.attempt import Hooks, Trace
from holdfast.kernel.operation import rows
from holdfast.records import KINDS

# A change in one of these is a change of cost on every turn: look before you update the number.
STATEMENTS = {
    "SessionsOps.session": 6,
    "CheckpointOps.append": 6,
    "CheckpointOps.save": 5,
    "CheckpointOps.record": 5,
}


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place) as opened:
        yield opened


def sql(store: holdfast.Store, *statements: str, **parameters: Any) -> list[dict[str, Any]]:
    """Run statements as somebody with the database's password could, in one transaction."""

    def run(tx: holdfast.Transaction) -> holdfast.Op[list[dict[str, Any]]]:
        found: list[dict[str, Any]] = []
        for statement in statements:
            found = yield from rows(statement, **parameters)
        return found

    return store.run(run)


def test_status_goes_to_an_end_and_back_only_on_purpose(store: holdfast.Store) -> None:
    session = store.session("s")
    assert session.info().status == "active"
    for status in ("completed", "failed", "cancelled"):
        session.end(status)
        with pytest.raises(holdfast.SessionEnded):
            session.save(x=1)
        with pytest.raises(holdfast.SessionEnded):
            store.session("s")
        session = store.session("s", reopen=True)
    changes = [c.data for c in reversed(session.history(kind="state_transition"))]
    assert changes[:2] == [
        {"from": "active", "to": "completed"},
        {"from": "completed", "to": "active"},
    ]
    assert len(changes) == 6


def test_a_resumed_session_keeps_its_birth_and_its_root(store: holdfast.Store) -> None:
    first = store.session("first")
    child = store.session("child", parent=first, agent="a", metadata={"n": 1})
    other = store.session("other")
    born = child.info()
    again = store.session("child", parent=other, name="renamed")
    now = again.info()
    assert (now.created_at, now.root_id, now.parent_id) == (born.created_at, "first", "first")
    assert (now.name, now.agent, now.metadata) == ("renamed", "a", {"n": 1})
    assert now.last_resumed_at >= born.last_resumed_at


def test_a_child_process_finds_its_session(store: holdfast.Store) -> None:
    child = store.session("c", parent=store.session("r"), name="helper")
    environment = child.environment()
    identity = holdfast.current_session(environment)
    assert identity is not None
    assert (identity.id, identity.name, identity.root_id) == ("c", "helper", "r")
    assert identity.url == store.url
    assert holdfast.current_session({}) is None
    text = "${AGENT_SESSION_NAME}/${AGENT_ROOT_SESSION_ID} ${HOME} $AGENT_SESSION_ID"
    assert child.expand(text) == "helper/r ${HOME} $AGENT_SESSION_ID"


def test_cancelling_reaches_everything_below_and_fences_drivers(store: holdfast.Store) -> None:
    root = store.session("root")
    below = [store.session(f"c{n}", parent="root") for n in range(3)]
    grandchild = store.session("g", parent="c1")
    below[2].end()
    driver = grandchild.drive("worker", lease_seconds=60)
    assert set(below[1].cancel()) == {"c1", "g"}
    with pytest.raises((holdfast.LeaseLost, holdfast.SessionEnded)):
        driver.save(x=1)
    driver.close()
    statuses = {info.id: info.status for info in root.tree()}
    assert statuses == {
        "root": "active",
        "c0": "active",
        "c1": "cancelled",
        "c2": "completed",
        "g": "cancelled",
    }


def test_deleting_is_refused_while_work_goes_on_below(store: holdfast.Store) -> None:
    root = store.session("root")
    child = store.session("child", parent=root)
    with pytest.raises(holdfast.SessionBusy, match="session child is active"):
        root.delete()
    child.end()
    assert root.delete() == ["root", "child"]
    assert store.sessions() == []
    fresh = store.session("root")
    assert fresh.save(x=1).version == 1
    assert fresh.number != root.number


def test_listings_page_by_cursor_at_a_constant_cost(place: dict[str, Any]) -> None:
    traces: list[Trace] = []
    with holdfast.open(**place, hooks=Hooks(trace=traces.append)) as store:
        for number in range(25):
            store.session(f"s{number}", agent="even" if number % 2 == 0 else "odd")
        traces.clear()
        seen: list[str] = []
        after = 0
        while page := store.sessions(after=after, limit=10):
            seen += [info.id for info in page]
            after = page[-1].number
        assert seen == [f"s{number}" for number in range(25)]
        assert len(store.sessions(agent="odd", limit=100)) == 12
        assert len(store.sessions(root="s3")) == 1
        assert {trace.statements for trace in traces} <= {1}


def test_the_database_itself_refuses_to_change_history(store: holdfast.Store) -> None:
    session = store.session("s")
    session.save(x=1)
    for statement in (
        "UPDATE hf_checkpoints SET kind = 'turn'",
        "DELETE FROM hf_checkpoints",
        "DELETE FROM hf_events",
    ):
        with pytest.raises(holdfast.Refused, match="append-only"):
            sql(store, statement)
    with pytest.raises(holdfast.Refused):
        sql(
            store,
            "INSERT INTO hf_checkpoints (key, epoch, kind, state_sequence, manifest, created_at) "
            "VALUES (1, 1, 'step', 0, CAST('' AS BLOB), 0)",
        )
    assert sql(store, "SELECT count(*) AS n FROM hf_doors") == [{"n": 0}]


def test_resume_points_follow_iterations_and_epochs(store: holdfast.Store) -> None:
    session = store.session("s")
    assert session.resume_point() == holdfast.ResumePoint(iteration=1, checkpoint=None)
    session.record("iteration_start", {"iteration": 1})
    assert session.resume_point().iteration == 1
    session.record("iteration_end", {"iteration": 1})
    assert session.resume_point().iteration == 2
    session.record("iteration_start", {"iteration": 2})
    session.record("error_boundary", {"error": "x"})
    point = session.resume_point()
    assert (point.iteration, point.checkpoint and point.checkpoint.version) == (2, 3)
    session.rewind(1)
    assert session.resume_point().iteration == 1
    fork = session.fork(2)
    assert fork.resume_point().iteration == 2


def test_history_shows_every_version_and_latest_follows_the_path(store: holdfast.Store) -> None:
    session = store.session("s")
    for number in range(4):
        session.append("xs", [number])
    session.rewind(2)
    session.append("xs", ["other"])
    assert [c.version for c in session.history()] == [6, 5, 4, 3, 2, 1]
    assert [c.epoch for c in session.history()] == [2, 2, 1, 1, 1, 1]
    latest = session.latest()
    assert latest is not None
    assert latest["xs"] == [0, 1, "other"]
    assert session.at(4)["xs"] == [0, 1, 2, 3]
    assert [c.version for c in session.history(before=3, limit=1)] == [2]
    assert session.counts() == {"turn": 5, "state_transition": 1}
    newest = session.latest(kind="turn")
    assert newest is not None
    assert newest.version == 6


def test_values_come_back_exactly(store: holdfast.Store) -> None:
    values = {
        "none": None, "zero": 0, "false": False, "empty": "", "dict": {}, "list": [],
        "float": 1.0, "one": 1, "true": True, "negative zero": -0.0, "big": 2**200,
        "less": -(2**64),
        "text": "ünïcødé 🐙 \0 \u2028", "nested": {"b": [1, {"a": None}], "a": {}},
        "large": {"k": "v" * 5_000}, "many": [{"i": i} for i in range(200)],
    }  # fmt: skip
    session = store.session("s")
    session.save(values)
    latest = session.latest()
    assert latest is not None
    assert repr(latest.channels) == repr(values)
    assert "missing" not in latest.channels


@pytest.mark.parametrize("part", ["manifest", "data", "item", "run"])
def test_a_flipped_byte_is_told_and_the_version_before_still_loads(
    store: holdfast.Store, part: str
) -> None:
    session = store.session("s")
    session.save(xs=list(range(64 if part == "run" else 3)), kind="turn", data={"n": 1})
    session.save(ys=["y" * 50] * (64 if part == "run" else 2), kind="turn", data={"n": 2})
    key = session.number * SHIFT + 2
    if part in {"manifest", "data"}:
        table, column, where = "hf_checkpoints", part, key
    else:
        (row,) = sql(store, "SELECT max(key) AS key FROM hf_items")
        table, column, where = "hf_items", "data", row["key"]
    (row,) = sql(store, f"SELECT {column} AS body FROM {table} WHERE key = :key", key=where)
    body = bytearray(row["body"])
    body[len(body) // 2] ^= 1
    columns = "key, epoch, kind, iteration, item_id, state_sequence, manifest, data, metadata"
    if table == "hf_checkpoints":
        # Only a copy can be changed: the trigger refuses an UPDATE, the door allows a DELETE.
        replaced = {"manifest": "manifest", "data": "data", column: "CAST(:body AS BLOB)"}
        sql(
            store,
            "INSERT INTO hf_doors (name) VALUES ('test')",
            f"CREATE TABLE hf_copy AS SELECT {columns}, created_at FROM hf_checkpoints "
            f"WHERE key = {where}",
            f"DELETE FROM hf_checkpoints WHERE key = {where}",
            f"INSERT INTO hf_checkpoints ({columns}, created_at) SELECT key, epoch, kind,"
            f" iteration, item_id, state_sequence, {replaced['manifest']}, {replaced['data']},"
            " metadata, created_at FROM hf_copy",
            "DELETE FROM hf_doors",
            body=bytes(body),
        )
    else:
        sql(store, "UPDATE hf_items SET data = :body WHERE key = :key", body=bytes(body), key=where)
    with pytest.raises(holdfast.CorruptRecord):
        store.session("s").latest()
    assert len(session.at(1)["xs"]) == (64 if part == "run" else 3)


def test_a_version_removed_by_hand_leaves_every_other_loadable(store: holdfast.Store) -> None:
    session = store.session("s")
    for number in range(100):
        session.append("xs", [number])
    key = session.number * SHIFT + 40
    sql(
        store,
        "INSERT INTO hf_doors (name) VALUES ('by hand')",
        f"DELETE FROM hf_checkpoints WHERE key = {key}",
        "DELETE FROM hf_doors",
    )
    with pytest.raises(holdfast.CheckpointNotFound):
        session.at(40)
    for version in range(1, 101):
        if version != 40:
            assert session.at(version)["xs"] == list(range(version))
    assert session.append("xs", [100]).version == 101


def test_every_turn_costs_the_statements_it_should(place: dict[str, Any]) -> None:
    traces: list[Trace] = []
    with holdfast.open(**place, hooks=Hooks(trace=traces.append)) as store:
        session = store.session("s")
        session.save(xs=["a"], plan={"n": 0})
        traces.clear()
        store.session("t")
        for _ in range(5):
            session.append("xs", ["b"])
            session.save(plan={"n": 1})
            session.record("error_boundary")
        costs = {(trace.call, trace.statements) for trace in traces}
    assert costs == set(STATEMENTS.items())


def test_the_async_colour_does_the_same(place: dict[str, Any]) -> None:
    async def run() -> None:
        async with await holdfast.aopen(**place) as store:
            session = await store.session("s")
            await session.save(xs=[1])
            await asyncio.gather(*(session.append("xs", [n]) for n in range(20)))
            latest = await session.latest()
            assert latest is not None
            assert (latest.version, sorted(latest["xs"])) == (21, [0, 1, *range(1, 20)])
            fork = await session.fork(1)
            async with await fork.drive("d", lease_seconds=30) as driver:
                await driver.append("xs", [2])
                with pytest.raises(holdfast.SessionBusy):
                    await fork.save(x=1)
            await fork.rewind(1)
            assert (await fork.at(3)).channels == {"xs": [1]}

            def both(tx: holdfast.Transaction) -> holdfast.Op[int]:
                yield from tx.within(session).append("xs", ["x"])
                yield from tx.within(session).append("xs", ["y"])
                yield from tx.within(session).end()
                return 7

            assert await store.run(both) == 7
            ended = await session.latest()
            assert ended is not None
            assert ended["xs"][-2:] == ["x", "y"]
            assert (await session.info()).status == "completed"

    asyncio.run(run())


def test_pins_and_attestations_say_something_about_existing_versions(
    store: holdfast.Store,
) -> None:
    session = store.session("s")
    session.save(x=1)
    session.pin(1, "kept")
    session.pin(1, "kept for another reason")
    session.attest(1, {"by": "a test"})
    session.unpin(1)
    kinds = [event.kind for event in store.events("s")][-4:]
    assert kinds == [
        "checkpoint_pinned",
        "checkpoint_pinned",
        "checkpoint_attested",
        "checkpoint_unpinned",
    ]
    fork = session.fork(1)
    with pytest.raises(holdfast.CheckpointNotFound):
        fork.pin(2, "not there")


def test_unknown_kinds_are_the_only_ones_refused(store: holdfast.Store) -> None:
    session = store.session("s")
    for number, kind in enumerate(KINDS, 1):
        data = {"iteration": 1} if kind.startswith("iteration") else None
        assert session.record(kind, data).version == number
