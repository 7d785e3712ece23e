"""Keys have room for what a busy store writes in many years, and what does not fit is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoints.keys import ITEMS, VERSIONS
from holdfast.checkpoints.lines import checkpoint_context, write_manifest
from holdfast.kernel.operation import rows
from tests.checkpoints.looking import Look

ADD_VERSION = """
INSERT INTO hf_checkpoints (key, epoch, kind, state_sequence, manifest, created_at)
VALUES (:key, 1, 'turn', 0, :manifest, 0)
"""
MOVE_COUNTER = {
    "sqlite": "INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :number)",
    "postgres": "SELECT setval(pg_get_serial_sequence(:table, :column), :number)",
}


def move_counters(store: holdfast.Store, numbers: dict[str, int]) -> None:
    """Let the tables count on from these numbers."""
    dialect = store.runtime.driver.dialect

    def move(tx: holdfast.Transaction) -> holdfast.Op[None]:
        for name, number in numbers.items():
            table = f'"{getattr(store.runtime.target, "schema", "")}".{name}'
            column = "id" if name == "hf_lines" else "number"
            given = {"name": name, "table": table, "column": column, "number": number}
            yield from rows(MOVE_COUNTER[dialect], **given)

    store.run(move)


def filled(store: holdfast.Store) -> tuple[holdfast.Session, list[int]]:
    """Return a session whose list has just gone on in a second line."""
    session = store.session("s")
    wanted = list(range(ITEMS - 5))
    session.append("log", wanted)
    for number in range(ITEMS - 5, ITEMS + 5):
        session.append("log", [number])
        wanted.append(number)
    return session, wanted


def test_a_list_that_has_filled_a_line_goes_on_in_another(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db", durability="normal") as store:
        session, wanted = filled(store)
        newest = session.latest()
        assert newest is not None
        assert newest.channels["log"] == wanted
        sizes = Look(store).rows("SELECT sum(count) AS items FROM hf_items_view GROUP BY line_id")
        assert sorted(int(row["items"]) for row in sizes) == [5, ITEMS]
        window = session.latest(last=8)
        assert window is not None
        assert window.channels["log"] == wanted[-8:]


@pytest.mark.slow
def test_a_list_of_several_lines_is_edited_pruned_and_moved(tmp_path: Path) -> None:
    file = tmp_path / "s.holdfast"
    with holdfast.open(f"sqlite:///{tmp_path}/store.db", durability="normal") as store:
        session, wanted = filled(store)
        wanted[3] = wanted[-2] = -1
        session.save(log=wanted)
        wanted.append(7)
        session.append("log", [7])
        at_once = store.session("at once")
        at_once.save(log=wanted)
        store.prune(keep=1)
        store.export(file)
        for each in (session, at_once):
            loaded = each.latest()
            assert loaded is not None
            assert loaded.channels["log"] == wanted
    with holdfast.open(f"sqlite:///{tmp_path}/other.db", durability="normal") as other:
        other.import_sessions(file)
        moved = other.find_session("s").latest()
        assert moved is not None
        assert moved.channels["log"] == wanted


def test_line_ids_and_session_numbers_go_beyond_32_bits(place: dict[str, Any]) -> None:
    """As in a store that has given out most of its numbers."""
    far_session, far_line = 2**34, 2**42
    with holdfast.open(**place) as store:
        move_counters(store, {"hf_sessions": far_session, "hf_lines": far_line})
        session = store.session("s")
        assert session.number > far_session
        for number in range(70):
            session.append("log", [number])
        session.save(value="x" * 500)
        fork = session.fork(40)
        fork.append("log", ["forked"])
        session.rewind(60)
        session.append("log", ["rewound"])
        assert min(row["id"] for row in Look(store).rows("SELECT id FROM hf_lines")) > far_line
        loaded = [each.latest() for each in (session, fork)]
        assert [each and each.channels["log"][-2:] for each in loaded] == [
            [59, "rewound"],
            [39, "forked"],
        ]
        assert len(session.history(limit=100)) > 60
        assert session.counts()["turn"] > 60


def test_a_session_that_has_had_all_versions_says_so(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session, codec = store.session("s"), store.runtime.codec
        last = VERSIONS - 2

        def skip(tx: holdfast.Transaction) -> holdfast.Op[None]:
            key = session.number * VERSIONS + last
            context = checkpoint_context(key, "manifest")
            sealed = codec.seal(write_manifest(codec, {}), context=context)
            yield from rows(ADD_VERSION, key=key, manifest=sealed)
            yield from rows("UPDATE hf_sessions SET version = :version", version=last)

        store.run(skip)
        assert session.append("log", [1]).version == last + 1
        with pytest.raises(holdfast.LimitExceeded, match="continue in a new session"):
            session.append("log", [2])
        newest = session.latest()
        assert newest is not None
        assert newest.channels == {"log": [1]}
