"""The power-loss images must show what SQLite loses, and only that."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import apsw

from holdfast.testing.power import PowerLog


@dataclass
class Verdict:
    """What the images of one run showed."""

    images: int = 0
    corrupt: int = 0
    lost: int = 0
    halved: int = 0
    numbers: set[int] = field(default_factory=set)


def open_database(path: Path, log: PowerLog, synchronous: str) -> apsw.Connection:
    connection = apsw.Connection(str(path), vfs=log.vfs_name)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", synchronous)
    connection.pragma("wal_autocheckpoint", 12)
    return connection


def commit_pairs(connection: apsw.Connection, log: PowerLog, count: int) -> None:
    """Commit rows two by two, and mark each pair once its COMMIT has returned."""
    connection.execute("CREATE TABLE pairs (number, half, filling, UNIQUE (number, half))")
    log.mark("acknowledged", "table")
    for number in range(count):
        with connection:
            for half in (0, 1):
                values = (number, half)
                connection.execute("INSERT INTO pairs VALUES (?, ?, randomblob(1500))", values)
        log.mark("acknowledged", number)


def judge(log: PowerLog, directory: Path, *, seed: int, per_cut: int = 5) -> Verdict:
    verdict = Verdict()
    for image in log.images(seed=seed, per_cut=per_cut):
        verdict.images += 1
        connection = apsw.Connection(str(image.write_to(directory)))
        try:
            if connection.pragma("integrity_check") != "ok":
                verdict.corrupt += 1
                continue
            found: dict[object, object] = {}
            if connection.table_exists("main", "pairs"):
                found = {"table": 2}
                query = "SELECT number, count(*) FROM pairs GROUP BY number"
                for number, count in connection.execute(query):
                    found[number] = count
            verdict.lost += any(value not in found for value in image.acknowledged)
            verdict.halved += any(count != 2 for count in found.values())
            verdict.numbers.add(len(found))
        except apsw.Error:
            verdict.corrupt += 1
        finally:
            connection.close()
    return verdict


def run(directory: Path, synchronous: str, *, seed: int, commits: int = 40) -> Verdict:
    (directory / "images").mkdir()
    with PowerLog() as log:
        connection = open_database(directory / "live.db", log, synchronous)
        commit_pairs(connection, log, commits)
        connection.close()
        checkpoints = {o.kind for o in log.operations if o.path.endswith("live.db")}
        assert {"write", "truncate"} <= checkpoints
        return judge(log, directory / "images", seed=seed)


def test_full_loses_no_acknowledged_commit_and_never_corrupts(tmp_path: Path) -> None:
    verdict = run(tmp_path, "FULL", seed=1)
    assert verdict.images >= 300
    assert (verdict.corrupt, verdict.lost, verdict.halved) == (0, 0, 0)
    assert verdict.numbers >= set(range(42))  # Every state on the way was seen.


def test_normal_is_seen_to_lose_acknowledged_commits_but_not_to_corrupt(tmp_path: Path) -> None:
    verdict = run(tmp_path, "NORMAL", seed=2)
    assert verdict.images >= 300
    assert (verdict.corrupt, verdict.halved) == (0, 0)
    assert verdict.lost > verdict.images // 10


def test_off_is_seen_to_corrupt(tmp_path: Path) -> None:
    verdict = run(tmp_path, "OFF", seed=3, commits=15)
    assert verdict.corrupt + verdict.halved > 0
    assert verdict.lost > 0


def test_when_everything_is_kept_the_image_is_the_real_file(tmp_path: Path) -> None:
    with PowerLog() as log:
        path = tmp_path / "live.db"
        connection = open_database(path, log, "NORMAL")
        commit_pairs(connection, log, 10)
        *_, clean, kept = log.images(per_cut=2)
        names = {"live.db", "live.db-wal"}
        assert set(kept.files) == names
        # Closing these files drops SQLite's locks, which nobody else is there to want.
        real = {name: (tmp_path / name).read_bytes() for name in names}
        connection.close()
    assert kept.files == real
    assert clean.files != real
    assert kept.acknowledged == clean.acknowledged == ["table", *range(10)]


def test_the_same_seed_makes_the_same_images(tmp_path: Path) -> None:
    with PowerLog() as log:
        connection = open_database(tmp_path / "live.db", log, "FULL")
        commit_pairs(connection, log, 5)
        connection.close()
    first, again, other = (
        [(image.name, image.files) for image in log.images(seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert {name for name, _ in first} != {name for name, _ in other}
    assert [files for _, files in first] != [files for _, files in other]


def test_a_database_that_was_there_before_the_log_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "live.db"
    before = apsw.Connection(str(path))
    before.execute("CREATE TABLE old (x); INSERT INTO old VALUES (1)")
    before.close()
    (tmp_path / "images").mkdir()
    with PowerLog() as log:
        connection = open_database(path, log, "FULL")
        commit_pairs(connection, log, 2)
        connection.close()
    images = [image for image in log.images() if image.files]
    assert len(images) > 10
    for image in images:
        connection = apsw.Connection(str(image.write_to(tmp_path / "images")))
        assert connection.execute("SELECT x FROM old").fetchall() == [(1,)]
        connection.close()
