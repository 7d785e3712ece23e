"""Damage on the disk: it is told, it spreads to nothing else, and the session can go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast import CheckpointNotFound, CorruptRecord
from holdfast.checkpoints import Heads
from holdfast.checkpoints.keys import VERSIONS
from tests.checkpoints import tables
from tests.checkpoints.colours import sql

COLUMNS = "key, epoch, kind, iteration, item_id, state_sequence, manifest, data, metadata"


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place, durability="normal") as opened:
        is_sqlite = opened.runtime.driver.dialect == "sqlite"
        for table in ("hf_items", "hf_lines"):
            for name in ("no_update", "no_delete"):
                sql(
                    opened,
                    f"DROP TRIGGER {f'{table}_{name}' if is_sqlite else f'{name} ON {table}'}",
                )
        yield opened


def fresh(store: holdfast.Store, id: str = "s") -> holdfast.Session:
    """Return a handle of a process that remembers nothing."""
    session = store.find_session(id)
    Heads.of(store.runtime).forget(session.number)
    return session


def replace(store: holdfast.Store, table: str, column: str, key: int, body: bytes) -> None:
    """Put other bytes into a row; a checkpoint is taken out and put back, past its triggers."""
    name = "id" if table == "hf_lines" else "key"
    if table != "hf_checkpoints":
        statement = f"UPDATE {table} SET {column} = :body WHERE {name} = :key"
        sql(store, statement, body=body, key=key)
        return
    (row,) = sql(store, "SELECT * FROM hf_checkpoints WHERE key = :key", key=key)
    values = {name: row[name] for name in [*COLUMNS.split(", "), "created_at"]} | {column: body}
    blobs = {"manifest", "data", "metadata"}
    texts = {"kind", "item_id"}
    listed = ", ".join(
        f"CAST(:{name} AS {'BLOB' if name in blobs else 'TEXT' if name in texts else 'INTEGER'})"
        for name in values
    )
    sql(
        store,
        "INSERT INTO hf_doors (name) VALUES ('damage')",
        "DELETE FROM hf_checkpoints WHERE key = :key",
        f"INSERT INTO hf_checkpoints ({COLUMNS}, created_at) VALUES ({listed})",
        "DELETE FROM hf_doors",
        **values,
    )


def flipped(body: bytes, place: int) -> bytes:
    damaged = bytearray(body)
    damaged[place] ^= 0x01
    return bytes(damaged)


def conversation(store: holdfast.Store) -> dict[int, dict[str, Any]]:
    """Save eight versions that use everything there is; return what each holds."""
    session = store.session("s", metadata={"title": "t"})
    log: list[Any] = [{"n": number} for number in range(70)]
    channels: dict[str, Any] = {"log": list(log), "memo": "m" * 300, "plan": {"a": 1}}
    wanted: dict[int, dict[str, Any]] = {}

    def save(**changes: Any) -> None:
        channels.update(changes)
        named: dict[str, Any] = {"data": {"version": len(wanted) + 1}, "metadata": {"by": "test"}}
        version = session.save(changes, **named).version
        wanted[version] = {name: channels[name] for name in channels}

    save(**channels)
    save(log=[*log, "one"])
    save(log=[*log, "one", *range(60)])
    save(memo="n" * 300)
    save(log=[*log[:50], "edited", *log[51:], "one", *range(60)])
    save(log=["summary", *range(40, 60)])
    save(plan={"a": 2})
    save(log=["summary", *range(40, 60), "on"])
    return wanted


def check_others(store: holdfast.Store, wanted: dict[int, Any], broken: set[int]) -> None:
    """Make sure that exactly these versions are broken."""
    session = fresh(store)
    for version, channels in wanted.items():
        if version in broken:
            with pytest.raises(CorruptRecord):
                session.at(version)
        else:
            assert session.at(version).channels == channels, version


@pytest.mark.parametrize("part", ["manifest", "data", "metadata"])
def test_a_damaged_part_of_a_version_breaks_that_version_alone(
    store: holdfast.Store, part: str
) -> None:
    wanted = conversation(store)
    number = store.find_session("s").number
    for version in wanted:
        key = number * VERSIONS + version
        (row,) = sql(store, f"SELECT {part} AS body FROM hf_checkpoints WHERE key = {key}")
        body = bytes(row["body"])
        # Each byte of one version: the mark, the version, the flags, the digest and the body.
        places = range(len(body)) if version == 4 else [0, 1, 2, 3, 18, 19, len(body) - 1]
        for place in places:
            replace(store, "hf_checkpoints", part, key, flipped(body, place))
            with pytest.raises(CorruptRecord):
                fresh(store).at(version)
        check_others(store, wanted, {version})
        replace(store, "hf_checkpoints", part, key, body)
    check_others(store, wanted, set())
    tables.check(store)


def test_a_damaged_newest_manifest_can_be_left_behind(store: holdfast.Store) -> None:
    wanted = conversation(store)
    number = store.find_session("s").number
    key = number * VERSIONS + 8
    (row,) = sql(store, f"SELECT manifest AS body FROM hf_checkpoints WHERE key = {key}")
    replace(store, "hf_checkpoints", "manifest", key, flipped(bytes(row["body"]), 30))
    with pytest.raises(CorruptRecord, match="hf_checkpoints/1/8/manifest does not match its check"):
        fresh(store).latest()
    before = tables.dump(store)
    with pytest.raises(CorruptRecord):
        fresh(store).save(x=1)
    with pytest.raises(CorruptRecord):
        fresh(store).append("log", [1])
    assert tables.dump(store) == before
    assert fresh(store).rewind(7).version == 9
    assert fresh(store).append("log", ["goes on"]).version == 10
    log = wanted[7]["log"]
    assert fresh(store).at(10).channels == {**wanted[7], "log": [*log, "goes on"]}
    assert fresh(store).fork(7, id="fork").latest() is not None
    check_others(store, wanted, {8})


def test_a_rewind_to_a_damaged_version_undoes_nothing(store: holdfast.Store) -> None:
    undone: list[str] = []

    def recall(arguments: dict[str, Any], result: Any, key: str) -> None:
        undone.append(arguments["to"])

    @holdfast.tool(effect="mutate", undo=recall)
    def mail(to: str) -> str:
        return to

    session = store.session("s")
    session.save(n=1)
    session.call(mail, to="ann")
    key = session.number * VERSIONS + 1
    (row,) = sql(store, f"SELECT manifest AS body FROM hf_checkpoints WHERE key = {key}")
    replace(store, "hf_checkpoints", "manifest", key, flipped(bytes(row["body"]), 19))
    with pytest.raises(CorruptRecord):
        fresh(store).rewind(1)
    assert undone == []


def test_damaged_items_break_exactly_the_versions_that_use_them(store: holdfast.Store) -> None:
    wanted = conversation(store)
    found = tables.dump(store)
    users: dict[int, set[int]] = {}
    for row in found["hf_items"]:
        body = row["data"]
        broken: set[int] = set()
        for place in (0, 1, 2, 5, len(body) // 2, len(body) - 1):
            replace(store, "hf_items", "data", row["key"], flipped(body, place))
            broken = {version for version in wanted if not loads(store, version)}
            assert users.setdefault(row["key"], broken) == broken, "any flipped byte is the same"
        assert broken, "every item is used by some version"
        check_others(store, wanted, broken)
        replace(store, "hf_items", "data", row["key"], body)
    runs = [row["key"] for row in found["hf_items"] if row["count"] > 1]
    assert runs
    assert all(users[key] >= {1, 2, 3, 4, 5} for key in runs[:1]), "the first run is shared"
    assert min(map(len, users.values())) < len(wanted), "some items are used by a few versions"
    check_others(store, wanted, set())


def loads(store: holdfast.Store, version: int) -> bool:
    try:
        fresh(store).at(version)
    except CorruptRecord:
        return False
    return True


def test_items_that_are_missing_or_moved_are_told(store: holdfast.Store) -> None:
    wanted = conversation(store)
    for row in tables.dump(store)["hf_items"]:
        key, body = row["key"], row["data"]
        sql(store, "DELETE FROM hf_items WHERE key = :key", key=key)
        assert any(not loads(store, version) for version in wanted)
        # A row of another place has a digest of its own and does not open here.
        (other,) = sql(store, "SELECT count, data FROM hf_items ORDER BY key DESC LIMIT 1")
        insert = "INSERT INTO hf_items (key, count, data) VALUES (:key, :count, :data)"
        sql(store, insert, key=key, count=row["count"], data=other["data"])
        assert any(not loads(store, version) for version in wanted)
        sql(store, "DELETE FROM hf_items WHERE key = :key", key=key)
        sql(store, insert, key=key, count=row["count"], data=body)
    check_others(store, wanted, set())


def test_a_line_without_its_pieces_is_told(store: holdfast.Store) -> None:
    wanted = conversation(store)
    lines = [row for row in tables.dump(store)["hf_lines"] if row["pieces"] is not None]
    assert lines
    for row in lines:
        for body in (flipped(row["pieces"], 25), None):
            sql(
                store,
                "UPDATE hf_lines SET pieces = CAST(:body AS BLOB) WHERE id = :id",
                body=body,
                id=row["id"],
            )
            broken = {version for version in wanted if not loads(store, version)}
            assert broken
            check_others(store, wanted, broken)
        replace(store, "hf_lines", "pieces", row["id"], row["pieces"])
    check_others(store, wanted, set())


def test_a_damaged_session_row_is_told_and_its_versions_still_load(store: holdfast.Store) -> None:
    wanted = conversation(store)
    (row,) = sql(store, "SELECT metadata AS body FROM hf_sessions")
    body = flipped(bytes(row["body"]), 20)
    sql(store, "UPDATE hf_sessions SET metadata = :body", body=body)
    with pytest.raises(CorruptRecord, match="hf_sessions/s"):
        store.find_session("s").info()
    check_others(store, wanted, set())
    assert fresh(store).append("log", ["goes on"]).version == 9


def remove(store: holdfast.Store, *versions: int) -> None:
    """Remove versions by hand, past the triggers."""
    number = store.find_session("s").number
    keys = ", ".join(str(number * VERSIONS + version) for version in versions)
    sql(
        store,
        "INSERT INTO hf_doors (name) VALUES ('by hand')",
        f"DELETE FROM hf_checkpoints WHERE key IN ({keys})",
        "DELETE FROM hf_doors",
    )


@pytest.mark.parametrize("removed", [(1,), (2,), (4,), (5,), (7,), (2, 3, 5, 6)])
def test_versions_removed_by_hand_leave_every_other_loadable(
    store: holdfast.Store, removed: tuple[int, ...]
) -> None:
    wanted = conversation(store)
    fork = fresh(store).fork(7, id="fork")
    remove(store, *removed)
    session = fresh(store)
    for version, channels in wanted.items():
        if version in removed:
            with pytest.raises(CheckpointNotFound):
                session.at(version)
        else:
            assert session.at(version).channels == channels
    left = [version for version in range(8, 0, -1) if version not in removed]
    assert [checkpoint.version for checkpoint in session.history()] == left
    assert fork.at(7).channels == wanted[7]
    assert session.append("log", ["goes on"]).version == 9
    assert session.at(9)["log"] == [*wanted[8]["log"], "goes on"]


def test_a_session_that_lost_its_newest_version_says_so_and_goes_on_by_a_rewind(
    store: holdfast.Store,
) -> None:
    wanted = conversation(store)
    remove(store, 8)
    latest = fresh(store).latest()
    assert latest is not None
    assert (latest.version, latest.channels) == (7, wanted[7])
    with pytest.raises(
        CorruptRecord, match=r"version 8 of session s .*has lost its version 8.* rewind the"
    ):
        fresh(store).append("log", ["x"])
    assert fresh(store).rewind(7).version == 9
    assert fresh(store).save(plan="on").version == 10
    assert fresh(store).at(10).channels == {**wanted[7], "plan": "on"}


@pytest.mark.parametrize("part", ["manifest", "data", "item"])
def test_damage_names_its_session_its_version_and_what_to_do(
    store: holdfast.Store, part: str
) -> None:
    session = store.session("s")
    session.append("log", ["a"], data={"n": 1})
    session.append("log", ["b" * 200], data={"n": 2})
    table, column = ("hf_items", "data") if part == "item" else ("hf_checkpoints", part)
    (row,) = sql(store, f"SELECT key, {column} AS body FROM {table} ORDER BY key DESC LIMIT 1")
    replace(store, table, column, row["key"], flipped(row["body"], -1))
    seen = fresh(store)
    reads: list[Any] = [lambda: seen.at(2), seen.latest]
    if part == "data":
        reads.append(seen.history)
    else:
        reads.append(lambda: seen.diff(1, 2))
    if part == "manifest":
        reads += [lambda: seen.append("log", ["c"]), lambda: seen.fork(2), lambda: seen.rewind(2)]
    for read in reads:
        with pytest.raises(CorruptRecord, match="version 2 of session s is damaged") as told:
            read()
        assert (told.value.session_id, told.value.version) == ("s", 2)
        assert "rewind the session to an older version that loads, or restore a backup" in str(
            told.value
        )
    assert seen.at(1)["log"] == ["a"]
    assert seen.rewind(1).version == 3
