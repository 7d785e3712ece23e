"""A backup is one moment of a store, whatever order its rows lie in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import store as store_module
from holdfast.kernel.sqlite import connection


def test_the_backup_of_trees_that_were_updated_is_whole(
    place: dict[str, Any], tmp_path: Path
) -> None:
    """An update moves a parent's row behind its children's, on PostgreSQL."""
    with holdfast.open(**place) as store:
        root = store.session("root")
        middle = store.session("middle", parent=root)
        for number in range(20):
            store.session(f"leaf-{number}", parent=middle)
        for session in (middle, root):
            session.append("log", ["updated"])
        item = store.work.submit("mail", session=root)
        store.backup(tmp_path / "copy.db")
        tree = [(each.id, each.parent_id, each.version) for each in root.tree()]
    copied = f"sqlite:///{tmp_path}/copy.db"
    with holdfast.open(copied) as copy:
        found = copy.find_session("root").tree()
        assert [(each.id, each.parent_id, each.version) for each in found] == tree
        assert copy.work.get(item.id).session_id == "root"
        copy.session("leaf-new", parent="middle").append("log", [1])
    assert {finding.level for finding in store_module.check(copied)} <= {"ok", "warning"}


@pytest.mark.parametrize("times", [1, 2])
def test_a_backup_of_a_backup_is_the_same(
    times: int, place: dict[str, Any], tmp_path: Path
) -> None:
    with holdfast.open(**place) as store:
        store.session("child", parent=store.session("root")).append("log", [1, 2])
        store.backup(tmp_path / "0.db")
    for number in range(times):
        with holdfast.open(f"sqlite:///{tmp_path}/{number}.db") as store:
            store.backup(tmp_path / f"{number + 1}.db")
    with holdfast.open(f"sqlite:///{tmp_path}/{times}.db") as store:
        latest = store.find_session("child").latest()
        assert latest is not None
        assert latest.channels == {"log": [1, 2]}


def test_a_backup_reaches_the_disk_in_parts_and_pauses_only_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(descriptor: int) -> None:
        written = os.fstat(descriptor).st_size
        parts.append(written - sum(parts))
        fsync(descriptor)

    def write(done: int, total: int) -> None:
        session.append("log", [done])

    parts: list[int] = []
    pauses: list[float] = []
    fsync = os.fsync
    with holdfast.open(f"sqlite:///{tmp_path}/live.db") as store:
        session = store.session("s")
        for _ in range(8):
            session.append("log", [os.urandom(500_000).hex()])
        monkeypatch.setattr("holdfast.kernel.sqlite.connection.os.fsync", sync)
        monkeypatch.setattr("holdfast.kernel.sqlite.connection.time.sleep", pauses.append)
        store.backup(tmp_path / "alone.db")
        assert pauses == []
        # SQLite keeps up to 2 MB before it writes them.
        assert 0 < max(parts) <= 2 * 2**20 + connection.PAGES_PER_STEP * 4096
        steps = len(parts)
        assert steps > 2_000 // connection.PAGES_PER_STEP
        store.backup(tmp_path / "beside.db", progress=write)
    assert len(pauses) >= steps - 1
